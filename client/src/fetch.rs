//! Requests chunks that only the server can provide, and interprets its answers.
//!
//! The server answers a [`FromClient::Fetch`] in parts. A chunk in such a part is now on this node's drives, is in the arena
//! under a lease, or cannot be read. This module is the only one that interprets those answers. Two modules use it, and they
//! differ in how long they hold a lease: [`crate::read`] copies the bytes from the arena and releases the lease at once;
//! [`crate::batch`] holds the lease and lends the bytes in place.
//!
//! Invariant: a caller trusts leased bytes only if the lease still held *after* it looked at them. The server may revoke a lease
//! at any time and put another chunk into the same slot.

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::DatasetId;
use dayfly_meta::wire::local::{FetchedChunk, FromClient, FromServer};
use dayfly_meta::wire::status::Source;

use crate::ClientError;
use crate::attach::unexpected;
use crate::attachment::Attachment;
use crate::socket::Socket;

/// One part of the server's answer to a request for chunks.
pub(crate) struct FetchAnswer {
    chunks: Vec<(u32, FetchedChunk)>,
    terms: LeaseTerms,
    /// The lease on all chunks of this part that lie in the arena; `None` if none of them does.
    pub(crate) lease: Option<u64>,
    /// Whether the server has answered the whole request. It may have left chunks out, for lack of room.
    pub(crate) is_last: bool,
}

/// A chunk as it arrived.
pub(crate) enum ArrivedChunk {
    /// The block is now on this node's drives, so a local read finds it.
    Local,
    /// The bytes lie in the arena.
    Leased(LeasedChunk),
    /// The chunk cannot be read; the error names the node and what to do.
    Failed(ClientError),
}

/// A chunk in the arena, with the terms that decide whether its bytes may be trusted.
#[derive(Clone, Copy)]
pub(crate) struct LeasedChunk {
    /// Offset of its first byte in the arena.
    offset: u64,
    terms: LeaseTerms,
}

/// The connection that leases were granted to, and its token at that time. A revocation changes the token.
#[derive(Clone, Copy)]
struct LeaseTerms {
    connection: u32,
    token: u64,
}

impl LeaseTerms {
    fn hold(self, attachment: &Attachment) -> bool {
        attachment.status_page().holds(self.connection, self.token)
    }
}

/// Returns the request for chunks of a dataset. With `recheck` the server first examines this node's own copies of the chunks, and drops
/// damaged copies.
pub(crate) fn request_for(dataset: DatasetId, chunks: Vec<Chunk>, recheck: bool) -> FromClient {
    FromClient::Fetch { dataset, chunks, recheck }
}

/// Receives the next part of the answer to a request for `requested` chunks.
pub(crate) fn receive_chunks(socket: &mut Socket, requested: usize) -> Result<FetchAnswer, ClientError> {
    let (chunks, lease, token, is_last) = match socket.receive()?.0 {
        FromServer::Fetched { chunks, lease, token, is_last } => (chunks, lease, token, is_last),
        other => return Err(unexpected(other)),
    };
    if chunks.iter().any(|&(index, _)| index as usize >= requested) {
        return Err(ClientError::Protocol("a chunk that was not requested"));
    }
    let terms = LeaseTerms { connection: socket.number(), token };
    Ok(FetchAnswer { chunks, terms, lease: (lease != 0).then_some(lease), is_last })
}

/// Releases leases. The server sends no answer to this.
pub(crate) fn release(socket: &mut Socket, leases: Vec<u64>) -> Result<(), ClientError> {
    if leases.is_empty() { Ok(()) } else { socket.send(&FromClient::Release { leases }) }
}

impl FetchAnswer {
    /// Returns whether the leases of this part still hold.
    pub(crate) fn is_held(&self, attachment: &Attachment) -> bool {
        self.terms.hold(attachment)
    }

    /// Returns whether this part covers no chunks.
    pub(crate) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Returns the chunks of this part, each with its index in the request.
    pub(crate) fn into_chunks(self) -> impl Iterator<Item = (usize, ArrivedChunk)> {
        let terms = self.terms;
        self.chunks.into_iter().map(move |(index, chunk)| {
            let arrived = match chunk {
                FetchedChunk::Here => ArrivedChunk::Local,
                FetchedChunk::Leased { offset } => ArrivedChunk::Leased(LeasedChunk { offset, terms }),
                FetchedChunk::Failed { reason } => ArrivedChunk::Failed(ClientError::Unreachable(reason)),
            };
            (index as usize, arrived)
        })
    }
}

impl LeasedChunk {
    /// Returns whether the lease was still in force when the caller last looked at the bytes, which was before this call.
    pub(crate) fn is_held(&self, attachment: &Attachment) -> bool {
        self.terms.hold(attachment)
    }

    /// Returns the first `len` bytes of the chunk, in place. They are valid only if [`Self::is_held`] returns `true` afterward.
    pub(crate) fn bytes<'a>(&self, attachment: &'a Attachment, len: u64) -> Result<&'a [u8], ClientError> {
        attachment.arena.leased(self.offset, len).ok_or(OUTSIDE)
    }

    /// Records in shared memory that the chunk was read, so that the server counts it as used.
    pub(crate) fn mark(&self, attachment: &Attachment) {
        attachment.arena.mark(self.offset);
    }

    /// Copies bytes from `start` within the chunk, then marks and counts the read. Returns `false` if the lease was revoked
    /// before the copy was complete: the copy is worthless, and the chunk has to be requested again.
    pub(crate) fn copy_to(&self, attachment: &Attachment, start: u64, target: &mut [u8]) -> Result<bool, ClientError> {
        if !attachment.arena.copy_to(self.offset.saturating_add(start), target) {
            return Err(OUTSIDE);
        }
        if !self.is_held(attachment) {
            return Ok(false);
        }
        self.mark(attachment);
        attachment.count(Source::Asked, 1, target.len() as u64);
        Ok(true)
    }
}

const OUTSIDE: ClientError = ClientError::Protocol("a lease outside the arena");
