//! How blocks are packed into a segment, and how a position in it is encoded.
//!
//! A segment is a sparse file. Its first page is a header, so no block lies at offset 0. Blocks of
//! at least [`PAGE_BLOCK_SIZE_MIN`] bytes start on a page and share no page with others; smaller
//! blocks are packed without gaps. A segment holds no checksums: the checksums of its blocks are in
//! the catalog.

use crate::limits::{DRIVES_MAX, PAGE_BLOCK_SIZE_MIN, PAGE_SIZE};

/// The first eight bytes of a segment.
pub const MAGIC: [u8; 8] = *b"DAYFLYSG";
/// Version of the packing. Any change to the rules on this page must increment the version.
pub const VERSION: u32 = 1;
/// Offset of the first block.
pub const DATA_START: u64 = PAGE_SIZE;
/// Upper bound on the end of the last block: a location has 56 bits for an offset.
pub const OFFSET_MAX: u64 = 1 << OFFSET_BITS;

/// Returns the header of a segment: magic, version, dataset, drive. The rest of its page is zero.
pub fn header(dataset: u32, drive: u8) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&dataset.to_le_bytes());
    bytes[16] = drive;
    bytes
}

/// Returns where a block of `len` bytes starts if all earlier blocks end at or before `end`, and
/// where the next block may start.
pub fn pack(end: u64, len: u64) -> (u64, u64) {
    if len >= PAGE_BLOCK_SIZE_MIN {
        let start = end.next_multiple_of(PAGE_SIZE);
        (start, (start + len).next_multiple_of(PAGE_SIZE))
    } else {
        (end, end + len)
    }
}

/// The position of a block on its node: a drive, and an offset in the segment on that drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrivePosition {
    /// Index of the drive among the node's data dirs.
    pub drive: u8,
    /// Offset in that segment in bytes, at least [`DATA_START`] and below 2^56.
    pub offset: u64,
}

/// Where a block can be read on a node. Encoded as a word of the locations table, it is never 0.
///
/// ```text
/// 63       56 55                                  0
/// 0cdddddd    offset in the segment on drive d        c: 1 for a cached block, which may be evicted
/// 11111111    24 bits of generation, 32 bits of unit  in the arena, for now
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// A block that this node owns: in the segment for as long as the dataset exists.
    Owned(DrivePosition),
    /// A block of another node: in the segment until its space is needed.
    Cached(DrivePosition),
    /// In the arena until its space is needed.
    Arena {
        /// Where the block starts, in units of [`crate::limits::ARENA_UNIT`] bytes.
        unit: u32,
        /// The number of blocks published so far, modulo 2^24. Because of it, two blocks that are
        /// in the same place one after the other have different locations.
        generation: u32,
    },
}

const CACHED_BIT: u8 = 1 << 6;
const ARENA_BYTE: u8 = u8::MAX;
const OFFSET_BITS: u32 = 56;
const GENERATION_MASK: u32 = (1 << 24) - 1;

impl Location {
    /// Returns the word for the locations table.
    pub fn pack(self) -> u64 {
        let word = |byte: u8, rest: u64| u64::from(byte) << OFFSET_BITS | rest & ((1 << OFFSET_BITS) - 1);
        match self {
            Self::Owned(position) => word(position.drive, position.offset),
            Self::Cached(position) => word(position.drive | CACHED_BIT, position.offset),
            Self::Arena { unit, generation } => word(ARENA_BYTE, u64::from(generation & GENERATION_MASK) << 32 | u64::from(unit)),
        }
    }

    /// Decodes a word of the table; `None` means that the block is absent, or the table damaged.
    pub fn unpack(word: u64) -> Option<Self> {
        let byte = (word >> OFFSET_BITS) as u8;
        if byte == ARENA_BYTE {
            return Some(Self::Arena { unit: word as u32, generation: (word >> 32) as u32 & GENERATION_MASK });
        }
        let position = DrivePosition { drive: byte & !CACHED_BIT, offset: word & ((1 << OFFSET_BITS) - 1) };
        if position.offset < DATA_START || usize::from(position.drive) >= DRIVES_MAX {
            return None;
        }
        Some(if byte & CACHED_BIT == 0 { Self::Owned(position) } else { Self::Cached(position) })
    }

    /// Returns the position in a segment, unless the block is in the arena.
    pub fn position(self) -> Option<DrivePosition> {
        match self {
            Self::Owned(position) | Self::Cached(position) => Some(position),
            Self::Arena { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_are_packed_without_gaps_and_large_ones_share_no_page() {
        let check = |end, len, expect| assert_eq!(pack(end, len), expect, "{len} bytes after {end}");
        check(4096, 10, (4096, 4106));
        check(4106, 65_535, (4106, 69_641));
        check(4106, 65_536, (8192, 73_728));
        check(8192, 65_537, (8192, 77_824));
    }

    #[test]
    fn a_packed_location_unpacks_to_the_same_and_zero_means_absent() {
        let position = DrivePosition { drive: 63, offset: 1 << 40 };
        for location in [
            Location::Owned(position),
            Location::Cached(position),
            Location::Arena { unit: 0, generation: 0 },
            Location::Arena { unit: u32::MAX, generation: GENERATION_MASK },
        ] {
            assert_eq!(Location::unpack(location.pack()), Some(location));
        }
        for absent in [0, DATA_START - 1, 1 << 63 | 1 << 40] {
            assert_eq!(Location::unpack(absent), None, "{absent:x}");
        }
        assert_eq!(Location::Cached(DrivePosition { drive: 1, offset: 4096 }).pack(), 0x4100_0000_0000_1000, "golden");
        assert_eq!(Location::Arena { unit: 7, generation: 2 }.pack(), 0xff00_0002_0000_0007, "golden");
    }

    #[test]
    fn golden_header() {
        let expect = b"DAYFLYSG\x01\0\0\0\x07\0\0\0\x02\0\0\0\0\0\0\0";
        assert_eq!(&header(7, 2), expect);
    }
}
