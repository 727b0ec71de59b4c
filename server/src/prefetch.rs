//! Prefetch: fetches blocks ahead of readers that have sent the order in which they will read samples.
//!
//! Each order has one task. The task keeps leases on a *window* of chunks that come next in the order. From the arena's marks
//! it learns which of these chunks were read; it releases those and fetches the same number of new ones. A controller uses
//! feedback to decide how far the task reads ahead, and with how many requests at once, within the limits of the policy
//! (`dayfly tune --prefetch`).
//!
//! # Parts
//!
//! - [`Prefetcher`]: all orders of the node, their memory limits, and their counters.
//! - [`SampleOrder`]: the samples of one order, as they arrive from a client.
//! - [`order`]: the task that reads ahead along one order.
//! - [`controller`]: decides the depth and the number of requests. It knows nothing about chunks or
//!   time, so tests can drive it with simulated feedback.
//!
//! # Invariants
//!
//! - All orders together lease at most three quarters of the arena. The rest is for requests of processes.
//! - While a request of a process waits for room, an order takes no new room, and shrinks its window.
//! - If nothing in an order is read for `Deadlines::order_idle`, the order releases its whole window until something is read
//!   again.
//! - A chunk that a process itself requested does not enter the window.
//!
//! Prefetch never reports errors: if a chunk cannot be prefetched, its reader requests it later, and gets the error then.
//! Prefetch does not cache blocks; it passes each chunk that was read to the fetcher, which caches the chunk.

mod controller;
mod order;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{DatasetId, SampleId};
use dayfly_meta::limits::{ORDER_SAMPLES_MAX, ORDERS_MAX, PREFETCH_SHARE};
use dayfly_meta::wire::status::{Policy, PrefetchStatus};
use tokio::sync::Semaphore;

use crate::arena::Arena;
use crate::fetch::Fetcher;
use crate::store::Dataset;
use order::{OrderTask, SharedOrder};

/// Reads ahead along all orders of a node.
pub(crate) struct Prefetcher {
    arena: Arena,
    fetcher: Arc<Fetcher>,
    /// How long an order may stay unread before it releases its window ([`Deadlines`]).
    order_idle: Duration,
    /// The same limit while a request waits for room ([`Deadlines`]).
    recall: Duration,
    policy: Mutex<Policy>,
    orders: Mutex<Vec<Weak<SharedOrder>>>,
    permits: Semaphore,
    /// Samples in all orders.
    ordered_samples: AtomicU64,
    /// Bytes in the windows of all orders, and in flight for them.
    ahead_bytes: AtomicU64,
    hits: AtomicU64,
    late: AtomicU64,
    wasted: AtomicU64,
}

/// Samples in the order in which a client will read them. Counts toward the node's limit until it is dropped.
#[derive(Default)]
pub(crate) struct SampleOrder {
    samples: Vec<SampleId>,
    /// The prefetcher that counts the samples.
    prefetcher: Option<Arc<Prefetcher>>,
}

impl SampleOrder {
    /// Appends samples. Returns `false`, and appends nothing, if the node's orders would exceed [`ORDER_SAMPLES_MAX`].
    pub(crate) fn extend(&mut self, prefetcher: &Arc<Prefetcher>, samples: Vec<SampleId>) -> bool {
        let more = samples.len() as u64;
        let fits = |count: u64| count.checked_add(more).filter(|&count| count <= ORDER_SAMPLES_MAX as u64);
        if prefetcher.ordered_samples.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return false;
        }
        self.prefetcher.get_or_insert_with(|| prefetcher.clone());
        self.samples.extend(samples);
        true
    }
}

impl Drop for SampleOrder {
    fn drop(&mut self) {
        if let Some(prefetcher) = &self.prefetcher {
            prefetcher.ordered_samples.fetch_sub(self.samples.len() as u64, Ordering::Relaxed);
        }
    }
}

impl Prefetcher {
    pub(crate) fn new(arena: Arena, fetcher: Arc<Fetcher>, deadlines: &Deadlines) -> Arc<Self> {
        Arc::new(Self {
            arena,
            fetcher,
            order_idle: deadlines.order_idle,
            recall: deadlines.recall,
            policy: Mutex::default(),
            orders: Mutex::default(),
            permits: Semaphore::new(ORDERS_MAX),
            ordered_samples: AtomicU64::new(0),
            ahead_bytes: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            late: AtomicU64::new(0),
            wasted: AtomicU64::new(0),
        })
    }

    /// Applies the fields that are set in `policy`, and returns the policy in force.
    pub(crate) fn set_policy(&self, policy: Policy) -> Policy {
        let mut current = self.policy.lock().unwrap_or_else(PoisonError::into_inner);
        *current = current.then(policy);
        *current
    }

    pub(crate) fn fetcher(&self) -> &Arc<Fetcher> {
        &self.fetcher
    }

    pub(crate) fn policy(&self) -> Policy {
        *self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> PrefetchStatus {
        let orders: Vec<Arc<SharedOrder>> = self.orders().iter().filter_map(Weak::upgrade).collect();
        PrefetchStatus {
            orders: orders.len() as u64,
            depth_bytes: orders.iter().map(|order| order.depth_bytes()).sum(),
            requests: orders.iter().map(|order| order.requests()).sum(),
            hits: self.hits.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
            wasted: self.wasted.load(Ordering::Relaxed),
        }
    }

    /// Records that a process asked for chunks that were not on this node. If the dataset has an order, prefetch was too late
    /// for these chunks.
    pub(crate) fn note_demand<'a>(&self, dataset: DatasetId, chunks: impl Iterator<Item = &'a Chunk> + Clone) {
        let count = chunks.clone().count() as u64;
        let mut orders = self.orders();
        orders.retain(|order| order.strong_count() > 0);
        if count == 0 {
            return;
        }
        let mut is_ordered = false;
        for order in orders.iter().filter_map(Weak::upgrade).filter(|order| order.dataset == dataset) {
            is_ordered = true;
            order.note_demand(chunks.clone().copied(), count);
        }
        if is_ordered {
            self.late.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Reads ahead along an order until its end, or until the future is dropped. At most [`ORDERS_MAX`] orders run at once;
    /// further orders wait.
    pub(crate) async fn run(self: Arc<Self>, dataset: Arc<Dataset>, samples: SampleOrder) {
        let Ok(_permit) = self.permits.acquire().await else { return };
        let order = Arc::new(SharedOrder::new(dataset.id()));
        self.orders().push(Arc::downgrade(&order));
        OrderTask::new(&self, &order, &dataset, &samples.samples).run().await;
    }

    /// Bytes of the arena that all orders together may take.
    fn memory(&self) -> u64 {
        let wanted = self.policy().prefetch_bytes.unwrap_or(self.arena.len() / PREFETCH_SHARE);
        wanted.min(self.arena.len() - self.arena.len() / 4)
    }

    /// Bytes of the arena that each order may take.
    fn memory_per_order(&self) -> u64 {
        let orders = self.orders().iter().filter(|order| order.strong_count() > 0).count().max(1) as u64;
        self.memory() / orders
    }

    fn orders(&self) -> MutexGuard<'_, Vec<Weak<SharedOrder>>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
