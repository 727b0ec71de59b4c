//! The state of one stage-in on the coordinator: units to assign, each node's progress, and the first failure.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::roster::Roster;
use dayfly_meta::wire::control::{Counted, Counts, Phase, Progress};
use dayfly_meta::wire::peer::{CoordinatorReply, Sighting, SuspectPath, UnitReport};
use dayfly_stagein::unit_ledger::{NextUnits, UnitLedger, WorkerId};
use tokio::sync::{Notify, SetOnce, watch};

use super::CoordinatorError;
use super::conflicts::{Rivals, Suspicions};
use super::rates::Rates;
use crate::stage_in::name_drive;
use crate::store::Drive;

/// The most nodes that the error of a stalled stage-in names.
const WAITING_NODES_SHOWN_MAX: usize = 8;

/// A node's regular report.
#[derive(Default)]
pub(crate) struct NodeReport {
    /// The number of the node's reports, this one included.
    pub(crate) number: u64,
    /// What was counted since the last report.
    pub(crate) progress: Counted,
    /// What the node's threads are waiting for, if nothing was counted.
    pub(crate) waits: Vec<String>,
    /// Path conflicts that the node, as an owner of blocks, suspects.
    pub(crate) suspects: Vec<SuspectPath>,
    /// Samples that the node's workers found and whose paths are suspect.
    pub(crate) sightings: Vec<Sighting>,
}

/// What the coordinator remembers of a node's reports.
#[derive(Clone, Default)]
struct LastReport {
    /// The number of the last report; 0 before the first.
    number: u64,
    /// How many times [`CoordinatedStageIn::silent_node`] has looked since. While this node does not run, it does not look.
    looks: u32,
}

/// A running stage-in, as its coordinator sees it.
pub(crate) struct CoordinatedStageIn {
    pub(super) number: u64,
    coordinator: NodeId,
    /// The nodes that take part: those that were live when the stage-in began, and have not been lost since. Each has the
    /// incarnation with which it began, because a node that was lost takes no part anymore, even if it has returned.
    participants: Mutex<Vec<(NodeId, u32)>>,
    unit_ledger: Mutex<UnitLedger>,
    /// The drive that stores the list of units.
    plan_drive: Arc<Drive>,
    progress: Mutex<Progress>,
    rates: Mutex<Rates>,
    /// What the plan has counted, and what each node's accepted units have.
    counts: Mutex<BTreeMap<Option<NodeId>, Counts>>,
    redone_bytes: AtomicU64,
    last_reports: Mutex<Vec<LastReport>>,
    failure: watch::Sender<Option<Arc<CoordinatorError>>>,
    /// Set when all nodes have begun. Before that, a unit's blocks could reach a node that does not know about the stage-in.
    all_begun: SetOnce<()>,
    all_read: watch::Sender<bool>,
    /// Set if some of the samples can only be read where they are stored now.
    needs_all_parts: AtomicBool,
    /// Notified when a unit is reported: another unit may have become assignable, or no unit may be left.
    unit_reported: Notify,
    /// Counts all progress on all nodes. If there is none for too long, the stage-in has stalled.
    steps: AtomicU64,
    /// What each node's threads are waiting for, while the node makes no progress.
    waits: Mutex<Vec<Vec<String>>>,
    rivals: Arc<Rivals>,
    keeps_going: bool,
    /// Source bytes per second that all nodes together may read.
    max_rate: Option<u64>,
    suspicions: Mutex<Suspicions>,
    deadlines: Deadlines,
}

