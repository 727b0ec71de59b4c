//! Waiting. A file is always ready; the kernel, which knows ours by a placeholder, is asked about the others only.

use std::ffi::c_int;
use std::os::fd::RawFd;

use libc::{fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};

use super::hook;
use crate::memory::{array_mut, fail};
use crate::{next, table};

const READY: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDNORM | libc::POLLWRNORM;
static NOW: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

hook! {
    fn poll | __poll (descriptors: *mut pollfd, count: nfds_t, timeout_ms: c_int) -> c_int {
        poll_with(descriptors, count, |is_ready| next::poll(descriptors, count, if is_ready { 0 } else { timeout_ms }))
    }

    fn __poll_chk(descriptors: *mut pollfd, count: nfds_t, timeout_ms: c_int, _room: libc::size_t) -> c_int {
        poll(descriptors, count, timeout_ms)
    }

    fn ppoll(descriptors: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int {
        poll_with(descriptors, count, |is_ready| next::ppoll(descriptors, count, if is_ready { &raw const NOW } else { timeout }, mask))
    }

    fn __ppoll_chk(descriptors: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t, _room: libc::size_t) -> c_int {
        ppoll(descriptors, count, timeout, mask)
    }

    fn select | __select (count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int {
        select_with(count, [read, write, except], |is_ready| {
            let mut now = timeval { tv_sec: 0, tv_usec: 0 };
            next::select(count, read, write, except, if is_ready { &raw mut now } else { timeout })
        })
    }

    fn pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int {
        select_with(count, [read, write, except], |is_ready| {
            next::pselect(count, read, write, except, if is_ready { &raw const NOW } else { timeout }, mask)
        })
    }

    fn epoll_ctl(epoll: c_int, operation: c_int, descriptor: c_int, event: *mut libc::epoll_event) -> c_int {
        // As Linux answers for every regular file and directory.
        if table::is_ours(descriptor) { fail(libc::EPERM) } else { next::epoll_ctl(epoll, operation, descriptor, event) }
    }
}

/// Polls with our descriptors taken out, without waiting if one of them is ready.
fn poll_with(descriptors: *mut pollfd, count: nfds_t, kernel: impl FnOnce(bool) -> c_int) -> c_int {
    let all = array_mut(descriptors, count as usize);
    if !all.iter().any(|one| table::is_ours(one.fd)) {
        return kernel(false);
    }
    // The kernel passes over negative numbers.
    let ours: Vec<(usize, RawFd)> =
        all.iter().enumerate().filter(|(_, one)| table::is_ours(one.fd)).map(|(at, one)| (at, one.fd)).collect();
    let is_ready = ours.iter().any(|&(at, _)| all[at].events & READY != 0);
    ours.iter().for_each(|&(at, _)| all[at].fd = -1);
    let found = kernel(is_ready);
    let all = array_mut(descriptors, count as usize);
    let mut ready = 0;
    for (at, number) in ours {
        all[at].fd = number;
        all[at].revents = all[at].events & READY;
        ready += c_int::from(all[at].revents != 0);
    }
    if found < 0 { found } else { found + ready }
}

/// A set's words, of which only those for `count` numbers need be there.
fn words<'a>(set: *mut fd_set, count: c_int) -> &'a mut [u64] {
    array_mut(set.cast::<u64>(), (count.max(0) as usize).div_ceil(64))
}

fn select_with(count: c_int, sets: [*mut fd_set; 3], kernel: impl FnOnce(bool) -> c_int) -> c_int {
    if count <= 0 || table::numbers(0, count - 1).next().is_none() {
        return kernel(false);
    }
    // Ours, of each set; the kernel is asked about the others.
    let take = |set: *mut fd_set| -> Vec<RawFd> {
        let members = words(set, count);
        let is_member = |number: RawFd| members.get(number as usize / 64).is_some_and(|word| word >> (number % 64) & 1 == 1);
        let ours: Vec<RawFd> = table::numbers(0, count - 1).filter(|&number| is_member(number)).collect();
        ours.iter().for_each(|&number| members[number as usize / 64] &= !(1 << (number % 64)));
        ours
    };
    let ours = sets.map(take);
    let ready = ours[0].len() + ours[1].len();
    let found = kernel(ready > 0);
    // A file is never exceptional. Where the kernel fails, all three sets are as they were.
    let told = if found < 0 { 3 } else { 2 };
    for (&set, ours) in sets.iter().zip(&ours).take(told) {
        let members = words(set, count);
        ours.iter().for_each(|&number| members[number as usize / 64] |= 1 << (number % 64));
    }
    if found < 0 { found } else { found + ready as c_int }
}
