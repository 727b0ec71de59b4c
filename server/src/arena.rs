//! The arena: the shared memory that receives chunks of other nodes' blocks. This node's processes read the chunks there.
//!
//! A chunk in the arena is in one of three states. It is *loading* (one request fetches it, and every other request for it
//! waits for that fetch), *leased* (at least one [`Lease`] pins it), or *idle*. Idle chunks stay until their room is needed;
//! a policy made for epochs then decides which of them to evict.
//!
//! # Parts
//!
//! - [`Arena`] hands out leases on chunks that are resident, and decides who loads the others ([`Arena::claim`]).
//! - [`load_group`]: the right and the duty to load the chunks of one owner.
//! - [`kept`]: blocks that a stage-in has read and not stored.
//! - [`lease`]: a resident chunk, and the right to read it.
//! - [`table`]: records which chunks are resident or loading, and chooses which ones to evict. It has no locks and never waits,
//!   so a test explores its interleavings.
//! - [`ledger`]: records how many leases each process holds, and chooses the process that loses its leases when others need
//!   room.
//!
//! # Invariants
//!
//! - A chunk becomes visible (leased or published) only after its bytes have been compared with the catalog's checksum.
//! - A leased chunk keeps its bytes: its slot is freed only after its last lease has been dropped.
//! - A block that consists of one chunk is also published in its dataset's locations while it is resident, so that processes
//!   find it without a message. Processes set a mark in shared memory for every such read. The location is withdrawn before the
//!   slot is freed, so a reader that checks the location after it has copied never accepts another chunk's bytes.
//! - Only a request that holds no leases waits for room, and every request has room for the chunks that it loads. So
//!   requests cannot wait for each other in a cycle.
//!
//! The arena does not talk to other nodes (`fetch` does) and does not write to drives (`cache_writer` does).

mod kept;
mod lease;
mod ledger;
mod load_group;
mod table;

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, DatasetId, NodeId};
use dayfly_meta::limits::ARENA_UNIT;
use dayfly_meta::shared::SharedMarks;
use dayfly_meta::status_page::StatusPage;
use dayfly_transport::{Region, Slot};
use futures_util::future::Shared;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::store::{ChunkInfo, Dataset};
pub(crate) use kept::KeptNumbers;
pub(crate) use lease::Lease;
use lease::ResidentChunk;
pub(crate) use ledger::{LeaseHolder, LeaseLedger};
pub(crate) use load_group::LoadGroup;
use table::{Lookup, Table};

/// Identifies a chunk among all datasets of this node.
pub(crate) type ChunkKey = (DatasetId, Chunk);

/// The fewest bytes to evict at once, even where fewer would do: one large eviction costs less than many small ones.
const EVICTION_LEN_MIN: u64 = 256 << 10;
/// The mean chunk length that the eviction policy is sized for.
const TYPICAL_LEN: u64 = 32 << 10;
/// A request that waits for room looks again at this interval even if nothing wakes it, because a slot that was kept for a late
/// answer becomes free without a notification.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The arena. Clones share it.
#[derive(Clone)]
pub(crate) struct Arena {
    inner: Arc<Inner>,
}

struct Inner {
    region: Region,
    /// A read-only descriptor of the region, for clients.
    reader: File,
    marks_file: File,
    marks: Arc<SharedMarks>,
    table: Mutex<Table<ChunkKey, ResidentChunk, PendingLoad>>,
    /// Distinguishes the chunks that successively occupy the same slot.
    generation: AtomicU32,
    leases: AtomicU64,
    /// The first request that waits for room holds this lock. The others queue for the lock, first come, first served.
    queue: tokio::sync::Mutex<()>,
    waiting: AtomicU64,
    waited: AtomicU64,
    /// Notified when a lease ends while a request waits for room.
    idled: Notify,
    ledger: Arc<LeaseLedger<Lease>>,
}

/// The error of a chunk that could not be loaded. The requests that joined the load get it too. The arena does not examine it.
pub(crate) type LoadFailure = Arc<dyn Error + Send + Sync>;

/// A load that another request performs.
#[derive(Clone)]
pub(crate) struct PendingLoad {
    /// The node that the chunks come from.
    pub(crate) owner: NodeId,
    /// Resolves at the end: to the failures if chunks could not be loaded, and to an error (the sender was dropped) if all were
    /// loaded or the load was abandoned. Waiters resume in the order in which they came.
    pub(crate) end: Shared<oneshot::Receiver<Arc<HashMap<Chunk, LoadFailure>>>>,
}

/// A chunk that a request wants.
#[derive(Clone)]
pub(crate) struct Wanted {
    /// The chunk's index in the request.
    pub(crate) index: u32,
    pub(crate) chunk: Chunk,
    pub(crate) info: ChunkInfo,
}

