//! The state of a session as its nodes report it, and the policy that they follow.

use std::collections::HashMap;

use rkyv::{Archive, Deserialize, Serialize};

use crate::id::NodeId;

/// Where the bytes of a read came from, as seen by the process that read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Source {
    /// A block that this node owns, from its segment.
    Segment,
    /// A block of another node that is cached in this node's segment.
    Cached,
    /// The arena, where an earlier read or a prefetch had put the bytes; no message was needed.
    Arena,
    /// The server, after a request for the bytes.
    Asked,
}

/// The number of [`Source`]s.
pub const SOURCES: usize = 4;

/// A number of reads, and their bytes.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Number of blocks, or of chunks of large blocks.
    pub count: u64,
    /// Bytes of those reads.
    pub bytes: u64,
}

impl Reads {
    /// Adds other reads.
    pub fn add(&mut self, more: Self) {
        self.count = self.count.wrapping_add(more.count);
        self.bytes = self.bytes.wrapping_add(more.bytes);
    }
}

/// Where a node found bytes that differ from those that were staged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Hop {
    /// In a batch that was shipped to the node.
    Shipped,
    /// In a chunk that an owner sent to the node.
    Fetched,
    /// In the node's arena, after the bytes had arrived there intact.
    Arena,
    /// Among the node's cached blocks.
    Cached,
    /// Among the blocks that the node owns.
    Owned,
}

/// The number of [`Hop`]s.
pub const HOPS: usize = 5;

/// How far to prefetch ahead of readers that have submitted an order.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Depth {
    /// As far as the controller sees fit.
    #[default]
    Auto,
    /// This number of samples; 0 disables prefetching.
    Samples(u32),
}

/// How nodes prefetch and cache. A field that is `None` leaves the setting as it is.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// How far to prefetch.
    pub prefetch: Option<Depth>,
    /// Bytes of each node's arena that prefetched chunks may take.
    pub prefetch_bytes: Option<u64>,
    /// Bytes of other nodes' blocks that each node may cache on its drives; [`CACHE_ALL_ROOM`] for
    /// all the room there is.
    pub cache_bytes: Option<u64>,
}

/// The value of [`Policy::cache_bytes`] that allows all the room there is.
pub const CACHE_ALL_ROOM: u64 = u64::MAX;

impl Policy {
    /// Returns the policy that is in force if `self` is applied first and then `other`.
    pub fn then(self, other: Self) -> Self {
        Self {
            prefetch: other.prefetch.or(self.prefetch),
            prefetch_bytes: other.prefetch_bytes.or(self.prefetch_bytes),
            cache_bytes: other.cache_bytes.or(self.cache_bytes),
        }
    }
}

/// The state of a session, as `status` shows it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// One entry for each node, in order. The entry of a node that does not answer contains the
    /// reason instead.
    pub nodes: Vec<NodeEntry>,
    /// All datasets of the session.
    pub datasets: Vec<DatasetStatus>,
}

/// Room on a file system, on which several servers of one machine may have data dirs.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSystemRoom {
    /// Tells the file system from all others, also from those of other machines.
    pub id: u64,
    /// The free part of the node's capacity there.
    pub capacity_bytes: u64,
    /// What the file system has free, for everybody.
    pub free_bytes: u64,
}

/// Lowers the free bytes of nodes whose data dirs share file systems, if these have less room than the nodes expect together. Each
/// node gets a part in proportion to what it expects.
pub fn divide_shared_room<'a>(nodes: impl Iterator<Item = &'a mut NodeStatus>) {
    let nodes: Vec<&mut NodeStatus> = nodes.collect();
    let mut expected: HashMap<u64, (u128, u64)> = HashMap::new();
    for room in nodes.iter().flat_map(|node| &node.file_systems) {
        let (all, free) = expected.entry(room.id).or_insert((0, room.free_bytes));
        *all += u128::from(room.capacity_bytes.min(room.free_bytes));
        *free = room.free_bytes.min(*free);
    }
    for node in nodes {
        for room in &node.file_systems {
            let (all, free) = expected.get(&room.id).copied().unwrap_or_default();
            let mine = room.capacity_bytes.min(room.free_bytes);
            let part = (u128::from(mine) * u128::from(free)).checked_div(all).unwrap_or(0) as u64;
            node.free_bytes = node.free_bytes.saturating_sub(mine.saturating_sub(part));
        }
    }
}

/// A node's entry in `status`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct NodeEntry {
    /// The node's number.
    pub node: NodeId,
    /// The address at which its peers reach it.
    pub address: String,
    /// The node's state, or the reason why it did not report one.
    pub status: Result<NodeStatus, String>,
    /// Milliseconds since the supervisor declared the node lost; `None` for a member that is not lost.
    pub lost_for_ms: Option<u64>,
}

