//! SIGBUS. While segments are mapped, the signal belongs to this library: a drive that fails during a copy gives EIO instead of
//! ending the program. The action that the program itself sets for SIGBUS is remembered, returned when it asks, and applied to
//! every fault that is not ours. Calls about other signals are passed on.
//!
//! Before the program sets its first handler, this library prepares for calls in handlers.

use std::ffi::c_int;

use dayfly_client::fault::{self as bus_error, Disposition};
use libc::{SIGBUS, sigaction as Action, sigset_t};

use super::hook;
use crate::memory::{FromC, zeroed};
use crate::next::early;
use crate::setup::setup;

hook! {
    fn sigaction | __sigaction (number, new, old) {
        if !new.is_null() {
            prepare();
        }
        if number != SIGBUS || !bus_error::is_available() {
            return sigaction::next(number, new, old);
        }
        let before = match new.get() {
            Some(new) => bus_error::replace_disposition(Disposition { handler: new.sa_sigaction, flags: new.sa_flags }),
            None => bus_error::disposition(),
        };
        let mut known: Action = zeroed();
        (known.sa_sigaction, known.sa_flags) = (before.handler, before.flags);
        // A program that does not ask for the old action passes the null pointer.
        let _ = old.put(known);
        0
    }

    fn signal | bsd_signal | ssignal (number: c_int, handler: usize) -> isize {
        prepare();
        if number != SIGBUS || !bus_error::is_available() {
            return signal::next(number, handler);
        }
        let mut new: Action = zeroed();
        (new.sa_sigaction, new.sa_flags) = (handler, libc::SA_RESTART);
        let mut old: Action = zeroed();
        match sigaction(number, (&new).into(), (&mut old).into()) {
            0 => old.sa_sigaction as isize,
            _ => libc::SIG_ERR as isize,
        }
    }

    fn sysv_signal | __sysv_signal (number: c_int, handler: usize) -> isize {
        prepare();
        sysv_signal::next(number, handler)
    }

    fn sigset(number: c_int, handler: usize) -> isize {
        prepare();
        sigset::next(number, handler)
    }

    fn sigprocmask(how: c_int, new: FromC<*const sigset_t>, old: FromC<*mut sigset_t>) -> c_int {
        without_bus_errors(how, new, |new| sigprocmask::next(how, new, old))
    }

    fn pthread_sigmask(how: c_int, new: FromC<*const sigset_t>, old: FromC<*mut sigset_t>) -> c_int {
        without_bus_errors(how, new, |new| pthread_sigmask::next(how, new, old))
    }
}

/// Prepares for calls in a signal handler.
fn prepare() {
    if setup().is_some() {
        early::look_up_all();
    }
}

/// Changes a thread's signal mask, but never blocks SIGBUS: the kernel ends a process that raises a blocked SIGBUS, even if it
/// does so in one of our copies.
fn without_bus_errors(how: c_int, new: FromC<*const sigset_t>, change: impl FnOnce(FromC<*const sigset_t>) -> c_int) -> c_int {
    match new.get() {
        Some(mut changed) if how != libc::SIG_UNBLOCK && bus_error::is_available() => {
            // SAFETY: a live set.
            unsafe { libc::sigdelset(&raw mut changed, SIGBUS) };
            change((&changed).into())
        }
        _ => change(new),
    }
}
