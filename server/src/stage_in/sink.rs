//! Delivers a worker's blocks: to this node's segments if this node owns them, and otherwise to their owner, in offers.
//!
//! This is the one place where a node treats itself differently from a peer, for speed: [`OwnNode`] gathers a batch directly in
//! the memory from which the batch is written to a drive. An offer would have to copy the batch into that memory. Everything
//! without bulk bytes, such as reserving room, goes through [`Peers`](crate::peers::Peers) for every owner.

use std::error::Error;
use std::sync::Arc;

use dayfly_meta::catalog::StoredBlock;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BATCH_LEN_MAX, SHIP_ATTEMPTS_MAX};
use dayfly_meta::wire::peer::{Damaged, NodeStageInReply, NodeStageInRequest, OfferReply, OfferRequest, RejectionKind, Rival};
use dayfly_stagein::StageInError;
use dayfly_stagein::pipeline::{Batch, BlockPiece, Delivery, Reserved, Sink};
use dayfly_transport::{Region, Slot};
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::{NodeStageIn, NodeStageInError};
use crate::ingest::{IngestError, Stored, check};
use crate::peers::{Patience, PeerError};

type Outcome = Result<Delivery<Slot>, StageInError>;

/// The owner of blocks, as seen by a worker of this node.
trait Owner {
    /// Returns memory to gather a batch in; `None` if all memory that this worker may have is in use.
    fn buffer(&self) -> Result<Option<Slot>, StageInError>;

    /// Moves a batch to the owner.
    fn store_batch(&self, batch: Batch<Slot>) -> BoxFuture<'static, Outcome>;

    /// Moves a piece of a large block to the owner.
    fn store_piece(&self, piece: BlockPiece<Slot>) -> BoxFuture<'static, Outcome>;
}

/// This node: batches are gathered where batches of other nodes land, and stay there until they are written.
struct OwnNode {
    stage_in: Arc<NodeStageIn>,
}

impl Owner for OwnNode {
    fn buffer(&self) -> Result<Option<Slot>, StageInError> {
        let Self { stage_in } = self;
        let slot = stage_in.landing_slot(BATCH_LEN_MAX as u64);
        let slot = stage_in.context.blocking.wait_for(stage_in.unless_cancelled(slot))?;
        slot.map(Some).map_err(|error| not_stored(stage_in.context.node, error))
    }

    fn store_batch(&self, batch: Batch<Slot>) -> BoxFuture<'static, Outcome> {
        let (stage_in, node) = (self.stage_in.clone(), self.stage_in.context.node);
        Box::pin(async move {
            let (slot, table) = batch.into_parts();
            let stored = stage_in.store_batch(table.blocks.as_slice().into(), slot, table.len).await;
            match stored.map_err(|error| not_stored(node, error))? {
                Stored::At(first_arrival) => Ok(Delivery::Stored(first_arrival, table)),
                Stored::Full(slot) => Ok(Delivery::Full(node, Batch::from_parts(slot, table))),
            }
        })
    }

    fn store_piece(&self, piece: BlockPiece<Slot>) -> BoxFuture<'static, Outcome> {
        let (stage_in, node) = (self.stage_in.clone(), self.stage_in.context.node);
        let BlockPiece { buffer, len, arrival, offset, checksum, .. } = piece;
        Box::pin(async move {
            let stored = stage_in.store_piece((arrival, offset), checksum, buffer, len).await;
            stored.map(|()| Delivery::Piece).map_err(|error| not_stored(node, error))
        })
    }
}

/// Another node, to which bytes go in offers.
struct PeerNode {
    stage_in: Arc<NodeStageIn>,
    owner: NodeId,
    shipping: Region,
}

impl Owner for PeerNode {
    fn buffer(&self) -> Result<Option<Slot>, StageInError> {
        Ok(self.shipping.slot(BATCH_LEN_MAX as u64))
    }

