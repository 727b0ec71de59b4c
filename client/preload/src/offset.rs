//! The offset of an open file description. It is shared with forked children, as POSIX says: before a fork it moves to
//! memory that both sides map. Where a child has become another program that has the file as one of the kernel's (see
//! `carry`), the kernel's offset is the one that counts.

use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use dayfly_client::reserved_fd::ReservedFd;
use dayfly_meta::deadlines::Deadlines;

use crate::next;
use crate::table::Description;

/// Stands in `own` once the offset has moved.
const MOVED: u64 = u64::MAX;
/// Stands in the cell while, and after, the offset goes over to the kernel.
const HANDED_OVER: u64 = u64::MAX - 1;
/// What is read where another process died while it handed over: the end of every file, not some other place.
const LOST: u64 = u64::MAX >> 1;

/// Nobody has filled the carrier; somebody has; else the process that is at it.
pub(crate) const EMPTY: u32 = 0;
pub(crate) const FILLED: u32 = 1;

/// An offset.
pub(crate) struct Offset {
    own: AtomicU64,
    shared: AtomicPtr<Shared>,
    page: AtomicPtr<Page>,
    /// A file of the kernel's in the place of this description, for programs without this library.
    carrier: AtomicPtr<ReservedFd>,
    /// Whether the carrier is filled, as long as this process alone has it.
    filled: AtomicU32,
    /// Whether forked processes have the same carrier; then its state is with the shared offset.
    is_carrier_shared: AtomicBool,
}

/// In memory that forked processes share.
struct Shared {
    offset: AtomicU64,
    filled: AtomicU32,
}

/// Memory with the offsets that moved at one fork, and how many of them this process still has.
struct Page {
    base: NonNull<Shared>,
    len: usize,
    references: AtomicUsize,
}

impl Offset {
    pub(crate) fn new() -> Self {
        Self {
            own: AtomicU64::new(0),
            shared: AtomicPtr::new(null_mut()),
            page: AtomicPtr::new(null_mut()),
            carrier: AtomicPtr::new(null_mut()),
            filled: AtomicU32::new(EMPTY),
            is_carrier_shared: AtomicBool::new(false),
        }
    }

    fn shared(&self) -> Option<&Shared> {
        let shared = self.shared.load(Ordering::Acquire);
        // SAFETY: points into the page that `share` attached to this offset, which is unmapped only when this ends.
        (!shared.is_null()).then(|| unsafe { &*shared })
    }

    /// Where the offset is now. It moves at most once, before a fork; whoever meets it on the way waits a moment.
    fn cell(&self) -> &AtomicU64 {
        loop {
            if let Some(shared) = self.shared() {
                return &shared.offset;
            }
            if self.own.load(Ordering::Acquire) != MOVED {
                return &self.own;
            }
            std::hint::spin_loop();
        }
    }

    /// The state of the carrier.
    pub(crate) fn filled(&self) -> &AtomicU32 {
        match self.shared() {
            Some(shared) if self.is_carrier_shared.load(Ordering::Acquire) => &shared.filled,
            _ => &self.filled,
        }
    }

    pub(crate) fn carrier(&self) -> Option<&ReservedFd> {
        let carrier = self.carrier.load(Ordering::Acquire);
        // SAFETY: made by `Box::into_raw` in `set_carrier`, and ended only when this ends.
        (!carrier.is_null()).then(|| unsafe { &*carrier })
    }