impl CoordinatedStageIn {
    pub(super) fn new(
        number: u64,
        (unit_ledger, plan_drive, counts): (UnitLedger, Arc<Drive>, Counts),
        (rivals, keeps_going): (Arc<Rivals>, bool),
        max_rate: Option<u64>,
        (coordinator, roster): (NodeId, &Roster),
        deadlines: Deadlines,
    ) -> Self {
        let (participants, nodes) = (incarnations(roster).collect(), roster.count());
        let progress = Progress { phase: Phase::Reading, nodes: vec![Counted::default(); nodes], ..Progress::default() };
        Self {
            number,
            coordinator,
            participants: Mutex::new(participants),
            last_reports: Mutex::new(vec![LastReport::default(); nodes]),
            unit_ledger: Mutex::new(unit_ledger),
            plan_drive,
            rates: Mutex::new(Rates::new(nodes, deadlines.progress_interval)),
            progress: Mutex::new(progress),
            counts: Mutex::new(BTreeMap::from([(None, counts)])),
            redone_bytes: AtomicU64::new(0),
            failure: watch::Sender::new(None),
            all_begun: SetOnce::new(),
            all_read: watch::Sender::new(false),
            needs_all_parts: AtomicBool::new(false),
            unit_reported: Notify::new(),
            steps: AtomicU64::new(0),
            waits: Mutex::new(vec![Vec::new(); nodes]),
            rivals,
            keeps_going,
            max_rate,
            suspicions: Mutex::default(),
            deadlines,
        }
    }

    /// Lets workers have units, because all nodes have begun.
    pub(super) fn set_all_begun(&self) {
        // A failure may already have set it.
        let _ = self.all_begun.set(());
    }

    /// Returns how many source bytes per second each node may read that has units.
    pub(super) fn share_of_max_rate(&self) -> Option<u64> {
        let participants = self.participants().len();
        self.max_rate.map(|rate| rate.div_ceil(self.unit_ledger().readers(participants).max(1) as u64))
    }

    /// Waits until all units are finished.
    pub(super) async fn all_read(&self) {
        // The sender lives as long as `self`.
        let _ = self.all_read.subscribe().wait_for(|all_read| *all_read).await;
    }

    /// Takes a worker's report of its finished units, if any, and answers with more units. If the answer is lost, the worker repeats the
    /// request.
    pub(super) async fn next_units(&self, (worker, request): (WorkerId, u64), finished: Vec<UnitReport>) -> CoordinatorReply {
        let has_finished = !finished.is_empty();
        if has_finished {
            self.step();
            finished.into_iter().for_each(|report| self.record(report));
        }
        let (turn, has_urgent) = {
            let mut unit_ledger = self.unit_ledger();
            (unit_ledger.begin_turn(worker, request), unit_ledger.has_urgent())
        };
        if has_finished || has_urgent {
            self.unit_reported.notify_waiters();
        }
        let wait = async {
            // If a node does not begin, the coordinator's request to it fails in the end, and so does the stage-in.
            self.all_begun.wait().await;
            loop {
                let unit_reported = self.unit_reported.notified();
                tokio::pin!(unit_reported);
                unit_reported.as_mut().enable();
                // A node that was lost has no part in the stage-in anymore.
                if self.has_failed() || !self.participants().contains(&worker.node) {
                    return CoordinatorReply::Over;
                }
                let next = {
                    let mut unit_ledger = self.unit_ledger();
                    if !turn.is_some_and(|turn| unit_ledger.is_turn(worker, turn)) {
                        // The worker waits for the answer to another request.
                        return CoordinatorReply::Wait;
                    }
                    let next = unit_ledger.assign_next(worker);
                    // Set under the lock, so that from now on no unit is assigned again in place of a node that is lost.
                    if matches!(next, Ok(NextUnits::Finished)) {
                        self.all_read.send_replace(true);
                    }
                    next
                };
                match next {
                    Ok(NextUnits::Assigned(units)) => {
                        self.step();
                        return CoordinatorReply::Units(units);
                    }
                    Ok(NextUnits::NoneYet) => {}
                    Ok(NextUnits::Finished) => {
                        self.unit_reported.notify_waiters();
                        return CoordinatorReply::NoUnit;
                    }
                    Err(error) => {
                        let node = (self.progress().nodes.len() > 1).then_some(self.coordinator);
                        let cause = name_drive(&self.plan_drive, error).into();
                        self.fail(CoordinatorError::OnNode { node, cause });
                        return CoordinatorReply::Over;
                    }
                }
                unit_reported.await;
            }
        };
        tokio::time::timeout(self.deadlines.unit, wait).await.unwrap_or(CoordinatorReply::Wait)
    }

