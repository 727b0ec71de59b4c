//! The arena: memory into which chunks of other nodes' blocks land, and from which this node's processes read them.
//!
//! A chunk here is being loaded (others who want it wait for the one who loads it), leased, or idle. Idle ones stay until their
//! room is needed; a scan-resistant policy says which goes first (`table`). A block that is one chunk is published in its
//! dataset's locations for as long as it is here, so that processes find it without asking; what they read so, they mark.

mod ledger;
mod table;

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, DatasetId, NodeId};
use dayfly_meta::limits::{ARENA_UNIT, FETCH_PART_LEN};
use dayfly_meta::locations::Locations;
use dayfly_meta::segment::Location;
use dayfly_meta::shared::SharedMarks;
use dayfly_meta::status_page::StatusPage;
use dayfly_transport::{Region, Slot};
use futures_util::FutureExt;
use futures_util::future::Shared;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::store::{ChunkInfo, Dataset};
use ledger::Leased;
pub(crate) use ledger::{LeaseHolder, LeaseLedger};
use table::{Resident, Table, Wish};

/// A chunk's name on this node.
pub(crate) type Key = (DatasetId, Chunk);

/// So much makes room at once, where a little would do: what is evicted with one look costs less.
const EVICTED_TOGETHER: u64 = 256 << 10;
/// The policy is prepared for entries of this size in the mean.
const TYPICAL_LEN: u64 = 32 << 10;

/// The arena; clones share it.
#[derive(Clone)]
pub(crate) struct Arena {
    inner: Arc<Inner>,
}

struct Inner {
    region: Region,
    reader: File,
    marks_file: File,
    marks: Arc<SharedMarks>,
    table: Mutex<Table<Key, Held, Loading>>,
    generation: AtomicU32,
    leases: AtomicU64,
    /// One who waits for room holds this; others queue for it, first come, first served.
    turn: tokio::sync::Mutex<()>,
    waiting: AtomicU64,
    waited: AtomicU64,
    idled: Notify,
    ledger: Arc<LeaseLedger<Lease>>,
}

/// A chunk in the arena. When it is dropped, its location has been taken back before its room is.
struct Held {
    slot: Slot,
    published: Option<(Arc<Locations>, BlockId, Location)>,
    marks: Arc<SharedMarks>,
}

/// Tells those who wait for a load that it ended: closed without a word it succeeded or was given up, else it failed so. They hear it
/// in the order in which they came.
pub(crate) type Loading = Shared<oneshot::Receiver<Arc<str>>>;

/// What is wanted.
#[derive(Clone)]
pub(crate) struct Wanted {
    /// Its place in the request.
    pub(crate) at: u32,
    pub(crate) chunk: Chunk,
    pub(crate) info: ChunkInfo,
}

/// What became of many wishes. What is not named had no room.
#[derive(Default)]
pub(crate) struct Claimed {
    /// What is here.
    pub(crate) held: Vec<(u32, Lease)>,
    /// What somebody loads; when the channel closes without a failure, wish again.
    pub(crate) loading: Vec<(u32, Key, Loading)>,
    /// What is for the claimer to load, by owner.
    pub(crate) loads: Vec<Ticket>,
    /// What is loaded by these, in bytes.
    pub(crate) load_bytes: u64,
    /// Bytes of all of these.
    pub(crate) bytes: u64,
}

impl Claimed {
    /// Whether there was no room for anything.
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.loading.is_empty() && self.loads.is_empty()
    }
}

/// The right, and the duty, to load chunks of one owner. What is not filled when it is dropped passes to the next who wishes.
pub(crate) struct Ticket {
    arena: Arena,
    pub(crate) owner: NodeId,
    dataset: Arc<Dataset>,
    loads: Vec<Load>,
    bytes: u64,
    ended: Option<oneshot::Sender<Arc<str>>>,
    loading: Loading,
}

struct Load {
    at: u32,
    chunk: Chunk,
    is_block: bool,
    slot: Option<Slot>,
}

