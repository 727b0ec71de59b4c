//! A stage-in as the coordinator sees it: units to hand out, how far each node is, and the first failure.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::control::{Counted, Counts, Phase, Progress};
use dayfly_meta::wire::peer::{Question, Reply, Sighting, UnitReport};
use dayfly_stagein::unit_ledger::{NextUnits, UnitLedger};
use tokio::sync::{Notify, SetOnce, watch};
use tokio::time::Instant;

use super::COORDINATOR;
use super::conflicts::{Rivals, Suspicions};
use super::rates::Rates;

/// Nodes that are named when a stage-in stands still.
const WAITING_NODES_TOLD_MAX: usize = 8;

/// What a node tells of its part.
#[derive(Default)]
pub(crate) struct Reported {
    pub(crate) progress: Counted,
    pub(crate) waits: Vec<String>,
    pub(crate) suspects: Vec<Question>,
    pub(crate) sightings: Vec<Sighting>,
}

/// A stage-in as the coordinator sees it.
pub(crate) struct CoordinatedStageIn {
    pub(super) number: u64,
    unit_ledger: Mutex<UnitLedger>,
    progress: Mutex<Progress>,
    rates: Mutex<Rates>,
    counts: Mutex<Counts>,
    redone_bytes: AtomicU64,
    /// When each node last reported; before all have begun, when the stage-in was planned.
    reported: Mutex<Vec<Instant>>,
    failure: watch::Sender<Option<String>>,
    /// Set when all nodes have begun: before, a unit's blocks could reach a node that does not know of them.
    pub(super) all_begun: SetOnce<()>,
    pub(super) all_read: watch::Sender<bool>,
    /// A unit came back: there may be more to hand out, or nothing any more.
    judged: Notify,
    /// Counts all that goes forward, on any node: without it for long enough, the stage-in ends.
    steps: AtomicU64,
    /// What each node's threads wait for, while nothing goes forward there.
    waits: Mutex<Vec<Vec<String>>>,
    rivals: Arc<Rivals>,
    keeps_going: bool,
    suspicions: Mutex<Suspicions>,
    deadlines: Deadlines,
}

impl CoordinatedStageIn {
    pub(super) fn new(
        number: u64,
        (unit_ledger, counts): (UnitLedger, Counts),
        (rivals, keeps_going): (Arc<Rivals>, bool),
        nodes: usize,
        deadlines: Deadlines,
    ) -> Self {
        let progress = Progress { phase: Phase::Reading, nodes: vec![Counted::default(); nodes], ..Progress::default() };
        Self {
            number,
            reported: Mutex::new(vec![Instant::now(); nodes]),
            unit_ledger: Mutex::new(unit_ledger),
            rates: Mutex::new(Rates::new(nodes, deadlines.progress_interval)),
            progress: Mutex::new(progress),
            counts: Mutex::new(counts),
            redone_bytes: AtomicU64::new(0),
            failure: watch::Sender::new(None),
            all_begun: SetOnce::new(),
            all_read: watch::Sender::new(false),
            judged: Notify::new(),
            steps: AtomicU64::new(0),
            waits: Mutex::new(vec![Vec::new(); nodes]),
            rivals,
            keeps_going,
            suspicions: Mutex::default(),
            deadlines,
        }
    }

    /// A worker has finished units, or none yet, and wants more.
    pub(crate) async fn next_unit(&self, finished: Vec<UnitReport>) -> Reply {
        // That a `begin` takes too long ends the stage-in elsewhere.
        self.all_begun.wait().await;
        if !finished.is_empty() {
            self.step();
            finished.into_iter().for_each(|report| self.take_back(report));
            self.judged.notify_waiters();
        }
        let wait = async {
            loop {
                let judged = self.judged.notified();
                tokio::pin!(judged);
                judged.as_mut().enable();
                if self.has_failed() {
                    return Reply::Stop;
                }
                let handed = self.handing().assign_next();
                match handed {
                    Ok(NextUnits::Assigned(units)) => {
                        self.step();
                        return Reply::Units(units);
                    }
                    Ok(NextUnits::NoneYet) => {}
                    Ok(NextUnits::Finished) => {
                        self.all_read.send_replace(true);
                        self.judged.notify_waiters();
                        return Reply::NoUnit;
                    }
                    Err(error) => {
                        self.fail(error.to_string());
                        return Reply::Stop;
                    }
                }
                judged.await;
            }
        };
        tokio::time::timeout(self.deadlines.unit, wait).await.unwrap_or(Reply::Wait)
    }

