//! How a stage-in is decided: committed on all live nodes, or aborted on all. A state machine without sockets.
//!
//! A coordinator decides in rounds. It asks every live node to carry out the decision, and asks again until each node has done so
//! or is lost. If the coordinator is lost, its successor first asks what the nodes have done: if one of them has committed, the
//! successor commits on all, otherwise it aborts on all.
//!
//! Invariant: a node carries out no request of an epoch older than the newest one it has heard of ([`Promise`]). So once a
//! successor knows the answer of every live node, no older coordinator can change it.

use std::collections::{BTreeMap, BTreeSet};

use dayfly_meta::id::NodeId;
use dayfly_meta::roster::Roster;

/// The newest epoch that a node has heard of, from the supervisor or from a coordinator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Promise {
    epoch: u32,
}

/// A request came from a coordinator of an older epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request is from membership epoch {asked}, and this node knows epoch {newest}")]
pub(crate) struct OldEpoch {
    /// The epoch of the request.
    pub(crate) asked: u32,
    /// The newest epoch that the node has heard of.
    pub(crate) newest: u32,
}

impl Promise {
    /// Admits a request of this epoch, or says that it is too old.
    ///
    /// # Errors
    /// The node has heard of a newer epoch.
    pub(crate) fn admit(&mut self, epoch: u32) -> Result<(), OldEpoch> {
        if epoch < self.epoch {
            return Err(OldEpoch { asked: epoch, newest: self.epoch });
        }
        self.epoch = epoch;
        Ok(())
    }

    /// Returns the newest epoch that a request has named.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }
}

/// What is to happen to a stage-in on all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Decision {
    /// The dataset becomes visible.
    Commit,
    /// Everything is undone.
    Abort,
}

/// What a coordinator does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Ask these nodes, with this epoch.
    Ask {
        /// The coordinator's epoch.
        epoch: u32,
        /// The nodes that have not answered yet.
        nodes: Vec<NodeId>,
    },
    /// All live nodes have answered.
    Done,
    /// This node is no longer the coordinator. Another one decides.
    StandDown,
}

/// Nodes that all have to answer. A node that is lost and returns undoes what it did before, so it has to answer again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Round {
    /// The incarnation of each node that has answered, as far as the coordinator knew when it asked.
    answered: BTreeMap<u16, u32>,
}

impl Round {
    /// Records the answer of a node that was asked with this roster.
    pub(crate) fn answered(&mut self, node: NodeId, roster: &Roster) {
        let Some(member) = roster.member(node) else { return };
        let incarnation = self.answered.entry(node.0).or_default();
        *incarnation = member.incarnation.max(*incarnation);
    }

    /// Returns what to do next. The coordinator's own node comes last: what it shows to its processes is then already certain.
    pub(crate) fn next(&self, own: NodeId, roster: &Roster) -> Next {
        if roster.coordinator() != own || !roster.is_live(own) {
            return Next::StandDown;
        }
        let is_waiting = |node: &NodeId| {
            let answered = self.answered.get(&node.0).copied();
            answered.is_none() || answered < roster.member(*node).map(|member| member.incarnation)
        };
        let others: Vec<NodeId> = roster.live().filter(|node| *node != own).filter(is_waiting).collect();
        match (others.is_empty(), is_waiting(&own)) {
            (false, _) => Next::Ask { epoch: roster.epoch(), nodes: others },
            (true, true) => Next::Ask { epoch: roster.epoch(), nodes: vec![own] },
            (true, false) => Next::Done,
        }
    }
}

/// What a successor has learned about the stage-ins of its predecessors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Inquiry {
    round: Round,
    open: BTreeSet<u64>,
    committed: BTreeSet<u64>,
}

impl Inquiry {
    /// Records a node's answer: the stage-ins that have not ended there, and those whose datasets are visible there.
    pub(crate) fn answered(
        &mut self,
        (node, roster): (NodeId, &Roster),
        open: impl IntoIterator<Item = u64>,
        visible: impl IntoIterator<Item = u64>,
    ) {
        self.round.answered(node, roster);
        self.open.extend(open);
        self.committed.extend(visible);
    }

