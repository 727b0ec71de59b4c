//! Notices when a stage-in no longer makes progress.

use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;

use super::CoordinatorError;

/// Counts checks that saw no progress. It counts checks and not time, so that a pause of the whole process does not look like a
/// stall: a stopped process makes no checks.
pub(super) struct StallDetector {
    timeout: Duration,
    interval: Duration,
    steps: u64,
    looks: u32,
}

impl StallDetector {
    pub(super) fn new(deadlines: &Deadlines) -> Self {
        Self { timeout: deadlines.stall, interval: deadlines.progress_interval, steps: 0, looks: 0 }
    }

    /// Makes one check; called once per `interval`. `steps` counts all progress so far. Returns
    /// whether there has been no progress for too long.
    pub(super) fn is_stalled(&mut self, steps: u64) -> bool {
        self.looks = if steps == self.steps { self.looks + 1 } else { 0 };
        self.steps = steps;
        self.interval * self.looks > self.timeout
    }

    /// Returns the error for the user.
    pub(super) fn error(&self, waits_for: String) -> CoordinatorError {
        CoordinatorError::Stalled { seconds: self.timeout.as_secs(), waits_for }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "A stage-in that waits because of `--max-rate` has not stalled."
    #[test]
    fn a_stall_is_noticed_and_slow_progress_is_not_a_stall() {
        let deadlines = Deadlines { stall: Deadlines::DEFAULT.progress_interval * 10, ..Deadlines::DEFAULT };
        let mut detector = StallDetector::new(&deadlines);
        assert!((0..100).all(|steps| !detector.is_stalled(steps)));
        assert_eq!((0..100).position(|_| detector.is_stalled(99)), Some(10));
        assert!(!detector.is_stalled(100), "there is progress again");
        assert!(detector.error("node 1: reading 'x'".to_owned()).to_string().contains("2 s"));
    }
}
