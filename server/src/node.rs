//! One node of a session: creates its parts, connects them, and closes them at the end. It does nothing else.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::limits::{BATCH_LEN_MAX, STREAM_READERS_MAX};
use dayfly_meta::roster::{LeaseRound, RosterChange};
use dayfly_meta::status_page::StatusPage;
use dayfly_stagein::origin::{SharedFiles, SystemFiles};
use dayfly_transport::tcp::{Identity, Purpose};
use dayfly_transport::{Ability, Agreement, Service, Serving, Transport};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, sleep};
use tracing::Instrument;

use crate::Config;
use crate::arena::Arena;
use crate::beats::Beats;
use crate::blocking::{Blocking, Threads};
use crate::cache_writer::CacheWriter;
use crate::catch_up::{CatchUp, CatchUpError};
use crate::clients::{ClientContext, ClientListener};
use crate::coordinator::{Coordinator, CoordinatorContext};
use crate::fetch::Fetcher;
use crate::membership::{JoinError, Membership, RejoinRequest, Tenure};
use crate::origins::Origins;
use crate::peers::Peers;
use crate::prefetch::Prefetcher;
use crate::processes::Processes;
use crate::recovery::{Recovery, RecoveryProgress};
use crate::room::Room;
use crate::service::{Administration, Coordination, NodeService, Offers, Reads, StageIns};
use crate::stage_in::{NodeStageIns, StageInContext};
use crate::stats::{ClientReads, Damage};
use crate::status::{DriveRooms, StatusReporter};
use crate::store::Store;

/// Bytes of memory for runs and catalogs that arrive from peers. They do not belong in the arena.
const EXCHANGE_LEN: u64 = 8 << 20;
const _: () = assert!(EXCHANGE_LEN >= 4 * BATCH_LEN_MAX as u64);

