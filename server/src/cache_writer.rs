//! Caches other nodes' blocks on this node's drives while there is room. One task takes chunks as they arrive in the arena and
//! writes many of them at once. Another task syncs what was written. After the sync, processes can find the copies without
//! sending a message.
//!
//! `store::cached_blocks` decides which blocks are cached. A chunk is verified again before it is written, because a copy on a
//! drive is read in later epochs too.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::checksum::check;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::DatasetId;
use dayfly_meta::limits::{CACHE_QUEUE_LEN_MAX, CACHE_SYNC_INTERVAL, CACHE_SYNC_LEN};
use dayfly_meta::wire::status::Hop;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{sleep, timeout};

use crate::arena::{Arena, Lease};
use crate::blocking::Blocking;
use crate::stats::Damage;
use crate::store::Dataset;

/// Bytes that are written in one batch; fewer if no further chunk arrives for [`BATCH_WAIT`].
const BATCH_LEN: u64 = 4 << 20;
const BATCH_WAIT: Duration = Duration::from_millis(5);

/// A chunk that waits to be written. Its lease pins its bytes in the arena.
struct QueuedChunk {
    dataset: Arc<Dataset>,
    chunk: Chunk,
    lease: Lease,
}

/// Sends chunks to the task that caches them.
pub(crate) struct CacheWriter {
    /// The queue has no bound of its own: `waiting_bytes_max` bounds it.
    queue: UnboundedSender<QueuedChunk>,
    waiting_bytes: Arc<AtomicU64>,
    waiting_bytes_max: u64,
}

impl CacheWriter {
    /// Returns the writer and its task, which ends when the writer is dropped.
    pub(crate) fn new(arena: Arena, damage: Arc<Damage>, blocking: Arc<dyn Blocking>) -> (Self, impl Future<Output = ()>) {
        let (queue, queued) = unbounded_channel();
        let waiting_bytes_max = CACHE_QUEUE_LEN_MAX.min(arena.len() / 8);
        let waiting_bytes = Arc::new(AtomicU64::new(0));
        let written = Arc::new(Written::default());
        let writing = write_all(queued, waiting_bytes.clone(), written.clone(), damage, blocking.clone());
        let task = async move {
            tokio::select! {
                biased;
                () = writing => {}
                () = sync_all(&written, &arena, &*blocking) => {}
            }
        };
        (Self { queue, waiting_bytes, waiting_bytes_max }, task)
    }

    /// Returns whether so many bytes wait to be written that no more are taken.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting_bytes.load(Ordering::Relaxed) >= self.waiting_bytes_max
    }

    /// Enqueues a chunk to be cached, if this node caches the chunk's block. A chunk that arrives while too many bytes wait is
    /// not cached this time.
    pub(crate) fn enqueue(&self, dataset: &Arc<Dataset>, chunk: Chunk, lease: impl FnOnce() -> Option<Lease>) {
        if !dataset.should_cache(chunk.block) || self.is_full() {
            return;
        }
        let Some(lease) = lease() else { return };
        self.waiting_bytes.fetch_add(lease.len(), Ordering::Relaxed);
        // The task is gone only when the session has ended.
        let _ = self.queue.send(QueuedChunk { dataset: dataset.clone(), chunk, lease });
    }
}

/// Datasets with blocks that have been written but not synced yet.
#[derive(Default)]
struct Written {
    group: Mutex<Group>,
    grew: Notify,
}

#[derive(Default)]
struct Group {
    datasets: HashMap<DatasetId, Arc<Dataset>>,
    bytes: u64,
}

impl Written {
    fn add(&self, dataset: Arc<Dataset>, bytes: u64) {
        let mut group = self.group();
        group.bytes += bytes;
        group.datasets.insert(dataset.id(), dataset);
        drop(group);
        self.grew.notify_one();
    }

    /// Waits until a group is large enough or old enough to be synced, and takes it.
    async fn next(&self) -> Group {
        while self.group().datasets.is_empty() {
            self.grew.notified().await;
        }
        let is_large = async {
            while self.group().bytes < CACHE_SYNC_LEN {
                self.grew.notified().await;
            }
        };
        // Both results mean that the group can be synced: it is large enough or, after the timeout, old enough.
        let _ = timeout(CACHE_SYNC_INTERVAL, is_large).await;
        std::mem::take(&mut *self.group())
    }

