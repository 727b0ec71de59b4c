//! Reads blocks without a message if they are in this node's segments or in the arena, and otherwise with the server's help. One
//! message can request many blocks.

use std::cell::Cell;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BLOCK_SIZE_MAX, CHUNK_LEN, RECHECKS_MAX};
use dayfly_meta::wire::status::Source;

use crate::attachment::{Attachment, Connection};
use crate::fetch::{ArrivedChunk, LeasedChunk, receive_chunks, release, request_for};
use crate::{ClientError, Dataset, Session};

/// A whole block, verified against its checksums, as [`Session::read_blocks`] passes it to its callback.
pub struct BlockData<'a> {
    /// The block's number in its dataset.
    pub block: BlockId,
    /// All bytes of the block.
    pub bytes: &'a [u8],
    /// Whether the bytes came from this node's own drives.
    pub is_local: bool,
    /// Whether this node's copy was damaged, so that these bytes come from another copy.
    pub was_bad: bool,
}

/// A function that takes a chunk that arrived: the attachment through which it came, its index in the request and its lease, or `None`
/// instead of the lease if the chunk is now on this node's drives.
type OnChunk<'a> = &'a mut dyn FnMut(&Attachment, usize, Option<LeasedChunk>) -> Result<(), ClientError>;

/// How many chunks of a large block one request names. The server reads ahead beyond them.
const WINDOW: usize = 4;

impl Session {
    /// Reads from a sample. The count is less than the buffer's length only at the sample's end. `verified` remembers the last
    /// chunk whose checksum was correct, so that a sequential reader does not verify a chunk twice.
    ///
    /// # Errors
    /// If the session has ended, the dataset was replaced, a block cannot be read, or all copies of a block are damaged.
    pub fn read_at(
        &self,
        dataset: &Dataset,
        sample: SampleId,
        offset: u64,
        buffer: &mut [u8],
        verified: &mut Option<Chunk>,
    ) -> Result<usize, ClientError> {
        if dataset.attachment().is_gone() && self.has_left(dataset) {
            return self.read_at(&*self.renewed(dataset)?, sample, offset, buffer, verified);
        }
        let (size, blocks) = dataset.catalog().sample(sample).ok_or(ClientError::Protocol("an unknown sample"))?;
        let end = size.min(offset.saturating_add(buffer.len() as u64));
        let mut at = offset;
        while at < end {
            let part = at / BLOCK_SIZE_MAX;
            let within = at % BLOCK_SIZE_MAX;
            let block = BlockId(blocks.start + part as u32);
            let step = if self.verifies_reads() { CHUNK_LEN } else { BLOCK_SIZE_MAX };
            let len = (end - at).min(step - within % step) as usize;
            let start = (at - offset) as usize;
            let target = &mut buffer[start..start + len];
            let chunk = Chunk::at(block, within);
            if self.verifies_reads() && *verified != Some(chunk) {
                self.read_verified(dataset, chunk, within - chunk.start(), target)?;
                *verified = Some(chunk);
            } else {
                self.read_part(dataset, block, within, target)?;
            }
            at += len as u64;
        }
        Ok(end.saturating_sub(offset) as usize)
    }

    /// Reads a part of a block. If the block is on this node's drives or in the arena, this takes no message. Otherwise the server
    /// delivers the part chunk by chunk.
    pub(crate) fn read_part(&self, dataset: &Dataset, block: BlockId, offset: u64, buffer: &mut [u8]) -> Result<(), ClientError> {
        match self.read_part_of(dataset, block, offset, buffer) {
            Err(ClientError::Gone) if self.has_left(dataset) => {
                self.read_part_of(&*self.renewed(dataset)?, block, offset, buffer)
            }
            read => read,
        }
    }

