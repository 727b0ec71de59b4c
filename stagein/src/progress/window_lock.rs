//! The permit for decoders with a large window. On each node, a stage-in runs only one such decoder
//! at a time, because its window can take much of the memory that the stage-in may use there.

use std::sync::{Condvar, Mutex, PoisonError};

use super::CANCEL_CHECK_INTERVAL;

#[derive(Default)]
pub(super) struct WindowLock {
    is_taken: Mutex<bool>,
    freed: Condvar,
}

/// Held while a decoder uses a large window.
pub(crate) struct WindowPermit<'a>(&'a WindowLock);

impl Drop for WindowPermit<'_> {
    fn drop(&mut self) {
        *self.0.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.freed.notify_one();
    }
}

impl WindowLock {
    /// Waits for the permit. Returns `None` once `is_cancelled` returns `true`.
    pub(super) fn acquire(&self, is_cancelled: impl Fn() -> bool) -> Option<WindowPermit<'_>> {
        let mut is_taken = self.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_taken {
            if is_cancelled() {
                return None;
            }
            let waited = self.freed.wait_timeout(is_taken, CANCEL_CHECK_INTERVAL);
            is_taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_taken = true;
        Some(WindowPermit(self))
    }
}
