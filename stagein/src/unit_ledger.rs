//! The unit ledger records which units wait, which are assigned to a worker, and which results
//! count.
//!
//! Every assignment of a unit gets a ticket, and every member that a worker finds carries the
//! ticket of that assignment. The results of most units count as soon as they are reported. A range
//! of a tar is different: its worker starts at the first block that looks like a header, and
//! whether that was a real header is known only after the previous range has been read. The worker
//! must have started where the previous range ended. If it did not, the ledger rejects the ticket
//! and assigns the range again, this time with its true start. Ranges of one archive therefore
//! count strictly in order, while workers read them in parallel; other units do not wait for this.
//!
//! If a node is lost, the members that its workers found are lost with it. The ledger then assigns
//! all of that node's units again, finished ones too. Likewise, if the answer that carries units to
//! a worker is lost, they are assigned again when the worker asks the next time.
//!
//! The ledger is a plain state machine without locks, clocks or I/O, apart from reading units back
//! from the queue's temporary file. The coordinator holds it in a mutex.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{MESSAGE_LEN_MAX, SMALL_UNITS_MAX};
use dayfly_meta::wire::control::Counts;
use dayfly_meta::wire::peer::{TarPosition, TarRange, Unit, UnitReport, Work};

use crate::StageInError;
use crate::plan::{SplitTar, UnitQueue};

/// Assigns the units of one stage-in to workers and decides which results count.
pub struct UnitLedger {
    waiting: UnitQueue,
    /// Ranges whose first attempt was rejected. They are assigned before everything else, because
    /// the results of all later ranges must wait for them.
    retries: VecDeque<Unit>,
    /// Split archives, by source.
    chains: HashMap<u32, RangeChain>,
    /// Units that a worker is reading, by ticket.
    assigned: BTreeMap<u32, Assignment>,
    /// How many of these each node has. Nodes without any are not listed.
    assigned_by_node: HashMap<NodeId, usize>,
    /// What each node has finished, by node. Ranges that have no verdict yet are not included.
    finished: HashMap<NodeId, Vec<Finished>>,
    /// Units of lost nodes. They are assigned before those that wait.
    redone: VecDeque<Finished>,
    last_ticket: u32,
    rejected: HashSet<u32>,
    /// The last request of each worker.
    turns: HashMap<WorkerId, Turn>,
    last_turn: u64,
}

/// A worker thread of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkerId {
    /// The worker's node.
    pub node: NodeId,
    /// The worker's number on its node.
    pub number: u16,
}

/// What has become of a worker's last request.
#[derive(Default)]
struct Turn {
    number: u64,
    /// The worker's number for the request.
    request: u64,
    /// The units that were assigned.
    tickets: Vec<u32>,
}

/// A unit that a worker is reading.
struct Assignment {
    worker: WorkerId,
    source: u32,
    what: Assigned,
}

enum Assigned {
    /// A whole unit, and its index in the queue.
    Unit(u32),
    /// A range of a tar that awaits its verdict: its index, and the global headers that its worker started with.
    Range(usize, Vec<u8>),
    /// A range of a tar that was accepted before, from a node that was lost.
    RangeAgain(usize, TarPosition),
}

/// A unit whose result counts.
enum Finished {
    /// A whole unit, by its index in the queue.
    Unit(u32),
    /// A range of a tar: its source, its index, and where its first member starts.
    Range(u32, usize, TarPosition),
}

/// The answer to a worker that asks for units.
#[derive(Debug)]
pub enum NextUnits {
    /// One unit, or several small ones. The worker must report each of them.
    Assigned(Vec<Unit>),
    /// No unit is waiting now, but an assigned one may be rejected and assigned again. Ask later.
    NoneYet,
    /// All units are finished and none will be added.
    Finished,
}

/// The ledger's decisions after a report. Because ranges count in order, one report can decide
/// about several units, or about none yet.
#[derive(Debug, Default)]
pub struct Verdict {
    /// The [`Counts`] of the newly accepted units, each with the node that has read the unit.
    pub accepted: Vec<(NodeId, Counts)>,
    /// The [`Counts`] of the newly rejected units. Progress already includes them, so the caller
    /// subtracts them.
    pub rejected: Vec<Counts>,
    /// Source bytes that were read for the rejected units.
    pub rejected_bytes: u64,
    /// Set if a unit that counts could not be read to its end; the stage-in has failed.
    pub failure: Option<String>,
}

