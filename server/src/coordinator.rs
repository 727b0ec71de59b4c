//! The coordinator's part of a stage-in: plan, hand out units, merge what was found, publish on all nodes or on none.

mod conflicts;
mod following;
mod merge;
mod rates;
mod spread;
mod stage;

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dayfly_meta::catalog::{About, Source};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::{DATASETS_MAX, DIRECTORIES_MAX_DEFAULT, DIRECTORIES_PER_FILE_MAX, STAGE_INS_MAX};
use dayfly_meta::path::{display, is_below, is_normal, join};
use dayfly_meta::wire::control::{Event, Phase, Progress, StageInEstimate, StageInRequest, Summary};
use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_stagein::StageInError;
use dayfly_stagein::plan::{self, PlanRequest};
use dayfly_stagein::progress::ProgressMonitor;
use dayfly_stagein::unit_ledger::UnitLedger;
use futures_util::future::{FutureExt, join_all};
use tokio::sync::{Semaphore, mpsc};

use crate::server::Server;
use crate::store::unnamed_file;
use conflicts::Rivals;
use following::Following;
use merge::Merged;
use spread::Spread;
pub(crate) use stage::{CoordinatedStageIn, Reported};

/// The node that leads stage-ins.
const COORDINATOR: NodeId = NodeId(0);
/// Bytes of catalog that an entry takes beside its name.
const CATALOG_ENTRY_LEN: u64 = 88;
/// Bytes that a merge writes for one of a run, at most about.
const MERGED_PER_RUN: u64 = 4;
/// Nodes to which one gives the catalog at a time.
const CATALOG_FAN_OUT: usize = 4;

/// The coordinator's stage-ins.
pub(crate) struct Coordinator {
    permits: Semaphore,
    running: Mutex<HashMap<u64, Arc<CoordinatedStageIn>>>,
    /// Where the datasets of those that run will be.
    targets: Mutex<Vec<Vec<u8>>>,
    /// Those that have become datasets: a node that did not hear of it asks.
    published: Mutex<HashSet<u64>>,
    last: AtomicU64,
    following: Following,
}

impl Coordinator {
    pub(crate) fn new(deadlines: Deadlines) -> Self {
        let permits = Semaphore::new(STAGE_INS_MAX);
        Self {
            permits,
            running: Mutex::default(),
            targets: Mutex::default(),
            published: Mutex::default(),
            last: AtomicU64::new(0),
            following: Following::new(deadlines),
        }
    }

    /// The stage-in of this number, if it runs.
    pub(crate) fn stage(&self, number: u64) -> Option<Arc<CoordinatedStageIn>> {
        self.running().get(&number).cloned()
    }

    /// What a node is told that reports on a stage-in.
    pub(crate) fn report(&self, number: u64, node: NodeId, reported: Reported) -> Reply {
        match self.stage(number) {
            Some(stage) => stage.report(node, reported),
            None if self.published().contains(&number) => Reply::Stop,
            None => Reply::Undone,
        }
    }

    /// Those that other nodes asked for.
    pub(crate) fn following(&self) -> &Following {
        &self.following
    }

