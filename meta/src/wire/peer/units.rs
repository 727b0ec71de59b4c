//! Units: pieces of sources that the coordinator assigns to workers, and the workers' reports on them.

use rkyv::{Archive, Deserialize, Serialize};

use super::Rivalry;
use crate::catalog::{Compression, Version};
use crate::wire::control::Counts;

/// A piece of a source, for one worker.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Number of the source that the unit is a piece of.
    pub source: u32,
    /// Number of this assignment. A range that was started at a wrong offset is assigned again under another number.
    pub ticket: u32,
    /// The directory in the dataset below which the unit's members are placed.
    pub prefix: Vec<u8>,
    /// Which other sources must not contain the same paths.
    pub rivalry: Rivalry,
    /// What to read.
    pub work: Work,
}

/// The work of a unit.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// A whole compressed tar archive.
    Tar {
        /// The archive's path.
        path: Vec<u8>,
        /// The compression of the source.
        compression: Compression,
        /// The archive's version when the coordinator planned the stage-in.
        version: Version,
    },
    /// The members of a plain tar whose headers begin in a range.
    TarRange(TarRange),
    /// Some members of a zip.
    Zip(ZipPart),
    /// Some entries of a directory tree, or a single file.
    Tree {
        /// The tree's root.
        root: Vec<u8>,
        /// The entries, with paths below the root.
        entries: Vec<TreeEntry>,
    },
}

impl Work {
    /// Returns the path of the archive, or of the root of the tree.
    pub fn path(&self) -> &[u8] {
        match self {
            Self::Tar { path, .. } => path,
            Self::TarRange(range) => &range.path,
            Self::Zip(part) => &part.path,
            Self::Tree { root, .. } => root,
        }
    }
}

/// A range of a plain tar.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TarRange {
    /// The archive's path.
    pub path: Vec<u8>,
    /// The archive's version when the coordinator planned the stage-in.
    pub version: Version,
    /// Offset of the range's first byte, where the range before it ends.
    pub from: u64,
    /// Offset just past the range's last byte.
    pub to: u64,
    /// Where the range's first member begins, if that is known. Otherwise the worker searches for it.
    pub start: Option<TarPosition>,
}

/// A position between two members of a tar.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct TarPosition {
    /// Offset in the archive.
    pub offset: u64,
    /// The records of global extended headers that are in force there.
    pub globals: Vec<u8>,
}

/// A worker's findings in a range of a plain tar.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeReport {
    /// Offset of the first header in the range; `None` if there was none.
    pub first: Option<u64>,
    /// Where the next range's first member begins; `None` after the end of the archive.
    pub next: Option<TarPosition>,
    /// Why the worker could not read to the end. It matters only if the worker began at the right offset.
    pub failure: Option<String>,
}

/// Members of a zip: a part of its central directory.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ZipPart {
    /// The archive's path.
    pub path: Vec<u8>,
    /// The archive's version when the coordinator planned the stage-in.
    pub version: Version,
    /// Records of the central directory, byte for byte.
    pub records: Vec<u8>,
    /// Offset in the file of the first of these records.
    pub offset: u64,
    /// Bytes that precede the archive in its file. The offsets in the records do not count these
    /// bytes.
    pub shift: u64,
}

/// An entry of a directory tree, as the coordinator's walk found it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TreeEntry {
    /// Its number in the order of the walk.
    pub number: u64,
    /// Its path below the root; empty for a source that is a single file.
    pub path: Vec<u8>,
    /// The permission bits of its mode.
    pub mode: u32,
    /// Modification time, whole seconds.
    pub mtime_s: i64,
    /// Modification time, nanoseconds within the second.
    pub mtime_ns: u32,
    /// Time of the inode's last change, whole seconds.
    pub ctime_s: i64,
    /// Time of the inode's last change, nanoseconds within the second.
    pub ctime_ns: u32,
    /// File, directory or link.
    pub kind: TreeKind,
}

/// The kind of an entry of a directory tree.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum TreeKind {
    /// A regular file with its length in bytes.
    File(u64),
    /// A directory, which has no data.
    Directory,
    /// A symlink with its target.
    Symlink(Vec<u8>),
    /// Another name for the file at this path in the tree.
    HardLink(Vec<u8>),
}

/// The result of a unit.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitReport {
    /// The assignment that this report ends.
    pub ticket: u32,
    /// Source bytes that were read for the unit.
    pub source_bytes: u64,
    /// The report on a range of a plain tar.
    pub range: Option<RangeReport>,
    /// What the worker found.
    pub counts: Counts,
    /// Whether the samples found must be left out of the dataset, because the source changed while
    /// it was read.
    pub withdrawn: bool,
}