impl UnitLedger {
    /// Creates a ledger over the units of a plan and the archives that the plan split.
    pub fn new(units: UnitQueue, split_tars: Vec<SplitTar>) -> Self {
        let chains = split_tars.into_iter().map(|tar| (tar.source, RangeChain::new(tar))).collect();
        Self {
            waiting: units,
            retries: VecDeque::new(),
            chains,
            assigned: BTreeMap::new(),
            assigned_by_node: HashMap::new(),
            finished: HashMap::new(),
            redone: VecDeque::new(),
            last_ticket: 0,
            rejected: HashSet::new(),
            turns: HashMap::new(),
            last_turn: 0,
        }
    }

    /// Returns how many of `nodes` nodes read at the same time: those that have units, and others as far as units wait for them.
    pub fn readers(&self, nodes: usize) -> usize {
        let busy = self.assigned_by_node.len();
        let waiting = self.waiting.left() + self.retries.len() + self.redone.len();
        (busy + waiting).min(nodes)
    }

    /// Takes note that a worker asks for units, after its report of those that it has finished. So
    /// it has none: what was assigned to it has not reached it, and is assigned again. `request`
    /// counts the worker's requests; one that it repeats keeps its number. Returns the number of this
    /// turn, or `None` if the worker has made a later request, so that nobody waits for the answer to
    /// this one.
    pub fn begin_turn(&mut self, worker: WorkerId, request: u64) -> Option<u64> {
        let turn = self.turns.entry(worker).or_default();
        if turn.request > request {
            return None;
        }
        self.last_turn += 1;
        let before = std::mem::replace(turn, Turn { number: self.last_turn, request, tickets: Vec::new() });
        let unseen = before.tickets.into_iter().filter(|ticket| self.assigned.contains_key(ticket)).collect::<Vec<_>>();
        self.take_back(&unseen);
        // Should the worker have them nevertheless, what it finds in them does not count.
        self.rejected.extend(unseen);
        Some(self.last_turn)
    }

    /// Returns whether units wait that were assigned before.
    pub fn has_urgent(&self) -> bool {
        !self.retries.is_empty() || !self.redone.is_empty()
    }

    /// Returns whether the worker has not asked again since this turn began.
    pub fn is_turn(&self, worker: WorkerId, turn: u64) -> bool {
        self.turns.get(&worker).is_some_and(|last| last.number == turn)
    }

    /// Assigns the next unit, or several small ones, to a worker.
    ///
    /// # Errors
    ///
    /// [`StageInError::TempFile`] if a unit cannot be read back from the plan's temporary file.
    pub fn assign_next(&mut self, worker: WorkerId) -> Result<NextUnits, StageInError> {
        let mut units = Vec::new();
        let mut len = 0;
        // Ranges count as large, so ranges and retries are always assigned alone.
        while let Some(small_len) = self.waiting.next_small_len().filter(|_| !self.has_urgent()) {
            len += small_len;
            if units.len() == SMALL_UNITS_MAX || len > MESSAGE_LEN_MAX / 2 {
                break;
            }
            units.extend(self.assign_one(worker)?);
        }
        if units.is_empty() {
            units.extend(self.assign_one(worker)?);
        }
        match units.is_empty() {
            false => Ok(NextUnits::Assigned(units)),
            true if self.assigned.is_empty() => Ok(NextUnits::Finished),
            true => Ok(NextUnits::NoneYet),
        }
    }

    fn assign_one(&mut self, worker: WorkerId) -> Result<Option<Unit>, StageInError> {
        while let Some((unit, what)) = self.next_unit()? {
            let what = match (&what, &unit.work, self.chains.get(&unit.source)) {
                (Assigned::Unit(_), Work::TarRange(_), Some(chain)) if chain.position.is_none() => {
                    // The archive ended in an earlier range; the bytes here are not part of it.
                    continue;
                }
                (Assigned::Unit(_), Work::TarRange(range), Some(chain)) => chain.assigned(range),
                _ => what,
            };
            return Ok(Some(self.assign(worker, unit, what)));
        }
        Ok(None)
    }

