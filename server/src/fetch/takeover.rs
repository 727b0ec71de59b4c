//! Chooses the node that is asked for a block: its owner, or with several copies the holder with the fewest of this node's requests.
//! If no holder answers, the next candidate takes their place: it reads the block from its origin, once for all nodes that ask for it.
//!
//! Invariant: a request that fails because a node does not answer puts that node on the list of suspects, and a holder that does not
//! have a good copy is not asked for it again. So the next attempt goes to another node, and attempts end. This node itself is never
//! a suspect.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId, NodeId};
use dayfly_meta::limits::BAD_HOLDERS_MAX;
use dayfly_meta::placement::NodeSet;

use super::Fetcher;
use super::error::ReadError;
use crate::origins::has_origin;
use crate::peers::PeerError;
use crate::stats::OwnerCounter;
use crate::store::Dataset;

/// Holders that turned out to have no good copy of a block.
#[derive(Default)]
pub(super) struct BadHolders(Mutex<HashSet<(DatasetId, BlockId, NodeId)>>);

impl BadHolders {
    fn lock(&self) -> MutexGuard<'_, HashSet<(DatasetId, BlockId, NodeId)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn contains(&self, dataset: &Dataset, block: BlockId, node: NodeId) -> bool {
        self.lock().contains(&(dataset.id(), block, node))
    }

    fn insert(&self, dataset: &Dataset, block: BlockId, node: NodeId) {
        let mut all = self.lock();
        if all.len() >= BAD_HOLDERS_MAX {
            // They are found again, at the cost of a request each.
            all.clear();
        }
        all.insert((dataset.id(), block, node));
    }
}

/// The bytes that one request is about to ask each holder for.
#[derive(Default)]
pub(super) struct Loads(RefCell<HashMap<NodeId, u64>>);

impl Fetcher {
    /// Returns the node to ask for a chunk.
    pub(super) fn source_of(
        &self,
        dataset: &Dataset,
        chunk: Chunk,
        owner: NodeId,
        absent: Option<&NodeSet>,
        loads: &Loads,
    ) -> NodeId {
        if dataset.copies() > 1
            && let Some(holder) = self.best_holder(dataset, chunk, absent, loads)
        {
            return holder;
        }
        let is_bad = |node| dataset.copies() > 1 && self.bad_holders.contains(dataset, chunk.block, node);
        let is_absent = |node| absent.is_some_and(|absent| absent.contains(node));
        if !is_absent(owner) && !is_bad(owner) {
            return owner;
        }
        // A node that took the place of a lost holder may have a copy that has no origin.
        if dataset.copies() == 1 && !has_origin(dataset, chunk) {
            return owner;
        }
        let mut skipped = absent.copied().unwrap_or_default();
        if dataset.copies() > 1 {
            dataset.holders(chunk.block).into_iter().filter(|&holder| is_bad(holder)).for_each(|holder| {
                skipped.insert(holder);
            });
            skipped.insert(owner);
        }
        dataset.candidate(chunk.block, &skipped).unwrap_or(self.peers.own_node())
    }

    /// Returns the holder of a copy with the fewest bytes under way to this node, if other nodes hold copies and answer.
    fn best_holder(&self, dataset: &Dataset, chunk: Chunk, absent: Option<&NodeSet>, loads: &Loads) -> Option<NodeId> {
        let mut loads = loads.0.borrow_mut();
        let load = |holder: NodeId| {
            let in_flight = self.owners.get(holder.index()).map_or(0, OwnerCounter::in_flight);
            // Equal holders come in an order that differs between blocks.
            (in_flight + loads.get(&holder).copied().unwrap_or(0), holder.0 ^ chunk.block.0 as u16)
        };
        let best = self.good_holders(dataset, chunk.block, absent).into_iter().min_by_key(|&holder| load(holder))?;
        *loads.entry(best).or_default() += dataset.chunk(chunk).map_or(0, |info| info.len);
        Some(best)
    }

    /// Returns the other nodes that hold a block since the stage-in, and from which it can be read as far as this node knows.
    fn good_holders(&self, dataset: &Dataset, block: BlockId, absent: Option<&NodeSet>) -> Vec<NodeId> {
        let mut holders = dataset.holders(block);
        let is_absent = |node| absent.is_some_and(|absent| absent.contains(node));
        let own = self.peers.own_node();
        holders.retain(|&node| node != own && !is_absent(node) && !self.bad_holders.contains(dataset, block, node));
        holders
    }

    /// Returns a node, not lost and no suspect, that holds a copy of a block since the stage-in.
    pub(super) fn surviving_holder(&self, dataset: &Dataset, block: BlockId) -> Option<NodeId> {
        let absent = self.peers.absent();
        (dataset.copies() > 1).then(|| self.good_holders(dataset, block, absent.as_ref()).first().copied()).flatten()
    }

    /// Takes note of a request to `node` that has failed. Returns whether the error means that the node cannot be reached, or does
    /// not answer. From then on, other nodes are asked for those chunks that have other sources.
    pub(super) fn note_absence(&self, node: NodeId, error: &ReadError) -> bool {
        let is_absent =
            matches!(error, ReadError::Peer(error) if matches!(**error, PeerError::Transport(_)) && error.is_absence());
        if is_absent {
            self.peers.suspect(node);
        }
        is_absent
    }

    /// Returns whether a chunk can be read although a node does not answer: from its origin, or from another holder that is not
    /// absent.
    pub(super) fn has_other_source(&self, dataset: &Dataset, chunk: Chunk) -> bool {
        has_origin(dataset, chunk) || self.surviving_holder(dataset, chunk.block).is_some()
    }

    /// After `node` has not sent a good chunk: returns whether the chunk should be asked for again, because another node has a copy
    /// or can read it from its origin.
    pub(super) fn can_ask_other_holder(&self, dataset: &Dataset, chunk: Chunk, node: NodeId) -> bool {
        // A node that was to read the chunk from its origin was the last resort.
        if dataset.copies() == 1 || !dataset.holders(chunk.block).contains(&node) {
            return false;
        }
        self.bad_holders.insert(dataset, chunk.block, node);
        self.has_other_source(dataset, chunk)
    }
}
