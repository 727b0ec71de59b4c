//! Blocks that this node owns, but has on no drive: a stage-in found no room for them, or their copies were bad.

use std::sync::{Arc, PoisonError};

use dayfly_meta::chunk::Chunk;
use dayfly_transport::Slot;
use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::Instrument;

use super::error::{ReadError, read_error};
use super::shared_read::JoinedRead;
use super::{Caching, FetchError, FetchedChunks, Fetcher};
use crate::arena::LoadGroup;
use crate::origins::OriginFailure;

impl Fetcher {
    /// Reads chunks from their origins. The reading goes on if the caller no longer waits for it.
    pub(super) async fn load_from_origins(self: Arc<Self>, group: LoadGroup, caching: Caching) -> FetchedChunks {
        let (done, loaded) = oneshot::channel();
        let loading = {
            let fetcher = self.clone();
            let load = async move {
                let fetched = fetcher.read_and_finish(group, caching).await;
                // The receiver is gone if the caller no longer waits. Its leases are then dropped.
                let _ = done.send(fetched);
            };
            load.in_current_span()
        };
        self.spawn_origin_load(loading);
        // A load ends without a result only when the node ends.
        loaded.await.unwrap_or_default()
    }

    /// Starts work that goes on when the request that needs it is dropped.
    pub(super) fn spawn_origin_load(&self, load: impl Future<Output = ()> + Send + 'static) {
        let mut loads = self.origin_loads.lock().unwrap_or_else(PoisonError::into_inner);
        while loads.try_join_next().is_some() {}
        loads.spawn(load);
    }

    async fn read_and_finish(self: Arc<Self>, mut group: LoadGroup, caching: Caching) -> FetchedChunks {
        let (chunks, dataset) = (group.chunks(), group.dataset().clone());
        let unread = |&chunk: &Chunk| Err(read_error(&dataset, chunk, ReadError::Nothing));
        let mut outcomes: Vec<Result<Slot, FetchError>> = chunks.iter().map(unread).collect();
        let (mut numbers, mut slots, mut shared) = (Vec::new(), Vec::new(), Vec::new());
        for (number, (slot, joined)) in group.take_slots().into_iter().zip(self.join_reads(&dataset, &chunks)).enumerate() {
            match joined {
                Some(read) => shared.push((number, slot, read)),
                None => {
                    numbers.push(number);
                    slots.push(slot);
                }
            }
        }
        let copying = join_all(shared.into_iter().map(|(number, slot, read)| self.copy_shared(number, slot, read)));
        let wanted: Vec<Chunk> = numbers.iter().map(|&number| chunks[number]).collect();
        let reading = join_all(self.origins.read(&dataset, &wanted, slots));
        let (read, copied) = tokio::join!(reading, copying);
        let mut finish = |number: usize, read: Result<Slot, OriginFailure>| {
            outcomes[number] = read.map_err(|error| read_error(&dataset, chunks[number], error.into()));
        };
        read.into_iter().flatten().for_each(|(index, read)| finish(numbers[index], read));
        // A read that ended without a result was given up. So this node reads these chunks itself.
        let (mut numbers, mut slots) = (Vec::new(), Vec::new());
        for (number, slot, outcome) in copied {
            match outcome {
                Some(Ok(())) => finish(number, Ok(slot)),
                Some(Err(failure)) => finish(number, Err(failure)),
                None => {
                    numbers.push(number);
                    slots.push(slot);
                }
            }
        }
        let wanted: Vec<Chunk> = numbers.iter().map(|&number| chunks[number]).collect();
        let read = join_all(self.origins.read(&dataset, &wanted, slots)).await;
        read.into_iter().flatten().for_each(|(index, read)| finish(numbers[index], read));
        self.finish(group, outcomes, caching)
    }

    /// Waits for a read whose bytes do not go into the arena, and copies them. The outcome is `None` if that read was given up.
    async fn copy_shared(
        &self,
        number: usize,
        mut slot: Slot,
        read: JoinedRead,
    ) -> (usize, Slot, Option<Result<(), OriginFailure>>) {
        let outcome = match timeout(self.peers.deadlines().origin, read.outcome()).await.ok().flatten() {
            Some(Ok(bytes)) if bytes.len() == slot.len() => {
                slot.copy_from_slice(&bytes);
                Some(Ok(()))
            }
            Some(Err(failure)) => Some(Err(failure)),
            _ => None,
        };
        (number, slot, outcome)
    }
}
