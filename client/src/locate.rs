//! Finding sessions: each has a folder `${DAYFLY_RUNTIME_DIR:-/tmp}/dayfly-<uid>/<id>/`, mode 0700, in which every server
//! of this machine has its socket and holds a lock for as long as it lives. `watch` looks whether these are still there.

mod watch;

use std::env;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
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
pub use watch::Watch;

/// Names the session that a process belongs to.
pub const SESSION_VARIABLE: &str = "DAYFLY_SESSION";
/// Names the node that a process belongs to, where a machine has several.
pub const NODE_VARIABLE: &str = "DAYFLY_NODE";
/// The path below which programs see the namespace, so that a process which never goes there need not ask.
pub const PREFIX_VARIABLE: &str = "DAYFLY_PREFIX";
/// The working directory, where that is in the namespace: one program tells the next.
pub const CWD_VARIABLE: &str = "DAYFLY_CWD";
/// Moves the folder of all sessions.
pub const RUNTIME_DIR_VARIABLE: &str = "DAYFLY_RUNTIME_DIR";
/// Tries at a lock, and the time between them.
const LOCK_ATTEMPTS: usize = 50;
const LOCK_INTERVAL: Duration = Duration::from_millis(2);
/// Tries at making a session's folder while others end.
const CREATE_ATTEMPTS_MAX: usize = 10;
/// Held by who keeps the session, for as long as that lives, and has its process id; and for a moment by who makes or removes the folder.
const KEEPER_LOCK: &str = "supervisor.lock";
/// The longest path of a Unix socket, without its end.
const SOCKET_PATH_LEN_MAX: usize = 107;
/// The manager's name of the job that the session is part of.
const JOB: &str = "job";

/// A session's folder on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// The session.
    pub session: SessionId,
    /// Its folder.
    pub folder: PathBuf,
}

/// The folder in which each user has one.
pub fn runtime_base() -> PathBuf {
    let base = env::var_os(RUNTIME_DIR_VARIABLE).filter(|base| !base.is_empty()).map_or_else(|| "/tmp".into(), PathBuf::from);
    // Servers work in another folder than whoever starts them.
    std::path::absolute(&base).unwrap_or(base)
}

/// The folder of all sessions of this user, below one for all users.
pub fn runtime_dir_in(base: &Path) -> PathBuf {
    base.join(format!("dayfly-{}", geteuid()))
}

/// The folder of all sessions of this user.
pub fn runtime_dir() -> PathBuf {
    runtime_dir_in(&runtime_base())
}

/// Makes the folder of a new session, with the supervisor's lock.
pub fn create(all: &Path, session: SessionId, job: Option<&str>) -> Result<(Location, Flock<File>), ClientError> {
    let made = prepare(all, session, |folder| {
        create_private(folder)?;
        let lock = lock_patiently(&folder.join(KEEPER_LOCK))?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        fs::write(folder.join(KEEPER_LOCK), std::process::id().to_string())?;
        if let Some(job) = job {
            fs::write(folder.join(JOB), job)?;
        }
        Ok(lock)
    });
    if let Err(ClientError::Folder { folder, error }) = &made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        // What was made before it failed is of no use to anyone; another session in the folder of all keeps that.
        let _ = fs::remove_dir_all(folder);
        let _ = fs::remove_dir(all);
    }
    made
}

/// Makes the folder of a session, or comes into it, with a lock that keeps it until a node's lock does. `is_reserved`: its supervisor is known to
/// have made it.
pub fn enter(
    all: &Path,
    session: SessionId,
    job: Option<&str>,
    is_reserved: bool,
) -> Result<(Location, Flock<File>), ClientError> {
    prepare(all, session, |folder| {
        make_private(folder)?;
        // Who removes a folder holds this; who keeps one does so for long.
        let door = if is_reserved { None } else { lock_patiently(&folder.join(KEEPER_LOCK))? };
        let path = folder.join(format!("starting-{}.lock", std::process::id()));
        let lock = lock_patiently(&path)?.ok_or_else(|| io::Error::from(io::ErrorKind::AlreadyExists))?;
        if let Some(job) = job.filter(|_| door.is_some()) {
            fs::write(folder.join(JOB), job)?;
        }
        Ok(lock)
    })
}

