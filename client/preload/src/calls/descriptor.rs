//! Descriptors: duplicating, closing, asking.

use std::ffi::{c_int, c_uint, c_ulong};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use dayfly_client::reserved_fd::is_reserved;

use super::hook;
use crate::memory::{self, fail, get, put};
use crate::process::{Fault, answer};
use crate::table::{self, Reference};
use crate::{carry, next, vfork};

/// Flags that `F_SETFL` can change.
const CHANGEABLE: c_int = libc::O_APPEND | libc::O_ASYNC | libc::O_DIRECT | libc::O_NOATIME | libc::O_NONBLOCK;
/// `_IOW(0x94, 9, int)`, `_IOW(0x94, 13, struct file_clone_range)`.
const CLONE: c_ulong = 0x4004_9409;
const CLONE_RANGE: c_ulong = 0x4020_940d;
const DEDUPE_RANGE: c_ulong = 0xc018_9436;
const GET_BLOCK_SIZE: c_ulong = 2;

hook! {
    fn close | __close (descriptor: c_int) -> c_int {
        if is_reserved(descriptor) {
            return fail(libc::EBADF);
        }
        if table::is_ours(descriptor) && vfork::child().is_none() {
            // First here: once the kernel has closed it, another thread may get the number.
            table::forget(descriptor);
        }
        next::close(descriptor)
    }

    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        // CLOSE_RANGE_CLOEXEC closes nothing now.
        if first > last || flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 {
            return close_kernel_range(first, last, flags);
        }
        let clamp = |number: c_uint| number.min(RawFd::MAX as c_uint) as RawFd;
        // Nothing is there, and so nothing is closed; an old kernel says that it cannot.
        if close_kernel_range(c_uint::MAX, c_uint::MAX, 0) != 0 {
            return -1;
        }
        if vfork::child().is_none() {
            table::numbers(clamp(first), clamp(last)).for_each(table::forget);
        }
        // Around those that the library keeps.
        let mut start = first;
        for kept in (first..=last.min(KEPT_MAX)).filter(|&number| is_reserved(clamp(number))) {
            if start < kept && close_kernel_range(start, kept - 1, flags) != 0 {
                return -1;
            }
            start = kept + 1;
        }
        if start > last { 0 } else { close_kernel_range(start, last, flags) }
    }

    fn closefrom(first: c_int) -> () {
        let first = first.max(0) as c_uint;
        if close_range(first, c_uint::MAX, 0) != 0 {
            let listed = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
            let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<c_int>().ok());
            let numbers: Vec<c_int> = numbers.filter(|&number| number >= first as c_int).collect();
            numbers.into_iter().for_each(|number| { close(number); });
        }
    }

    fn dup(descriptor: c_int) -> c_int {
        let copy = next::dup(descriptor);
        noted(descriptor, copy)
    }

    fn dup2 | __dup2 (from: c_int, to: c_int) -> c_int {
        if from == to {
            return next::dup2(from, to);
        }
        if is_reserved(to) || is_reserved(from) {
            return fail(libc::EBADF);
        }
        let copy = next::dup2(from, to);
        noted(from, copy)
    }

    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
        if is_reserved(to) || is_reserved(from) {
            return fail(libc::EBADF);
        }
        let copy = next::dup3(from, to, flags);
        noted(from, copy)
    }

    fn fcntl | fcntl64 | __fcntl (descriptor: c_int, command: c_int, argument: c_ulong) -> c_int {
        let Some(open) = table::find(descriptor) else {
            let result = next::fcntl(descriptor, command, argument);
            let is_copy = command == libc::F_DUPFD || command == libc::F_DUPFD_CLOEXEC;
            return if is_copy { noted(descriptor, result) } else { result };
        };
        match command {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
                let copy = next::fcntl(descriptor, command, argument);
                noted(descriptor, copy)
            }
            libc::F_GETFD | libc::F_SETFD => next::fcntl(descriptor, command, argument),
            libc::F_GETFL => open.flags.load(Ordering::Acquire),
            libc::F_SETFL => {
                let kept = open.flags.load(Ordering::Acquire) & !CHANGEABLE;
                open.flags.store(kept | argument as c_int & CHANGEABLE, Ordering::Release);
                0
            }
            libc::F_SETLK | libc::F_SETLKW | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => {
                answer(|| lock(get(argument as *const libc::flock)))
            }
            libc::F_GETLK | libc::F_OFD_GETLK => answer(|| {
                let pointer = argument as *mut libc::flock;
                let mut lock = get(pointer.cast_const()).ok_or(libc::EFAULT)?;
                lock.l_type = libc::F_UNLCK as i16;
                Ok(put(pointer, lock).map(|()| 0)?)
            }),
            _ => fail(libc::EINVAL),
        }
    }

    fn ioctl(descriptor: c_int, request: c_ulong, argument: c_ulong) -> c_int {
        match table::find(descriptor) {
            // Into a file of the kernel's, out of ours: there are no extents to share.
            None if request == CLONE && table::is_ours(argument as c_int) => fail(libc::EOPNOTSUPP),
            None if request == CLONE_RANGE && clone_source(argument).is_some_and(table::is_ours) => fail(libc::EOPNOTSUPP),
            None => next::ioctl(descriptor, request, argument),
            Some(open) => control(&open, descriptor, request, argument),
        }
    }

    fn isatty(descriptor: c_int) -> c_int {
        if !table::is_ours(descriptor) {
            return next::isatty(descriptor);
        }
        memory::set_errno(libc::ENOTTY);
        0
    }

    fn flock(descriptor: c_int, operation: c_int) -> c_int {
        // Nobody writes: all may have it.
        if table::is_ours(descriptor) { 0 } else { next::flock(descriptor, operation) }
    }

    fn lockf | lockf64 (descriptor: c_int, command: c_int, len: i64) -> c_int {
        match command {
            _ if !table::is_ours(descriptor) => next::lockf(descriptor, command, len),
            libc::F_ULOCK | libc::F_TEST => 0,
            // It would be a lock to write.
            _ => fail(libc::EBADF),
        }
    }

    fn fsync(descriptor: c_int) -> c_int {
        if table::is_ours(descriptor) { 0 } else { next::fsync(descriptor) }
    }

    fn fdatasync(descriptor: c_int) -> c_int {
        if table::is_ours(descriptor) { 0 } else { next::fdatasync(descriptor) }
    }

    fn syncfs(descriptor: c_int) -> c_int {
        if table::is_ours(descriptor) { 0 } else { next::syncfs(descriptor) }
    }
}

