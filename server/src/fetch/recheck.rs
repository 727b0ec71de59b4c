//! Looking again at copies on this node that a process found unreadable or wrong. The server reads each for itself, so a
//! process with bad memory of its own makes nobody lose a good copy. A bad copy of what another node owns is given up, and is
//! then fetched as if it had never been here.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dayfly_meta::checksum::{Mismatch, check};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::wire::status::Hop;

use super::{Fetcher, name};
use crate::store::Dataset;

/// A copy that was looked at.
enum Copy {
    Good,
    Damaged(Mismatch),
    Unreadable(String),
}

impl Fetcher {
    /// Looks at this node's copies of chunks. What is told, for the user, is of blocks that this node owns: nobody has another
    /// copy of those.
    pub(crate) async fn recheck(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk]) -> Vec<Option<String>> {
        let (fetcher, dataset, wanted) = (self.clone(), dataset.clone(), chunks.to_vec());
        let looking = self
            .blocking
            .run(move || -> Vec<Option<String>> { wanted.iter().map(|&chunk| fetcher.recheck_one(&dataset, chunk)).collect() });
        looking.await.unwrap_or_else(|error| vec![Some(format!("the check of a copy failed: {error}")); chunks.len()])
    }

    fn recheck_one(&self, dataset: &Arc<Dataset>, chunk: Chunk) -> Option<String> {
        let location = dataset.locations().find(chunk.block);
        let Some(place) = location.and_then(Location::position) else {
            // Chunks of large blocks lie in the arena without a location.
            self.recheck_arena(dataset, chunk);
            return None;
        };
        let copy = read(dataset, chunk, place)?;
        let is_kept = matches!(location, Some(Location::Cached(_)));
        if matches!(copy, Copy::Good) || (is_kept && !dataset.withdraw_copy(chunk.block, place)) || dataset.is_gone() {
            // What was given up while it was read may have read as anything.
            return None;
        }
        let (owner, name) = (dataset.catalog().owner(chunk.block)?, name(dataset, chunk));
        let hop = if is_kept { Hop::Cached } else { Hop::Owned };
        let why = match copy {
            Copy::Good => return None,
            Copy::Damaged(mismatch) => {
                self.damage.found(hop, owner, &name, mismatch);
                mismatch.to_string()
            }
            Copy::Unreadable(error) => {
                self.damage.unreadable(hop, owner, &name, &error);
                error
            }
        };
        if is_kept {
            self.keep_again(dataset, chunk);
            return None;
        }
        Some(format!("node {owner}, which owns it, has a bad copy of {name}: {why}; stage it in again, and look at its drive"))
    }

    /// Has a block kept whose copy was given up, as far as it is in the arena still. The rest is kept when it comes again.
    fn keep_again(&self, dataset: &Arc<Dataset>, chunk: Chunk) {
        let len = dataset.catalog().block(chunk.block).map_or(0, |(_, len)| len);
        for chunk in Chunk::all(chunk.block, len) {
            self.cache_writer.keep(dataset, chunk, || self.arena.find(&(dataset.id(), chunk)));
        }
    }

    fn recheck_arena(&self, dataset: &Dataset, chunk: Chunk) {
        let key = (dataset.id(), chunk);
        let (Some(lease), Some(expected)) = (self.arena.find(&key), dataset.catalog().chunk_checksum(chunk)) else { return };
        if let Err(mismatch) = check(lease.bytes(), expected) {
            let Some(owner) = dataset.catalog().owner(chunk.block) else { return };
            self.damage.found(Hop::Arena, owner, &name(dataset, chunk), mismatch);
            self.arena.discard(&key, &lease);
        }
    }
}

/// Reads a chunk as it lies on this node's drive; `None` where the catalog has no such chunk.
fn read(dataset: &Dataset, chunk: Chunk, place: DrivePosition) -> Option<Copy> {
    let info = dataset.chunk(chunk)?;
    let expected = dataset.catalog().chunk_checksum(chunk)?;
    let file = dataset.segments().file(place.drive)?;
    let mut bytes = vec![0; info.len as usize];
    Some(match file.read_exact_at(&mut bytes, place.offset + chunk.start()) {
        Err(error) => Copy::Unreadable(error.to_string()),
        Ok(()) => check(&bytes, expected).map_or_else(Copy::Damaged, |()| Copy::Good),
    })
}
