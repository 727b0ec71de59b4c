//! TCP: to each peer one connection for small messages and a few for bulk, each proved by the session's key, then plain, or sealed where that was asked for.

mod answer;
mod dial;
pub(crate) mod door;
pub(crate) mod handshake;
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
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::wire::status::Network;
use tokio::net::TcpListener;
use tokio::sync::Mutex;

use crate::{Ability, Agreement, Connection, Key, Region, Service, Serving, Transport, TransportError};

/// Who we are, and what we and our peers prove to each other.
#[derive(Clone)]
pub struct Identity {
    /// The session.
    pub session: SessionId,
    /// Its key.
    pub key: Arc<Key>,
    /// Our node.
    pub node: NodeId,
    /// What connections are for.
    pub purpose: Purpose,
    /// How long we wait for our peers.
    pub deadlines: Deadlines,
}

/// What a handshake is for: both ends must mean the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// A peer's connection, plain after the handshake.
    #[default]
    Peer,
    /// A peer's connection, every byte of it encrypted and authenticated.
    SealedPeer,
    /// A channel.
    Channel,
}

impl Purpose {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Peer => b"dayfly peer",
            Self::SealedPeer => b"dayfly sealed peer",
            Self::Channel => b"dayfly channel",
        }
    }

    /// The keys, where they are used.
    fn seal(self, keys: seal::Keys) -> Option<seal::Keys> {
        (self == Self::SealedPeer).then_some(keys)
    }
}

/// The TCP transport of one node.
pub struct Tcp {
    identity: Identity,
    listener: Mutex<Option<TcpListener>>,
}

impl Tcp {
    /// Binds the listener; peers reach us at the returned address.
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
        dial::connect(&self.identity, peer, address).await
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        let listener = self.listener.lock().await.take();
        let listener = listener.ok_or_else(|| io::Error::new(io::ErrorKind::AlreadyExists, "this node serves already"))?;
        Ok(serve::start(listener, self.identity.clone(), service))
    }

    fn ability(&self) -> Ability {
        Ability { rdma: Err("it has TCP alone".to_owned()) }
    }

    fn agree(&self, _agreement: Agreement) {}

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        Vec::new()
    }

    fn status(&self) -> Network {
        Network::default()
    }
}

/// Whether a handshake that failed so may have had to make way for others.
pub(crate) fn is_pushed_out(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof};
    [BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof].contains(&error.kind())
}

#[cfg(test)]
pub(crate) mod relay;
#[cfg(test)]
mod tests;
