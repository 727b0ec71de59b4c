//! Serves the processes of this node through a Unix socket that only the same user may use.
//!
//! Each connection is served by a [`Client`], which answers one request at a time. A process holds leases on memory of the
//! arena through its connection. The leases end with the connection, or with the process that opened it, even if a forked child
//! has inherited the connection. The parts:
//!
//! - `fetch_reply`: answers a fetch, in several messages as chunks arrive;
//! - `control`: command-line commands: status, tune, stage-in, down;
//! - `read_ahead`: fetches ahead of a process that reads a large file in order;
//! - `socket`: messages on the socket.
//!
//! Invariants: a client that takes no message for a long time loses its leases. It costs memory for at most one message and one
//! part of an answer. A client that holds leases never waits for room in the arena, so clients cannot wait for each other.

mod control;
mod fetch_reply;
mod read_ahead;
mod socket;

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{DatasetId, NodeId, SampleId, SessionId};
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, CLIENTS_MAX, ORDER_PART_SAMPLES, RECHECKED_CHUNKS_MAX};
use dayfly_meta::wire::local::{CopyState, FromClient, FromServer, Original};
use dayfly_meta::wire::{VERSION, decode};
use nix::unistd::geteuid;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::arena::{Arena, Lease, LeaseHolder};
use crate::blocking::Blocking;
use crate::fetch::Fetcher;
use crate::membership::Membership;
use crate::peers::Peers;
use crate::prefetch::{Prefetcher, SampleOrder};
use crate::processes::{Attachment, Processes, exit_of};
use crate::room::Room;
use crate::stats::ClientReads;
use crate::status::StatusReporter;
use crate::store::{Filling, Share, ShareError, Store};
use read_ahead::ReadAhead;
use socket::{Receiver, Sender};

/// The pause after a failed `accept`. Most likely the server is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The parts of a node that its clients use.
pub(crate) struct ClientContext {
    pub(crate) session: SessionId,
    pub(crate) node: NodeId,
    /// The path below which programs see the namespace.
    pub(crate) prefix: Vec<u8>,
    pub(crate) verify_reads: bool,
    /// The session's folder, in which the socket lies.
    pub(crate) runtime_dir: PathBuf,
    pub(crate) store: Arc<Store>,
    pub(crate) room: Arc<Room>,
    pub(crate) arena: Arena,
    pub(crate) fetcher: Arc<Fetcher>,
    pub(crate) prefetcher: Arc<Prefetcher>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) processes: Arc<Processes>,
    pub(crate) client_reads: Arc<ClientReads>,
    pub(crate) membership: Arc<Membership>,
    pub(crate) status: Arc<StatusReporter>,
    pub(crate) blocking: Arc<dyn Blocking>,
}

impl ClientContext {
    fn deadlines(&self) -> &Deadlines {
        self.peers.deadlines()
    }
}

/// The socket, and the tasks that serve its clients. Dropping it ends all of them.
pub(crate) struct ClientListener {
    path: PathBuf,
    _tasks: JoinSet<()>,
}

impl ClientListener {
    /// Binds the node's socket in the session's folder, and starts to serve.
    pub(crate) fn start(context: ClientContext) -> io::Result<Self> {
        let path = context.runtime_dir.join(format!("node-{}.sock", context.node));
        // This node's lock is held, so the socket of an earlier server, which was killed, belongs to nobody.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        let mut tasks = JoinSet::new();
        tasks.spawn(accept_all(listener, Arc::new(context)));
        Ok(Self { path, _tasks: tasks })
    }
}

impl Drop for ClientListener {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(%error, "the socket for programs was removed already");
        }
    }
}

