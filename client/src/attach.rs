//! Attaches to a session: opens connections to the node's server, and maps the files that the
//! server passes over them.
//!
//! A [`Session`] holds the attachment to the node's server and the list of datasets. All of it is usable
//! from several threads and, after [`Session::after_fork`], in a forked child. If the server has died or
//! ended and another one has taken its place, the session attaches to that one with the next request.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dayfly_meta::id::{DatasetId, NodeId, SampleId, SessionId};
use dayfly_meta::limits::ORDER_PART_SAMPLES;
use dayfly_meta::status_page::Tally;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::local::{FromClient, FromServer};
use dayfly_meta::wire::status::{Reads, SOURCES};
use nix::libc;

use crate::attachment::{Attachment, Connection};
use crate::current::{Current, InUse};
use crate::greeting::{open, open_first};
use crate::heartbeat::Patience;
use crate::locate::SessionFolder;
use crate::{ClientError, Dataset, cancellation, reserved_fd};

/// An attachment to a node's server.
pub struct Session {
    path: PathBuf,
    id: SessionId,
    node: NodeId,
    nodes: u16,
    prefix: Vec<u8>,
    verify_reads: bool,
    /// How many further batches are assumed to be cold, see [`Session::is_cold`].
    cold_batches: AtomicU32,
    /// The process that owns the connections. A forked child must not use its parent's connections.
    process: AtomicU32,
    /// In a box, because a session is created on the stack, and a signal handler may have a small stack.
    attachment: Box<Current<Arc<Attachment>>>,
    datasets: Box<Current<DatasetList>>,
    tally: Arc<Tally>,
}

struct DatasetList {
    attachment: Arc<Attachment>,
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
    /// Attaches to the server of the node that this process belongs to. If the server stands still, waits for it.
    ///
    /// # Errors
    ///
    /// If no server of the session runs on this machine, or it does not answer or rejects the
    /// connection.
    pub fn attach(location: &SessionFolder) -> Result<Self, ClientError> {
        Self::attach_to(location, location.my_node()?)
    }

    /// Attaches to the server of a given node on this machine. If the server stands still, waits for it.
    ///
    /// # Errors
    ///
    /// If that server does not answer or rejects the connection.
    pub fn attach_to(location: &SessionFolder, node: NodeId) -> Result<Self, ClientError> {
        Self::attach_with(location, node, Patience::Long)
    }

    /// Like [`Self::attach_to`], for a command that shows or ends the session: does not wait as long for a server that stands still.
    ///
    /// # Errors
    ///
    /// Those of [`Self::attach_to`].
    pub fn attach_briefly(location: &SessionFolder, node: NodeId) -> Result<Self, ClientError> {
        Self::attach_with(location, node, Patience::Short)
    }

    fn attach_with(location: &SessionFolder, node: NodeId, patience: Patience) -> Result<Self, ClientError> {
        let _deferral = cancellation::uninterrupted();
        with_numbers(|| Self::attach_once(location, node, patience))
    }

