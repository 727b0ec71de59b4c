//! A worker's pipeline: it reads units, cuts samples into blocks, places each block on a node, and
//! ships blocks to their owners in batches.
//!
//! A [`Worker`] runs on a thread of its own, and its calls block that thread. It works on one unit
//! at a time:
//!
//! - The files below `pipeline/` read the different kinds of sources: ranges of plain tars
//!   (`range`), the members of any tar (`archive`), parts of zips (`zip`), archives within archives
//!   (`nested`), and files of directory trees (`read`).
//! - Each sample goes through `shipping`: the sample's path decides the owner of every block, and
//!   the block's bytes are read straight into the open batch for its owner. Full batches go to
//!   the [`Sink`]. If not all samples fit, `unstored` reads some blocks only for their checksums.
//! - Once all of a member's blocks are stored, the member goes to a sorted run ([`crate::runs`]),
//!   with the numbers that the owners gave to the blocks.
//!
//! The sink bounds the worker's memory: the worker fills buffers that the sink lends it, and waits
//! when none is left. A slow owner therefore slows its senders down, and no queue grows.
//!
//! If a read fails, the sample is treated as if it had never existed. Its blocks may already be stored,
//! but no member names them.

mod absent;
mod archive;
mod batch;
mod nested;
mod range;
mod read;
mod shipping;
mod sink;
mod unstored;
mod zip;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dayfly_meta::catalog::{Member, MemberKind};
use dayfly_meta::id::NodeId;
use dayfly_meta::placement::{NodeSet, Placement};
use dayfly_meta::stored_share::StoredShare;
use dayfly_meta::wire::control::{Counts, Selection, Step};
use dayfly_meta::wire::peer::{Rivalry, Unit, UnitReport, Work};

pub use batch::{Batch, BatchTable, BlockPiece};
pub use sink::{Delivery, Reserved, Sink};

use crate::StageInError;
use crate::path_conflicts::SuspectPaths;
use crate::progress::{Activity, ProgressMonitor};
use crate::runs::RunWriter;
use crate::selection::Selector;
pub use crate::source::compressed::decoder_threads::DecoderLimits;

/// The ticket of a member that was withdrawn before it got into a run. The ledger never assigns
/// this ticket.
const WITHDRAWN: u32 = u32::MAX;

/// The facts that a worker needs about its stage-in.
pub struct WorkerConfig<'a> {
    /// Decides which node owns a block.
    pub placement: Arc<Placement>,
    /// Which members to take, and under which names.
    pub selection: &'a Selection,
    /// Seed of the placement.
    pub seed: u64,
    /// Threads and memory for decoding compressed sources.
    pub decoders: DecoderLimits,
    /// Paths that the coordinator suspects of a conflict; shared by all workers of a node.
    pub suspect_paths: Arc<SuspectPaths>,
    /// Which of the blocks that can be read again from their origins are stored; `None` if every block must be stored.
    pub stored_share: Option<StoredShare>,
}

/// Reads units and ships the samples in them.
pub struct Worker<S: Sink> {
    sink: S,
    placement: Arc<Placement>,
    /// Nodes that had no room for a block. This worker gives their blocks to the next candidates.
    full: NodeSet,
    /// Nodes that did not answer. They are in `full`, too.
    absent: NodeSet,
    /// Batches that are being filled, at most one per owner.
    open: BTreeMap<NodeId, Batch<S::Buffer>>,
    /// Members that are not in a run yet. Batches refer to them by index.
    members: Vec<Member>,
    /// Memory used by `members`, in bytes.
    members_len: usize,
    runs: RunWriter,
    selector: Selector,
    selection: Selection,
    seed: u64,
    shuffle_seed: u64,
    decoders: DecoderLimits,
    monitor: Arc<ProgressMonitor>,
    activity: Activity,
    unit: CurrentUnit,
    suspect_paths: Arc<SuspectPaths>,
    stored_share: Option<StoredShare>,
    /// All members found so far were compared with this generation of `suspect_paths`. `None` if the
    /// check skipped members of an uncertain unit.
    checked_generation: Option<u64>,
    /// How long this thread has waited for source bytes in the current call of [`Self::run`].
    reading: Duration,
    /// How long this thread has waited for the sink in the current call of [`Self::run`].
    shipping: Duration,
    /// Copies of batches for which the owners had no room. The copies are outside the sink's
    /// memory, and the blocks in them need new owners.
    returned: VecDeque<Batch<Box<[u8]>>>,
    /// Memory for a chunk that is read only for its checksum, once there has been one.
    unstored: Vec<u8>,
}

