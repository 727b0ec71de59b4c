//! Which file to open for a sample, and how to recognize that it is the file that was staged in.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dayfly_meta::catalog::{Catalog, Compression, Place, Source, SourceKind, Version};
use dayfly_meta::id::SampleId;

use super::error::OriginError;
use super::files::FileState;

/// The file that contains a sample.
pub(super) struct Target {
    /// Number of the source.
    pub(super) source: u32,
    /// Path of the source, or of the file if symlinks in the source are followed.
    pub(super) source_path: Vec<u8>,
    /// Path of the file below the source, if the source is a directory, in which no symlinks are followed.
    pub(super) below: Option<Vec<u8>>,
    /// The file's full path, for messages.
    pub(super) path: PathBuf,
    /// Where the sample's bytes lie in the file.
    pub(super) place: Place,
    /// Size of the sample in bytes.
    pub(super) size: u64,
    expected: Expected,
}

/// What the file looked like at stage-in.
enum Expected {
    /// A source of its own. The inode is 0 if it is unknown.
    Source { version: Version, inode: u64 },
    /// A file in a tree.
    TreeFile { mtime_s: i64, mtime_ns: u32 },
}

impl Target {
    pub(super) fn of(catalog: &Catalog, sample: SampleId) -> Result<Self, OriginError> {
        Self::find(catalog, sample).ok_or(OriginError::NotInCatalog)?
    }

    fn find(catalog: &Catalog, sample: SampleId) -> Option<Result<Self, OriginError>> {
        let origin = catalog.origin(sample)?;
        let Source { path: source_path, kind, compression, version, inode, .. } = catalog.source(origin.source)?;
        let (size, _) = catalog.sample(sample)?;
        let mut path = Path::new(OsStr::from_bytes(&source_path)).to_owned();
        if compression != Compression::None {
            return Some(Err(OriginError::Unsupported { path, reason: "it is a compressed tar" }));
        }
        let (mut source_path, mut below, mut expected) = (source_path, None, Expected::Source { version, inode });
        if matches!(kind, SourceKind::Directory | SourceKind::FollowedDirectory) {
            let inner = catalog.path_in_source(sample)?;
            path.push(OsStr::from_bytes(&inner));
            match kind {
                SourceKind::Directory => below = Some(inner),
                // The path may lead through symlinks, and out of the directory.
                _ => source_path = path.as_os_str().as_bytes().to_vec(),
            }
            let attributes = catalog.attributes(&catalog.entry_of(sample)?)?;
            expected = Expected::TreeFile { mtime_s: attributes.mtime_s, mtime_ns: attributes.mtime_ns };
        }
        Some(Ok(Self { source: origin.source, source_path, below, path, place: origin.place, size, expected }))
    }

    /// Returns a target for all of a source that is a file.
    pub(super) fn of_source(catalog: &Catalog, source: u32) -> Result<Self, OriginError> {
        let Source { path, version, inode, .. } = catalog.source(source).ok_or(OriginError::NotInCatalog)?;
        let (full, expected) = (Path::new(OsStr::from_bytes(&path)).to_owned(), Expected::Source { version, inode });
        Ok(Self { source, source_path: path, below: None, path: full, place: Place::Tree, size: version.size, expected })
    }

    /// Returns the offset of the sample's record, for messages.
    pub(super) fn offset(&self) -> u64 {
        match self.place {
            Place::Bytes { offset } | Place::SparseTar { offset, .. } => offset,
            Place::ZipRecord { offset, .. } | Place::Nested { offset, .. } => offset,
            Place::Tree => 0,
        }
    }

    /// Compares an open file with what was staged in. Its change time does not count: it is another one once the file has been moved
    /// away and back, and checksums show what size and modification time do not.
    pub(super) fn check(&self, found: &FileState) -> Result<(), OriginError> {
        let Version { size, mtime_s, mtime_ns, .. } = found.version;
        let (expected_size, same_mtime, same_inode) = match self.expected {
            Expected::Source { version, inode } => {
                (version.size, (mtime_s, mtime_ns) == (version.mtime_s, version.mtime_ns), inode == 0 || inode == found.inode)
            }
            Expected::TreeFile { mtime_s: s, mtime_ns: ns } => (self.size, (mtime_s, mtime_ns) == (s, ns), true),
        };
        if !found.is_file {
            return Err(self.changed("it is not a regular file"));
        }
        if size != expected_size {
            return Err(self.changed(&format!("it has {size} bytes and had {expected_size}")));
        }
        if !same_mtime {
            return Err(self.changed("it was modified"));
        }
        if same_inode { Ok(()) } else { Err(self.changed("it was replaced by another file")) }
    }

    pub(super) fn changed(&self, what: &str) -> OriginError {
        OriginError::Changed { path: self.path.clone(), what: what.to_owned() }
    }

    pub(super) fn unsupported_nested(&self) -> OriginError {
        OriginError::Unsupported { path: self.path.clone(), reason: "the sample is in an archive within it" }
    }
}
