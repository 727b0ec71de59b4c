//! What goes wrong in a session, and when. The seed decides this before the session begins.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::id::NodeId;
use tokio::time::sleep;

use super::net::Net;
use super::random::Random;

/// A fault. If it lasts for some time, its last field is the duration.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// No message gets through between two nodes.
    Silence(NodeId, NodeId, Duration),
    /// Each message between two nodes is delayed by the first duration.
    Slow(NodeId, NodeId, Duration, Duration),
    /// The connections between two nodes break.
    Reset(NodeId, NodeId),
    /// This many requests between two nodes are refused.
    Refuse(NodeId, NodeId, u32),
    /// One bit flips in each of this many transfers between two nodes.
    Flip(NodeId, NodeId, u32),
    /// A node neither sends nor receives.
    Freeze(NodeId, Duration),
    /// This many pieces cannot be read from a node's drive.
    Unreadable(NodeId, u32),
    /// A node is killed.
    Kill(NodeId),
    /// The stage-in is canceled.
    Cancel,
    /// A source of the stage-in is truncated.
    Truncate,
}

/// Draws the faults of a session, with the time at which each begins, in order of time.
pub(super) fn draw(random: &mut Random, nodes: u16) -> Vec<(Duration, Fault)> {
    let count = 3 + random.below(4);
    let mut faults: Vec<(Duration, Fault)> = Vec::new();
    let mut once = BTreeSet::new();
    while (faults.len() as u64) < count {
        let at = random.log_duration(Duration::from_millis(1), Duration::from_secs(10));
        let lasting = random.log_duration(Duration::from_millis(100), Duration::from_secs(12));
        let one = NodeId(random.below(nodes.into()) as u16);
        let other = NodeId((one.0 + 1 + random.below(u64::from(nodes) - 1) as u16) % nodes);
        let few = 1 + random.below(3) as u32;
        let kind = random.below(16);
        let fault = match kind {
            0..3 => Fault::Silence(one, other, lasting),
            3 | 4 => Fault::Slow(one, other, random.log_duration(Duration::from_millis(5), Duration::from_secs(1)), lasting),
            5..7 => Fault::Reset(one, other),
            7 | 8 => Fault::Refuse(one, other, few),
            9 | 10 => Fault::Flip(one, other, few),
            11 | 12 => Fault::Freeze(one, lasting),
            13 => Fault::Unreadable(one, few),
            // Each of these happens at most once: a killed node stays dead, and only one stage-in is disturbed.
            14 if once.insert("kill") => Fault::Kill(one),
            15 if once.insert("source") => {
                if random.is_one_in(2) {
                    Fault::Cancel
                } else {
                    Fault::Truncate
                }
            }
            _ => continue,
        };
        faults.push((at, fault));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// Applies a fault to the network, and ends it when its time is over.
pub(super) async fn apply(net: &Arc<Net>, fault: Fault) {
    match fault {
        Fault::Silence(one, other, lasting) => {
            net.change_link(one, other, |link| link.is_silent = true);
            sleep(lasting).await;
            net.change_link(one, other, |link| link.is_silent = false);
        }
        Fault::Slow(one, other, slow, lasting) => {
            net.change_link(one, other, |link| link.slow = slow);
            sleep(lasting).await;
            net.change_link(one, other, |link| link.slow = Duration::ZERO);
        }
        Fault::Reset(one, other) => net.reset(one, other),
        Fault::Refuse(one, other, count) => net.change_link(one, other, |link| link.refused += count),
        Fault::Flip(one, other, count) => net.change_link(one, other, |link| link.flipped += count),
        Fault::Freeze(node, lasting) => {
            net.change_node(node, |health| health.is_frozen = true);
            sleep(lasting).await;
            net.change_node(node, |health| health.is_frozen = false);
        }
        Fault::Unreadable(node, count) => net.change_node(node, |health| health.unreadable += count),
        Fault::Kill(node) => net.change_node(node, |health| health.is_killed = true),
        Fault::Cancel | Fault::Truncate => {}
    }
}
