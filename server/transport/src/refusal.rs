//! Why a request failed, where the failure is not an error of this node's own calls: the peer refused it, or the peer is lost.

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A refusal of one request, with its reason as text. A [`Service`](crate::Service) returns it in place of an answer, and the
/// asker gets it in [`TransportError::Refused`](crate::TransportError::Refused).
///
/// Only the text crosses the wire. Rejections that the asker should tell apart are answers of the service's own protocol; a
/// refusal is for requests that cannot be answered in that protocol at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

impl Refusal {
    /// Refuses for this reason: a text, or an error, of which the message is kept.
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
    /// The peer closed its connections, as a server does that exits.
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
    /// The cause of a connection that could not be made.
    pub fn unreachable(error: io::Error) -> Self {
        Self::Unreachable(Arc::new(error))
    }

    /// The cause of a connection that ended with `error`.
    pub fn ended(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Failed(Arc::new(error)),
        }
    }
}
