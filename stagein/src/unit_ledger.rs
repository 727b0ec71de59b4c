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
//! The ledger is a plain state machine without locks, clocks or I/O, apart from reading units back
//! from the queue's temporary file. The coordinator holds it in a mutex.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

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
    assigned: HashMap<u32, Assignment>,
    last_ticket: u32,
    rejected: HashSet<u32>,
}

/// A unit that a worker is reading.
struct Assignment {
    source: u32,
    /// Only for a range of a tar: its index, and the global headers that its worker started with.
    range: Option<(usize, Vec<u8>)>,
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
    /// The [`Counts`] of the newly accepted units.
    pub accepted: Vec<Counts>,
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
            assigned: HashMap::new(),
            last_ticket: 0,
            rejected: HashSet::new(),
        }
    }

    /// Assigns the next unit, or several small ones.
    ///
    /// # Errors
    ///
    /// [`StageInError::TempFile`] if a unit cannot be read back from the plan's temporary file.
    pub fn assign_next(&mut self) -> Result<NextUnits, StageInError> {
        let mut units = Vec::new();
        let mut len = 0;
        // Ranges count as large, so ranges and retries are always assigned alone.
        while let Some(small_len) = self.waiting.next_small_len().filter(|_| self.retries.is_empty()) {
            len += small_len;
            if units.len() == SMALL_UNITS_MAX || len > MESSAGE_LEN_MAX / 2 {
                break;
            }
            units.extend(self.assign_one()?);
        }
        if units.is_empty() {
            units.extend(self.assign_one()?);
        }
        match units.is_empty() {
            false => Ok(NextUnits::Assigned(units)),
            true if self.assigned.is_empty() => Ok(NextUnits::Finished),
            true => Ok(NextUnits::NoneYet),
        }
    }

    fn assign_one(&mut self) -> Result<Option<Unit>, StageInError> {
        loop {
            let unit = match self.retries.pop_front() {
                Some(unit) => Some(unit),
                None => self.waiting.next_unit()?,
            };
            let Some(mut unit) = unit else { return Ok(None) };
            let range = match (&unit.work, self.chains.get_mut(&unit.source)) {
                (Work::TarRange(range), Some(chain)) => {
                    if chain.position.is_none() {
                        // The archive ended in an earlier range; the bytes here are not part of it.
                        continue;
                    }
                    let index = chain.tar.ranges.partition_point(|&(from, _)| from < range.from);
                    let globals = range.start.as_ref().map_or_else(Vec::new, |start| start.globals.clone());
                    Some((index, globals))
                }
                _ => None,
            };
            self.last_ticket += 1;
            unit.ticket = self.last_ticket;
            self.assigned.insert(unit.ticket, Assignment { source: unit.source, range });
            return Ok(Some(unit));
        }
    }

    /// Records the report of a finished unit. A report for an unknown ticket is ignored.
    pub fn record(&mut self, report: UnitReport) -> Verdict {
        let mut verdict = Verdict::default();
        let Some(Assignment { source, range }) = self.assigned.remove(&report.ticket) else { return verdict };
        if report.withdrawn {
            self.rejected.insert(report.ticket);
        }
        let (Some((index, globals)), Some(chain)) = (range, self.chains.get_mut(&source)) else {
            verdict.accepted.push(report.counts);
            return verdict;
        };
        chain.reports.insert(index, (report, globals));
        if let Some(retry) = chain.judge(&mut verdict, &mut self.rejected) {
            self.retries.push_back(retry);
        }
        verdict
    }

    /// Returns whether the result of this ticket is certain to count. A range is certain once all
    /// ranges before it count. Any other unit is certain as soon as it is assigned, except with
    /// `keep_going`: in that case the worker may still withdraw the unit because the source
    /// changed. Without `keep_going`, a changed source fails the stage-in.
    pub fn is_certain(&self, ticket: u32, keep_going: bool) -> bool {
        let may_be_rejected = self.assigned.get(&ticket).is_some_and(|assigned| keep_going || assigned.range.is_some());
        let awaits_verdict =
            || self.chains.values().flat_map(|chain| chain.reports.values()).any(|(report, _)| report.ticket == ticket);
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
    /// Reports that wait for the report of an earlier range, each with the global headers that its
    /// worker started with. The key is the index of the range.
    reports: BTreeMap<usize, (UnitReport, Vec<u8>)>,
    /// Index of the first range without a verdict.
    next: usize,
    /// Where the archive's next member starts; `None` after the archive's end.
    position: Option<TarPosition>,
}

impl RangeChain {
    fn new(tar: SplitTar) -> Self {
        Self { tar, reports: BTreeMap::new(), next: 0, position: Some(TarPosition::default()) }
    }

    /// Judges reports in order, up to the first one that is still missing. Returns the next range,
    /// with its true start, if its report had to be rejected.
    fn judge(&mut self, verdict: &mut Verdict, rejected: &mut HashSet<u32>) -> Option<Unit> {
        while let Some(position) = self.position.clone() {
            let (report, globals) = self.reports.remove(&self.next)?;
            let (from, to) = self.tar.ranges[self.next];
            if position.offset >= to {
                // A member of an earlier range reaches past the end of this range, so no member starts here.
                reject(report, verdict, rejected);
                self.next += 1;
                continue;
            }
            let range = report.range.clone().unwrap_or_default();
            if range.first == Some(position.offset) && globals == position.globals {
                verdict.accepted.push(report.counts);
                if range.failure.is_some() {
                    verdict.failure = range.failure;
                    return None;
                }
                self.position = range.next;
                self.next += 1;
                continue;
            }
            reject(report, verdict, rejected);
            let (path, version) = (self.tar.path.clone(), self.tar.version);
            let range = TarRange { path, version, from, to, start: Some(position) };
            let (source, prefix, rivalry) = (self.tar.source, self.tar.prefix.clone(), self.tar.rivalry);
            return Some(Unit { source, ticket: 0, prefix, rivalry, work: Work::TarRange(range) });
        }
        // The archive has ended; the bytes after its end are not part of it.
        std::mem::take(&mut self.reports).into_values().for_each(|(report, _)| reject(report, verdict, rejected));
        None
    }
}

fn reject(report: UnitReport, verdict: &mut Verdict, rejected: &mut HashSet<u32>) {
    rejected.insert(report.ticket);
    verdict.rejected.push(report.counts);
    verdict.rejected_bytes += report.source_bytes;
}
