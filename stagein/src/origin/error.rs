//! Why a sample cannot be read from its source. Each message names the source and says what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;

/// Why a sample cannot be read from its source. Several samples may share one cause, so an error can be cloned.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OriginError {
    /// The source is not what it was at stage-in.
    #[error("'{}' is no longer what was staged in: {what}; restore it as it was, or stage the dataset in again", path.display())]
    Changed {
        /// Path of the source, or of the file in it.
        path: PathBuf,
        /// How it differs from what was staged in.
        what: String,
    },
    /// The source is gone.
    #[error("'{}' does not exist anymore, or not on this node; restore it, or stage the dataset in again", path.display())]
    Missing {
        /// Path of the source, or of the file in it.
        path: PathBuf,
    },
    /// The source ends too early, although its metadata promise more bytes.
    #[error(
        "'{}' ends at byte {}, although its size promises {wanted} bytes from byte {offset}; check the file system that it lies on",
        path.display(),
        offset.saturating_add(*got)
    )]
    ShortRead {
        /// Path of the source, or of the file in it.
        path: PathBuf,
        /// Offset in the source at which the read began.
        offset: u64,
        /// How many bytes were to be read.
        wanted: u64,
        /// How many there were.
        got: u64,
    },
    /// The file system failed.
    #[error("cannot read '{}' at byte {offset}: {error}; check the file system that it lies on", path.display())]
    Io {
        /// Path of the source, or of the file in it.
        path: PathBuf,
        /// Offset in the source.
        offset: u64,
        /// The system's answer.
        #[source]
        error: Arc<io::Error>,
    },
    /// The source seems unchanged, but its bytes are not those that were staged in.
    #[error("'{}' is damaged at byte {offset}: {reason}; restore it as it was, or stage the dataset in again", path.display())]
    Damaged {
        /// Path of the source, or of the file in it.
        path: PathBuf,
        /// Offset in the source of the sample's record.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// Samples of this kind cannot be read from their sources yet.
    #[error("cannot read a sample out of '{}': {reason}; stage the dataset in again, on nodes with room for all of it", path.display())]
    Unsupported {
        /// Path of the source.
        path: PathBuf,
        /// Which kind it is.
        reason: &'static str,
    },
    /// The catalog has no such sample, or the sample has no such bytes.
    #[error("the dataset has no such sample or bytes; this is a bug in Dayfly")]
    NotInCatalog,
}

impl OriginError {
    /// Returns whether the file system may succeed a moment later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Io { error, .. } => error.kind() != io::ErrorKind::PermissionDenied,
            error => matches!(error, Self::ShortRead { .. }),
        }
    }

    /// Turns the system's answer into an error.
    pub(super) fn io(path: &Path, offset: u64, error: io::Error) -> Self {
        let path = path.to_owned();
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOENT) => Self::Missing { path },
            Some(Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV | Errno::ENXIO) => Self::Changed {
                path,
                what: "something else has taken the place of the file or of a directory above it".to_owned(),
            },
            _ => Self::Io { path, offset, error: Arc::new(error) },
        }
    }

    /// Returns whether a network file system has forgotten the file behind a descriptor.
    pub(super) fn is_stale(&self) -> bool {
        matches!(self, Self::Io { error, .. } if error.raw_os_error() == Some(Errno::ESTALE as i32))
    }
}
