//! Reads from origins whose bytes do not go into the arena: for peers while the arena has no room, and for recovery.
//!
//! Peers that want the same chunk share one read. The read goes on when the peers have got no answer in time, and its bytes wait
//! until a peer asks again. So a parallel file system that takes longer than a request may take is read once, not once for each
//! request.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::DatasetId;
use dayfly_meta::limits::WITHOUT_ARENA_LEN_MAX;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout_at};

use super::Fetcher;
use super::shared_read::{JoinedRead, OpenRead, SharedRead, open_read};
use crate::store::Dataset;

type Key = (DatasetId, Chunk);

/// The reads under way, and those whose bytes no peer has got yet.
pub(super) struct ReadsWithoutArena {
    reads: Mutex<HashMap<Key, JoinedRead>>,
    /// Bytes that further reads may take.
    room: Arc<Semaphore>,
}

impl Default for ReadsWithoutArena {
    fn default() -> Self {
        Self { reads: Mutex::default(), room: Arc::new(Semaphore::new(WITHOUT_ARENA_LEN_MAX as usize)) }
    }
}

impl ReadsWithoutArena {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<Key, JoinedRead>> {
        self.reads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReadsWithoutArena {
    /// Takes reads from the table. Nobody joins them from now on.
    pub(super) fn remove(&self, dataset: DatasetId, chunks: &[Chunk]) {
        let mut reads = self.lock();
        chunks.iter().for_each(|&chunk| drop(reads.remove(&(dataset, chunk))));
    }
}

impl Fetcher {
    /// Reads chunks that this node owns into memory of their own. `None` stands for a chunk that has not been read at the deadline.
    pub(super) async fn read_without_arena(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
        deadline: Instant,
    ) -> Vec<Option<SharedRead>> {
        let mut reads = self.join_reads(dataset, chunks);
        if reads.iter().any(Option::is_none) {
            let len = chunks.iter().map(|&chunk| chunk_len(dataset, chunk)).sum::<usize>().min(WITHOUT_ARENA_LEN_MAX as usize);
            let room = self.without_arena.room.clone().acquire_many_owned(len as u32);
            if let Ok(Ok(room)) = timeout_at(deadline, room).await {
                reads = self.begin_reads(dataset, chunks, room);
            }
        }
        let mut outcomes = Vec::with_capacity(chunks.len());
        for read in reads {
            outcomes.push(match read {
                Some(read) => timeout_at(deadline, read.outcome()).await.ok().flatten(),
                None => None,
            });
        }
        outcomes
    }

    /// Joins the reads of those chunks that are under way or done.
    pub(super) fn join_reads(&self, dataset: &Dataset, chunks: &[Chunk]) -> Vec<Option<JoinedRead>> {
        let reads = self.without_arena.lock();
        chunks.iter().map(|&chunk| reads.get(&(dataset.id(), chunk)).cloned()).collect()
    }

    /// Begins to read those chunks that nobody reads yet, and joins the other reads. The new reads hold `room` until they end.
    fn begin_reads(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
        room: OwnedSemaphorePermit,
    ) -> Vec<Option<JoinedRead>> {
        let mut new = Vec::new();
        let mut reads = self.without_arena.lock();
        let join = |&chunk: &Chunk| {
            let begin = || {
                let (open, joined) = open_read();
                new.push((chunk, open));
                joined
            };
            Some(reads.entry((dataset.id(), chunk)).or_insert_with(begin).clone())
        };
        let joined = chunks.iter().map(join).collect();
        drop(reads);
        if !new.is_empty() {
            let (fetcher, dataset) = (self.clone(), dataset.clone());
            self.spawn_origin_load(async move {
                fetcher.perform_reads(&dataset, new).await;
                drop(room);
            });
        }
        joined
    }

    async fn perform_reads(&self, dataset: &Arc<Dataset>, new: Vec<(Chunk, OpenRead)>) {
        let chunks: Vec<Chunk> = new.iter().map(|(chunk, _)| *chunk).collect();
        let buffers = chunks.iter().map(|&chunk| vec![0; chunk_len(dataset, chunk)]).collect();
        let mut reading: FuturesUnordered<_> = self.origins.read(dataset, &chunks, buffers).into_iter().collect();
        let (start, mut unclaimed) = (Instant::now(), Vec::new());
        while let Some(part) = reading.next().await {
            for (number, result) in part {
                let (chunk, open) = &new[number];
                // One is in the table. If a peer waits now, another one may be about to ask again, unless the read was quick.
                // Whoever asks after a failure tries again.
                let is_wanted_again = open.joined() == 1 || start.elapsed() > self.peers.deadlines().request / 4;
                let is_kept = result.is_ok() && is_wanted_again;
                open.end(result.map(Arc::new));
                if is_kept {
                    unclaimed.push(*chunk);
                } else {
                    self.without_arena.lock().remove(&(dataset.id(), *chunk));
                }
            }
        }
        if !unclaimed.is_empty() {
            sleep(self.peers.deadlines().request).await;
            self.without_arena.remove(dataset.id(), &unclaimed);
        }
    }
}

fn chunk_len(dataset: &Dataset, chunk: Chunk) -> usize {
    dataset.chunk(chunk).map_or(0, |info| info.len as usize)
}
