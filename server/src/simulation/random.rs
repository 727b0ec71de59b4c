//! Random numbers from a seed, for reproducible runs.

use std::time::Duration;

/// The SplitMix64 generator.
#[derive(Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, which must not be 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(super) fn is_one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    pub(super) fn duration(&mut self, from: Duration, to: Duration) -> Duration {
        from + Duration::from_micros(self.below((to - from).as_micros().max(1) as u64))
    }

    /// Returns a duration whose logarithm is uniform: each doubling between `from` and `to` is
    /// equally likely.
    pub(super) fn log_duration(&mut self, from: Duration, to: Duration) -> Duration {
        let doublings = (to.as_secs_f64() / from.as_secs_f64()).log2();
        from.mul_f64((doublings * (self.below(1 << 20) as f64 / f64::from(1 << 20))).exp2())
    }
}
