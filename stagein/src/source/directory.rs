//! Walks a directory tree. A directory comes before its contents, and the names in a directory come
//! in the order of their bytes. Symlinks are recorded or, with `--dereference`, followed.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dayfly_meta::limits::{DIRECTORIES_PER_FILE_MAX, PATH_LEN_MAX, STAT_BATCH_LEN, STAT_PATHS_MIN, STAT_THREADS};
use dayfly_meta::path::{components, join};
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

/// A file's device and inode.
type FileId = (u64, u64);

/// For each file that may have several names, the first path at which the walk found it.
type Links = HashMap<FileId, Vec<u8>>;

/// A tree to walk.
pub(crate) struct Tree<'a> {
    pub(crate) root: &'a Path,
    /// The root's name as patterns see it.
    pub(crate) spelled: &'a [u8],
    pub(crate) selector: &'a Selector,
    /// Whether the walk takes what symlinks lead to, instead of the symlinks.
    pub(crate) is_dereferenced: bool,
    /// The directories that contain the root.
    pub(crate) above: Ancestors,
    /// How many directories a walk that follows symlinks enters, besides some for each file. Few symlinks can stand for very many.
    pub(crate) directories_max: u64,
}

/// Directories that contain one another. A walk that follows symlinks could come to one of them again, and would never end.
#[derive(Clone, Default)]
pub(crate) struct Ancestors(Vec<FileId>);

impl Ancestors {
    /// Adds a directory that lies in all of these. Fails if it is one of them.
    pub(crate) fn enter(&mut self, path: &Path, metadata: &Metadata) -> Result<(), StageInError> {
        let id = (metadata.dev(), metadata.ino());
        if self.0.contains(&id) {
            return Err(StageInError::Loop { path: path.to_owned() });
        }
        self.0.push(id);
        Ok(())
    }
}

