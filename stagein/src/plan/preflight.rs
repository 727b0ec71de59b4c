//! Looking at sources before anything is started for them. A plan finds the same, but it is made when a stage-in's turn comes, which may
//! be hours after another has begun.

use std::fs::{self, File};
use std::path::Path;

use dayfly_meta::wire::control::Selection;

use super::Watch;
use super::given::expand;
use crate::StageInError;
use crate::progress::ProgressMonitor;
use crate::selection::Selector;
use crate::source::classify;

/// Files whose content is looked at: of many sources the others are only opened, for each look costs a parallel file system a read.
const CLASSIFIED_MAX: usize = 256;

/// Checks that filters can be understood, that each path, glob and list names something, and that what they name can be read and is
/// what its name says.
///
/// # Errors
///
/// The first that a plan of the same sources would fail with, as far as it can be told without reading them.
pub fn check_sources(patterns: &[Vec<u8>], selection: &Selection) -> Result<(), StageInError> {
    Selector::new(selection)?;
    let monitor = ProgressMonitor::default();
    for (number, path) in expand(patterns, &Watch::new(&monitor))?.into_iter().enumerate() {
        let metadata = fs::metadata(&path).map_err(|error| StageInError::Read { path: path.clone(), error })?;
        if !metadata.is_dir() && !metadata.is_file() {
            return Err(StageInError::SpecialFile { path });
        }
        match check_content(&path, metadata.is_dir(), selection.no_unpack || number >= CLASSIFIED_MAX) {
            Err(error) if !selection.keep_going || !error.is_of_source() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn check_content(path: &Path, is_folder: bool, is_opened_only: bool) -> Result<(), StageInError> {
    let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
    match (is_folder, is_opened_only) {
        (true, _) => fs::read_dir(path).map(drop).map_err(unreadable),
        (false, true) => File::open(path).map(drop).map_err(unreadable),
        (false, false) => classify(path).map(drop),
    }
}
