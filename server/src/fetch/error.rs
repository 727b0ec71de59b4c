//! Why a chunk cannot be read. Each error keeps its cause, and reads as one sentence for the user.

use std::fmt;
use std::sync::Arc;

use dayfly_meta::checksum::Mismatch;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::path::{display, join};

use crate::arena::LoadFailure;
use crate::blocking::JobLost;
use crate::origins::OriginFailure;
use crate::peers::PeerError;
use crate::store::Dataset;

/// Why a request did not get a chunk.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum FetchError {
    #[error("the arena is full of leased blocks; start the session with a larger --memory")]
    ArenaFull,
    #[error("the dataset has no block {}", .0.0)]
    NoSuchBlock(BlockId),
    /// The chunk's owner does not answer, and other nodes can read the chunk, or the owner may only stand still. Whoever wants the chunk
    /// asks for it again.
    #[error("its owner does not answer")]
    AskOthers,
    #[error(
        "cannot read {chunk}: the server that stored it was lost, and node {node} cannot read it again out of its compressed archive: \
         {reason}; stage such archives in with --copies 2"
    )]
    NotRecovered { chunk: ChunkName, node: NodeId, reason: String },
    #[error("node {owner} does not hold {chunk}")]
    NotHeld { owner: NodeId, chunk: ChunkName },
    #[error("node {owner} cannot read {chunk}: {reason}")]
    AtOwner { owner: NodeId, chunk: ChunkName, reason: String },
    #[error("cannot read {chunk}: {source}")]
    Read { chunk: ChunkName, source: ReadError },
    #[error(
        "node {owner}, the owner of {chunk}, has a bad copy of it: {source}; check that node's drive and stage the dataset in again"
    )]
    BadCopy { owner: NodeId, chunk: ChunkName, source: CopyError },
}

/// Why a fetch of a chunk from its owner failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ReadError {
    /// The owner could not be asked, or rejected the request, or could not read the chunk from its drive.
    #[error(transparent)]
    Peer(Arc<PeerError>),
    #[error("node {0} sent a reply that does not match the request")]
    WrongReply(NodeId),
    #[error(
        "node {owner} sent damaged bytes {attempts} times in a row: {mismatch}; \
         that node's drive or memory, or the network, is at fault"
    )]
    Damaged {
        owner: NodeId,
        attempts: usize,
        #[source]
        mismatch: Mismatch,
    },
    /// The chunk is on no drive of its owner, which is this node.
    #[error(transparent)]
    Origin(#[from] OriginFailure),
    #[error("cannot verify its bytes: {0}")]
    Verify(#[source] JobLost),
    #[error("its owner sent no bytes")]
    Nothing,
    /// Another request was fetching the chunk and failed.
    #[error(transparent)]
    Joined(LoadFailure),
}

/// What is wrong with a copy on this node's drive.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum CopyError {
    #[error(transparent)]
    Damaged(Mismatch),
    #[error(transparent)]
    Unreadable(Arc<std::io::Error>),
}

impl From<PeerError> for ReadError {
    fn from(error: PeerError) -> Self {
        Self::Peer(Arc::new(error))
    }
}

/// Names a chunk for the user by its block, and by a path of the sample that the block belongs to.
#[derive(Clone, Debug)]
pub(crate) struct ChunkName {
    block: BlockId,
    path: Vec<u8>,
}

impl ChunkName {
    pub(super) fn new(dataset: &Dataset, chunk: Chunk) -> Self {
        let catalog = dataset.catalog();
        let entry = catalog.block(chunk.block).and_then(|(sample, _)| catalog.entry_of(sample));
        let below = entry.map_or_else(Vec::new, |entry| catalog.path(&entry));
        Self { block: chunk.block, path: join(dataset.target(), &below) }
    }
}

impl fmt::Display for ChunkName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "block {} of '{}'", self.block.0, display(&self.path))
    }
}

/// Wraps the error of reading one chunk from its owner, and names the chunk.
pub(super) fn read_error(dataset: &Dataset, chunk: Chunk, source: ReadError) -> FetchError {
    FetchError::Read { chunk: ChunkName::new(dataset, chunk), source }
}
