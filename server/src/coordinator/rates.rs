//! Records how many source bytes each node read in each interval. The record stays small: when there are too many intervals,
//! pairs of intervals are joined, and each interval is then twice as long.

use std::time::{Duration, Instant};

use dayfly_meta::id::NodeId;

/// The most intervals of all nodes together, so that they fit in a summary.
const ALL_INTERVALS_MAX: usize = 32 << 10;
/// The most and the fewest intervals of one node.
const INTERVALS_MAX: usize = 512;
const INTERVALS_MIN: usize = 8;

/// Bytes by node and interval.
pub(super) struct Rates {
    start: Instant,
    interval: Duration,
    nodes: Vec<Vec<u64>>,
}

impl Rates {
    pub(super) fn new(nodes: usize, interval: Duration) -> Self {
        Self { start: Instant::now(), interval, nodes: vec![Vec::new(); nodes] }
    }

    pub(super) fn add(&mut self, node: NodeId, bytes: u64) {
        self.add_at(self.start.elapsed(), node, bytes);
    }

    fn add_at(&mut self, since: Duration, node: NodeId, bytes: u64) {
        let max = (ALL_INTERVALS_MAX / self.nodes.len().max(1)).clamp(INTERVALS_MIN, INTERVALS_MAX);
        let mut number = (since.as_nanos() / self.interval.as_nanos()) as usize;
        while number >= max {
            self.interval *= 2;
            number /= 2;
            for rates in &mut self.nodes {
                *rates = rates.chunks(2).map(|pair| pair.iter().sum()).collect();
            }
        }
        let Some(rates) = self.nodes.get_mut(node.index()) else { return };
        if rates.len() <= number {
            rates.resize(number + 1, 0);
        }
        rates[number] += bytes;
    }

    /// Returns the bytes by node and interval, and the length of an interval in milliseconds.
    pub(super) fn read(&self) -> (Vec<Vec<u64>>, u64) {
        (self.nodes.clone(), self.interval.as_millis() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(200);

    #[test]
    fn nothing_is_lost_when_intervals_grow() {
        let mut rates = Rates::new(2, INTERVAL);
        for step in 0..5000_u32 {
            rates.add_at(INTERVAL * step, NodeId((step % 2) as u16), 1);
        }
        let (nodes, interval_ms) = rates.read();
        assert_eq!(nodes.iter().map(|rates| rates.iter().sum::<u64>()).collect::<Vec<_>>(), [2500, 2500]);
        assert!(nodes.iter().all(|rates| rates.len() <= INTERVALS_MAX) && interval_ms == 200 * 16);
    }
}
