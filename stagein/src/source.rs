//! Sources and their formats: a plain or compressed tar, a zip, a directory tree, or a single file.
//! A file's contents decide which of these it is; its name matters only where the contents cannot
//! decide.
//!
//! - `plain` reads uncompressed files in large sequential reads.
//! - `tar` and `zip` parse archives. They check every field, and no header makes them allocate
//!   memory in advance.
//! - `compressed` decodes streams; whole archives are decoded on separate threads.
//! - `directory` walks trees.

pub(crate) mod compressed;
pub(crate) mod directory;
pub(crate) mod plain;
pub(crate) mod tar;
pub(crate) mod zip;

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;

use dayfly_meta::catalog::{Compression, SourceKind};

use crate::StageInError;
use crate::error::{exceeds_memory, is_of_system};

/// Name endings of archives. A source with such a name but other contents is an error; it does not
/// become a sample.
const ARCHIVE_ENDINGS: [&str; 20] = [
    ".tar.gz", ".tar.xz", ".tar.zst", ".tar.bz2", ".tar.lz4", ".tar", ".tgz", ".taz", ".tbz", ".tbz2", ".tb2", ".txz", ".tlz4",
    ".tzst", ".crate", ".zip", ".whl", ".egg", ".jar", ".cbz",
];
/// Name endings of zips. Many other files are zips inside (`.npz`, `.pt`, `.docx`) and are samples,
/// so a zip is unpacked only if its name says so.
const ZIP_ENDINGS: [&str; 5] = [".zip", ".whl", ".egg", ".jar", ".cbz"];

/// Determines the kind and compression of the regular file at `path`. Within a tree, an empty tar is no archive, as in an archive. A
/// decoder takes at most `decoder_memory` bytes.
pub(crate) fn classify(path: &Path, is_in_tree: bool, decoder_memory: u64) -> Result<(SourceKind, Compression), StageInError> {
    let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
    let mut file = File::open(path).map_err(unreadable)?;
    let mut start = Vec::with_capacity(tar::BLOCK_LEN);
    (&mut file).take(tar::BLOCK_LEN as u64).read_to_end(&mut start).map_err(unreadable)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let is_zip = || zip::is_zip(&start) || !tar::is_tar(&start) && zip::ends_as_zip(&file);
    if ZIP_ENDINGS.iter().any(|ending| name.ends_with(ending)) && is_zip() {
        return Ok((SourceKind::Zip, Compression::None));
    }
    let compression = compressed::recognize_file(&file, &start).map_err(unreadable)?;
    if compression != Compression::None {
        file.rewind().map_err(unreadable)?;
        let mut decoder = compressed::Decoded::new(compressed::decoder(compression, file, decoder_memory).map_err(unreadable)?);
        let mut unpacked = Vec::with_capacity(tar::BLOCK_LEN);
        decoder.by_ref().take(tar::BLOCK_LEN as u64).read_to_end(&mut unpacked).map_err(|error| {
            let (path, offset, reason) = (path.to_owned(), unpacked.len() as u64, error.to_string());
            match is_of_system(&error) {
                _ if exceeds_memory(&error) => {
                    let window = compressed::window_len(compression, &start);
                    StageInError::WindowTooLarge { path, window, memory_max: decoder_memory, is_nested: false }
                }
                true => StageInError::ReadAt { path, offset, is_decompressed: true, error },
                false => StageInError::Damaged { path, offset, is_decompressed: true, reason },
            }
        })?;
        start = unpacked;
    }
    let is_named_archive = ARCHIVE_ENDINGS.iter().any(|ending| name.ends_with(ending)) || name.contains(".tar.");
    // An empty tar starts with zeros, and so do many disk images: here the name decides.
    if tar::is_tar(&start)
        || is_named_archive && !is_in_tree && start.len() == tar::BLOCK_LEN && start.iter().all(|&byte| byte == 0)
    {
        return Ok((SourceKind::Tar, compression));
    }
    if is_named_archive {
        return Err(StageInError::NotAnArchive { path: path.to_owned() });
    }
    Ok((SourceKind::File, Compression::None))
}

/// Returns whether a name has an archive's ending, such as `.tar.gz` or `.zip`.
pub fn has_archive_ending(name: &[u8]) -> bool {
    without_archive_ending(name).is_some()
}

/// Returns the path without an archive's ending. Returns `None` if the path has no such ending, or
/// if the file's name consists only of the ending.
pub(crate) fn without_archive_ending(path: &[u8]) -> Option<&[u8]> {
    let ends_with = |ending: &&str| {
        let start = path.len().checked_sub(ending.len())?;
        path[start..].eq_ignore_ascii_case(ending.as_bytes()).then_some(&path[..start])
    };
    let stem = ARCHIVE_ENDINGS.iter().find_map(ends_with)?;
    (!stem.is_empty() && !stem.ends_with(b"/")).then_some(stem)
}
