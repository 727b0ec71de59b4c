//! Stores units in a temporary file, so that a plan of many millions of files takes little memory,
//! and decides in which order they are assigned.

use std::cmp::Reverse;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;

use dayfly_meta::checksum::{check, checksum};
use dayfly_meta::limits::{FRAME_BODY_LEN_MAX, SMALL_UNIT_BYTES_MAX, UNIT_BYTES_MAX};
use dayfly_meta::wire::peer::Unit;
use dayfly_meta::wire::{decode, encode};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::StageInError;

/// The units of a plan. Units that workers have received stay in the file, because they are assigned again if the worker's node is
/// lost.
///
/// Large units come first, so that no worker starts a large unit when the others have already
/// finished. The rest come in random order, so that samples that are neighbors in the sources do
/// not reach the owners' drives at the same time.
pub struct UnitQueue {
    file: BufWriter<File>,
    /// Length of the file in bytes.
    file_len: u64,
    /// The units. Once the queue is closed, they are in the order in which they are assigned.
    units: Vec<QueuedUnit>,
    /// Index of the next unit.
    next: usize,
}

/// Where an encoded unit is in the file.
struct QueuedUnit {
    offset: u64,
    len: u32,
    /// Checksum of the encoded unit. The file is not synced, and the checksum shows whether the
    /// drive has lost part of it.
    checksum: u32,
    /// Source bytes that the unit reads.
    source_bytes: u64,
}

impl UnitQueue {
    pub(crate) fn new(temp_file: File) -> Self {
        Self { file: BufWriter::new(temp_file), file_len: 0, units: Vec::new(), next: 0 }
    }

    /// Adds a unit that reads `source_bytes`.
    pub(crate) fn push(&mut self, unit: &Unit, source_bytes: u64) -> io::Result<()> {
        let encoded = encode(unit);
        if encoded.len() > FRAME_BODY_LEN_MAX {
            let reason = format!("a unit has {} bytes, but a message has at most {FRAME_BODY_LEN_MAX}", encoded.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        self.file.write_all(&encoded)?;
        let (offset, len) = (self.file_len, encoded.len() as u32);
        self.units.push(QueuedUnit { offset, len, checksum: checksum(&encoded), source_bytes });
        self.file_len += encoded.len() as u64;
        Ok(())
    }

    /// Orders the units. Must be called once, after the last `push`.
    pub(crate) fn close(&mut self, seed: u64) -> io::Result<()> {
        self.file.flush()?;
        let weight = |unit: &QueuedUnit| if unit.source_bytes > UNIT_BYTES_MAX { unit.source_bytes } else { 0 };
        self.units
            .sort_by_cached_key(|unit| (Reverse(weight(unit)), Reverse(xxh3_64_with_seed(&unit.offset.to_le_bytes(), seed))));
        Ok(())
    }

    /// Returns the encoded length of the next unit, if that unit is small enough to be assigned
    /// together with others.
    pub(crate) fn next_small_len(&self) -> Option<usize> {
        self.units.get(self.next).filter(|unit| unit.source_bytes <= SMALL_UNIT_BYTES_MAX).map(|unit| unit.len as usize)
    }

    /// Returns the number of units that have not been taken.
    pub(crate) fn left(&self) -> usize {
        self.units.len() - self.next
    }

    /// Takes the next unit, and returns it with its index; `None` after the last.
    ///
    /// # Errors
    ///
    /// [`StageInError::TempFile`] if the unit cannot be read back as it was written.
    pub fn next_unit(&mut self) -> Result<Option<(u32, Unit)>, StageInError> {
        let index = self.next as u32;
        let unit = self.unit(index)?;
        self.next += usize::from(unit.is_some());
        Ok(unit.map(|unit| (index, unit)))
    }

    /// Returns a unit, whether it has been taken or not; `None` if there is no such unit.
    ///
    /// # Errors
    ///
    /// As for [`Self::next_unit`].
    pub fn unit(&self, index: u32) -> Result<Option<Unit>, StageInError> {
        let Some(&QueuedUnit { offset, len, checksum, .. }) = self.units.get(index as usize) else { return Ok(None) };
        let mut bytes = vec![0; len as usize];
        self.file.get_ref().read_exact_at(&mut bytes, offset).map_err(StageInError::TempFile)?;
        check(&bytes, checksum).map_err(|error| StageInError::TempFile(io::Error::other(error)))?;
        decode(&bytes).map(Some).map_err(|error| StageInError::TempFile(io::Error::other(error)))
    }
}
