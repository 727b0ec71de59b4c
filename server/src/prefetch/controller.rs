//! Decides how far to fetch ahead, and how many requests to have in flight. It uses feedback to
//! find both, for links and readers of any speed.
//!
//! The control law runs once every [`INTERVAL`]. Let `rate` be the bytes read per second, smoothed over 100 ms, and `latency`
//! the shortest time that a request took:
//!
//! ```text
//! depth    = boost · rate · (2 · latency + 2 · INTERVAL)        between 2 requests and the available memory
//! requests = boost · rate · latency / request length + 1
//! ```
//!
//! The depth is twice what the link holds, plus what the reader reads in two intervals.
//!
//! A reader that has to wait for chunks reads more slowly than it could, so `rate` is too low. Therefore `boost` doubles when
//! the reader had to wait. It keeps doubling until one doubling makes the reader less than a tenth faster; that last doubling
//! is taken back, and `boost` then stays as it is. Where the link is the limit, even the first doubling is taken back. The law
//! uses the shortest latency and not the mean: requests that queue behind each other raise the mean, and must not lead to still
//! more requests. When the rate halves or doubles, `boost` is learned again.
//!
//! While other requests wait for room in the arena, the memory that the order may use halves in each interval. Afterward, a
//! twentieth of the full memory is added back in each interval.

use std::time::Duration;

/// How often the control law runs.
pub(super) const INTERVAL: Duration = Duration::from_millis(10);
/// The time constant of the smoothed rate, in seconds.
const SMOOTHING_S: f64 = 0.1;
/// How long it takes until the effect of a doubling can be observed.
const BOOST_INTERVAL: Duration = Duration::from_millis(350);
const BOOST_MAX: f64 = 16.0;
/// A doubling helped if the rate grew by this factor.
const BOOST_GAIN: f64 = 1.1;

/// The observations since the last interval.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Observation {
    pub(super) elapsed: Duration,
    /// Bytes that the reader has read.
    pub(super) read_bytes: u64,
    /// Whether the reader had to wait for a chunk.
    pub(super) was_late: bool,
    /// The shortest time that a request took, if one was answered.
    pub(super) latency: Option<Duration>,
    /// Whether other requests wait for room in the arena.
    pub(super) is_short: bool,
    /// Bytes of the arena that the order may take.
    pub(super) memory: u64,
    /// Bytes that one request asks for.
    pub(super) request_len: u64,
}

/// The controller's targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Targets {
    /// How many bytes to be ahead of the reader.
    pub(super) depth_bytes: u64,
    /// How many requests to have in flight.
    pub(super) requests: usize,
}

/// The state of an attempt to double the boost.
#[derive(Clone, Copy)]
enum Trial {
    /// A doubling may help.
    Untried,
    /// The boost was doubled at this rate, and the effect is not known yet.
    Running(f64),
    /// A doubling did not help at this rate.
    Failed(f64),
}

/// The controller of one order.
pub(super) struct Controller {
    requests_max: usize,
    rate: f64,
    /// The shortest latency since the rate last changed, in seconds.
    latency: Option<f64>,
    boost: f64,
    trial: Trial,
    since_boost: Duration,
    /// The part of the memory that the order may take.
    memory_share: f64,
}

impl Controller {
    pub(super) fn new(requests_max: usize) -> Self {
        Self {
            requests_max,
            rate: 0.0,
            latency: None,
            boost: 1.0,
            trial: Trial::Untried,
            since_boost: BOOST_INTERVAL,
            memory_share: 1.0,
        }
    }

    /// Runs the control law for one interval.
    pub(super) fn step(&mut self, observed: Observation) -> Targets {
        let elapsed_s = observed.elapsed.as_secs_f64().max(1e-6);
        self.observe_latency(observed);
        let latency = self.latency.unwrap_or(0.0);
        // Requests return in lumps, so the rate is smoothed over several latencies.
        let weight = 1.0 - (-elapsed_s / (SMOOTHING_S + 6.0 * latency)).exp();
        self.rate += weight * (observed.read_bytes as f64 / elapsed_s - self.rate);
        self.adjust_boost(observed);
        self.memory_share = if observed.is_short { self.memory_share / 2.0 } else { self.memory_share + 0.05 }.clamp(0.02, 1.0);
        let length = observed.request_len.max(1) as f64;
        let depth = self.boost * self.rate * (2.0 * latency + 2.0 * INTERVAL.as_secs_f64());
        let requests = self.boost * self.rate * latency / length + 1.0;
        let memory = observed.memory as f64 * self.memory_share;
        Targets {
            depth_bytes: depth.max(2.0 * length).min(memory) as u64,
            requests: (requests.round() as usize).clamp(2, self.requests_max),
        }
    }

    fn observe_latency(&mut self, observed: Observation) {
        if let Some(latency) = observed.latency.map(|latency| latency.as_secs_f64()) {
            self.latency = Some(self.latency.map_or(latency, |shortest| shortest.min(latency)));
        }
    }

