//! Descriptors: duplicating, closing, querying, locking.
//!
//! The kernel does the work on the placeholder; these hooks keep the table in step with the kernel. The order matters, because
//! other threads open and close at the same time: a number is forgotten before the kernel closes it, and named after the kernel has
//! created it.

use std::ffi::{c_char, c_int, c_uint, c_ulong};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use dayfly_client::reserved_fd::{give_way, is_hidden, is_reserved};
use dayfly_client::{cancellation, raw_call};
use libc::{off_t, size_t};

use super::hidden::as_seen;
use super::hook;
use crate::fault::{Fault, answer};
use crate::memory::{self, Errno, FromC, fail};
use crate::table::{self, Reference};
use crate::{exec_handoff, next, placeholder, vfork};

/// Flags that `F_SETFL` can change.
const CHANGEABLE: c_int = libc::O_APPEND | libc::O_DIRECT | libc::O_NOATIME | libc::O_NONBLOCK;
/// FICLONE, `_IOW(0x94, 9, int)`.
const CLONE: c_ulong = 0x4004_9409;
/// FICLONERANGE, `_IOW(0x94, 13, struct file_clone_range)`.
const CLONE_RANGE: c_ulong = 0x4020_940d;
/// FIDEDUPERANGE, `_IOWR(0x94, 54, struct file_dedupe_range)`.
const DEDUPE_RANGE: c_ulong = 0xc018_9436;
/// FIGETBSZ, `_IO(0x00, 2)`.
const GET_BLOCK_SIZE: c_ulong = 2;
/// One more than the highest number at which `close_range` looks for reserved descriptors.
const RESERVED_MAX: c_uint = 4096;

/// All flags of `sync_file_range`.
const SYNC_FLAGS: c_uint = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;

