//! Finds the sessions on this machine.
//!
//! Each session has a folder `${DAYFLY_RUNTIME_DIR:-/tmp}/dayfly-<uid>/<id>/` with mode 0700. Every
//! server on this machine has its socket there and holds a lock file there for as long as it lives.
//! The supervisor holds a lock file there, too. A lock that is held proves that its process lives, because the kernel
//! frees the lock however the process ends. [`Watch`] checks that these files still have their
//! names.

mod environment;
mod names;
mod watch;

use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::NODES_MAX;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;

use crate::ClientError;
pub use crate::privacy::{NotPrivate, check_private, check_stays};
pub use environment::Environment;
use names::names_in;
pub use watch::Watch;

/// Names the session that a process belongs to.
pub const SESSION_VARIABLE: &str = "DAYFLY_SESSION";
/// Names the node that a process belongs to, if a machine has several.
pub const NODE_VARIABLE: &str = "DAYFLY_NODE";
/// Holds the path below which programs see the namespace. A process that finds it here, and never
/// uses the namespace, need not ask the server.
pub const PREFIX_VARIABLE: &str = "DAYFLY_PREFIX";
/// Holds the working directory, if it is in the namespace, for the program that `exec` starts.
pub const CWD_VARIABLE: &str = "DAYFLY_CWD";
/// Names the folder to use instead of `/tmp` for the folders of sessions.
pub const RUNTIME_DIR_VARIABLE: &str = "DAYFLY_RUNTIME_DIR";
/// Number of times that a lock is tried, and the time between two attempts.
const LOCK_ATTEMPTS: usize = 50;
const LOCK_INTERVAL: Duration = Duration::from_millis(2);
/// Number of times that the creation of a session's folder is tried. Another process may remove the
/// folder before it is locked.
const CREATE_ATTEMPTS_MAX: usize = 10;
/// The supervisor holds this lock for as long as it lives, and the file contains its process id. A
/// process that creates or removes the folder holds the lock for a moment.
const SUPERVISOR_LOCK: &str = "supervisor.lock";
/// Length of the longest path of a Unix socket, without the final NUL.
const SOCKET_PATH_LEN_MAX: usize = 107;
/// The file with the workload manager's name for the job that the session belongs to.
const JOB: &str = "job";
/// The name of the file that a process locks while it ends the session is this, followed by the process id.
const ENDING: &str = "ending-";

/// A session's folder on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionFolder {
    /// The session's id.
    pub session: SessionId,
    /// The folder's path.
    pub folder: PathBuf,
}

/// Says, for as long as it lives, that this process is ending a session.
pub struct Ending {
    lock: Flock<File>,
}

impl Ending {
    /// Says forever that the session's servers have ended.
    ///
    /// # Errors
    ///
    /// If this cannot be written.
    pub fn finish(&mut self) -> io::Result<()> {
        self.lock.write_all(b"done")
    }
}

/// Returns the folder that contains one folder for each user.
pub fn runtime_base() -> PathBuf {
    runtime_base_in(env::var_os(RUNTIME_DIR_VARIABLE))
}

/// Returns the folder that contains one folder for each user. `named` is the value of `DAYFLY_RUNTIME_DIR`.
fn runtime_base_in(named: Option<OsString>) -> PathBuf {
    let base = named.filter(|base| !base.is_empty()).map_or_else(|| "/tmp".into(), PathBuf::from);
    // Servers have another working directory than the process that starts them.
    std::path::absolute(&base).unwrap_or(base)
}

/// Returns the folder of all sessions of this user, below the given folder of all users.
pub fn runtime_dir_in(base: &Path) -> PathBuf {
    base.join(format!("dayfly-{}", geteuid()))
}

/// Returns the folder of all sessions of this user.
pub fn runtime_dir() -> PathBuf {
    runtime_dir_in(&runtime_base())
}

/// Creates the folder of a new session and takes the supervisor's lock.
///
/// # Errors
///
/// If the folder cannot be created privately.
pub fn create(all: &Path, session: SessionId, job: Option<&str>) -> Result<(SessionFolder, Flock<File>), ClientError> {
    let made = prepare(all, session, |folder| {
        create_private(folder)?;
        let lock = lock_patiently(&folder.join(SUPERVISOR_LOCK))?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        fs::write(folder.join(SUPERVISOR_LOCK), std::process::id().to_string())?;
        if let Some(job) = job {
            write_private(&folder.join(JOB), job.as_bytes())?;
        }
        Ok(lock)
    });
    if let Err(ClientError::Folder { folder, error }) = &made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        // The files created before the failure are of no use. The folder of all sessions stays if
        // another session is in it.
        let _ = fs::remove_dir_all(folder);
        let _ = fs::remove_dir(all);
    }
    made
}

