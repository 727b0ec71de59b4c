//! One stage-in, from its request to its end, on the coordinator.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dayfly_meta::catalog::{Compression, Source, SourceKind};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{ARCHIVE_GROWTH_GUESS, DATASETS_MAX};
use dayfly_meta::path::{display, is_normal, join};
use dayfly_meta::roster::Roster;
use dayfly_meta::wire::control::{Copies, Event, Phase, Progress, StageInEstimate, StageInRequest, Summary};
use dayfly_meta::wire::peer::{AdministrationReply, AdministrationRequest, NodeStageInRequest};
use dayfly_meta::wire::status::divide_shared_room;
use dayfly_stagein::StageInError;
use dayfly_stagein::plan::{self, PlanRequest, StageInPlan};
use dayfly_stagein::progress::ProgressMonitor;
use dayfly_stagein::unit_ledger::UnitLedger;
use futures_util::future::{FutureExt, join_all};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::Instrument;

use super::conflicts::Rivals;
use super::fit::{Amounts, Fit};
use super::publication::{self, Publication};
use super::stall::StallDetector;
use super::{ClaimError, CoordinatedStageIn, Coordinator, CoordinatorContext, CoordinatorError, TargetClaim};
use crate::peers::PeerError;
use crate::stage_in::name_drive;
use crate::store::Drive;

/// Bytes that a file takes at least in a tar.
const TAR_HEADER_LEN: u64 = 512;
/// Bytes that an entry takes in the catalog, in addition to its name.
const CATALOG_ENTRY_LEN: u64 = 88;