/// How a node reaches its peers.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Whether the node uses RDMA; otherwise it uses TCP.
    pub is_rdma: bool,
    /// Card, port and address, or the reason why the node does not use RDMA.
    pub detail: String,
    /// Peers that are reached over TCP although the session uses RDMA, each with the reason.
    pub fallen_back: Vec<(NodeId, String)>,
    /// Calls that posted work to the card.
    pub posts: u64,
    /// Operations posted by those calls.
    pub works: u64,
    /// Completions that the card reported.
    pub completions: u64,
    /// Number of times that the thread that handles completions was woken.
    pub wake_ups: u64,
    /// Bytes written into peers' memory, to answer their reads.
    pub written_bytes: u64,
    /// Bytes read from peers' memory, when they ship batches.
    pub read_bytes: u64,
    /// Requests for blocks that went over TCP although the node uses RDMA: no queue pair worked, it was full, or it cannot carry the request.
    pub requests_by_tcp: u64,
    /// Queue pairs that exist now.
    pub queue_pairs: u64,
    /// Queue pairs that failed.
    pub failed: u64,
    /// Bytes of memory that the card may access.
    pub registered_bytes: u64,
}

/// The state of a node.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeStatus {
    /// The server's process id.
    pub pid: u32,
    /// The node's data dirs.
    pub data_dirs: Vec<Vec<u8>>,
    /// Samples whose first block the node owns.
    pub samples: u64,
    /// Blocks that the node owns.
    pub blocks: u64,
    /// Blocks and chunks that the node found damaged, by [`Hop`].
    pub damaged: [u64; HOPS],
    /// Bytes of the blocks that the node owns.
    pub held_bytes: u64,
    /// Bytes taken in the data dirs by segments and catalogs, which have no names that `du` could
    /// find. Cached blocks do not count unless they are kept, because they make room for others.
    pub used_bytes: u64,
    /// The part of [`Self::used_bytes`] that copies take which processes of the node share: they map them, read them as standard
    /// input, or run them. These copies make way for stage-ins.
    pub mapped_bytes: u64,
    /// Bytes that the node may take in its data dirs.
    pub capacity_bytes: u64,
    /// Bytes that a stage-in may still take: the free part of the capacity (or the free space of
    /// the file systems, if that is less), plus the bytes of cached blocks and of copies for processes that nobody uses, because a
    /// stage-in can drop them, without the room for copies that are still to come.
    pub free_bytes: u64,
    /// The file systems of the data dirs.
    pub file_systems: Vec<FileSystemRoom>,
    /// Bytes that all files of the node take, as its file systems count them, including cached
    /// blocks and reserved room.
    pub taken_bytes: u64,
    /// How long ago the drives said the last three figures, in milliseconds, if they do not answer now; else 0.
    pub drives_silent_ms: u64,
    /// The part of [`Self::taken_bytes`] that cached blocks take and can give up.
    pub cached_room_bytes: u64,
    /// Size of the arena in bytes.
    pub arena_bytes: u64,
    /// Bytes of the arena that contain chunks.
    pub arena_used_bytes: u64,
    /// Chunks leased to clients.
    pub leases: u64,
    /// Processes attached to the server.
    pub clients: u64,
    /// The processes that read most.
    pub busiest: Vec<ClientStatus>,
    /// Units that the node reads at a time in one stage-in.
    pub stage_in_workers: u64,
    /// Memory for all stage-ins that run at once, in bytes.
    pub stage_in_memory_bytes: u64,
    /// Resident memory of the server in bytes, including shared memory.
    pub memory_bytes: u64,
    /// What the clients of this node read, by [`Source`].
    pub reads: [Reads; SOURCES],
    /// Chunks that came from other nodes, whether requested or prefetched.
    pub remote: Reads,
    /// Requests that joined a fetch already in flight.
    pub joined: u64,
    /// Chunks that this node sent to others.
    pub served: Reads,
    /// Chunks that this node read from their origins.
    pub origins: OriginStatus,
    /// Bytes of the blocks that this node owns but did not store, for lack of room.
    pub unstored_bytes: u64,
    /// Copies of other nodes' blocks that stage-ins stored on this node (`--copies`).
    pub copies: Reads,
    /// The blocks of lost nodes that this node reads and stores.
    pub recovery: RecoveryStatus,
    /// What this node received from each owner, by node.
    pub owners: Vec<OwnerStatus>,
    /// How long clients waited for chunks that they asked the server for, in microseconds: the
    /// median, the 90th and the 99th percentile.
    pub wait_us: [u64; 3],
    /// Requests of clients that the server is working on.
    pub asking: u64,
    /// The part of [`Self::asking`] that waits for room in the arena.
    pub queued: u64,
    /// Requests that did not find room in the arena at once, so far.
    pub queued_total: u64,
    /// The state of prefetching.
    pub prefetch: PrefetchStatus,
    /// Blocks of other nodes that are cached on this node.
    pub cached: Reads,
    /// The share of the bytes of all datasets that will be on this node's drives once all blocks
    /// that the node intends to cache have arrived, in thousandths.
    pub predicted_local_permille: u64,
    /// The policy in force.
    pub policy: Policy,
    /// How the node reaches its peers.
    pub network: Network,
}