/// Has `make` make a session's folder; once more where it, or the folder of all, was removed under it, as a leftover or empty.
fn prepare(
    all: &Path,
    session: SessionId,
    make: impl Fn(&Path) -> io::Result<Flock<File>>,
) -> Result<(Location, Flock<File>), ClientError> {
    let folder = all.join(session.to_string());
    // The longest that a socket's name in it may be.
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
        // What is locked must still be what has the name.
        let is_there = fs::read_dir(&folder)
            .map_err(failed)?
            .flatten()
            .any(|entry| lock.metadata().is_ok_and(|locked| entry.metadata().is_ok_and(|named| named.ino() == locked.ino())));
        if is_there { Ok(lock) } else { Err(failed(io::ErrorKind::NotFound.into())) }
    };
    for _ in 1..CREATE_ATTEMPTS_MAX {
        match attempt() {
            Err(ClientError::Folder { error, .. }) if error.kind() == io::ErrorKind::NotFound => {}
            made => return Ok((Location { session, folder }, made?)),
        }
    }
    let lock = attempt()?;
    Ok((Location { session, folder }, lock))
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

/// All folders of sessions, running or left over.
pub fn all(folder: &Path) -> Result<Vec<Location>, ClientError> {
    if fs::symlink_metadata(folder).is_err() {
        return Ok(Vec::new());
    }
    check_private(folder)?;
    let mut found = Vec::new();
    let failed = |error: io::Error| ClientError::Folder { folder: folder.to_owned(), error };
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if let Some(session) = name.to_str().and_then(|name| name.parse().ok()) {
            found.push(Location { session, folder: folder.join(name) });
        }
    }
    found.sort_by_key(|location| location.session);
    Ok(found)
}

/// The sessions of which a server lives here.
pub fn running() -> Result<Vec<Location>, ClientError> {
    Ok(all(&runtime_dir())?.into_iter().filter(|location| !location.live_nodes().is_empty()).collect())
}

