//! A worker: reads units, cuts samples into blocks, places each, and ships them to their owners in batches.
//!
//! Memory is bounded by the sink: a worker fills buffers that the sink lends it, and when all are out it waits for one to
//! come back, so a slow owner slows its senders and grows no queue.

mod archive;
mod batch;
mod nested;
mod range;
mod read;
mod zip;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read};
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dayfly_meta::catalog::{Member, MemberKind, StoredBlock};
use dayfly_meta::checksum::{checksum, combine};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BATCH_LEN_MAX, BATCHES_IN_FLIGHT_MAX, BLOCK_SIZE_MAX, CHUNK_LEN, SAMPLE_SIZE_MAX};
use dayfly_meta::path::{display, group};
use dayfly_meta::placement::Placement;
use dayfly_meta::wire::control::{Counts, Grouping, Selection, Step};
use dayfly_meta::wire::peer::{RangeReport, Rival, Rivalry, ShippedBlock, Unit, UnitReport, Work};
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use batch::{Batch, BatchTable, BlockPiece};

use crate::StageInError;
use crate::path_conflicts::{SuspectPaths, rival};
use crate::progress::{Activity, ProgressMonitor};
use crate::runs::RunWriter;
use crate::selection::Selector;
pub use crate::source::compressed::decoder_threads::DecoderLimits;

/// The ticket of members that were taken back.
const WITHDRAWN: u32 = u32::MAX;

/// Where blocks go. All calls may wait.
pub trait Sink {
    /// Memory to gather a batch in: [`BATCH_LEN_MAX`] bytes.
    type Buffer: DerefMut<Target = [u8]>;

    /// A buffer for blocks of this owner; `None` when all that this worker may have are open or in flight.
    fn buffer(&mut self, owner: NodeId) -> Result<Option<Self::Buffer>, StageInError>;

    /// Starts to move a batch to its owner.
    fn ship(&mut self, owner: NodeId, batch: Batch<Self::Buffer>) -> Result<(), StageInError>;

    /// Starts to move a piece of a block for which room was taken.
    fn ship_piece(&mut self, owner: NodeId, piece: BlockPiece<Self::Buffer>) -> Result<(), StageInError>;

    /// Batches and pieces under way.
    fn in_flight(&self) -> usize;

    /// Waits for one of them to arrive. A batch for which its owner had no room comes back.
    fn next_delivery(&mut self) -> Result<Delivery<Self::Buffer>, StageInError>;

    /// Asks the owner for room for a block that will come in pieces; its number there, if there is room.
    fn reserve(&mut self, owner: NodeId, block_len: u64, rival: Rival) -> Result<Option<u32>, StageInError>;
}

/// What became of a batch.
pub enum Delivery<B> {
    /// Its owner has it. The first block's number there, and the others' follow.
    Stored(u32, BatchTable),
    /// A piece has arrived.
    Piece,
    /// Its owner is full; nothing of it is stored.
    Full(NodeId, Batch<B>),
}

/// How a worker does its work.
pub struct WorkerConfig<'a> {
    /// Who owns what.
    pub placement: Arc<Placement>,
    /// What to take.
    pub selection: &'a Selection,
    /// Seed of the order in which blocks are stored.
    pub seed: u64,
    /// For compressed sources.
    pub decoders: DecoderLimits,
    /// What the coordinator wants to know of what is found.
    pub suspect_paths: Arc<SuspectPaths>,
}

