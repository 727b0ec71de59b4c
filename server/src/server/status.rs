//! What a server tells of itself and of its session.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dayfly_meta::limits::REQUEST_TIMEOUT;
use dayfly_meta::wire::control::{DatasetStatus, NodeEntry, NodeStatus, Status};
use dayfly_meta::wire::peer::{Reply, Request};

use super::Server;
use crate::store::Dataset;

impl Server {
    /// What this node says of itself.
    pub(crate) fn status(&self) -> NodeStatus {
        let datasets = self.store.datasets();
        let sum = |count: &dyn Fn(&Dataset) -> u64| datasets.iter().map(|dataset| count(dataset)).sum();
        let (arena_used_bytes, leases) = self.arena.usage();
        let (local_reads, local_bytes) = self.store.counters().local();
        let (remote_reads, remote_bytes) = self.fetcher.remote();
        let (served_blocks, served_bytes) = self.fetcher.served();
        NodeStatus {
            pid: std::process::id(),
            data_dirs: self.config.data_dirs.iter().map(|path| path.as_os_str().as_encoded_bytes().to_vec()).collect(),
            samples: sum(&|dataset| dataset.held().samples),
            blocks: sum(&|dataset| dataset.held().blocks),
            held_bytes: sum(&|dataset| dataset.held().bytes),
            used_bytes: self.store.used(),
            capacity_bytes: self.store.capacity(),
            arena_bytes: self.arena.len(),
            arena_used_bytes,
            leases,
            clients: self.clients.load(Ordering::Relaxed),
            memory_bytes: resident_memory(),
            local_reads,
            local_bytes,
            remote_reads,
            remote_bytes,
            served_blocks,
            served_bytes,
        }
    }

    /// What all nodes say.
    pub(crate) async fn session_status(self: &Arc<Self>) -> Status {
        let asking = self.peers.nodes().map(|node| async move {
            let address = self.peers.address(node).map_or_else(String::new, |address| address.to_string());
            let status = match self.ask(node, Request::Status, REQUEST_TIMEOUT).await {
                Ok(Reply::Status(status)) => Ok(status),
                Ok(_) => Err("it answers what was not asked".to_owned()),
                Err(error) => Err(error.to_string()),
            };
            NodeEntry { node, address, status }
        });
        let nodes = futures_util::future::join_all(asking).await;
        let dataset = |dataset: &Arc<Dataset>| {
            let header = dataset.catalog().header();
            let (samples, bytes) = (u64::from(header.samples), header.bytes);
            DatasetStatus { target: dataset.target().to_vec(), samples, bytes, catalog_bytes: header.file_len }
        };
        Status { nodes, datasets: self.store.datasets().iter().map(dataset).collect() }
    }
}

/// Resident memory of this process in bytes; 0 where the kernel does not tell.
fn resident_memory() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok().and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * dayfly_meta::limits::PAGE_SIZE
}
