//! The read path. A chunk that a process asks for is on this node's drives, or in the arena, or is fetched from its owner.
//!
//! Requests for the same chunk are joined: one of them fetches it, and the others wait for that fetch. All chunks that a
//! request needs from one owner are asked for in as few messages as [`FETCH_PART_LEN`] allows. Each chunk can be used as soon
//! as the message that asked for it has been answered.
//!
//! # Parts
//!
//! - [`Fetcher`] starts requests.
//! - [`PendingFetch`] is a request in flight.
//! - [`serve`] answers the requests of peers, as an owner.
//! - [`from_origins`] reads blocks that this node owns, but has on no drive, from their origins.
//! - [`without_arena`] does so for peers while the arena has no room.
//! - [`verify`] compares the bytes that an owner sent with the catalog's checksums.
//! - [`takeover`] chooses other nodes while the owner does not answer.
//! - [`recover`] reads and stores the blocks of lost nodes in the background.
//! - [`streams`] makes readers wait for blocks of compressed tars that are read again.
//! - [`recheck`] checks local copies that a process found to be bad.
//! - [`error`] says why a chunk cannot be read.
//!
//! # Invariants
//!
//! - All bytes are verified before a process can see them, and before they are cached.
//! - Every wait has a deadline: a request waits at most `Deadlines::arena` for room and at most `Deadlines::request` for the
//!   answer to a message, and a joined request ends with the fetch that it joined. A request waits longer only for the parallel
//!   file system, at most `Deadlines::origin` after the last chunk has arrived. Whoever wants a chunk asks again as long as its owner
//!   may only stand still; `Peers::is_waited_for` ends that.
//! - A request waits for room only for its first chunk, and only if its client holds no leases. A request that loads a chunk
//!   already has room for it. A request of a peer waits neither for room in the arena nor for a load from another peer. It
//!   may wait for recovery, which asks peers only for what they have, or read from origins. So requests cannot wait for each other in a cycle.
//!
//! [`FETCH_PART_LEN`]: dayfly_meta::limits::FETCH_PART_LEN

mod error;
mod from_origins;
mod recheck;
mod recover;
mod serve;
mod shared_read;
pub(crate) mod streams;
mod takeover;
mod unaware;
mod verify;
mod without_arena;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{CACHE_PAUSE, FETCH_ATTEMPTS_MAX, NODES_MAX, STREAM_ASKED_INTERVAL_MIN};
use dayfly_meta::wire::peer::{ReadReply, ReadRequest};
use dayfly_meta::wire::status::{Hop, OriginStatus, OwnerStatus, Reads};
use dayfly_transport::Slot;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tracing::Instrument;

use crate::arena::{Arena, Claimed, Lease, LoadGroup, PendingLoad, Wanted};
use crate::blocking::Blocking;
use crate::cache_writer::CacheWriter;
use crate::origins::{OriginFailure, Origins};
use crate::peers::Peers;
use crate::stats::{Damage, OwnerCounter, ReadCounter};
use crate::store::{ChunkInfo, Dataset};
pub(crate) use error::FetchError;
use error::{ChunkName, ReadError, read_error};
pub(crate) use serve::Served;
use streams::Streams;
use takeover::{BadHolders, Loads};
use unaware::Unaware;
use verify::{OwnerReply, Received};
use without_arena::ReadsWithoutArena;

/// The result for one requested chunk.
pub(crate) enum Fetched {
    /// The chunk's block is on this node's drives.
    Local,
    /// The chunk is in the arena.
    Leased(Lease),
    Failed(FetchError),
}

/// Results, each with the chunk's index in the request.
pub(crate) type FetchedChunks = Vec<(u32, Fetched)>;

/// Fetches chunks for this node's processes, and serves this node's blocks to peers.
pub(crate) struct Fetcher {
    arena: Arena,
    peers: Arc<Peers>,
    cache_writer: CacheWriter,
    remote: ReadCounter,
    served: ReadCounter,
    joined: AtomicU64,
    owners: Vec<OwnerCounter>,
    damage: Arc<Damage>,
    blocking: Arc<dyn Blocking>,
    origins: Arc<Origins>,
    /// Loads from origins. They go on when the request that began them is dropped, because the next one would begin them again.
    /// They end with the fetcher.
    origin_loads: Mutex<JoinSet<()>>,
    without_arena: ReadsWithoutArena,
    bad_holders: BadHolders,
    unaware: Unaware,
    streams: Streams,
    /// How long readers wait for blocks of compressed tars; 0 if these are not read again.
    recovery_timeout: Duration,
}

