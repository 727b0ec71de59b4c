//! Expands sparse files. GNU tar stores a map of the pieces that have data, in one of four formats,
//! followed by only those pieces. Reading returns zeros for the holes.

use std::io;

use dayfly_meta::limits::SPARSE_PIECES_MAX;

use super::header::number;
use super::pax::ascii;
use super::{BLOCK_LEN, TarReader};
use crate::source::plain::Skip;

const BROKEN: &str = "the map of a sparse file is malformed";

/// A sparse file that is being read.
pub(super) struct Expansion {
    /// Offset and length of each piece that follows. The pieces are sorted, do not overlap, and lie
    /// within the file.
    pieces: std::vec::IntoIter<(u64, u64)>,
    /// Offset and length of the current piece.
    piece: (u64, u64),
    /// Offset in the file of the next byte to return.
    at: u64,
    size: u64,
}

impl Expansion {
    /// Checks the map of a file that has `stored` bytes in the archive.
    fn new(pieces: Vec<(u64, u64)>, size: u64, stored: u64) -> Result<Self, &'static str> {
        let mut end = 0;
        let mut sum = 0_u64;
        for &(offset, len) in &pieces {
            if offset < end {
                return Err(BROKEN);
            }
            end = offset.checked_add(len).filter(|&end| end <= size).ok_or(BROKEN)?;
            sum += len;
        }
        if sum != stored {
            return Err(BROKEN);
        }
        Ok(Self { pieces: pieces.into_iter(), piece: (0, 0), at: 0, size })
    }

    /// Returns the size of the file in bytes, including its holes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn read<R: Skip>(&mut self, buffer: &mut [u8], data: &mut TarReader<R>) -> io::Result<usize> {
        while self.at >= self.piece.0 + self.piece.1 {
            // A hole may follow the last piece, up to the end of the file.
            self.piece = self.pieces.next().unwrap_or((self.size, 0));
            if self.piece == (self.size, 0) {
                break;
            }
        }
        let in_hole = self.at < self.piece.0;
        let end = if in_hole { self.piece.0 } else { self.piece.0 + self.piece.1 };
        let len = usize::try_from(end.saturating_sub(self.at)).unwrap_or(usize::MAX).min(buffer.len());
        let count = if in_hole {
            buffer[..len].fill(0);
            len
        } else {
            data.read_raw(&mut buffer[..len])?
        };
        self.at += count as u64;
        Ok(count)
    }
}

/// Reads the old GNU format, whose map is in the header itself and in blocks after it.
pub(super) fn old_gnu<R: Skip>(tar: &mut TarReader<R>, header: &[u8; BLOCK_LEN], stored: u64) -> Result<Expansion, String> {
    let mut pieces = Vec::new();
    let size = field(&header[483..495])?;
    let mut is_extended = header[482] != 0;
    push_all(&mut pieces, &header[386..482])?;
    while is_extended {
        let block = tar.read_block().map_err(|_| BROKEN)?;
        push_all(&mut pieces, &block[..504])?;
        is_extended = block[504] != 0;
    }
    tar.expect_data(stored);
    Ok(Expansion::new(pieces, size, stored)?)
}

fn field(bytes: &[u8]) -> Result<u64, &'static str> {
    number(bytes).and_then(|value| u64::try_from(value).ok()).filter(|&value| value < 1 << 62).ok_or(BROKEN)
}

fn push_all(pieces: &mut Vec<(u64, u64)>, table: &[u8]) -> Result<(), &'static str> {
    for entry in table.chunks_exact(24).take_while(|entry| entry[0] != 0) {
        push(pieces, (field(&entry[..12])?, field(&entry[12..])?))?;
    }
    Ok(())
}

fn push(pieces: &mut Vec<(u64, u64)>, piece: (u64, u64)) -> Result<(), &'static str> {
    if pieces.len() == SPARSE_PIECES_MAX {
        return Err("a sparse file has too many pieces");
    }
    // GNU tar marks the end of the map with an empty piece.
    if piece.1 > 0 {
        pieces.push(piece);
    }
    Ok(())
}

/// PAX records about a sparse file, in versions 0.0, 0.1 and 1.0 of the format.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PaxSparse {
    /// The file's name. The name in the header is made up.
    pub(super) name: Option<Vec<u8>>,
    size: Option<u64>,
    pieces: Vec<(u64, u64)>,
    /// Version 0.0: the offset of a piece whose length is in a later record.
    offset: Option<u64>,
    /// Version 1.0: the map is at the start of the member's data.
    map_is_in_data: bool,
}

impl PaxSparse {
    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let number = || decimal(value);
        match key {
            b"name" => self.name = Some(value.to_vec()),
            b"size" | b"realsize" => self.size = Some(number()?),
            b"major" => self.map_is_in_data = number()? == 1,
            b"offset" => self.offset = Some(number()?),
            b"numbytes" => push(&mut self.pieces, (self.offset.take()?, number()?)).ok()?,
            b"map" => {
                let mut numbers = value.split(|&byte| byte == b',').map(decimal);
                while let Some(offset) = numbers.next() {
                    push(&mut self.pieces, (offset?, numbers.next()??)).ok()?;
                }
            }
            _ => {}
        }
        Some(())
    }

    /// Starts the expansion. The reader is positioned at the member's data.
    pub(super) fn expansion<R: Skip>(mut self, tar: &mut TarReader<R>) -> Result<Expansion, String> {
        let size = self.size.ok_or(BROKEN)?;
        if self.map_is_in_data {
            self.pieces = map_in_data(tar)?;
        }
        Ok(Expansion::new(self.pieces, size, tar.data_left)?)
    }
}

/// Reads a map of version 1.0: decimal numbers, one per line, in blocks of their own. The first
/// number is the number of pieces; the offset and length of each piece follow.
fn map_in_data<R: Skip>(tar: &mut TarReader<R>) -> Result<Vec<(u64, u64)>, String> {
    let mut block = [0; BLOCK_LEN];
    let mut at = BLOCK_LEN;
    let mut next = || -> Result<u64, &'static str> {
        let mut digits = Vec::new();
        loop {
            if at == BLOCK_LEN {
                let mut filled = 0;
                while filled < BLOCK_LEN {
                    match tar.read_raw(&mut block[filled..]) {
                        Ok(0) | Err(_) => return Err(BROKEN),
                        Ok(count) => filled += count,
                    }
                }
                at = 0;
            }
            let byte = block[at];
            at += 1;
            match byte {
                b'\n' => return decimal(&digits).ok_or(BROKEN),
                _ if digits.len() == 20 => return Err(BROKEN),
                _ => digits.push(byte),
            }
        }
    };
    let count = next()?;
    let mut pieces = Vec::new();
    for _ in 0..count {
        push(&mut pieces, (next()?, next()?))?;
    }
    Ok(pieces)
}

fn decimal(text: &[u8]) -> Option<u64> {
    ascii(text)?.parse().ok().filter(|&value: &u64| value < 1 << 62)
}
