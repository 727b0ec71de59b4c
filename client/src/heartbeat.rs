//! Watches the heartbeat of the node's server, which advances a word of its status page every
//! second.
//!
//! The client has no thread for that. It looks at the word whenever it sends something and, while
//! it waits for an answer, at regular polls. Once the word has not changed for [`HEARTBEAT_POLLS`]
//! polls, every request fails at once until the word changes again.
//!
//! Time is counted in polls that this process waited through. A process that was stopped, for
//! however long, counts one poll. So a server that kept running, or that was stopped and resumed
//! together with the process, does not count as dead.
//!
//! All state is atomic: threads share it, a forked child continues with its copy, and a signal
//! handler finds nothing locked.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::HEARTBEAT_POLLS;
use dayfly_meta::status_page::StatusPage;

/// A client looks for another server when the heartbeat has not changed for its timeout divided by this.
const SILENCE_PARTS: u64 = 4;

/// How long a client waits. The server sets both.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// For an answer.
    pub(crate) server: Duration,
    /// For a heartbeat.
    pub(crate) heartbeat: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { server: Deadlines::DEFAULT.server, heartbeat: Deadlines::DEFAULT.heartbeat }
    }
}

impl Timeouts {
    /// Returns the time between two polls.
    pub(crate) fn poll_interval(&self) -> Duration {
        (self.heartbeat / HEARTBEAT_POLLS).max(Duration::from_millis(1))
    }

    /// Returns the shortest time that counts as a poll interval. The kernel's clock is coarser than
    /// ours, so a poll may come this early.
    pub(crate) fn shortest_poll_interval(&self) -> Duration {
        self.poll_interval() * 9 / 10
    }
}

/// The server's status page, and what this process has seen of its heartbeat.
pub(crate) struct Heartbeat {
    status_page: StatusPage,
    timeouts: Timeouts,
    /// The heartbeat that was seen last.
    seen: AtomicU64,
    missed_polls: AtomicU32,
    /// When the last poll was counted, in microseconds since `start`.
    polled_us: AtomicU64,
    start: Instant,
    /// The heartbeat that [`Self::is_silent`] saw last, and when it was new, in milliseconds since some time before `start`.
    last_beat: AtomicU64,
    last_beat_ms: AtomicU64,
}

impl Heartbeat {
    pub(crate) fn new(status_page: StatusPage, timeouts: Timeouts) -> Self {
        let seen = AtomicU64::new(status_page.heartbeat());
        Self {
            last_beat: AtomicU64::new(status_page.heartbeat()),
            last_beat_ms: AtomicU64::new(coarse_ms()),
            status_page,
            timeouts,
            seen,
            missed_polls: AtomicU32::new(0),
            polled_us: AtomicU64::new(0),
            start: Instant::now(),
        }
    }

    pub(crate) fn status_page(&self) -> &StatusPage {
        &self.status_page
    }

    pub(crate) fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    /// Fails while the server is known to be stalled.
    pub(crate) fn check(&self) -> io::Result<()> {
        let beat = self.status_page.heartbeat();
        if self.seen.swap(beat, Ordering::AcqRel) != beat {
            self.missed_polls.store(0, Ordering::Release);
        }
        if self.missed_polls.load(Ordering::Acquire) < HEARTBEAT_POLLS {
            return Ok(());
        }
        let message = format!("it has stood still for {} s", self.timeouts.heartbeat.as_secs_f64());
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    /// Returns whether the heartbeat has not changed for a while, so that it is worth looking for another server. Returns `true` once
    /// for each such while.
    #[inline]
    pub(crate) fn is_silent(&self) -> bool {
        let beat = self.status_page.heartbeat();
        let is_same = self.last_beat.load(Ordering::Relaxed) == beat;
        let now_ms = coarse_ms();
        if is_same && now_ms.saturating_sub(self.last_beat_ms.load(Ordering::Relaxed)) < self.silence_ms() {
            return false;
        }
        self.last_beat.store(beat, Ordering::Relaxed);
        self.last_beat_ms.store(now_ms, Ordering::Relaxed);
        is_same
    }

    fn silence_ms(&self) -> u64 {
        self.timeouts.heartbeat.as_millis() as u64 / SILENCE_PARTS
    }

    /// Records that a thread has waited for one poll interval without an answer.
    pub(crate) fn record_poll(&self) -> io::Result<()> {
        self.check()?;
        // Threads that wait at the same time count one poll together.
        let now = self.start.elapsed().as_micros() as u64;
        let last = self.polled_us.load(Ordering::Acquire);
        let is_next = now.saturating_sub(last) >= self.timeouts.shortest_poll_interval().as_micros() as u64;
        if is_next && self.polled_us.compare_exchange(last, now, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.missed_polls.fetch_add(1, Ordering::AcqRel);
        }
        self.check()
    }
}

/// A clock that costs a few nanoseconds and is precise to a few milliseconds.
pub(crate) fn coarse_ms() -> u64 {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC_COARSE)
        .map_or(0, |now| now.tv_sec() as u64 * 1000 + now.tv_nsec() as u64 / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (StatusPage, Heartbeat) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(dayfly_meta::status_page::FILE_LEN).unwrap();
        (StatusPage::map(&file, true).unwrap(), Heartbeat::new(StatusPage::map(&file, false).unwrap(), Timeouts::default()))
    }

    #[test]
    fn polls_of_many_threads_count_once_and_a_heartbeat_resets_the_count() {
        let (server, client) = pair();
        // This is the state of a process that was stopped for an hour. However late a poll is, it
        // counts as one poll.
        let long_ago = client.start.checked_sub(Duration::from_secs(3600)).unwrap();
        let client = Heartbeat { start: long_ago, ..client };
        (0..3 * HEARTBEAT_POLLS).for_each(|_| client.record_poll().unwrap());
        assert_eq!(client.missed_polls.load(Ordering::Relaxed), 1, "within one poll");
        client.missed_polls.store(HEARTBEAT_POLLS, Ordering::Relaxed);
        assert!(client.check().is_err() && client.record_poll().is_err());
        server.advance_heartbeat();
        client.check().unwrap();
        assert_eq!(client.missed_polls.load(Ordering::Relaxed), 0);
    }

    /// SEMANTICS: "Time during which the reader itself was stopped does not count."
    #[test]
    fn a_server_that_stands_still_fails_after_enough_polls_and_recovers_at_once() {
        let (server, client) = pair();
        std::thread::sleep(client.timeouts.poll_interval());
        let waited = (0..HEARTBEAT_POLLS + 5).take_while(|_| {
            client.polled_us.store(0, Ordering::Relaxed);
            client.record_poll().is_ok()
        });
        assert_eq!(waited.count() as u32, HEARTBEAT_POLLS - 1);
        server.advance_heartbeat();
        assert!(client.record_poll().is_ok());
    }
}
