//! Where each block lies, by the number it got when it arrived: a word each, in a file, so that memory does not grow with them.
//!
//! The file is not synced. A word is written once, so a page that its drive loses holds what was written of it before, or zeros, which
//! are no place: the block is missing then, and the stage-in fails.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::shared::SharedWords;

/// The table.
pub(super) struct Arrivals {
    file: File,
    map: OnceLock<SharedWords>,
}

impl Arrivals {
    /// In a nameless file.
    pub(super) fn new(file: File) -> Self {
        Self { file, map: OnceLock::new() }
    }

    /// Notes where blocks lie whose numbers follow each other.
    pub(super) fn write(&self, first: u32, places: &[DrivePosition]) -> io::Result<()> {
        let words: Vec<u8> = places.iter().flat_map(|place| Location::Owned(*place).pack().to_le_bytes()).collect();
        self.file.write_all_at(&words, u64::from(first) * 8)
    }

    /// All of `count` blocks are noted.
    pub(super) fn finish(&self, count: u32) -> io::Result<()> {
        if count == 0 {
            return Ok(());
        }
        self.file.set_len(u64::from(count) * 8)?;
        // Once is enough: nothing arrives any more.
        let _ = self.map.set(SharedWords::map(&self.file, count as usize, false)?);
        Ok(())
    }

    pub(super) fn find(&self, arrival: u32) -> Option<DrivePosition> {
        self.map.get().and_then(|words| Location::unpack(words.load(arrival as usize))?.position())
    }
}
