//! A batch: blocks for one owner, back to back in a buffer that the sink lent.

use std::ops::DerefMut;

use dayfly_meta::wire::peer::ShippedBlock;

/// Blocks on their way to one owner.
pub struct Batch<B> {
    buffer: B,
    len: usize,
    blocks: Vec<ShippedBlock>,
    members: Vec<(usize, u32)>,
}

impl<B: DerefMut<Target = [u8]>> Batch<B> {
    pub(super) fn new(buffer: B) -> Self {
        Self { buffer, len: 0, blocks: Vec::new(), members: Vec::new() }
    }

    /// Bytes in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its blocks, in the order of their bytes.
    pub fn blocks(&self) -> &[ShippedBlock] {
        &self.blocks
    }

    /// Parts with the buffer, whose first [`Self::len`] bytes are the blocks', so that it can be sent.
    pub fn into_parts(self) -> (B, BatchTable) {
        (self.buffer, BatchTable { len: self.len, blocks: self.blocks, members: self.members })
    }

    /// Puts a batch together again, after [`Self::into_parts`].
    pub fn from_parts(buffer: B, table: BatchTable) -> Self {
        Self { buffer, len: table.len, blocks: table.blocks, members: table.members }
    }

    /// The same in memory that nobody lent.
    pub(super) fn to_owned(&self) -> Batch<Box<[u8]>> {
        let buffer = self.buffer[..self.len].to_vec().into_boxed_slice();
        Batch { buffer, len: self.len, blocks: self.blocks.clone(), members: self.members.clone() }
    }

    /// Where the next `len` bytes go; the caller has seen to it that there is room.
    pub(super) fn space(&mut self, len: usize) -> &mut [u8] {
        &mut self.buffer[self.len..self.len + len]
    }

    /// Takes in the bytes that were put into the space before.
    pub(super) fn push(&mut self, member: (usize, u32), block: ShippedBlock) {
        self.len += block.len as usize;
        self.blocks.push(block);
        self.members.push(member);
    }

    /// Each block with its member's index and its number there, and its bytes.
    pub(super) fn iter(&self) -> impl Iterator<Item = ((usize, u32), &ShippedBlock, &[u8])> {
        let mut end = 0;
        self.members.iter().zip(&self.blocks).map(move |(&member, block)| {
            let start = end;
            end += block.len as usize;
            (member, block, &self.buffer[start..end])
        })
    }
}

/// A batch without its buffer.
pub struct BatchTable {
    /// Bytes in the buffer.
    pub len: usize,
    /// Its blocks.
    pub blocks: Vec<ShippedBlock>,
    pub(super) members: Vec<(usize, u32)>,
}

/// A piece of a block that is larger than a batch.
pub struct BlockPiece<B> {
    /// Its bytes, at the start of this.
    pub buffer: B,
    /// How many.
    pub len: usize,
    /// The block's number at its owner.
    pub arrival: u32,
    /// Where in the block it goes.
    pub offset: u64,
    /// CRC32C of its bytes as they were read from the source.
    pub checksum: u32,
}
