//! Quickly checks sources before anything is started for them. Planning finds the same errors, but
//! a stage-in is planned only when its turn comes, which may be hours later.

use std::fs::{self, File};
use std::path::Path;

use dayfly_meta::wire::control::Selection;

use super::activity::PlanActivity;
use super::source_paths::expand;
use crate::StageInError;
use crate::progress::ProgressMonitor;
use crate::selection::Selector;
use crate::source::classify;

/// Number of files whose contents are read. Further files are only opened, to save the parallel
/// file system one read per file.
const CLASSIFIED_MAX: usize = 256;

/// Checks that the patterns of the selection parse, that each path, glob and list matches something,
/// that the matches can be read, and that files with an archive's name are archives.
///
/// # Errors
///
/// An error that planning would return too. Errors that lie deeper in a source than its first bytes
/// are not found.
pub fn check_sources(patterns: &[Vec<u8>], selection: &Selection) -> Result<(), StageInError> {
    Selector::new(selection)?;
    let monitor = ProgressMonitor::default();
    for (number, path) in expand(patterns, &PlanActivity::new(&monitor))?.into_iter().enumerate() {
        let metadata = fs::metadata(&path).map_err(|error| StageInError::Read { path: path.clone(), error })?;
        if !metadata.is_dir() && !metadata.is_file() {
            return Err(StageInError::SpecialFile { path });
        }
        match check_content(&path, metadata.is_dir(), selection, selection.no_unpack || number >= CLASSIFIED_MAX) {
            Err(error) if !selection.keep_going || !error.is_of_source() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn check_content(path: &Path, is_directory: bool, selection: &Selection, is_opened_only: bool) -> Result<(), StageInError> {
    let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
    match (is_directory, is_opened_only) {
        (true, _) => fs::read_dir(path).map(drop).map_err(unreadable),
        (false, true) => File::open(path).map(drop).map_err(unreadable),
        (false, false) => classify(path, false, selection.decoder_memory_max()).map(drop),
    }
}
