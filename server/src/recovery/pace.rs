//! Bounds the rate of recovery.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Lets bytes pass at a rate.
pub(super) struct Pace {
    bytes_per_second: u64,
    next: Instant,
}

impl Pace {
    pub(super) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, next: Instant::now() }
    }

    /// Waits until the bytes that passed before have had their time, and lets `bytes` pass. Time in which nothing passed is lost.
    pub(super) async fn pass(&mut self, bytes: u64) {
        sleep_until(self.next).await;
        let took = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second.max(1) as f64);
        self.next = Instant::now() + took;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bytes_pass_at_the_rate() {
        let start = Instant::now();
        let mut pace = Pace::new(1000);
        for _ in 0..5 {
            pace.pass(500).await;
        }
        assert_eq!(start.elapsed(), Duration::from_secs(2), "the last bytes pass after the others have had their time");
        tokio::time::sleep(Duration::from_secs(60)).await;
        pace.pass(500).await;
        pace.pass(500).await;
        let elapsed = start.elapsed();
        assert!(
            elapsed >= Duration::from_millis(62_500) && elapsed < Duration::from_secs(63),
            "no burst after a break: {elapsed:?}"
        );
    }
}
