//! The rosters and the deadlines of the explored session.

use std::net::SocketAddr;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::roster::{Roster, RosterChange, RosterMember};

use super::SERVERS;

/// Returns a roster in which a node has this incarnation.
pub(super) fn roster_with(node: NodeId, incarnation: u32) -> Roster {
    let mut roster = Roster::new(&addresses());
    let member = RosterMember { address: addresses()[node.index()], incarnation, is_lost: false };
    roster.apply(&RosterChange { epoch: 1, coordinator: 0, members: vec![(node.0, member)] });
    roster
}

/// Returns a roster as a coordinator sees it that does not notice that another one took over.
pub(super) fn roster_led_by(node: NodeId, known: &Roster) -> Roster {
    let row = |member: NodeId| {
        known.member(member).map(|row| (member.0, RosterMember { is_lost: row.is_lost && member != node, ..row.clone() }))
    };
    let members = (0..SERVERS as u16).map(NodeId).filter_map(row).collect();
    let mut roster = Roster::new(&addresses());
    roster.apply(&RosterChange { epoch: known.epoch(), coordinator: node.0, members });
    roster
}

pub(super) fn addresses() -> Vec<SocketAddr> {
    (1..=SERVERS as u8).map(|node| SocketAddr::from(([127, 0, 0, node], 7))).collect()
}

pub(super) fn deadlines() -> Deadlines {
    let second = Duration::from_secs(1);
    Deadlines { lease_interval: second, publish_lease: second, lease: second * 2, ..Deadlines::DEFAULT }
}
