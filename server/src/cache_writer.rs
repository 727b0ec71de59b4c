//! Keeping what came from others on this node's drives, if there is room: a task that takes chunks as they land and writes many at
//! once, and a task that syncs them, so that from the next epoch on processes find them without asking.

use std::collections::HashMap;
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

use crate::arena::Lease;
use crate::blocking::Blocking;
use crate::stats::Damage;
use crate::store::Dataset;

/// Written together; less, if no more comes for a moment.
const TOGETHER_LEN: u64 = 4 << 20;
const TOGETHER_WAIT: Duration = Duration::from_millis(5);

/// A chunk to be kept; its lease keeps its bytes.
struct Landed {
    dataset: Arc<Dataset>,
    chunk: Chunk,
    lease: Lease,
}

/// The way to the task.
pub(crate) struct CacheWriter {
    /// Bounded by the bytes that wait.
    queue: UnboundedSender<Landed>,
    waiting_bytes: Arc<AtomicU64>,
    waiting_bytes_max: u64,
}

impl CacheWriter {
    /// The task ends with the cache_writer.
    pub(crate) fn new(arena_len: u64, damage: Arc<Damage>, blocking: Arc<dyn Blocking>) -> (Self, impl Future<Output = ()>) {
        let (queue, landed) = unbounded_channel();
        let waiting_bytes = Arc::new(AtomicU64::new(0));
        let written = Arc::new(Written::default());
        let writing = keep_all(landed, waiting_bytes.clone(), written.clone(), damage, blocking.clone());
        let task = async move {
            tokio::select! {
                biased;
                () = writing => {}
                () = sync_all(&written, &*blocking) => {}
            }
        };
        (Self { queue, waiting_bytes, waiting_bytes_max: CACHE_QUEUE_LEN_MAX.min(arena_len / 8) }, task)
    }

    /// Has a chunk kept, if its block is meant to be and not too many wait.
    pub(crate) fn keep(&self, dataset: &Arc<Dataset>, chunk: Chunk, lease: impl FnOnce() -> Option<Lease>) {
        if !dataset.keeps(chunk.block) || self.waiting_bytes.load(Ordering::Relaxed) >= self.waiting_bytes_max {
            return;
        }
        let Some(lease) = lease() else { return };
        self.waiting_bytes.fetch_add(lease.len(), Ordering::Relaxed);
        // Without a task the session has ended.
        let _ = self.queue.send(Landed { dataset: dataset.clone(), chunk, lease });
    }
}

/// What was written and is to be synced.
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

    /// Waits until there is a group to be synced, and takes it.
    async fn next(&self) -> Group {
        while self.group().datasets.is_empty() {
            self.grew.notified().await;
        }
        let is_large = async {
            while self.group().bytes < CACHE_SYNC_LEN {
                self.grew.notified().await;
            }
        };
        // Large or old, it is taken.
        let _ = timeout(CACHE_SYNC_INTERVAL, is_large).await;
        std::mem::take(&mut *self.group())
    }

    fn group(&self) -> MutexGuard<'_, Group> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Syncs group after group, while the next is written.
async fn sync_all(written: &Written, blocking: &dyn Blocking) {
    loop {
        for dataset in written.next().await.datasets.into_values() {
            match blocking.run(move || dataset.sync_kept()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(%error, "copies of other nodes' blocks are given up"),
                Err(error) => tracing::warn!(%error, "syncing copies of other nodes' blocks failed"),
            }
        }
    }
}

impl Landed {
    /// Whether it is still what it was when it came: a copy on a drive is read in later epochs too, so one that went bad in the
    /// arena is not written there, and nobody is to read it.
    fn is_good(&self, damage: &Damage) -> bool {
        let Self { dataset, chunk, lease } = self;
        let known = dataset.catalog().chunk_checksum(*chunk).zip(dataset.catalog().owner(chunk.block));
        let Some((expected, owner)) = known else { return false };
        let checked = check(lease.bytes(), expected);
        if let Err(mismatch) = checked {
            damage.found(Hop::Arena, owner, &format!("block {}, about to be kept", chunk.block.0), mismatch);
            lease.discard(&(dataset.id(), *chunk));
        }
        checked.is_ok()
    }
}

async fn keep_all(
    mut landed: UnboundedReceiver<Landed>,
    waiting_bytes: Arc<AtomicU64>,
    written: Arc<Written>,
    damage: Arc<Damage>,
    blocking: Arc<dyn Blocking>,
) {
    let mut next = None;
    loop {
        let first = match next.take() {
            Some(first) => first,
            None => match landed.recv().await {
                Some(first) => first,
                None => return,
            },
        };
        let dataset: Arc<Dataset> = first.dataset.clone();
        let mut bytes = first.lease.len();
        let mut together = vec![first];
        let mut has_waited = false;
        while bytes < TOGETHER_LEN {
            match landed.try_recv() {
                Ok(one) if one.dataset.id() == dataset.id() => {
                    bytes += one.lease.len();
                    together.push(one);
                }
                Ok(one) => {
                    next = Some(one);
                    break;
                }
                Err(_) if has_waited => break,
                Err(_) => {
                    sleep(TOGETHER_WAIT).await;
                    has_waited = true;
                }
            }
        }
        let target = dataset.clone();
        let damage = damage.clone();
        let writing = blocking.run(move || {
            together.retain(|one| one.is_good(&damage));
            let chunks: Vec<(Chunk, &[u8])> = together.iter().map(|one| (one.chunk, one.lease.bytes())).collect();
            target.keep(&chunks)
        });
        match writing.await {
            Ok(Ok(0)) => {}
            Ok(Ok(bytes)) => written.add(dataset, bytes),
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot keep blocks of other nodes");
                // Some may have been written.
                written.add(dataset, 0);
            }
            Err(error) => tracing::warn!(%error, "keeping blocks of other nodes failed"),
        }
        waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}
