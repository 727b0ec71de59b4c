//! Batches of small blocks and pieces of large blocks. A worker passes them to its sink.

use std::ops::DerefMut;

use dayfly_meta::wire::peer::ShippedBlock;

/// Blocks for one owner, back to back in a buffer that the sink lent.
pub struct Batch<B> {
    buffer: B,
    /// Bytes of the buffer that are filled.
    len: usize,
    blocks: Vec<ShippedBlock>,
    /// For each block, the index of the block's member in the worker's list, and the number of the
    /// block in that member.
    members: Vec<(usize, u32)>,
}

impl<B: DerefMut<Target = [u8]>> Batch<B> {
    pub(super) fn new(buffer: B) -> Self {
        Self { buffer, len: 0, blocks: Vec::new(), members: Vec::new() }
    }

    /// Returns the total length of all blocks, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the batch has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the blocks, in the order of their bytes in the buffer.
    pub fn blocks(&self) -> &[ShippedBlock] {
        &self.blocks
    }

    /// Separates the buffer from the table, so that the buffer can be sent. The buffer's first
    /// [`Self::len`] bytes are the blocks.
    pub fn into_parts(self) -> (B, BatchTable) {
        (self.buffer, BatchTable { len: self.len, blocks: self.blocks, members: self.members })
    }

    /// Rebuilds a batch from what [`Self::into_parts`] returned.
    pub fn from_parts(buffer: B, table: BatchTable) -> Self {
        Self { buffer, len: table.len, blocks: table.blocks, members: table.members }
    }

    /// Copies the batch into memory that does not belong to the sink.
    pub(super) fn to_owned(&self) -> Batch<Box<[u8]>> {
        let buffer = self.buffer[..self.len].to_vec().into_boxed_slice();
        Batch { buffer, len: self.len, blocks: self.blocks.clone(), members: self.members.clone() }
    }

    /// Returns the space for the next block, which has `len` bytes. The caller must have checked
    /// that the block fits.
    pub(super) fn space(&mut self, len: usize) -> &mut [u8] {
        &mut self.buffer[self.len..self.len + len]
    }

    /// Adds the block whose bytes were written to [`Self::space`].
    pub(super) fn push(&mut self, member: (usize, u32), block: ShippedBlock) {
        self.len += block.len as usize;
        self.blocks.push(block);
        self.members.push(member);
    }

    /// Returns every block with the index of the block's member, the block's number in the member,
    /// and the block's bytes.
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
    /// Bytes of the buffer that are filled.
    pub len: usize,
    /// The blocks, in the order of their bytes in the buffer.
    pub blocks: Vec<ShippedBlock>,
    /// For each block, the index of its member in the worker's list, and its number in the member.
    pub members: Vec<(usize, u32)>,
}

/// A piece of a block that is larger than a batch.
pub struct BlockPiece<B> {
    /// A buffer that starts with the bytes of the piece.
    pub buffer: B,
    /// Length of the piece in bytes.
    pub len: usize,
    /// The index of the block's member in the worker's list, and the block's number in the member.
    pub member: (usize, u32),
    /// The block's number at its owner, from [`super::Sink::reserve`].
    pub arrival: u32,
    /// Offset of the piece in the block.
    pub offset: u64,
    /// CRC32C of the piece as it was read from the source.
    pub checksum: u32,
}
