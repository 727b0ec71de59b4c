//! The code that all measurements share: their error, timing, and a random number generator.

use std::time::Instant;

/// Any error ends a measurement.
pub(crate) type Failure = Box<dyn std::error::Error>;

/// Runs `work` and returns the seconds that it took, with its result.
pub(crate) fn time<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64(), result)
}

/// Returns the median, or 0 if there are no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// A random number generator that gives the same numbers in every run (SplitMix64).
#[derive(Clone)]
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    pub(crate) fn next(&mut self) -> u64 {
        self.skip(1);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Leaves out numbers.
    pub(crate) fn skip(&mut self, count: u64) {
        self.0 = self.0.wrapping_add(Self::STEP.wrapping_mul(count));
    }

    /// Puts a list in random order.
    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            list.swap(at, (self.next() % (at as u64 + 1)) as usize);
        }
    }
}
