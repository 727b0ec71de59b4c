//! Blocks that this node owns, but has on no drive: a stage-in found no room for them, or their copies were bad.

use std::sync::{Arc, PoisonError};

use dayfly_meta::chunk::Chunk;
use dayfly_transport::Slot;
use futures_util::future::join_all;
use tokio::sync::oneshot;
use tracing::Instrument;

use super::error::{ReadError, read_error};
use super::{Caching, FetchError, FetchedChunks, Fetcher};
use crate::arena::LoadGroup;

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
        let reading = self.origins.read(&dataset, &chunks, group.take_slots());
        for (number, read) in join_all(reading).await.into_iter().flatten() {
            outcomes[number] = read.map_err(|error| read_error(&dataset, chunks[number], error.into()));
        }
        self.finish(group, outcomes, caching)
    }
}