/// Cancels blocking work when dropped, so that the work ends with the future that waits for it.
#[derive(Default)]
struct CancelOnDrop(Arc<ProgressMonitor>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Runs a stage-in and sends its events. The last event says how it ended. If the receiver goes away before the dataset is
/// committed, the stage-in is canceled.
pub(super) async fn run(
    coordinator: &Arc<Coordinator>,
    (from, id): (NodeId, u64),
    request: StageInRequest,
    events: mpsc::Sender<Event>,
) {
    let (node, target) = (coordinator.context.node, display(&request.target));
    let span = tracing::info_span!("coordinate", %node, target, stage_in = tracing::field::Empty);
    let running = catch_panic(node, run_to_end(coordinator, (from, id), request, &events)).instrument(span.clone());
    let event = match Box::pin(running).await {
        Ok(summary) => {
            span.in_scope(|| tracing::info!(samples = summary.samples, bytes = summary.bytes, "staged in"));
            Event::StagedIn(Box::new(summary))
        }
        Err(error) => {
            span.in_scope(|| tracing::info!(%error, "a stage-in failed"));
            Event::Failed { reason: error.to_string(), can_restart: error.is_absence() }
        }
    };
    // The client that asked for the stage-in may be gone.
    let _ = events.send(event).await;
}

/// Turns a panic into an error of the stage-in, so that the stage-in's room is freed and the user sees the error.
async fn catch_panic<T>(node: NodeId, work: impl Future<Output = Result<T, CoordinatorError>>) -> Result<T, CoordinatorError> {
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or(Err(CoordinatorError::Panicked(node)))
}

async fn run_to_end(
    coordinator: &Arc<Coordinator>,
    (from, id): (NodeId, u64),
    request: StageInRequest,
    events: &mpsc::Sender<Event>,
) -> Result<Summary, CoordinatorError> {
    let (start, context) = (Instant::now(), &coordinator.context);
    if !is_normal(&request.target) {
        return Err(CoordinatorError::InvalidTarget(display(&request.target)));
    }
    if let Some(wanted) = request.selection.decoder_memory.filter(|wanted| *wanted > context.stage_in_memory) {
        return Err(CoordinatorError::TooMuchDecoderMemory { wanted, limit: context.stage_in_memory, node: context.node });
    }
    let _claim = shown_as_waiting(context, events, claim(coordinator, id, &request.target, events)).await?;
    let _permit = tokio::select! {
        biased;
        // Nothing closes the semaphore.
        permit = coordinator.permits.acquire() => permit.map_err(|_| CoordinatorError::Cancelled)?,
        () = events.closed() => return Err(CoordinatorError::Cancelled),
        never = report_phase(context, events, Phase::Waiting) => never,
    };
    if let Some(dataset) = context.store.datasets().into_iter().find(|dataset| dataset.request() == id) {
        // An earlier coordinator was lost after it had begun to commit. This node has finished that.
        return publication::summary_of(context, dataset, start).await;
    }
    let conflict = context.store.conflict(&request.target, request.replace);
    let replaces = conflict.map_err(|conflict| CoordinatorError::TargetTaken(conflict.message(&context.prefix)))?;
    if context.store.datasets().len() >= DATASETS_MAX {
        return Err(CoordinatorError::TooManyDatasets);
    }
    let roster = shown_as_waiting(context, events, reach_all(context)).await?;
    let participants: Vec<NodeId> = roster.live().collect();
    // The plan needs room too, because it is written to a data dir.
    shown_as_waiting(context, events, make_headroom(context, &participants)).await?;
    let planning = CancelOnDrop::default();
    let (plan, plan_drive) = tokio::select! {
        biased;
        plan = make_plan(context, &request, planning.0.clone()) => plan?,
        stalled = planning_stalls(context, &planning.0) => return Err(stalled),
        () = events.closed() => return Err(CoordinatorError::Cancelled),
        never = report_phase(context, events, Phase::Planning) => never,
    };
    // While the stage-in was planned, blocks may have been cached, and other programs may have filled drives.
    shown_as_waiting(context, events, make_headroom(context, &participants)).await?;
    let free = shown_as_waiting(context, events, free_room(context, &participants)).await?;
    let fit = tokio::select! {
        biased;
        fit = judge_fit(context, &request, &plan, (&participants, &free), planning.0.clone()) => fit,
        stalled = planning_stalls(context, &planning.0) => return Err(stalled),
        () = events.closed() => return Err(CoordinatorError::Cancelled),
        never = report_phase(context, events, Phase::Planning) => never,
    };
    let partial = fit.as_ref().ok().and_then(|(fit, _)| fit.partial);
    let copies = fit.as_ref().map_or(1, |(_, copies)| *copies);
    let _ = events.send(Event::Planned(estimate(&plan, free.iter().sum(), partial, copies))).await;
    let (fit, copies) = fit?;
    let number = coordinator.term.next_number().ok_or(match coordinator.term.is_ready() {
        true => CoordinatorError::NoNumbersLeft,
        false => CoordinatorError::StoodDown,
    })?;
    tracing::Span::current().record("stage_in", number);
    let unit_ledger = UnitLedger::new(plan.units, plan.split_tars);
    let rivals = Arc::new(Rivals::new(plan.rivalries, &plan.sources));
    let judging = (rivals.clone(), request.selection.keep_going);
    let state = (unit_ledger, plan_drive, plan.counts);
    let stage_in = Arc::new(CoordinatedStageIn::new(
        number,
        state,
        judging,
        request.max_rate,
        (context.node, &roster),
        *context.deadlines(),
    ));
    coordinator.registry.insert(stage_in.clone());
    let publication = Publication {
        coordinator,
        stage_in: &stage_in,
        request: &request,
        sources: plan.sources,
        rivals,
        id,
        replaces,
        free,
        fit,
        copies,
        copied_bytes: Mutex::default(),
    };
    let preparing = async {
        tokio::select! {
            biased;
            failure = stage_in.failed() => Err(CoordinatorError::Shared(failure)),
            () = events.closed() => Err(CoordinatorError::Cancelled),
            prepared = Box::pin(publication.prepare()) => prepared,
            never = watch_progress(context, from, &stage_in, events) => never,
        }
    };
    let prepared = catch_panic(context.node, preparing).await;
    // The node that asked may have been lost since the last look.
    let is_asker_lost = prepared.is_ok() && !context.peers.roster().is_live(from);
    let prepared = if is_asker_lost { Err(CoordinatorError::AskerLost(from)) } else { prepared };
    // From here on the stage-in cannot be canceled: either all nodes show the dataset, or the stage-in is undone.
    let published = match prepared {
        Ok(merged) => {
            let committing = async {
                tokio::select! {
                    biased;
                    committed = publication.commit() => committed,
                    never = report_phase(context, events, Phase::Publishing) => never,
                }
            };
            catch_panic(context.node, committing).await.map(|()| merged)
        }
        Err(error) => Err(error),
    };
    let result = match published {
        Ok(merged) => {
            coordinator.registry.set_published(number);
            // All nodes show the dataset. A node that misses the request to settle settles when its next report is answered.
            let settled = publication.settle().await;
            publication.summary(merged, settled, start).await
        }
        Err(error) => {
            // Another coordinator decides if this node has stood down.
            if !matches!(error, CoordinatorError::StoodDown) {
                publication.abort().await;
            }
            let stored = stage_in.progress().bytes;
            let error = error.with_amounts(stored, &publication.free, request.require_fit).share();
            stage_in.fail(CoordinatorError::Shared(error.clone()));
            Err(CoordinatorError::Shared(error))
        }
    };
    coordinator.registry.remove(number);
    result
}

/// Claims a target. Waits for a stage-in there that is about to end.
async fn claim<'a>(
    coordinator: &'a Coordinator,
    id: u64,
    target: &[u8],
    events: &mpsc::Sender<Event>,
) -> Result<TargetClaim<'a>, CoordinatorError> {
    let context = &coordinator.context;
    let mut seen = None;
    loop {
        match TargetClaim::new(&coordinator.targets, target, id, events) {
            Ok(claim) => return Ok(claim),
            Err(ClaimError::Ending) => {}
            // Its user may have interrupted it, and its node may not have said so yet. Then that node does not ask for its events.
            Err(ClaimError::Claimed { target, id }) => {
                let asked = (id, coordinator.subscriptions.asked(id));
                if *seen.get_or_insert(asked) != asked {
                    return Err(CoordinatorError::TargetClaimed(display(&join(&context.prefix, &target))));
                }
            }
        }
        sleep(context.deadlines().progress_interval).await;
    }
}

