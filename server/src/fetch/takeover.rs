//! Chooses the node that is asked for a block: its owner, or with several copies the holder with the fewest of this node's requests.
//! If no holder answers, the next candidate takes their place: it reads the block from its origin, once for all nodes that ask for it.
//!
//! A new server in the place of a dead one does not have all blocks that it holds yet. The other holders are asked instead. If none of
//! them is left, a block of a compressed tar is waited for: it comes back to the new server.
//!
//! Invariant: a request that fails because a node does not answer puts that node on the list of suspects, a node that does not know
//! the dataset is not asked for it for a while, and a holder that does not have a good copy is not asked for it again. So the next
//! attempt goes to another node, and attempts end. This node itself is never a suspect. A node that is no holder, and answers that it
//! cannot read a block, is the last one that is asked.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId, NodeId};
use dayfly_meta::limits::{BAD_HOLDER_PAUSE, BAD_HOLDERS_MAX};
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::peer::RejectionKind;
use tokio::time::Instant;

use super::Fetcher;
use crate::origins::has_origin;
use crate::peers::PeerError;
use crate::stats::OwnerCounter;
use crate::store::Dataset;

/// Holders that turned out to have no good copy of a block. They may get one later, so each is asked again after a while.
#[derive(Default)]
pub(super) struct BadHolders(Mutex<HashMap<(DatasetId, BlockId, NodeId), BadHolder>>);

#[derive(Clone, Copy)]
struct BadHolder {
    since: Instant,
    /// Whether the block is to come back to the holder.
    is_late: bool,
}