/// Calls `visit` for the tree's root and everything below it. Calls `check_in` before it examines each path, because a slow file system
/// may take a long time to answer. An error from `check_in` ends the walk.
pub(crate) fn walk(
    tree: Tree<'_>,
    check_in: &dyn Fn(&Path) -> Result<(), StageInError>,
    visit: &mut dyn FnMut(WalkItem) -> Result<(), StageInError>,
) -> Result<(), StageInError> {
    let Tree { root, spelled, selector, is_dereferenced, above: mut ancestors, directories_max } = tree;
    let (mut number, mut directories, mut files) = (0, 0, 0);
    let root_depth = ancestors.0.len();
    let mut links = Links::new();
    // This is an explicit stack, so that a deep tree does not overflow the thread's stack.
    let mut waiting = vec![Waiting { path: root.to_owned(), name: Vec::new(), metadata: None }];
    while let Some(next) = waiting.last() {
        check_in(&next.path)?;
        if next.metadata.is_none() {
            examine_last(&mut waiting, is_dereferenced);
        }
        let Some(Waiting { path, name, metadata }) = waiting.pop() else { break };
        let metadata = metadata.unwrap_or_else(|| examine(&path, is_dereferenced));
        let is_root = name.is_empty();
        if name.len() > PATH_LEN_MAX {
            visit(WalkItem::TooLong(path))?;
            continue;
        }
        let is_directory = is_root || metadata.as_ref().is_ok_and(Metadata::is_dir);
        let spelled = join(spelled, &name);
        if !is_root && (selector.excludes(&spelled) || !is_directory && !selector.includes(&spelled, false)) {
            visit(WalkItem::Unselected)?;
            continue;
        }
        let metadata = match metadata {
            // The user may name a tree by a symlink.
            _ if is_root => fs::metadata(&path).map_err(|error| unreadable(&path, error))?,
            Ok(metadata) => metadata,
            Err(error) => {
                visit(WalkItem::Unreadable(missing_or_unreadable(&path, error)))?;
                continue;
            }
        };
        if is_directory && is_dereferenced {
            directories += 1;
            let max = directories_max.saturating_add(files * DIRECTORIES_PER_FILE_MAX);
            if directories > max {
                return Err(StageInError::TooManyDirectories { path: root.to_owned(), max });
            }
            ancestors.0.truncate(root_depth + components(&name).count());
            if let Err(error) = ancestors.enter(&path, &metadata) {
                visit(WalkItem::Unreadable(error))?;
                continue;
            }
        }
        if is_root || selector.includes(&spelled, is_directory) {
            match kind_of(&path, &name, &metadata, &mut links, is_dereferenced) {
                Err(error) => visit(WalkItem::Unreadable(unreadable(&path, error)))?,
                Ok(Some(kind)) => visit(WalkItem::Entry(entry(number, name.clone(), &metadata, kind)))?,
                Ok(None) => visit(WalkItem::Special)?,
            }
            number += 1;
            files += u64::from(!is_directory);
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
fn examine_last(waiting: &mut [Waiting], is_dereferenced: bool) {
    let first = waiting.len().saturating_sub(STAT_BATCH_LEN);
    let unknown: Vec<&mut Waiting> = waiting[first..].iter_mut().filter(|next| next.metadata.is_none()).collect();
    let threads = unknown.len().div_ceil(STAT_PATHS_MIN).clamp(1, STAT_THREADS);
    let mut parts: Vec<Vec<&mut Waiting>> = (0..threads).map(|_| Vec::new()).collect();
    unknown.into_iter().enumerate().for_each(|(number, next)| parts[number % threads].push(next));
    let own = parts.pop();
    let examine = |next: &mut Waiting| next.metadata = Some(examine(&next.path, is_dereferenced));
    std::thread::scope(|scope| {
        for part in parts {
            // If no thread can be had, the paths are examined one by one when their turn comes.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || part.into_iter().for_each(examine));
        }
        own.into_iter().flatten().for_each(examine);
    });
}

fn examine(path: &Path, is_dereferenced: bool) -> io::Result<Metadata> {
    if is_dereferenced { fs::metadata(path) } else { fs::symlink_metadata(path) }
}

/// Returns the subdirectories of a directory, sorted, and how many other names it has. The former become the roots of trees when a
/// component is stripped, and nothing is left of the latter.
pub(crate) fn subdirectories(path: &Path, is_dereferenced: bool) -> Result<(Vec<PathBuf>, u64), StageInError> {
    let names = sorted_names(path).map_err(|error| unreadable(path, error))?;
    let paths = names.into_iter().map(|name| path.join(std::ffi::OsStr::from_bytes(&name)));
    let is_directory = |path: &PathBuf| examine(path, is_dereferenced).is_ok_and(|metadata| metadata.is_dir());
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
fn kind_of(
    path: &Path,
    name: &[u8],
    metadata: &Metadata,
    links: &mut Links,
    is_dereferenced: bool,
) -> io::Result<Option<TreeKind>> {
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
    // Symlinks, too, give a file several names.
    if metadata.nlink() > 1 || is_dereferenced {
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

fn missing_or_unreadable(path: &Path, error: io::Error) -> StageInError {
    match fs::read_link(path) {
        Ok(target) if error.kind() == io::ErrorKind::NotFound => StageInError::Dangling { path: path.to_owned(), target },
        _ => unreadable(path, error),
    }
}

fn unreadable(path: &Path, error: io::Error) -> StageInError {
    StageInError::Read { path: path.to_owned(), error }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::os::unix::fs::symlink;

    use dayfly_meta::wire::control::Selection;

    use super::*;

    /// SEMANTICS: "With `--dereference`, at most a million directories of a tree are searched, plus four for each file, or as many as
    /// `--max-directories` allows if that is more."
    #[test]
    fn few_symlinks_cannot_stand_for_directories_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let level = |number: usize| folder.path().join(number.to_string());
        // Each level leads to the next one twice.
        for number in 0..=20 {
            fs::create_dir(level(number)).unwrap();
        }
        for number in 0..20 {
            ["a", "b"].into_iter().for_each(|name| symlink(level(number + 1), level(number).join(name)).unwrap());
        }
        let selector = Selector::new(&Selection::default()).unwrap();
        let entries = |root: &Path| {
            let above = Ancestors::default();
            let tree = Tree { root, spelled: b".", selector: &selector, is_dereferenced: true, above, directories_max: 1000 };
            let mut count = 0;
            let walked = walk(tree, &|_| Ok(()), &mut |_| {
                count += 1;
                Ok(())
            });
            walked.map(|()| count)
        };
        assert_eq!(entries(&level(14)).unwrap(), 127);
        let error = entries(&level(0)).unwrap_err();
        assert!(matches!(error, StageInError::TooManyDirectories { max: 1000, .. }), "{error}");
    }
}
