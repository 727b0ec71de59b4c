//! Reading blocks: from the node's segments if they are here, else through the server's arena. Many blocks cost one
//! message.

use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BLOCK_SIZE_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::local::{FetchedBlock, FromClient, FromServer};

use crate::attach::unexpected;
use crate::{ClientError, Dataset, Session};

/// A block's bytes, seen once by whoever asked for many.
pub struct BlockData<'a> {
    /// Which block.
    pub block: BlockId,
    /// All of it.
    pub bytes: &'a [u8],
    /// Whether it came from this node's own segment.
    pub is_local: bool,
}

/// A batch asked of the server has at most this many bytes, so that several clients fit the arena at once.
const BATCH_BYTES_MAX: u64 = 16 << 20;

impl Session {
    /// Reads from a sample; short only at its end. `verified` remembers the last block whose checksum was seen to be right.
    pub fn read_at(
        &self,
        dataset: &Dataset,
        sample: SampleId,
        offset: u64,
        buffer: &mut [u8],
        verified: &mut Option<BlockId>,
    ) -> Result<usize, ClientError> {
        let (size, blocks) = dataset.catalog().sample(sample).ok_or(ClientError::Protocol("an unknown sample"))?;
        let end = size.min(offset.saturating_add(buffer.len() as u64));
        let mut at = offset;
        while at < end {
            let part = at / BLOCK_SIZE_MAX;
            let within = at % BLOCK_SIZE_MAX;
            let len = (end - at).min(BLOCK_SIZE_MAX - within) as usize;
            let block = BlockId(blocks.start + part as u32);
            let start = (at - offset) as usize;
            let target = &mut buffer[start..start + len];
            if self.verifies_reads() && *verified != Some(block) {
                self.read_verified(dataset, block, within, target)?;
                *verified = Some(block);
            } else {
                self.read_part(dataset, block, within, target)?;
            }
            at += len as u64;
        }
        Ok(end.saturating_sub(offset) as usize)
    }

    /// Reads a part of a block.
    fn read_part(&self, dataset: &Dataset, block: BlockId, offset: u64, buffer: &mut [u8]) -> Result<(), ClientError> {
        loop {
            if dataset.read_here(block, offset, buffer)? {
                self.check_not_gone(dataset)?;
                self.counters.count_local(buffer.len() as u64);
                return Ok(());
            }
            let mut copied = false;
            self.fetch(dataset, &[block], &mut |_, fetched| match fetched {
                FetchedBlock::Here => Ok(()),
                FetchedBlock::Leased { offset: place, len, .. } => {
                    let fits = offset.checked_add(buffer.len() as u64).is_some_and(|end| end <= *len);
                    copied = fits && self.arena.copy_to(place.saturating_add(offset), buffer);
                    if copied { Ok(()) } else { Err(ClientError::Protocol("a lease outside of the arena")) }
                }
                FetchedBlock::Failed { reason } => Err(ClientError::Unreachable(reason.clone())),
            })?;
            if copied {
                return self.check_not_gone(dataset);
            }
        }
    }

    fn read_verified(&self, dataset: &Dataset, block: BlockId, offset: u64, buffer: &mut [u8]) -> Result<(), ClientError> {
        let (_, len) = dataset.catalog().block(block).ok_or(ClientError::Protocol("an unknown block"))?;
        let mut whole = vec![0; len as usize];
        self.read_part(dataset, block, 0, &mut whole)?;
        verify(dataset, block, &whole)?;
        buffer.copy_from_slice(&whole[offset as usize..offset as usize + buffer.len()]);
        Ok(())
    }