    fn read_part_of(&self, dataset: &Dataset, block: BlockId, offset: u64, buffer: &mut [u8]) -> Result<(), ClientError> {
        let end = offset + buffer.len() as u64;
        let (mut at, mut rechecks, mut is_restored) = (offset, 0, false);
        while at < end {
            let rest = &mut buffer[(at - offset) as usize..];
            let recheck = match dataset.read_here(block, at, rest) {
                Ok(Some(source)) => {
                    self.check_not_gone(dataset)?;
                    dataset.attachment().count(source, 1, rest.len() as u64);
                    return Ok(());
                }
                Ok(None) => false,
                // The program has closed the library's descriptor of a segment.
                Err(ClientError::Segment(_)) if !is_restored && !dataset.is_intact() && !dataset.attachment().is_replaced() => {
                    self.restore(dataset)?;
                    is_restored = true;
                    continue;
                }
                // The owner has another copy of a cached block, and the origin has one of any other block.
                Err(ClientError::Segment(_)) if rechecks < RECHECKS_MAX => true,
                Err(error) => return Err(error),
            };
            // The server that runs now finds no copy of its own by the locations of an earlier one.
            if dataset.attachment().is_replaced() {
                return self.read_part(&*self.renewed(dataset)?, block, at, rest);
            }
            rechecks += usize::from(recheck);
            at += self.read_remote(dataset, block, at, rest, recheck)?;
        }
        Ok(())
    }

    /// Requests a range from the server and copies the start of the range, as far as it arrived without a gap. Returns the number
    /// of bytes copied. 0 means that the range is now on this node's drives, or that its start has to be requested again. With
    /// `recheck` the server first examines this node's copies of the range.
    pub(crate) fn read_remote(
        &self,
        dataset: &Dataset,
        block: BlockId,
        offset: u64,
        buffer: &mut [u8],
        recheck: bool,
    ) -> Result<u64, ClientError> {
        let (_, block_len) = dataset.catalog().block(block).ok_or(ClientError::Protocol("an unknown block"))?;
        let end = offset + buffer.len() as u64;
        let first = Chunk::at(block, offset);
        let chunks: Vec<Chunk> =
            Chunk::all(block, block_len).filter(|chunk| chunk.index >= first.index && chunk.start() < end).take(WINDOW).collect();
        let mut has_arrived = vec![false; chunks.len()];
        self.fetch(dataset, &chunks, recheck, &mut |attachment, index, leased| {
            let Some(leased) = leased else { return Ok(()) };
            let chunk = chunks[index];
            let Some(len) = chunk.len_in(block_len) else { return Err(ClientError::Protocol("an unknown block")) };
            let (from, to) = (offset.max(chunk.start()), end.min(chunk.start() + len));
            let target = &mut buffer[(from - offset) as usize..(to - offset) as usize];
            has_arrived[index] = leased.copy_to(attachment, from - chunk.start(), target)?;
            Ok(())
        })?;
        self.check_not_gone(dataset)?;
        let arrived = has_arrived.iter().take_while(|&&arrived| arrived).count() as u64;
        let until = (first.start() + arrived * CHUNK_LEN).min(end);
        Ok(until.saturating_sub(offset))
    }

