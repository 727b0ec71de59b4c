//! A lock that separates forks from changes to the descriptor table. The kernel copies a process's
//! descriptors and its memory one after the other. A descriptor that another thread opens in
//! between is known to the child's memory, but is not open in the child, where its number may later
//! be reused for another file. Operations that open descriptors and record their numbers hold this
//! lock, and so does a fork.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static IS_HELD: AtomicBool = AtomicBool::new(false);

/// How long to wait for the lock. A child whose fork this library did not notice may find the lock
/// held by a thread that does not exist in the child.
const PATIENCE: Duration = Duration::from_secs(60);

/// While this value lives no thread forks.
pub struct ForkLock;

/// Keeps other threads from forking until the result is dropped.
pub fn lock() -> ForkLock {
    acquire();
    ForkLock
}

impl Drop for ForkLock {
    fn drop(&mut self) {
        release();
    }
}

/// Takes the lock. Must be called before a fork.
pub fn acquire() {
    let deadline = Instant::now() + PATIENCE;
    while IS_HELD.swap(true, Ordering::AcqRel) && Instant::now() < deadline {
        std::thread::yield_now();
    }
}

/// Releases the lock. Must be called after a fork, in the parent and in the child.
pub fn release() {
    IS_HELD.store(false, Ordering::Release);
}