/// Creates the folder of a session if it does not exist, and takes a lock that protects the folder
/// from removal until the node has its own lock. `is_reserved` means that the supervisor is known to
/// have created the folder.
///
/// # Errors
///
/// If the folder cannot be created privately or locked.
pub fn enter(
    all: &Path,
    session: SessionId,
    job: Option<&str>,
    is_reserved: bool,
) -> Result<(SessionFolder, Flock<File>), ClientError> {
    prepare(all, session, |folder| {
        make_private(folder)?;
        // A process that removes the folder holds the supervisor's lock for a moment. A supervisor
        // holds it for its whole life.
        let supervisor_lock = if is_reserved { None } else { lock_patiently(&folder.join(SUPERVISOR_LOCK))? };
        let path = folder.join(format!("starting-{}.lock", std::process::id()));
        let lock = lock_patiently(&path)?.ok_or_else(|| io::Error::from(io::ErrorKind::AlreadyExists))?;
        if let Some(job) = job.filter(|_| supervisor_lock.is_some()) {
            write_private(&folder.join(JOB), job.as_bytes())?;
        }
        Ok(lock)
    })
}

/// Runs `make` to create a session's folder. Tries again if that folder, or the folder of all
/// sessions, was removed meanwhile as a leftover or because it was empty.
fn prepare(
    all: &Path,
    session: SessionId,
    make: impl Fn(&Path) -> io::Result<Flock<File>>,
) -> Result<(SessionFolder, Flock<File>), ClientError> {
    let folder = all.join(session.to_string());
    // The longest name that a socket in the folder may have.
    let longest = folder.join(format!("node-{}.sock", NODES_MAX - 1));
    if longest.as_os_str().as_bytes().len() > SOCKET_PATH_LEN_MAX {
        return Err(ClientError::LongFolder { folder, len: longest.as_os_str().as_bytes().len() });
    }
    check_stays(all)?;
    let failed = |error: io::Error| ClientError::Folder { folder: folder.clone(), error };
    let attempt = || -> Result<Flock<File>, ClientError> {
        make_private(all).map_err(failed)?;
        check_private(all)?;
        let lock = make(&folder).map_err(failed)?;
        // The locked file must still have a name in the folder.
        let is_there = fs::read_dir(&folder)
            .map_err(failed)?
            .flatten()
            .any(|entry| lock.metadata().is_ok_and(|locked| entry.metadata().is_ok_and(|named| named.ino() == locked.ino())));
        if is_there { Ok(lock) } else { Err(failed(io::ErrorKind::NotFound.into())) }
    };
    for _ in 1..CREATE_ATTEMPTS_MAX {
        match attempt() {
            Err(ClientError::Folder { error, .. }) if error.kind() == io::ErrorKind::NotFound => {}
            made => return Ok((SessionFolder { session, folder }, made?)),
        }
    }
    let lock = attempt()?;
    Ok((SessionFolder { session, folder }, lock))
}

fn make_private(folder: &Path) -> io::Result<()> {
    match create_private(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn create_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(folder)
}

/// Writes a file in a session's folder. Only this user can read the file.
///
/// # Errors
///
/// If the file cannot be created or written.
pub fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.write_all(content)
}

/// Returns the folders of all sessions, whether the sessions are running or have left their folders behind.
///
/// # Errors
///
/// If the folder is not private or cannot be read.
pub fn all(folder: &Path) -> Result<Vec<SessionFolder>, ClientError> {
    if fs::symlink_metadata(folder).is_err() {
        return Ok(Vec::new());
    }
    check_private(folder)?;
    let mut found = Vec::new();
    let failed = |error: io::Error| ClientError::Folder { folder: folder.to_owned(), error };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if let Some(session) = name.to_str().and_then(|name| name.parse().ok()) {
            found.push(SessionFolder { session, folder: folder.join(name) });
        }
    }
    found.sort_by_key(|location| location.session);
    Ok(found)
}

/// Returns the sessions that have a live server on this machine.
///
/// # Errors
///
/// Same as for [`all`].
pub fn running() -> Result<Vec<SessionFolder>, ClientError> {
    let mut running = Vec::new();
    for location in all(&runtime_dir())? {
        if location.is_running()? {
            running.push(location);
        }
    }
    Ok(running)
}

