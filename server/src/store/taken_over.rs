//! Which blocks this node holds in place of nodes that are lost: those of which it is the first candidate that is not lost, or with
//! several copies, one of the first.
//!
//! Such a block ranks among the blocks that this node owns but did not store, so it is cached before the blocks of live owners.
//! When the lost node returns, it ranks as an ordinary cached block again.
//!
//! With several copies, such blocks are *kept*: they have their room before anything is cached, and never make way. A node that has
//! returned may be a new server without blocks, so they are kept until that node says that it has its copies again. Blocks that come
//! to a new server, or to a node whose copies a stage-in left out, are kept, too, because they belong there for good. So are blocks that
//! no node stored, because their owner was lost before it got them. All of them lie among the cached blocks, because a process maps
//! segments with the length that these have at first.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dayfly_meta::catalog::block_len;
use dayfly_meta::id::{BlockId, NodeId, SampleId};
use dayfly_meta::limits::TAKEN_OVER_SAMPLES_MAX;
use dayfly_meta::placement::NodeSet;
use dayfly_stagein::origin::is_readable;

use super::Dataset;

/// The part of a dataset that a node holds in place of lost owners.
#[derive(Default)]
pub(super) struct TakenOver {
    /// The lost members of the session.
    lost: NodeSet,
    /// Blocks that this node holds in the place of these members are kept: those that are lost, and with several copies also those that
    /// have returned and may not have all of their copies yet.
    kept_for: NodeSet,
    /// Whether the dataset was incomplete when the bytes were counted.
    is_incomplete: bool,
    /// Bytes of the blocks that this node holds in their place, and of the copies that are to come to this node.
    bytes: u64,
    /// Bytes of the blocks that are kept once they have come to this node.
    kept_bytes: u64,
}

impl Dataset {
    /// Takes the lost members of the session. Ranks change with them, so [`Self::lower_cache_threshold`] must follow. Looks at the
    /// whole catalog if the members have changed.
    pub(crate) fn set_lost(&self, lost: &NodeSet) {
        // A node may hear that it has been lost itself. It goes on holding what it holds in place of others.
        let mut lost = *lost;
        lost.remove(self.me());
        let (known, is_incomplete) = (self.taken_over(), self.is_incomplete());
        if known.lost == lost && known.is_incomplete == is_incomplete {
            return;
        }
        let before = known.kept_for.iter().filter(|_| self.copies() > 1);
        self.set_members(lost, lost.iter().chain(before).collect(), is_incomplete);
    }

    /// Takes note that a node that has returned has all of its copies again.
    pub(crate) fn set_refilled(&self, node: NodeId) {
        let known = self.taken_over();
        let mut kept_for = known.kept_for;
        if !known.lost.contains(node) && kept_for.remove(node) {
            self.set_members(known.lost, kept_for, known.is_incomplete);
        }
    }

    fn set_members(&self, lost: NodeSet, kept_for: NodeSet, is_incomplete: bool) {
        let (bytes, kept_bytes) = self.bytes_to_take_over(&lost, &kept_for);
        *self.taken_over_slot() = Arc::new(TakenOver { lost, kept_for, is_incomplete, bytes, kept_bytes });
        self.cached_blocks().set_ranks_changed();
    }

    /// Returns the members that have returned and may not have all of their copies yet.
    pub(crate) fn refilling(&self) -> NodeSet {
        let TakenOver { lost, kept_for, .. } = &*self.taken_over();
        kept_for.iter().filter(|node| !lost.contains(*node)).collect()
    }

    /// Returns whether all copies that are to be on this node are here. Looks at each block once; what was here stays.
    pub(crate) fn has_come_back(&self) -> bool {
        // What is missing may become known later, so nothing is noted before.
        if self.copies() == 1 || !self.is_incomplete() {
            return true;
        }
        let is_here = |block| !self.is_to_come_back(block) || self.is_local(block);
        let (first, blocks) = (self.come_back.load(Ordering::Relaxed), self.catalog().header().blocks);
        let found = (first..blocks).take_while(|&block| is_here(BlockId(block))).count() as u32;
        self.come_back.fetch_max(first + found, Ordering::Relaxed);
        first + found >= blocks
    }

    /// Returns whether this node has appeared in the session without the blocks that it owns, which are to come back to it from
    /// other nodes or from their origins.
    pub(crate) fn is_refilled(&self) -> bool {
        self.is_without_blocks
    }

    /// Returns whether a block comes back to a new server, which owns it and is the only one that stores it.
    pub(crate) fn is_own_again(&self, block: BlockId) -> bool {
        self.is_refilled() && self.copies() == 1 && self.is_mine(block)
    }

    /// Takes note that the stage-in left out copies that are to be on this node, because their owner or this node was lost.
    pub(crate) fn set_lacks_copies(&self) {
        self.lacks_copies.store(true, Ordering::Relaxed);
    }

