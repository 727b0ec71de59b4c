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
//!
//! # Handlers that cannot wait
//!
//! A wait for the server may be long, for example because the server stands still. A call that can begin again says so ([`Attempts`]).
//! A signal that waits then ends a wait that is not short: the call gives its connection up and fails, the handlers run, and the call
//! begins again. Parts of a call that must not begin again hold a [`Whole`].

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;

use dayfly_meta::limits::HEARTBEAT_POLLS;

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
    is_outermost: bool,
}

/// What this thread may do about signals that wait.
struct Waiting {
    /// The program's mask, while its handlers wait.
    program_mask: Cell<Option<u64>>,
    /// Whether the call that this thread makes, or a call that it is part of, can begin again.
    can_begin_again: Cell<bool>,
    /// The signals that have ended a wait of this call, one bit each.
    arrived: Cell<u64>,
    /// How many waits of this call they have ended.
    ended: Cell<u32>,
    /// The polls of its waits that were in vain, before the server has welcomed it.
    polls: Cell<u32>,
}

/// Polls after which a wait is not short. A server that runs shows a sign of life within them.
const LONG_POLLS: u32 = HEARTBEAT_POLLS / 4;
/// If signals keep coming, each wait takes more polls until it ends, up to so many: a connection is given up with each.
const MORE_POLLS_MAX: u32 = 3;

thread_local! {
    static WAITING: Waiting = const {
        Waiting {
            program_mask: Cell::new(None),
            can_begin_again: Cell::new(false),
            arrived: Cell::new(0),
            ended: Cell::new(0),
            polls: Cell::new(0),
        }
    };
}

/// The signals whose handlers do not let system calls go on, one bit each.
static ENDS_CALLS: AtomicU64 = AtomicU64::new(0);

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

/// Learns that the program is about to set a handler for a signal. `ends_calls` says whether system calls fail with EINTR after it has
/// run.
pub fn note_handler(number: c_int, ends_calls: bool) {
    if (1..=64).contains(&number) {
        match ends_calls {
            true => ENDS_CALLS.fetch_or(bit(number), Ordering::Relaxed),
            false => ENDS_CALLS.fetch_and(!bit(number), Ordering::Relaxed),
        };
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
    Deferral { before, mask: None, is_outermost: false }
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
    if mask.is_some() {
        // A thread that is ending has no such state anymore.
        let _ = WAITING.try_with(|waiting| {
            deferral.is_outermost = waiting.program_mask.get().is_none();
            if deferral.is_outermost {
                waiting.program_mask.set(mask);
            }
        });
    }
    deferral
}

impl Drop for Deferral {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: a state that the same function returned, and a live integer.
        unsafe { pthread_setcancelstate(self.before, &raw mut ours) };
        let Some(mask) = self.mask else { return };
        if !self.is_outermost {
            raw_call::change_mask(libc::SIG_SETMASK, mask);
            return;
        }
        // The mask is restored last. The signals that have been waiting arrive here. A handler may jump, and then the call ends.
        let can_begin_again = WAITING.try_with(|waiting| {
            waiting.program_mask.set(None);
            waiting.can_begin_again.replace(false)
        });
        raw_call::change_mask(libc::SIG_SETMASK, mask);
        if let Ok(can_begin_again) = can_begin_again {
            let _ = WAITING.try_with(|waiting| waiting.can_begin_again.set(can_begin_again));
        }
    }
}

/// A call of the program that can begin again if a signal ends its wait.
pub struct Attempts {
    /// Whether handlers can run between two attempts. They cannot if this call is part of another one, which holds a [`Deferral`].
    can_begin_again: bool,
    /// What [`Waiting`] held before. A handler may make calls within a call.
    before: Before,
}

#[derive(Default)]
struct Before {
    can_begin_again: bool,
    arrived: u64,
    ended: u32,
    polls: u32,
}

impl Attempts {
    /// Begins the first attempt.
    pub fn begin() -> Self {
        let begin = |waiting: &Waiting| {
            let can_begin_again = waiting.program_mask.get().is_none();
            let is_allowed = can_begin_again || waiting.can_begin_again.get();
            let before = Before {
                can_begin_again: waiting.can_begin_again.replace(is_allowed),
                arrived: waiting.arrived.take(),
                ended: waiting.ended.take(),
                polls: waiting.polls.take(),
            };
            Self { can_begin_again, before }
        };
        // A value that is not used would be dropped.
        WAITING.try_with(begin).unwrap_or_else(|_| Self { can_begin_again: false, before: Before::default() })
    }

