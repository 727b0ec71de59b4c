//! Defers `pthread_cancel`, which ends a thread in the middle of a system call by unwinding its stack.
//!
//! The unwinding must not meet code of this crate that waits for the server: a connection with an answer in flight, a lock or a
//! descriptor would stay behind, and Rust ends the process when such an unwinding reaches `catch_unwind`. So code that
//! makes system calls that are cancellation points holds a [`Deferral`]. A cancellation request that arrives meanwhile
//! stays pending, and takes effect at the thread's next cancellation point after the deferral has ended.
//!
//! Code that makes no system call holds no deferral, because a deferral costs about 10 ns.
//!
//! # Handlers that jump
//!
//! A signal handler may leave by `siglongjmp`, and then the interrupted call never continues. A connection, a count of users or the
//! deferral itself would stay as it was forever. So where such things are held, handlers wait too ([`uninterrupted`]): the signals
//! for which the program has set handlers are blocked, and arrive right afterward. Programs without handlers pay one load for that.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;

use crate::raw_call;

/// C's `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While this value lives, nobody can cancel the thread that created it. That thread must drop it.
pub struct Deferral {
    /// The cancellation state that the program had set before.
    before: c_int,
    /// The thread's previous mask of signals, if the deferral changed the mask.
    mask: Option<u64>,
}

/// The signals for which the program has set handlers, one bit each.
static HANDLED: AtomicU64 = AtomicU64::new(0);
/// Signals that are never blocked: SIGABRT, and those that an instruction raises. If the latter were blocked, the kernel would end
/// the process.
const NEVER_BLOCKED: u64 = bit(libc::SIGBUS)
    | bit(libc::SIGSEGV)
    | bit(libc::SIGILL)
    | bit(libc::SIGFPE)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS)
    | bit(libc::SIGABRT);

const fn bit(number: c_int) -> u64 {
    1 << (number - 1)
}

/// Learns that the program is about to set a handler for a signal.
pub fn note_handler(number: c_int) {
    if (1..=64).contains(&number) {
        HANDLED.fetch_or(bit(number) & !NEVER_BLOCKED, Ordering::Relaxed);
    }
}

/// Learns that the program has taken the handler for a signal away.
pub fn forget_handler(number: c_int) {
    if (1..=64).contains(&number) {
        HANDLED.fetch_and(!bit(number), Ordering::Relaxed);
    }
}

/// Defers cancellation of this thread until the result is dropped. Deferrals may nest.
#[must_use]
pub fn defer() -> Deferral {
    let mut before = 0;
    // SAFETY: a live integer for the old state. The call is async-signal-safe and cannot fail with this state.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    Deferral { before, mask: None }
}

/// Defers cancellation of this thread, and the program's signal handlers on it, until the result is dropped. Until then, wait
/// for nothing but the server, and start no other program, because it would inherit the mask.
#[must_use]
pub fn uninterrupted() -> Deferral {
    let handled = HANDLED.load(Ordering::Relaxed);
    // Signals are blocked first, so that no handler jumps while cancellation is off.
    let mask = if handled == 0 { None } else { raw_call::change_mask(libc::SIG_BLOCK, handled) };
    let mut deferral = defer();
    deferral.mask = mask;
    deferral
}

impl Drop for Deferral {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: a state that the same function returned, and a live integer.
        unsafe { pthread_setcancelstate(self.before, &raw mut ours) };
        // The mask is restored last. The signals that have been waiting arrive here.
        if let Some(mask) = self.mask {
            raw_call::change_mask(libc::SIG_SETMASK, mask);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether this thread blocks a signal.
    fn is_blocked(number: c_int) -> bool {
        raw_call::change_mask(libc::SIG_BLOCK, 0).unwrap() & bit(number) != 0
    }

    #[test]
    fn cancellation_and_handlers_wait_until_the_outermost_deferral_ends() {
        for number in [libc::SIGUSR2, libc::SIGSEGV, -1, 65] {
            note_handler(number);
        }
        let outer = uninterrupted();
        let inner = uninterrupted();
        let mut state = 0;
        // SAFETY: sets what is set already.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut state) };
        assert_eq!(state, DISABLE);
        assert!(is_blocked(libc::SIGUSR2) && !is_blocked(libc::SIGSEGV) && !is_blocked(libc::SIGUSR1));
        drop(inner);
        assert!(is_blocked(libc::SIGUSR2));
        drop(outer);
        assert!(!is_blocked(libc::SIGUSR2));
        // A signal whose handler is gone must be able to end the program.
        [libc::SIGUSR2, -1, 65].into_iter().for_each(forget_handler);
        let without = uninterrupted();
        assert!(!is_blocked(libc::SIGUSR2));
        drop(without);
    }
}
