//! One node of a session: makes its parts, connects them, and closes them in the end. Nothing else.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::status_page::StatusPage;
use dayfly_transport::tcp::{Identity, Purpose};
use dayfly_transport::{Ability, Agreement, Service, Serving, Transport};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::Config;
use crate::arena::Arena;
use crate::blocking::{Blocking, Threads};
use crate::cache_writer::CacheWriter;
use crate::clients::{ClientContext, ClientListener};
use crate::coordinator::{Coordinator, CoordinatorContext};
use crate::fetch::Fetcher;
use crate::membership::{JoinError, Membership};
use crate::peers::Peers;
use crate::prefetch::Prefetcher;
use crate::processes::Processes;
use crate::room::Room;
use crate::service::{Administration, Coordination, NodeService, Offers, Reads, StageIns};
use crate::stage_in::{NodeStageIns, StageInContext};
use crate::stats::{ClientReads, Damage};
use crate::status::StatusReporter;
use crate::store::Store;

/// Bytes of memory for runs and catalogs that arrive from peers, which do not belong in the arena.
const EXCHANGE_LEN: u64 = 8 << 20;
const _: () = assert!(EXCHANGE_LEN >= 4 * BATCH_LEN_MAX as u64);

/// Why a node could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data dirs cannot be used.
    #[error("{0}")]
    Store(#[source] io::Error),
    /// The node's shared memory cannot be made.
    #[error("cannot create the arena: {0}")]
    Arena(#[source] io::Error),
    /// The listener for peers cannot be bound.
    #[error("cannot listen for other nodes at {address}: {error}")]
    Listen {
        /// The wanted address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The socket for local processes cannot be made.
    #[error("cannot create the socket for programs in '{}': {error}", folder.display())]
    Socket {
        /// The session's folder.
        folder: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
}

/// Advances the heartbeat on the status page, which shows this node's processes that the server's runtime is alive.
async fn advance_heartbeat(status_page: Arc<StatusPage>, interval: Duration) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        status_page.advance_heartbeat();
    }
}

/// One node of a session.
pub struct Node {
    address: SocketAddr,
    transport: Arc<dyn Transport>,
    store: Arc<Store>,
    membership: Arc<Membership>,
    running: Mutex<Option<Running>>,
    #[cfg(test)]
    pub(crate) parts: NodeParts,
}

/// What ends with the session. Dropping it closes all connections.
struct Running {
    _peers: Serving,
    /// Keeps the loopback alive, which refers to it weakly.
    _service: Arc<dyn Service>,
    _clients: ClientListener,
    _tasks: JoinSet<()>,
}

/// Parts that the simulation looks at.
#[cfg(test)]
pub(crate) struct NodeParts {
    pub(crate) node: dayfly_meta::id::NodeId,
    pub(crate) store: Arc<Store>,
    pub(crate) arena: Arena,
    pub(crate) peers: Arc<Peers>,
    pub(crate) fetcher: Arc<Fetcher>,
    pub(crate) stage_ins: Arc<NodeStageIns>,
    pub(crate) coordinator: Arc<Coordinator>,
}

impl Node {
    /// Opens the data dirs, binds the listener and starts to serve. Programs can attach at once; they find datasets once
    /// the node has [joined](Self::join) its session.
    ///
    /// # Errors
    /// A data dir, the arena, the listener or the socket cannot be made.
    pub async fn start(config: Config) -> Result<Arc<Self>, StartError> {
        Self::start_over(config, |transport| transport).await
    }

    /// Like [`Self::start`], over a transport that `decorate` wraps, as tests do to inject faults.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_over(
        config: Config,
        decorate: impl FnOnce(Arc<dyn Transport>) -> Arc<dyn Transport>,
    ) -> Result<Arc<Self>, StartError> {
        let purpose = if config.encrypt { Purpose::SealedPeer } else { Purpose::Peer };
        let deadlines = config.deadlines;
        let identity = Identity { session: config.session, key: config.key.clone(), node: config.node, purpose, deadlines };
        let wanted = config.listen;
        let listen = |error| StartError::Listen { address: wanted, error };
        let (transport, address) = dayfly_transport::open(identity, config.listen, &config.network).await.map_err(listen)?;
        Self::start_on(config, decorate(transport), address, Arc::new(Threads)).await
    }

    /// Like [`Self::start`], on a transport that is open already, over which peers reach this node at `address`. Blocking
    /// work runs on `blocking`.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_on(
        config: Config,
        transport: Arc<dyn Transport>,
        address: SocketAddr,
        blocking: Arc<dyn Blocking>,
    ) -> Result<Arc<Self>, StartError> {
        let (node, deadlines) = (config.node, config.deadlines);
        let store = Arc::new(Store::open(&config.data_dirs, config.capacity).map_err(StartError::Store)?);
        let region = transport.region(config.memory).map_err(StartError::Arena)?;
        let arena = Arena::new(region, store.status_page().clone(), &deadlines).map_err(StartError::Arena)?;
        let exchange = transport.region(EXCHANGE_LEN).map_err(StartError::Arena)?;
        let damage = Arc::new(Damage::default());
        let peers = Arc::new(Peers::new(node, transport.clone(), exchange, damage.clone(), deadlines));
        let (cache_writer, caching) = CacheWriter::new(arena.len(), damage.clone(), blocking.clone());
        let fetcher = Arc::new(Fetcher::new(arena.clone(), peers.clone(), cache_writer, damage.clone(), blocking.clone()));
        let prefetcher = Prefetcher::new(arena.clone(), fetcher.clone(), &deadlines);
        let (processes, client_reads) = (Arc::<Processes>::default(), Arc::<ClientReads>::default());
        let room = Arc::new(Room::new(store.clone(), processes.clone(), prefetcher.clone(), blocking.clone(), deadlines));
        let stage_ins = Arc::new(NodeStageIns::new(StageInContext {
            node,
            workers: config.workers,
            decoders: config.decoders,
            memory: config.stage_in_memory,
            store: store.clone(),
            arena: arena.clone(),
            room: room.clone(),
            peers: peers.clone(),
            transport: transport.clone(),
            blocking: blocking.clone(),
        }));
        let coordinator = Arc::new(Coordinator::new(CoordinatorContext {
            node,
            prefix: config.prefix.clone(),
            workers: config.workers,
            stage_in_memory: config.stage_in_memory,
            store: store.clone(),
            room: room.clone(),
            peers: peers.clone(),
            stage_ins: stage_ins.clone(),
            blocking: blocking.clone(),
        }));
        let membership = Arc::new(Membership::new(peers.clone(), transport.clone(), store.clone(), blocking.clone()));
        let status = Arc::new(StatusReporter {
            data_dirs: config.data_dirs.clone(),
            workers: config.workers,
            stage_in_memory: config.stage_in_memory,
            store: store.clone(),
            arena: arena.clone(),
            processes: processes.clone(),
            fetcher: fetcher.clone(),
            prefetcher: prefetcher.clone(),
            stage_ins: stage_ins.clone(),
            client_reads: client_reads.clone(),
            damage: damage.clone(),
            peers: peers.clone(),
            transport: transport.clone(),
        });
        let service: Arc<dyn Service> = Arc::new(NodeService {
            reads: Reads { store: store.clone(), stage_ins: stage_ins.clone(), fetcher: fetcher.clone() },
            offers: Offers { stage_ins: stage_ins.clone(), damage },
            coordination: Coordination { coordinator: coordinator.clone() },
            stage_ins: StageIns { stage_ins: stage_ins.clone() },
            administration: Administration {
                membership: membership.clone(),
                status: status.clone(),
                room,
                last_answer: deadlines.last_answer,
            },
        });
        peers.set_loopback(address, Arc::downgrade(&service), blocking);
        let serving = transport.serve(service.clone()).await.map_err(|error| StartError::Listen { address, error })?;
        let clients = ClientListener::start(ClientContext {
            session: config.session,
            node,
            prefix: config.prefix,
            verify_reads: config.verify_reads,
            runtime_dir: config.runtime_dir.clone(),
            store: store.clone(),
            arena: arena.clone(),
            fetcher: fetcher.clone(),
            prefetcher,
            peers: peers.clone(),
            processes,
            client_reads,
            membership: membership.clone(),
            status,
        });
        let clients = clients.map_err(|error| StartError::Socket { folder: config.runtime_dir, error })?;
        let mut tasks = JoinSet::new();
        tasks.spawn(caching);
        tasks.spawn(advance_heartbeat(store.status_page().clone(), deadlines.heartbeat_interval));
        let running = Running { _peers: serving, _service: service, _clients: clients, _tasks: tasks };
        tracing::info!(%node, %address, "this node has started");
        Ok(Arc::new(Self {
            address,
            transport,
            #[cfg(test)]
            parts: NodeParts { node, store: store.clone(), arena, peers, fetcher, stage_ins, coordinator },
            store,
            membership,
            running: Mutex::new(Some(running)),
        }))
    }

    /// The address at which peers reach this node.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The networks over which peers could reach this node.
    pub fn ability(&self) -> Ability {
        self.transport.ability()
    }

    /// Takes the roster, meets peers, and passes the roster on to the nodes below in the tree. Returns, as sentences, which
    /// pairs of nodes do not reach each other over the network that was tried.
    ///
    /// # Errors
    /// This node, or one below it, cannot reach a peer.
    pub async fn join(&self, roster: &[SocketAddr], agreement: Agreement) -> Result<Vec<String>, JoinError> {
        self.membership.join(roster, agreement).await
    }

    /// Uses the network that all nodes have agreed on, and passes it on to the nodes below in the tree.
    ///
    /// # Errors
    /// A node below cannot be reached.
    pub async fn agree(&self, agreement: Agreement) -> Result<(), JoinError> {
        self.membership.agree(agreement).await
    }

    /// Waits until the session has ended on this node.
    pub async fn ended(&self) {
        self.membership.ended().await;
    }

    /// Ends the session on all other nodes that can be reached.
    pub async fn end_others(&self) {
        drop(self.membership.end_others(&[]).await);
    }

    /// Frees all room on the data dirs, even under open files, so that the node serves no bytes any more. Returns the
    /// bytes freed.
    pub fn give_up(&self) -> u64 {
        self.store.free_all()
    }

    /// Closes all connections, and stops to serve.
    pub fn close(&self) {
        drop(self.running.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
