//! `vfork` children. Such a child runs in its parent's memory, with a descriptor table of its own, until it becomes another
//! program. What it closes and duplicates there must not change what this library knows about the parent's descriptors.
//!
//! Calls of `vfork` are therefore counted. While one is in progress, a function that would change shared records first asks
//! [`child`] whether it runs in the parent or in a child. While no call is in progress, the question costs one load. A child's own
//! copies of our numbers are noted on the parent's thread, which is the thread that the child runs on.
//!
//! The function `vfork` itself is in `calls/vfork.rs`.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::placeholder;

/// Calls of `vfork` that have not returned in the parent yet. The hook counts up and down.
pub(crate) static UNDER_WAY: AtomicU32 = AtomicU32::new(0);
/// The process whose memory this is.
static HOME: AtomicI32 = AtomicI32::new(0);

/// The most copies of our numbers that one thread notes at a time. A child rarely makes more than three.
const COPIES_MAX: usize = 16;

/// A number at which a `vfork` child has made a copy of another number.
#[derive(Clone, Copy)]
struct ChildCopy {
    /// Process id of the child; 0 where the entry is free.
    child: i32,
    number: RawFd,
    /// The parent's number for the same open file.
    source: RawFd,
}

const NONE: ChildCopy = ChildCopy { child: 0, number: 0, source: 0 };

thread_local! {
    static COPIES: Cell<[ChildCopy; COPIES_MAX]> = const { Cell::new([NONE; COPIES_MAX]) };
}

/// Records that this process owns its memory: at the start, and in a forked child.
pub(crate) fn set_home() {
    // SAFETY: only asks for a number.
    HOME.store(unsafe { libc::getpid() }, Ordering::Release);
    UNDER_WAY.store(0, Ordering::Release);
}

/// Returns the process id of this process if it is a child in its parent's memory.
#[inline]
pub(crate) fn child() -> Option<i32> {
    if UNDER_WAY.load(Ordering::Acquire) == 0 {
        return None;
    }
    // SAFETY: only asks for a number.
    let process = unsafe { libc::getpid() };
    (process != HOME.load(Ordering::Acquire)).then_some(process)
}

/// Returns whether this process is a child that has something else at a number than its parent has.
#[inline]
pub(crate) fn has_replaced(number: RawFd) -> bool {
    child().is_some_and(|child| {
        let is_copy = COPIES.get().iter().any(|copy| copy.child == child && copy.number == number && copy.source != number);
        is_copy || !placeholder::is_at(number)
    })
}

/// Records that a child has made `to` a copy of `from`, whatever `from` names.
pub(crate) fn note_copy(child: i32, from: RawFd, to: RawFd) {
    let mut copies = COPIES.get();
    let source = source_in(&copies, child, from);
    let old = copies.iter().position(|copy| copy.child == child && copy.number == to);
    // If this child has no entry for `to` yet, it takes one that is free, or that an earlier child left behind.
    let entry = old.or_else(|| copies.iter().position(|copy| copy.child != child));
    if let Some(entry) = entry {
        copies[entry] = ChildCopy { child, number: to, source };
        COPIES.set(copies);
    }
}

fn source_in(copies: &[ChildCopy], child: i32, number: RawFd) -> RawFd {
    let copy = copies.iter().find(|copy| copy.child == child && copy.number == number);
    copy.map_or(number, |copy| copy.source)
}

/// Returns the parent's number for the open file that a child has at a number.
pub(crate) fn source_of(child: i32, number: RawFd) -> RawFd {
    source_in(&COPIES.get(), child, number)
}

/// Returns the numbers at which a child has made copies.
pub(crate) fn copies_of(child: i32) -> Vec<RawFd> {
    COPIES.get().iter().filter(|copy| copy.child == child).map(|copy| copy.number).collect()
}

/// Forgets a child's copies, once its kernel table holds kernel files instead of ours.
pub(crate) fn forget_copies() {
    COPIES.set([NONE; COPIES_MAX]);
}