/// Reads units and ships what is in them.
pub struct Worker<S: Sink> {
    sink: S,
    placement: Arc<Placement>,
    full: Vec<NodeId>,
    open: BTreeMap<NodeId, Batch<S::Buffer>>,
    /// Members whose blocks are not all stored yet; batches name them by their index here.
    members: Vec<Member>,
    members_len: usize,
    runs: RunWriter,
    selector: Selector,
    selection: Selection,
    seed: u64,
    decoders: DecoderLimits,
    monitor: Arc<ProgressMonitor>,
    activity: Activity,
    counts: Counts,
    ticket: u32,
    rivalry: Rivalry,
    suspect_paths: Arc<SuspectPaths>,
    /// Up to which of its generations they were answered; `None` if something was passed over.
    checked_generation: Option<u64>,
    /// Whether members of the present unit may yet turn out to be none: then nothing is said of them before it ends.
    is_uncertain: bool,
    /// Source bytes read for the present unit, and how long its thread waited for them.
    source_bytes: u64,
    reading: Duration,
    shipping: Duration,
    /// Whether members of the present unit are in the runs already.
    has_flushed: bool,
    /// Whether what the present unit gives must not count.
    withdrawn: bool,
    /// Batches that came back, to be placed anew.
    returned: VecDeque<Batch<Box<[u8]>>>,
}

impl<S: Sink> Worker<S> {
    /// A worker of one stage-in.
    pub fn new(sink: S, runs: RunWriter, config: WorkerConfig<'_>, monitor: Arc<ProgressMonitor>) -> Result<Self, StageInError> {
        Ok(Self {
            sink,
            placement: config.placement,
            full: Vec::new(),
            open: BTreeMap::new(),
            members: Vec::new(),
            members_len: 0,
            runs,
            selector: Selector::new(config.selection)?,
            selection: config.selection.clone(),
            // Another than the placement's, or what a node owns would be stored in the order of the ring.
            seed: config.seed ^ 0x5eed_0f0f_da1f_1700,
            decoders: config.decoders,
            activity: monitor.new_activity(),
            monitor,
            counts: Counts::default(),
            ticket: 0,
            rivalry: Rivalry::default(),
            suspect_paths: config.suspect_paths,
            checked_generation: Some(0),
            is_uncertain: false,
            source_bytes: 0,
            reading: Duration::ZERO,
            shipping: Duration::ZERO,
            has_flushed: false,
            withdrawn: false,
            returned: VecDeque::new(),
        })
    }

    /// Reads a unit, or several small ones; when this returns, all of their blocks are with their owners.
    pub fn run(&mut self, units: &[Unit]) -> Result<Vec<UnitReport>, StageInError> {
        let start = Instant::now();
        (self.reading, self.shipping) = (Duration::ZERO, Duration::ZERO);
        let mut reports: Vec<UnitReport> = Vec::with_capacity(units.len());
        for unit in units {
            (self.counts, self.ticket, self.source_bytes) = (Counts::default(), unit.ticket, 0);
            (self.has_flushed, self.withdrawn, self.rivalry) = (false, false, unit.rivalry);
            self.activity.begin(Step::Reading, unit.work.path());
            let is_guess = matches!(&unit.work, Work::TarRange(range) if range.start.is_none());
            self.is_uncertain = self.selection.keep_going || is_guess;
            let range = self.read_unit(unit)?;
            let (mut counts, source_bytes, withdrawn) = (std::mem::take(&mut self.counts), self.source_bytes, self.withdrawn);
            // Of several, none can be begun at a wrong place; their remarks together must fit a message.
            if let Some(first) = reports.first_mut() {
                first.counts.add(std::mem::take(&mut counts));
            }
            reports.push(UnitReport { ticket: unit.ticket, source_bytes, range, counts, withdrawn });
        }
        self.flush()?;
        self.is_uncertain = false;
        self.check_suspect_paths()?;
        self.activity.end();
        self.monitor.add_busy_time(Step::Shipping, self.shipping);
        self.monitor.add_busy_time(Step::Placing, start.elapsed().saturating_sub(self.reading + self.shipping));
        Ok(reports)
    }

    /// What all units gave, in sorted runs.
    pub fn finish(self) -> Result<RunWriter, StageInError> {
        Ok(self.runs)
    }

    /// Looks for what was asked since the last look, in all that was found before.
    pub fn check_suspect_paths(&mut self) -> Result<(), StageInError> {
        let generation = self.suspect_paths.generation();
        if self.checked_generation == Some(generation) {
            return Ok(());
        }
        self.checked_generation = if self.is_uncertain { None } else { Some(generation) };
        let uncertain = self.is_uncertain.then_some(self.ticket);
        let mut look_at = |member: &Member| {
            if member.ticket != WITHDRAWN && Some(member.ticket) != uncertain {
                self.suspect_paths.check(member);
            }
        };
        self.members.iter().for_each(&mut look_at);
        self.runs.each(&mut look_at).map_err(StageInError::TempFile)
    }

