//! The locations table of one dataset on one node. It records where each block lies on this node, or that the block is absent.
//!
//! The table is a sparse file: one page of header, then one word for every block of the dataset,
//! whichever node owns it. The server writes the table; clients map it read-only and look blocks up
//! without a message.
//!
//! Invariants that let readers copy without locks:
//! - The server stores a word with Release once the block's bytes can be read. Readers load it with
//!   Acquire.
//! - A block that the node owns never moves. Its word is cleared if its bytes turn out to be bad, but the bytes stay where
//!   they are, so a reader that was faster still gets what the drive returns. The word of a cached block, or of a block in the
//!   arena, is cleared before the block's bytes are given up. A reader therefore copies the bytes
//!   and then checks that the word is unchanged; if it is, the copied bytes were the block's.
//! - When the whole dataset goes away, the server sets the *gone* word in the header before it
//!   gives up any of the dataset's bytes. Readers check this word after a copy, too.

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

/// The mapped locations table of one dataset on this node.
pub struct Locations {
    words: SharedWords,
}

impl Locations {
    /// Returns the length of the table's file in bytes.
    pub fn file_len(blocks: u32) -> u64 {
        PAGE_SIZE + u64::from(blocks) * 8
    }

    /// Creates an empty table in `file`, which must be new.
    ///
    /// The table is written through a mapping, where a full file system would raise SIGBUS. Callers
    /// reserve [`Self::file_len`] bytes beforehand.
    ///
    /// # Errors
    ///
    /// If the file cannot be extended or mapped.
    pub fn create(file: &File, blocks: u32) -> io::Result<Self> {
        let words = FIRST_WORD + blocks as usize;
        file.set_len(Self::file_len(blocks))?;
        let table = Self { words: SharedWords::map(file, words, true)? };
        table.words.store(VERSION_WORD, VERSION);
        table.words.store(BLOCKS_WORD, u64::from(blocks));
        table.words.store(MAGIC_WORD, MAGIC);
        Ok(table)
    }

    /// Maps, for reading, a table that a server created.
    ///
    /// # Errors
    ///
    /// If the file cannot be mapped, or is not a table of this version with this number of blocks.
    pub fn open(file: &File, blocks: u32) -> io::Result<Self> {
        let words = SharedWords::map(file, FIRST_WORD + blocks as usize, false)?;
        if (words.load(MAGIC_WORD), words.load(VERSION_WORD), words.load(BLOCKS_WORD)) != (MAGIC, VERSION, u64::from(blocks)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a locations table of this version for this dataset"));
        }
        Ok(Self { words })
    }

    /// Returns where the block can be read on this node; `None` if it is absent.
    pub fn find(&self, block: BlockId) -> Option<Location> {
        Location::unpack(self.words.load(word_of(block)))
    }

    /// Returns whether the block is still where it was found. If this is called after a copy, `true` means that the copy is good.
    pub fn is_still(&self, block: BlockId, location: Location) -> bool {
        // The copied bytes must be read before the word is read.
        fence(Ordering::Acquire);
        self.words.load(word_of(block)) == location.pack()
    }

    /// Publishes a block whose bytes can now be read.
    pub fn publish(&self, block: BlockId, location: Location) {
        self.words.store(word_of(block), location.pack());
    }

    /// Publishes a block if it is absent. Returns whether it was absent.
    pub fn publish_absent(&self, block: BlockId, location: Location) -> bool {
        self.words.replace(word_of(block), 0, location.pack())
    }

    /// Clears a block's word if the word still holds this location, and returns whether it did. If
    /// it did, the caller may give up the bytes there.
    pub fn withdraw(&self, block: BlockId, location: Location) -> bool {
        let was = self.words.replace(word_of(block), location.pack(), 0);
        // The word must be written before any new bytes in that place.
        fence(Ordering::SeqCst);
        was
    }

    /// Prefetches the word of a block into the processor's cache, because it will be looked up soon.
    pub fn prefetch(&self, block: BlockId) {
        self.words.prefetch(word_of(block));
    }

    /// Returns whether the dataset's bytes have been given up. Bytes that were copied before this
    /// call returned `true` may be zeros.
    pub fn is_gone(&self) -> bool {
        self.words.load(GONE_WORD) != 0
    }

    /// Announces that the dataset's bytes are about to be given up, or, with `false`, that they
    /// stay after all.
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
