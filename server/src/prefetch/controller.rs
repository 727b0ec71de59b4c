//! How far to fetch ahead, and how many requests to have under way: found by feedback, for links and readers of any speed.
//!
//! The law, evaluated every [`INTERVAL`]. With `rate` the bytes that were read in a second (smoothed over 100 ms) and `latency` the
//! shortest that a request took,
//!
//! ```text
//! depth    = boost · rate · (2 · latency + 2 · INTERVAL)        within [2 requests, the memory that there is]
//! requests = boost · rate · latency / request length + 1
//! ```
//!
//! which is what a link holds, twice, and what a reader takes while nobody looks. A reader that is held up by us makes `rate` small
//! and hides how fast it would be; so when it had to wait, `boost` doubles, until a doubling has not made it faster by a tenth: that
//! one is taken back, and `boost` stays. Where the link is the limit, that is the first: the shortest latency, not the mean, is taken,
//! so that requests which queue behind each other do not ask for still more of them. When the rate falls to a half, or doubles, the
//! boost is learned anew.
//! When requests of others wait for room in the arena, the memory is halved, and comes back by a twentieth an interval.

use std::time::Duration;

/// How often the law is evaluated.
pub(super) const INTERVAL: Duration = Duration::from_millis(10);
/// The rate is smoothed over this.
const SMOOTHING_S: f64 = 0.1;
/// What a doubling did shows after so long.
const BOOST_INTERVAL: Duration = Duration::from_millis(350);
const BOOST_MAX: f64 = 16.0;
/// A reader that is so much faster was held up before.
const BOOST_GAIN: f64 = 1.1;

/// What was seen since the last look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Observed {
    pub(super) elapsed: Duration,
    /// Bytes that the reader has taken.
    pub(super) read_bytes: u64,
    /// Whether it had to wait.
    pub(super) was_late: bool,
    /// The shortest that a request took, if one has ended.
    pub(super) latency: Option<Duration>,
    /// Whether others wait for room.
    pub(super) is_short: bool,
    /// Bytes that may be taken.
    pub(super) memory: u64,
    /// Bytes that one request asks for.
    pub(super) request_len: u64,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Bytes to be ahead of the reader.
    pub(super) depth_bytes: u64,
    /// Requests to have under way.
    pub(super) requests: usize,
}

/// What is known of doubling the boost.
#[derive(Clone, Copy)]
enum Trial {
    /// It may help.
    None,
    /// It was doubled at this rate.
    Under(f64),
    /// It did not help at this rate.
    Failed(f64),
}

/// The controller of one order.
pub(super) struct Controller {
    requests_max: usize,
    rate: f64,
    /// The shortest since the rate was last another, in seconds.
    latency: Option<f64>,
    boost: f64,
    trial: Trial,
    since_boost: Duration,
    /// The part of the memory that may be taken while others wait.
    memory_share: f64,
}

impl Controller {
    pub(super) fn new(requests_max: usize) -> Self {
        Self {
            requests_max,
            rate: 0.0,
            latency: None,
            boost: 1.0,
            trial: Trial::None,
            since_boost: BOOST_INTERVAL,
            memory_share: 1.0,
        }
    }

    pub(super) fn step(&mut self, seen: Observed) -> Plan {
        let elapsed_s = seen.elapsed.as_secs_f64().max(1e-6);
        self.see_latency(seen);
        let latency = self.latency.unwrap_or(0.0);
        // What comes in lumps is looked at over several of them.
        let weight = 1.0 - (-elapsed_s / (SMOOTHING_S + 6.0 * latency)).exp();
        self.rate += weight * (seen.read_bytes as f64 / elapsed_s - self.rate);
        self.see_waiting(seen);
        self.memory_share = if seen.is_short { self.memory_share / 2.0 } else { self.memory_share + 0.05 }.clamp(0.02, 1.0);
        let length = seen.request_len.max(1) as f64;
        let depth = self.boost * self.rate * (2.0 * latency + 2.0 * INTERVAL.as_secs_f64());
        let requests = self.boost * self.rate * latency / length + 1.0;
        let memory = seen.memory as f64 * self.memory_share;
        Plan {
            depth_bytes: depth.max(2.0 * length).min(memory) as u64,
            requests: (requests.round() as usize).clamp(2, self.requests_max),
        }
    }

    fn see_latency(&mut self, seen: Observed) {
        if let Some(latency) = seen.latency.map(|latency| latency.as_secs_f64()) {
            self.latency = Some(self.latency.map_or(latency, |shortest| shortest.min(latency)));
        }
    }

