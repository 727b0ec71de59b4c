//! Cuts samples into blocks, places the blocks, and ships them.
//!
//! Blocks that fit in a batch share batches; a larger block first gets room at its owner and is
//! then sent in pieces. This worker skips an owner that is full, and the owner's blocks go to their
//! next candidates. Blocks of a batch that comes back are placed again one by one, since the next
//! candidate differs from block to block.

use std::io::{self, Read};
use std::time::Instant;

use dayfly_meta::catalog::{Member, MemberKind, StoredBlock};
use dayfly_meta::checksum::{checksum, combine};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BATCH_LEN_MAX, BATCHES_IN_FLIGHT_MAX, BLOCK_SIZE_MAX, CHUNK_LEN, SAMPLE_SIZE_MAX};
use dayfly_meta::path::display;
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::control::Step;
use dayfly_meta::wire::peer::{Rival, ShippedBlock};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{Batch, BlockPiece, Delivery, Reserved, Sink, Worker};
use crate::StageInError;
use crate::path_conflicts::rival;

impl<S: Sink> Worker<S> {
    /// Takes a file: reads its `size` bytes from `data` and ships them. `read_error` turns a failed read into an error that names
    /// the source. After an error, the file is treated as if it did not exist.
    pub(super) fn take_file(
        &mut self,
        mut member: Member,
        size: u64,
        data: &mut dyn Read,
        read_error: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        if size > SAMPLE_SIZE_MAX {
            return Err(StageInError::TooLarge { sample: display(&member.path), size });
        }
        let parts = size.div_ceil(BLOCK_SIZE_MAX);
        let unknown = StoredBlock { owner: NodeId(0), arrival: 0 };
        if let MemberKind::File { size: bytes, blocks, .. } = &mut member.kind {
            (*bytes, *blocks) = (size, vec![unknown; parts as usize]);
        }
        let index = self.members.len();
        self.members_len += member.memory_len();
        self.members.push(member);
        for part in 0..parts as u32 {
            let block_len = (size - u64::from(part) * BLOCK_SIZE_MAX).min(BLOCK_SIZE_MAX);
            let taken = if !self.is_to_be_stored(index, part) {
                self.read_unstored(index, part, block_len, data, read_error)
            } else if block_len <= BATCH_LEN_MAX as u64 {
                self.take_small_block(index, part, block_len as usize, data, read_error)
            } else {
                self.take_large_block(index, part, block_len, data, read_error)
            };
            if taken.is_err() {
                // No open batch refers to this index: the block that failed is in no batch, and the
                // blocks before it were large, so they went in pieces.
                self.members.truncate(index);
            }
            taken?;
        }
        self.place_returned()?;
        self.unit.counts.files += 1;
        self.unit.counts.bytes += size;
        self.monitor.count_file(size);
        if self.suspect_paths.generation() == 0 {
            return Ok(());
        }
        if self.unit.is_uncertain {
            self.checked_generation = None;
            return Ok(());
        }
        self.members.get(index).into_iter().for_each(|member| self.suspect_paths.check(member));
        self.check_suspect_paths()
    }

    fn take_small_block(
        &mut self,
        index: usize,
        part: u32,
        len: usize,
        data: &mut dyn Read,
        read_error: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        let Some(owner) = self.owner(index, part, &self.full)? else {
            return self.read_unstored(index, part, len as u64, data, read_error);
        };
        let checksum = self.append(owner, (index, part), len, &mut |space| {
            data.read_exact(space).map_err(read_error)?;
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
        read_error: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        // A node without room for this block may have room for smaller ones.
        let mut full = self.full;
        let (owner, arrival) = loop {
            let Some(owner) = self.owner(index, part, &full)? else {
                return self.read_unstored(index, part, block_len, data, read_error);
            };
            let rival = self.rival(index, part);
            match self.call_sink(|sink| sink.reserve(owner, block_len, rival))? {
                Reserved::At(arrival) => break (owner, arrival),
                Reserved::Full => {}
                Reserved::Absent => self.skip_absent(owner),
            }
            full.insert(owner);
        };
        let mut chunk_checksum = 0;
        let mut offset = 0;
        while offset < block_len {
            let len = (block_len - offset).min(BATCH_LEN_MAX as u64) as usize;
            // If the owner has stopped to answer, the rest of the block is of no use there.
            let piece = if self.absent.contains(owner) { None } else { Some(self.take_buffer(owner)?) };
            let (checksum, piece) = match piece {
                None => (self.read_for_checksum(len, data, read_error)?, None),
                Some(mut buffer) => {
                    let space = &mut buffer[..len];
                    data.read_exact(space).map_err(read_error)?;
                    let checksum = checksum(space);
                    (checksum, Some(BlockPiece { buffer, len, member: (index, part), arrival, offset, checksum }))
                }
            };
            let starts_chunk = offset.is_multiple_of(CHUNK_LEN);
            chunk_checksum = if starts_chunk { checksum } else { combine(chunk_checksum, checksum, len as u64) };
            if let Some(piece) = piece {
                self.limit_in_flight()?;
                self.sink.ship_piece(owner, piece)?;
            }
            offset += len as u64;
            if offset.is_multiple_of(CHUNK_LEN) || offset == block_len {
                self.add_checksum(index, chunk_checksum);
            }
        }
        match self.absent.contains(owner) {
            true => self.mark_unstored(index, part),
            false => self.set_block(index, part, StoredBlock { owner, arrival }),
        }
        Ok(())
    }

    /// Returns the node that is to store a block; `None` if all nodes are `full` and the block can be read again.
    fn owner(&self, index: usize, part: u32, full: &NodeSet) -> Result<Option<NodeId>, StageInError> {
        let path = &self.members[index].path;
        match self.placement.owner(self.group(path), part, full) {
            None if !self.can_be_read_again(index) => {
                let size = if let MemberKind::File { size, .. } = self.members[index].kind { size } else { 0 };
                Err(StageInError::NoRoom { sample: display(path), size })
            }
            owner => Ok(owner),
        }
    }

    /// Returns what the owner compares to find path conflicts. Only a sample's first block carries
    /// it.
    fn rival(&self, index: usize, part: u32) -> Rival {
        if part > 0 { Rival::default() } else { rival(&self.members[index].path, self.unit.rivalry) }
    }

    /// Returns the key by which a path is placed and shuffled; samples with equal keys stay
    /// together.
    pub(super) fn group<'a>(&self, path: &'a [u8]) -> &'a [u8] {
        self.selection.group.of(path)
    }