/// Returns the session to use: the one that `DAYFLY_SESSION` names; else the session of `job`, which
/// is the workload manager's name for this job; else the only session that belongs to no job.
///
/// # Errors
///
/// If no session is running, the named one is not running, or several are possible.
pub fn find(job: Option<&str>) -> Result<SessionFolder, ClientError> {
    let names = |running: &[SessionFolder]| running.iter().map(|location| location.session.to_string()).collect::<Vec<_>>();
    if let Some(name) = env::var_os(SESSION_VARIABLE).filter(|name| !name.is_empty()) {
        let name = name.to_string_lossy().into_owned();
        let mut all = all(&runtime_dir())?;
        if let Some(found) = all.iter().position(|location| location.session.to_string() == name)
            && all[found].is_running()?
        {
            return Ok(all.swap_remove(found));
        }
        if let Some(owner) = foreign_owner(&name) {
            return Err(ClientError::Foreign { name, owner });
        }
        all.retain(|location| location.is_running().unwrap_or(false));
        return Err(ClientError::Unknown { name, running: names(&all) });
    }
    let mut running = running()?;
    if job.is_some() {
        let of_job = |location: &SessionFolder| location.job().as_deref() == job;
        if running.iter().any(of_job) {
            running.retain(of_job);
        } else {
            running.retain(|location| location.job().is_none());
        }
    }
    match running.len() {
        0 => Err(ClientError::NoSession),
        1 => Ok(running.remove(0)),
        _ => Err(ClientError::Ambiguous(names(&running))),
    }
}

/// Returns the user who has a session with this id, if that is another user. Looks only into folders
/// that this process may search; root may search them all.
fn foreign_owner(name: &str) -> Option<u32> {
    name.parse::<SessionId>().ok()?;
    let users = fs::read_dir(runtime_base()).into_iter().flatten().flatten();
    let users = users.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"dayfly-"));
    let folder = users.map(|entry| entry.path().join(name)).find_map(|folder| fs::symlink_metadata(folder).ok())?;
    (folder.uid() != geteuid().as_raw()).then(|| folder.uid())
}

impl SessionFolder {
    /// Returns the path of the socket on which a node's server listens.
    pub fn socket(&self, node: NodeId) -> PathBuf {
        self.folder.join(format!("node-{node}.sock"))
    }

    /// Takes a node's lock for its server and writes the server's process id into it. The lock
    /// becomes free when that process ends, however it ends. `None` if another process holds the lock.
    ///
    /// # Errors
    ///
    /// If the lock file cannot be created or written.
    pub fn lock_node(&self, node: NodeId) -> io::Result<Option<Flock<File>>> {
        let Some(lock) = lock_patiently(&self.lock_path(node))? else { return Ok(None) };
        fs::write(self.lock_path(node), std::process::id().to_string())?;
        Ok(Some(lock))
    }

    /// Watches the files that a node's server needs for as long as it lives: the session's folder,
    /// and the server's lock and socket.
    ///
    /// # Errors
    ///
    /// If one of them is gone already.
    pub fn watch_node(&self, node: NodeId, lock: &File) -> io::Result<Watch> {
        let mut watch = Watch::new(&self.folder)?;
        watch.add(self.lock_path(node), &lock.metadata()?);
        watch.add(self.socket(node), &fs::symlink_metadata(self.socket(node))?);
        Ok(watch)
    }

    /// Watches the files that the supervisor needs for as long as it lives: the session's folder and
    /// the supervisor's lock.
    ///
    /// # Errors
    ///
    /// If one of them is gone already.
    pub fn watch_supervisor(&self, lock: &File) -> io::Result<Watch> {
        let mut watch = Watch::new(&self.folder)?;
        watch.add(self.folder.join(SUPERVISOR_LOCK), &lock.metadata()?);
        Ok(watch)
    }

    fn lock_path(&self, node: NodeId) -> PathBuf {
        self.folder.join(format!("node-{node}.lock"))
    }

    /// Returns the nodes whose servers live on this machine, lowest first.
    pub fn live_nodes(&self) -> Vec<NodeId> {
        let names = names_in(&self.folder).unwrap_or_default().into_iter();
        let number = |name: OsString| name.to_str()?.strip_prefix("node-")?.strip_suffix(".lock")?.parse().ok();
        let mut nodes: Vec<NodeId> =
            names.filter_map(number).map(NodeId).filter(|&node| is_locked(&self.lock_path(node))).collect();
        nodes.sort_unstable();
        nodes
    }

