//! Deliberate bugs that the simulation must find: decorators of the transport that break what the server relies on, and mistakes of
//! the simulated supervisor.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::peer::{CoordinatorReply, NodeStageInReply, NodeStageInRequest, ReadRequest, Rejection, Request};
use dayfly_meta::wire::status::{Network, Policy};
use dayfly_meta::wire::{decode_sealed, encode_sealed};
use dayfly_transport::{
    Ability, Agreement, Answer, Connection, Incoming, Piece, Pulled, Refusal, Region, Service, Serving, Slot, Transport,
    TransportError,
};

use super::net::name;

/// A bug in one node, or in the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Planted {
    /// An owner answers a read with the wrong chunks.
    WrongChunk,
    /// A connection receives an answer, but its caller waits forever and does not even get a timeout.
    SwallowedAnswer,
    /// A node confirms that it has made a dataset visible, but has not.
    UndoneCommit,
    /// The supervisor does not tell a node who is a member.
    UntoldChange,
    /// A node that returns says that it has caught up, but has not.
    HastyReturn,
    /// Nodes tell each node that returns that there are no datasets.
    ForgottenDatasets,
}

impl Planted {
    pub(super) const ALL: [Self; 6] = [
        Self::WrongChunk,
        Self::SwallowedAnswer,
        Self::UndoneCommit,
        Self::UntoldChange,
        Self::HastyReturn,
        Self::ForgottenDatasets,
    ];
}

impl Planted {
    /// Returns whether the bug is in the transport of a node. `is_one` says whether this is the one node that usually has the bug.
    pub(super) fn is_in_transport(self, is_one: bool) -> bool {
        match self {
            Self::WrongChunk | Self::SwallowedAnswer | Self::UndoneCommit => is_one,
            Self::ForgottenDatasets => true,
            // These are in the supervisor, or in the servers' side of its channels.
            Self::UntoldChange | Self::HastyReturn => false,
        }
    }
}

/// A node's transport with a bug in it.
pub(super) struct Buggy<T> {
    pub(super) inner: T,
    pub(super) bug: Planted,
}

#[async_trait]
impl<T: Transport> Transport for Buggy<T> {
    fn region(&self, len: u64) -> io::Result<Region> {
        self.inner.region(len)
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        let inner = self.inner.connect(peer, address).await?;
        Ok(Arc::new(BuggyConnection { inner, bug: self.bug, reads: AtomicU32::new(0) }))
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        self.inner.serve(Arc::new(BuggyService { inner: service, bug: self.bug })).await
    }

    fn ability(&self) -> Ability {
        self.inner.ability()
    }

    fn agree(&self, agreement: Agreement) {
        self.inner.agree(agreement);
    }

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        self.inner.fallen_back()
    }

    fn status(&self) -> Network {
        self.inner.status()
    }
}

struct BuggyConnection {
    inner: Arc<dyn Connection>,
    bug: Planted,
    reads: AtomicU32,
}

#[async_trait]
impl Connection for BuggyConnection {
    fn peer(&self) -> NodeId {
        self.inner.peer()
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    fn quiet_for(&self) -> Duration {
        self.inner.quiet_for()
    }

    async fn pull(&self, message: Vec<u8>, slots: Vec<Slot>, timeout: Duration) -> Result<Pulled, TransportError> {
        let is_read = matches!(decode_sealed::<Request>(&message), Ok(Request::Read(ReadRequest::Chunks { .. })));
        let pulled = self.inner.pull(message, slots, timeout).await;
        if self.bug == Planted::SwallowedAnswer && is_read && self.reads.fetch_add(1, Ordering::Relaxed) == 3 {
            return std::future::pending().await;
        }
        pulled
    }

    async fn offer(
        &self,
        message: Vec<u8>,
        payload: &mut Option<Slot>,
        len: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, TransportError> {
        self.inner.offer(message, payload, len, timeout).await
    }
}

struct BuggyService {
    inner: Arc<dyn Service>,
    bug: Planted,
}

#[async_trait]
impl Service for BuggyService {
    async fn pulled(&self, from: NodeId, message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        let request = decode_sealed::<Request>(&message);
        if self.bug == Planted::UndoneCommit && matches!(request, Ok(Request::NodeStageIn(NodeStageInRequest::Commit { .. }))) {
            return Ok(Answer { message: encode_sealed(&Ok::<_, Rejection>(NodeStageInReply::Done)), pieces: Vec::new() });
        }
        if self.bug == Planted::ForgottenDatasets && name(&message) == "Datasets" {
            let none = CoordinatorReply::Datasets { datasets: Vec::new(), policy: Policy::default() };
            return Ok(Answer { message: encode_sealed(&Ok::<_, Rejection>(none)), pieces: Vec::new() });
        }
        let mut answer = self.inner.pulled(from, message, room).await?;
        if self.bug == Planted::WrongChunk && matches!(request, Ok(Request::Read(ReadRequest::Chunks { .. }))) {
            let [Piece::File { offset, .. }, .., Piece::File { offset: other, .. }] = &mut answer.pieces[..] else {
                return Ok(answer);
            };
            std::mem::swap(offset, other);
        }
        Ok(answer)
    }

    async fn offered(&self, from: NodeId, message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        self.inner.offered(from, message, incoming).await
    }
}