    /// Takes the most urgent unit.
    fn next_unit(&mut self) -> Result<Option<(Unit, Assigned)>, StageInError> {
        if let Some(unit) = self.retries.pop_front() {
            // All of these are ranges, which are known by where they are, not by their index.
            return Ok(Some((unit, Assigned::Unit(u32::MAX))));
        }
        match self.redone.pop_front() {
            Some(Finished::Unit(index)) => Ok(self.waiting.unit(index)?.map(|unit| (unit, Assigned::Unit(index)))),
            Some(Finished::Range(source, index, start)) => {
                let chain = self.chains.get(&source);
                Ok(chain.map(|chain| (chain.unit(index, Some(start.clone())), Assigned::RangeAgain(index, start))))
            }
            None => Ok(self.waiting.next_unit()?.map(|(index, unit)| (unit, Assigned::Unit(index)))),
        }
    }

    fn assign(&mut self, worker: WorkerId, mut unit: Unit, what: Assigned) -> Unit {
        self.last_ticket += 1;
        unit.ticket = self.last_ticket;
        self.turns.entry(worker).or_default().tickets.push(unit.ticket);
        self.assigned.insert(unit.ticket, Assignment { worker, source: unit.source, what });
        *self.assigned_by_node.entry(worker.node).or_default() += 1;
        unit
    }

    /// Takes an assigned unit from its worker.
    fn unassign(&mut self, ticket: u32) -> Option<Assignment> {
        let assignment = self.assigned.remove(&ticket)?;
        if let Entry::Occupied(mut of_node) = self.assigned_by_node.entry(assignment.worker.node) {
            *of_node.get_mut() -= 1;
            if *of_node.get() == 0 {
                of_node.remove();
            }
        }
        Some(assignment)
    }

    /// Assigns all units of a lost node again: those that its workers were reading, and those that they had finished.
    pub fn lose(&mut self, node: NodeId) {
        let of_node = self.assigned.iter().filter(|(_, assigned)| assigned.worker.node == node);
        let tickets: Vec<u32> = of_node.map(|(ticket, _)| *ticket).collect();
        self.take_back(&tickets);
        for chain in self.chains.values_mut() {
            let of_node = chain.reports.iter().filter(|(_, waiting)| waiting.node == node);
            let reported: Vec<usize> = of_node.map(|(index, _)| *index).collect();
            reported.iter().for_each(|index| drop(chain.reports.remove(index)));
            self.retries.extend(reported.into_iter().map(|index| chain.unit(index, None)));
        }
        self.redone.extend(self.finished.remove(&node).unwrap_or_default());
    }

    /// Takes assigned units from their workers, to assign them again.
    fn take_back(&mut self, tickets: &[u32]) {
        for ticket in tickets {
            let Some(Assignment { source, what, .. }) = self.unassign(*ticket) else { continue };
            match what {
                Assigned::Unit(index) => self.redone.push_back(Finished::Unit(index)),
                Assigned::RangeAgain(index, start) => self.redone.push_back(Finished::Range(source, index, start)),
                Assigned::Range(index, _) => self.retries.extend(self.chains.get(&source).map(|chain| chain.unit(index, None))),
            }
        }
    }

    /// Records the report of a finished unit. A report for an unknown ticket is ignored.
    pub fn record(&mut self, report: UnitReport) -> Verdict {
        let mut verdict = Verdict::default();
        let Some(Assignment { worker: WorkerId { node, .. }, source, what }) = self.unassign(report.ticket) else {
            return verdict;
        };
        if report.withdrawn {
            self.rejected.insert(report.ticket);
        }
        let finished = match (what, self.chains.get_mut(&source)) {
            (Assigned::Range(index, globals), Some(chain)) => {
                chain.reports.insert(index, WaitingReport { node, report, globals });
                let retry = chain.judge(&mut verdict, &mut self.rejected, &mut self.finished);
                self.retries.extend(retry);
                return verdict;
            }
            (Assigned::RangeAgain(index, start), _) => {
                verdict.failure = report.range.and_then(|range| range.failure);
                Finished::Range(source, index, start)
            }
            (Assigned::Unit(index), _) => Finished::Unit(index),
            (Assigned::Range(..), None) => return verdict,
        };
        verdict.accepted.push((node, report.counts));
        self.finished.entry(node).or_default().push(finished);
        verdict
    }

