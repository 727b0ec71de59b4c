//! Moves messages and bulk bytes between the nodes of a session.
//!
//! # Parts
//! - [`contract`]: the traits [`Transport`], [`Connection`] and [`Service`], which every transport implements.
//! - [`tcp`]: the transport that always works. It makes three TCP connections to each peer, authenticated with the session's key.
//! - [`rdma`]: moves bulk bytes through the RDMA card if there is one, alongside a TCP transport that takes over when a card
//!   fails. `async_rdma`, enabled by the feature of that name, is a second provider.
//! - [`selection`]: all nodes use the same network; this module decides which.
//! - [`fault`]: a transport that injects faults, for tests of what is built on top.
//! - [`channel`]: a small encrypted connection for control messages, used between the supervisor and the servers.
//! - [`probe`]: measures the network between two nodes, for `dayfly doctor`.
//!
//! # Two operations
//! A [`Connection`] has two operations. Each is a small message with bulk bytes attached, and each has a deadline:
//! - [`Connection::pull`] asks; the answer's bytes land in slots of the asker.
//! - [`Connection::offer`] offers the bytes of one slot; the peer takes them when it has room.
//!
//! # Invariants
//! - Memory for bulk bytes comes from the transport ([`Transport::region`]), which registers the memory if a card is to access it.
//! - A slot goes into an operation by value and comes back only when no more bytes can land in it. When a deadline passes, the
//!   caller gets its error at once, while the slot stays with the connection.
//! - The memory that one peer can hold this way is bounded, so a peer that hangs cannot starve requests to others.
//! - Every wait has a deadline, and a peer from which no byte arrives is declared lost.
//! - A peer proves that it holds the session's key before anything else is read from it.
//!
//! # What this crate does not know
//! - Catalogs, datasets, samples and blocks: messages are bytes, and a [`Service`] gives them their meaning.
//! - Membership: the users of this crate supply the nodes and addresses.
//!
//! In turn, nothing above this crate knows whether bytes went over TCP or RDMA.
//!
//! # Example
//! One node pulls five bytes from another:
//!
//! ```
//! use std::net::Ipv4Addr;
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use async_trait::async_trait;
//! use dayfly_meta::deadlines::Deadlines;
//! use dayfly_meta::id::{NodeId, SessionId};
//! use dayfly_transport::tcp::{Identity, Purpose, Tcp};
//! use dayfly_transport::{Answer, Connection, Incoming, Key, Piece, Refusal, Service, Transport};
//!
//! struct Greeter;
//!
//! #[async_trait]
//! impl Service for Greeter {
//!     async fn pulled(&self, _from: NodeId, message: Vec<u8>, _room: Vec<u64>) -> Result<Answer, Refusal> {
//!         Ok(Answer { message, pieces: vec![Piece::Bytes(b"hello".to_vec())] })
//!     }
//!
//!     async fn offered(&self, _from: NodeId, _message: Vec<u8>, _incoming: Incoming) -> Result<Vec<u8>, Refusal> {
//!         Err("this node takes no bytes".into())
//!     }
//! }
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let key = Arc::new(Key::new([7; 32]));
//! let identity = |node| Identity {
//!     session: SessionId([1; 8]),
//!     key: key.clone(),
//!     node: NodeId(node),
//!     purpose: Purpose::Peer,
//!     deadlines: Deadlines::DEFAULT,
//! };
//! let loopback = (Ipv4Addr::LOCALHOST, 0).into();
//! let (asker, _) = Tcp::bind(identity(0), loopback).await?;
//! let (owner, address) = Tcp::bind(identity(1), loopback).await?;
//! let _serving = owner.serve(Arc::new(Greeter)).await?;
//!
//! let connection = asker.connect(NodeId(1), address).await?;
//! let region = asker.region(1 << 20)?;
//! let slot = region.slot(100).ok_or("the region is full")?;
//! let pulled = connection.pull(b"who is there?".to_vec(), vec![slot], Duration::from_secs(5)).await?;
//! assert_eq!(pulled.lens, [5]);
//! assert_eq!(&pulled.slots[0][..5], b"hello");
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "async-rdma")]
pub mod async_rdma;
mod budget;
pub mod channel;
pub mod contract;
mod error;
mod fair_queue;
pub mod fault;
mod key;
mod open;
mod page_cache;
pub mod probe;
pub mod rdma;
mod region;
pub mod selection;
pub mod silence;
pub mod tcp;

pub use contract::{Answer, Connection, Incoming, Landing, Piece, Pulled, Service, Serving, Transport, Unread};
pub use error::{LossCause, Refusal, TransportError};
pub use key::Key;
pub use open::{Options, open};
pub use rdma::Choice;
pub use region::{Region, Slot};
pub use selection::{Ability, Agreement, Obstacle, Preference, agree};

#[cfg(test)]
mod conformance;
#[cfg(test)]
#[path = "../../../meta/src/test_seed.rs"]
mod test_seed;
