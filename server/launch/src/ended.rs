//! Whether somebody has ended a session, for example with `dayfly down`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dayfly_client::locate::SessionFolder;
use dayfly_meta::limits::FOLDER_CHECK_INTERVAL;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// Whether somebody has ended a session, or is ending it. Servers say so, and the session's folder does, because servers that stand
/// still or cannot be reached say nothing.
#[derive(Clone)]
pub struct Ended {
    /// What servers have said, which stays true.
    was_said: Arc<AtomicBool>,
    /// What the folder said last. A command that was ending the session may have been interrupted since.
    was_seen: Arc<AtomicBool>,
    location: SessionFolder,
}

impl Ended {
    pub(crate) fn new(location: SessionFolder) -> Self {
        Self { was_said: Arc::default(), was_seen: Arc::default(), location }
    }

    /// Takes note of what a server has said.
    pub(crate) fn set(&self) {
        self.was_said.store(true, Ordering::Relaxed);
    }

    /// Returns whether a server has said so, or the folder did when somebody looked there last.
    pub(crate) fn is_known(&self) -> bool {
        self.was_said.load(Ordering::Relaxed) || self.was_seen.load(Ordering::Relaxed)
    }

    /// Returns whether somebody has ended the session. Looks into the session's folder, whose file system may not answer.
    pub fn look(&self) -> bool {
        self.was_seen.store(self.location.is_ended(), Ordering::Relaxed);
        self.is_known()
    }

    /// Looks again and again, away from the runtime threads. Runs until it is dropped.
    pub(crate) async fn look_always(self) {
        loop {
            sleep(FOLDER_CHECK_INTERVAL).await;
            let ended = self.clone();
            // A panic there would mean that nothing was found.
            let _ = spawn_blocking(move || ended.look()).await;
        }
    }
}
