//! Between a server and the processes of its node: one request at a time, each with its answer. Descriptors travel beside
//! the answers that say so. A client that needs nothing but local blocks sends nothing after it has attached.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::{Command, Event};
use crate::chunk::Chunk;
use crate::id::{DatasetId, NodeId, SampleId, SessionId};

/// What a client asks.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum FromClient {
    /// The first message: who speaks, by version. Answer: `Welcome`.
    Hello {
        /// [`super::VERSION`] of the client.
        version: u32,
    },
    /// All datasets. Answers: one `Dataset` each, then `DatasetsEnd`.
    Datasets,
    /// Chunks that are not in the node's locations. Answers: `Fetched`, as they come, the last of which says so. Those that it does
    /// not name, and those whose leases were revoked meanwhile, are to be asked for again, once leases were released.
    Fetch {
        /// Their dataset.
        dataset: DatasetId,
        /// At most [`crate::limits::BATCH_BLOCKS_MAX`].
        chunks: Vec<Chunk>,
        /// The caller found this node's copies of them unreadable or wrong. The server looks for itself, and gives up those
        /// that are. At most [`crate::limits::RECHECKED_CHUNKS_MAX`] then.
        recheck: bool,
    },
    /// The order in which samples will be read, to be fetched ahead: a part of it, after those sent before. It ends with the
    /// connection. Answer to the last part: `Ordered`.
    Order {
        /// Their dataset.
        dataset: DatasetId,
        /// At most [`crate::limits::ORDER_PART_SAMPLES`].
        samples: Vec<SampleId>,
        /// Whether nothing follows.
        is_last: bool,
    },
    /// Leases that are no longer needed. No answer. The one message that may be sent while a `Fetch` is being answered.
    Release {
        /// As named in `Fetched`.
        leases: Vec<u64>,
    },
    /// A nameless file on the node's data dir. Answer: `Spill`.
    Spill {
        /// Bytes that it shall hold.
        len: u64,
    },
    /// A command. Answers: `Event`s, the last of which says that it is.
    Control(Command),
}

/// What a server answers.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum FromServer {
    /// The session. Descriptors: the status page, the counters, the arena, its marks.
    Welcome {
        /// [`super::VERSION`] of the server.
        version: u32,
        /// The session's id.
        session: SessionId,
        /// The server's node.
        node: NodeId,
        /// Number of nodes.
        nodes: u16,
        /// The path below which programs see the namespace.
        prefix: Vec<u8>,
        /// Whether clients verify what they read against the catalog's checksums.
        verify_reads: bool,
        /// Length of the arena in bytes.
        arena_len: u64,
        /// The process's place in the counters.
        slot: u32,
        /// The connection's word in the status page.
        connection: u32,
        /// How long the client waits for the server, in milliseconds.
        server_timeout_ms: u32,
        /// And for a heartbeat, when it waits.
        heartbeat_timeout_ms: u32,
    },
    /// A dataset. Descriptors: its catalog, its locations, then its segments by drive.
    Dataset {
        /// Its number.
        id: DatasetId,
        /// Its root's path below the prefix.
        target: Vec<u8>,
    },
    /// All datasets have been named.
    DatasetsEnd {
        /// The status page's generation that this answer is as new as.
        generation: u64,
    },
    /// Some of the chunks that were asked for.
    Fetched {
        /// By their place in the request.
        chunks: Vec<(u32, FetchedChunk)>,
        /// Holds all of these that are leased, until it is released or revoked, or the process ends; 0 if none is.
        lease: u64,
        /// The connection's token when they were leased: once the status page has another, none of these leases holds.
        token: u64,
        /// Whether this was all.
        is_last: bool,
    },
    /// The order will be fetched ahead.
    Ordered,
    /// Descriptor: an empty file without a name, which may be written.
    Spill,
    /// Part of a command's answer.
    Event(Event),
    /// The request is not granted.
    Refused {
        /// Why, for the user.
        reason: String,
    },
}

/// What became of a chunk that was asked for.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum FetchedChunk {
    /// Its block is in the node's segments now.
    Here,
    /// It is in the arena, until the lease is released.
    Leased {
        /// Offset of its first byte in the arena.
        offset: u64,
    },
    /// It cannot be had; names the node and what to do.
    Failed {
        /// For the user.
        reason: String,
    },
}
