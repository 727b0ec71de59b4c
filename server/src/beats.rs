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
            let (mut turns, mut still_ticks) = (status_page.turns(), 0);
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                status_page.advance_beats();
                let now = status_page.turns();
                still_ticks = if now == turns { still_ticks + 1 } else { 0 };
                turns = now;
                if interval * still_ticks > patience {
                    return on_deadlock();
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
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
    fn a_runtime_that_makes_no_turns_is_found_and_one_that_does_is_not() {
        for makes_turns in [true, false] {
            let (page, (found, finding)) = (page(), mpsc::channel());
            let beats = Beats::start(page.clone(), INTERVAL, 40 * INTERVAL, move || found.send(()).unwrap()).unwrap();
            while page.beats() < 80 && finding.try_recv().is_err() {
                if makes_turns {
                    page.advance_turns();
                }
                thread::sleep(INTERVAL);
            }
            // A deadlock ends the beats.
            assert_eq!(page.beats() >= 80, makes_turns, "{}", page.beats());
            drop(beats);
            let last = page.beats();
            thread::sleep(4 * INTERVAL);
            assert_eq!(page.beats(), last);
        }
    }
}
