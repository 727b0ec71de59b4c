//! The library's reserved descriptors look closed to the program.
//!
//! Each hook passes its descriptors on through [`as_seen`], which replaces a reserved number by one at which nothing is ever open.
//! So the kernel itself finds what is wrong with the call, in its usual order. [`hook!`] does this for all arguments that have one
//! of the names that [`seen!`] lists. The functions below have hooks for this reason only.
//!
//! This library's own calls about a reserved descriptor pass through these hooks too. They keep the number, because the thread is
//! noted as a user of the descriptor (see [`dayfly_client::reserved_fd`]). Calls of [`crate::next`] hide nothing at all.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::RawFd;

use dayfly_client::reserved_fd::is_hidden;
use libc::{epoll_event, itimerspec, off_t, sigset_t, size_t, sockaddr, socklen_t};

use super::hook;
use super::read::Parts;
use crate::memory::FromC;

/// A number that is higher than any that the kernel gives out.
pub(super) const NEVER_OPEN: RawFd = RawFd::MAX;

/// Returns the number that the next library gets in place of a number that the program passes.
#[inline]
pub(super) fn as_seen(number: RawFd) -> RawFd {
    if is_hidden(number) { NEVER_OPEN } else { number }
}

/// Decides by an argument's name whether it is a descriptor, and returns what the next library gets for it.
macro_rules! seen {
    (descriptor $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    (directory $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    (from_directory $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    (to_directory $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    (socket $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    (epoll $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    (mount $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    (source $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    (sink $value:ident) => {
        $crate::calls::hidden::as_seen($value)
    };
    ($other:ident $value:ident) => {
        $value
    };
}
pub(super) use seen;

/// Defines hooks that pass everything on.
macro_rules! hidden {
    ($(fn $name:ident $(| $alias:ident)* ($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        hook! {$(
            fn $name $(| $alias)* ($($argument: $kind),*) -> $result {
                $name::next($($argument),*)
            }
        )*}
    };
}

type Bytes<'a> = FromC<'a, *const c_void>;
type Room<'a> = FromC<'a, *mut c_void>;
type Address<'a> = FromC<'a, *const sockaddr>;
type AddressRoom<'a> = FromC<'a, *mut sockaddr>;
type Len<'a> = FromC<'a, *mut socklen_t>;
type Events<'a> = FromC<'a, *mut epoll_event>;

hidden! {
    fn writev(descriptor: c_int, vector: Parts, count: c_int) -> isize;
    fn pwrite | pwrite64 | __pwrite64 (descriptor: c_int, buffer: Bytes, len: size_t, offset: off_t) -> isize;
    fn pwritev | pwritev64 (descriptor: c_int, vector: Parts, count: c_int, offset: off_t) -> isize;
    fn pwritev2 | pwritev64v2 (descriptor: c_int, vector: Parts, count: c_int, offset: off_t, flags: c_int) -> isize;
    fn fallocate | fallocate64 (descriptor: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int;
    fn posix_fallocate | posix_fallocate64 (descriptor: c_int, offset: off_t, len: off_t) -> c_int;
    fn vmsplice(descriptor: c_int, vector: Parts, count: size_t, flags: c_uint) -> isize;
    fn fpathconf(descriptor: c_int, name: c_int) -> i64;
    fn isfdtype(descriptor: c_int, kind: c_int) -> c_int;
    fn eventfd_read(descriptor: c_int, value: FromC<*mut u64>) -> c_int;
    fn eventfd_write(descriptor: c_int, value: u64) -> c_int;
    fn tcgetattr(descriptor: c_int, out: Room) -> c_int;
    fn tcsetattr(descriptor: c_int, when: c_int, value: Bytes) -> c_int;
    fn timerfd_gettime(descriptor: c_int, out: FromC<*mut itimerspec>) -> c_int;
    fn timerfd_settime(
        descriptor: c_int, flags: c_int, new: FromC<*const itimerspec>, old: FromC<*mut itimerspec>
    ) -> c_int;
    fn inotify_add_watch(descriptor: c_int, path: FromC<*const c_char>, mask: u32) -> c_int;
    fn inotify_rm_watch(descriptor: c_int, watch: c_int) -> c_int;
    fn epoll_wait(epoll: c_int, events: Events, count: c_int, timeout_ms: c_int) -> c_int;
    fn epoll_pwait(epoll: c_int, events: Events, count: c_int, timeout_ms: c_int, mask: FromC<*const sigset_t>) -> c_int;

    fn send | __send (socket: c_int, bytes: Bytes, len: size_t, flags: c_int) -> isize;
    fn sendto(socket: c_int, bytes: Bytes, len: size_t, flags: c_int, to: Address, to_len: socklen_t) -> isize;
    fn recv(socket: c_int, out: Room, len: size_t, flags: c_int) -> isize;
    fn recvfrom(socket: c_int, out: Room, len: size_t, flags: c_int, from: AddressRoom, from_len: Len) -> isize;
    fn __recv_chk(socket: c_int, out: Room, len: size_t, room: size_t, flags: c_int) -> isize;
    fn __recvfrom_chk(
        socket: c_int, out: Room, len: size_t, room: size_t, flags: c_int, from: AddressRoom, from_len: Len
    ) -> isize;
    fn shutdown(socket: c_int, how: c_int) -> c_int;
    fn bind(socket: c_int, address: Address, len: socklen_t) -> c_int;
    fn connect | __connect (socket: c_int, address: Address, len: socklen_t) -> c_int;
    fn listen(socket: c_int, waiting_max: c_int) -> c_int;
    fn getsockopt(socket: c_int, level: c_int, name: c_int, value: Room, len: Len) -> c_int;
    fn setsockopt(socket: c_int, level: c_int, name: c_int, value: Bytes, len: socklen_t) -> c_int;
    fn getsockname(socket: c_int, address: AddressRoom, len: Len) -> c_int;
    fn getpeername(socket: c_int, address: AddressRoom, len: Len) -> c_int;
    fn sockatmark(socket: c_int) -> c_int;
}

hook! {
    fn write | __write (descriptor, buffer, len) {
        write::next(descriptor, buffer, len)
    }

    // A `va_list` is an array or a structure, so C passes its address.

    fn vdprintf(descriptor: c_int, format: FromC<*const c_char>, list: Room) -> c_int {
        vdprintf::next(descriptor, format, list)
    }

    fn __vdprintf_chk(descriptor: c_int, flag: c_int, format: FromC<*const c_char>, list: Room) -> c_int {
        __vdprintf_chk::next(descriptor, flag, format, list)
    }
}
