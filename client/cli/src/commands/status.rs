//! `dayfly status`: shows what each node holds, what was read from where, and how nodes reach each
//! other.

use std::process::ExitCode;

use dayfly_client::Session;
use dayfly_launch::units;
use dayfly_meta::metrics::SOURCE_NAMES;
use dayfly_meta::path::{display, join};
use dayfly_meta::text::without_os_numbers;
use dayfly_meta::wire::status::{
    Network, NodeEntry, NodeStatus, OriginStatus, Reads, RecoveryStatus, SOURCES, Source, Status as SessionStatus, total,
};
use serde_json::{Value, json};

use super::{policy, query};
use crate::args::StatusArguments;
use crate::failure::{Failure, print_line};
use crate::size::show;

pub(super) fn run(arguments: StatusArguments) -> Result<ExitCode, Failure> {
    let (session, status) = query::status()?;
    if arguments.json {
        print_line!("{}", as_json(&session, &status))
    } else {
        show_tables(&session, &status)
    }
    // A lost node is no failure of this command.
    let has_failed = status.nodes.iter().any(|entry| entry.status.is_err() && entry.lost_for_ms.is_none());
    if has_failed { Err(Failure::silent()) } else { Ok(ExitCode::SUCCESS) }
}

/// Returns the total bytes that all nodes hold.
fn all_held(status: &SessionStatus) -> u64 {
    status.nodes.iter().filter_map(|entry| entry.status.as_ref().ok()).map(|node| node.held_bytes).sum()
}

fn share_percent(node: &NodeStatus, all: u64) -> f64 {
    if all == 0 { 0.0 } else { node.held_bytes as f64 * 100.0 / all as f64 }
}

/// Explains the first table's columns.
const LEGEND: [&str; 6] = [
    "samples, bytes: what the node owns, and its share of all bytes; empty samples are on no node",
    "cached: copies of other nodes' blocks; stage-ins evict them, so 'free' includes their space",
    "taken: space of all unnamed files on the data dirs, including cached blocks; du does not see it",
    "free: room for new datasets within --capacity",
    "memory: what the server uses, including its arena of other nodes' blocks",
    "workers: how many units of the sources a node reads at the same time during a stage-in",
];

/// Explains the second table's columns.
const READS_LEGEND: [&str; 4] = [
    "reads of processes on the node, as count (bytes): own, from its own data dirs; cached, from its copies of other nodes' \
     blocks; arena, fetched ahead or by another process; asked, fetched while the reader waited",
    "over the network: chunks that arrived from other nodes, asked for or fetched ahead",
    "local/expect: the share of bytes read from the node's own drives, and the share to expect once its cache is full",
    "prefetch: samples that had arrived before they were read, that arrived late, and that were never read",
];

