//! Where a worker's batches go: to this node's own segments, or by an offer to their owner.

use std::error::Error;
use std::sync::Arc;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BATCH_LEN_MAX, SHIP_ATTEMPTS_MAX};
use dayfly_meta::wire::peer::{Damaged, Reply, Request, Rival};
use dayfly_stagein::StageInError;
use dayfly_stagein::pipeline::{Batch, BlockPiece, Delivery, Sink};
use dayfly_transport::{Region, Slot};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::Stage;
use crate::ingest::{IngestError, Stored, check};
use crate::server::Server;

type Outcome = Result<Delivery<Slot>, StageInError>;

/// One worker's sink.
pub(super) struct ServerSink {
    server: Arc<Server>,
    stage: Arc<Stage>,
    shipping: Region,
    runtime: Handle,
    under_way: JoinSet<Outcome>,
}

impl ServerSink {
    /// Takes memory for the batches of one worker.
    pub(super) fn new(server: Arc<Server>, stage: Arc<Stage>, batches: usize, runtime: Handle) -> Result<Self, StageInError> {
        let shipping = server.transport().region((BATCH_LEN_MAX * batches) as u64);
        let no_memory = |error| failed(server.config().node, format!("no memory for batches: {error}"));
        let shipping = shipping.map_err(no_memory)?;
        Ok(Self { server, stage, shipping, runtime, under_way: JoinSet::new() })
    }

    fn is_here(&self, owner: NodeId) -> bool {
        owner == self.server.config().node
    }
}

/// Stores on this node what needs no offer.
async fn here(server: Arc<Server>, store: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
    let stored = server.blocking().run(store).await;
    stored.map_err(|error| failed(server.config().node, error))?
}

fn failed(node: NodeId, cause: impl Into<Box<dyn Error + Send + Sync>>) -> StageInError {
    StageInError::Ship { node, cause: cause.into() }
}

/// Why this very node did not take a batch of its own worker.
fn not_stored(me: NodeId, error: IngestError) -> StageInError {
    match error {
        IngestError::Damaged(damaged) => corrupted(me, damaged),
        error => failed(me, error),
    }
}

fn corrupted(me: NodeId, Damaged { expected, found, .. }: Damaged) -> StageInError {
    StageInError::Corrupted { node: me, expected, found }
}

/// Offers bytes to their owner. If they arrive damaged, they are sent again, unless it is here that they have changed since
/// they were read from the source.
async fn offer(
    server: &Server,
    owner: NodeId,
    request: &Request,
    (mut slot, len): (Slot, usize),
    check: impl Fn(&[u8]) -> Result<(), Damaged>,
) -> Result<(Reply, Slot), StageInError> {
    for _ in 0..SHIP_ATTEMPTS_MAX {
        let (reply, back) = server.peers().offer(owner, request, slot, len).await.map_err(|error| failed(owner, error))?;
        if !matches!(reply, Reply::Damaged(_)) {
            return Ok((reply, back));
        }
        check(&back[..len]).map_err(|damaged| corrupted(server.config().node, damaged))?;
        slot = back;
    }
    let way = "its network card, its memory or the network between is at fault";
    Err(failed(owner, format!("a batch arrived there damaged {SHIP_ATTEMPTS_MAX} times in a row; {way}")))
}

impl Sink for ServerSink {
    type Buffer = Slot;

    fn buffer(&mut self, owner: NodeId) -> Result<Option<Slot>, StageInError> {
        if !self.is_here(owner) {
            return Ok(self.shipping.slot(BATCH_LEN_MAX as u64));
        }
        // What stays here is put where what comes from others lands: it is kept there until it is written.
        let slot = self.stage.landing_slot(BATCH_LEN_MAX as u64);
        let slot = self.server.blocking().wait_for(self.stage.unless_cancelled(slot))?;
        slot.map(Some).map_err(|reason| failed(owner, reason))
    }

