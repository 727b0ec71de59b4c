//! What the workers of a stage-in on one node have done, how busy they were with what, whether they should go on, and how fast
//! they may read.

mod activity;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::wire::control::{Counted, STEPS, Step};

use activity::Activities;
pub use activity::Activity;

/// A reader that must wait looks this often whether it should go on at all.
const SLEEP_MAX: Duration = Duration::from_millis(100);
/// How far a limited reader may be ahead of its rate, as a time: pieces are large, and delays are made good.
const AHEAD_MAX: Duration = Duration::from_millis(50);

/// What a node's workers share with those who watch them.
#[derive(Default)]
pub struct Gauge {
    source_bytes: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
    shipped_bytes: AtomicU64,
    busy_ns: [AtomicU64; STEPS],
    steps: AtomicU64,
    activities: Activities,
    cancelled: AtomicBool,
    limit: Option<Limit>,
    large_window: LargeWindow,
}

/// Whether someone decodes with a large window.
#[derive(Default)]
struct LargeWindow {
    is_taken: Mutex<bool>,
    freed: Condvar,
}

/// Held by who decodes with a large window: one at a time.
pub(crate) struct Alone<'a>(&'a LargeWindow);

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        *self.0.is_taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.freed.notify_one();
    }
}

/// A rate, and when all that was admitted so far will have been read at it.
struct Limit {
    bytes_per_second: u64,
    paid_until: Mutex<Instant>,
}

impl Gauge {
    /// With a bound on the bytes of sources that may be read in a second.
    pub fn new(max_rate: Option<u64>) -> Self {
        let limit = max_rate.map(|rate| Limit { bytes_per_second: rate.max(1), paid_until: Mutex::new(Instant::now()) });
        Self { limit, ..Self::default() }
    }

    /// What was counted since the last call.
    pub fn take(&self) -> Counted {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        Counted {
            source_bytes: take(&self.source_bytes),
            files: take(&self.files),
            bytes: take(&self.bytes),
            shipped_bytes: take(&self.shipped_bytes),
            busy_ns: std::array::from_fn(|step| take(&self.busy_ns[step])),
            steps: take(&self.steps),
        }
    }

    /// Makes the workers end with [`crate::StageInError::Cancelled`] at their next step.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether [`Self::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Counts what was sent to other nodes.
    pub fn shipped(&self, bytes: u64) {
        self.shipped_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts time that a thread spent with a step.
    pub fn busy(&self, step: Step, time: Duration) {
        self.busy_ns[step as usize].fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Counts what no other counter shows: something went forward.
    pub fn step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// A place to say what a thread does.
    pub fn activity(&self) -> Activity {
        self.activities.enter()
    }

    /// What the threads do that have said so, in words.
    pub fn activities(&self) -> Vec<String> {
        self.activities.told()
    }

    /// Waits until nobody decodes with a large window; `None` if the stage-in was cancelled before.
    pub(crate) fn large_window(&self) -> Option<Alone<'_>> {
        let window = &self.large_window;
        let mut is_taken = window.is_taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *is_taken {
            if self.is_cancelled() {
                return None;
            }
            let waited = window.freed.wait_timeout(is_taken, SLEEP_MAX);
            is_taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *is_taken = true;
        Some(Alone(window))
    }

    pub(crate) fn file(&self, bytes: u64) {
        self.files.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts what was read of a source, and waits until as much may be read again.
    pub(crate) fn read(&self, bytes: u64) {
        self.source_bytes.fetch_add(bytes, Ordering::Relaxed);
        let Some(limit) = &self.limit else { return };
        let mut until = limit.paid_until.lock().unwrap_or_else(PoisonError::into_inner);
        let start = (*until).max(Instant::now().checked_sub(AHEAD_MAX).unwrap_or(*until));
        *until = start + Duration::from_secs_f64(bytes as f64 / limit.bytes_per_second as f64);
        let until = *until;
        while !self.is_cancelled() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            // Who waits because its user wants it to does not stand still.
            self.step();
            std::thread::sleep(left.min(SLEEP_MAX));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_and_cancelling_ends_the_wait() {
        let gauge = Gauge::new(Some(1 << 20));
        let start = Instant::now();
        (0..10).for_each(|_| gauge.read(26_215));
        assert!(start.elapsed() >= Duration::from_millis(190), "{:?}", start.elapsed());
        assert_eq!(gauge.take().source_bytes, 262_150);
        gauge.cancel();
        gauge.read(1 << 40);
    }
}
