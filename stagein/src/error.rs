//! What can go wrong while staging in. Each message names the source, the place in it, and the way out.

use std::io;
use std::path::PathBuf;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{SAMPLE_SIZE_MAX, SOURCE_PATHS_LEN_MAX, SOURCES_MAX};

/// Why a stage-in failed.
#[derive(Debug, thiserror::Error)]
pub enum StageInError {
    /// Nothing is there.
    #[error("no file or directory matches '{0}'")]
    NoMatch(String),
    /// A pattern that cannot be understood.
    #[error("'{pattern}' is not a pattern: {reason}")]
    Pattern {
        /// As given.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A list that cannot be one.
    #[error("'{}' cannot be a list of sources: {reason}", path.display())]
    List {
        /// Which.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// More sources than are kept in memory.
    #[error(
        "'{pattern}' names too many sources: one stage-in takes at most {SOURCES_MAX}, with {SOURCE_PATHS_LEN_MAX} bytes of paths; \
             stage in the folder that they lie in, or some of them after the others"
    )]
    TooMany {
        /// The glob or list that names the first one too many.
        pattern: String,
    },
    /// A source, or a file of a tree, cannot be read.
    #[error("cannot read '{}': {error}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A device, FIFO or socket, named as a source.
    #[error("'{}' is neither a file nor a directory", path.display())]
    Special {
        /// Which.
        path: PathBuf,
    },
    /// Named as an archive, but not one.
    #[error("'{}' is named like an archive, but is none that can be unpacked (known: zip, and tar, plain or in gzip, zstd, xz, bzip2 or lz4); \
             --no-unpack keeps archives as they are", path.display())]
    NotAnArchive {
        /// Which.
        path: PathBuf,
    },
    /// An archive breaks off or is damaged.
    #[error("'{}' is damaged at byte {offset} of its unpacked content: {reason}", path.display())]
    Damaged {
        /// Which.
        path: PathBuf,
        /// Where, after decompression.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// A member that this version does not unpack.
    #[error("'{}' has at byte {offset} a member that cannot be unpacked: {reason}", path.display())]
    Unsupported {
        /// Which archive.
        path: PathBuf,
        /// Where, after decompression.
        offset: u64,
        /// What it is.
        reason: String,
    },
    /// A source is not what it was when it was listed or opened.
    #[error("'{}' changed while it was staged in", path.display())]
    Changed {
        /// Which.
        path: PathBuf,
    },
    /// A file that gives more or fewer bytes than its metadata say, though it did not change: those of /proc do.
    #[error("'{}' says that it has {size} bytes and gives {}: it is no plain file of data; copy what it gives, and stage in the copy",
            path.display(), if *gives_more { "more" } else { "fewer" })]
    Lies {
        /// Which.
        path: PathBuf,
        /// What it says.
        size: u64,
        /// What it gives.
        gives_more: bool,
    },
    /// Larger than a sample may be; a hostile header can say so of a small file.
    #[error("'{sample}' says it has {size} bytes, and a sample has at most {SAMPLE_SIZE_MAX}")]
    TooLarge {
        /// The sample.
        sample: String,
        /// What it says.
        size: u64,
    },
    /// No node has room for a block.
    #[error("no node has room left for '{sample}'; give more with --capacity or --data-dir, or stage in less")]
    NoRoom {
        /// The sample.
        sample: String,
    },
    /// The data dir failed while something was put aside there.
    #[error("cannot put aside what was found: {0}")]
    Scratch(#[source] io::Error),
    /// A node did not take what was shipped to it.
    #[error("cannot store on node {node}: {reason}")]
    Ship {
        /// Which node.
        node: NodeId,
        /// Why.
        reason: String,
    },
    /// Bytes changed between the source and the network, in a worker's memory.
    #[error(
        "a block changed in the memory of node {node} after it was read: its checksum is {found:08x}, at the source it was \
         {expected:08x}; have that node's memory tested, and stage in without it"
    )]
    Corrupted {
        /// The worker's node.
        node: NodeId,
        /// The checksum taken while the source was read.
        expected: u32,
        /// The checksum now.
        found: u32,
    },
    /// More members than can be told apart.
    #[error("'{}' holds too many members for an archive within an archive; unpack it before", path.display())]
    Crowded {
        /// Which.
        path: PathBuf,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl StageInError {
    /// Whether it is about one source, or a member of it, so that the others can be staged in all the same.
    pub(crate) fn is_of_source(&self) -> bool {
        match self {
            Self::Read { .. }
            | Self::Damaged { .. }
            | Self::Unsupported { .. }
            | Self::Changed { .. }
            | Self::Lies { .. }
            | Self::TooLarge { .. }
            | Self::NotAnArchive { .. }
            | Self::Crowded { .. } => true,
            Self::NoMatch(_)
            | Self::Pattern { .. }
            | Self::List { .. }
            | Self::TooMany { .. }
            | Self::Special { .. }
            | Self::NoRoom { .. }
            | Self::Scratch(_)
            | Self::Ship { .. }
            | Self::Corrupted { .. }
            | Self::Cancelled => false,
        }
    }
}
