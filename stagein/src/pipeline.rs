//! A worker: reads units, cuts samples into blocks, places each, and ships them to their owners in batches.
//!
//! Memory is bounded by the sink: a worker fills buffers that the sink lends it, and when all are out it waits for one to
//! come back, so a slow owner slows its senders and grows no queue.

mod batch;
mod read;

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dayfly_meta::catalog::{Member, MemberKey, MemberKind, StoredBlock};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BATCH_LEN_MAX, BATCHES_IN_FLIGHT_MAX, BLOCK_SIZE_MAX, RUN_LEN_MAX, SAMPLE_SIZE_MAX};
use dayfly_meta::path::display;
use dayfly_meta::placement::Placement;
use dayfly_meta::wire::control::{Counts, Selection};
use dayfly_meta::wire::peer::{Counted, ShippedBlock, Unit, UnitReport};

pub use batch::Batch;

use crate::StageInError;
use crate::runs::RunWriter;
use crate::selection::Selector;

/// Where blocks go. All calls may wait.
pub trait Sink {
    /// Memory to gather a batch in: [`BATCH_LEN_MAX`] bytes.
    type Buffer: DerefMut<Target = [u8]>;

    /// A buffer; `None` when all that this worker may have are open or in flight.
    fn buffer(&mut self) -> Option<Self::Buffer>;

    /// Starts to move a batch to its owner.
    fn ship(&mut self, owner: NodeId, batch: Batch<Self::Buffer>) -> Result<(), StageInError>;

    /// Batches under way.
    fn in_flight(&self) -> usize;

    /// Waits for one batch to arrive. A batch for which its owner had no room comes back.
    fn settle(&mut self) -> Result<Settled<Self::Buffer>, StageInError>;

    /// Asks the owner for room for a block that will come in pieces.
    fn reserve(&mut self, owner: NodeId, key: MemberKey, part: u32, block_len: u64) -> Result<bool, StageInError>;
}

/// What became of a batch.
pub enum Settled<B> {
    /// Its blocks are stored.
    Stored,
    /// Its owner is full; nothing of it is stored.
    Full(NodeId, Batch<B>),
}

/// What a worker shares with those who watch it.
#[derive(Default)]
pub struct Gauge {
    source_bytes: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
    cancelled: AtomicBool,
}

impl Gauge {
    /// What was counted since the last call.
    pub fn take(&self) -> Counted {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        Counted { source_bytes: take(&self.source_bytes), files: take(&self.files), bytes: take(&self.bytes) }
    }

    /// Makes the worker end with [`StageInError::Cancelled`] at its next step.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether [`Self::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn add(counter: &AtomicU64, value: u64) {
        counter.fetch_add(value, Ordering::Relaxed);
    }
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
    gauge: Arc<Gauge>,
    counts: Counts,
}

impl<S: Sink> Worker<S> {
    /// A worker of one stage-in.
    pub fn new(
        sink: S,
        placement: Arc<Placement>,
        runs: RunWriter,
        selection: &Selection,
        gauge: Arc<Gauge>,
    ) -> Result<Self, StageInError> {
        Ok(Self {
            sink,
            placement,
            full: Vec::new(),
            open: BTreeMap::new(),
            members: Vec::new(),
            members_len: 0,
            runs,
            selector: Selector::new(selection)?,
            gauge,
            counts: Counts::default(),
        })
    }

    /// Reads a unit; when this returns, all of its blocks are stored.
    pub fn run(&mut self, unit: &Unit) -> Result<UnitReport, StageInError> {
        self.counts = Counts::default();
        self.read_unit(unit)?;
        self.flush()?;
        Ok(UnitReport { counts: std::mem::take(&mut self.counts), progress: self.gauge.take() })
    }

    /// What all units gave, in sorted runs.
    pub fn finish(self) -> Result<RunWriter, StageInError> {
        Ok(self.runs)
    }

    fn note(&mut self, text: &str) {
        self.counts.note(text);
    }

    /// Takes a member that has no data.
    fn take_member(&mut self, member: Member) -> Result<(), StageInError> {
        self.members_len += member.memory_len();
        self.members.push(member);
        if self.members_len >= RUN_LEN_MAX / 4 { self.flush() } else { Ok(()) }
    }

