//! Watches the folder of a running session, and ends the session when it disappears.
//!
//! Without its folder no process can find the session, and its servers would hold their space
//! forever. While the folder is there, the watch also renews the folder's times, so that cleaners
//! that remove old files leave the folder alone.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dayfly_client::locate::Watch;
use dayfly_meta::limits::{FOLDER_CHECK_INTERVAL, FOLDER_TOUCH_INTERVAL};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Waits until a watched file or folder is gone, and returns its path. Meanwhile, renews the times
/// of everything that is watched.
pub(crate) async fn until_gone(watch: Watch) -> PathBuf {
    let watch = Arc::new(watch);
    let mut ticks = interval(FOLDER_CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut touched = Instant::now();
    loop {
        ticks.tick().await;
        let is_due = touched.elapsed() >= FOLDER_TOUCH_INTERVAL;
        if is_due {
            touched = Instant::now();
        }
        let watch = watch.clone();
        // The folder's file system may not answer, so the check must not run on a runtime thread.
        let check = tokio::task::spawn_blocking(move || {
            if is_due {
                watch.touch();
            }
            watch.gone().map(Path::to_owned)
        });
        if let Ok(Some(path)) = check.await {
            return path;
        }
    }
}

/// Explains why a session ends after `path` is gone, and what to do about it.
pub(crate) fn gone_message(path: &Path) -> String {
    format!(
        "the session ends because '{}' was removed or replaced; without it no process can find the session. If a cleaner \
         removes old files there, move the session's folders with DAYFLY_RUNTIME_DIR or --data-dir",
        path.display()
    )
}
