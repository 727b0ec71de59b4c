//! Requests that tell a node's part of a stage-in what to do. All requests except `Reserve` come from the coordinator,
//! in the order of the variants.

use rkyv::{Archive, Deserialize, Serialize};

use super::{ListedDataset, Rival};
use crate::id::{DatasetId, NodeId};
use crate::stored_share::StoredShare;
use crate::wire::control::{Counted, Counts, Selection};
use crate::wire::status::Reads;

/// A request to a node's part of a stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum NodeStageInRequest {
    /// Evict cached blocks where other programs have filled a drive. Sent before a stage-in. Reply:
    /// [`NodeStageInReply::Done`].
    MakeHeadroom,
    /// A stage-in is beginning: make room for its blocks and start workers. Reply: [`NodeStageInReply::Done`].
    Begin {
        /// The stage-in's number, which the coordinator assigns.
        stage_in: u64,
        /// The number of the request; see [`CoordinatorRequest::Start`](super::CoordinatorRequest::Start).
        request: u64,
        /// What to take from the sources.
        selection: Selection,
        /// Seed of the placement, and of the order in which blocks are stored.
        seed: u64,
        /// Source bytes that this node may read per second.
        max_rate: Option<u64>,
        /// Free bytes on each node, in the order of the nodes. They are the nodes' weights in the
        /// placement.
        capacities: Vec<u64>,
        /// Which of the blocks that can be read again from their origins are stored; `None` if all blocks
        /// must be stored.
        stored_share: Option<StoredShare>,
        /// An estimate of the number of files. If not all blocks fit, room for their catalog is reserved
        /// at once.
        expected_files: u64,
    },
    /// Reserve room for a large block that will arrive in pieces. Comes from a worker of any node. Reply:
    /// [`NodeStageInReply::Reserved`].
    Reserve {
        /// The worker's stage-in.
        stage_in: u64,
        /// The block's length in bytes.
        block_len: u64,
        /// What the owner compares to find path conflicts.
        rival: Rival,
    },
    /// No unit is left: write out all blocks and report the sorted runs. Reply: [`NodeStageInReply::Finished`].
    Finish {
        /// The stage-in to finish.
        stage_in: u64,
    },
    /// Fetch the catalog from a node, check it, and fill the table of locations. Reply: [`NodeStageInReply::Done`].
    Prepare {
        /// The stage-in that made the catalog.
        stage_in: u64,
        /// The dataset's number.
        dataset: DatasetId,
        /// The dataset's root, below the prefix.
        target: Vec<u8>,
        /// A node that has the catalog.
        from: NodeId,
        /// Length of the catalog in bytes.
        len: u64,
        /// CRC32C of the catalog.
        checksum: u32,
        /// The dataset that this one replaces.
        replaces: Option<DatasetId>,
        /// What the stage-in has encountered.
        counts: Counts,
    },
    /// Copy blocks of which this node is a holder from their owners, in the background. Sent again and again, until all nodes are
    /// done. Reply: [`NodeStageInReply::Copying`].
    Copy {
        /// The stage-in that prepared the dataset.
        stage_in: u64,
        /// Whether the stage-in fails if there is no room for a copy.
        is_required: bool,
    },
    /// Make the prepared dataset visible, in place of the one that it replaces. Reply: [`NodeStageInReply::Done`].
    Commit {
        /// The stage-in that prepared the dataset.
        stage_in: u64,
        /// The coordinator's membership epoch. A node that knows a newer one rejects the request.
        epoch: u32,
    },
    /// The dataset is visible on all nodes: free what it replaced, and everything else that the
    /// stage-in still holds. Reply: [`NodeStageInReply::Done`].
    Settle {
        /// The stage-in that succeeded.
        stage_in: u64,
        /// The coordinator's membership epoch, as for `Commit`.
        epoch: u32,
    },
    /// The stage-in failed: forget all of it, and make visible again what it replaced. Reply:
    /// [`NodeStageInReply::Done`].
    Abort {
        /// The stage-in that failed.
        stage_in: u64,
        /// The coordinator's membership epoch, as for `Commit`.
        epoch: u32,
    },
    /// From a new coordinator: say how far each stage-in got here. From now on, the node rejects requests of older epochs.
    /// Reply: [`NodeStageInReply::Inquired`].
    Inquire {
        /// The coordinator's membership epoch.
        epoch: u32,
    },
}

/// The answer to a [`NodeStageInRequest`].
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum NodeStageInReply {
    /// The request was carried out.
    Done,
    /// How far stage-ins got on this node.
    Inquired {
        /// The stage-ins that have not ended here.
        open: Vec<u64>,
        /// The datasets that are visible here.
        visible: Vec<ListedDataset>,
    },
    /// Room for a large block.
    Reserved {
        /// The number that the block's pieces name, or `None` if no drive has room. In that case the block goes to the
        /// next candidate.
        arrival: Option<u32>,
    },
    /// How far a node has come with its copies.
    Copying {
        /// The blocks to copy, as far as the node has found them.
        wanted: Reads,
        /// The blocks that have been copied.
        copied: Reads,
        /// A number that grows as long as there is progress.
        steps: u64,
        /// Whether the node has copied all it can, and the copies are on its drives.
        is_done: bool,
    },
    /// All blocks are on the drives.
    Finished {
        /// Length of each sorted run in bytes.
        run_lens: Vec<u64>,
        /// What was counted since the last report.
        counted: Counted,
    },
}
