//! What a node counts of its reading: atomics, read by `status`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dayfly_meta::checksum::Mismatch;
use dayfly_meta::id::NodeId;
use dayfly_meta::metrics::HOP_NAMES;
use dayfly_meta::wire::status::{HOPS, Hop, OwnerStatus, Reads};

/// Reads that are counted.
#[derive(Default)]
pub(crate) struct ReadCounter {
    count: AtomicU64,
    bytes: AtomicU64,
}

impl ReadCounter {
    pub(crate) fn add(&self, count: u64, bytes: u64) {
        self.count.fetch_add(count, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Reads {
        Reads { count: self.count.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

/// What came from one owner.
#[derive(Default)]
pub(crate) struct OwnerCounter {
    reads: ReadCounter,
    requests: AtomicU64,
    busy_us: AtomicU64,
}

impl OwnerCounter {
    pub(crate) fn add(&self, count: u64, bytes: u64, took: Duration) {
        self.reads.add(count, bytes);
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.busy_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> OwnerStatus {
        OwnerStatus {
            reads: self.reads.get(),
            requests: self.requests.load(Ordering::Relaxed),
            busy_us: self.busy_us.load(Ordering::Relaxed),
        }
    }
}

/// Damaged bytes that were found, by where.
#[derive(Default)]
pub(crate) struct Damage {
    counts: [AtomicU64; HOPS],
}

impl Damage {
    /// Counts a find, and warns of it. A network or a drive that damages much must not fill the log, so only the first finds
    /// of a hop are told, and then ever fewer: the second, the fourth, the eighth.
    pub(crate) fn record(&self, hop: Hop, owner: NodeId, what: &str, Mismatch { expected, found }: Mismatch) {
        let count = self.counts[hop as usize].fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            let (hop, expected, found) = (HOP_NAMES[hop as usize], format!("{expected:08x}"), format!("{found:08x}"));
            tracing::warn!(hop, node = %owner, what, expected, found, count, "bytes differ from what was staged in");
        }
    }

    /// As [`Self::record`], of bytes that cannot be read at all.
    pub(crate) fn record_unreadable(&self, hop: Hop, owner: NodeId, what: &str, error: &str) {
        let count = self.counts[hop as usize].fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::warn!(hop = HOP_NAMES[hop as usize], node = %owner, what, error, count, "a copy cannot be read");
        }
    }

    pub(crate) fn get(&self) -> [u64; HOPS] {
        std::array::from_fn(|hop| self.counts[hop].load(Ordering::Relaxed))
    }
}

/// Four buckets to each doubling: what is told is at most a fifth too much.
const SUB_BITS: u32 = 2;
const BUCKETS: usize = 40 << SUB_BITS;

/// How often what took how long.
pub(crate) struct Latencies {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Latencies {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl Latencies {
    pub(crate) fn add(&self, took: Duration) {
        self.buckets[bucket(took.as_micros() as u64)].fetch_add(1, Ordering::Relaxed);
    }

    /// Microseconds that so many thousandths took at most.
    pub(crate) fn permille_us<const N: usize>(&self, permilles: [u64; N]) -> [u64; N] {
        let counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        let all: u64 = counts.iter().sum();
        permilles.map(|permille| {
            let wanted = (all * permille).div_ceil(1000);
            let mut seen = 0;
            let found = counts.iter().position(|count| {
                seen += count;
                seen >= wanted && all > 0
            });
            found.map_or(0, end_us)
        })
    }
}

fn bucket(us: u64) -> usize {
    let bits = (u64::BITS - us.leading_zeros()).saturating_sub(SUB_BITS + 1);
    (((bits as usize) << SUB_BITS) + (us >> bits) as usize).min(BUCKETS - 1)
}

/// The most that falls into a bucket.
fn end_us(bucket: usize) -> u64 {
    let sub = 1_usize << SUB_BITS;
    if bucket < 2 * sub {
        return bucket as u64;
    }
    let bits = bucket / sub - 1;
    let top = bucket - (bits << SUB_BITS);
    ((top as u64 + 1) << bits) - 1
}

/// Processes' requests for what is not in the segments.
#[derive(Default)]
pub(crate) struct ClientReads {
    under_way: AtomicU64,
    took: Latencies,
}

/// A request, as long as it is worked on.
pub(crate) struct PendingRead<'a>(&'a ClientReads);

impl ClientReads {
    pub(crate) fn begin(&self) -> PendingRead<'_> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        PendingRead(self)
    }

    /// One was answered.
    pub(crate) fn end(&self, took: Duration) {
        self.took.add(took);
    }

    pub(crate) fn under_way(&self) -> u64 {
        self.under_way.load(Ordering::Relaxed)
    }

    pub(crate) fn wait_us(&self) -> [u64; 3] {
        self.took.permille_us([500, 900, 990])
    }
}

impl Drop for PendingRead<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_near_what_was_measured() {
        let latencies = Latencies::default();
        assert_eq!(latencies.permille_us([500]), [0]);
        (1..=1000).for_each(|us| latencies.add(Duration::from_micros(us * 10)));
        let [half, most, last] = latencies.permille_us([500, 900, 990]);
        assert!((5000..6100).contains(&half) && (9000..11_000).contains(&most) && (9900..12_000).contains(&last));
        latencies.add(Duration::from_secs(1 << 40));
    }

    #[test]
    fn every_bucket_ends_where_the_next_begins() {
        for us in (0..70_000).chain([1 << 30, (1 << 40) + 7]) {
            let found = bucket(us);
            let before = if found == 0 { 0 } else { end_us(found - 1) + 1 };
            assert!(before <= us && us <= end_us(found) || found == BUCKETS - 1, "{us} in {found}: {before}..={}", end_us(found));
        }
    }
}
