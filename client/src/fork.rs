//! A lock that prevents a fork in the middle of certain changes to memory, which the child must find complete. A thread holds the
//! lock while it makes such a change, and while it forks.
//!
//! A function that may be called in a signal handler must not take this lock: the handler may have interrupted `malloc`, and a
//! thread that forks waits for `malloc` while it holds the lock, so both would wait forever. Such functions change memory in single
//! atomic steps instead. The exception is `fork` itself, which waits for the lock only if another thread holds it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::thread_number;

/// The number of the thread that holds the lock, or 0.
static HOLDER: AtomicUsize = AtomicUsize::new(0);
/// How often the holder has taken the lock again, in signal handlers.
static AGAIN: AtomicUsize = AtomicUsize::new(0);

/// How long to wait for the lock. A child whose fork this library did not notice may find the lock
/// held by a thread that does not exist in the child.
const PATIENCE: Duration = Duration::from_secs(60);

/// While this value lives, no other thread forks.
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
    let me = thread_number::current();
    if HOLDER.load(Ordering::Acquire) == me {
        AGAIN.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    while HOLDER.compare_exchange(0, me, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        if Instant::now() > deadline {
            HOLDER.store(me, Ordering::Release);
            return;
        }
        std::thread::yield_now();
    }
}

/// Releases the lock. Must be called after a fork, in the parent and in the child.
pub fn release() {
    if HOLDER.load(Ordering::Acquire) != thread_number::current() {
        return;
    }
    // If a signal handler runs between these steps, it releases the lock as often as it takes it, so `AGAIN` does not change.
    if AGAIN.load(Ordering::Relaxed) > 0 {
        AGAIN.fetch_sub(1, Ordering::Relaxed);
    } else {
        HOLDER.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_has_the_lock_takes_it_again_and_others_wait() {
        let outer = lock();
        acquire();
        release();
        let other = std::thread::spawn(|| {
            let _lock = lock();
            Instant::now()
        });
        std::thread::sleep(Duration::from_millis(20));
        let released = Instant::now();
        drop(outer);
        assert!(other.join().unwrap() >= released);
    }
}