/// The state of the unit that a worker is currently reading.
#[derive(Default)]
struct CurrentUnit {
    ticket: u32,
    rivalry: Rivalry,
    counts: Counts,
    /// Source bytes that have been read for the unit so far.
    source_bytes: u64,
    /// Whether the unit's members may still be rejected or withdrawn. Until the unit ends, they
    /// must not be reported as sightings of suspect paths.
    is_uncertain: bool,
    /// Whether samples can be read again from the unit's source, one by one.
    is_readable_again: bool,
    /// Whether some of the unit's members are already in a run and can no longer be discarded.
    has_flushed: bool,
    /// Whether the unit's source changed, so that the catalog must contain none of the unit's
    /// members.
    withdrawn: bool,
}

impl<S: Sink> Worker<S> {
    /// Creates a worker for one stage-in.
    ///
    /// # Errors
    ///
    /// [`StageInError::InvalidPattern`] if a pattern of the selection does not parse.
    pub fn new(sink: S, runs: RunWriter, config: WorkerConfig<'_>, monitor: Arc<ProgressMonitor>) -> Result<Self, StageInError> {
        Ok(Self {
            sink,
            placement: config.placement,
            full: NodeSet::new(),
            absent: NodeSet::new(),
            open: BTreeMap::new(),
            members: Vec::new(),
            members_len: 0,
            runs,
            selector: Selector::new(config.selection)?,
            selection: config.selection.clone(),
            // The placement hashes paths with `config.seed`. With the same seed here, each node
            // would store its blocks in the order of the hashes that placed them there.
            shuffle_seed: config.seed ^ 0x5eed_0f0f_da1f_1700,
            seed: config.seed,
            decoders: config.decoders,
            activity: monitor.new_activity(),
            monitor,
            unit: CurrentUnit::default(),
            suspect_paths: config.suspect_paths,
            stored_share: config.stored_share,
            checked_generation: Some(0),
            reading: Duration::ZERO,
            shipping: Duration::ZERO,
            returned: VecDeque::new(),
            unstored: Vec::new(),
        })
    }

    /// Reads one unit or several small ones. When this returns, the owners have stored all blocks
    /// of these units.
    ///
    /// # Errors
    ///
    /// Any error fails the stage-in. With `--keep-going`, errors that concern only one source are
    /// counted in the reports instead.
    pub fn run(&mut self, units: &[Unit]) -> Result<Vec<UnitReport>, StageInError> {
        let start = Instant::now();
        (self.reading, self.shipping) = (Duration::ZERO, Duration::ZERO);
        let mut reports: Vec<UnitReport> = Vec::with_capacity(units.len());
        for unit in units {
            self.activity.begin(Step::Reading, unit.work.path());
            let starts_at_a_guess = matches!(&unit.work, Work::TarRange(range) if range.start.is_none());
            let is_uncertain = self.selection.keep_going || starts_at_a_guess;
            let (ticket, rivalry) = (unit.ticket, unit.rivalry);
            // Only compressed tars are read by this kind of work.
            let is_readable_again = !matches!(unit.work, Work::Tar { .. });
            self.unit = CurrentUnit { ticket, rivalry, is_uncertain, is_readable_again, ..CurrentUnit::default() };
            let range = self.read_unit(unit)?;
            let CurrentUnit { source_bytes, withdrawn, .. } = self.unit;
            let mut counts = std::mem::take(&mut self.unit.counts);
            // The notes of all units together must fit in one message, so the first report carries
            // the counts and notes of all units. Counts that may be rejected are not mixed with
            // others, because a range is always assigned alone.
            if let Some(first) = reports.first_mut() {
                first.counts.add(std::mem::take(&mut counts));
            }
            reports.push(UnitReport { ticket: unit.ticket, source_bytes, range, counts, withdrawn });
        }
        self.flush()?;
        self.unit.is_uncertain = false;
        self.check_suspect_paths()?;
        self.activity.end();
        self.monitor.add_busy_time(Step::Shipping, self.shipping);
        self.monitor.add_busy_time(Step::Placing, start.elapsed().saturating_sub(self.reading + self.shipping));
        Ok(reports)
    }