hook! {
    fn close | __close (descriptor: c_int) -> c_int {
        if may_close(descriptor) { close::next(descriptor) } else { fail(libc::EBADF) }
    }

    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        // With CLOSE_RANGE_CLOEXEC, the call closes nothing now.
        if first > last || flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 {
            return close_kernel_range(first, last, flags);
        }
        let clamp = |number: c_uint| number.min(RawFd::MAX as c_uint) as RawFd;
        // There is nothing to close in this range, but a kernel without the system call says so here, before we change anything.
        if close_kernel_range(c_uint::MAX, c_uint::MAX, 0) != 0 {
            return -1;
        }
        if vfork::child().is_none() {
            table::numbers(clamp(first), clamp(last)).for_each(table::forget);
        }
        // Leave out the library's own descriptors.
        let mut start = first;
        for reserved in (first..=last.min(RESERVED_MAX)).filter(|&number| is_reserved(clamp(number))) {
            if start < reserved && close_kernel_range(start, reserved - 1, flags) != 0 {
                return -1;
            }
            start = reserved + 1;
        }
        if start > last { 0 } else { close_kernel_range(start, last, flags) }
    }

    fn closefrom(first: c_int) -> () {
        let first = first.max(0) as c_uint;
        if close_range(first, c_uint::MAX, 0) != 0 {
            let _deferral = cancellation::defer();
            let listed = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
            let numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<c_int>().ok());
            let numbers: Vec<c_int> = numbers.filter(|&number| number >= first as c_int).collect();
            numbers.into_iter().for_each(|number| { close(number); });
        }
    }

    fn dup(descriptor) {
        let copy = dup::next(descriptor);
        record_copy(descriptor, copy)
    }

    fn dup2 | __dup2 (from: c_int, to: c_int) -> c_int {
        if from == to {
            return dup2::next(as_seen(from), to);
        }
        match make_room(from, to) {
            Ok(()) => record_copy(from, dup2::next(from, to)),
            Err(errno) => fail(errno),
        }
    }

    fn dup3(from, to, flags) {
        match make_room(from, to) {
            Ok(()) => record_copy(from, dup3::next(from, to, flags)),
            Err(errno) => fail(errno),
        }
    }

    fn fcntl | fcntl64 | __fcntl (descriptor, command, argument) {
        let Some(open) = table::find(descriptor) else {
            let result = fcntl::next(descriptor, command, argument);
            let is_copy = command == libc::F_DUPFD || command == libc::F_DUPFD_CLOEXEC;
            return if is_copy { record_copy(descriptor, result) } else { result };
        };
        match command {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
                let copy = fcntl::next(descriptor, command, argument);
                record_copy(descriptor, copy)
            }
            libc::F_GETFD | libc::F_SETFD => fcntl::next(descriptor, command, argument),
            libc::F_GETFL => open.flags.load(Ordering::Acquire),
            _ if open.is_place() => fcntl::next(descriptor, command, argument),
            libc::F_SETFL => {
                change_flags(&open, CHANGEABLE, argument.raw() as c_int);
                0
            }
            libc::F_SETLK | libc::F_SETLKW | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => {
                if command == libc::F_SETLKW || command == libc::F_OFD_SETLKW {
                    next::act_on_cancel();
                }
                // SAFETY: these commands take a pointer to a lock.
                answer(|| lock(unsafe { argument.pointer() }.get()))
            }
            libc::F_GETLK | libc::F_OFD_GETLK => answer(|| {
                // SAFETY: these commands take a pointer to a lock.
                let pointer: FromC<*mut libc::flock> = unsafe { argument.pointer() };
                let mut lock = pointer.get().ok_or(libc::EFAULT)?;
                lock.l_type = libc::F_UNLCK as i16;
                Ok(pointer.put(lock).map(|()| 0)?)
            }),
            libc::F_GETPIPE_SZ | libc::F_SETPIPE_SZ => fail(libc::EBADF),
            _ => fail(libc::EINVAL),
        }
    }

    fn ioctl(descriptor: c_int, request: c_ulong, argument: FromC<c_ulong>) -> c_int {
        // Runtimes ask whether every file that they open is a terminal.
        match if request == libc::TCGETS { table::find_early(descriptor) } else { table::find(descriptor) } {
            // One of our files cannot be cloned into a kernel file, because there are no extents to share.
            None if request == CLONE && table::is_ours(argument.raw() as c_int) => fail(libc::EOPNOTSUPP),
            None if request == CLONE_RANGE && clone_source(argument).is_some_and(table::is_ours) => fail(libc::EOPNOTSUPP),
            None if request == CLONE && is_hidden(argument.raw() as c_int) => fail(libc::EBADF),
            None if request == CLONE_RANGE && clone_source(argument).is_some_and(is_hidden) => fail(libc::EBADF),
            None => ioctl::next(descriptor, request, argument),
            Some(open) if open.is_place() => ioctl::next(descriptor, request, argument),
            Some(open) => control(&open, descriptor, request, argument),
        }
    }

    fn isatty(descriptor: c_int) -> c_int {
        if table::find_early(descriptor).is_none_or(|open| open.is_place()) {
            return isatty::next(descriptor);
        }
        memory::set_errno(libc::ENOTTY);
        0
    }

    fn ttyname(descriptor: c_int) -> *mut c_char {
        if table::find_early(descriptor).is_none_or(|open| open.is_place()) {
            return ttyname::next(descriptor);
        }
        fail(libc::ENOTTY)
    }

    fn ttyname_r(descriptor: c_int, name: FromC<*mut c_char>, len: size_t) -> c_int {
        if table::find_early(descriptor).is_none_or(|open| open.is_place()) {
            return ttyname_r::next(descriptor, name, len);
        }
        memory::set_errno(libc::ENOTTY);
        libc::ENOTTY
    }

    fn __ttyname_r_chk(descriptor: c_int, name: FromC<*mut c_char>, len: size_t, room: size_t) -> c_int {
        if table::find_early(descriptor).is_none_or(|open| open.is_place()) {
            return __ttyname_r_chk::next(descriptor, name, len, room);
        }
        ttyname_r(descriptor, name, len)
    }

    fn flock(descriptor: c_int, operation: c_int) -> c_int {
        // There are no writers, so every lock can be granted.
        if table::is_open(descriptor) { 0 } else { flock::next(descriptor, operation) }
    }

    fn lockf | lockf64 (descriptor: c_int, command: c_int, len: libc::off_t) -> c_int {
        match command {
            _ if !table::is_open(descriptor) => lockf::next(descriptor, command, len),
            libc::F_ULOCK | libc::F_TEST => 0,
            // A write lock needs a descriptor that is open for writing.
            _ => fail(libc::EBADF),
        }
    }

    fn fsync(descriptor: c_int) -> c_int {
        next::act_on_cancel();
        if table::is_open(descriptor) { 0 } else { fsync::next(descriptor) }
    }

    fn fdatasync(descriptor: c_int) -> c_int {
        next::act_on_cancel();
        if table::is_open(descriptor) { 0 } else { fdatasync::next(descriptor) }
    }

    fn sync_file_range(descriptor: c_int, offset: off_t, len: off_t, flags: c_uint) -> c_int {
        if !table::is_open(descriptor) {
            return sync_file_range::next(descriptor, offset, len, flags);
        }
        next::act_on_cancel();
        let is_valid = offset >= 0 && len >= 0 && offset.checked_add(len).is_some() && flags & !SYNC_FLAGS == 0;
        if is_valid { 0 } else { fail(libc::EINVAL) }
    }

    fn syncfs(descriptor: c_int) -> c_int {
        if table::is_open(descriptor) { 0 } else { syncfs::next(descriptor) }
    }
}