    fn published(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, HashMap<u64, Arc<CoordinatedStageIn>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn targets(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A target, kept from other stage-ins until this is dropped.
struct Claim<'a> {
    coordinator: &'a Coordinator,
    target: Vec<u8>,
}

impl<'a> Claim<'a> {
    /// The other target, if it is taken.
    fn take(coordinator: &'a Coordinator, target: &[u8]) -> Result<Self, Vec<u8>> {
        let mut targets = coordinator.targets();
        let overlaps = |other: &&Vec<u8>| other == &target || is_below(other, target) || is_below(target, other);
        if let Some(other) = targets.iter().find(overlaps) {
            return Err(other.clone());
        }
        targets.push(target.to_vec());
        Ok(Self { coordinator, target: target.to_vec() })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut targets = self.coordinator.targets();
        if let Some(at) = targets.iter().position(|target| *target == self.target) {
            targets.swap_remove(at);
        }
    }
}

/// Cancels when dropped: what blocks on behalf of a future ends with it.
#[derive(Default)]
struct CancelOnDrop(Arc<ProgressMonitor>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Notices that nothing goes forward any more. It counts its looks, not time, for none of them come while this process is stopped.
struct StandStill {
    timeout: Duration,
    interval: Duration,
    steps: u64,
    looks: u32,
}

impl StandStill {
    fn new(deadlines: &Deadlines) -> Self {
        Self { timeout: deadlines.stall, interval: deadlines.progress_interval, steps: 0, looks: 0 }
    }

    /// To be called each `interval`, with what has gone forward so far; whether nothing did for too long.
    fn is_over(&mut self, steps: u64) -> bool {
        self.looks = if steps == self.steps { self.looks + 1 } else { 0 };
        self.steps = steps;
        self.interval * self.looks > self.timeout
    }

    /// For the user.
    fn told(&self, waits_for: &str) -> String {
        let seconds = self.timeout.as_secs();
        format!("nothing went forward on any node for {seconds} s (--stage-in-timeout of the session); waited for: {waits_for}")
    }
}

/// Sees a stage-in from its request to its end; the requester going away cancels it. Tells `events` how it goes.
pub(crate) async fn stage_in(server: Arc<Server>, request: StageInRequest, events: mpsc::Sender<Event>) {
    if server.config().node == COORDINATOR {
        return coordinate_one(&server, request, events).await;
    }
    following::follow(&server, request, events).await;
}

/// The same on the coordinator.
async fn coordinate_one(server: &Arc<Server>, request: StageInRequest, events: mpsc::Sender<Event>) {
    let result = Box::pin(caught(run(server, request, &events))).await;
    let event = match result {
        Ok(summary) => Event::StagedIn(Box::new(summary)),
        Err(reason) => Event::Failed { reason },
    };
    // Whoever asked may be gone.
    let _ = events.send(event).await;
}

/// A panic of what leads a stage-in is an error of it: what it took is given back, and its user is told.
async fn caught<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let panicked = |_| Err(format!("node {COORDINATOR} failed at something that it did not expect; its log says more"));
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(panicked)
}

async fn run(server: &Arc<Server>, request: StageInRequest, events: &mpsc::Sender<Event>) -> Result<Summary, String> {
    let start = Instant::now();
    if !is_normal(&request.target) {
        return Err("the target is no path of the namespace".to_owned());
    }
    let claim = Claim::take(server.coordinator(), &request.target);
    let _claim = claim.map_err(|other| {
        format!("another stage-in to '{}' is running; wait for its end", display(&join(&server.config().prefix, &other)))
    })?;
    let _permit = tokio::select! {
        biased;
        permit = server.coordinator().permits.acquire() => permit.map_err(|error| error.to_string())?,
        () = events.closed() => return Err("cancelled".to_owned()),
        never = tell_phase(server, events, Phase::Waiting) => never,
    };
    let replaces = server
        .store()
        .conflict(&request.target, request.replace)
        .map_err(|conflict| conflict.message(&server.config().prefix))?;
    if server.store().datasets().len() >= DATASETS_MAX {
        return Err(format!("a session has at most {DATASETS_MAX} datasets"));
    }
    // The plan is written to a data dir, too.
    make_headroom(server).await?;
    let planning = CancelOnDrop::default();
    let plan = tokio::select! {
        biased;
        plan = make_plan(server, &request, planning.0.clone()) => plan?,
        stuck = planning_stands_still(server, &planning.0) => return Err(stuck),
        () = events.closed() => return Err("cancelled".to_owned()),
        never = tell_phase(server, events, Phase::Planning) => never,
    };
    // Copies may have come meanwhile, and others may have taken more.
    make_headroom(server).await?;
    let free = free_room(server).await?;
    let announced = announce(&plan, free.iter().sum());
    let (least, all_free) = (announced.least_bytes, announced.free_bytes);
    let _ = events.send(Event::Planned(announced)).await;
    if least > all_free {
        return Err(format!(
            "the sources take at least {least} bytes and {all_free} are free on all nodes; give more with --capacity or --data-dir"
        ));
    }
    let number = server.coordinator().last.fetch_add(1, Ordering::Relaxed) + 1;
    let unit_ledger = UnitLedger::new(plan.units, plan.split_tars);
    let rivals = Arc::new(Rivals::new(plan.rivalries, &plan.sources));
    let judging = (rivals.clone(), request.selection.keep_going);
    let stage = CoordinatedStageIn::new(number, (unit_ledger, plan.counts), judging, server.peers().count(), *server.deadlines());
    let stage = Arc::new(stage);
    server.coordinator().running().insert(number, stage.clone());
    let job = Job { server, stage: &stage, request: &request, sources: plan.sources, rivals, free };
    let preparing = async {
        tokio::select! {
            biased;
            reason = stage.failed() => Err(reason),
            () = events.closed() => Err("cancelled".to_owned()),
            prepared = Box::pin(job.prepare()) => prepared,
            never = tell_progress(server, &stage, events) => never,
        }
    };
    let prepared = caught(preparing).await;
    // From here on it is not cancelled any more: either all show it, or it is undone.
    let published = match prepared {
        Ok(merged) => caught(job.commit(replaces)).await.map(|()| merged),
        Err(reason) => Err(reason),
    };
    let result = match published {
        Ok(merged) => {
            server.coordinator().published().insert(number);
            // All show it. A node that does not hear this now settles when its next report is answered with `Stop`.
            let settled = job.ask_all(&Request::Settle { stage: number }, server.deadlines().request).await;
            job.summary(merged, settled.err(), start).await
        }
        Err(reason) => {
            // Nodes that are lost have nothing to forget; the first failure is what the user needs to know.
            let _ = job.ask_all(&Request::Abort { stage: number }, server.deadlines().request).await;
            stage.fail(reason.clone());
            Err(reason)
        }
    };
    server.coordinator().running().remove(&number);
    result
}

/// Shows that what comes before the reading goes on, until dropped.
async fn tell_phase<T>(server: &Server, events: &mpsc::Sender<Event>, phase: Phase) -> T {
    loop {
        tokio::time::sleep(server.deadlines().progress_interval).await;
        let _ = events.try_send(Event::Progress(Progress { phase, ..Progress::default() }));
    }
}

/// Ends when planning does not go forward any more; the reason.
async fn planning_stands_still(server: &Server, gauge: &ProgressMonitor) -> String {
    let mut stand_still = StandStill::new(server.deadlines());
    let mut steps = 0;
    loop {
        tokio::time::sleep(server.deadlines().progress_interval).await;
        steps += gauge.take_counted().steps;
        if stand_still.is_over(steps) {
            return stand_still.told(&format!("node {COORDINATOR}: {}", gauge.current_activities().join(", ")));
        }
    }
}

async fn make_plan(
    server: &Arc<Server>,
    request: &StageInRequest,
    gauge: Arc<ProgressMonitor>,
) -> Result<plan::StageInPlan, String> {
    let (sources, selection, seed) = (request.sources.clone(), request.selection.clone(), request.seed);
    let workers = (server.peers().count() * server.config().workers) as u64;
    let drive = server.store().roomiest_drive();
    let planned = server.blocking().run(move || {
        let scratch = unnamed_file(drive.path()).map_err(|error| drive.write_error(error).to_string())?;
        let wanted = PlanRequest { patterns: &sources, selection: &selection, seed, workers };
        plan::plan_sources(&wanted, scratch, &gauge).map_err(|error| match error {
            StageInError::TempFile(error) => StageInError::TempFile(drive.write_error(error)).to_string(),
            error => error.to_string(),
        })
    });
    planned.await.map_err(|error| error.to_string())?.map_err(|reason| server.naming(COORDINATOR, reason))
}

/// Has copies make way on all nodes for what a stage-in writes beside blocks.
async fn make_headroom(server: &Arc<Server>) -> Result<(), String> {
    let timeout = server.deadlines().request + server.deadlines().views;
    let asking = server.peers().nodes().map(|node| server.ask(node, Request::Headroom, timeout));
    for made in join_all(asking).await {
        made.map_err(|error| format!("all nodes are needed for a stage-in: {error}"))?;
    }
    Ok(())
}

/// Free room on each node.
async fn free_room(server: &Arc<Server>) -> Result<Vec<u64>, String> {
    let asking = server.peers().nodes().map(|node| server.ask(node, Request::Status, server.deadlines().request));
    let free = |reply: Result<Reply, _>| match reply {
        Ok(Reply::Status(status)) => Ok(status.free_bytes),
        Ok(_) => Err("a node answers what was not asked".to_owned()),
        Err(error) => Err(format!("all nodes are needed for a stage-in: {error}")),
    };
    join_all(asking).await.into_iter().map(free).collect()
}

fn announce(plan: &plan::StageInPlan, free_bytes: u64) -> StageInEstimate {
    StageInEstimate {
        sources: plan.sources.len() as u64,
        source_bytes: plan.source_bytes,
        known_files: plan.known_files,
        files_are_all_known: plan.files_are_all_known,
        least_bytes: plan.known_bytes,
        catalog_bytes: plan.known_files * CATALOG_ENTRY_LEN + plan.known_names_len,
        free_bytes,
    }
}

/// Tells how far it is until dropped; ends with an error when a node is lost.
async fn tell_progress<T>(server: &Server, stage: &CoordinatedStageIn, events: &mpsc::Sender<Event>) -> Result<T, String> {
    let mut stand_still = StandStill::new(server.deadlines());
    loop {
        tokio::time::sleep(server.deadlines().progress_interval).await;
        // Each step of publishing has a deadline of its own.
        let is_publishing = stage.progress().phase == Phase::Publishing;
        if stand_still.is_over(stage.steps()) && !is_publishing {
            return Err(stand_still.told(&stage.waits_for()));
        }
        for node in server.peers().nodes() {
            if server.peers().is_lost(node) {
                let address = server.peers().address(node).map_or_else(String::new, |address| format!(" ({address})"));
                return Err(format!("node {node}{address} was lost during the stage-in"));
            }
        }
        if let Some(node) = stage.silent_node() {
            return Err(format!(
                "node {node} has not reported for {} s and has given the stage-in up",
                server.deadlines().node_silent.as_secs_f64()
            ));
        }
        // A slow listener misses some; the next one says more.
        let _ = events.try_send(Event::Progress(stage.progress().clone()));
    }
}

/// What all steps need.
struct Job<'a> {
    server: &'a Arc<Server>,
    stage: &'a Arc<CoordinatedStageIn>,
    request: &'a StageInRequest,
    sources: Vec<Source>,
    rivals: Arc<Rivals>,
    free: Vec<u64>,
}

impl Job<'_> {
    /// Everything up to the point where all nodes could show the dataset.
    async fn prepare(&self) -> Result<Merged, String> {
        let stage = self.stage.number;
        let (selection, seed) = (self.request.selection.clone(), self.request.seed);
        let start = Instant::now();
        let max_rate = self.request.max_rate.map(|rate| rate.div_ceil(self.free.len().max(1) as u64));
        let begin = Request::Begin { stage, selection, seed, max_rate, capacities: self.free.clone() };
        self.ask_all(&begin, self.server.deadlines().request).await?;
        // A failure has set it, if it is set.
        let _ = self.stage.all_begun.set(());
        let mut all_read = self.stage.all_read.subscribe();
        all_read.wait_for(|all_read| *all_read).await.map_err(|error| error.to_string())?;
        let read = start.elapsed();
        let runs = self.finish().await?;
        let finished = start.elapsed();
        self.stage.progress().phase = Phase::Merging;
        let created_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        let by_files = DIRECTORIES_MAX_DEFAULT + self.stage.counts().files * DIRECTORIES_PER_FILE_MAX;
        let directories_max = self.request.selection.max_directories.unwrap_or(by_files);
        // What is put aside of the members, the catalog, and what is sorted for it.
        let runs_len: u64 = runs.iter().map(|&(_, _, len)| len).sum();
        self.server.make_headroom(runs_len.saturating_mul(MERGED_PER_RUN)).await?;
        let merging = merge::Merging {
            server: self.server.clone(),
            stage: self.stage.clone(),
            runs,
            about: About { seed, created_s, group: self.request.selection.group, directories_max: Some(directories_max) },
            sources: self.sources.clone(),
            rivals: self.rivals.clone(),
        };
        let merged = self.server.blocking().run(move || merging.run()).await.map_err(|error| error.to_string())??;
        self.stage.progress().phase = Phase::Publishing;
        let built = start.elapsed();
        self.spread(&merged).await?;
        let published = start.elapsed();
        tracing::info!(stage, ?read, ?finished, ?built, ?published, "a stage-in, since its beginning");
        Ok(merged)
    }

