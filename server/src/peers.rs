//! The nodes of the session as one node sees them: their addresses, and a way to send requests to each of them.
//!
//! [`Peers`] holds the roster and one [`Dialer`] for each other node, which connects when the node is first needed. For its own
//! node it holds a [`Loopback`], a connection that calls the local service. A request to its own node therefore works like a
//! request to a peer, with the same messages, deadlines and errors, and no caller distinguishes the two.
//!
//! Invariants: the roster only ever becomes newer. No wait is longer than the caller's deadline; dialing counts toward that deadline. The
//! loopback has only a weak reference to the service, so that the loopback does not keep a closed node alive.
//!
//! This module knows messages, not what they mean: what a peer does with a request is up to [`crate::service`].

mod dialer;
mod loopback;
mod pull_bytes;
mod roster_cell;
mod suspects;
mod waits;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use dayfly_meta::checksum::Mismatch;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{FETCH_ATTEMPTS_MAX, PAIRS_ALL_TRIED_NODES, START_TIMEOUT};
use dayfly_meta::roster::{Roster, RosterChange};
use dayfly_meta::wire::peer::{Answered, OfferReply, OfferRequest, Rejection, RejectionKind, RequestKind};
use dayfly_meta::wire::{InvalidMessage, decode_sealed, encode_sealed};
use dayfly_transport::{Connection, LossCause, Pulled, Region, Service, Slot, Transport, TransportError, Unread};
use tokio::time::{Instant, sleep};

use crate::blocking::Blocking;
use crate::stats::Damage;
use dialer::Dialer;
use loopback::Loopback;
use roster_cell::RosterCell;
pub(crate) use roster_cell::RosterChanges;
use suspects::Suspects;
use waits::Waits;

/// Why a peer could not be asked, or why it did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// The request did not get through, or its answer did not get back.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The peer rejected the request.
    #[error("node {node}: {rejection}")]
    Rejected {
        node: NodeId,
        #[source]
        rejection: Rejection,
    },
    /// The peer could not read some of the wanted bytes from its drive.
    #[error("node {node}: {reason}")]
    Unread { node: NodeId, reason: String },
    /// The wanted bytes arrived damaged each time.
    #[error("node {node}: what it sent arrived damaged {FETCH_ATTEMPTS_MAX} times in a row: {mismatch}")]
    Damaged { node: NodeId, mismatch: Mismatch },
    /// This node has no memory free for the answer's bytes.
    #[error("node {node} is too busy to read from its peers")]
    Busy { node: NodeId },
    /// The answer cannot be decoded, or does not belong to the request.
    #[error("node {0} sent an answer that does not belong to the request, or is damaged")]
    InvalidAnswer(NodeId),
    /// The node is not in the roster.
    #[error("node {0} is not a member of this session")]
    NotAMember(NodeId),
    /// The session has not started yet.
    #[error("this server does not have the roster yet")]
    NoRoster,
}

impl PeerError {
    /// Returns whether the error means that a node cannot be reached, or does not answer.
    pub(crate) fn is_absence(&self) -> bool {
        use TransportError::{Lost, Stuck, Timeout};
        match self {
            Self::Transport(error) => matches!(error, Lost { .. } | Timeout { .. } | Stuck { .. }),
            Self::Rejected { rejection, .. } => rejection.kind == RejectionKind::PeerFailed,
            _ => false,
        }
    }

