//! The part of a batch that comes from other nodes: asking for it, taking it in, and letting go of it.

use std::collections::BTreeMap;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::DatasetId;
use dayfly_meta::limits::BATCH_BLOCKS_MAX;
use dayfly_meta::wire::local::{FetchedChunk, FromClient, FromServer};
use dayfly_meta::wire::status::Source;

use super::{Batch, Item, State};
use crate::ClientError;
use crate::attach::unexpected;
use crate::socket::Socket;

/// What was asked of the server.
#[derive(Default)]
pub(super) struct Far {
    /// To be asked for, by dataset.
    pub(super) waiting: BTreeMap<DatasetId, Vec<(usize, Chunk)>>,
    /// Asked for on this connection, and not answered yet.
    pub(super) asked: Vec<Option<(usize, Chunk)>>,
    pub(super) socket: Option<Box<Socket>>,
    pub(super) is_under_way: bool,
}

/// Bytes in the arena, leased.
#[derive(Clone, Copy)]
pub(super) struct Leased {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The connection's token when it was leased.
    token: u64,
    /// Whether it was delivered, and so may have been looked at.
    pub(super) is_delivered: bool,
}

impl Batch<'_> {
    /// Asks for what is far, if nothing is under way: of one dataset, as much as one message names.
    pub(super) fn ask(&mut self) -> Result<(), ClientError> {
        let Some(mut entry) = self.far.waiting.first_entry() else { return Ok(()) };
        let dataset = *entry.key();
        let count = entry.get().len().min(BATCH_BLOCKS_MAX);
        let asked: Vec<(usize, Chunk)> = entry.get_mut().drain(..count).collect();
        if entry.get().is_empty() {
            entry.remove();
        }
        if self.session.is_gone() {
            return Err(ClientError::Gone);
        }
        let socket = match &mut self.far.socket {
            Some(socket) => socket,
            none => none.insert(self.session.take_socket()?),
        };
        self.far.is_under_way = true;
        let request = FromClient::Fetch { dataset, chunks: asked.iter().map(|(_, chunk)| *chunk).collect(), recheck: false };
        self.far.asked = asked.into_iter().map(Some).collect();
        socket.send(&request)
    }

    /// Takes in what comes next.
    pub(super) fn receive(&mut self) -> Result<(), ClientError> {
        if self.home != std::process::id() {
            return Err(ClientError::Protocol("a batch is its process's own, not a forked child's"));
        }
        if self.session.is_gone() {
            return Err(ClientError::Gone);
        }
        if !self.far.is_under_way {
            self.ask()?;
        }
        let Some(socket) = self.far.socket.as_mut().filter(|_| self.far.is_under_way) else {
            return Err(ClientError::Protocol("nobody was asked"));
        };
        // On a failure it stays under way, and so the connection ends with the batch, and after its views: what comes on it belongs to
        // nothing any more.
        let (chunks, lease, token, is_last) = match socket.receive()?.0 {
            FromServer::Fetched { chunks, lease, token, is_last } => (chunks, lease, token, is_last),
            other => return Err(unexpected(other)),
        };
        let is_held = self.session.status_page().holds(socket.number(), token);
        self.far.is_under_way = !is_last;
        let is_nothing = chunks.is_empty();
        if lease != 0 && is_held {
            self.leases.push(lease);
        }
        let (mut count, mut bytes) = (0, 0);
        for (at, fetched) in chunks {
            // Revoked before it was even read: to be asked for again.
            if matches!(fetched, FetchedChunk::Leased { .. }) && !is_held {
                continue;
            }
            let Some((index, _)) = self.far.asked.get_mut(at as usize).and_then(Option::take) else {
                return Err(ClientError::Protocol("blocks that were not asked for"));
            };
            let size = self.items[index].as_ref().map_or(0, Item::size);
            self.states[index] = match fetched {
                FetchedChunk::Leased { offset } => {
                    self.session.arena.mark(offset);
                    (count, bytes) = (count + 1, bytes + size);
                    State::Leased(Leased { offset, len: size, token, is_delivered: false })
                }
                FetchedChunk::Here => State::Later,
                FetchedChunk::Failed { reason } => State::Failed(ClientError::Unreachable(reason)),
            };
            self.arrived.push_back(index);
        }
        self.session.count(Source::Asked, count, bytes);
        if is_last {
            if is_nothing {
                self.let_go()?;
            }
            self.ask_again()?;
        }
        Ok(())
    }

    /// What the server had no room for is asked for again, and what was not asked for yet.
    fn ask_again(&mut self) -> Result<(), ClientError> {
        let left: Vec<(usize, Chunk)> = self.far.asked.drain(..).flatten().collect();
        if let Some(item) = left.first().and_then(|(index, _)| self.items[*index].as_ref()) {
            let dataset = item.dataset.id();
            let waiting = self.far.waiting.entry(dataset).or_default();
            waiting.splice(..0, left);
        }
        self.ask()
    }

    /// Copies what is leased and gives the leases back: others need the room, or we have our share.
    pub(super) fn let_go(&mut self) -> Result<(), ClientError> {
        for state in &mut self.states {
            let State::Leased(leased) = *state else { continue };
            let Leased { offset, len, token, is_delivered } = leased;
            let bytes =
                self.session.arena.leased(offset, len).ok_or(ClientError::Protocol("a lease outside of the arena"))?.to_vec();
            if self.far.socket.as_ref().is_some_and(|socket| self.session.status_page().holds(socket.number(), token)) {
                *state = State::Owned(bytes);
            } else if !is_delivered {
                *state = State::Later;
            }
        }
        self.release()
    }

    /// Lets go if the server asks for it, because others wait for room.
    pub(super) fn let_go_if_asked(&mut self) -> Result<(), ClientError> {
        let is_asked = |socket: &Socket| self.session.status_page().is_recalled(socket.number());
        // On the way of every sample, so the system call comes last.
        let is_asked = !self.leases.is_empty() && self.far.socket.as_deref().is_some_and(is_asked);
        if is_asked && self.home == std::process::id() { self.let_go() } else { Ok(()) }
    }

    /// Whether a lease still held when what it is of was looked at, which was before this is asked.
    pub(super) fn holds(&self, leased: &Leased) -> bool {
        let is_held = |socket: &Socket| self.session.status_page().holds(socket.number(), leased.token);
        !self.is_broken && self.far.socket.as_deref().is_some_and(is_held)
    }

    pub(super) fn release(&mut self) -> Result<(), ClientError> {
        let leases = std::mem::take(&mut self.leases);
        match &mut self.far.socket {
            Some(socket) if !leases.is_empty() => socket.send(&FromClient::Release { leases }),
            _ => Ok(()),
        }
    }
}

impl Far {
    pub(super) fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.asked.iter().all(Option::is_none)
    }
}