/// Waits for other nodes or stage-ins, as the user sees. Ends early if the user has gone.
async fn shown_as_waiting<T>(
    context: &CoordinatorContext,
    events: &mpsc::Sender<Event>,
    waiting: impl Future<Output = Result<T, CoordinatorError>>,
) -> Result<T, CoordinatorError> {
    tokio::select! {
        biased;
        done = waiting => done,
        () = events.closed() => Err(CoordinatorError::Cancelled),
        never = report_phase(context, events, Phase::Waiting) => never,
    }
}

/// Sends progress events for a phase in which nothing is counted. Ends only when the future is dropped.
async fn report_phase<T>(context: &CoordinatorContext, events: &mpsc::Sender<Event>, phase: Phase) -> T {
    loop {
        sleep(context.deadlines().progress_interval).await;
        let _ = events.try_send(Event::Progress(Progress { phase, ..Progress::default() }));
    }
}

/// Returns an error once planning no longer makes progress.
async fn planning_stalls(context: &CoordinatorContext, monitor: &ProgressMonitor) -> CoordinatorError {
    let mut detector = StallDetector::new(context.deadlines());
    let mut steps = 0;
    loop {
        sleep(context.deadlines().progress_interval).await;
        steps += monitor.take_counted().steps;
        if detector.is_stalled(steps) {
            return detector.error(format!("node {}: {}", context.node, monitor.current_activities().join(", ")));
        }
    }
}

/// Plans the stage-in. Returns the plan, and the drive that stores the list of its units.
async fn make_plan(
    context: &CoordinatorContext,
    request: &StageInRequest,
    monitor: Arc<ProgressMonitor>,
) -> Result<(StageInPlan, Arc<Drive>), CoordinatorError> {
    let (sources, selection, seed) = (request.sources.clone(), request.selection.clone(), request.seed);
    let workers = (context.peers.count() * context.workers) as u64;
    let store = context.store.clone();
    let planning = context.blocking.run(move || {
        let drive = store.roomiest_drive();
        let scratch = drive.unnamed_file().map_err(StageInError::TempFile)?;
        let plan_request = PlanRequest { patterns: &sources, selection: &selection, seed, workers };
        let planned = plan::plan_sources(&plan_request, scratch, &monitor).map_err(|error| name_drive(&drive, error));
        planned.map(|plan| (plan, drive))
    });
    planning.await?.map_err(|error| CoordinatorError::on_node(&context.peers, context.node, error))
}

/// Waits until this node reaches all members. One that nobody reaches is lost meanwhile, and the stage-in does without it; one that only
/// this node does not reach ends the stage-in, because it would fail each time that it begins again.
async fn reach_all(context: &CoordinatorContext) -> Result<Arc<Roster>, CoordinatorError> {
    let deadlines = context.deadlines();
    let patience = deadlines.lost_after + deadlines.node_silent;
    let start = tokio::time::Instant::now();
    loop {
        let roster = context.peers.roster();
        let asking = roster.live().map(|node| async move {
            let asked = context.peers.ask(node, AdministrationRequest::Status, deadlines.request).await;
            asked.err().map(|cause| (node, cause))
        });
        let mut failures = join_all(asking).await.into_iter().flatten();
        let Some((node, cause)) = failures.next() else { return Ok(roster) };
        if !cause.is_absence() {
            return Err(cause.into());
        }
        if start.elapsed() > patience && context.peers.roster().is_live(node) {
            let (coordinator, seconds) = (context.node, patience.as_secs());
            return Err(CoordinatorError::OutOfReach { node, coordinator, seconds, cause });
        }
        sleep(deadlines.progress_interval).await;
    }
}

