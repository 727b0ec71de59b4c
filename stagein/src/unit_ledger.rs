//! UnitLedger out units, and judging what came back.
//!
//! A range of a tar is begun wherever something looks like a header. Whether that was right shows once the range before it
//! has been read: it ends where this one must have begun, or this one is handed out again. So a range counts only after all
//! ranges before it do; nothing else waits for that.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use dayfly_meta::limits::{MESSAGE_LEN_MAX, SMALL_UNITS_MAX};
use dayfly_meta::wire::control::Counts;
use dayfly_meta::wire::peer::{TarPosition, TarRange, Unit, UnitReport, Work};

use crate::StageInError;
use crate::plan::{Cut, Ranges, UnitQueue};

/// The units of a stage-in, on their way out and back.
pub struct UnitLedger {
    queue: UnitQueue,
    again: VecDeque<Unit>,
    chains: HashMap<u32, Chain>,
    out: HashMap<u32, Out>,
    last_ticket: u32,
    rejected: HashSet<u32>,
}

/// A unit that someone reads.
struct Out {
    source: u32,
    /// Of a range: its number, and the global headers that it was begun with.
    range: Option<(usize, Vec<u8>)>,
}

/// What a worker gets.
#[derive(Debug)]
pub enum Handed {
    /// A unit, or several small ones.
    Units(Vec<Unit>),
    /// Nothing now; what is out may have to be handed out again.
    Nothing,
    /// Nothing any more: all is read.
    Done,
}

/// What reports come to.
#[derive(Debug, Default)]
pub struct Judged {
    /// What was met in what counts from now on.
    pub counts: Vec<Counts>,
    /// What was met in what does not count, for progress was told of it.
    pub undone: Vec<Counts>,
    /// Bytes that were read for it.
    pub undone_bytes: u64,
    /// Why the stage-in cannot go on.
    pub failure: Option<String>,
}

impl UnitLedger {
    /// `ranges` are those of the archives that are cut.
    pub fn new(queue: UnitQueue, ranges: Ranges) -> Self {
        let chains = ranges.into_iter().map(|(source, ranges)| (source, Chain::new(ranges))).collect();
        Self { queue, again: VecDeque::new(), chains, out: HashMap::new(), last_ticket: 0, rejected: HashSet::new() }
    }

    /// The next unit, or several small ones.
    pub fn hand_out(&mut self) -> Result<Handed, StageInError> {
        let mut units = Vec::new();
        let mut len = 0;
        // Ranges are not small: those that are begun where a header is found, and those that are read again, go alone.
        while let Some(small_len) = self.queue.next_small_len().filter(|_| self.again.is_empty()) {
            len += small_len;
            if units.len() == SMALL_UNITS_MAX || len > MESSAGE_LEN_MAX / 2 {
                break;
            }
            units.extend(self.next_unit()?);
        }
        if units.is_empty() {
            units.extend(self.next_unit()?);
        }
        match units.is_empty() {
            false => Ok(Handed::Units(units)),
            true if self.out.is_empty() => Ok(Handed::Done),
            true => Ok(Handed::Nothing),
        }
    }

    fn next_unit(&mut self) -> Result<Option<Unit>, StageInError> {
        loop {
            let unit = match self.again.pop_front() {
                Some(unit) => Some(unit),
                None => self.queue.next_unit()?,
            };
            let Some(mut unit) = unit else { return Ok(None) };
            let range = match (&unit.work, self.chains.get_mut(&unit.source)) {
                (Work::TarRange(range), Some(chain)) => {
                    if chain.position.is_none() {
                        // The archive ended before it: what lies there is no part of it.
                        continue;
                    }
                    let number = chain.cut.ranges.partition_point(|&(from, _)| from < range.from);
                    let globals = range.start.as_ref().map_or_else(Vec::new, |start| start.globals.clone());
                    Some((number, globals))
                }
                _ => None,
            };
            self.last_ticket += 1;
            unit.ticket = self.last_ticket;
            self.out.insert(unit.ticket, Out { source: unit.source, range });
            return Ok(Some(unit));
        }
    }

    /// A unit came back.
    pub fn take_back(&mut self, report: UnitReport) -> Judged {
        let mut judged = Judged::default();
        let Some(Out { source, range }) = self.out.remove(&report.ticket) else { return judged };
        if report.withdrawn {
            self.rejected.insert(report.ticket);
        }
        let (Some((number, globals)), Some(chain)) = (range, self.chains.get_mut(&source)) else {
            judged.counts.push(report.counts);
            return judged;
        };
        chain.reports.insert(number, (report, globals));
        chain.judge(&mut judged, &mut self.rejected, &mut self.again, source);
        judged
    }

    /// Whether what this ticket found will certainly count. A range counts once all before it do; any other unit from the start, unless
    /// its source may still turn out to have changed, which only `keep_going` forgives.
    pub fn is_certain(&self, ticket: u32, keep_going: bool) -> bool {
        let is_out = self.out.get(&ticket).is_some_and(|out| keep_going || out.range.is_some());
        let is_unjudged =
            || self.chains.values().flat_map(|chain| chain.reports.values()).any(|(report, _)| report.ticket == ticket);
        !is_out && !self.rejected.contains(&ticket) && !is_unjudged()
    }

    /// What was found by these does not count.
    pub fn rejected(&self) -> &HashSet<u32> {
        &self.rejected
    }
}

/// An archive's ranges, one after another.
struct Chain {
    cut: Cut,
    /// Those that came back and are not judged, with the global headers that they were begun with.
    reports: BTreeMap<usize, (UnitReport, Vec<u8>)>,
    /// The first that is not judged.
    at: usize,
    /// Where the archive's next member begins; `None` after its end.
    position: Option<TarPosition>,
}

impl Chain {
    fn new(cut: Cut) -> Self {
        Self { cut, reports: BTreeMap::new(), at: 0, position: Some(TarPosition::default()) }
    }

    fn judge(&mut self, judged: &mut Judged, rejected: &mut HashSet<u32>, again: &mut VecDeque<Unit>, source: u32) {
        while let Some(position) = self.position.clone() {
            let Some((report, globals)) = self.reports.remove(&self.at) else { return };
            let (from, to) = self.cut.ranges[self.at];
            if position.offset >= to {
                // No member of the archive begins in this range.
                reject(report, judged, rejected);
                self.at += 1;
                continue;
            }
            let range = report.range.clone().unwrap_or_default();
            if range.first == Some(position.offset) && globals == position.globals {
                judged.counts.push(report.counts);
                if range.failure.is_some() {
                    judged.failure = range.failure;
                    return;
                }
                self.position = range.next;
                self.at += 1;
                continue;
            }
            reject(report, judged, rejected);
            let (path, version) = (self.cut.path.clone(), self.cut.version);
            let range = TarRange { path, version, from, to, start: Some(position) };
            let (prefix, rivalry) = (self.cut.prefix.clone(), self.cut.rivalry);
            again.push_back(Unit { source, ticket: 0, prefix, rivalry, work: Work::TarRange(range) });
            return;
        }
        // The archive has ended: whatever lies behind is no part of it.
        std::mem::take(&mut self.reports).into_values().for_each(|(report, _)| reject(report, judged, rejected));
    }
}

fn reject(report: UnitReport, judged: &mut Judged, rejected: &mut HashSet<u32>) {
    rejected.insert(report.ticket);
    judged.undone.push(report.counts);
    judged.undone_bytes += report.source_bytes;
}
