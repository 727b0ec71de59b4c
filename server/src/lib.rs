//! The server: one node of a session. It holds its share of all blocks, fetches the rest from other nodes for the processes
//! of its node, and takes part in stage-ins.
//!
//! [`Node`] is the composition. Every other module is a part of the node. A part is given the parts that it uses, and never the
//! node itself:
//!
//! | module | what it does | uses |
//! |---|---|---|
//! | `blocking` | runs work that waits for drives | |
//! | `stats` | counts reads, latencies and damage | |
//! | `store` | drives, segments, datasets, cached blocks | |
//! | `processes` | attached processes and their counters | |
//! | `arena` | shared memory for chunks, with leases | `store` |
//! | `cache_writer` | writes copies of other nodes' blocks | `arena`, `store` |
//! | `peers` | the roster, and requests to any node, this one included | `blocking`, `stats` |
//! | `copies` | reads blocks from other nodes that hold them | `peers`, `store` |
//! | `fetch` | the read path | `arena`, `cache_writer`, `copies`, `peers`, `store` |
//! | `prefetch` | reads ahead along sample orders | `arena`, `fetch`, `store` |
//! | `room` | room for stage-ins and for cached blocks | `peers`, `prefetch`, `processes`, `store` |
//! | `recovery` | recovers the blocks of lost nodes | `fetch`, `peers`, `room`, `store` |
//! | `ingest` | stores the blocks that arrive in a stage-in | `store` |
//! | `stage_in` | this node's part of a stage-in | `arena`, `copies`, `ingest`, `peers`, `room`, `store` |
//! | `coordinator` | plans stage-ins, merges, publishes (on node 0) | `peers`, `room`, `stage_in`, `store` |
//! | `membership` | start and end of the session | `peers`, `store` |
//! | `status` | the status of the node and of the session | all of the above except `coordinator` and `membership` |
//! | `service` | answers peers, one file for each kind of request | `coordinator`, `fetch`, `membership`, `room`, `stage_in`, `status`, `store` |
//! | `clients` | answers processes of this node | `coordinator`, `fetch`, `membership`, `peers`, `prefetch`, `status`, `store` |
//! | `node` | composes all of them | all |
//!
//! # Invariants
//!
//! - Every wait has a deadline (`dayfly_meta::deadlines`), and every queue a bound (`dayfly_meta::limits`).
//! - Work that waits for drives runs on [`blocking::Blocking`], never on a runtime thread.
//! - A node sends requests to itself in the same way as to any peer: `peers` has a loopback connection to the node's own
//!   service. The one exception, for speed, is named in `stage_in::sink`.
//!
//! # What is not here
//!
//! Other crates contain the network (`dayfly-transport`), the reading of sources (`dayfly-stagein`), formats and messages
//! (`dayfly-meta`), and everything that starts servers or reads the command line. This crate prints nothing; it logs with
//! `tracing`.
//!
//! # Example
//!
//! A session of one node:
//!
//! ```
//! use std::sync::Arc;
//!
//! use dayfly_meta::deadlines::Deadlines;
//! use dayfly_meta::limits::RECOVERY_TIMEOUT_DEFAULT;
//! use dayfly_meta::id::{NodeId, SessionId};
//! use dayfly_server::{Agreement, Config, Key, Node, Options, Preference};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (runtime_dir, data_dir) = (tempfile::tempdir()?, tempfile::tempdir()?);
//! let config = Config {
//!     session: SessionId([7; 8]),
//!     key: Arc::new(Key::new([3; 32])),
//!     encrypt: false,
//!     node: NodeId(0),
//!     is_replacement: false,
//!     listen: "127.0.0.1:0".parse()?,
//!     network: Options { preference: Preference::Tcp, ..Options::default() },
//!     runtime_dir: runtime_dir.path().to_owned(),
//!     data_dirs: vec![data_dir.path().to_owned()],
//!     capacity: 64 << 20,
//!     growth: None,
//!     memory: 64 << 20,
//!     prefix: b"/dayfly".to_vec(),
//!     verify_reads: false,
//!     workers: 1,
//!     decoders: 1,
//!     pfs_streams: 16,
//!     recovery_rate: 256 << 20,
//!     recovery_timeout: RECOVERY_TIMEOUT_DEFAULT,
//!     stage_in_memory: 256 << 20,
//!     deadlines: Deadlines::DEFAULT,
//! };
//! let node = Node::start(config).await?;
//! node.join(&[node.address()], Agreement::Tcp { why: "an example".to_owned() }).await?;
//! // Programs can attach now.
//! assert!(runtime_dir.path().join("node-0.sock").exists());
//! assert_eq!(node.free_all(), 0, "nothing was staged in, so no bytes are freed");
//! node.close();
//! # Ok(())
//! # }
//! ```