    /// The runs of all nodes: node, number, length.
    async fn finish(&self) -> Result<Vec<(NodeId, u32, u64)>, String> {
        let request = Request::Finish { stage: self.stage.number };
        let replies = self.ask_all(&request, self.server.deadlines().offer).await?;
        let mut runs = Vec::new();
        for (node, reply) in self.server.peers().nodes().zip(replies) {
            let Reply::Runs { lens, counted } = reply else { return Err(format!("node {node} answers what was not asked")) };
            self.stage.count(node, counted);
            runs.extend((0..).zip(lens).map(|(run, len)| (node, run, len)));
        }
        Ok(runs)
    }

    /// The catalog goes from node to node along a tree: who has it gives it to a few more in each round.
    async fn spread(&self, merged: &Merged) -> Result<(), String> {
        self.server.stages().get(self.stage.number)?.set_catalog(merged.file.clone());
        let coordinator = self.server.config().node;
        let mut have = vec![coordinator];
        let mut lack: Vec<NodeId> = self.server.peers().nodes().filter(|&node| node != coordinator).collect();
        let others = async {
            while !lack.is_empty() {
                let next = lack.split_off(lack.len().saturating_sub(have.len() * CATALOG_FAN_OUT));
                let from = have.iter().cycle();
                let preparing = next.iter().zip(from).map(|(&node, &from)| self.prepare_on(node, from, merged));
                join_all(preparing).await.into_iter().collect::<Result<(), String>>()?;
                have.extend(next);
            }
            Ok(())
        };
        tokio::try_join!(self.prepare_on(coordinator, coordinator, merged), others).map(|_| ())
    }