    /// Returns whether a server of the session lives on this machine.
    ///
    /// # Errors
    ///
    /// If this process may not search the folder, and so cannot tell.
    pub fn is_running(&self) -> Result<bool, ClientError> {
        match self.entries() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(ClientError::Unsearchable { folder: self.folder.clone(), error }),
            Ok(_) => Ok(!self.live_nodes().is_empty()),
        }
    }

    /// Lists the folder. Fails if this process lacks the permission to search the folder, because the
    /// path leads through it. Without that permission, the folder's files could not be opened.
    fn entries(&self) -> io::Result<fs::ReadDir> {
        fs::read_dir(self.folder.join("."))
    }

    /// Returns the process id of a node's server, if it lives.
    pub fn pid(&self, node: NodeId) -> Option<i32> {
        process_of_lock(&self.lock_path(node))
    }

    /// Returns the process id of the session's supervisor, if it lives on this machine.
    pub fn supervisor(&self) -> Option<i32> {
        process_of_lock(&self.folder.join(SUPERVISOR_LOCK))
    }

    /// Returns the workload manager's name for the job that the session belongs to.
    pub fn job(&self) -> Option<String> {
        fs::read_to_string(self.folder.join(JOB)).ok()
    }

    /// Detaches the session from its job.
    ///
    /// # Errors
    ///
    /// If the file that names the job cannot be removed.
    pub fn forget_job(&self) -> io::Result<()> {
        match fs::remove_file(self.folder.join(JOB)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Tells the session's supervisor that this process is ending the session, so that servers which are killed now are no loss. This
    /// holds until the result is dropped, or forever after [`Ending::finish`].
    ///
    /// # Errors
    ///
    /// If the file that says so cannot be written.
    pub fn begin_ending(&self) -> io::Result<Ending> {
        let path = self.folder.join(format!("{ENDING}{}", std::process::id()));
        let lock = lock_patiently(&path)?.ok_or_else(|| io::Error::from(io::ErrorKind::WouldBlock))?;
        Ok(Ending { lock })
    }

    /// Returns whether a process has ended the session, or is ending it. One that was interrupted is not.
    pub fn is_ended(&self) -> bool {
        let names = names_in(&self.folder).unwrap_or_default().into_iter();
        let mut marks = names.filter(|name| name.as_bytes().starts_with(ENDING.as_bytes())).map(|name| self.folder.join(name));
        marks.any(|mark| is_locked(&mark) || fs::metadata(&mark).is_ok_and(|mark| mark.len() > 0))
    }

    /// Returns the node that this process belongs to: the one that `DAYFLY_NODE` names, else the
    /// lowest on this machine.
    ///
    /// # Errors
    ///
    /// If no server lives here, or the named node is not among those that do.
    pub fn my_node(&self) -> Result<NodeId, ClientError> {
        let nodes = self.live_nodes();
        let lowest = *nodes.first().ok_or(ClientError::NoSession)?;
        let Some(wanted) = env::var(NODE_VARIABLE).ok().filter(|wanted| !wanted.is_empty()) else { return Ok(lowest) };
        let found = wanted.parse().ok().map(NodeId).filter(|node| nodes.contains(node));
        found.ok_or_else(|| ClientError::NoNode {
            session: self.session.to_string(),
            node: wanted,
            nodes: nodes.iter().map(NodeId::to_string).collect(),
        })
    }

    /// Calls `remove` if the folder is left over: if no supervisor lives, and no server lives or is
    /// starting. Returns whether the folder is gone.
    ///
    /// # Errors
    ///
    /// If the folder cannot be examined, and if `remove` fails.
    pub fn remove_if_dead(&self, remove: impl FnOnce() -> io::Result<()>) -> io::Result<bool> {
        let _supervisor_lock = match lock_file(&self.folder.join(SUPERVISOR_LOCK)) {
            Ok(Some(supervisor_lock)) => supervisor_lock,
            Ok(None) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(error) => return Err(error),
        };
        self.remove_if_last(remove)
    }

    /// Like [`Self::remove_if_dead`], for the holder of the supervisor's lock.
    ///
    /// # Errors
    ///
    /// If the folder cannot be searched, and if `remove` fails.
    pub fn remove_if_last(&self, remove: impl FnOnce() -> io::Result<()>) -> io::Result<bool> {
        let entries = match self.entries() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            entries => entries,
        };
        let others = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        let is_lock = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "lock") && !path.ends_with(SUPERVISOR_LOCK);
        if others.filter(is_lock).any(|path| is_locked(&path)) {
            return Ok(false);
        }
        remove().map(|()| true)
    }
}

/// Like [`lock_file`], but tries several times: a process that only checks the lock holds it for a
/// moment.
fn lock_patiently(path: &Path) -> io::Result<Option<Flock<File>>> {
    for _ in 0..LOCK_ATTEMPTS {
        if let Some(lock) = lock_file(path)? {
            return Ok(Some(lock));
        }
        std::thread::sleep(LOCK_INTERVAL);
    }
    Ok(None)
}

/// Locks a file, which is created if need be. `None` if another process holds the lock.
fn lock_file(path: &Path) -> io::Result<Option<Flock<File>>> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error.into()),
    }
}

/// Returns the process that holds a lock, as it has written into the lock's file.
pub(crate) fn process_of_lock(path: &Path) -> Option<i32> {
    is_locked(path).then(|| fs::read_to_string(path).ok()?.trim().parse().ok()).flatten()
}

fn is_locked(path: &Path) -> bool {
    // Uses a shared lock, so that two processes that check do not mistake each other for the owner.
    let Ok(file) = File::open(path) else { return false };
    Flock::lock(file, FlockArg::LockSharedNonblock).is_err()
}
