//! Calls in which the kernel gives out descriptors. They have nothing to do with the namespace, and are passed on. But a number
//! that such a call returns may still be in our table, because the program closed it without calling our hooks; here the table
//! learns that the number now has another file.
//!
//! Functions that some C libraries do not have are left out, because a program may look for them by name to see whether they exist.
//! That is safe: nobody calls `read` on the descriptors that those functions return.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};
use std::os::fd::RawFd;

use libc::{cmsghdr, mmsghdr, msghdr, sigset_t, sockaddr, socklen_t, timespec};

use super::hook;
use crate::memory::FromC;
use crate::table;

/// Defines hooks for functions that return a new descriptor.
macro_rules! creates {
    ($(fn $name:ident($($argument:ident: $kind:ty),*);)*) => {
        hook! {$(
            fn $name($($argument: $kind),*) -> c_int {
                table::created($name::next($($argument),*))
            }
        )*}
    };
}

creates! {
    fn socket(domain: c_int, kind: c_int, protocol: c_int);
    fn accept(socket: c_int, address: FromC<*mut sockaddr>, len: FromC<*mut socklen_t>);
    fn accept4(socket: c_int, address: FromC<*mut sockaddr>, len: FromC<*mut socklen_t>, flags: c_int);
    fn epoll_create(size: c_int);
    fn epoll_create1(flags: c_int);
    fn eventfd(start: c_uint, flags: c_int);
    fn fanotify_init(flags: c_uint, file_flags: c_uint);
    fn inotify_init();
    fn inotify_init1(flags: c_int);
    fn memfd_create(name: FromC<*const c_char>, flags: c_uint);
    fn open_by_handle_at(mount: c_int, handle: FromC<*mut c_void>, flags: c_int);
    fn posix_openpt(flags: c_int);
    fn signalfd(descriptor: c_int, signals: FromC<*const sigset_t>, flags: c_int);
    fn timerfd_create(clock: c_int, flags: c_int);
}

/// Two new descriptors.
type Pair<'a> = FromC<'a, *mut [RawFd; 2]>;

hook! {
    fn pipe(pair: Pair) -> c_int {
        with_pair(pair, pipe::next(pair))
    }

    fn pipe2(pair: Pair, flags: c_int) -> c_int {
        with_pair(pair, pipe2::next(pair, flags))
    }

    fn socketpair(domain: c_int, kind: c_int, protocol: c_int, pair: Pair) -> c_int {
        with_pair(pair, socketpair::next(domain, kind, protocol, pair))
    }

    fn recvmsg(socket: c_int, message: FromC<*mut msghdr>, flags: c_int) -> isize {
        let count = recvmsg::next(socket, message, flags);
        if count >= 0 {
            received(message);
        }
        count
    }

    fn recvmmsg(
        socket: c_int,
        messages: FromC<*mut mmsghdr>,
        len: c_uint,
        flags: c_int,
        timeout: FromC<*mut timespec>,
    ) -> c_int {
        let count = recvmmsg::next(socket, messages, len, flags, timeout);
        all_received(messages, count.into());
        count
    }
}

fn with_pair(pair: Pair, result: c_int) -> c_int {
    if result == 0 {
        both_created(pair);
    }
    result
}

/// Learns of two new descriptors.
pub(super) fn both_created(pair: Pair) {
    pair.get().into_iter().flatten().for_each(|number| {
        table::created(number);
    });
}

/// Learns of the descriptors that came with a message.
pub(super) fn received(message: FromC<*mut msghdr>) {
    let Some(header) = message.get().filter(|header| header.msg_controllen >= size_of::<cmsghdr>()) else { return };
    // SAFETY: the kernel has just filled in the control data that the header describes; the macros stay within it.
    unsafe {
        let mut at: *mut cmsghdr = libc::CMSG_FIRSTHDR(&raw const header);
        while !at.is_null() {
            let kind = (*at).cmsg_type;
            if (*at).cmsg_level == libc::SOL_SOCKET && (kind == libc::SCM_RIGHTS || kind == SCM_PIDFD) {
                let first = libc::CMSG_DATA(at).cast::<RawFd>();
                let len = (*at).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                for number in 0..len / size_of::<RawFd>() {
                    table::created(first.wrapping_add(number).read_unaligned());
                }
            }
            at = libc::CMSG_NXTHDR(&raw const header, at);
        }
    }
}

/// The type of a control message with a process's descriptor.
const SCM_PIDFD: c_int = 4;

/// Learns of the descriptors that came with `count` messages.
pub(super) fn all_received(messages: FromC<*mut mmsghdr>, count: c_long) {
    for at in 0..usize::try_from(count).unwrap_or(0) {
        let message = messages.raw().wrapping_add(at).cast::<msghdr>();
        // SAFETY: the kernel has filled in `count` messages, each of which begins with its header.
        received(unsafe { FromC::new(message) });
    }
}
