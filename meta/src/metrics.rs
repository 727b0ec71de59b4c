//! The metrics of a node, declared as data under the names that monitoring systems see.
//! `docs/METRICS.md` is generated from this file.

use std::fmt::Write;

use crate::wire::status::{NodeStatus, Reads};

/// How the value of a metric may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The value only grows, from the start of the session.
    Counter,
    /// The value shows the current state, and may fall.
    Gauge,
}

/// A metric of a node.
pub struct Metric {
    /// The metric's name. It contains the unit, and ends with `_total` if the metric is a counter.
    pub name: &'static str,
    /// How the value changes.
    pub kind: Kind,
    /// One or more sentences that describe the value.
    pub help: &'static str,
    /// The label, in addition to `node`, that tells several values of the metric apart; empty if there is
    /// only one value.
    pub label: &'static str,
    /// Returns the metric's values, each with the value of its label.
    values: fn(&NodeStatus) -> Vec<(String, f64)>,
}

/// Names of the [`crate::wire::status::Source`]s, in their order.
pub const SOURCE_NAMES: [&str; crate::wire::status::SOURCES] = ["segment", "cached", "arena", "asked"];

/// Names of the [`crate::wire::status::Hop`]s, in their order.
pub const HOP_NAMES: [&str; crate::wire::status::HOPS] = ["shipped", "fetched", "arena", "cached", "owned"];

fn one(value: u64) -> Vec<(String, f64)> {
    vec![(String::new(), value as f64)]
}

fn by_source(node: &NodeStatus, of: fn(&Reads) -> u64) -> Vec<(String, f64)> {
    SOURCE_NAMES.iter().zip(&node.reads).map(|(name, reads)| ((*name).to_owned(), of(reads) as f64)).collect()
}

fn by_owner(node: &NodeStatus, of: fn(&crate::wire::status::OwnerStatus) -> f64) -> Vec<(String, f64)> {
    let owners = node.owners.iter().enumerate().filter(|(_, owner)| owner.requests > 0);
    owners.map(|(number, owner)| (number.to_string(), of(owner))).collect()
}

macro_rules! metrics {
    ($($name:literal $kind:ident $label:literal $help:literal $values:expr;)*) => {
        /// All metrics, in the order of the output.
        pub const METRICS: &[Metric] = &[
            $(Metric { name: $name, kind: Kind::$kind, help: $help, label: $label, values: $values },)*
        ];
    };
}

