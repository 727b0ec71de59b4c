//! How leases are renewed in a session of many servers: along a tree of its members, so that the supervisor sends and receives one
//! message in each interval, however many servers there are. State machines without sockets or a clock.
//!
//! In each interval, the supervisor sends a [`LeaseRound`] to one server, the root. Each server passes the round on to the servers
//! below it, and answers it with the servers that it has heard below itself in the last round. So renewals take no time, and a sign of
//! life takes one interval for each level of the tree.
//!
//! The tree is a shortcut and decides nothing. A server that is not reached by it, or that the supervisor has not heard through it,
//! sends its signs of life directly, and the supervisor renews the leases of servers that do so directly. So a server that stands still
//! costs the servers below it nothing. A round renews a lease only if both sides know the same epoch: a server that was declared lost
//! is not told of the new epoch, so no server can renew its lease by mistake.

use std::collections::{BTreeMap, BTreeSet};

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{LEASE_TREE_PATIENCE, NODES_MAX};
use dayfly_meta::roster::{LeaseRound, Roster};

use super::{Supervision, below};

/// A server's part in the tree.
#[derive(Debug, Default)]
pub(crate) struct LeaseRelay {
    /// The number of the last round.
    last: u64,
    /// Intervals since a round renewed the lease of this server and the supervisor had heard of the server.
    unreached_ticks: u32,
    /// The servers that have been heard below each server that this one has asked, and the round in which they were.
    heard: BTreeMap<NodeId, (u64, Vec<u16>)>,
}

/// What a server does with a new round.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    /// Whether the round renews the lease of this server.
    pub(crate) renews: bool,
    /// The servers to which the round goes next.
    pub(crate) below: Vec<NodeId>,
}

impl LeaseRelay {
    /// Takes a round. Returns `None` if it is not new.
    pub(crate) fn take(&mut self, round: &LeaseRound, own: NodeId, roster: &Roster) -> Option<Passed> {
        if round.number <= self.last {
            return None;
        }
        self.last = round.number;
        let renews = round.epoch == roster.epoch() && roster.is_live(own);
        if renews && !round.unheard.contains(&own.0) {
            self.unreached_ticks = 0;
        }
        let last = self.last;
        self.heard.retain(|_, (number, _)| *number + 1 >= last);
        Some(Passed { renews, below: nodes_below(round, own, roster) })
    }

    /// Records the answer of a server below this one: the servers that it has heard.
    pub(crate) fn answered(&mut self, node: NodeId, number: u64, mut heard: Vec<u16>) {
        heard.truncate(NODES_MAX);
        self.heard.insert(node, (number, heard));
    }

    /// Returns this server and all those below it that have been heard lately.
    pub(crate) fn heard(&self, own: NodeId) -> Vec<u16> {
        let below = self.heard.values().flat_map(|(_, heard)| heard.iter().copied());
        below.chain([own.0]).collect::<BTreeSet<u16>>().into_iter().take(NODES_MAX).collect()
    }

    /// Lets one interval pass.
    pub(crate) fn tick(&mut self) {
        self.unreached_ticks = self.unreached_ticks.saturating_add(1);
    }

    /// Returns whether the tree serves this server. If not, it has to send signs of life to the supervisor itself.
    pub(crate) fn is_reached(&self) -> bool {
        self.last > 0 && self.unreached_ticks <= LEASE_TREE_PATIENCE
    }
}

/// Returns the nodes below a node in the tree of a round. The tree contains the live members in the order of their numbers, from the
/// root on.
fn nodes_below(round: &LeaseRound, own: NodeId, roster: &Roster) -> Vec<NodeId> {
    let live: Vec<NodeId> = roster.live().collect();
    let place = |node: u16| live.iter().position(|live| live.0 == node);
    let (Some(root), Some(own)) = (place(round.root), place(own.0)) else { return Vec::new() };
    let own = (own + live.len() - root) % live.len();
    below(own, live.len(), round.width.into()).map(|place| live[(place + root) % live.len()]).collect()
}

/// The supervisor's part in the tree.
#[derive(Debug)]
pub struct LeaseTree {
    width: u16,
    /// The number of the last round.
    number: u64,
    /// The servers that have sent a sign of life themselves since the last round.
    spoke: BTreeSet<NodeId>,
}

