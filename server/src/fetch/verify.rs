//! Compares the chunks that an owner sent with the checksums in the catalog, before any process can read them and before they
//! are cached.

use std::collections::HashMap;
use std::sync::Arc;

use dayfly_meta::checksum::{Mismatch, check};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::peer::{MissingChunk, WhyMissing};
use dayfly_transport::{Slot, Unread};

use super::error::ReadError;
use crate::blocking::Blocking;
use crate::peers;
use crate::store::Dataset;

/// A reply with more bytes than this is verified on a blocking thread: on a runtime thread it would delay other messages.
const VERIFIED_INLINE_MAX: usize = 256 << 10;

/// One chunk of an owner's reply.
pub(super) enum Received {
    /// The chunk has the checksum that it had at stage-in.
    Verified(Slot),
    /// The chunk has another checksum.
    Damaged(Slot, Mismatch),
    /// The owner could not read the chunk from its drive.
    Unreadable(Slot, ReadError),
    /// The owner is still reading the chunk from its origin.
    Late(Slot),
    /// The owner does not hold the chunk.
    NotHeld,
    /// The owner cannot read the chunk, for this reason.
    Failed(String),
}

/// An owner's reply to a read, not verified yet.
pub(super) struct OwnerReply {
    pub(super) owner: NodeId,
    /// One slot for each requested chunk, in order.
    pub(super) slots: Vec<Slot>,
    /// How many bytes arrived in each slot.
    pub(super) lens: Vec<u64>,
    /// The chunks that the owner did not send.
    pub(super) missing: Vec<MissingChunk>,
    /// Why it cannot read some of them.
    pub(super) reasons: Vec<String>,
    /// Indexes of the chunks that the owner could not read, and why.
    pub(super) unread: Unread,
}

impl OwnerReply {
    /// Compares each chunk with its checksum.
    pub(super) async fn verify(
        self,
        blocking: &dyn Blocking,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
    ) -> Result<Vec<Received>, ReadError> {
        let len: usize = self.slots.iter().map(Slot::len).sum();
        if len <= VERIFIED_INLINE_MAX {
            return Ok(self.verified(dataset, chunks));
        }
        let (dataset, chunks) = (dataset.clone(), chunks.to_vec());
        blocking.run(move || self.verified(&dataset, &chunks)).await.map_err(ReadError::Verify)
    }

    fn verified(self, dataset: &Dataset, chunks: &[Chunk]) -> Vec<Received> {
        let Self { owner, slots, lens, missing, reasons, unread } = self;
        let missing: HashMap<u32, WhyMissing> = missing.into_iter().map(|chunk| (chunk.index, chunk.why)).collect();
        let verify = |(((index, slot), len), &chunk): (((u32, Slot), u64), &Chunk)| {
            let Some(expected) = dataset.catalog().chunk_checksum(chunk) else { return Received::NotHeld };
            match missing.get(&index) {
                Some(WhyMissing::NotOwned) => return Received::NotHeld,
                Some(WhyMissing::Late) => return Received::Late(slot),
                Some(&WhyMissing::Failed { reason }) => {
                    let reason = reasons.get(reason as usize).map_or("it did not say why", String::as_str);
                    return Received::Failed(reason.to_owned());
                }
                None => {}
            }
            if unread.pieces.contains(&index) {
                return Received::Unreadable(slot, peers::unread(owner, &unread).into());
            }
            if len != slot.len() as u64 {
                return Received::NotHeld;
            }
            match check(&slot, expected) {
                Ok(()) => Received::Verified(slot),
                Err(mismatch) => Received::Damaged(slot, mismatch),
            }
        };
        (0..).zip(slots).zip(lens).zip(chunks).map(verify).collect()
    }
}
