//! Data dirs: which are taken, whether they serve, and each node's folder in them.

use std::collections::HashSet;
use std::env;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dayfly_client::locate::{NotPrivate, check_private, check_stays};
use dayfly_meta::id::SessionId;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::statfs::statfs;
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access, geteuid};

use crate::failure::{Failure, owner};
use crate::size;

/// The file in a session's folder that lists its folders in the data dirs.
pub(super) const LIST: &str = "data-dirs";
/// What a node takes of what is free when `--capacity` does not say.
const SHARE_PERCENT: u64 = 90;
/// What all nodes of a machine may take of it, whatever `--capacity` says.
const SHARE_PERCENT_MAX: u64 = 98;

/// File systems that reach over a network, by the magic of `statfs`.
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

/// The data dirs given, or the one that the environment names.
pub(crate) fn chosen(given: &[PathBuf]) -> Vec<PathBuf> {
    if !given.is_empty() {
        return given.to_vec();
    }
    let named = ["SLURM_TMPDIR", "TMPDIR"].into_iter().filter_map(env::var_os).find(|path| !path.is_empty());
    vec![named.map_or_else(|| "/tmp".into(), PathBuf::from)]
}

/// What file system a folder is on, in a word, and the bytes that are free there.
pub(crate) fn kind(path: &Path) -> io::Result<(String, u64)> {
    let stat = statfs(path)?;
    let magic = stat.filesystem_type().0 as u32;
    let free = stat.blocks_available() * stat.block_size().unsigned_abs();
    let kind = match NETWORK.iter().find(|(network, _)| *network == magic) {
        Some((_, name)) => format!("network ({name})"),
        None if magic == TMPFS => "tmpfs".to_owned(),
        None => "local".to_owned(),
    };
    Ok((kind, free))
}

/// Absolute paths of data dirs that serve, and what is to be said of them.
pub(super) fn check(data_dirs: &[PathBuf], allow_network: bool) -> Result<(Vec<PathBuf>, Vec<String>), Failure> {
    let (mut checked, mut warnings) = (Vec::new(), Vec::new());
    for path in data_dirs {
        let unusable = |error: io::Error| {
            Failure::new(format!(
                "cannot use the data dir '{}': {error}; make it on every node, or name another by --data-dir",
                path.display()
            ))
        };
        let path = fs::canonicalize(path).map_err(unusable)?;
        if !path.is_dir() {
            return Err(unusable(io::ErrorKind::NotADirectory.into()));
        }
        check_folder(&path)?;
        warnings.extend(movable(&path));
        let kind = statfs(&path).map_err(|error| unusable(error.into()))?.filesystem_type().0 as u32;
        if let Some((_, name)) = NETWORK.iter().find(|(magic, _)| *magic == kind).filter(|_| !allow_network) {
            return Err(Failure::new(format!(
                "the data dir '{}' is on {name}, a network file system; name a local drive by --data-dir, or give --allow-network-data-dir",
                path.display()
            )));
        }
        if kind == TMPFS {
            warnings.push(format!("the data dir '{}' is a tmpfs: all blocks will take memory", path.display()));
        }
        checked.push(path);
    }
    Ok((checked, warnings))
}

/// Whether this user may make a folder in a data dir, and whether that stays this user's.
fn check_folder(data_dir: &Path) -> Result<(), Failure> {
    let user = user_folder(data_dir);
    check_stays(&user).map_err(exposed)?;
    if fs::symlink_metadata(&user).is_ok() {
        return check_private(&user).map_err(exposed);
    }
    access(data_dir, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|error| {
        let whose = fs::metadata(data_dir).map_or_else(
            |_| String::new(),
            |found| format!(", which is of user {} and has mode {:04o}", found.uid(), found.mode() & 0o7777),
        );
        let path = data_dir.display();
        Failure::new(format!(
            "cannot make a folder in the data dir '{path}'{whose}: {}; name another by --data-dir",
            error.desc()
        ))
    })
}

/// What is wrong with a folder, and the way out.
fn exposed(error: NotPrivate) -> Failure {
    Failure::new(format!("{error}; else name another by --data-dir, of your own{}", owner(&error)))
}

/// A warning, if others may put another in the place of a data dir. That alone is no reason to refuse it: it is what those are left
/// with who make a folder of their own in one that all may write to.
fn movable(data_dir: &Path) -> Option<String> {
    let moved = data_dir.ancestors().find_map(|folder| check_stays(folder).err());
    moved.map(|error| format!("the data dir '{}' may be moved by others: {error}", data_dir.display()))
}

/// What each of `nodes` servers of this machine may take: what the user says, as far as it is there, or most of what is free now.
pub(super) fn capacity(wanted: Option<u64>, data_dirs: &[PathBuf], nodes: u16) -> Result<(u64, Option<String>), Failure> {
    let free = free(data_dirs)? / 100;
    let share = |percent: u64| free * percent / u64::from(nodes);
    let Some(wanted) = wanted else { return Ok((share(SHARE_PERCENT), None)) };
    let most = share(SHARE_PERCENT_MAX);
    if wanted <= most {
        return Ok((wanted, None));
    }
    let servers = if nodes > 1 { format!(" for {nodes} servers") } else { String::new() };
    let warning = format!(
        "--capacity {} is more than the data dirs have: {} free{servers}; this one takes at most {}",
        size::show(wanted),
        size::show(free * 100),
        size::show(most)
    );
    Ok((most, Some(warning)))
}

