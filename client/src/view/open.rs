//! Open files and open directories.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use dayfly_meta::catalog::EntryId;
use dayfly_meta::id::SampleId;
use dayfly_meta::path::{join, split_last};

use super::resolve::ResolvedPath;
use super::{FileKind, Stat, View, ViewError, entry, inode, kind_of};
use crate::Dataset;

/// The file or the directory that an opened path names.
pub enum Opened {
    /// The path names a sample.
    File(OpenFile),
    /// The path names a directory.
    Directory(Directory),
}

/// An open file.
pub struct OpenFile {
    pub(super) dataset: Arc<Dataset>,
    entry: EntryId,
    pub(super) sample: SampleId,
    stat: Stat,
    /// The last chunk whose checksum was correct, packed into a number: the block in the upper bits,
    /// the chunk's index in the lower 16 bits. One is added, so that 0 means that there is none.
    pub(super) verified: AtomicU64,
}

impl OpenFile {
    pub(super) fn new(dataset: Arc<Dataset>, entry: EntryId, sample: SampleId, stat: Stat) -> Self {
        Self { dataset, entry, sample, stat, verified: AtomicU64::new(0) }
    }

    /// Makes the processor fetch the start of the file, which will be read soon, while the caller
    /// does something else.
    pub fn prefetch(&self) {
        self.dataset.prefetch(self.sample);
    }

    /// Returns the attributes that `fstat` returns.
    pub fn stat(&self) -> Stat {
        self.stat
    }

    /// Returns the dataset that contains the file.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Returns the file's sample.
    pub fn sample(&self) -> SampleId {
        self.sample
    }

    /// Returns the path by which the file was opened, with symlinks resolved.
    ///
    /// # Errors
    ///
    /// If the catalog is damaged.
    pub fn path(&self, view: &View) -> Result<Vec<u8>, ViewError> {
        view.path_of(&ResolvedPath::Entry(self.dataset.clone(), self.entry))
    }
}

/// An open directory.
pub struct Directory {
    listing: Listing,
    path: Vec<u8>,
    stat: Stat,
    parent_inode: u64,
}

enum Listing {
    Entries(Arc<Dataset>, EntryId),
    /// Names with their inodes.
    Virtual(Vec<(Vec<u8>, u64)>),
}

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryEntry<'a> {
    /// The last component of the path.
    pub name: &'a [u8],
    /// The kind of the file. A symlink is not followed.
    pub kind: FileKind,
    /// The inode, as in [`Stat::inode`].
    pub inode: u64,
    /// Where to resume the listing after this entry. Valid for as long as the dataset exists.
    pub next: u64,
}

impl Directory {
    pub(super) fn new(view: &View, resolved: ResolvedPath) -> Result<Self, ViewError> {
        let stat = view.stat_of(&resolved)?;
        let path = view.path_of(&resolved)?;
        let listing = match resolved {
            ResolvedPath::Entry(dataset, id) => match entry(&dataset, id)?.kind {
                dayfly_meta::catalog::EntryKind::Directory => Listing::Entries(dataset, id),
                _ => return Err(ViewError::NotADirectory),
            },
            ResolvedPath::Virtual(below) => {
                let with_inode =
                    |name: Vec<u8>| view.lstat(&view.above_prefix(&join(&below, &name))).map(|stat| (name, stat.inode));
                Listing::Virtual(view.virtual_names(&below)?.into_iter().map(with_inode).collect::<Result<_, _>>()?)
            }
        };
        let parent_inode = match &listing {
            Listing::Entries(dataset, id) if id.0 != 0 => inode(dataset, &entry(dataset, entry(dataset, *id)?.parent)?),
            _ => match split_last(&path).filter(|(parent, _)| view.contains(parent)) {
                Some((parent, _)) => view.lstat(parent)?.inode,
                None => stat.inode,
            },
        };
        Ok(Self { listing, path, stat, parent_inode })
    }

    /// Returns the directory's path, as programs see it, without symlinks.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// Returns the attributes that `fstat` returns.
    pub fn stat(&self) -> Stat {
        self.stat
    }

    /// Returns the inode of `..`. The root of the namespace is its own parent.
    pub fn parent_inode(&self) -> u64 {
        self.parent_inode
    }

    /// Returns the first entry at or after a position: 0, or the `next` of an entry.
    pub fn entry(&self, from: u64) -> Option<DirectoryEntry<'_>> {
        match &self.listing {
            Listing::Entries(dataset, id) => {
                let directory = dataset.catalog().entry(*id)?;
                // A program can seek beyond the last entry.
                let from = u32::try_from(from).ok()?.max(id.0 + 1);
                let found = dataset.catalog().children(&directory, Some(EntryId(from))).next()?;
                // A damaged catalog must not make the listing go backward.
                let (kind, next) = (kind_of(found.kind), u64::from(found.next.0.max(from + 1)));
                Some(DirectoryEntry { name: found.name, kind, inode: inode(dataset, &found), next })
            }
            Listing::Virtual(names) => {
                let (name, inode) = names.get(usize::try_from(from).ok()?)?;
                Some(DirectoryEntry { name, kind: FileKind::Directory, inode: *inode, next: from + 1 })
            }
        }
    }

    /// Returns the entries from a position on, sorted by the bytes of their names, without `.` and
    /// `..`.
    pub fn entries(&self, from: u64) -> impl Iterator<Item = DirectoryEntry<'_>> {
        let mut at = from;
        std::iter::from_fn(move || {
            let found = self.entry(at)?;
            at = found.next;
            Some(found)
        })
    }
}
