//! Walks a directory tree. A directory comes before its contents, and the names in a directory come
//! in the order of their bytes. Symlinks are recorded and not followed.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dayfly_meta::limits::{PATH_LEN_MAX, STAT_BATCH_LEN, STAT_PATHS_MIN, STAT_THREADS};
use dayfly_meta::path::join;
use dayfly_meta::wire::peer::{TreeEntry, TreeKind};

use crate::StageInError;
use crate::selection::Selector;

/// What a walk finds at one path.
pub(crate) enum WalkItem {
    /// A file, directory or symlink.
    Entry(TreeEntry),
    /// A device, FIFO or socket.
    Special,
    /// A file that the selection leaves out, or a directory with all that is in it.
    Unselected,
    /// A path that cannot be read. The walk continues if the callback returns `Ok`.
    Unreadable(StageInError),
    /// A path that is too long for a dataset.
    TooLong(PathBuf),
}

/// For each file that has several hard links, the first path at which the walk found it. The key is
/// the file's device and inode.
type Links = HashMap<(u64, u64), Vec<u8>>;

/// Calls `visit` for the tree's root and everything below it. Patterns see names that begin with `spelled`, the root's name. Calls
/// `check_in` before it examines each path, because a slow file system may take a long time to answer. An error from `check_in` ends
/// the walk.
pub(crate) fn walk(
    root: &Path,
    spelled: &[u8],
    selector: &Selector,
    check_in: &dyn Fn(&Path) -> Result<(), StageInError>,
    visit: &mut dyn FnMut(WalkItem) -> Result<(), StageInError>,
) -> Result<(), StageInError> {
    let mut number = 0;
    let mut links = Links::new();
    // This is an explicit stack, so that a deep tree does not overflow the thread's stack.
    let mut waiting = vec![Waiting { path: root.to_owned(), name: Vec::new(), metadata: None }];
    while let Some(next) = waiting.last() {
        check_in(&next.path)?;
        if next.metadata.is_none() {
            examine_last(&mut waiting);
        }
        let Some(Waiting { path, name, metadata }) = waiting.pop() else { break };
        let metadata = metadata.unwrap_or_else(|| fs::symlink_metadata(&path));
        let metadata = match metadata {
            Ok(metadata) => metadata,
            Err(error) => {
                visit(WalkItem::Unreadable(unreadable(&path, error)))?;
                continue;
            }
        };
        let is_root = name.is_empty();
        if name.len() > PATH_LEN_MAX {
            visit(WalkItem::TooLong(path))?;
            continue;
        }
        let is_directory = metadata.is_dir() || is_root;
        let spelled = join(spelled, &name);
        if !is_root && (selector.excludes(&spelled) || !is_directory && !selector.includes(&spelled, false)) {
            visit(WalkItem::Unselected)?;
            continue;
        }
        if is_root || selector.includes(&spelled, is_directory) {
            let metadata = if is_root { fs::metadata(&path).map_err(|error| unreadable(&path, error))? } else { metadata };
            match kind_of(&path, &name, &metadata, &mut links) {
                Err(error) => visit(WalkItem::Unreadable(unreadable(&path, error)))?,
                Ok(Some(kind)) => visit(WalkItem::Entry(entry(number, name.clone(), &metadata, kind)))?,
                Ok(None) => visit(WalkItem::Special)?,
            }
            number += 1;
        }
        if is_directory {
            let names = match sorted_names(&path) {
                Ok(names) => names,
                Err(error) => {
                    visit(WalkItem::Unreadable(unreadable(&path, error)))?;
                    continue;
                }
            };
            waiting.extend(names.into_iter().rev().map(|child| Waiting {
                path: path.join(std::ffi::OsStr::from_bytes(&child)),
                name: join(&name, &child),
                metadata: None,
            }));
        }
    }
    Ok(())
}

/// A path that the walk has not visited yet.
struct Waiting {
    path: PathBuf,
    /// The path below the root.
    name: Vec<u8>,
    /// What the file system says about it, once it has been asked.
    metadata: Option<io::Result<Metadata>>,
}

/// Asks the file system about the paths that come next, several at a time: a parallel file system answers each question late, but
/// many at once. Few paths get few threads, because starting a thread takes longer than a question to a local file system.
fn examine_last(waiting: &mut [Waiting]) {
    let first = waiting.len().saturating_sub(STAT_BATCH_LEN);
    let unknown: Vec<&mut Waiting> = waiting[first..].iter_mut().filter(|next| next.metadata.is_none()).collect();
    let threads = unknown.len().div_ceil(STAT_PATHS_MIN).clamp(1, STAT_THREADS);
    let mut parts: Vec<Vec<&mut Waiting>> = (0..threads).map(|_| Vec::new()).collect();
    unknown.into_iter().enumerate().for_each(|(number, next)| parts[number % threads].push(next));
    let own = parts.pop();
    std::thread::scope(|scope| {
        for part in parts {
            // If no thread can be had, the paths are examined one by one when their turn comes.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || part.into_iter().for_each(Waiting::examine));
        }
        own.into_iter().flatten().for_each(Waiting::examine);
    });
}

impl Waiting {
    fn examine(&mut self) {
        self.metadata = Some(fs::symlink_metadata(&self.path));
    }
}

/// Returns the subdirectories of a directory, sorted, and how many other names it has. The former become the roots of trees when a
/// component is stripped, and nothing is left of the latter.
pub(crate) fn subdirectories(path: &Path) -> Result<(Vec<PathBuf>, u64), StageInError> {
    let names = sorted_names(path).map_err(|error| unreadable(path, error))?;
    let paths = names.into_iter().map(|name| path.join(std::ffi::OsStr::from_bytes(&name)));
    let is_directory = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir());
    let (directories, others): (Vec<_>, Vec<_>) = paths.partition(is_directory);
    Ok((directories, others.len() as u64))
}

/// Returns the entry of a source that is a single file.
pub(crate) fn single_file(metadata: &Metadata) -> TreeEntry {
    entry(0, Vec::new(), metadata, TreeKind::File(metadata.len()))
}

fn entry(number: u64, path: Vec<u8>, metadata: &Metadata, kind: TreeKind) -> TreeEntry {
    let (mtime_s, mtime_ns) = (metadata.mtime(), metadata.mtime_nsec() as u32);
    let (ctime_s, ctime_ns) = (metadata.ctime(), metadata.ctime_nsec() as u32);
    TreeEntry { number, path, mode: metadata.mode() & 0o7777, mtime_s, mtime_ns, ctime_s, ctime_ns, kind }
}

/// Returns the kind of a path; `None` for a device, FIFO or socket.
fn kind_of(path: &Path, name: &[u8], metadata: &Metadata, links: &mut Links) -> io::Result<Option<TreeKind>> {
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Ok(Some(TreeKind::Directory));
    }
    if kind.is_symlink() {
        return Ok(Some(TreeKind::Symlink(fs::read_link(path)?.into_os_string().into_vec())));
    }
    if !kind.is_file() {
        return Ok(None);
    }
    if metadata.nlink() > 1 {
        if let Some(first) = links.get(&(metadata.dev(), metadata.ino())) {
            return Ok(Some(TreeKind::HardLink(first.clone())));
        }
        links.insert((metadata.dev(), metadata.ino()), name.to_vec());
    }
    Ok(Some(TreeKind::File(metadata.len())))
}

fn sorted_names(path: &Path) -> io::Result<Vec<Vec<u8>>> {
    let names = fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.file_name().into_vec()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names)
}

fn unreadable(path: &Path, error: io::Error) -> StageInError {
    StageInError::Read { path: path.to_owned(), error }
}