/// Forgets a descriptor that the program is about to close, because another thread may get the number afterward. Returns `false` if
/// the descriptor is one of the library's own, which stays open. This does not ask the kernel whether the number is still ours:
/// either way, it is right to forget a number that is closed.
pub(super) fn may_close(descriptor: RawFd) -> bool {
    if is_reserved(descriptor) {
        return false;
    }
    if table::is_named(descriptor) && vfork::child().is_none() {
        // The number stays ours if the thread is canceled here.
        next::act_on_cancel();
        table::forget(descriptor);
    }
    true
}

/// Moves a descriptor of the library away if the program wants to have its number.
pub(super) fn make_room(from: RawFd, to: RawFd) -> Result<(), Errno> {
    if is_reserved(from) {
        return Err(libc::EBADF);
    }
    if !is_reserved(to) || vfork::child().is_some() {
        return Ok(());
    }
    // Without an open file to duplicate, the call fails, and the number must go on looking closed to the program.
    if raw_call::flags(from).is_none() {
        return Err(libc::EBADF);
    }
    placeholder::note_given(to);
    give_way(to)
}

fn close_kernel_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // Old C libraries do not have the function, so this is the system call.
    next::syscall(libc::SYS_close_range, first as usize, last as usize, flags as usize, 0, 0, 0) as c_int
}

/// Records that `copy` now names what `from` names, after the kernel has done so. Returns the result for the program.
pub(super) fn record_copy(from: RawFd, copy: RawFd) -> RawFd {
    if copy < 0 {
        return copy;
    }
    if let Some(child) = vfork::child() {
        vfork::note_copy(child, from, copy);
        return copy;
    }
    match table::find(from) {
        None => {
            table::created(copy);
        }
        Some(open) => {
            if !table::name(copy, &open) {
                close::next(copy);
                return fail(libc::EMFILE);
            }
            exec_handoff::serve_standard_input(copy);
        }
    }
    copy
}

/// Changes some of a description's flags, and those of its kernel copy, because the programs that inherited the copy see those.
fn change_flags(open: &Reference, which: c_int, flags: c_int) {
    let change = |before: c_int| Some(before & !which | flags & which);
    let _ = open.flags.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    exec_handoff::copy_flags(open);
}

/// Decides about a lock. There are no writers, so a read lock is always granted. A write lock never is, because the descriptor is
/// open only for reading.
fn lock(requested: Option<libc::flock>) -> Result<c_int, Fault> {
    match c_int::from(requested.ok_or(libc::EFAULT)?.l_type) {
        libc::F_RDLCK | libc::F_UNLCK => Ok(0),
        libc::F_WRLCK => Err(Fault::Errno(libc::EBADF)),
        _ => Err(Fault::Errno(libc::EINVAL)),
    }
}

/// Returns the source descriptor of FICLONERANGE, the first field of its argument.
fn clone_source(argument: FromC<c_ulong>) -> Option<RawFd> {
    // SAFETY: the request takes a pointer to a structure that begins with this number.
    let source: FromC<*mut i64> = unsafe { argument.pointer() };
    RawFd::try_from(source.get()?).ok()
}

fn control(open: &Reference, descriptor: c_int, request: c_ulong, argument: FromC<c_ulong>) -> c_int {
    // SAFETY: the requests below that store a number take a pointer to an `int`.
    let number: FromC<*mut c_int> = unsafe { argument.pointer() };
    answer(|| match request {
        libc::FIONREAD => {
            let file = open.file().map_err(|_| libc::ENOTTY)?;
            // The kernel cuts the number off in the same way.
            let left = (file.stat().size as i64).wrapping_sub(open.offset.load() as i64);
            Ok(number.put(left as c_int).map(|()| 0)?)
        }
        GET_BLOCK_SIZE => Ok(number.put(4096).map(|()| 0)?),
        libc::FIOCLEX | libc::FIONCLEX => {
            let flag = if request == libc::FIOCLEX { libc::FD_CLOEXEC } else { 0 };
            Ok(next::fcntl_number(descriptor, libc::F_SETFD, flag))
        }
        libc::FIONBIO => {
            let flag = if number.get().ok_or(libc::EFAULT)? != 0 { libc::O_NONBLOCK } else { 0 };
            change_flags(open, libc::O_NONBLOCK, flag);
            Ok(0)
        }
        // Files send no signals.
        libc::FIOASYNC if number.get().ok_or(libc::EFAULT)? == 0 => Ok(0),
        CLONE | CLONE_RANGE => Err(Fault::Errno(libc::EBADF)),
        DEDUPE_RANGE => Err(Fault::Errno(libc::EOPNOTSUPP)),
        _ => Err(Fault::Errno(libc::ENOTTY)),
    })
}
