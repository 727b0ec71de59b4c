//! SIGBUS belongs to this library while segments are mapped: a copy that the drive fails is EIO, not the program's end. What
//! the program wants done by SIGBUS is kept, told back when it asks, and done for every other fault.

use std::ffi::c_int;

use dayfly_client::fault::{self, Disposition};
use libc::{SIGBUS, sigaction as Action, sigset_t};

use super::hook;
use crate::memory::{get, put, zeroed};
use crate::next;

hook! {
    fn sigaction | __sigaction (number: c_int, new: *const Action, old: *mut Action) -> c_int {
        if number != SIGBUS || !fault::is_available() {
            return next::sigaction(number, new, old);
        }
        let before = match get(new) {
            Some(new) => fault::replace_disposition(Disposition { handler: new.sa_sigaction, flags: new.sa_flags }),
            None => fault::disposition(),
        };
        let mut told: Action = zeroed();
        (told.sa_sigaction, told.sa_flags) = (before.handler, before.flags);
        // Nothing to tell where the program does not ask.
        let _ = put(old, told);
        0
    }

    fn signal | bsd_signal (number: c_int, handler: usize) -> isize {
        if number != SIGBUS || !fault::is_available() {
            return next::signal(number, handler);
        }
        let mut new: Action = zeroed();
        (new.sa_sigaction, new.sa_flags) = (handler, libc::SA_RESTART);
        let mut old: Action = zeroed();
        match sigaction(number, &raw const new, &raw mut old) {
            0 => old.sa_sigaction as isize,
            _ => libc::SIG_ERR as isize,
        }
    }

    fn sigprocmask(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int {
        with_bus_errors(how, new, |new| next::sigprocmask(how, new, old))
    }

    fn pthread_sigmask(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int {
        with_bus_errors(how, new, |new| next::pthread_sigmask(how, new, old))
    }
}

/// A thread that blocks SIGBUS would be ended by one of its own making, also in a copy of ours: that stays open.
fn with_bus_errors(how: c_int, new: *const sigset_t, set: impl FnOnce(*const sigset_t) -> c_int) -> c_int {
    match get(new) {
        Some(mut changed) if how != libc::SIG_UNBLOCK && fault::is_available() => {
            // SAFETY: a set of ours.
            unsafe { libc::sigdelset(&raw mut changed, SIGBUS) };
            set(&raw const changed)
        }
        _ => set(new),
    }
}
