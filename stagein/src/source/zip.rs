//! Zip: the central directory at the archive's end says what there is and where. Every field is checked; nothing is allocated on
//! the word of a header.

pub(crate) mod data;
mod record;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dayfly_meta::limits::{UNIT_BYTES_MAX, UNIT_FILES_MAX, UNIT_NAMES_LEN_MAX};

pub(crate) use record::{Record, ZipKind};

use crate::StageInError;

/// Where the archive's end is looked for: its record and the longest comment.
const TAIL_LEN: u64 = 22 + 65_535;
/// Bytes of the central directory read at a time; more than its longest record.
const CHUNK_LEN: usize = 1 << 20;

/// Why a zip cannot be read.
#[derive(Debug)]
pub(crate) enum ZipError {
    /// The file system says so.
    Read(io::Error),
    /// Its bytes are none, or contradict each other.
    Damaged { offset: u64, reason: &'static str },
    /// It is well, but of a kind that is not read.
    Unsupported { offset: u64, reason: String },
}

impl ZipError {
    /// For the user, who knows the archive by its path.
    pub(crate) fn of(self, path: &Path) -> StageInError {
        let path = path.to_owned();
        match self {
            Self::Read(error) => StageInError::Read { path, error },
            Self::Damaged { offset, reason } => StageInError::Damaged { path, offset, reason: reason.to_owned() },
            Self::Unsupported { offset, reason } => StageInError::Unsupported { path, offset, reason },
        }
    }
}

impl From<io::Error> for ZipError {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

/// Whether a file that starts so is a zip.
pub(crate) fn is_zip(start: &[u8]) -> bool {
    start.starts_with(b"PK\x03\x04") || start.starts_with(b"PK\x05\x06")
}

/// Some records of the central directory that follow each other.
pub(crate) struct Part {
    /// Their bytes.
    pub(crate) records: Vec<u8>,
    /// Offset of the first in the file.
    pub(crate) offset: u64,
    /// Bytes of the members in the archive.
    pub(crate) bytes: u64,
}

/// Reads the central directory and gives it away in parts of a worker's size; returns how many bytes stand before the archive.
pub(crate) fn parts<E: From<ZipError>>(file: &File, take: &mut dyn FnMut(Part, u64) -> Result<(), E>) -> Result<(), E> {
    let directory = Directory::find(file)?;
    let mut offset = directory.start;
    let mut total = 0_u64;
    let mut part = Part { records: Vec::new(), offset, bytes: 0 };
    let mut count = 0;
    let mut chunk = Vec::new();
    while offset < directory.end {
        let len = (directory.end - offset).min(CHUNK_LEN as u64) as usize;
        chunk.resize(len, 0);
        file.read_exact_at(&mut chunk, offset).map_err(ZipError::Read)?;
        let mut at = 0;
        while let Some(record_len) = record::len(&chunk[at..]).map_err(|reason| damaged(offset + at as u64, reason))? {
            total += 1;
            let bytes = &chunk[at..at + record_len];
            part.bytes += record::stored_len(bytes);
            part.records.extend_from_slice(bytes);
            at += record_len;
            count += 1;
            if count == UNIT_FILES_MAX * 4 || part.bytes >= UNIT_BYTES_MAX || part.records.len() >= UNIT_NAMES_LEN_MAX {
                let next = Part { records: Vec::new(), offset: offset + at as u64, bytes: 0 };
                take(std::mem::replace(&mut part, next), directory.shift)?;
                count = 0;
            }
        }
        if at == 0 {
            return Err(damaged(offset, "a member that its central directory cuts short").into());
        }
        offset += at as u64;
    }
    // Without zip64 some writers count in 16 bits, whatever the number.
    if total & directory.records_mask != directory.records {
        return Err(damaged(directory.end, "another number of members than its end record says").into());
    }
    if count > 0 { take(part, directory.shift) } else { Ok(()) }
}

/// Where the central directory lies.
struct Directory {
    start: u64,
    end: u64,
    records: u64,
    /// The bits of their number that are told.
    records_mask: u64,
    shift: u64,
}

impl Directory {
    fn find(file: &File) -> Result<Self, ZipError> {
        let size = file.metadata()?.len();
        let tail_start = size.saturating_sub(TAIL_LEN);
        let mut tail = vec![0; (size - tail_start) as usize];
        file.read_exact_at(&mut tail, tail_start)?;
        let is_end = |at: &usize| {
            let record = &tail[*at..];
            record.starts_with(b"PK\x05\x06") && record.len() >= 22 && usize::from(u16_at(record, 20)) <= record.len() - 22
        };
        let none = || damaged(size, "it breaks off: its central directory is missing");
        let at = (0..tail.len().saturating_sub(21)).rev().find(is_end).ok_or_else(none)?;
        let end_record = &tail[at..];
        let mut end = tail_start + at as u64;
        let mut disks = u64::from(u16_at(end_record, 4)) | u64::from(u16_at(end_record, 6));
        let (mut records, mut records_mask) = (u64::from(u16_at(end_record, 10)), u64::from(u16::MAX));
        let mut len = u64::from(u32_at(end_record, 12));
        let mut offset = u64::from(u32_at(end_record, 16));
        if let Some(at) = at.checked_sub(20).filter(|&at| tail[at..].starts_with(b"PK\x06\x07")) {
            let place = end;
            // Its own offset does not count what stands before the archive; where the record must end does.
            let stated = u64_at(&tail[at..], 8);
            let mut record = [0; 56];
            let near = (tail_start + at as u64).checked_sub(56);
            let found = [Some(stated), near]
                .into_iter()
                .flatten()
                .find(|&place| file.read_exact_at(&mut record, place).is_ok() && record.starts_with(b"PK\x06\x06"));
            end = found.ok_or(damaged(place, "its zip64 end record is missing"))?;
            disks = u64::from(u32_at(&record, 16)) | u64::from(u32_at(&record, 20));
            (records, records_mask) = (u64_at(&record, 32), u64::MAX);
            len = u64_at(&record, 40);
            offset = u64_at(&record, 48);
        }
        if disks != 0 {
            return Err(ZipError::Unsupported { offset: end, reason: "it is one of several volumes".to_owned() });
        }
        let start = end.checked_sub(len).ok_or(damaged(end, "a central directory longer than the archive"))?;
        let shift = start.checked_sub(offset).ok_or(damaged(end, "a central directory beyond its end"))?;
        Ok(Self { start, end, records, records_mask, shift })
    }
}

pub(super) fn damaged(offset: u64, reason: &'static str) -> ZipError {
    ZipError::Damaged { offset, reason }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u16::from_le_bytes(*bytes))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests;
