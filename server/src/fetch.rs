//! The one read path: a chunk is here, or in the arena already, or is fetched from its owner. Equal wishes are joined; all chunks
//! of one request that one owner has are asked for in one message, and can be used as soon as they have come.

mod landed;
mod recheck;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{FETCH_ATTEMPTS_MAX, NODES_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_meta::wire::status::{Hop, OwnerStatus, Reads};
use dayfly_transport::{Answer, Piece, Slot};
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::arena::{Arena, Claimed, Key, Lease, Loading, Ticket, Wanted};
use crate::blocking::Blocking;
use crate::cache_writer::CacheWriter;
use crate::peers::{Peers, unread};
use crate::stats::{Damage, OwnerCounter, ReadCounter};
use crate::store::Dataset;
use landed::{Filled, Landed};

/// What became of a wish.
pub(crate) enum Fetched {
    /// Its block is in the segments.
    Local,
    /// It is in the arena.
    Leased(Lease),
    /// It cannot be had; for the user.
    Failed(String),
}

/// By place in the request.
pub(crate) type FetchedChunks = Vec<(u32, Fetched)>;

/// Fetches for this node's processes.
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
}

/// A request under way; dropping it lets go of it.
pub(crate) struct PendingFetch {
    ready: FetchedChunks,
    under_way: FuturesUnordered<BoxFuture<'static, FetchedChunks>>,
    /// Bytes that come over the network for it.
    pub(crate) load_bytes: u64,
    /// Bytes that it will have leases on, if all of it comes.
    pub(crate) claimed_bytes: u64,
    /// What was not there yet, by place in the request.
    pub(crate) awaited: Vec<u32>,
}

impl PendingFetch {
    fn of(ready: FetchedChunks) -> Self {
        Self { ready, under_way: FuturesUnordered::new(), load_bytes: 0, claimed_bytes: 0, awaited: Vec::new() }
    }

    /// What has come; waits until something has. `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<FetchedChunks> {
        if self.ready.is_empty() {
            self.ready = self.under_way.next().await?;
        }
        // What is there by now goes with it: each part is a message.
        while let Some(Some(part)) = futures_util::FutureExt::now_or_never(self.under_way.next()) {
            self.ready.extend(part);
        }
        Some(std::mem::take(&mut self.ready))
    }

    /// What was here already, by place in the request; to be asked before [`Self::next`].
    pub(crate) fn held(&self) -> impl Iterator<Item = (u32, &Lease)> {
        self.ready.iter().filter_map(|(at, fetched)| match fetched {
            Fetched::Leased(lease) => Some((*at, lease)),
            _ => None,
        })
    }

    /// Lets go of all that has not been told yet.
    pub(crate) fn cancel(&mut self) {
        *self = Self::of(FetchedChunks::new());
    }

    /// Whether all has been told.
    pub(crate) fn is_done(&self) -> bool {
        self.ready.is_empty() && self.under_way.is_empty()
    }
}

impl Fetcher {
    pub(crate) fn new(
        arena: Arena,
        peers: Arc<Peers>,
        cache_writer: CacheWriter,
        damage: Arc<Damage>,
        blocking: Arc<dyn Blocking>,
    ) -> Self {
        let owners = (0..NODES_MAX).map(|_| OwnerCounter::default()).collect();
        let (remote, served) = (ReadCounter::default(), ReadCounter::default());
        Self { arena, peers, cache_writer, remote, served, joined: AtomicU64::new(0), owners, damage, blocking }
    }

    /// What came over the network.
    pub(crate) fn remote(&self) -> Reads {
        self.remote.get()
    }

    /// What was sent to others.
    pub(crate) fn served(&self) -> Reads {
        self.served.get()
    }

    /// Wishes for what was on its way already.
    pub(crate) fn joined(&self) -> u64 {
        self.joined.load(Ordering::Relaxed)
    }

    /// What each owner sent.
    pub(crate) fn owners(&self) -> Vec<OwnerStatus> {
        self.owners.iter().map(OwnerCounter::get).collect()
    }

