//! How the nodes of a session join it and leave it.
//!
//! The roster and the agreed network travel down a tree: each node forwards them to the nodes below it, so that no node has to
//! reach all others. The request to end a session goes from one node directly to all others, because nodes below a lost node
//! must end too.
//!
//! # Parts
//!
//! Who is a member is decided by state machines without sockets or a clock, which tests explore exhaustively:
//!
//! - [`supervision`]: the supervisor's rules. It alone decides, and numbers its decisions: the membership epochs.
//! - [`relay`]: how leases are renewed along a tree in a session of many servers.
//! - [`tenure`]: how long a server serves and publishes without hearing from the supervisor.
//! - [`decision`]: how a stage-in is committed on all live nodes or on none, whoever is lost meanwhile.

pub(crate) mod decision;
#[cfg(test)]
mod exploration;
mod relay;
mod supervision;
mod tenure;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{FALLEN_BACK_SHOWN_MAX, REJOINS_WAITING_MAX, TREE_WIDTH};
use dayfly_meta::roster::LeaseRound;
use dayfly_meta::wire::peer::{AdministrationReply, AdministrationRequest, AgreedNetwork, Rejection};
use dayfly_transport::{Agreement, LossCause, Transport, TransportError};
use futures_util::future::{join_all, try_join_all};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::Instrument;

use crate::blocking::{Blocking, JobLost};
use crate::peers::{PeerError, Peers};
use crate::store::Store;
use relay::{LeaseRelay, Passed};
pub use relay::{LeaseTree, Renewals};
pub use supervision::{Changes, Greeting, Loss, Patience, Supervision};
pub use tenure::Tenure;

/// Why a session could not start on all nodes.
#[derive(Debug, thiserror::Error)]
#[error("{}", self.message())]
pub struct JoinError {
    /// The node that could not reach a peer, or could not use that peer's answer.
    node: NodeId,
    #[source]
    cause: PeerError,
}

impl JoinError {
    fn message(&self) -> String {
        match &self.cause {
            // The reason names the node that failed, which may be further down the tree.
            PeerError::Rejected { rejection, .. } => rejection.reason.clone(),
            cause => format!("node {}: {cause}", self.node),
        }
    }
}

impl From<JoinError> for Rejection {
    fn from(error: JoinError) -> Self {
        let reason = error.to_string();
        Self { reason, ..error.cause.into_rejection() }
    }
}

/// The request of a user for a new server in the place of a lost one, on its way to the supervisor.
pub struct RejoinRequest {
    /// The lost node.
    pub node: NodeId,
    /// The host on which the server is to run; `None` for the host of the lost server.
    pub host: Option<String>,
    /// Takes a message for the user, or the reason of a failure.
    pub answer: oneshot::Sender<Result<String, String>>,
}

/// The result of ending a session.
#[derive(Default)]
pub(crate) struct Ending {
    /// Number of nodes that have stopped serving.
    pub(crate) nodes: u16,
    /// Bytes freed in their data dirs.
    pub(crate) freed_bytes: u64,
    /// Nodes that could not be asked to end, and why.
    pub(crate) failures: Vec<String>,
}

/// One node as a member of its session.
pub(crate) struct Membership {
    node: NodeId,
    peers: Arc<Peers>,
    transport: Arc<dyn Transport>,
    store: Arc<Store>,
    blocking: Arc<dyn Blocking>,
    /// Whether the nodes have agreed on a network, which is the last step of a session's start.
    has_begun: AtomicBool,
    /// Whether programs may attach.
    is_open: watch::Sender<bool>,
    has_ended: watch::Sender<bool>,
    tenure: Mutex<Tenure>,
    relay: Arc<Mutex<LeaseRelay>>,
    /// Passes the last round of renewals on.
    passing: Mutex<JoinSet<()>>,
    /// Requests that wait to be sent to the supervisor.
    rejoins: (mpsc::Sender<RejoinRequest>, tokio::sync::Mutex<mpsc::Receiver<RejoinRequest>>),
}

impl Membership {
    pub(crate) fn new(peers: Arc<Peers>, transport: Arc<dyn Transport>, store: Arc<Store>, blocking: Arc<dyn Blocking>) -> Self {
        let (rejoin_sender, rejoins) = mpsc::channel(REJOINS_WAITING_MAX);
        Self {
            node: peers.own_node(),
            tenure: Mutex::new(Tenure::new(peers.deadlines())),
            relay: Arc::default(),
            passing: Mutex::default(),
            peers,
            transport,
            store,
            blocking,
            has_begun: AtomicBool::new(false),
            is_open: watch::Sender::new(false),
            has_ended: watch::Sender::new(false),
            rejoins: (rejoin_sender, tokio::sync::Mutex::new(rejoins)),
        }
    }

