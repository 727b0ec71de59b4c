//! What goes wrong, and when: drawn from the seed before a session begins.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::id::NodeId;
use tokio::time::sleep;

use super::net::Net;
use super::random::Random;

/// A fault, with how long it lasts where it does.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// Nothing gets through between two nodes.
    Silence(NodeId, NodeId, Duration),
    /// All between two nodes takes longer.
    Slow(NodeId, NodeId, Duration, Duration),
    /// Connections between two nodes break.
    Reset(NodeId, NodeId),
    /// So many requests between two nodes are refused.
    Refuse(NodeId, NodeId, u32),
    /// So many transfers between two nodes have a bit flipped.
    Flip(NodeId, NodeId, u32),
    /// A node stands still.
    Still(NodeId, Duration),
    /// So many pieces cannot be read from a node's drive.
    Unreadable(NodeId, u32),
    /// A node is killed.
    Kill(NodeId),
    /// The stage-in is cancelled.
    Cancel,
    /// A source of the stage-in loses its end.
    Shrink,
}

/// When each comes, in order.
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
            11 | 12 => Fault::Still(one, lasting),
            13 => Fault::Unreadable(one, few),
            // These at most once: who is killed stays so, and a stage-in is cancelled or cut short but once.
            14 if once.insert("kill") => Fault::Kill(one),
            15 if once.insert("source") => {
                if random.is_one_in(2) {
                    Fault::Cancel
                } else {
                    Fault::Shrink
                }
            }
            _ => continue,
        };
        faults.push((at, fault));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// Makes a fault happen on the network, and ends it when its time is over.
pub(super) async fn happen(net: &Arc<Net>, fault: Fault) {
    match fault {
        Fault::Silence(one, other, lasting) => {
            net.trouble(one, other, |trouble| trouble.is_silent = true);
            sleep(lasting).await;
            net.trouble(one, other, |trouble| trouble.is_silent = false);
        }
        Fault::Slow(one, other, slow, lasting) => {
            net.trouble(one, other, |trouble| trouble.slow = slow);
            sleep(lasting).await;
            net.trouble(one, other, |trouble| trouble.slow = Duration::ZERO);
        }
        Fault::Reset(one, other) => net.reset(one, other),
        Fault::Refuse(one, other, count) => net.trouble(one, other, |trouble| trouble.refused += count),
        Fault::Flip(one, other, count) => net.trouble(one, other, |trouble| trouble.flipped += count),
        Fault::Still(node, lasting) => {
            net.ail(node, |ailment| ailment.is_still = true);
            sleep(lasting).await;
            net.ail(node, |ailment| ailment.is_still = false);
        }
        Fault::Unreadable(node, count) => net.ail(node, |ailment| ailment.unreadable += count),
        Fault::Kill(node) => net.ail(node, |ailment| ailment.is_killed = true),
        Fault::Cancel | Fault::Shrink => {}
    }
}
