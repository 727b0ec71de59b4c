//! The ring of virtual nodes, and the hashes of virtual nodes and blocks.

use std::hash::{BuildHasher, Hash, Hasher};
use std::iter;

use hashring::HashRing;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::Member;
use crate::id::NodeId;
use crate::limits::VIRTUAL_NODES_PER_MEMBER_MIN;

/// The scale 1 of distances, as a fixed-point number.
pub(super) const SCALE_ONE: u64 = 1 << 32;

/// Virtual nodes, each with the arc of points that lead to it.
pub(super) struct Ring {
    ring: HashRing<VirtualNode, ExplicitHash>,
    /// By node number, the factor by which distances to a member's virtual nodes count, in units of
    /// 1 / [`SCALE_ONE`]. Counts of virtual nodes are only roughly proportional to capacity, and the
    /// factor makes up for that: a member with a third more virtual nodes than its capacity calls
    /// for has a factor of 4/3.
    scales: Vec<u64>,
}

/// A virtual node, seen from a point of the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hit {
    pub(super) node: NodeId,
    /// The distance, scaled. The smallest one wins.
    pub(super) distance: u128,
}

impl Ring {
    /// Builds a ring of about `len` virtual nodes. Every member must have a capacity.
    pub(super) fn new(members: &[Member], len: usize) -> Self {
        let total: u128 = members.iter().map(|member| u128::from(member.capacity)).sum();
        let len = len as u128;
        let mut scales = vec![0; members.iter().map(|member| member.node.index() + 1).max().unwrap_or(0)];
        let mut virtual_nodes = Vec::with_capacity(len as usize + members.len());
        for member in members {
            // None of this overflows 128 bits: there are at most 2^12 members and 2^16 virtual nodes.
            let due = u128::from(member.capacity) * len;
            let count = ((due + total / 2) / total).max(VIRTUAL_NODES_PER_MEMBER_MIN as u128);
            let scale = u128::from(SCALE_ONE) * count * total / due;
            scales[member.node.index()] = u64::try_from(scale).unwrap_or(u64::MAX);
            virtual_nodes.extend((0..count as u32).map(|replica| VirtualNode { node: member.node, replica }));
        }
        let mut ring = HashRing::with_hasher(ExplicitHash);
        ring.batch_add(virtual_nodes);
        Self { ring, scales }
    }

    /// Returns the virtual node that a point leads to: the one at the point, or the next one
    /// clockwise. Returns `None` if the ring is empty.
    pub(super) fn next(&self, point: Point) -> Option<Hit> {
        let virtual_node = self.ring.get(&point)?;
        // The ring does not tell the position, so it is hashed once more.
        let distance = virtual_node.position().wrapping_sub(point.0);
        let scale = self.scales[virtual_node.node.index()];
        Some(Hit { node: virtual_node.node, distance: u128::from(distance) * u128::from(scale) })
    }

    /// Returns the virtual nodes' positions in ascending order, with each one's node and scale.
    pub(super) fn positions(&self) -> impl Iterator<Item = (u64, NodeId, u64)> + '_ {
        let mut point = Some(Point(0));
        iter::from_fn(move || {
            let from = point?;
            let virtual_node = self.ring.get(&from)?;
            let position = virtual_node.position();
            point = position.checked_add(1).map(Point);
            // After the last virtual node, the ring goes on with the first one.
            (position >= from.0).then(|| (position, virtual_node.node, self.scales[virtual_node.node.index()]))
        })
        .fuse()
    }

    /// Returns the length of the memory that the ring takes, in bytes.
    pub(super) fn memory_len(&self) -> usize {
        self.ring.len() * size_of::<(u64, VirtualNode)>() + self.scales.len() * size_of::<u64>()
    }
}

/// The hash of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(u64);

impl Key {
    pub(super) fn new(seed: u64, path: &[u8], part: u32) -> Self {
        let seed = seed ^ u64::from(part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(xxh3_64_with_seed(path, seed))
    }

    /// Returns the block's point with this number.
    pub(super) fn point(self, number: u32) -> Point {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.0.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        Point(xxh3_64(&bytes))
    }
}

/// A point of the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point(pub(super) u64);

impl Hash for Point {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VirtualNode {
    node: NodeId,
    replica: u32,
}

impl VirtualNode {
    fn position(self) -> u64 {
        let mut bytes = *b"node\0\0\0\0\0\0";
        bytes[4..6].copy_from_slice(&self.node.0.to_le_bytes());
        bytes[6..].copy_from_slice(&self.replica.to_le_bytes());
        xxh3_64(&bytes)
    }
}

/// Returns the position of a node's first virtual node.
pub(super) fn first_position(node: NodeId) -> u64 {
    VirtualNode { node, replica: 0 }.position()
}

impl Hash for VirtualNode {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.position());
    }
}

/// Takes over the one number that the types above write: it is a hash already.
#[derive(Clone)]
struct ExplicitHash;

struct OneNumber(u64);

impl BuildHasher for ExplicitHash {
    type Hasher = OneNumber;

    fn build_hasher(&self) -> OneNumber {
        OneNumber(0)
    }
}

impl Hasher for OneNumber {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64(bytes);
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
