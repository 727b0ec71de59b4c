//! Being part of a session: the connection to the node's server, and what came through it.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use dayfly_meta::id::{NodeId, SampleId, SessionId};
use dayfly_meta::limits::ORDER_PART_SAMPLES;
use dayfly_meta::status_page::{Counters, StatusPage};
use dayfly_meta::wire::VERSION;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::local::{FromClient, FromServer};
use dayfly_meta::wire::status::{Reads, Source};

use crate::arena::Arena;
use crate::heartbeat::{Heartbeat, Patience};
use crate::locate::Location;
use crate::pool::Pool;
use crate::socket::Socket;
use crate::{ClientError, Dataset, fork};

/// An attachment to a node's server.
pub struct Session {
    path: PathBuf,
    id: SessionId,
    node: NodeId,
    nodes: u16,
    prefix: Vec<u8>,
    verify_reads: bool,
    heartbeat: Arc<Heartbeat>,
    counters: Counters,
    /// This process's place in the counters.
    slot: AtomicU32,
    pub(crate) arena: Arena,
    /// Batches that are taken to be cold.
    cold_batches: AtomicU32,
    /// The process whose connections these are: a forked child must not speak on its parent's.
    home: AtomicU32,
    idle: Pool<Socket>,
    datasets: ArcSwap<Known>,
}

#[derive(Default)]
struct Known {
    generation: Option<u64>,
    all: Vec<Arc<Dataset>>,
}

/// The datasets of a session at some moment.
pub struct Datasets(Guard<Arc<Known>>);

impl Deref for Datasets {
    type Target = [Arc<Dataset>];

    fn deref(&self) -> &Self::Target {
        &self.0.all
    }
}

impl Session {
    /// Attaches to the server of the node that this process belongs to.
    pub fn attach(location: &Location) -> Result<Self, ClientError> {
        Self::attach_to(location, location.my_node()?)
    }

    /// Attaches to the server of a certain node of this machine.
    pub fn attach_to(location: &Location, node: NodeId) -> Result<Self, ClientError> {
        let _no_fork = fork::hold();
        let path = location.socket(node);
        let (mut socket, welcome, files) = open(&path, None).map_err(|error| match error {
            ClientError::Server(error) => ClientError::Server(std::io::Error::new(error.kind(), format!("node {node}: {error}"))),
            error => error,
        })?;
        let FromServer::Welcome { session, node, nodes, prefix, verify_reads, arena_len, slot, .. } = welcome else {
            return Err(ClientError::Protocol("no welcome"));
        };
        let [status_page, counters, arena, marks]: [File; 4] =
            files.try_into().map_err(|_| ClientError::Protocol("a welcome without its files"))?;
        let session = Self {
            path,
            id: session,
            node,
            nodes,
            prefix,
            verify_reads,
            heartbeat: Arc::new(Heartbeat::of(StatusPage::map(&status_page, false)?, socket.patience())),
            counters: Counters::map(&counters)?,
            slot: AtomicU32::new(slot),
            arena: Arena::map(&arena, &marks, arena_len)?,
            cold_batches: AtomicU32::new(0),
            home: AtomicU32::new(std::process::id()),
            idle: Pool::new(),
            datasets: ArcSwap::default(),
        };
        socket.watch(session.heartbeat.clone());
        session.idle.put(Box::new(socket));
        Ok(session)
    }

    /// The session.
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// The node whose server this is.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// How many nodes the session has.
    pub fn nodes(&self) -> u16 {
        self.nodes
    }

    /// The path below which programs see the namespace.
    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// Whether what is read is checked against the checksums taken at stage-in.
    pub fn verifies_reads(&self) -> bool {
        self.verify_reads
    }

    /// What the server tells in shared memory.
    pub(crate) fn status_page(&self) -> &StatusPage {
        self.heartbeat.status_page()
    }

