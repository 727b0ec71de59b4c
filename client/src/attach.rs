//! Attaches to a session: opens connections to the node's server, and maps the files that the
//! server passes over them.
//!
//! A [`Session`] holds the mapped status page, counters and arena, a few idle connections, and the
//! list of datasets. All of it is usable from several threads and, after [`Session::after_fork`],
//! in a forked child.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dayfly_meta::id::{NodeId, SampleId, SessionId};
use dayfly_meta::limits::ORDER_PART_SAMPLES;
use dayfly_meta::status_page::{Counters, StatusPage};
use dayfly_meta::wire::VERSION;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::local::{FromClient, FromServer};
use dayfly_meta::wire::status::{Reads, Source};
use nix::libc;

use crate::arena::Arena;
use crate::current::{Current, InUse};
use crate::heartbeat::{Heartbeat, Timeouts};
use crate::locate::SessionFolder;
use crate::pool::Pool;
use crate::socket::Socket;
use crate::{ClientError, Dataset, cancellation, reserved_fd};

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
    /// This process's slot in the counters.
    slot: AtomicU32,
    pub(crate) arena: Arena,
    /// How many further batches are assumed to be cold, see [`Session::is_cold`].
    cold_batches: AtomicU32,
    /// The process that owns the connections. A forked child must not use its parent's connections.
    process: AtomicU32,
    idle: Pool<Socket>,
    /// In a box, because a session is created on the stack, and a signal handler may have a small stack.
    datasets: Box<Current<DatasetList>>,
}

struct DatasetList {
    generation: u64,
    all: Vec<Arc<Dataset>>,
}

/// The datasets of a session at one moment.
pub struct Datasets<'a>(InUse<'a, DatasetList>);

impl Deref for Datasets<'_> {
    type Target = [Arc<Dataset>];

    fn deref(&self) -> &Self::Target {
        &self.0.all
    }
}

impl Session {
    /// Attaches to the server of the node that this process belongs to.
    ///
    /// # Errors
    ///
    /// If no server of the session runs on this machine, or it does not answer or rejects the
    /// connection.
    pub fn attach(location: &SessionFolder) -> Result<Self, ClientError> {
        Self::attach_to(location, location.my_node()?)
    }

    /// Attaches to the server of a given node on this machine.
    ///
    /// # Errors
    ///
    /// If that server does not answer or rejects the connection.
    pub fn attach_to(location: &SessionFolder, node: NodeId) -> Result<Self, ClientError> {
        let _deferral = cancellation::uninterrupted();
        with_numbers(|| Self::attach_once(location, node))
    }

    fn attach_once(location: &SessionFolder, node: NodeId) -> Result<Self, ClientError> {
        let path = location.socket(node);
        let (mut socket, welcome, files) = open(&path, None).map_err(|error| error.of_node(node))?;
        let FromServer::Welcome { session, node, nodes, prefix, verify_reads, arena_len, slot, .. } = welcome else {
            return Err(ClientError::Protocol("the first answer is not a welcome"));
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
            heartbeat: Arc::new(Heartbeat::new(StatusPage::map(&status_page, false)?, socket.timeouts())),
            counters: Counters::map(&counters)?,
            slot: AtomicU32::new(slot),
            arena: Arena::map(&arena, &marks, arena_len)?,
            cold_batches: AtomicU32::new(0),
            process: AtomicU32::new(std::process::id()),
            idle: Pool::new(),
            datasets: Box::new(Current::none()),
        };
        socket.watch(session.heartbeat.clone());
        session.idle.put(Box::new(socket));
        Ok(session)
    }

    /// Returns the session's id.
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Returns the node whose server this process is attached to.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Returns the number of nodes in the session.
    pub fn nodes(&self) -> u16 {
        self.nodes
    }

    /// Returns the path below which programs see the namespace.
    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// Returns whether reads are verified against the checksums taken at stage-in.
    pub fn verifies_reads(&self) -> bool {
        self.verify_reads
    }

    /// Returns the server's status page.
    pub(crate) fn status_page(&self) -> &StatusPage {
        self.heartbeat.status_page()
    }

    /// Returns whether the session has ended. This is one read of memory.
    pub fn is_gone(&self) -> bool {
        self.status_page().is_gone()
    }