async fn accept_all(listener: UnixListener, context: Arc<ClientContext>) {
    // Without this, a program would not find a dataset that the server of this node has shown before.
    context.membership.opened().await;
    let permits = Arc::new(Semaphore::new(CLIENTS_MAX));
    let mut clients = JoinSet::new();
    let mut failures = 0_u64;
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let accepted = listener.accept().await;
        while clients.try_join_next().is_some() {}
        let stream = match accepted {
            Ok((stream, _)) => {
                failures = 0;
                stream
            }
            Err(error) => {
                failures += 1;
                // The first, the second, the fourth, ...: the cause may last for hours.
                if failures.is_power_of_two() {
                    tracing::warn!(%error, failures, "cannot accept a client");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // The folder's mode is already 0700. This check protects the socket even if somebody changes the mode.
        let pid = match stream.peer_cred() {
            Ok(peer) if peer.uid() == geteuid().as_raw() => peer.pid().unwrap_or(0),
            _ => {
                tracing::warn!("a process of another user was rejected");
                continue;
            }
        };
        let context = context.clone();
        clients.spawn(async move {
            let attachment = context.processes.attach(context.store.counters(), pid);
            let holder = context.arena.ledger().open(pid);
            let mut client = Client::new(socket::split(stream, context.deadlines().send), attachment, holder, context.clone());
            tokio::select! {
                // Serving stops when the process ends. It does not wait for the end of the connection, because a forked child
                // may hold the connection open for longer.
                () = exit_of(pid) => {}
                served = client.serve() => if let Err(error) = served {
                    tracing::debug!(pid, %error, "the connection of a client failed");
                },
            }
            let has_made_room = client.has_made_room;
            drop((client, permit));
            // What the process had copied takes no more room, unless another one still uses it: then the drive says so.
            if has_made_room && let Err(error) = context.room.plan_cache().await {
                tracing::warn!(%error, "cannot plan again which blocks this node caches after a process has ended");
            }
        });
    }
}

/// One connection of a process.
struct Client {
    receiver: Receiver,
    sender: Sender,
    attachment: Attachment,
    /// Holds the connection's leases. Dropping the holder revokes them, however the connection ends.
    holder: LeaseHolder<Lease>,
    context: Arc<ClientContext>,
    read_ahead: ReadAhead,
    /// A sample order that is still arriving in parts.
    order: SampleOrder,
    /// The copy that the client fills. If the connection ends before that, the copy is given up.
    filling: Option<Filling>,
    /// Whether cached blocks may have made way for copies that the client has made.
    has_made_room: bool,
    /// The task that reads ahead along the connection's sample order. It ends with the connection.
    tasks: JoinSet<()>,
}

impl Client {
    fn new(
        (receiver, sender): (Receiver, Sender),
        attachment: Attachment,
        holder: LeaseHolder<Lease>,
        context: Arc<ClientContext>,
    ) -> Self {
        Self {
            receiver,
            sender,
            attachment,
            holder,
            context,
            read_ahead: ReadAhead::default(),
            order: SampleOrder::default(),
            filling: None,
            has_made_room: false,
            tasks: JoinSet::new(),
        }
    }

    async fn serve(&mut self) -> io::Result<()> {
        let hello = self.receiver.receive().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        match decode::<FromClient>(&hello) {
            Ok(FromClient::Hello { version: VERSION }) => self.welcome().await?,
            Ok(FromClient::Hello { version }) => {
                let reason = format!(
                    "this server uses version {VERSION} of the protocol, and the client uses version {version}; use the dayfly \
                     that started the session"
                );
                return self.refuse(&reason).await;
            }
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "the first message is not a hello")),
        }
        while let Some(message) = self.receiver.receive().await? {
            let message = decode::<FromClient>(&message).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            self.answer(message).await?;
        }
        Ok(())
    }

    async fn answer(&mut self, message: FromClient) -> io::Result<()> {
        match message {
            FromClient::Hello { .. } => self.welcome().await,
            FromClient::Datasets => self.list_datasets().await,
            FromClient::Fetch { dataset, chunks, recheck } => match self.context.store.dataset(dataset) {
                Some(_) if chunks.len() > BATCH_BLOCKS_MAX => {
                    self.refuse(&format!("more than {BATCH_BLOCKS_MAX} chunks in one request")).await
                }
                Some(_) if recheck && chunks.len() > RECHECKED_CHUNKS_MAX => {
                    self.refuse(&format!("more than {RECHECKED_CHUNKS_MAX} chunks to recheck in one request")).await
                }
                Some(dataset) => self.fetch(&dataset, &chunks, recheck).await,
                None => self.refuse("the dataset no longer exists").await,
            },
            FromClient::Release { leases } => {
                self.holder.release(&leases);
                Ok(())
            }
            FromClient::Order { dataset, samples, is_last } => self.order(dataset, samples, is_last).await,
            FromClient::Spill { len } => self.spill(len).await,
            FromClient::Control(command) => self.control(command).await,
            FromClient::ShareCopy { dataset, original } => self.share_copy(dataset, original).await,
            FromClient::CopyFilled => self.finish_copy().await,
        }
    }

    async fn refuse(&self, reason: &str) -> io::Result<()> {
        self.sender.send(&FromServer::Refused { reason: reason.to_owned() }, &[]).await
    }

    async fn welcome(&self) -> io::Result<()> {
        let context = &self.context;
        let deadlines = context.deadlines();
        let welcome = FromServer::Welcome {
            version: VERSION,
            session: context.session,
            node: context.node,
            nodes: context.peers.count() as u16,
            prefix: context.prefix.clone(),
            verify_reads: context.verify_reads,
            arena_len: context.arena.len(),
            slot: self.attachment.slot(),
            connection: self.holder.connection(),
            server_timeout_ms: deadlines.server.as_millis() as u32,
            heartbeat_timeout_ms: deadlines.heartbeat.as_millis() as u32,
            silence_timeout_ms: deadlines.silence().as_millis() as u32,
            deadlock_beats: deadlines.deadlock_beats(),
        };
        let (status_page, counters) = context.store.shared_files();
        let (arena, marks) = context.arena.files();
        self.sender.send(&welcome, &[status_page, counters, arena, marks]).await
    }

    async fn list_datasets(&self) -> io::Result<()> {
        // The generation is read first, so that a change during the listing makes the client ask again.
        let generation = self.context.store.generation();
        for dataset in self.context.store.datasets() {
            let files = dataset.client_files()?;
            let message = FromServer::Dataset { id: dataset.id(), target: dataset.target().to_vec() };
            self.sender.send(&message, &files.iter().collect::<Vec<_>>()).await?;
        }
        self.sender.send(&FromServer::DatasetsEnd { generation }, &[]).await
    }

    /// Takes a part of a sample order. With the last part, starts to read ahead along the order, and stops reading ahead along
    /// the previous one.
    async fn order(&mut self, dataset: DatasetId, samples: Vec<SampleId>, is_last: bool) -> io::Result<()> {
        if samples.len() > ORDER_PART_SAMPLES {
            return self.refuse(&format!("more than {ORDER_PART_SAMPLES} samples in one part of an order")).await;
        }
        if !self.order.extend(&self.context.prefetcher, samples) {
            self.order = SampleOrder::default();
            return self.refuse("the sample orders of this node have too many samples").await;
        }
        if !is_last {
            return Ok(());
        }
        let order = std::mem::take(&mut self.order);
        self.tasks.abort_all();
        let Some(dataset) = self.context.store.dataset(dataset) else {
            return self.refuse("the dataset no longer exists").await;
        };
        self.tasks.spawn(self.context.prefetcher.clone().run(dataset, order));
        self.sender.send(&FromServer::Ordered, &[]).await
    }

    /// Answers with a copy that all processes of this node share, or assigns it to the client. Cached blocks make way for it.
    async fn share_copy(&mut self, dataset: DatasetId, original: Original) -> io::Result<()> {
        self.filling = None;
        let (store, blocking) = (self.context.store.clone(), self.context.blocking.clone());
        let share = move || {
            let store = store.clone();
            blocking.run(move || store.share_copy(dataset, original))
        };
        let mut shared = share().await.map_err(io::Error::other)?;
        if let Err(ShareError::NoRoom(len)) = shared {
            self.has_made_room = true;
            if self.context.room.make_room_for_copy(len).await.is_ok_and(|has_room| has_room) {
                shared = share().await.map_err(io::Error::other)?;
            }
        }
        let answer = |state| FromServer::SharedCopy(state);
        match shared {
            Ok(Share::Whole(file)) => self.sender.send(&answer(CopyState::Whole), &[&file]).await,
            Ok(Share::Busy(filled)) => self.sender.send(&answer(CopyState::Busy { filled }), &[]).await,
            Ok(Share::Assigned(filling)) => {
                let filling = self.filling.insert(filling);
                self.sender.send(&answer(CopyState::Assigned), &[filling.file()]).await
            }
            Err(error) => self.refuse(&error.to_string()).await,
        }
    }

    /// Gives the copy that the client has filled to all processes.
    async fn finish_copy(&mut self) -> io::Result<()> {
        let Some(filling) = self.filling.take() else { return self.refuse("no copy was assigned").await };
        let finished = self.context.blocking.run(move || filling.finish()).await;
        match finished.map_err(io::Error::other)? {
            Ok(file) => self.sender.send(&FromServer::SharedCopy(CopyState::Whole), &[&file]).await,
            Err(error) => {
                tracing::warn!(%error, "a process has failed to make a copy");
                self.refuse(&error.to_string()).await
            }
        }
    }

    /// Creates an unnamed file for a program that needs a real file. Cached blocks make way for it. The space is not reserved, because
    /// the server does not see when the program is done with the file.
    async fn spill(&mut self, len: u64) -> io::Result<()> {
        self.has_made_room = true;
        let (store, node) = (self.context.store.clone(), self.context.node);
        let has_room = match self.context.room.make_room_for_copy(len).await {
            Ok(has_room) => has_room,
            Err(error) => return self.refuse(&format!("node {node} cannot make room for a copy: {error}")).await,
        };
        let created = self.context.blocking.run(move || {
            let drive = store.roomiest_drive();
            if !has_room {
                let (path, len) = (drive.path().display(), len.div_ceil(1 << 20));
                return Err(format!(
                    "node {node} has no room on '{path}' for a copy of {len} MiB, which a mapping, or a program that gets the file as its \
                     standard input, needs; free some, or start the session with a larger --capacity"
                ));
            }
            drive.unnamed_file().map_err(|error| format!("node {node} cannot create a file: {error}"))
        });
        match created.await.map_err(io::Error::other)? {
            Ok(file) => self.sender.send(&FromServer::Spill, &[&file]).await,
            Err(reason) => self.refuse(&reason).await,
        }
    }
}