    /// Returns whether the error means that the node's server has ended: nothing listens at its address.
    pub(crate) fn is_ended(&self) -> bool {
        matches!(self, Self::Transport(TransportError::Lost { cause: LossCause::Unreachable(error), .. })
            if error.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// Returns whether a node that could not be reached may only be too busy.
    fn may_be_busy(&self) -> bool {
        match self {
            Self::Transport(TransportError::Lost { cause: LossCause::Unreachable(error), .. }) => {
                waits::is_of_busy_peer(error.kind())
            }
            Self::Transport(TransportError::Lost { cause: LossCause::Silent(_), .. }) => true,
            _ => false,
        }
    }

    /// Converts the error into the rejection with which this node answers another node. A peer's rejection keeps its kind; most
    /// other errors mean that a peer failed.
    pub(crate) fn into_rejection(self) -> Rejection {
        let kind = match &self {
            Self::Rejected { rejection, .. } => rejection.kind,
            Self::Busy { .. } => RejectionKind::Busy,
            Self::Damaged { .. } => RejectionKind::Damaged,
            Self::NoRoster => RejectionKind::NotReady,
            _ => RejectionKind::PeerFailed,
        };
        Rejection::new(kind, self)
    }
}

/// The roster, and a connection to each node.
pub(crate) struct Peers {
    node: NodeId,
    transport: Arc<dyn Transport>,
    dialers: OnceLock<Vec<Dialer>>,
    roster: RosterCell,
    loopback: OnceLock<Arc<Loopback>>,
    suspects: Suspects,
    waits: Waits,
    /// Memory for the bytes of runs and catalogs. These bytes do not belong in the arena.
    exchange: Region,
    damage: Arc<Damage>,
    deadlines: Deadlines,
}

impl Peers {
    /// Creates the peers of a node that does not know the roster yet. The bytes of runs and catalogs land in `exchange`.
    pub(crate) fn new(
        node: NodeId,
        transport: Arc<dyn Transport>,
        exchange: Region,
        damage: Arc<Damage>,
        deadlines: Deadlines,
    ) -> Self {
        let (dialers, loopback, suspects, waits) = (OnceLock::new(), OnceLock::new(), Suspects::new(), Waits::default());
        let roster = RosterCell::new(Roster::new(&[]));
        Self { node, transport, dialers, roster, loopback, suspects, waits, exchange, damage, deadlines }
    }

    /// Returns the number of this node.
    pub(crate) fn own_node(&self) -> NodeId {
        self.node
    }

    pub(crate) fn deadlines(&self) -> &Deadlines {
        &self.deadlines
    }

    /// Makes this node's service answer the requests that the node sends to itself.
    pub(crate) fn set_loopback(&self, address: SocketAddr, service: Weak<dyn Service>, blocking: Arc<dyn Blocking>) {
        // A node has one service for its whole life, so a second call would set the same one.
        let _ = self.loopback.set(Arc::new(Loopback::new(self.node, address, service, blocking)));
    }

    /// Sets the roster with which the session begins. Only the first call has an effect: every later call passes the same one.
    pub(crate) fn set_roster(&self, addresses: &[SocketAddr]) {
        let dialer = |(node, &address)| Dialer::new(NodeId(node), address, &self.deadlines);
        if self.dialers.set((0..).zip(addresses).map(dialer).collect()).is_ok() {
            self.roster.change(|_| Some(Roster::new(addresses)));
        }
    }

    /// Takes a newer roster. Does nothing if this one is not newer, or if the session has not begun.
    pub(crate) fn change_roster(&self, change: &RosterChange) {
        let Some(dialers) = self.dialers.get() else { return };
        self.roster.change(|roster| {
            let mut changed = roster.clone();
            if !changed.apply(change) {
                return None;
            }
            for dialer in dialers {
                let node = dialer.peer();
                let (Some(before), Some(now)) = (roster.member(node), changed.member(node)) else { continue };
                if now.incarnation > before.incarnation {
                    dialer.redirect(now.address);
                    self.suspects.remove(node);
                    self.waits.end(node);
                }
            }
            self.suspects.set_lost(changed.lost());
            Some(changed)
        });
    }

    /// Returns the members of the session.
    pub(crate) fn roster(&self) -> Arc<Roster> {
        self.roster.get()
    }

    /// Returns what learns of every change of the members.
    pub(crate) fn roster_changes(&self) -> RosterChanges {
        self.roster.changes()
    }

    /// Connects to the peers that this node needs to reach at the start of a session.
    pub(crate) async fn meet(&self) -> Result<(), PeerError> {
        let nodes = met_at_start(self.node.index(), self.count()).into_iter();
        let connecting = nodes.map(|node| self.meet_one(NodeId(node as u16)));
        futures_util::future::try_join_all(connecting).await.map(drop)
    }

    /// Connects to a peer. One that is too busy to answer in time is dialed again.
    async fn meet_one(&self, node: NodeId) -> Result<(), PeerError> {
        self.at_start(|| self.connection(node, START_TIMEOUT)).await.map(drop)
    }

    /// Sends a request that belongs to the start of a session, and may be carried out twice. A peer that is too busy to be heard in time
    /// is asked again.
    pub(crate) async fn ask_at_start<R: RequestKind + Clone>(&self, node: NodeId, request: &R) -> Result<R::Reply, PeerError> {
        self.at_start(|| self.ask(node, request.clone(), START_TIMEOUT)).await
    }

    async fn at_start<T, F>(&self, ask: impl Fn() -> F) -> Result<T, PeerError>
    where
        F: Future<Output = Result<T, PeerError>>,
    {
        let mut patience = Patience::new(START_TIMEOUT);
        loop {
            match ask().await {
                Err(error) if error.may_be_busy() && patience.spend() < START_TIMEOUT / 2 => {}
                answer => return answer,
            }
            patience.pause(self.deadlines.redial).await;
        }
    }

    /// Returns the number of nodes in the session, this one included; 0 before the roster is known.
    pub(crate) fn count(&self) -> usize {
        self.dialers.get().map_or(0, Vec::len)
    }

    /// Returns all nodes of the session, this one and lost ones included.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.count() as u16).map(NodeId)
    }

    /// Returns the members that are not lost, this one included.
    pub(crate) fn live(&self) -> Vec<NodeId> {
        self.roster.get().live().collect()
    }

    pub(crate) fn address(&self, node: NodeId) -> Option<SocketAddr> {
        self.dialers.get()?.get(node.index()).map(Dialer::address)
    }

    /// Returns whether the connection to the node was lost and has not been replaced. While the node is being dialed, the
    /// connection does not count as lost; a later call sees the outcome of the dial.
    pub(crate) fn is_cut_off(&self, node: NodeId) -> bool {
        node != self.node && self.dialers.get().and_then(|dialers| dialers.get(node.index())).is_some_and(Dialer::is_lost)
    }

    /// Returns a connection, and what is left of `limit` for the request itself.
    async fn connection(&self, node: NodeId, limit: Duration) -> Result<(Arc<dyn Connection>, Duration), PeerError> {
        if node == self.node {
            let loopback = self.loopback.get().ok_or(PeerError::NoRoster)?;
            return Ok((loopback.clone(), limit));
        }
        let start = Instant::now();
        let dialers = self.dialers.get().ok_or(PeerError::NoRoster)?;
        let dialer = dialers.get(node.index()).ok_or(PeerError::NotAMember(node))?;
        let connection = dialer.connection(&self.transport, limit / 4 * 3).await?;
        // If this took no noticeable time, the connection already existed, and the request gets all of `limit`.
        let took = start.elapsed();
        let left = if took < self.deadlines.look_interval { limit } else { limit.saturating_sub(took).max(limit / 4) };
        Ok((connection, left))
    }

    /// Returns whether this node is connected to another one, or can be within `limit`. Otherwise suspects it, unless this node itself
    /// stood still meanwhile.
    pub(crate) async fn reaches(self: &Arc<Self>, node: NodeId, limit: Duration) -> bool {
        let start = Instant::now();
        // A dial may take three quarters of what a request may take.
        let is_reached = self.connection(node, limit / 3 * 4).await.is_ok();
        if !is_reached && start.elapsed() < limit * 2 {
            self.suspect(node);
        }
        is_reached
    }

    /// Sends a request whose answer is only a message, without bulk bytes.
    pub(crate) async fn ask<R: RequestKind>(&self, node: NodeId, request: R, timeout: Duration) -> Result<R::Reply, PeerError> {
        self.pull(node, request, Vec::new(), timeout).await.map(|(reply, _)| reply)
    }

    /// Like [`Self::ask`], but repeats the request, which may be carried out twice; see [`Self::until_lost`].
    pub(crate) async fn ask_until_lost<R: RequestKind + Clone>(&self, node: NodeId, request: R) -> Result<R::Reply, PeerError> {
        let timeout = self.deadlines.request;
        self.until_lost(node, timeout, || self.ask(node, request.clone(), timeout)).await
    }

    /// Asks a node again and again, each time for at most `timeout`, until it answers or the supervisor has declared it lost: a node
    /// without a sign of life may only be starved. Gives up after the longest time that the supervisor may take, because a session can
    /// lose its supervisor. If this node itself stands still, that counts as `timeout` at most.
    pub(crate) async fn until_lost<T, F>(&self, node: NodeId, timeout: Duration, ask: impl Fn() -> F) -> Result<T, PeerError>
    where
        F: Future<Output = Result<T, PeerError>>,
    {
        let mut patience = Patience::new(timeout);
        loop {
            let answer = ask().await;
            match &answer {
                Err(error) if may_pass(error) && self.should_ask_again(node, &mut patience) => {}
                _ => return answer,
            }
            patience.pause(self.deadlines.progress_interval).await;
        }
    }

    /// Returns whether a node that has failed to answer is to be asked again.
    pub(crate) fn should_ask_again(&self, node: NodeId, patience: &mut Patience) -> bool {
        let limit = self.deadlines.lost_after + self.deadlines.node_silent;
        self.roster().is_live(node) && patience.spend() <= limit
    }

    /// Sends a request, and receives the answer's bytes in `slots`. Fails unless the peer could read all of the bytes.
    pub(crate) async fn pull<R: RequestKind>(
        &self,
        node: NodeId,
        request: R,
        slots: Vec<Slot>,
        timeout: Duration,
    ) -> Result<(R::Reply, Pulled), PeerError> {
        let (reply, pulled) = self.pull_pieces(node, request, slots, timeout).await?;
        if pulled.unread.pieces.is_empty() { Ok((reply, pulled)) } else { Err(unread(node, &pulled.unread)) }
    }

    /// Like [`Self::pull`], but succeeds even if the peer could not read some pieces. The caller must look for those.
    pub(crate) async fn pull_pieces<R: RequestKind>(
        &self,
        node: NodeId,
        request: R,
        slots: Vec<Slot>,
        timeout: Duration,
    ) -> Result<(R::Reply, Pulled), PeerError> {
        let (connection, left) = self.connection(node, timeout).await?;
        let pulled = connection.pull(encode_sealed(&request.into()), slots, left).await?;
        Ok((reply(node, R::decode_answer(&pulled.message))?, pulled))
    }

    /// Returns memory for bytes that do not belong in the arena. Waits for it at most as long as a request may take.
    pub(crate) async fn exchange_slot(&self, len: u64) -> Result<Slot, PeerError> {
        self.exchange.slot_within(len, self.deadlines.request).await.ok_or(PeerError::Busy { node: self.node })
    }

    /// Offers the first `len` bytes of `payload`, which is there again afterward. After an error, it may be gone.
    pub(crate) async fn offer(
        &self,
        node: NodeId,
        request: &OfferRequest,
        payload: &mut Option<Slot>,
        len: usize,
    ) -> Result<OfferReply, PeerError> {
        let (connection, left) = self.connection(node, self.deadlines.offer).await?;
        let message = connection.offer(encode_sealed(request), payload, len, left).await?;
        reply(node, decode_sealed(&message))
    }
}

/// Returns whether a request may still be answered: one that the peer's transport refuses may be taken later, unlike one that is too long.
fn may_pass(error: &PeerError) -> bool {
    matches!(error, PeerError::Transport(error) if !matches!(error, TransportError::TooLong(_)))
}

/// How long a node has been asked in vain.
pub(crate) struct Patience {
    /// How long each try takes at most.
    timeout: Duration,
    asked_at: Instant,
    spent: Duration,
}

impl Patience {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { timeout, asked_at: Instant::now(), spent: Duration::ZERO }
    }

