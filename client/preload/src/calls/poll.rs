//! Waiting for descriptors. A file is always ready. The kernel, which has a placeholder at our numbers, is asked only about the
//! other descriptors, and does not wait if one of ours is ready.

use std::ffi::c_int;
use std::os::fd::RawFd;

use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use super::hook;
use crate::memory::{FromC, fail};
use crate::table;

const READY: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDNORM | libc::POLLWRNORM;
static NOW: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

/// A set for `select`: as many words of 64 bits as the call's count of numbers needs, perhaps fewer than a whole `fd_set`.
type Set<'a> = FromC<'a, *mut u64>;

const _: () = assert!(size_of::<fd_set>().is_multiple_of(size_of::<u64>()));

hook! {
    fn poll | __poll (descriptors: FromC<*mut pollfd>, count: nfds_t, timeout_ms: c_int) -> c_int {
        poll_with(descriptors, count, |is_ready| poll::next(descriptors, count, if is_ready { 0 } else { timeout_ms }))
    }

    fn __poll_chk(descriptors: FromC<*mut pollfd>, count: nfds_t, timeout_ms: c_int, _room: size_t) -> c_int {
        poll(descriptors, count, timeout_ms)
    }

    fn ppoll(
        descriptors: FromC<*mut pollfd>,
        count: nfds_t,
        timeout: FromC<*const timespec>,
        mask: FromC<*const sigset_t>,
    ) -> c_int {
        poll_with(descriptors, count, |is_ready| {
            ppoll::next(descriptors, count, if is_ready { (&NOW).into() } else { timeout }, mask)
        })
    }

    fn __ppoll_chk(
        descriptors: FromC<*mut pollfd>,
        count: nfds_t,
        timeout: FromC<*const timespec>,
        mask: FromC<*const sigset_t>,
        _room: size_t,
    ) -> c_int {
        ppoll(descriptors, count, timeout, mask)
    }

    fn select | __select (count: c_int, read: Set, write: Set, except: Set, timeout: FromC<*mut timeval>) -> c_int {
        select_with(count, [read, write, except], |is_ready| {
            let mut now = timeval { tv_sec: 0, tv_usec: 0 };
            select::next(count, read, write, except, if is_ready { (&mut now).into() } else { timeout })
        })
    }

    fn pselect(
        count: c_int,
        read: Set,
        write: Set,
        except: Set,
        timeout: FromC<*const timespec>,
        mask: FromC<*const sigset_t>,
    ) -> c_int {
        select_with(count, [read, write, except], |is_ready| {
            pselect::next(count, read, write, except, if is_ready { (&NOW).into() } else { timeout }, mask)
        })
    }

    fn epoll_ctl(epoll: c_int, operation: c_int, descriptor: c_int, event: FromC<*mut libc::epoll_event>) -> c_int {
        // Linux refuses regular files and directories in the same way.
        if table::is_open(descriptor) { fail(libc::EPERM) } else { epoll_ctl::next(epoll, operation, descriptor, event) }
    }
}

/// Polls. `kernel` polls the other descriptors; its argument says whether one of ours is ready, so that it must not wait.
fn poll_with(descriptors: FromC<*mut pollfd>, count: nfds_t, kernel: impl FnOnce(bool) -> c_int) -> c_int {
    let all = descriptors.slice_mut(count as usize);
    if !all.iter().any(|entry| table::is_open(entry.fd)) {
        return kernel(false);
    }
    let ours: Vec<(usize, RawFd)> =
        all.iter().enumerate().filter(|(_, entry)| table::is_open(entry.fd)).map(|(at, entry)| (at, entry.fd)).collect();
    let is_ready = ours.iter().any(|&(at, _)| all[at].events & READY != 0);
    // The kernel skips negative numbers.
    ours.iter().for_each(|&(at, _)| all[at].fd = -1);
    let found = kernel(is_ready);
    let all = descriptors.slice_mut(count as usize);
    let mut ready = 0;
    for (at, number) in ours {
        all[at].fd = number;
        all[at].revents = all[at].events & READY;
        ready += c_int::from(all[at].revents != 0);
    }
    if found < 0 { found } else { found + ready }
}

/// Returns the words of a set that a call with `count` numbers uses.
fn words(set: Set<'_>, count: c_int) -> &mut [u64] {
    set.slice_mut((count.max(0) as usize).div_ceil(64))
}

/// Selects. `kernel` selects among the other descriptors; its argument says whether one of ours is ready.
fn select_with(count: c_int, sets: [Set; 3], kernel: impl FnOnce(bool) -> c_int) -> c_int {
    if count <= 0 || table::numbers(0, count - 1).next().is_none() {
        return kernel(false);
    }
    // Takes our numbers out of a set.
    let take = |set: Set| -> Vec<RawFd> {
        let members = words(set, count);
        let is_member = |number: RawFd| members.get(number as usize / 64).is_some_and(|word| word >> (number % 64) & 1 == 1);
        let ours: Vec<RawFd> =
            table::numbers(0, count - 1).filter(|&number| is_member(number) && table::is_open(number)).collect();
        ours.iter().for_each(|&number| members[number as usize / 64] &= !(1 << (number % 64)));
        ours
    };
    let ours = sets.map(take);
    let ready = ours[0].len() + ours[1].len();
    let found = kernel(ready > 0);
    // A file never has an exceptional condition, so the third set gets its members back only where the call fails, which leaves
    // all sets as they were.
    let restored = if found < 0 { 3 } else { 2 };
    for (&set, ours) in sets.iter().zip(&ours).take(restored) {
        let members = words(set, count);
        ours.iter().for_each(|&number| members[number as usize / 64] |= 1 << (number % 64));
    }
    if found < 0 { found } else { found + ready as c_int }
}