    fn note(&mut self, text: &str) {
        self.counts.note(text);
    }

    /// Whether a failure can be left at that: with `--keep-going`, if it is about a source.
    fn forgive(&mut self, error: StageInError) -> Result<(), StageInError> {
        if self.monitor.is_cancelled() {
            return Err(StageInError::Cancelled);
        }
        if !self.selection.keep_going || !error.is_of_source() {
            return Err(error);
        }
        self.counts.skip(&error.skip_note());
        Ok(())
    }

    /// Takes a member that has no data.
    fn take_member(&mut self, member: Member) -> Result<(), StageInError> {
        self.counts.hard_links += u64::from(matches!(member.kind, MemberKind::HardLink(_)));
        self.members_len += member.memory_len();
        self.members.push(member);
        self.monitor.advance();
        self.flush_if_many()
    }

    fn flush_if_many(&mut self) -> Result<(), StageInError> {
        if self.members_len < self.runs.len_max() / 4 {
            return Ok(());
        }
        self.has_flushed = true;
        self.flush()
    }

    /// Takes a file and reads its `size` bytes. `failed` says what a failed read means; then it is as if it had not been there.
    fn take_file(
        &mut self,
        mut member: Member,
        size: u64,
        data: &mut dyn Read,
        failed: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        if size > SAMPLE_SIZE_MAX {
            return Err(StageInError::TooLarge { sample: display(&member.path), size });
        }
        let parts = size.div_ceil(BLOCK_SIZE_MAX);
        let unknown = StoredBlock { owner: NodeId(0), arrival: 0 };
        member.kind = MemberKind::File { size, blocks: vec![unknown; parts as usize], checksums: Vec::new() };
        let index = self.members.len();
        self.members_len += member.memory_len();
        self.members.push(member);
        for part in 0..parts as u32 {
            let block_len = (size - u64::from(part) * BLOCK_SIZE_MAX).min(BLOCK_SIZE_MAX);
            let taken = if block_len <= BATCH_LEN_MAX as u64 {
                self.take_small_block(index, part, block_len as usize, data, failed)
            } else {
                self.take_large_block(index, part, block_len, data, failed)
            };
            if taken.is_err() {
                // No batch names it: the block that failed is in none, and those before it went in pieces.
                self.members.truncate(index);
            }
            taken?;
        }
        self.place_returned()?;
        self.counts.files += 1;
        self.counts.bytes += size;
        self.monitor.count_file(size);
        if self.suspect_paths.generation() == 0 {
            return Ok(());
        }
        if self.is_uncertain {
            self.checked_generation = None;
            return Ok(());
        }
        self.members.get(index).into_iter().for_each(|member| self.suspect_paths.check(member));
        self.check_suspect_paths()
    }

    /// Takes back the file that was taken last: its bytes are not what they should be.
    fn withdraw_last(&mut self) {
        if let Some(member) = self.members.last_mut() {
            member.ticket = WITHDRAWN;
            self.counts.files = self.counts.files.saturating_sub(1);
        }
    }

    fn take_small_block(
        &mut self,
        index: usize,
        part: u32,
        len: usize,
        data: &mut dyn Read,
        failed: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        let owner = self.owner(index, part)?;
        let checksum = self.append(owner, (index, part), len, &mut |space| {
            data.read_exact(space).map_err(failed)?;
            Ok(checksum(space))
        })?;
        self.add_checksum(index, checksum);
        Ok(())
    }

