//! Tracks the progress of one node's part of a stage-in: what its threads have done, what each one
//! is doing now, whether they should continue, and how fast they may read.
//!
//! Everything on a node that works on one stage-in shares one [`ProgressMonitor`]. Working threads add to its counters and
//! describe themselves in an [`Activity`]; an observer collects the counters from time to time, and can cancel the stage-in. The
//! monitor also holds the two limits that apply to all threads on a node together: the read rate (`--max-rate`) and the permit for
//! a decoder with a large window.

mod activity;
mod rate_limit;
mod window_lock;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dayfly_meta::wire::control::{Counted, STEPS, Step};

use activity::Activities;
pub use activity::Activity;
use rate_limit::RateLimit;
use window_lock::WindowLock;
pub(crate) use window_lock::WindowPermit;

/// How often a waiting thread checks whether the stage-in was canceled.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Counters, activities, cancellation and read rate of one stage-in on one node.
#[derive(Default)]
pub struct ProgressMonitor {
    source_bytes: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
    shipped_bytes: AtomicU64,
    busy_ns: [AtomicU64; STEPS],
    steps: AtomicU64,
    activities: Activities,
    cancelled: AtomicBool,
    rate_limit: Option<RateLimit>,
    large_window: WindowLock,
}

impl ProgressMonitor {
    /// Creates a monitor whose stage-in reads at most `max_rate` source bytes per second.
    pub fn new(max_rate: Option<u64>) -> Self {
        Self { rate_limit: max_rate.map(RateLimit::new), ..Self::default() }
    }

    /// Changes how many source bytes per second the stage-in reads, if its rate is limited.
    pub fn set_max_rate(&self, max_rate: u64) {
        if let Some(limit) = &self.rate_limit {
            limit.set(max_rate);
        }
    }

    /// Returns what was counted since the last call and resets the counters.
    pub fn take_counted(&self) -> Counted {
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

    /// Makes all workers fail with [`crate::StageInError::Cancelled`] at their next check.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns whether [`Self::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Counts bytes that were sent to other nodes.
    pub fn count_shipped(&self, bytes: u64) {
        self.shipped_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds time that a thread spent in a pipeline step.
    pub fn add_busy_time(&self, step: Step, time: Duration) {
        self.busy_ns[step as usize].fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Records progress that no other counter shows, so that the stage-in does not count as
    /// stalled.
    pub fn advance(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Registers a thread. From then on, the thread uses the returned value to describe what it is
    /// doing.
    pub fn new_activity(&self) -> Activity {
        self.activities.register()
    }

    /// Describes what the registered threads are doing, for messages about a stalled stage-in.
    pub fn current_activities(&self) -> Vec<String> {
        self.activities.describe()
    }

    /// Waits until no other decoder on this node uses a large window. Returns `None` if the
    /// stage-in was canceled first.
    pub(crate) fn wait_for_large_window(&self) -> Option<WindowPermit<'_>> {
        self.large_window.acquire(|| self.is_cancelled())
    }

    /// Counts one sample that has this many bytes.
    pub(crate) fn count_file(&self, bytes: u64) {
        self.files.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that were read from a source, and sleeps for as long as the rate limit demands
    /// before the next read.
    pub(crate) fn count_read(&self, bytes: u64) {
        self.source_bytes.fetch_add(bytes, Ordering::Relaxed);
        let Some(limit) = &self.rate_limit else { return };
        let until = limit.admit(bytes);
        while !self.is_cancelled() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            // A thread that is sleeping because of the rate limit is not stalled.
            self.advance();
            std::thread::sleep(left.min(CANCEL_CHECK_INTERVAL));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_keep_to_the_rate_limit_until_the_stage_in_is_cancelled() {
        let monitor = ProgressMonitor::new(Some(1 << 20));
        let start = Instant::now();
        (0..10).for_each(|_| monitor.count_read(26_215));
        assert!(start.elapsed() >= Duration::from_millis(190), "{:?}", start.elapsed());
        assert_eq!(monitor.take_counted().source_bytes, 262_150);
        // A higher rate holds for what is read from now on.
        monitor.set_max_rate(1 << 30);
        let start = Instant::now();
        (0..10).for_each(|_| monitor.count_read(1 << 20));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        monitor.set_max_rate(1);
        monitor.cancel();
        monitor.count_read(1 << 40);
    }
}
