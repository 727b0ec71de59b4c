//! Read-ahead within one large file. If a process reads a large file in order, without a sample
//! order, the next chunks are fetched while the process uses the previous ones.

use std::sync::Arc;

use dayfly_meta::catalog::block_len;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId, SampleId};
use dayfly_meta::limits::{BLOCK_SIZE_MAX, CHUNK_LEN, READ_AHEAD_LEN_MAX};
use tokio::task::JoinSet;

use crate::fetch::Fetcher;
use crate::store::Dataset;

const CHUNKS_PER_BLOCK: u64 = BLOCK_SIZE_MAX / CHUNK_LEN;

/// The read-ahead of one connection.
#[derive(Default)]
pub(super) struct ReadAhead {
    /// The last chunk that the process asked for, by its index in the sample.
    last: Option<(DatasetId, SampleId, u64)>,
    /// How many chunks to fetch ahead; doubles while the process reads in order.
    window: u64,
    /// All of the sample's chunks with smaller indexes have been requested.
    fetched_to: u64,
    tasks: JoinSet<()>,
}

impl ReadAhead {
    /// Records a request, and fetches ahead if the request continues the previous one or starts at the beginning of a large file.
    pub(super) fn note_request(&mut self, fetcher: &Arc<Fetcher>, dataset: &Arc<Dataset>, chunks: &[Chunk]) {
        while self.tasks.try_join_next().is_some() {}
        let (Some(first), Some(last)) = (chunks.first(), chunks.last()) else { return };
        let Some((sample, from)) = position(dataset, *first) else { return };
        let Some((last_sample, to)) = position(dataset, *last) else { return };
        let this = (dataset.id(), sample);
        let continues = self.last.is_some_and(|(dataset, sample, at)| (dataset, sample) == this && (at..=at + 1).contains(&from));
        self.last = Some((dataset.id(), last_sample, to));
        let Some((size, blocks)) = dataset.catalog().sample(sample).filter(|(size, _)| *size > CHUNK_LEN) else { return };
        if sample != last_sample || !(continues || from == 0) {
            (self.window, self.fetched_to) = (0, 0);
            return;
        }
        let is_behind = !continues || self.fetched_to < to + 1;
        self.fetched_to = if is_behind { to + 1 } else { self.fetched_to };
        // The window begins with as many chunks as the process reads at once, and then doubles each time.
        let asked = chunks.len() as u64;
        self.window = if continues { (self.window * 2).max(asked).min(READ_AHEAD_LEN_MAX / CHUNK_LEN) } else { asked };
        let end = (to + 1 + self.window).min(size.div_ceil(CHUNK_LEN));
        let next: Vec<Chunk> = (self.fetched_to..end).filter_map(|index| chunk_at(size, blocks.start, index)).collect();
        self.fetched_to = self.fetched_to.max(end);
        if next.is_empty() {
            return;
        }
        let mut fetch = fetcher.begin_if_room(dataset, &next, READ_AHEAD_LEN_MAX);
        // The fetched chunks stay in the arena, without leases, until the process asks for them.
        self.tasks.spawn(async move { while fetch.next().await.is_some() {} });
    }
}

/// Returns the sample of a chunk, and the chunk's index in that sample.
fn position(dataset: &Dataset, chunk: Chunk) -> Option<(SampleId, u64)> {
    let (sample, _) = dataset.catalog().block(chunk.block)?;
    let (_, blocks) = dataset.catalog().sample(sample)?;
    let part = u64::from(chunk.block.0.checked_sub(blocks.start)?);
    Some((sample, part * CHUNKS_PER_BLOCK + u64::from(chunk.index)))
}

fn chunk_at(size: u64, first_block: u32, index: u64) -> Option<Chunk> {
    let (part, index) = ((index / CHUNKS_PER_BLOCK) as u32, (index % CHUNKS_PER_BLOCK) as u16);
    let chunk = Chunk { block: BlockId(first_block + part), index };
    chunk.len_in(block_len(size, part)).map(|_| chunk)
}