    /// Takes a file and reads its `size` bytes. `failed` says what a failed read means.
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
        let unknown = StoredBlock { owner: NodeId(0), checksum: 0 };
        member.kind = MemberKind::File { size, blocks: vec![unknown; parts as usize] };
        let index = self.members.len();
        self.members_len += member.memory_len();
        self.members.push(member);
        for part in 0..parts as u32 {
            let block_len = (size - u64::from(part) * BLOCK_SIZE_MAX).min(BLOCK_SIZE_MAX);
            if block_len <= BATCH_LEN_MAX as u64 {
                self.take_small_block(index, part, block_len as usize, data, failed)?;
            } else {
                self.take_large_block(index, part, block_len, data, failed)?;
            }
        }
        self.counts.files += 1;
        self.counts.bytes += size;
        Gauge::add(&self.gauge.files, 1);
        Gauge::add(&self.gauge.bytes, size);
        if self.members_len >= RUN_LEN_MAX / 4 { self.flush() } else { Ok(()) }
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
        let mut checksum = 0;
        self.append(owner, index, part, len, &mut |space| {
            data.read_exact(space).map_err(failed)?;
            checksum = crc32c::crc32c(space);
            Ok(())
        })?;
        self.set_block(index, part, StoredBlock { owner, checksum });
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
        let key = self.members[index].key;
        let owner = loop {
            let owner = self.owner(index, part)?;
            if self.sink.reserve(owner, key, part, block_len)? {
                break owner;
            }
            self.mark_full(owner);
        };
        let mut checksum = 0;
        let mut offset = 0;
        while offset < block_len {
            let len = (block_len - offset).min(BATCH_LEN_MAX as u64) as usize;
            let mut batch = Batch::new(self.take_buffer()?);
            let space = batch.space(len);
            data.read_exact(space).map_err(failed)?;
            checksum = crc32c::crc32c_append(checksum, space);
            batch.push(index, ShippedBlock { key, part, block_len, offset, len: len as u32 });
            self.ship(owner, batch)?;
            offset += len as u64;
        }
        self.set_block(index, part, StoredBlock { owner, checksum });
        Ok(())
    }

    fn owner(&self, index: usize, part: u32) -> Result<NodeId, StageInError> {
        let path = &self.members[index].path;
        self.placement.owner(path, part).ok_or_else(|| StageInError::NoRoom { sample: display(path) })
    }

    fn set_block(&mut self, index: usize, part: u32, block: StoredBlock) {
        if let Some(MemberKind::File { blocks, .. }) = self.members.get_mut(index).map(|member| &mut member.kind)
            && let Some(place) = blocks.get_mut(part as usize)
        {
            *place = block;
        }
    }

    /// Puts a small block into its owner's open batch; `fill` writes its bytes.
    fn append(
        &mut self,
        owner: NodeId,
        index: usize,
        part: u32,
        len: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), StageInError>,
    ) -> Result<(), StageInError> {
        let has_room = |batch: &Batch<S::Buffer>| batch.len() + len <= BATCH_LEN_MAX && batch.blocks().len() < BATCH_BLOCKS_MAX;
        let mut batch = match self.open.remove(&owner) {
            Some(batch) if has_room(&batch) => batch,
            other => {
                if let Some(batch) = other {
                    self.ship(owner, batch)?;
                }
                Batch::new(self.take_buffer()?)
            }
        };
        fill(batch.space(len))?;
        let key = self.members[index].key;
        batch.push(index, ShippedBlock { key, part, block_len: len as u64, offset: 0, len: len as u32 });
        // While a buffer was waited for, a batch that came back may have opened another one for this owner.
        if let Some(other) = self.open.insert(owner, batch) {
            self.ship(owner, other)?;
        }
        Ok(())
    }

    fn take_buffer(&mut self) -> Result<S::Buffer, StageInError> {
        loop {
            if self.gauge.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            if let Some(buffer) = self.sink.buffer() {
                return Ok(buffer);
            }
            if self.sink.in_flight() > 0 {
                self.settle()?;
            } else if let Some(owner) = self.open.iter().max_by_key(|(_, batch)| batch.len()).map(|(&owner, _)| owner)
                && let Some(batch) = self.open.remove(&owner)
            {
                self.ship(owner, batch)?;
            }
        }
    }

    fn ship(&mut self, owner: NodeId, batch: Batch<S::Buffer>) -> Result<(), StageInError> {
        while self.sink.in_flight() >= BATCHES_IN_FLIGHT_MAX {
            self.settle()?;
        }
        self.sink.ship(owner, batch)
    }

    /// Waits for a batch to arrive; one that its owner had no room for goes to the next on the ring, block by block.
    fn settle(&mut self) -> Result<(), StageInError> {
        if self.gauge.is_cancelled() {
            return Err(StageInError::Cancelled);
        }
        let Settled::Full(node, batch) = self.sink.settle()? else { return Ok(()) };
        self.mark_full(node);
        for (index, block, bytes) in batch.iter() {
            let owner = self.owner(index, block.part)?;
            self.append(owner, index, block.part, bytes.len(), &mut |space| {
                space.copy_from_slice(bytes);
                Ok(())
            })?;
            let checksum = crc32c::crc32c(bytes);
            self.set_block(index, block.part, StoredBlock { owner, checksum });
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
        while !self.open.is_empty() || self.sink.in_flight() > 0 {
            match self.open.pop_first() {
                Some((owner, batch)) => self.ship(owner, batch)?,
                None => self.settle()?,
            }
        }
        self.members_len = 0;
        for member in std::mem::take(&mut self.members) {
            self.runs.push(member).map_err(StageInError::Scratch)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
