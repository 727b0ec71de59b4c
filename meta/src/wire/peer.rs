//! Between servers. Each request goes as the message of a pull or an offer; bulk bytes travel beside it.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::{Counted, Counts, Event, Selection, StageInRequest};
use super::status::{NodeStatus, Policy};
use crate::catalog::Compression;
use crate::chunk::Chunk;
use crate::id::DatasetId;

/// What a server asks another. A *stage* is one stage-in, numbered by the coordinator.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Request {
    /// Pull: chunks of blocks that the other holds, one piece each. Reply: `Read`.
    Read {
        /// Their dataset.
        dataset: DatasetId,
        /// Which.
        chunks: Vec<Chunk>,
    },
    /// Offer: blocks to hold, back to back. Reply: `Shipped`.
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
        /// Its length.
        block_len: u64,
        /// What its owner compares.
        rival: Rival,
    },
    /// Offer: a piece of a block for which there is room. Reply: `Done`.
    ShipPiece {
        /// Its stage-in.
        stage: u64,
        /// The block's number there.
        arrival: u32,
        /// Where in the block the piece goes.
        offset: u64,
        /// CRC32C of its bytes as they were read from the source.
        checksum: u32,
    },
    /// To the coordinator: begin a stage-in, asked for on this node. Reply: `Followed`.
    StageIn(StageInRequest),
    /// To the coordinator: how does it go? Reply: `Told`.
    Follow {
        /// Its number among those.
        number: u64,
        /// How many events were heard so far; what comes after them is told, again if need be.
        heard: u64,
    },
    /// To the coordinator: nobody asks for it any more; if it runs, cancel it. Reply: `Done`.
    Leave {
        /// Its number among those.
        number: u64,
    },
    /// From the coordinator: a stage-in begins; take units. Reply: `Done`.
    Begin {
        /// Its number.
        stage: u64,
        /// What to take of archives.
        selection: Selection,
        /// Seed of the placement, and of the order in which blocks are stored.
        seed: u64,
        /// Bytes of sources that this node may read in a second.
        max_rate: Option<u64>,
        /// Room on each node, in order: its weight in the placement.
        capacities: Vec<u64>,
    },
    /// From the coordinator, before a stage-in: have copies make way where others have taken the drive's room. Reply: `Done`.
    Headroom,
    /// To the coordinator: what came of units, and are there more? Reply: `Units`, `Wait`, `NoUnit` or `Stop`.
    NextUnit {
        /// The stage-in.
        stage: u64,
        /// The units just finished.
        finished: Vec<UnitReport>,
    },
    /// To the coordinator, now and then: how far we are. Reply: `Go`, `Stop` or `Undone`.
    Report {
        /// The stage-in.
        stage: u64,
        /// Counted since the last report.
        progress: Counted,
        /// What this node's threads wait for, if nothing was counted.
        waits: Vec<String>,
        /// What this node, as an owner, suspects.
        suspects: Vec<Question>,
        /// What its workers have found of what is asked.
        sightings: Vec<Sighting>,
    },
    /// To the coordinator: the stage-in failed here. Reply: `Done`.
    Fail {
        /// The stage-in.
        stage: u64,
        /// For the user.
        reason: String,
    },
    /// From the coordinator: no unit is left; tell your runs. Reply: `Runs`.
    Finish {
        /// The stage-in.
        stage: u64,
    },
    /// Pull: bytes of a run, as many as fit. Reply: `Bytes`.
    ReadRun {
        /// The stage-in.
        stage: u64,
        /// Which run.
        run: u32,
        /// From where.
        offset: u64,
    },
    /// From the coordinator: fetch the catalog from the given node, check it, fill your locations. Reply: `Done`.
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
    /// Pull: bytes of a prepared catalog, as many as fit. Reply: `Bytes`.
    ReadCatalog {
        /// The stage-in.
        stage: u64,
        /// From where.
        offset: u64,
    },
    /// From the coordinator: show the prepared dataset in place of the one it replaces. Reply: `Done`.
    Commit {
        /// The stage-in.
        stage: u64,
        /// What it replaces.
        replaces: Option<DatasetId>,
    },
    /// From the coordinator: all nodes show it; give up what it replaced, and all else of the stage-in. Reply: `Done`.
    Settle {
        /// The stage-in.
        stage: u64,
    },
    /// From the coordinator: forget the stage-in and all that came of it; show again what it replaced. Reply: `Done`.
    Abort {
        /// The stage-in.
        stage: u64,
    },
    /// Tell of yourself. Reply: `Status`.
    Status,
    /// From the node that the user told it: how to read ahead and what to keep. Reply: `Done`.
    Tune(Policy),
    /// From the node above in the tree: who all nodes are. Meet them, and tell those below. Reply: `Joined`.
    Join {
        /// Every node's address, in order.
        addresses: Vec<String>,
        /// How to try to reach them: by RDMA, with what is not as it should be, or by TCP, and why.
        network: Result<Option<String>, String>,
    },
    /// From the node above in the tree: how all reach each other from now on. Tell those below. Reply: `Done`.
    Agree(Result<Option<String>, String>),
    /// From the node that the user told it: end the session. Reply: `Ended`, then the server ends.
    End,
}

