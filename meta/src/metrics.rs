//! What a node counts, by the names that monitoring systems know it under: declared as data. `docs/METRICS.md` is made of this.

use std::fmt::Write;

use crate::wire::status::{NodeStatus, Reads};

/// How a value moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It only grows, from the session's start.
    Counter,
    /// It is what it is at the moment.
    Gauge,
}

/// A metric of a node.
pub struct Metric {
    /// Its name, which ends with the unit, and `_total` where it is a counter.
    pub name: &'static str,
    /// How it moves.
    pub kind: Kind,
    /// What it tells.
    pub help: &'static str,
    /// The label that tells its values apart beside `node`; empty if there is one value.
    pub label: &'static str,
    /// The values, each with that label's.
    values: fn(&NodeStatus) -> Vec<(String, f64)>,
}

/// Names of [`crate::wire::status::Source`]s, in their order.
pub const SOURCE_NAMES: [&str; crate::wire::status::SOURCES] = ["segment", "cached", "arena", "asked"];

/// Names of [`crate::wire::status::Hop`]s, in their order.
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
        /// All metrics, in the order in which they are told.
        pub const METRICS: &[Metric] = &[
            $(Metric { name: $name, kind: Kind::$kind, help: $help, label: $label, values: $values },)*
        ];
    };
}

