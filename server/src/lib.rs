//! One node of a session: what it holds, how it gets the rest, and what it does for its processes and its peers.
//!
//! [`Server`] ties the parts together; each part is a module that knows only those below it:
//! `store` (drives, segments, datasets) ← `arena` ← `keep` ← `fetch` ← `prefetch`; `ingest` and `stage` (this node's part of a stage-in);
//! `coordinator` (the coordinator's part); `peers` (the other nodes); `clients` (the processes of this node).

mod arena;
pub mod blocking;
mod cache_writer;
mod clients;
mod coordinator;
mod fetch;
mod ingest;
mod peers;
mod prefetch;
mod server;
mod stage;
mod stats;
mod store;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};

pub use dayfly_stagein::StageInError;
pub use dayfly_stagein::plan::check_sources;
pub use dayfly_transport::{Ability, Agreement, Choice, Key, Obstacle, Options, Preference, agree, channel};
pub use server::{Server, StartError};

/// What a server is told when it starts.
#[derive(Clone)]
pub struct Config {
    /// The session.
    pub session: SessionId,
    /// Its key.
    pub key: Arc<Key>,
    /// Whether all that goes between nodes is encrypted.
    pub encrypt: bool,
    /// This node.
    pub node: NodeId,
    /// Where peers reach it; port 0 for any.
    pub listen: SocketAddr,
    /// By what it reaches them.
    pub network: Options,
    /// The session's folder: 0700, with each node's socket and lock.
    pub runtime_dir: PathBuf,
    /// Where blocks are kept.
    pub data_dirs: Vec<PathBuf>,
    /// Bytes that may be taken there, all together.
    pub capacity: u64,
    /// Size of the arena.
    pub memory: u64,
    /// The path below which programs see the namespace.
    pub prefix: Vec<u8>,
    /// Whether clients verify what they read.
    pub verify_reads: bool,
    /// Stage-in workers.
    pub workers: usize,
    /// Threads that decode one compressed source.
    pub decoders: usize,
    /// Bytes of memory for all stage-ins.
    pub stage_memory: u64,
    /// How long each wait may take.
    pub deadlines: Deadlines,
}

#[cfg(test)]
mod simulation;