    /// Sets the carrier, unless there is one; whether it did.
    pub(crate) fn set_carrier(&self, carrier: ReservedFd) -> bool {
        let carrier = Box::into_raw(Box::new(carrier));
        let is_set = self.carrier.compare_exchange(null_mut(), carrier, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !is_set {
            // SAFETY: made just above, and not published.
            drop(unsafe { Box::from_raw(carrier) });
        }
        is_set
    }

    /// Takes over a carrier that a `vfork` child has filled.
    pub(crate) fn adopt(&self, carrier: ReservedFd) {
        if self.set_carrier(carrier) {
            if self.is_cell_ours() {
                self.cell().store(HANDED_OVER, Ordering::Release);
            }
            self.filled().store(FILLED, Ordering::Release);
        }
    }

    /// The kernel's descriptor that keeps the offset, once it does.
    pub(crate) fn kernel(&self) -> Option<RawFd> {
        let carrier = self.carrier()?;
        (self.filled().load(Ordering::Acquire) == FILLED).then(|| carrier.as_raw_fd())
    }

    /// Whether whoever uses the cell has the same carrier.
    fn is_cell_ours(&self) -> bool {
        self.shared().is_none() || self.is_carrier_shared.load(Ordering::Acquire)
    }

    /// The value of the cell, once it is one; `None` where the kernel has it.
    #[inline]
    fn value(&self) -> Option<(&AtomicU64, u64)> {
        let cell = self.cell();
        match cell.load(Ordering::Acquire) {
            MOVED | HANDED_OVER => self.value_later(),
            value => Some((cell, value)),
        }
    }

    #[cold]
    fn value_later(&self) -> Option<(&AtomicU64, u64)> {
        let deadline = Instant::now() + Deadlines::DEFAULT.server;
        loop {
            let cell = self.cell();
            match cell.load(Ordering::Acquire) {
                MOVED => {}
                HANDED_OVER if self.kernel().is_some() => return None,
                HANDED_OVER if Instant::now() > deadline => return Some((cell, LOST)),
                HANDED_OVER => std::thread::yield_now(),
                value => return Some((cell, value)),
            }
        }
    }

    /// Gives the offset to the kernel's file, which is filled: from here on that counts.
    pub(crate) fn hand_over(&self, carrier: RawFd) {
        if !self.is_cell_ours() {
            // Those who share the cell do not have this carrier: they go on from the cell.
            next::lseek(carrier, self.load() as i64, libc::SEEK_SET);
            self.filled().store(FILLED, Ordering::Release);
            return;
        }
        let offset = loop {
            let cell = self.cell();
            let now = cell.load(Ordering::Acquire);
            if now != MOVED && cell.compare_exchange(now, HANDED_OVER, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                break now;
            }
        };
        if offset != HANDED_OVER {
            next::lseek(carrier, offset as i64, libc::SEEK_SET);
        }
        self.filled().store(FILLED, Ordering::Release);
    }

    pub(crate) fn load(&self) -> u64 {
        if let Some(descriptor) = self.kernel() {
            return u64::try_from(next::lseek(descriptor, 0, libc::SEEK_CUR)).unwrap_or(0);
        }
        self.value().map_or_else(|| self.load(), |(_, value)| value)
    }

    pub(crate) fn store(&self, offset: u64) {
        if let Some(descriptor) = self.kernel() {
            next::lseek(descriptor, offset as i64, libc::SEEK_SET);
            return;
        }
        while let Some((cell, now)) = self.value() {
            if now == LOST || cell.compare_exchange(now, offset, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return;
            }
        }
        self.store(offset);
    }

    /// Takes the next bytes, at most `len` and not beyond `size`: returns where they start and how many they are. Two who
    /// read from one description never get the same ones. `None` where the kernel has the offset: read there.
    pub(crate) fn claim(&self, len: u64, size: u64) -> Option<(u64, u64)> {
        if self.kernel().is_some() {
            return None;
        }
        loop {
            let (cell, start) = self.value()?;
            let count = len.min(size.saturating_sub(start));
            if count == 0 || cell.compare_exchange_weak(start, start + count, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some((start, count));
            }
        }
    }

    /// Gives back what was claimed and could not be read, unless somebody has moved on.
    pub(crate) fn unclaim(&self, start: u64, count: u64) {
        // Whoever has moved on keeps what they have.
        let _ = self.cell().compare_exchange(start + count, start, Ordering::AcqRel, Ordering::Relaxed);
    }
}

impl Drop for Offset {
    fn drop(&mut self) {
        let carrier = *self.carrier.get_mut();
        if !carrier.is_null() {
            // SAFETY: made by `Box::into_raw` in `set_carrier`; nobody else sees this offset any more.
            drop(unsafe { Box::from_raw(carrier) });
        }
        let page = *self.page.get_mut();
        if page.is_null() {
            return;
        }
        // SAFETY: made by `Box::into_raw` in `share`, and alive as long as one offset refers to it.
        let last = unsafe { (*page).references.fetch_sub(1, Ordering::AcqRel) } == 1;
        if last {
            // SAFETY: that was the last reference of this process; its children have mappings of their own.
            unsafe {
                let page = Box::from_raw(page);
                libc::munmap(page.base.as_ptr().cast(), page.len);
            }
        }
    }
}

/// Moves the offsets of all that is open into memory that a child will share.
pub(crate) fn share<'a>(descriptions: impl Iterator<Item = &'a Description>) {
    let all: Vec<&Offset> = descriptions.map(|description| &description.offset).collect();
    let moving: Vec<&Offset> = all.iter().copied().filter(|offset| offset.shared().is_none()).collect();
    if !moving.is_empty() {
        move_to_shared_memory(moving);
    }
    for offset in all {
        let is_new = offset.carrier().is_some() && !offset.is_carrier_shared.load(Ordering::Acquire);
        let Some(shared) = offset.shared().filter(|_| is_new) else { continue };
        let state = offset.filled.load(Ordering::Acquire);
        // Where another process of ours has shared one of its own with its children, this one stays what it is.
        if shared.filled.compare_exchange(EMPTY, state, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            offset.is_carrier_shared.store(true, Ordering::Release);
        }
    }
}

fn move_to_shared_memory(moving: Vec<&Offset>) {
    let len = moving.len() * size_of::<Shared>();
    // SAFETY: a new mapping of nothing that exists.
    let memory = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(null_mut(), len, protection, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0)
    };
    let Some(base) = NonNull::new(memory.cast::<Shared>()).filter(|_| memory != libc::MAP_FAILED) else { return };
    let page = Box::into_raw(Box::new(Page { base, len, references: AtomicUsize::new(moving.len()) }));
    for (number, offset) in moving.into_iter().enumerate() {
        let value = offset.own.swap(MOVED, Ordering::AcqRel);
        // SAFETY: within the mapping, which has room for all of them, aligned, and zero: a valid `Shared`.
        let shared = unsafe { base.add(number).as_ref() };
        shared.offset.store(value, Ordering::Release);
        offset.page.store(page, Ordering::Release);
        offset.shared.store(base.as_ptr().wrapping_add(number), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_claimed_once_and_not_beyond_the_end() {
        let offset = Offset::new();
        assert_eq!(offset.claim(4, 10), Some((0, 4)));
        assert_eq!(offset.claim(100, 10), Some((4, 6)));
        assert_eq!(offset.claim(1, 10), Some((10, 0)));
        offset.unclaim(4, 6);
        assert_eq!(offset.load(), 4);
        offset.store(20);
        assert_eq!(offset.claim(1, 10), Some((20, 0)));
    }
}