    /// Reads whole blocks, verifies them, and passes each to `on_block` once. Blocks that are not on this node are requested in
    /// batches, so they are not passed in the order of `blocks`.
    ///
    /// # Errors
    /// The errors of [`Session::read_at`], and any error of `on_block`.
    pub fn read_blocks(
        &self,
        dataset: &Dataset,
        blocks: &[BlockId],
        on_block: &mut dyn FnMut(BlockData<'_>) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        let mut buffer = Vec::new();
        let mut remote: Vec<BlockId> = Vec::new();
        for &block in blocks {
            let (_, len) = dataset.catalog().block(block).ok_or(ClientError::Protocol("an unknown block"))?;
            buffer.resize(len as usize, 0);
            let found = dataset.read_here(block, 0, &mut buffer);
            if let Ok(Some(source)) = found {
                self.check_not_gone(dataset)?;
                dataset.attachment().count(source, 1, len);
                let was_bad = self.repair(dataset, block, &mut buffer)?;
                let is_local = !was_bad && matches!(source, Source::Segment | Source::Cached);
                on_block(BlockData { block, bytes: &buffer, is_local, was_bad })?;
            } else if len > CHUNK_LEN || found.is_err() {
                self.read_part(dataset, block, 0, &mut buffer)?;
                let was_bad = self.repair(dataset, block, &mut buffer)? || found.is_err();
                on_block(BlockData { block, bytes: &buffer, is_local: false, was_bad })?;
            } else {
                remote.push(block);
            }
            if remote.len() == BATCH_BLOCKS_MAX {
                self.read_remote_blocks(dataset, &mut remote, &mut buffer, on_block)?;
            }
        }
        self.read_remote_blocks(dataset, &mut remote, &mut buffer, on_block)
    }

    /// Reads the blocks in `remote`, which are not on this node and have one chunk each. Empties `remote`.
    fn read_remote_blocks(
        &self,
        dataset: &Dataset,
        remote: &mut Vec<BlockId>,
        buffer: &mut Vec<u8>,
        on_block: &mut dyn FnMut(BlockData<'_>) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        let mut blocks = std::mem::take(remote);
        while !blocks.is_empty() {
            let chunks: Vec<Chunk> = blocks.iter().map(|&block| Chunk { block, index: 0 }).collect();
            let (mut local, mut bad, mut is_done) = (Vec::new(), Vec::new(), vec![false; blocks.len()]);
            self.fetch(dataset, &chunks, false, &mut |attachment, index, leased| {
                let block = blocks[index];
                let Some(leased) = leased else {
                    is_done[index] = true;
                    local.push(block);
                    return Ok(());
                };
                let (_, len) = dataset.catalog().block(block).ok_or(ClientError::Protocol("an unknown block"))?;
                buffer.resize(len as usize, 0);
                if !leased.copy_to(attachment, 0, buffer)? {
                    return Ok(());
                }
                self.check_not_gone(dataset)?;
                is_done[index] = true;
                if self.verify(dataset, chunks[index], buffer).is_err() {
                    // The block is read again later, because answers for other blocks are still in flight on this connection.
                    bad.push(block);
                    return Ok(());
                }
                on_block(BlockData { block, bytes: buffer, is_local: false, was_bad: false })
            })?;
            for block in bad {
                let (_, len) = dataset.catalog().block(block).ok_or(ClientError::Protocol("an unknown block"))?;
                buffer.resize(len as usize, 0);
                self.read_part(dataset, block, 0, buffer)?;
                self.repair(dataset, block, buffer)?;
                on_block(BlockData { block, bytes: buffer, is_local: false, was_bad: true })?;
            }
            self.read_blocks(dataset, &local, on_block)?;
            let mut is_done = is_done.into_iter();
            blocks.retain(|_| is_done.next() == Some(false));
        }
        Ok(())
    }

    /// Requests chunks and passes each one that arrives to `on_chunk`. The server may leave some out; the caller requests those
    /// again. As soon as `on_chunk` has seen the chunks of a lease, the lease is released, on the connection it was granted to.
    fn fetch(&self, dataset: &Dataset, chunks: &[Chunk], recheck: bool, on_chunk: OnChunk<'_>) -> Result<(), ClientError> {
        self.check_not_gone(dataset)?;
        // If `on_chunk` fails, the rest of the answer is still received, so that the connection stays usable.
        let mut outcome = Ok(());
        let has_begun = Cell::new(false);
        self.with_connection(&|| !has_begun.get(), |Connection { socket, attachment }| {
            socket.send(&request_for(dataset.id(), chunks.to_vec(), recheck))?;
            loop {
                let answer = receive_chunks(socket, chunks.len())?;
                let (lease, is_last) = (answer.lease, answer.is_last);
                has_begun.set(true);
                for (index, chunk) in answer.into_chunks() {
                    if outcome.is_ok() {
                        outcome = match chunk {
                            ArrivedChunk::Leased(leased) => on_chunk(attachment, index, Some(leased)),
                            ArrivedChunk::Local => on_chunk(attachment, index, None),
                            ArrivedChunk::Failed(error) => Err(error),
                        };
                    }
                }
                release(socket, lease.into_iter().collect())?;
                if is_last {
                    return Ok(());
                }
            }
        })?;
        outcome
    }

    /// Fails if the session has ended or the dataset was replaced. Bytes copied before a successful check are valid.
    fn check_not_gone(&self, dataset: &Dataset) -> Result<(), ClientError> {
        let attachment = dataset.attachment();
        let is_gone = dataset.is_gone() || attachment.is_gone() || attachment.is_replaced() && self.is_gone();
        if is_gone { Err(ClientError::Gone) } else { Ok(()) }
    }
}
