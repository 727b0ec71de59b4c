//! Checks local copies that a process reported as unreadable or wrong. The server reads each copy itself, so a process with
//! faulty memory of its own cannot make the node drop a good copy. A bad cached copy of another node's block is withdrawn; the
//! block is then fetched as if it had never been cached.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dayfly_meta::checksum::check;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::wire::status::Hop;

use super::Fetcher;
use super::error::{ChunkName, CopyError, FetchError, ReadError, read_error};
use crate::origins::has_origin;
use crate::store::Dataset;

impl Fetcher {
    /// Checks this node's copies of chunks, and withdraws those that are bad. Returns an error for each bad copy of a block that
    /// this node owns, if the block cannot be read from its origin.
    pub(crate) async fn recheck(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk]) -> Vec<Option<FetchError>> {
        let (fetcher, checked, wanted) = (self.clone(), dataset.clone(), chunks.to_vec());
        let checking = self.blocking.run(move || -> Vec<Option<FetchError>> {
            wanted.iter().map(|&chunk| fetcher.recheck_one(&checked, chunk)).collect()
        });
        checking.await.unwrap_or_else(|error| {
            let failed = |&chunk: &Chunk| Some(read_error(dataset, chunk, ReadError::Verify(error.clone())));
            chunks.iter().map(failed).collect()
        })
    }

    fn recheck_one(&self, dataset: &Arc<Dataset>, chunk: Chunk) -> Option<FetchError> {
        let location = dataset.locations().find(chunk.block);
        let Some(position) = location.and_then(Location::position) else {
            // Chunks of large blocks are in the arena without a published location.
            self.recheck_arena(dataset, chunk);
            return None;
        };
        let error = check_copy(dataset, chunk, position)?.err()?;
        let is_cached = matches!(location, Some(Location::Cached(_)));
        let is_withdrawn = match is_cached {
            true => dataset.withdraw_cached(chunk.block, position),
            false => {
                (has_origin(dataset, chunk) || dataset.copies() > 1)
                    && dataset.locations().withdraw(chunk.block, Location::Owned(position))
            }
        };
        if is_cached && !is_withdrawn || dataset.is_gone() {
            // The copy was withdrawn while we read it, so the read may have returned anything.
            return None;
        }
        let (owner, name) = (dataset.catalog().owner(chunk.block)?, ChunkName::new(dataset, chunk));
        let hop = if is_cached { Hop::Cached } else { Hop::Owned };
        match &error {
            CopyError::Damaged(mismatch) => self.damage.record(hop, owner, &name, *mismatch),
            CopyError::Unreadable(error) => self.damage.record_unreadable(hop, owner, &name, error),
        }
        if is_withdrawn {
            self.cache_again(dataset, chunk);
            return None;
        }
        Some(FetchError::BadCopy { owner, chunk: name, source: error })
    }

    /// Caches again those chunks of a withdrawn block that are still in the arena. The others are cached when they are fetched
    /// again.
    fn cache_again(&self, dataset: &Arc<Dataset>, chunk: Chunk) {
        let len = dataset.catalog().block(chunk.block).map_or(0, |(_, len)| len);
        for chunk in Chunk::all(chunk.block, len) {
            self.cache_writer.enqueue(dataset, chunk, || self.arena.find(&(dataset.id(), chunk)));
        }
    }

    fn recheck_arena(&self, dataset: &Dataset, chunk: Chunk) {
        let key = (dataset.id(), chunk);
        let (Some(lease), Some(expected)) = (self.arena.find(&key), dataset.catalog().chunk_checksum(chunk)) else { return };
        if let Err(mismatch) = check(lease.bytes(), expected) {
            let Some(owner) = dataset.catalog().owner(chunk.block) else { return };
            self.damage.record(Hop::Arena, owner, ChunkName::new(dataset, chunk), mismatch);
            self.arena.discard(&key, &lease);
        }
    }
}

/// Reads a chunk from this node's drive and compares the bytes with the chunk's checksum; returns `None` if the catalog has no
/// such chunk.
fn check_copy(dataset: &Dataset, chunk: Chunk, position: DrivePosition) -> Option<Result<(), CopyError>> {
    let info = dataset.chunk(chunk)?;
    let expected = dataset.catalog().chunk_checksum(chunk)?;
    let file = dataset.segments().file(position.drive)?;
    let mut bytes = vec![0; info.len as usize];
    let read = file.read_exact_at(&mut bytes, position.offset + chunk.start());
    let read = read.map_err(|error| CopyError::Unreadable(Arc::new(error)));
    Some(read.and_then(|()| check(&bytes, expected).map_err(CopyError::Damaged)))
}
