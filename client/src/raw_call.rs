//! Makes system calls about descriptors and signals without the C library's functions. The preload library replaces those functions
//! with its own, to which reserved descriptors look closed. No call here changes `errno`.

use std::mem::MaybeUninit;
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};

use nix::libc;

/// `F_DUPFD_QUERY`.
const DUPLICATE_QUERY: usize = 1027;

/// `RLIMIT_NOFILE`, as an argument of a system call.
const DESCRIPTORS: usize = libc::RLIMIT_NOFILE as usize;

/// Makes a system call with four arguments. Returns the kernel's result, which is negative for an error.
///
/// # Safety
///
/// The arguments are what the call expects: pointers are valid for what the kernel does with them.
unsafe fn call(number: libc::c_long, first: usize, second: usize, third: usize, fourth: usize) -> isize {
    let result: isize;
    // SAFETY: the kernel preserves all registers but the ones named here.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::asm!(
            "syscall", inlateout("rax") number as isize => result, in("rdi") first, in("rsi") second, in("rdx") third,
            in("r10") fourth, lateout("rcx") _, lateout("r11") _, options(nostack)
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!(
            "svc 0", in("x8") number, inlateout("x0") first as isize => result, in("x1") second, in("x2") third,
            in("x3") fourth, options(nostack)
        );
    }
    result
}

/// Returns the device and the inode of the file that is open at a number; `None` if nothing is open there.
pub fn identity(number: RawFd) -> Option<(u64, u64)> {
    attributes(number).map(|stat| (stat.st_dev, stat.st_ino))
}

/// Returns the mode of the file that is open at a number, including the file's type; `None` if nothing is open there.
pub fn mode(number: RawFd) -> Option<u32> {
    attributes(number).map(|stat| stat.st_mode)
}

fn attributes(number: RawFd) -> Option<libc::stat> {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the kernel fills in the structure.
    let result = unsafe { call(libc::SYS_fstat, number as usize, stat.as_mut_ptr().addr(), 0, 0) };
    // SAFETY: the call succeeded, so the structure is filled in.
    (result == 0).then(|| unsafe { stat.assume_init() })
}

/// Returns the flags with which a descriptor's file is open (`F_GETFL`); `None` if nothing is open there.
pub fn flags(number: RawFd) -> Option<i32> {
    // SAFETY: the command takes no argument.
    let result = unsafe { call(libc::SYS_fcntl, number as usize, libc::F_GETFL as usize, 0, 0) };
    (result >= 0).then_some(result as i32)
}

/// Returns whether two numbers name the same open file description; `None` if the kernel cannot tell (before Linux 6.10).
pub fn are_same(left: RawFd, right: RawFd) -> Option<bool> {
    // SAFETY: the command takes two numbers.
    let result = unsafe { call(libc::SYS_fcntl, left as usize, DUPLICATE_QUERY, right as usize, 0) };
    (result >= 0).then_some(result == 1)
}

/// Duplicates a descriptor to the lowest free number that is not below `floor`. The copy is close-on-exec.
///
/// # Errors
///
/// The kernel's error number: EINVAL if `floor` is not below the limit, EMFILE if no number is free.
pub(crate) fn duplicate_above(number: RawFd, floor: RawFd) -> Result<RawFd, i32> {
    // SAFETY: the command takes two numbers.
    let result = unsafe { call(libc::SYS_fcntl, number as usize, libc::F_DUPFD_CLOEXEC as usize, floor as usize, 0) };
    if result >= 0 { Ok(result as RawFd) } else { Err(-result as i32) }
}

/// Closes a descriptor that the caller owns.
pub fn close(owned: OwnedFd) {
    // SAFETY: the number is open, and nobody uses it anymore.
    unsafe { call(libc::SYS_close, owned.into_raw_fd() as usize, 0, 0, 0) };
}

/// Returns the limit on descriptors, soft and hard. It holds for the whole process.
pub(crate) fn descriptors_limit() -> Option<(u64, u64)> {
    let mut limit = MaybeUninit::<libc::rlimit64>::uninit();
    // SAFETY: the kernel fills in the structure.
    let result = unsafe { call(libc::SYS_prlimit64, 0, DESCRIPTORS, 0, limit.as_mut_ptr().addr()) };
    // SAFETY: the call succeeded, so the structure is filled in.
    (result == 0).then(|| unsafe { limit.assume_init() }).map(|limit| (limit.rlim_cur, limit.rlim_max))
}

/// Sets the limit on descriptors, and returns what it was before; `None` if the kernel refuses.
pub(crate) fn replace_descriptors_limit(soft: u64, hard: u64) -> Option<(u64, u64)> {
    let new = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
    let mut limit = MaybeUninit::<libc::rlimit64>::uninit();
    // SAFETY: the kernel reads one structure, and fills in the other.
    let result = unsafe { call(libc::SYS_prlimit64, 0, DESCRIPTORS, (&raw const new).addr(), limit.as_mut_ptr().addr()) };
    // SAFETY: the call succeeded, so the structure is filled in.
    (result == 0).then(|| unsafe { limit.assume_init() }).map(|limit| (limit.rlim_cur, limit.rlim_max))
}

/// Returns the signals that wait because this thread blocks them, one bit each.
pub(crate) fn pending_signals() -> u64 {
    let mut pending = 0_u64;
    // SAFETY: one live word of the size that the call is told.
    let result = unsafe { call(libc::SYS_rt_sigpending, (&raw mut pending).addr(), size_of::<u64>(), 0, 0) };
    if result == 0 { pending } else { 0 }
}

/// Changes this thread's mask of signals. Returns the mask before.
pub(crate) fn change_mask(how: i32, set: u64) -> Option<u64> {
    let mut before = 0_u64;
    let (new, old) = ((&raw const set).addr(), (&raw mut before).addr());
    // SAFETY: two live words of the size that the call is told.
    let result = unsafe { call(libc::SYS_rt_sigprocmask, how as usize, new, old, size_of::<u64>()) };
    (result == 0).then_some(before)
}