/// What a server answers.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Reply {
    /// The node and all below it have met their peers.
    Joined {
        /// Those that are not reached in the way that was tried, in words.
        fallen_back: Vec<String>,
    },
    /// The stage-in is on its way; ask how it goes, or it is cancelled.
    Followed {
        /// Its number among those that other nodes asked for.
        number: u64,
    },
    /// What happened next, if anything did.
    Told(Option<Box<Event>>),
    /// The node serves no longer.
    Ended {
        /// Bytes given up on its data dirs.
        freed_bytes: u64,
    },
    /// Done; bytes, if any, lie in the slots.
    Done,
    /// The wanted bytes lie in the slot.
    Bytes {
        /// Their CRC32C.
        checksum: u32,
    },
    /// The wanted chunks lie in their slots, but for these, which are not here.
    Read {
        /// By their place in the request.
        missing: Vec<u32>,
    },
    /// The blocks are stored, or will be before `Finish` is answered. Without a number none of them is, for there is no room, and
    /// they go to the next node on the ring.
    Shipped {
        /// The first block's number among all that arrived here; the others' follow.
        arrival: Option<u32>,
    },
    /// The offered bytes are not those that were read from the source; nothing of them is stored. Look at your own, and send
    /// them again.
    Damaged(Damaged),
    /// A unit to read, or several small ones.
    Units(Vec<Unit>),
    /// There is none now, but there may be: ask again.
    Wait,
    /// There is none, and will be none.
    NoUnit,
    /// The stage-in is over, by a failure elsewhere or by its user. To a report: it has become a dataset; give up what that
    /// replaced.
    Stop,
    /// To a report: the stage-in goes on. So many files were found on all nodes.
    Go {
        /// Each takes room in the catalog, which every node will have.
        files: u64,
        /// Paths to look for.
        questions: Vec<Question>,
    },
    /// To a report: the stage-in has failed; forget all of it, also if it is shown already.
    Undone,
    /// Lengths of this node's runs.
    Runs {
        /// In bytes, one a run.
        lens: Vec<u64>,
        /// Counted since the last report.
        counted: Counted,
    },
    /// What a node says of itself.
    Status(Box<NodeStatus>),
    /// It could not be done.
    Failed {
        /// For the user, naming the place.
        reason: String,
    },
}

/// A block as it is shipped.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShippedBlock {
    /// Its length.
    pub len: u32,
    /// CRC32C of its bytes as they were read from the source.
    pub checksum: u32,
    /// Blocks are stored in the order of these: random numbers, the same for what is to lie together.
    pub shuffle: u64,
    /// Of a sample's first block.
    pub rival: Rival,
}

/// Which sources must not have a path in common: those of one pattern or list, but each with itself.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rivalry {
    /// The pattern's number, from 1; 0 for a source that has no rivals.
    pub pattern: u32,
    /// The number of the file or directory that was found by it.
    pub given: u32,
}

/// What an owner compares of a sample's path.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rival {
    /// Hash of the path, seeded by the pattern.
    pub hash: u64,
    /// As of [`Rivalry`].
    pub pattern: u32,
    /// As of [`Rivalry`].
    pub given: u32,
}