    /// Whether the session has ended: one read of memory.
    pub fn is_gone(&self) -> bool {
        self.status_page().is_gone()
    }

    /// The datasets, by number. Asks the server only when they have changed since the last call.
    pub fn datasets(&self) -> Result<Datasets, ClientError> {
        if self.is_gone() {
            return Err(ClientError::Gone);
        }
        let known = self.datasets.load();
        if known.generation == Some(self.status_page().generation()) {
            return Ok(Datasets(known));
        }
        let _no_fork = fork::hold();
        let (generation, all) = self.list(&known.all)?;
        // A session that has ended since shows no dataset, which is not to say that none was there.
        if self.is_gone() {
            return Err(ClientError::Gone);
        }
        self.datasets.store(Arc::new(Known { generation: Some(generation), all }));
        Ok(Datasets(self.datasets.load()))
    }

    /// To be called in a forked child: it takes connections of its own, and ends its copies of its parent's, so that the
    /// server sees the parent's end when it comes.
    pub fn after_fork(&self) {
        while let Some(socket) = self.idle.take() {
            drop(socket);
        }
        self.home.store(std::process::id(), Ordering::Release);
    }

    fn list(&self, known: &[Arc<Dataset>]) -> Result<(u64, Vec<Arc<Dataset>>), ClientError> {
        self.with_connection(|socket| {
            socket.send(&FromClient::Datasets)?;
            let mut all = Vec::new();
            loop {
                match socket.receive()? {
                    (FromServer::Dataset { id, target }, files) => match known.iter().find(|dataset| dataset.id() == id) {
                        // Hidden and shown again, perhaps: its files are the same, and its gone flag is clear again.
                        Some(dataset) => all.push(dataset.clone()),
                        None => all.push(Arc::new(Dataset::new(id, target, files)?)),
                    },
                    (FromServer::DatasetsEnd { generation }, _) => return Ok((generation, all)),
                    (other, _) => return Err(unexpected(other)),
                }
            }
        })
    }

    /// A nameless file on the node's data dir, for `len` bytes that a program wants as a file of the kernel's.
    pub fn spill(&self, len: u64) -> Result<File, ClientError> {
        self.with_connection(|socket| {
            socket.send(&FromClient::Spill { len })?;
            match socket.receive()? {
                (FromServer::Spill, files) => files.into_iter().next().ok_or(ClientError::Protocol("no file came")),
                (other, _) => Err(unexpected(other)),
            }
        })
    }

    /// Gives a command; `see` sees each event, the last one included.
    pub fn control(&self, command: Command, see: &mut dyn FnMut(Event)) -> Result<(), ClientError> {
        self.with_connection(|socket| {
            socket.send(&FromClient::Control(command))?;
            loop {
                match socket.receive()?.0 {
                    FromServer::Event(event) => {
                        let is_last = !matches!(event, Event::Planned(_) | Event::Progress(_));
                        see(event);
                        if is_last {
                            return Ok(());
                        }
                    }
                    other => return Err(unexpected(other)),
                }
            }
        })
    }

