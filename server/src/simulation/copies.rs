//! Copies: once recovery has had its time, all nodes that are to hold a block have it again, and keep it.

use std::sync::Arc;

use dayfly_meta::id::{BlockId, NodeId};

use super::reader::dataset;
use super::session::Session;
use crate::Node;

impl Session<'_> {
    /// Checks that each block of all datasets with copies is on the nodes that hold it in the absence of those that are lost. A block
    /// that is only cached there does not count: it makes way. Blocks of compressed tars that no node has are gone, because these
    /// sessions read no tar again.
    pub(super) fn check_copies(&self, alive: &[Arc<Node>]) {
        let Some(first) = alive.first() else { return };
        let lost = first.parts.peers.roster().lost();
        for known in first.parts.store.datasets().iter().filter(|dataset| dataset.copies() > 1) {
            let shown: Vec<_> =
                alive.iter().filter_map(|server| Some((server.parts.config.node, dataset(server, known.target())?))).collect();
            for block in (0..known.catalog().header().blocks).map(BlockId) {
                let is_gone = known.is_streamed(block) && !shown.iter().any(|(_, dataset)| dataset.is_local(block));
                let holds = |holder: &NodeId| {
                    let here = shown.iter().filter(|(node, dataset)| node == holder && dataset.is_local(block));
                    here.into_iter().any(|(_, dataset)| dataset.has_own_copy(block) || dataset.is_kept(block))
                };
                let (with, without): (Vec<_>, Vec<_>) = known.holders_without(block, &lost).into_iter().partition(holds);
                if !without.is_empty() && !is_gone {
                    let target = String::from_utf8_lossy(known.target());
                    return self.broken(format!("{block:?} of {target} is not on {without:?}, but on {with:?}; lost: {lost:?}"));
                }
            }
        }
    }
}