/// Why a node could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data dirs cannot be used.
    #[error("{0}")]
    Store(#[source] io::Error),
    /// The node's shared memory cannot be created.
    #[error("cannot create the arena, whose size --memory sets: {0}")]
    Arena(#[source] io::Error),
    /// The listener for peers cannot be bound.
    #[error("cannot listen for other nodes at {address}: {error}")]
    Listen {
        /// The address at which the node was to listen.
        address: SocketAddr,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The thread that shows programs that this server runs cannot be started.
    #[error("cannot start a thread for the status page in '{}': {error}", folder.display())]
    Beats {
        /// The session's folder.
        folder: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The socket for local processes cannot be created.
    #[error("cannot create the socket for programs in '{}': {error}", folder.display())]
    Socket {
        /// The session's folder.
        folder: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
}

/// Advances a word of the status page, so that this node's processes can see that the server's runtime is alive.
async fn advance_turns(status_page: Arc<StatusPage>, interval: Duration) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        status_page.advance_turns();
    }
}

/// One node of a session.
pub struct Node {
    address: SocketAddr,
    pub(crate) parts: NodeParts,
    running: Mutex<Option<Running>>,
}

/// The parts that end with the session. Dropping this closes all connections.
struct Running {
    _peers: Serving,
    /// Keeps the service alive, because the loopback has only a weak reference to it.
    _service: Arc<dyn Service>,
    _clients: ClientListener,
    _tasks: JoinSet<()>,
    _beats: Option<Beats>,
}

/// The parts of a node. None of them refers to the node.
pub(crate) struct NodeParts {
    pub(crate) config: Config,
    transport: Arc<dyn Transport>,
    blocking: Arc<dyn Blocking>,
    pub(crate) store: Arc<Store>,
    pub(crate) arena: Arena,
    damage: Arc<Damage>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) fetcher: Arc<Fetcher>,
    prefetcher: Arc<Prefetcher>,
    processes: Arc<Processes>,
    client_reads: Arc<ClientReads>,
    room: Arc<Room>,
    pub(crate) stage_ins: Arc<NodeStageIns>,
    pub(crate) coordinator: Arc<Coordinator>,
    membership: Arc<Membership>,
    catch_up: Arc<CatchUp>,
    recovery_progress: Arc<RecoveryProgress>,
    status: Arc<StatusReporter>,
}

impl NodeParts {
    /// Creates the parts, starting with those that use no other part. Returns them with the task that writes cached blocks.
    fn new(
        config: Config,
        transport: Arc<dyn Transport>,
        blocking: Arc<dyn Blocking>,
        files: SharedFiles,
    ) -> Result<(Self, impl Future<Output = ()> + Send + 'static), StartError> {
        let (node, deadlines) = (config.node, config.deadlines);
        let store = Arc::new(Store::open(&config.data_dirs, config.capacity, config.growth).map_err(StartError::Store)?);
        let region = transport.region(config.memory).map_err(StartError::Arena)?;
        let arena = Arena::new(region, store.status_page().clone(), &deadlines).map_err(StartError::Arena)?;
        let exchange = transport.region(EXCHANGE_LEN).map_err(StartError::Arena)?;
        let damage = Arc::new(Damage::default());
        let peers = Arc::new(Peers::new(node, transport.clone(), exchange, damage.clone(), deadlines));
        let (cache_writer, caching) = CacheWriter::new(arena.clone(), damage.clone(), blocking.clone());
        let fetcher = Arc::new(Fetcher::new(
            arena.clone(),
            peers.clone(),
            cache_writer,
            damage.clone(),
            blocking.clone(),
            Arc::new(Origins::new(files, blocking.clone(), config.pfs_streams, deadlines.origin)),
            config.recovery_timeout,
        ));
        let prefetcher = Prefetcher::new(arena.clone(), fetcher.clone(), &deadlines);
        let (processes, client_reads) = (Arc::<Processes>::default(), Arc::<ClientReads>::default());
        let room =
            Arc::new(Room::new(store.clone(), peers.clone(), processes.clone(), prefetcher.clone(), blocking.clone(), deadlines));
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
        let membership = Arc::new(Membership::new(peers.clone(), transport.clone(), store.clone(), blocking.clone()));
        let catch_up = Arc::new(CatchUp {
            peers: peers.clone(),
            store: store.clone(),
            stage_ins: stage_ins.clone(),
            arena: arena.clone(),
            room: room.clone(),
            blocking: blocking.clone(),
            brought: tokio::sync::Mutex::default(),
        });
        let coordinator = Arc::new(Coordinator::new(CoordinatorContext {
            node,
            prefix: config.prefix.clone(),
            workers: config.workers,
            stage_in_memory: config.stage_in_memory,
            store: store.clone(),
            room: room.clone(),
            peers: peers.clone(),
            stage_ins: stage_ins.clone(),
            membership: membership.clone(),
            catch_up: catch_up.clone(),
            blocking: blocking.clone(),
        }));
        let recovery_progress = Arc::<RecoveryProgress>::default();
        let status = Arc::new(StatusReporter {
            data_dirs: config.data_dirs.clone(),
            workers: config.workers,
            stage_in_memory: config.stage_in_memory,
            store: store.clone(),
            arena: arena.clone(),
            processes: processes.clone(),
            fetcher: fetcher.clone(),
            prefetcher: prefetcher.clone(),
            drives: DriveRooms::new(store.clone(), stage_ins.clone(), blocking.clone(), config.deadlines.request / 4),
            client_reads: client_reads.clone(),
            damage: damage.clone(),
            peers: peers.clone(),
            recovery: recovery_progress.clone(),
            transport: transport.clone(),
        });
        let parts = Self {
            config,
            transport,
            blocking,
            store,
            arena,
            damage,
            peers,
            fetcher,
            prefetcher,
            processes,
            client_reads,
            room,
            stage_ins,
            coordinator,
            membership,
            catch_up,
            recovery_progress,
            status,
        };
        Ok((parts, caching))
    }

    /// Creates the task that recovers the blocks of lost nodes.
    fn recovery(&self) -> Recovery {
        Recovery {
            peers: self.peers.clone(),
            room: self.room.clone(),
            store: self.store.clone(),
            fetcher: self.fetcher.clone(),
            blocking: self.blocking.clone(),
            rate: self.config.recovery_rate,
            timeout: self.config.recovery_timeout,
            stream_readers: Arc::new(Semaphore::new(STREAM_READERS_MAX)),
            progress: self.recovery_progress.clone(),
        }
    }

    /// Creates the service that answers peers.
    fn service(&self) -> NodeService {
        let (stage_ins, damage) = (self.stage_ins.clone(), self.damage.clone());
        NodeService {
            reads: Reads {
                store: self.store.clone(),
                stage_ins: stage_ins.clone(),
                fetcher: self.fetcher.clone(),
                blocking: self.blocking.clone(),
            },
            offers: Offers { stage_ins: stage_ins.clone(), damage },
            coordination: Coordination { coordinator: self.coordinator.clone() },
            stage_ins: StageIns { stage_ins },
            administration: Administration {
                membership: self.membership.clone(),
                status: self.status.clone(),
                room: self.room.clone(),
                catch_up: self.catch_up.clone(),
                last_answer: self.config.deadlines.last_answer,
            },
        }
    }

    /// Collects the parts that answer processes.
    fn client_context(&self) -> ClientContext {
        ClientContext {
            session: self.config.session,
            node: self.config.node,
            prefix: self.config.prefix.clone(),
            verify_reads: self.config.verify_reads,
            runtime_dir: self.config.runtime_dir.clone(),
            store: self.store.clone(),
            room: self.room.clone(),
            arena: self.arena.clone(),
            fetcher: self.fetcher.clone(),
            prefetcher: self.prefetcher.clone(),
            peers: self.peers.clone(),
            processes: self.processes.clone(),
            client_reads: self.client_reads.clone(),
            membership: self.membership.clone(),
            status: self.status.clone(),
            blocking: self.blocking.clone(),
        }
    }
}

impl Node {
    /// Opens the data dirs, binds the listener and starts to serve. Programs can attach immediately; they find datasets after
    /// the node has [joined](Self::join) its session. Programs that attach to a [replacement](Config::is_replacement) wait until it
    /// has them.
    ///
    /// # Errors
    /// A data dir, the arena, the listener or the socket cannot be created.
    pub async fn start(config: Config) -> Result<Arc<Self>, StartError> {
        Self::start_over(config, |transport| transport).await
    }

    /// Like [`Self::start`], but `decorate` wraps the transport. Tests use this to inject faults.
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
        let node = Self::start_on(config, decorate(transport), address, Arc::new(Threads), Arc::new(SystemFiles)).await?;
        let folder = node.parts.config.runtime_dir.clone();
        let beats = node.start_beats().map_err(|error| StartError::Beats { folder, error })?;
        if let Some(running) = &mut *node.running.lock().unwrap_or_else(PoisonError::into_inner) {
            running._beats = Some(beats);
        }
        Ok(node)
    }

    /// Starts the beats. If the runtime is deadlocked, the process ends, so that another server can take its place.
    fn start_beats(&self) -> io::Result<Beats> {
        let deadlines = &self.parts.config.deadlines;
        let (node, patience) = (self.parts.config.node, deadlines.deadlock());
        Beats::start(self.parts.store.status_page().clone(), deadlines.heartbeat_interval, patience, move || {
            let seconds = patience.as_secs_f64();
            tracing::error!(%node, "this server ends, because its runtime has made no turn for {seconds} s while its process ran");
            // Nothing else can end a process whose runtime is deadlocked. It cannot fail for this process itself.
            let _ = kill(Pid::this(), Signal::SIGKILL);
        })
    }

    /// Like [`Self::start`], but with a transport that is already open. Peers reach this node at `address`. Blocking work runs
    /// on `blocking`, and blocks that are on no drive are read through `files`.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_on(
        config: Config,
        transport: Arc<dyn Transport>,
        address: SocketAddr,
        blocking: Arc<dyn Blocking>,
        files: SharedFiles,
    ) -> Result<Arc<Self>, StartError> {
        let span = tracing::info_span!("start", node = %config.node, %address);
        Self::start_parts(config, transport, address, blocking, files).instrument(span).await
    }

    async fn start_parts(
        config: Config,
        transport: Arc<dyn Transport>,
        address: SocketAddr,
        blocking: Arc<dyn Blocking>,
        files: SharedFiles,
    ) -> Result<Arc<Self>, StartError> {
        let (parts, caching) = NodeParts::new(config, transport, blocking, files)?;
        let service: Arc<dyn Service> = Arc::new(parts.service());
        parts.peers.set_loopback(address, Arc::downgrade(&service), parts.blocking.clone());
        let serving = parts.transport.serve(service.clone()).await;
        let serving = serving.map_err(|error| StartError::Listen { address, error })?;
        let clients = ClientListener::start(parts.client_context())
            .map_err(|error| StartError::Socket { folder: parts.config.runtime_dir.clone(), error })?;
        if !parts.config.is_replacement {
            parts.membership.open();
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(caching);
        tasks.spawn(parts.coordinator.clone().follow_roster());
        tasks.spawn(advance_turns(parts.store.status_page().clone(), parts.config.deadlines.heartbeat_interval));
        tasks.spawn(parts.recovery().run());
        tasks.spawn(parts.room.clone().drop_idle_copies());
        let running = Running { _peers: serving, _service: service, _clients: clients, _tasks: tasks, _beats: None };
        tracing::info!("this node is serving");
        Ok(Arc::new(Self { address, parts, running: Mutex::new(Some(running)) }))
    }

    /// Returns the address at which peers reach this node.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the networks over which peers could reach this node.
    pub fn ability(&self) -> Ability {
        self.parts.transport.ability()
    }

    /// Takes the roster, connects to peers, and passes the roster on to the nodes below in the
    /// tree. Returns one sentence for each pair of nodes that cannot reach each other over the
    /// network that was tried.
    ///
    /// # Errors
    /// This node, or one below it, cannot reach a peer.
    pub async fn join(&self, roster: &[SocketAddr], agreement: Agreement) -> Result<Vec<String>, JoinError> {
        self.parts.membership.join(roster, agreement).await
    }

    /// Uses the network that all nodes have agreed on, and passes the agreement on to the nodes below in the tree.
    ///
    /// # Errors
    /// A node below cannot be reached.
    pub async fn agree(&self, agreement: Agreement) -> Result<(), JoinError> {
        self.parts.membership.agree(agreement).await
    }

    /// Makes this node a member of a session that has begun, in the place of a lost server. It has to catch up with the session.
    pub fn take_place(&self, roster: &[SocketAddr], agreement: Agreement) {
        self.parts.membership.take_place(roster, agreement);
    }

    /// Waits for a request of a user to the supervisor. Only one caller may wait at a time.
    pub async fn next_rejoin(&self) -> RejoinRequest {
        self.parts.membership.next_rejoin().await
    }

    /// Returns this node's lease, as the node itself counts it.
    pub fn tenure(&self) -> MutexGuard<'_, Tenure> {
        self.parts.membership.tenure()
    }

    /// Lets one interval of the lease pass. Returns whether this server has to send a sign of life to the supervisor itself.
    pub fn tick(&self) -> bool {
        self.parts.membership.tick()
    }

    /// Takes a round of renewals from the supervisor, as the root of its tree. Returns the nodes that have been heard.
    pub fn take_round(&self, round: &LeaseRound) -> Vec<u16> {
        self.parts.membership.take_round(round)
    }

    /// Takes the members of a newer epoch. Returns whether this node has been lost and is a member again.
    pub fn change_roster(&self, change: &RosterChange) -> bool {
        let is_live = || self.parts.peers.roster().is_live(self.parts.config.node);
        let was_live = is_live();
        self.parts.peers.change_roster(change);
        !was_live && is_live()
    }

    /// Makes this node's datasets the same as the coordinator's, after this node was lost. Undoes stage-ins that were running.
    ///
    /// # Errors
    /// The coordinator cannot be asked, or a dataset cannot be prepared.
    pub async fn catch_up(&self) -> Result<(), CatchUpError> {
        self.parts.catch_up.catch_up().await
    }

    /// Looks for datasets that appeared after this node caught up and before it was a member again. Tries again until all of them
    /// are visible here. Returns whether they are: not if this node has been lost meanwhile.
    pub async fn catch_up_again(&self) -> bool {
        let deadlines = self.parts.config.deadlines;
        let mut pause = deadlines.progress_interval;
        loop {
            let Err(error) = self.parts.catch_up.look_again().await else {
                self.parts.membership.open();
                return true;
            };
            if !self.parts.peers.roster().is_live(self.parts.config.node) {
                return false;
            }
            tracing::warn!(%error, "cannot take all new datasets; trying again");
            sleep(pause).await;
            pause = (pause * 2).min(deadlines.catch_up);
        }
    }

    /// Returns whether the session has begun on this node: the nodes have met and agreed on a network.
    pub fn has_begun(&self) -> bool {
        self.parts.membership.has_begun()
    }

    /// Waits until the session has ended on this node.
    pub async fn ended(&self) {
        self.parts.membership.ended().await;
    }

    /// Ends the session on all other nodes that can be reached.
    pub async fn end_others(&self) {
        drop(self.parts.membership.end_others(&[]).await);
    }

    /// Returns whether no other member of the session is left.
    pub fn is_alone(&self) -> bool {
        self.parts.peers.roster().live().all(|node| node == self.parts.config.node)
    }

    /// Ends the session on this node, whose server is about to end while the session may go on. Frees nothing: what programs have open
    /// or mapped stays as it is until they close it.
    pub fn leave(&self) {
        self.parts.membership.end();
    }

    /// Frees all the space that the node uses in its data dirs, even in files that are still open.
    /// After that, the node no longer serves any bytes. Returns the bytes freed.
    pub fn free_all(&self) -> u64 {
        // A peer or client that asks for the end while this server exits gets no error.
        self.parts.membership.end();
        self.parts.store.free_all()
    }

    /// Closes all connections, and stops serving.
    pub fn close(&self) {
        drop(self.running.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