    /// Returns whether a node has answered.
    #[cfg(test)]
    pub(crate) fn has_answered(&self, node: NodeId) -> bool {
        self.round.answered.contains_key(&node.0)
    }

    /// Returns what to do next.
    pub(crate) fn next(&self, own: NodeId, roster: &Roster) -> Next {
        self.round.next(own, roster)
    }

    /// Returns the decisions about all stage-ins that have not ended on all live nodes, once these have answered.
    pub(crate) fn decisions(&self) -> impl Iterator<Item = (u64, Decision)> + '_ {
        let decision = |number| if self.committed.contains(&number) { Decision::Commit } else { Decision::Abort };
        self.open.iter().map(move |&number| (number, decision(number)))
    }
}

#[cfg(test)]
mod tests {
    use dayfly_meta::roster::{RosterChange, RosterMember};

    use super::*;

    fn roster(epoch: u32, coordinator: u16, lost: &[u16]) -> Roster {
        let addresses = [std::net::SocketAddr::from(([127, 0, 0, 1], 7)); 3];
        let mut roster = Roster::new(&addresses);
        let gone = |&node: &u16| (node, RosterMember { address: addresses[0], incarnation: 0, is_lost: true });
        roster.apply(&RosterChange { epoch, coordinator, members: lost.iter().map(gone).collect() });
        roster
    }

    #[test]
    fn all_live_nodes_must_answer_and_the_coordinator_comes_last() {
        let ask = |epoch, nodes: &[u16]| Next::Ask { epoch, nodes: nodes.iter().copied().map(NodeId).collect() };
        let mut round = Round::default();
        assert_eq!(round.next(NodeId(0), &roster(1, 0, &[])), ask(1, &[1, 2]));
        round.answered(NodeId(1), &roster(1, 0, &[]));
        assert_eq!(round.next(NodeId(0), &roster(2, 0, &[2])), ask(2, &[0]), "node 2 is lost");
        round.answered(NodeId(0), &roster(2, 0, &[2]));
        assert_eq!(round.next(NodeId(0), &roster(2, 0, &[2])), Next::Done);
        assert_eq!(round.next(NodeId(0), &roster(3, 0, &[])), ask(3, &[2]), "node 2 has returned");
        assert_eq!(round.next(NodeId(0), &roster(4, 1, &[0])), Next::StandDown);
    }

    #[test]
    fn a_node_that_has_answered_was_lost_and_has_returned_must_answer_again() {
        let mut returned = roster(3, 0, &[]);
        let member = RosterMember { incarnation: 1, ..returned.member(NodeId(1)).unwrap().clone() };
        returned.apply(&RosterChange { epoch: 4, coordinator: 0, members: vec![(1, member)] });
        let mut round = Round::default();
        (0..3).for_each(|node| round.answered(NodeId(node), &roster(1, 0, &[])));
        assert_eq!(round.next(NodeId(0), &roster(2, 0, &[1])), Next::Done);
        assert_eq!(round.next(NodeId(0), &returned), Next::Ask { epoch: 4, nodes: vec![NodeId(1)] });
        round.answered(NodeId(1), &roster(1, 0, &[]));
        assert_ne!(round.next(NodeId(0), &returned), Next::Done, "it was asked before it was lost");
        round.answered(NodeId(1), &returned);
        assert_eq!(round.next(NodeId(0), &returned), Next::Done);
    }

    #[test]
    fn a_node_carries_out_no_request_of_an_older_epoch() {
        let mut promise = Promise::default();
        assert_eq!(promise.admit(2), Ok(()));
        assert_eq!(promise.admit(1), Err(OldEpoch { asked: 1, newest: 2 }));
        assert_eq!(promise.admit(2), Ok(()));
    }

    #[test]
    fn one_node_that_has_committed_decides() {
        let mut inquiry = Inquiry::default();
        let asked = roster(1, 1, &[0]);
        inquiry.answered((NodeId(1), &asked), [6, 7], []);
        inquiry.answered((NodeId(2), &asked), [6], [5, 7]);
        assert_eq!(inquiry.next(NodeId(1), &roster(1, 1, &[0])), Next::Done);
        assert_eq!(inquiry.decisions().collect::<Vec<_>>(), [(6, Decision::Abort), (7, Decision::Commit)]);
    }
}
