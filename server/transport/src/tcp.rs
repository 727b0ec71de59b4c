//! The TCP transport. A connection to a peer consists of three TCP streams (links): one for small messages and two for bulk
//! bytes. The session's key authenticates each link. After the handshake the link carries plain text, or sealed frames if the
//! user asked for encryption.
//!
//! # Parts
//! - Dialing side: `connection` sends requests to one peer; `links` watches all links to it and replaces those that fail;
//!   `link` has the requests under way on one link; `dial` makes a link.
//! - Listening side: `serve` accepts links and reads requests; `answer` sends the answers' bytes; `handshake_limiter` bounds
//!   the handshakes under way.
//! - Both sides: `handshake`, `seal` (encryption), `stream` (frames out) and `reader` (frames in).
//!
//! # Invariants
//! - Only the end that dialed a link sends requests on it, and the other end only answers.
//! - The bytes of a slot land only while its request is in the table of a link. A link that fails returns the slots of its requests
//!   only after its stream is closed.
//! - A file that cannot be read never ends a link: its bytes are replaced by zeros, and the answer names the piece.

mod answer;
mod connection;
mod dial;
pub(crate) mod handshake;
pub(crate) mod handshake_limiter;
mod identity;
mod link;
mod links;
mod reader;
pub(crate) mod seal;
mod serve;
mod stream;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::status::Network;
use tokio::net::TcpListener;
use tokio::sync::Mutex;

use crate::contract::{Connection, Service, Serving, Transport};
use crate::error::TransportError;
use crate::region::Region;
use crate::selection::{Ability, Agreement};

pub use identity::{Identity, Purpose};

/// The TCP transport of one node.
pub struct Tcp {
    identity: Identity,
    /// Taken by [`Transport::serve`], so that a node serves only once.
    listener: Mutex<Option<TcpListener>>,
}

impl Tcp {
    /// Binds the listener. Peers reach this node at the returned address.
    ///
    /// # Errors
    /// The address is in use or is not an address of this machine.
    pub async fn bind(identity: Identity, address: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok((Self { identity, listener: Mutex::new(Some(listener)) }, address))
    }
}

#[async_trait]
impl Transport for Tcp {
    fn region(&self, len: u64) -> io::Result<Region> {
        Region::new(len)
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        connection::connect(&self.identity, peer, address).await
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        let listener = self.listener.lock().await.take();
        let listener =
            listener.ok_or_else(|| io::Error::new(io::ErrorKind::AlreadyExists, "this node is accepting connections already"))?;
        Ok(serve::start(listener, self.identity.clone(), service))
    }

    fn ability(&self) -> Ability {
        Ability { rdma: Err("it uses TCP only".to_owned()) }
    }

    fn agree(&self, _agreement: Agreement) {}

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        Vec::new()
    }

    fn status(&self) -> Network {
        Network::default()
    }
}

#[cfg(test)]
pub(crate) mod relay;
#[cfg(test)]
mod tests;