    /// Counts the try that has just ended. Returns the length of all.
    fn spend(&mut self) -> Duration {
        self.spent += self.asked_at.elapsed().min(self.timeout);
        self.asked_at = Instant::now();
        self.spent
    }

    /// Waits for the next try.
    pub(crate) async fn pause(&mut self, pause: Duration) {
        sleep(pause).await;
        self.spent += pause;
        self.asked_at = Instant::now();
    }
}

/// Returns the error for pieces that a peer could not read.
pub(crate) fn unread(node: NodeId, unread: &Unread) -> PeerError {
    PeerError::Unread { node, reason: unread.reason.clone() }
}

fn reply<T>(node: NodeId, decoded: Result<Answered<T>, InvalidMessage>) -> Result<T, PeerError> {
    match decoded {
        Ok(Ok(reply)) => Ok(reply),
        Ok(Err(rejection)) => Err(PeerError::Rejected { node, rejection }),
        Err(InvalidMessage) => Err(PeerError::InvalidAnswer(node)),
    }
}

/// Returns the peers that a node connects to at the start. In a small session these are all peers. In a large one, they are the
/// nodes 1, 2, 4, 8 ... places further on in the roster. The number of connections then grows with the logarithm of the number of
/// nodes, and near and far paths through the network are tried.
fn met_at_start(node: usize, count: usize) -> Vec<usize> {
    if count <= PAIRS_ALL_TRIED_NODES {
        return (0..count).filter(|&peer| peer != node).collect();
    }
    std::iter::successors(Some(1), |distance| Some(distance * 2))
        .take_while(|&distance| distance < count)
        .map(|distance| (node + distance) % count)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use dayfly_meta::wire::status::Network;
    use dayfly_transport::{Ability, Agreement, Serving};

    use super::*;

    /// The first dials fail as those of a busy peer do, and then the peer has another key.
    struct Busy {
        dials: AtomicUsize,
        /// How each dial fails; `None` if the peer is silent after the handshake.
        busy: &'static [Option<io::ErrorKind>],
        /// How long each dial takes.
        takes: Duration,
    }

    impl Busy {
        fn peers(busy: &'static [Option<io::ErrorKind>], takes: Duration) -> (Arc<Self>, Arc<Peers>) {
            let transport = Arc::new(Self { dials: AtomicUsize::new(0), busy, takes });
            let exchange = Region::new(1 << 20).unwrap();
            let peers = Peers::new(NodeId(0), transport.clone(), exchange, Arc::default(), Deadlines::DEFAULT);
            peers.set_roster(&["127.0.0.1:1", "127.0.0.1:2"].map(|address| address.parse().unwrap()));
            (transport, Arc::new(peers))
        }
    }

    #[async_trait]
    impl Transport for Busy {
        fn region(&self, len: u64) -> io::Result<Region> {
            Region::new(len)
        }

        async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
            sleep(self.takes).await;
            let dial = self.dials.fetch_add(1, Ordering::Relaxed);
            let silent = LossCause::Silent(Deadlines::DEFAULT.peer_lost);
            let failed = self.busy.get(dial).copied().unwrap_or(Some(io::ErrorKind::PermissionDenied));
            Err(TransportError::Lost { peer, address, cause: failed.map_or(silent, |kind| LossCause::unreachable(kind.into())) })
        }

        async fn serve(&self, _service: Arc<dyn Service>) -> io::Result<Serving> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn ability(&self) -> Ability {
            Ability { rdma: Err("none".to_owned()) }
        }

        fn agree(&self, _agreement: Agreement) {}

        fn fallen_back(&self) -> Vec<(NodeId, String)> {
            Vec::new()
        }

        fn status(&self) -> Network {
            Network::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_start_a_busy_peer_is_dialed_again_and_one_that_refuses_is_not() {
        use io::ErrorKind::{ConnectionReset, TimedOut, UnexpectedEof};
        const BUSY: [Option<io::ErrorKind>; 5] =
            [Some(TimedOut), Some(ConnectionReset), None, Some(TimedOut), Some(UnexpectedEof)];
        for (busy, dials) in [(&BUSY[..], 6..=6), (&[], 1..=1), (&[Some(TimedOut); 200], 10..=40)] {
            let (transport, peers) = Busy::peers(busy, Duration::ZERO);
            assert!(peers.meet().await.is_err());
            let dialed = transport.dials.load(Ordering::Relaxed);
            assert!(dials.contains(&dialed), "{dialed} dials of a peer that is {busy:?}");
            let (transport, peers) = Busy::peers(busy, Duration::ZERO);
            assert!(peers.ask_at_start(NodeId(1), &dayfly_meta::wire::peer::AdministrationRequest::End).await.is_err());
            let dialed = transport.dials.load(Ordering::Relaxed);
            assert!(dials.contains(&dialed), "{dialed} dials to ask a peer that is {busy:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_is_not_reached_soon_is_suspected_unless_this_node_stood_still() {
        let limit = Duration::from_millis(500);
        for (stood_still, is_suspected) in [(Duration::ZERO, true), (limit * 3, false)] {
            let (_, peers) = Busy::peers(&[], limit * 4);
            let (is_reached, ()) = tokio::join!(peers.reaches(NodeId(1), limit), tokio::time::advance(stood_still));
            assert!(!is_reached);
            assert_eq!(peers.absent().is_some(), is_suspected, "after {stood_still:?}");
        }
    }

    #[test]
    fn a_node_connects_to_all_peers_in_a_small_session_and_to_a_few_in_a_large_one() {
        assert_eq!(met_at_start(1, 3), [0, 2]);
        assert!(met_at_start(0, 1).is_empty());
        assert_eq!(met_at_start(15, 17), [16, 0, 2, 6, 14]);
        assert_eq!(met_at_start(4095, 4096).len(), 12);
    }
}
