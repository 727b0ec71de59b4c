//! The offset of an open file description.
//!
//! POSIX gives a forked child the same offset as its parent, so an offset has up to three homes, in this order:
//!
//! 1. `own`, a word in this process's memory.
//! 2. After the first fork: a word in memory that parent and children map ([`share`]).
//! 3. Once the description has a *kernel copy* that is filled (see `exec_handoff`): the kernel's offset of that file. Another
//!    program may have the file open without this library, and then only the kernel knows how far it has read.
//!
//! An offset moves forward through these homes and never back. A word that has moved holds a mark instead of an offset, so a
//! thread that meets it follows. There are no locks: a fork in the middle of an operation leaves nothing locked, and a process
//! that dies in the middle delays others no longer than their deadline.

use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use dayfly_client::cancellation;
use dayfly_client::reserved_fd::ReservedFd;
use dayfly_meta::deadlines::Deadlines;

use crate::next;

/// The value of `own` once the offset has moved to shared memory.
const MOVED: u64 = u64::MAX;
/// The value of the word while the offset moves to the kernel, and from then on.
const IN_KERNEL: u64 = u64::MAX - 1;
/// The offset that readers get if another process died while it moved the offset to the kernel, or if the program closed the
/// kernel copy: beyond the end of every file, because a wrong offset would give wrong bytes.
const LOST: u64 = u64::MAX >> 1;

/// State of a kernel copy: no process has filled it. A process that fills it stores its process id.
pub(crate) const EMPTY: u32 = 0;
/// State of a kernel copy: it has the file's bytes.
pub(crate) const FILLED: u32 = 1;

/// The offset of one open file description, and the description's kernel copy.
pub(crate) struct Offset {
    own: AtomicU64,
    shared: AtomicPtr<Shared>,
    page: AtomicPtr<Page>,
    /// A kernel file that stands for this description in programs without this library.
    kernel_copy: AtomicPtr<ReservedFd>,
    /// State of the kernel copy, as long as this process alone has it.
    filled: AtomicU32,
    /// Whether forked processes have the same kernel copy; then its state is in shared memory.
    is_copy_shared: AtomicBool,
}

/// An offset in memory that forked processes share.
struct Shared {
    offset: AtomicU64,
    filled: AtomicU32,
}

/// A mapping with the offsets that moved at one fork.
struct Page {
    base: NonNull<Shared>,
    /// Length in bytes.
    len: usize,
    /// Offsets of this process that still use the mapping.
    references: AtomicUsize,
}

impl Offset {
    pub(crate) fn new() -> Self {
        Self {
            own: AtomicU64::new(0),
            shared: AtomicPtr::new(null_mut()),
            page: AtomicPtr::new(null_mut()),
            kernel_copy: AtomicPtr::new(null_mut()),
            filled: AtomicU32::new(EMPTY),
            is_copy_shared: AtomicBool::new(false),
        }
    }

    fn shared(&self) -> Option<&Shared> {
        let shared = self.shared.load(Ordering::Acquire);
        // SAFETY: points into the mapping that `share` gave this offset, which is unmapped only when this is dropped.
        (!shared.is_null()).then(|| unsafe { &*shared })
    }

