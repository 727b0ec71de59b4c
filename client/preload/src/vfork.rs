//! A `vfork` child runs in its parent's memory, with a descriptor table of its own, until it becomes another program. What it
//! closes and duplicates there must not change what this library knows of its parent. So `vfork` is counted, and while a
//! child may be under way those who change things ask who they are.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use crate::table::{self, Reference};
use crate::{carry, process};

/// Calls of `vfork` that have not come back to the parent.
static UNDER_WAY: AtomicU32 = AtomicU32::new(0);
/// The process whose memory this is.
static HOME: AtomicI32 = AtomicI32::new(0);

/// Numbers that a `vfork` child has given to something of ours.
const COPIES_MAX: usize = 16;

thread_local! {
    /// Child, its number, and the parent's number for the same. The child runs on its parent's thread.
    static COPIES: Cell<[(i32, RawFd, RawFd); COPIES_MAX]> = const { Cell::new([(0, 0, 0); COPIES_MAX]) };
}

/// Notes whose memory this is: at the start, and in a forked child.
pub(crate) fn set_home() {
    // SAFETY: asks only.
    HOME.store(unsafe { libc::getpid() }, Ordering::Release);
    UNDER_WAY.store(0, Ordering::Release);
}

/// Whether this is a child in its parent's memory; if so, which process.
#[inline]
pub(crate) fn child() -> Option<i32> {
    if UNDER_WAY.load(Ordering::Acquire) == 0 {
        return None;
    }
    // SAFETY: asks only.
    let process = unsafe { libc::getpid() };
    (process != HOME.load(Ordering::Acquire)).then_some(process)
}

/// Whether this is a child that has something else than its parent behind a number.
#[inline]
pub(crate) fn has_replaced(number: RawFd) -> bool {
    child().is_some_and(|child| {
        let is_copy = COPIES.get().iter().any(|&(process, copy, source)| process == child && copy == number && source != number);
        is_copy || !process::is_placeholder(number)
    })
}

/// Notes that a child has made `to` a copy of `from`, whatever that is.
pub(crate) fn note_copy(child: i32, from: RawFd, to: RawFd) {
    let mut copies = COPIES.get();
    let source = origin_in(&copies, child, from);
    let old = copies.iter().position(|&(process, number, _)| process == child && number == to);
    // A free place, or one that an earlier child has left.
    let place = old.or_else(|| copies.iter().position(|&(process, ..)| process != child));
    if let Some(place) = place {
        copies[place] = (child, to, source);
        COPIES.set(copies);
    }
}

fn origin_in(copies: &[(i32, RawFd, RawFd)], child: i32, number: RawFd) -> RawFd {
    let copy = copies.iter().find(|&&(process, copy, _)| process == child && copy == number);
    copy.map_or(number, |&(_, _, source)| source)
}

/// What a number of a child names, if the kernel's table there says that it is one of ours.
pub(crate) fn find(child: i32, number: RawFd) -> Option<Reference> {
    table::find_at_home(origin_in(&COPIES.get(), child, number))
}

/// All numbers that may be ours in a child.
pub(crate) fn numbers(child: i32) -> Vec<RawFd> {
    let mut numbers: Vec<RawFd> = table::numbers(0, RawFd::MAX).collect();
    numbers.extend(COPIES.get().iter().filter(|copy| copy.0 == child).map(|copy| copy.1));
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// Forgets what a child has noted, once the kernel's table says it.
pub(crate) fn forget_copies() {
    COPIES.set([(0, 0, 0); COPIES_MAX]);
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!("vfork is still to be written for this processor");

/// `vfork` of the C library, with a count around it. By hand, for the child returns from it on its parent's stack, and what
/// it does there must not meet a frame of ours.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn vfork() -> libc::pid_t {
    core::arch::naked_asm!(
        "push rax",
        "call {before}",
        "pop rax",
        // The child will overwrite the return address: keep it in a register, which the kernel does not touch.
        "pop rdi",
        "lock inc dword ptr [rip + {count}]",
        "mov eax, 58",
        "syscall",
        "push rdi",
        "test eax, eax",
        "jz 2f",
        "lock dec dword ptr [rip + {count}]",
        "mov edi, eax",
        "jmp {after}",
        "2:",
        "ret",
        count = sym UNDER_WAY,
        before = sym before,
        after = sym after,
    )
}

#[cfg(target_arch = "x86_64")]
extern "C" fn before() {
    if process::known_view().is_some() {
        carry::open_mail();
    }
}

/// In the parent, with what the kernel says.
#[cfg(target_arch = "x86_64")]
extern "C" fn after(result: i32) -> libc::pid_t {
    if result < 0 {
        return crate::memory::fail(-result);
    }
    if process::known_view().is_some() {
        let before = crate::memory::errno();
        carry::take_mail();
        crate::memory::set_errno(before);
    }
    result
}