/// Whether chunks are cached on this node's drives as soon as they arrive.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caching {
    OnArrival,
    /// The caller calls [`Fetcher::cache`] for each chunk that a process has read.
    ByCaller,
}

/// A request in flight. Dropping it gives up its interest in the chunks.
pub(crate) struct PendingFetch {
    ready: FetchedChunks,
    in_flight: FuturesUnordered<BoxFuture<'static, FetchedChunks>>,
    /// Bytes that come over the network because of this request.
    pub(crate) load_bytes: u64,
    /// Bytes that this request will have leases on, if everything arrives.
    pub(crate) claimed_bytes: u64,
    /// Indexes of the chunks that were neither local nor resident when the request started.
    pub(crate) awaited: Vec<u32>,
}

impl PendingFetch {
    fn completed(ready: FetchedChunks) -> Self {
        Self { ready, in_flight: FuturesUnordered::new(), load_bytes: 0, claimed_bytes: 0, awaited: Vec::new() }
    }

    /// Returns the next results; waits until there is at least one. Returns `None` once all results have been returned.
    pub(crate) async fn next(&mut self) -> Option<FetchedChunks> {
        if self.ready.is_empty() {
            self.ready = self.in_flight.next().await?;
        }
        // Each call becomes one message to the client, so we add everything else that has arrived by now.
        while let Some(Some(part)) = self.in_flight.next().now_or_never() {
            self.ready.extend(part);
        }
        Some(std::mem::take(&mut self.ready))
    }

    /// Returns leases on the chunks that were resident when the request started. Call this before [`Self::next`].
    pub(crate) fn leased(&self) -> impl Iterator<Item = (u32, &Lease)> {
        self.ready.iter().filter_map(|(index, fetched)| match fetched {
            Fetched::Leased(lease) => Some((*index, lease)),
            _ => None,
        })
    }

    /// Drops all results that have not been returned yet, and ends the request.
    pub(crate) fn cancel(&mut self) {
        *self = Self::completed(FetchedChunks::new());
    }

    /// Returns whether all results have been returned.
    pub(crate) fn is_done(&self) -> bool {
        self.ready.is_empty() && self.in_flight.is_empty()
    }
}

impl Fetcher {
    pub(crate) fn new(
        arena: Arena,
        peers: Arc<Peers>,
        cache_writer: CacheWriter,
        damage: Arc<Damage>,
        blocking: Arc<dyn Blocking>,
        origins: Arc<Origins>,
        recovery_timeout: Duration,
    ) -> Self {
        let owners = (0..NODES_MAX).map(|_| OwnerCounter::default()).collect();
        let (remote, served) = (ReadCounter::default(), ReadCounter::default());
        Self {
            arena,
            peers,
            cache_writer,
            remote,
            served,
            joined: AtomicU64::new(0),
            owners,
            damage,
            blocking,
            origins,
            origin_loads: Mutex::default(),
            without_arena: ReadsWithoutArena::default(),
            bad_holders: BadHolders::default(),
            unaware: Unaware::default(),
            streams: Streams::default(),
            recovery_timeout,
        }
    }

    /// Chunks that came over the network.
    pub(crate) fn remote(&self) -> Reads {
        self.remote.get()
    }

    /// Chunks that this node sent to peers.
    pub(crate) fn served(&self) -> Reads {
        self.served.get()
    }

    /// The compressed tars that are being read again.
    pub(crate) fn streams(&self) -> &Streams {
        &self.streams
    }

    /// What this node read from origins.
    pub(crate) fn origins(&self) -> OriginStatus {
        self.origins.status()
    }

    /// Requests that joined a fetch already in flight.
    pub(crate) fn joined(&self) -> u64 {
        self.joined.load(Ordering::Relaxed)
    }