    /// Ends the worker and returns all members that it found.
    ///
    /// # Errors
    ///
    /// Currently none.
    pub fn finish(self) -> Result<RunWriter, StageInError> {
        Ok(self.runs)
    }

    /// Looks for suspect paths among all members found so far, if the suspects have changed since
    /// the last check.
    ///
    /// # Errors
    ///
    /// [`StageInError::TempFile`] if a run cannot be read back.
    pub fn check_suspect_paths(&mut self) -> Result<(), StageInError> {
        let generation = self.suspect_paths.generation();
        if self.checked_generation == Some(generation) {
            return Ok(());
        }
        self.checked_generation = if self.unit.is_uncertain { None } else { Some(generation) };
        let uncertain_ticket = self.unit.is_uncertain.then_some(self.unit.ticket);
        let mut check = |member: &Member| {
            if member.ticket != WITHDRAWN && Some(member.ticket) != uncertain_ticket {
                self.suspect_paths.check(member);
            }
        };
        self.members.iter().for_each(&mut check);
        self.runs.for_each(&mut check).map_err(StageInError::TempFile)
    }

    /// With `--keep-going`, counts an error that concerns only one source or member, and adds a
    /// note about it. Returns every other error.
    fn skip_or_fail(&mut self, error: StageInError) -> Result<(), StageInError> {
        if self.monitor.is_cancelled() {
            return Err(StageInError::Cancelled);
        }
        if !self.selection.keep_going || !error.is_of_source() {
            return Err(error);
        }
        self.unit.counts.skip(&error.skip_note());
        Ok(())
    }

    /// Takes a member without data: a directory, symlink or hard link.
    fn take_member(&mut self, member: Member) -> Result<(), StageInError> {
        self.unit.counts.hard_links += u64::from(matches!(member.kind, MemberKind::HardLink(_)));
        self.members_len += member.memory_len();
        self.members.push(member);
        self.monitor.advance();
        self.flush_if_many()
    }

    /// Withdraws the file that was taken last, because its source turned out to have changed or to
    /// have a different size.
    fn withdraw_last(&mut self) {
        if let Some(member) = self.members.last_mut() {
            member.ticket = WITHDRAWN;
            self.unit.counts.files = self.unit.counts.files.saturating_sub(1);
        }
    }

    /// Moves the members to the runs once they take a quarter of a run's memory.
    fn flush_if_many(&mut self) -> Result<(), StageInError> {
        if self.members_len < self.runs.len_max() / 4 {
            return Ok(());
        }
        self.unit.has_flushed = true;
        self.flush()
    }

    /// Ships all open batches, waits until everything is stored, and moves the members to the runs.
    fn flush(&mut self) -> Result<(), StageInError> {
        while !self.open.is_empty() || self.sink.in_flight() > 0 || !self.returned.is_empty() {
            self.place_returned()?;
            match self.open.pop_first() {
                Some((owner, batch)) => self.ship(owner, batch)?,
                None if self.sink.in_flight() > 0 => self.await_delivery()?,
                None => {}
            }
        }
        self.members_len = 0;
        for member in std::mem::take(&mut self.members).into_iter().filter(|member| member.ticket != WITHDRAWN) {
            self.runs.push(member).map_err(StageInError::TempFile)?;
        }
        Ok(())
    }

    /// Forgets the members of the current unit that are not in a run yet. No member then names
    /// their blocks.
    fn discard(&mut self) -> Result<(), StageInError> {
        self.open.clear();
        self.returned.clear();
        while self.sink.in_flight() > 0 {
            self.sink.next_delivery()?;
        }
        self.members.clear();
        (self.members_len, self.unit.counts) = (0, Counts::default());
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