fn show_tables(session: &Session, status: &SessionStatus) {
    print_line!("session {} at {}, {}", session.id(), display(session.prefix()), units::counted(session.nodes().into(), "node"));
    print_line!(
        "{:<5} {:<21} {:>10} {:>10} {:>6} {:>10} {:>10} {:>10} {:>8} {:>8}",
        "node",
        "address",
        "samples",
        "bytes",
        "share",
        "cached",
        "taken",
        "free",
        "memory",
        "workers"
    );
    let all = all_held(status);
    for NodeEntry { node, address, status, lost_for_ms } in &status.nodes {
        let node = node.to_string();
        match status {
            Err(reason) => {
                let reason = display(without_os_numbers(reason).as_bytes());
                let what = match lost_for_ms {
                    Some(lost_for_ms) => format!("has been lost for {} s; other nodes take its place", lost_for_ms / 1000),
                    None => format!("does not answer: {reason}"),
                };
                print_line!("{node:<5} {address:<21} {what}")
            }
            Ok(node_status) => print_line!(
                "{node:<5} {address:<21} {:>10} {:>10} {:>5.1}% {:>10} {:>10} {:>10} {:>8} {:>8}",
                node_status.samples,
                show(node_status.held_bytes),
                share_percent(node_status, all),
                show(node_status.cached.bytes),
                show(node_status.taken_bytes),
                show(node_status.free_bytes),
                show(node_status.memory_bytes),
                node_status.stage_in_workers
            ),
        }
    }
    for line in LEGEND {
        print_line!("{line}");
    }
    print_line!(
        "{:<5} {:>20} {:>20} {:>20} {:>20} {:>20} {:>12} {:>24}",
        "node",
        "read: own",
        "cached",
        "arena",
        "asked",
        "over the network",
        "local/expect",
        "prefetch hit/late/waste"
    );
    for NodeEntry { node, status, .. } in &status.nodes {
        let (Ok(status), node) = (status, node.to_string()) else { continue };
        let [own, cached, arena, asked] = status.reads.map(counted);
        let prefetch = status.prefetch;
        print_line!(
            "{node:<5} {own:>20} {cached:>20} {arena:>20} {asked:>20} {:>20} {:>12} {:>24}",
            counted(status.remote),
            format!("{:.0}/{:.0}%", local_percent(status), status.predicted_local_permille as f64 / 10.0),
            format!("{}/{}/{}", prefetch.hits, prefetch.late, prefetch.wasted),
        );
    }
    for line in READS_LEGEND {
        print_line!("{line}");
    }
    for NodeEntry { node, status, .. } in &status.nodes {
        let Ok(NodeStatus { origins, unstored_bytes, .. }) = status else { continue };
        if *unstored_bytes == 0 && *origins == OriginStatus::default() {
            continue;
        }
        print_line!(
            "node {node} owns {} that it does not store; it has read {} from the sources in {}, with {}",
            show(*unstored_bytes),
            counted(origins.reads),
            units::counted(origins.operations, "operation"),
            units::counted(origins.failures, "failure")
        );
    }
    for NodeEntry { node, status, .. } in &status.nodes {
        if let Ok(NodeStatus { mapped_bytes: bytes @ 1.., .. }) = status {
            let bytes = show(*bytes);
            print_line!(
                "node {node} keeps copies of {bytes} for programs that map files, read them as standard input, or run them"
            );
        }
    }
    for NodeEntry { node, status, .. } in &status.nodes {
        if let Ok(NodeStatus { drives_silent_ms: silent_ms @ 1.., .. }) = status {
            let seconds = silent_ms / 1000;
            print_line!("node {node}: its drives do not answer; what is taken and free is what they said {seconds} s ago");
        }
    }
    for NodeEntry { node, status, .. } in &status.nodes {
        let Ok(NodeStatus { recovery, .. }) = status else { continue };
        if recovery.wanted.count > 0 || !recovery.is_scanned {
            print_line!("node {node} {}", recovery_line(recovery));
        }
        for line in lines_about_left_out(recovery) {
            print_line!("node {node} {line}");
        }
    }
    for NodeEntry { node, status, .. } in &status.nodes {
        let Ok(NodeStatus { network, .. }) = status else { continue };
        print_line!(
            "node {node} reaches its peers by {}: {}",
            kind(network),
            display(without_os_numbers(&network.detail).as_bytes())
        );
        for (peer, why) in &network.fallen_back {
            print_line!("node {node} reaches node {peer} over TCP instead: {}", display(without_os_numbers(why).as_bytes()));
        }
    }
    if let Some(node) = status.nodes.iter().find_map(|entry| entry.status.as_ref().ok()) {
        print_line!("{}", policy::describe(&node.policy));
    }
    for dataset in &status.datasets {
        let path = display(&join(session.prefix(), &dataset.target));
        print_line!(
            "dataset {path}: {}, {}, catalog {} on each node",
            units::counted(dataset.samples, "sample"),
            show(dataset.bytes),
            show(dataset.catalog_bytes)
        );
    }
}

/// Says how far a node has come with the blocks of lost nodes.
fn recovery_line(recovery: &RecoveryStatus) -> String {
    let RecoveryStatus { wanted, recovered, failed, is_scanned, .. } = recovery;
    let at_least = if *is_scanned { "" } else { "at least " };
    let failures = match failed.count {
        0 => String::new(),
        count => format!("; {} could not be read, and will be tried again", units::counted(count, "block")),
    };
    format!(
        "has recovered {} of {at_least}{} of lost nodes, {} of {at_least}{}{failures}",
        recovered.count,
        units::counted(wanted.count, "block"),
        show(recovered.bytes),
        show(wanted.bytes)
    )
}

