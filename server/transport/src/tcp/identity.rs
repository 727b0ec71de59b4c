//! The identity that a node proves to the other end of each connection.

use std::sync::Arc;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};

use super::seal::Keys;
use crate::key::Key;

/// The identity of this node, which is part of every handshake.
#[derive(Clone)]
pub struct Identity {
    /// The session that this node belongs to.
    pub session: SessionId,
    /// The session's key.
    pub key: Arc<Key>,
    /// The number of this node.
    pub node: NodeId,
    /// The purpose of the connections that are dialed or accepted with this identity.
    pub purpose: Purpose,
    /// How long this node waits for its peers.
    pub deadlines: Deadlines,
}

/// The purpose of a connection. Both ends must name the same purpose, so a recorded handshake is useless for any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// Messages and bulk bytes between servers, in plain text after the handshake.
    #[default]
    Peer,
    /// Messages and bulk bytes between servers, with every byte encrypted and authenticated.
    SealedPeer,
    /// A control channel: see [`channel`](crate::channel).
    Channel,
}

impl Purpose {
    /// Returns the prologue of the handshake.
    pub(super) fn name(self) -> &'static [u8] {
        match self {
            Self::Peer => b"dayfly peer",
            Self::SealedPeer => b"dayfly sealed peer",
            Self::Channel => b"dayfly channel",
        }
    }

    /// Returns the keys that seal a connection between servers; `None` if it is plain.
    pub(super) fn seal(self, keys: Keys) -> Option<Keys> {
        (self == Self::SealedPeer).then_some(keys)
    }
}
