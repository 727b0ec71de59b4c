//! Chunks, the pieces in which blocks travel between nodes. A large block is fetched and evicted
//! chunk by chunk, so that its first bytes can be used while the rest is on its way, and a small
//! arena can serve large files.

use rkyv::{Archive, Deserialize, Serialize};

use crate::id::BlockId;
use crate::limits::CHUNK_LEN;

/// A piece of a block, at most [`CHUNK_LEN`] bytes. Nearly all blocks are one chunk.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[rkyv(attr(allow(missing_docs)))]
pub struct Chunk {
    /// The block that this is a piece of.
    pub block: BlockId,
    /// The chunk's index in its block, from 0.
    pub index: u16,
}

impl Chunk {
    /// Returns the chunk of `block` that contains `offset`.
    pub fn at(block: BlockId, offset: u64) -> Self {
        Self { block, index: (offset / CHUNK_LEN) as u16 }
    }

    /// Returns all chunks of a block of this length. An empty block has none.
    pub fn all(block: BlockId, block_len: u64) -> impl Iterator<Item = Self> {
        (0..block_len.div_ceil(CHUNK_LEN) as u16).map(move |index| Self { block, index })
    }

    /// Returns the offset of the chunk's first byte in its block.
    pub fn start(self) -> u64 {
        u64::from(self.index) * CHUNK_LEN
    }

    /// Returns the chunk's length in a block of this length; `None` if the block ends before the
    /// chunk starts.
    pub fn len_in(self, block_len: u64) -> Option<u64> {
        block_len.checked_sub(self.start()).filter(|&left| left > 0).map(|left| left.min(CHUNK_LEN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::BLOCK_SIZE_MAX;

    #[test]
    fn chunks_cover_a_block() {
        for len in [0, 1, CHUNK_LEN - 1, CHUNK_LEN, CHUNK_LEN + 1, BLOCK_SIZE_MAX] {
            let mut end = 0;
            for chunk in Chunk::all(BlockId(3), len) {
                assert_eq!((chunk.start(), Chunk::at(BlockId(3), end)), (end, chunk));
                end += chunk.len_in(len).unwrap();
            }
            assert_eq!((end, Chunk::at(BlockId(3), len.next_multiple_of(CHUNK_LEN)).len_in(len)), (len, None));
        }
    }
}