    pub(super) fn set_block(&mut self, index: usize, part: u32, block: StoredBlock) {
        if let Some(MemberKind::File { blocks, .. }) = self.members.get_mut(index).map(|member| &mut member.kind)
            && let Some(entry) = blocks.get_mut(part as usize)
        {
            *entry = block;
        }
    }

    /// Adds the checksum of a member's next chunk.
    pub(super) fn add_checksum(&mut self, index: usize, checksum: u32) {
        if let Some(MemberKind::File { checksums, .. }) = self.members.get_mut(index).map(|member| &mut member.kind) {
            checksums.push(checksum);
            self.members_len += size_of::<u32>();
        }
    }

    /// Appends a small block to its owner's open batch. `fill` writes the block's bytes and returns
    /// the checksum that they had when they were read from the source. This function returns the
    /// same checksum.
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
            let shuffle = xxh3_64_with_seed(self.group(&self.members[index].path), self.shuffle_seed ^ u64::from(part));
            let rival = self.rival(index, part);
            batch.push((index, part), ShippedBlock { len: len as u32, checksum, shuffle, rival });
            self.set_block(index, part, StoredBlock { owner, arrival: 0 });
        }
        // While this thread waited for a buffer, placing returned blocks may have opened another
        // batch for the same owner.
        if let Some(other) = self.open.insert(owner, batch) {
            self.ship(owner, other)?;
        }
        filled
    }

    /// Gets a buffer from the sink. If the sink has none left, waits for a delivery. If nothing is
    /// in flight, first ships the fullest open batch.
    fn take_buffer(&mut self, owner: NodeId) -> Result<S::Buffer, StageInError> {
        loop {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            let start = Instant::now();
            let buffer = self.call_sink(|sink| sink.buffer(owner));
            self.shipping += start.elapsed();
            if let Some(buffer) = buffer? {
                return Ok(buffer);
            }
            if self.sink.in_flight() > 0 {
                self.await_delivery()?;
            } else if let Some(owner) = self.open.iter().max_by_key(|(_, batch)| batch.len()).map(|(&owner, _)| owner)
                && let Some(batch) = self.open.remove(&owner)
            {
                self.ship(owner, batch)?;
            } else {
                return Err(StageInError::Ship { node: owner, cause: "this worker has no memory for a batch".into() });
            }
        }
    }

    pub(super) fn ship(&mut self, owner: NodeId, batch: Batch<S::Buffer>) -> Result<(), StageInError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.limit_in_flight()?;
        self.sink.ship(owner, batch)
    }

    /// Calls the sink, which may block, and meanwhile shows that this thread is storing blocks.
    fn call_sink<T>(&mut self, call: impl FnOnce(&mut S) -> T) -> T {
        self.activity.switch_to(Step::Shipping);
        let result = call(&mut self.sink);
        self.activity.switch_to(Step::Reading);
        result
    }

    fn limit_in_flight(&mut self) -> Result<(), StageInError> {
        while self.sink.in_flight() >= BATCHES_IN_FLIGHT_MAX {
            self.await_delivery()?;
        }
        Ok(())
    }

    /// Waits for one delivery. A batch that its owner had no room for is kept for
    /// [`Self::place_returned`].
    pub(super) fn await_delivery(&mut self) -> Result<(), StageInError> {
        if self.monitor.is_cancelled() {
            return Err(StageInError::Cancelled);
        }
        let start = Instant::now();
        let delivery = self.call_sink(S::next_delivery);
        self.shipping += start.elapsed();
        let (node, batch) = match delivery? {
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
            Delivery::Absent { node, members, error } => return self.leave_to_source(node, &members, error),
        };
        self.full.insert(node);
        // Shipping the blocks again needs a buffer from the sink. The batch is therefore copied out
        // of its own buffer: otherwise the waiting batches could hold all of the sink's buffers.
        self.returned.push_back(batch.to_owned());
        Ok(())
    }

    /// Places the blocks of returned batches on their next candidates.
    pub(super) fn place_returned(&mut self) -> Result<(), StageInError> {
        while let Some(batch) = self.returned.pop_front() {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            for ((index, part), block, bytes) in batch.iter() {
                let Some(owner) = self.owner(index, part, &self.full)? else {
                    self.keep_or_leave(index, part, bytes)?;
                    continue;
                };
                self.append(owner, (index, part), bytes.len(), &mut |space| {
                    space.copy_from_slice(bytes);
                    // This is the checksum that the bytes had when they were read. If they have
                    // changed in memory since then, the next owner will notice.
                    Ok(block.checksum)
                })?;
            }
        }
        Ok(())
    }
}