    fn record(&self, report: UnitReport) {
        let verdict = self.unit_ledger().record(report);
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        verdict.accepted.into_iter().for_each(|(node, more)| counts.entry(Some(node)).or_default().add(more));
        drop(counts);
        {
            let mut progress = self.progress();
            for rejected in verdict.rejected {
                progress.files = progress.files.saturating_sub(rejected.files);
                progress.bytes = progress.bytes.saturating_sub(rejected.bytes);
            }
        }
        self.redone_bytes.fetch_add(verdict.rejected_bytes, Ordering::Relaxed);
        if let Some(reason) = verdict.failure {
            self.fail(CoordinatorError::UnitFailed(reason));
        }
    }

    fn unit_ledger(&self) -> MutexGuard<'_, UnitLedger> {
        self.unit_ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tickets of rejected assignments. Archive members that carry these tickets are left out.
    pub(super) fn rejected_tickets(&self) -> HashSet<u32> {
        self.unit_ledger().rejected_tickets().clone()
    }

    /// Returns the source bytes that were read for rejected assignments.
    pub(super) fn redone_bytes(&self) -> u64 {
        self.redone_bytes.load(Ordering::Relaxed)
    }

    /// Returns the source bytes that each node read in each interval, and the length of an interval in milliseconds.
    pub(super) fn rates(&self) -> (Vec<Vec<u64>>, u64) {
        self.rates.lock().unwrap_or_else(PoisonError::into_inner).read()
    }

    /// Records a node's report, and answers it.
    pub(super) fn report(&self, node: NodeId, report: NodeReport) -> CoordinatorReply {
        let NodeReport { number, progress, waits, suspects, sightings } = report;
        let is_new = self.last_reports().get_mut(node.index()).is_some_and(|last| {
            last.looks = 0;
            std::mem::replace(&mut last.number, number) != number
        });
        // A node repeats a report if the answer was lost.
        if is_new {
            self.count(node, progress);
        }
        if let Some(of_node) = self.waits().get_mut(node.index()) {
            *of_node = waits;
        }
        let (suspects, conflict) = {
            let mut suspicions = self.suspicions.lock().unwrap_or_else(PoisonError::into_inner);
            suspicions.add(suspects, sightings);
            let unit_ledger = self.unit_ledger();
            let is_certain = |ticket| unit_ledger.is_certain(ticket, self.keeps_going);
            (suspicions.suspects(), suspicions.conflict(&self.rivals, is_certain))
        };
        if let Some(conflict) = conflict {
            self.fail(conflict.into());
        }
        if self.has_failed() {
            CoordinatorReply::Abort
        } else {
            CoordinatorReply::Continue { files: self.progress().files, suspects, max_rate: self.share_of_max_rate() }
        }
    }

    /// Adds what a node has counted since its last report.
    pub(super) fn count(&self, node: NodeId, counted: Counted) {
        if !counted.is_still() {
            self.step();
        }
        let mut progress = self.progress();
        progress.source_bytes += counted.source_bytes;
        progress.files += counted.files;
        progress.bytes += counted.bytes;
        if let Some(of_node) = progress.nodes.get_mut(node.index()) {
            of_node.add(&counted);
        }
        drop(progress);
        self.rates.lock().unwrap_or_else(PoisonError::into_inner).add(node, counted.source_bytes);
    }

