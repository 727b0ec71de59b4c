//! The boundary between a worker and the nodes that store blocks.

use std::ops::DerefMut;

use dayfly_meta::catalog::StoredBlock;
use dayfly_meta::id::NodeId;
#[cfg(doc)]
use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::wire::peer::Rival;

use super::{Batch, BatchTable, BlockPiece};
use crate::StageInError;

/// Takes blocks to their owners, on this node or on others. Every call may block its thread.
///
/// The sink owns the memory of all of a worker's batches, and so determines how far the worker can
/// get ahead of the owners.
pub trait Sink {
    /// Memory of [`BATCH_LEN_MAX`] bytes in which a batch is gathered.
    type Buffer: DerefMut<Target = [u8]>;

    /// Lends a buffer for blocks of `owner`. Returns `None` if all of the worker's buffers are
    /// already in open batches or in flight.
    ///
    /// # Errors
    ///
    /// [`StageInError::Ship`] if there is no memory, [`StageInError::Cancelled`].
    fn buffer(&mut self, owner: NodeId) -> Result<Option<Self::Buffer>, StageInError>;

    /// Starts sending a batch to its owner.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::next_delivery`], which reports most failures.
    fn ship(&mut self, owner: NodeId, batch: Batch<Self::Buffer>) -> Result<(), StageInError>;

    /// Starts sending a piece of a block for which [`Self::reserve`] obtained room.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::next_delivery`], which reports most failures.
    fn ship_piece(&mut self, owner: NodeId, piece: BlockPiece<Self::Buffer>) -> Result<(), StageInError>;

    /// Returns the number of batches and pieces that have been shipped but not yet delivered.
    fn in_flight(&self) -> usize;

    /// Waits until a batch or piece that is in flight is stored or refused.
    ///
    /// # Errors
    ///
    /// [`StageInError::Ship`] if the owner failed, [`StageInError::Corrupted`] if the bytes changed
    /// in this node's memory, [`StageInError::Cancelled`].
    fn next_delivery(&mut self) -> Result<Delivery<Self::Buffer>, StageInError>;

    /// Asks the owner for room for a block that will come in pieces.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::next_delivery`].
    fn reserve(&mut self, owner: NodeId, block_len: u64, rival: Rival) -> Result<Reserved, StageInError>;

    /// Keeps a block that is not stored in memory, if there is room, so that its first readers find it there. `fill` writes the
    /// block's `len` bytes. Returns the block, whose owner is the node that keeps it. Returns `None`, without a call of `fill`,
    /// if the block is not kept.
    ///
    /// # Errors
    ///
    /// The errors of `fill`.
    fn keep(
        &mut self,
        len: u64,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), StageInError>,
    ) -> Result<Option<StoredBlock>, StageInError> {
        let _ = (len, fill);
        Ok(None)
    }
}

/// An owner's answer to a request for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserved {
    /// The block has this number at its owner.
    At(u32),
    /// The owner is full.
    Full,
    /// The owner does not answer.
    Absent,
}

/// The outcome of shipping a batch or piece.
pub enum Delivery<B> {
    /// The owner has stored the batch. The number is the first block's number at its owner; the
    /// other blocks have the numbers after it.
    Stored(u32, BatchTable),
    /// The owner has stored a piece.
    Piece,
    /// The owner is full and has stored nothing of the batch.
    Full(NodeId, Batch<B>),
    /// The owner does not answer. The bytes are lost.
    Absent {
        /// The owner that does not answer.
        node: NodeId,
        /// The blocks: for each, the index of its member in the worker's list, and its number in the member.
        members: Vec<(usize, u32)>,
        /// The error for blocks that cannot be read again.
        error: StageInError,
    },
}