    /// After an attempt has failed, and the program's handlers have run: returns whether the attempt failed because of them, and
    /// another one may be made. If the call may fail with EINTR, it does so unless all of the handlers let calls go on.
    pub fn is_another(&self, may_fail: bool) -> Option<AfterHandlers> {
        if !self.can_begin_again {
            return None;
        }
        match WAITING.try_with(|waiting| waiting.arrived.take()).unwrap_or(0) {
            0 => None,
            arrived if may_fail && arrived & ENDS_CALLS.load(Ordering::Relaxed) != 0 => Some(AfterHandlers::Fail),
            _ => Some(AfterHandlers::BeginAgain),
        }
    }
}

impl Drop for Attempts {
    fn drop(&mut self) {
        let _ = WAITING.try_with(|waiting| {
            let Before { can_begin_again, arrived, ended, polls } = std::mem::take(&mut self.before);
            waiting.can_begin_again.set(can_begin_again);
            // What has ended the wait of a part has ended that of the whole call, too.
            let still = if self.can_begin_again { 0 } else { waiting.arrived.get() };
            waiting.arrived.set(arrived | still);
            waiting.ended.set(ended);
            waiting.polls.set(polls);
        });
    }
}

/// While this lives, no signal ends a wait of this thread.
pub struct Whole {
    could_begin_again: bool,
}

impl Whole {
    /// Begins a part of a call, or a call, that must not begin again.
    pub fn begin() -> Self {
        Self { could_begin_again: WAITING.try_with(|waiting| waiting.can_begin_again.replace(false)).unwrap_or(false) }
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        let _ = WAITING.try_with(|waiting| waiting.can_begin_again.set(self.could_begin_again));
    }
}

/// What a call does after a signal has ended its wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterHandlers {
    /// It begins again.
    BeginAgain,
    /// It fails with EINTR.
    Fail,
}

/// Returns whether a wait of this thread is to end after so many polls, because a signal that the program handles waits.
pub(crate) fn has_arrived(polls: u32) -> bool {
    let look = |waiting: &Waiting| {
        let Some(mask) = waiting.program_mask.get().filter(|_| waiting.can_begin_again.get()) else { return false };
        if polls < LONG_POLLS + waiting.ended.get().min(MORE_POLLS_MAX) {
            return false;
        }
        let arrived = raw_call::pending_signals() & HANDLED.load(Ordering::Relaxed) & !mask;
        waiting.arrived.set(waiting.arrived.get() | arrived);
        waiting.ended.set(waiting.ended.get().saturating_add(u32::from(arrived != 0)));
        arrived != 0
    };
    WAITING.try_with(look).unwrap_or(false)
}

/// Returns how many polls this call has made in vain before it was welcomed by the server.
pub(crate) fn polls_before() -> u32 {
    WAITING.try_with(|waiting| waiting.polls.get()).unwrap_or(0)
}

/// Keeps the number of such polls for the next attempt.
pub(crate) fn keep_polls(polls: u32) {
    let _ = WAITING.try_with(|waiting| waiting.polls.set(polls));
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
            note_handler(number, false);
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

    extern "C" fn ignore(_: c_int) {}

    /// Sends a signal to this thread.
    fn raise(number: c_int) {
        // SAFETY: sends a signal for which a handler is set.
        unsafe { libc::raise(number) };
    }

    #[test]
    fn a_signal_that_waits_ends_the_wait_of_a_call_that_can_begin_again() {
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(libc::SIGURG, ignore as *const () as usize) };
        for ends_calls in [false, true] {
            note_handler(libc::SIGURG, ends_calls);
            let wait = || {
                let _deferral = uninterrupted();
                let before = has_arrived(HEARTBEAT_POLLS);
                raise(libc::SIGURG);
                (before, has_arrived(HEARTBEAT_POLLS))
            };
            assert_eq!(wait(), (false, false), "a call that cannot begin again");
            let attempts = Attempts::begin();
            assert_eq!((wait(), has_arrived(HEARTBEAT_POLLS)), ((false, true), false));
            assert!(!has_arrived(LONG_POLLS - 1));
            // A handler makes a call of its own.
            let of_handler = Attempts::begin();
            assert_eq!(of_handler.is_another(true), None);
            assert_eq!((wait(), of_handler.is_another(false)), ((false, true), Some(AfterHandlers::BeginAgain)));
            drop(of_handler);
            let expected = if ends_calls { AfterHandlers::Fail } else { AfterHandlers::BeginAgain };
            assert_eq!((attempts.is_another(true), attempts.is_another(true)), (Some(expected), None));
            // A call that is part of another one cannot begin again itself, but the other one can.
            {
                let _deferral = uninterrupted();
                let part = Attempts::begin();
                assert_eq!((wait(), part.is_another(true)), ((false, true), None));
            }
            assert_eq!(attempts.is_another(false), Some(AfterHandlers::BeginAgain));
            drop(attempts);
            assert_eq!(wait(), (false, false));
        }
        forget_handler(libc::SIGURG);
    }
}
