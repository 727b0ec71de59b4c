//! Records where each shipped block lies, by arrival number. The table is a file with one word per block, so that memory does
//! not grow with the number of blocks.
//!
//! The file is not synced. A page that the drive loses reads as it was before, or as zeros. Each word is written only once, so
//! a lost word is zero, which is not a valid position. The block then counts as missing, and the stage-in fails.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::shared::SharedWords;

use crate::store::Drive;

/// Positions by arrival number.
pub(super) struct ArrivalTable {
    file: File,
    /// The drive that the file is on.
    drive: Arc<Drive>,
    /// Set when all blocks have arrived.
    map: OnceLock<SharedWords>,
}

impl ArrivalTable {
    /// Creates an empty table on a drive.
    pub(super) fn new(drive: Arc<Drive>) -> io::Result<Self> {
        Ok(Self { file: drive.unnamed_file()?, drive, map: OnceLock::new() })
    }

    /// Writes the positions of blocks with consecutive arrival numbers, which start at `first`.
    pub(super) fn write(&self, first: u32, positions: &[DrivePosition]) -> io::Result<()> {
        let words: Vec<u8> = positions.iter().flat_map(|position| Location::Owned(*position).pack().to_le_bytes()).collect();
        self.file.write_all_at(&words, u64::from(first) * 8).map_err(|error| self.drive.failure(error))
    }

    /// Opens the table for [`Self::find`], after all `count` blocks have been written.
    pub(super) fn finish(&self, count: u32) -> io::Result<()> {
        if count == 0 {
            return Ok(());
        }
        let mapped = self.file.set_len(u64::from(count) * 8).and_then(|()| SharedWords::map(&self.file, count as usize, false));
        // A second call would map the same file, so the first map stays.
        let _ = self.map.set(mapped.map_err(|error| self.drive.failure(error))?);
        Ok(())
    }

    pub(super) fn find(&self, arrival: u32) -> Option<DrivePosition> {
        self.map.get().and_then(|words| Location::unpack(words.load(arrival as usize))?.position())
    }
}