    fn see_waiting(&mut self, seen: Observed) {
        self.since_boost += seen.elapsed;
        if self.since_boost < BOOST_INTERVAL {
            return;
        }
        self.trial = match self.trial {
            Trial::None if seen.was_late && self.boost < BOOST_MAX => {
                self.boost *= 2.0;
                Trial::Under(self.rate)
            }
            Trial::Under(before) if self.rate < before * BOOST_GAIN => {
                self.boost = (self.boost / 2.0).max(1.0);
                Trial::Failed(self.rate)
            }
            Trial::Under(_) => Trial::None,
            Trial::Failed(rate) if !(rate / 2.0..=rate * 2.0).contains(&self.rate) => {
                (self.boost, self.latency) = (1.0, None);
                Trial::None
            }
            // A rate that drifts is not one that has changed.
            trial => return self.trial = trial,
        };
        self.since_boost = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: u64 = 1 << 20;

    /// A link that gives `rate` bytes in a second and `latency` to each request, a reader that would take `reader` bytes in a second.
    /// Returns depth and what was read, by interval.
    fn simulate(rate: f64, latency_s: f64, reader: f64, memory: u64) -> Vec<(Plan, f64)> {
        let mut controller = Controller::new(16);
        let mut plan = Plan { depth_bytes: 2 * LENGTH, requests: 2 };
        let step = 0.0005;
        let (mut time, mut ahead, mut link_free_at) = (0.0_f64, 0.0_f64, 0.0_f64);
        let mut flights: Vec<(f64, f64)> = Vec::new();
        let (mut read, mut was_late, mut shortest): (f64, bool, Option<f64>) = (0.0, false, None);
        let mut history = Vec::new();
        let mut next_look = INTERVAL.as_secs_f64();
        while time < 4.0 {
            time += step;
            let (landed, under_way): (Vec<_>, Vec<_>) = flights.iter().partition(|(_, end)| *end <= time);
            flights = under_way;
            for (start, end) in landed {
                ahead += LENGTH as f64;
                shortest = Some(shortest.map_or(end - start, |shortest: f64| shortest.min(end - start)));
            }
            let wanted = reader * step;
            let taken = wanted.min(ahead);
            was_late |= taken < wanted;
            (ahead, read) = (ahead - taken, read + taken);
            let filling = |flights: &Vec<(f64, f64)>, ahead: f64| ahead + flights.len() as f64 * LENGTH as f64;
            while flights.len() < plan.requests && filling(&flights, ahead) < plan.depth_bytes as f64 {
                link_free_at = link_free_at.max(time) + LENGTH as f64 / rate;
                flights.push((time, link_free_at + latency_s));
            }
            if time >= next_look {
                next_look += INTERVAL.as_secs_f64();
                plan = controller.step(Observed {
                    elapsed: INTERVAL,
                    read_bytes: read as u64,
                    was_late,
                    latency: shortest.map(Duration::from_secs_f64),
                    is_short: false,
                    memory,
                    request_len: LENGTH,
                });
                history.push((plan, read / INTERVAL.as_secs_f64()));
                (read, was_late, shortest) = (0.0, false, None);
            }
        }
        history
    }

    /// After two seconds the depth moves no more than a quarter about its mean, and the reader gets what link and reader allow.
    fn converges(rate: f64, latency_s: f64, reader: f64) {
        let history = simulate(rate, latency_s, reader, 256 << 20);
        let settled = &history[200..];
        let mean = |values: &dyn Fn(&(Plan, f64)) -> f64| settled.iter().map(values).sum::<f64>() / settled.len() as f64;
        let depth = mean(&|(plan, _)| plan.depth_bytes as f64);
        for (at, (plan, _)) in settled.iter().enumerate() {
            let off = (plan.depth_bytes as f64 - depth).abs() / depth;
            assert!(off < 0.25, "rate {rate} latency {latency_s} reader {reader}: {off} at {at} of {depth}");
        }
        let got = mean(&|(_, got)| *got);
        let possible = rate.min(reader).min(16.0 * LENGTH as f64 / (latency_s + LENGTH as f64 / rate));
        assert!(got > 0.9 * possible, "rate {rate} latency {latency_s} reader {reader}: {got} of {possible}, depth {depth}");
        assert!(depth < 8.0 * possible * (2.0 * latency_s + 0.04) + 16.0 * LENGTH as f64, "{depth} is more than is of use");
    }

    #[test]
    fn it_converges_on_links_and_readers_of_any_speed() {
        for rate in [20e6, 200e6, 2e9] {
            for latency_s in [0.0001, 0.002, 0.02] {
                for reader in [10e6, 300e6, 1e9] {
                    converges(rate, latency_s, reader);
                }
            }
        }
    }

    #[test]
    fn memory_bounds_it_and_pressure_halves_it() {
        assert!(simulate(2e9, 0.02, 2e9, 8 << 20).iter().all(|(plan, _)| plan.depth_bytes <= 8 << 20));
        let mut controller = Controller::new(16);
        let seen = Observed {
            elapsed: INTERVAL,
            read_bytes: 20 << 20,
            latency: Some(Duration::from_millis(10)),
            memory: 64 << 20,
            request_len: LENGTH,
            ..Observed::default()
        };
        let before = (0..100).map(|_| controller.step(seen)).last().unwrap();
        let short = (0..4).map(|_| controller.step(Observed { is_short: true, ..seen })).last().unwrap();
        let after = (0..100).map(|_| controller.step(seen)).last().unwrap();
        assert!(before.depth_bytes == 64 << 20 && short.depth_bytes <= 4 << 20 && after.depth_bytes == 64 << 20);
    }
}
