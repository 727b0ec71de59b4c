//! Waiting for descriptors. A file is always ready. The kernel, which has a placeholder at our numbers, is asked only about the
//! other descriptors, and does not wait if one of ours is ready.

use std::ffi::c_int;
use std::os::fd::RawFd;

use dayfly_client::reserved_fd::{is_hidden, reserved_numbers};
use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use super::hook;
use crate::memory::{self, Errno, FromC, fail};
use crate::table;

const READY: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDNORM | libc::POLLWRNORM;
static NOW: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

/// A set for `select`: as many words of 64 bits as the call's count of numbers needs, perhaps fewer than a whole `fd_set`.
pub(super) type Set<'a> = FromC<'a, *mut u64>;

const _: () = assert!(size_of::<fd_set>().is_multiple_of(size_of::<u64>()));

hook! {
    fn poll | __poll (descriptors: FromC<*mut pollfd>, count: nfds_t, timeout_ms: c_int) -> c_int {
        poll_with(descriptors, count, |others, is_ready| poll::next(others, count, if is_ready { 0 } else { timeout_ms }))
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
        poll_with(descriptors, count, |others, is_ready| {
            ppoll::next(others, count, if is_ready { (&NOW).into() } else { timeout }, mask)
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
        select_with(count, [read, write, except], |count, [read, write, except], is_ready| {
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
        select_with(count, [read, write, except], |count, [read, write, except], is_ready| {
            pselect::next(count, read, write, except, if is_ready { (&NOW).into() } else { timeout }, mask)
        })
    }

    fn epoll_ctl(epoll: c_int, operation: c_int, descriptor: c_int, event: FromC<*mut libc::epoll_event>) -> c_int {
        if !table::is_open(descriptor) {
            return epoll_ctl::next(epoll, operation, descriptor, event);
        }
        // Linux refuses regular files and directories in the same way, after it has read the event.
        let is_read = operation == libc::EPOLL_CTL_DEL || event.get().is_some();
        fail(if is_read { libc::EPERM } else { libc::EFAULT })
    }
}

/// Arrays of at most this many descriptors are copied to the stack, so a handler that jumps out of the call leaves no memory
/// behind.
const ON_STACK_MAX: usize = 64;
/// One more than the highest number that a set for `select` is searched for. By default, the kernel gives out no higher number.
const NUMBERS_MAX: c_int = 1 << 20;

/// Returns what the program learns about a descriptor of ours, or about a reserved one, which looks closed.
#[inline]
fn answered(entry: pollfd) -> Option<i16> {
    match is_hidden(entry.fd) {
        true => Some(libc::POLLNVAL),
        false => table::is_open(entry.fd).then_some(entry.events & READY),
    }
}

/// Polls. `kernel` polls an array without our descriptors; its second argument says whether one of ours is ready, so that it must
/// not wait. The program's array is changed only when the call returns: a thread may be canceled in it, or a handler jump out of
/// it.
pub(super) fn poll_with(
    descriptors: FromC<*mut pollfd>,
    count: nfds_t,
    kernel: impl FnOnce(FromC<*mut pollfd>, bool) -> c_int,
) -> c_int {
    let count = count as usize;
    // The kernel fails for an array that cannot be read.
    let Ok(all) = descriptors.as_const().values(count) else { return kernel(descriptors, false) };
    if !all.clone().any(|entry| answered(entry).is_some()) {
        return kernel(descriptors, false);
    }
    if let Err(errno) = descriptors.check_writable(count) {
        return fail(errno);
    }
    let mut on_stack = [pollfd { fd: -1, events: 0, revents: 0 }; ON_STACK_MAX];
    let mut on_heap = Vec::new();
    let copy = match on_stack.get_mut(..count) {
        Some(copy) => copy,
        None => {
            on_heap.resize(count, on_stack[0]);
            &mut on_heap[..]
        }
    };
    let mut ready = 0;
    for (entry, original) in copy.iter_mut().zip(all.clone()) {
        *entry = original;
        if let Some(revents) = answered(original) {
            // The kernel skips negative numbers.
            entry.fd = -1;
            ready += c_int::from(revents != 0);
        }
    }
    // SAFETY: a live array of `count` elements.
    let found = kernel(unsafe { FromC::new(copy.as_mut_ptr()) }, ready > 0);
    if found < 0 && memory::errno() != libc::EINTR {
        return found;
    }
    for (at, (entry, original)) in copy.iter().zip(all).enumerate() {
        let left_out = if entry.fd == original.fd { None } else { answered(original) };
        // Fails only if the program has unmapped the array in the meantime.
        let _ = descriptors.at(at).put(pollfd { revents: left_out.unwrap_or(entry.revents), ..original });
    }
    if found < 0 { found } else { found + ready }
}

/// Returns whether one of the sets contains a reserved descriptor.
fn selects_hidden(count: c_int, sets: [Set; 3]) -> bool {
    let is_member = |set: &Set, number: RawFd| {
        !set.is_null() && set.at(number as usize / 64).get().is_some_and(|word| word >> (number % 64) & 1 == 1)
    };
    let in_range = |number: &RawFd| (0..count).contains(number);
    reserved_numbers().filter(in_range).any(|number| sets.iter().any(|set| is_member(set, number)) && is_hidden(number))
}

/// Selects. `kernel` gets the count of numbers and the sets without ours; its last argument says whether one of ours is ready. The
/// program's sets are changed only when the call returns, as by the kernel.
pub(super) fn select_with(count: c_int, sets: [Set; 3], kernel: impl FnOnce(c_int, [Set; 3], bool) -> c_int) -> c_int {
    if selects_hidden(count, sets) {
        return fail(libc::EBADF);
    }
    // Like the kernel, this looks at the words that may hold an open descriptor, and at none after them.
    let Some(last) = (count > 0).then(|| table::numbers(0, count - 1).last()).flatten() else {
        return kernel(count, sets, false);
    };
    // Returns our numbers in a set. The null pointer is a set that was left out.
    let ours_in = |set: Set| -> Result<Vec<RawFd>, Errno> {
        if set.is_null() {
            return Ok(Vec::new());
        }
        set.check_writable(last as usize / 64 + 1)?;
        let word = |number: RawFd| set.at(number as usize / 64);
        let is_member = |number: &RawFd| word(*number).get().is_some_and(|word| word >> (number % 64) & 1 == 1);
        Ok(table::numbers(0, last).filter(|number| is_member(number) && table::is_open(*number)).collect())
    };
    let mut ours = [const { Vec::new() }; 3];
    for (set, ours) in sets.into_iter().zip(&mut ours) {
        match ours_in(set) {
            Ok(numbers) => *ours = numbers,
            Err(errno) => return fail(errno),
        }
    }
    if ours.iter().all(Vec::is_empty) {
        return kernel(count, sets, false);
    }
    let count = count.min(NUMBERS_MAX);
    let words = (count as usize).div_ceil(64);
    // The part of a set that can be read, without our numbers.
    let without = |set: &Set, ours: &Vec<RawFd>| {
        let mut copy: Vec<u64> = (0..words).map_while(|at| set.at(at).get()).collect();
        let readable = copy.len();
        copy.resize(words, 0);
        ours.iter().for_each(|number| copy[*number as usize / 64] &= !(1 << (number % 64)));
        (copy, readable)
    };
    let mut copies: Vec<(Vec<u64>, usize)> = sets.iter().zip(&ours).map(|(set, ours)| without(set, ours)).collect();
    let mut passed = sets;
    for (passed, (copy, _)) in passed.iter_mut().zip(&mut copies).filter(|(set, _)| !set.is_null()) {
        // SAFETY: a live set with room for `count` numbers.
        *passed = unsafe { FromC::new(copy.as_mut_ptr()) };
    }
    let ready = ours[0].len() + ours[1].len();
    let found = kernel(count, passed, ready > 0);
    if found < 0 {
        return found;
    }
    // A file never has an exceptional condition.
    for (ours, (copy, _)) in ours.iter().take(2).zip(&mut copies) {
        ours.iter().for_each(|number| copy[*number as usize / 64] |= 1 << (number % 64));
    }
    for (set, (copy, readable)) in sets.iter().zip(&copies).filter(|(set, _)| !set.is_null()) {
        for (at, word) in copy.iter().take(*readable).enumerate() {
            // Fails only if the program has unmapped the set in the meantime.
            let _ = set.at(at).put(*word);
        }
    }
    found + ready as c_int
}
