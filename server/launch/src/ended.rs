//! Whether somebody has ended a session, for example with `dayfly down`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dayfly_client::locate::SessionFolder;
use dayfly_meta::limits::FOLDER_CHECK_INTERVAL;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// Whether somebody has ended a session. Servers say so, and the session's folder does, because servers that stand still or cannot be
/// reached say nothing.
#[derive(Clone)]
pub struct Ended {
    is_known: Arc<AtomicBool>,
    location: SessionFolder,
}

impl Ended {
    pub(crate) fn new(location: SessionFolder) -> Self {
        Self { is_known: Arc::default(), location }
    }

    /// Takes note of what a server has said.
    pub(crate) fn set(&self) {
        self.is_known.store(true, Ordering::Relaxed);
    }

    /// Returns whether a server has said so, or the folder did when somebody looked there.
    pub(crate) fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Relaxed)
    }

    /// Returns whether somebody has ended the session. Looks into the session's folder, whose file system may not answer.
    pub fn look(&self) -> bool {
        if !self.is_known() && self.location.is_ended() {
            self.set();
        }
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