/// Makes all nodes evict cached blocks, to make room for the files that a stage-in writes in addition to blocks.
async fn make_headroom(context: &CoordinatorContext, participants: &[NodeId]) -> Result<(), CoordinatorError> {
    let timeout = context.deadlines().request + context.deadlines().views;
    let asking = participants.iter().map(|&node| {
        context.peers.until_lost(node, timeout, move || context.peers.ask(node, NodeStageInRequest::MakeHeadroom, timeout))
    });
    for made in join_all(asking).await {
        made.map_err(CoordinatorError::NodeMissing)?;
    }
    Ok(())
}

/// Returns the free bytes on each node, in the order of node numbers; 0 for nodes that take no part. Nodes that share a drive share its
/// room.
async fn free_room(context: &CoordinatorContext, participants: &[NodeId]) -> Result<Vec<u64>, CoordinatorError> {
    let asking = context.peers.nodes().map(|node| async move {
        if !participants.contains(&node) {
            return Ok(None);
        }
        match context.peers.ask_until_lost(node, AdministrationRequest::Status).await {
            Ok(AdministrationReply::Status(status)) => Ok(Some(status)),
            Ok(_) => Err(CoordinatorError::Peer(PeerError::InvalidAnswer(node))),
            Err(error) => Err(CoordinatorError::NodeMissing(error)),
        }
    });
    let mut asked = join_all(asking).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    divide_shared_room(asked.iter_mut().flatten().map(|status| &mut **status));
    Ok(asked.into_iter().map(|status| status.map_or(0, |status| status.free_bytes)).collect())
}

/// Decides what share of the samples is stored on the participants. Looks into tars only if their lengths do not decide.
async fn judge_fit(
    context: &CoordinatorContext,
    request: &StageInRequest,
    plan: &StageInPlan,
    (participants, free): (&[NodeId], &[u64]),
    monitor: Arc<ProgressMonitor>,
) -> Result<(Fit, u16), CoordinatorError> {
    // Lost nodes have no room, and need none.
    let room: Vec<u64> = participants.iter().map(|node| free[node.index()]).collect();
    if let Copies::Number(copies) = request.copies
        && usize::from(copies.max(1)) > room.len()
    {
        return Err(CoordinatorError::TooManyCopies { copies, nodes: room.len() });
    }
    let fit = |amounts: Amounts| {
        let fit = Fit::with_copies(amounts, &room, request.require_fit, request.copies, request.seed);
        fit.map_err(|error| error.among(participants, free))
    };
    let sizes = plan.sizes;
    let at_most = Amounts {
        files: plan.known_files + sizes.zip_members,
        readable_bytes: sizes.readable_bytes_max,
        unreadable_bytes: 0,
        sure_bytes: 0,
        untold_bytes: sizes.compressed_bytes,
        copies: 1,
    };
    let of_tars = |is_plain: bool| plan.sources.iter().filter(move |source| is_tar(source, is_plain)).cloned();
    let (plain, compressed): (Vec<Source>, Vec<Source>) = (of_tars(true).collect(), of_tars(false).collect());
    let plain_len = plain.iter().fold(0_u64, |sum, source| sum.saturating_add(source.version.size));
    let unpacked_len = plain_len.saturating_add(sizes.compressed_bytes.saturating_mul(ARCHIVE_GROWTH_GUESS));
    // At worst, a tar is full of empty files.
    let most_files = Amounts { files: at_most.files.saturating_add(unpacked_len / TAR_HEADER_LEN), ..at_most };
    let copies = match request.copies {
        Copies::Number(copies) => copies.max(1),
        Copies::Auto => 2,
    };
    if most_files.copied(copies).surely_fit(&room) {
        return fit(at_most);
    }
    let selection = request.selection.clone();
    let sampling = context.blocking.run(move || {
        Ok((plan::sample_tars(&plain, &selection, &monitor)?, plan::sample_compressed(&compressed, &selection, &monitor)?))
    });
    let on_coordinator = |error: StageInError| CoordinatorError::on_node(&context.peers, context.node, error);
    let (in_plain, in_compressed) = sampling.await?.map_err(on_coordinator)?;
    let amounts = Amounts {
        // The number of files in tars is only roughly known, and blocks must not take the catalog's room.
        files: at_most.files + if in_plain.seen < 1000 { in_plain.files * 2 } else { in_plain.files / 4 * 5 },
        readable_bytes: at_most.readable_bytes.saturating_sub(plain_len).saturating_add(in_plain.bytes),
        unreadable_bytes: in_compressed.told_bytes,
        sure_bytes: in_compressed.sure_bytes,
        untold_bytes: in_compressed.untold_bytes,
        copies: 1,
    };
    fit(amounts)
}

