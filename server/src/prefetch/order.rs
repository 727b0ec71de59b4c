//! Reads ahead along one order.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId, SampleId};
use dayfly_meta::limits::PREFETCH_REQUESTS_MAX;
use dayfly_meta::wire::status::Depth;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::Notify;
use tokio::time::sleep;

use super::Prefetcher;
use super::controller::{Controller, INTERVAL, Observation, Targets};
use crate::arena::Lease;
use crate::fetch::{Fetched, FetchedChunks, Fetcher};
use crate::store::Dataset;

/// The most chunks that one request asks for. Requests are small so that chunks arrive as steadily as the reader reads them.
const REQUEST_CHUNKS_MAX: usize = 256;
const REQUEST_LEN_MAX: u64 = 2 << 20;
/// How often the task looks at the marks while the reader is reading, and while it is not.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const IDLE_LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// The task looks less often once the reader has not read for this long.
const IDLE_AFTER: Duration = Duration::from_millis(50);
/// Several readers may share an order and overtake each other, so the task looks at this many chunks at the window's front.
const OUT_OF_ORDER_MAX: usize = 256;
/// The most chunks to remember among those that processes asked for themselves.
const DEMANDED_MAX: usize = 16 << 10;
/// The most samples that the task looks at for one request: a long run of local samples must not keep the thread from other
/// tasks.
const REQUEST_SAMPLES_MAX: usize = 4096;
/// The initial estimate of the mean length of a chunk.
const INITIAL_MEAN_LEN: u64 = 4096;

/// The part of an order that its task shares with the prefetcher.
pub(super) struct SharedOrder {
    pub(super) dataset: DatasetId,
    /// Number of chunks that processes have asked for since the controller last ran.
    late: AtomicU64,
    has_demand: Notify,
    /// Chunks that processes asked for themselves. They were read at once, so they need not enter the window.
    demanded: Mutex<HashSet<Chunk>>,
    depth_bytes: AtomicU64,
    requests: AtomicU64,
}

impl SharedOrder {
    pub(super) fn new(dataset: DatasetId) -> Self {
        Self {
            dataset,
            late: AtomicU64::new(0),
            has_demand: Notify::new(),
            demanded: Mutex::default(),
            depth_bytes: AtomicU64::new(0),
            requests: AtomicU64::new(0),
        }
    }

    /// Returns how many bytes ahead of the reader the order currently tries to be.
    pub(super) fn depth_bytes(&self) -> u64 {
        self.depth_bytes.load(Ordering::Relaxed)
    }

    /// Returns how many requests the order currently tries to have in flight.
    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Records `count` chunks that a process asked for, and wakes the task.
    pub(super) fn note_demand(&self, chunks: impl Iterator<Item = Chunk>, count: u64) {
        self.late.fetch_add(count, Ordering::Relaxed);
        let mut demanded = self.demanded();
        if demanded.len() > DEMANDED_MAX {
            demanded.clear();
        }
        demanded.extend(chunks);
        drop(demanded);
        self.has_demand.notify_one();
    }

    fn demanded(&self) -> MutexGuard<'_, HashSet<Chunk>> {
        self.demanded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of an order that has not been requested yet.
struct Upcoming<'a> {
    dataset: &'a Arc<Dataset>,
    samples: &'a [SampleId],
    /// The index of the next sample whose chunks are not in `chunks` yet.
    next: usize,
    chunks: VecDeque<Chunk>,
}

