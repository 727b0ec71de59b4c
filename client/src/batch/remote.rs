//! Handles the part of a batch that comes from other nodes: requests it, processes the answers, and releases the leases.

use std::collections::BTreeMap;
use std::ops::Deref;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::DatasetId;
use dayfly_meta::limits::BATCH_BLOCKS_MAX;
use dayfly_meta::wire::status::Source;

use super::{Batch, Delivery, ItemState, LeasedSample, SampleRef};
use crate::attachment::{Attachment, Connection};
use crate::fetch::{ArrivedChunk, receive_chunks, release, request_for};
use crate::{ClientError, Session};

/// The chunks that a batch needs from the server, each with the index of its sample.
#[derive(Default)]
pub(super) struct RemoteChunks {
    /// The chunks that were not requested yet, grouped by dataset.
    pub(super) waiting: BTreeMap<DatasetId, Vec<(usize, Chunk)>>,
    /// The chunks of the request in flight, in the order of the request; `None` for chunks that
    /// have been answered.
    pub(super) requested: Vec<Option<(usize, Chunk)>>,
    pub(super) connection: Option<Connection>,
    pub(super) is_in_flight: bool,
}

impl<S: Deref<Target = Session>> Batch<S> {
    /// Returns whether the connection failed, so that the batch ends before its last sample.
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Makes a later call deliver an item whose read was interrupted.
    pub(super) fn put_back(&mut self, index: usize) {
        self.can_go_on = true;
        match self.delivery {
            Delivery::InOrder => self.next = index,
            Delivery::AsAvailable => self.arrived.push_front(index),
        }
    }

    /// Sends the next request, if chunks are waiting. The request names as many chunks of one dataset as a message may name. No
    /// other request may be in flight.
    pub(super) fn send_request(&mut self) -> Result<(), ClientError> {
        if self.remote.waiting.is_empty() {
            return Ok(());
        }
        if self.session.is_gone() {
            return Err(ClientError::Gone);
        }
        if self.remote.connection.is_none() {
            let taken = self.session.take_connection();
            self.remote.connection = Some(taken.inspect_err(|error| self.can_go_on = matches!(error, ClientError::Interrupted))?);
        }
        let (Some(mut entry), Some(connection)) = (self.remote.waiting.first_entry(), &mut self.remote.connection) else {
            return Ok(());
        };
        let dataset = *entry.key();
        let count = entry.get().len().min(BATCH_BLOCKS_MAX);
        let requested: Vec<(usize, Chunk)> = entry.get_mut().drain(..count).collect();
        if entry.get().is_empty() {
            entry.remove();
        }
        self.remote.is_in_flight = true;
        let chunks = requested.iter().map(|(_, chunk)| *chunk).collect();
        self.remote.requested = requested.into_iter().map(Some).collect();
        let request = request_for(dataset, chunks, false);
        // Samples that have arrived lie in the arena of the server that has sent them.
        if self.leases.is_empty() { self.session.send_first(connection, &request) } else { connection.socket.send(&request) }
    }