    fn take_large_block(
        &mut self,
        index: usize,
        part: u32,
        block_len: u64,
        data: &mut dyn Read,
        failed: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        let (owner, arrival) = loop {
            let owner = self.owner(index, part)?;
            let rival = self.rival(index, part);
            let reserved = self.storing(|sink| sink.reserve(owner, block_len, rival));
            if let Some(arrival) = reserved? {
                break (owner, arrival);
            }
            self.mark_full(owner);
        };
        let mut chunk = 0;
        let mut offset = 0;
        while offset < block_len {
            let len = (block_len - offset).min(BATCH_LEN_MAX as u64) as usize;
            let mut buffer = self.take_buffer(owner)?;
            let space = &mut buffer[..len];
            data.read_exact(space).map_err(failed)?;
            let checksum = checksum(space);
            let is_first = offset.is_multiple_of(CHUNK_LEN);
            chunk = if is_first { checksum } else { combine(chunk, checksum, len as u64) };
            self.make_way()?;
            self.sink.ship_piece(owner, BlockPiece { buffer, len, arrival, offset, checksum })?;
            offset += len as u64;
            if offset.is_multiple_of(CHUNK_LEN) || offset == block_len {
                self.add_checksum(index, chunk);
            }
        }
        self.set_block(index, part, StoredBlock { owner, arrival });
        Ok(())
    }

    fn owner(&self, index: usize, part: u32) -> Result<NodeId, StageInError> {
        let path = &self.members[index].path;
        let owner = self.placement.owner(self.group(path), part);
        owner.ok_or_else(|| StageInError::NoRoom { sample: display(path) })
    }

    /// What the owner of a block compares: of a sample, its first block stands for all.
    fn rival(&self, index: usize, part: u32) -> Rival {
        if part > 0 { Rival::default() } else { rival(&self.members[index].path, self.rivalry) }
    }