    fn take_back(&self, report: UnitReport) {
        let judged = self.handing().record(report);
        judged.accepted.into_iter().for_each(|counts| self.counts().add(counts));
        {
            let mut progress = self.progress();
            for undone in judged.rejected {
                progress.files = progress.files.saturating_sub(undone.files);
                progress.bytes = progress.bytes.saturating_sub(undone.bytes);
            }
        }
        self.redone_bytes.fetch_add(judged.rejected_bytes, Ordering::Relaxed);
        if let Some(reason) = judged.failure {
            self.fail(reason);
        }
    }

    fn handing(&self) -> MutexGuard<'_, UnitLedger> {
        self.unit_ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was found by these does not count.
    pub(super) fn rejected(&self) -> HashSet<u32> {
        self.handing().rejected_tickets().clone()
    }

    /// Source bytes that were read for nothing.
    pub(super) fn redone_bytes(&self) -> u64 {
        self.redone_bytes.load(Ordering::Relaxed)
    }

    /// Source bytes that each node read in each interval, and its length in milliseconds.
    pub(super) fn rates(&self) -> (Vec<Vec<u64>>, u64) {
        self.rates.lock().unwrap_or_else(PoisonError::into_inner).read()
    }

    /// A node is so far.
    pub(crate) fn report(&self, node: NodeId, reported: Reported) -> Reply {
        let Reported { progress: counted, waits, suspects, sightings } = reported;
        if let Some(reported) = self.reported().get_mut(node.index()) {
            *reported = Instant::now();
        }
        self.count(node, counted);
        if let Some(of_node) = self.waits().get_mut(node.index()) {
            *of_node = waits;
        }
        let (questions, conflict) = {
            let mut suspicions = self.suspicions.lock().unwrap_or_else(PoisonError::into_inner);
            suspicions.take(suspects, sightings);
            let unit_ledger = self.handing();
            let is_certain = |ticket| unit_ledger.is_certain(ticket, self.keeps_going);
            (suspicions.questions(), suspicions.conflict(&self.rivals, is_certain))
        };
        if let Some(reason) = conflict {
            self.fail(reason);
        }
        if self.has_failed() { Reply::Undone } else { Reply::Go { files: self.progress().files, questions } }
    }

    /// Adds what a node has done since it was last heard of.
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

    /// Something went forward.
    pub(super) fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// How much has gone forward so far.
    pub(super) fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// What is waited for, when nothing has gone forward for too long.
    pub(super) fn waits_for(&self) -> String {
        let waits = self.waits();
        let told = (0..).map(NodeId).zip(&*waits).filter(|(_, waits)| !waits.is_empty());
        let told: Vec<String> =
            told.take(WAITING_NODES_TOLD_MAX).map(|(node, waits)| format!("node {node}: {}", waits.join(", "))).collect();
        match (self.progress().phase, told.is_empty()) {
            (Phase::Merging, _) => format!("node {COORDINATOR}: merging what was found into the catalog"),
            (_, true) => "no node says what for".to_owned(),
            (_, false) => told.join("; "),
        }
    }

    fn waits(&self) -> MutexGuard<'_, Vec<Vec<String>>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first failure ends the stage-in.
    pub(crate) fn fail(&self, reason: String) {
        self.failure.send_if_modified(|failure| {
            let is_first = failure.is_none();
            failure.get_or_insert(reason);
            is_first
        });
        // Those who wait for everyone to begin must hear that it is over.
        // They may have begun before.
        let _ = self.all_begun.set(());
        self.judged.notify_waiters();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    pub(super) async fn failed(&self) -> String {
        let mut failure = self.failure.subscribe();
        let failure = failure.wait_for(Option::is_some).await;
        failure.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    }

    /// A node that has not reported for so long that it has given up by itself.
    pub(super) fn silent_node(&self) -> Option<NodeId> {
        let silent = self.reported().iter().position(|reported| reported.elapsed() > self.deadlines.node_silent);
        silent.map(|node| NodeId(node as u16))
    }

    fn reported(&self) -> MutexGuard<'_, Vec<Instant>> {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