/// The result of claiming many chunks. A chunk for which there was no room does not appear in the result.
#[derive(Default)]
pub(crate) struct Claimed {
    /// Resident chunks, by index in the request.
    pub(crate) leased: Vec<(u32, Lease)>,
    /// Chunks that another request is loading. When the load ends without a failure, claim the chunk again.
    pub(crate) pending: Vec<(u32, Chunk, PendingLoad)>,
    /// Chunks for the claimer to load, grouped by owner.
    pub(crate) loads: Vec<LoadGroup>,
    /// Bytes of the chunks in `loads`.
    pub(crate) load_bytes: u64,
    /// Bytes of all claimed chunks.
    pub(crate) bytes: u64,
}

impl Claimed {
    /// Returns whether nothing was claimed, because not even one chunk found room.
    pub(crate) fn is_empty(&self) -> bool {
        self.leased.is_empty() && self.pending.is_empty() && self.loads.is_empty()
    }
}

impl Arena {
    /// Creates an arena in `region`. Clients map the arena through a read-only descriptor, and see in `status_page` which
    /// leases still hold.
    pub(crate) fn new(region: Region, status_page: Arc<StatusPage>, deadlines: &Deadlines) -> io::Result<Self> {
        let reader = crate::store::read_only(region.file())?;
        let marks_len = region.len() / ARENA_UNIT;
        let marks_file = crate::store::shared_file("dayfly-marks", marks_len)?;
        let marks = Arc::new(SharedMarks::map(&marks_file, marks_len as usize)?);
        let table = Mutex::new(Table::new(region.len(), (region.len() / TYPICAL_LEN).max(64) as usize));
        let ledger = Arc::new(LeaseLedger::new(status_page, region.len(), deadlines));
        let inner = Inner {
            region,
            reader,
            marks_file,
            marks,
            table,
            generation: AtomicU32::new(0),
            leases: AtomicU64::new(0),
            queue: tokio::sync::Mutex::default(),
            waiting: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            idled: Notify::new(),
            ledger,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the files that clients get: the arena, read-only, and its marks, which they write.
    pub(crate) fn files(&self) -> (&File, &File) {
        (&self.inner.reader, &self.inner.marks_file)
    }

    pub(crate) fn len(&self) -> u64 {
        self.inner.region.len()
    }

    /// Returns the record of which processes hold which leases.
    pub(crate) fn ledger(&self) -> &Arc<LeaseLedger<Lease>> {
        &self.inner.ledger
    }

    /// Returns the bytes of resident chunks, and the number of leases.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.table().weight(), self.inner.leases.load(Ordering::Relaxed))
    }

    /// Returns the number of requests that are waiting for room now, and the number that have ever waited for it.
    pub(crate) fn waiters(&self) -> (u64, u64) {
        (self.inner.waiting.load(Ordering::Relaxed), self.inner.waited.load(Ordering::Relaxed))
    }

    /// Claims chunks in order, up to `budget` bytes and as long as there is room. Without `may_allocate`, chunks that would
    /// need a new slot are skipped. Never waits for room.
    pub(crate) fn claim(
        &self,
        dataset: &Arc<Dataset>,
        wanted: impl Iterator<Item = Wanted>,
        budget: u64,
        may_allocate: bool,
    ) -> Claimed {
        let mut claimed = Claimed::default();
        let mut left = budget;
        let mut table = self.table();
        for wanted in wanted {
            let Some(rest) = left.checked_sub(wanted.info.len) else { break };
            let key = (dataset.id(), wanted.chunk);
            match table.look_up(&key) {
                Lookup::Resident(chunk) => claimed.leased.push((wanted.index, Lease::new(self, chunk))),
                Lookup::Loading(pending) => claimed.pending.push((wanted.index, wanted.chunk, pending)),
                Lookup::Absent if !may_allocate => continue,
                Lookup::Absent => {
                    let Some(slot) = self.allocate(&mut table, wanted.info.len) else { break };
                    claimed.load_bytes += wanted.info.len;
                    self.add_load(&mut table, &mut claimed.loads, dataset, &wanted, slot);
                }
            }
            left = rest;
        }
        claimed.bytes = budget - left;
        claimed
    }

    /// Claims one chunk, for which the caller already has a slot.
    pub(crate) fn claim_with(&self, dataset: &Arc<Dataset>, wanted: &Wanted, slot: Slot) -> Claimed {
        let mut claimed = Claimed { bytes: wanted.info.len, ..Claimed::default() };
        let key = (dataset.id(), wanted.chunk);
        let mut table = self.table();
        match table.look_up(&key) {
            Lookup::Resident(chunk) => claimed.leased.push((wanted.index, Lease::new(self, chunk))),
            Lookup::Loading(pending) => claimed.pending.push((wanted.index, wanted.chunk, pending)),
            Lookup::Absent => {
                claimed.load_bytes = wanted.info.len;
                self.add_load(&mut table, &mut claimed.loads, dataset, wanted, slot);
            }
        }
        claimed
    }

    /// Returns a lease on a chunk, if it is resident now.
    pub(crate) fn find(&self, key: &ChunkKey) -> Option<Lease> {
        match self.table().look_up(key) {
            Lookup::Resident(chunk) => Some(Lease::new(self, chunk)),
            _ => None,
        }
    }

    /// Returns whether a request is waiting for room. If so, no other request allocates more than it must.
    pub(crate) fn is_short(&self) -> bool {
        self.inner.waiting.load(Ordering::Relaxed) > 0
    }

    /// Adds a chunk to the group of its owner, or to a new group if that group is full.
    fn add_load(
        &self,
        table: &mut Table<ChunkKey, ResidentChunk, PendingLoad>,
        groups: &mut Vec<LoadGroup>,
        dataset: &Arc<Dataset>,
        wanted: &Wanted,
        slot: Slot,
    ) {
        let ChunkInfo { len, owner, .. } = wanted.info;
        let open = groups.iter().position(|group| group.owner == owner && group.fits(len));
        let index = open.unwrap_or_else(|| {
            groups.push(LoadGroup::new(self, dataset, owner));
            groups.len() - 1
        });
        let group = &mut groups[index];
        table.begin_load((dataset.id(), wanted.chunk), group.pending());
        group.push(wanted, slot);
    }

    /// Returns a slot of `len` bytes, if there is room for it or idle chunks can be evicted to make room.
    fn allocate(&self, table: &mut Table<ChunkKey, ResidentChunk, PendingLoad>, len: u64) -> Option<Slot> {
        loop {
            if let Some(slot) = self.inner.region.slot(len) {
                return Some(slot);
            }
            if table.evict(len.max(EVICTION_LEN_MIN)).is_empty() {
                return None;
            }
        }
    }

    /// Waits for a slot of `len` bytes; requests are served in the order in which they came. Meanwhile the holders of leases
    /// are asked to release them, and the largest holder that does not respond loses its leases. Returns `None` after `limit`.
    pub(crate) async fn slot_within(&self, len: u64, limit: Duration) -> Option<Slot> {
        let start = Instant::now();
        let deadline = start + limit;
        if !self.is_short()
            && let Some(slot) = self.allocate(&mut self.table(), len)
        {
            return Some(slot);
        }
        let _waiting = Waiting::new(&self.inner);
        let _first = timeout_at(deadline, self.inner.queue.lock()).await.ok()?;
        loop {
            // The notification is enabled before the attempt, so that a lease that ends right after the attempt still wakes us.
            let idled = self.inner.idled.notified();
            tokio::pin!(idled);
            idled.as_mut().enable();
            if let Some(slot) = self.allocate(&mut self.table(), len) {
                return Some(slot);
            }
            if self.inner.ledger.recall(start.elapsed()) {
                continue;
            }
            let woken = timeout_at(deadline.min(Instant::now() + RETRY_INTERVAL), idled).await;
            if woken.is_err() && Instant::now() >= deadline {
                return None;
            }
        }
    }

    /// Drops the chunks of a dataset. A leased chunk keeps its room until its last lease ends.
    pub(crate) fn forget(&self, dataset: DatasetId) {
        let forgotten = self.table().forget(|key| key.0 == dataset);
        drop(forgotten);
    }

    /// Returns the resident chunks of a dataset.
    pub(crate) fn chunks_of(&self, dataset: DatasetId) -> Vec<Chunk> {
        self.table().keys().filter(|key| key.0 == dataset).map(|key| key.1).collect()
    }

    /// Drops the chunks of blocks that processes find elsewhere from now on. Each block comes with its length. A leased chunk keeps
    /// its room until its last lease ends.
    pub(crate) fn forget_blocks(&self, dataset: DatasetId, blocks: &[(BlockId, u64)]) {
        for chunk in blocks.iter().flat_map(|&(block, len)| Chunk::all(block, len)) {
            let forgotten = self.table().take(&(dataset, chunk));
            drop(forgotten);
        }
    }

    /// Drops a chunk whose bytes are damaged, so that the next request for it fetches it again.
    /// From then on, nobody finds the damaged copy; existing leases on it keep its room until they
    /// end.
    pub(crate) fn discard(&self, key: &ChunkKey, lease: &Lease) {
        let discarded = self.table().forget_one(key, |chunk| Arc::ptr_eq(chunk, lease.chunk()));
        if discarded {
            lease.chunk().withdraw();
        }
    }

    fn next_generation(&self) -> u32 {
        self.inner.generation.fetch_add(1, Ordering::Relaxed)
    }

    fn table(&self) -> MutexGuard<'_, Table<ChunkKey, ResidentChunk, PendingLoad>> {
        self.inner.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a request as waiting for room, until this guard is dropped. When the last waiting request stops, the recall of leases
/// ends.
struct Waiting<'a>(&'a Inner);

impl<'a> Waiting<'a> {
    fn new(inner: &'a Inner) -> Self {
        inner.waiting.fetch_add(1, Ordering::Relaxed);
        inner.waited.fetch_add(1, Ordering::Relaxed);
        Self(inner)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.0.waiting.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.ledger.end_recall();
        }
    }
}
