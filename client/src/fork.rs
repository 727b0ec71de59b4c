//! Forking beside other threads. The kernel copies a process's descriptors and its memory one after the other, not at one
//! moment: what another thread opens in between is in the child's memory, but not among its descriptors. Where a number must
//! not come to mean something else, the two are done under this lock, which a fork takes, too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static IS_HELD: AtomicBool = AtomicBool::new(false);

/// A child that was made behind our back may find the lock held by a thread that it does not have.
const PATIENCE: Duration = Duration::from_secs(60);

/// Until this is dropped no thread forks.
pub struct Held;

/// Keeps threads from forking.
pub fn hold() -> Held {
    acquire();
    Held
}

impl Drop for Held {
    fn drop(&mut self) {
        release();
    }
}

/// To be called before a fork.
pub fn acquire() {
    let deadline = Instant::now() + PATIENCE;
    while IS_HELD.swap(true, Ordering::AcqRel) && Instant::now() < deadline {
        std::thread::yield_now();
    }
}

/// To be called after a fork, on both sides.
pub fn release() {
    IS_HELD.store(false, Ordering::Release);
}
