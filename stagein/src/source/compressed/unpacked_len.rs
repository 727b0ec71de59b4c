//! Finds out how many bytes a compressed file unpacks to, from what the file itself states about
//! that. Nothing is decoded, and only headers, footers and indexes are read.
//!
//! | format | what tells |
//! |---|---|
//! | zstd | the headers of all frames, or the seek table at the end (`t2sz`, seekable format) |
//! | lz4 | the headers of all frames, if written with `--content-size` |
//! | xz | the index of each stream, from the end of the file |
//! | gzip | the last four bytes; with `bgzip`, those of each block |
//! | bzip2 | nothing |
//!
//! `pzstd`, and zstd or lz4 in a pipe, leave the length out.
//!
//! All of these are claims. A claim that no compressed file of that length can fulfill is not
//! believed. Any other claim is: it makes a stage-in refuse its own source at worst.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use dayfly_meta::catalog::Compression;
use dayfly_meta::limits::{CHECKED_CONTENT_MAX, COMPRESSED_READ_LEN, XZ_INDEX_LEN_MAX};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::frames::{Content, FrameScanner};
use crate::StageInError;

/// How many bytes a compressed file unpacks to, as far as it tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnpackedLen {
    /// The part of the file that tells unpacks to this many bytes.
    pub(crate) told_bytes: u64,
    /// Length of the part of the file that does not tell.
    pub(crate) untold_len: u64,
}

/// Returns what `file` tells, after at most `reads_max` reads; four are enough unless there are many
/// frames or streams. Calls `check_in` before each read, and returns its error. A part that cannot be
/// read does not tell: the worker that reads it will report why.
pub(crate) fn unpacked_len(
    file: &File,
    compression: Compression,
    reads_max: u32,
    check_in: &mut dyn FnMut() -> Result<(), StageInError>,
) -> Result<UnpackedLen, StageInError> {
    let len = file.metadata().map_or(0, |metadata| metadata.len());
    // A file system may ignore this advice, which is no reason to fail.
    let _ = posix_fadvise(file.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
    let mut reader = Reader { file, len, buffer: Vec::new(), start: 0, reads_left: reads_max, check_in };
    let found = match compression {
        Compression::Zstd => match reader.seek_table()? {
            Some(told_bytes) => UnpackedLen { told_bytes, untold_len: 0 },
            None => reader.frames(compression)?,
        },
        Compression::Lz4 => reader.frames(compression)?,
        Compression::Xz => reader.xz_streams()?,
        Compression::Gzip if reader.bgzf_block_len(0)?.is_some() => reader.bgzf_blocks()?,
        Compression::Gzip => reader.gzip_claim()?,
        Compression::Bzip2 | Compression::None => UnpackedLen { told_bytes: 0, untold_len: len },
    };
    let is_possible = found.told_bytes <= (len - found.untold_len.min(len)).saturating_mul(growth_max(compression));
    Ok(if is_possible { found } else { UnpackedLen { told_bytes: 0, untold_len: len } })
}

/// Returns how many bytes each byte of a file can unpack to.
fn growth_max(compression: Compression) -> u64 {
    match compression {
        // Neither tells anything.
        Compression::None | Compression::Bzip2 => 1,
        // A match of 258 bytes takes at least two bits.
        Compression::Gzip => 1032,
        // Each byte that continues a match's length adds at most 255 bytes.
        Compression::Lz4 => 255,
        // A match of 273 bytes takes about 0.3 bits, so that the best case is about 7,000.
        Compression::Xz => 8192,
        // A block has at most 128 KiB, and at least four bytes.
        Compression::Zstd => 32 << 10,
    }
}

/// Makes small reads of a file.
struct Reader<'a> {
    file: &'a File,
    len: u64,
    buffer: Vec<u8>,
    /// Offset of the buffer in the file.
    start: u64,
    reads_left: u32,
    check_in: &'a mut dyn FnMut() -> Result<(), StageInError>,
}