    /// Reads whole blocks, those that are not here in batches, and shows each to `see` once.
    pub fn read_blocks(
        &self,
        dataset: &Dataset,
        blocks: &[BlockId],
        see: &mut dyn FnMut(BlockData<'_>) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        let mut buffer = Vec::new();
        let mut far: Vec<BlockId> = Vec::new();
        let mut far_bytes = 0;
        for &block in blocks {
            let (_, len) = dataset.catalog().block(block).ok_or(ClientError::Protocol("an unknown block"))?;
            buffer.resize(len as usize, 0);
            if dataset.read_here(block, 0, &mut buffer)? {
                self.check_not_gone(dataset)?;
                self.counters.count_local(len);
                see(BlockData { block, bytes: &buffer, is_local: true })?;
                continue;
            }
            if far.len() == BATCH_BLOCKS_MAX || !far.is_empty() && far_bytes + len > BATCH_BYTES_MAX {
                self.read_far(dataset, &far, &mut buffer, see)?;
                far.clear();
                far_bytes = 0;
            }
            far.push(block);
            far_bytes += len;
        }
        self.read_far(dataset, &far, &mut buffer, see)
    }

    fn read_far(
        &self,
        dataset: &Dataset,
        mut blocks: &[BlockId],
        buffer: &mut Vec<u8>,
        see: &mut dyn FnMut(BlockData<'_>) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        while !blocks.is_empty() {
            let mut here = Vec::new();
            let done = self.fetch(dataset, blocks, &mut |block, fetched| match fetched {
                FetchedBlock::Leased { offset, len, .. } => {
                    buffer.resize((*len).min(BLOCK_SIZE_MAX) as usize, 0);
                    if !self.arena.copy_to(*offset, buffer) {
                        return Err(ClientError::Protocol("a lease outside of the arena"));
                    }
                    self.check_not_gone(dataset)?;
                    see(BlockData { block, bytes: buffer, is_local: false })
                }
                FetchedBlock::Here => {
                    here.push(block);
                    Ok(())
                }
                FetchedBlock::Failed { reason } => Err(ClientError::Unreachable(reason.clone())),
            })?;
            self.read_blocks(dataset, &here, see)?;
            blocks = &blocks[done..];
        }
        Ok(())
    }

    /// Asks the server for blocks and shows what became of each: at least of the first, perhaps not of all; returns of how many. What
    /// it leases is given back afterwards, on the connection on which it was leased.
    fn fetch(
        &self,
        dataset: &Dataset,
        blocks: &[BlockId],
        see: &mut dyn FnMut(BlockId, &FetchedBlock) -> Result<(), ClientError>,
    ) -> Result<usize, ClientError> {
        self.check_not_gone(dataset)?;
        // A failure of `see` is none of the connection's.
        let (count, seen) = self.converse(|socket| {
            socket.send(&FromClient::Fetch { dataset: dataset.id(), blocks: blocks.to_vec() })?;
            let fetched = match socket.receive()?.0 {
                FromServer::Fetched { blocks: fetched } if !fetched.is_empty() && fetched.len() <= blocks.len() => fetched,
                FromServer::Fetched { .. } => return Err(ClientError::Protocol("blocks that were not asked for")),
                other => return Err(unexpected(other)),
            };
            let seen = blocks.iter().zip(&fetched).try_for_each(|(&block, fetched)| see(block, fetched));
            let lease =
                |fetched: &FetchedBlock| if let FetchedBlock::Leased { lease, .. } = fetched { Some(*lease) } else { None };
            let leases: Vec<u64> = fetched.iter().filter_map(lease).collect();
            if !leases.is_empty() {
                socket.send(&FromClient::Release { leases })?;
            }
            Ok((fetched.len(), seen))
        })?;
        seen.map(|()| count)
    }

    /// What was copied before this passes was real.
    fn check_not_gone(&self, dataset: &Dataset) -> Result<(), ClientError> {
        if dataset.is_gone() || self.is_gone() { Err(ClientError::Gone) } else { Ok(()) }
    }
}

/// Compares a block with the checksum taken at stage-in.
pub(crate) fn verify(dataset: &Dataset, block: BlockId, bytes: &[u8]) -> Result<(), ClientError> {
    let expected = dataset.catalog().checksum(block).ok_or(ClientError::Protocol("an unknown block"))?;
    let found = crc32c::crc32c(bytes);
    if found == expected {
        return Ok(());
    }
    let path = dataset.path_of_block(block).map_or_else(String::new, |path| display(&path));
    Err(ClientError::Checksum { block: block.0, path, expected, found })
}

impl BlockData<'_> {
    /// Compares the bytes with the checksum taken at stage-in.
    pub fn verify(&self, dataset: &Dataset) -> Result<(), ClientError> {
        verify(dataset, self.block, self.bytes)
    }
}

impl Dataset {
    /// A path of the sample that a block is a piece of: looked for through the whole catalog, for messages only.
    fn path_of_block(&self, block: BlockId) -> Option<Vec<u8>> {
        let (sample, _) = self.catalog().block(block)?;
        let entries =
            (0..self.catalog().header().entries).filter_map(|id| self.catalog().entry(dayfly_meta::catalog::EntryId(id)));
        entries.into_iter().find(|entry| entry.sample() == Some(sample)).map(|entry| self.catalog().path(&entry))
    }
}
