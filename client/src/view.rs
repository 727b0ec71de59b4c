//! The namespace as POSIX programs expect it: paths, symlinks, attributes, directories, open files, and the one place
//! where errors become errno. Every face (command line, preload library, FUSE) is made of this.

mod resolve;

use std::sync::{Arc, Mutex, PoisonError};

use dayfly_meta::catalog::{Attributes, Entry, EntryId, EntryKind};
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::path::display;
use nix::libc;

use crate::{ClientError, Dataset, Session};
use resolve::Place;

/// Why a call on the namespace fails.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// Nothing has this name.
    #[error("no such file or directory")]
    NotFound,
    /// Something on the way is no directory, or what should be one is none.
    #[error("not a directory")]
    NotADirectory,
    /// A directory cannot be read as a file.
    #[error("is a directory")]
    IsADirectory,
    /// Not a symlink.
    #[error("not a symbolic link")]
    NotASymlink,
    /// Too many symlinks.
    #[error("too many levels of symbolic links")]
    Loop,
    /// A name or the path is too long.
    #[error("file name too long")]
    TooLong,
    /// The path is none of the namespace's.
    #[error("not in the namespace, which is at '{}'", display(.0))]
    Elsewhere(Vec<u8>),
    /// A symlink leads out of the namespace.
    #[error("it leads out of the namespace, to '{}'", display(.0))]
    Outside(Vec<u8>),
    /// The namespace is read-only.
    #[error("read-only file system")]
    ReadOnly,
    /// The bytes cannot be had.
    #[error("{0}")]
    Client(#[from] ClientError),
}

impl ViewError {
    /// The errno that a program sees.
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotFound | Self::Elsewhere(_) | Self::Outside(_) => libc::ENOENT,
            Self::NotADirectory => libc::ENOTDIR,
            Self::IsADirectory => libc::EISDIR,
            Self::NotASymlink => libc::EINVAL,
            Self::Loop => libc::ELOOP,
            Self::TooLong => libc::ENAMETOOLONG,
            Self::ReadOnly => libc::EROFS,
            Self::Client(_) => libc::EIO,
        }
    }
}

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file: a sample.
    File,
    /// A directory.
    Directory,
    /// A symlink.
    Symlink,
}

/// What `stat` tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// What it is.
    pub kind: FileKind,
    /// Permission bits. They are shown, not enforced: whoever may attach may read.
    pub permissions: u32,
    /// Size in bytes; of a symlink, its target's length.
    pub size: u64,
    /// Number of names; of a directory, subdirectories plus two.
    pub links: u32,
    /// Number of the file in the session, the same on all nodes.
    pub inode: u64,
    /// Modification time, whole seconds of the epoch.
    pub mtime_s: i64,
    /// And nanoseconds.
    pub mtime_ns: u32,
}

impl Stat {
    /// `st_mode`: type and permissions.
    pub fn mode(&self) -> u32 {
        let kind = match self.kind {
            FileKind::File => libc::S_IFREG,
            FileKind::Directory => libc::S_IFDIR,
            FileKind::Symlink => libc::S_IFLNK,
        };
        kind | self.permissions
    }
}

/// The namespace of a session.
pub struct View {
    session: Session,
}

impl View {
    /// The view of an attachment.
    pub fn new(session: Session) -> Self {
        Self { session }
    }

    /// The attachment.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Whether a path (absolute, as a program sees it) lies in the namespace.
    pub fn contains(&self, path: &[u8]) -> bool {
        self.below_prefix(path).is_some()
    }

    /// What a path names, symlinks followed.
    pub fn stat(&self, path: &[u8]) -> Result<Stat, ViewError> {
        self.stat_at(path, true)
    }

    /// What a path names, a symlink as itself.
    pub fn lstat(&self, path: &[u8]) -> Result<Stat, ViewError> {
        self.stat_at(path, false)
    }

