//! Shared memory for bulk bytes, allocated in slots. A slot's bytes belong to its holder alone, and dropping the slot frees them.
//!
//! A region is a memfd, so other processes can map it read-only. A region that an RDMA card may access carries its registration,
//! which ends with the region.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use dayfly_meta::limits::ARENA_UNIT as UNIT;
use memmap2::MmapRaw;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use offset_allocator::{Allocation, Allocator};
use tokio::sync::Notify;

/// Number of slots that every region may have. The allocator takes 28 bytes for each of them when the region is created. A large
/// region may have more slots, one for every 2 KiB, because many small pieces share the region.
const SLOTS_MIN: u32 = 128 << 10;
const UNITS_PER_SLOT: u32 = (2048 / UNIT) as u32;

/// The keys with which a card accesses a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    /// The key for operations by this node.
    pub(crate) local: u32,
    /// The key for operations by the peers.
    pub(crate) remote: u32,
}

/// Allows a card to access a region until the guard is dropped.
pub(crate) struct Registration {
    pub(crate) keys: Keys,
    pub(crate) _guard: Box<dyn Any + Send + Sync>,
}

/// Shared memory from which slots are allocated; clones share it.
#[derive(Clone)]
pub struct Region {
    inner: Arc<Inner>,
}

struct Inner {
    /// Fields are dropped in order, so the registration ends before the memory is unmapped.
    registration: OnceLock<Registration>,
    map: MmapRaw,
    file: File,
    room: Mutex<Allocator>,
    freed: Notify,
}

impl Region {
    /// Creates a region of `len` bytes over a memfd that can neither shrink nor grow. Pages that are never touched take no
    /// memory.
    ///
    /// # Errors
    /// `len` is more than 256 GiB, or the memfd cannot be made or mapped.
    pub fn new(len: u64) -> io::Result<Self> {
        Self::with_slots(len, SLOTS_MIN.max((len / UNIT) as u32 / UNITS_PER_SLOT))
    }