/// What is free now on the file systems of the data dirs.
fn free(data_dirs: &[PathBuf]) -> Result<u64, Failure> {
    let mut free = 0;
    let mut seen = HashSet::new();
    for path in data_dirs {
        // Two folders of one file system have its room once.
        if !seen.insert(fs::metadata(path).map(|metadata| metadata.dev()).unwrap_or_default()) {
            continue;
        }
        let stat =
            statvfs(path).map_err(|error| Failure::new(format!("cannot use the data dir '{}': {error}", path.display())))?;
        free += stat.blocks_available() * stat.fragment_size();
    }
    Ok(free)
}

fn user_folder(data_dir: &Path) -> PathBuf {
    data_dir.join(format!("dayfly-{}", geteuid()))
}

/// A session's folder in each data dir.
pub(super) fn for_session(data_dirs: &[PathBuf], session: SessionId) -> Vec<PathBuf> {
    data_dirs.iter().map(|data_dir| user_folder(data_dir).join(session.to_string())).collect()
}

/// A node's folder in each data dir, for its server to make.
pub(super) fn for_node(data_dirs: &[PathBuf], session: SessionId, node: u16) -> Vec<PathBuf> {
    for_session(data_dirs, session).iter().map(|folder| folder.join(format!("node-{node}"))).collect()
}

/// Makes a node's folders and locks them for as long as the result lives: they look empty, but are not left over.
pub(super) fn create_and_lock(folders: &[PathBuf]) -> Result<Vec<Flock<File>>, Failure> {
    let create = |folder: &PathBuf| {
        let unusable = |error: io::Error| {
            Failure::new(format!("cannot make '{}': {error}; name another data dir by --data-dir", folder.display()))
        };
        // The user's folder, two above a node's, first: in a common data dir anyone may have made it before.
        let user = folder.ancestors().nth(2).unwrap_or(folder);
        // The end of another session may remove the user's folder between two steps; then once more.
        let attempt = || {
            DirBuilder::new().mode(0o700).recursive(true).create(user).map_err(unusable)?;
            check_private(user).map_err(exposed)?;
            let locked = || {
                DirBuilder::new().mode(0o700).recursive(true).create(folder)?;
                let lock = Flock::lock(File::open(folder)?, FlockArg::LockSharedNonblock)
                    .map_err(|(_, error)| io::Error::from(error))?;
                // Removed before it was locked?
                fs::metadata(folder).map(|_| lock)
            };
            locked().map_err(unusable)
        };
        attempt().or_else(|_| attempt())
    };
    folders.iter().map(create).collect()
}

/// A session's folders in its data dirs, to be written down.
pub(super) fn list(data_dirs: &[PathBuf], session: SessionId) -> Vec<u8> {
    let folders = for_session(data_dirs, session).into_iter().map(|folder| folder.into_os_string().into_vec());
    folders.collect::<Vec<_>>().join(&0)
}

/// Reads what [`list`] wrote.
pub(super) fn listed(bytes: &[u8]) -> Vec<PathBuf> {
    let paths = bytes.split(|&byte| byte == 0).filter(|path| !path.is_empty());
    paths.map(|path| PathBuf::from(std::ffi::OsStr::from_bytes(path))).collect()
}

/// Opens a folder, and nothing else: what another user has put in its place might never open.
fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    File::options().read(true).custom_flags(flags.bits()).open(path)
}

/// Removes a session's folders in its data dirs. They hold no files with names, so only empty ones can be there.
pub(super) fn remove(folders: &[PathBuf]) {
    // In one that is not, another user's may lie in their place.
    let is_ours = |folder: &&PathBuf| folder.parent().is_some_and(|user| check_private(user).is_ok());
    for folder in folders.iter().filter(is_ours) {
        for node in fs::read_dir(folder).into_iter().flatten().flatten() {
            // A server that lives holds its folder; it may be of a session whose runtime folder is not to be seen from here.
            let lock = open_folder(&node.path()).map(|folder| Flock::lock(folder, FlockArg::LockExclusiveNonblock));
            if matches!(lock, Ok(Ok(_))) {
                let _ = fs::remove_dir(node.path());
            }
        }
        // Each fails where something is left in it, or where it is gone already.
        let _ = fs::remove_dir(folder);
        if let Some(user) = folder.parent() {
            let _ = fs::remove_dir(user);
        }
    }
}

/// Removes folders of sessions that are no more, even if their runtime folder is gone too; says of how many.
pub(super) fn remove_leftovers(data_dirs: &[PathBuf], running: &[SessionId]) -> usize {
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
