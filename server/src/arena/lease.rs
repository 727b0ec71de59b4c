//! A chunk that is resident in the arena, and the right to read it.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use dayfly_meta::id::BlockId;
use dayfly_meta::limits::ARENA_UNIT;
use dayfly_meta::locations::Locations;
use dayfly_meta::segment::Location;
use dayfly_meta::shared::SharedMarks;
use dayfly_transport::Slot;

use super::ledger::Leased;
use super::table::Resident;
use super::{Arena, ChunkKey};
use crate::store::Dataset;

/// A resident chunk. Dropping it withdraws its location first, and frees its slot after that.
pub(super) struct ResidentChunk {
    slot: Slot,
    /// The location that was published for the chunk, if any.
    published: OnceLock<(Arc<Locations>, BlockId, Location)>,
    marks: Arc<SharedMarks>,
    is_from_origin: bool,
    /// Whether a request has found the chunk since it was loaded, or since eviction last looked.
    was_found: AtomicBool,
    chances: AtomicU8,
}

impl ResidentChunk {
    pub(super) fn new(slot: Slot, marks: Arc<SharedMarks>, is_from_origin: bool) -> Self {
        let (was_found, chances) = (AtomicBool::new(false), AtomicU8::new(0));
        let chunk = Self { slot, published: OnceLock::new(), marks, is_from_origin, was_found, chances };
        chunk.marks.set(chunk.unit(), 0);
        chunk
    }

    /// Publishes the chunk, which is the whole block `block`, unless processes can already find that block elsewhere on this node.
    /// Call this once.
    pub(super) fn publish(&self, dataset: &Dataset, block: BlockId, generation: u32) {
        let location = Location::Arena { unit: self.unit() as u32, generation };
        if dataset.publish_in_arena(block, location) {
            let _ = self.published.set((dataset.locations().clone(), block, location));
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.slot
    }

    /// Withdraws the chunk's location, so that processes no longer find it.
    pub(super) fn withdraw(&self) {
        if let Some((locations, block, location)) = self.published.get() {
            locations.withdraw(*block, *location);
        }
    }

    /// Returns the index of the chunk's mark.
    fn unit(&self) -> usize {
        (self.slot.offset() / ARENA_UNIT) as usize
    }
}

impl Resident for ResidentChunk {
    fn weight(&self) -> u64 {
        (self.slot.len() as u64).next_multiple_of(ARENA_UNIT)
    }

    fn is_from_origin(&self) -> bool {
        self.is_from_origin
    }

    fn set_mark(&self) {
        self.was_found.store(true, Ordering::Relaxed);
    }

    fn take_mark(&self) -> bool {
        // The first read is the one that the chunk was fetched for, so that read does not count.
        let was_read_again = self.marks.get(self.unit()) > 1;
        if was_read_again {
            self.marks.set(self.unit(), 1);
        }
        self.was_found.swap(false, Ordering::Relaxed) || was_read_again
    }

    fn chances(&self) -> &AtomicU8 {
        &self.chances
    }
}

impl Drop for ResidentChunk {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// The right to read a resident chunk, which stays where it is until the lease is dropped.
pub(crate) struct Lease {
    arena: Arena,
    /// `None` only while the lease is being dropped.
    chunk: Option<Arc<ResidentChunk>>,
}

impl Lease {
    pub(super) fn new(arena: &Arena, chunk: Arc<ResidentChunk>) -> Self {
        arena.inner.leases.fetch_add(1, Ordering::Relaxed);
        Self { arena: arena.clone(), chunk: Some(chunk) }
    }

    pub(super) fn chunk(&self) -> &Arc<ResidentChunk> {
        self.chunk.as_ref().unwrap_or_else(|| unreachable!("only `drop` takes the chunk out of a lease"))
    }

    /// Drops the damaged chunk from the arena; see [`Arena::discard`].
    pub(crate) fn discard(&self, key: &ChunkKey) {
        self.arena.discard(key, self);
    }

    /// Returns the chunk's offset in the arena.
    pub(crate) fn offset(&self) -> u64 {
        self.chunk().slot.offset()
    }

    pub(crate) fn len(&self) -> u64 {
        self.chunk().slot.len() as u64
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.chunk().slot
    }

    /// Returns whether a process has read the chunk since it was loaded, or since
    /// [`Self::clear_mark`].
    pub(crate) fn was_read(&self) -> bool {
        self.chunk().marks.get(self.chunk().unit()) > 0
    }

    /// Forgets that a process has read the chunk.
    pub(crate) fn clear_mark(&self) {
        self.chunk().marks.set(self.chunk().unit(), 0);
    }
}

impl Leased for Lease {
    fn weight(&self) -> u64 {
        self.len()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The chunk is unpinned before a waiting request is woken, so that this request can evict
        // it at once.
        drop(self.chunk.take());
        self.arena.inner.leases.fetch_sub(1, Ordering::Relaxed);
        if self.arena.is_short() {
            self.arena.inner.idled.notify_waiters();
        }
    }
}