impl Upcoming<'_> {
    /// Takes the next chunks that are not local, as many as fit in one request. Returns these chunks and their total length in
    /// bytes.
    fn next_request(&mut self) -> (Vec<Chunk>, u64) {
        let (mut request, mut bytes) = (Vec::new(), 0);
        let mut samples = 0;
        while request.len() < REQUEST_CHUNKS_MAX && samples < REQUEST_SAMPLES_MAX {
            let Some(&chunk) = self.chunks.front() else {
                let Some(&sample) = self.samples.get(self.next) else { break };
                self.next += 1;
                samples += 1;
                self.append_chunks(sample);
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

    fn append_chunks(&mut self, sample: SampleId) {
        let Some((size, blocks)) = self.dataset.catalog().sample(sample) else { return };
        for (part, block) in (0..).zip(blocks.map(BlockId)) {
            self.chunks.extend(Chunk::all(block, dayfly_meta::catalog::block_len(size, part)));
        }
    }

    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.next == self.samples.len()
    }

    /// Puts chunks back at the front, in order.
    fn put_back(&mut self, chunks: impl DoubleEndedIterator<Item = Chunk>) {
        chunks.rev().for_each(|chunk| self.chunks.push_front(chunk));
    }
}

/// A chunk in the window: it has arrived but has not been read yet.
struct UnreadChunk {
    chunk: Chunk,
    lease: Lease,
    since: Instant,
    /// The sequence number of this chunk: the order's chunks are numbered as they arrive.
    number: u64,
}

/// The task that reads ahead along one order.
pub(super) struct OrderTask<'a> {
    prefetcher: &'a Arc<Prefetcher>,
    order: &'a SharedOrder,
    upcoming: Upcoming<'a>,
    window: VecDeque<UnreadChunk>,
    window_bytes: u64,
    /// The sequence number of the next chunk that arrives.
    next_number: u64,
    /// The highest sequence number of a chunk that was read.
    furthest_read: u64,
    controller: Controller,
    targets: Targets,
    /// What was observed since the controller last ran.
    observed: Observation,
    controlled_at: Instant,
    /// When the reader last read something.
    read_at: Instant,
    /// A running mean of the chunks' lengths.
    mean_len: u64,
    /// Whether the window was released because nobody was reading.
    is_paused: bool,
    /// What this order contributes to [`Prefetcher::ahead_bytes`].
    ahead_bytes: u64,
}

impl<'a> OrderTask<'a> {
    pub(super) fn new(
        prefetcher: &'a Arc<Prefetcher>,
        order: &'a SharedOrder,
        dataset: &'a Arc<Dataset>,
        samples: &'a [SampleId],
    ) -> Self {
        let depth_bytes = match prefetcher.policy().prefetch {
            // Nothing is fetched before `control` has set the depth that the policy asks for.
            Some(Depth::Samples(_)) => 0,
            _ => prefetcher.memory_per_order().min(2 * REQUEST_LEN_MAX),
        };
        Self {
            prefetcher,
            order,
            upcoming: Upcoming { dataset, samples, next: 0, chunks: VecDeque::new() },
            window: VecDeque::new(),
            window_bytes: 0,
            next_number: 1,
            furthest_read: 0,
            controller: Controller::new(PREFETCH_REQUESTS_MAX),
            targets: Targets { depth_bytes, requests: 2 },
            observed: Observation::default(),
            controlled_at: Instant::now(),
            read_at: Instant::now(),
            mean_len: INITIAL_MEAN_LEN,
            is_paused: false,
            ahead_bytes: 0,
        }
    }

    /// Runs until the whole order has been read.
    pub(super) async fn run(mut self) {
        let mut in_flight = FuturesUnordered::new();
        let mut in_flight_bytes = 0;
        loop {
            self.look_at_marks();
            self.set_ahead_bytes(self.window_bytes + in_flight_bytes);
            while !self.is_paused
                && in_flight.len() < self.targets.requests
                && self.window_bytes + in_flight_bytes < self.targets.depth_bytes
                && self.set_ahead_bytes(self.window_bytes + in_flight_bytes) < self.prefetcher.memory()
            {
                let (chunks, bytes) = self.upcoming.next_request();
                if chunks.is_empty() {
                    break;
                }
                in_flight_bytes += bytes;
                in_flight.push(fetch(&self.prefetcher.fetcher, self.upcoming.dataset, self.order, chunks, bytes));
            }
            if self.upcoming.is_empty() && in_flight.is_empty() && self.window.is_empty() {
                return;
            }
            let is_idle = self.read_at.elapsed() > IDLE_AFTER;
            let pause = if is_idle { IDLE_LOOK_INTERVAL } else { LOOK_INTERVAL };
            tokio::select! {
                Some(request) = in_flight.next() => {
                    in_flight_bytes -= request.bytes;
                    self.complete(request);
                }
                () = self.order.has_demand.notified() => {
                    self.read_at = Instant::now();
                    self.is_paused = false;
                }
                () = sleep(pause) => {}
            }
        }
    }