    /// Begins to get as many of the first chunks as `budget` bytes and the room allow, at least one. The others are not named in what
    /// comes; they are to be asked for again.
    ///
    /// Only for the first chunk is room waited for; this is for who holds no leases. And who loads a chunk has room for it. So requests
    /// cannot wait for each other in a ring.
    pub(crate) async fn begin(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk], budget: u64) -> PendingFetch {
        let (mut ready, wanted) = look_up(dataset, chunks);
        let Some(first) = wanted.first().cloned() else { return PendingFetch::of(ready) };
        // What is here, or on its way, needs no room; new room is for those who wait for it, if any do.
        let budget = budget.max(first.info.len);
        let claimed = self.arena.claim(dataset, wanted.into_iter(), budget, !self.arena.is_short());
        if !claimed.is_empty() {
            return self.start(ready, claimed, true);
        }
        let Some(slot) = self.arena.room_within(first.info.len, self.peers.deadlines().arena).await else {
            let reason = "the arena is full of leased blocks; give more with --memory".to_owned();
            ready.push((first.at, Fetched::Failed(reason)));
            return PendingFetch::of(ready);
        };
        self.start(ready, self.arena.claim_with(dataset, &first, slot), true)
    }

    /// As [`Self::begin`], but no new room is taken where there is none, and where others wait for some.
    pub(crate) fn begin_if_room(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk], budget: u64) -> PendingFetch {
        let (ready, wanted) = look_up(dataset, chunks);
        self.start(ready, self.arena.claim(dataset, wanted.into_iter(), budget, !self.arena.is_short()), true)
    }

    /// As [`Self::begin_if_room`], of what is not read yet: it is not kept before it is, so that its reader can be seen to read it.
    pub(crate) fn begin_ahead(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk], budget: u64) -> PendingFetch {
        let (ready, wanted) = look_up(dataset, chunks);
        self.start(ready, self.arena.claim(dataset, wanted.into_iter(), budget, !self.arena.is_short()), false)
    }

    /// Has what was read ahead kept, if it is meant to be.
    pub(crate) fn keep(&self, dataset: &Arc<Dataset>, chunk: Chunk, lease: Lease) {
        self.cache_writer.keep(dataset, chunk, || Some(lease));
    }

    fn start(self: &Arc<Self>, mut ready: FetchedChunks, claimed: Claimed, keeps: bool) -> PendingFetch {
        ready.extend(claimed.held.into_iter().map(|(at, lease)| (at, Fetched::Leased(lease))));
        self.joined.fetch_add(claimed.loading.len() as u64, Ordering::Relaxed);
        let loads = claimed.loads.iter().flat_map(Ticket::places);
        let awaited = claimed.loading.iter().map(|(at, ..)| *at).chain(loads).collect();
        let (load_bytes, claimed_bytes) = (claimed.load_bytes, claimed.bytes);
        let fetching = PendingFetch { load_bytes, claimed_bytes, awaited, ..PendingFetch::of(ready) };
        for (at, key, loading) in claimed.loading {
            fetching.under_way.push(Box::pin(join(self.arena.clone(), at, key, loading)));
        }
        for ticket in claimed.loads {
            fetching.under_way.push(Box::pin(self.clone().load(ticket, keeps)));
        }
        fetching
    }

    /// One message to one owner, and one more for what came damaged, or could not be read there.
    async fn load(self: Arc<Self>, mut ticket: Ticket, keeps: bool) -> FetchedChunks {
        let (owner, chunks, dataset) = (ticket.owner, ticket.chunks(), ticket.dataset().clone());
        let mut wanted: Vec<usize> = (0..chunks.len()).collect();
        let mut slots = ticket.take_slots();
        let mut good: Vec<Option<Slot>> = chunks.iter().map(|_| None).collect();
        let mut reasons: Vec<Option<String>> = vec![None; chunks.len()];
        for attempt in 1..=FETCH_ATTEMPTS_MAX {
            let asked: Vec<Chunk> = wanted.iter().map(|&number| chunks[number]).collect();
            let landed = match self.bring(owner, &dataset, &asked, std::mem::take(&mut slots)).await {
                Ok(landed) => landed,
                Err(reason) if attempt == 1 => return failed(&dataset, ticket, &reason),
                Err(reason) => {
                    wanted.iter().for_each(|&number| reasons[number] = Some(cannot_read(&dataset, chunks[number], &reason)));
                    break;
                }
            };
            let mut damaged = Vec::new();
            for (number, landed) in std::mem::take(&mut wanted).into_iter().zip(landed) {
                let name = || name(&dataset, chunks[number]);
                match landed {
                    Landed::Good(slot) => good[number] = Some(slot),
                    Landed::Missing => reasons[number] = Some(format!("node {owner} does not hold {}", name())),
                    Landed::Damaged(slot, mismatch) => {
                        self.damage.record(Hop::Fetched, owner, &name(), mismatch);
                        let way = "its drive, its memory or the network is at fault";
                        let reason = format!("node {owner} sent it damaged {attempt} times in a row: {mismatch}; {way}");
                        reasons[number] = Some(cannot_read(&dataset, chunks[number], &reason));
                        damaged.push(number);
                        slots.push(slot);
                    }
                    // Its neighbors are well; it may have been given up where it lay, or its drive may do better alone.
                    Landed::Unread(slot, reason) => {
                        reasons[number] = Some(cannot_read(&dataset, chunks[number], &reason));
                        damaged.push(number);
                        slots.push(slot);
                    }
                }
            }
            wanted = damaged;
            if wanted.is_empty() {
                break;
            }
        }
        // Room that came back with bytes that nobody shall see.
        drop(slots);
        let filled = ticket.fill(good);
        let mut part = FetchedChunks::with_capacity(chunks.len());
        for ((chunk, (at, lease)), reason) in chunks.into_iter().zip(filled).zip(reasons) {
            let fetched = match lease {
                Some(lease) => {
                    if keeps {
                        self.cache_writer.keep(&dataset, chunk, || self.arena.find(&(dataset.id(), chunk)));
                    }
                    Fetched::Leased(lease)
                }
                None => Fetched::Failed(reason.unwrap_or_else(|| cannot_read(&dataset, chunk, "nothing came"))),
            };
            part.push((at, fetched));
        }
        part
    }

    /// Has an owner send chunks into slots, one each, and checks what came.
    async fn bring(
        &self,
        owner: NodeId,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
        slots: Vec<Slot>,
    ) -> Result<Vec<Landed>, String> {
        let count = chunks.len();
        let bytes = slots.iter().map(|slot| slot.len() as u64).sum();
        let request = Request::Read { dataset: dataset.id(), chunks: chunks.to_vec() };
        let start = Instant::now();
        let pulled = self.peers.pull_pieces(owner, &request, slots, self.peers.deadlines().request).await;
        let filled = match pulled {
            Ok((Reply::Read { missing }, pulled)) if pulled.slots.len() == count => {
                let reason = unread(owner, &pulled.unread).to_string();
                Filled { slots: pulled.slots, lens: pulled.lens, missing, unread: pulled.unread.pieces, reason }
            }
            Ok(_) => return Err(format!("node {owner} answers what was not asked")),
            Err(error) => return Err(error.to_string()),
        };
        if let Some(counter) = self.owners.get(owner.index()) {
            counter.add(count as u64, bytes, start.elapsed());
        }
        self.remote.add(count as u64, bytes);
        filled.check(&*self.blocking, dataset, chunks).await
    }

    /// The owner's side.
    pub(crate) fn serve(&self, dataset: &Dataset, chunks: &[Chunk]) -> Answer {
        let mut missing = Vec::new();
        let mut pieces = Vec::with_capacity(chunks.len());
        dataset.prefetch(chunks);
        for (number, &chunk) in (0..).zip(chunks) {
            pieces.push(dataset.piece(chunk).unwrap_or_else(|| {
                missing.push(number);
                Piece::Bytes(Vec::new())
            }));
        }
        self.served.add((chunks.len() - missing.len()) as u64, pieces.iter().map(Piece::len).sum());
        Answer { message: dayfly_meta::wire::encode_sealed(&Reply::Read { missing }), pieces }
    }
}

