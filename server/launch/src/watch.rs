//! Ending a session whose folder is removed: nobody would find it any more, and its servers would hold their space for ever.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dayfly_client::locate::Watch;
use dayfly_meta::limits::{FOLDER_CHECK_INTERVAL, FOLDER_TOUCH_INTERVAL};
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Waits until a watched name is gone, and returns it. Keeps what is watched looking young meanwhile.
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
        // The folder may be on a file system that does not answer: not on a thread that moves messages.
        let looking = tokio::task::spawn_blocking(move || {
            if is_due {
                watch.touch();
            }
            watch.gone().map(Path::to_owned)
        });
        if let Ok(Some(path)) = looking.await {
            return path;
        }
    }
}

/// Says that a session ends since a path is gone, and the way out.
pub(crate) fn gone_message(path: &Path) -> String {
    format!(
        "the session ends: its '{}' was removed or replaced, and without that no process finds the session. If something cleans that \
         folder, move the session's by DAYFLY_RUNTIME_DIR or --data-dir",
        path.display()
    )
}
