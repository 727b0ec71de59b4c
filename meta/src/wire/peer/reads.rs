//! Reads: requests that are answered with bulk bytes.

use rkyv::{Archive, Deserialize, Serialize};

use crate::chunk::Chunk;
use crate::id::DatasetId;

/// A request for bytes that the peer holds.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum ReadRequest {
    /// Chunks of blocks that the peer owns, or that it reads in place of their owner, one piece and one slot for each. Reply: [`ReadReply::Chunks`].
    Chunks {
        /// The dataset of all these chunks.
        dataset: DatasetId,
        /// The chunks, in the order of the slots.
        chunks: Vec<Chunk>,
        /// Whether the peer must first examine its copies, because one of them was bad.
        recheck: bool,
        /// Whether the peer is asked in place of the owner, which does not answer.
        takes_over: bool,
    },
    /// Bytes of a sorted run, as many as fit into the slot. Reply: [`ReadReply::Bytes`].
    Run {
        /// The stage-in that the run belongs to.
        stage_in: u64,
        /// The run's index among the peer's runs.
        run: u32,
        /// Offset of the first wanted byte.
        offset: u64,
    },
    /// Bytes of a catalog that is about to be published, as many as fit into the slot. Reply:
    /// [`ReadReply::Bytes`].
    Catalog {
        /// The stage-in that made the catalog.
        stage_in: u64,
        /// Offset of the first wanted byte.
        offset: u64,
    },
    /// Bytes of the catalog of a dataset that the peer shows, as many as fit into the slot. Reply: [`ReadReply::Bytes`].
    DatasetCatalog {
        /// The dataset that has the catalog.
        dataset: DatasetId,
        /// Offset of the first wanted byte.
        offset: u64,
    },
}

/// A chunk that a peer does not send.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingChunk {
    /// The chunk's position in the request.
    pub index: u32,
    /// Why it is missing.
    pub why: WhyMissing,
}

/// Why a peer does not send a chunk.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyMissing {
    /// The peer does not own it.
    NotOwned,
    /// The peer is still reading it from its origin, or it is to come back to the peer. Ask again, or ask another holder.
    Late,
    /// The peer cannot read it.
    Failed {
        /// Index among the reply's reasons.
        reason: u32,
    },
}

/// The answer to a [`ReadRequest`].
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum ReadReply {
    /// The chunks lie in their slots.
    Chunks {
        /// Chunks that the peer does not send.
        missing: Vec<MissingChunk>,
        /// Why chunks cannot be read; each reason once.
        reasons: Vec<String>,
    },
    /// The bytes lie in the slot.
    Bytes {
        /// CRC32C of these bytes, which the transport does not check.
        checksum: u32,
    },
}