    /// Chunks that each owner sent, by node number.
    pub(crate) fn owners(&self) -> Vec<OwnerStatus> {
        self.owners.iter().map(OwnerCounter::get).collect()
    }

    /// Starts to fetch chunks, in order, as long as `budget` and the arena's room last, but at least one chunk. The remaining
    /// chunks do not appear in the results; the caller asks for them again.
    ///
    /// Waits for room for the first chunk only. Only a client that holds no leases may call this.
    pub(crate) async fn begin(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk], budget: u64) -> PendingFetch {
        let (mut ready, mut wanted) = self.look_up(dataset, chunks);
        let late = self.take_late(dataset, &mut ready, &mut wanted);
        if !late.is_empty() && ready.is_empty() && wanted.is_empty() {
            // The caller asks again.
            sleep(STREAM_ASKED_INTERVAL_MIN).await;
        }
        let Some(first) = wanted.first().cloned() else { return PendingFetch::completed(ready) };
        let budget = budget.max(first.info.len);
        let claimed = self.claim(dataset, wanted, budget);
        if !claimed.is_empty() {
            return self.start(dataset, ready, claimed, Caching::OnArrival);
        }
        let Some(slot) = self.arena.slot_within(first.info.len, self.peers.deadlines().arena).await else {
            ready.push((first.index, Fetched::Failed(FetchError::ArenaFull)));
            return PendingFetch::completed(ready);
        };
        self.start(dataset, ready, self.arena.claim_with(dataset, &first, slot), Caching::OnArrival)
    }

    /// Like [`Self::begin`], but does not wait for room, and takes no room while other requests wait for it.
    pub(crate) fn begin_if_room(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk], budget: u64) -> PendingFetch {
        let (mut ready, mut wanted) = self.look_up(dataset, chunks);
        self.take_late(dataset, &mut ready, &mut wanted);
        self.start(dataset, ready, self.claim(dataset, wanted, budget), Caching::OnArrival)
    }

    /// Like [`Self::begin_if_room`], but reads all chunks from their origins that are on no drive of this node. Those that this node is
    /// getting from another one do not appear in the results: that node may be waiting for this answer.
    fn begin_as_owner(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk]) -> PendingFetch {
        let own = self.peers.own_node();
        let (ready, wanted) = look_up(dataset, chunks, &|_, _| own);
        let mut claimed = self.claim(dataset, wanted, u64::MAX);
        claimed.pending.retain(|(.., load)| load.owner == own);
        self.start(dataset, ready, claimed, Caching::OnArrival)
    }

    /// Like [`Self::begin_if_room`], for chunks that are prefetched. They are not cached on arrival: a process would then read
    /// the cached copy, which leaves no mark, and the prefetcher could not see that the chunk was read.
    pub(crate) fn begin_ahead(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk], budget: u64) -> PendingFetch {
        let (mut ready, mut wanted) = self.look_up(dataset, chunks);
        let late = self.take_late(dataset, &mut ready, &mut wanted);
        // Readers wait for chunks that are late, but nobody prefetches them.
        ready.extend(late.into_iter().map(|index| (index, Fetched::Failed(FetchError::AskOthers))));
        self.start(dataset, ready, self.claim(dataset, wanted, budget), Caching::ByCaller)
    }

    /// Caches a prefetched chunk that a process has read, if this node caches the chunk's block.
    pub(crate) fn cache(&self, dataset: &Arc<Dataset>, chunk: Chunk, lease: Lease) {
        self.cache_writer.enqueue(dataset, chunk, || Some(lease));
    }

    /// Caches, in the background, the blocks in the arena that there is room for. Call this when room has become free: blocks that
    /// stay in the arena are not loaded again, so they would never be cached.
    pub(crate) fn cache_resident(self: &Arc<Self>, datasets: Vec<Arc<Dataset>>) {
        let fetcher = self.clone();
        self.spawn_origin_load(async move {
            for dataset in datasets {
                for chunk in fetcher.arena.chunks_of(dataset.id()) {
                    let is_wanted = dataset.should_cache(chunk.block) && dataset.chunk(chunk).is_some_and(|info| info.is_block);
                    if !is_wanted {
                        continue;
                    }
                    let start = Instant::now();
                    while fetcher.cache_writer.is_full() {
                        if start.elapsed() > fetcher.peers.deadlines().request {
                            tracing::debug!("the drives are too slow to cache what is in the arena");
                            return;
                        }
                        sleep(CACHE_PAUSE).await;
                    }
                    fetcher.cache_writer.enqueue(&dataset, chunk, || fetcher.arena.find(&(dataset.id(), chunk)));
                }
            }
        });
    }

    /// Separates the chunks that need no fetch from the chunks that need one, and decides whom to ask for these.
    fn look_up(&self, dataset: &Dataset, chunks: &[Chunk]) -> (FetchedChunks, Vec<Wanted>) {
        let (absent, loads) = (self.absent(dataset), Loads::default());
        look_up(dataset, chunks, &|chunk, owner| self.source_of(dataset, chunk, owner, absent.as_ref(), &loads))
    }

    /// Claims chunks in the arena. While a request waits for room, the others claim only chunks that need no new room.
    fn claim(&self, dataset: &Arc<Dataset>, wanted: Vec<Wanted>, budget: u64) -> Claimed {
        self.arena.claim(dataset, wanted.into_iter(), budget, !self.arena.is_short())
    }

    fn start(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        mut ready: FetchedChunks,
        claimed: Claimed,
        caching: Caching,
    ) -> PendingFetch {
        let Claimed { leased, pending, loads, load_bytes, bytes } = claimed;
        ready.extend(leased.into_iter().map(|(index, lease)| (index, Fetched::Leased(lease))));
        self.joined.fetch_add(pending.len() as u64, Ordering::Relaxed);
        let loaded = loads.iter().flat_map(LoadGroup::indexes);
        let awaited = pending.iter().map(|(index, ..)| *index).chain(loaded).collect();
        let fetching = PendingFetch { load_bytes, claimed_bytes: bytes, awaited, ..PendingFetch::completed(ready) };
        for (index, chunk, load) in pending {
            fetching.in_flight.push(Box::pin(join(self.arena.clone(), dataset.clone(), index, chunk, load)));
        }
        for group in loads {
            let span = tracing::debug_span!("fetch", dataset = dataset.id().0, owner = %group.owner, chunks = group.len());
            let fetcher = self.clone();
            fetching.in_flight.push(match group.owner == self.peers.own_node() {
                true => Box::pin(fetcher.load_from_origins(group, caching).instrument(span)),
                false => Box::pin(fetcher.load(group, caching).instrument(span)),
            });
        }
        fetching
    }

    /// Sends one message to the owner, and further ones for the chunks that arrived damaged or that the owner could not read. Asks
    /// for a chunk that the owner is still reading from its origin until the deadline.
    async fn load(self: Arc<Self>, mut group: LoadGroup, caching: Caching) -> FetchedChunks {
        let (owner, chunks, dataset) = (group.owner, group.chunks(), group.dataset().clone());
        let mut slots = group.take_slots();
        let unsent = |&chunk: &Chunk| Err(read_error(&dataset, chunk, ReadError::Nothing));
        let mut outcomes: Vec<Result<Slot, FetchError>> = chunks.iter().map(unsent).collect();
        let mut remaining: Vec<usize> = (0..chunks.len()).collect();
        let mut attempt = 1;
        let mut last_progress = Instant::now();
        let mut is_silent = false;
        while attempt <= FETCH_ATTEMPTS_MAX && !remaining.is_empty() {
            let requested: Vec<Chunk> = remaining.iter().map(|&number| chunks[number]).collect();
            // What the owner sent before was bad, so from the second attempt on it examines its copies.
            let recheck = attempt > 1;
            let received = match self.request(owner, &dataset, &requested, recheck, std::mem::take(&mut slots)).await {
                Ok(received) => received,
                Err(error) => {
                    is_silent = matches!(&error, ReadError::Peer(error) if self.note_absence(owner, &dataset, error));
                    // A node that stands still is asked again.
                    let has_others = |chunk| is_silent && self.has_other_source(&dataset, chunk);
                    let is_waited_for = matches!(&error, ReadError::Peer(error) if self.peers.is_waited_for(owner, error));
                    if is_waited_for && !remaining.iter().all(|&number| has_others(chunks[number])) {
                        sleep(self.peers.deadlines().progress_interval).await;
                    }
                    for number in remaining {
                        let chunk = chunks[number];
                        outcomes[number] = Err(match is_waited_for || has_others(chunk) {
                            true => FetchError::AskOthers,
                            false => read_error(&dataset, chunk, error.clone()),
                        });
                    }
                    break;
                }
            };
            let mut has_bad = false;
            for (number, received) in std::mem::take(&mut remaining).into_iter().zip(received) {
                let chunk = || ChunkName::new(&dataset, chunks[number]);
                let (slot, error) = match received {
                    Received::Verified(slot) => {
                        (outcomes[number], last_progress) = (Ok(slot), Instant::now());
                        continue;
                    }
                    Received::NotHeld => {
                        outcomes[number] = Err(FetchError::NotHeld { owner, chunk: chunk() });
                        continue;
                    }
                    Received::Failed(reason) => {
                        outcomes[number] = Err(FetchError::AtOwner { owner, chunk: chunk(), reason });
                        continue;
                    }
                    Received::Late(_) if self.is_streamed(&dataset, chunks[number]) => {
                        if !self.can_ask_holder_that_has_it(&dataset, chunks[number], owner) {
                            self.streams.note_late(Self::source_key(&dataset, chunks[number]));
                        }
                        outcomes[number] = Err(FetchError::AskOthers);
                        continue;
                    }
                    Received::Late(slot) => {
                        let timeout = self.peers.deadlines().origin;
                        let late = OriginFailure::late(&dataset, chunks[number], timeout);
                        outcomes[number] = Err(read_error(&dataset, chunks[number], late.into()));
                        if last_progress.elapsed() < timeout {
                            remaining.push(number);
                            slots.push(slot);
                        }
                        continue;
                    }
                    Received::Damaged(slot, mismatch) => {
                        self.damage.record(Hop::Fetched, owner, chunk(), mismatch);
                        (slot, ReadError::Damaged { owner, attempts: attempt, mismatch })
                    }
                    // Another attempt for this chunk alone may succeed: its owner's drive may return the bytes this time, or
                    // the chunk may have been withdrawn while it was read.
                    Received::Unreadable(slot, error) => (slot, error),
                };
                outcomes[number] = Err(read_error(&dataset, chunks[number], error));
                remaining.push(number);
                slots.push(slot);
                has_bad = true;
            }
            attempt += usize::from(has_bad);
        }
        let is_substitute =
            |&chunk: &Chunk| dataset.catalog().owner(chunk.block) != Some(owner) || self.has_said_late(&dataset, chunk, owner);
        if let Some(&arrived) = chunks.iter().zip(&outcomes).find(|(_, outcome)| outcome.is_ok()).map(|(chunk, _)| chunk)
            && is_substitute(&arrived)
        {
            self.streams.note_arrival(Self::source_key(&dataset, arrived));
        }
        // These slots hold damaged bytes, so they go back to the arena before anything is published.
        drop(slots);
        for (number, outcome) in outcomes.iter_mut().enumerate() {
            let is_bad = outcome.as_ref().is_err_and(|error| !matches!(error, FetchError::AskOthers));
            if is_bad && !is_silent && self.can_ask_other_holder(&dataset, chunks[number], owner) {
                *outcome = Err(FetchError::AskOthers);
            }
        }
        self.finish(group, outcomes, caching)
    }

    /// Makes the verified chunks of a group resident, and caches them.
    fn finish(&self, group: LoadGroup, outcomes: Vec<Result<Slot, FetchError>>, caching: Caching) -> FetchedChunks {
        let (chunks, dataset) = (group.chunks(), group.dataset().clone());
        let ended = group.end(outcomes.into_iter().map(|outcome| outcome.map_err(Arc::new)).collect());
        let mut fetched = FetchedChunks::with_capacity(chunks.len());
        for (chunk, (index, outcome)) in chunks.into_iter().zip(ended) {
            fetched.push((
                index,
                match outcome {
                    Ok(lease) => {
                        if caching == Caching::OnArrival {
                            self.cache_writer.enqueue(&dataset, chunk, || self.arena.find(&(dataset.id(), chunk)));
                        }
                        Fetched::Leased(lease)
                    }
                    // Whoever wants the chunk asks for it again.
                    Err(error) if matches!(*error, FetchError::AskOthers) => continue,
                    Err(error) => Fetched::Failed(FetchError::clone(&error)),
                },
            ));
        }
        fetched
    }

    /// Asks an owner for chunks, with one slot for each, and verifies the bytes that the owner sends.
    async fn request(
        &self,
        owner: NodeId,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
        recheck: bool,
        slots: Vec<Slot>,
    ) -> Result<Vec<Received>, ReadError> {
        let count = chunks.len();
        let takes_over = chunks.iter().any(|chunk| {
            // Without copies, the owner is the only holder.
            let is_substitute =
                dataset.catalog().owner(chunk.block) != Some(owner) && !dataset.holders(chunk.block).contains(&owner);
            // All holders have said that the chunk is late.
            is_substitute || self.is_late_holder(dataset, *chunk, owner)
        });
        let bytes = slots.iter().map(|slot| slot.len() as u64).sum();
        let request = ReadRequest::Chunks { dataset: dataset.id(), chunks: chunks.to_vec(), recheck, takes_over };
        let start = Instant::now();
        let counter = self.owners.get(owner.index());
        let _in_flight = counter.map(|counter| counter.begin(bytes));
        let pulled = self.peers.pull_pieces(owner, request, slots, self.peers.deadlines().request).await;
        let reply = match pulled {
            Ok((ReadReply::Chunks { missing, reasons }, pulled)) if pulled.slots.len() == count => {
                OwnerReply { owner, slots: pulled.slots, lens: pulled.lens, missing, reasons, unread: pulled.unread }
            }
            Ok(_) => return Err(ReadError::WrongReply(owner)),
            Err(error) => {
                if let Some(failures) = counter.and_then(OwnerCounter::add_failure) {
                    let dataset = dataset.id().0;
                    tracing::warn!(%owner, dataset, chunks = count, failures, %error, "cannot fetch blocks from their owner");
                }
                return Err(error.into());
            }
        };
        if let Some(counter) = counter {
            counter.add(count as u64, bytes, start.elapsed());
        }
        self.peers.has_served(owner);
        self.remote.add(count as u64, bytes);
        reply.verify(&*self.blocking, dataset, chunks).await
    }
}

