//! How blocks are packed into a segment, and how a place in it is written.
//!
//! A segment is a sparse file. Its first page is a header, so that no block lies at offset 0. Blocks of at least
//! [`PAGE_BLOCK_SIZE_MIN`] bytes start on a page and own it to its end; smaller ones are packed tight. What a block's
//! bytes must hash to stands in the catalog, not here.

use crate::limits::{DRIVES_MAX, PAGE_BLOCK_SIZE_MIN, PAGE_SIZE};

/// The first eight bytes of a segment.
pub const MAGIC: [u8; 8] = *b"DAYFLYSG";
/// Version of the packing; a change of this page's rules raises it.
pub const VERSION: u32 = 1;
/// Offset of the first block.
pub const DATA_START: u64 = PAGE_SIZE;

/// The header: magic, version, dataset, drive; the rest of the page is zero.
pub fn header(dataset: u32, drive: u8) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&dataset.to_le_bytes());
    bytes[16] = drive;
    bytes
}

/// Where a block that follows `end` bytes starts, and where the next may start after it.
pub fn pack(end: u64, len: u64) -> (u64, u64) {
    if len >= PAGE_BLOCK_SIZE_MIN {
        let start = end.next_multiple_of(PAGE_SIZE);
        (start, (start + len).next_multiple_of(PAGE_SIZE))
    } else {
        (end, end + len)
    }
}

/// A block's place on its node: a drive, and an offset in the segment there. As a number it is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which of the node's data dirs.
    pub drive: u8,
    /// Offset in bytes in the segment on that drive; at least [`DATA_START`], below 2^56.
    pub offset: u64,
}

impl Place {
    /// The number that stands in the locations table.
    pub fn pack(self) -> u64 {
        debug_assert!(self.offset >= DATA_START && self.offset < 1 << 56);
        u64::from(self.drive) << 56 | self.offset
    }

    /// Reads a number of the table; `None` means that the block is absent (or the table damaged).
    pub fn unpack(word: u64) -> Option<Self> {
        let place = Self { drive: (word >> 56) as u8, offset: word & ((1 << 56) - 1) };
        (place.offset >= DATA_START && usize::from(place.drive) < DRIVES_MAX).then_some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_are_tight_and_large_ones_own_their_pages() {
        let check = |end, len, expect| assert_eq!(pack(end, len), expect, "{len} bytes after {end}");
        check(4096, 10, (4096, 4106));
        check(4106, 65_535, (4106, 69_641));
        check(4106, 65_536, (8192, 73_728));
        check(8192, 65_537, (8192, 77_824));
    }

    #[test]
    fn places_read_back_and_absent_is_zero() {
        let place = Place { drive: 3, offset: 1 << 40 };
        assert_eq!(Place::unpack(place.pack()), Some(place));
        assert_eq!(Place::unpack(0), None);
        assert_eq!(Place::unpack(DATA_START - 1), None);
        assert_eq!(Place::unpack(u64::MAX), None);
    }

    #[test]
    fn golden_header() {
        let expect = b"DAYFLYSG\x01\0\0\0\x07\0\0\0\x02\0\0\0\0\0\0\0";
        assert_eq!(&header(7, 2), expect);
    }
}