    /// Where a symlink leads.
    pub fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, ViewError> {
        match self.resolve(path, false)? {
            Place::Entry(dataset, id) => {
                let entry = entry(&dataset, id)?;
                let target = dataset.catalog().symlink_target(&entry);
                target.map(<[u8]>::to_vec).ok_or(ViewError::NotASymlink)
            }
            Place::Virtual(_) => Err(ViewError::NotASymlink),
        }
    }

    /// The path that a path leads to: absolute, with neither symlinks nor dots.
    pub fn canonical(&self, path: &[u8]) -> Result<Vec<u8>, ViewError> {
        let place = self.resolve(path, true)?;
        let below = match &place {
            Place::Virtual(path) => path.clone(),
            Place::Entry(dataset, id) => {
                dayfly_meta::path::join(dataset.target(), &dataset.catalog().path(&entry(dataset, *id)?))
            }
        };
        Ok(self.above_prefix(&below))
    }

    /// Opens a file to read it.
    pub fn open(&self, path: &[u8]) -> Result<OpenFile, ViewError> {
        match self.resolve(path, true)? {
            Place::Virtual(_) => Err(ViewError::IsADirectory),
            Place::Entry(dataset, id) => {
                let entry = entry(&dataset, id)?;
                let sample = entry.sample().ok_or(ViewError::IsADirectory)?;
                let stat = stat_of_entry(&dataset, &entry)?;
                Ok(OpenFile { dataset, sample, stat, verified: Mutex::new(None) })
            }
        }
    }

    /// Opens a directory to list it.
    pub fn open_directory(&self, path: &[u8]) -> Result<Directory, ViewError> {
        match self.resolve(path, true)? {
            Place::Entry(dataset, id) => match entry(&dataset, id)?.kind {
                EntryKind::Directory => Ok(Directory { listing: Listing::Entries(dataset, id) }),
                _ => Err(ViewError::NotADirectory),
            },
            Place::Virtual(path) => {
                let with_inode = |name: Vec<u8>| {
                    let child = self.above_prefix(&dayfly_meta::path::join(&path, &name));
                    self.lstat(&child).map(|stat| (name, stat.inode))
                };
                let names = self.virtual_names(&path)?.into_iter().map(with_inode).collect::<Result<_, _>>()?;
                Ok(Directory { listing: Listing::Virtual(names) })
            }
        }
    }

    /// Reads from an open file; short only at its end.
    pub fn read_at(&self, file: &OpenFile, offset: u64, buffer: &mut [u8]) -> Result<usize, ViewError> {
        let mut verified = file.verified.lock().map_or(None, |verified| *verified);
        let count = self.session.read_at(&file.dataset, file.sample, offset, buffer, &mut verified)?;
        *file.verified.lock().unwrap_or_else(PoisonError::into_inner) = verified;
        Ok(count)
    }

    fn stat_at(&self, path: &[u8], follow: bool) -> Result<Stat, ViewError> {
        // Mostly the path is plain and names an entry: then one lookup tells all.
        let datasets = self.session.datasets()?;
        let plain = self.below_prefix(path).map(|below| below.strip_prefix(b"/").unwrap_or(below));
        if let Some((dataset, within)) = plain.and_then(|plain| resolve::split(&datasets, plain))
            && let Some((entry, attributes)) = dataset.catalog().stat(within)
            && (!follow || entry.kind != EntryKind::Symlink)
        {
            return Ok(stat_from(dataset, &entry, &attributes));
        }
        self.stat_of(&self.resolve(path, follow)?)
    }

    fn stat_of(&self, place: &Place) -> Result<Stat, ViewError> {
        match place {
            Place::Entry(dataset, id) => stat_of_entry(dataset, &entry(dataset, *id)?),
            Place::Virtual(path) => {
                let names = self.virtual_names(path)?.len() as u32;
                let inode = u64::from(crc32c::crc32c(path)) + 1;
                let kind = FileKind::Directory;
                // As old as the newest dataset below it.
                let datasets = self.session.datasets()?;
                let below = datasets.iter().filter(|dataset| dayfly_meta::path::is_below(dataset.target(), path));
                let mtime_s = below.map(|dataset| dataset.catalog().header().created_s).max().unwrap_or(0);
                Ok(Stat { kind, permissions: 0o755, size: 0, links: names.saturating_add(2), inode, mtime_s, mtime_ns: 0 })
            }
        }
    }
}

