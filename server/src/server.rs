//! The server: its parts put together, and what it does with each peer's request.

mod membership;
mod policy;
mod status;

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::checksum::{Mismatch, check, checksum};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::{BATCH_LEN_MAX, FETCH_ATTEMPTS_MAX};
use dayfly_meta::status_page::StatusPage;
use dayfly_meta::wire::peer::{Damaged, Reply, Request};
use dayfly_meta::wire::status::Hop;
use dayfly_meta::wire::{decode_sealed, encode_sealed};
use dayfly_transport::tcp::{Identity, Purpose};
use dayfly_transport::{Ability, Answer, Incoming, Piece, Refusal, Region, Service, Serving, Transport};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::Config;
use crate::arena::Arena;
use crate::blocking::{Blocking, Threads};
use crate::cache_writer::CacheWriter;
use crate::clients::{Clients, Processes};
use crate::coordinator::{Coordinator, Reported};
use crate::fetch::Fetcher;
use crate::peers::{PeerError, Peers};
use crate::prefetch::Prefetcher;
use crate::stage::{Beginning, Stage, Stages};
use crate::stats::{ClientReads, Damage};
use crate::store::{Dataset, Store, unnamed_file};

/// Bytes for what servers read of each other outside of the arena: runs and catalogs.
const EXCHANGE_LEN: u64 = 8 << 20;
const _: () = assert!(EXCHANGE_LEN >= 4 * BATCH_LEN_MAX as u64);

/// Why a server could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data dirs cannot be used.
    #[error("{0}")]
    Store(#[source] io::Error),
    /// The arena cannot be made.
    #[error("cannot make the arena: {0}")]
    Arena(#[source] io::Error),
    /// The peers' listener cannot be bound.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// The socket for local processes cannot be made.
    #[error("cannot make the socket in '{folder}': {error}")]
    Socket {
        /// In which folder.
        folder: String,
        /// Why.
        error: io::Error,
    },
}

/// Tells this node's processes again and again that the runtime which serves them goes on.
async fn beat(status_page: Arc<StatusPage>, interval: Duration) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        status_page.advance_heartbeat();
    }
}

/// One node of a session.
pub struct Server {
    config: Config,
    transport: Arc<dyn Transport>,
    blocking: Arc<dyn Blocking>,
    address: SocketAddr,
    store: Store,
    arena: Arena,
    exchange: Region,
    peers: Arc<Peers>,
    fetcher: Arc<Fetcher>,
    prefetcher: Arc<Prefetcher>,
    stages: Stages,
    coordinator: Coordinator,
    processes: Arc<Processes>,
    reading: ClientReads,
    damage: Arc<Damage>,
    /// Held while what is kept is thought over.
    planning: tokio::sync::Mutex<()>,
    running: Mutex<Option<Running>>,
    ended: watch::Sender<bool>,
}

/// What ends with the session; dropping it closes all connections.
struct Running {
    _peers: Serving,
    _clients: Clients,
    _tasks: JoinSet<()>,
}

impl Server {
    /// Opens the data dirs, binds the listener and starts to answer peers. Clients are served once the roster is known.
    pub async fn start(config: Config) -> Result<Arc<Self>, StartError> {
        Self::start_over(config, |transport| transport).await
    }

    /// As [`Self::start`], over a transport that has been decorated.
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

    /// As [`Self::start`], on a network that is there already, by which peers reach us at `address`.
    pub async fn start_on(
        config: Config,
        transport: Arc<dyn Transport>,
        address: SocketAddr,
        blocking: Arc<dyn Blocking>,
    ) -> Result<Arc<Self>, StartError> {
        let listen = |error| StartError::Listen { address, error };
        let deadlines = config.deadlines;
        let store = Store::open(&config.data_dirs, config.capacity).map_err(StartError::Store)?;
        let region = transport.region(config.memory).map_err(StartError::Arena)?;
        let arena = Arena::new(region, store.status_page().clone(), &deadlines).map_err(StartError::Arena)?;
        let exchange = transport.region(EXCHANGE_LEN).map_err(StartError::Arena)?;
        let peers = Arc::new(Peers::new(config.node, transport.clone(), deadlines));
        let damage = Arc::new(Damage::default());
        let (cache_writer, keeping) = CacheWriter::new(arena.len(), damage.clone(), blocking.clone());
        let fetcher = Arc::new(Fetcher::new(arena.clone(), peers.clone(), cache_writer, damage.clone(), blocking.clone()));
        let server = Arc::new(Self {
            prefetcher: Prefetcher::new(arena.clone(), fetcher.clone(), &deadlines),
            fetcher,
            config,
            transport,
            blocking,
            address,
            store,
            arena,
            exchange,
            peers,
            stages: Stages::default(),
            coordinator: Coordinator::new(deadlines),
            processes: Arc::default(),
            reading: ClientReads::default(),
            damage,
            planning: tokio::sync::Mutex::default(),
            running: Mutex::new(None),
            ended: watch::Sender::new(false),
        });
        let serving = server.transport.serve(Arc::new(PeerService(server.clone()))).await.map_err(listen)?;
        let clients = Clients::start(server.clone())
            .map_err(|error| StartError::Socket { folder: server.config.runtime_dir.display().to_string(), error })?;
        let mut tasks = JoinSet::new();
        tasks.spawn(keeping);
        tasks.spawn(beat(server.store.status_page().clone(), deadlines.heartbeat_interval));
        let running = Running { _peers: serving, _clients: clients, _tasks: tasks };
        *server.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
        Ok(server)
    }