fn is_tar(source: &Source, is_plain: bool) -> bool {
    source.kind == SourceKind::Tar && (source.compression == Compression::None) == is_plain
}

fn estimate(plan: &StageInPlan, free_bytes: u64, partial: Option<(u64, u64)>, copies: u16) -> StageInEstimate {
    StageInEstimate {
        sources: plan.sources.len() as u64,
        source_bytes: plan.source_bytes,
        known_files: plan.known_files,
        files_are_all_known: plan.files_are_all_known,
        least_bytes: plan.known_bytes,
        catalog_bytes: plan.known_files * CATALOG_ENTRY_LEN + plan.known_names_len,
        free_bytes,
        partial,
        copies,
    }
}

/// Sends progress events until the future is dropped. Returns an error once the stage-in stalls or a node is lost.
async fn watch_progress<T>(
    context: &CoordinatorContext,
    from: NodeId,
    stage_in: &CoordinatedStageIn,
    events: &mpsc::Sender<Event>,
) -> Result<T, CoordinatorError> {
    let mut detector = StallDetector::new(context.deadlines());
    loop {
        sleep(context.deadlines().progress_interval).await;
        // Publishing is not checked for stalls, because each of its steps has a deadline of its own. Copying is checked by those who
        // wait for it.
        let is_publishing = matches!(stage_in.progress().phase, Phase::Publishing | Phase::Copying);
        if detector.is_stalled(stage_in.steps()) && !is_publishing {
            return Err(detector.error(stage_in.waits_for()));
        }
        let roster = context.peers.roster();
        if !roster.is_live(from) {
            return Err(CoordinatorError::AskerLost(from));
        }
        for node in stage_in.lost(&roster) {
            let goes_on = if is_publishing { stage_in.publish_without(node) } else { stage_in.go_on_without(node) };
            if !goes_on {
                return Err(CoordinatorError::NodeLost { node, address: context.peers.address(node) });
            }
            tracing::warn!(%node, "a stage-in goes on without a lost node");
            let _ = events.send(Event::WentOn { node }).await;
        }
        if context.membership.tenure().is_alone() {
            // Nobody declares a node lost anymore.
            let cut_off = stage_in.participants().into_iter().find(|&node| context.peers.is_cut_off(node));
            if let Some(node) = cut_off {
                return Err(CoordinatorError::NodeLost { node, address: context.peers.address(node) });
            }
        }
        if let Some(node) = stage_in.silent_node() {
            let seconds = (context.deadlines().lost_after + context.deadlines().node_silent).as_secs();
            return Err(CoordinatorError::NodeSilent { node, coordinator: context.node, seconds });
        }
        // A slow client misses some events. This loses nothing, because each event contains all progress so far.
        let _ = events.try_send(Event::Progress(stage_in.progress().clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "A panic of the coordinator ends its stage-in with an error and frees the stage-in's
    /// space."
    #[tokio::test]
    async fn a_panic_of_the_coordinator_is_an_error_of_its_stage_in() {
        let panics = || -> Result<(), CoordinatorError> { std::panic::resume_unwind(Box::new("a defect")) };
        let error = catch_panic(NodeId(0), async { panics() }).await.unwrap_err();
        assert!(error.to_string().contains("node 0 failed"));
        let cancelled = async { Err::<(), _>(CoordinatorError::Cancelled) };
        assert!(matches!(catch_panic(NodeId(0), cancelled).await, Err(CoordinatorError::Cancelled)));
        assert!(matches!(catch_panic(NodeId(0), async { Ok(1) }).await, Ok(1)));
    }
}
