//! Which nodes may own a block, in order of preference: a pure function of the seed, the sample's
//! path, the block's index in the sample, and the members.
//!
//! The function is multi-probe consistent hashing (Appleton and O'Reilly, 2015) over a ring of the
//! crate `hashring`. Each member has few virtual nodes, and a block looks at several points of
//! the ring. Each point leads to the next virtual node, and the nearest one wins. A member's share
//! is therefore even although its arcs are not.
//!
//! - `ring`: the virtual nodes, and all hashes. They are XXH3-64 over bytes that the file lays out,
//!   so every build on every machine places blocks alike.
//! - `candidates`: the order of all members for one block.
//! - `node_set`: the nodes that a caller skips because they are full, lost or absent.
//! - `shares`: the part of all blocks that each member owns, for reports and tests.
//!
//! Invariants: the order of a block's candidates never depends on who is skipped, so skipping a
//! member moves that member's blocks and no others. Only integers decide. Asking for owners
//! and candidates allocates nothing.

mod candidates;
mod node_set;
mod ring;
mod shares;
#[cfg(test)]
mod tests;

pub use candidates::Candidates;
pub use node_set::NodeSet;

use crate::id::NodeId;
use crate::limits::{VIRTUAL_NODES_MIN, VIRTUAL_NODES_PER_MEMBER};
use candidates::Rotation;
use ring::{Key, Ring};

/// A member of the session. Its capacity is its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The node's number.
    pub node: NodeId,
    /// The number of bytes that the node has room for.
    pub capacity: u64,
}

/// The placement of a session's members. It never changes: callers that share it each skip the
/// nodes that they know to be full, lost or absent.
pub struct Placement {
    ring: Ring,
    seed: u64,
    members: NodeSet,
    /// Members with capacity; all members if none has any.
    weighted: Rotation,
    /// The other members. They come after all others.
    weightless: Rotation,
}

impl Placement {
    /// Builds the ring. A member without capacity owns nothing while another member is left, unless
    /// no member has any capacity; then all share equally. Of members with the same number the
    /// first one counts. Numbers that no session has ([`crate::limits::NODES_MAX`]) are left out.
    pub fn new(seed: u64, members: &[Member]) -> Self {
        let mut all = NodeSet::new();
        let members: Vec<Member> = members.iter().copied().filter(|member| all.insert(member.node)).collect();
        let is_weighted = |member: &Member| member.capacity > 0;
        let (mut weighted, mut weightless): (Vec<Member>, Vec<Member>) = members.into_iter().partition(is_weighted);
        if weighted.is_empty() {
            weighted = weightless.drain(..).map(|member| Member { capacity: 1, ..member }).collect();
        }
        let nodes = |members: &[Member]| members.iter().map(|member| member.node).collect();
        Self {
            ring: Ring::new(&weighted, VIRTUAL_NODES_MIN.max(VIRTUAL_NODES_PER_MEMBER * weighted.len())),
            seed,
            members: all,
            weighted: Rotation::new(nodes(&weighted)),
            weightless: Rotation::new(nodes(&weightless)),
        }
    }

    /// Returns the owner of block `part` of the sample at `path`: the first of its candidates that
    /// is not skipped. Returns `None` if all members are skipped.
    pub fn owner(&self, path: &[u8], part: u32, skipped: &NodeSet) -> Option<NodeId> {
        Candidates::new(self, self.key(path, part), *skipped).next()
    }

    /// Returns all members, the most preferred one first, for block `part` of the sample at `path`.
    /// Each candidate is found only when it is asked for.
    pub fn candidates(&self, path: &[u8], part: u32) -> Candidates<'_> {
        Candidates::new(self, self.key(path, part), NodeSet::new())
    }

    /// Returns the length of the memory that the placement takes, in bytes.
    pub fn memory_len(&self) -> usize {
        size_of::<Self>() + self.ring.memory_len() + self.weighted.memory_len() + self.weightless.memory_len()
    }

    fn key(&self, path: &[u8], part: u32) -> Key {
        Key::new(self.seed, path, part)
    }
}