impl BadHolders {
    fn lock(&self) -> MutexGuard<'_, HashMap<(DatasetId, BlockId, NodeId), BadHolder>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, dataset: &Dataset, block: BlockId, node: NodeId) -> Option<BadHolder> {
        let found = self.lock().get(&(dataset.id(), block, node)).copied();
        found.filter(|bad| bad.since.elapsed() < BAD_HOLDER_PAUSE)
    }

    fn contains(&self, dataset: &Dataset, block: BlockId, node: NodeId) -> bool {
        self.find(dataset, block, node).is_some()
    }

    fn is_late(&self, dataset: &Dataset, block: BlockId, node: NodeId) -> bool {
        self.find(dataset, block, node).is_some_and(|bad| bad.is_late)
    }

    fn insert(&self, dataset: &Dataset, block: BlockId, node: NodeId, is_late: bool) {
        let mut all = self.lock();
        if all.len() >= BAD_HOLDERS_MAX {
            // They are found again, at the cost of a request each.
            all.clear();
        }
        all.insert((dataset.id(), block, node), BadHolder { since: Instant::now(), is_late });
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
        if let Some(holder) = self.late_holder(dataset, chunk, absent) {
            return holder;
        }
        let is_bad = |node| dataset.copies() > 1 && self.bad_holders.contains(dataset, chunk.block, node);
        let is_absent = |node| absent.is_some_and(|absent| absent.contains(node));
        if !is_absent(owner) && !is_bad(owner) {
            return owner;
        }
        // With copies, a node that took the place of a lost holder may have a copy that has no origin.
        let is_streamed = self.is_streamed(dataset, chunk);
        if !has_origin(dataset, chunk) && (dataset.copies() == 1 || is_streamed) && !self.can_be_streamed(dataset, chunk, absent)
        {
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
    pub(super) fn good_holders(&self, dataset: &Dataset, block: BlockId, absent: Option<&NodeSet>) -> Vec<NodeId> {
        self.good_among(dataset.holders(block), dataset, block, absent)
    }

    /// Returns the other nodes that hold a block in place of lost holders, or will.
    pub(super) fn good_stand_ins(
        &self,
        dataset: &Dataset,
        block: BlockId,
        lost: &NodeSet,
        absent: Option<&NodeSet>,
    ) -> Vec<NodeId> {
        let (mut stand_ins, holders) = (dataset.holders_without(block, lost), dataset.holders(block));
        stand_ins.retain(|node| !holders.contains(node));
        self.good_among(stand_ins, dataset, block, absent)
    }

    fn good_among(&self, mut nodes: Vec<NodeId>, dataset: &Dataset, block: BlockId, absent: Option<&NodeSet>) -> Vec<NodeId> {
        let is_absent = |node| absent.is_some_and(|absent| absent.contains(node));
        let own = self.peers.own_node();
        nodes.retain(|&node| node != own && !is_absent(node) && !self.bad_holders.contains(dataset, block, node));
        nodes
    }

    /// Returns a holder, perhaps this node, that answers, and that a chunk of a compressed tar is to come back to.
    fn late_holder(&self, dataset: &Dataset, chunk: Chunk, absent: Option<&NodeSet>) -> Option<NodeId> {
        if dataset.copies() == 1 || !self.is_streamed(dataset, chunk) {
            return None;
        }
        let is_late = |node| match node == self.peers.own_node() {
            true => dataset.is_to_come_back(chunk.block),
            false => self.is_late_holder(dataset, chunk, node),
        };
        let is_absent = |node| absent.is_some_and(|absent| absent.contains(node));
        dataset.holders(chunk.block).into_iter().find(|&node| !is_absent(node) && is_late(node))
    }

    /// Returns whether a node has said that a chunk is to come back to it, and the chunk may have other holders.
    pub(super) fn is_late_holder(&self, dataset: &Dataset, chunk: Chunk, node: NodeId) -> bool {
        dataset.copies() > 1 && self.has_said_late(dataset, chunk, node)
    }

    /// Returns whether a node has said that a chunk is to come back to it. The node may be the chunk's only holder.
    pub(super) fn has_said_late(&self, dataset: &Dataset, chunk: Chunk, node: NodeId) -> bool {
        self.bad_holders.is_late(dataset, chunk.block, node)
    }

    /// After `node` has said that a chunk is late: returns whether another holder can be asked for the chunk at once.
    pub(super) fn can_ask_holder_that_has_it(&self, dataset: &Dataset, chunk: Chunk, node: NodeId) -> bool {
        if !dataset.holders(chunk.block).contains(&node) {
            return false;
        }
        self.bad_holders.insert(dataset, chunk.block, node, true);
        self.surviving_holder(dataset, chunk.block).is_some()
    }

    /// Returns a node, not lost and no suspect, that holds a copy of a block since the stage-in.
    pub(super) fn surviving_holder(&self, dataset: &Dataset, block: BlockId) -> Option<NodeId> {
        let absent = self.absent(dataset);
        (dataset.copies() > 1).then(|| self.good_holders(dataset, block, absent.as_ref()).first().copied()).flatten()
    }

    /// Returns the node that has held a block in place of this one while this node was lost.
    pub(super) fn substitute(&self, dataset: &Dataset, block: BlockId) -> Option<NodeId> {
        if !dataset.is_to_come_back(block) {
            return None;
        }
        let mut skipped = self.absent(dataset).unwrap_or_default();
        skipped.insert(self.peers.own_node());
        // The other holders have been asked.
        dataset.holders(block).into_iter().for_each(|holder| {
            skipped.insert(holder);
        });
        dataset.candidate(block, &skipped)
    }

    /// Returns the nodes that are not asked for blocks of a dataset: those that are lost or do not answer, and those that do not know
    /// the dataset. `None` if there are none.
    pub(super) fn absent(&self, dataset: &Dataset) -> Option<NodeSet> {
        self.unaware.and_absent(dataset.id(), self.peers.absent())
    }

    /// Takes note of a request to `node` that has failed. Returns whether the error means that the node cannot be reached, does not
    /// answer, or does not know the dataset. From then on, other nodes are asked for those chunks that have other sources.
    pub(super) fn note_absence(&self, node: NodeId, dataset: &Dataset, error: &PeerError) -> bool {
        match error {
            PeerError::Transport(_) if error.is_absence() => self.peers.suspect(node),
            // If the dataset is being replaced, this node learns of that soon.
            PeerError::Rejected { rejection, .. } if rejection.kind == RejectionKind::NoSuchDataset && !dataset.is_gone() => {
                self.unaware.insert(dataset.id(), node);
            }
            _ => return false,
        }
        true
    }

    /// Returns whether a chunk can be read although a node does not answer: from its origin, or from another holder that is not
    /// absent.
    pub(super) fn has_other_source(&self, dataset: &Dataset, chunk: Chunk) -> bool {
        let absent = self.absent(dataset);
        self.has_other_copy(dataset, chunk)
            || self.late_holder(dataset, chunk, absent.as_ref()).is_some()
            || self.can_be_streamed(dataset, chunk, absent.as_ref())
    }

    fn has_other_copy(&self, dataset: &Dataset, chunk: Chunk) -> bool {
        has_origin(dataset, chunk) || self.surviving_holder(dataset, chunk.block).is_some() || self.has_substitute(dataset, chunk)
    }

    /// Returns whether another node may have made a copy again, because a holder is lost. [`Self::source_of`] asks that node when no
    /// holder is left. A block of a compressed tar that can be read again comes back otherwise.
    fn has_substitute(&self, dataset: &Dataset, chunk: Chunk) -> bool {
        if dataset.copies() == 1 || self.is_streamed(dataset, chunk) {
            return false;
        }
        let (roster, holders) = (self.peers.roster(), dataset.holders(chunk.block));
        if holders.iter().all(|&holder| roster.is_live(holder)) {
            return false;
        }
        let mut skipped = self.absent(dataset).unwrap_or_default();
        holders.into_iter().for_each(|holder| {
            skipped.insert(holder);
        });
        dataset.candidate(chunk.block, &skipped).is_some_and(|node| node != self.peers.own_node())
    }

    /// Returns whether a chunk's compressed tar will be read again: not as long as a node has a copy of the chunk, even a bad one.
    fn can_be_streamed(&self, dataset: &Dataset, chunk: Chunk, absent: Option<&NodeSet>) -> bool {
        let is_absent = |node: &NodeId| absent.is_some_and(|absent| absent.contains(*node));
        self.is_streamed(dataset, chunk) && dataset.holders(chunk.block).iter().all(is_absent)
    }

    /// After `node` has not sent a good chunk: returns whether the chunk should be asked for again, because another node has a copy,
    /// or may have one, or will have one, or can read it from its origin.
    pub(super) fn can_ask_other_holder(&self, dataset: &Dataset, chunk: Chunk, node: NodeId) -> bool {
        // A node that was to read the chunk from its origin was the last resort.
        if !dataset.is_copied_to(chunk.block, node) {
            return false;
        }
        self.bad_holders.insert(dataset, chunk.block, node, false);
        self.has_other_copy(dataset, chunk) || self.late_holder(dataset, chunk, self.absent(dataset).as_ref()).is_some()
    }
}
