//! What goes wrong in a session, and when. The seed decides this before the session begins.

use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::id::NodeId;
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use super::net::Net;
use super::random::Random;
use super::supervisor::Shared;

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
    /// A node stands still.
    Freeze(NodeId, Duration),
    /// A node reaches nobody, not even the supervisor.
    CutOff(NodeId, Duration),
    /// A node's control channel breaks, and the node dials the supervisor again after this time.
    Break(NodeId, Duration),
    /// This many pieces cannot be read from a node's drive.
    Unreadable(NodeId, u32),
    /// A node is killed.
    Kill(NodeId),
    /// A node suffers this when it has sent a number of messages of this name. All of these messages come from the coordinator.
    Strike(&'static str, u32, Blow),
    /// The stage-in is canceled.
    Cancel,
    /// A source of the stage-in is truncated.
    Truncate,
}

/// What happens to a coordinator.
#[derive(Clone, Copy, Debug)]
pub(super) enum Blow {
    Kill,
    Freeze(Duration),
    CutOff(Duration),
    /// No message gets through between it and this node.
    Silence(NodeId, Duration),
}

/// Messages with which a coordinator makes, publishes or ends a stage-in.
const STRUCK_AT: [&str; 8] = ["Begin", "Finish", "Prepare", "Commit", "Commit", "Settle", "Abort", "Inquire"];
/// Nodes that are killed in one session.
const KILLED_MAX: u32 = 2;
/// How long the coordinator may take until it is struck.
const STRIKE_WITHIN: Duration = Duration::from_secs(60);

/// Draws the faults of a session, with the time at which each begins, in order of time.
pub(super) fn draw(random: &mut Random, nodes: u16) -> Vec<(Duration, Fault)> {
    let count = 3 + random.below(4);
    let mut faults: Vec<(Duration, Fault)> = Vec::new();
    let (mut killed, mut is_source_done) = (0, false);
    let mut may_kill = || {
        killed += 1;
        killed <= KILLED_MAX
    };
    while (faults.len() as u64) < count {
        let at = random.log_duration(Duration::from_millis(1), Duration::from_secs(10));
        let lasting = random.log_duration(Duration::from_millis(100), Duration::from_secs(12));
        let one = NodeId(random.below(nodes.into()) as u16);
        let other = NodeId((one.0 + 1 + random.below(u64::from(nodes) - 1) as u16) % nodes);
        let few = 1 + random.below(3) as u32;
        // Half of those who stand still are lost meanwhile.
        let long = match random.is_one_in(2) {
            true => random.log_duration(Duration::from_millis(500), Duration::from_secs(30)),
            false => random.duration(Duration::from_secs(31), Duration::from_secs(60)),
        };
        let cut_off = random.log_duration(Duration::from_secs(1), Duration::from_secs(60));
        let redialed = random.log_duration(Duration::from_millis(300), Duration::from_secs(10));
        let kind = random.below(21);
        let fault = match kind {
            0..3 => Fault::Silence(one, other, lasting),
            3 | 4 => Fault::Slow(one, other, random.log_duration(Duration::from_millis(5), Duration::from_secs(1)), lasting),
            5..7 => Fault::Reset(one, other),
            7 | 8 => Fault::Refuse(one, other, few),
            9 | 10 => Fault::Flip(one, other, few),
            11 | 12 => Fault::Freeze(one, long),
            13 => Fault::Unreadable(one, few),
            14 if may_kill() => Fault::Kill(one),
            15 => Fault::CutOff(one, cut_off),
            16 => Fault::Break(one, redialed),
            17..20 => {
                let blow = match random.below(4) {
                    0 | 1 if may_kill() => Blow::Kill,
                    2 => Blow::Freeze(long),
                    _ => Blow::CutOff(cut_off),
                };
                Fault::Strike(STRUCK_AT[random.below(STRUCK_AT.len() as u64) as usize], few, blow)
            }
            // Only one stage-in is disturbed.
            20 if !is_source_done => {
                is_source_done = true;
                if random.is_one_in(2) { Fault::Cancel } else { Fault::Truncate }
            }
            _ => continue,
        };
        faults.push((at, fault));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// Applies a fault, and ends it when its time is over.
pub(super) async fn apply(net: &Arc<Net>, supervisor: &Shared, fault: Fault) {
    match fault {
        Fault::Silence(one, other, lasting) => strike(net, one, Blow::Silence(other, lasting)).await,
        Fault::Slow(one, other, slow, lasting) => {
            net.change_link(one, other, |link| link.slow = slow);
            sleep(lasting).await;
            net.change_link(one, other, |link| link.slow = Duration::ZERO);
        }
        Fault::Reset(one, other) => net.reset(one, other),
        Fault::Refuse(one, other, count) => net.change_link(one, other, |link| link.refused += count),
        Fault::Flip(one, other, count) => net.change_link(one, other, |link| link.flipped += count),
        Fault::Freeze(node, lasting) => strike(net, node, Blow::Freeze(lasting)).await,
        Fault::CutOff(node, lasting) => strike(net, node, Blow::CutOff(lasting)).await,
        Fault::Break(node, lasting) => supervisor.break_channel(node, lasting).await,
        Fault::Unreadable(node, count) => net.change_node(node, |health| health.unreadable += count),
        Fault::Kill(node) => strike(net, node, Blow::Kill).await,
        Fault::Strike(message, count, blow) => {
            if let Ok(Some(node)) = timeout(STRIKE_WITHIN, net.trap(message, count)).await {
                net.note(&format!("node {node} is struck: {blow:?}"));
                strike(net, node, blow).await;
            }
        }
        Fault::Cancel | Fault::Truncate => {}
    }
}

/// Strikes nodes when a number of messages of this name have been sent. Returns `false` if there are not as many.
pub(super) async fn strike_nodes(net: &Arc<Net>, (message, count): (&'static str, u32), nodes: &[u16], blow: Blow) -> bool {
    let Ok(Some(_)) = timeout(STRIKE_WITHIN, net.trap(message, count)).await else { return false };
    net.note(&format!("nodes {nodes:?} are struck: {blow:?}"));
    join_all(nodes.iter().map(|&node| strike(net, NodeId(node), blow))).await;
    true
}

async fn strike(net: &Arc<Net>, node: NodeId, blow: Blow) {
    match blow {
        Blow::Kill => net.change_node(node, |health| health.is_killed = true),
        Blow::Freeze(lasting) => {
            net.change_node(node, |health| health.is_frozen = true);
            sleep(lasting).await;
            net.change_node(node, |health| health.is_frozen = false);
        }
        Blow::CutOff(lasting) => {
            net.change_node(node, |health| health.is_cut_off = true);
            sleep(lasting).await;
            net.change_node(node, |health| health.is_cut_off = false);
        }
        Blow::Silence(other, lasting) => {
            net.change_link(node, other, |link| link.is_silent = true);
            sleep(lasting).await;
            net.change_link(node, other, |link| link.is_silent = false);
        }
    }
}