    /// Returns the word that holds the offset now. It moves at most once, before a fork; a thread that reads it during the move
    /// spins briefly.
    fn word(&self) -> &AtomicU64 {
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

    /// Returns the state of the kernel copy: [`EMPTY`], [`FILLED`], or the id of the process that fills it.
    pub(crate) fn filled(&self) -> &AtomicU32 {
        match self.shared() {
            Some(shared) if self.is_copy_shared.load(Ordering::Acquire) => &shared.filled,
            _ => &self.filled,
        }
    }

    /// Returns the kernel copy, filled or not.
    pub(crate) fn kernel_copy(&self) -> Option<&ReservedFd> {
        let copy = self.kernel_copy.load(Ordering::Acquire);
        // SAFETY: made by `Box::into_raw` in `set_kernel_copy`, and freed only when this is dropped.
        (!copy.is_null()).then(|| unsafe { &*copy })
    }

    /// Sets the kernel copy, unless there is one. Returns whether it was set.
    pub(crate) fn set_kernel_copy(&self, copy: ReservedFd) -> bool {
        let copy = Box::into_raw(Box::new(copy));
        let is_set = self.kernel_copy.compare_exchange(null_mut(), copy, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !is_set {
            // SAFETY: created just above and not published.
            drop(unsafe { Box::from_raw(copy) });
        }
        is_set
    }

    /// Takes over a kernel copy that a `vfork` child has filled, and whose offset the child's program uses.
    pub(crate) fn adopt(&self, copy: ReservedFd) {
        if self.set_kernel_copy(copy) {
            if self.shares_copy() {
                self.word().store(IN_KERNEL, Ordering::Release);
            }
            self.filled().store(FILLED, Ordering::Release);
        }
    }

    /// Returns the kernel file that keeps the offset, once one does.
    pub(crate) fn kernel(&self) -> Option<&ReservedFd> {
        self.kernel_copy().filter(|_| self.filled().load(Ordering::Acquire) == FILLED)
    }

    /// Returns whether every process that uses the word has the same kernel copy.
    fn shares_copy(&self) -> bool {
        self.shared().is_none() || self.is_copy_shared.load(Ordering::Acquire)
    }

    /// Returns the word and the offset in it; `None` where the kernel has the offset.
    #[inline]
    fn value(&self) -> Option<(&AtomicU64, u64)> {
        let word = self.word();
        match word.load(Ordering::Acquire) {
            MOVED | IN_KERNEL => self.wait_for_value(),
            value => Some((word, value)),
        }
    }

    #[cold]
    fn wait_for_value(&self) -> Option<(&AtomicU64, u64)> {
        let deadline = Instant::now() + Deadlines::DEFAULT.server;
        loop {
            let word = self.word();
            match word.load(Ordering::Acquire) {
                MOVED => {}
                IN_KERNEL if self.kernel().is_some() => return None,
                IN_KERNEL if Instant::now() > deadline => return Some((word, LOST)),
                IN_KERNEL => std::thread::yield_now(),
                value => return Some((word, value)),
            }
        }
    }

    /// Moves the offset to the kernel copy, which is filled: from here on, the kernel's offset applies.
    pub(crate) fn hand_over(&self, copy: RawFd) {
        if !self.shares_copy() {
            // The processes that share the word do not have this copy: they continue from the word.
            next::lseek(copy, self.load() as i64, libc::SEEK_SET);
            self.filled().store(FILLED, Ordering::Release);
            return;
        }
        let offset = loop {
            let word = self.word();
            let now = word.load(Ordering::Acquire);
            if now != MOVED && word.compare_exchange(now, IN_KERNEL, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                break now;
            }
        };
        if offset != IN_KERNEL {
            next::lseek(copy, offset as i64, libc::SEEK_SET);
        }
        self.filled().store(FILLED, Ordering::Release);
    }

    pub(crate) fn load(&self) -> u64 {
        if let Some(copy) = self.kernel() {
            let offset = copy.get().map_or(-1, |copy| next::lseek(copy.as_raw_fd(), 0, libc::SEEK_CUR));
            return u64::try_from(offset).unwrap_or(LOST);
        }
        self.value().map_or_else(|| self.load(), |(_, value)| value)
    }

    pub(crate) fn store(&self, offset: u64) {
        if let Some(copy) = self.kernel() {
            // Where the program has closed the copy, the next read fails.
            if let Ok(copy) = copy.get() {
                next::lseek(copy.as_raw_fd(), offset as i64, libc::SEEK_SET);
            }
            return;
        }
        while let Some((word, now)) = self.value() {
            if now == LOST || word.compare_exchange(now, offset, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return;
            }
        }
        self.store(offset);
    }

    /// Claims the next bytes, at most `len` bytes and none beyond `size`. Returns their start and their count. Two readers of one
    /// description never get the same bytes. `None` where the kernel has the offset: read from the kernel copy instead.
    pub(crate) fn claim(&self, len: u64, size: u64) -> Option<(u64, u64)> {
        if self.kernel().is_some() {
            return None;
        }
        loop {
            let (word, start) = self.value()?;
            let count = len.min(size.saturating_sub(start));
            if count == 0 || word.compare_exchange_weak(start, start + count, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some((start, count));
            }
        }
    }

    /// Returns claimed bytes that could not be read, those after the first `done`, unless another reader has claimed more since
    /// then; that reader keeps its bytes.
    pub(crate) fn unclaim(&self, start: u64, count: u64, done: u64) {
        let _ = self.word().compare_exchange(start + count, start + done, Ordering::AcqRel, Ordering::Relaxed);
    }
}

impl Drop for Offset {
    fn drop(&mut self) {
        let copy = *self.kernel_copy.get_mut();
        if !copy.is_null() {
            let _deferral = cancellation::defer();
            // SAFETY: made by `Box::into_raw` in `set_kernel_copy`; nobody else sees this offset anymore.
            drop(unsafe { Box::from_raw(copy) });
        }
        let page = *self.page.get_mut();
        if page.is_null() {
            return;
        }
        // SAFETY: made by `Box::into_raw` in `move_to_shared_memory`, and alive as long as one offset refers to it.
        let is_last = unsafe { (*page).references.fetch_sub(1, Ordering::AcqRel) } == 1;
        if is_last {
            // SAFETY: that was this process's last reference; its children have mappings of their own.
            unsafe {
                let page = Box::from_raw(page);
                libc::munmap(page.base.as_ptr().cast(), page.len);
            }
        }
    }
}

/// Moves all offsets into memory that a child will share. Call it before a fork, with an offset of every open description.
pub(crate) fn share<'a>(offsets: impl Iterator<Item = &'a Offset>) {
    let all: Vec<&Offset> = offsets.collect();
    let moving: Vec<&Offset> = all.iter().copied().filter(|offset| offset.shared().is_none()).collect();
    if !moving.is_empty() {
        move_to_shared_memory(moving);
    }
    for offset in all {
        let is_new = offset.kernel_copy().is_some() && !offset.is_copy_shared.load(Ordering::Acquire);
        let Some(shared) = offset.shared().filter(|_| is_new) else { continue };
        let state = offset.filled.load(Ordering::Acquire);
        // If another process of the family has already shared a copy of its own, ours stays private.
        if shared.filled.compare_exchange(EMPTY, state, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            offset.is_copy_shared.store(true, Ordering::Release);
        }
    }
}

fn move_to_shared_memory(moving: Vec<&Offset>) {
    let len = moving.len() * size_of::<Shared>();
    // SAFETY: a new mapping, which replaces nothing.
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
        offset.unclaim(4, 6, 2);
        assert_eq!(offset.load(), 6);
        offset.store(20);
        assert_eq!(offset.claim(1, 10), Some((20, 0)));
    }
}
