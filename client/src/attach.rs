//! Being part of a session: the connection to the node's server, and what came through it.

use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use dayfly_meta::board::{Board, Counters};
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::wire::VERSION;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::local::{FromClient, FromServer};

use crate::arena::Arena;
use crate::locate::Location;
use crate::socket::Socket;
use crate::{ClientError, Dataset};

/// An attachment to a node's server.
pub struct Session {
    path: PathBuf,
    id: SessionId,
    node: NodeId,
    nodes: u16,
    prefix: Vec<u8>,
    verify_reads: bool,
    board: Board,
    pub(crate) counters: Counters,
    pub(crate) arena: Arena,
    connection: Mutex<Connection>,
    datasets: RwLock<Datasets>,
}

/// The socket, with the process that opened it: a forked child must not speak on its parent's.
struct Connection {
    owner: u32,
    socket: Socket,
    /// After a failure an answer may still be under way that belongs to nothing any more.
    is_broken: bool,
}

#[derive(Default)]
struct Datasets {
    generation: Option<u64>,
    all: Arc<[Arc<Dataset>]>,
}

impl Session {
    /// Attaches to the server of the node that this process belongs to.
    pub fn attach(location: &Location) -> Result<Self, ClientError> {
        Self::attach_to(location, location.my_node()?)
    }

    /// Attaches to the server of a certain node of this machine.
    pub fn attach_to(location: &Location, node: NodeId) -> Result<Self, ClientError> {
        let path = location.socket(node);
        let mut connection = Connection::open(&path)?;
        let (welcome, files) = connection.hello()?;
        let FromServer::Welcome { session, node, nodes, prefix, verify_reads, arena_len, .. } = welcome else {
            return Err(ClientError::Protocol("no welcome"));
        };
        let [board, counters, arena]: [File; 3] =
            files.try_into().map_err(|_| ClientError::Protocol("a welcome without its files"))?;
        Ok(Self {
            path,
            id: session,
            node,
            nodes,
            prefix,
            verify_reads,
            board: Board::map(&board, false)?,
            counters: Counters::map(&counters)?,
            arena: Arena::map(&arena, arena_len)?,
            connection: Mutex::new(connection),
            datasets: RwLock::default(),
        })
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

    /// Whether the session has ended: one read of memory.
    pub fn is_gone(&self) -> bool {
        self.board.is_gone()
    }

    /// The datasets, by number. Asks the server only when they have changed since the last call.
    pub fn datasets(&self) -> Result<Arc<[Arc<Dataset>]>, ClientError> {
        if self.is_gone() {
            return Err(ClientError::Gone);
        }
        let generation = self.board.generation();
        let known = self.datasets.read().unwrap_or_else(PoisonError::into_inner);
        if known.generation == Some(generation) {
            return Ok(known.all.clone());
        }
        drop(known);
        let mut known = self.datasets.write().unwrap_or_else(PoisonError::into_inner);
        let (generation, all) = self.list(&known.all)?;
        *known = Datasets { generation: Some(generation), all: all.into() };
        Ok(known.all.clone())
    }

    fn list(&self, known: &[Arc<Dataset>]) -> Result<(u64, Vec<Arc<Dataset>>), ClientError> {
        self.converse(|socket| {
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

    /// One request, one answer.
    pub(crate) fn ask(&self, request: &FromClient) -> Result<FromServer, ClientError> {
        self.converse(|socket| {
            socket.send(request)?;
            socket.receive().map(|(answer, _)| answer)
        })
    }

    /// A message without an answer.
    pub(crate) fn tell(&self, message: &FromClient) -> Result<(), ClientError> {
        self.converse(|socket| socket.send(message))
    }

    /// Gives a command; `see` sees each event, the last one included.
    pub fn control(&self, command: Command, see: &mut dyn FnMut(Event)) -> Result<(), ClientError> {
        self.converse(|socket| {
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

    /// Speaks with the server, on this process's own connection, a fresh one if the last one broke.
    fn converse<T>(&self, speak: impl FnOnce(&mut Socket) -> Result<T, ClientError>) -> Result<T, ClientError> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        if connection.is_broken || connection.owner != std::process::id() {
            *connection = Connection::open(&self.path)?;
            connection.hello()?;
        }
        let result = speak(&mut connection.socket);
        connection.is_broken = result.is_err();
        result
    }
}

impl Connection {
    fn open(path: &std::path::Path) -> Result<Self, ClientError> {
        Ok(Self { owner: std::process::id(), socket: Socket::connect(path)?, is_broken: false })
    }

    fn hello(&mut self) -> Result<(FromServer, Vec<File>), ClientError> {
        self.socket.send(&FromClient::Hello { version: VERSION })?;
        match self.socket.receive()? {
            (FromServer::Refused { reason }, _) => Err(ClientError::Refused(reason)),
            other => Ok(other),
        }
    }
}

pub(crate) fn unexpected(answer: FromServer) -> ClientError {
    match answer {
        FromServer::Refused { reason } => ClientError::Refused(reason),
        _ => ClientError::Protocol("an answer to another question"),
    }
}