    fn ship(&mut self, owner: NodeId, batch: Batch<Slot>) -> Result<(), StageInError> {
        if self.is_here(owner) {
            let (server, stage) = (self.server.clone(), self.stage.clone());
            let store = async move {
                let (slot, table) = batch.into_parts();
                let stored = stage.store(&server, table.blocks.as_slice().into(), slot, table.len).await;
                match stored.map_err(|error| not_stored(owner, error))? {
                    Stored::At(first) => Ok(Delivery::Stored(first, table)),
                    Stored::Full(slot) => Ok(Delivery::Full(owner, Batch::from_parts(slot, table))),
                }
            };
            self.under_way.spawn_on(store, &self.runtime);
            return Ok(());
        }
        let (server, stage) = (self.server.clone(), self.stage.clone());
        let offer = async move {
            let (slot, table) = batch.into_parts();
            let request = Request::Ship { stage: stage.number(), blocks: table.blocks.clone() };
            let check = |bytes: &[u8]| check::batch(&table.blocks, bytes);
            match offer(&server, owner, &request, (slot, table.len), check).await? {
                (Reply::Shipped { arrival: Some(first) }, _) => {
                    stage.gauge().count_shipped(table.len as u64);
                    Ok(Delivery::Stored(first, table))
                }
                (Reply::Shipped { arrival: None }, slot) => Ok(Delivery::Full(owner, Batch::from_parts(slot, table))),
                _ => Err(failed(owner, "it answers what was not asked")),
            }
        };
        self.under_way.spawn_on(offer, &self.runtime);
        Ok(())
    }

    fn ship_piece(&mut self, owner: NodeId, piece: BlockPiece<Slot>) -> Result<(), StageInError> {
        let (server, stage) = (self.server.clone(), self.stage.clone());
        let BlockPiece { buffer, len, arrival, offset, checksum } = piece;
        if self.is_here(owner) {
            let store = move || {
                let stored = stage.ingest().store_piece(arrival, offset, checksum, &buffer[..len]);
                stored.map(|()| Delivery::Piece).map_err(|error| not_stored(owner, error))
            };
            self.under_way.spawn_on(here(self.server.clone(), store), &self.runtime);
            return Ok(());
        }
        let offer = async move {
            let request = Request::ShipPiece { stage: stage.number(), arrival, offset, checksum };
            match offer(&server, owner, &request, (buffer, len), |bytes| check::piece(checksum, bytes)).await? {
                (Reply::Done, _) => {
                    stage.gauge().count_shipped(len as u64);
                    Ok(Delivery::Piece)
                }
                _ => Err(failed(owner, "it answers what was not asked")),
            }
        };
        self.under_way.spawn_on(offer, &self.runtime);
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.under_way.len()
    }

    fn next_delivery(&mut self) -> Outcome {
        // Each offer has its own deadline; a drive of this node that stands still is met by the coordinator's, which cancels.
        match self.server.blocking().wait_for(self.stage.unless_cancelled(self.under_way.join_next()))? {
            Some(Ok(outcome)) => outcome,
            Some(Err(error)) => Err(failed(self.server.config().node, error)),
            None => Ok(Delivery::Piece),
        }
    }

    fn reserve(&mut self, owner: NodeId, block_len: u64, rival: Rival) -> Result<Option<u32>, StageInError> {
        if self.is_here(owner) {
            let reserved = self.stage.reserve(&self.server, block_len, rival);
            let reserved = self.server.blocking().wait_for(self.stage.unless_cancelled(reserved))?;
            return reserved.map_err(|reason| failed(owner, reason));
        }
        let request = Request::Reserve { stage: self.stage.number, block_len, rival };
        let asked = self.server.ask(owner, request, self.server.deadlines().request);
        match self.server.blocking().wait_for(self.stage.unless_cancelled(asked))? {
            Ok(Reply::Shipped { arrival }) => Ok(arrival),
            Ok(_) => Err(failed(owner, "it answers what was not asked")),
            Err(error) => Err(failed(owner, error)),
        }
    }
}