metrics! {
    "dayfly_reads_total" Counter "source" "Reads of blocks, or of chunks of large blocks, by processes of this node. The source is a block that the node owns, a cached block, the arena without a message, or the server after a request."
        |node| by_source(node, |reads| reads.count);
    "dayfly_read_bytes_total" Counter "source" "Bytes of the reads that `dayfly_reads_total` counts."
        |node| by_source(node, |reads| reads.bytes);
    "dayfly_remote_reads_total" Counter "" "Chunks that arrived over the network, requested or prefetched."
        |node| one(node.remote.count);
    "dayfly_remote_bytes_total" Counter "" "Bytes of the chunks that arrived over the network."
        |node| one(node.remote.bytes);
    "dayfly_joined_total" Counter "" "Requests that joined a fetch already in flight."
        |node| one(node.joined);
    "dayfly_origin_reads_total" Counter "" "Chunks read from their origins on the parallel file system."
        |node| one(node.origins.reads.count);
    "dayfly_origin_bytes_total" Counter "" "Bytes of the chunks read from their origins."
        |node| one(node.origins.reads.bytes);
    "dayfly_origin_operations_total" Counter "" "Reads of sources for these chunks, including repeated ones."
        |node| one(node.origins.operations);
    "dayfly_origin_failures_total" Counter "" "Chunks that could not be read from their origins."
        |node| one(node.origins.failures);
    "dayfly_recovery_wanted_blocks" Gauge "" "Blocks of lost nodes that the node holds in their place, had not stored when the members of the session last changed, and has room for."
        |node| one(node.recovery.wanted.count);
    "dayfly_recovery_wanted_bytes" Gauge "" "Bytes of the blocks that `dayfly_recovery_wanted_blocks` counts."
        |node| one(node.recovery.wanted.bytes);
    "dayfly_recovery_recovered_blocks" Gauge "" "Those of the blocks in `dayfly_recovery_wanted_blocks` that the node has stored by now."
        |node| one(node.recovery.recovered.count);
    "dayfly_recovery_recovered_bytes" Gauge "" "Bytes of the blocks that `dayfly_recovery_recovered_blocks` counts."
        |node| one(node.recovery.recovered.bytes);
    "dayfly_recovery_failed_blocks" Gauge "" "Those of the blocks in `dayfly_recovery_wanted_blocks` that could not be read. The node tries again later."
        |node| one(node.recovery.failed.count);
    "dayfly_recovery_without_room_blocks" Gauge "" "Blocks of lost nodes that the node holds in their place and has not stored, but has no room for."
        |node| one(node.recovery.without_room.count);
    "dayfly_recovery_unrecoverable_blocks" Gauge "" "Blocks of lost nodes that no source can be read again for. Reads of them fail."
        |node| one(node.recovery.unrecoverable.count);
    "dayfly_recovery_scanned" Gauge "" "1 if `dayfly_recovery_wanted_blocks` counts the blocks of all datasets, 0 if the node still looks for more."
        |node| one(node.recovery.is_scanned.into());
    "dayfly_unstored_bytes" Gauge "" "Bytes of the blocks that the node owns but did not store, for lack of room."
        |node| one(node.unstored_bytes);
    "dayfly_served_reads_total" Counter "" "Chunks sent to other nodes."
        |node| one(node.served.count);
    "dayfly_served_bytes_total" Counter "" "Bytes of the chunks sent to other nodes."
        |node| one(node.served.bytes);
    "dayfly_owner_bytes_total" Counter "owner" "Bytes received from each owner."
        |node| by_owner(node, |owner| owner.reads.bytes as f64);
    "dayfly_owner_requests_total" Counter "owner" "Requests that each owner answered."
        |node| by_owner(node, |owner| owner.requests as f64);
    "dayfly_owner_failures_total" Counter "owner" "Requests to each owner that failed, for example because it did not answer."
        |node| by_owner(node, |owner| owner.failures as f64);
    "dayfly_owner_busy_seconds_total" Counter "owner" "Total time that requests to each owner took."
        |node| by_owner(node, |owner| owner.busy_us as f64 / 1e6);
    "dayfly_damaged_total" Counter "hop" "Blocks and chunks whose bytes differed from those that were staged in. The hop says where this node found the damage: in a block shipped to it, in a chunk fetched from an owner, in its arena, in a cached block, or in a block that it owns."
        |node| HOP_NAMES.iter().zip(node.damaged).map(|(name, count)| ((*name).to_owned(), count as f64)).collect();
    "dayfly_wait_seconds" Gauge "quantile" "How long processes wait for chunks that they ask the server for, since the session began."
        |node| ["0.5", "0.9", "0.99"].iter().zip(node.wait_us).map(|(name, us)| ((*name).to_owned(), us as f64 / 1e6)).collect();
    "dayfly_asking" Gauge "" "Requests of processes that the server is working on."
        |node| one(node.asking);
    "dayfly_queued" Gauge "" "Requests that wait for room in the arena. They are a part of `dayfly_asking`."
        |node| one(node.queued);
    "dayfly_queued_total" Counter "" "Requests that did not find room in the arena at once."
        |node| one(node.queued_total);
    "dayfly_prefetch_orders" Gauge "" "Orders that are being prefetched."
        |node| one(node.prefetch.orders);
    "dayfly_prefetch_depth_bytes" Gauge "" "How many bytes the node tries to be ahead of its readers."
        |node| one(node.prefetch.depth_bytes);
    "dayfly_prefetch_requests" Gauge "" "How many prefetch requests to owners the node has in flight at once."
        |node| one(node.prefetch.requests);
    "dayfly_prefetch_hits_total" Counter "" "Chunks that had arrived before they were read."
        |node| one(node.prefetch.hits);
    "dayfly_prefetch_late_total" Counter "" "Chunks of an order that did not arrive before a reader asked for them."
        |node| one(node.prefetch.late);
    "dayfly_prefetch_wasted_total" Counter "" "Chunks that were prefetched and evicted unread."
        |node| one(node.prefetch.wasted);
    "dayfly_held_bytes" Gauge "" "Bytes of the blocks that the node owns."
        |node| one(node.held_bytes);
    "dayfly_copied_bytes" Gauge "" "Bytes of the copies of other nodes' blocks that stage-ins stored on the node (`--copies`)."
        |node| one(node.copies.bytes);
    "dayfly_cached_bytes" Gauge "" "Bytes of other nodes' blocks that are cached on the node's drives."
        |node| one(node.cached.bytes);
    "dayfly_predicted_local_ratio" Gauge "" "The share of the bytes of all datasets that will be on the node's drives once all blocks that the node intends to cache have arrived."
        |node| vec![(String::new(), node.predicted_local_permille as f64 / 1000.0)];
    "dayfly_used_bytes" Gauge "" "Bytes taken on the node's drives, not counting cached blocks that can be evicted."
        |node| one(node.used_bytes);
    "dayfly_mapped_bytes" Gauge "" "Bytes of the copies that processes of the node map, read as standard input, or run. They are part of the used bytes, and make way for stage-ins."
        |node| one(node.mapped_bytes);
    "dayfly_free_bytes" Gauge "" "Bytes that a stage-in may still take: the free part of the node's capacity (or the free space of the file systems, if that is less), plus the bytes of cached blocks and of unused mapped copies, because a stage-in can drop them, without the room for copies that are still to come (`--copies`)."
        |node| one(node.free_bytes);
    "dayfly_taken_bytes" Gauge "" "Bytes that the node's files take, as their file systems count them, including cached blocks."
        |node| one(node.taken_bytes);
    "dayfly_capacity_bytes" Gauge "" "Bytes that the node may take on its drives."
        |node| one(node.capacity_bytes);
    "dayfly_arena_bytes" Gauge "" "Size of the arena."
        |node| one(node.arena_bytes);
    "dayfly_arena_used_bytes" Gauge "" "Bytes of chunks in the arena, leased or idle."
        |node| one(node.arena_used_bytes);
    "dayfly_leases" Gauge "" "Chunks in the arena that are leased to a process, or that wait for their reader."
        |node| one(node.leases);
    "dayfly_clients" Gauge "" "Processes attached."
        |node| one(node.clients);
    "dayfly_rdma" Gauge "" "1 if the node reaches its peers over RDMA, 0 if over TCP."
        |node| one(node.network.is_rdma.into());
    "dayfly_fallen_back_peers" Gauge "" "Peers that the node reaches over TCP although the session uses RDMA."
        |node| one(node.network.fallen_back.len() as u64);
    "dayfly_rdma_operations_total" Counter "" "Operations posted to the RDMA card."
        |node| one(node.network.works);
    "dayfly_rdma_completions_total" Counter "" "Completions that the card reported."
        |node| one(node.network.completions);
    "dayfly_rdma_wake_ups_total" Counter "" "Number of times that the thread that handles completions was woken."
        |node| one(node.network.wake_ups);
    "dayfly_rdma_written_bytes_total" Counter "" "Bytes written into peers' memory, to answer their reads."
        |node| one(node.network.written_bytes);
    "dayfly_rdma_read_bytes_total" Counter "" "Bytes read from peers' memory when they ship blocks of a stage-in."
        |node| one(node.network.read_bytes);
    "dayfly_rdma_requests_by_tcp_total" Counter "" "Requests for blocks that went over TCP although the node uses RDMA: no queue pair worked, it was full, or it cannot carry the request."
        |node| one(node.network.requests_by_tcp);
    "dayfly_rdma_queue_pairs" Gauge "" "Queue pairs that exist now."
        |node| one(node.network.queue_pairs);
    "dayfly_rdma_failed_queue_pairs_total" Counter "" "Queue pairs that failed."
        |node| one(node.network.failed);
    "dayfly_rdma_registered_bytes" Gauge "" "Memory that the card may access."
        |node| one(node.network.registered_bytes);
    "dayfly_memory_bytes" Gauge "" "Resident memory of the server, including shared memory."
        |node| one(node.memory_bytes);
}

