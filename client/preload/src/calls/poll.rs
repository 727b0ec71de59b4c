//! Waiting for descriptors. A file is always ready. The kernel, which has a placeholder at our numbers, is asked only about the
//! other descriptors, and does not wait if one of ours is ready.

use std::ffi::c_int;
use std::os::fd::RawFd;

use dayfly_client::reserved_fd::{is_hidden, reserved_numbers};
use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use super::hook;
use crate::memory::{Errno, FromC, fail};
use crate::table;

const READY: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDNORM | libc::POLLWRNORM;
static NOW: timespec = timespec { tv_sec: 0, tv_nsec: 0 };

/// A set for `select`: as many words of 64 bits as the call's count of numbers needs, perhaps fewer than a whole `fd_set`.
pub(super) type Set<'a> = FromC<'a, *mut u64>;

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
        if !table::is_open(descriptor) {
            return epoll_ctl::next(epoll, operation, descriptor, event);
        }
        // Linux refuses regular files and directories in the same way, after it has read the event.
        let is_read = operation == libc::EPOLL_CTL_DEL || event.get().is_some();
        fail(if is_read { libc::EPERM } else { libc::EFAULT })
    }
}

/// Our descriptors in the program's array, by index, as they are when the call returns. When this is dropped they are back there,
/// even if the thread is cancelled.
struct TakenFromArray<'a> {
    descriptors: FromC<'a, *mut pollfd>,
    answered: Vec<(usize, pollfd)>,
}

impl Drop for TakenFromArray<'_> {
    fn drop(&mut self) {
        for &(at, entry) in &self.answered {
            // Fails only if the program has unmapped the array in the meantime.
            let _ = self.descriptors.at(at).put(entry);
        }
    }
}

/// Returns what the program learns about a descriptor of ours, or about a reserved one, which looks closed.
#[inline]
fn answered(entry: pollfd) -> Option<pollfd> {
    match is_hidden(entry.fd) {
        true => Some(pollfd { revents: libc::POLLNVAL, ..entry }),
        false => table::is_open(entry.fd).then_some(pollfd { revents: entry.events & READY, ..entry }),
    }
}

/// Returns whether an array contains a reserved descriptor.
pub(super) fn polls_hidden(descriptors: FromC<*mut pollfd>, count: nfds_t) -> bool {
    reserved_numbers().next().is_some()
        && descriptors.as_const().values(count as usize).is_ok_and(|mut all| all.any(|entry| is_hidden(entry.fd)))
}

/// Polls. `kernel` polls the other descriptors; its argument says whether one of ours is ready, so that it must not wait.
fn poll_with(descriptors: FromC<*mut pollfd>, count: nfds_t, kernel: impl FnOnce(bool) -> c_int) -> c_int {
    let count = count as usize;
    // The kernel fails for an array that cannot be read.
    let Ok(all) = descriptors.as_const().values(count) else { return kernel(false) };
    if !all.clone().any(|entry| answered(entry).is_some()) {
        return kernel(false);
    }
    let answered: Vec<(usize, pollfd)> = all.enumerate().filter_map(|(at, entry)| Some((at, answered(entry)?))).collect();
    let ready = answered.iter().filter(|(_, entry)| entry.revents != 0).count() as c_int;
    if let Err(errno) = descriptors.check_writable(count) {
        return fail(errno);
    }
    let taken = TakenFromArray { descriptors, answered };
    for &(at, entry) in &taken.answered {
        // The kernel skips negative numbers. The array is writable, so this cannot fail.
        let _ = descriptors.at(at).put(pollfd { fd: -1, ..entry });
    }
    let found = kernel(ready > 0);
    if found < 0 { found } else { found + ready }
}

/// Our numbers in the program's sets. They are back there when this is dropped, even if the thread is cancelled.
struct TakenFromSets<'a> {
    sets: [Set<'a>; 3],
    ours: [Vec<RawFd>; 3],
    /// How many of the sets get their members back.
    restored: usize,
}

impl Drop for TakenFromSets<'_> {
    fn drop(&mut self) {
        for (set, ours) in self.sets.iter().zip(&self.ours).take(self.restored) {
            for &number in ours {
                let word = set.at(number as usize / 64);
                // Fails only if the program has unmapped the set in the meantime.
                let _ = word.put(word.get().unwrap_or(0) | 1 << (number % 64));
            }
        }
    }
}

/// Returns whether one of the sets contains a reserved descriptor.
pub(super) fn selects_hidden(count: c_int, sets: [Set; 3]) -> bool {
    let is_member = |set: &Set, number: RawFd| {
        !set.is_null() && set.at(number as usize / 64).get().is_some_and(|word| word >> (number % 64) & 1 == 1)
    };
    let in_range = |number: &RawFd| (0..count).contains(number);
    reserved_numbers().filter(in_range).any(|number| sets.iter().any(|set| is_member(set, number)) && is_hidden(number))
}

/// Selects. `kernel` selects among the other descriptors; its argument says whether one of ours is ready.
fn select_with(count: c_int, sets: [Set; 3], kernel: impl FnOnce(bool) -> c_int) -> c_int {
    if selects_hidden(count, sets) {
        return fail(libc::EBADF);
    }
    // Like the kernel, this looks at the words that may hold an open descriptor, and at none after them.
    let Some(last) = (count > 0).then(|| table::numbers(0, count - 1).last()).flatten() else { return kernel(false) };
    // Takes our numbers out of a set. The null pointer is a set that was left out.
    let take = |set: Set| -> Result<Vec<RawFd>, Errno> {
        if set.is_null() {
            return Ok(Vec::new());
        }
        set.check_writable(last as usize / 64 + 1)?;
        let word = |number: RawFd| set.at(number as usize / 64);
        let is_member = |number: &RawFd| word(*number).get().is_some_and(|word| word >> (number % 64) & 1 == 1);
        let ours: Vec<RawFd> = table::numbers(0, last).filter(|number| is_member(number) && table::is_open(*number)).collect();
        for &number in &ours {
            word(number).put(word(number).get().unwrap_or(0) & !(1 << (number % 64)))?;
        }
        Ok(ours)
    };
    let mut taken = TakenFromSets { sets, ours: [const { Vec::new() }; 3], restored: 3 };
    for (set, ours) in sets.into_iter().zip(&mut taken.ours) {
        match take(set) {
            Ok(numbers) => *ours = numbers,
            Err(errno) => return fail(errno),
        }
    }
    let ready = taken.ours[0].len() + taken.ours[1].len();
    let found = kernel(ready > 0);
    if found < 0 {
        return found;
    }
    // A file never has an exceptional condition, so the third set gets its members back only where the call fails, which leaves
    // all sets as they were.
    taken.restored = 2;
    found + ready as c_int
}