    /// Counts one step of progress.
    pub(super) fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of steps so far.
    pub(super) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Returns what a stalled stage-in is waiting for, by node.
    pub(super) fn waits_for(&self) -> String {
        if self.progress().phase == Phase::Merging {
            return format!("node {}: merging the sorted runs into the catalog", self.coordinator);
        }
        let waits = self.waits();
        let waiting = (0..).map(NodeId).zip(&*waits).filter(|(_, waits)| !waits.is_empty()).take(WAITING_NODES_SHOWN_MAX);
        let waiting: Vec<String> = waiting.map(|(node, waits)| format!("node {node}: {}", waits.join(", "))).collect();
        if waiting.is_empty() { "an unknown cause; no node reports one".to_owned() } else { waiting.join("; ") }
    }

    fn waits(&self) -> MutexGuard<'_, Vec<Vec<String>>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails the stage-in. Only the first failure counts.
    pub(super) fn fail(&self, error: CoordinatorError) {
        self.failure.send_if_modified(|failure| {
            let is_first = failure.is_none();
            failure.get_or_insert_with(|| error.share());
            is_first
        });
        // Workers that wait for all nodes to begin must learn that the stage-in is over. If all nodes have begun, `all_begun`
        // is already set.
        let _ = self.all_begun.set(());
        self.unit_reported.notify_waiters();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// Waits for the first failure.
    pub(super) async fn failed(&self) -> Arc<CoordinatorError> {
        let mut failure = self.failure.subscribe();
        // The sender lives as long as `self`.
        let failure = failure.wait_for(Option::is_some).await.ok().and_then(|failure| failure.clone());
        failure.unwrap_or_else(|| Arc::new(CoordinatorError::Cancelled))
    }

    /// Returns a node that has not reported for so long that it has given up on the stage-in on its own. Called once per
    /// `progress_interval`.
    pub(super) fn silent_node(&self) -> Option<NodeId> {
        // Before that, the supervisor declares a node lost that is silent to all.
        let patience = self.deadlines.lost_after + self.deadlines.node_silent;
        let mut reports = self.last_reports();
        reports.iter_mut().for_each(|last| last.looks += 1);
        let silent_for = |node: &NodeId| reports.get(node.index()).map(|last| self.deadlines.progress_interval * last.looks);
        self.participants().into_iter().find(|node| silent_for(node) > Some(patience))
    }

    /// Returns the nodes that take part.
    pub(super) fn participants(&self) -> Vec<NodeId> {
        let participants = self.participants.lock().unwrap_or_else(PoisonError::into_inner);
        participants.iter().map(|&(node, _)| node).collect()
    }

    /// Returns the nodes that take part, with the incarnations with which they began.
    pub(super) fn members(&self) -> Vec<(NodeId, u32)> {
        self.participants.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the nodes that take part, but are lost, or have been since the stage-in began.
    pub(super) fn lost(&self, roster: &Roster) -> Vec<NodeId> {
        let participants = self.participants.lock().unwrap_or_else(PoisonError::into_inner);
        let live: Vec<(NodeId, u32)> = incarnations(roster).collect();
        participants.iter().filter(|participant| !live.contains(participant)).map(|&(node, _)| node).collect()
    }

    /// Records that some samples can only be read where they are stored now: those of compressed tars, and of archives within
    /// archives. The dataset must not become visible without a node that stores them.
    pub(super) fn set_needs_all_parts(&self) {
        self.needs_all_parts.store(true, Ordering::Relaxed);
    }

    /// Goes on without a lost node, once the catalog is there. Returns `false` if the dataset cannot do without the node.
    pub(super) fn publish_without(&self, node: NodeId) -> bool {
        let can = !self.needs_all_parts.load(Ordering::Relaxed);
        if can {
            self.drop_participant(node);
        }
        can
    }

    fn last_reports(&self) -> MutexGuard<'_, Vec<LastReport>> {
        self.last_reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what all accepted units have counted.
    pub(super) fn counts(&self) -> Counts {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.values().fold(Counts::default(), |mut all, counts| {
            all.add(counts.clone());
            all
        })
    }

    /// Goes on without a lost node: its units are assigned again. Returns `false` if that is too late, because all units were
    /// finished, and some of what was found was on that node.
    pub(super) fn go_on_without(&self, node: NodeId) -> bool {
        let mut unit_ledger = self.unit_ledger();
        if *self.all_read.borrow() || !self.all_begun.initialized() {
            return false;
        }
        unit_ledger.lose(node);
        drop(unit_ledger);
        self.drop_participant(node);
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).remove(&Some(node));
        let mut progress = self.progress();
        if let Some(of_node) = progress.nodes.get_mut(node.index()).map(std::mem::take) {
            progress.files = progress.files.saturating_sub(of_node.files);
            progress.bytes = progress.bytes.saturating_sub(of_node.bytes);
        }
        drop(progress);
        self.waits().get_mut(node.index()).into_iter().for_each(Vec::clear);
        self.step();
        self.unit_reported.notify_waiters();
        true
    }

    /// Records that a node no longer takes part.
    fn drop_participant(&self, node: NodeId) {
        self.participants.lock().unwrap_or_else(PoisonError::into_inner).retain(|(participant, _)| *participant != node);
    }
}

/// Returns the live members, with their incarnations.
fn incarnations(roster: &Roster) -> impl Iterator<Item = (NodeId, u32)> + '_ {
    roster.live().filter_map(|node| Some((node, roster.member(node)?.incarnation)))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use dayfly_meta::roster::{RosterChange, RosterMember};
    use dayfly_meta::wire::control::Selection;
    use dayfly_stagein::plan::{PlanRequest, plan_sources};