    /// Processes the next part of an answer.
    pub(super) fn receive(&mut self) -> Result<(), ClientError> {
        if self.process != std::process::id() {
            return Err(ClientError::Protocol("a forked child cannot continue to read from its parent's batch"));
        }
        if self.session.is_gone() {
            return Err(ClientError::Gone);
        }
        if !self.remote.is_in_flight {
            self.send_request()?;
        }
        let Some(Connection { socket, attachment }) = self.remote.connection.as_mut().filter(|_| self.remote.is_in_flight) else {
            return Err(ClientError::Protocol("no request is in flight"));
        };
        // After a failure the request stays in flight. When the batch is dropped, its views end and then the connection is
        // closed, so that no later request mistakes a late answer for its own.
        let answer = match receive_chunks(socket, self.remote.requested.len()) {
            Err(ClientError::Interrupted) => {
                self.can_go_on = !socket.is_midway();
                return Err(ClientError::Interrupted);
            }
            answer => answer?,
        };
        let (is_held, is_last, is_empty) = (answer.is_held(attachment), answer.is_last, answer.is_empty());
        self.remote.is_in_flight = !is_last;
        if is_held {
            self.leases.extend(answer.lease);
        }
        let (mut count, mut bytes) = (0, 0);
        for (at, chunk) in answer.into_chunks() {
            // The lease was revoked before this process even read the answer, so the chunk must be requested again.
            if matches!(chunk, ArrivedChunk::Leased(_)) && !is_held {
                continue;
            }
            let Some((index, _)) = self.remote.requested.get_mut(at).and_then(Option::take) else {
                return Err(ClientError::Protocol("a chunk that was not requested"));
            };
            let len = self.items[index].as_ref().map_or(0, SampleRef::size);
            self.states[index] = match chunk {
                ArrivedChunk::Leased(chunk) => {
                    chunk.mark(attachment);
                    (count, bytes) = (count + 1, bytes + len);
                    ItemState::Leased(LeasedSample { chunk, len, is_delivered: false })
                }
                ArrivedChunk::Local => ItemState::Deferred,
                ArrivedChunk::Failed(error) => ItemState::Failed(error),
            };
            self.arrived.push_back(index);
        }
        attachment.count(Source::Asked, count, bytes);
        self.leased_bytes += bytes;
        let is_within_share = attachment.lease(bytes);
        // The arena has no room for another chunk of ours until we release some leases; or other batches of this process lease so
        // much that one more chunk for each batch would fill the arena.
        if is_last && is_empty || !is_within_share {
            self.copy_and_release()?;
        }
        if is_last { self.request_rest() } else { Ok(()) }
    }

    /// Requests the chunks that the server had no room for, and then those that were not requested yet.
    fn request_rest(&mut self) -> Result<(), ClientError> {
        let left: Vec<(usize, Chunk)> = self.remote.requested.drain(..).flatten().collect();
        if let Some(item) = left.first().and_then(|(index, _)| self.items[*index].as_ref()) {
            let waiting = self.remote.waiting.entry(item.dataset.id()).or_default();
            waiting.splice(..0, left);
        }
        self.send_request()
    }

    /// Copies all leased samples and releases their leases, because others need the room or this process has used up its share.
    pub(super) fn copy_and_release(&mut self) -> Result<(), ClientError> {
        let attachment = self.remote.attachment();
        for state in &mut self.states {
            let (ItemState::Leased(leased), Some(attachment)) = (&*state, attachment) else { continue };
            let leased = *leased;
            let bytes = leased.chunk.bytes(attachment, leased.len)?.to_vec();
            if leased.chunk.is_held(attachment) {
                *state = ItemState::Copied(bytes);
            } else if !leased.is_delivered {
                *state = ItemState::Deferred;
            }
        }
        self.release()
    }

    /// Releases the leases if the server recalls them because others are waiting for room.
    pub(super) fn release_if_recalled(&mut self) -> Result<(), ClientError> {
        let is_recalled = |Connection { socket, attachment }: &Connection| attachment.status_page().is_recalled(socket.number());
        // This runs before every sample, so the system call `getpid` comes last.
        let is_recalled = !self.leases.is_empty() && self.remote.connection.as_ref().is_some_and(is_recalled);
        if is_recalled && self.process == std::process::id() { self.copy_and_release() } else { Ok(()) }
    }

    /// Returns whether the lease was still in force when the program last looked at the sample, which was before this call.
    pub(super) fn holds(&self, leased: &LeasedSample) -> bool {
        !self.is_broken && self.remote.attachment().is_some_and(|attachment| leased.chunk.is_held(attachment))
    }

    pub(super) fn release(&mut self) -> Result<(), ClientError> {
        let leases = std::mem::take(&mut self.leases);
        if let Some(attachment) = self.remote.attachment() {
            attachment.release(std::mem::take(&mut self.leased_bytes));
        }
        match &mut self.remote.connection {
            Some(connection) => release(&mut connection.socket, leases),
            None => Ok(()),
        }
    }
}

impl RemoteChunks {
    /// Returns the server that has sent the chunks.
    pub(super) fn attachment(&self) -> Option<&Attachment> {
        self.connection.as_ref().map(|connection| &*connection.attachment)
    }

    pub(super) fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.requested.iter().all(Option::is_none)
    }
}