/// The right to read a chunk; dropping it ends it.
pub(crate) struct Lease {
    arena: Arena,
    held: Option<Arc<Held>>,
}

impl Arena {
    /// `region` is mapped by clients through a descriptor that cannot write. `status page` tells them which leases hold.
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
            turn: tokio::sync::Mutex::default(),
            waiting: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            idled: Notify::new(),
            ledger,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What clients get: the arena to read, its marks to write.
    pub(crate) fn files(&self) -> (&File, &File) {
        (&self.inner.reader, &self.inner.marks_file)
    }

    pub(crate) fn len(&self) -> u64 {
        self.inner.region.len()
    }

    /// Which of this node's processes hold which leases.
    pub(crate) fn ledger(&self) -> &Arc<LeaseLedger<Lease>> {
        &self.inner.ledger
    }

    /// Bytes of chunks in it, and leases out.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.table().weight(), self.inner.leases.load(Ordering::Relaxed))
    }

    /// Requests that wait for room, and that ever did.
    pub(crate) fn waiters(&self) -> (u64, u64) {
        (self.inner.waiting.load(Ordering::Relaxed), self.inner.waited.load(Ordering::Relaxed))
    }

    /// Claims as many as `budget` bytes and the room allow, or, where no new room is to be taken, those that need none. Room is
    /// waited for by nobody here.
    pub(crate) fn claim(
        &self,
        dataset: &Arc<Dataset>,
        wanted: impl Iterator<Item = Wanted>,
        budget: u64,
        takes_room: bool,
    ) -> Claimed {
        let mut claimed = Claimed::default();
        let mut left = budget;
        let mut table = self.table();
        for wanted in wanted {
            let Some(rest) = left.checked_sub(wanted.info.len) else { break };
            let key = (dataset.id(), wanted.chunk);
            match table.wish(&key) {
                Wish::Held(held) => claimed.held.push((wanted.at, self.lease(held))),
                Wish::Loading(loading) => claimed.loading.push((wanted.at, key, loading)),
                Wish::Absent if !takes_room => continue,
                Wish::Absent => {
                    let Some(slot) = self.take_slot(&mut table, wanted.info.len) else { break };
                    claimed.load_bytes += wanted.info.len;
                    self.add_load(&mut table, &mut claimed.loads, dataset, &wanted, slot);
                }
            }
            left = rest;
        }
        claimed.bytes = budget - left;
        claimed
    }

    /// As [`Self::claim`], of one for which there is room already.
    pub(crate) fn claim_with(&self, dataset: &Arc<Dataset>, wanted: &Wanted, slot: Slot) -> Claimed {
        let mut claimed = Claimed { bytes: wanted.info.len, ..Claimed::default() };
        let key = (dataset.id(), wanted.chunk);
        let mut table = self.table();
        match table.wish(&key) {
            Wish::Held(held) => claimed.held.push((wanted.at, self.lease(held))),
            Wish::Loading(loading) => claimed.loading.push((wanted.at, key, loading)),
            Wish::Absent => {
                claimed.load_bytes = wanted.info.len;
                self.add_load(&mut table, &mut claimed.loads, dataset, wanted, slot);
            }
        }
        claimed
    }

    /// A lease on what is here now.
    pub(crate) fn find(&self, key: &Key) -> Option<Lease> {
        match self.table().wish(key) {
            Wish::Held(held) => Some(self.lease(held)),
            _ => None,
        }
    }

    /// Whether a request waits for room: then nobody else takes any beyond what they must.
    pub(crate) fn is_short(&self) -> bool {
        self.inner.waiting.load(Ordering::Relaxed) > 0
    }

    fn add_load(
        &self,
        table: &mut Table<Key, Held, Loading>,
        loads: &mut Vec<Ticket>,
        dataset: &Arc<Dataset>,
        wanted: &Wanted,
        slot: Slot,
    ) {
        let ChunkInfo { len, owner, is_block } = wanted.info;
        let load = Load { at: wanted.at, chunk: wanted.chunk, is_block, slot: Some(slot) };
        let at = loads.iter().position(|ticket| ticket.owner == owner && ticket.takes(len));
        let ticket = match at {
            Some(at) => &mut loads[at],
            None => {
                let (ended, loading) = oneshot::channel();
                let (ended, loading) = (Some(ended), loading.shared());
                let dataset = dataset.clone();
                loads.push(Ticket { arena: self.clone(), owner, dataset, loads: Vec::new(), bytes: 0, ended, loading });
                let last = loads.len() - 1;
                &mut loads[last]
            }
        };
        table.begin((dataset.id(), wanted.chunk), ticket.loading.clone());
        ticket.loads.push(load);
        ticket.bytes += len;
    }

    fn lease(&self, held: Arc<Held>) -> Lease {
        self.inner.leases.fetch_add(1, Ordering::Relaxed);
        Lease { arena: self.clone(), held: Some(held) }
    }

    /// A slot, if there is room or idle chunks make some.
    fn take_slot(&self, table: &mut Table<Key, Held, Loading>, len: u64) -> Option<Slot> {
        loop {
            if let Some(slot) = self.inner.region.slot(len) {
                return Some(slot);
            }
            if table.evict(len.max(EVICTED_TOGETHER)).is_empty() {
                return None;
            }
        }
    }

    /// A slot, as soon as there is room; those who came before are served before. Whoever holds leases is asked for them meanwhile,
    /// and loses them in the end.
    pub(crate) async fn room_within(&self, len: u64, wait: Duration) -> Option<Slot> {
        let start = Instant::now();
        let deadline = start + wait;
        if !self.is_short()
            && let Some(slot) = self.take_slot(&mut self.table(), len)
        {
            return Some(slot);
        }
        let _waiting = Waiting::new(&self.inner);
        let _turn = timeout_at(deadline, self.inner.turn.lock()).await.ok()?;
        loop {
            let idled = self.inner.idled.notified();
            tokio::pin!(idled);
            idled.as_mut().enable();
            if let Some(slot) = self.take_slot(&mut self.table(), len) {
                return Some(slot);
            }
            if self.inner.ledger.recall(start.elapsed()) {
                continue;
            }
            // Slots also come free when a late answer lands; a look now and then finds those.
            let look_again = Instant::now() + Duration::from_millis(100);
            let woken = timeout_at(deadline.min(look_again), idled).await;
            if woken.is_err() && Instant::now() >= deadline {
                return None;
            }
        }
    }

    /// Forgets a dataset's chunks; those that are leased stay until they are not.
    pub(crate) fn forget(&self, dataset: DatasetId) {
        let forgotten = self.table().forget(|key| key.0 == dataset);
        drop(forgotten);
    }

    /// Forgets a chunk whose bytes are bad, so that the next who wants it has it fetched. Nobody finds it any more from here on;
    /// those who have leases keep their room until they let go.
    pub(crate) fn discard(&self, key: &Key, lease: &Lease) {
        let discarded = self.table().forget_one(key, |held| Arc::ptr_eq(held, lease.shared()));
        if discarded {
            lease.held().withdraw();
        }
    }

    fn table(&self) -> MutexGuard<'_, Table<Key, Held, Loading>> {
        self.inner.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One more who waits for room.
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