    /// Creates a region as [`Self::new`] does, with at most `slots_max` slots at a time.
    ///
    /// # Errors
    /// The same as for [`Self::new`].
    pub fn with_slots(len: u64, slots_max: u32) -> io::Result<Self> {
        let units =
            u32::try_from(len / UNIT).map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a region is at most 256 GiB"))?;
        let file = File::from(memfd_create("dayfly-region", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
        file.set_len(u64::from(units) * UNIT)?;
        let map = MmapRaw::map_raw(&file)?;
        fcntl(file.as_fd(), FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL))?;
        let room = Mutex::new(Allocator::with_max_allocs(units, slots_max));
        let inner = Inner { registration: OnceLock::new(), map, file, room, freed: Notify::new() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the memfd behind the region, for other processes to map read-only.
    pub fn file(&self) -> &File {
        &self.inner.file
    }

    /// Returns the address of the first byte in this process.
    pub(crate) fn address(&self) -> u64 {
        self.inner.map.as_mut_ptr() as u64
    }

    /// Attaches a card's registration, which then ends with the region.
    pub(crate) fn registered(self, registration: Registration) -> Self {
        // The region is new and has no registration yet, so this cannot fail.
        let _ = self.inner.registration.set(registration);
        self
    }

    /// Returns the length of the region in bytes.
    pub fn len(&self) -> u64 {
        self.inner.map.len() as u64
    }

    /// Returns whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Allocates a slot of at least `len` bytes, if there is room for it now.
    pub fn slot(&self, len: u64) -> Option<Slot> {
        let units = u32::try_from(len.max(1).div_ceil(UNIT)).ok()?;
        // The allocator sorts free room into classes, eight for each power of two, and looks for room in classes that are large
        // enough throughout. Room that is smaller than its class would never be used again for the same length.
        let units = units.checked_next_multiple_of(1 << units.ilog2().saturating_sub(3))?;
        let allocation = self.inner.room.lock().unwrap_or_else(PoisonError::into_inner).allocate(units)?;
        Some(Slot { region: self.clone(), allocation, len: len as usize })
    }

    /// Allocates a slot of at least `len` bytes, waiting up to `timeout` for room.
    pub async fn slot_within(&self, len: u64, timeout: Duration) -> Option<Slot> {
        let wait = async {
            loop {
                let freed = self.inner.freed.notified();
                tokio::pin!(freed);
                freed.as_mut().enable();
                if let Some(slot) = self.slot(len) {
                    return slot;
                }
                freed.await;
            }
        };
        tokio::time::timeout(timeout, wait).await.ok()
    }
}

/// Bytes of a region that belong to the holder alone.
pub struct Slot {
    region: Region,
    allocation: Allocation,
    len: usize,
}

impl Slot {
    /// Returns the offset of the first byte in the region.
    pub fn offset(&self) -> u64 {
        u64::from(self.allocation.offset) * UNIT
    }

    /// Returns the length of the slot in bytes, as requested.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the slot has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of this slot's region, which no other live region has, and the region's length.
    pub(crate) fn home(&self) -> (usize, u64) {
        (Arc::as_ptr(&self.region.inner) as usize, self.region.len())
    }

    /// Returns the address of the first byte in this process.
    pub(crate) fn address(&self) -> u64 {
        self.pointer() as u64
    }

    /// Returns the keys with which a card accesses the slot, if its region is registered.
    pub(crate) fn keys(&self) -> Option<Keys> {
        self.region.inner.registration.get().map(|registration| registration.keys)
    }

    fn pointer(&self) -> *mut u8 {
        self.region.inner.map.as_mut_ptr().wrapping_add(self.offset() as usize)
    }
}

impl std::ops::Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: these bytes lie within the mapping, and the allocator gave them to this slot alone until it is dropped. The
        // mapping lives as long as `region`. The bytes of a new memfd are zeros, so they are initialized. Other processes map the
        // region read-only, and writing here needs `&mut self`, so nothing writes while this borrow lives.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.len) }
    }
}

impl std::ops::DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only access in this process.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.len) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.region.inner.room.lock().unwrap_or_else(PoisonError::into_inner).free(self.allocation);
        self.region.inner.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_do_not_overlap_and_dropped_slots_are_free_again() {
        let region = Region::new(1 << 20).unwrap();
        let mut slots: Vec<Slot> = (0..8_u8).map(|_| region.slot(100_000).unwrap()).collect();
        slots.iter_mut().zip(0..).for_each(|(slot, number)| slot.fill(number));
        assert!(slots.iter().zip(0..).all(|(slot, number)| slot.iter().all(|&byte| byte == number)));
        assert!(region.slot(600_000).is_none());
        slots.clear();
        assert!(region.slot(1 << 20).is_some());
        assert!(region.slot((1 << 20) + 1).is_none());
    }

    #[test]
    fn a_large_region_has_room_for_many_small_slots() {
        let region = Region::new(1 << 30).unwrap();
        let slots: Vec<Slot> = std::iter::from_fn(|| region.slot(3000)).collect();
        // A part of the region is lost between slots.
        assert!(slots.len() > 300_000, "{}", slots.len());
    }

    #[test]
    fn the_place_of_a_slot_takes_another_slot_of_the_same_length() {
        for len in [100, 3000, 19_000, 20_000, 20_032, 100_000, 1_048_570] {
            let region = Region::new(32 << 20).unwrap();
            let mut slots: Vec<Option<Slot>> = std::iter::from_fn(|| region.slot(len).map(Some)).take(10_000).collect();
            for step in [2, 3, 5] {
                slots.iter_mut().step_by(step).for_each(|slot| *slot = None);
                let again = |slot: &mut Option<Slot>| *slot = region.slot(len);
                slots.iter_mut().filter(|slot| slot.is_none()).for_each(again);
                assert!(slots.iter().all(Option::is_some), "length {len}, every {step}th slot");
            }
        }
    }

    #[tokio::test]
    async fn a_waiter_gets_room_that_is_freed_or_fails_at_its_deadline() {
        let region = Region::new(4096).unwrap();
        let slot = region.slot(4096).unwrap();
        assert!(region.slot_within(1, Duration::from_millis(20)).await.is_none());
        let waiter = tokio::spawn({
            let region = region.clone();
            async move { region.slot_within(4096, Duration::from_secs(5)).await.is_some() }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop(slot);
        assert!(waiter.await.unwrap());
    }
}