impl Reader<'_> {
    /// Returns `len` bytes at `offset`, or `None` if they cannot be read or too many reads were
    /// made. `len` is at most [`XZ_INDEX_LEN_MAX`].
    fn at(&mut self, offset: u64, len: u64) -> Result<Option<&[u8]>, StageInError> {
        let Some(end) = offset.checked_add(len).filter(|&end| end <= self.len) else { return Ok(None) };
        if !self.holds(offset, end) {
            self.load(offset, end.max(offset.saturating_add(COMPRESSED_READ_LEN).min(self.len)))?;
        }
        Ok(self.held(offset, end))
    }

    /// Like [`Self::at`], for a caller that will want the bytes before these next.
    fn before(&mut self, end: u64, len: u64) -> Result<Option<&[u8]>, StageInError> {
        let Some(offset) = end.checked_sub(len).filter(|_| end <= self.len) else { return Ok(None) };
        if !self.holds(offset, end) {
            self.load(offset.min(end.saturating_sub(COMPRESSED_READ_LEN)), end)?;
        }
        Ok(self.held(offset, end))
    }

    fn holds(&self, offset: u64, end: u64) -> bool {
        self.start <= offset && end <= self.start + self.buffer.len() as u64
    }

    fn held(&self, offset: u64, end: u64) -> Option<&[u8]> {
        self.holds(offset, end).then(|| &self.buffer[(offset - self.start) as usize..(end - self.start) as usize])
    }

    /// Fills the buffer. Leaves it empty if the bytes cannot be read, or if too many reads were made.
    fn load(&mut self, start: u64, end: u64) -> Result<(), StageInError> {
        self.buffer.clear();
        let Some(reads_left) = self.reads_left.checked_sub(1) else { return Ok(()) };
        self.reads_left = reads_left;
        (self.check_in)()?;
        self.start = start;
        self.buffer.resize((end - start) as usize, 0);
        if self.file.read_exact_at(&mut self.buffer, start).is_err() {
            self.buffer.clear();
        }
        Ok(())
    }

    fn array_at<const LEN: usize>(&mut self, offset: u64) -> Result<Option<[u8; LEN]>, StageInError> {
        Ok(self.at(offset, LEN as u64)?.and_then(|bytes| bytes.first_chunk()).copied())
    }

    fn u32_at(&mut self, offset: u64) -> Result<Option<u32>, StageInError> {
        Ok(self.array_at(offset)?.map(u32::from_le_bytes))
    }

    /// Adds up what the headers of the frames of a zstd or lz4 file tell.
    fn frames(&mut self, compression: Compression) -> Result<UnpackedLen, StageInError> {
        let (mut told_bytes, mut offset) = (0_u64, 0_u64);
        // Where the part that does not tell begins.
        let mut untold_from = 0;
        let mut is_frame_told = false;
        let Some(mut scanner) = FrameScanner::new(compression) else {
            return Ok(UnpackedLen { told_bytes: 0, untold_len: self.len });
        };
        loop {
            is_frame_told &= !scanner.is_at_boundary();
            if is_frame_told || scanner.is_at_boundary() {
                untold_from = offset;
            }
            let Some(missing) = scanner.missing() else { break };
            let Some(field) = self.at(offset, missing as u64)? else { break };
            scanner.scan(field);
            offset = offset.saturating_add(missing as u64);
            match scanner.take_content() {
                Some(Content::Told(content)) => {
                    (told_bytes, is_frame_told) = (told_bytes.saturating_add(content), true);
                    // What does not shrink grows by a few bytes per block.
                    let frame_len_max = content.saturating_add(content / 128).saturating_add(COMPRESSED_READ_LEN);
                    if content > CHECKED_CONTENT_MAX && frame_len_max >= self.len - offset {
                        return Ok(UnpackedLen { told_bytes, untold_len: 0 });
                    }
                }
                Some(Content::Untold) => break,
                None => {}
            }
            offset = offset.saturating_add(scanner.take_skip());
        }
        Ok(UnpackedLen { told_bytes, untold_len: self.len.saturating_sub(untold_from) })
    }

    /// Returns the total in the seek table at the end of a zstd file, if there is one.
    fn seek_table(&mut self) -> Result<Option<u64>, StageInError> {
        const FOOTER_LEN: u64 = 9;
        const MAGIC: [u8; 4] = 0x8f92_eab1_u32.to_le_bytes();
        let Some(at) = self.len.checked_sub(FOOTER_LEN) else { return Ok(None) };
        let Some([a, b, c, d, descriptor, magic @ ..]) = self.array_at::<9>(at)? else { return Ok(None) };
        let entry_len = if descriptor & 0x80 == 0 { 8 } else { 12 };
        let table_len = u64::from(u32::from_le_bytes([a, b, c, d])) * entry_len;
        let Some(start) = at.checked_sub(table_len + 8).filter(|_| magic == MAGIC && table_len <= XZ_INDEX_LEN_MAX - 8) else {
            return Ok(None);
        };
        let Some(table) = self.at(start, 8 + table_len)? else { return Ok(None) };
        let (header, entries) = table.split_at(8);
        if header[..4] != 0x184d_2a5e_u32.to_le_bytes() || header[4..] != ((table_len + FOOTER_LEN) as u32).to_le_bytes() {
            return Ok(None);
        }
        let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| u64::from(u32::from_le_bytes(*bytes)));
        let sums = entries
            .chunks(entry_len as usize)
            .fold((0, 0), |(packed, unpacked), entry| (packed + number(entry), unpacked + number(&entry[4..])));
        // A table that does not describe this file tells nothing.
        Ok((sums.0 == start).then_some(sums.1))
    }

    /// Adds up the indexes of the streams of an xz file, beginning with the last one.
    fn xz_streams(&mut self) -> Result<UnpackedLen, StageInError> {
        const FOOTER_LEN: u64 = 12;
        let (mut told_bytes, mut end) = (0_u64, self.len);
        while let Some(at) = end.checked_sub(FOOTER_LEN) {
            let Some(footer) = self.before(end, FOOTER_LEN)?.and_then(|bytes| bytes.first_chunk::<12>()).copied() else { break };
            if footer[8..] == [0; 4] {
                // Streams are padded with zeros, four at a time.
                end -= 4;
                continue;
            }
            let [a, b, c, d, index @ ..] = footer;
            let index_len = (u64::from(u32::from_le_bytes([index[0], index[1], index[2], index[3]])) + 1) * 4;
            let is_valid = footer[10..] == *b"YZ" && crc32fast::hash(&index[..6]) == u32::from_le_bytes([a, b, c, d]);
            let Some(index_start) = at.checked_sub(index_len).filter(|_| is_valid && index_len <= XZ_INDEX_LEN_MAX) else {
                break;
            };
            let Some(sums) = self.before(at, index_len)?.and_then(sums_of_xz_index) else { break };
            // The header of a stream has as many bytes as its footer.
            let Some(start) = index_start.checked_sub(sums.packed.saturating_add(FOOTER_LEN)) else { break };
            told_bytes = told_bytes.saturating_add(sums.unpacked);
            end = start;
        }
        Ok(UnpackedLen { told_bytes, untold_len: end })
    }

    /// Returns the claim at the end of a gzip file: the unpacked length of its last stream, modulo
    /// 4 GiB.
    ///
    /// So the claim is never too high. It is too low if there are several streams, or if the file
    /// unpacks to more than 4 GiB, which no file of less than 4 MiB does. A claim below the file's own
    /// length shows that one of these is the case, and tells nothing.
    fn gzip_claim(&mut self) -> Result<UnpackedLen, StageInError> {
        let nothing = UnpackedLen { told_bytes: 0, untold_len: self.len };
        let Some(at) = self.len.checked_sub(4) else { return Ok(nothing) };
        let Some(claim) = self.u32_at(at)? else { return Ok(nothing) };
        // Bytes that do not shrink grow by some bytes per block, and by a header with a name.
        let unpacked_min = (self.len - self.len / 64).saturating_sub(COMPRESSED_READ_LEN);
        Ok(if u64::from(claim) >= unpacked_min { UnpackedLen { told_bytes: claim.into(), untold_len: 0 } } else { nothing })
    }

    /// Adds up what the blocks of a bgzf file tell.
    fn bgzf_blocks(&mut self) -> Result<UnpackedLen, StageInError> {
        let (mut told_bytes, mut offset) = (0_u64, 0_u64);
        while offset < self.len {
            let Some(len) = self.bgzf_block_len(offset)? else { break };
            let Some(end) = offset.checked_add(len).filter(|&end| end <= self.len) else { break };
            // This read brings the header of the next block along.
            let Some(content) = self.u32_at(end - 4)?.filter(|&content| content <= 1 << 16) else { break };
            told_bytes += u64::from(content);
            offset = end;
        }
        Ok(UnpackedLen { told_bytes, untold_len: self.len - offset })
    }

    /// Returns the length of the bgzf block at `offset`, if there is one.
    fn bgzf_block_len(&mut self, offset: u64) -> Result<Option<u64>, StageInError> {
        const HEADER_LEN: u64 = 18;
        let Some(header) = self.array_at::<{ HEADER_LEN as usize }>(offset)? else { return Ok(None) };
        let Some(mut scanner) = FrameScanner::new(Compression::Gzip) else { return Ok(None) };
        scanner.scan(&header);
        Ok(scanner.missing().map(|_| HEADER_LEN + scanner.take_skip()))
    }
}

/// What the index of an xz stream says about all blocks of the stream.
struct XzSums {
    /// Length of the blocks in the file, with their padding.
    packed: u64,
    unpacked: u64,
}

/// Parses an index with its checksum. Returns `None` if it is damaged.
fn sums_of_xz_index(index: &[u8]) -> Option<XzSums> {
    let (body, stored) = index.split_last_chunk::<4>()?;
    if crc32fast::hash(body) != u32::from_le_bytes(*stored) {
        return None;
    }
    let mut rest = body.strip_prefix(&[0])?;
    let mut number = || {
        let mut value = 0_u64;
        for shift in (0..63).step_by(7) {
            let (&byte, after) = rest.split_first()?;
            rest = after;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    };
    let mut sums = XzSums { packed: 0, unpacked: 0 };
    // Each record takes at least two bytes, so a false count ends with the index.
    for _ in 0..number()? {
        sums.packed = sums.packed.saturating_add(number()?.checked_next_multiple_of(4)?);
        sums.unpacked = sums.unpacked.saturating_add(number()?);
    }
    Some(sums)
}

#[cfg(test)]
mod tests;
