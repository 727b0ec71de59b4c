//! Everything that can go wrong in a stage-in. Each message names the source or sample, the
//! position of the problem in it, the reason, and what the user can do about it.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{DECODER_MEMORY_MAX, SAMPLE_SIZE_MAX, SOURCE_PATHS_LEN_MAX, SOURCES_MAX};
use dayfly_meta::text::show_bytes;

/// The advice that ends some messages. It is left out of the notes about what `--keep-going`
/// skipped.
const KEEP_GOING_ADVICE: &str = ", or skip what cannot be read with --keep-going";

/// The start of [`StageInError::NoRoom`]'s message. The coordinator, to which some failures come as text, adds amounts to it.
pub const NO_ROOM: &str = "no node has room left";

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
    /// The file that `@LIST` names cannot be used as a list of sources.
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
    /// A source, or a file in a tree, cannot be opened or read.
    #[error("cannot read '{}': {error}; {}{KEEP_GOING_ADVICE}", path.display(), read_advice(error))]
    Read {
        /// Path of the file or directory.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The file system failed while an archive was read. This does not mean that the archive is
    /// damaged.
    #[error(
        "cannot read '{}' at byte {offset}{}: {error}; {}{KEEP_GOING_ADVICE}",
        path.display(), of_contents(*is_decompressed), read_advice(error)
    )]
    ReadAt {
        /// Path of the archive. For an archive within an archive, it begins with the outer
        /// archive's path.
        path: PathBuf,
        /// Offset in the archive, as in [`Self::Damaged`].
        offset: u64,
        /// Whether the offset is counted after decompression.
        is_decompressed: bool,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// With `--dereference`, a symlink in a tree leads to nothing.
    #[error(
        "'{}' is a symbolic link to '{}', which does not exist; leave it out with --exclude{KEEP_GOING_ADVICE}",
        path.display(), target.display()
    )]
    Dangling {
        /// Path of the symlink.
        path: PathBuf,
        /// What it leads to.
        target: PathBuf,
    },
    /// With `--dereference`, a symlink in a tree leads to a directory that contains it.
    #[error("'{}' leads back to a directory that contains it; leave it out with --exclude{KEEP_GOING_ADVICE}", path.display())]
    Loop {
        /// Path at which the directory was found again.
        path: PathBuf,
    },
    /// With `--dereference`, symlinks lead to directories again and again.
    #[error(
        "'{}' has more than {max} directories, because symbolic links in it lead to directories again and again; leave some of them \
         out with --exclude, or pass --max-directories to allow more",
        path.display()
    )]
    TooManyDirectories {
        /// Path of the tree.
        path: PathBuf,
        /// How many directories it may have.
        max: u64,
    },
    /// A source is a device, FIFO or socket.
    #[error("'{}' is neither a file nor a directory; a device, FIFO or socket cannot be staged in", path.display())]
    SpecialFile {
        /// Path of the source.
        path: PathBuf,
    },
    /// A file has an archive's name, but not an archive's contents.
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
        "'{}' is damaged at byte {offset}{}: {reason}; replace it with an intact copy{KEEP_GOING_ADVICE}",
        path.display(), of_contents(*is_decompressed)
    )]
    Damaged {
        /// Path of the archive. For an archive within an archive, it begins with the outer
        /// archive's path.
        path: PathBuf,
        /// Offset in the archive.
        offset: u64,
        /// Whether the offset is counted after decompression, as in a compressed tar.
        is_decompressed: bool,
        /// What is wrong there.
        reason: String,
    },
    /// The decoder of an archive would need too much memory.
    #[error(
        "'{}' was compressed with so large a window{} that its decoder needs more than {} of memory; {}compress it again with a \
         smaller one, as 'zstd -19' and 'xz -6' do{KEEP_GOING_ADVICE}",
        path.display(), show_window(*window), show_bytes(*memory_max), more_memory_advice(*window, *memory_max, *is_nested)
    )]
    WindowTooLarge {
        /// Path of the archive. For an archive within an archive, it begins with the outer
        /// archive's path.
        path: PathBuf,
        /// The window in bytes, if it is known. 0 stands for unknown.
        window: u64,
        /// How many bytes a decoder may take.
        memory_max: u64,
        /// Whether the archive, or what cannot be decoded, lies in another archive.
        is_nested: bool,
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
    /// A zip is split into parts, of which this one is the last.
    #[error(
        "'{}' is the last part of a split zip, which cannot be unpacked; join the parts with `zip -s 0 PART.zip --out WHOLE.zip` and \
         stage in the whole, or stage archives in as files with --no-unpack",
        path.display()
    )]
    SplitZip {
        /// Path of the last part.
        path: PathBuf,
    },
    /// A source has changed since it was planned or opened.
    #[error("'{}' changed while it was staged in; stage it in again once nothing writes to it", path.display())]
    Changed {
        /// Path of the source.
        path: PathBuf,
    },
    /// A file yields more or fewer bytes than its metadata promises, although it did not change.
    /// Files in /proc and /sys behave this way.
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
    #[error("{NO_ROOM} for '{sample}' ({})", show_bytes(*.size))]
    NoRoom {
        /// Path of the sample in the dataset.
        sample: String,
        /// The sample's size in bytes.
        size: u64,
    },
    /// A temporary file on a data dir failed.
    #[error("cannot use a temporary file of the stage-in: {0}")]
    TempFile(#[source] io::Error),
    /// A node did not store the blocks that were sent to it.
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
        /// The coordinator's answer, or why there was none.
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
        /// Path of the inner archive, which begins with the outer archive's path.
        path: PathBuf,
    },
    /// The stage-in was canceled, by its user or by a failure elsewhere.
    #[error("canceled")]
    Cancelled,
}

