//! `pthread_cancel`, which ends a thread in the middle of a system call by unwinding its stack.
//!
//! The unwinding must not meet code of this crate that waits for the server: a connection with an answer in flight, a lock or a
//! descriptor would stay behind, and Rust ends the process when such an unwinding reaches `catch_unwind`. So whatever makes
//! system calls that are cancellation points holds a [`Deferral`]. A request that arrives in the meantime stays pending, and
//! takes effect at the thread's next cancellation point after that.
//!
//! Paths that make no system call hold none, because it costs about 10 ns.

use std::ffi::c_int;

/// C's `PTHREAD_CANCEL_DISABLE`.
const DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While this value lives, nobody can cancel the thread that created it. That thread must drop it.
pub struct Deferral {
    /// What the program had set before.
    before: c_int,
}

/// Defers cancellation of this thread until the result is dropped. Deferrals may nest.
#[must_use]
pub fn defer() -> Deferral {
    let mut before = 0;
    // SAFETY: a live integer for the old state. The call is async-signal-safe and cannot fail with this state.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    Deferral { before }
}

impl Drop for Deferral {
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: a state that the same function returned, and a live integer.
        unsafe { pthread_setcancelstate(self.before, &raw mut ours) };
    }
}