/// The session that is meant: by `DAYFLY_SESSION`, else the job's (named as its manager does), else the only one that is not of
/// another job.
pub fn find(job: Option<&str>) -> Result<Location, ClientError> {
    let mut running = running()?;
    let names = |running: &[Location]| running.iter().map(|location| location.session.to_string()).collect::<Vec<_>>();
    if let Some(name) = env::var_os(SESSION_VARIABLE).filter(|name| !name.is_empty()) {
        let name = name.to_string_lossy().into_owned();
        let found = running.iter().position(|location| location.session.to_string() == name);
        return match found {
            Some(found) => Ok(running.swap_remove(found)),
            None => Err(ClientError::Unknown { name, running: names(&running) }),
        };
    }
    if job.is_some() {
        let of_job = |location: &Location| location.job().as_deref() == job;
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

impl Location {
    /// The session of the environment, without looking whether it lives: for processes that were started as part of one.
    pub fn of_environment() -> Result<Self, ClientError> {
        let name = env::var(SESSION_VARIABLE).unwrap_or_default();
        let unknown = |name: &str| ClientError::Unknown { name: name.to_owned(), running: Vec::new() };
        let session: SessionId = name.parse().map_err(|_| unknown(&name))?;
        // Its own folder is what must be private: in a container the one above may have been made for the occasion.
        let mine = runtime_dir();
        let folder = mine.join(&name);
        if folder.is_dir() {
            check_private(&folder)?;
            return Ok(Self { session, folder });
        }
        // In a user namespace we may go by another number than the one that is in the folder's name.
        let others = mine.parent().and_then(|base| fs::read_dir(base).ok()).into_iter().flatten().flatten();
        let found = others
            .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"dayfly-"))
            .map(|entry| entry.path().join(&name))
            .find(|folder| check_private(folder).is_ok());
        match found {
            Some(folder) => Ok(Self { session, folder }),
            None => Err(unknown(&name)),
        }
    }

    /// The node of the environment, without looking whether it lives; else the lowest that does.
    pub fn node_of_environment(&self) -> Result<NodeId, ClientError> {
        let wanted = env::var(NODE_VARIABLE).ok().and_then(|wanted| wanted.parse().ok()).map(NodeId);
        wanted.map_or_else(|| self.my_node(), Ok)
    }

    /// Where a node's server listens.
    pub fn socket(&self, node: NodeId) -> PathBuf {
        self.folder.join(format!("node-{node}.sock"))
    }

    /// Takes a node's lock for its server: holds its process id, and is free when that has ended, however it did.
    pub fn lock_node(&self, node: NodeId) -> io::Result<Option<Flock<File>>> {
        let Some(lock) = lock_patiently(&self.lock_path(node))? else { return Ok(None) };
        fs::write(self.lock_path(node), std::process::id().to_string())?;
        Ok(Some(lock))
    }

    /// What a node's server has to find here as long as it lives: the folder, its lock and its socket.
    pub fn watch_node(&self, node: NodeId, lock: &File) -> io::Result<Watch> {
        let mut watch = Watch::new(&self.folder)?;
        watch.add(self.lock_path(node), &lock.metadata()?);
        watch.add(self.socket(node), &fs::symlink_metadata(self.socket(node))?);
        Ok(watch)
    }

    /// The same of who keeps the session.
    pub fn watch_supervisor(&self, lock: &File) -> io::Result<Watch> {
        let mut watch = Watch::new(&self.folder)?;
        watch.add(self.folder.join(KEEPER_LOCK), &lock.metadata()?);
        Ok(watch)
    }

    fn lock_path(&self, node: NodeId) -> PathBuf {
        self.folder.join(format!("node-{node}.lock"))
    }

    /// The nodes whose servers live on this machine, lowest first.
    pub fn live_nodes(&self) -> Vec<NodeId> {
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let number = |name: std::ffi::OsString| name.to_str()?.strip_prefix("node-")?.strip_suffix(".lock")?.parse().ok();
        let mut nodes: Vec<NodeId> =
            names.filter_map(number).map(NodeId).filter(|&node| is_locked(&self.lock_path(node))).collect();
        nodes.sort_unstable();
        nodes
    }

    /// The process of a node's server, if it lives.
    pub fn pid(&self, node: NodeId) -> Option<i32> {
        let path = self.lock_path(node);
        is_locked(&path).then(|| fs::read_to_string(&path).ok()?.trim().parse().ok()).flatten()
    }

    /// The process that keeps the session, if it is on this machine and lives.
    pub fn supervisor(&self) -> Option<i32> {
        let path = self.folder.join(KEEPER_LOCK);
        is_locked(&path).then(|| fs::read_to_string(&path).ok()?.trim().parse().ok()).flatten()
    }

    /// The manager's name of the job that the session is part of.
    pub fn job(&self) -> Option<String> {
        fs::read_to_string(self.folder.join(JOB)).ok()
    }

    /// Makes it a session of no job.
    pub fn forget_job(&self) -> io::Result<()> {
        match fs::remove_file(self.folder.join(JOB)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The node that this process belongs to: by `DAYFLY_NODE`, else the lowest here.
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

    /// Has a folder that is left over removed, in which no server lives or starts and which nobody keeps; says whether it was one.
    pub fn remove_if_dead(&self, remove: impl FnOnce() -> io::Result<()>) -> io::Result<bool> {
        let _door = match lock_file(&self.folder.join(KEEPER_LOCK)) {
            Ok(Some(door)) => door,
            Ok(None) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(error) => return Err(error),
        };
        self.remove_if_last(remove)
    }

    /// The same by who has the supervisor's lock.
    pub fn remove_if_last(&self, remove: impl FnOnce() -> io::Result<()>) -> io::Result<bool> {
        let others = fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_lock = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "lock") && !path.ends_with(KEEPER_LOCK);
        if others.filter(is_lock).any(|path| is_locked(&path)) {
            return Ok(false);
        }
        remove().map(|()| true)
    }
}

/// As [`lock_file`], but not put off by one who only looks: a look takes the lock for a moment.
fn lock_patiently(path: &Path) -> io::Result<Option<Flock<File>>> {
    for _ in 0..LOCK_ATTEMPTS {
        if let Some(lock) = lock_file(path)? {
            return Ok(Some(lock));
        }
        std::thread::sleep(LOCK_INTERVAL);
    }
    Ok(None)
}

/// Locks a file, made if need be; `None` where another process has.
fn lock_file(path: &Path) -> io::Result<Option<Flock<File>>> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(error.into()),
    }
}

fn is_locked(path: &Path) -> bool {
    // Shared, so that two who look do not take each other for the owner.
    let Ok(file) = File::open(path) else { return false };
    Flock::lock(file, FlockArg::LockSharedNonblock).is_err()
}
