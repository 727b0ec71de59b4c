//! Writes one line that names what slows readers down.

use dayfly_launch::units::counted;
use dayfly_meta::wire::status::{NodeStatus, OwnerStatus, Source, Status, total};

/// Other nodes count as the bottleneck only if readers wait for them during at least this
/// percentage of the time. Waiting for space in the arena always counts, however short it is.
const WAITING_PERCENT: f64 = 20.0;
/// An owner is hot if it sends more than this many times the mean of all owners.
const HOT: f64 = 1.5;

/// Names what slowed readers down between two queries of the status.
pub(in crate::commands) fn bottleneck(before: &Status, now: &Status, seconds: f64) -> String {
    let pairs: Vec<(&NodeStatus, &NodeStatus)> = before
        .nodes
        .iter()
        .zip(&now.nodes)
        .filter_map(|(old, new)| Some((old.status.as_ref().ok()?, new.status.as_ref().ok()?)))
        .collect();
    let sum = |of: &dyn Fn(&NodeStatus) -> u64| -> u64 { pairs.iter().map(|(old, new)| of(new).saturating_sub(of(old))).sum() };
    let read = sum(&|node| total(&node.reads).bytes);
    if read == 0 {
        return "bottleneck: none, because nothing is being read".to_owned();
    }
    let queued = sum(&|node| node.queued_total);
    if queued > 0 {
        return format!(
            "bottleneck: space in the arena ({} waited for it); start servers with more --memory, or hold fewer samples at once",
            counted(queued, "request")
        );
    }
    let clients: u64 = pairs.iter().map(|(_, new)| new.clients.max(1)).sum();
    let busy_us = sum(&|node| node.owners.iter().map(|owner| owner.busy_us).sum());
    let asked = sum(&|node| node.reads[Source::Asked as usize].bytes);
    let waiting_percent = busy_us as f64 / (seconds * 1e6 * clients as f64) * 100.0;
    if asked * 10 < read || waiting_percent < WAITING_PERCENT {
        return "bottleneck: the readers themselves; their data arrives before they need it".to_owned();
    }
    let late = sum(&|node| node.prefetch.late);
    let what = match hottest(&pairs) {
        Some((owner, share)) => format!("node {owner}, which sends {share:.0} % of all bytes between nodes"),
        None if late > 0 => "the network and the other nodes, because prefetched samples arrive too late".to_owned(),
        None => {
            "the latency of other nodes; submit the reading order (dayfly_order_epoch), or read many samples at once".to_owned()
        }
    };
    format!("bottleneck: {what}")
}

/// Returns the owner that sends the most and its share in percent, if it sends much more than the
/// mean.
fn hottest(pairs: &[(&NodeStatus, &NodeStatus)]) -> Option<(usize, f64)> {
    let owners = pairs.iter().map(|(_, new)| new.owners.len()).max()?;
    let bytes = |owners: &[OwnerStatus], owner: usize| owners.get(owner).map_or(0, |owner| owner.reads.bytes);
    let sent: Vec<u64> = (0..owners)
        .map(|owner| pairs.iter().map(|(old, new)| bytes(&new.owners, owner).saturating_sub(bytes(&old.owners, owner))).sum())
        .collect();
    let all: u64 = sent.iter().sum();
    let (owner, &most) = sent.iter().enumerate().max_by_key(|(_, bytes)| **bytes)?;
    let is_hot = all > 0 && sent.len() > 2 && most as f64 > HOT * all as f64 / sent.len() as f64;
    is_hot.then(|| (owner, most as f64 * 100.0 / all as f64))
}

#[cfg(test)]
mod tests {
    use dayfly_meta::id::NodeId;
    use dayfly_meta::wire::status::{NodeEntry, Reads};

    use super::*;

    fn session(change: impl Fn(&mut NodeStatus)) -> Status {
        let node = |number| {
            let mut status = NodeStatus { owners: vec![OwnerStatus::default(); 4], ..NodeStatus::default() };
            change(&mut status);
            NodeEntry { node: NodeId(number), address: String::new(), status: Ok(status), lost_for_ms: None }
        };
        Status { nodes: (0..4).map(node).collect(), datasets: Vec::new() }
    }

    fn check(expect: &str, change: impl Fn(&mut NodeStatus)) {
        let line = bottleneck(&session(|_| {}), &session(change), 1.0);
        assert!(line.contains(expect), "{line}");
    }

    #[test]
    fn each_bottleneck_has_its_line() {
        let asks = |node: &mut NodeStatus| {
            node.clients = 1;
            node.reads[Source::Asked as usize] = Reads { count: 100, bytes: 1000 };
            node.owners.iter_mut().for_each(|owner| (owner.busy_us, owner.reads.bytes) = (200_000, 250));
        };
        check("nothing is being read", |_| {});
        check("the readers themselves", |node| node.reads[0] = Reads { count: 9, bytes: 1000 });
        check("the latency of other nodes", asks);
        check("prefetched samples arrive too late", |node| {
            asks(node);
            node.prefetch.late = 5;
        });
        check("node 2, which sends 70 %", |node| {
            asks(node);
            node.owners[2].reads.bytes = 1750;
        });
        check("space in the arena (8 requests waited for it)", |node| {
            asks(node);
            node.queued_total = 2;
        });
    }
}