fn entry(dataset: &Dataset, id: EntryId) -> Result<Entry<'_>, ViewError> {
    Ok(dataset.catalog().entry(id).ok_or(ClientError::Protocol("a damaged catalog"))?)
}

fn stat_of_entry(dataset: &Dataset, entry: &Entry<'_>) -> Result<Stat, ViewError> {
    let attributes = dataset.catalog().attributes(entry).ok_or(ClientError::Protocol("a damaged catalog"))?;
    Ok(stat_from(dataset, entry, &attributes))
}

fn stat_from(dataset: &Dataset, entry: &Entry<'_>, attributes: &Attributes) -> Stat {
    Stat {
        kind: kind_of(entry.kind),
        permissions: attributes.mode & 0o7777,
        size: attributes.size,
        links: attributes.links,
        inode: inode(dataset, entry),
        mtime_s: attributes.mtime_s,
        mtime_ns: attributes.mtime_ns,
    }
}

fn kind_of(kind: EntryKind) -> FileKind {
    match kind {
        EntryKind::File => FileKind::File,
        EntryKind::Directory => FileKind::Directory,
        EntryKind::Symlink => FileKind::Symlink,
    }
}

/// Names of one sample share it, so that programs see hard links as such.
fn inode(dataset: &Dataset, entry: &Entry<'_>) -> u64 {
    let is_file = entry.kind == EntryKind::File;
    u64::from(dataset.id().0) << 33 | u64::from(entry.node) << 1 | u64::from(is_file)
}

/// A file that is open.
pub struct OpenFile {
    dataset: Arc<Dataset>,
    sample: SampleId,
    stat: Stat,
    verified: Mutex<Option<BlockId>>,
}

impl OpenFile {
    /// What `fstat` tells.
    pub fn stat(&self) -> Stat {
        self.stat
    }

    /// Its dataset.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Its sample.
    pub fn sample(&self) -> SampleId {
        self.sample
    }
}

/// A directory that is open.
pub struct Directory {
    listing: Listing,
}

enum Listing {
    Entries(Arc<Dataset>, EntryId),
    /// Names, with their inodes.
    Virtual(Vec<(Vec<u8>, u64)>),
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    /// The name.
    pub name: Vec<u8>,
    /// What it names; never followed.
    pub kind: FileKind,
    /// As `stat` tells it.
    pub inode: u64,
    /// To go on after this one, list from here. Good for as long as the dataset is there.
    pub next: u64,
}

impl Directory {
    /// Names from a position on (0, or an entry's `next`), sorted by their bytes, without `.` and `..`.
    pub fn entries(&self, from: u64) -> Box<dyn Iterator<Item = DirectoryEntry> + '_> {
        match &self.listing {
            Listing::Entries(dataset, id) => {
                let Some(directory) = dataset.catalog().entry(*id) else { return Box::new(std::iter::empty()) };
                let from = u32::try_from(from).ok().filter(|&from| from > 0).map(EntryId);
                Box::new(dataset.catalog().children(&directory, from).map(|entry| DirectoryEntry {
                    name: entry.name.to_vec(),
                    kind: kind_of(entry.kind),
                    inode: inode(dataset, &entry),
                    next: u64::from(entry.next.0),
                }))
            }
            Listing::Virtual(names) => {
                let from = usize::try_from(from).unwrap_or(usize::MAX);
                Box::new(names.iter().enumerate().skip(from).map(|(at, (name, inode))| DirectoryEntry {
                    name: name.clone(),
                    kind: FileKind::Directory,
                    inode: *inode,
                    next: at as u64 + 1,
                }))
            }
        }
    }
}
