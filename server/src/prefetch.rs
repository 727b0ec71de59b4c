//! PendingFetch ahead of readers that have said what they will read. One task an order: it keeps a window of chunks leased that come
//! next, sees by the arena's marks which of them were read, and takes as many more. How many is the controller's matter, within what
//! the policy says.

mod controller;

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use dayfly_meta::chunk::Chunk;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, DatasetId, SampleId};
use dayfly_meta::limits::{ORDER_SAMPLES_MAX, ORDERS_MAX, PREFETCH_REQUESTS_MAX, PREFETCH_SHARE};
use dayfly_meta::wire::status::{Depth, Policy, PrefetchStatus};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::{Notify, Semaphore};
use tokio::time::sleep;

use crate::arena::{Arena, Lease};
use crate::fetch::{Fetched, FetchedChunks, Fetcher};
use crate::store::Dataset;
use controller::{Controller, INTERVAL, Observed, Plan};

/// A request asks for no more than this: small ones come as often as they are read.
const REQUEST_CHUNKS_MAX: usize = 256;
const REQUEST_LEN_MAX: u64 = 2 << 20;
/// How often the marks are looked at while something is read, and while nothing is.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const IDLE_INTERVAL: Duration = Duration::from_millis(10);
/// Readers of one order go ahead of each other by so many chunks: as many unread ones are looked behind.
const OUT_OF_ORDER_MAX: usize = 256;
/// Chunks asked for by processes that are remembered.
const ASKED_FOR_MAX: usize = 16 << 10;
/// Samples that are here already and are passed over before others have their turn.
const PASSED_OVER_MAX: usize = 4096;

/// All orders of a node.
pub(crate) struct Prefetcher {
    arena: Arena,
    fetcher: Arc<Fetcher>,
    order_idle: Duration,
    recall: Duration,
    policy: Mutex<Policy>,
    orders: Mutex<Vec<Weak<Order>>>,
    permits: Semaphore,
    /// Samples in all orders.
    ordered: AtomicU64,
    /// Bytes that all orders have ahead, or on their way.
    taken: AtomicU64,
    hits: AtomicU64,
    late: AtomicU64,
    wasted: AtomicU64,
}

/// Samples in the order in which they will be read.
#[derive(Default)]
pub(crate) struct SampleOrder {
    samples: Vec<SampleId>,
    /// Who has counted them.
    prefetcher: Option<Arc<Prefetcher>>,
}

impl SampleOrder {
    /// Takes more of them; `false`, and nothing taken, where the node has as many as it may.
    pub(crate) fn extend(&mut self, prefetcher: &Arc<Prefetcher>, samples: Vec<SampleId>) -> bool {
        let more = samples.len() as u64;
        let fits = |count: u64| count.checked_add(more).filter(|&count| count <= ORDER_SAMPLES_MAX as u64);
        if prefetcher.ordered.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
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
            prefetcher.ordered.fetch_sub(self.samples.len() as u64, Ordering::Relaxed);
        }
    }
}

/// What others see of an order.
struct Order {
    dataset: DatasetId,
    late: AtomicU64,
    asked: Notify,
    /// What processes asked for themselves: it need not wait for them in the window.
    asked_for: Mutex<HashSet<Chunk>>,
    depth_bytes: AtomicU64,
    requests: AtomicU64,
}