/// Parts chunks into those that need no fetching, and those that do.
fn look_up(dataset: &Dataset, chunks: &[Chunk]) -> (FetchedChunks, Vec<Wanted>) {
    let mut ready = FetchedChunks::new();
    let mut wanted = Vec::with_capacity(chunks.len());
    dataset.prefetch(chunks);
    for (at, &chunk) in (0..).zip(chunks) {
        match dataset.chunk(chunk) {
            Some(_) if dataset.is_local(chunk.block) => ready.push((at, Fetched::Local)),
            Some(info) => wanted.push(Wanted { at, chunk, info }),
            None => ready.push((at, Fetched::Failed("there is no such block".to_owned()))),
        }
    }
    (ready, wanted)
}

/// Waits out another's load, whose failure is ours too. What is gone again before we look is not named.
async fn join(arena: Arena, at: u32, key: Key, loading: Loading) -> FetchedChunks {
    // The loader's own deadlines bound this wait.
    if let Ok(reason) = loading.await {
        return vec![(at, Fetched::Failed(reason.as_ref().to_owned()))];
    }
    arena.find(&key).map(|lease| (at, Fetched::Leased(lease))).into_iter().collect()
}

fn failed(dataset: &Dataset, ticket: Ticket, reason: &str) -> FetchedChunks {
    let reason = ticket.chunks().first().map_or_else(|| reason.to_owned(), |&chunk| cannot_read(dataset, chunk, reason));
    ticket.fail(&reason).into_iter().map(|at| (at, Fetched::Failed(reason.clone()))).collect()
}

fn cannot_read(dataset: &Dataset, chunk: Chunk, reason: &str) -> String {
    format!("cannot read {}: {reason}", name(dataset, chunk))
}

/// Names a chunk for the user.
fn name(dataset: &Dataset, chunk: Chunk) -> String {
    let sample = dataset.catalog().block(chunk.block).map_or(0, |(sample, _)| sample.0);
    format!("block {} (sample {sample} of '{}')", chunk.block.0, display(dataset.target()))
}