metrics! {
    "dayfly_reads_total" Counter "source" "Reads of blocks, or chunks of large ones, by this node's processes: out of its own segment, what it keeps of others, the arena without asking, or by asking the server."
        |node| by_source(node, |reads| reads.count);
    "dayfly_read_bytes_total" Counter "source" "Their bytes."
        |node| by_source(node, |reads| reads.bytes);
    "dayfly_remote_reads_total" Counter "" "Chunks that came over the network, asked for or fetched ahead."
        |node| one(node.remote.count);
    "dayfly_remote_bytes_total" Counter "" "Their bytes."
        |node| one(node.remote.bytes);
    "dayfly_joined_total" Counter "" "Wishes for a chunk for which another's transfer was on its way already."
        |node| one(node.joined);
    "dayfly_served_reads_total" Counter "" "Chunks sent to other nodes."
        |node| one(node.served.count);
    "dayfly_served_bytes_total" Counter "" "Their bytes."
        |node| one(node.served.bytes);
    "dayfly_owner_bytes_total" Counter "owner" "Bytes that came from each owner."
        |node| by_owner(node, |owner| owner.reads.bytes as f64);
    "dayfly_owner_requests_total" Counter "owner" "Requests to each owner."
        |node| by_owner(node, |owner| owner.requests as f64);
    "dayfly_owner_busy_seconds_total" Counter "owner" "Time that requests to each owner took, added up."
        |node| by_owner(node, |owner| owner.busy_us as f64 / 1e6);
    "dayfly_damaged_total" Counter "hop" "Blocks and chunks whose bytes were not those that were staged in, by where this node found that: shipped to it, fetched from their owner, in its arena, kept on its drives, or owned by it."
        |node| HOP_NAMES.iter().zip(node.damaged).map(|(name, count)| ((*name).to_owned(), count as f64)).collect();
    "dayfly_wait_seconds" Gauge "quantile" "How long processes wait for what they ask the server for, since the session began."
        |node| ["0.5", "0.9", "0.99"].iter().zip(node.wait_us).map(|(name, us)| ((*name).to_owned(), us as f64 / 1e6)).collect();
    "dayfly_asking" Gauge "" "Processes' requests that the server works on."
        |node| one(node.asking);
    "dayfly_queued" Gauge "" "Of these, requests that wait for room in the arena."
        |node| one(node.queued);
    "dayfly_queued_total" Counter "" "Requests that found no room in the arena at once."
        |node| one(node.queued_total);
    "dayfly_prefetch_orders" Gauge "" "Orders that are read ahead."
        |node| one(node.prefetch.orders);
    "dayfly_prefetch_depth_bytes" Gauge "" "Bytes to be ahead of readers."
        |node| one(node.prefetch.depth_bytes);
    "dayfly_prefetch_requests" Gauge "" "Requests to owners that are made at once for it."
        |node| one(node.prefetch.requests);
    "dayfly_prefetch_hits_total" Counter "" "Chunks that had come before they were read."
        |node| one(node.prefetch.hits);
    "dayfly_prefetch_late_total" Counter "" "Chunks that were ordered and had to be asked for all the same."
        |node| one(node.prefetch.late);
    "dayfly_prefetch_wasted_total" Counter "" "Chunks that were fetched ahead and given back unread."
        |node| one(node.prefetch.wasted);
    "dayfly_held_bytes" Gauge "" "Bytes of the blocks that the node owns."
        |node| one(node.held_bytes);
    "dayfly_cached_bytes" Gauge "" "Bytes of other nodes' blocks that it keeps on its drives."
        |node| one(node.cached.bytes);
    "dayfly_predicted_local_ratio" Gauge "" "Share of all bytes that it will read from its own drives, once all that it means to keep has come."
        |node| vec![(String::new(), node.predicted_local_permille as f64 / 1000.0)];
    "dayfly_used_bytes" Gauge "" "Bytes taken on its drives."
        |node| one(node.used_bytes);
    "dayfly_free_bytes" Gauge "" "Bytes that a stage-in may still take: no more than the file systems have; what is kept of others makes way."
        |node| one(node.free_bytes);
    "dayfly_taken_bytes" Gauge "" "Bytes that its files take, as their file systems count them: what is kept of others among them."
        |node| one(node.taken_bytes);
    "dayfly_capacity_bytes" Gauge "" "Bytes that it may take there."
        |node| one(node.capacity_bytes);
    "dayfly_arena_bytes" Gauge "" "Size of the arena."
        |node| one(node.arena_bytes);
    "dayfly_arena_used_bytes" Gauge "" "Bytes of chunks in the arena, leased or idle."
        |node| one(node.arena_used_bytes);
    "dayfly_leases" Gauge "" "Chunks in the arena that somebody reads, or that wait for their reader."
        |node| one(node.leases);
    "dayfly_clients" Gauge "" "Processes attached."
        |node| one(node.clients);
    "dayfly_rdma" Gauge "" "1 where the node reaches its peers by RDMA, 0 where by TCP."
        |node| one(node.network.is_rdma.into());
    "dayfly_fallen_back_peers" Gauge "" "Peers that it reaches by TCP although RDMA was agreed on."
        |node| one(node.network.fallen_back.len() as u64);
    "dayfly_rdma_operations_total" Counter "" "Operations that it posted to its card."
        |node| one(node.network.works);
    "dayfly_rdma_completions_total" Counter "" "Completions that the card told of."
        |node| one(node.network.completions);
    "dayfly_rdma_wake_ups_total" Counter "" "Times the thread that takes them was woken."
        |node| one(node.network.wake_ups);
    "dayfly_rdma_written_bytes_total" Counter "" "Bytes that it wrote into peers' memory, for their reads."
        |node| one(node.network.written_bytes);
    "dayfly_rdma_read_bytes_total" Counter "" "Bytes that it read from peers' memory, while they staged in."
        |node| one(node.network.read_bytes);
    "dayfly_rdma_queue_pairs" Gauge "" "Queue pairs."
        |node| one(node.network.queue_pairs);
    "dayfly_rdma_failed_queue_pairs_total" Counter "" "Queue pairs that failed."
        |node| one(node.network.failed);
    "dayfly_rdma_registered_bytes" Gauge "" "Memory that the card may touch."
        |node| one(node.network.registered_bytes);
    "dayfly_memory_bytes" Gauge "" "Resident memory of the server, shared parts included."
        |node| one(node.memory_bytes);
}

/// The values of some nodes, as Prometheus reads them.
pub fn prometheus(nodes: &[(u16, &NodeStatus)]) -> String {
    let mut text = String::new();
    for metric in METRICS {
        let kind = if metric.kind == Kind::Counter { "counter" } else { "gauge" };
        // Writing into a string does not fail.
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

/// The page that describes them.
pub fn page() -> String {
    let mut text = "# Metrics\n\nWhat `dayfly metrics` tells of a node, in Prometheus' text format. Every value has the label `node`. This page is \
                    made by `dayfly metrics --describe`; a test holds it to the code.\n\n| name | kind | label | what it tells |\n|---|---|---|---|\n"
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
    fn names_are_unique_and_say_what_they_count() {
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
    fn prometheus_can_read_them() {
        let status = NodeStatus { reads: [Reads { count: 3, bytes: 40 }; 4], ..NodeStatus::default() };
        let text = prometheus(&[(2, &status)]);
        assert!(text.contains("# TYPE dayfly_reads_total counter\ndayfly_reads_total{node=\"2\",source=\"segment\"} 3\n"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.ends_with('}') && value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
