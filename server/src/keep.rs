//! Keeping what came from others on this node's drives, if there is room: a task that takes chunks as they land and writes many at
//! once, so that from the next epoch on processes find them without asking.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dayfly_meta::checksum::check;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::limits::KEEP_QUEUE_LEN_MAX;
use dayfly_meta::wire::status::Hop;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::sleep;

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
pub(crate) struct Keeper {
    /// Bounded by the bytes that wait.
    queue: UnboundedSender<Landed>,
    waiting_bytes: Arc<AtomicU64>,
    waiting_bytes_max: u64,
}

impl Keeper {
    /// The task ends with the keeper.
    pub(crate) fn new(arena_len: u64, damage: Arc<Damage>, blocking: Arc<dyn Blocking>) -> (Self, impl Future<Output = ()>) {
        let (queue, landed) = unbounded_channel();
        let waiting_bytes = Arc::new(AtomicU64::new(0));
        let task = keep_all(landed, waiting_bytes.clone(), damage, blocking);
        (Self { queue, waiting_bytes, waiting_bytes_max: KEEP_QUEUE_LEN_MAX.min(arena_len / 8) }, task)
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
        let damage = damage.clone();
        let writing = blocking.run(move || {
            together.retain(|one| one.is_good(&damage));
            let chunks: Vec<(Chunk, &[u8])> = together.iter().map(|one| (one.chunk, one.lease.bytes())).collect();
            dataset.keep(&chunks)
        });
        match writing.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "cannot keep blocks of other nodes"),
            Err(error) => tracing::warn!(%error, "keeping blocks of other nodes failed"),
        }
        waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}
