//! Data dirs: which directories hold blocks, whether they are usable, and each node's folder in
//! them.
//!
//! Below a data dir lie `dayfly-<uid>/<session>/node-<n>`. These folders stay empty, because blocks
//! are in files without names; a server holds a lock on its folder, so that a cleanup can tell a
//! live node from a leftover.

use std::collections::HashSet;
use std::env;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dayfly_client::locate::{NotPrivate, check_private, check_stays};
use dayfly_meta::id::SessionId;
use dayfly_server::Growth;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::statfs::statfs;
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access, geteuid};

use crate::error::LaunchError;
use crate::units::{counted, show_bytes};

/// A smaller capacity is most likely a mistake, such as a missing unit, or a full drive.
const CAPACITY_TINY: u64 = 1 << 20;
/// The file in a session's folder that lists the session's folders in the data dirs.
pub(crate) const LIST: &str = "data-dirs";
/// The share of the free space that a node takes if `--capacity` is not given.
const SHARE_PERCENT: u64 = 90;
/// The share of the free space that all nodes of a machine may take, regardless of `--capacity`.
const SHARE_PERCENT_MAX: u64 = 98;

/// Network file systems, by the magic number of `statfs`.
const NETWORK: [(u32, &str); 9] = [
    (0x6969, "NFS"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x00c3_6400, "Ceph"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB"),
    (0x0102_1997, "9p"),
    (0x6b41_4653, "AFS"),
];
const TMPFS: u32 = 0x0102_1994;

/// Returns the given data dirs, or else the one that the environment names: `$SLURM_TMPDIR`,
/// `$TMPDIR`, or `/tmp`.
pub fn chosen_data_dirs(given: &[PathBuf]) -> Vec<PathBuf> {
    if !given.is_empty() {
        return given.to_vec();
    }
    let named = ["SLURM_TMPDIR", "TMPDIR"].into_iter().filter_map(env::var_os).find(|path| !path.is_empty());
    vec![named.map_or_else(|| "/tmp".into(), PathBuf::from)]
}

/// The kind of file system under a data dir.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystemKind {
    /// A file system of this machine, most likely on a drive.
    Local,
    /// A file system in memory.
    Tmpfs,
    /// A network file system, by name.
    Network(&'static str),
}

/// Returns the kind of file system that a directory is on, and its free bytes.
///
/// # Errors
/// Fails if the directory cannot be examined.
pub fn file_system(path: &Path) -> io::Result<(FileSystemKind, u64)> {
    let stat = statfs(path)?;
    let magic = stat.filesystem_type().0 as u32;
    let free = stat.blocks_available() * stat.block_size().unsigned_abs();
    let kind = match NETWORK.iter().find(|(network, _)| *network == magic) {
        Some((_, name)) => FileSystemKind::Network(name),
        None if magic == TMPFS => FileSystemKind::Tmpfs,
        None => FileSystemKind::Local,
    };
    Ok((kind, free))
}

/// Checks data dirs, and returns their absolute paths with warnings for the user.
pub(crate) fn check(data_dirs: &[PathBuf], allow_network: bool) -> Result<(Vec<PathBuf>, Vec<String>), LaunchError> {
    let (mut checked, mut warnings) = (Vec::new(), Vec::new());
    for given in data_dirs {
        let unusable = |source: io::Error| LaunchError::DataDir { path: given.clone(), source };
        let path = fs::canonicalize(given).map_err(unusable)?;
        if !path.is_dir() {
            return Err(unusable(io::ErrorKind::NotADirectory.into()));
        }
        check_folder(&path)?;
        warnings.extend(movable(&path));
        match file_system(&path).map_err(unusable)?.0 {
            FileSystemKind::Network(kind) if !allow_network => return Err(LaunchError::NetworkDataDir { path, kind }),
            FileSystemKind::Tmpfs => {
                warnings.push(format!("the data dir '{}' is a tmpfs, so all blocks will take memory", path.display()));
            }
            _ => {}
        }
        checked.push(path);
    }
    Ok((checked, warnings))
}

/// Checks that this user may create a folder in a data dir, and that nobody else can replace it.
fn check_folder(data_dir: &Path) -> Result<(), LaunchError> {
    let user = user_folder(data_dir);
    check_stays(&user).map_err(exposed)?;
    if fs::symlink_metadata(&user).is_ok() {
        return check_private(&user).map_err(exposed);
    }
    access(data_dir, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|error| {
        let owner = fs::metadata(data_dir).map_or_else(
            |_| String::new(),
            |found| format!(", which belongs to user {} and has mode {:04o}", found.uid(), found.mode() & 0o7777),
        );
        LaunchError::DataDirNotWritable { path: data_dir.to_owned(), owner, source: error.into() }
    })
}

fn exposed(source: NotPrivate) -> LaunchError {
    LaunchError::ExposedDataDir { source }
}

/// Returns a warning if others could replace a data dir.
///
/// This alone does not make the data dir unusable. Users who can write only to a directory that is
/// open to everyone, and who create their own folder in it, have no better place.
fn movable(data_dir: &Path) -> Option<String> {
    let exposed = data_dir.ancestors().find_map(|folder| check_stays(folder).err());
    exposed.map(|error| format!("the data dir '{}' may be moved by others: {error}", data_dir.display()))
}

/// Returns how many bytes each of this machine's `servers` may take, with a warning if the user
/// asked for more than is available.
pub(crate) fn capacity(wanted: Option<u64>, data_dirs: &[PathBuf], servers: u16) -> Result<(u64, Option<String>), LaunchError> {
    let free = free_bytes(data_dirs)? / 100;
    let share = |percent: u64| free * percent / u64::from(servers);
    let most = share(SHARE_PERCENT_MAX);
    let capacity = wanted.map_or(share(SHARE_PERCENT), |wanted| wanted.min(most));
    if capacity < CAPACITY_TINY {
        let warning = format!(
            "this server may use only {} in its data dirs, which have {} free, and no real dataset fits in that; use another --data-dir, \
             or a larger --capacity such as 10GiB",
            show_bytes(capacity),
            show_bytes(free * 100),
        );
        return Ok((capacity, Some(warning)));
    }
    let Some(wanted) = wanted.filter(|wanted| *wanted > most) else { return Ok((capacity, None)) };
    let for_servers = if servers > 1 { format!(" for {}", counted(servers.into(), "server")) } else { String::new() };
    let warning = format!(
        "--capacity {} is more than the data dirs have: {} free{for_servers}; this server takes at most {}",
        show_bytes(wanted),
        show_bytes(free * 100),
        show_bytes(most)
    );
    Ok((most, Some(warning)))
}

/// Returns what a server that replaces a lost one may take, now and when other programs make room. `replaced` is what the lost one was
/// given. Without it, the server takes an equal share with the other `servers` of this machine.
pub(crate) fn growth(wanted: Option<u64>, replaced: Option<u64>, servers: u16) -> Growth {
    let percent = if wanted.is_some() { SHARE_PERCENT_MAX } else { SHARE_PERCENT };
    let millionths = percent * 10_000;
    match replaced {
        Some(replaced) => Growth { millionths, most_bytes: replaced },
        None => Growth { millionths: millionths / u64::from(servers), most_bytes: wanted.unwrap_or(u64::MAX) },
    }
}

/// Returns how many bytes a server with this growth may take now.
pub(crate) fn capacity_now(growth: Growth, data_dirs: &[PathBuf]) -> Result<u64, LaunchError> {
    let share = u128::from(free_bytes(data_dirs)?) * u128::from(growth.millionths) / 1_000_000;
    Ok(growth.most_bytes.min(share as u64))
}

/// Returns the bytes that are currently free on the file systems of the data dirs.
fn free_bytes(data_dirs: &[PathBuf]) -> Result<u64, LaunchError> {
    let mut free = 0;
    let mut seen = HashSet::new();
    for path in data_dirs {
        // Two data dirs on one file system share its space.
        if !seen.insert(fs::metadata(path).map(|metadata| metadata.dev()).unwrap_or_default()) {
            continue;
        }
        let stat = statvfs(path).map_err(|error| LaunchError::DataDir { path: path.clone(), source: error.into() })?;
        free += stat.blocks_available() * stat.fragment_size();
    }
    Ok(free)
}

fn user_folder(data_dir: &Path) -> PathBuf {
    data_dir.join(format!("dayfly-{}", geteuid()))
}

/// Returns a session's folder in each data dir.
pub(crate) fn session_folders(data_dirs: &[PathBuf], session: SessionId) -> Vec<PathBuf> {
    data_dirs.iter().map(|data_dir| user_folder(data_dir).join(session.to_string())).collect()
}

/// Returns a node's folder in each data dir. Its server creates them.
pub(crate) fn node_folders(data_dirs: &[PathBuf], session: SessionId, node: u16) -> Vec<PathBuf> {
    session_folders(data_dirs, session).iter().map(|folder| folder.join(format!("node-{node}"))).collect()
}

/// Creates a node's folders and locks them. The locks show that the folders, which look empty, are
/// not leftovers.
pub(crate) fn create_and_lock(folders: &[PathBuf]) -> Result<Vec<Flock<File>>, LaunchError> {
    let create = |folder: &PathBuf| {
        let unusable = |source: io::Error| LaunchError::NodeFolder { path: folder.clone(), source };
        // The user's folder comes first. It is two levels above a node's folder. In a shared data
        // dir, anyone may have created it before.
        let user = folder.ancestors().nth(2).unwrap_or(folder);
        let attempt = || {
            DirBuilder::new().mode(0o700).recursive(true).create(user).map_err(unusable)?;
            check_private(user).map_err(exposed)?;
            let locked = || {
                DirBuilder::new().mode(0o700).recursive(true).create(folder)?;
                let lock = Flock::lock(File::open(folder)?, FlockArg::LockSharedNonblock)
                    .map_err(|(_, error)| io::Error::from(error))?;
                // A cleanup may have removed the folder before it was locked.
                fs::metadata(folder).map(|_| lock)
            };
            locked().map_err(unusable)
        };
        // When another session ends, it may remove the user's folder between two of these calls, so
        // one failure is retried.
        attempt().or_else(|_| attempt())
    };
    folders.iter().map(create).collect()
}

/// Encodes a session's folders in its data dirs, for the file [`LIST`].
pub(crate) fn encode_list(data_dirs: &[PathBuf], session: SessionId) -> Vec<u8> {
    let folders = session_folders(data_dirs, session).into_iter().map(|folder| folder.into_os_string().into_vec());
    folders.collect::<Vec<_>>().join(&0)
}

/// Decodes what [`encode_list`] returned.
pub(crate) fn decode_list(bytes: &[u8]) -> Vec<PathBuf> {
    let paths = bytes.split(|&byte| byte == 0).filter(|path| !path.is_empty());
    paths.map(|path| PathBuf::from(std::ffi::OsStr::from_bytes(path))).collect()
}

/// Opens a path only if it is a folder. Another user may have put a FIFO in its place, and opening
/// the FIFO could block forever.
fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    File::options().read(true).custom_flags(flags.bits()).open(path)
}

