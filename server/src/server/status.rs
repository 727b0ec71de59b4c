//! What a server tells of itself and of its session.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_meta::wire::status::{DatasetStatus, NodeEntry, NodeStatus, Reads, Status};

use super::Server;
use crate::store::Dataset;

/// What `stat` counts a file's room in.
const BLOCK_LEN: u64 = 512;

impl Server {
    /// What this node says of itself.
    pub(crate) fn status(&self) -> NodeStatus {
        let datasets = self.store.datasets();
        let sum = |count: &dyn Fn(&Dataset) -> u64| datasets.iter().map(|dataset| count(dataset)).sum();
        let (arena_used_bytes, leases) = self.arena.usage();
        let (clients, busiest, reads) = self.processes.status(self.store.counters());
        let (queued, queued_total) = self.arena.waiters();
        let mut kept = Reads::default();
        datasets
            .iter()
            .map(|dataset| dataset.cached_blocks().usage())
            .for_each(|(count, bytes)| kept.add(Reads { count, bytes }));
        let mut owners = self.fetcher.owners();
        owners.truncate(self.peers.count());
        NodeStatus {
            pid: std::process::id(),
            data_dirs: self.config.data_dirs.iter().map(|path| path.as_os_str().as_encoded_bytes().to_vec()).collect(),
            samples: sum(&|dataset| dataset.owned().samples),
            blocks: sum(&|dataset| dataset.owned().blocks),
            damaged: self.damage.get(),
            held_bytes: sum(&|dataset| dataset.owned().bytes),
            used_bytes: self.store.used().saturating_sub(self.store.cached_room()),
            capacity_bytes: self.store.capacity(),
            free_bytes: self.store.free(),
            taken_bytes: self.taken_bytes(),
            cached_room_bytes: self.store.cached_room(),
            arena_bytes: self.arena.len(),
            arena_used_bytes,
            leases,
            clients,
            busiest,
            stage_in_workers: self.config.workers as u64,
            stage_in_memory_bytes: self.config.stage_memory,
            memory_bytes: resident_memory(),
            reads,
            remote: self.fetcher.remote(),
            joined: self.fetcher.joined(),
            served: self.fetcher.served(),
            owners,
            wait_us: self.reading.wait_us(),
            asking: self.reading.in_flight(),
            queued,
            queued_total,
            prefetch: self.prefetcher.status(),
            cached: kept,
            predicted_local_permille: predicted_local(&datasets),
            policy: self.prefetcher.policy(),
            network: self.transport.status(),
        }
    }

    /// What the files of datasets and stage-ins take, as their file systems count it.
    fn taken_bytes(&self) -> u64 {
        let datasets = self.store.datasets();
        // A stage-in's segments become its dataset's when it is shown.
        let files: HashMap<*const File, Arc<File>> = datasets
            .iter()
            .flat_map(|dataset| dataset.segments().files().chain([dataset.catalog_file()]))
            .chain(self.stages.all().iter().flat_map(|stage| stage.ingest().segments().files()))
            .map(|file| (Arc::as_ptr(file), file.clone()))
            .collect();
        files.values().filter_map(|file| file.metadata().ok()).map(|metadata| metadata.blocks() * BLOCK_LEN).sum()
    }

    /// What all nodes say.
    pub(crate) async fn session_status(self: &Arc<Self>) -> Status {
        let asking = self.peers.nodes().map(|node| async move {
            let address = self.peers.address(node).map_or_else(String::new, |address| address.to_string());
            let status = match self.ask(node, Request::Status, self.deadlines().request).await {
                Ok(Reply::Status(status)) => Ok(*status),
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

/// Which share of all bytes this node will read from its own drives, in thousandths.
fn predicted_local(datasets: &[Arc<Dataset>]) -> u64 {
    let all: u64 = datasets.iter().map(|dataset| dataset.catalog().header().bytes).sum();
    let here = |dataset: &Arc<Dataset>| {
        u128::from(dataset.owned().bytes) * 1000
            + u128::from(dataset.remote_bytes()) * u128::from(dataset.cached_blocks().share_permille())
    };
    datasets.iter().map(here).sum::<u128>().checked_div(all.into()).unwrap_or(0) as u64
}

/// Resident memory of this process in bytes; 0 where the kernel does not tell.
fn resident_memory() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok().and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * dayfly_meta::limits::PAGE_SIZE
}
