//! The contract between transports and their users: the traits that every transport implements, and the types that they exchange.
//!
//! - A [`Transport`] is one node's access to a network: it creates [`Region`]s, dials peers, and serves them.
//! - A [`Connection`] leads to one peer, with two operations: [`Connection::pull`] and [`Connection::offer`].
//! - A [`Service`] answers the requests of the peers.
//!
//! A slot passed to an operation comes back only when no more bytes can land in it. A request that misses its deadline returns an
//! error to its caller at once, but its slots stay with the connection until the peer has answered or the connection has ended.
//!
//! `conformance.rs` checks all transports against this contract with one test body.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::status::Network;

use crate::error::{PieceError, Refusal, TransportError};
use crate::region::{Region, Slot};
use crate::selection::{Ability, Agreement};

/// Bulk bytes of an answer.
pub enum Piece {
    /// A range of a file.
    File {
        /// The open file.
        file: Arc<File>,
        /// Offset of the first byte in the file.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Set before the range is freed. A reader checks this flag after it has read bytes: if the flag is set by then, the
        /// bytes may be zeros and must not be used.
        revoked: Arc<AtomicBool>,
    },
    /// Bytes in memory.
    Bytes(Vec<u8>),
}

impl Piece {
    /// Returns the length of the piece in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::File { len, .. } => *len,
            Self::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// Returns whether the piece has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The answer to a pull: piece *i* lands in slot *i* and must fit into it.
pub struct Answer {
    /// A message for the asker.
    pub message: Vec<u8>,
    /// The bulk bytes: at most one piece for each of the asker's slots.
    pub pieces: Vec<Piece>,
}

/// The pieces that the peer could not read when it answered a pull. All other pieces of the answer are intact.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// Numbers of these pieces, ascending. The contents of their slots are undefined.
    pub pieces: Vec<u32>,
    /// Why the first of them could not be read.
    pub reason: String,
}

impl Unread {
    /// Reasons are cut to this length, so that an answer has room for one.
    const REASON_CHARS_MAX: usize = 256;

    /// Adds a piece. Adding a piece twice is harmless.
    pub(crate) fn add(&mut self, piece: usize, error: &PieceError) {
        if self.pieces.is_empty() {
            self.reason = error.to_string().chars().take(Self::REASON_CHARS_MAX).collect();
        }
        if let Err(at) = self.pieces.binary_search(&(piece as u32)) {
            self.pieces.insert(at, piece as u32);
        }
    }
}

/// An answered pull.
pub struct Pulled {
    /// The peer's message.
    pub message: Vec<u8>,
    /// The slots of the request, filled.
    pub slots: Vec<Slot>,
    /// Number of bytes that landed in each slot.
    pub lens: Vec<u64>,
    /// Pieces that the peer could not read; their slots must not be used.
    pub unread: Unread,
}

/// A connection to one peer.
#[async_trait]
pub trait Connection: Send + Sync {
    /// Returns the node at the other end.
    fn peer(&self) -> NodeId;

    /// Returns whether the peer has been found lost. A lost connection never recovers.
    fn is_lost(&self) -> bool;

    /// Returns how long nothing has been heard from the peer. A peer that runs is heard every second.
    fn quiet_for(&self) -> Duration {
        Duration::ZERO
    }

    /// Sends a request. The bytes of its answer land in `slots`. `timeout` counts from the last progress.
    ///
    /// # Errors
    /// See [`TransportError`]. A pull into slots only reads, so a transport may send it twice; a pull without slots is sent once.
    async fn pull(&self, message: Vec<u8>, slots: Vec<Slot>, timeout: Duration) -> Result<Pulled, TransportError>;

