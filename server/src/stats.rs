//! Counters of what a node reads and of the damage that it finds. They are atomics; `status` and the metrics read them.

use std::fmt::Display;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dayfly_meta::checksum::Mismatch;
use dayfly_meta::id::NodeId;
use dayfly_meta::metrics::HOP_NAMES;
use dayfly_meta::wire::status::{HOPS, Hop, OwnerStatus, Reads};

/// Counts reads and their bytes.
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

/// Counts what one owner sent to this node.
#[derive(Default)]
pub(crate) struct OwnerCounter {
    reads: ReadCounter,
    requests: AtomicU64,
    /// Microseconds between request and answer, summed over all requests.
    busy_us: AtomicU64,
    failures: AtomicU64,
    /// Bytes that this node waits for.
    in_flight: AtomicU64,
}

/// A request to an owner. Dropping it ends it.
pub(crate) struct InFlight<'a> {
    counter: &'a OwnerCounter,
    bytes: u64,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.counter.in_flight.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl OwnerCounter {
    /// Counts bytes as under way until the returned guard is dropped.
    pub(crate) fn begin(&self, bytes: u64) -> InFlight<'_> {
        self.in_flight.fetch_add(bytes, Ordering::Relaxed);
        InFlight { counter: self, bytes }
    }

    /// Returns the bytes that this node waits for.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, count: u64, bytes: u64, took: Duration) {
        self.reads.add(count, bytes);
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.busy_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
    }

    /// Counts a request that failed. Returns the number of failures if this failure is to be logged. Only the first, second,
    /// fourth, eighth failure and so on is logged, so that a lost owner does not fill the log.
    pub(crate) fn add_failure(&self) -> Option<u64> {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        failures.is_power_of_two().then_some(failures)
    }

    pub(crate) fn get(&self) -> OwnerStatus {
        OwnerStatus {
            reads: self.reads.get(),
            requests: self.requests.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            busy_us: self.busy_us.load(Ordering::Relaxed),
        }
    }
}

/// Counts damaged copies by the hop at which they were found.
#[derive(Default)]
pub(crate) struct Damage {
    counts: [AtomicU64; HOPS],
}

impl Damage {
    /// Counts bytes of `what` that differ from what was staged in, and logs a warning. At each hop, only the first, second, fourth,
    /// eighth case and so on is logged, so that a network or drive that damages a lot of data does not fill the log.
    pub(crate) fn record(&self, hop: Hop, owner: NodeId, what: impl Display, Mismatch { expected, found }: Mismatch) {
        let count = self.counts[hop as usize].fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            let (hop, expected, found) = (HOP_NAMES[hop as usize], format!("{expected:08x}"), format!("{found:08x}"));
            tracing::warn!(hop, node = %owner, %what, expected, found, count, "bytes differ from those that were staged in");
        }
    }

    /// Like [`Self::record`], for a copy that could not be read from its drive.
    pub(crate) fn record_unreadable(&self, hop: Hop, owner: NodeId, what: impl Display, error: &io::Error) {
        let count = self.counts[hop as usize].fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::warn!(hop = HOP_NAMES[hop as usize], node = %owner, %what, %error, count, "cannot read a copy from its drive");
        }
    }

    pub(crate) fn get(&self) -> [u64; HOPS] {
        std::array::from_fn(|hop| self.counts[hop].load(Ordering::Relaxed))
    }
}

/// Each doubling of the latency has 4 buckets, so a reported percentile is at most a quarter too high.
const SUB_BITS: u32 = 2;
const BUCKETS: usize = 40 << SUB_BITS;

/// A histogram of latencies.
pub(crate) struct LatencyHistogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl LatencyHistogram {
    pub(crate) fn add(&self, took: Duration) {
        self.buckets[bucket(took.as_micros() as u64)].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns one latency in microseconds for each of `permilles`. For 900, for example, at least 90 % of all values do not
    /// exceed it.
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

/// Returns the largest value, in microseconds, that falls into a bucket.
fn end_us(bucket: usize) -> u64 {
    let sub = 1_usize << SUB_BITS;
    if bucket < 2 * sub {
        return bucket as u64;
    }
    let bits = bucket / sub - 1;
    let top = bucket - (bits << SUB_BITS);
    ((top as u64 + 1) << bits) - 1
}

/// Counts requests of this node's processes for blocks that are not on its drives.
#[derive(Default)]
pub(crate) struct ClientReads {
    in_flight: AtomicU64,
    latencies: LatencyHistogram,
}

/// Counts a request as in flight until this value is dropped.
pub(crate) struct PendingRead<'a>(&'a ClientReads);

impl ClientReads {
    pub(crate) fn begin(&self) -> PendingRead<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        PendingRead(self)
    }

    /// Records how long a request took to be answered.
    pub(crate) fn end(&self, took: Duration) {
        self.latencies.add(took);
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns the median, the 90th and the 99th percentile of the requests' latencies, in microseconds.
    pub(crate) fn wait_us(&self) -> [u64; 3] {
        self.latencies.permille_us([500, 900, 990])
    }
}

impl Drop for PendingRead<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_close_to_the_measured_values() {
        let latencies = LatencyHistogram::default();
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
