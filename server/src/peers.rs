//! The other nodes: where they are, and the connections to them, made when first needed.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::PAIRS_ALL_TRIED_NODES;
use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_meta::wire::{decode, encode};
use dayfly_transport::{Connection, Offered, Pulled, Slot, Transport, TransportError};
use tokio::sync::Mutex;

/// Why a peer could not be asked, or what it said.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    #[error("{0}")]
    Transport(#[from] TransportError),
    #[error("node {node}: {reason}")]
    Failed { node: NodeId, reason: String },
    #[error("node {0} answers with what is no message of this version")]
    Invalid(NodeId),
    #[error("node {0} is not of this session")]
    Unknown(NodeId),
    #[error("this server does not know its peers yet")]
    NoRoster,
}

/// The roster, and a connection to each other node.
pub(crate) struct Peers {
    me: NodeId,
    transport: Arc<dyn Transport>,
    roster: OnceLock<Vec<Peer>>,
    deadlines: Deadlines,
}

struct Peer {
    address: SocketAddr,
    connection: Mutex<Line>,
}

/// A connection, or the last failure to make one: who comes within a moment of that hears the same and need not dial.
#[derive(Default)]
struct Line {
    connection: Option<Arc<dyn Connection>>,
    failed: Option<(Instant, TransportError)>,
}

impl Peers {
    pub(crate) fn new(me: NodeId, transport: Arc<dyn Transport>, deadlines: Deadlines) -> Self {
        Self { me, transport, roster: OnceLock::new(), deadlines }
    }

    pub(crate) fn deadlines(&self) -> &Deadlines {
        &self.deadlines
    }

    /// Takes the roster, once.
    pub(crate) fn set(&self, addresses: &[SocketAddr]) {
        let peer = |&address: &SocketAddr| Peer { address, connection: Mutex::default() };
        // Whoever tells it a second time tells the same.
        let _ = self.roster.set(addresses.iter().map(peer).collect());
    }

    /// Connects to those whom this node meets at the start.
    pub(crate) async fn meet(&self) -> Result<(), PeerError> {
        let meeting = neighbours(self.me.index(), self.count());
        let meeting = meeting.into_iter().map(|node| async move { self.connection(NodeId(node as u16)).await.map(drop) });
        futures_util::future::try_join_all(meeting).await.map(drop)
    }

    pub(crate) fn count(&self) -> usize {
        self.roster.get().map_or(0, Vec::len)
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.count() as u16).map(NodeId)
    }

    pub(crate) fn address(&self, node: NodeId) -> Option<SocketAddr> {
        self.roster.get()?.get(node.index()).map(|peer| peer.address)
    }

    /// Whether the node was reached once and is lost now.
    pub(crate) fn is_lost(&self, node: NodeId) -> bool {
        match self.roster.get().and_then(|roster| roster.get(node.index())) {
            // Being dialled again means that it was lost; how that ends, the next look will tell.
            Some(peer) if node != self.me => match peer.connection.try_lock() {
                Ok(line) => line.failed.is_some() || line.connection.as_ref().is_some_and(|connection| connection.is_lost()),
                Err(_) => false,
            },
            _ => false,
        }
    }

    async fn connection(&self, node: NodeId) -> Result<Arc<dyn Connection>, PeerError> {
        let roster = self.roster.get().ok_or(PeerError::NoRoster)?;
        let peer = roster.get(node.index()).filter(|_| node != self.me).ok_or(PeerError::Unknown(node))?;
        let mut line = peer.connection.lock().await;
        if let Some(connection) = line.connection.as_ref().filter(|connection| !connection.is_lost()) {
            return Ok(connection.clone());
        }
        if let Some((_, error)) = line.failed.as_ref().filter(|(at, _)| at.elapsed() < self.deadlines.redial) {
            return Err(error.clone().into());
        }
        match self.transport.connect(node, peer.address).await {
            Ok(connection) => {
                *line = Line { connection: Some(connection.clone()), failed: None };
                Ok(connection)
            }
            Err(error) => {
                line.failed = Some((Instant::now(), error.clone()));
                Err(error.into())
            }
        }
    }

    /// A request whose answer is a message alone.
    pub(crate) async fn ask(&self, node: NodeId, request: &Request, timeout: Duration) -> Result<Reply, PeerError> {
        self.pull(node, request, Vec::new(), timeout).await.map(|(reply, _)| reply)
    }

    /// A request whose answer's bytes land in slots.
    pub(crate) async fn pull(
        &self,
        node: NodeId,
        request: &Request,
        slots: Vec<Slot>,
        timeout: Duration,
    ) -> Result<(Reply, Pulled), PeerError> {
        let pulled = self.connection(node).await?.pull(encode(request), slots, timeout).await?;
        Ok((reply(node, &pulled.message)?, pulled))
    }

    /// A request with bytes for the peer.
    pub(crate) async fn offer(
        &self,
        node: NodeId,
        request: &Request,
        payload: Slot,
        len: usize,
    ) -> Result<(Reply, Slot), PeerError> {
        let offered = self.connection(node).await?.offer(encode(request), payload, len, self.deadlines.offer).await?;
        let Offered { message, payload } = offered;
        Ok((reply(node, &message)?, payload))
    }
}

fn reply(node: NodeId, message: &[u8]) -> Result<Reply, PeerError> {
    match decode(message) {
        Ok(Reply::Failed { reason }) => Err(PeerError::Failed { node, reason }),
        Ok(reply) => Ok(reply),
        Err(_) => Err(PeerError::Invalid(node)),
    }
}

/// Whom a node meets at the start: everyone, while that are few; else those 1, 2, 4, 8 ... places on, so that connections grow with the
/// logarithm of the number of nodes, and near and far ways are tried.
fn neighbours(me: usize, count: usize) -> Vec<usize> {
    if count <= PAIRS_ALL_TRIED_NODES {
        return (0..count).filter(|&node| node != me).collect();
    }
    std::iter::successors(Some(1), |step| Some(step * 2))
        .take_while(|&step| step < count)
        .map(|step| (me + step) % count)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_meet_all_and_many_meet_a_few() {
        assert_eq!(neighbours(1, 3), [0, 2]);
        assert_eq!(neighbours(0, 1), []);
        assert_eq!(neighbours(15, 17), [16, 0, 2, 6, 14]);
        assert_eq!(neighbours(4095, 4096).len(), 12);
    }
}