    /// Takes the roster, connects to peers, and makes the nodes below do the same. Returns one sentence for each pair of nodes
    /// that cannot reach each other over the network that was tried.
    pub(crate) async fn join(&self, addresses: &[SocketAddr], agreement: Agreement) -> Result<Vec<String>, JoinError> {
        let span = tracing::info_span!("join", node = %self.node, nodes = addresses.len());
        async {
            self.peers.set_roster(addresses);
            self.transport.agree(agreement.clone());
            let addresses = addresses.iter().map(SocketAddr::to_string).collect();
            let request = AdministrationRequest::Join { addresses, network: to_wire(agreement) };
            let meeting = async { self.peers.meet().await.map_err(|cause| JoinError { node: self.node, cause }) };
            let (below, ()) = tokio::try_join!(self.ask_below(&request), meeting)?;
            let sentence = |(peer, why)| format!("node {} cannot reach node {peer}: {why}", self.node);
            let mut fallen_back: Vec<String> = self.transport.fallen_back().into_iter().map(sentence).collect();
            for reply in below {
                if let AdministrationReply::Joined { fallen_back: theirs } = reply {
                    fallen_back.extend(theirs);
                }
            }
            fallen_back.truncate(FALLEN_BACK_SHOWN_MAX);
            tracing::info!("this node has joined the session");
            Ok(fallen_back)
        }
        .instrument(span)
        .await
    }

    /// Uses the network that all nodes have agreed on, and makes the nodes below do the same.
    pub(crate) async fn agree(&self, agreement: Agreement) -> Result<(), JoinError> {
        self.transport.agree(agreement.clone());
        self.has_begun.store(true, Ordering::Release);
        self.ask_below(&AdministrationRequest::Agree(to_wire(agreement))).await.map(drop)
    }

    /// Joins a session that has begun, in the place of a lost server.
    pub(crate) fn take_place(&self, addresses: &[SocketAddr], agreement: Agreement) {
        self.peers.set_roster(addresses);
        self.transport.agree(agreement);
        self.has_begun.store(true, Ordering::Release);
        tracing::info!(nodes = addresses.len(), "this node takes the place of a lost server");
    }

    /// Asks the supervisor to start a new server in the place of a lost one. Returns a message for the user.
    ///
    /// # Errors
    /// The reason why there is no new server.
    pub(crate) async fn rejoin(&self, node: NodeId, host: Option<String>) -> Result<String, String> {
        if self.tenure().is_alone() {
            return Err("the supervisor of this session has ended, so nobody can start servers".to_owned());
        }
        let (answer, answered) = oneshot::channel();
        let request = RejoinRequest { node, host, answer };
        let sent = timeout(self.peers.deadlines().request, self.rejoins.0.send(request)).await;
        let no_answer = || "the supervisor of this session does not answer; try again".to_owned();
        sent.map_err(|_| no_answer())?.map_err(|_| no_answer())?;
        // The supervisor answers within its own deadline, which the user may have set.
        answered.await.unwrap_or_else(|_| Err("the supervisor could not be reached for a moment; try again".to_owned()))
    }

    /// Waits for a request to start a new server.
    pub(crate) async fn next_rejoin(&self) -> RejoinRequest {
        match self.rejoins.1.lock().await.recv().await {
            Some(request) => request,
            // `self` holds a sender.
            None => std::future::pending().await,
        }
    }

    /// Returns this server's lease, as the server itself counts it.
    pub(crate) fn tenure(&self) -> MutexGuard<'_, Tenure> {
        self.tenure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a round of renewals and passes it on to the nodes below in its tree. Returns the nodes that have been heard there, this
    /// one included.
    pub(crate) fn take_round(&self, round: &LeaseRound) -> Vec<u16> {
        let roster = self.peers.roster();
        let mut relay = self.relay();
        if let Some(Passed { renews, below }) = relay.take(round, self.node, &roster) {
            if renews {
                self.tenure().renew();
            }
            let mut passing = JoinSet::new();
            for node in below {
                let (peers, relay, round) = (self.peers.clone(), self.relay.clone(), round.clone());
                passing.spawn(async move {
                    let number = round.number;
                    let asked = peers.ask(node, AdministrationRequest::Renew(round), peers.deadlines().lease_interval).await;
                    if let Ok(AdministrationReply::Heard(heard)) = asked {
                        relay.lock().unwrap_or_else(PoisonError::into_inner).answered(node, number, heard);
                    }
                });
            }
            // This ends what is left of the round before.
            *self.passing.lock().unwrap_or_else(PoisonError::into_inner) = passing;
        }
        relay.heard(self.node)
    }

