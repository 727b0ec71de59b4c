//! The dynamic section of an ELF file: which libraries a library needs, and the folders that it names for them.
//!
//! The bytes are hostile until checked: every offset is looked up in the program headers, and every count has a bound.

use crate::fault::Fault;

/// The most bytes of program headers, or of a dynamic section, that are read. Real ones have hundreds.
const TABLE_LEN_MAX: u64 = 64 << 10;
/// The most bytes of a string that are read.
const STRING_LEN_MAX: usize = 4096;

const LOADED: u32 = 1;
const DYNAMIC: u32 = 2;

const NEEDED: u64 = 1;
const STRINGS: u64 = 5;
const OLD_FOLDERS: u64 = 15;
const FOLDERS: u64 = 29;

/// What a library needs.
pub(crate) struct Needs {
    /// The names of libraries, as in `DT_NEEDED`.
    pub(crate) names: Vec<Vec<u8>>,
    /// The folders of `DT_RUNPATH`, or else of `DT_RPATH`.
    pub(crate) folders: Vec<Vec<u8>>,
}

struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    len: u64,
}

/// Reads a library's needs with `read_at(offset, buffer)`. `None` if the file is not a 64-bit ELF file with a dynamic section.
pub(crate) fn needs(read_at: impl Fn(u64, &mut [u8]) -> Result<usize, Fault>) -> Result<Option<Needs>, Fault> {
    let read = |offset: u64, len: usize| {
        let mut bytes = vec![0; len];
        let count = read_at(offset, &mut bytes)?;
        bytes.truncate(count);
        Ok::<_, Fault>(bytes)
    };
    let header = read(0, 64)?;
    if !header.starts_with(b"\x7fELF\x02\x01") || header.len() < 64 {
        return Ok(None);
    }
    let (len, count) = (u64::from(half(&header, 54)), u64::from(half(&header, 56)));
    if len < 56 || len * count > TABLE_LEN_MAX {
        return Ok(None);
    }
    let table = read(long(&header, 32), (len * count) as usize)?;
    let segments: Vec<Segment> = table.chunks_exact(len as usize).map(segment).collect();
    let Some(dynamic) = segments.iter().find(|segment| segment.kind == DYNAMIC) else { return Ok(None) };
    let bytes = read(dynamic.offset, dynamic.len.min(TABLE_LEN_MAX) as usize)?;
    let entries: Vec<(u64, u64)> =
        bytes.chunks_exact(16).map(|entry| (long(entry, 0), long(entry, 8))).take_while(|entry| entry.0 != 0).collect();
    let value = |tag: u64| entries.iter().find(|entry| entry.0 == tag).map(|entry| entry.1);
    let Some(strings) = value(STRINGS).and_then(|address| offset_of(&segments, address)) else { return Ok(None) };
    let string = |at: u64| {
        let mut bytes = read(strings.saturating_add(at), STRING_LEN_MAX)?;
        bytes.truncate(bytes.iter().position(|&byte| byte == 0).unwrap_or(0));
        Ok::<_, Fault>(bytes)
    };
    let names = entries.iter().filter(|entry| entry.0 == NEEDED).map(|entry| string(entry.1)).collect::<Result<_, _>>()?;
    let folders = value(FOLDERS).or_else(|| value(OLD_FOLDERS)).map_or_else(|| Ok(Vec::new()), string)?;
    let folders = folders.split(|&byte| byte == b':').filter(|folder| !folder.is_empty()).map(<[u8]>::to_vec).collect();
    Ok(Some(Needs { names, folders }))
}

fn segment(header: &[u8]) -> Segment {
    Segment { kind: word(header, 0), offset: long(header, 8), address: long(header, 16), len: long(header, 32) }
}

/// Returns the file offset of the bytes that will be loaded at an address.
fn offset_of(segments: &[Segment], address: u64) -> Option<u64> {
    let within =
        |segment: &&Segment| segment.kind == LOADED && address.checked_sub(segment.address).is_some_and(|at| at < segment.len);
    let segment = segments.iter().find(within)?;
    (address - segment.address).checked_add(segment.offset)
}

fn half(bytes: &[u8], at: usize) -> u16 {
    number::<2>(bytes, at) as u16
}

fn word(bytes: &[u8], at: usize) -> u32 {
    number::<4>(bytes, at) as u32
}

fn long(bytes: &[u8], at: usize) -> u64 {
    number::<8>(bytes, at)
}

/// Returns a number of `LEN` bytes; 0 if the bytes end too early.
fn number<const LEN: usize>(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..at + LEN).unwrap_or_default();
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs_of(bytes: &[u8]) -> Option<Needs> {
        let read_at = |offset: u64, buffer: &mut [u8]| {
            let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
            let count = rest.len().min(buffer.len());
            buffer[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        };
        needs(read_at).unwrap_or_else(|_| panic!("reading memory does not fail"))
    }

    /// A file with one loaded segment, whose addresses begin at 0x1000, a dynamic section at 200 and strings at 400.
    fn library(entries: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0; 500];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (bytes[32], bytes[54], bytes[56]) = (64, 56, 2);
        for (at, kind, offset, address, len) in [(64, LOADED, 0, 0x1000, 500), (120, DYNAMIC, 200, 0, 160_u64)] {
            bytes[at..at + 4].copy_from_slice(&kind.to_le_bytes());
            for (at, value) in [(at + 8, offset), (at + 16, address), (at + 32, len)] {
                bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(value));
            }
        }
        for (number, (tag, value)) in entries.iter().enumerate() {
            let at = 200 + number * 16;
            bytes[at..at + 8].copy_from_slice(&tag.to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&value.to_le_bytes());
        }
        bytes[400..431].copy_from_slice(b"\0libone.so\0libtwo.so\0/a:$ORIGIN");
        bytes
    }

    #[test]
    fn needed_libraries_and_their_folders_are_found() {
        let found = needs_of(&library(&[(NEEDED, 1), (STRINGS, 0x1000 + 400), (NEEDED, 11), (OLD_FOLDERS, 0), (FOLDERS, 21)]));
        let found = found.expect("a dynamic section");
        assert_eq!(found.names, [&b"libone.so"[..], b"libtwo.so"]);
        assert_eq!(found.folders, [&b"/a"[..], b"$ORIGIN"]);
    }

    #[test]
    fn damaged_files_need_nothing() {
        assert!(needs_of(b"").is_none() && needs_of(b"#!/bin/sh").is_none() && needs_of(&[0x7f; 64]).is_none());
        let whole = library(&[(STRINGS, 0x1000 + 400), (NEEDED, u64::MAX), (FOLDERS, u64::MAX - 4)]);
        for len in 0..whole.len() {
            needs_of(&whole[..len]);
        }
        for at in 0..200 {
            let mut damaged = whole.clone();
            damaged[at] = 0xff;
            needs_of(&damaged);
        }
    }
}