/// Returns the values of some nodes in Prometheus' text format.
pub fn prometheus(nodes: &[(u16, &NodeStatus)]) -> String {
    let mut text = String::new();
    for metric in METRICS {
        let kind = if metric.kind == Kind::Counter { "counter" } else { "gauge" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {} {}\n# TYPE {} {kind}", metric.name, metric.help, metric.name);
        for (node, status) in nodes {
            for (label, value) in (metric.values)(status) {
                let more = if metric.label.is_empty() { String::new() } else { format!(",{}=\"{label}\"", metric.label) };
                let _ = writeln!(text, "{}{{node=\"{node}\"{more}}} {value}", metric.name);
            }
        }
    }
    text
}

/// Returns the page that describes all metrics.
pub fn page() -> String {
    let mut text = "# Metrics\n\n\
                    `dayfly metrics` prints these metrics of a node in Prometheus' text format. Every value has the label `node`.\n\
                    This page is the output of `dayfly metrics --describe`; a test compares the two.\n\n\
                    | name | kind | label | meaning |\n|---|---|---|---|\n"
        .to_owned();
    for metric in METRICS {
        let kind = if metric.kind == Kind::Counter { "counter" } else { "gauge" };
        let _ = writeln!(text, "| `{}` | {kind} | {} | {} |", metric.name, metric.label, metric.help);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_are_unique_and_show_their_kind() {
        let mut names: Vec<&str> = METRICS.iter().map(|metric| metric.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
        for metric in METRICS {
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
            assert!(metric.name.starts_with("dayfly_") && metric.help.ends_with('.'), "{}", metric.name);
        }
    }

    #[test]
    fn the_output_is_valid_prometheus_text() {
        let status = NodeStatus { reads: [Reads { count: 3, bytes: 40 }; 4], ..NodeStatus::default() };
        let text = prometheus(&[(2, &status)]);
        assert!(text.contains("# TYPE dayfly_reads_total counter\ndayfly_reads_total{node=\"2\",source=\"segment\"} 3\n"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.ends_with('}') && value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
