//! The members of a session, as the supervisor announces them.
//!
//! The supervisor alone decides who is a member, and raises the *membership epoch* with every change. So two rosters of the same
//! epoch are equal, and of two rosters the one with the higher epoch is the newer.

use core::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::id::NodeId;
use crate::placement::NodeSet;

/// A member of a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RosterMember {
    /// Where peers reach the member's server.
    pub address: SocketAddr,
    /// How often this member has returned after it was lost.
    pub incarnation: u32,
    /// Whether the member's server is lost.
    pub is_lost: bool,
}

/// The members of a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Roster {
    epoch: u32,
    coordinator: NodeId,
    members: Vec<RosterMember>,
}

/// The difference between a roster and the roster with which the session began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterChange {
    /// The epoch of the changed roster.
    pub epoch: u32,
    /// The node that coordinates stage-ins in this epoch.
    pub coordinator: u16,
    /// All members that are not as they were when the session began.
    pub members: Vec<(u16, RosterMember)>,
}

/// A renewal of the leases of all members, which travels down a tree of them.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct LeaseRound {
    /// Rounds are numbered in order, from 1.
    pub number: u64,
    /// The membership epoch. The round renews the leases of servers that know this epoch.
    pub epoch: u32,
    /// The node that gets the round from the supervisor.
    pub root: u16,
    /// To how many nodes each node passes the round on.
    pub width: u16,
    /// The members that the supervisor has not heard in the last rounds.
    pub unheard: Vec<u16>,
}

impl Roster {
    /// Creates the roster of a session that begins.
    pub fn new(addresses: &[SocketAddr]) -> Self {
        let member = |&address| RosterMember { address, incarnation: 0, is_lost: false };
        Self { epoch: 0, coordinator: NodeId(0), members: addresses.iter().map(member).collect() }
    }

    /// Returns the membership epoch.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns the number of members, lost ones included.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// Returns a member.
    pub fn member(&self, node: NodeId) -> Option<&RosterMember> {
        self.members.get(node.index())
    }

    /// Returns the members that are not lost, in the order of their numbers.
    pub fn live(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0..).map(NodeId).zip(&self.members).filter(|(_, member)| !member.is_lost).map(|(node, _)| node)
    }

    /// Returns whether a node is a member that is not lost.
    pub fn is_live(&self, node: NodeId) -> bool {
        self.member(node).is_some_and(|member| !member.is_lost)
    }

    /// Returns the members that are lost.
    pub fn lost(&self) -> NodeSet {
        (0..).map(NodeId).zip(&self.members).filter(|(_, member)| member.is_lost).map(|(node, _)| node).collect()
    }

    /// Returns the node that coordinates stage-ins. It is the first member when the session begins, and stays coordinator until it
    /// is lost. Then the live member with the lowest number takes its place.
    pub fn coordinator(&self) -> NodeId {
        self.coordinator
    }

    /// Applies a newer change. Returns whether there was anything to apply. Members that are not in the roster are ignored.
    pub fn apply(&mut self, change: &RosterChange) -> bool {
        if change.epoch <= self.epoch {
            return false;
        }
        (self.epoch, self.coordinator) = (change.epoch, NodeId(change.coordinator));
        for (node, changed) in &change.members {
            if let Some(member) = self.members.get_mut(usize::from(*node)) {
                *member = changed.clone();
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_change_is_applied_and_an_older_one_is_ignored() {
        let addresses: Vec<SocketAddr> = (1..=3).map(|node| SocketAddr::from(([127, 0, 0, node], 7))).collect();
        let mut roster = Roster::new(&addresses);
        assert_eq!((roster.epoch(), roster.coordinator(), roster.live().count()), (0, NodeId(0), 3));
        let lost = RosterMember { is_lost: true, ..roster.member(NodeId(0)).unwrap().clone() };
        let change = RosterChange { epoch: 2, coordinator: 1, members: vec![(0, lost.clone()), (9, lost.clone())] };
        assert!(roster.apply(&change));
        assert_eq!((roster.coordinator(), roster.is_live(NodeId(0)), roster.lost().len()), (NodeId(1), false, 1));
        let back = RosterMember { is_lost: false, incarnation: 1, ..lost };
        let change = |epoch| RosterChange { epoch, coordinator: 1, members: vec![(0, back.clone())] };
        assert!(!roster.apply(&change(2)), "the same epoch");
        assert!(roster.apply(&change(3)));
        assert_eq!((roster.coordinator(), roster.lost().len(), roster.count()), (NodeId(1), 0, 3));
        assert!(!roster.is_live(NodeId(3)), "it is not a member");
    }
}
