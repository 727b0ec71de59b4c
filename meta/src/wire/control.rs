//! Commands of the command line, and what a server tells of their progress and end.

use rkyv::{Archive, Deserialize, Serialize};

use crate::id::NodeId;
use crate::limits::{NOTE_LEN_MAX, NOTES_SHOWN_MAX};

/// A command.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Command {
    /// Stage sources in. Events: `Planned`, `Progress`, at the end `StagedIn`. Closing the connection cancels it.
    StageIn(StageIn),
    /// Tell what all nodes hold and do. Event: `Status`.
    Status,
    /// End the session on this node. Event: `Down`, then the server ends.
    Down,
}

/// What to stage in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct StageIn {
    /// Absolute paths or globs, in order.
    pub sources: Vec<Vec<u8>>,
    /// The dataset's root, below the prefix.
    pub target: Vec<u8>,
    /// What to take of the sources.
    pub selection: Selection,
    /// Seed of the placement.
    pub seed: u64,
    /// Whether a dataset at the target makes way.
    pub replace: bool,
}

/// What to take of the sources, and under which names.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Leading components to drop from each name.
    pub strip_components: u32,
    /// Globs of which a file's name must match one, if there are any.
    pub include: Vec<String>,
    /// Globs that a name, or a directory it lies in, must not match.
    pub exclude: Vec<String>,
    /// Archives stay files.
    pub no_unpack: bool,
}

/// What a command's server tells.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Event {
    /// A stage-in is about to begin.
    Planned(Plan),
    /// How far it is.
    Progress(Progress),
    /// It is done: the dataset is visible on all nodes.
    StagedIn(Summary),
    /// How the session is.
    Status(Status),
    /// This node serves no longer.
    Down {
        /// Bytes given up on the data dirs.
        freed_bytes: u64,
    },
    /// The command failed and left nothing behind.
    Failed {
        /// For the user.
        reason: String,
    },
}

/// What a stage-in will take, against what is free.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Sources after globs were expanded.
    pub sources: u64,
    /// Bytes of the sources as they lie on the PFS.
    pub source_bytes: u64,
    /// Files, where they are known before reading (directories and single files).
    pub known_files: u64,
    /// Whether that is all of them.
    pub files_are_all_known: bool,
    /// Bytes the samples take at least: what an archive holds is known only once it is read.
    pub least_bytes: u64,
    /// Bytes of the catalog on each node, as far as files are known.
    pub catalog_bytes: u64,
    /// Free room on all nodes.
    pub free_bytes: u64,
}

/// How far a stage-in is.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes of the sources read so far.
    pub source_bytes: u64,
    /// Files found so far.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a stage-in is doing.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Finding sources and telling them apart.
    #[default]
    Planning,
    /// Reading sources and storing blocks.
    Reading,
    /// Merging what was found into the catalog.
    Merging,
    /// Giving all nodes the catalog.
    Publishing,
}

/// Counts of what a stage-in met.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Regular files read.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Devices, FIFOs and sockets, skipped.
    pub special: u64,
    /// Members refused: their names leave the tree or cannot be kept, or something stands in their place.
    pub refused: u64,
    /// Absolute names made relative.
    pub made_relative: u64,
    /// Archives that end without their end mark.
    pub unmarked_ends: u64,
    /// The first few of these by name.
    pub notes: Vec<String>,
}

impl Counts {
    /// Keeps a remark, if there are not enough of them; shortened, for a hostile name can be a megabyte long.
    pub fn note(&mut self, text: &str) {
        if self.notes.len() < NOTES_SHOWN_MAX {
            self.notes.push(text.chars().take(NOTE_LEN_MAX).collect());
        }
    }
}

/// A finished stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Samples of the dataset.
    pub samples: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Directories and symlinks.
    pub others: u64,
    /// Bytes of the catalog on each node.
    pub catalog_bytes: u64,
    /// Bytes of the sources read.
    pub source_bytes: u64,
    /// What was met on the way.
    pub counts: Counts,
    /// Milliseconds from the request to now.
    pub elapsed_ms: u64,
    /// Fullest node's share over the mean, in tenths of a percent.
    pub imbalance_permille: u64,
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
    /// Bytes of these.
    pub held_bytes: u64,
    /// Bytes taken on its data dirs: segments and catalogs, which have no names that `du` could find.
    pub used_bytes: u64,
    /// What it may take.
    pub capacity_bytes: u64,
    /// Size of the arena, and how much of it holds blocks.
    pub arena_bytes: u64,
    /// See `arena_bytes`.
    pub arena_used_bytes: u64,
    /// Leases out to clients.
    pub leases: u64,
    /// Processes attached.
    pub clients: u64,
    /// Resident memory of the server, in bytes; shared parts included.
    pub memory_bytes: u64,
    /// Blocks that this node's clients read from its own segments.
    pub local_reads: u64,
    /// Bytes of these.
    pub local_bytes: u64,
    /// Blocks that came from other nodes over the network; what the arena still held is not counted again.
    pub remote_reads: u64,
    /// Bytes of these.
    pub remote_bytes: u64,
    /// Blocks that this node sent to others.
    pub served_blocks: u64,
    /// Bytes of these.
    pub served_bytes: u64,
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