    /// Returns the datasets of the session, by number. Asks the server only if they have changed since the last call.
    ///
    /// # Errors
    ///
    /// If the session has ended or the server does not answer.
    pub fn datasets(&self) -> Result<Datasets<'_>, ClientError> {
        if self.is_gone() {
            return Err(ClientError::Gone);
        }
        if let Some(known) = self.datasets.load()
            && known.generation == self.status_page().generation()
        {
            return Ok(Datasets(known));
        }
        self.update_datasets()
    }

    #[cold]
    fn update_datasets(&self) -> Result<Datasets<'_>, ClientError> {
        let _deferral = cancellation::uninterrupted();
        let known = self.datasets.load().map_or_else(Vec::new, |known| known.all.clone());
        let (generation, all) = with_numbers(|| self.list(&known))?;
        // If the session ended in the meantime, the server's list is empty even if the session had datasets.
        if self.is_gone() {
            return Err(ClientError::Gone);
        }
        self.datasets.store(Some(Arc::new(DatasetList { generation, all })));
        // This finds a list: one was stored just now, and nothing ever removes it.
        self.datasets.load().map(Datasets).ok_or(ClientError::Gone)
    }

    /// Prepares the attachment for use in a forked child, which must call this. The child gets
    /// connections of its own and closes its copies of the parent's connections, so that the server
    /// notices when the parent exits.
    pub fn after_fork(&self) {
        let _deferral = cancellation::defer();
        reserved_fd::after_fork();
        while let Some(socket) = self.idle.take() {
            drop(socket);
        }
        self.process.store(std::process::id(), Ordering::Release);
        self.datasets.after_fork();
    }

    fn list(&self, known: &[Arc<Dataset>]) -> Result<(u64, Vec<Arc<Dataset>>), ClientError> {
        self.with_connection(|socket| {
            socket.send(&FromClient::Datasets)?;
            let mut all = Vec::new();
            loop {
                match socket.receive()? {
                    (FromServer::Dataset { id, target }, files) => match known.iter().find(|dataset| dataset.id() == id) {
                        // The dataset may have been hidden and shown again. Its files are the same,
                        // and its gone flag is clear again.
                        Some(dataset) => all.push(dataset.clone()),
                        None => all.push(Arc::new(Dataset::new(id, target, files)?)),
                    },
                    (FromServer::DatasetsEnd { generation }, _) => return Ok((generation, all)),
                    (other, _) => return Err(unexpected(other)),
                }
            }
        })
    }

    /// Asks the server again for those segments of a dataset whose descriptors the program has closed.
    ///
    /// # Errors
    ///
    /// If the server does not answer, or no longer has the dataset.
    pub fn restore(&self, dataset: &Dataset) -> Result<(), ClientError> {
        // A `vfork` child has a descriptor table of its own, but shares the memory in which its parent records reserved
        // descriptors. So the child must not restore any.
        if !self.is_own_process() {
            return Err(ClientError::Segment(std::io::Error::other("the program closed its descriptor")));
        }
        let _deferral = cancellation::uninterrupted();
        let is_restored = with_numbers(|| {
            self.with_connection(|socket| {
                socket.send(&FromClient::Datasets)?;
                let mut is_restored = false;
                loop {
                    match socket.receive()? {
                        (FromServer::Dataset { id, .. }, files) => {
                            is_restored = is_restored || id == dataset.id() && dataset.restore(files);
                        }
                        (FromServer::DatasetsEnd { .. }, _) => return Ok(is_restored),
                        (other, _) => return Err(unexpected(other)),
                    }
                }
            })
        })?;
        if is_restored { Ok(()) } else { Err(ClientError::Gone) }
    }

    /// Returns an unnamed file with room for `len` bytes in the node's data dir, for a program that
    /// needs a kernel file.
    ///
    /// # Errors
    ///
    /// If the data dir has no room, or the server does not answer.
    pub fn spill(&self, len: u64) -> Result<File, ClientError> {
        self.with_connection(|socket| {
            socket.send(&FromClient::Spill { len })?;
            match socket.receive()? {
                (FromServer::Spill, files) => files.into_iter().next().ok_or(ClientError::Protocol("an answer without its file")),
                (other, _) => Err(unexpected(other)),
            }
        })
    }

    /// Sends a command and passes each event to `on_event`, including the last one, which is the
    /// result.
    ///
    /// # Errors
    ///
    /// If the connection fails. A command that fails reports that as an event.
    pub fn control(&self, command: Command, on_event: &mut dyn FnMut(Event)) -> Result<(), ClientError> {
        self.with_connection(|socket| {
            socket.send(&FromClient::Control(command))?;
            loop {
                match socket.receive()?.0 {
                    FromServer::Event(event) => {
                        let is_last = event.is_last();
                        on_event(event);
                        if is_last {
                            return Ok(());
                        }
                    }
                    other => return Err(unexpected(other)),
                }
            }
        })
    }

    /// Makes the server prefetch samples in `order`, which is the order in which they will be read.
    /// The server stops when the result is dropped.
    ///
    /// A process may submit several orders. If it reads in a different order than it submitted, its
    /// reads are slower but correct.
    ///
    /// # Errors
    ///
    /// If the server rejects the order or does not answer.
    pub fn submit(&self, dataset: &Dataset, order: impl IntoIterator<Item = SampleId>) -> Result<Order<'_>, ClientError> {
        let _deferral = cancellation::uninterrupted();
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

    /// Runs `operation` on an idle connection of this process, or on a new one.
    pub(crate) fn with_connection<T>(
        &self,
        operation: impl FnOnce(&mut Socket) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let _deferral = cancellation::uninterrupted();
        let mut socket = self.take_socket()?;
        let result = operation(&mut socket);
        // After a failure, a late answer may still arrive on the connection, so no other request
        // may use it.
        if result.is_ok() {
            self.put_socket(socket);
        }
        result
    }

    /// Takes an idle connection of this process, or opens a new one.
    pub(crate) fn take_socket(&self) -> Result<Box<Socket>, ClientError> {
        while let Some(socket) = self.is_own_process().then(|| self.idle.take()).flatten() {
            // The program may have closed the connection's descriptor.
            if socket.is_intact() {
                return Ok(socket);
            }
        }
        let (socket, _, _) = with_numbers(|| open(&self.path, Some(self.heartbeat.clone())))?;
        self.slot.store(socket.slot(), Ordering::Relaxed);
        Ok(Box::new(socket))
    }

    /// Puts a connection back, so that another request can use it. Nothing may be in flight on it.
    pub(crate) fn put_socket(&self, socket: Box<Socket>) {
        if self.is_own_process() {
            self.idle.put(socket);
        }
    }

    /// Returns whether this process owns the idle connections. A `vfork` child, which shares its parent's memory, does not own
    /// them. Neither does a child whose fork this library did not notice.
    fn is_own_process(&self) -> bool {
        self.process.load(Ordering::Acquire) == std::process::id()
    }

    /// Adds reads to this process's counters.
    pub(crate) fn count(&self, source: Source, count: u64, bytes: u64) {
        self.counters.count(self.slot.load(Ordering::Relaxed), source, Reads { count, bytes });
    }

    /// Returns whether a batch is assumed to be cold, that is, not in memory. If `batches` is a number, that
    /// many batches, beginning with this one, are assumed to be cold from now on.
    pub(crate) fn is_cold(&self, batches: Option<u32>) -> bool {
        // Threads may race here; an approximate count is enough.
        let left = batches.unwrap_or_else(|| self.cold_batches.load(Ordering::Relaxed));
        if left > 0 {
            self.cold_batches.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }

    /// Keeps the cached blocks of this node in place until the result is dropped.
    pub(crate) fn begin_views(&self, slot: u32) -> Views<'_> {
        self.counters.begin_view(slot);
        Views { counters: &self.counters, slot }
    }
}

