//! The errors with which the coordinator fails a stage-in. The user sees their messages.

use std::error::Error;
use std::io;
use std::sync::Arc;

use dayfly_meta::catalog::BuildError;
use dayfly_meta::catalog::resolve::ResolveError;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::DATASETS_MAX;
use dayfly_meta::text::show_bytes;
use dayfly_meta::wire::peer::{Rejection, RejectionKind};
use dayfly_stagein::NO_ROOM;

use super::conflicts::PathConflict;
use crate::blocking::JobLost;
use crate::peers::{PeerError, Peers};
use crate::room::RoomError;
use crate::stage_in::NodeStageInError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CoordinatorError {
    #[error("canceled, because the command that started the stage-in has ended, or its node does not ask for events anymore")]
    Cancelled,
    /// Nobody is left who waits for the stage-in.
    #[error("node {0}, on which this stage-in was started, was lost meanwhile; start the stage-in again")]
    AskerLost(NodeId),
    #[error("'{0}' cannot be the path of a dataset: it has an empty, '.' or '..' component, or none at all")]
    InvalidTarget(String),
    #[error("another stage-in to '{0}' is running; wait until it has ended")]
    TargetClaimed(String),
    /// A dataset is at the target, above or below it.
    #[error("{0}")]
    TargetTaken(String),
    #[error("a session has at most {DATASETS_MAX} datasets; replace one with --replace, or start another session")]
    TooManyDatasets,
    #[error(
        "the sources take at least {}, and all nodes together have {} free ({}); {}{MORE_ROOM}",
        show_bytes(*needed), show_bytes(free.iter().sum()), by_node(free),
        if *can_be_left { LEAVE } else { UNPACK }
    )]
    NotEnoughRoom { needed: u64, free: Vec<u64>, can_be_left: bool },
    #[error(
        "{copies} copies of the samples take at least {}, and all nodes together have {} free ({}); use fewer --copies, or {MORE_ROOM}",
        show_bytes(*needed), show_bytes(free.iter().sum()), by_node(free)
    )]
    NotEnoughRoomForCopies { copies: u16, needed: u64, free: Vec<u64> },
    #[error(
        "with {copies} copies, node {node} would hold about {}, and has {} free; use fewer --copies, or {MORE_ROOM}",
        show_bytes(*needed), show_bytes(*free)
    )]
    NodeTooSmallForCopies { copies: u16, node: usize, needed: u64, free: u64 },
    #[error(
        "--decoder-memory {} is more than the memory for stage-ins on node {node}, {}; start the session with a larger \
         --stage-in-memory",
        show_bytes(*wanted), show_bytes(*limit)
    )]
    TooMuchDecoderMemory { wanted: u64, limit: u64, node: NodeId },
    #[error("--copies {copies} needs at least {copies} nodes, and the session has {nodes}")]
    TooManyCopies { copies: u16, nodes: usize },
    #[error(
        "each node needs about {} for the catalog, and node {node} has {} free; {MORE_ROOM}",
        show_bytes(*needed), show_bytes(*free)
    )]
    NoCatalogRoom { needed: u64, node: usize, free: u64 },
    /// A node found no room on any node. `free` is from the start of the stage-in.
    #[error(
        "{cause}; {} were stored, and all nodes together had {} free ({}); {}{MORE_ROOM}",
        show_bytes(*stored), show_bytes(free.iter().sum()), by_node(free), if *is_required { REQUIRED } else { UNPACK }
    )]
    NoRoomLeft { cause: Arc<CoordinatorError>, stored: u64, free: Vec<u64>, is_required: bool },
    #[error(
        "node {coordinator}, which coordinates stage-ins, has not reached node {node} for {seconds} s, and the node is not declared \
         lost: {cause}; check the network between the two nodes"
    )]
    OutOfReach {
        node: NodeId,
        coordinator: NodeId,
        seconds: u64,
        #[source]
        cause: PeerError,
    },
    #[error("a stage-in needs all nodes: {0}")]
    NodeMissing(#[source] PeerError),
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// A node has failed, and its name precedes the cause unless the session has only one node.
    #[error("{}{cause}", node.map_or_else(String::new, |node| format!("node {node}: ")))]
    OnNode {
        node: Option<NodeId>,
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    #[error("node {node}{} was lost during the stage-in", address.map_or_else(String::new, |address| format!(" ({address})")))]
    NodeLost { node: NodeId, address: Option<std::net::SocketAddr> },
    #[error(
        "node {coordinator}, which coordinates the stage-in, has not heard from node {node} for {seconds} s, and the node is not declared \
         lost, so it has given up on the stage-in; check the network between the two nodes"
    )]
    NodeSilent { node: NodeId, coordinator: NodeId, seconds: u64 },
    #[error("no progress on any node for {seconds} s (the session's --stage-in-timeout); it waited for: {waits_for}")]
    Stalled { seconds: u64, waits_for: String },
    /// The sources have files, and the dataset would have none.
    #[error("no sample is left of the sources: {}", what_left_out(*.unselected, *.refused, *.skipped))]
    NothingLeft { unselected: u64, refused: u64, skipped: u64 },
    /// An assigned unit could not be read to its end.
    #[error("{0}")]
    UnitFailed(String),
    #[error(transparent)]
    PathConflict(#[from] PathConflict),
    #[error("cannot merge what was found: {0}")]
    Merge(#[source] io::Error),
    #[error(transparent)]
    Links(#[from] ResolveError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Room(#[from] RoomError),
    #[error(transparent)]
    OwnPart(#[from] NodeStageInError),
    #[error("'{0}' was replaced at once by another stage-in")]
    ReplacedAtOnce(String),
    #[error("node {0} failed unexpectedly while it coordinated the stage-in; see its log")]
    Panicked(NodeId),
    #[error("this node was lost while it coordinated the stage-in")]
    StoodDown,
    #[error("this node, which coordinates the stage-in, has not heard from the supervisor for {0} s")]
    CutOff(f64),
    #[error("this session cannot number any more stage-ins; start another session")]
    NoNumbersLeft,
    #[error(transparent)]
    JobLost(#[from] JobLost),
    /// The first failure of a stage-in. Several parts of the coordinator share this error.
    #[error(transparent)]
    Shared(Arc<CoordinatorError>),
}

/// What to do if nodes are full.
const MORE_ROOM: &str =
    "start the session on more nodes, allow more with --capacity, add drives with --data-dir, or stage in less";
/// What else to do if samples must be stored.
const UNPACK: &str = "samples of compressed tars and of archives within archives must be stored, while those of plain tars, zips and \
                      directories can be left where they are; ";
/// What else to do if the samples that do not fit can be left on the parallel file system.
const LEAVE: &str = "without --require-fit, a part is stored and the rest is read from the sources; or ";
/// What else to do if all samples were to be stored. All nodes together may have room for them, and none of them for a large one.
const REQUIRED: &str = "each block of a sample must fit onto one node; without --require-fit, samples of plain tars, zips and \
                        directories that do not fit are read from these; or ";
/// The most nodes whose free bytes a message shows.
const NODES_SHOWN_MAX: usize = 8;

/// Shows the free bytes of each node.
fn by_node(free: &[u64]) -> String {
    let shown = free.iter().take(NODES_SHOWN_MAX).enumerate().map(|(node, free)| format!("node {node}: {}", show_bytes(*free)));
    let rest = if free.len() > NODES_SHOWN_MAX { ", ..." } else { "" };
    shown.collect::<Vec<_>>().join(", ") + rest
}

/// Says what left out all samples of a stage-in.
fn what_left_out(unselected: u64, refused: u64, skipped: u64) -> String {
    let causes = [
        (unselected, "left out by --include, --exclude or --strip-components"),
        (refused, "refused, because their paths cannot be stored"),
        (skipped, "not readable"),
    ];
    let causes = causes
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, cause)| format!("{count} {} {cause}", if *count == 1 { "is" } else { "are" }));
    causes.collect::<Vec<_>>().join(", ")
}

impl CoordinatorError {
    /// Returns whether the cause is that nodes are full.
    fn is_for_room(&self) -> bool {
        match self {
            Self::Shared(error) => error.is_for_room(),
            Self::OnNode { cause, .. } => {
                cause.downcast_ref::<Rejection>().is_some_and(|rejection| rejection.kind == RejectionKind::NoRoom)
            }
            Self::Peer(PeerError::Rejected { rejection, .. }) => rejection.kind == RejectionKind::NoRoom,
            // Only the text of such a failure reaches the coordinator.
            Self::UnitFailed(reason) => reason.contains(NO_ROOM),
            _ => false,
        }
    }

    /// Returns whether the cause is that a node is lost, does not answer or has left the stage-in, so that another attempt may
    /// succeed.
    pub(super) fn is_absence(&self) -> bool {
        // A node leaves the stage-in if its coordinator does not answer for a while, or if a new server takes the node's place.
        // The workers of a node that leaves may say so first.
        let has_left = |rejection: &Rejection| matches!(rejection.kind, RejectionKind::NoSuchStageIn | RejectionKind::Cancelled);
        match self {
            Self::Shared(error) => error.is_absence(),
            Self::NodeLost { .. } | Self::NodeSilent { .. } | Self::StoodDown => true,
            Self::Peer(PeerError::Rejected { rejection, .. }) if has_left(rejection) => true,
            Self::NodeMissing(error) | Self::Peer(error) => error.is_absence(),
            Self::OnNode { cause, .. } => cause
                .downcast_ref::<Rejection>()
                .is_some_and(|rejection| rejection.kind == RejectionKind::PeerFailed || has_left(rejection)),
            Self::Merge(error) | Self::Links(ResolveError::Read(error)) => {
                let node_failed = error.get_ref().and_then(|cause| cause.downcast_ref::<Self>());
                node_failed.is_some_and(Self::is_absence)
            }
            _ => false,
        }
    }

    /// Lets an error that counts participants count nodes. `free` has the room of each node.
    pub(super) fn among(self, participants: &[NodeId], free: &[u64]) -> Self {
        match self {
            Self::NoCatalogRoom { needed, node, free } => {
                Self::NoCatalogRoom { needed, node: participants.get(node).map_or(node, |node| node.index()), free }
            }
            Self::NotEnoughRoom { needed, can_be_left, .. } => Self::NotEnoughRoom { needed, free: free.to_vec(), can_be_left },
            Self::NotEnoughRoomForCopies { copies, needed, .. } => {
                Self::NotEnoughRoomForCopies { copies, needed, free: free.to_vec() }
            }
            Self::NodeTooSmallForCopies { copies, node, needed, free } => {
                let node = participants.get(node).map_or(node, |node| node.index());
                Self::NodeTooSmallForCopies { copies, node, needed, free }
            }
            other => other,
        }
    }

    /// Adds amounts to an error of nodes that are full: what was stored, and what was free on each node at the start. `is_required`
    /// says whether the user wanted all samples to be stored.
    pub(super) fn with_amounts(self, stored: u64, free: &[u64], is_required: bool) -> Self {
        match self.is_for_room() {
            true => Self::NoRoomLeft { cause: self.share(), stored, free: free.to_vec(), is_required },
            false => self,
        }
    }

    /// Returns the error for a failure on `node`.
    pub(super) fn on_node(peers: &Peers, node: NodeId, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::OnNode { node: (peers.count() > 1).then_some(node), cause: cause.into() }
    }

    /// Makes the error shareable. A shared error stays as it is.
    pub(super) fn share(self) -> Arc<Self> {
        match self {
            Self::Shared(error) => error,
            error => Arc::new(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "if a node has given up its part because it could not reach the coordinator."
    #[test]
    fn a_stage_in_may_begin_again_without_a_node_that_has_left_it() {
        let failed = |kind| {
            let rejection = Rejection::new(kind, "the stage-in has ended on this node, or never began here");
            CoordinatorError::Peer(PeerError::Rejected { node: NodeId(3), rejection })
        };
        assert!(failed(RejectionKind::NoSuchStageIn).is_absence());
        assert!(failed(RejectionKind::PeerFailed).is_absence());
        assert!(!failed(RejectionKind::SourceFailed).is_absence());
    }

    #[test]
    fn a_stage_in_that_is_canceled_without_its_user_says_why_and_does_not_begin_again() {
        for error in [CoordinatorError::Cancelled, CoordinatorError::AskerLost(NodeId(3))] {
            let message = error.to_string();
            assert!(message.contains("node") && message.contains("stage-in"), "{message}");
            assert!(!error.is_absence());
        }
        assert!(CoordinatorError::AskerLost(NodeId(3)).to_string().starts_with("node 3, on which"));
    }
}