/// A process of a node.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientStatus {
    /// The process id; 0 if the server cannot see the process. Reads by forked children count here
    /// until the children send requests of their own.
    pub pid: i32,
    /// What the process read, by [`Source`].
    pub reads: [Reads; SOURCES],
}

impl ClientStatus {
    /// Returns the sum of its reads.
    pub fn all(&self) -> Reads {
        total(&self.reads)
    }
}

/// Returns the sum of reads from all sources.
pub fn total(reads: &[Reads; SOURCES]) -> Reads {
    let mut all = Reads::default();
    reads.iter().for_each(|&reads| all.add(reads));
    all
}

/// What a node read from origins on the parallel file system.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OriginStatus {
    /// Chunks, and their bytes.
    pub reads: Reads,
    /// Reads of sources. One can bring several chunks that lie close together.
    pub operations: u64,
    /// Chunks that could not be read.
    pub failures: u64,
}

/// How far a node has recovered the blocks that it holds in place of lost nodes, since the members of the session last changed.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryStatus {
    /// The blocks that the node lacked and has room for. They include those of the other two fields.
    pub wanted: Reads,
    /// The blocks that are on the node's drives by now.
    pub recovered: Reads,
    /// The blocks that could not be read. The node tries again later.
    pub failed: Reads,
    /// The blocks that the node lacks, too, but has no room for.
    pub without_room: Reads,
    /// The blocks that no source can be read again for, so that reads of them fail until the lost node returns.
    pub unrecoverable: Reads,
    /// Whether the node has looked through all datasets, so that [`Self::wanted`] counts all blocks. If `--recovery-rate` is 0, there
    /// is nothing to look for.
    pub is_scanned: bool,
}

/// The traffic that a node received from one owner.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerStatus {
    /// What the owner sent.
    pub reads: Reads,
    /// Requests that the owner answered.
    pub requests: u64,
    /// Requests that failed, for example because the owner did not answer.
    pub failures: u64,
    /// The total time that those requests took, in microseconds.
    pub busy_us: u64,
}

/// The state of prefetching on a node.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchStatus {
    /// Orders that are being prefetched.
    pub orders: u64,
    /// How many bytes ahead of readers the controller currently tries to be.
    pub depth_bytes: u64,
    /// How many requests to owners the controller currently keeps in flight.
    pub requests: u64,
    /// Blocks that had arrived before they were read.
    pub hits: u64,
    /// Ordered blocks that did not arrive before a reader asked for them.
    pub late: u64,
    /// Blocks that were prefetched and evicted unread.
    pub wasted: u64,
}

/// A dataset's entry in `status`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct DatasetStatus {
    /// The path of its root, below the prefix.
    pub target: Vec<u8>,
    /// Number of samples.
    pub samples: u64,
    /// Bytes of all samples.
    pub bytes: u64,
    /// Bytes of the catalog on each node.
    pub catalog_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_share_a_file_system_divide_what_it_has_free() {
        // For each node, free bytes apart from those on file systems, and its file systems: number, free capacity, free bytes.
        type Row<'a> = (&'a [(u64, &'a [(u64, u64, u64)])], &'a [u64]);
        let rows: [Row<'_>; 6] = [
            (&[(0, &[(1, 40, 100)]), (0, &[(1, 60, 100)])], &[40, 60]),
            (&[(0, &[(1, 16, 14)]), (0, &[(1, 16, 14)]), (0, &[(1, 16, 14)]), (5, &[(1, 16, 14)])], &[3, 3, 3, 8]),
            (&[(0, &[(1, 10, 20)]), (0, &[(1, 30, 20)]), (0, &[(2, 30, 20)])], &[6, 13, 20]),
            (&[(7, &[(1, 30, 20), (2, 30, 40)]), (0, &[(2, 90, 40)])], &[7 + 20 + 17, 22]),
            (&[(3, &[(1, 0, 0)]), (3, &[])], &[3, 3]),
            (&[(0, &[(1, u64::MAX, u64::MAX)]), (0, &[(1, u64::MAX, u64::MAX)])], &[u64::MAX / 2; 2]),
        ];
        for (nodes, expected) in rows {
            let node = |(rest, rooms): &(u64, &[(u64, u64, u64)])| {
                let room = |&(id, capacity_bytes, free_bytes)| FileSystemRoom { id, capacity_bytes, free_bytes };
                let free_bytes = rooms.iter().map(|&(_, capacity, free)| capacity.min(free)).sum::<u64>() + rest;
                NodeStatus { free_bytes, file_systems: rooms.iter().map(room).collect(), ..NodeStatus::default() }
            };
            let mut nodes: Vec<NodeStatus> = nodes.iter().map(node).collect();
            divide_shared_room(nodes.iter_mut());
            let found: Vec<u64> = nodes.iter().map(|node| node.free_bytes).collect();
            assert_eq!(found, expected);
        }
    }
}
