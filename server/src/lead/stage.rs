//! A stage-in as the lead sees it: units to hand out, how far each node is, and the first failure.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{NOTES_SHOWN_MAX, REQUEST_TIMEOUT};
use dayfly_meta::wire::control::{Counts, Phase, Progress};
use dayfly_meta::wire::peer::{Counted, Reply, UnitReport};
use dayfly_stagein::plan::UnitQueue;
use tokio::sync::watch;

/// A node reports five times a second and tries twice before it gives up.
pub(super) const NODE_SILENT_TIMEOUT: Duration = Duration::from_secs(3 * REQUEST_TIMEOUT.as_secs());

/// A stage-in as the lead sees it.
pub(crate) struct LeadStage {
    pub(super) number: u64,
    units: Mutex<Units>,
    progress: Mutex<Progress>,
    counts: Mutex<Counts>,
    /// When each node last reported; before all have begun, when the stage-in was planned.
    reported: Mutex<Vec<Instant>>,
    failure: watch::Sender<Option<String>>,
    /// Set when all nodes have begun: before, a unit's blocks could reach a node that does not know of them.
    pub(super) all_begun: watch::Sender<bool>,
    pub(super) all_read: watch::Sender<bool>,
}

struct Units {
    queue: UnitQueue,
    handed_out: u64,
    finished: u64,
    is_empty: bool,
}

impl LeadStage {
    pub(super) fn new(number: u64, queue: UnitQueue, counts: Counts, nodes: usize) -> Self {
        Self {
            number,
            reported: Mutex::new(vec![Instant::now(); nodes]),
            units: Mutex::new(Units { queue, handed_out: 0, finished: 0, is_empty: false }),
            progress: Mutex::new(Progress { phase: Phase::Reading, ..Progress::default() }),
            counts: Mutex::new(counts),
            failure: watch::Sender::new(None),
            all_begun: watch::Sender::new(false),
            all_read: watch::Sender::new(false),
        }
    }

    /// A worker has finished a unit, or none yet, and wants another.
    pub(crate) async fn next_unit(&self, finished: Option<UnitReport>) -> Reply {
        // The sender lives as long as `self`; that a `begin` takes too long ends the stage-in elsewhere.
        let _ = self.all_begun.subscribe().wait_for(|begun| *begun).await;
        if self.has_failed() {
            return Reply::Stop;
        }
        let mut units = self.units.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(report) = finished {
            units.finished += 1;
            self.add_progress(report.progress);
            add_counts(&mut self.counts(), report.counts);
        }
        let unit = if units.is_empty { Ok(None) } else { units.queue.next_unit() };
        match unit {
            Ok(Some(unit)) => {
                units.handed_out += 1;
                Reply::Unit(unit)
            }
            Ok(None) => {
                units.is_empty = true;
                self.all_read.send_if_modified(|all_read| {
                    let was = std::mem::replace(all_read, units.finished == units.handed_out);
                    was != *all_read
                });
                Reply::NoUnit
            }
            Err(error) => {
                self.fail(error.to_string());
                Reply::Stop
            }
        }
    }

    /// A node is so far.
    pub(crate) fn report(&self, node: NodeId, counted: Counted) -> Reply {
        if let Some(reported) = self.reported().get_mut(node.index()) {
            *reported = Instant::now();
        }
        self.add_progress(counted);
        if self.has_failed() { Reply::Stop } else { Reply::Done }
    }

    fn add_progress(&self, counted: Counted) {
        let mut progress = self.progress();
        progress.source_bytes += counted.source_bytes;
        progress.files += counted.files;
        progress.bytes += counted.bytes;
    }

    /// The first failure ends the stage-in.
    pub(crate) fn fail(&self, reason: String) {
        self.failure.send_if_modified(|failure| {
            let is_first = failure.is_none();
            failure.get_or_insert(reason);
            is_first
        });
        // Those who wait for everyone to begin must hear that it is over.
        self.all_begun.send_replace(true);
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
        let silent = self.reported().iter().position(|reported| reported.elapsed() > NODE_SILENT_TIMEOUT);
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

fn add_counts(all: &mut Counts, more: Counts) {
    all.files += more.files;
    all.bytes += more.bytes;
    all.special += more.special;
    all.refused += more.refused;
    all.made_relative += more.made_relative;
    all.unmarked_ends += more.unmarked_ends;
    all.notes.extend(more.notes);
    all.notes.truncate(NOTES_SHOWN_MAX);
}
