//! Whether the node's server goes on. It advances a word of its board each second; this process has no thread to watch that, so it
//! looks whenever it sends something and, while it waits for an answer, at each tick. Once the word has stood still for
//! [`HEARTBEAT_TIMEOUT`], every request fails at once until the word moves again.
//!
//! Time is counted in ticks that this process waited through. A process that was stopped itself, for however long, has counted
//! one tick, and so does not take a server for dead that went on, or was stopped and continued with it.
//!
//! Atomics only: threads share it, a forked child goes on with its copy, and a signal handler finds nothing locked.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use dayfly_meta::board::Board;
use dayfly_meta::limits::{CLIENT_TICK, HEARTBEAT_TIMEOUT};

/// So many ticks without a heartbeat are enough.
const TICKS_MAX: u32 = (HEARTBEAT_TIMEOUT.as_millis() / CLIENT_TICK.as_millis()) as u32;
/// Ticks less far apart than this are one: they come a little early or late.
const TICK_MS: u64 = CLIENT_TICK.as_millis() as u64 * 9 / 10;

/// The server's board, and what this process has seen of its heartbeat.
pub(crate) struct Heartbeat {
    board: Board,
    /// The heartbeat that was seen last, and the ticks since.
    seen: AtomicU64,
    ticks: AtomicU32,
    /// When the last tick was counted, in milliseconds from the start.
    ticked_ms: AtomicU64,
    start: Instant,
}

impl Heartbeat {
    pub(crate) fn of(board: Board) -> Self {
        let seen = AtomicU64::new(board.heartbeat());
        Self { board, seen, ticks: AtomicU32::new(0), ticked_ms: AtomicU64::new(0), start: Instant::now() }
    }

    pub(crate) fn board(&self) -> &Board {
        &self.board
    }

    /// Fails while the server is known to stand still.
    pub(crate) fn check(&self) -> io::Result<()> {
        let beat = self.board.heartbeat();
        if self.seen.swap(beat, Ordering::AcqRel) != beat {
            self.ticks.store(0, Ordering::Release);
        }
        if self.ticks.load(Ordering::Acquire) < TICKS_MAX {
            return Ok(());
        }
        let message = format!("it has stood still for {} s", HEARTBEAT_TIMEOUT.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }

    /// Says that a thread has waited for one tick, and nothing came.
    pub(crate) fn tick(&self) -> io::Result<()> {
        self.check()?;
        // Threads that wait at the same time wait through the same tick.
        let now = self.start.elapsed().as_millis() as u64;
        let last = self.ticked_ms.load(Ordering::Acquire);
        let is_next = now.saturating_sub(last) >= TICK_MS;
        if is_next && self.ticked_ms.compare_exchange(last, now, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.ticks.fetch_add(1, Ordering::AcqRel);
        }
        self.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn pair() -> (Board, Heartbeat) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(dayfly_meta::board::FILE_LEN).unwrap();
        (Board::map(&file, true).unwrap(), Heartbeat::of(Board::map(&file, false).unwrap()))
    }

    #[test]
    fn ticks_of_many_threads_are_counted_once_and_a_beat_ends_the_count() {
        let (server, client) = pair();
        // As a process finds it that was stopped for an hour: however late it is, a tick is one tick.
        let long_ago = client.start.checked_sub(Duration::from_secs(3600)).unwrap();
        let client = Heartbeat { start: long_ago, ..client };
        (0..3 * TICKS_MAX).for_each(|_| client.tick().unwrap());
        assert_eq!(client.ticks.load(Ordering::Relaxed), 1, "within one tick");
        client.ticks.store(TICKS_MAX, Ordering::Relaxed);
        assert!(client.check().is_err() && client.tick().is_err());
        server.beat();
        client.check().unwrap();
        assert_eq!(client.ticks.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_server_that_stands_still_fails_after_enough_ticks_and_is_forgiven_at_once() {
        let (server, client) = pair();
        std::thread::sleep(CLIENT_TICK);
        let waited = (0..TICKS_MAX + 5).take_while(|_| {
            client.ticked_ms.store(0, Ordering::Relaxed);
            client.tick().is_ok()
        });
        assert_eq!(waited.count() as u32, TICKS_MAX - 1);
        server.beat();
        assert!(client.tick().is_ok());
    }
}
