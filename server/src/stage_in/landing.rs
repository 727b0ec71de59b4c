//! Takes the blocks that this node's workers and other nodes ship to this node, and makes room for them on its drives.

use std::sync::Arc;

use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::wire::peer::{OfferReply, Rival, ShippedBlock};
use dayfly_transport::{Incoming, Slot};

use super::{NodeStageIn, NodeStageInError};
use crate::ingest::{IngestError, Stored};
use crate::store::room_for;

/// How many times room is made for one batch. Other batches may take the room that was made for this one.
pub(super) const ROOM_ATTEMPTS_MAX: usize = 8;

impl NodeStageIn {
    /// Waits until there is memory in which a batch can land, and returns it. The wait slows down the batch's sender.
    pub(super) async fn landing_slot(&self, len: u64) -> Result<Slot, NodeStageInError> {
        if let Some(slot) = self.landing.slot_within(len, self.deadlines().landing_patience).await {
            return Ok(slot);
        }
        // The batches that wait to be written may leave no gap that is large enough for another batch, although they are too
        // few to be written yet. Writing them now makes room.
        let ingest = self.ingest.clone();
        self.context.blocking.run(move || ingest.flush()).await??;
        self.landing.slot_within(len, self.deadlines().landing).await.ok_or(NodeStageInError::Busy)
    }

    /// Takes a batch from a peer.
    pub(crate) async fn land_batch(&self, blocks: Vec<ShippedBlock>, incoming: Incoming) -> Result<OfferReply, NodeStageInError> {
        let (slot, len) = self.land(incoming).await?;
        match self.store_batch(blocks.into(), slot, len).await {
            Ok(Stored::At(first_arrival)) => Ok(OfferReply::Stored { first_arrival }),
            Ok(Stored::Full(_)) => Ok(OfferReply::NoRoom),
            Err(NodeStageInError::Ingest(IngestError::Damaged(damaged))) => Ok(OfferReply::Damaged(damaged)),
            Err(error) => Err(error),
        }
    }

    /// Takes a piece of a large block from a peer. Room for the block must have been reserved before.
    pub(crate) async fn land_piece(
        &self,
        (arrival, offset): (u32, u64),
        checksum: u32,
        incoming: Incoming,
    ) -> Result<OfferReply, NodeStageInError> {
        let (slot, len) = self.land(incoming).await?;
        match self.store_piece((arrival, offset), checksum, slot, len).await {
            Ok(()) => Ok(OfferReply::PieceStored),
            Err(NodeStageInError::Ingest(IngestError::Damaged(damaged))) => Ok(OfferReply::Damaged(damaged)),
            Err(error) => Err(error),
        }
    }

    async fn land(&self, incoming: Incoming) -> Result<(Slot, usize), NodeStageInError> {
        let len = incoming.len();
        if len > BATCH_LEN_MAX as u64 {
            return Err(NodeStageInError::TooLong(len));
        }
        let slot = self.landing_slot(len).await?;
        let slot = incoming.land(slot).await.map_err(NodeStageInError::NotLanded)?;
        Ok((slot, len as usize))
    }

    /// Stores a batch. If no drive has room for it, evicts cached blocks and tries again.
    pub(super) async fn store_batch(
        &self,
        blocks: Arc<[ShippedBlock]>,
        slot: Slot,
        len: usize,
    ) -> Result<Stored, NodeStageInError> {
        let room = blocks.iter().map(|block| room_for(u64::from(block.len))).sum();
        let mut slot = slot;
        for attempts_left in (0..ROOM_ATTEMPTS_MAX).rev() {
            let (ingest, blocks) = (self.ingest.clone(), blocks.clone());
            match self.context.blocking.run(move || ingest.store(&blocks, slot, len)).await?? {
                Stored::Full(full) if attempts_left > 0 && self.context.room.make_room(room).await? => slot = full,
                stored => return Ok(stored),
            }
        }
        Err(NodeStageInError::NoRoom)
    }

    /// Stores a piece of a large block.
    pub(super) async fn store_piece(
        &self,
        (arrival, offset): (u32, u64),
        checksum: u32,
        slot: Slot,
        len: usize,
    ) -> Result<(), NodeStageInError> {
        let ingest = self.ingest.clone();
        Ok(self.context.blocking.run(move || ingest.store_piece(arrival, offset, checksum, &slot[..len])).await??)
    }

    /// Reserves room for a large block that will arrive in pieces. Returns the block's arrival number, which comes with each
    /// piece, or `None` if there is no room.
    pub(crate) async fn reserve(&self, block_len: u64, rival: Rival) -> Result<Option<u32>, NodeStageInError> {
        for attempts_left in (0..ROOM_ATTEMPTS_MAX).rev() {
            let ingest = self.ingest.clone();
            let reserved = self.context.blocking.run(move || ingest.reserve(block_len, rival)).await??;
            if reserved.is_some() || attempts_left == 0 || !self.context.room.make_room(room_for(block_len)).await? {
                return Ok(reserved);
            }
        }
        Ok(None)
    }
}
