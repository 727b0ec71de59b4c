//! The offset of an open file description.
//!
//! POSIX gives a forked child the same offset as its parent, so an offset has up to three homes, in this order:
//!
//! 1. `own`, a word in this process's memory.
//! 2. After the first fork: a word in memory that parent and children map ([`share`]).
//! 3. Once the description has a *kernel copy* that is filled (see `exec_handoff`): the kernel's offset of that file. Another
//!    program may have the file open without this library, and then only the kernel knows how far that program has read.
//!
//! An offset moves forward through these homes and never back. After a move, the old word tells the way to the next home, and a
//! thread that reads the word follows. Each move is one atomic change, made when the next home is ready. So there are no locks, and
//! nobody waits for a thread that a fork left behind, for a process that died, or for a thread that a signal handler has
//! interrupted.

use std::os::fd::{AsRawFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use dayfly_client::cancellation;
use dayfly_client::reserved_fd::ReservedFd;

use crate::next;

/// The upper bits of `own` once the offset has moved to shared memory; the lower bits are the address of its [`Shared`]. No offset
/// has any of the upper bits.
const MOVED: u64 = 1 << 63;
/// The bits that tell a moved word from an offset and from [`IN_KERNEL`].
const MOVED_MASK: u64 = 0xffff << 48;
/// The value of the word once the kernel has the offset.
const IN_KERNEL: u64 = u64::MAX - 1;
/// The offset that readers get if the kernel has the offset, but this process does not have the copy or the program has closed it.
/// The value is beyond the end of every file, because a wrong offset would give wrong bytes. No program can seek there.
const LOST: u64 = u64::MAX - 2;

/// State of a kernel copy: no process has filled it. A process that fills it stores its process id.
pub(crate) const EMPTY: u32 = 0;
/// State of a kernel copy: it has the file's bytes.
pub(crate) const FILLED: u32 = 1;

/// The offset of one open file description, and the description's kernel copy.
pub(crate) struct Offset {
    own: AtomicU64,
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
    /// The number of this process's offsets that still use the mapping.
    references: AtomicUsize,
}

impl Offset {
    pub(crate) fn new() -> Self {
        Self {
            own: AtomicU64::new(0),
            page: AtomicPtr::new(null_mut()),
            kernel_copy: AtomicPtr::new(null_mut()),
            filled: AtomicU32::new(EMPTY),
            is_copy_shared: AtomicBool::new(false),
        }
    }

    fn shared(&self) -> Option<&Shared> {
        let own = self.own.load(Ordering::Acquire);
        let shared: *const Shared = std::ptr::with_exposed_provenance((own & !MOVED_MASK) as usize);
        // SAFETY: points into the mapping that `share` gave this offset, which is unmapped only when this is dropped.
        has_moved(own).then(|| unsafe { &*shared })
    }

    /// Returns the word that holds the offset now. The offset moves to another word at most once, before a fork.
    #[inline]
    fn word(&self) -> &AtomicU64 {
        self.shared().map_or(&self.own, |shared| &shared.offset)
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
                self.leave_to_kernel(|_| {});
            }
            self.filled().store(FILLED, Ordering::Release);
        }
    }

    /// Returns the kernel file that keeps the offset, once one does.
    pub(crate) fn kernel(&self) -> Option<&ReservedFd> {
        let copy = self.kernel_copy()?;
        // A thread that hands the offset over marks the word first, when the copy is ready.
        let is_marked = || self.shares_copy() && self.word().load(Ordering::Acquire) == IN_KERNEL;
        (self.filled().load(Ordering::Acquire) == FILLED || is_marked()).then_some(copy)
    }

    /// Returns whether every process that uses the word has the same kernel copy.
    fn shares_copy(&self) -> bool {
        self.shared().is_none() || self.is_copy_shared.load(Ordering::Acquire)
    }

    /// Returns the word and the offset in it; `None` where the kernel has the offset.
    #[inline]
    fn value(&self) -> Option<(&AtomicU64, u64)> {
        loop {
            let word = self.word();
            match word.load(Ordering::Acquire) {
                IN_KERNEL => return self.kernel().is_none().then_some((word, LOST)),
                // Another thread's fork has moved the offset in the meantime.
                value if has_moved(value) => {}
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
        self.leave_to_kernel(|offset| {
            next::lseek(copy, offset as i64, libc::SEEK_SET);
        });
        self.filled().store(FILLED, Ordering::Release);
    }

    /// Marks the word, so that the kernel's offset applies from then on. `prepare` sets the kernel's offset first, while nobody
    /// uses it.
    fn leave_to_kernel(&self, prepare: impl Fn(u64)) {
        while let Some((word, offset)) = self.value() {
            prepare(offset);
            if offset == LOST || word.compare_exchange(offset, IN_KERNEL, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    /// Returns the offset, or the highest possible offset if it is lost.
    pub(crate) fn load(&self) -> u64 {
        if let Some(copy) = self.kernel() {
            let offset = copy.get().map_or(-1, |copy| next::lseek(copy.as_raw_fd(), 0, libc::SEEK_CUR));
            return u64::try_from(offset).unwrap_or(i64::MAX as u64);
        }
        self.value().map_or_else(|| self.load(), |(_, value)| value.min(i64::MAX as u64))
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

    /// Returns the offset at which to read. `None` where the kernel has the offset: read from the kernel copy instead.
    pub(crate) fn position(&self) -> Option<u64> {
        self.kernel().is_none().then(|| self.value())?.map(|(_, offset)| offset)
    }

    /// Takes the bytes that have been read at `start`: moves the offset behind them. Returns `false` if the offset has changed since
    /// then, for example because another reader has taken bytes. So two readers of one description never get the same bytes.
    pub(crate) fn advance(&self, start: u64, len: u64) -> bool {
        while self.kernel().is_none()
            && let Some((word, now)) = self.value()
            && now == start
        {
            if word.compare_exchange_weak(start, start + len, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return true;
            }
        }
        false
    }
}

impl Drop for Offset {
    fn drop(&mut self) {
        let copy = *self.kernel_copy.get_mut();
        if !copy.is_null() {
            let _deferral = cancellation::uninterrupted();
            // SAFETY: made by `Box::into_raw` in `set_kernel_copy`; nobody else sees this offset anymore.
            drop(unsafe { Box::from_raw(copy) });
        }
        let page = *self.page.get_mut();
        if !page.is_null() {
            release(page);
        }
    }
}

/// Moves all offsets into memory that a child will share. Call it before a fork, with the offset of every open description.
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
        // If a related process has already shared a copy of its own, ours stays private.
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
    // This function holds a reference too, so that the mapping stays while offsets are moved.
    let page = Box::into_raw(Box::new(Page { base, len, references: AtomicUsize::new(1) }));
    for (number, offset) in moving.into_iter().enumerate() {
        // SAFETY: alive by this function's reference.
        unsafe { &*page }.references.fetch_add(1, Ordering::Relaxed);
        // A fork in a signal handler may have been here first, and then this offset has a home already.
        if offset.page.compare_exchange(null_mut(), page, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            release(page);
            continue;
        }
        // SAFETY: within the mapping, which has room for all of them, aligned, and zero: a valid `Shared`.
        let shared = unsafe { base.add(number).as_ref() };
        // The child will have the same kernel copy. Both are set before the word moves, so that a reader never misses the copy.
        if offset.kernel_copy().is_some() {
            shared.filled.store(offset.filled.load(Ordering::Acquire), Ordering::Release);
            offset.is_copy_shared.store(true, Ordering::Release);
        }
        let moved = MOVED | std::ptr::from_ref(shared).expose_provenance() as u64;
        let mut value = offset.own.load(Ordering::Acquire);
        loop {
            shared.offset.store(value, Ordering::Release);
            match offset.own.compare_exchange(value, moved, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => value = now,
            }
        }
    }
    release(page);
}

/// Drops one reference to a mapping. When no reference is left, the mapping is unmapped.
fn release(page: *mut Page) {
    // SAFETY: made by `Box::into_raw` in `move_to_shared_memory`, and alive by the caller's reference.
    let is_last = unsafe { (*page).references.fetch_sub(1, Ordering::AcqRel) } == 1;
    if is_last {
        // SAFETY: that was this process's last reference; its children have mappings of their own.
        unsafe {
            let page = Box::from_raw(page);
            libc::munmap(page.base.as_ptr().cast(), page.len);
        }
    }
}

/// Returns whether a word holds the address of an offset's shared memory.
fn has_moved(word: u64) -> bool {
    word & MOVED_MASK == MOVED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_moves_to_shared_memory_and_to_the_kernel_with_its_value() {
        let offset = Offset::new();
        offset.store(7);
        share([&offset].into_iter());
        assert!(offset.shared().is_some());
        assert_eq!((offset.position(), offset.advance(7, 3), offset.load()), (Some(7), true, 10));
        share([&offset].into_iter());
        assert_eq!(offset.load(), 10);
        offset.store(u64::MAX >> 2);
        assert_eq!(offset.load(), u64::MAX >> 2);
        offset.store(i64::MAX as u64);
        assert_eq!(offset.load(), i64::MAX as u64);
        offset.store(20);
        // SAFETY: the name is a string; `owned` checks the result.
        let copy = crate::memory::owned(unsafe { libc::memfd_create(c"test".as_ptr(), 0) }).ok();
        assert!(offset.set_kernel_copy(ReservedFd::new(copy.expect("a memfd"))));
        share([&offset].into_iter());
        assert!(offset.kernel().is_none());
        offset.hand_over(offset.kernel_copy().unwrap().number());
        assert!(offset.kernel().is_some() && offset.position().is_none() && !offset.advance(20, 1));
        assert_eq!(offset.load(), 20);
        offset.store(21);
        assert_eq!(offset.load(), 21);
    }

    #[test]
    fn bytes_are_taken_once() {
        let offset = Offset::new();
        assert!(offset.advance(0, 4) && offset.load() == 4);
        assert!(!offset.advance(0, 4), "another reader has taken them");
        assert!(offset.advance(4, 6) && offset.load() == 10);
        offset.store(2);
        assert!(!offset.advance(10, 1) && offset.load() == 2);
    }
}