    fn store_batch(&self, batch: Batch<Slot>) -> BoxFuture<'static, Outcome> {
        let (stage_in, owner) = (self.stage_in.clone(), self.owner);
        Box::pin(async move {
            let (slot, table) = batch.into_parts();
            let request = OfferRequest::Batch { stage_in: stage_in.number, blocks: table.blocks.clone() };
            let check = |bytes: &[u8]| check::batch(&table.blocks, bytes);
            match offer(&stage_in, owner, &request, (slot, table.len), check).await {
                Ok((OfferReply::Stored { first_arrival }, _)) => {
                    stage_in.monitor.count_shipped(table.len as u64);
                    Ok(Delivery::Stored(first_arrival, table))
                }
                Ok((OfferReply::NoRoom, slot)) => Ok(Delivery::Full(owner, Batch::from_parts(slot, table))),
                Ok(_) => Err(ship_error(owner, PeerError::InvalidAnswer(owner))),
                Err(failure) => failure.absent(owner, table.members),
            }
        })
    }

    fn store_piece(&self, piece: BlockPiece<Slot>) -> BoxFuture<'static, Outcome> {
        let (stage_in, owner) = (self.stage_in.clone(), self.owner);
        let BlockPiece { buffer, len, member, arrival, offset, checksum } = piece;
        Box::pin(async move {
            let request = OfferRequest::Piece { stage_in: stage_in.number, arrival, offset, checksum };
            match offer(&stage_in, owner, &request, (buffer, len), |bytes| check::piece(checksum, bytes)).await {
                Ok((OfferReply::PieceStored, _)) => {
                    stage_in.monitor.count_shipped(len as u64);
                    Ok(Delivery::Piece)
                }
                Ok(_) => Err(ship_error(owner, PeerError::InvalidAnswer(owner))),
                Err(failure) => failure.absent(owner, vec![member]),
            }
        })
    }
}

/// Offers bytes to their owner, until the owner is lost. If they arrive damaged, they are sent again, unless they have changed in this
/// node's memory since they were read from the source.
async fn offer(
    stage_in: &NodeStageIn,
    owner: NodeId,
    request: &OfferRequest,
    (slot, len): (Slot, usize),
    check: impl Fn(&[u8]) -> Result<(), Damaged>,
) -> Result<(OfferReply, Slot), OfferFailure> {
    let (peers, deadlines) = (&stage_in.context.peers, stage_in.deadlines());
    let (mut payload, mut patience) = (Some(slot), Patience::new(deadlines.offer));
    let mut attempts_left = SHIP_ATTEMPTS_MAX;
    while attempts_left > 0 {
        match (peers.offer(owner, request, &mut payload, len).await, payload.take()) {
            (Ok(OfferReply::Damaged(_)), Some(slot)) => {
                check(&slot[..len]).map_err(|damaged| OfferFailure::Other(corrupted(stage_in.context.node, damaged)))?;
                attempts_left -= 1;
                payload = Some(slot);
            }
            (Ok(reply), Some(slot)) => return Ok((reply, slot)),
            (Ok(_), None) => return Err(OfferFailure::Other(ship_error(owner, PeerError::InvalidAnswer(owner)))),
            // Either node may have stood still: the owner says that bytes have not arrived if this node did. If the owner has stored them,
            // and only its answer was lost, nothing will refer to that copy.
            (Err(error), Some(slot)) if error.is_absence() && peers.should_ask_again(owner, &mut patience) => {
                payload = Some(slot);
                patience.pause(deadlines.progress_interval).await;
            }
            (Err(error), _) if is_absent(&error) => return Err(OfferFailure::Absent(ship_error(owner, error))),
            (Err(error), _) => return Err(OfferFailure::Other(ship_error(owner, error))),
        }
    }
    let reason = format!(
        "a batch arrived there damaged {SHIP_ATTEMPTS_MAX} times in a row; that node's network card or memory, \
         or the network in between, is at fault"
    );
    Err(OfferFailure::Other(ship_error(owner, reason)))
}

/// Why an offer was not taken.
enum OfferFailure {
    /// The owner does not answer, or takes no part in the stage-in anymore.
    Absent(StageInError),
    Other(StageInError),
}

impl OfferFailure {
    fn absent(self, node: NodeId, members: Vec<(usize, u32)>) -> Outcome {
        match self {
            Self::Absent(error) => Ok(Delivery::Absent { node, members, error }),
            Self::Other(error) => Err(error),
        }
    }
}

/// Returns whether an owner is gone from the stage-in. One that was lost and has returned takes no part in it.
fn is_absent(error: &PeerError) -> bool {
    error.is_absence() || matches!(error, PeerError::Rejected { rejection, .. } if rejection.kind == RejectionKind::NoSuchStageIn)
}