    /// What a path is placed and shuffled by.
    fn group<'a>(&self, path: &'a [u8]) -> &'a [u8] {
        match self.selection.group {
            Grouping::None => path,
            Grouping::Stem => group(path),
        }
    }

    fn set_block(&mut self, index: usize, part: u32, block: StoredBlock) {
        if let Some(MemberKind::File { blocks, .. }) = self.members.get_mut(index).map(|member| &mut member.kind)
            && let Some(place) = blocks.get_mut(part as usize)
        {
            *place = block;
        }
    }

    /// Notes the checksum of a member's next chunk.
    fn add_checksum(&mut self, index: usize, checksum: u32) {
        if let Some(MemberKind::File { checksums, .. }) = self.members.get_mut(index).map(|member| &mut member.kind) {
            checksums.push(checksum);
            self.members_len += size_of::<u32>();
        }
    }

    /// Puts a small block into its owner's open batch; `fill` writes its bytes and returns their checksum as they were read
    /// from the source. Returns the same.
    fn append(
        &mut self,
        owner: NodeId,
        (index, part): (usize, u32),
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<u32, StageInError>,
    ) -> Result<u32, StageInError> {
        let has_room = |batch: &Batch<S::Buffer>| batch.len() + len <= BATCH_LEN_MAX && batch.blocks().len() < BATCH_BLOCKS_MAX;
        let mut batch = match self.open.remove(&owner) {
            Some(batch) if has_room(&batch) => batch,
            other => {
                if let Some(batch) = other {
                    self.ship(owner, batch)?;
                }
                Batch::new(self.take_buffer(owner)?)
            }
        };
        let filled = fill(batch.space(len));
        if let Ok(checksum) = filled {
            let shuffle = xxh3_64_with_seed(self.group(&self.members[index].path), self.seed ^ u64::from(part));
            let rival = self.rival(index, part);
            batch.push((index, part), ShippedBlock { len: len as u32, checksum, shuffle, rival });
            self.set_block(index, part, StoredBlock { owner, arrival: 0 });
        }
        // While a buffer was waited for, a batch that came back may have opened another one for this owner.
        if let Some(other) = self.open.insert(owner, batch) {
            self.ship(owner, other)?;
        }
        filled
    }

    fn take_buffer(&mut self, owner: NodeId) -> Result<S::Buffer, StageInError> {
        loop {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            let start = Instant::now();
            let buffer = self.storing(|sink| sink.buffer(owner));
            self.shipping += start.elapsed();
            if let Some(buffer) = buffer? {
                return Ok(buffer);
            }
            if self.sink.in_flight() > 0 {
                self.settle()?;
            } else if let Some(owner) = self.open.iter().max_by_key(|(_, batch)| batch.len()).map(|(&owner, _)| owner)
                && let Some(batch) = self.open.remove(&owner)
            {
                self.ship(owner, batch)?;
            } else {
                return Err(StageInError::Ship { node: owner, cause: "there is no memory for a batch".into() });
            }
        }
    }

    fn ship(&mut self, owner: NodeId, batch: Batch<S::Buffer>) -> Result<(), StageInError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.make_way()?;
        self.sink.ship(owner, batch)
    }

    /// Calls the sink, which may wait.
    fn storing<T>(&mut self, call: impl FnOnce(&mut S) -> T) -> T {
        self.activity.switch_to(Step::Shipping);
        let result = call(&mut self.sink);
        self.activity.switch_to(Step::Reading);
        result
    }

    fn make_way(&mut self) -> Result<(), StageInError> {
        while self.sink.in_flight() >= BATCHES_IN_FLIGHT_MAX {
            self.settle()?;
        }
        Ok(())
    }

    /// Waits for a batch to arrive; one that its owner had no room for goes to the next on the ring, block by block.
    fn settle(&mut self) -> Result<(), StageInError> {
        if self.monitor.is_cancelled() {
            return Err(StageInError::Cancelled);
        }
        let start = Instant::now();
        let settled = self.storing(S::next_delivery);
        self.shipping += start.elapsed();
        let (node, batch) = match settled? {
            Delivery::Piece => return Ok(()),
            Delivery::Stored(first, table) => {
                for (&(index, part), arrival) in table.members.iter().zip(first..) {
                    if let Some(MemberKind::File { blocks, .. }) = self.members.get_mut(index).map(|member| &mut member.kind)
                        && let Some(block) = blocks.get_mut(part as usize)
                    {
                        block.arrival = arrival;
                    }
                }
                return Ok(());
            }
            Delivery::Full(node, batch) => (node, batch),
        };
        self.mark_full(node);
        // Its memory is needed to ship it again, so it waits elsewhere.
        self.returned.push_back(batch.to_owned());
        Ok(())
    }

    /// Gives blocks whose owner was full to the next on the ring.
    fn place_returned(&mut self) -> Result<(), StageInError> {
        while let Some(batch) = self.returned.pop_front() {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            for ((index, part), block, bytes) in batch.iter() {
                let owner = self.owner(index, part)?;
                self.append(owner, (index, part), bytes.len(), &mut |space| {
                    space.copy_from_slice(bytes);
                    // Taken when they were read: if they have changed since, their next owner notices.
                    Ok(block.checksum)
                })?;
            }
        }
        Ok(())
    }

    fn mark_full(&mut self, node: NodeId) {
        if !self.full.contains(&node) {
            self.full.push(node);
            self.placement = Arc::new(self.placement.without(&[node]));
        }
    }

    /// Ships what is open, waits until all is stored, and puts the members into the runs.
    fn flush(&mut self) -> Result<(), StageInError> {
        while !self.open.is_empty() || self.sink.in_flight() > 0 || !self.returned.is_empty() {
            self.place_returned()?;
            match self.open.pop_first() {
                Some((owner, batch)) => self.ship(owner, batch)?,
                None if self.sink.in_flight() > 0 => self.settle()?,
                None => {}
            }
        }
        self.members_len = 0;
        for member in std::mem::take(&mut self.members).into_iter().filter(|member| member.ticket != WITHDRAWN) {
            self.runs.push(member).map_err(StageInError::TempFile)?;
        }
        Ok(())
    }

    /// Forgets the present unit's members, as far as they are not in the runs. Their blocks stay unnamed.
    fn discard(&mut self) -> Result<(), StageInError> {
        self.open.clear();
        self.returned.clear();
        while self.sink.in_flight() > 0 {
            self.sink.next_delivery()?;
        }
        self.members.clear();
        (self.members_len, self.counts) = (0, Counts::default());
        Ok(())
    }
}

#[cfg(test)]
mod tests;
