//! The status of a node and of its session, put together from the counters of all parts.

mod drives;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::limits::PAGE_SIZE;
use dayfly_meta::wire::peer::{AdministrationReply, AdministrationRequest};
use dayfly_meta::wire::status::{DatasetStatus, NodeEntry, NodeStatus, Reads, Status, divide_shared_room};
use dayfly_transport::Transport;
use futures_util::future::join_all;

use crate::arena::Arena;
use crate::blocking::JobLost;
use crate::fetch::Fetcher;
use crate::peers::{PeerError, Peers};
use crate::prefetch::Prefetcher;
use crate::processes::Processes;
use crate::recovery::RecoveryProgress;
use crate::stats::{ClientReads, Damage};
use crate::store::{Dataset, Store};

use self::drives::DriveRoom;
pub(crate) use self::drives::DriveRooms;

/// Reads the counters of a node's parts.
pub(crate) struct StatusReporter {
    pub(crate) data_dirs: Vec<PathBuf>,
    pub(crate) workers: usize,
    pub(crate) stage_in_memory: u64,
    pub(crate) store: Arc<Store>,
    pub(crate) arena: Arena,
    pub(crate) processes: Arc<Processes>,
    pub(crate) fetcher: Arc<Fetcher>,
    pub(crate) prefetcher: Arc<Prefetcher>,
    pub(crate) drives: Arc<DriveRooms>,
    pub(crate) client_reads: Arc<ClientReads>,
    pub(crate) damage: Arc<Damage>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) recovery: Arc<RecoveryProgress>,
    pub(crate) transport: Arc<dyn Transport>,
}

impl StatusReporter {
    /// Returns the status of this node.
    pub(crate) async fn node_status(&self) -> Result<NodeStatus, JobLost> {
        let (room, silence) = self.drives.room().await?;
        Ok(self.with_room(room, silence))
    }

    fn with_room(&self, room: DriveRoom, silence: Duration) -> NodeStatus {
        let DriveRoom { free_bytes, file_systems, taken_bytes } = room;
        let datasets = self.store.datasets();
        let sum = |count: &dyn Fn(&Dataset) -> u64| datasets.iter().map(|dataset| count(dataset)).sum();
        let (arena_used_bytes, leases) = self.arena.usage();
        let (clients, busiest, reads) = self.processes.status(self.store.counters());
        let (queued, queued_total) = self.arena.waiters();
        let mut cached = Reads::default();
        for (count, bytes) in datasets.iter().map(|dataset| dataset.cached_blocks().usage()) {
            cached.add(Reads { count, bytes });
        }
        let mut owners = self.fetcher.owners();
        owners.truncate(self.peers.count());
        NodeStatus {
            pid: std::process::id(),
            data_dirs: self.data_dirs.iter().map(|path| path.as_os_str().as_encoded_bytes().to_vec()).collect(),
            samples: sum(&|dataset| dataset.owned().samples),
            blocks: sum(&|dataset| dataset.owned().blocks),
            damaged: self.damage.get(),
            held_bytes: sum(&|dataset| dataset.owned().bytes),
            used_bytes: self.store.used().saturating_sub(self.store.evictable_room()),
            mapped_bytes: self.store.shared_copies_bytes(),
            capacity_bytes: self.store.capacity(),
            free_bytes,
            file_systems,
            taken_bytes,
            drives_silent_ms: silence.as_millis() as u64,
            cached_room_bytes: self.store.evictable_room(),
            arena_bytes: self.arena.len(),
            arena_used_bytes,
            leases,
            clients,
            busiest,
            stage_in_workers: self.workers as u64,
            stage_in_memory_bytes: self.stage_in_memory,
            memory_bytes: resident_memory(),
            reads,
            remote: self.fetcher.remote(),
            joined: self.fetcher.joined(),
            served: self.fetcher.served(),
            origins: self.fetcher.origins(),
            unstored_bytes: sum(&|dataset| dataset.owned().unstored_bytes),
            recovery: self.recovery.status(&self.peers.roster().lost(), datasets.iter().any(|dataset| dataset.is_incomplete())),
            copies: datasets.iter().fold(Reads::default(), |mut all, dataset| {
                all.add(dataset.copies_here());
                all
            }),
            owners,
            wait_us: self.client_reads.wait_us(),
            asking: self.client_reads.in_flight(),
            queued,
            queued_total,
            prefetch: self.prefetcher.status(),
            cached,
            predicted_local_permille: predicted_local_permille(&datasets),
            policy: self.prefetcher.policy(),
            network: self.transport.status(),
        }
    }

    /// Returns the status of all nodes. A node that cannot be asked has an entry that says why.
    pub(crate) async fn session_status(&self) -> Status {
        let asking = self.peers.nodes().map(|node| async move {
            let address = self.peers.address(node).map_or_else(String::new, |address| address.to_string());
            if let Some(lost_for) = self.peers.lost_for(node) {
                let lost_for_ms = Some(lost_for.as_millis() as u64);
                return NodeEntry { node, address, status: Err("it is lost".to_owned()), lost_for_ms };
            }
            let timeout = self.peers.deadlines().request;
            let status = match self.peers.ask(node, AdministrationRequest::Status, timeout).await {
                Ok(AdministrationReply::Status(status)) => Ok(*status),
                Ok(_) => Err(PeerError::InvalidAnswer(node).to_string()),
                Err(error) => Err(error.to_string()),
            };
            NodeEntry { node, address, status, lost_for_ms: None }
        });
        let mut nodes = join_all(asking).await;
        divide_shared_room(nodes.iter_mut().filter_map(|entry| entry.status.as_mut().ok()));
        let dataset = |dataset: &Arc<Dataset>| {
            let header = dataset.catalog().header();
            let (samples, bytes) = (u64::from(header.samples), header.bytes);
            DatasetStatus { target: dataset.target().to_vec(), samples, bytes, catalog_bytes: header.file_len }
        };
        Status { nodes, datasets: self.store.datasets().iter().map(dataset).collect() }
    }
}

/// Predicts, in thousandths, what share of all bytes this node will read from its own drives once its caches are full.
fn predicted_local_permille(datasets: &[Arc<Dataset>]) -> u64 {
    let all: u64 = datasets.iter().map(|dataset| dataset.catalog().header().bytes).sum();
    let local = |dataset: &Arc<Dataset>| {
        u128::from(dataset.stored_bytes()) * 1000
            + u128::from(dataset.remote_bytes()) * u128::from(dataset.cached_blocks().share_permille())
    };
    datasets.iter().map(local).sum::<u128>().checked_div(all.into()).unwrap_or(0) as u64
}

/// Returns the resident memory of this process in bytes; 0 if the kernel does not report it.
fn resident_memory() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok().and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * PAGE_SIZE
}