fn ship_error(node: NodeId, cause: impl Into<Box<dyn Error + Send + Sync>>) -> StageInError {
    StageInError::Ship { node, cause: cause.into() }
}

/// Returns why this node did not take a batch of its own worker.
fn not_stored(node: NodeId, error: NodeStageInError) -> StageInError {
    match error {
        NodeStageInError::Ingest(IngestError::Damaged(damaged)) => corrupted(node, damaged),
        error => ship_error(node, error),
    }
}

fn corrupted(node: NodeId, Damaged { expected, found, .. }: Damaged) -> StageInError {
    StageInError::Corrupted { node, expected, found }
}

/// One worker's sink.
pub(super) struct NodeSink {
    stage_in: Arc<NodeStageIn>,
    /// Memory for batches on their way to other nodes.
    shipping: Region,
    runtime: Handle,
    under_way: JoinSet<Outcome>,
}

impl NodeSink {
    /// Takes memory for the batches of one worker.
    pub(super) fn new(stage_in: Arc<NodeStageIn>, batches: usize, runtime: Handle) -> Result<Self, StageInError> {
        let context = &stage_in.context;
        let shipping = context.transport.region((BATCH_LEN_MAX * batches) as u64);
        let shipping = shipping.map_err(|error| ship_error(context.node, format!("no memory for batches: {error}")))?;
        Ok(Self { stage_in, shipping, runtime, under_way: JoinSet::new() })
    }

    fn owner(&self, node: NodeId) -> Box<dyn Owner> {
        let stage_in = self.stage_in.clone();
        if node == self.stage_in.context.node {
            Box::new(OwnNode { stage_in })
        } else {
            Box::new(PeerNode { stage_in, owner: node, shipping: self.shipping.clone() })
        }
    }
}

impl Sink for NodeSink {
    type Buffer = Slot;

    fn buffer(&mut self, owner: NodeId) -> Result<Option<Slot>, StageInError> {
        self.owner(owner).buffer()
    }

    fn ship(&mut self, owner: NodeId, batch: Batch<Slot>) -> Result<(), StageInError> {
        self.under_way.spawn_on(self.owner(owner).store_batch(batch), &self.runtime);
        Ok(())
    }

    fn ship_piece(&mut self, owner: NodeId, piece: BlockPiece<Slot>) -> Result<(), StageInError> {
        self.under_way.spawn_on(self.owner(owner).store_piece(piece), &self.runtime);
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.under_way.len()
    }

    fn next_delivery(&mut self) -> Outcome {
        let Self { stage_in, under_way, .. } = self;
        // Each offer has a deadline of its own. If a drive of this node hangs, the coordinator's deadline ends the stage-in,
        // which cancels this wait.
        match stage_in.context.blocking.wait_for(stage_in.unless_cancelled(under_way.join_next()))? {
            Some(Ok(outcome)) => outcome,
            Some(Err(error)) => Err(ship_error(stage_in.context.node, error)),
            None => Ok(Delivery::Piece),
        }
    }

    fn reserve(&mut self, owner: NodeId, block_len: u64, rival: Rival) -> Result<Reserved, StageInError> {
        let stage_in = &self.stage_in;
        let request = NodeStageInRequest::Reserve { stage_in: stage_in.number, block_len, rival };
        // If an answer was lost, nothing will refer to the room that it offered.
        let asking = stage_in.context.peers.ask_until_lost(owner, request);
        match stage_in.context.blocking.wait_for(stage_in.unless_cancelled(asking))? {
            Ok(NodeStageInReply::Reserved { arrival }) => Ok(arrival.map_or(Reserved::Full, Reserved::At)),
            Err(error) if owner != stage_in.context.node && is_absent(&error) => Ok(Reserved::Absent),
            Ok(_) => Err(ship_error(owner, PeerError::InvalidAnswer(owner))),
            Err(error) => Err(ship_error(owner, error)),
        }
    }

    fn keep(
        &mut self,
        len: u64,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), StageInError>,
    ) -> Result<Option<StoredBlock>, StageInError> {
        let NodeStageIn { context, kept, .. } = &*self.stage_in;
        let Some(mut slot) = context.arena.spare(len) else { return Ok(None) };
        let Some(arrival) = kept.next() else { return Ok(None) };
        fill(&mut slot)?;
        context.arena.keep(self.stage_in.dataset(), arrival, slot);
        Ok(Some(StoredBlock { owner: context.node, arrival }))
    }
}