/// Removes a session's folders in its data dirs, except those of live servers. The folders hold no
/// named files.
pub(crate) fn remove(folders: &[PathBuf]) {
    // If the parent is not private, another user's folder may be in the place of the session's.
    let is_ours = |folder: &&PathBuf| folder.parent().is_some_and(|user| check_private(user).is_ok());
    for folder in folders.iter().filter(is_ours) {
        for node in fs::read_dir(folder).into_iter().flatten().flatten() {
            // A live server holds a lock on its folder. The server may belong to a session whose
            // runtime folder is not visible here.
            let lock = open_folder(&node.path()).map(|folder| Flock::lock(folder, FlockArg::LockExclusiveNonblock));
            if matches!(lock, Ok(Ok(_))) {
                let _ = fs::remove_dir(node.path());
            }
        }
        // These fail if something is left in the folder, or if it is gone already. Both are fine.
        let _ = fs::remove_dir(folder);
        if let Some(user) = folder.parent() {
            let _ = fs::remove_dir(user);
        }
    }
}

/// Removes the folders of sessions that are not running, even if their runtime folders are gone.
/// Returns how many were removed.
pub(crate) fn remove_leftovers(data_dirs: &[PathBuf], running: &[SessionId]) -> usize {
    let mut removed = 0;
    for data_dir in data_dirs.iter().filter(|data_dir| check_private(&user_folder(data_dir)).is_ok()) {
        for entry in fs::read_dir(user_folder(data_dir)).into_iter().flatten().flatten() {
            let session = entry.file_name().to_str().and_then(|name| name.parse::<SessionId>().ok());
            if session.is_some_and(|session| !running.contains(&session)) {
                remove(&[entry.path()]);
                removed += usize::from(!entry.path().exists());
            }
        }
    }
    removed
}
