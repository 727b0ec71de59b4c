//! Whether the node's server goes on. It advances a word of its status page each second; this process has no thread to watch that, so it
//! looks whenever it sends something and, while it waits for an answer, at each tick. Once the word has stood still for so many
//! ticks, every request fails at once until the word moves again.
//!
//! Time is counted in ticks that this process waited through. A process that was stopped itself, for however long, has counted
//! one tick, and so does not take a server for dead that went on, or was stopped and continued with it.
//!
//! Atomics only: threads share it, a forked child goes on with its copy, and a signal handler finds nothing locked.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::HEARTBEAT_POLLS;
use dayfly_meta::status_page::StatusPage;

/// How long a client waits; the server says so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For an answer.
    pub(crate) server: Duration,
    /// For a heartbeat.
    pub(crate) heartbeat: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { server: Deadlines::DEFAULT.server, heartbeat: Deadlines::DEFAULT.heartbeat }
    }
}

impl Patience {
    /// Between two looks.
    pub(crate) fn tick(&self) -> Duration {
        (self.heartbeat / HEARTBEAT_POLLS).max(Duration::from_millis(1))
    }

    /// The kernel's clock is coarser than ours: a tick may come this early.
    pub(crate) fn shortest_tick(&self) -> Duration {
        self.tick() * 9 / 10
    }
}

/// The server's status page, and what this process has seen of its heartbeat.
pub(crate) struct Heartbeat {
    status_page: StatusPage,
    patience: Patience,
    /// The heartbeat that was seen last, and the ticks since.
    seen: AtomicU64,
    ticks: AtomicU32,
    /// When the last tick was counted, in microseconds from the start.
    ticked_us: AtomicU64,
    start: Instant,
}

impl Heartbeat {
    pub(crate) fn of(status_page: StatusPage, patience: Patience) -> Self {
        let seen = AtomicU64::new(status_page.heartbeat());
        Self { status_page, patience, seen, ticks: AtomicU32::new(0), ticked_us: AtomicU64::new(0), start: Instant::now() }
    }

    pub(crate) fn status_page(&self) -> &StatusPage {
        &self.status_page
    }

    pub(crate) fn patience(&self) -> Patience {
        self.patience
    }

    /// Fails while the server is known to stand still.
    pub(crate) fn check(&self) -> io::Result<()> {
        let beat = self.status_page.heartbeat();
        if self.seen.swap(beat, Ordering::AcqRel) != beat {
            self.ticks.store(0, Ordering::Release);
        }
        if self.ticks.load(Ordering::Acquire) < HEARTBEAT_POLLS {
            return Ok(());
        }
        let message = format!("it has stood still for {} s", self.patience.heartbeat.as_secs_f64());
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    /// Says that a thread has waited for one tick, and nothing came.
    pub(crate) fn tick(&self) -> io::Result<()> {
        self.check()?;
        // Threads that wait at the same time wait through the same tick.
        let now = self.start.elapsed().as_micros() as u64;
        let last = self.ticked_us.load(Ordering::Acquire);
        let is_next = now.saturating_sub(last) >= self.patience.shortest_tick().as_micros() as u64;
        if is_next && self.ticked_us.compare_exchange(last, now, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.ticks.fetch_add(1, Ordering::AcqRel);
        }
        self.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (StatusPage, Heartbeat) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(dayfly_meta::status_page::FILE_LEN).unwrap();
        (StatusPage::map(&file, true).unwrap(), Heartbeat::of(StatusPage::map(&file, false).unwrap(), Patience::default()))
    }

    #[test]
    fn ticks_of_many_threads_are_counted_once_and_a_beat_ends_the_count() {
        let (server, client) = pair();
        // As a process finds it that was stopped for an hour: however late it is, a tick is one tick.
        let long_ago = client.start.checked_sub(Duration::from_secs(3600)).unwrap();
        let client = Heartbeat { start: long_ago, ..client };
        (0..3 * HEARTBEAT_POLLS).for_each(|_| client.tick().unwrap());
        assert_eq!(client.ticks.load(Ordering::Relaxed), 1, "within one tick");
        client.ticks.store(HEARTBEAT_POLLS, Ordering::Relaxed);
        assert!(client.check().is_err() && client.tick().is_err());
        server.advance_heartbeat();
        client.check().unwrap();
        assert_eq!(client.ticks.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_server_that_stands_still_fails_after_enough_ticks_and_is_forgiven_at_once() {
        let (server, client) = pair();
        std::thread::sleep(client.patience.tick());
        let waited = (0..HEARTBEAT_POLLS + 5).take_while(|_| {
            client.ticked_us.store(0, Ordering::Relaxed);
            client.tick().is_ok()
        });
        assert_eq!(waited.count() as u32, HEARTBEAT_POLLS - 1);
        server.advance_heartbeat();
        assert!(client.tick().is_ok());
    }
}
