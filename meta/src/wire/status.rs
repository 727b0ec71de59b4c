//! How a session is: what its nodes tell of themselves, and how they are told to behave.

use rkyv::{Archive, Deserialize, Serialize};

use crate::id::NodeId;

/// Where the bytes of a read came from, as the process that read them sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Source {
    /// The node's own segment.
    Segment,
    /// The node's segment, in which it keeps what others own.
    Cached,
    /// The arena, where it had been fetched by another or ahead: no message was needed.
    Arena,
    /// The server was asked.
    Asked,
}

/// Number of [`Source`]s.
pub const SOURCES: usize = 4;

/// Reads, and their bytes.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// How many blocks, or chunks of large ones.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Reads {
    /// Adds others.
    pub fn add(&mut self, more: Self) {
        self.count = self.count.wrapping_add(more.count);
        self.bytes = self.bytes.wrapping_add(more.bytes);
    }
}

/// Where a node found bytes that were not those that were staged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Hop {
    /// In a batch that was shipped to it.
    Shipped,
    /// In what an owner sent it.
    Fetched,
    /// In its arena, after they had come.
    Arena,
    /// Among what it keeps of other nodes' blocks.
    Cached,
    /// In a segment, among the blocks that it owns.
    Owned,
}

/// Number of [`Hop`]s.
pub const HOPS: usize = 5;

/// How much to fetch ahead of readers that have said what they will read.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Depth {
    /// As much as the controller finds right.
    #[default]
    Auto,
    /// So many samples; 0 for none.
    Samples(u32),
}

/// How nodes read ahead and what they keep. A field that is not set leaves things as they are.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// How far to fetch ahead.
    pub prefetch: Option<Depth>,
    /// Bytes of the arena that may be taken for it, on each node.
    pub prefetch_bytes: Option<u64>,
    /// Bytes of other nodes' blocks that each node may keep on its drives; [`CACHE_ALL_ROOM`] for all the room there is.
    pub cache_bytes: Option<u64>,
}

/// For [`Policy::cache_bytes`].
pub const CACHE_ALL_ROOM: u64 = u64::MAX;

impl Policy {
    /// What holds when `other` is told to whom had `self`.
    pub fn then(self, other: Self) -> Self {
        Self {
            prefetch: other.prefetch.or(self.prefetch),
            prefetch_bytes: other.prefetch_bytes.or(self.prefetch_bytes),
            cache_bytes: other.cache_bytes.or(self.cache_bytes),
        }
    }
}

/// A session, as `status` shows it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// One a node, in order; a node that does not answer has its reason instead.
    pub nodes: Vec<NodeEntry>,
    /// The datasets.
    pub datasets: Vec<DatasetStatus>,
}

/// A node's line in `status`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct NodeEntry {
    /// The node.
    pub node: NodeId,
    /// Its address for peers.
    pub address: String,
    /// What it says of itself, or why it says nothing.
    pub status: Result<NodeStatus, String>,
}

/// How a node reaches its peers.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// By RDMA; else by TCP.
    pub is_rdma: bool,
    /// Which card, port and address; or why not by RDMA.
    pub detail: String,
    /// Peers that are reached by TCP all the same, and why.
    pub fallen_back: Vec<(NodeId, String)>,
    /// Calls that posted work to the card.
    pub posts: u64,
    /// Operations that they posted.
    pub works: u64,
    /// Completions that the card told of.
    pub completions: u64,
    /// Times its thread was woken.
    pub wake_ups: u64,
    /// Bytes written into peers' memory, for their reads.
    pub written_bytes: u64,
    /// Bytes read from peers' memory, when they stage in.
    pub read_bytes: u64,
    /// Queue pairs, now.
    pub queue_pairs: u64,
    /// Queue pairs that failed.
    pub failed: u64,
    /// Memory that the card may touch, in bytes.
    pub registered_bytes: u64,
}

