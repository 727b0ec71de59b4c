//! Blocks that a stage-in has read and not stored. They are kept in the arena, as far as it is free, so that the first epoch finds
//! them there. Until the stage-in's catalog numbers them, nobody can ask for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dayfly_meta::catalog::{NOT_STORED, NOT_STORED_MIN};
use dayfly_meta::checksum::checksum;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId};
use dayfly_transport::Slot;

use super::lease::ResidentChunk;
use super::{Arena, ChunkKey};
use crate::store::Dataset;

/// Blocks have far fewer chunks, so no chunk of a dataset has the key of a kept block.
const KEPT: u16 = u16::MAX;

/// Returns the key of a kept block until its dataset is known.
fn provisional_key(dataset: DatasetId, arrival: u32) -> ChunkKey {
    (dataset, Chunk { block: BlockId(arrival), index: KEPT })
}

impl Arena {
    /// Returns memory for a block that is to be kept, without evicting anything, and not while requests wait for room.
    pub(crate) fn spare(&self, len: u64) -> Option<Slot> {
        (!self.is_short()).then(|| self.inner.region.slot(len)).flatten()
    }

    /// Keeps a block of a dataset that does not exist yet. `arrival` tells it apart from the others.
    pub(crate) fn keep(&self, dataset: DatasetId, arrival: u32, slot: Slot) {
        let chunk = Arc::new(ResidentChunk::new(slot, self.inner.marks.clone(), true));
        let evicted = self.table().finish_load(provisional_key(dataset, arrival), chunk);
        drop(evicted);
    }

    /// Gives the kept blocks of a dataset that is about to become visible to those who will ask for them, after a comparison of
    /// their bytes with the catalog. Drops those that the catalog does not contain. Takes time in proportion to the kept bytes.
    pub(crate) fn adopt(&self, dataset: &Dataset) {
        let id = dataset.id();
        dataset.each_kept(&mut |arrival, block| {
            let Some(kept) = self.table().take(&provisional_key(id, arrival)) else { return };
            let chunk = Chunk { block, index: 0 };
            if dataset.catalog().chunk_checksum(chunk) != Some(checksum(kept.bytes())) {
                tracing::warn!(dataset = id.0, block = block.0, "a block that was kept in memory has changed there; dropped it");
                return;
            }
            kept.publish(dataset, block, self.next_generation());
            let evicted = self.table().finish_load((id, chunk), kept);
            drop(evicted);
        });
        let unused = self.table().forget(|(of, chunk)| *of == id && chunk.index == KEPT);
        drop(unused);
    }
}

/// Numbers the blocks that one stage-in keeps on this node.
#[derive(Debug, Default)]
pub(crate) struct KeptNumbers(AtomicU32);

impl KeptNumbers {
    /// Returns an arrival number that no other block on this node has; `None` if there are no more.
    pub(crate) fn next(&self) -> Option<u32> {
        let arrival = NOT_STORED_MIN.checked_add(self.0.fetch_add(1, Ordering::Relaxed))?;
        (arrival < NOT_STORED).then_some(arrival)
    }
}
