//! Errors: why a request failed, why a peer counts as lost, and why single pieces of an answer could not be read.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::id::NodeId;

/// Why a request failed. Each kind calls for a different reaction from the caller.
///
/// The text includes the cause, because errors cross to other nodes and to users as text; the cause is also the error's
/// [`source`](std::error::Error::source).
#[derive(Debug, Clone, thiserror::Error)]
pub enum TransportError {
    /// The peer is gone, or could not be reached in the first place. A lost connection never recovers; dial again.
    #[error("node {peer} ({address}) cannot be reached: {cause}")]
    Lost {
        /// The lost node.
        peer: NodeId,
        /// The address at which it was dialed.
        address: SocketAddr,
        /// What showed that the node is lost.
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
    /// The message is longer than a message may be: it has this many bytes. This is a bug in the caller.
    #[error("a message of {0} bytes is too long")]
    TooLong(usize),
}

/// A refusal of one request, with its reason as text. A [`Service`](crate::Service) returns it in place of an answer, and the
/// asker gets it in [`TransportError::Refused`](crate::TransportError::Refused).
///
/// Only the text crosses the wire. Rejections that the asker should tell from each other are answers of the service's own protocol; a
/// refusal is for requests that cannot be answered in that protocol at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

impl Refusal {
    /// Creates a refusal from a reason, which is a text or an error. Only the message of an error is kept.
    ///
    /// ```
    /// use dayfly_transport::Refusal;
    ///
    /// let parsed: Result<u32, Refusal> = "seven".parse().map_err(Refusal::new);
    /// assert_eq!(parsed.unwrap_err().to_string(), "invalid digit found in string");
    /// ```
    pub fn new(reason: impl ToString) -> Self {
        Self(reason.to_string())
    }
}

impl From<String> for Refusal {
    fn from(reason: String) -> Self {
        Self(reason)
    }
}

impl From<&str> for Refusal {
    fn from(reason: &str) -> Self {
        Self(reason.to_owned())
    }
}

/// Why a peer counts as lost.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LossCause {
    /// No connection could be made: nothing listens there, the network does not lead there, or the handshake failed.
    #[error("cannot connect to it: {0}")]
    Unreachable(#[source] Arc<io::Error>),
    /// The peer closed its connections, as a server does when it exits.
    #[error("it closed the connection")]
    Closed,
    /// No byte arrived from the peer for this long, although it was pinged.
    #[error("no byte arrived from it for {} s", .0.as_secs_f64())]
    Silent(Duration),
    /// A stream to or from the peer failed.
    #[error("the connection failed: {0}")]
    Failed(#[source] Arc<io::Error>),
}

impl LossCause {
    /// Returns the cause of a connection that could not be made.
    pub fn unreachable(error: io::Error) -> Self {
        Self::Unreachable(Arc::new(error))
    }

    /// Returns the cause of a connection that ended with `error`.
    pub fn ended(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Failed(Arc::new(error)),
        }
    }
}

/// Why the bytes of one piece could not be read. The other pieces of the answer are sent as usual.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum PieceError {
    /// The file is shorter than the length recorded for it, so its drive lost bytes.
    #[error("the file on its drive is shorter than what was written to it")]
    Truncated,
    /// The drive, not the node, is at fault.
    #[error("its drive cannot be read: {0}")]
    Unreadable(#[source] Arc<io::Error>),
    /// The range was freed while it was read, so its bytes may be zeros.
    #[error("it was deleted while it was being read")]
    Revoked,
}

impl From<io::Error> for PieceError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            _ => Self::Unreadable(Arc::new(error)),
        }
    }
}
