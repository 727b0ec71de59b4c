//! The namespace as POSIX programs expect it: paths, symlinks, attributes, directories, open files,
//! and the one place where errors become errno. The command line and the preload library are built
//! on it.

mod open;
mod resolve;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dayfly_meta::catalog::{Attributes, Entry, EntryId, EntryKind};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::BlockId;
use dayfly_meta::path::display;
use nix::libc;

use crate::batch::{RequestedSample, SampleRef, WantedSamples};
use crate::{Batch, ClientError, Dataset, Delivery, OnMissing, Session};
pub use open::{Directory, DirectoryEntry, OpenFile, Opened};
use resolve::ResolvedPath;

/// The reason why a call on the namespace failed.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// The path names nothing.
    #[error("no such file or directory")]
    NotFound,
    /// A component before the last is not a directory, or the last component must be a directory and is not one.
    #[error("not a directory")]
    NotADirectory,
    /// A directory cannot be read as a file.
    #[error("is a directory")]
    IsADirectory,
    /// The path does not name a symlink.
    #[error("not a symbolic link")]
    NotASymlink,
    /// The path leads through too many symlinks.
    #[error("too many levels of symbolic links")]
    Loop,
    /// A name or the whole path is too long.
    #[error("file name too long")]
    TooLong,
    /// The path is not in the namespace. The value is the prefix.
    #[error("it is not in the namespace, which is at '{}'", display(.0))]
    Elsewhere(Vec<u8>),
    /// A symlink leads out of the namespace. The value is its destination.
    #[error("it leads out of the namespace, to '{}'", display(.0))]
    Outside(Vec<u8>),
    /// The namespace is read-only.
    #[error("read-only file system")]
    ReadOnly,
    /// The bytes cannot be read.
    #[error("{0}")]
    Client(#[from] ClientError),
}

impl ViewError {
    /// Returns the errno that a program sees.
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotFound | Self::Elsewhere(_) | Self::Outside(_) => libc::ENOENT,
            Self::NotADirectory => libc::ENOTDIR,
            Self::IsADirectory => libc::EISDIR,
            Self::NotASymlink => libc::EINVAL,
            Self::Loop => libc::ELOOP,
            Self::TooLong => libc::ENAMETOOLONG,
            Self::ReadOnly => libc::EROFS,
            Self::Client(ClientError::Path { errno, .. }) => *errno,
            Self::Client(ClientError::Buffer) => libc::EFAULT,
            Self::Client(ClientError::Interrupted) => libc::EINTR,
            Self::Client(ClientError::NoCopy(_)) => libc::ENOSPC,
            Self::Client(ClientError::Limit(error)) => error.raw_os_error().unwrap_or(libc::EIO),
            Self::Client(_) => libc::EIO,
        }
    }
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file, which is a sample.
    File,
    /// A directory of a dataset or above datasets.
    Directory,
    /// A symlink, not followed.
    Symlink,
}

/// The attributes that `stat` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// The kind of the file.
    pub kind: FileKind,
    /// Permission bits. They are shown, but not enforced: any process that may attach may read.
    pub permissions: u32,
    /// Size in bytes; for a symlink, the length of its target.
    pub size: u64,
    /// Number of names; for a directory, the number of its subdirectories plus two.
    pub links: u32,
    /// The file's number in the session, the same on all nodes.
    pub inode: u64,
    /// Modification time, in whole seconds since 1970.
    pub mtime_s: i64,
    /// Nanoseconds to be added to `mtime_s`.
    pub mtime_ns: u32,
}

impl Stat {
    /// Returns the value of `st_mode`: type and permissions.
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
    /// Creates a view of an attached session's namespace.
    pub fn new(session: Session) -> Self {
        Self { session }
    }

    /// Returns the session that the view was created from.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns whether an absolute path, as a program sees it, lies in the namespace.
    pub fn contains(&self, path: &[u8]) -> bool {
        self.below_prefix(path).is_some()
    }

    /// Returns the attributes of a path. Symlinks are followed.
    ///
    /// # Errors
    ///
    /// Same as for `stat(2)`; see [`ViewError::errno`].
    pub fn stat(&self, path: &[u8]) -> Result<Stat, ViewError> {
        self.stat_at(path, true)
    }

