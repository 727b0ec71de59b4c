//! Moves messages and bulk bytes between nodes. Knows nothing of catalogs, blocks or sessions beyond their key.
//!
//! A connection has two operations, each a small message with bulk bytes beside it, both with a deadline:
//! [`Connection::pull`], answered with bytes that land in our slots, and [`Connection::offer`], by which the far side takes
//! our bytes when it is ready. Slots go in by value and come back only when no more bytes can land in them: a deadline
//! answers the caller, while the slot stays with the connection until that is drained or dead.

#[cfg(feature = "async-rdma")]
pub mod async_rdma;
mod budget;
pub mod channel;
mod cold;
pub mod fault;
mod key;
pub mod probe;
pub mod rdma;
mod refusal;
mod region;
pub mod tcp;
mod turns;

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::status::Network;

pub use key::Key;
pub use rdma::{Ability, Agreement, Choice, Preference, agree};
pub use refusal::{LossCause, Refusal};
pub use region::{Region, Slot};

/// Why a request failed. Every kind calls for a different reaction of the caller.
///
/// The text includes the cause, because errors cross to other nodes and to users as text; the cause is also the error's
/// [`source`](std::error::Error::source).
#[derive(Debug, Clone, thiserror::Error)]
pub enum TransportError {
    /// The peer is gone, or could not be reached in the first place. A lost connection never recovers; dial again.
    #[error("node {peer} ({address}) is lost: {cause}")]
    Lost {
        /// The lost node.
        peer: NodeId,
        /// The address at which it was dialed.
        address: SocketAddr,
        /// What showed that it is lost.
        #[source]
        cause: LossCause,
    },
    /// The peer lives, but the request made no progress in time.
    #[error("node {peer} ({address}) did not answer within {} ms", timeout.as_millis())]
    Timeout {
        /// The node that was asked.
        peer: NodeId,
        /// The address at which it was dialed.
        address: SocketAddr,
        /// The request's deadline, counted from its last progress.
        timeout: Duration,
    },
    /// The peer refused the request.
    #[error("node {peer} ({address}) refused the request: {refusal}")]
    Refused {
        /// The node that was asked.
        peer: NodeId,
        /// The address at which it was dialed.
        address: SocketAddr,
        /// The reason that the peer gave.
        #[source]
        refusal: Refusal,
    },
    /// Requests to this peer that are past their deadlines hold too much of this node's memory, so no more are sent until the
    /// peer has answered them.
    #[error(
        "node {peer} ({address}) is stuck: {requests} requests for {bytes} bytes are past their deadlines. Its drive hangs or is \
         far too slow: see the kernel log of that node. Requests are sent to it again as soon as it answers"
    )]
    Stuck {
        /// The node that does not answer.
        peer: NodeId,
        /// The address at which it was dialed.
        address: SocketAddr,
        /// Number of requests past their deadlines.
        requests: u32,
        /// Bytes of memory that these requests hold.
        bytes: u64,
    },
    /// The message, of this many bytes, is longer than a message may be: a defect of the caller.
    #[error("a message of {0} bytes is too long")]
    TooLong(usize),
}

/// Bulk bytes of an answer.
pub enum Piece {
    /// A range of a file.
    File {
        /// Which.
        file: Arc<File>,
        /// From where.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Set before the file's bytes are given up: what was read before this is looked at may be zeros, and is not sent.
        revoked: Arc<AtomicBool>,
    },
    /// Bytes.
    Bytes(Vec<u8>),
}

impl Piece {
    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::File { len, .. } => *len,
            Self::Bytes(bytes) => bytes.len() as u64,
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The answer to a pull: piece *i* lands in slot *i* and must fit it.
pub struct Answer {
    /// For the asker.
    pub message: Vec<u8>,
    /// At most as many as there are slots.
    pub pieces: Vec<Piece>,
}

/// Pieces of an answer whose bytes the peer could not read. All other pieces are as they should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unread {
    /// Numbers of these pieces, ascending. What lies in their slots means nothing.
    pub pieces: Vec<u32>,
    /// Why the first of them could not be read.
    pub reason: String,
}

impl Unread {
    /// Reasons are cut to this, so that an answer has room for one.
    const REASON_CHARS_MAX: usize = 256;

    /// Adds a piece, once.
    pub(crate) fn add(&mut self, piece: usize, reason: &str) {
        if self.pieces.is_empty() {
            self.reason = reason.chars().take(Self::REASON_CHARS_MAX).collect();
        }
        if let Err(at) = self.pieces.binary_search(&(piece as u32)) {
            self.pieces.insert(at, piece as u32);
        }
    }
}

/// Says that bytes of a file could not be read, and that the drive is at fault, not the node.
pub(crate) fn drive_failure(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the file on its drive is shorter than what was written to it".to_owned(),
        _ => format!("its drive cannot be read: {error}"),
    }
}

