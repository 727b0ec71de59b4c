//! Coordination: what nodes ask of the coordinator, for their users and for their workers.

use rkyv::{Archive, Deserialize, Serialize};

use super::{Rejection, Sighting, SuspectPath, Unit, UnitReport};
use crate::id::DatasetId;
use crate::wire::control::{Counted, Counts, Event, StageInRequest};
use crate::wire::status::Policy;

/// A request to the coordinator.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum CoordinatorRequest {
    /// Start a stage-in for a user of the asking node. Reply: [`CoordinatorReply::Started`].
    Start {
        /// A number that the asking node has given the request. If a stage-in begins again, the number stays the same.
        id: u64,
        /// What the user asks for.
        request: StageInRequest,
    },
    /// List the datasets of the session. Sent by a node that was lost and wants to be a member again, or is one again. Reply:
    /// [`CoordinatorReply::Datasets`].
    Datasets {
        /// The membership epoch that the asking node knows. A coordinator that does not know it yet could publish a dataset
        /// without the asking node after it has answered, so it rejects the request.
        epoch: u32,
    },
    /// Wait a moment for the next event of a stage-in that this node started. Reply: [`CoordinatorReply::Event`].
    NextEvent {
        /// The number from [`CoordinatorReply::Started`].
        subscription: u64,
        /// How many events have arrived so far. The coordinator repeats the last event if its answer was lost.
        received: u64,
    },
    /// Nobody is waiting for events anymore: cancel the stage-in if it is running. Reply: [`CoordinatorReply::Done`].
    Unsubscribe {
        /// The number from [`CoordinatorReply::Started`].
        subscription: u64,
    },
    /// Report finished units and ask for more. Reply: [`CoordinatorReply::Units`], [`CoordinatorReply::Wait`],
    /// [`CoordinatorReply::NoUnit`] or [`CoordinatorReply::Over`].
    NextUnits {
        /// The worker's stage-in.
        stage_in: u64,
        /// The worker's number on its node.
        worker: u16,
        /// The number of the worker's requests, this one included. One that is repeated keeps its number: what was assigned in the
        /// first answer, if that was lost, is assigned again.
        request: u64,
        /// Units that the worker has finished since its last request.
        finished: Vec<UnitReport>,
    },
    /// A node's regular report. Reply: [`CoordinatorReply::Continue`], [`CoordinatorReply::Settle`] or
    /// [`CoordinatorReply::Abort`].
    Report {
        /// The stage-in that the report is about.
        stage_in: u64,
        /// The number of the node's reports, this one included. One that is repeated keeps its number, and is counted once.
        report: u64,
        /// What was counted since the last report.
        progress: Counted,
        /// What the node's threads are waiting for, if nothing was counted.
        waits: Vec<String>,
        /// Path conflicts that this node, as an owner of blocks, suspects.
        suspects: Vec<SuspectPath>,
        /// Samples with suspect paths that the node's workers found.
        sightings: Vec<Sighting>,
    },
    /// The stage-in failed on this node. Reply: [`CoordinatorReply::Done`].
    Fail {
        /// The stage-in that failed.
        stage_in: u64,
        /// Why it failed.
        rejection: Rejection,
    },
}

/// A dataset of the session, as the coordinator lists it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct ListedDataset {
    /// The dataset's number.
    pub dataset: DatasetId,
    /// The number of the request that made it; see [`CoordinatorRequest::Start`].
    pub request: u64,
    /// The dataset's root, below the prefix.
    pub target: Vec<u8>,
    /// Length of its catalog in bytes.
    pub len: u64,
    /// CRC32C of its catalog.
    pub checksum: u32,
    /// What its stage-in encountered, without remarks.
    pub counts: Counts,
}

/// The answer to a [`CoordinatorRequest`].
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum CoordinatorReply {
    /// The coordinator has accepted the stage-in. The asker must keep asking for events, or the stage-in is canceled.
    Started {
        /// The number under which to ask for the stage-in's events.
        subscription: u64,
    },
    /// The next event, or `None` if nothing has happened yet.
    Event(Option<Box<Event>>),
    /// What a node must know to be a member.
    Datasets {
        /// All datasets of the session.
        datasets: Vec<ListedDataset>,
        /// How nodes prefetch and cache.
        policy: Policy,
    },
    /// The request was carried out.
    Done,
    /// Units to read: one, or several small ones.
    Units(Vec<Unit>),
    /// No unit is free now, but one may become free. Ask again.
    Wait,
    /// All units are finished.
    NoUnit,
    /// The stage-in has failed, or its user canceled it.
    Over,
    /// The stage-in is still running.
    Continue {
        /// Files found on all nodes so far. Each file takes room in the catalog, and every node will hold a copy
        /// of the catalog.
        files: u64,
        /// Paths to look for.
        suspects: Vec<SuspectPath>,
        /// How many source bytes per second the node may read, if the stage-in limits the rate. Those that are left read faster
        /// when a node is lost.
        max_rate: Option<u64>,
    },
    /// The stage-in has become a dataset on all nodes: free what it replaced.
    Settle,
    /// The stage-in has failed: forget all of it, even if its dataset is already visible on this node.
    Abort,
}
