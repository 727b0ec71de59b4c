//! Offers: blocks that a stage-in ships to their owner. The bytes follow when the owner has room for them.

use rkyv::{Archive, Deserialize, Serialize};

use super::Rival;

/// An offer of a stage-in's blocks to their owner.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum OfferRequest {
    /// Whole blocks, back to back. Reply: [`OfferReply::Stored`], [`OfferReply::NoRoom`] or [`OfferReply::Damaged`].
    Batch {
        /// The stage-in that ships them.
        stage_in: u64,
        /// One entry for each block, in the order of the bytes.
        blocks: Vec<ShippedBlock>,
    },
    /// A piece of a large block, for which the owner has reserved room. Reply: [`OfferReply::PieceStored`] or
    /// [`OfferReply::Damaged`].
    Piece {
        /// The stage-in that ships it.
        stage_in: u64,
        /// The number under which the owner reserved the block's room.
        arrival: u32,
        /// Offset of the piece in the block.
        offset: u64,
        /// CRC32C of the piece as it was read from the source.
        checksum: u32,
    },
}

/// The answer to an [`OfferRequest`].
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum OfferReply {
    /// The batch is stored, or will be before the stage-in's `Finish` is answered.
    Stored {
        /// The arrival number of the first block. The other blocks have the numbers that follow it.
        first_arrival: u32,
    },
    /// Nothing of the batch is stored, because no drive has room for it. Its blocks go to their next candidates.
    NoRoom,
    /// The piece is stored.
    PieceStored,
    /// What arrived is not what was read from the source; none of it is stored. The sender checks
    /// its own copy and sends it again.
    Damaged(Damaged),
}

/// A block in a batch.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShippedBlock {
    /// Length in bytes.
    pub len: u32,
    /// CRC32C of its bytes as they were read from the source.
    pub checksum: u32,
    /// The owner stores blocks in the order of these random numbers. Blocks that belong together have the same
    /// number.
    pub shuffle: u64,
    /// What the owner compares to find path conflicts. It is set only for the first block of a
    /// sample.
    pub rival: Rival,
}

/// A shipped block, or a piece of one, that arrived damaged.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged {
    /// Position in the batch.
    pub at: u32,
    /// The checksum that was sent with the block.
    pub expected: u32,
    /// The checksum of what arrived.
    pub found: u32,
}