    fn attach_once(location: &SessionFolder, node: NodeId, patience: Patience) -> Result<Self, ClientError> {
        let path = location.socket(node);
        let (socket, welcome, files) = open_first(&path, patience).map_err(|error| error.of_node(node))?;
        let tally = Arc::<Tally>::default();
        let attachment = Attachment::new(&path, socket, &welcome, files, Arc::clone(&tally))?;
        let FromServer::Welcome { session, node, nodes, prefix, verify_reads, .. } = welcome else {
            return Err(ClientError::Protocol("the first answer is not a welcome"));
        };
        let current = Box::new(Current::none());
        current.store(Some(Arc::new(Arc::new(attachment))));
        Ok(Self {
            path,
            id: session,
            node,
            nodes,
            prefix,
            verify_reads,
            cold_batches: AtomicU32::new(0),
            process: AtomicU32::new(std::process::id()),
            attachment: current,
            datasets: Box::new(Current::none()),
            tally,
        })
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

    /// Returns the attachment to the server that runs on the node as far as this process knows.
    pub(crate) fn attachment(&self) -> Result<Arc<Attachment>, ClientError> {
        // There is always one.
        self.attachment.load().map(|attachment| Arc::clone(&attachment)).ok_or(ClientError::Gone)
    }

    /// Returns what this process has read in the session so far, by [`Source`](dayfly_meta::wire::status::Source). A forked child goes on
    /// from its parent's sums.
    pub fn reads(&self) -> [Reads; SOURCES] {
        self.tally.sums()
    }

    /// Returns whether the session has ended, at least on this node: its server has ended, and no other one has taken its place. As long
    /// as the server runs, this is one read of memory. It never waits.
    pub fn is_gone(&self) -> bool {
        self.attachment.load().is_none_or(|attachment| attachment.is_gone() && !attachment.has_successor())
    }

    /// Returns whether the session has ended, or a dataset was replaced as far as this process has heard. It never waits.
    pub fn is_dataset_gone(&self, dataset: &Dataset) -> bool {
        if self.is_gone() || !dataset.is_gone() {
            return self.is_gone();
        }
        // If the server has ended, it no longer has any dataset. What there is now, its successor has said.
        let is_known_gone =
            |known: &DatasetList| !known.attachment.is_gone() && known.all.iter().all(|other| other.id() != dataset.id());
        !dataset.attachment().is_gone() || self.datasets.load().is_some_and(|known| is_known_gone(&known))
    }

    /// Returns the datasets of the session, by number. Asks the server only if they have changed since the last call.
    ///
    /// # Errors
    ///
    /// If the session has ended or the server does not answer.
    pub fn datasets(&self) -> Result<Datasets<'_>, ClientError> {
        if let Some(known) = self.datasets.load() {
            let attachment = &known.attachment;
            if attachment.is_gone() && !self.attach_again(attachment) {
                return Err(ClientError::Gone);
            }
            let is_left = attachment.is_replaced() || attachment.is_gone();
            let is_current = known.generation == attachment.status_page().generation() && !is_left;
            // If there is no other server, what the last one has said still holds.
            if is_current && !(attachment.heartbeat().is_silent() && self.attach_again(attachment)) {
                return Ok(Datasets(known));
            }
        }
        self.update_datasets()
    }