/// Says which blocks of lost nodes a node does not store in their place.
fn lines_about_left_out(recovery: &RecoveryStatus) -> Vec<String> {
    let line = |before: &str, reads: &Reads, after: &str| {
        (reads.count > 0)
            .then(|| format!("{before} {} of lost nodes, {}{after}", units::counted(reads.count, "block"), show(reads.bytes)))
    };
    [
        line("has no room for", &recovery.without_room, ""),
        line("cannot recover", &recovery.unrecoverable, ": reads of them fail until the nodes return"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn kind(network: &Network) -> &'static str {
    if network.is_rdma { "RDMA" } else { "TCP" }
}

fn counted(reads: Reads) -> String {
    format!("{} ({})", reads.count, show(reads.bytes))
}

/// Returns the share of the bytes read that came from the node's own drives, in percent.
fn local_percent(node: &NodeStatus) -> f64 {
    let local = node.reads[Source::Segment as usize].bytes + node.reads[Source::Cached as usize].bytes;
    let all = total(&node.reads).bytes;
    if all == 0 { 0.0 } else { local as f64 * 100.0 / all as f64 }
}

fn as_json(session: &Session, status: &SessionStatus) -> Value {
    let all = all_held(status);
    let node = |entry: &NodeEntry| match &entry.status {
        Err(reason) => {
            let (node, address) = (entry.node.0, &entry.address);
            json!({ "node": node, "address": address, "error": reason, "lost_for_ms": entry.lost_for_ms })
        }
        Ok(status) => {
            let mut value = json!({
                "node": entry.node.0, "address": entry.address, "pid": status.pid,
                "data_dirs": status.data_dirs.iter().map(|path| display(path)).collect::<Vec<_>>(),
                "samples": status.samples, "blocks": status.blocks, "held_bytes": status.held_bytes,
                "share_percent": share_percent(status, all),
                "used_bytes": status.used_bytes, "capacity_bytes": status.capacity_bytes,
                "free_bytes": status.free_bytes, "taken_bytes": status.taken_bytes, "cached_room_bytes": status.cached_room_bytes,
                "arena_bytes": status.arena_bytes, "arena_used_bytes": status.arena_used_bytes,
                "leases": status.leases, "clients": status.clients, "memory_bytes": status.memory_bytes,
                "stage_in_workers": status.stage_in_workers, "stage_in_memory_bytes": status.stage_in_memory_bytes,
                "reads": by_source(&status.reads),
                "remote_reads": status.remote.count, "remote_bytes": status.remote.bytes, "joined": status.joined,
                "served_reads": status.served.count, "served_bytes": status.served.bytes,

                "owners": status.owners.iter().map(|owner| json!({
                    "reads": owner.reads.count, "bytes": owner.reads.bytes, "requests": owner.requests, "failures": owner.failures, "busy_us": owner.busy_us,
                })).collect::<Vec<_>>(),
                "wait_us": { "p50": status.wait_us[0], "p90": status.wait_us[1], "p99": status.wait_us[2] },
                "asking": status.asking, "queued": status.queued, "queued_total": status.queued_total,
                "prefetch": {
                    "orders": status.prefetch.orders, "depth_bytes": status.prefetch.depth_bytes,
                    "requests": status.prefetch.requests, "hits": status.prefetch.hits, "late": status.prefetch.late,
                    "wasted": status.prefetch.wasted,
                },
                "cached_blocks": status.cached.count, "cached_bytes": status.cached.bytes,
                "local_percent": local_percent(status), "network": network_as_json(&status.network),
                "predicted_local_percent": status.predicted_local_permille as f64 / 10.0,
                "busiest_clients": status.busiest.iter().map(|client| json!({
                    "pid": client.pid, "reads": by_source(&client.reads),
                })).collect::<Vec<_>>(),
            });
            value["mapped_bytes"] = json!(status.mapped_bytes);
            value["drives_silent_ms"] = json!(status.drives_silent_ms);
            value["origins"] = origins(status);
            value["copies"] = json!({ "blocks": status.copies.count, "bytes": status.copies.bytes });
            value["recovery"] = recovery_as_json(&status.recovery);
            value
        }
    };
    let datasets = status.datasets.iter().map(|dataset| {
        json!({
            "path": display(&join(session.prefix(), &dataset.target)),
            "samples": dataset.samples, "bytes": dataset.bytes, "catalog_bytes": dataset.catalog_bytes,
        })
    });
    json!({
        "session": session.id().to_string(), "prefix": display(session.prefix()),
        "nodes": status.nodes.iter().map(node).collect::<Vec<_>>(), "datasets": datasets.collect::<Vec<_>>(),
    })
}

fn network_as_json(network: &Network) -> Value {
    let fallen_back = network.fallen_back.iter().map(|(peer, why)| json!({ "node": peer.0, "why": why }));
    json!({
        "transport": kind(network).to_lowercase(), "detail": network.detail, "fallen_back": fallen_back.collect::<Vec<_>>(),
        "posts": network.posts, "works": network.works, "completions": network.completions, "wake_ups": network.wake_ups,
        "written_bytes": network.written_bytes, "read_bytes": network.read_bytes,
        "requests_by_tcp": network.requests_by_tcp, "queue_pairs": network.queue_pairs, "failed": network.failed,
        "registered_bytes": network.registered_bytes,
    })
}

fn origins(status: &NodeStatus) -> Value {
    let OriginStatus { reads, operations, failures } = status.origins;
    json!({
        "unstored_bytes": status.unstored_bytes, "reads": reads.count, "bytes": reads.bytes, "operations": operations,
        "failures": failures,
    })
}

fn recovery_as_json(recovery: &RecoveryStatus) -> Value {
    let one = |reads: &Reads| json!({ "blocks": reads.count, "bytes": reads.bytes });
    let RecoveryStatus { wanted, recovered, failed, without_room, unrecoverable, is_scanned } = recovery;
    json!({
        "wanted": one(wanted), "recovered": one(recovered), "failed": one(failed), "without_room": one(without_room),
        "unrecoverable": one(unrecoverable), "is_scanned": is_scanned,
    })
}

fn by_source(reads: &[Reads; SOURCES]) -> Value {
    let one = |(name, reads): (&&str, &Reads)| ((*name).to_owned(), json!({ "count": reads.count, "bytes": reads.bytes }));
    Value::Object(SOURCE_NAMES.iter().zip(reads).map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "As long as a node has not looked through all datasets, it says "at least"."
    #[test]
    fn the_line_about_recovery_says_how_much_is_done_and_what_failed() {
        let reads = |count| Reads { count, bytes: count << 20 };
        let recovery = RecoveryStatus { wanted: reads(10), recovered: reads(7), is_scanned: true, ..RecoveryStatus::default() };
        assert_eq!(recovery_line(&recovery), "has recovered 7 of 10 blocks of lost nodes, 7.0MiB of 10.0MiB");
        let line = recovery_line(&RecoveryStatus { failed: reads(1), ..recovery });
        assert!(line.ends_with("; 1 block could not be read, and will be tried again"), "{line}");
        assert_eq!(recovery_as_json(&recovery)["recovered"], json!({ "blocks": 7, "bytes": 7 << 20 }));
        let unfinished = RecoveryStatus { is_scanned: false, ..recovery };
        assert_eq!(recovery_line(&unfinished), "has recovered 7 of at least 10 blocks of lost nodes, 7.0MiB of at least 10.0MiB");
        assert_eq!(recovery_as_json(&unfinished)["is_scanned"], false);
        assert!(lines_about_left_out(&recovery).is_empty());
        let left_out = RecoveryStatus { without_room: reads(2), unrecoverable: reads(1), ..recovery };
        let lines = [
            "has no room for 2 blocks of lost nodes, 2.0MiB",
            "cannot recover 1 block of lost nodes, 1.0MiB: reads of them fail until the nodes return",
        ];
        assert_eq!(lines_about_left_out(&left_out), lines);
        assert_eq!(recovery_as_json(&left_out)["without_room"], json!({ "blocks": 2, "bytes": 2 << 20 }));
    }
}