    fn group(&self) -> MutexGuard<'_, Group> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Syncs one group after another, while the next one is being written.
async fn sync_all(written: &Written, arena: &Arena, blocking: &dyn Blocking) {
    loop {
        for dataset in written.next().await.datasets.into_values() {
            let id = dataset.id().0;
            let arena = arena.clone();
            match blocking.run(move || sync_copies(&dataset, &arena)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(dataset = id, %error, "a drive failed to sync copies of blocks; the copies are dropped")
                }
                Err(error) => tracing::warn!(dataset = id, %error, "cannot sync copies of other nodes' blocks"),
            }
        }
    }
}

/// Waits until the copies that were written before are on the drives. What processes find there from then on leaves the arena.
pub(crate) fn sync_copies(dataset: &Dataset, arena: &Arena) -> io::Result<()> {
    let mut published = Vec::new();
    let synced = dataset.sync_cached(&mut |block, len| published.push((block, len)));
    arena.forget_blocks(dataset.id(), &published);
    synced
}

impl QueuedChunk {
    /// Returns whether the chunk still has the checksum that it had when it arrived. A damaged chunk must not be written to a
    /// drive, and is dropped from the arena so that nobody reads it there.
    fn is_undamaged(&self, damage: &Damage) -> bool {
        let Self { dataset, chunk, lease } = self;
        let known = dataset.catalog().chunk_checksum(*chunk).zip(dataset.catalog().owner(chunk.block));
        let Some((expected, owner)) = known else { return false };
        let checked = check(lease.bytes(), expected);
        if let Err(mismatch) = checked {
            damage.record(Hop::Arena, owner, format_args!("block {}, about to be cached", chunk.block.0), mismatch);
            lease.discard(&(dataset.id(), *chunk));
        }
        checked.is_ok()
    }
}

/// Chunks of one dataset that are written together.
struct Batch {
    dataset: Arc<Dataset>,
    chunks: Vec<QueuedChunk>,
    bytes: u64,
}

/// Collects a batch; `None` when the writer is gone. `next` carries a chunk of another dataset over to the next batch.
async fn next_batch(queued: &mut UnboundedReceiver<QueuedChunk>, next: &mut Option<QueuedChunk>) -> Option<Batch> {
    let first = match next.take() {
        Some(first) => first,
        None => queued.recv().await?,
    };
    let mut batch = Batch { dataset: first.dataset.clone(), bytes: first.lease.len(), chunks: vec![first] };
    let mut has_waited = false;
    while batch.bytes < BATCH_LEN {
        match queued.try_recv() {
            Ok(chunk) if chunk.dataset.id() == batch.dataset.id() => {
                batch.bytes += chunk.lease.len();
                batch.chunks.push(chunk);
            }
            Ok(chunk) => {
                *next = Some(chunk);
                break;
            }
            Err(_) if has_waited => break,
            Err(_) => {
                sleep(BATCH_WAIT).await;
                has_waited = true;
            }
        }
    }
    Some(batch)
}

async fn write_all(
    mut queued: UnboundedReceiver<QueuedChunk>,
    waiting_bytes: Arc<AtomicU64>,
    written: Arc<Written>,
    damage: Arc<Damage>,
    blocking: Arc<dyn Blocking>,
) {
    let mut next = None;
    while let Some(Batch { dataset, mut chunks, bytes }) = next_batch(&mut queued, &mut next).await {
        let (target, damage) = (dataset.clone(), damage.clone());
        let writing = blocking.run(move || {
            chunks.retain(|queued| queued.is_undamaged(&damage));
            let chunks: Vec<(Chunk, &[u8])> = chunks.iter().map(|queued| (queued.chunk, queued.lease.bytes())).collect();
            target.write_cached(&chunks)
        });
        match writing.await {
            Ok(Ok(0)) => {}
            Ok(Ok(bytes)) => written.add(dataset, bytes),
            Ok(Err(error)) => {
                tracing::warn!(dataset = dataset.id().0, %error, "cannot cache blocks of other nodes");
                // Some of the chunks may have been written.
                written.add(dataset, 0);
            }
            Err(error) => tracing::warn!(dataset = dataset.id().0, %error, "cannot cache blocks of other nodes"),
        }
        waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}
