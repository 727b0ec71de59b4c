//! Reads blocks whose owners do not answer. The next candidate of such a block takes its owner's place: it reads the block from its
//! origin, once for all nodes that ask for it.
//!
//! Invariant: a request that fails because a node does not answer puts that node on the list of suspects, so the next attempt goes
//! to another node. This node itself is never a suspect. So attempts end.

use std::sync::Arc;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::NodeId;
use dayfly_meta::placement::NodeSet;

use super::Fetcher;
use super::error::ReadError;
use crate::origins::has_origin;
use crate::peers::PeerError;
use crate::store::Dataset;

impl Fetcher {
    /// Returns the node to ask for a chunk: its owner, or another node while the owner is absent and the chunk has an origin.
    pub(super) fn source_of(&self, dataset: &Dataset, chunk: Chunk, owner: NodeId, absent: Option<&NodeSet>) -> NodeId {
        let Some(absent) = absent.filter(|absent| absent.contains(owner)) else { return owner };
        if !has_origin(dataset, chunk) {
            return owner;
        }
        dataset.candidate(chunk.block, absent).unwrap_or(self.peers.own_node())
    }

    /// After a request to `node` has failed: returns whether the request should be made again, because other nodes can answer it.
    pub(super) fn can_ask_others(&self, dataset: &Arc<Dataset>, chunks: &[Chunk], node: NodeId, error: &ReadError) -> bool {
        if !is_absence(error) {
            return false;
        }
        self.peers.suspect(node);
        // Chunks without origins are asked for at their owner only.
        chunks.iter().all(|&chunk| has_origin(dataset, chunk))
    }
}

/// Returns whether an error means that the node cannot be reached, or does not answer.
fn is_absence(error: &ReadError) -> bool {
    let ReadError::Peer(error) = error else { return false };
    matches!(**error, PeerError::Transport(_)) && error.is_absence()
}
