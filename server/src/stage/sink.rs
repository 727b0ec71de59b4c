//! Where a worker's batches go: into this node's own segments, or by an offer to their owner.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use dayfly_meta::catalog::MemberKey;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BATCH_LEN_MAX, BATCHES_PER_WORKER, REQUEST_TIMEOUT};
use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_stagein::StageInError;
use dayfly_stagein::pipeline::{Batch, Settled, Sink};
use dayfly_transport::{Region, Slot};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::Stage;
use crate::server::Server;

type Outcome = Result<Settled<Slot>, StageInError>;

/// One worker's sink.
pub(super) struct ServerSink {
    server: Arc<Server>,
    stage: Arc<Stage>,
    shipping: Region,
    runtime: Handle,
    settled: VecDeque<Outcome>,
    under_way: JoinSet<Outcome>,
}

impl ServerSink {
    /// Takes memory for the batches of one worker.
    pub(super) fn new(server: Arc<Server>, stage: Arc<Stage>, runtime: Handle) -> io::Result<Self> {
        let shipping = server.transport().region((BATCH_LEN_MAX * BATCHES_PER_WORKER) as u64)?;
        Ok(Self { server, stage, shipping, runtime, settled: VecDeque::new(), under_way: JoinSet::new() })
    }

    fn is_here(&self, owner: NodeId) -> bool {
        owner == self.server.config().node
    }
}

impl Sink for ServerSink {
    type Buffer = Slot;

    fn buffer(&mut self) -> Option<Slot> {
        self.shipping.slot(BATCH_LEN_MAX as u64)
    }

    fn ship(&mut self, owner: NodeId, batch: Batch<Slot>) -> Result<(), StageInError> {
        if self.is_here(owner) {
            let len = batch.len();
            let (slot, table) = batch.into_parts();
            let stored = self.stage.ingest().store(&table.blocks, &slot[..len]);
            self.settled.push_back(match stored {
                Ok(true) => Ok(Settled::Stored),
                Ok(false) => Ok(Settled::Full(owner, Batch::from_parts(slot, table))),
                Err(error) => Err(StageInError::Ship { node: owner, reason: error.to_string() }),
            });
            return Ok(());
        }
        let (server, number) = (self.server.clone(), self.stage.number);
        self.under_way.spawn_on(
            async move {
                let (slot, table) = batch.into_parts();
                let request = Request::Ship { stage: number, blocks: table.blocks.clone() };
                match server.peers().offer(owner, &request, slot, table.len).await {
                    Ok((Reply::Shipped { stored: true }, _)) => Ok(Settled::Stored),
                    Ok((Reply::Shipped { stored: false }, slot)) => Ok(Settled::Full(owner, Batch::from_parts(slot, table))),
                    Ok(_) => Err(StageInError::Ship { node: owner, reason: "it answers what was not asked".to_owned() }),
                    Err(error) => Err(StageInError::Ship { node: owner, reason: error.to_string() }),
                }
            },
            &self.runtime,
        );
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.settled.len() + self.under_way.len()
    }

    fn settle(&mut self) -> Outcome {
        if let Some(outcome) = self.settled.pop_front() {
            return outcome;
        }
        // Each offer has its own deadline, so this wait has one.
        match self.runtime.block_on(self.under_way.join_next()) {
            Some(Ok(outcome)) => outcome,
            Some(Err(error)) => Err(StageInError::Ship { node: self.server.config().node, reason: error.to_string() }),
            None => Ok(Settled::Stored),
        }
    }

    fn reserve(&mut self, owner: NodeId, key: MemberKey, part: u32, block_len: u64) -> Result<bool, StageInError> {
        let failed = |reason: String| StageInError::Ship { node: owner, reason };
        if self.is_here(owner) {
            return self.stage.ingest().reserve(key, part, block_len).map_err(|error| failed(error.to_string()));
        }
        let request = Request::Reserve { stage: self.stage.number, key, part, block_len };
        match self.runtime.block_on(self.server.ask(owner, request, REQUEST_TIMEOUT)) {
            Ok(Reply::Shipped { stored }) => Ok(stored),
            Ok(_) => Err(failed("it answers what was not asked".to_owned())),
            Err(error) => Err(failed(error.to_string())),
        }
    }
}
