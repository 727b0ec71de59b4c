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
//! all of that node's units again, finished ones too.
//!
//! The ledger is a plain state machine without locks, clocks or I/O, apart from reading units back
//! from the queue's temporary file. The coordinator holds it in a mutex.

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
    /// What each node has finished, by node. Ranges that have no verdict yet are not included.
    finished: HashMap<NodeId, Vec<Finished>>,
    /// Units of lost nodes. They are assigned before those that wait.
    redone: VecDeque<Finished>,
    last_ticket: u32,
    rejected: HashSet<u32>,
}

/// A unit that a worker is reading.
struct Assignment {
    node: NodeId,
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
            finished: HashMap::new(),
            redone: VecDeque::new(),
            last_ticket: 0,
            rejected: HashSet::new(),
        }
    }

    /// Returns the number of all units, whatever their state.
    pub fn units(&self) -> usize {
        self.waiting.len()
    }

    /// Assigns the next unit, or several small ones, to a worker of `node`.
    ///
    /// # Errors
    ///
    /// [`StageInError::TempFile`] if a unit cannot be read back from the plan's temporary file.
    pub fn assign_next(&mut self, node: NodeId) -> Result<NextUnits, StageInError> {
        let mut units = Vec::new();
        let mut len = 0;
        // Ranges count as large, so ranges and retries are always assigned alone.
        let is_urgent = !self.retries.is_empty() || !self.redone.is_empty();
        while let Some(small_len) = self.waiting.next_small_len().filter(|_| !is_urgent) {
            len += small_len;
            if units.len() == SMALL_UNITS_MAX || len > MESSAGE_LEN_MAX / 2 {
                break;
            }
            units.extend(self.assign_one(node)?);
        }
        if units.is_empty() {
            units.extend(self.assign_one(node)?);
        }
        match units.is_empty() {
            false => Ok(NextUnits::Assigned(units)),
            true if self.assigned.is_empty() => Ok(NextUnits::Finished),
            true => Ok(NextUnits::NoneYet),
        }
    }

    fn assign_one(&mut self, node: NodeId) -> Result<Option<Unit>, StageInError> {
        while let Some((unit, what)) = self.next_unit()? {
            let what = match (&what, &unit.work, self.chains.get(&unit.source)) {
                (Assigned::Unit(_), Work::TarRange(_), Some(chain)) if chain.position.is_none() => {
                    // The archive ended in an earlier range; the bytes here are not part of it.
                    continue;
                }
                (Assigned::Unit(_), Work::TarRange(range), Some(chain)) => chain.assigned(range),
                _ => what,
            };
            return Ok(Some(self.assign(node, unit, what)));
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

    fn assign(&mut self, node: NodeId, mut unit: Unit, what: Assigned) -> Unit {
        self.last_ticket += 1;
        unit.ticket = self.last_ticket;
        self.assigned.insert(unit.ticket, Assignment { node, source: unit.source, what });
        unit
    }

    /// Assigns all units of a lost node again: those that its workers were reading, and those that they had finished.
    pub fn lose(&mut self, node: NodeId) {
        let lost: Vec<u32> =
            self.assigned.iter().filter(|(_, assigned)| assigned.node == node).map(|(ticket, _)| *ticket).collect();
        for Assignment { source, what, .. } in lost.into_iter().filter_map(|ticket| self.assigned.remove(&ticket)) {
            match what {
                Assigned::Unit(index) => self.redone.push_back(Finished::Unit(index)),
                Assigned::RangeAgain(index, start) => self.redone.push_back(Finished::Range(source, index, start)),
                Assigned::Range(index, _) => self.retries.extend(self.chains.get(&source).map(|chain| chain.unit(index, None))),
            }
        }
        for chain in self.chains.values_mut() {
            let of_node = chain.reports.iter().filter(|(_, waiting)| waiting.node == node);
            let reported: Vec<usize> = of_node.map(|(index, _)| *index).collect();
            reported.iter().for_each(|index| drop(chain.reports.remove(index)));
            self.retries.extend(reported.into_iter().map(|index| chain.unit(index, None)));
        }
        self.redone.extend(self.finished.remove(&node).unwrap_or_default());
    }

    /// Records the report of a finished unit. A report for an unknown ticket is ignored.
    pub fn record(&mut self, report: UnitReport) -> Verdict {
        let mut verdict = Verdict::default();
        let Some(Assignment { node, source, what }) = self.assigned.remove(&report.ticket) else { return verdict };
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