    /// Returns whether the result of this ticket is certain to count. A range is certain once all
    /// ranges before it count. Any other unit is certain as soon as it is assigned, except with
    /// `keep_going`: in that case the worker may still withdraw the unit because the source
    /// changed. Without `keep_going`, a changed source fails the stage-in.
    pub fn is_certain(&self, ticket: u32, keep_going: bool) -> bool {
        let is_range = |assigned: &Assignment| matches!(assigned.what, Assigned::Range(..));
        let may_be_rejected = self.assigned.get(&ticket).is_some_and(|assigned| keep_going || is_range(assigned));
        let awaits_verdict =
            || self.chains.values().flat_map(|chain| chain.reports.values()).any(|waiting| waiting.report.ticket == ticket);
        !may_be_rejected && !self.rejected.contains(&ticket) && !awaits_verdict()
    }

    /// Returns the tickets whose members must be left out of the catalog.
    pub fn rejected_tickets(&self) -> &HashSet<u32> {
        &self.rejected
    }
}

/// The ranges of one archive, which the ledger judges in order.
struct RangeChain {
    tar: SplitTar,
    /// Reports that wait for the report of an earlier range, by the index of the range.
    reports: BTreeMap<usize, WaitingReport>,
    /// Index of the first range without a verdict.
    next: usize,
    /// Where the archive's next member starts; `None` after the archive's end.
    position: Option<TarPosition>,
}

struct WaitingReport {
    node: NodeId,
    report: UnitReport,
    /// The global headers that the worker started with.
    globals: Vec<u8>,
}

impl RangeChain {
    fn new(tar: SplitTar) -> Self {
        Self { tar, reports: BTreeMap::new(), next: 0, position: Some(TarPosition::default()) }
    }

    /// Judges reports in order, up to the first one that is still missing. Returns the next range,
    /// with its true start, if its report had to be rejected.
    fn judge(
        &mut self,
        verdict: &mut Verdict,
        rejected: &mut HashSet<u32>,
        finished: &mut HashMap<NodeId, Vec<Finished>>,
    ) -> Option<Unit> {
        while let Some(position) = self.position.clone() {
            let WaitingReport { node, report, globals } = self.reports.remove(&self.next)?;
            let (_, to) = self.tar.ranges[self.next];
            if position.offset >= to {
                // A member of an earlier range reaches past the end of this range, so no member starts here.
                reject(report, verdict, rejected);
                self.next += 1;
                continue;
            }
            let range = report.range.clone().unwrap_or_default();
            if range.first == Some(position.offset) && globals == position.globals {
                verdict.accepted.push((node, report.counts));
                finished.entry(node).or_default().push(Finished::Range(self.tar.source, self.next, position));
                if range.failure.is_some() {
                    verdict.failure = range.failure;
                    return None;
                }
                self.position = range.next;
                self.next += 1;
                continue;
            }
            reject(report, verdict, rejected);
            return Some(self.unit(self.next, Some(position)));
        }
        // The archive has ended; the bytes after its end are not part of it.
        std::mem::take(&mut self.reports).into_values().for_each(|waiting| reject(waiting.report, verdict, rejected));
        None
    }

    /// Returns a range as a unit. Without `start`, its worker guesses where the first member starts.
    fn unit(&self, index: usize, start: Option<TarPosition>) -> Unit {
        let SplitTar { source, path, version, prefix, rivalry, ranges, .. } = &self.tar;
        let (from, to) = ranges[index];
        // What comes before the first range without a verdict is known.
        let start = start.or_else(|| self.position.clone().filter(|_| index == self.next));
        let range = TarRange { path: path.clone(), version: *version, from, to, start };
        Unit { source: *source, ticket: 0, prefix: prefix.clone(), rivalry: *rivalry, work: Work::TarRange(range) }
    }

    fn assigned(&self, range: &TarRange) -> Assigned {
        let index = self.tar.ranges.partition_point(|&(from, _)| from < range.from);
        Assigned::Range(index, range.start.as_ref().map_or_else(Vec::new, |start| start.globals.clone()))
    }
}

