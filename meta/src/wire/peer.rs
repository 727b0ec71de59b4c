//! Between servers. Each request goes as the message of a pull or an offer; bulk bytes travel beside it.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::{Counts, NodeStatus, Selection};
use crate::catalog::{Compression, MemberKey};
use crate::id::{BlockId, DatasetId};

/// What a server asks another. A *stage* is one stage-in, numbered by the lead.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Request {
    /// Pull: blocks that the other holds, one piece each. Reply: `Read`.
    Read {
        /// Their dataset.
        dataset: DatasetId,
        /// Which.
        blocks: Vec<BlockId>,
    },
    /// Offer: blocks or pieces of blocks to hold, back to back. Reply: `Shipped`.
    Ship {
        /// Their stage-in.
        stage: u64,
        /// One an extent of the offered bytes, in order.
        blocks: Vec<ShippedBlock>,
    },
    /// Room for a block that comes in pieces. Reply: `Shipped`.
    Reserve {
        /// Its stage-in.
        stage: u64,
        /// Its name until it has a number.
        key: MemberKey,
        /// Which of its sample's blocks.
        part: u32,
        /// Its length.
        block_len: u64,
    },
    /// From the lead: a stage-in begins; take units. Reply: `Done`.
    Begin {
        /// Its number.
        stage: u64,
        /// What to take of archives.
        selection: Selection,
        /// Seed of the placement.
        seed: u64,
        /// Room on each node, in order: its weight in the placement.
        capacities: Vec<u64>,
    },
    /// To the lead: what came of a unit, and is there another? Reply: `Unit`, `NoUnit` or `Stop`.
    NextUnit {
        /// The stage-in.
        stage: u64,
        /// The unit just finished, if any.
        finished: Option<UnitReport>,
    },
    /// To the lead, now and then: how far we are. Reply: `Done` or `Stop`.
    Report {
        /// The stage-in.
        stage: u64,
        /// Counted since the last report.
        progress: Counted,
    },
    /// To the lead: the stage-in failed here. Reply: `Done`.
    Fail {
        /// The stage-in.
        stage: u64,
        /// For the user.
        reason: String,
    },
    /// From the lead: no unit is left; tell your runs. Reply: `Runs`.
    Finish {
        /// The stage-in.
        stage: u64,
    },
    /// Pull: bytes of a run, as many as fit. Reply: `Done`.
    ReadRun {
        /// The stage-in.
        stage: u64,
        /// Which run.
        run: u32,
        /// From where.
        offset: u64,
    },
    /// From the lead: fetch the catalog from the given node, check it, fill your locations. Reply: `Done`.
    Prepare {
        /// The stage-in.
        stage: u64,
        /// The dataset's number.
        dataset: DatasetId,
        /// Its root, below the prefix.
        target: Vec<u8>,
        /// The node that has the catalog.
        from: crate::id::NodeId,
        /// The catalog's length.
        len: u64,
        /// Its CRC32C.
        checksum: u32,
    },
    /// Pull: bytes of a prepared catalog, as many as fit. Reply: `Done`.
    ReadCatalog {
        /// The stage-in.
        stage: u64,
        /// From where.
        offset: u64,
    },
    /// From the lead: show the prepared dataset in place of the one it replaces. Reply: `Done`.
    Commit {
        /// The stage-in.
        stage: u64,
        /// What it replaces.
        replaces: Option<DatasetId>,
    },
    /// From the lead: all nodes show it; give up what it replaced, and all else of the stage-in. Reply: `Done`.
    Settle {
        /// The stage-in.
        stage: u64,
    },
    /// From the lead: forget the stage-in and all that came of it; show again what it replaced. Reply: `Done`.
    Abort {
        /// The stage-in.
        stage: u64,
    },
    /// Tell of yourself. Reply: `Status`.
    Status,
}

/// What a server answers.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Reply {
    /// Done; bytes, if any, lie in the slots.
    Done,
    /// Which of the wanted blocks lie in their slots; the others are not here.
    Read {
        /// One a block.
        found: Vec<bool>,
    },
    /// Whether the blocks are stored; if not, none of them is, and they go to the next node on the ring.
    Shipped {
        /// Stored, or no room.
        stored: bool,
    },
    /// A unit to read.
    Unit(Unit),
    /// There is none, and will be none.
    NoUnit,
    /// The stage-in is over, by a failure elsewhere or by its user.
    Stop,
    /// Lengths of this node's runs.
    Runs {
        /// In bytes, one a run.
        lens: Vec<u64>,
    },
    /// What a node says of itself.
    Status(NodeStatus),
    /// It could not be done.
    Failed {
        /// For the user, naming the place.
        reason: String,
    },
}

/// A block, or a piece of one, as it is shipped.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShippedBlock {
    /// Its sample's key.
    pub key: MemberKey,
    /// Which of its sample's blocks.
    pub part: u32,
    /// Length of the whole block.
    pub block_len: u64,
    /// Where in the block these bytes go; less than all only for a block that was reserved.
    pub offset: u64,
    /// How many bytes of the batch they are.
    pub len: u32,
}

/// A piece of a source, for one worker.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Number of its source.
    pub source: u32,
    /// The directory of the dataset that its names go below.
    pub prefix: Vec<u8>,
    /// What to read.
    pub work: Work,
}

/// What a unit is.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// A whole tar archive.
    Tar {
        /// Its path.
        path: Vec<u8>,
        /// How it is compressed.
        compression: Compression,
    },
    /// Some entries of a directory tree, or a single file.
    Tree {
        /// The tree's root.
        root: Vec<u8>,
        /// Paths below it.
        entries: Vec<TreeEntry>,
    },
}

/// An entry of a directory tree, as the lead's walk saw it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TreeEntry {
    /// Its number in the walk.
    pub number: u64,
    /// Its path below the root; empty for a source that is a single file.
    pub path: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// Modification time, whole seconds.
    pub mtime_s: i64,
    /// And nanoseconds.
    pub mtime_ns: u32,
    /// What it is.
    pub kind: TreeKind,
}

/// What an entry of a tree is.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum TreeKind {
    /// A regular file of so many bytes.
    File(u64),
    /// A directory.
    Directory,
    /// A symlink and its target.
    Symlink(Vec<u8>),
    /// A further name of the file at the given path of the tree.
    HardLink(Vec<u8>),
}

/// What came of a unit.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitReport {
    /// What was met.
    pub counts: Counts,
    /// How far the node is, since the last report.
    pub progress: Counted,
}

/// Progress since the last report.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Bytes read from sources.
    pub source_bytes: u64,
    /// Files found.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}