    /// Has the server fetch ahead what will be read, in the order in which it will be: at once, and until the result is dropped. A
    /// process may have several orders; what it reads in another order than it said is only slower.
    pub fn submit(&self, dataset: &Dataset, order: impl IntoIterator<Item = SampleId>) -> Result<Order<'_>, ClientError> {
        let mut socket = self.take_socket()?;
        let mut order = order.into_iter().peekable();
        loop {
            let samples: Vec<SampleId> = order.by_ref().take(ORDER_PART_SAMPLES).collect();
            let is_last = order.peek().is_none();
            socket.send(&FromClient::Order { dataset: dataset.id(), samples, is_last })?;
            if is_last {
                break;
            }
        }
        match socket.receive()?.0 {
            FromServer::Ordered => Ok(Order { _session: self, _socket: socket }),
            other => Err(unexpected(other)),
        }
    }

    /// Speaks with the server, on an idle connection of this process or a fresh one.
    pub(crate) fn with_connection<T>(
        &self,
        operation: impl FnOnce(&mut Socket) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let mut socket = self.take_socket()?;
        let result = operation(&mut socket);
        // After a failure an answer may still be under way that belongs to nothing any more.
        if result.is_ok() {
            self.put_socket(socket);
        }
        result
    }

    /// An idle connection of this process, or a fresh one.
    pub(crate) fn take_socket(&self) -> Result<Box<Socket>, ClientError> {
        match self.is_home().then(|| self.idle.take()).flatten() {
            Some(socket) => Ok(socket),
            None => {
                let (socket, _, _) = open(&self.path, Some(self.heartbeat.clone()))?;
                self.slot.store(socket.slot(), Ordering::Relaxed);
                Ok(Box::new(socket))
            }
        }
    }

    /// Lets the next one use a connection on which nothing is under way.
    pub(crate) fn put_socket(&self, socket: Box<Socket>) {
        if self.is_home() {
            self.idle.put(socket);
        }
    }

    /// A child that shares its parent's memory (`vfork`), or whose fork we were not told of, leaves the pool alone.
    fn is_home(&self) -> bool {
        self.home.load(Ordering::Acquire) == std::process::id()
    }

    /// Counts what was read.
    pub(crate) fn count(&self, source: Source, count: u64, bytes: u64) {
        self.counters.count(self.slot.load(Ordering::Relaxed), source, Reads { count, bytes });
    }

    /// Whether a batch is taken to be cold: one just before was, or, with a number, this one is and so many will be.
    pub(crate) fn is_cold(&self, batches: Option<u32>) -> bool {
        // Roughly is enough.
        let left = batches.unwrap_or_else(|| self.cold_batches.load(Ordering::Relaxed));
        if left > 0 {
            self.cold_batches.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }

    /// From here on, until the result is dropped, what is kept on this node stays where it is found.
    pub(crate) fn begin_views(&self, slot: u32) -> Views<'_> {
        self.counters.begin_view(slot);
        Views { counters: &self.counters, slot }
    }
}

/// See [`Session::begin_views`].
pub(crate) struct Views<'a> {
    counters: &'a Counters,
    slot: u32,
}

impl Drop for Views<'_> {
    fn drop(&mut self) {
        self.counters.end_view(self.slot);
    }
}

/// An order that the server reads ahead, as long as this lives.
pub struct Order<'a> {
    _session: &'a Session,
    /// The order ends with its connection.
    _socket: Box<Socket>,
}

/// A connection on which both sides know each other.
fn open(path: &Path, heartbeat: Option<Arc<Heartbeat>>) -> Result<(Socket, FromServer, Vec<File>), ClientError> {
    let mut socket = Socket::connect(path, heartbeat)?;
    socket.send(&FromClient::Hello { version: VERSION })?;
    match socket.receive() {
        Ok((FromServer::Refused { reason }, _)) => Err(ClientError::Refused(reason)),
        Ok((welcome, files)) => {
            if let FromServer::Welcome { slot, connection, server_timeout_ms, heartbeat_timeout_ms, .. } = welcome {
                let [server, heartbeat] = [server_timeout_ms, heartbeat_timeout_ms].map(|ms| Duration::from_millis(ms.into()));
                socket.welcome(slot, connection, Patience { server, heartbeat })?;
            }
            Ok((socket, welcome, files))
        }
        // It hangs up on what it does not understand.
        Err(ClientError::Server(error)) if error.kind() == ErrorKind::UnexpectedEof => Err(ClientError::OtherBuild),
        Err(error) => Err(error),
    }
}

pub(crate) fn unexpected(answer: FromServer) -> ClientError {
    match answer {
        FromServer::Refused { reason } => ClientError::Refused(reason),
        _ => ClientError::Protocol("an answer to another question"),
    }
}