impl Order {
    fn asked_for(&self) -> MutexGuard<'_, HashSet<Chunk>> {
        self.asked_for.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Prefetcher {
    pub(crate) fn new(arena: Arena, fetcher: Arc<Fetcher>, deadlines: &Deadlines) -> Arc<Self> {
        let zero = || AtomicU64::new(0);
        Arc::new(Self {
            arena,
            fetcher,
            order_idle: deadlines.order_idle,
            recall: deadlines.recall,
            policy: Mutex::default(),
            orders: Mutex::default(),
            permits: Semaphore::new(ORDERS_MAX),
            ordered: zero(),
            taken: zero(),
            hits: zero(),
            late: zero(),
            wasted: zero(),
        })
    }

    /// Takes what is set in a policy; returns what holds now.
    pub(crate) fn set_policy(&self, policy: Policy) -> Policy {
        let mut held = self.policy.lock().unwrap_or_else(PoisonError::into_inner);
        *held = held.then(policy);
        *held
    }

    pub(crate) fn policy(&self) -> Policy {
        *self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self) -> PrefetchStatus {
        let orders: Vec<Arc<Order>> = self.orders().iter().filter_map(Weak::upgrade).collect();
        let sum = |of: &dyn Fn(&Order) -> u64| orders.iter().map(|order| of(order)).sum();
        PrefetchStatus {
            orders: orders.len() as u64,
            depth_bytes: sum(&|order| order.depth_bytes.load(Ordering::Relaxed)),
            requests: sum(&|order| order.requests.load(Ordering::Relaxed)),
            hits: self.hits.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
            wasted: self.wasted.load(Ordering::Relaxed),
        }
    }

    /// A process has asked for chunks that were not there: if they were ordered, they come too late.
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
            order.late.fetch_add(count, Ordering::Relaxed);
            let mut asked_for = order.asked_for();
            if asked_for.len() > ASKED_FOR_MAX {
                asked_for.clear();
            }
            asked_for.extend(chunks.clone().copied());
            drop(asked_for);
            order.asked.notify_one();
        }
        if is_ordered {
            self.late.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Reads an order ahead, until its end or until this is dropped.
    pub(crate) async fn run(self: Arc<Self>, dataset: Arc<Dataset>, ordered: SampleOrder) {
        let Ok(_permit) = self.permits.acquire().await else { return };
        let zero = || AtomicU64::new(0);
        let order = Arc::new(Order {
            dataset: dataset.id(),
            late: zero(),
            asked: Notify::new(),
            asked_for: Mutex::default(),
            depth_bytes: zero(),
            requests: zero(),
        });
        self.orders().push(Arc::downgrade(&order));
        // Until something is known; who has said how far, is not begun with anything else.
        let depth_bytes = match self.policy().prefetch {
            Some(Depth::Samples(_)) => 0,
            _ => self.memory().min(2 * REQUEST_LEN_MAX),
        };
        let ahead = Ahead {
            prefetcher: &self,
            order: &order,
            todo: Todo { dataset: &dataset, samples: &ordered.samples, next: 0, chunks: VecDeque::new() },
            window: VecDeque::new(),
            window_bytes: 0,
            next_number: 1,
            furthest: 0,
            controller: Controller::new(PREFETCH_REQUESTS_MAX),
            plan: Plan { depth_bytes, requests: 2 },
            seen: Observed::default(),
            looked: Instant::now(),
            progressed: Instant::now(),
            mean_len: 4096,
            is_paused: false,
            taken: 0,
        };
        ahead.run().await;
    }

    /// What all orders together may take of the arena.
    fn all_memory(&self) -> u64 {
        let all = self.policy().prefetch_bytes.unwrap_or(self.arena.len() / PREFETCH_SHARE);
        // The rest is for those who ask.
        all.min(self.arena.len() - self.arena.len() / 4)
    }

    /// What each of them may take.
    fn memory(&self) -> u64 {
        let orders = self.orders().iter().filter(|order| order.strong_count() > 0).count().max(1) as u64;
        self.all_memory() / orders
    }

    fn orders(&self) -> MutexGuard<'_, Vec<Weak<Order>>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is still to be fetched of an order.
struct Todo<'a> {
    dataset: &'a Arc<Dataset>,
    samples: &'a [SampleId],
    next: usize,
    chunks: VecDeque<Chunk>,
}

impl Todo<'_> {
    /// The next chunks that are not here, for one request.
    fn request(&mut self) -> (Vec<Chunk>, u64) {
        let (mut request, mut bytes) = (Vec::new(), 0);
        let mut passed_over = 0;
        while request.len() < REQUEST_CHUNKS_MAX && passed_over < PASSED_OVER_MAX {
            let Some(&chunk) = self.chunks.front() else {
                let Some(&sample) = self.samples.get(self.next) else { break };
                self.next += 1;
                passed_over += 1;
                let Some((size, blocks)) = self.dataset.catalog().sample(sample) else { continue };
                for (part, block) in (0..).zip(blocks.map(BlockId)) {
                    let block_len = dayfly_meta::catalog::block_len(size, part);
                    self.chunks.extend(Chunk::all(block, block_len));
                }
                continue;
            };
            let len = self.dataset.chunk(chunk).map_or(0, |info| info.len);
            if len == 0 || self.dataset.is_local(chunk.block) {
                self.chunks.pop_front();
                continue;
            }
            if !request.is_empty() && bytes + len > REQUEST_LEN_MAX {
                break;
            }
            self.chunks.pop_front();
            request.push(chunk);
            bytes += len;
        }
        (request, bytes)
    }

    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.next == self.samples.len()
    }

    fn put_back(&mut self, chunks: impl DoubleEndedIterator<Item = Chunk>) {
        chunks.rev().for_each(|chunk| self.chunks.push_front(chunk));
    }
}

