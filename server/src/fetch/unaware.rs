//! Peers that answer, but do not know a dataset that this node shows: a new server that is still learning which datasets exist, or one
//! that is about to exit. For a while, other nodes are asked for their blocks, as if these peers were absent.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::{UNAWARE_MAX, UNAWARE_PAUSE};
use dayfly_meta::placement::NodeSet;
use tokio::time::Instant;

/// The peers that did not know a dataset lately. Nearly always there are none.
#[derive(Default)]
pub(super) struct Unaware {
    is_any: AtomicBool,
    since: Mutex<HashMap<(DatasetId, NodeId), Instant>>,
}

impl Unaware {
    /// Records that a peer did not know a dataset.
    pub(super) fn insert(&self, dataset: DatasetId, node: NodeId) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        if since.len() >= UNAWARE_MAX {
            // They are found again, at the cost of a request each.
            since.clear();
        }
        since.insert((dataset, node), Instant::now());
        self.is_any.store(true, Ordering::Release);
    }

    /// Adds the peers that did not know a dataset lately to those that are absent.
    pub(super) fn and_absent(&self, dataset: DatasetId, absent: Option<NodeSet>) -> Option<NodeSet> {
        if !self.is_any.load(Ordering::Acquire) {
            return absent;
        }
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.retain(|_, since| since.elapsed() < UNAWARE_PAUSE);
        self.is_any.store(!since.is_empty(), Ordering::Release);
        let mut all = absent.unwrap_or_default();
        since.keys().filter(|(of, _)| *of == dataset).for_each(|&(_, node)| {
            all.insert(node);
        });
        (!all.is_empty()).then_some(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_counts_as_absent_for_one_dataset_and_for_a_while() {
        let unaware = Unaware::default();
        let absent = |dataset| unaware.and_absent(DatasetId(dataset), Some(NodeSet::from_iter([NodeId(5)])));
        let nodes = |dataset| absent(dataset).map(|all| all.iter().collect::<Vec<_>>());
        assert_eq!(nodes(1), Some(vec![NodeId(5)]));
        unaware.insert(DatasetId(1), NodeId(2));
        assert_eq!(nodes(1), Some(vec![NodeId(2), NodeId(5)]));
        assert_eq!(nodes(2), Some(vec![NodeId(5)]));
        tokio::time::advance(UNAWARE_PAUSE).await;
        assert_eq!(nodes(1), Some(vec![NodeId(5)]));
        assert!(unaware.and_absent(DatasetId(1), None).is_none());
    }
}