/// Separates the chunks that need no fetch from the chunks that need one.
fn look_up(dataset: &Dataset, chunks: &[Chunk], source: &dyn Fn(Chunk, NodeId) -> NodeId) -> (FetchedChunks, Vec<Wanted>) {
    let mut ready = FetchedChunks::new();
    let mut wanted = Vec::with_capacity(chunks.len());
    dataset.prefetch(chunks);
    for (index, &chunk) in (0..).zip(chunks) {
        match dataset.chunk(chunk) {
            Some(_) if dataset.is_local(chunk.block) => ready.push((index, Fetched::Local)),
            Some(info) => wanted.push(Wanted { index, chunk, info: ChunkInfo { owner: source(chunk, info.owner), ..info } }),
            None => ready.push((index, Fetched::Failed(FetchError::NoSuchBlock(chunk.block)))),
        }
    }
    (ready, wanted)
}

/// Waits for a load that another request performs, and shares its failure. If the chunk has already been evicted again, the
/// result is empty, and the caller asks for the chunk again.
async fn join(arena: Arena, dataset: Arc<Dataset>, index: u32, chunk: Chunk, load: PendingLoad) -> FetchedChunks {
    // This wait is bounded by the deadlines of the request that loads the chunk.
    if let Ok(failures) = load.end.await
        && let Some(failure) = failures.get(&chunk)
    {
        let error = failure.downcast_ref::<FetchError>().cloned();
        if let Some(FetchError::AskOthers) = error {
            return FetchedChunks::new();
        }
        let error = error.unwrap_or_else(|| read_error(&dataset, chunk, ReadError::Joined(failure.clone())));
        return vec![(index, Fetched::Failed(error))];
    }
    arena.find(&(dataset.id(), chunk)).map(|lease| (index, Fetched::Leased(lease))).into_iter().collect()
}