/// When dropped, ends the view that [`Session::begin_views`] began.
pub(crate) struct Views<'a> {
    counters: &'a Counters,
    slot: u32,
}

impl Drop for Views<'_> {
    fn drop(&mut self) {
        self.counters.end_view(self.slot);
    }
}

/// An order that the server prefetches for as long as this value lives.
pub struct Order<'a> {
    _session: &'a Session,
    /// The order ends when its connection is closed.
    _socket: Box<Socket>,
}

/// Runs `operation`, if need be with a higher limit on descriptors.
fn with_numbers<T>(operation: impl Fn() -> Result<T, ClientError>) -> Result<T, ClientError> {
    reserved_fd::with_numbers(operation, |error| match error {
        ClientError::Limit(error) => error.raw_os_error() == Some(libc::EMFILE),
        _ => false,
    })
}

/// Opens a connection and exchanges versions.
fn open(path: &Path, heartbeat: Option<Arc<Heartbeat>>) -> Result<(Socket, FromServer, Vec<File>), ClientError> {
    let mut socket = Socket::connect(path, heartbeat)?;
    socket.send(&FromClient::Hello { version: VERSION })?;
    match socket.receive() {
        Ok((FromServer::Refused { reason }, _)) => Err(ClientError::Refused(reason)),
        Ok((welcome, files)) => {
            if let FromServer::Welcome { slot, connection, server_timeout_ms, heartbeat_timeout_ms, .. } = welcome {
                let [server, heartbeat] = [server_timeout_ms, heartbeat_timeout_ms].map(|ms| Duration::from_millis(ms.into()));
                socket.welcome(slot, connection, Timeouts { server, heartbeat })?;
            }
            Ok((socket, welcome, files))
        }
        // A server that does not understand the first message closes the connection.
        Err(ClientError::Server(error)) if error.kind() == ErrorKind::UnexpectedEof => Err(ClientError::OtherBuild),
        Err(error) => Err(error),
    }
}

pub(crate) fn unexpected(answer: FromServer) -> ClientError {
    match answer {
        FromServer::Refused { reason } => ClientError::Refused(reason),
        _ => ClientError::Protocol("an answer to a different request"),
    }
}
