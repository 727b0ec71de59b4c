//! Shared memory, cut into slots. A slot's bytes belong to whoever holds it; dropping it gives the room back.

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

/// How many slots a region may have: each takes 28 bytes of memory beside it from the start. In a large region small samples are
/// many: one of 2 KiB for each 2 KiB.
const SLOTS_MIN: u32 = 128 << 10;
const UNITS_PER_SLOT: u32 = (2048 / UNIT) as u32;

/// By which a card may touch a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Keys {
    /// For our own operations.
    pub(crate) local: u32,
    /// For our peers'.
    pub(crate) remote: u32,
}

/// That a card may touch a region, until the guard is dropped.
pub(crate) struct Registration {
    pub(crate) keys: Keys,
    pub(crate) _guard: Box<dyn Any + Send + Sync>,
}

/// A region; clones share it.
#[derive(Clone)]
pub struct Region {
    inner: Arc<Inner>,
}

struct Inner {
    /// Goes before what it is of.
    registration: OnceLock<Registration>,
    map: MmapRaw,
    file: File,
    room: Mutex<Allocator>,
    freed: Notify,
}

impl Region {
    /// Makes a region of `len` bytes over a memfd that can neither shrink nor grow. Untouched bytes take no memory.
    pub fn new(len: u64) -> io::Result<Self> {
        Self::with_slots(len, SLOTS_MIN.max((len / UNIT) as u32 / UNITS_PER_SLOT))
    }

    /// As [`Self::new`], of which no more slots are taken at once than these.
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

    /// The file behind it, for other processes to map read-only.
    pub fn file(&self) -> &File {
        &self.inner.file
    }

    /// Where it lies in this process.
    pub(crate) fn address(&self) -> u64 {
        self.inner.map.as_mut_ptr() as u64
    }

    /// Has a card's registration end with it.
    pub(crate) fn registered(self, registration: Registration) -> Self {
        // It is new, and has none.
        let _ = self.inner.registration.set(registration);
        self
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.inner.map.len() as u64
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A slot of at least `len` bytes, if there is room for it now.
    pub fn slot(&self, len: u64) -> Option<Slot> {
        let units = u32::try_from(len.max(1).div_ceil(UNIT)).ok()?;
        let allocation = self.inner.room.lock().unwrap_or_else(PoisonError::into_inner).allocate(units)?;
        Some(Slot { region: self.clone(), allocation, len: len as usize })
    }

    /// A slot, when there is room for it within `timeout`.
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

/// Exclusive room in a region.
pub struct Slot {
    region: Region,
    allocation: Allocation,
    len: usize,
}

impl Slot {
    /// Offset of its first byte in the region.
    pub fn offset(&self) -> u64 {
        u64::from(self.allocation.offset) * UNIT
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region that it is of, by a number, and how long that is.
    pub(crate) fn home(&self) -> (usize, u64) {
        (Arc::as_ptr(&self.region.inner) as usize, self.region.len())
    }

    /// Where it lies in this process.
    pub(crate) fn address(&self) -> u64 {
        self.pointer() as u64
    }

    /// By which a card may touch it, if one may.
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
        // SAFETY: the allocator gave these bytes, which lie within the mapping, to this slot alone until it is dropped;
        // the mapping lives as long as `region`. Bytes of a fresh memfd are zero, thus initialised. Other processes map
        // the region read-only. Writing needs `&mut self`, so no one writes while this borrow lives.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.len) }
    }
}

impl std::ops::DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes this the only access in this process.
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
    fn slots_are_apart_and_room_comes_back() {
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
    fn a_large_region_is_not_full_of_few_small_slots() {
        let region = Region::new(1 << 30).unwrap();
        let slots: Vec<Slot> = std::iter::from_fn(|| region.slot(3000)).collect();
        // Beside what is lost between slots.
        assert!(slots.len() > 300_000, "{}", slots.len());
    }

    #[tokio::test]
    async fn a_waiter_gets_room_when_there_is_some_and_else_its_deadline() {
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