    /// Returns the attributes of a path. A symlink at its end is not followed.
    ///
    /// # Errors
    ///
    /// Same as for `lstat(2)`; see [`ViewError::errno`].
    pub fn lstat(&self, path: &[u8]) -> Result<Stat, ViewError> {
        self.stat_at(path, false)
    }

    /// Returns the target of a symlink.
    ///
    /// # Errors
    ///
    /// If the path does not name a symlink.
    pub fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, ViewError> {
        match self.resolve(path, false)? {
            ResolvedPath::Entry(dataset, id) => {
                let entry = entry(&dataset, id)?;
                let target = dataset.catalog().symlink_target(&entry);
                target.map(<[u8]>::to_vec).ok_or(ViewError::NotASymlink)
            }
            ResolvedPath::Virtual(_) => Err(ViewError::NotASymlink),
        }
    }

    /// Returns the absolute path that `path` leads to, without symlinks and without `.` or `..`.
    ///
    /// # Errors
    ///
    /// If the path names nothing, or leads out of the namespace.
    pub fn canonical(&self, path: &[u8]) -> Result<Vec<u8>, ViewError> {
        self.path_of(&self.resolve(path, true)?)
    }

    /// Opens what a path names: a file for reading, or a directory for listing.
    ///
    /// # Errors
    ///
    /// Same as for `open(2)`; see [`ViewError::errno`].
    pub fn open_any(&self, path: &[u8]) -> Result<Opened, ViewError> {
        let datasets = self.session.datasets()?;
        if let Some((dataset, entry, attributes)) = self.find_plain(&datasets, path)
            && let Some(sample) = entry.sample()
        {
            let stat = stat_from(dataset, &entry, &attributes);
            return Ok(Opened::File(OpenFile::new(dataset.clone(), entry.id, sample, stat)));
        }
        match self.resolve(path, true)? {
            ResolvedPath::Entry(dataset, id) => {
                let entry = entry(&dataset, id)?;
                match entry.sample() {
                    Some(sample) => {
                        let stat = stat_of_entry(&dataset, &entry)?;
                        Ok(Opened::File(OpenFile::new(dataset.clone(), id, sample, stat)))
                    }
                    None => Ok(Opened::Directory(Directory::new(self, ResolvedPath::Entry(dataset.clone(), id))?)),
                }
            }
            resolved @ ResolvedPath::Virtual(_) => Ok(Opened::Directory(Directory::new(self, resolved)?)),
        }
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    ///
    /// Same as for `open(2)`; [`ViewError::IsADirectory`] if the path names a directory.
    pub fn open(&self, path: &[u8]) -> Result<OpenFile, ViewError> {
        match self.open_any(path)? {
            Opened::File(file) => Ok(file),
            Opened::Directory(_) => Err(ViewError::IsADirectory),
        }
    }

    /// Opens a directory for listing.
    ///
    /// # Errors
    ///
    /// Same as for `opendir(3)`; [`ViewError::NotADirectory`] if the path names a file.
    pub fn open_directory(&self, path: &[u8]) -> Result<Directory, ViewError> {
        match self.open_any(path)? {
            Opened::Directory(directory) => Ok(directory),
            Opened::File(_) => Err(ViewError::NotADirectory),
        }
    }

    /// Reads from an open file. The count is less than the buffer's length only at the end of the file.
    ///
    /// # Errors
    ///
    /// If the bytes cannot be read; see [`Session::read_at`].
    pub fn read_at(&self, file: &OpenFile, offset: u64, buffer: &mut [u8]) -> Result<usize, ViewError> {
        let chunk = |word: u64| Chunk { block: BlockId((word >> 16) as u32), index: word as u16 };
        let mut verified = file.verified.load(Ordering::Acquire).checked_sub(1).map(chunk);
        let count = self.session.read_at(&file.dataset, file.sample, offset, buffer, &mut verified)?;
        file.verified
            .store(verified.map_or(0, |chunk| (u64::from(chunk.block.0) << 16 | u64::from(chunk.index)) + 1), Ordering::Release);
        Ok(count)
    }

    /// Begins to read whole files, by their paths; see [`Session::read_many`].
    ///
    /// # Errors
    ///
    /// Same as for [`Session::read_many`].
    pub fn read_many(&self, paths: &[&[u8]], delivery: Delivery, on_missing: OnMissing) -> Result<Batch<&Session>, ClientError> {
        Batch::begin(&self.session, self.requested(paths), delivery, on_missing)
    }

    /// Reads whole files into buffers; see [`Session::read_many_into`].
    ///
    /// # Errors
    ///
    /// Same as for [`Session::read_many_into`].
    pub fn read_many_into(
        &self,
        paths: &[&[u8]],
        buffers: &mut [&mut [u8]],
        on_missing: OnMissing,
    ) -> Result<Vec<Result<u64, ClientError>>, ClientError> {
        let datasets = self.session.datasets()?;
        let mut wanted = WantedSamples::with_capacity(paths.len());
        for path in paths {
            if let Some((dataset, entry, _)) = self.find_plain(&datasets, path)
                && let Some(sample) = entry.sample()
            {
                wanted.add(dataset, sample);
                continue;
            }
            match self.request(path) {
                Ok(SampleRef { dataset, sample }) => wanted.add(&dataset, sample),
                Err(error) => wanted.add_error(error),
            }
        }
        drop(datasets);
        self.session.fill_buffers(wanted, buffers, on_missing)
    }

    fn requested(&self, paths: &[&[u8]]) -> Vec<RequestedSample> {
        paths.iter().map(|path| self.request(path)).collect()
    }

    fn request(&self, path: &[u8]) -> RequestedSample {
        match self.open(path) {
            Ok(file) => Ok(SampleRef { sample: file.sample, dataset: file.dataset }),
            Err(ViewError::Client(error)) => Err(error),
            Err(error) => {
                let (path, reason) = (display(path), error.to_string());
                Err(ClientError::Path { path, reason, errno: error.errno() })
            }
        }
    }

    /// Returns the dataset that contains a path.
    ///
    /// # Errors
    ///
    /// If the path names nothing, or a directory above all datasets.
    pub fn dataset_of(&self, path: &[u8]) -> Result<Arc<Dataset>, ViewError> {
        match self.resolve(path, true)? {
            ResolvedPath::Entry(dataset, _) => Ok(dataset),
            ResolvedPath::Virtual(_) => Err(ViewError::IsADirectory),
        }
    }

    /// Returns the absolute path of a resolved path.
    fn path_of(&self, resolved: &ResolvedPath) -> Result<Vec<u8>, ViewError> {
        Ok(match resolved {
            ResolvedPath::Virtual(path) => self.above_prefix(path),
            ResolvedPath::Entry(dataset, id) => {
                let within = dataset.catalog().path(&entry(dataset, *id)?);
                self.above_prefix(&dayfly_meta::path::join(dataset.target(), &within))
            }
        })
    }

    /// Looks a path up as it is written, in one step. This finds most paths, because they lead through no symlink, `.` or `..`.
    fn find_plain<'a>(&self, datasets: &'a [Arc<Dataset>], path: &[u8]) -> Option<(&'a Arc<Dataset>, Entry<'a>, Attributes)> {
        let below = self.below_prefix(path)?;
        let (dataset, within) = resolve::split(datasets, below.strip_prefix(b"/").unwrap_or(below))?;
        let (entry, attributes) = dataset.catalog().stat(within)?;
        Some((dataset, entry, attributes))
    }

    fn stat_at(&self, path: &[u8], follow: bool) -> Result<Stat, ViewError> {
        let datasets = self.session.datasets()?;
        if let Some((dataset, entry, attributes)) = self.find_plain(&datasets, path)
            && (!follow || entry.kind != EntryKind::Symlink)
        {
            return Ok(stat_from(dataset, &entry, &attributes));
        }
        self.stat_of(&self.resolve(path, follow)?)
    }

    fn stat_of(&self, resolved: &ResolvedPath) -> Result<Stat, ViewError> {
        match resolved {
            ResolvedPath::Entry(dataset, id) => stat_of_entry(dataset, &entry(dataset, *id)?),
            ResolvedPath::Virtual(path) => {
                let names = self.virtual_names(path)?.len() as u32;
                let inode = u64::from(crc32c::crc32c(path)) + 1;
                let kind = FileKind::Directory;
                // The directory's time is that of the newest dataset below it.
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

/// Returns the inode of an entry. All names of one sample share it, so that programs recognize hard
/// links.
fn inode(dataset: &Dataset, entry: &Entry<'_>) -> u64 {
    let is_file = entry.kind == EntryKind::File;
    u64::from(dataset.id().0) << 33 | u64::from(entry.node) << 1 | u64::from(is_file)
}