/// What the supervisor sends in an interval.
#[derive(Debug, PartialEq, Eq)]
pub struct Renewals {
    /// The root and its round.
    pub round: Option<(NodeId, LeaseRound)>,
    /// The servers whose leases are renewed directly.
    pub direct: Vec<NodeId>,
}

impl LeaseTree {
    /// Creates a tree in which each server passes rounds on to `width` others.
    pub fn new(width: u16) -> Self {
        Self { width, number: 0, spoke: BTreeSet::new() }
    }

    /// Records that a server has sent a sign of life itself.
    pub fn spoke(&mut self, node: NodeId) {
        self.spoke.insert(node);
    }

    /// Begins the next round. `has_channel` says which members can be sent a message. A member that cannot may not know that its
    /// channel is gone, and notices when it speaks for itself. The root is the first member of the others that is heard.
    pub fn next_round(&mut self, supervision: &Supervision, has_channel: impl Fn(NodeId) -> bool) -> Renewals {
        let roster = supervision.roster();
        let is_unheard = |node: &NodeId| supervision.silent_ticks(*node) > LEASE_TREE_PATIENCE || !has_channel(*node);
        let (unheard, heard): (Vec<NodeId>, Vec<NodeId>) = roster.live().partition(is_unheard);
        self.number += 1;
        let root = heard.first().copied();
        let round = root.map(|root| {
            let unheard = unheard.iter().map(|node| node.0).collect();
            (root, LeaseRound { number: self.number, epoch: roster.epoch(), root: root.0, width: self.width, unheard })
        });
        let spoke = std::mem::take(&mut self.spoke);
        let is_direct = |&node: &NodeId| spoke.contains(&node) || !roster.is_live(node);
        let all = (0..roster.count() as u16).map(NodeId);
        Renewals { round, direct: all.filter(|&node| supervision.is_renewed(node)).filter(is_direct).collect() }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use dayfly_meta::deadlines::Deadlines;

    use super::super::{Changes, Patience};
    use super::*;

    /// A session whose leases are renewed along a tree. Servers in `still` stand still.
    struct Session {
        supervision: Supervision,
        tree: LeaseTree,
        servers: Vec<LeaseRelay>,
        /// The intervals that have passed since each server's lease was renewed.
        unrenewed: Vec<u32>,
        /// How many messages the supervisor has received in the last interval.
        received: usize,
    }

    impl Session {
        fn new(count: u16, width: u16) -> Self {
            let addresses: Vec<SocketAddr> = (0..count).map(|node| SocketAddr::from(([10, 0, 0, 1], node))).collect();
            Self {
                supervision: Supervision::new(&addresses, Patience::new(&Deadlines::DEFAULT)),
                tree: LeaseTree::new(width),
                servers: (0..count).map(|_| LeaseRelay::default()).collect(),
                unrenewed: vec![0; count.into()],
                received: 0,
            }
        }

        /// Passes a round on. Returns the nodes that have been heard below a node, or `None` if that node stands still.
        fn pass(&mut self, node: NodeId, round: &LeaseRound, still: &[u16]) -> Option<Vec<u16>> {
            if still.contains(&node.0) {
                return None;
            }
            let roster = self.supervision.roster().clone();
            let Some(Passed { renews, below }) = self.servers[node.index()].take(round, node, &roster) else {
                return Some(self.servers[node.index()].heard(node));
            };
            if renews {
                self.unrenewed[node.index()] = 0;
            }
            // A server answers before the servers below it do.
            let heard = self.servers[node.index()].heard(node);
            for below in below {
                if let Some(heard) = self.pass(below, round, still) {
                    self.servers[node.index()].answered(below, round.number, heard);
                }
            }
            Some(heard)
        }

        fn tick(&mut self, still: &[u16]) -> Changes {
            self.received = 0;
            let nodes = (0..self.servers.len() as u16).map(NodeId);
            for node in nodes.filter(|node| !still.contains(&node.0)) {
                self.servers[node.index()].tick();
                self.unrenewed[node.index()] += 1;
                if !self.servers[node.index()].is_reached() {
                    self.tree.spoke(node);
                    self.supervision.heard(node);
                    self.received += 1;
                }
            }
            let changes = self.supervision.tick();
            let Renewals { round, direct } = self.tree.next_round(&self.supervision, |_| true);
            direct.into_iter().for_each(|node| self.unrenewed[node.index()] = 0);
            if let Some((root, round)) = round
                && let Some(heard) = self.pass(root, &round, still)
            {
                self.received += 1;
                heard.into_iter().for_each(|node| self.supervision.reported(NodeId(node)));
            }
            changes
        }

        /// Lets intervals pass in which nobody but the servers in `still` may be lost or wait for its lease to be renewed.
        fn pass_calmly(&mut self, ticks: u32, still: &[u16]) {
            for tick in 0..ticks {
                let Changes { lost, returned } = self.tick(still);
                assert!(lost.iter().all(|(node, _)| still.contains(&node.0)) && returned.is_empty(), "{lost:?}");
                let nodes = (0_u16..).zip(&self.unrenewed).filter(|(node, _)| !still.contains(node));
                let longest = nodes.map(|(_, &unrenewed)| unrenewed).max().unwrap();
                assert!(longest <= LEASE_TREE_PATIENCE + 1, "tick {tick}: a lease was not renewed for {longest} intervals");
            }
        }
    }

    #[test]
    fn the_supervisor_receives_one_message_in_an_interval_whatever_the_number_of_servers() {
        for (count, width) in [(1, 16), (2, 1), (5, 1), (17, 16), (4096, 16)] {
            let mut session = Session::new(count, width);
            session.pass_calmly(10, &[]);
            session.pass_calmly(1, &[]);
            assert_eq!(session.received, 1, "{count} servers, width {width}");
        }
    }

    #[test]
    fn a_server_that_stands_still_costs_the_servers_below_it_nothing_and_is_lost_alone() {
        for (count, width, still) in [(5, 1, 0), (5, 1, 2), (300, 16, 0), (300, 16, 3), (4096, 16, 1)] {
            let mut session = Session::new(count, width);
            session.pass_calmly(10, &[]);
            session.pass_calmly(50, &[still]);
            let roster = session.supervision.roster();
            assert_eq!((roster.is_live(NodeId(still)), roster.live().count()), (false, usize::from(count) - 1));
            // The tree leaves the lost server out.
            assert_eq!(session.received, 1, "{count} servers, width {width}");
        }
    }

    #[test]
    fn a_member_without_a_control_channel_has_to_speak_for_itself() {
        let mut session = Session::new(4, 1);
        let Renewals { round, direct } = session.tree.next_round(&session.supervision, |node| node.0 > 1);
        let (root, round) = round.unwrap();
        assert_eq!((root, round.unheard, direct), (NodeId(2), vec![0, 1], vec![]));
    }

    #[test]
    fn a_round_of_another_epoch_renews_no_lease() {
        let addresses: Vec<SocketAddr> = (0..3).map(|node| SocketAddr::from(([10, 0, 0, 1], node))).collect();
        let roster = Roster::new(&addresses);
        let round = |number, epoch| LeaseRound { number, epoch, root: 0, width: 2, unheard: Vec::new() };
        let mut relay = LeaseRelay::default();
        assert!(!relay.take(&round(1, 1), NodeId(1), &roster).unwrap().renews, "this server was not told of the epoch");
        assert!(!relay.take(&round(2, 1), NodeId(1), &roster).unwrap().renews);
        assert!(relay.take(&round(3, 0), NodeId(1), &roster).unwrap().renews);
        assert_eq!(relay.take(&round(3, 0), NodeId(1), &roster), None, "it is not new");
        assert_eq!(relay.take(&round(2, 0), NodeId(1), &roster), None);
    }

    #[test]
    fn a_server_that_the_supervisor_does_not_hear_through_the_tree_speaks_for_itself() {
        let addresses: Vec<SocketAddr> = (0..3).map(|node| SocketAddr::from(([10, 0, 0, 1], node))).collect();
        let roster = Roster::new(&addresses);
        let mut relay = LeaseRelay::default();
        assert!(!relay.is_reached(), "there may be no tree");
        for number in 1..10 {
            let unheard = if number > 1 { vec![1] } else { Vec::new() };
            let round = LeaseRound { number, epoch: 0, root: 0, width: 2, unheard };
            assert!(relay.take(&round, NodeId(1), &roster).unwrap().renews);
            assert_eq!(relay.is_reached(), number <= u64::from(LEASE_TREE_PATIENCE) + 1, "round {number}");
            relay.tick();
        }
    }
}
