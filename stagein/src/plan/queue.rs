//! Units in a file, so that a plan of many million files costs no memory, and the order in which they are handed out.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;

use dayfly_meta::checksum::{check, checksum};
use dayfly_meta::limits::{FRAME_BODY_LEN_MAX, SMALL_UNIT_BYTES_MAX, UNIT_BYTES_MAX};
use dayfly_meta::wire::peer::Unit;
use dayfly_meta::wire::{decode, encode};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::StageInError;

/// The units of a plan. Large ones come first, so that none is begun when the others are done; the rest come in random order, so
/// that what lies together in the sources is not stored at the same time.
pub struct UnitQueue {
    file: BufWriter<File>,
    end: u64,
    places: Vec<Place>,
}

struct Place {
    offset: u64,
    len: u32,
    /// The file is not synced: what the drive has lost of it must not pass for a unit.
    checksum: u32,
    /// Bytes of the source that it reads.
    bytes: u64,
}

impl UnitQueue {
    pub(crate) fn new(scratch: File) -> Self {
        Self { file: BufWriter::new(scratch), end: 0, places: Vec::new() }
    }

    /// Adds a unit that reads so many bytes.
    pub(crate) fn push(&mut self, unit: &Unit, bytes: u64) -> io::Result<()> {
        let encoded = encode(unit);
        if encoded.len() > FRAME_BODY_LEN_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a unit is too long"));
        }
        self.file.write_all(&encoded)?;
        self.places.push(Place { offset: self.end, len: encoded.len() as u32, checksum: checksum(&encoded), bytes });
        self.end += encoded.len() as u64;
        Ok(())
    }

    /// To be called once all units are there.
    pub(crate) fn close(&mut self, seed: u64) -> io::Result<()> {
        self.file.flush()?;
        // They are taken from the end.
        let weight = |place: &Place| if place.bytes > UNIT_BYTES_MAX { place.bytes } else { 0 };
        self.places.sort_by_cached_key(|place| (weight(place), xxh3_64_with_seed(&place.offset.to_le_bytes(), seed)));
        Ok(())
    }

    /// The length of the next unit as a message, if it is a small one.
    pub(crate) fn next_small_len(&self) -> Option<usize> {
        self.places.last().filter(|place| place.bytes <= SMALL_UNIT_BYTES_MAX).map(|place| place.len as usize)
    }

    /// The next unit; `None` after the last.
    pub fn next_unit(&mut self) -> Result<Option<Unit>, StageInError> {
        let Some(Place { offset, len, checksum, .. }) = self.places.pop() else { return Ok(None) };
        let mut bytes = vec![0; len as usize];
        self.file.get_ref().read_exact_at(&mut bytes, offset).map_err(StageInError::TempFile)?;
        check(&bytes, checksum).map_err(|error| StageInError::TempFile(io::Error::other(error)))?;
        decode(&bytes).map(Some).map_err(|error| StageInError::TempFile(io::Error::other(error)))
    }
}
