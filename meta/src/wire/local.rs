//! Messages between a server and the processes of its node. A connection carries one request at a
//! time, each with its answer. Descriptors travel with the answers that mention them. A client
//! that needs only local blocks sends nothing after it has attached.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::{Command, Event};
use crate::chunk::Chunk;
use crate::id::{BlockId, DatasetId, NodeId, SampleId, SessionId};

/// A request from a client.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum FromClient {
    /// The first message of a connection. Answer: `Welcome`.
    Hello {
        /// The client's [`super::VERSION`].
        version: u32,
    },
    /// Asks for all datasets. Answers: one `Dataset` for each, then `DatasetsEnd`.
    Datasets,
    /// Asks for chunks that are not in the node's locations. Answers: `Fetched` as chunks arrive;
    /// the last answer is marked as the last. If there are chunks that no answer names, or whose
    /// leases have been revoked since, the client releases leases and asks for these chunks again.
    Fetch {
        /// The dataset that the chunks belong to.
        dataset: DatasetId,
        /// At most [`crate::limits::BATCH_BLOCKS_MAX`] chunks.
        chunks: Vec<Chunk>,
        /// Whether the caller found this node's copies of the chunks unreadable or damaged. The
        /// server then examines the copies and drops damaged ones. Such a request names at most
        /// [`crate::limits::RECHECKED_CHUNKS_MAX`] chunks.
        recheck: bool,
    },
    /// The next part of an order of samples, which the server prefetches. The order ends when its
    /// connection closes. Answer to the last part: `Ordered`.
    Order {
        /// The dataset that the samples belong to.
        dataset: DatasetId,
        /// At most [`crate::limits::ORDER_PART_SAMPLES`] samples.
        samples: Vec<SampleId>,
        /// Whether this is the last part.
        is_last: bool,
    },
    /// Releases leases. The server does not answer. This is the only message that may be sent while
    /// a `Fetch` is being answered.
    Release {
        /// The leases, as named in `Fetched`.
        leases: Vec<u64>,
    },
    /// Asks for an unnamed file in a data dir of the node. Answer: `Spill`.
    Spill {
        /// The number of bytes that the file has to hold.
        len: u64,
    },
    /// A command. Answers: `Event`s; the last one is the result.
    Control(Command),
    /// Asks for a copy that all processes of the node share. Answer: `SharedCopy`.
    ShareCopy {
        /// The dataset that the bytes belong to.
        dataset: DatasetId,
        /// The bytes that the copy is to have.
        original: Original,
    },
    /// Says that the client has filled the copy that the last `SharedCopy` on this connection assigned to it. Answer: `SharedCopy`.
    CopyFilled,
}

/// An answer from a server.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum FromServer {
    /// Describes the session. Descriptors: the status page, the counters, the arena, and the
    /// arena's marks.
    Welcome {
        /// The server's [`super::VERSION`].
        version: u32,
        /// The session's id.
        session: SessionId,
        /// The server's node.
        node: NodeId,
        /// The number of nodes in the session.
        nodes: u16,
        /// The path below which programs see the namespace.
        prefix: Vec<u8>,
        /// Whether clients verify what they read against the catalog's checksums.
        verify_reads: bool,
        /// Size of the arena in bytes.
        arena_len: u64,
        /// The process's slot in the counters.
        slot: u32,
        /// The connection's number, which selects the connection's word on the status page.
        connection: u32,
        /// How long the client waits for the server, in milliseconds.
        server_timeout_ms: u32,
        /// How long the heartbeat may stand still before the client says that it waits, in milliseconds.
        heartbeat_timeout_ms: u32,
        /// How long the heartbeat may stand still while the client waits, in milliseconds.
        silence_timeout_ms: u32,
        /// The number of beats without a turn after which the client gives the server up.
        deadlock_beats: u32,
    },
    /// A dataset. Descriptors: its catalog, its locations, then its segments by drive.
    Dataset {
        /// The dataset's number.
        id: DatasetId,
        /// The path of its root, below the prefix.
        target: Vec<u8>,
    },
    /// The end of the list of datasets.
    DatasetsEnd {
        /// The status page's generation at the time of the list.
        generation: u64,
    },
    /// Some of the chunks that were asked for.
    Fetched {
        /// Each chunk by its index in the request.
        chunks: Vec<(u32, FetchedChunk)>,
        /// The lease on those chunks that lie in the arena; 0 if none does. The lease holds until
        /// it is released or revoked, or until the process ends.
        lease: u64,
        /// The connection's token when the lease was granted. The lease no longer holds once the
        /// status page has another token.
        token: u64,
        /// Whether this is the last answer to the request.
        is_last: bool,
    },
    /// The order will be prefetched.
    Ordered,
    /// Descriptor: an empty, unnamed, writable file.
    Spill,
    /// A copy that processes share. Descriptor: the copy, a file without a name, which is writable only if the client is to fill it.
    /// None while another process fills it.
    SharedCopy(CopyState),
    /// A report about a command.
    Event(Event),
    /// The request was rejected.
    Refused {
        /// A message for the user.
        reason: String,
    },
}

/// What processes share a copy of.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Original {
    /// A block, which processes map.
    Block(BlockId),
    /// A sample, which programs read as a file of the kernel, or which they run.
    Sample(SampleId),
}

/// How far a copy is.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyState {
    /// It has all bytes, and the server has checked them.
    Whole,
    /// It is empty, and the client is to fill it.
    Assigned,
    /// Another process fills it.
    Busy {
        /// The number of bytes that the copy has so far.
        filled: u64,
    },
}

/// The result for one chunk of a request.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum FetchedChunk {
    /// The chunk's block is in the node's segments by now.
    Here,
    /// The chunk is in the arena until the lease is released.
    Leased {
        /// Offset of its first byte in the arena.
        offset: u64,
    },
    /// The chunk cannot be read.
    Failed {
        /// A message for the user, which names the node and what to do.
        reason: String,
    },
}