    fn adjust_boost(&mut self, observed: Observation) {
        self.since_boost += observed.elapsed;
        if self.since_boost < BOOST_INTERVAL {
            return;
        }
        self.trial = match self.trial {
            Trial::Untried if observed.was_late && self.boost < BOOST_MAX => {
                self.boost *= 2.0;
                Trial::Running(self.rate)
            }
            Trial::Running(before) if self.rate < before * BOOST_GAIN => {
                self.boost = (self.boost / 2.0).max(1.0);
                Trial::Failed(self.rate)
            }
            Trial::Running(_) => Trial::Untried,
            Trial::Failed(rate) if !(rate / 2.0..=rate * 2.0).contains(&self.rate) => {
                (self.boost, self.latency) = (1.0, None);
                Trial::Untried
            }
            // No change. In particular, a rate that only drifts after a failed trial does not start a new one.
            trial => return self.trial = trial,
        };
        self.since_boost = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: u64 = 1 << 20;

    /// Simulates a link that delivers `rate` bytes per second with `latency_s` for each request, and a reader that could read
    /// `reader` bytes per second. Returns the targets and the rate of reading, by interval.
    fn simulate(rate: f64, latency_s: f64, reader: f64, memory: u64) -> Vec<(Targets, f64)> {
        let mut controller = Controller::new(16);
        let mut targets = Targets { depth_bytes: 2 * LENGTH, requests: 2 };
        let step = 0.0005;
        let (mut time, mut ahead, mut link_free_at) = (0.0_f64, 0.0_f64, 0.0_f64);
        let mut flights: Vec<(f64, f64)> = Vec::new();
        let (mut read, mut was_late, mut shortest): (f64, bool, Option<f64>) = (0.0, false, None);
        let mut history = Vec::new();
        let mut next_look = INTERVAL.as_secs_f64();
        while time < 4.0 {
            time += step;
            let (landed, in_flight): (Vec<_>, Vec<_>) = flights.iter().partition(|(_, end)| *end <= time);
            flights = in_flight;
            for (start, end) in landed {
                ahead += LENGTH as f64;
                shortest = Some(shortest.map_or(end - start, |shortest: f64| shortest.min(end - start)));
            }
            let wanted = reader * step;
            let taken = wanted.min(ahead);
            was_late |= taken < wanted;
            (ahead, read) = (ahead - taken, read + taken);
            let filling = |flights: &Vec<(f64, f64)>, ahead: f64| ahead + flights.len() as f64 * LENGTH as f64;
            while flights.len() < targets.requests && filling(&flights, ahead) < targets.depth_bytes as f64 {
                link_free_at = link_free_at.max(time) + LENGTH as f64 / rate;
                flights.push((time, link_free_at + latency_s));
            }
            if time >= next_look {
                next_look += INTERVAL.as_secs_f64();
                targets = controller.step(Observation {
                    elapsed: INTERVAL,
                    read_bytes: read as u64,
                    was_late,
                    latency: shortest.map(Duration::from_secs_f64),
                    is_short: false,
                    memory,
                    request_len: LENGTH,
                });
                history.push((targets, read / INTERVAL.as_secs_f64()));
                (read, was_late, shortest) = (0.0, false, None);
            }
        }
        history
    }

    /// Asserts that after two seconds the depth stays within a quarter of its mean, and that the reader is as fast as the link
    /// and its own speed allow.
    fn converges(rate: f64, latency_s: f64, reader: f64) {
        let history = simulate(rate, latency_s, reader, 256 << 20);
        let settled = &history[200..];
        let mean = |values: &dyn Fn(&(Targets, f64)) -> f64| settled.iter().map(values).sum::<f64>() / settled.len() as f64;
        let depth = mean(&|(targets, _)| targets.depth_bytes as f64);
        for (at, (targets, _)) in settled.iter().enumerate() {
            let deviation = (targets.depth_bytes as f64 - depth).abs() / depth;
            assert!(deviation < 0.25, "rate {rate} latency {latency_s} reader {reader}: {deviation} at {at} of {depth}");
        }
        let got = mean(&|(_, got)| *got);
        let possible = rate.min(reader).min(16.0 * LENGTH as f64 / (latency_s + LENGTH as f64 / rate));
        assert!(got > 0.9 * possible, "rate {rate} latency {latency_s} reader {reader}: {got} of {possible}, depth {depth}");
        assert!(depth < 8.0 * possible * (2.0 * latency_s + 0.04) + 16.0 * LENGTH as f64, "{depth} is more than useful");
    }

    /// SEMANTICS: "A controller finds how far to read ahead, within half of the arena or `tune
    /// --prefetch-memory` (plot)."
    #[test]
    fn the_depth_converges_on_links_and_readers_of_any_speed() {
        for rate in [20e6, 200e6, 2e9] {
            for latency_s in [0.0001, 0.002, 0.02] {
                for reader in [10e6, 300e6, 1e9] {
                    converges(rate, latency_s, reader);
                }
            }
        }
    }

    #[test]
    fn memory_bounds_the_depth_and_requests_that_wait_for_room_halve_it() {
        assert!(simulate(2e9, 0.02, 2e9, 8 << 20).iter().all(|(targets, _)| targets.depth_bytes <= 8 << 20));
        let mut controller = Controller::new(16);
        let observed = Observation {
            elapsed: INTERVAL,
            read_bytes: 20 << 20,
            latency: Some(Duration::from_millis(10)),
            memory: 64 << 20,
            request_len: LENGTH,
            ..Observation::default()
        };
        let before = (0..100).map(|_| controller.step(observed)).last().unwrap();
        let short = (0..4).map(|_| controller.step(Observation { is_short: true, ..observed })).last().unwrap();
        let after = (0..100).map(|_| controller.step(observed)).last().unwrap();
        assert!(before.depth_bytes == 64 << 20 && short.depth_bytes <= 4 << 20 && after.depth_bytes == 64 << 20);
    }
}