/// A chunk that has come and was not read yet.
struct Waiting {
    chunk: Chunk,
    lease: Lease,
    since: Instant,
    /// Its place among all that came for the order.
    number: u64,
}

/// An order that is being read ahead.
struct Ahead<'a> {
    prefetcher: &'a Arc<Prefetcher>,
    order: &'a Order,
    todo: Todo<'a>,
    window: VecDeque<Waiting>,
    window_bytes: u64,
    /// The next one's number, and that of the furthest that was read.
    next_number: u64,
    furthest: u64,
    controller: Controller,
    plan: Plan,
    seen: Observed,
    looked: Instant,
    /// When something was last read.
    progressed: Instant,
    mean_len: u64,
    /// Whether all was given back, for nobody read.
    is_paused: bool,
    /// What is counted in `Prefetcher::taken` for it.
    taken: u64,
}

impl Ahead<'_> {
    async fn run(mut self) {
        let mut flights = FuturesUnordered::new();
        let mut flight_bytes = 0;
        loop {
            self.look();
            self.take(self.window_bytes + flight_bytes);
            while !self.is_paused
                && flights.len() < self.plan.requests
                && self.window_bytes + flight_bytes < self.plan.depth_bytes
                && self.take(self.window_bytes + flight_bytes) < self.prefetcher.all_memory()
            {
                let (chunks, bytes) = self.todo.request();
                if chunks.is_empty() {
                    break;
                }
                flight_bytes += bytes;
                flights.push(fetch(&self.prefetcher.fetcher, self.todo.dataset, self.order, chunks, bytes));
            }
            let is_through = self.todo.is_empty() && flights.is_empty();
            if is_through && self.window.is_empty() {
                return;
            }
            let is_idle = self.progressed.elapsed() > Duration::from_millis(50);
            let pause = if is_idle { IDLE_INTERVAL } else { LOOK_INTERVAL };
            tokio::select! {
                Some(flight) = flights.next() => {
                    flight_bytes -= flight.bytes;
                    self.land(flight);
                }
                () = self.order.asked.notified() => {
                    self.progressed = Instant::now();
                    self.is_paused = false;
                }
                () = sleep(pause) => {}
            }
        }
    }

    /// Says what this order has ahead, or on its way; returns what all orders have.
    fn take(&mut self, bytes: u64) -> u64 {
        let before = std::mem::replace(&mut self.taken, bytes);
        let taken = &self.prefetcher.taken;
        if bytes >= before {
            taken.fetch_add(bytes - before, Ordering::Relaxed) + bytes - before
        } else {
            taken.fetch_sub(before - bytes, Ordering::Relaxed) - (before - bytes)
        }
    }

    fn land(&mut self, flight: Flight) {
        let mut left: Vec<Option<Chunk>> = flight.chunks.into_iter().map(Some).collect();
        for (at, fetched) in flight.part {
            let Some(chunk) = left.get_mut(at as usize).and_then(Option::take) else { continue };
            // What has failed fails again for its reader, who is the one to be told.
            let Fetched::Leased(lease) = fetched else { continue };
            if !self.order.asked_for().remove(&chunk) {
                self.window_bytes += lease.len();
                self.mean_len = (self.mean_len * 15 + lease.len()) / 16 + 1;
                self.window.push_back(Waiting { chunk, lease, since: Instant::now(), number: self.next_number });
                self.next_number += 1;
            }
        }
        // There was no room for these.
        let left: Vec<Chunk> = left.into_iter().flatten().collect();
        self.seen.is_short |= !left.is_empty();
        self.todo.put_back(left.into_iter());
        if flight.is_remote {
            self.seen.latency = Some(self.seen.latency.map_or(flight.took, |shortest| shortest.min(flight.took)));
        }
    }

    /// Lets go of what was read, and has the controller think again when it is time.
    fn look(&mut self) {
        let (mut at, mut hits, mut read_bytes) = (0, 0, 0);
        while at < self.window.len().min(OUT_OF_ORDER_MAX) {
            let Waiting { chunk, lease, .. } = &self.window[at];
            // What came to be kept is found there, by reads that leave no mark.
            if !lease.was_read() && !self.todo.dataset.is_local(chunk.block) {
                at += 1;
            } else if let Some(Waiting { chunk, lease, number, .. }) = self.window.remove(at) {
                self.furthest = self.furthest.max(number);
                read_bytes += lease.len();
                hits += 1;
                self.prefetcher.fetcher.cache(self.todo.dataset, chunk, lease);
            }
        }
        self.window_bytes -= read_bytes;
        self.seen.read_bytes += read_bytes;
        self.prefetcher.hits.fetch_add(hits, Ordering::Relaxed);
        if hits > 0 {
            self.progressed = Instant::now();
            self.drop_overtaken();
        } else if !self.window.is_empty() && self.progressed.elapsed() > self.patience() {
            self.give_back();
        }
        let elapsed = self.looked.elapsed();
        if elapsed >= INTERVAL {
            self.control(elapsed);
        }
    }

    fn control(&mut self, elapsed: Duration) {
        let policy = self.prefetcher.policy();
        let late = self.order.late.swap(0, Ordering::Relaxed);
        let seen = Observed {
            elapsed,
            was_late: late > 0,
            // What it asked for itself, it read.
            read_bytes: self.seen.read_bytes + late * self.mean_len,
            is_short: self.seen.is_short || self.prefetcher.arena.is_short(),
            memory: self.prefetcher.memory(),
            request_len: (self.mean_len * REQUEST_CHUNKS_MAX as u64).min(REQUEST_LEN_MAX),
            ..self.seen
        };
        self.plan = self.controller.step(seen);
        if let Some(Depth::Samples(samples)) = policy.prefetch {
            self.plan.depth_bytes = (u64::from(samples) * self.mean_len).min(seen.memory);
        }
        self.order.depth_bytes.store(self.plan.depth_bytes, Ordering::Relaxed);
        self.order.requests.store(self.plan.requests as u64, Ordering::Relaxed);
        if seen.is_short {
            // Others wait, and not all of this is needed soon.
            while self.window_bytes > self.plan.depth_bytes
                && let Some(Waiting { chunk, lease, .. }) = self.window.pop_back()
            {
                self.window_bytes -= lease.len();
                self.todo.put_back(std::iter::once(chunk));
            }
        }
        self.seen = Observed::default();
        self.looked = Instant::now();
    }

    /// What has been there for long, while others behind it were read, will not be read.
    fn drop_overtaken(&mut self) {
        let patience = self.prefetcher.order_idle;
        let is_overtaken = |first: &Waiting| first.number < self.furthest && first.since.elapsed() > patience;
        while self.window.front().is_some_and(is_overtaken) {
            let overtaken = self.window.pop_front();
            self.window_bytes -= overtaken.map_or(0, |overtaken| overtaken.lease.len());
            self.prefetcher.wasted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How long nobody need read before others get the room: those who wait for some do not wait for an idle order.
    fn patience(&self) -> Duration {
        let Prefetcher { arena, recall, order_idle, .. } = &**self.prefetcher;
        if arena.is_short() { *recall } else { *order_idle }
    }

    /// Nobody reads: others may have the room. What was ahead is fetched again when somebody does.
    fn give_back(&mut self) {
        self.prefetcher.wasted.fetch_add(self.window.len() as u64, Ordering::Relaxed);
        let chunks: Vec<Chunk> = self.window.drain(..).map(|waiting| waiting.chunk).collect();
        self.todo.put_back(chunks.into_iter());
        self.window_bytes = 0;
        self.is_paused = true;
        self.controller = Controller::new(PREFETCH_REQUESTS_MAX);
    }
}

impl Drop for Ahead<'_> {
    fn drop(&mut self) {
        self.take(0);
        self.prefetcher.wasted.fetch_add(self.window.len() as u64, Ordering::Relaxed);
    }
}

/// A request that has ended.
struct Flight {
    chunks: Vec<Chunk>,
    bytes: u64,
    part: FetchedChunks,
    took: Duration,
    /// Whether anything came over the network for it.
    is_remote: bool,
}

async fn fetch(fetcher: &Arc<Fetcher>, dataset: &Arc<Dataset>, order: &Order, chunks: Vec<Chunk>, bytes: u64) -> Flight {
    let start = Instant::now();
    let mut fetching = fetcher.begin_ahead(dataset, &chunks, bytes);
    for (at, lease) in fetching.leased() {
        // If it was read before, and not asked for just now, that was in another epoch.
        if chunks.get(at as usize).is_some_and(|chunk| !order.asked_for().contains(chunk)) {
            lease.clear_mark();
        }
    }
    let is_remote = fetching.load_bytes > 0;
    let mut part = FetchedChunks::new();
    while let Some(more) = fetching.next().await {
        part.extend(more);
    }
    if part.is_empty() {
        // No room at all: not at once again.
        sleep(INTERVAL).await;
    }
    Flight { chunks, bytes, part, took: start.elapsed(), is_remote }
}