    async fn prepare_on(&self, node: NodeId, from: NodeId, merged: &Merged) -> Result<(), String> {
        let request = Request::Prepare {
            stage: self.stage.number,
            dataset: DatasetId(self.stage.number as u32),
            target: self.request.target.clone(),
            from,
            len: merged.len,
            checksum: merged.checksum,
        };
        self.server.ask(node, request, self.server.deadlines().prepare).await.map(drop).map_err(|error| error.to_string())
    }

    async fn commit(&self, replaces: Option<DatasetId>) -> Result<(), String> {
        self.ask_all(&Request::Commit { stage: self.stage.number, replaces }, self.server.deadlines().request).await.map(drop)
    }

    async fn ask_all(&self, request: &Request, timeout: Duration) -> Result<Vec<Reply>, String> {
        let asking = self.server.peers().nodes().map(|node| self.server.ask(node, request.clone(), timeout));
        join_all(asking).await.into_iter().collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    async fn summary(&self, merged: Merged, unsettled: Option<String>, start: Instant) -> Result<Summary, String> {
        let mut counts = self.stage.counts().clone();
        if let Some(reason) = unsettled {
            counts.note(&format!("it is shown, but not all nodes have given up yet what it replaced: {reason}"));
        }
        counts.refused += merged.refused.count;
        counts.replaced += merged.replaced.count;
        merged.replaced.names.iter().for_each(|name| counts.note(name));
        merged.refused.names.iter().for_each(|name| counts.note(&format!("refused: {name}")));
        let dataset = self.server.store().dataset(DatasetId(self.stage.number as u32));
        let dataset = dataset.ok_or_else(|| format!("'{}' was replaced at once", display(&self.request.target)))?;
        let nodes = self.server.peers().count();
        let Spread { mut nodes, sizes, classes, archives } =
            self.server.blocking().run(move || Spread::of(&dataset, nodes)).await.map_err(|error| error.to_string())?;
        let imbalance_permille = spread::imbalance_permille(&nodes);
        let (rates, rate_interval_ms) = self.stage.rates();
        for ((node, counted), rates) in nodes.iter_mut().zip(&self.stage.progress().nodes).zip(rates) {
            (node.counted, node.rates) = (*counted, rates);
        }
        Ok(Summary {
            samples: merged.samples,
            bytes: merged.bytes,
            others: merged.others,
            archives,
            catalog_bytes: merged.len,
            source_bytes: self.stage.progress().source_bytes,
            counts,
            elapsed_ms: start.elapsed().as_millis() as u64,
            imbalance_permille,
            redone_bytes: self.stage.redone_bytes(),
            nodes,
            sizes,
            classes,
            rate_interval_ms,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_after_the_end_hears_how_it_ended() {
        let coordinator = Coordinator::new(Deadlines::DEFAULT);
        let ask = || coordinator.report(5, NodeId(1), Reported::default());
        assert_eq!(ask(), Reply::Undone, "a node that shows it already must take it back");
        coordinator.published().insert(5);
        assert_eq!(ask(), Reply::Stop);
    }

    #[tokio::test]
    async fn a_panic_of_the_coordinator_is_an_error_of_its_stage_in() {
        let server_fails = || -> Result<(), String> { std::panic::resume_unwind(Box::new("a fault of ours")) };
        assert!(caught(async { server_fails() }).await.unwrap_err().contains("node 0 failed"));
        assert_eq!(caught(async { Err::<(), _>("a reason".to_owned()) }).await.unwrap_err(), "a reason");
        assert_eq!(caught(async { Ok(1) }).await, Ok(1));
    }

    #[test]
    fn what_stands_still_is_noticed_and_what_goes_on_is_not() {
        let mut stand_still =
            StandStill::new(&Deadlines { stall: Deadlines::DEFAULT.progress_interval * 10, ..Deadlines::DEFAULT });
        assert!((0..100).all(|step| !stand_still.is_over(step)));
        assert_eq!((0..100).position(|_| stand_still.is_over(99)), Some(10));
        assert!(!stand_still.is_over(100), "it went forward");
        assert!(stand_still.told("node 1: reading 'x'").contains("2 s"));
    }

    #[test]
    fn a_target_is_claimed_once_and_given_back() {
        let coordinator = Coordinator::new(Deadlines::DEFAULT);
        let claim = Claim::take(&coordinator, b"a/b").ok().unwrap();
        for other in [&b"a/b"[..], b"a", b"a/b/c"] {
            assert_eq!(Claim::take(&coordinator, other).err().unwrap(), b"a/b");
        }
        assert!(Claim::take(&coordinator, b"a/bc").is_ok());
        drop(claim);
        assert!(Claim::take(&coordinator, b"a").is_ok());
    }
}
