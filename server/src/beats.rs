//! The beats of a server: a thread of its own advances a word of the status page every second, whatever the runtime does. So
//! processes of this node can tell a server that is starved or stopped, which they wait for, from one whose runtime is deadlocked.
//!
//! Time is counted in this thread's own ticks, so a server that was stopped as a whole has missed nothing.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dayfly_meta::status_page::StatusPage;

/// The thread. It ends when this is dropped.
pub(crate) struct Beats {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Beats {
    /// Starts the thread. It calls `on_deadlock`, once, if the runtime has made no turn for `patience`.
    pub(crate) fn start(
        status_page: Arc<StatusPage>,
        interval: Duration,
        patience: Duration,
        on_deadlock: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name("beats".to_owned()).spawn(move || {
            let mut stillness = Stillness { turns: status_page.turns(), ticks: 0 };
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                status_page.advance_beats();
                if interval * stillness.tick(status_page.turns()) > patience {
                    return on_deadlock();
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

/// How long the runtime has made no turn.
struct Stillness {
    turns: u64,
    ticks: u32,
}

impl Stillness {
    /// Notes how many turns there have been. Returns the number of ticks since the last one.
    fn tick(&mut self, turns: u64) -> u32 {
        self.ticks = if turns == self.turns { self.ticks + 1 } else { 0 };
        self.turns = turns;
        self.ticks
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // If it panicked, the panic was printed already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(5);

    fn page() -> Arc<StatusPage> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(dayfly_meta::status_page::FILE_LEN).unwrap();
        Arc::new(StatusPage::map(&file, true).unwrap())
    }

    #[test]
    fn ticks_count_from_the_last_turn() {
        let mut stillness = Stillness { turns: 7, ticks: 0 };
        for (turns, ticks) in [(7, 1), (7, 2), (8, 0), (10, 0), (10, 1), (10, 2), (10, 3), (11, 0)] {
            assert_eq!(stillness.tick(turns), ticks);
        }
    }

    #[test]
    fn a_runtime_that_makes_no_turns_is_found_once_and_ends_the_beats() {
        let (page, (found, finding)) = (page(), mpsc::channel());
        let _beats = Beats::start(page.clone(), INTERVAL, 40 * INTERVAL, move || found.send(()).unwrap()).unwrap();
        finding.recv().unwrap();
        assert_eq!((page.beats(), finding.recv()), (41, Err(mpsc::RecvError)));
    }

    #[test]
    fn beats_go_on_until_they_are_dropped() {
        let page = page();
        let beats = Beats::start(page.clone(), INTERVAL, Duration::MAX, || unreachable!()).unwrap();
        while page.beats() < 80 {
            thread::sleep(INTERVAL);
        }
        drop(beats);
        let last = page.beats();
        thread::sleep(4 * INTERVAL);
        assert_eq!(page.beats(), last);
    }
}
