//! Everything that can go wrong in a stage-in. Each message names the source or sample, where in
//! it the problem lies, the reason, and what the user can do about it.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{SAMPLE_SIZE_MAX, SOURCE_PATHS_LEN_MAX, SOURCES_MAX};

/// The advice that ends some messages. It is left out of the notes about what `--keep-going`
/// skipped.
const KEEP_GOING_ADVICE: &str = "; replace it with an intact copy, or skip what cannot be read with --keep-going";

/// Why a stage-in failed.
#[derive(Debug, thiserror::Error)]
pub enum StageInError {
    /// A path, glob or line of a list matches nothing.
    #[error("no file or directory matches '{0}'; check the path, which every node must be able to read")]
    NoMatch(String),
    /// A pattern (of a source, `--include` or `--exclude`) does not parse.
    #[error(
        "'{pattern}' is not a valid pattern: {reason}; wildcards are *, ?, [...] and **, \
         and a wildcard in brackets stands for itself, as in [*]"
    )]
    InvalidPattern {
        /// The pattern as the user wrote it.
        pattern: String,
        /// The parser's complaint.
        reason: String,
    },
    /// The file of `@LIST` cannot be a list of sources.
    #[error("'{}' cannot be used as a list of sources: {reason}", path.display())]
    InvalidList {
        /// Path of the list.
        path: PathBuf,
        /// What is wrong, and what to write instead.
        reason: String,
    },
    /// There are more sources than the coordinator keeps in memory.
    #[error(
        "'{pattern}' names too many sources: one stage-in takes at most {SOURCES_MAX}, with {SOURCE_PATHS_LEN_MAX} bytes of \
         paths in total; name the directory that contains them instead, or use several stage-ins"
    )]
    TooManySources {
        /// The glob or list that named the first source beyond the limit.
        pattern: String,
    },
    /// A source, a file of a tree, or a list cannot be opened or read.
    #[error("cannot read '{}': {error}", path.display())]
    Read {
        /// Path of the file or directory.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// A source is a device, FIFO or socket.
    #[error("'{}' is neither a file nor a directory; a device, FIFO or socket cannot be staged in", path.display())]
    SpecialFile {
        /// Path of the source.
        path: PathBuf,
    },
    /// A file has the name of an archive, but not the contents.
    #[error(
        "'{}' is named like an archive, but is not one that can be unpacked (supported: zip, and tar, either plain or compressed \
         with gzip, zstd, xz, bzip2 or lz4); rename it, or stage archives in as files with --no-unpack",
        path.display()
    )]
    NotAnArchive {
        /// Path of the file.
        path: PathBuf,
    },
    /// An archive is truncated or damaged.
    #[error(
        "'{}' is damaged at byte {offset}{}: {reason}{KEEP_GOING_ADVICE}",
        path.display(), if *is_decompressed { " of its decompressed contents" } else { "" }
    )]
    Damaged {
        /// Path of the archive. An archive within an archive has the outer one's path in front.
        path: PathBuf,
        /// Offset in the archive.
        offset: u64,
        /// Whether the offset is counted after decompression, as in a compressed tar.
        is_decompressed: bool,
        /// What is wrong there.
        reason: String,
    },
    /// A zip uses a feature that this version cannot unpack.
    #[error(
        "'{}' has a member at byte {offset} that cannot be unpacked: {reason}; pack it again as a plain zip or tar, \
         or skip what cannot be read with --keep-going",
        path.display()
    )]
    Unsupported {
        /// Path of the archive.
        path: PathBuf,
        /// Offset in the archive.
        offset: u64,
        /// The feature that is not supported.
        reason: String,
    },
    /// A source is not the same as when it was planned or opened.
    #[error("'{}' changed while it was staged in; stage it in again once nothing writes to it", path.display())]
    Changed {
        /// Path of the source.
        path: PathBuf,
    },
    /// A file yields more or fewer bytes than its metadata promises, although it did not change.
    /// Files in /proc and /sys do.
    #[error(
        "'{}' has a size of {size} bytes but yields {}, so it is not an ordinary file; copy its contents to a file, \
         and stage in the copy",
        path.display(), if *yields_more { "more" } else { "fewer" }
    )]
    WrongSize {
        /// Path of the file.
        path: PathBuf,
        /// Size in bytes according to its metadata.
        size: u64,
        /// Whether the file yields more than that; otherwise it yields less.
        yields_more: bool,
    },
    /// A sample is too large. A hostile header can claim any size for a small file.
    #[error("'{sample}' claims to have {size} bytes, but a sample has at most {SAMPLE_SIZE_MAX}; split it, or check the archive")]
    TooLarge {
        /// Path of the sample in the dataset.
        sample: String,
        /// The claimed size in bytes.
        size: u64,
    },
    /// Every node is full.
    #[error("no node has room left for '{sample}'; raise --capacity, add drives with --data-dir, or stage in less")]
    NoRoom {
        /// Path of the sample in the dataset.
        sample: String,
    },
    /// A temporary file on a data dir failed.
    #[error("cannot use a temporary file of the stage-in: {0}")]
    TempFile(#[source] io::Error),
    /// A node did not store the blocks it was sent.
    #[error("cannot store blocks on node {node}: {cause}")]
    Ship {
        /// The blocks' owner.
        node: NodeId,
        /// The node's answer, or why there was none.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    /// The coordinator did not assign units to a worker.
    #[error("cannot get work from node {coordinator}, the stage-in's coordinator: {cause}")]
    NoAssignment {
        /// The coordinator's node.
        coordinator: NodeId,
        /// Its answer, or why there was none.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    /// A block changed in a worker's memory between reading and sending.
    #[error(
        "a block changed in the memory of node {node} after it was read: its checksum is {found:08x} and was {expected:08x} at \
         the source; have that node's memory tested, and run without that node"
    )]
    Corrupted {
        /// The worker's node.
        node: NodeId,
        /// CRC32C taken when the source was read.
        expected: u32,
        /// CRC32C of the bytes in memory.
        found: u32,
    },
    /// An archive within an archive has more members than can be numbered.
    #[error("'{}' has too many members for an archive within an archive; unpack it first, or stage it in by itself", path.display())]
    TooManyMembers {
        /// Path of the inner archive, with the outer one's path in front.
        path: PathBuf,
    },
    /// The stage-in was cancelled, by its user or by a failure elsewhere.
    #[error("canceled")]
    Cancelled,
}

impl StageInError {
    /// Returns whether the error concerns one source or member only, so that `--keep-going` may
    /// skip it.
    pub(crate) fn is_of_source(&self) -> bool {
        match self {
            Self::Read { .. }
            | Self::Damaged { .. }
            | Self::Unsupported { .. }
            | Self::Changed { .. }
            | Self::WrongSize { .. }
            | Self::TooLarge { .. }
            | Self::NotAnArchive { .. }
            | Self::TooManyMembers { .. } => true,
            Self::NoMatch(_)
            | Self::InvalidPattern { .. }
            | Self::InvalidList { .. }
            | Self::TooManySources { .. }
            | Self::SpecialFile { .. }
            | Self::NoRoom { .. }
            | Self::TempFile(_)
            | Self::Ship { .. }
            | Self::NoAssignment { .. }
            | Self::Corrupted { .. }
            | Self::Cancelled => false,
        }
    }

    /// Returns the message for the list of what `--keep-going` skipped.
    pub(crate) fn skip_note(&self) -> String {
        let message = self.to_string();
        message.strip_suffix(KEEP_GOING_ADVICE).map_or_else(|| message.clone(), str::to_owned)
    }
}