mod arena;
mod beats;
pub mod blocking;
mod cache_writer;
mod catch_up;
mod clients;
mod coordinator;
mod copies;
mod fetch;
mod ingest;
mod membership;
mod node;
mod origins;
mod peers;
mod prefetch;
mod processes;
mod recovery;
mod room;
mod service;
mod stage_in;
mod stats;
mod status;
mod store;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};

pub use catch_up::CatchUpError;
pub use dayfly_stagein::StageInError;
pub use dayfly_stagein::plan::check_sources;
pub use dayfly_transport::{Ability, Agreement, Choice, Key, Obstacle, Options, Preference, agree, channel};
pub use membership::{Changes, Greeting, JoinError, LeaseTree, Loss, Patience, RejoinRequest, Renewals, Supervision, Tenure};
pub use node::{Node, StartError};
pub use store::Growth;

/// The configuration of one node.
#[derive(Clone)]
pub struct Config {
    /// The session that the node belongs to.
    pub session: SessionId,
    /// The session's key. Peers prove to each other that they know it.
    pub key: Arc<Key>,
    /// Whether everything that travels between nodes is encrypted.
    pub encrypt: bool,
    /// This node's number.
    pub node: NodeId,
    /// Whether this node joins a session that has begun, in the place of a lost server. Programs then attach to it once it is a
    /// member that shows all datasets.
    pub is_replacement: bool,
    /// The address at which peers reach this node; port 0 for any port.
    pub listen: SocketAddr,
    /// How this node reaches peers: RDMA or TCP, and over which card.
    pub network: Options,
    /// The session's folder, with mode 0700, which holds each node's socket and lock.
    pub runtime_dir: PathBuf,
    /// The directories in which blocks are stored, each on a drive.
    pub data_dirs: Vec<PathBuf>,
    /// Bytes that may be used in all data dirs together.
    pub capacity: u64,
    /// How the capacity grows if other programs make room in the data dirs.
    pub growth: Option<Growth>,
    /// Size of the arena in bytes.
    pub memory: u64,
    /// The path below which programs see the namespace.
    pub prefix: Vec<u8>,
    /// Whether clients verify the checksum of everything they read.
    pub verify_reads: bool,
    /// Worker threads of each stage-in.
    pub workers: usize,
    /// Threads that decode one compressed source.
    pub decoders: usize,
    /// Bytes of memory for all stage-ins of this node.
    pub stage_in_memory: u64,
    /// Reads of samples that this node makes at the same time on the parallel file system.
    pub pfs_streams: usize,
    /// Bytes per second that this node reads to recover the blocks of lost nodes; 0 to recover nothing in the background.
    pub recovery_rate: u64,
    /// How long readers wait for blocks of compressed tars that are read again after the loss of a node; 0 to not read them again.
    pub recovery_timeout: Duration,
    /// The deadlines and intervals of the session.
    pub deadlines: Deadlines,
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
#[path = "../../meta/src/test_seed.rs"]
mod test_seed;