    /// Where peers reach this server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// By what peers could reach this server.
    pub fn ability(&self) -> Ability {
        self.transport.ability()
    }

    /// Waits until the session has ended here.
    pub async fn ended(&self) {
        // The sender lives as long as `self`.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Gives all room back, whoever still has files open, and serves nothing any more. Returns the bytes freed.
    pub fn give_up(&self) -> u64 {
        self.store.free_all()
    }

    /// Ends the session here, once what was asked last has been answered.
    pub(crate) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Closes all connections.
    pub fn close(&self) {
        drop(self.running.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn deadlines(&self) -> &Deadlines {
        &self.config.deadlines
    }

    pub(crate) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    pub(crate) fn blocking(&self) -> &Arc<dyn Blocking> {
        &self.blocking
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn peers(&self) -> &Peers {
        &self.peers
    }

    pub(crate) fn fetcher(&self) -> &Arc<Fetcher> {
        &self.fetcher
    }

    pub(crate) fn prefetcher(&self) -> &Arc<Prefetcher> {
        &self.prefetcher
    }

    pub(crate) fn stages(&self) -> &Stages {
        &self.stages
    }

    pub(crate) fn coordinator(&self) -> &Coordinator {
        &self.coordinator
    }

    /// The processes that are attached.
    pub(crate) fn processes(&self) -> &Arc<Processes> {
        &self.processes
    }

    /// What they ask for.
    pub(crate) fn reading(&self) -> &ClientReads {
        &self.reading
    }

    /// Asks any node, this one included.
    pub(crate) async fn ask(self: &Arc<Self>, node: NodeId, request: Request, timeout: Duration) -> Result<Reply, PeerError> {
        if node != self.config.node {
            return self.peers.ask(node, &request, timeout).await;
        }
        match tokio::time::timeout(timeout, Box::pin(self.answer(node, request, &[]))).await {
            Ok(Ok((Reply::Failed { reason }, _)) | Err(reason)) => Err(PeerError::Failed { node, reason }),
            Ok(Ok((reply, _))) => Ok(reply),
            Err(_) => Err(PeerError::Failed { node, reason: format!("no answer within {} ms", timeout.as_millis()) }),
        }
    }

    /// Bytes, at most `room`, of any node.
    pub(crate) async fn pull_bytes(self: &Arc<Self>, node: NodeId, request: Request, room: u64) -> Result<Vec<u8>, PeerError> {
        if node == self.config.node {
            let answered = Box::pin(self.answer(node, request, &[room])).await;
            let (_, mut pieces) = answered.map_err(|reason| PeerError::Failed { node, reason })?;
            return match pieces.pop() {
                Some(Piece::Bytes(bytes)) => Ok(bytes),
                _ => Err(PeerError::Invalid(node)),
            };
        }
        let busy = || PeerError::Failed { node: self.config.node, reason: "too busy to read from its peers".to_owned() };
        let mut damaged = None;
        for _ in 0..FETCH_ATTEMPTS_MAX {
            let slot = self.exchange.slot_within(room, self.deadlines().request).await.ok_or_else(busy)?;
            let (reply, pulled) = self.peers.pull(node, &request, vec![slot], self.deadlines().request).await?;
            let (Reply::Bytes { checksum }, Some(slot), Some(&len)) = (reply, pulled.slots.first(), pulled.lens.first()) else {
                return Err(PeerError::Invalid(node));
            };
            let bytes = slot[..len as usize].to_vec();
            match check(&bytes, checksum) {
                Ok(()) => return Ok(bytes),
                Err(mismatch) => {
                    self.damage.record(Hop::Fetched, node, "a part of a catalog", mismatch);
                    damaged = Some(mismatch);
                }
            }
        }
        let told = damaged.map_or_else(String::new, |mismatch| format!(": {mismatch}"));
        let reason = format!("what it sent arrived damaged {FETCH_ATTEMPTS_MAX} times in a row{told}");
        Err(PeerError::Failed { node, reason })
    }

    /// Answers a request, from a peer or from this very node.
    async fn answer(self: &Arc<Self>, from: NodeId, request: Request, room: &[u64]) -> Result<(Reply, Vec<Piece>), String> {
        let room = room.first().copied().unwrap_or(0);
        let done = (Reply::Done, Vec::new());
        match request {
            Request::Read { .. } => Err("blocks are read by peers only".to_owned()),
            Request::Ship { .. } | Request::ShipPiece { .. } => Err("batches come as offers".to_owned()),
            Request::Reserve { stage, block_len, rival } => {
                let arrival = self.stages.get(stage)?.reserve(self, block_len, rival).await?;
                Ok((Reply::Shipped { arrival }, Vec::new()))
            }
            Request::Begin { stage, selection, seed, max_rate, capacities } => {
                let beginning = Beginning { number: stage, coordinator: from, selection, seed, max_rate, capacities };
                let server = self.clone();
                // It makes files and a ring of thousands: not on a thread that moves messages.
                let begun = self.blocking.run(move || Stage::begin(&server, beginning)).await;
                begun.map_err(|error| error.to_string())??;
                // Those who stage in come before what is only kept, which gives its room up when they need it.
                self.pause_keeping();
                Ok(done)
            }
            Request::Headroom => self.make_headroom(0).await.map(|()| done),
            Request::StageIn(request) => {
                let number = self.coordinator.following().begin(self, request)?;
                Ok((Reply::Followed { number }, Vec::new()))
            }
            Request::Follow { number, heard } => {
                let event = self.coordinator.following().next(number, heard).await?;
                Ok((Reply::Told(event.map(Box::new)), Vec::new()))
            }
            Request::Leave { number } => {
                self.coordinator.following().leave(number);
                Ok(done)
            }
            Request::NextUnit { stage, finished } => {
                let reply = match self.coordinator.stage(stage) {
                    Some(stage) => stage.next_unit(finished).await,
                    None => Reply::Stop,
                };
                Ok((reply, Vec::new()))
            }
            Request::Report { stage, progress, waits, suspects, sightings } => {
                let reported = Reported { progress, waits, suspects, sightings };
                Ok((self.coordinator.report(stage, from, reported), Vec::new()))
            }
            Request::Fail { stage, reason } => {
                if let Some(stage) = self.coordinator.stage(stage) {
                    stage.fail(self.naming(from, reason));
                }
                Ok(done)
            }
            Request::Finish { stage } => {
                let stage = self.stages.get(stage)?;
                let (lens, counted) = stage.finish().await?;
                Ok((Reply::Runs { lens, counted }, Vec::new()))
            }
            Request::ReadRun { stage, run, offset } => {
                let bytes = self.stages.get(stage)?.read_run(run, offset, room)?;
                Ok((Reply::Bytes { checksum: checksum(&bytes) }, vec![Piece::Bytes(bytes)]))
            }
            Request::ReadCatalog { stage, offset } => {
                let bytes = self.stages.get(stage)?.read_catalog(offset, room)?;
                Ok((Reply::Bytes { checksum: checksum(&bytes) }, vec![Piece::Bytes(bytes)]))
            }
            Request::Prepare { stage, dataset, target, from, len, checksum } => {
                let stage = self.stages.get(stage)?;
                self.prepare(&stage, dataset, target, from, len, checksum).await.map(|()| done)
            }
            Request::Commit { stage, replaces } => self.stages.get(stage)?.commit(self, replaces).map(|()| done),
            Request::Settle { stage } => {
                if let Some(stage) = self.stages.remove(stage) {
                    self.on_drives(move |server| stage.settle(server)).await?;
                    self.plan_kept().await?;
                }
                Ok(done)
            }
            Request::Abort { stage } => {
                if let Some(stage) = self.stages.remove(stage) {
                    self.on_drives(move |server| stage.abort(server)).await?;
                    self.plan_kept().await?;
                }
                Ok(done)
            }
            Request::Status => Ok((Reply::Status(Box::new(self.status())), Vec::new())),
            Request::Tune(policy) => {
                self.tune(policy).await?;
                Ok(done)
            }
            Request::Join { addresses, network } => {
                let addresses: Option<Vec<SocketAddr>> = addresses.iter().map(|address| address.parse().ok()).collect();
                let addresses = addresses.ok_or("the roster has what is no address")?;
                let fallen_back = self.join(&addresses, membership::agreement(network)).await?;
                Ok((Reply::Joined { fallen_back }, Vec::new()))
            }
            Request::Agree(network) => self.agree(membership::agreement(network)).await.map(|()| done),
            Request::End => {
                let freed_bytes = self.on_drives(Self::give_up).await?;
                let server = self.clone();
                // Its task is not this answer's, which has to go out first.
                tokio::spawn(async move {
                    tokio::time::sleep(server.deadlines().last_answer).await;
                    server.end();
                });
                Ok((Reply::Ended { freed_bytes }, Vec::new()))
            }
        }
    }

    /// What a node says, with its name where there are several.
    pub(crate) fn naming(&self, node: NodeId, reason: String) -> String {
        if self.peers.count() > 1 { PeerError::Failed { node, reason }.to_string() } else { reason }
    }

    /// A dataset as peers may read it: one that is shown, or that they show before or after this node does.
    fn to_be_read(&self, id: DatasetId) -> Option<Arc<Dataset>> {
        let shown = || self.store.dataset(id);
        // Between two looks it may have been shown and settled.
        shown().or_else(|| self.stages.dataset(id)).or_else(shown)
    }

    /// Does what a drive may take its time for, off the threads that move messages.
    pub(crate) async fn on_drives<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, String> {
        let server = self.clone();
        self.blocking.run(move || work(&server)).await.map_err(|error| error.to_string())
    }

    /// Gets the catalog, checks it and makes the dataset ready to be shown.
    async fn prepare(
        self: &Arc<Self>,
        stage: &Arc<Stage>,
        id: DatasetId,
        target: Vec<u8>,
        from: NodeId,
        len: u64,
        checksum: u32,
    ) -> Result<(), String> {
        let (drive, mut room) = stage.take_catalog_room();
        let more = len.saturating_sub(room.bytes());
        if !(room.grow(more) || self.make_room(more).await? && room.grow(more)) {
            return Err("no room for the catalog; give more with --capacity".to_owned());
        }
        room.shrink_to(len);
        // The locations take less than the catalog.
        self.make_headroom(len.saturating_mul(2)).await?;
        let cannot = |error: io::Error| format!("cannot write the catalog: {}", drive.write_error(error));
        if from != self.config.node {
            let file = Arc::new(unnamed_file(drive.path()).map_err(cannot)?);
            let mut offset = 0;
            while offset < len {
                let request = Request::ReadCatalog { stage: stage.number(), offset };
                let bytes = self.pull_bytes(from, request, (len - offset).min(BATCH_LEN_MAX as u64)).await;
                let bytes = bytes.map_err(|error| format!("cannot read the catalog: {error}"))?;
                if bytes.is_empty() {
                    return Err(format!("node {from} has less of the catalog than was said"));
                }
                file.write_all_at(&bytes, offset).map_err(cannot)?;
                offset += bytes.len() as u64;
            }
            stage.set_catalog(file);
        }
        let (stage, me, nodes) = (stage.clone(), self.config.node, self.peers.count());
        let preparing = self.blocking.run(move || {
            let file = stage.catalog()?;
            let (ingest, segments) = (stage.ingest(), stage.ingest().segments().clone());
            let find = |arrival| ingest.find(arrival);
            let taken = ingest.stored_bytes();
            let dataset = Dataset::prepare(id, target, &file, checksum, room, (me, nodes), &drive, segments, taken, &find);
            stage.set_prepared(dataset.map_err(|error| error.to_string())?);
            Ok(())
        });
        preparing.await.map_err(|error| error.to_string())?
    }
}

/// The server as its peers see it.
struct PeerService(Arc<Server>);

#[async_trait]
impl Service for PeerService {
    async fn pulled(&self, from: NodeId, message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        let server = &self.0;
        let request = decode_sealed::<Request>(&message).map_err(Refusal::new)?;
        if let Request::Read { dataset, chunks } = request {
            let dataset = server.to_be_read(dataset).ok_or("the dataset is not there (any more)")?;
            return if chunks.len() == room.len() {
                Ok(server.fetcher.serve(&dataset, &chunks))
            } else {
                Err("a slot a chunk is needed".into())
            };
        }
        let (reply, pieces) =
            server.answer(from, request, &room).await.unwrap_or_else(|reason| (Reply::Failed { reason }, Vec::new()));
        Ok(Answer { message: encode_sealed(&reply), pieces })
    }

    async fn offered(&self, from: NodeId, message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        let request = decode_sealed::<Request>(&message).map_err(Refusal::new)?;
        let reply = match request {
            Request::Ship { stage, blocks } => self.0.stages.get(stage)?.land(&self.0, blocks, incoming).await?,
            Request::ShipPiece { stage, arrival, offset, checksum } => {
                self.0.stages.get(stage)?.land_piece((arrival, offset), checksum, incoming).await?
            }
            _ => return Err("only batches are offered".into()),
        };
        if let Reply::Damaged(Damaged { at, expected, found }) = reply {
            let what = format!("block {at} of a batch");
            self.0.damage.record(Hop::Shipped, from, &what, Mismatch { expected, found });
        }
        Ok(encode_sealed(&reply))
    }
}