    /// Lets one interval of the lease pass. Returns whether this server has to send a sign of life to the supervisor itself.
    pub(crate) fn tick(&self) -> bool {
        self.tenure().tick();
        let mut relay = self.relay();
        relay.tick();
        !relay.is_reached()
    }

    fn relay(&self) -> MutexGuard<'_, LeaseRelay> {
        self.relay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the session has begun on this node.
    pub(crate) fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// Lets programs attach to this node.
    pub(crate) fn open(&self) {
        self.is_open.send_replace(true);
    }

    /// Waits until programs may attach to this node.
    pub(crate) async fn opened(&self) {
        // This fails only once the sender is dropped, and `self` holds the sender.
        let _ = self.is_open.subscribe().wait_for(|is_open| *is_open).await;
    }

    async fn ask_below(&self, request: &AdministrationRequest) -> Result<Vec<AdministrationReply>, JoinError> {
        let asking = below(self.node.index(), self.peers.count(), TREE_WIDTH).map(|node| async move {
            let asked = self.peers.ask_at_start(NodeId(node as u16), request).await;
            asked.map_err(|cause| JoinError { node: self.node, cause })
        });
        try_join_all(asking).await
    }

    /// Ends the session on all other nodes except `spared`, and frees the space that this node uses. The caller ends the
    /// session on this node, with [`Self::end`], once the answer to the user has gone out.
    pub(crate) async fn end_others(&self, spared: &[u16]) -> Ending {
        let others = self.peers.live().into_iter().filter(|node| *node != self.node && !spared.contains(&node.0));
        let asking = join_all(others.map(|node| self.ask_to_end(node)));
        let mut ending = Ending::default();
        for answer in asking.await {
            match answer {
                Ok(AdministrationReply::Ended { freed_bytes }) => {
                    ending.nodes += 1;
                    ending.freed_bytes += freed_bytes;
                }
                Ok(_) => {}
                // Another command has ended the session here.
                Err(_) if self.has_ended() => ending.nodes += 1,
                // Another command has ended it there first, or its server has died.
                Err(error) if error.is_ended() => {}
                Err(error) => ending.failures.push(error.to_string()),
            }
        }
        match self.free_all().await {
            Ok(freed_bytes) => {
                ending.nodes += 1;
                ending.freed_bytes += freed_bytes;
            }
            Err(error) => ending.failures.push(format!("node {}: {error}", self.node)),
        }
        ending
    }

    async fn ask_to_end(&self, node: NodeId) -> Result<AdministrationReply, PeerError> {
        let ask = || self.peers.ask(node, AdministrationRequest::End, self.peers.deadlines().request);
        match ask().await {
            // The end of the connection does not tell whether the server has ended. The next dial does.
            Err(PeerError::Transport(TransportError::Lost { cause: LossCause::Closed | LossCause::Failed(_), .. })) => {
                ask().await
            }
            answer => answer,
        }
    }

    /// Frees all the space that this node uses on its drives, even in files that are still open. Returns the bytes freed.
    pub(crate) async fn free_all(&self) -> Result<u64, JobLost> {
        let store = self.store.clone();
        self.blocking.run(move || store.free_all()).await
    }

    /// Lets the server of this node exit.
    pub(crate) fn end(&self) {
        self.has_ended.send_replace(true);
    }

    /// Returns whether the session has ended on this node.
    pub(crate) fn has_ended(&self) -> bool {
        *self.has_ended.borrow()
    }

    /// Waits until the session has ended on this node.
    pub(crate) async fn ended(&self) {
        // This fails only once the sender is dropped, and `self` holds the sender.
        let _ = self.has_ended.subscribe().wait_for(|has_ended| *has_ended).await;
    }
}

/// Returns the nodes directly below a node in a tree of `count` nodes.
fn below(node: usize, count: usize, width: usize) -> impl Iterator<Item = usize> {
    (node * width + 1..=node * width + width).take_while(move |&below| below < count)
}

fn to_wire(agreement: Agreement) -> AgreedNetwork {
    match agreement {
        Agreement::Rdma { note } => AgreedNetwork::Rdma { note },
        Agreement::Tcp { why } => AgreedNetwork::Tcp { why },
    }
}

/// Returns the agreement that arrived in a message.
pub(crate) fn from_wire(network: AgreedNetwork) -> Agreement {
    match network {
        AgreedNetwork::Rdma { note } => Agreement::Rdma { note },
        AgreedNetwork::Tcp { why } => Agreement::Tcp { why },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_reaches_every_node_once() {
        for count in [1, 2, 16, 17, 18, 300, 4096] {
            let mut reached: Vec<usize> = (0..count).flat_map(|node| below(node, count, TREE_WIDTH)).collect();
            reached.sort_unstable();
            assert_eq!(reached, (1..count).collect::<Vec<_>>());
        }
    }
}
