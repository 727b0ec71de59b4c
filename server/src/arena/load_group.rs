//! The chunks of one owner that one request has to load into the arena.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::FETCH_PART_LEN;
use dayfly_transport::Slot;
use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::lease::{Lease, ResidentChunk};
use super::{Arena, LoadFailure, PendingLoad, Wanted};
use crate::store::Dataset;

/// The right, and the duty, to load chunks of one owner. If the group is dropped before it has been filled, the next request
/// for one of its chunks loads that chunk.
pub(crate) struct LoadGroup {
    arena: Arena,
    pub(crate) owner: NodeId,
    dataset: Arc<Dataset>,
    loads: Vec<Load>,
    bytes: u64,
    /// Sends the failures to the requests that joined; dropping the sender ends their wait without a failure.
    end: Option<oneshot::Sender<Arc<HashMap<Chunk, LoadFailure>>>>,
    pending: PendingLoad,
}

struct Load {
    /// The chunk's index in the request.
    index: u32,
    chunk: Chunk,
    is_block: bool,
    slot: Option<Slot>,
}

impl LoadGroup {
    pub(super) fn new(arena: &Arena, dataset: &Arc<Dataset>, owner: NodeId) -> Self {
        let (end, pending) = oneshot::channel();
        let (end, pending) = (Some(end), PendingLoad { owner, end: pending.shared() });
        Self { arena: arena.clone(), owner, dataset: dataset.clone(), loads: Vec::new(), bytes: 0, end, pending }
    }

    /// Returns whether one message can carry `len` more bytes.
    pub(super) fn fits(&self, len: u64) -> bool {
        self.bytes + len <= FETCH_PART_LEN
    }

    pub(super) fn pending(&self) -> PendingLoad {
        self.pending.clone()
    }

    pub(super) fn push(&mut self, wanted: &Wanted, slot: Slot) {
        self.bytes += wanted.info.len;
        let (index, chunk, is_block) = (wanted.index, wanted.chunk, wanted.info.is_block);
        self.loads.push(Load { index, chunk, is_block, slot: Some(slot) });
    }

    pub(crate) fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    pub(crate) fn len(&self) -> usize {
        self.loads.len()
    }

    pub(crate) fn chunks(&self) -> Vec<Chunk> {
        self.loads.iter().map(|load| load.chunk).collect()
    }

    /// Returns the chunks' indexes in the request.
    pub(crate) fn indexes(&self) -> impl Iterator<Item = u32> {
        self.loads.iter().map(|load| load.index)
    }

    /// Returns the slots that receive the chunks, in order.
    pub(crate) fn take_slots(&mut self) -> Vec<Slot> {
        self.loads.iter_mut().filter_map(|load| load.slot.take()).collect()
    }

    /// Ends the load: makes the verified chunks resident, and tells the requests that joined why the others could not be loaded.
    /// Returns each chunk's index in the request, with a lease or the failure.
    pub(crate) fn end<E>(mut self, outcomes: Vec<Result<Slot, Arc<E>>>) -> Vec<(u32, Result<Lease, Arc<E>>)>
    where
        E: Error + Send + Sync + 'static,
    {
        let arena = self.arena.clone();
        let mut ended = Vec::with_capacity(outcomes.len());
        let mut failures: HashMap<Chunk, LoadFailure> = HashMap::new();
        // These are dropped after the lock is released, because evicted chunks withdraw their locations and free their slots.
        let mut evicted = Vec::new();
        let mut table = arena.table();
        for (load, outcome) in std::mem::take(&mut self.loads).into_iter().zip(outcomes) {
            let key = (self.dataset.id(), load.chunk);
            let slot = match outcome {
                Ok(slot) => slot,
                Err(failure) => {
                    table.abandon_load(&key);
                    failures.insert(load.chunk, failure.clone());
                    ended.push((load.index, Err(failure)));
                    continue;
                }
            };
            let chunk = Arc::new(arena.make_resident(&self.dataset, &load, slot));
            evicted.extend(table.finish_load(key, chunk.clone()));
            ended.push((load.index, Ok(Lease::new(&arena, chunk))));
        }
        drop(table);
        if !failures.is_empty()
            && let Some(end) = self.end.take()
        {
            // Perhaps no request has joined.
            let _ = end.send(Arc::new(failures));
        }
        ended
    }

    fn abandon(&mut self) {
        let mut table = self.arena.table();
        for load in self.loads.drain(..) {
            table.abandon_load(&(self.dataset.id(), load.chunk));
        }
    }
}

impl Drop for LoadGroup {
    fn drop(&mut self) {
        if !self.loads.is_empty() {
            self.abandon();
        }
    }
}

impl Arena {
    fn make_resident(&self, dataset: &Dataset, load: &Load, slot: Slot) -> ResidentChunk {
        let chunk = ResidentChunk::new(slot, self.inner.marks.clone(), dataset.is_holder(load.chunk.block));
        if load.is_block {
            chunk.publish(dataset, load.chunk.block, self.next_generation());
        }
        chunk
    }
}