impl Ticket {
    fn takes(&self, len: u64) -> bool {
        self.bytes + len <= FETCH_PART_LEN
    }

    pub(crate) fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    pub(crate) fn chunks(&self) -> Vec<Chunk> {
        self.loads.iter().map(|load| load.chunk).collect()
    }

    /// Their places in the request.
    pub(crate) fn places(&self) -> impl Iterator<Item = u32> {
        self.loads.iter().map(|load| load.at)
    }

    /// Where the chunks shall land.
    pub(crate) fn take_slots(&mut self) -> Vec<Slot> {
        self.loads.iter_mut().filter_map(|load| load.slot.take()).collect()
    }

    /// The chunks have landed, and were checked, in these slots; those without one cannot be had.
    pub(crate) fn fill(mut self, slots: Vec<Option<Slot>>) -> Vec<(u32, Option<Lease>)> {
        let arena = self.arena.clone();
        let mut filled = Vec::with_capacity(slots.len());
        let mut evicted = Vec::new();
        let mut table = arena.table();
        for (load, slot) in std::mem::take(&mut self.loads).into_iter().zip(slots) {
            let key = (self.dataset.id(), load.chunk);
            let Some(slot) = slot else {
                table.give_up(&key);
                filled.push((load.at, None));
                continue;
            };
            let held = Arc::new(arena.hold(&self.dataset, &load, slot));
            evicted.extend(table.fill(key, held.clone()));
            filled.push((load.at, Some(arena.lease(held))));
        }
        drop(table);
        filled
    }

