//! Reads a zip. The central directory at the end of the file lists all members with their
//! positions.
//!
//! The coordinator finds the directory and splits its records into [`Part`]s, one per unit; a
//! worker parses the records of its part (`record`) and unpacks the members (`data`). Every field
//! is checked, and no memory is allocated merely because a header claims a size.

pub(crate) mod data;
mod record;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dayfly_meta::limits::{UNIT_BYTES_MAX, UNIT_FILES_MAX, UNIT_NAMES_LEN_MAX};

pub(crate) use record::{Record, ZipKind};

use crate::StageInError;

/// The number of bytes at the end of the file in which the end record is searched for. It is the
/// length of the record plus that of the longest possible comment.
const TAIL_LEN: u64 = 22 + 65_535;
/// Bytes of the central directory that are read at once. The longest record is shorter.
const CHUNK_LEN: usize = 1 << 20;

/// The reason why a zip cannot be read.
#[derive(Debug)]
pub(crate) enum ZipError {
    /// The file cannot be read.
    Read(io::Error),
    /// The zip is damaged or contradicts itself at this offset.
    Damaged { offset: u64, reason: &'static str },
    /// The zip is valid, but uses a feature that this version does not support.
    Unsupported { offset: u64, reason: String },
    /// The file is the last part of a zip that was split.
    Split,
}

impl ZipError {
    /// Adds the path of the archive.
    pub(crate) fn into_stage_in_error(self, path: &Path) -> StageInError {
        let path = path.to_owned();
        match self {
            Self::Read(error) => StageInError::Read { path, error },
            Self::Damaged { offset, reason } => {
                StageInError::Damaged { path, offset, is_decompressed: false, reason: reason.to_owned() }
            }
            Self::Unsupported { offset, reason } => StageInError::Unsupported { path, offset, reason },
            Self::Split => StageInError::SplitZip { path },
        }
    }
}

impl From<io::Error> for ZipError {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

/// Returns whether a file with these first bytes is a zip.
pub(crate) fn is_zip(start: &[u8]) -> bool {
    start.starts_with(b"PK\x03\x04") || start.starts_with(b"PK\x05\x06")
}

/// Returns whether a file ends as a zip does, whatever comes first: a self-extracting zip begins with a program, and the last part of
/// a split zip with the middle of a member.
pub(crate) fn ends_as_zip(file: &File) -> bool {
    matches!(Directory::find(file), Ok(_) | Err(ZipError::Split))
}

/// Consecutive records of the central directory that make one unit.
pub(crate) struct Part {
    /// The records, unparsed.
    pub(crate) records: Vec<u8>,
    /// Offset of the first record in the file.
    pub(crate) offset: u64,
    /// Bytes that the members take in the archive.
    pub(crate) bytes: u64,
}

/// Reads the central directory and calls `take` for each part. The second argument of `take` is the
/// number of bytes before the archive in its file. For example, a self-extracting zip starts with a
/// program. The offsets in the records do not include these bytes.
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
            return Err(damaged(offset, "a record of the central directory is truncated").into());
        }
        offset += at as u64;
    }
    // Some programs write more than 65,535 members without zip64; the 16-bit count then wraps.
    if total & directory.records_mask != directory.records {
        return Err(damaged(directory.end, "the number of members differs from the one in the end record").into());
    }
    if count > 0 { take(part, directory.shift) } else { Ok(()) }
}

/// The position of the central directory.
struct Directory {
    start: u64,
    end: u64,
    /// Number of records according to the end record.
    records: u64,
    /// The end record stores only these bits of the number of records.
    records_mask: u64,
    /// Bytes before the archive in its file.
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
        let none = || damaged(size, "the archive is truncated: its central directory is missing");
        let at = (0..tail.len().saturating_sub(21)).rev().find(is_end).ok_or_else(none)?;
        let end_record = &tail[at..];
        let mut end = tail_start + at as u64;
        let mut disks = u64::from(u16_at(end_record, 4)) | u64::from(u16_at(end_record, 6));
        let (mut records, mut records_mask) = (u64::from(u16_at(end_record, 10)), u64::from(u16::MAX));
        let mut len = u64::from(u32_at(end_record, 12));
        let mut offset = u64::from(u32_at(end_record, 16));
        if let Some(at) = at.checked_sub(20).filter(|&at| tail[at..].starts_with(b"PK\x06\x07")) {
            let locator_end = end;
            // The stated offset does not count bytes before the archive. If there is no record at
            // that offset, the record is usually right before its locator.
            let stated = u64_at(&tail[at..], 8);
            let mut record = [0; 56];
            let near = (tail_start + at as u64).checked_sub(56);
            let found = [Some(stated), near]
                .into_iter()
                .flatten()
                .find(|&offset| file.read_exact_at(&mut record, offset).is_ok() && record.starts_with(b"PK\x06\x06"));
            end = found.ok_or(damaged(locator_end, "the zip64 end record is missing"))?;
            disks = u64::from(u32_at(&record, 16)) | u64::from(u32_at(&record, 20));
            (records, records_mask) = (u64_at(&record, 32), u64::MAX);
            len = u64_at(&record, 40);
            offset = u64_at(&record, 48);
        }
        if disks != 0 {
            return Err(ZipError::Split);
        }
        let start = end.checked_sub(len).ok_or(damaged(end, "the central directory claims to be longer than the archive"))?;
        let shift = start.checked_sub(offset).ok_or(damaged(end, "the central directory claims to start after its end"))?;
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