    /// Returns whether blocks are to come to this node, or back to it, even if no member is lost.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.is_refilled() || self.lacks_copies.load(Ordering::Relaxed)
    }

    /// Returns whether this node is one of a block's holders, and the block is to come back to it.
    pub(crate) fn is_to_come_back(&self, block: BlockId) -> bool {
        self.is_incomplete() && self.holders(block).contains(&self.me())
    }

    /// Returns whether blocks are to come to this node that then stay.
    pub(super) fn has_kept(&self) -> bool {
        self.copies() > 1 && (self.is_incomplete() || !self.taken_over().kept_for.is_empty())
    }

    /// Returns whether a block stays on this node once it has come here.
    pub(crate) fn is_kept(&self, block: BlockId) -> bool {
        self.copies() > 1
            && !self.has_own_copy(block)
            && (self.is_to_come_back(block) || self.takes_over(block, &self.taken_over().kept_for))
    }

    /// Returns the bytes of the blocks that stay on this node once they have come here.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.taken_over().kept_bytes
    }

    /// Returns whether peers may ask this node for a block that the stage-in did not store on it. With several copies, a new server only
    /// has those blocks that have come back to it, and a node that holds blocks in place of a lost one those that it has got.
    pub(crate) fn is_source(&self, block: BlockId) -> bool {
        let is_owner = self.is_mine(block) && !(self.is_refilled() && self.copies() > 1);
        is_owner || self.is_local(block) && self.is_kept(block)
    }

    /// Returns whether this node owns a block or takes the place of the block's owner, which is lost. Its copy on this node, if
    /// there is one, is the one that other nodes ask for.
    pub(crate) fn is_holder(&self, block: BlockId) -> bool {
        self.is_mine(block) || self.takes_over(block, &self.taken_over().lost)
    }

    /// Returns the bytes of the blocks that are to come to this node because of losses: what it holds in place of lost nodes, the copies
    /// that it lacks, and all that it holds if its server is new.
    pub(crate) fn lost_bytes(&self) -> u64 {
        self.taken_over().bytes + if self.is_refilled() { self.owned().unstored_bytes } else { 0 }
    }

    /// Returns the bytes of the blocks that this node holds, because it is one of their holders or takes the place of one, but that the
    /// stage-in did not store on this node.
    pub(crate) fn unstored_bytes(&self) -> u64 {
        self.owned().unstored_bytes + self.taken_over().bytes
    }

    /// Returns whether this node holds a block that no stage-in stored here, because some of its holders are among the lost nodes.
    pub(crate) fn takes_over(&self, block: BlockId, lost: &NodeSet) -> bool {
        if lost.is_empty() {
            return false;
        }
        if self.copies() == 1 {
            let is_lost = self.catalog().owner(block).is_some_and(|owner| lost.contains(owner));
            return is_lost && self.candidate(block, lost) == Some(self.me());
        }
        let is_one_lost = self.holders(block).iter().any(|holder| lost.contains(*holder));
        // A stage-in that loses a node cannot make all copies, so a holder may lack its own.
        is_one_lost && !self.has_own_copy(block) && self.holders_without(block, lost).contains(&self.me())
    }

    /// Returns whether this node may read a block's compressed tar again for the block. If all holders are lost, one node does, and the
    /// other nodes in their place get the block from that node.
    pub(crate) fn is_streamed_here(&self, block: BlockId, lost: &NodeSet) -> bool {
        let are_all_lost = self.holders(block).iter().all(|holder| lost.contains(*holder));
        !are_all_lost || self.candidate(block, lost) == Some(self.me())
    }

    /// Returns the bytes of the blocks that this node holds in place of lost owners, and of the copies that are to come to it; and of
    /// the blocks that it then keeps. In a large dataset it looks at a part of the samples only: the results decide how room is divided,
    /// and this is never exact.
    fn bytes_to_take_over(&self, lost: &NodeSet, kept_for: &NodeSet) -> (u64, u64) {
        let has_copies = self.copies() > 1;
        if kept_for.is_empty() && !(has_copies && self.is_incomplete()) {
            return (0, 0);
        }
        let samples = self.catalog().header().samples;
        let step = samples.div_ceil(TAKEN_OVER_SAMPLES_MAX).max(1);
        let (mut bytes, mut kept_bytes) = (0, 0);
        for sample in (0..samples).step_by(step as usize).map(SampleId) {
            let Some((size, blocks)) = self.catalog().sample(sample) else { continue };
            for (part, block) in (0..).zip(blocks.map(BlockId)) {
                // With copies, other nodes may have it, also in place of lost ones.
                let can_be_read = || has_copies || is_readable(self.catalog(), sample) || self.is_streamed(block);
                let comes_back = has_copies && self.is_to_come_back(block) && !self.has_own_copy(block);
                let is_taken_over = self.takes_over(block, lost) && can_be_read();
                if is_taken_over || comes_back && !self.is_mine(block) {
                    bytes += block_len(size, part);
                }
                // What this node did not get while another one was lost comes to that one now.
                let is_kept = || is_taken_over || comes_back || self.is_local(block) && self.takes_over(block, kept_for);
                if has_copies && is_kept() {
                    kept_bytes += block_len(size, part);
                }
            }
        }
        let of_all = |counted: u64| counted.saturating_mul(step.into());
        let bytes_max = self.remote_bytes().saturating_sub(self.owned().unstored_bytes);
        (of_all(bytes).min(bytes_max), of_all(kept_bytes).min(self.remote_bytes()))
    }
}