    /// The chunks cannot be had: those who wait for them hear the same. Returns their places in the request.
    pub(crate) fn fail(mut self, reason: &str) -> Vec<u32> {
        let places = self.loads.iter().map(|load| load.at).collect();
        self.give_up();
        if let Some(ended) = self.ended.take() {
            // Nobody may wait for it.
            let _ = ended.send(reason.into());
        }
        places
    }

    fn give_up(&mut self) {
        let mut table = self.arena.table();
        for load in self.loads.drain(..) {
            table.give_up(&(self.dataset.id(), load.chunk));
        }
    }
}

impl Arena {
    fn hold(&self, dataset: &Dataset, load: &Load, slot: Slot) -> Held {
        let block = load.chunk.block;
        let unit = (slot.offset() / ARENA_UNIT) as u32;
        self.inner.marks.set(unit as usize, 0);
        let generation = self.inner.generation.fetch_add(1, Ordering::Relaxed);
        let location = Location::Arena { unit, generation };
        // Only where no process could find it otherwise.
        let is_published = load.is_block && dataset.publish_in_arena(block, location);
        let published = is_published.then(|| (dataset.locations().clone(), block, location));
        Held { slot, published, marks: self.inner.marks.clone() }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.loads.is_empty() {
            self.give_up();
        }
    }
}

impl Held {
    fn withdraw(&self) {
        if let Some((locations, block, location)) = &self.published {
            locations.withdraw(*block, *location);
        }
    }

    fn unit(&self) -> usize {
        (self.slot.offset() / ARENA_UNIT) as usize
    }
}

impl Resident for Held {
    fn weight(&self) -> u64 {
        (self.slot.len() as u64).next_multiple_of(ARENA_UNIT)
    }

    fn take_mark(&self) -> bool {
        // Once is what it came for.
        let was_read_again = self.marks.get(self.unit()) > 1;
        if was_read_again {
            self.marks.set(self.unit(), 1);
        }
        was_read_again
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl Lease {
    fn shared(&self) -> &Arc<Held> {
        // Taken out only when it is dropped.
        self.held.as_ref().unwrap_or_else(|| unreachable!("a lease holds"))
    }

    fn held(&self) -> &Held {
        self.shared()
    }

    /// See [`Arena::discard`].
    pub(crate) fn discard(&self, key: &Key) {
        self.arena.discard(key, self);
    }

    /// Where the chunk lies in the arena.
    pub(crate) fn offset(&self) -> u64 {
        self.held().slot.offset()
    }

    /// Its length.
    pub(crate) fn len(&self) -> u64 {
        self.held().slot.len() as u64
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.held().slot
    }

    /// Whether a process has read it since it came, or since [`Self::clear_mark`].
    pub(crate) fn was_read(&self) -> bool {
        self.held().marks.get(self.held().unit()) > 0
    }

    /// Forgets that it was read.
    pub(crate) fn clear_mark(&self) {
        self.held().marks.set(self.held().unit(), 0);
    }
}

impl Leased for Lease {
    fn weight(&self) -> u64 {
        self.len()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        drop(self.held.take());
        self.arena.inner.leases.fetch_sub(1, Ordering::Relaxed);
        if self.arena.is_short() {
            self.arena.inner.idled.notify_waiters();
        }
    }
}