    /// Records how many bytes this order has ahead or in flight. Returns the sum over all orders.
    fn set_ahead_bytes(&mut self, bytes: u64) -> u64 {
        let before = std::mem::replace(&mut self.ahead_bytes, bytes);
        let all = &self.prefetcher.ahead_bytes;
        if bytes >= before {
            all.fetch_add(bytes - before, Ordering::Relaxed) + bytes - before
        } else {
            all.fetch_sub(before - bytes, Ordering::Relaxed) - (before - bytes)
        }
    }

    /// Moves the chunks of a completed request into the window.
    fn complete(&mut self, request: CompletedRequest) {
        let mut missing: Vec<Option<Chunk>> = request.chunks.into_iter().map(Some).collect();
        for (index, fetched) in request.fetched {
            let Some(chunk) = missing.get_mut(index as usize).and_then(Option::take) else { continue };
            // A chunk that failed is not requested again here. If a reader requests the chunk, that reader gets the error.
            let Fetched::Leased(lease) = fetched else { continue };
            if !self.order.demanded().remove(&chunk) {
                self.window_bytes += lease.len();
                self.mean_len = (self.mean_len * 15 + lease.len()) / 16 + 1;
                self.window.push_back(UnreadChunk { chunk, lease, since: Instant::now(), number: self.next_number });
                self.next_number += 1;
            }
        }
        // The other chunks found no room in the arena, or a node that was asked for them does not answer and others can serve them.
        let has_no_room = |(index, chunk): (u32, &Option<Chunk>)| chunk.is_some() && !request.awaited.contains(&index);
        self.observed.is_short |= (0..).zip(&missing).any(has_no_room);
        self.upcoming.put_back(missing.into_iter().flatten());
        if request.is_remote {
            self.observed.latency = Some(self.observed.latency.map_or(request.took, |shortest| shortest.min(request.took)));
        }
    }

    /// Releases the chunks that were read, and runs the controller when it is due.
    fn look_at_marks(&mut self) {
        let (mut index, mut hits, mut read_bytes) = (0, 0, 0);
        while index < self.window.len().min(OUT_OF_ORDER_MAX) {
            let UnreadChunk { chunk, lease, .. } = &self.window[index];
            // If the chunk's block has been cached in the meantime, processes read it from the drive, which leaves no mark.
            // Such a chunk counts as read.
            if !lease.was_read() && !self.upcoming.dataset.is_local(chunk.block) {
                index += 1;
            } else if let Some(UnreadChunk { chunk, lease, number, .. }) = self.window.remove(index) {
                self.furthest_read = self.furthest_read.max(number);
                read_bytes += lease.len();
                hits += 1;
                self.prefetcher.fetcher.cache(self.upcoming.dataset, chunk, lease);
            }
        }
        self.window_bytes -= read_bytes;
        self.observed.read_bytes += read_bytes;
        self.prefetcher.hits.fetch_add(hits, Ordering::Relaxed);
        if hits > 0 {
            self.read_at = Instant::now();
            self.drop_overtaken();
        } else if !self.window.is_empty() && self.read_at.elapsed() > self.idle_limit() {
            self.release_window();
        }
        let elapsed = self.controlled_at.elapsed();
        if elapsed >= INTERVAL {
            self.control(elapsed);
        }
    }