/// Which samples have this path?
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// Its hash.
    pub hash: u64,
    /// Seeded by this pattern.
    pub pattern: u32,
}

/// A sample that has.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// As asked.
    pub hash: u64,
    /// The path.
    pub path: Vec<u8>,
    /// Its source.
    pub source: u32,
    /// Which handing-out of a unit found it.
    pub ticket: u32,
    /// A hash of its size and checksums.
    pub content: u64,
}

/// A shipped block, or a piece of one, that is not what was read from the source.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged {
    /// Its place in the batch.
    pub at: u32,
    /// The checksum that was sent with it.
    pub expected: u32,
    /// The checksum of what arrived.
    pub found: u32,
}

/// A piece of a source, for one worker.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Number of its source.
    pub source: u32,
    /// Which handing-out this is: a range that was begun at a wrong place is handed out again.
    pub ticket: u32,
    /// The directory of the dataset that its names go below.
    pub prefix: Vec<u8>,
    /// Of its source.
    pub rivalry: Rivalry,
    /// What to read.
    pub work: Work,
}

/// What a unit is.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// A whole tar archive, compressed.
    Tar {
        /// Its path.
        path: Vec<u8>,
        /// How it is compressed.
        compression: Compression,
    },
    /// The members of a plain tar whose headers begin in a range.
    TarRange(TarRange),
    /// Some members of a zip.
    Zip(ZipPart),
    /// Some entries of a directory tree, or a single file.
    Tree {
        /// The tree's root.
        root: Vec<u8>,
        /// Paths below it.
        entries: Vec<TreeEntry>,
    },
}

impl Work {
    /// The source, or the root of the tree.
    pub fn path(&self) -> &[u8] {
        match self {
            Self::Tar { path, .. } => path,
            Self::TarRange(range) => &range.path,
            Self::Zip(part) => &part.path,
            Self::Tree { root, .. } => root,
        }
    }
}

/// A file as it was when it was looked at: by these one tells that it was changed.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Its length in bytes.
    pub size: u64,
    /// Modification time, whole seconds.
    pub mtime_s: i64,
    /// And nanoseconds.
    pub mtime_ns: u32,
    /// Time of the last change of the inode, whole seconds: who changes a file can put its modification time back, but not this.
    pub ctime_s: i64,
    /// And nanoseconds.
    pub ctime_ns: u32,
}

/// A range of a plain tar.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TarRange {
    /// The archive.
    pub path: Vec<u8>,
    /// As the coordinator saw it.
    pub version: Version,
    /// Where the range begins; the one before ends there.
    pub from: u64,
    /// Where it ends.
    pub to: u64,
    /// Where its first member begins, if that is known; else it is to be found.
    pub start: Option<TarPosition>,
}

/// Between two members of a tar.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct TarPosition {
    /// Offset in the archive.
    pub offset: u64,
    /// The records of global extended headers that are in force.
    pub globals: Vec<u8>,
}

/// What a worker met in a range.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeReport {
    /// Where it began: the first header; `None` if there was none.
    pub first: Option<u64>,
    /// Where the next range's first member begins; `None` after the archive's end.
    pub next: Option<TarPosition>,
    /// Why it could not be read to its end. That matters only if it was begun at the right place.
    pub failure: Option<String>,
}

/// Members of a zip: a piece of its central directory.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ZipPart {
    /// The archive.
    pub path: Vec<u8>,
    /// As the coordinator saw it.
    pub version: Version,
    /// Records of the central directory, as they stand there.
    pub records: Vec<u8>,
    /// Offset of the first of them in the archive.
    pub offset: u64,
    /// What stands before the archive in its file: offsets within do not count it.
    pub shift: u64,
}

/// An entry of a directory tree, as the coordinator's walk saw it.
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
    /// Time of the last change of its inode, whole seconds.
    pub ctime_s: i64,
    /// And nanoseconds.
    pub ctime_ns: u32,
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
    /// The unit's.
    pub ticket: u32,
    /// Bytes of its source that were read for it.
    pub source_bytes: u64,
    /// Of a range of a tar.
    pub range: Option<RangeReport>,
    /// What was met.
    pub counts: Counts,
    /// What was found must not count: its source changed meanwhile.
    pub withdrawn: bool,
}
