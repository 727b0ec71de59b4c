//! The other nodes: where they are, and the connections to them, made when first needed.

mod line;

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{PAIRS_ALL_TRIED_NODES, START_TIMEOUT};
use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_meta::wire::{decode_sealed, encode_sealed};
use dayfly_transport::{Connection, Offered, Pulled, Slot, Transport, TransportError, Unread};
use tokio::time::Instant;

use line::Line;

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
    roster: OnceLock<Vec<Line>>,
    deadlines: Deadlines,
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
        let line = |(node, &address)| Line::new(NodeId(node), address, &self.deadlines);
        // Whoever tells it a second time tells the same.
        let _ = self.roster.set((0..).zip(addresses).map(line).collect());
    }

    /// Connects to those whom this node meets at the start.
    pub(crate) async fn meet(&self) -> Result<(), PeerError> {
        let meeting = neighbours(self.me.index(), self.count());
        let meeting =
            meeting.into_iter().map(|node| async move { self.connection(NodeId(node as u16), START_TIMEOUT).await.map(drop) });
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
        node != self.me && self.roster.get().and_then(|roster| roster.get(node.index())).is_some_and(Line::is_lost)
    }

    /// A connection, and what is left of `limit` for the request itself.
    async fn connection(&self, node: NodeId, limit: Duration) -> Result<(Arc<dyn Connection>, Duration), PeerError> {
        let start = Instant::now();
        let roster = self.roster.get().ok_or(PeerError::NoRoster)?;
        let line = roster.get(node.index()).filter(|_| node != self.me).ok_or(PeerError::Unknown(node))?;
        let connection = line.connection(&self.transport, limit / 4 * 3).await?;
        // A connection that was there already takes nothing.
        let took = start.elapsed();
        let left = if took < self.deadlines.look_interval { limit } else { limit.saturating_sub(took).max(limit / 4) };
        Ok((connection, left))
    }

    /// A request whose answer is a message alone.
    pub(crate) async fn ask(&self, node: NodeId, request: &Request, timeout: Duration) -> Result<Reply, PeerError> {
        self.pull(node, request, Vec::new(), timeout).await.map(|(reply, _)| reply)
    }

    /// A request whose answer's bytes land in slots. All of them, or it fails.
    pub(crate) async fn pull(
        &self,
        node: NodeId,
        request: &Request,
        slots: Vec<Slot>,
        timeout: Duration,
    ) -> Result<(Reply, Pulled), PeerError> {
        let (reply, pulled) = self.pull_pieces(node, request, slots, timeout).await?;
        if pulled.unread.pieces.is_empty() { Ok((reply, pulled)) } else { Err(unread(node, &pulled.unread)) }
    }

    /// As [`Self::pull`], but pieces that the peer cannot read are left to the caller to find.
    pub(crate) async fn pull_pieces(
        &self,
        node: NodeId,
        request: &Request,
        slots: Vec<Slot>,
        timeout: Duration,
    ) -> Result<(Reply, Pulled), PeerError> {
        let (connection, left) = self.connection(node, timeout).await?;
        let pulled = connection.pull(encode_sealed(request), slots, left).await?;
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
        let (connection, left) = self.connection(node, self.deadlines.offer).await?;
        let Offered { message, payload } = connection.offer(encode_sealed(request), payload, len, left).await?;
        Ok((reply(node, &message)?, payload))
    }
}

/// Tells the user of pieces that a peer could not read.
pub(crate) fn unread(node: NodeId, unread: &Unread) -> PeerError {
    PeerError::Failed { node, reason: unread.reason.clone() }
}

fn reply(node: NodeId, message: &[u8]) -> Result<Reply, PeerError> {
    match decode_sealed(message) {
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
