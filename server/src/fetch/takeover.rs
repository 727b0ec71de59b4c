//! Reads blocks whose owners do not answer. The next candidate of such a block takes its owner's place: it reads the block from its
//! origin, once for all nodes that ask for it.
//!
//! Invariant: a request that fails because a node does not answer puts that node on the list of suspects, so the next attempt goes
//! to another node. This node itself is never a suspect. So attempts end.

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

    /// Takes note of a request to `node` that has failed. Returns whether the error means that the node cannot be reached, or does
    /// not answer. From then on, other nodes are asked for those chunks that have origins.
    pub(super) fn note_absence(&self, node: NodeId, error: &ReadError) -> bool {
        let is_absent =
            matches!(error, ReadError::Peer(error) if matches!(**error, PeerError::Transport(_)) && error.is_absence());
        if is_absent {
            self.peers.suspect(node);
        }
        is_absent
    }
}