    #[cold]
    fn update_datasets(&self) -> Result<Datasets<'_>, ClientError> {
        let _deferral = cancellation::uninterrupted();
        let known = self.datasets.load().map_or_else(Vec::new, |known| known.all.clone());
        let mut list = with_numbers(|| self.list(&known))?;
        // If the server ended in the meantime, its list is empty even if the session has datasets.
        if list.attachment.is_gone() && self.attach_again(&list.attachment) {
            list = with_numbers(|| self.list(&known))?;
        }
        if list.attachment.is_gone() {
            return Err(ClientError::Gone);
        }
        self.datasets.store(Some(Arc::new(list)));
        // This finds a list: one was stored just now, and nothing ever removes it.
        self.datasets.load().map(Datasets).ok_or(ClientError::Gone)
    }

    /// Returns a dataset as the server knows it that replaced the one from which this process has it.
    ///
    /// # Errors
    ///
    /// If the server does not answer, or no longer has the dataset.
    pub(crate) fn renewed(&self, dataset: &Dataset) -> Result<Arc<Dataset>, ClientError> {
        let datasets = self.datasets()?;
        datasets.iter().find(|known| known.id() == dataset.id()).cloned().ok_or(ClientError::Gone)
    }

    /// Returns whether this process is attached to another server than the one that it has a dataset from. If that one has ended, and
    /// not only died, it has freed its blocks. Then attaches to the server that has taken its place, if there is one.
    pub fn has_left(&self, dataset: &Dataset) -> bool {
        let attachment = dataset.attachment();
        attachment.is_replaced() || attachment.is_gone() && self.attach_again(attachment)
    }

    /// Attaches to another server if one runs on this node now. Returns whether this process is attached to another server than
    /// `old`.
    #[cold]
    pub(crate) fn attach_again(&self, old: &Arc<Attachment>) -> bool {
        let _deferral = cancellation::uninterrupted();
        // A `vfork` child shares the memory of its parent, but not its descriptors.
        if !self.is_own_process() {
            return false;
        }
        let is_other = |current: &Arc<Attachment>| !Arc::ptr_eq(current, old);
        if self.attachment().is_ok_and(|current| is_other(&current)) {
            return true;
        }
        if !old.has_successor() {
            return false;
        }
        // A signal that ended this wait would be lost, and the call would fail.
        let _whole = cancellation::Whole::begin();
        let attach = || {
            let (socket, welcome, files) = open(&self.path, None, Patience::Short)?;
            Attachment::new(&self.path, socket, &welcome, files, Arc::clone(&self.tally))
        };
        // A new server may not listen yet; a later call finds it.
        let Some(new) = old.attempt(|| with_numbers(attach).ok()) else { return false };
        self.adopt(old, new);
        true
    }

    /// Uses the attachment to a new server, unless another thread has attached to it meanwhile.
    fn adopt(&self, old: &Arc<Attachment>, new: Attachment) {
        if let Some(current) = self.attachment.load().filter(|current| Arc::ptr_eq(current, old)) {
            self.attachment.replace(&current, Arc::new(Arc::new(new)));
        }
        old.set_replaced();
    }

    /// Prepares the attachment for use in a forked child, which must call this. The child gets
    /// connections of its own and closes its copies of the parent's connections, so that the server
    /// notices when the parent exits.
    pub fn after_fork(&self) {
        let _deferral = cancellation::defer();
        reserved_fd::after_fork();
        if let Ok(attachment) = self.attachment() {
            attachment.after_fork();
        }
        self.process.store(std::process::id(), Ordering::Release);
        self.attachment.after_fork();
        self.datasets.after_fork();
    }

    fn list(&self, known: &[Arc<Dataset>]) -> Result<DatasetList, ClientError> {
        self.with_connection(&always, |Connection { socket, attachment }| {
            socket.send(&FromClient::Datasets)?;
            let mut all = Vec::new();
            loop {
                match socket.receive()? {
                    (FromServer::Dataset { id, target }, files) => match find_known(known, id, attachment) {
                        // The dataset may have been hidden and shown again. Its files are the same,
                        // and its gone flag is clear again.
                        Some(dataset) => all.push(dataset.clone()),
                        None => all.push(Arc::new(Dataset::new(id, target, files, attachment.clone())?)),
                    },
                    (FromServer::DatasetsEnd { generation }, _) => {
                        return Ok(DatasetList { attachment: attachment.clone(), generation, all });
                    }
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
            self.with_connection(&always, |Connection { socket, attachment }| {
                socket.send(&FromClient::Datasets)?;
                let (mut is_restored, is_of_server) = (false, dataset.is_of(attachment));
                loop {
                    match socket.receive()? {
                        (FromServer::Dataset { id, .. }, files) => {
                            let is_it = is_of_server && id == dataset.id();
                            is_restored = is_restored || is_it && dataset.restore(files);
                        }
                        (FromServer::DatasetsEnd { .. }, _) => return Ok(is_restored),
                        (other, _) => return Err(unexpected(other)),
                    }
                }
            })
        })?;
        if is_restored { Ok(()) } else { Err(ClientError::Gone) }
    }

    /// Sends a command and passes each event to `on_event`, including the last one, which is the
    /// result.
    ///
    /// # Errors
    ///
    /// If the connection fails. A command that fails reports that as an event. Only a stage-in waits for a server that stands still.
    pub fn control(&self, command: Command, on_event: &mut dyn FnMut(Event)) -> Result<(), ClientError> {
        let patience = if matches!(command, Command::StageIn(_)) { Patience::Long } else { Patience::Short };
        self.with_connection(&never, |Connection { socket, .. }| {
            socket.set_patience(patience);
            socket.send(&FromClient::Control(command.clone()))?;
            loop {
                match socket.receive()?.0 {
                    FromServer::Event(event) => {
                        let is_last = event.is_last();
                        on_event(event);
                        if is_last {
                            socket.set_patience(Patience::Long);
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
    pub fn submit(&self, dataset: &Dataset, order: impl IntoIterator<Item = SampleId>) -> Result<Order, ClientError> {
        let _deferral = cancellation::uninterrupted();
        let mut connection = self.take_connection()?;
        let mut order = order.into_iter().peekable();
        let mut is_first = true;
        loop {
            let samples: Vec<SampleId> = order.by_ref().take(ORDER_PART_SAMPLES).collect();
            let is_last = order.peek().is_none();
            let part = FromClient::Order { dataset: dataset.id(), samples, is_last };
            if std::mem::take(&mut is_first) {
                self.send_first(&mut connection, &part)?;
            } else {
                connection.socket.send(&part)?;
            }
            if is_last {
                break;
            }
        }
        match connection.socket.receive()?.0 {
            FromServer::Ordered => Ok(Order { _connection: connection }),
            other => Err(unexpected(other)),
        }
    }

    /// Runs `operation` on an idle connection of this process, or on a new one. If the server has died and another one has taken its
    /// place, runs `operation` again there, provided that it can be repeated.
    pub(crate) fn with_connection<T>(
        &self,
        can_repeat: &dyn Fn() -> bool,
        mut operation: impl FnMut(&mut Connection) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let _deferral = cancellation::uninterrupted();
        let mut connection = self.take_connection()?;
        let mut result = operation(&mut connection);
        if matches!(result, Err(ClientError::Server(_))) && can_repeat() && self.attach_again(&connection.attachment) {
            connection = self.take_connection()?;
            result = operation(&mut connection);
        }
        // After a failure, a late answer may still arrive on the connection, so no other request
        // may use it.
        if result.is_ok() {
            self.put_connection(connection);
        }
        result
    }

    /// Sends the first message on a connection that was idle. If the server has died and another one has taken its place, connects to
    /// that server.
    pub(crate) fn send_first(&self, connection: &mut Connection, message: &FromClient) -> Result<(), ClientError> {
        match connection.socket.send(message) {
            Err(ClientError::Server(_)) if self.attach_again(&connection.attachment) => {
                let _whole = cancellation::Whole::begin();
                *connection = self.take_connection()?;
                connection.socket.send(message)
            }
            sent => sent,
        }
    }

    /// Takes an idle connection of this process, or opens a new one.
    pub(crate) fn take_connection(&self) -> Result<Connection, ClientError> {
        let mut attachment = self.attachment()?;
        if attachment.heartbeat().is_silent() && self.attach_again(&attachment) {
            attachment = self.attachment()?;
        }
        while let Some(socket) = self.is_own_process().then(|| attachment.take_idle()).flatten() {
            // The program may have closed the connection's descriptor.
            if socket.is_intact() {
                return Ok(Connection { socket, attachment });
            }
        }
        match with_numbers(|| open(&self.path, Some(attachment.heartbeat().clone()), Patience::Long)) {
            Ok((socket, _, files)) if attachment.is_of_same_server(&files) => {
                attachment.set_slot(socket.slot());
                Ok(Connection { socket: Box::new(socket), attachment })
            }
            // A new server listens at the same path, and has just answered.
            Ok(_) => {
                attachment.attempt_at_once();
                self.connect_again(&attachment, || ClientError::Protocol("it is another server"))
            }
            Err(error @ ClientError::Server(_)) => self.connect_again(&attachment, || error),
            Err(error) => Err(error),
        }
    }

    /// Connects to the server that has taken the place of `old`. If there is none, fails with `error`.
    fn connect_again(&self, old: &Arc<Attachment>, error: impl FnOnce() -> ClientError) -> Result<Connection, ClientError> {
        if !self.attach_again(old) {
            return Err(error());
        }
        let attachment = self.attachment()?;
        if let Some(socket) = attachment.take_idle() {
            return Ok(Connection { socket, attachment });
        }
        // Another thread has taken the connection of the new attachment.
        let (socket, _, files) = with_numbers(|| open(&self.path, Some(attachment.heartbeat().clone()), Patience::Long))?;
        if !attachment.is_of_same_server(&files) {
            return Err(error());
        }
        Ok(Connection { socket: Box::new(socket), attachment })
    }

    /// Puts a connection back, so that another request can use it. Nothing may be in flight on it.
    pub(crate) fn put_connection(&self, Connection { socket, attachment }: Connection) {
        if self.is_own_process() && !attachment.is_replaced() {
            attachment.put_idle(socket);
        }
    }

    /// Returns whether this process owns the idle connections. A `vfork` child, which shares its parent's memory, does not own
    /// them. Neither does a child whose fork this library did not notice.
    fn is_own_process(&self) -> bool {
        self.process.load(Ordering::Acquire) == std::process::id()
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
}

/// An order that the server prefetches for as long as this value lives.
pub struct Order {
    /// The order ends when its connection is closed.
    _connection: Connection,
}

fn always() -> bool {
    true
}

fn never() -> bool {
    false
}

/// Returns a dataset that this process has got from the same server before.
fn find_known<'a>(known: &'a [Arc<Dataset>], id: DatasetId, attachment: &Arc<Attachment>) -> Option<&'a Arc<Dataset>> {
    known.iter().find(|dataset| dataset.id() == id && dataset.is_of(attachment))
}

/// Runs `operation`, if need be with a higher limit on descriptors.
fn with_numbers<T>(operation: impl Fn() -> Result<T, ClientError>) -> Result<T, ClientError> {
    reserved_fd::with_numbers(operation, |error| match error {
        ClientError::Limit(error) => error.raw_os_error() == Some(libc::EMFILE),
        _ => false,
    })
}

pub(crate) fn unexpected(answer: FromServer) -> ClientError {
    match answer {
        FromServer::Refused { reason } => ClientError::Refused(reason),
        _ => ClientError::Protocol("an answer to a different request"),
    }
}
