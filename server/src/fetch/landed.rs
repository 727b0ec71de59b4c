//! What an owner sent, and its check against the catalog: before anybody may read it, and before it is kept.

use std::sync::Arc;

use dayfly_meta::checksum::{Mismatch, check};
use dayfly_meta::chunk::Chunk;
use dayfly_transport::Slot;

use crate::blocking::Blocking;
use crate::store::Dataset;

/// More bytes than this are not checked on a thread that moves messages: they would keep others waiting.
const CHECKED_AT_ONCE_MAX: usize = 256 << 10;

/// What became of a chunk that was asked for.
pub(super) enum Landed {
    /// It is what was staged in.
    Good(Slot),
    /// It is not.
    Damaged(Slot, Mismatch),
    /// The owner could not read it from its drive.
    Unread(Slot, String),
    /// The owner does not have it.
    Missing,
}

/// Slots that were filled, each with how many bytes landed in it.
pub(super) struct Filled {
    pub(super) slots: Vec<Slot>,
    pub(super) lens: Vec<u64>,
    /// By place in the request.
    pub(super) missing: Vec<u32>,
    /// What the owner could not read, likewise, and why.
    pub(super) unread: Vec<u32>,
    pub(super) reason: String,
}

impl Filled {
    /// Compares each chunk with its checksum.
    pub(super) async fn check(
        self,
        blocking: &dyn Blocking,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
    ) -> Result<Vec<Landed>, String> {
        let len: usize = self.slots.iter().map(Slot::len).sum();
        if len <= CHECKED_AT_ONCE_MAX {
            return Ok(self.checked(dataset, chunks));
        }
        let (dataset, chunks) = (dataset.clone(), chunks.to_vec());
        let checking = blocking.run(move || self.checked(&dataset, &chunks));
        checking.await.map_err(|error| format!("the check of what came failed: {error}"))
    }

    fn checked(self, dataset: &Dataset, chunks: &[Chunk]) -> Vec<Landed> {
        let Self { slots, lens, missing, unread, reason } = self;
        let filled = (0..).zip(slots).zip(lens).zip(chunks);
        let look = |(((number, slot), len), &chunk): (((u32, Slot), u64), &Chunk)| {
            let expected = dataset.catalog().chunk_checksum(chunk);
            match expected.filter(|_| (len == slot.len() as u64 || unread.contains(&number)) && !missing.contains(&number)) {
                None => Landed::Missing,
                Some(_) if unread.contains(&number) => Landed::Unread(slot, reason.clone()),
                Some(expected) => match check(&slot, expected) {
                    Ok(()) => Landed::Good(slot),
                    Err(mismatch) => Landed::Damaged(slot, mismatch),
                },
            }
        };
        filled.map(look).collect()
    }
}