    use super::*;

    #[test]
    fn only_nodes_that_can_have_a_unit_count_as_readers_and_a_lost_node_takes_no_part() {
        let folder = tempfile::tempdir().unwrap();
        for (sources, participants, readers) in [(1, 4, 1), (3, 4, 3), (9, 4, 4), (9, 1, 1), (0, 4, 1)] {
            let source = |number| {
                let source = folder.path().join(format!("{number}"));
                std::fs::create_dir_all(&source).unwrap();
                std::fs::write(source.join("sample"), "bytes").unwrap();
                source.into_os_string().into_encoded_bytes()
            };
            let patterns: Vec<Vec<u8>> = (0..sources).map(source).collect();
            let request = PlanRequest { patterns: &patterns, selection: &Selection::default(), seed: 7, workers: 1 };
            let plan = plan_sources(&request, tempfile::tempfile().unwrap(), &Arc::default()).unwrap();
            let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 20).unwrap();
            let ledger = UnitLedger::new(plan.units, plan.split_tars);
            let rivals = Arc::new(Rivals::new(plan.rivalries, &plan.sources));
            let roster = Roster::new(&vec![SocketAddr::from(([127, 0, 0, 1], 7)); participants]);
            let state = (ledger, drives[0].clone(), plan.counts);
            let stage_in =
                CoordinatedStageIn::new(1, state, (rivals, false), Some(12), (NodeId(0), &roster), Deadlines::default());
            assert_eq!(stage_in.share_of_max_rate(), Some(12 / readers), "{sources} sources, {participants} nodes");
            if participants != 4 {
                continue;
            }
            // A node that was lost takes no part anymore, even if it has returned before anybody looked.
            let member = roster.member(NodeId(2)).unwrap();
            for (is_lost, incarnation) in [(true, 0), (false, 1)] {
                let change = RosterMember { is_lost, incarnation, ..member.clone() };
                let mut changed = roster.clone();
                changed.apply(&RosterChange { epoch: 1, coordinator: 0, members: vec![(2, change)] });
                assert_eq!((stage_in.lost(&roster), stage_in.lost(&changed)), (vec![], vec![NodeId(2)]));
            }
            stage_in.set_all_begun();
            assert!(stage_in.go_on_without(NodeId(2)));
            let left = readers.min(3);
            assert_eq!(stage_in.share_of_max_rate(), Some(12 / left), "the others may read what the lost node would have");
            stage_in.set_needs_all_parts();
            assert!(!stage_in.publish_without(NodeId(1)) && stage_in.participants().len() == 3);
        }
    }
}
