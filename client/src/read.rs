//! Reading blocks: from the node's segments if they are here, else through the server's arena. Many blocks cost one
//! message.

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BLOCK_SIZE_MAX, CHUNK_LEN, RECHECKS_MAX};
use dayfly_meta::wire::local::{FetchedChunk, FromClient, FromServer};
use dayfly_meta::wire::status::Source;

use crate::attach::unexpected;
use crate::{ClientError, Dataset, Session};

/// A block's bytes, compared with their checksums and seen once by whoever asked for many.
pub struct BlockData<'a> {
    /// Which block.
    pub block: BlockId,
    /// All of it.
    pub bytes: &'a [u8],
    /// Whether it came from this node's own segment.
    pub is_local: bool,
    /// Whether a copy on this node was bad, and these came from elsewhere.
    pub was_bad: bool,
}

/// Is shown what became of a chunk, by its place in the request, and may ask whether its lease holds.
type See<'a> = &'a mut dyn FnMut(usize, &FetchedChunk, &dyn Fn() -> bool) -> Result<(), ClientError>;

/// Chunks of a large block that are asked for at once; the server reads on behind them.
const WINDOW: usize = 4;

impl Session {
    /// Reads from a sample; short only at its end. `verified` remembers the last chunk whose checksum was seen to be right.
    pub fn read_at(
        &self,
        dataset: &Dataset,
        sample: SampleId,
        offset: u64,
        buffer: &mut [u8],
        verified: &mut Option<Chunk>,
    ) -> Result<usize, ClientError> {
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

    /// Reads a part of a block: from what can be found without asking, or chunk by chunk as they come from the server.
    pub(crate) fn read_part(&self, dataset: &Dataset, block: BlockId, offset: u64, buffer: &mut [u8]) -> Result<(), ClientError> {
        let end = offset + buffer.len() as u64;
        let (mut at, mut rechecks) = (offset, 0);
        while at < end {
            let rest = &mut buffer[(at - offset) as usize..];
            let recheck = match dataset.read_here(&self.arena, block, at, rest) {
                Ok(Some(source)) => {
                    self.check_not_gone(dataset)?;
                    self.count(source, 1, rest.len() as u64);
                    return Ok(());
                }
                Ok(None) => false,
                // The owner has another copy of what this node only keeps.
                Err(ClientError::Segment(_)) if dataset.keeps(block) && rechecks < RECHECKS_MAX => true,
                Err(error) => return Err(error),
            };
            rechecks += usize::from(recheck);
            at += self.read_far(dataset, block, at, rest, recheck)?;
        }
        Ok(())
    }

    /// Reads from the start of a range what the server has got of it, at least some unless it is here now; returns how much. With
    /// `recheck` the server first looks at the copies that this node has of it.
    pub(crate) fn read_far(
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
        let mut has_come = vec![false; chunks.len()];
        self.fetch(dataset, &chunks, recheck, &mut |at, fetched, is_held| {
            let chunk = chunks[at];
            let Some(len) = chunk.len_in(block_len) else { return Err(ClientError::Protocol("an unknown block")) };
            match fetched {
                FetchedChunk::Here => Ok(()),
                FetchedChunk::Leased { offset: place } => {
                    let (from, to) = (offset.max(chunk.start()), end.min(chunk.start() + len));
                    let target = &mut buffer[(from - offset) as usize..(to - offset) as usize];
                    if !self.arena.copy_to(place.saturating_add(from - chunk.start()), target) {
                        return Err(ClientError::Protocol("a lease outside of the arena"));
                    }
                    if !is_held() {
                        return Ok(());
                    }
                    self.arena.mark(*place);
                    self.count(Source::Asked, 1, target.len() as u64);
                    has_come[at] = true;
                    Ok(())
                }
                FetchedChunk::Failed { reason } => Err(ClientError::Unreachable(reason.clone())),
            }
        })?;
        self.check_not_gone(dataset)?;
        let come = has_come.iter().take_while(|&&come| come).count() as u64;
        let until = (first.start() + come * CHUNK_LEN).min(end);
        Ok(until.saturating_sub(offset))
    }

    /// Reads whole blocks, those that are not here in batches, compares them, and shows each to `see` once.
    pub fn read_blocks(
        &self,
        dataset: &Dataset,
        blocks: &[BlockId],
        see: &mut dyn FnMut(BlockData<'_>) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        let mut buffer = Vec::new();
        let mut far: Vec<BlockId> = Vec::new();
        for &block in blocks {
            let (_, len) = dataset.catalog().block(block).ok_or(ClientError::Protocol("an unknown block"))?;
            buffer.resize(len as usize, 0);
            let found = dataset.read_here(&self.arena, block, 0, &mut buffer);
            if let Ok(Some(source)) = found {
                self.check_not_gone(dataset)?;
                self.count(source, 1, len);
                let was_bad = self.mend(dataset, block, &mut buffer)?;
                let is_local = !was_bad && matches!(source, Source::Segment | Source::Cached);
                see(BlockData { block, bytes: &buffer, is_local, was_bad })?;
            } else if len > CHUNK_LEN || found.is_err() {
                self.read_part(dataset, block, 0, &mut buffer)?;
                let was_bad = self.mend(dataset, block, &mut buffer)? || found.is_err();
                see(BlockData { block, bytes: &buffer, is_local: false, was_bad })?;
            } else {
                far.push(block);
            }
            if far.len() == BATCH_BLOCKS_MAX {
                self.read_far_blocks(dataset, &mut far, &mut buffer, see)?;
            }
        }
        self.read_far_blocks(dataset, &mut far, &mut buffer, see)
    }

    fn read_far_blocks(
        &self,
        dataset: &Dataset,
        far: &mut Vec<BlockId>,
        buffer: &mut Vec<u8>,
        see: &mut dyn FnMut(BlockData<'_>) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        let mut blocks = std::mem::take(far);
        while !blocks.is_empty() {
            let chunks: Vec<Chunk> = blocks.iter().map(|&block| Chunk { block, index: 0 }).collect();
            let (mut here, mut bad, mut is_done) = (Vec::new(), Vec::new(), vec![false; blocks.len()]);
            self.fetch(dataset, &chunks, false, &mut |at, fetched, is_held| match fetched {
                FetchedChunk::Leased { offset } => {
                    let (_, len) = dataset.catalog().block(blocks[at]).ok_or(ClientError::Protocol("an unknown block"))?;
                    buffer.resize(len as usize, 0);
                    if !self.arena.copy_to(*offset, buffer) {
                        return Err(ClientError::Protocol("a lease outside of the arena"));
                    }
                    if !is_held() {
                        return Ok(());
                    }
                    self.arena.mark(*offset);
                    self.check_not_gone(dataset)?;
                    self.count(Source::Asked, 1, len);
                    is_done[at] = true;
                    if self.verify(dataset, chunks[at], buffer).is_err() {
                        // Not on this connection, which is busy with the others.
                        bad.push(blocks[at]);
                        return Ok(());
                    }
                    see(BlockData { block: blocks[at], bytes: buffer, is_local: false, was_bad: false })
                }
                FetchedChunk::Here => {
                    is_done[at] = true;
                    here.push(blocks[at]);
                    Ok(())
                }
                FetchedChunk::Failed { reason } => Err(ClientError::Unreachable(reason.clone())),
            })?;
            for block in bad {
                let (_, len) = dataset.catalog().block(block).ok_or(ClientError::Protocol("an unknown block"))?;
                buffer.resize(len as usize, 0);
                self.read_part(dataset, block, 0, buffer)?;
                self.mend(dataset, block, buffer)?;
                see(BlockData { block, bytes: buffer, is_local: false, was_bad: true })?;
            }
            self.read_blocks(dataset, &here, see)?;
            let mut is_done = is_done.into_iter();
            blocks.retain(|_| is_done.next() == Some(false));
        }
        Ok(())
    }

    /// Asks the server for chunks and shows what became of each as it comes, perhaps not of all. What it leases is given back once it
    /// has been shown, on the connection on which it was leased. Beside each chunk comes a question, to be asked after it was copied:
    /// whether its lease still held. If not, the copy is worth nothing, and the chunk is to be asked for again.
    fn fetch(&self, dataset: &Dataset, chunks: &[Chunk], recheck: bool, see: See<'_>) -> Result<(), ClientError> {
        self.check_not_gone(dataset)?;
        // A failure of `see` is none of the connection's.
        let mut seen = Ok(());
        self.converse(|socket| {
            socket.send(&FromClient::Fetch { dataset: dataset.id(), chunks: chunks.to_vec(), recheck })?;
            loop {
                let (fetched, lease, token, is_last) = match socket.receive()?.0 {
                    FromServer::Fetched { chunks, lease, token, is_last } => (chunks, lease, token, is_last),
                    other => return Err(unexpected(other)),
                };
                let is_held = || self.status_page().holds(socket.number(), token);
                for (at, fetched) in &fetched {
                    if *at as usize >= chunks.len() {
                        return Err(ClientError::Protocol("blocks that were not asked for"));
                    }
                    if seen.is_ok() {
                        seen = see(*at as usize, fetched, &is_held);
                    }
                }
                if lease != 0 {
                    socket.send(&FromClient::Release { leases: vec![lease] })?;
                }
                if is_last {
                    return Ok(());
                }
            }
        })?;
        seen
    }

    /// What was copied before this passes was real.
    fn check_not_gone(&self, dataset: &Dataset) -> Result<(), ClientError> {
        if dataset.is_gone() || self.is_gone() { Err(ClientError::Gone) } else { Ok(()) }
    }
}