    /// Offers the first `len` bytes of `payload`, which must be there. The peer takes all of them or none. `timeout` counts from the
    /// last progress. Returns the peer's message; `payload` is there again, whether the peer took its bytes or not.
    ///
    /// # Errors
    /// See [`TransportError`]. After an error other than a refusal, the peer may or may not have taken the bytes, and `payload` is there
    /// only if nothing reads it anymore.
    async fn offer(
        &self,
        message: Vec<u8>,
        payload: &mut Option<Slot>,
        len: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, TransportError>;
}

/// A node's answers to the requests of its peers.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Answers a pull. `room` has the lengths of the asker's slots.
    ///
    /// # Errors
    /// A refusal reaches the asker as [`TransportError::Refused`].
    async fn pulled(&self, from: NodeId, message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal>;

    /// Answers an offer. The service takes the bytes with [`Incoming::land`], or leaves them by dropping `incoming`.
    ///
    /// # Errors
    /// A refusal reaches the asker as [`TransportError::Refused`].
    async fn offered(&self, from: NodeId, message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal>;
}

/// Offered bytes that have not been sent yet.
pub struct Incoming {
    len: u64,
    landing: Box<dyn Landing>,
}

impl Incoming {
    /// Describes `len` offered bytes, which the transport moves with `landing` once there is a slot for them.
    pub fn new(len: u64, landing: Box<dyn Landing>) -> Self {
        Self { len, landing }
    }

    /// Returns the number of bytes offered.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the offer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Moves the bytes into `slot`, which must have room for them.
    ///
    /// # Errors
    /// The slot is too small, the bytes did not arrive in time, or the connection ended.
    pub async fn land(self, slot: Slot) -> io::Result<Slot> {
        if (slot.len() as u64) < self.len {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the slot is too small for the offer"));
        }
        self.landing.land(slot).await
    }
}

/// A transport's part of [`Incoming`].
#[async_trait]
pub trait Landing: Send {
    /// Moves the offered bytes into `slot`, which has room for them.
    async fn land(self: Box<Self>, slot: Slot) -> io::Result<Slot>;
}

/// One node's access to a network.
#[async_trait]
pub trait Transport: Send + Sync {
    /// Creates shared memory from which slots are allocated. A transport that must register memory registers it here.
    ///
    /// # Errors
    /// The memory cannot be created, or the user insists on RDMA and the memory cannot be registered.
    fn region(&self, len: u64) -> io::Result<Region>;

    /// Connects to a peer. Both ends prove to each other that they hold the session's key.
    ///
    /// # Errors
    /// [`TransportError::Lost`] if the peer cannot be reached or has another key.
    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError>;

    /// Answers the peers' requests until the returned guard is dropped.
    ///
    /// # Errors
    /// This transport is already serving.
    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving>;

    /// Returns the networks that this node can use, for [`agree`](crate::agree).
    fn ability(&self) -> Ability;

    /// Follows what all nodes have agreed on. Before this call, the transport uses the best network that it has.
    fn agree(&self, agreement: Agreement);

    /// Returns the peers that are not reached over the agreed network, each with the reason.
    fn fallen_back(&self) -> Vec<(NodeId, String)>;

    /// Describes the network and counts its work, for `dayfly status`.
    fn status(&self) -> Network;
}

/// A [`Transport`] whose kind is known only at run time, so that decorators can wrap it too.
#[async_trait]
impl Transport for Arc<dyn Transport> {
    fn region(&self, len: u64) -> io::Result<Region> {
        (**self).region(len)
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        (**self).connect(peer, address).await
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        (**self).serve(service).await
    }

    fn ability(&self) -> Ability {
        (**self).ability()
    }

    fn agree(&self, agreement: Agreement) {
        (**self).agree(agreement);
    }

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        (**self).fallen_back()
    }

    fn status(&self) -> Network {
        (**self).status()
    }
}

/// A running listener. Dropping it ends the listener and all connections that it accepted.
pub struct Serving {
    _tasks: tokio::task::JoinSet<()>,
}

impl Serving {
    /// Creates a listener from the tasks that run it.
    pub fn new(tasks: tokio::task::JoinSet<()>) -> Self {
        Self { _tasks: tasks }
    }
}