fn reject(report: UnitReport, verdict: &mut Verdict, rejected: &mut HashSet<u32>) {
    rejected.insert(report.ticket);
    verdict.rejected.push(report.counts);
    verdict.rejected_bytes += report.source_bytes;
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dayfly_meta::wire::control::Selection;

    use super::*;
    use crate::plan::{PlanRequest, plan_sources};

    /// Returns a ledger of two units, each of which is a folder.
    fn ledger(folder: &std::path::Path) -> UnitLedger {
        let source = |name: &str| {
            let source = folder.join(name);
            std::fs::create_dir_all(&source).unwrap();
            // Large units are assigned one by one.
            std::fs::File::create(source.join("sample")).unwrap().set_len(64 << 20).unwrap();
            source.into_os_string().into_encoded_bytes()
        };
        let patterns = ["a", "b"].map(source);
        let request = PlanRequest { patterns: &patterns, selection: &Selection::default(), seed: 7, workers: 2 };
        let plan = plan_sources(&request, tempfile::tempfile().unwrap(), &Arc::default()).unwrap();
        UnitLedger::new(plan.units, plan.split_tars)
    }

    fn assigned(ledger: &mut UnitLedger, worker: WorkerId) -> Vec<Unit> {
        match ledger.assign_next(worker).unwrap() {
            NextUnits::Assigned(units) => units,
            other => panic!("no units: {other:?}"),
        }
    }

    fn report(unit: &Unit) -> UnitReport {
        UnitReport { ticket: unit.ticket, counts: Counts { files: 1, ..Counts::default() }, ..UnitReport::default() }
    }

    #[test]
    fn nodes_without_units_are_no_readers_once_no_units_wait() {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = ledger(folder.path());
        let workers = [(0, 0), (0, 1), (1, 0)].map(|(node, number)| WorkerId { node: NodeId(node), number });
        // There are two units.
        assert_eq!((ledger.readers(1), ledger.readers(4)), (1, 2));
        let first = assigned(&mut ledger, workers[0]);
        assert_eq!(ledger.readers(4), 2, "one unit waits for another node");
        let second = assigned(&mut ledger, workers[1]);
        assert_eq!(ledger.readers(4), 1, "both are on one node");
        ledger.record(report(&first[0]));
        assert_eq!(ledger.readers(4), 1);
        ledger.lose(NodeId(0));
        assert_eq!(ledger.readers(4), 2, "both wait again");
        let [first, _] = [workers[2], workers[0]].map(|worker| assigned(&mut ledger, worker));
        assert_eq!(ledger.readers(4), 2);
        ledger.record(report(&first[0]));
        ledger.record(report(&second[0]));
        assert_eq!(ledger.readers(4), 1, "a report from before the loss changes nothing");
    }

    #[test]
    fn units_whose_answer_was_lost_are_assigned_again_and_count_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut ledger = ledger(folder.path());
        let workers = [0, 1].map(|number| WorkerId { node: NodeId(0), number });
        let turn = ledger.begin_turn(workers[0], 1).unwrap();
        let lost = assigned(&mut ledger, workers[0]);
        // The worker repeats its request. The first one is not answered anymore.
        let again = ledger.begin_turn(workers[0], 1).unwrap();
        assert!(!ledger.is_turn(workers[0], turn) && ledger.is_turn(workers[0], again) && ledger.has_urgent());
        let units = assigned(&mut ledger, workers[0]);
        assert_eq!((units.len(), &units[0].work), (lost.len(), &lost[0].work));
        assert_ne!(units[0].ticket, lost[0].ticket);
        // Others do not lose theirs.
        ledger.begin_turn(workers[1], 1).unwrap();
        let others = assigned(&mut ledger, workers[1]);
        assert!(ledger.record(report(&lost[0])).accepted.is_empty());
        assert!(ledger.rejected_tickets().contains(&lost[0].ticket) && !ledger.is_certain(lost[0].ticket, false));
        for unit in units.iter().chain(&others) {
            assert_eq!(ledger.record(report(unit)).accepted.len(), 1);
        }
        // Nobody reads anymore.
        assert_eq!(ledger.readers(2), 0);
        // A request that arrives after a later one takes nothing back.
        ledger.begin_turn(workers[0], 3).unwrap();
        assert_eq!(ledger.begin_turn(workers[0], 2), None);
        assert!(matches!(ledger.assign_next(workers[0]).unwrap(), NextUnits::Finished));
        assert_eq!(ledger.rejected_tickets().len(), 1);
    }
}
