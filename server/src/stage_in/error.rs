//! The errors of a node's part of a stage-in.

use std::error::Error;
use std::io;
use std::sync::Arc;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::text::show_bytes;
use dayfly_meta::wire::peer::{Rejection, RejectionKind};
use dayfly_stagein::StageInError;

use crate::blocking::JobLost;
use crate::copies::CopyError;
use crate::ingest::IngestError;
use crate::membership::decision::OldEpoch;
use crate::peers::PeerError;
use crate::room::RoomError;
use crate::store::{Drive, PrepareError};

/// Why a node's part of a stage-in failed, or rejected a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodeStageInError {
    #[error("this node has ended its part of the stage-in, because it could not reach the coordinator")]
    NotRunning,
    /// Whether the dataset becomes visible is unknown here, so another attempt is as good as the first.
    #[error("the coordinator did not answer, so the stage-in ended on this node: {0}")]
    CoordinatorSilent(#[source] PeerError),
    #[error("the coordinator's roster has {theirs} nodes, and this node's roster has {ours}")]
    OtherRoster { theirs: usize, ours: usize },
    #[error("cannot begin a stage-in: {0}")]
    Begin(#[source] io::Error),
    #[error("a batch of {0} bytes was offered; the most is {BATCH_LEN_MAX}")]
    TooLong(u64),
    #[error("this node has no memory free for a batch; it is too busy, or its drives are too slow")]
    Busy,
    #[error("an offered batch did not arrive: {0}")]
    NotLanded(#[source] io::Error),
    #[error("there is no room for a batch, although room was made for it several times")]
    NoRoom,
    #[error(transparent)]
    Ingest(#[from] IngestError),
    #[error(transparent)]
    Room(#[from] RoomError),
    #[error(transparent)]
    Worker(#[from] StageInError),
    /// Shared by all requests that come after the failure.
    #[error(transparent)]
    Failed(Arc<NodeStageInError>),
    #[error("the workers have not finished yet")]
    NotFinished,
    #[error("this node has no run {0}")]
    NoSuchRun(u32),
    #[error("cannot read back a run or a catalog: {0}")]
    ReadBack(#[source] io::Error),
    #[error("the catalog is not on this node yet")]
    NoCatalog,
    #[error("there is no room for the catalog, which takes {}", show_bytes(*.0))]
    NoCatalogRoom(u64),
    #[error("cannot write the catalog: {0}")]
    WriteCatalog(#[source] io::Error),
    #[error("cannot read the catalog: {0}")]
    ReadCatalog(#[source] PeerError),
    #[error("node {from} has less of the catalog than the coordinator announced")]
    ShortCatalog { from: NodeId },
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error("cannot copy blocks from node {owner}: {error}")]
    Copy {
        owner: NodeId,
        #[source]
        error: CopyError,
    },
    #[error("node {owner} has no good copy of a block that it stored ({reason}); check its drives and its memory")]
    NoGoodCopy { owner: NodeId, reason: String },
    /// Only another attempt finds these samples again.
    #[error("node {owner} was lost before its samples of compressed archives had been copied")]
    LostUncopied { owner: NodeId },
    #[error("cannot write a copy of a block: {0}")]
    WriteCopy(#[source] io::Error),
    #[error("there is no room for a copy of {}; use fewer --copies", show_bytes(*.0))]
    NoCopyRoom(u64),
    #[error("no dataset was prepared")]
    NotPrepared,
    #[error(transparent)]
    OldEpoch(#[from] OldEpoch),
    #[error(transparent)]
    JobLost(#[from] JobLost),
}

impl NodeStageInError {
    fn kind(&self) -> RejectionKind {
        match self {
            // The stage-in begins again.
            Self::NotRunning | Self::LostUncopied { .. } => RejectionKind::NoSuchStageIn,
            Self::OtherRoster { .. } | Self::TooLong(_) | Self::NoSuchRun(_) => RejectionKind::Invalid,
            Self::NotFinished | Self::NoCatalog | Self::NotPrepared => RejectionKind::NotReady,
            Self::OldEpoch(_) => RejectionKind::OldEpoch,
            Self::Busy => RejectionKind::Busy,
            Self::NoRoom | Self::NoCatalogRoom(_) | Self::NoCopyRoom(_) => RejectionKind::NoRoom,
            Self::Begin(_) | Self::ReadBack(_) | Self::WriteCatalog(_) | Self::WriteCopy(_) => RejectionKind::DriveFailed,
            Self::NotLanded(_) | Self::ReadCatalog(_) | Self::ShortCatalog { .. } | Self::CoordinatorSilent(_) => {
                RejectionKind::PeerFailed
            }
            // This node has waited for the owner as long as it makes sense.
            Self::Copy { .. } | Self::NoGoodCopy { .. } => RejectionKind::Failed,
            Self::Ingest(error) => ingest_kind(error),
            Self::Worker(error) => worker_kind(error),
            Self::Prepare(error) => prepare_kind(error),
            Self::Failed(error) => error.kind(),
            Self::Room(RoomError::Free(_) | RoomError::Prepare(_)) => RejectionKind::DriveFailed,
            Self::Room(RoomError::JobLost(_)) | Self::JobLost(_) => RejectionKind::Failed,
        }
    }

    /// Makes the error shareable. A shared error stays as it is.
    pub(super) fn share(self) -> Arc<Self> {
        match self {
            Self::Failed(error) => error,
            error => Arc::new(error),
        }
    }
}

fn ingest_kind(error: &IngestError) -> RejectionKind {
    match error {
        IngestError::Damaged(_) => RejectionKind::Damaged,
        IngestError::Write(_) => RejectionKind::DriveFailed,
        _ => RejectionKind::Invalid,
    }
}

fn worker_kind(error: &StageInError) -> RejectionKind {
    match error {
        StageInError::Cancelled => RejectionKind::Cancelled,
        StageInError::Corrupted { .. } => RejectionKind::Damaged,
        StageInError::TempFile(_) => RejectionKind::DriveFailed,
        StageInError::NoRoom { .. } => RejectionKind::NoRoom,
        StageInError::Ship { cause, .. } | StageInError::NoAssignment { cause, .. } => exchange_kind(&**cause),
        _ => RejectionKind::SourceFailed,
    }
}

/// Returns the kind of a failed exchange with an owner or with the coordinator.
fn exchange_kind(cause: &(dyn Error + Send + Sync + 'static)) -> RejectionKind {
    if let Some(own) = cause.downcast_ref::<NodeStageInError>() {
        // This node is the owner. Its own failure is never the absence of a peer, which would begin the stage-in again.
        return own.kind();
    }
    match cause.downcast_ref() {
        // It was lost, and has returned or was replaced. It takes no part in the stage-in anymore.
        Some(PeerError::Rejected { rejection, .. }) if rejection.kind == RejectionKind::NoSuchStageIn => {
            RejectionKind::PeerFailed
        }
        // A peer that has answered says itself what failed.
        Some(PeerError::Rejected { rejection, .. }) => rejection.kind,
        Some(_) => RejectionKind::PeerFailed,
        None => RejectionKind::Failed,
    }
}

fn prepare_kind(error: &PrepareError) -> RejectionKind {
    match error {
        PrepareError::Catalog(_) | PrepareError::Checksum => RejectionKind::Damaged,
        PrepareError::Missing { .. } => RejectionKind::Failed,
        PrepareError::Write(_) => RejectionKind::DriveFailed,
    }
}

/// Adds the name of the data dir to the error of a temporary file there.
pub(crate) fn name_drive(drive: &Drive, error: StageInError) -> StageInError {
    match error {
        StageInError::TempFile(error) => StageInError::TempFile(drive.failure(error)),
        error => error,
    }
}

impl From<NodeStageInError> for Rejection {
    fn from(error: NodeStageInError) -> Self {
        Self::new(error.kind(), error)
    }
}

impl From<&NodeStageInError> for Rejection {
    fn from(error: &NodeStageInError) -> Self {
        Self::new(error.kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_in_may_begin_again_if_an_owner_has_returned_without_it_or_the_coordinator_was_silent() {
        let returned = Rejection::new(RejectionKind::NoSuchStageIn, "it never began here");
        let cause = PeerError::Rejected { node: NodeId(2), rejection: returned };
        let error = NodeStageInError::Worker(StageInError::Ship { node: NodeId(2), cause: Box::new(cause) });
        assert_eq!(error.kind(), RejectionKind::PeerFailed);
        let silent = NodeStageInError::CoordinatorSilent(PeerError::InvalidAnswer(NodeId(0)));
        assert_eq!(silent.kind(), RejectionKind::PeerFailed);
        assert!(silent.to_string().contains("node 0"), "{silent}");
        assert_eq!(NodeStageInError::Worker(StageInError::Cancelled).kind(), RejectionKind::Cancelled);
    }

    /// A stage-in begins again when a peer is absent. A failed drive, here or on a peer, must end it instead.
    #[test]
    fn a_failed_drive_is_never_taken_for_an_absent_peer() {
        let lost_data = || NodeStageInError::Ingest(IngestError::Write(io::Error::from_raw_os_error(5)));
        let rejected = |kind| PeerError::Rejected { node: NodeId(1), rejection: Rejection::new(kind, "") };
        let causes: [(Box<dyn Error + Send + Sync>, RejectionKind); 6] = [
            (lost_data().into(), RejectionKind::DriveFailed),
            (NodeStageInError::Failed(Arc::new(lost_data())).into(), RejectionKind::DriveFailed),
            (NodeStageInError::Busy.into(), RejectionKind::Busy),
            (rejected(RejectionKind::DriveFailed).into(), RejectionKind::DriveFailed),
            (PeerError::InvalidAnswer(NodeId(1)).into(), RejectionKind::PeerFailed),
            ("no memory for batches".into(), RejectionKind::Failed),
        ];
        for (cause, kind) in causes {
            let message = cause.to_string();
            let error = NodeStageInError::Worker(StageInError::Ship { node: NodeId(0), cause });
            assert_eq!(Rejection::from(error).kind, kind, "{message}");
        }
    }
}
