//! Bounds the load: all test processes of this user together run at most six servers per core.
//!
//! A session takes a permit for each of its servers before it starts, and returns them when it has ended. Permits are locked files, so
//! a process that is killed returns its permits, too. A session that is larger than the bound takes all permits.
//!
//! Nobody waits forever:
//! - Only one session at a time collects permits. So no two sessions have half of what they need and wait for each other, and small
//!   sessions do not overtake a large one that waits.
//! - A thread that holds permits starts its further sessions at once, without permits: it might wait for its own.
//! - After [`WAIT_MAX`] a session starts without permits, and says so. A test that starts sessions in several threads may come to that.
//!
//! The bound holds for sessions that [`super::Ground`] and [`super::hosts::Hosts`] start, and those of `chaos`. Sessions of tests that
//! run the program's `up` or `run` in their own way are not counted.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use nix::unistd::geteuid;

const SERVERS_PER_CORE: usize = 6;
/// How long a session waits for permits.
const WAIT_MAX: Duration = Duration::from_secs(180);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// The threads that hold permits, once for each session.
static HOLDERS: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());

fn holders() -> MutexGuard<'static, Vec<ThreadId>> {
    HOLDERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The permits of one session. Other sessions can have them when this value is dropped.
pub(crate) struct Permits {
    /// Locked files. Servers do not inherit them, because Rust's library opens all files with `O_CLOEXEC`.
    files: Vec<File>,
    holder: ThreadId,
}

impl Drop for Permits {
    fn drop(&mut self) {
        // A process that another thread is just starting may have the descriptors for another moment. It must not keep the locks.
        self.files.iter().for_each(|file| drop(file.unlock()));
        let mut holders = holders();
        if let Some(at) = holders.iter().position(|holder| *holder == self.holder) {
            holders.swap_remove(at);
        }
    }
}

/// Waits for the permits of a session with so many servers.
pub(crate) fn take(servers: usize) -> Permits {
    let holder = thread::current().id();
    let is_first = !holders().contains(&holder);
    let files = if is_first { wait_for(servers) } else { Vec::new() };
    holders().push(holder);
    Permits { files, holder }
}

/// Returns how many servers a command starts on this machine, which is 0 unless it is `up` or `run`.
pub(crate) fn servers_of(arguments: &[&str]) -> usize {
    if !matches!(arguments.first(), Some(&("up" | "run"))) {
        return 0;
    }
    let options = arguments.split(|&argument| argument == "--").next().unwrap_or_default();
    let value = |name: &str| options.iter().position(|&option| option == name).and_then(|at| options.get(at + 1));
    let hosts = value("--hosts").map(|hosts| hosts.split(',').count());
    value("--local").and_then(|count| count.parse().ok()).or(hosts).unwrap_or(1)
}

fn wait_for(servers: usize) -> Vec<File> {
    let total = SERVERS_PER_CORE * thread::available_parallelism().map_or(1, usize::from);
    match folder().and_then(|folder| collect(&folder, total, servers, WAIT_MAX)) {
        Ok(Some(files)) => files,
        Ok(None) => {
            eprintln!("{servers} servers start without permits, which did not become free within {WAIT_MAX:?}");
            Vec::new()
        }
        Err(error) => {
            eprintln!("{servers} servers start without permits, because the files of the permits cannot be used: {error}");
            Vec::new()
        }
    }
}

/// Returns the folder of the permits. It is the same for all test processes of the user, so it does not depend on `TMPDIR`, which
/// `.ci/run` sets to a folder of its own.
fn folder() -> io::Result<PathBuf> {
    let folder = PathBuf::from(format!("/tmp/dayfly-test-permits-{}", geteuid()));
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let metadata = fs::symlink_metadata(&folder)?;
    let is_ours = metadata.is_dir() && metadata.uid() == geteuid().as_raw();
    if is_ours { Ok(folder) } else { Err(io::Error::other(format!("'{}' is not a folder of this user", folder.display()))) }
}

/// Waits until `wanted` of `total` permits are free, or all of them if there are fewer, and locks them. Returns `None` if that took
/// longer than `limit`; then it has locked none of them.
///
/// # Errors
///
/// If the files of the permits cannot be opened or locked.
pub(crate) fn collect(folder: &Path, total: usize, wanted: usize, limit: Duration) -> io::Result<Option<Vec<File>>> {
    let open = |name: String| File::options().create(true).truncate(false).write(true).open(folder.join(name));
    let turn = open("turn".to_owned())?;
    let mut free = (0..total).map(|number| open(number.to_string())).collect::<io::Result<Vec<File>>>()?;
    let (wanted, deadline) = (wanted.min(total), Instant::now() + limit);
    let (mut has_turn, mut locked) = (false, Vec::new());
    loop {
        has_turn = has_turn || lock_if_free(&turn)?;
        let mut index = 0;
        while has_turn && locked.len() < wanted && index < free.len() {
            match lock_if_free(&free[index])? {
                true => locked.push(free.swap_remove(index)),
                false => index += 1,
            }
        }
        match () {
            () if has_turn && locked.len() == wanted => return Ok(Some(locked)),
            () if Instant::now() > deadline => return Ok(None),
            () => thread::sleep(LOOK_INTERVAL),
        }
    }
}

/// Locks a file, unless it is locked. Returns whether it did.
fn lock_if_free(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}
