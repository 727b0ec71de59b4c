//! Removes the folders of sessions when they end, and the folders that killed sessions left behind.
//!
//! Several processes may clean up at once. Locks decide which sessions are dead, so a running
//! session is never touched, and a folder that another process removed first counts as removed.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use dayfly_client::locate::{self, SessionFolder};
use dayfly_meta::id::SessionId;

use crate::data_dir;
use crate::error::LaunchError;

/// How long the process of a server that has ended may take to exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How many times the removal of a folder is retried while others create files in it.
const REMOVE_ATTEMPTS_MAX: u32 = 10;
/// The file in a session's folder that holds the path of the key file, if there is one.
pub(crate) const KEY_FILE_NAME: &str = "key-file";

/// Removes what killed sessions left on this machine, and returns how many places were cleaned.
///
/// # Errors
/// Fails if the folder of sessions cannot be read or changed.
pub fn sweep(runtime_dir: &Path, data_dirs: &[PathBuf]) -> Result<usize, LaunchError> {
    let mut removed = 0;
    for location in locate::all(runtime_dir)? {
        removed += usize::from(remove_if_dead(&location)?);
    }
    let running: Vec<SessionId> = locate::all(runtime_dir)?.iter().map(|location| location.session).collect();
    removed += data_dir::remove_leftovers(data_dirs, &running);
    remove_if_empty(runtime_dir);
    Ok(removed)
}

/// Like [`sweep`], and waits a moment for sessions whose last processes are about to exit.
///
/// # Errors
/// Same as for [`sweep`].
pub fn sweep_patiently(runtime_dir: &Path, data_dirs: &[PathBuf]) -> Result<usize, LaunchError> {
    let mut removed = sweep(runtime_dir, data_dirs)?;
    let deadline = Instant::now() + EXIT_TIMEOUT;
    for location in locate::all(runtime_dir)? {
        if location.live_nodes().is_empty() {
            removed += usize::from(remove_until(&location, deadline)?);
        }
    }
    Ok(removed)
}

/// Removes an ended session's folders. Waits a moment for servers that are about to exit; they may
/// also remove the folders. Returns whether they are gone.
///
/// # Errors
/// Fails if a folder cannot be removed.
pub fn remove_soon(location: &SessionFolder) -> Result<bool, LaunchError> {
    remove_until(location, Instant::now() + EXIT_TIMEOUT)
}

/// Removes a session's folders unless it still has servers or a supervisor. Returns whether they
/// were removed.
pub(crate) fn remove_if_dead(location: &SessionFolder) -> Result<bool, LaunchError> {
    if location.is_running()? {
        return Ok(false);
    }
    location.remove_if_dead(|| remove_all(location)).map_err(cannot_remove(location))
}

/// Like [`remove_if_dead`], for the process that holds the supervisor's lock.
pub(crate) fn remove_if_last(location: &SessionFolder) -> Result<bool, LaunchError> {
    location.remove_if_last(|| remove_all(location)).map_err(cannot_remove(location))
}

fn cannot_remove(location: &SessionFolder) -> impl FnOnce(io::Error) -> LaunchError {
    LaunchError::io(format!("cannot remove '{}'", location.folder.display()))
}

/// Removes a session's folders in its data dirs, except those of live servers. Works even if the
/// session's own folder, which contains the list of these folders, is gone.
pub(crate) fn remove_data_folders(folders: &[PathBuf]) {
    data_dir::remove(folders);
}

/// Removes a dead session's folders, and retries until the deadline. Returns whether the session's
/// own folder is gone.
fn remove_until(location: &SessionFolder, deadline: Instant) -> Result<bool, LaunchError> {
    while location.folder.exists() && !remove_if_dead(location)? && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
    // If another process removed the session's folder, it may not have removed the parent yet.
    location.folder.parent().into_iter().for_each(remove_if_empty);
    Ok(!location.folder.exists())
}

fn remove_all(location: &SessionFolder) -> io::Result<()> {
    let list = fs::read(location.folder.join(data_dir::LIST)).unwrap_or_default();
    data_dir::remove(&data_dir::decode_list(&list));
    if let Ok(key_file) = fs::read(location.folder.join(KEY_FILE_NAME)) {
        // The file still exists only if the process that wrote it was killed.
        let _ = fs::remove_file(OsStr::from_bytes(&key_file));
    }
    let mut attempts_left = REMOVE_ATTEMPTS_MAX;
    let removed = loop {
        match fs::remove_dir_all(&location.folder) {
            // Another process that is also removing the folder has recreated its lock.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && attempts_left > 0 => attempts_left -= 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => break Ok(()),
            removed => break removed,
        }
    };
    location.folder.parent().into_iter().for_each(remove_if_empty);
    removed
}

fn remove_if_empty(folder: &Path) {
    // Fails if another session lives in the folder, as it should.
    let _ = fs::remove_dir(folder);
}