impl StageInError {
    /// Returns whether the error concerns only one source or member, so that `--keep-going` may
    /// skip it.
    pub(crate) fn is_of_source(&self) -> bool {
        match self {
            Self::Read { .. }
            | Self::ReadAt { .. }
            | Self::Damaged { .. }
            | Self::Unsupported { .. }
            | Self::SplitZip { .. }
            | Self::Changed { .. }
            | Self::WrongSize { .. }
            | Self::TooLarge { .. }
            | Self::NotAnArchive { .. }
            | Self::Dangling { .. }
            | Self::Loop { .. }
            | Self::WindowTooLarge { .. }
            | Self::TooManyMembers { .. } => true,
            Self::NoMatch(_)
            | Self::InvalidPattern { .. }
            | Self::InvalidList { .. }
            | Self::TooManySources { .. }
            | Self::SpecialFile { .. }
            | Self::TooManyDirectories { .. }
            | Self::NoRoom { .. }
            | Self::TempFile(_)
            | Self::Ship { .. }
            | Self::NoAssignment { .. }
            | Self::Corrupted { .. }
            | Self::Cancelled => false,
        }
    }

    /// Returns the error's message as it appears in the list of what `--keep-going` skipped.
    pub(crate) fn skip_note(&self) -> String {
        let message = self.to_string();
        match message.strip_suffix(KEEP_GOING_ADVICE).and_then(|rest| rest.rsplit_once("; ")) {
            Some((fact, _advice)) => fact.to_owned(),
            None => message,
        }
    }
}

fn read_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "make it readable for the user who runs the session",
        io::ErrorKind::NotFound => "make sure that it exists on every node",
        _ => "check the file system that it lies on",
    }
}

fn of_contents(is_decompressed: bool) -> &'static str {
    if is_decompressed { " of its decompressed contents" } else { "" }
}

/// Returns whether the system reported this error. A decoder may have wrapped the system's error. Other
/// errors mean that the bytes themselves are wrong.
pub(crate) fn is_of_system(error: &io::Error) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        cause = match error.downcast_ref::<io::Error>() {
            Some(error) if error.raw_os_error().is_some() => return true,
            Some(error) => error.get_ref().map(|inner| inner as &(dyn Error + 'static)),
            None => error.source(),
        };
    }
    false
}

fn show_window(window: u64) -> String {
    if (1..=DECODER_MEMORY_MAX).contains(&window) { format!(" ({})", show_bytes(window)) } else { String::new() }
}

fn more_memory_advice(window: u64, memory_max: u64, is_nested: bool) -> String {
    // zstd knows only powers of 2.
    match window.max(memory_max + 1).checked_next_power_of_two() {
        Some(wanted) if !is_nested && wanted <= DECODER_MEMORY_MAX => {
            format!("allow decoders more with --decoder-memory {}MiB, or ", wanted >> 20)
        }
        _ => String::new(),
    }
}

/// Returns whether a decoder reported that it may not take as much memory as it needs.
pub(crate) fn exceeds_memory(error: &io::Error) -> bool {
    // The decoders of zstd and xz.
    ["Frame requires too much memory for decoding", "memory limit reached"].contains(&error.to_string().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_errors_differ_from_damaged_bytes_and_skip_notes_have_no_advice() {
        let system = || io::Error::from_raw_os_error(5);
        let wrapped = io::Error::other(StageInError::TempFile(io::Error::other(system())));
        assert!(is_of_system(&system()) && is_of_system(&io::Error::other(system())) && is_of_system(&wrapped));
        assert!(!is_of_system(&io::ErrorKind::UnexpectedEof.into()) && !is_of_system(&io::Error::other("cancelled")));
        let path = PathBuf::from("/pfs/a.tar");
        let error = StageInError::ReadAt { path: path.clone(), offset: 512, is_decompressed: false, error: system() };
        assert_eq!(error.skip_note(), "cannot read '/pfs/a.tar' at byte 512: Input/output error (os error 5)");
        let error = StageInError::Damaged { path, offset: 512, is_decompressed: true, reason: "x; y".to_owned() };
        assert_eq!(error.skip_note(), "'/pfs/a.tar' is damaged at byte 512 of its decompressed contents: x; y");
    }
}
