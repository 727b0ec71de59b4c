//! Enforces the read rate limit of a node (`--max-rate`), which all of its readers share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How far readers may run ahead of the rate. Reads come in large pieces at uneven times, and this
/// allowance lets a delayed reader catch up.
const BURST: Duration = Duration::from_millis(50);

pub(super) struct RateLimit {
    bytes_per_second: AtomicU64,
    /// The time at which a reader that keeps exactly to the allowed rate would have read everything
    /// admitted so far.
    paid_until: Mutex<Instant>,
}

impl RateLimit {
    pub(super) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1).into(), paid_until: Mutex::new(Instant::now()) }
    }

    /// Changes the rate for everything that is admitted from now on.
    pub(super) fn set(&self, bytes_per_second: u64) {
        self.bytes_per_second.store(bytes_per_second.max(1), Ordering::Relaxed);
    }

    /// Admits `bytes` that were just read. The reader must not read again before the returned time.
    pub(super) fn admit(&self, bytes: u64) -> Instant {
        let mut paid_until = self.paid_until.lock().unwrap_or_else(PoisonError::into_inner);
        let start = (*paid_until).max(Instant::now().checked_sub(BURST).unwrap_or(*paid_until));
        *paid_until = start + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second.load(Ordering::Relaxed) as f64);
        *paid_until
    }
}
