//! SIGBUS. While segments are mapped, the signal belongs to this library: a drive that fails during a copy gives EIO instead of
//! ending the program. The action that the program itself sets for SIGBUS is remembered, returned when the program asks, and
//! applied to every fault that is not ours, with its mask and its flags. Calls about other signals are passed on.
//!
//! A program may block SIGBUS, like any signal. This library only notes that: a thread that blocks SIGBUS reads without mapped
//! memory.
//!
//! Before the program sets its first handler, this library prepares for calls in handlers.

use std::ffi::c_int;

use dayfly_client::cancellation;
use dayfly_client::fault::{self as bus_error, Disposition};
use libc::{SIGBUS, sigaction as Action, sigset_t};

use super::hook;
use crate::attach::next_sigaction;
use crate::memory::{FromC, errno, fail, zeroed};
use crate::next::{self, early};
use crate::setup::setup;
use crate::vfork;

/// The kernel's flag for an action with a return address, which glibc sets in every action, and which programs see.
#[cfg(target_arch = "x86_64")]
const HAS_RESTORER: c_int = 0x0400_0000;
#[cfg(not(target_arch = "x86_64"))]
const HAS_RESTORER: c_int = 0;

hook! {
    fn sigaction | __sigaction (number, new, old) {
        if let Some(new) = new.get() {
            prepare(number, new.sa_sigaction, new.sa_flags);
        }
        if number != SIGBUS || !bus_error::is_available() {
            let result = sigaction::next(number, new, old);
            if let Some(new) = new.get()
                && result == 0
            {
                settle(number, new.sa_sigaction);
            }
            return result;
        }
        let before = match new.get().map(|new| Disposition::of(&new)) {
            Some(new) => {
                let new = Disposition { flags: new.flags | HAS_RESTORER, ..new };
                let Ok(before) = bus_error::replace_disposition(new, next_sigaction) else { return fail(errno()) };
                before
            }
            None => bus_error::disposition(),
        };
        if !old.is_null() {
            // Asks the kernel first, because some fields do not come from the program.
            let result = next::sigaction(number, FromC::<*mut Action>::null().as_const(), old);
            if result != 0 {
                return result;
            }
            if let Some(mut known) = old.get() {
                before.put_in(&mut known);
                // Cannot fail: the pointer is not null.
                let _ = old.put(known);
            }
        }
        0
    }

    fn signal | bsd_signal | ssignal (number: c_int, handler: usize) -> isize {
        prepare(number, handler, libc::SA_RESTART);
        if number != SIGBUS || !bus_error::is_available() {
            return settled(number, handler, signal::next(number, handler));
        }
        replace(handler, 1 << (SIGBUS - 1), libc::SA_RESTART)
    }

    fn sysv_signal | __sysv_signal (number: c_int, handler: usize) -> isize {
        prepare(number, handler, 0);
        if number != SIGBUS || !bus_error::is_available() {
            return settled(number, handler, sysv_signal::next(number, handler));
        }
        replace(handler, 0, libc::SA_RESETHAND | libc::SA_NODEFER)
    }

    fn sigset(number: c_int, handler: usize) -> isize {
        prepare(number, handler, 0);
        settled(number, handler, sigset::next(number, handler))
    }

    fn sigprocmask(how: c_int, new: FromC<*const sigset_t>, old: FromC<*mut sigset_t>) -> c_int {
        let result = sigprocmask::next(how, new, old);
        note(how, new, result)
    }

    fn pthread_sigmask(how: c_int, new: FromC<*const sigset_t>, old: FromC<*mut sigset_t>) -> c_int {
        let result = pthread_sigmask::next(how, new, old);
        note(how, new, result)
    }
}

/// Prepares for calls in a signal handler that the program is about to set.
fn prepare(number: c_int, handler: usize, flags: c_int) {
    if setup().is_some() {
        early::look_up_all();
        note_handler(number, handler, flags);
    }
}

fn note_handler(number: c_int, handler: usize, flags: c_int) {
    if is_handler(handler) {
        cancellation::note_handler(number, flags & libc::SA_RESTART == 0);
    }
}

fn is_handler(action: usize) -> bool {
    // SIG_HOLD, which only `sigset` takes, leaves the action as it is.
    const SIG_HOLD: usize = 2;
    !matches!(action, libc::SIG_DFL | libc::SIG_IGN | SIG_HOLD)
}

/// Takes note of an action that has been set. A signal without a handler is not blocked while this library waits, so that it can end
/// the program.
fn settle(number: c_int, action: usize) {
    // The actions of a `vfork` child are its own, unlike its memory.
    if vfork::child().is_some() {
        return;
    }
    if !is_handler(action) {
        cancellation::forget_handler(number);
    }
    // Another thread may have set a handler at the same time.
    let mut current: Action = zeroed();
    if next::sigaction(number, FromC::<*mut Action>::null().as_const(), (&mut current).into()) == 0 {
        note_handler(number, current.sa_sigaction, current.sa_flags);
    }
}

/// Takes note of an action that has been set with a call of this result.
fn settled(number: c_int, action: usize, result: isize) -> isize {
    if result != libc::SIG_ERR as isize {
        settle(number, action);
    }
    result
}

/// Sets the program's handler for SIGBUS, and returns the one before.
fn replace(handler: usize, mask: u64, flags: c_int) -> isize {
    let (mut new, mut old): (Action, Action) = (zeroed(), zeroed());
    Disposition { handler, flags, mask }.put_in(&mut new);
    match sigaction(SIGBUS, (&new).into(), (&mut old).into()) {
        0 => old.sa_sigaction as isize,
        _ => libc::SIG_ERR as isize,
    }
}

/// Notes that the calling thread may now block SIGBUS. Returns the result for the program.
fn note(how: c_int, new: FromC<*const sigset_t>, result: c_int) -> c_int {
    // SAFETY: the kernel has just read these 8 bytes, which are all of its signal set.
    let blocks = || unsafe { FromC::new(new.raw().cast::<u64>()) }.get().is_some_and(|set| set >> (SIGBUS - 1) & 1 == 1);
    if result == 0 && how != libc::SIG_UNBLOCK && blocks() {
        bus_error::note_mask();
    }
    result
}