/// What a node says of itself.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeStatus {
    /// The server's process.
    pub pid: u32,
    /// Its data dirs.
    pub data_dirs: Vec<Vec<u8>>,
    /// Samples whose first block it holds as owner.
    pub samples: u64,
    /// Blocks it holds as owner.
    pub blocks: u64,
    /// Blocks and chunks that it found damaged, by [`Hop`].
    pub damaged: [u64; HOPS],
    /// Bytes of these.
    pub held_bytes: u64,
    /// Bytes taken on its data dirs: segments and catalogs, which have no names that `du` could find. What is only kept makes way for
    /// others and does not count.
    pub used_bytes: u64,
    /// What it may take.
    pub capacity_bytes: u64,
    /// What a stage-in may still take: less than the capacity leaves, where others have filled the drives. What is only kept makes way.
    pub free_bytes: u64,
    /// Bytes that all its files take, as its file systems count them: what is only kept, and what is set aside for it, among them.
    pub taken_bytes: u64,
    /// Of these, what is only kept.
    pub cached_room_bytes: u64,
    /// Size of the arena, and how much of it holds blocks.
    pub arena_bytes: u64,
    /// See `arena_bytes`.
    pub arena_used_bytes: u64,
    /// Chunks leased to clients.
    pub leases: u64,
    /// Processes attached.
    pub clients: u64,
    /// Those that read most.
    pub busiest: Vec<ClientStatus>,
    /// Units that this node reads at a time in one stage-in.
    pub stage_in_workers: u64,
    /// Its memory for all stage-ins that run at once, in bytes.
    pub stage_in_memory_bytes: u64,
    /// Resident memory of the server, in bytes; shared parts included.
    pub memory_bytes: u64,
    /// What this node's clients read, by [`Source`].
    pub reads: [Reads; SOURCES],
    /// What came from other nodes over the network: asked for, or fetched ahead.
    pub remote: Reads,
    /// Wishes for a chunk that another's transfer was already on its way for.
    pub joined: u64,
    /// What this node sent to others.
    pub served: Reads,
    /// What each owner sent to this node, by node.
    pub owners: Vec<OwnerStatus>,
    /// Microseconds that clients waited for what they asked the server for: half of them less, nine of ten, 99 of 100.
    pub wait_us: [u64; 3],
    /// Clients' requests that the server works on.
    pub asking: u64,
    /// Of these, requests that wait for room in the arena.
    pub queued: u64,
    /// Requests that found no room in the arena at once, so far.
    pub queued_total: u64,
    /// What is fetched ahead.
    pub prefetch: PrefetchStatus,
    /// What is kept of other nodes' blocks.
    pub cached: Reads,
    /// What of each dataset this node could read from its own drives if all that it means to keep had come, in thousandths of the
    /// bytes of all datasets.
    pub predicted_local_permille: u64,
    /// What holds of [`Policy`].
    pub policy: Policy,
    /// How it reaches its peers.
    pub network: Network,
}

/// A process of a node.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientStatus {
    /// The process; its forked children count for it until they ask the server themselves. 0 where the server cannot see it.
    pub pid: i32,
    /// What it read, by [`Source`].
    pub reads: [Reads; SOURCES],
}

impl ClientStatus {
    /// All its reads.
    pub fn all(&self) -> Reads {
        total(&self.reads)
    }
}

/// Reads from all sources.
pub fn total(reads: &[Reads; SOURCES]) -> Reads {
    let mut all = Reads::default();
    reads.iter().for_each(|&reads| all.add(reads));
    all
}

/// What came from one owner.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerStatus {
    /// What it sent.
    pub reads: Reads,
    /// Requests to it.
    pub requests: u64,
    /// Microseconds that these took, all together.
    pub busy_us: u64,
}

/// What is fetched ahead on a node.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchStatus {
    /// Orders that are being read.
    pub orders: u64,
    /// Bytes to be ahead of readers, as the controller has it now.
    pub depth_bytes: u64,
    /// Requests to owners at once, as the controller has it now.
    pub requests: u64,
    /// Blocks that were there before they were read.
    pub hits: u64,
    /// Blocks that a reader had to ask for although they were ordered.
    pub late: u64,
    /// Blocks that were fetched and given back unread.
    pub wasted: u64,
}

/// A dataset's line in `status`.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct DatasetStatus {
    /// Its root, below the prefix.
    pub target: Vec<u8>,
    /// Samples.
    pub samples: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of the catalog on each node.
    pub catalog_bytes: u64,
}
