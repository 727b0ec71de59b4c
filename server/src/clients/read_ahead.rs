//! Readers that say nothing of what they will read, but go through a large file front to back: what comes next is fetched meanwhile.

use std::sync::Arc;

use dayfly_meta::catalog::block_len;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId, SampleId};
use dayfly_meta::limits::{CHUNK_LEN, READ_AHEAD_LEN_MAX};
use tokio::task::JoinSet;

use crate::fetch::Fetcher;
use crate::store::Dataset;

/// What a process asked for last.
#[derive(Default)]
pub(super) struct ReadAhead {
    last: Option<(DatasetId, SampleId, u64)>,
    /// Chunks to be ahead; doubles while the reader goes on.
    chunks: u64,
    /// Up to which chunk of the sample all is on its way.
    until: u64,
    tasks: JoinSet<()>,
}

impl ReadAhead {
    /// A process has asked for chunks.
    pub(super) fn asked(&mut self, fetcher: &Arc<Fetcher>, dataset: &Arc<Dataset>, chunks: &[Chunk]) {
        while self.tasks.try_join_next().is_some() {}
        let (Some(first), Some(last)) = (chunks.first(), chunks.last()) else { return };
        let Some((sample, from)) = position(dataset, *first) else { return };
        let Some((other, to)) = position(dataset, *last) else { return };
        let of_last = (dataset.id(), sample);
        let goes_on =
            self.last.is_some_and(|(dataset, sample, at)| (dataset, sample) == of_last && (at..=at + 1).contains(&from));
        self.last = Some((dataset.id(), other, to));
        let Some((size, blocks)) = dataset.catalog().sample(sample).filter(|(size, _)| *size > CHUNK_LEN) else { return };
        if sample != other || !(goes_on || from == 0) {
            (self.chunks, self.until) = (0, 0);
            return;
        }
        let is_new = !goes_on || self.until < to + 1;
        self.until = if is_new { to + 1 } else { self.until };
        // As far as it asks itself, and twice as far each time.
        let asked = chunks.len() as u64;
        self.chunks = if goes_on { (self.chunks * 2).max(asked).min(READ_AHEAD_LEN_MAX / CHUNK_LEN) } else { asked };
        let end = (to + 1 + self.chunks).min(size.div_ceil(CHUNK_LEN));
        let next: Vec<Chunk> = (self.until..end).filter_map(|number| chunk_at(size, blocks.start, number)).collect();
        self.until = self.until.max(end);
        if next.is_empty() {
            return;
        }
        let mut fetching = fetcher.begin_if_room(dataset, &next, READ_AHEAD_LEN_MAX);
        // What comes is idle in the arena until the reader asks for it.
        self.tasks.spawn(async move { while fetching.next().await.is_some() {} });
    }
}

/// A chunk's sample, and its number there.
fn position(dataset: &Dataset, chunk: Chunk) -> Option<(SampleId, u64)> {
    let (sample, _) = dataset.catalog().block(chunk.block)?;
    let (_, blocks) = dataset.catalog().sample(sample)?;
    let part = u64::from(chunk.block.0.checked_sub(blocks.start)?);
    Some((sample, part * (dayfly_meta::limits::BLOCK_SIZE_MAX / CHUNK_LEN) + u64::from(chunk.index)))
}

fn chunk_at(size: u64, first_block: u32, number: u64) -> Option<Chunk> {
    let by_block = dayfly_meta::limits::BLOCK_SIZE_MAX / CHUNK_LEN;
    let (part, index) = ((number / by_block) as u32, (number % by_block) as u16);
    let chunk = Chunk { block: BlockId(first_block + part), index };
    chunk.len_in(block_len(size, part)).map(|_| chunk)
}