/// Above this no number is watched over.
const KEPT_MAX: c_uint = 4096;

fn close_kernel_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // Not by the C library, whose older versions do not know it.
    // SAFETY: what these numbers name is not ours to keep.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) as c_int }
}

/// What `copy` names is now what `from` names, as the kernel has made it.
fn noted(from: RawFd, copy: RawFd) -> RawFd {
    if copy < 0 || !table::is_ours(from) && !table::is_ours(copy) && vfork::child().is_none() {
        return copy;
    }
    if let Some(child) = vfork::child() {
        vfork::note_copy(child, from, copy);
        return copy;
    }
    match table::find(from) {
        None => table::forget(copy),
        Some(open) => {
            if !table::name(copy, &open) {
                next::close(copy);
                return fail(libc::EMFILE);
            }
            carry::serve_standard_input(copy);
        }
    }
    copy
}

/// Nobody writes, so all may lock to read, and nobody to write by a descriptor that only reads.
fn lock(wanted: Option<libc::flock>) -> Result<c_int, Fault> {
    match c_int::from(wanted.ok_or(libc::EFAULT)?.l_type) {
        libc::F_RDLCK | libc::F_UNLCK => Ok(0),
        libc::F_WRLCK => Err(Fault::Errno(libc::EBADF)),
        _ => Err(Fault::Errno(libc::EINVAL)),
    }
}

/// The descriptor that FICLONERANGE takes from.
fn clone_source(argument: c_ulong) -> Option<RawFd> {
    get(argument as *const i64).and_then(|number| RawFd::try_from(number).ok())
}

fn control(open: &Reference, descriptor: c_int, request: c_ulong, argument: c_ulong) -> c_int {
    answer(|| match request {
        libc::FIONREAD => {
            let left = open.stat().size.saturating_sub(open.offset.load());
            Ok(put(argument as *mut c_int, left.min(c_int::MAX as u64) as c_int).map(|()| 0)?)
        }
        GET_BLOCK_SIZE => Ok(put(argument as *mut c_int, 4096).map(|()| 0)?),
        libc::FIOCLEX | libc::FIONCLEX => {
            let flag = if request == libc::FIOCLEX { libc::FD_CLOEXEC as c_ulong } else { 0 };
            Ok(next::fcntl(descriptor, libc::F_SETFD, flag))
        }
        libc::FIONBIO => Ok(0),
        CLONE | CLONE_RANGE => Err(Fault::Errno(libc::EBADF)),
        DEDUPE_RANGE => Err(Fault::Errno(libc::EOPNOTSUPP)),
        _ => Err(Fault::Errno(libc::ENOTTY)),
    })
}
