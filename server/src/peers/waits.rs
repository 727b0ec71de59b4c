//! Peers that give no sign of life, and that readers wait for: until they answer, or the supervisor has declared them lost.
//!
//! A wait has an end of its own, because a session can lose its supervisor, and because a peer may be heard and still not be able to
//! send blocks. A suspect's answer to a small request therefore does not begin it again.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::id::NodeId;
use dayfly_transport::{LossCause, TransportError};

use super::{Patience, PeerError, Peers};

/// What has been spent on each such peer since it last sent blocks. Nearly always there is none.
#[derive(Default)]
pub(super) struct Waits {
    is_any: AtomicBool,
    patience: Mutex<BTreeMap<NodeId, Patience>>,
}

impl Waits {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Patience>> {
        self.patience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn end(&self, node: NodeId) {
        if self.is_any.load(Ordering::Acquire) {
            let mut patience = self.lock();
            patience.remove(&node);
            self.is_any.store(!patience.is_empty(), Ordering::Release);
        }
    }
}

impl Peers {
    /// After a request for blocks to `node` has failed: returns whether the node may only stand still, so that it is to be asked again.
    pub(crate) fn is_waited_for(&self, node: NodeId, error: &PeerError) -> bool {
        if !self.is_still(node, error) || !self.roster().is_live(node) {
            return false;
        }
        let mut patience = self.waits.lock();
        self.waits.is_any.store(true, Ordering::Release);
        let spent = patience.entry(node).or_insert_with(|| Patience::new(self.deadlines.request)).spend();
        spent <= self.deadlines.lost_after + self.deadlines.node_silent
    }

    /// Records that a node has sent blocks.
    pub(crate) fn has_served(&self, node: NodeId) {
        self.waits.end(node);
    }

    /// Returns whether nothing has been heard from a node that did not answer a request.
    fn is_still(&self, node: NodeId, error: &PeerError) -> bool {
        let PeerError::Transport(error) = error else { return false };
        match error {
            TransportError::Lost { cause: LossCause::Unreachable(error), .. } => {
                let is_away = matches!(error.kind(), ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable);
                is_away || is_of_busy_peer(error.kind())
            }
            TransportError::Lost { .. } => true,
            // A server that runs is heard all the time. The connection of one that stands still is lost a moment later.
            TransportError::Timeout { .. } | TransportError::Stuck { .. } => {
                let dialer = self.dialers.get().and_then(|dialers| dialers.get(node.index()));
                dialer.is_some_and(|dialer| dialer.is_quiet(self.deadlines.request / 2))
            }
            _ => false,
        }
    }
}

/// Returns whether an attempt to connect failed in a way in which those to a busy peer do: it did not answer in time, or closed the
/// connection.
pub(super) fn is_of_busy_peer(kind: ErrorKind) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, TimedOut, UnexpectedEof};
    [BrokenPipe, ConnectionReset, NotConnected, TimedOut, UnexpectedEof].contains(&kind)
}