    /// Runs the controller and applies its targets.
    fn control(&mut self, elapsed: Duration) {
        let policy = self.prefetcher.policy();
        let late = self.order.late.swap(0, Ordering::Relaxed);
        let observed = Observation {
            elapsed,
            was_late: late > 0,
            // The reader also read the chunks that it asked for itself.
            read_bytes: self.observed.read_bytes + late * self.mean_len,
            is_short: self.observed.is_short || self.prefetcher.arena.is_short(),
            memory: self.prefetcher.memory_per_order(),
            request_len: (self.mean_len * REQUEST_CHUNKS_MAX as u64).min(REQUEST_LEN_MAX),
            ..self.observed
        };
        self.targets = self.controller.step(observed);
        if let Some(Depth::Samples(samples)) = policy.prefetch {
            self.targets.depth_bytes = (u64::from(samples) * self.mean_len).min(observed.memory);
        }
        self.order.depth_bytes.store(self.targets.depth_bytes, Ordering::Relaxed);
        self.order.requests.store(self.targets.requests as u64, Ordering::Relaxed);
        if observed.is_short {
            // Other requests wait for room, and the end of the window is not needed soon.
            while self.window_bytes > self.targets.depth_bytes
                && let Some(UnreadChunk { chunk, lease, .. }) = self.window.pop_back()
            {
                self.window_bytes -= lease.len();
                self.upcoming.put_back(std::iter::once(chunk));
            }
        }
        self.observed = Observation::default();
        self.controlled_at = Instant::now();
    }

    /// Drops the old chunks at the front of the window. The reader has already read later chunks, and will probably not read
    /// these.
    fn drop_overtaken(&mut self) {
        let limit = self.prefetcher.order_idle;
        let is_overtaken = |first: &UnreadChunk| first.number < self.furthest_read && first.since.elapsed() > limit;
        while self.window.front().is_some_and(is_overtaken) {
            let overtaken = self.window.pop_front();
            self.window_bytes -= overtaken.map_or(0, |overtaken| overtaken.lease.len());
            self.prefetcher.wasted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how long the order may go without a read before its window is released. The time is
    /// shorter while other requests wait for room.
    fn idle_limit(&self) -> Duration {
        let Prefetcher { arena, recall, order_idle, .. } = &**self.prefetcher;
        if arena.is_short() { *recall } else { *order_idle }
    }

    /// Releases the whole window, because nobody is reading. Its chunks are fetched again when somebody reads.
    fn release_window(&mut self) {
        self.prefetcher.wasted.fetch_add(self.window.len() as u64, Ordering::Relaxed);
        let chunks: Vec<Chunk> = self.window.drain(..).map(|unread| unread.chunk).collect();
        self.upcoming.put_back(chunks.into_iter());
        self.window_bytes = 0;
        self.is_paused = true;
        self.controller = Controller::new(PREFETCH_REQUESTS_MAX);
    }
}

impl Drop for OrderTask<'_> {
    fn drop(&mut self) {
        self.set_ahead_bytes(0);
        self.prefetcher.wasted.fetch_add(self.window.len() as u64, Ordering::Relaxed);
    }
}

/// A request that was answered.
struct CompletedRequest {
    chunks: Vec<Chunk>,
    /// The total length of the chunks in bytes.
    bytes: u64,
    fetched: FetchedChunks,
    /// Indexes of the chunks that were neither local nor resident, and for which there was room.
    awaited: Vec<u32>,
    took: Duration,
    /// Whether any chunk came over the network.
    is_remote: bool,
}

async fn fetch(
    fetcher: &Arc<Fetcher>,
    dataset: &Arc<Dataset>,
    order: &SharedOrder,
    chunks: Vec<Chunk>,
    bytes: u64,
) -> CompletedRequest {
    let start = Instant::now();
    let mut fetching = fetcher.begin_ahead(dataset, &chunks, bytes);
    for (index, lease) in fetching.leased() {
        // If a chunk was already resident, its mark comes from an earlier epoch, unless a process has just asked for the chunk.
        if chunks.get(index as usize).is_some_and(|chunk| !order.demanded().contains(chunk)) {
            lease.clear_mark();
        }
    }
    let is_remote = fetching.load_bytes > 0;
    let awaited = std::mem::take(&mut fetching.awaited);
    let mut fetched = FetchedChunks::new();
    while let Some(more) = fetching.next().await {
        fetched.extend(more);
    }
    if fetched.is_empty() {
        // The arena had no room at all, or a node does not answer, so the next attempt waits.
        sleep(INTERVAL).await;
    }
    CompletedRequest { chunks, bytes, fetched, awaited, took: start.elapsed(), is_remote }
}