/// Says that a file's bytes were given up while they were read.
pub(crate) const GIVEN_UP: &str = "it has just been given up";

/// An answered pull.
pub struct Pulled {
    /// The peer's message.
    pub message: Vec<u8>,
    /// The slots, with bytes in them.
    pub slots: Vec<Slot>,
    /// How many bytes landed in each slot.
    pub lens: Vec<u64>,
    /// Pieces that the peer could not read: their slots do not count.
    pub unread: Unread,
}

/// An answered offer.
pub struct Offered {
    /// The peer's message.
    pub message: Vec<u8>,
    /// What was offered, whether the peer took it or not.
    pub payload: Slot,
}

/// A way to one peer.
#[async_trait]
pub trait Connection: Send + Sync {
    /// The peer.
    fn peer(&self) -> NodeId;

    /// Whether the peer was found lost; a lost connection never recovers.
    fn is_lost(&self) -> bool;

    /// Asks; the answer's bytes land in `slots`. `timeout` counts from the last progress.
    async fn pull(&self, message: Vec<u8>, slots: Vec<Slot>, timeout: Duration) -> Result<Pulled, TransportError>;

    /// Offers the first `len` bytes of `payload`, of which the far side takes all or nothing.
    async fn offer(&self, message: Vec<u8>, payload: Slot, len: usize, timeout: Duration) -> Result<Offered, TransportError>;
}

/// What a node does with its peers' requests.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Answers a pull into slots of the given lengths. An `Err` reaches the asker as a refusal.
    async fn pulled(&self, from: NodeId, message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal>;

    /// Answers an offer; to take its bytes, lands them.
    async fn offered(&self, from: NodeId, message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal>;
}

/// Offered bytes that have not been sent yet.
pub struct Incoming {
    len: u64,
    landing: Box<dyn Landing>,
}

impl Incoming {
    /// Bytes that a transport has announced and will land when it is told where.
    pub fn new(len: u64, landing: Box<dyn Landing>) -> Self {
        Self { len, landing }
    }

    /// How many bytes are offered.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether none are.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Lets the bytes come into `slot`, which must have room for them.
    pub async fn land(self, slot: Slot) -> io::Result<Slot> {
        if (slot.len() as u64) < self.len {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the slot is too small for the offer"));
        }
        self.landing.land(slot).await
    }
}

/// How a transport lands offered bytes.
#[async_trait]
pub trait Landing: Send {
    /// Lets the bytes come into `slot`, which has room for them.
    async fn land(self: Box<Self>, slot: Slot) -> io::Result<Slot>;
}

/// A network.
#[async_trait]
pub trait Transport: Send + Sync {
    /// Shared memory from which slots come; a transport that must register memory has done so.
    fn region(&self, len: u64) -> io::Result<Region>;

    /// Finds a way to a peer, proves the key to it and has it prove it to us.
    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError>;

    /// Answers peers until the returned guard is dropped.
    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving>;

    /// What this node has to offer to the others, before they agree.
    fn ability(&self) -> Ability;

    /// Does as all have agreed. Until it is told, it tries the best it has.
    fn agree(&self, agreement: Agreement);

    /// Peers that are not reached in the agreed way, and why.
    fn fallen_back(&self) -> Vec<(NodeId, String)>;

    /// For the user.
    fn status(&self) -> Network;
}

/// What a node uses to reach its peers.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// What the user wants.
    pub preference: Preference,
    /// Which card.
    pub choice: Choice,
}

/// Binds the listener and opens the card, if there is one; peers reach us at the returned address.
pub async fn open(
    identity: tcp::Identity,
    address: SocketAddr,
    options: &Options,
) -> io::Result<(Arc<dyn Transport>, SocketAddr)> {
    let is_sealed = identity.purpose == tcp::Purpose::SealedPeer;
    let deadlines = identity.deadlines;
    let (tcp, address) = tcp::Tcp::bind(identity, address).await?;
    if is_sealed {
        return Ok((Arc::new(rdma::Rdma::without(tcp, options.preference, rdma::RdmaError::Sealed)), address));
    }
    #[cfg(feature = "async-rdma")]
    if options.preference == Preference::AsyncRdma {
        return Ok((Arc::new(async_rdma::AsyncRdma::new(tcp, &options.choice, deadlines)), address));
    }
    Ok((Arc::new(rdma::Rdma::new(tcp, options.preference, &options.choice, deadlines)), address))
}

/// A running listener; dropping it ends it and all connections that it accepted.
pub struct Serving {
    /// Ends the tasks.
    _tasks: tokio::task::JoinSet<()>,
}

impl Serving {
    /// A listener that these tasks are.
    pub fn new(tasks: tokio::task::JoinSet<()>) -> Self {
        Self { _tasks: tasks }
    }
}

#[cfg(test)]
mod conformance;
