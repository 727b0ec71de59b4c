//! The locations table: per node and dataset, where each block lies here, or that it is absent.
//!
//! A sparse file: one page of header, then one word for every block of the dataset, whoever owns it. A word is stored
//! with Release once the block's bytes can be read, and loaded with Acquire. What a node owns stays where it is; the word of
//! a block that it only keeps, or has in the arena, is cleared before its bytes are given up. So a reader copies and then
//! looks whether the word is what it was: if so, it has copied real bytes. The header's *gone* word does the same for all.

use std::fs::File;
use std::io;
use std::sync::atomic::{Ordering, fence};

use crate::id::BlockId;
use crate::limits::PAGE_SIZE;
use crate::segment::Location;
use crate::shared::SharedWords;

/// The first eight bytes of a table, as a little-endian word.
pub const MAGIC: u64 = u64::from_le_bytes(*b"DAYFLYLO");
/// Version of the layout.
pub const VERSION: u64 = 2;

const MAGIC_WORD: usize = 0;
const VERSION_WORD: usize = 1;
const BLOCKS_WORD: usize = 2;
const GONE_WORD: usize = 3;
const FIRST_WORD: usize = PAGE_SIZE as usize / 8;

fn word_of(block: BlockId) -> usize {
    FIRST_WORD + block.0 as usize
}

/// A node's table for one dataset, mapped.
pub struct Locations {
    words: SharedWords,
}

impl Locations {
    /// Length of a table's file in bytes.
    pub fn file_len(blocks: u32) -> u64 {
        PAGE_SIZE + u64::from(blocks) * 8
    }

    /// Makes an empty table in `file`, which must be new. It is written through a mapping: set [`Self::file_len`] bytes aside
    /// before, for there a full file system is a signal.
    pub fn create(file: &File, blocks: u32) -> io::Result<Self> {
        let words = FIRST_WORD + blocks as usize;
        file.set_len(Self::file_len(blocks))?;
        let table = Self { words: SharedWords::map(file, words, true)? };
        table.words.store(VERSION_WORD, VERSION);
        table.words.store(BLOCKS_WORD, u64::from(blocks));
        table.words.store(MAGIC_WORD, MAGIC);
        Ok(table)
    }

    /// Maps a table that a server made, to read it.
    pub fn open(file: &File, blocks: u32) -> io::Result<Self> {
        let words = SharedWords::map(file, FIRST_WORD + blocks as usize, false)?;
        if (words.load(MAGIC_WORD), words.load(VERSION_WORD), words.load(BLOCKS_WORD)) != (MAGIC, VERSION, u64::from(blocks)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a locations table of this version and dataset"));
        }
        Ok(Self { words })
    }

    /// Where the block can be read on this node, if it can.
    pub fn find(&self, block: BlockId) -> Option<Location> {
        Location::unpack(self.words.load(word_of(block)))
    }

    /// Whether the block is still where it was found: asked after a copy, it tells whether the copy is good.
    pub fn is_still(&self, block: BlockId, location: Location) -> bool {
        // What was copied before is read before the word is.
        fence(Ordering::Acquire);
        self.words.load(word_of(block)) == location.pack()
    }

    /// Publishes a block whose bytes can be read now.
    pub fn publish(&self, block: BlockId, location: Location) {
        self.words.store(word_of(block), location.pack());
    }

    /// Publishes a block that was absent; says whether it was.
    pub fn publish_absent(&self, block: BlockId, location: Location) -> bool {
        self.words.replace(word_of(block), 0, location.pack())
    }

    /// Takes a block's location back, if it is still this one, before its bytes are given up. Says whether it was.
    pub fn withdraw(&self, block: BlockId, location: Location) -> bool {
        let was = self.words.replace(word_of(block), location.pack(), 0);
        // Whatever comes into its place is written after the word is.
        fence(Ordering::SeqCst);
        was
    }

    /// Asks the processor for the words of a block that is about to be looked for.
    pub fn prefetch(&self, block: BlockId) {
        self.words.prefetch(word_of(block));
    }

    /// Whether the dataset's bytes have been given up: anything copied before this was asked may be zeros.
    pub fn is_gone(&self) -> bool {
        self.words.load(GONE_WORD) != 0
    }

    /// Says that the dataset's bytes are about to be given up (or that they are not, after all).
    pub fn set_gone(&self, gone: bool) {
        self.words.store(GONE_WORD, u64::from(gone));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_published_block_is_found_by_another_mapping() {
        let file = tempfile::tempfile().unwrap();
        let server = Locations::create(&file, 3).unwrap();
        let client = Locations::open(&file, 3).unwrap();
        let place = Location::Cached(crate::segment::DrivePosition { drive: 0, offset: 4096 });
        let other = Location::Arena { unit: 9, generation: 1 };
        server.publish(BlockId(2), place);
        assert_eq!((client.find(BlockId(1)), client.find(BlockId(2)), client.find(BlockId(3))), (None, Some(place), None));
        assert!(client.is_still(BlockId(2), place) && !client.is_still(BlockId(2), other));
        assert!(!server.withdraw(BlockId(2), other) && client.is_still(BlockId(2), place));
        assert!(server.withdraw(BlockId(2), place) && client.find(BlockId(2)).is_none());
        server.set_gone(true);
        assert!(client.is_gone());
        assert!(Locations::open(&file, 2).is_err());
        assert!(Locations::open(&tempfile::tempfile().unwrap(), 0).is_err());
    }
}
