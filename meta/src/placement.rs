//! Which node owns a block: a pure function of the seed, the sample's path, the block's index in
//! the sample, and the members.
//!
//! The function is a consistent-hash ring (crate `hashring`) with virtual nodes in proportion to
//! capacity. It hashes with XXH3-64 over bytes that are laid out in this file, so every build on
//! every machine places blocks alike. Golden values in the tests check this.

use std::hash::{BuildHasher, Hash, Hasher};

use hashring::HashRing;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::id::NodeId;
use crate::limits::{NODES_MAX, VIRTUAL_NODES};

/// A member of the session. Its capacity is its weight in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The node's number.
    pub node: NodeId,
    /// The number of bytes that the node has room for.
    pub capacity: u64,
}

/// The hash ring of a session's members.
pub struct Placement {
    ring: HashRing<VirtualNode, ExplicitHash>,
    counts: Vec<(NodeId, u32)>,
    seed: u64,
}

impl Placement {
    /// Builds the ring. A member without capacity owns nothing, unless no member has any; then all
    /// share equally.
    pub fn new(seed: u64, members: &[Member]) -> Self {
        let total: u128 = members.iter().map(|member| u128::from(member.capacity)).sum();
        let all = (VIRTUAL_NODES * members.len().min(NODES_MAX)) as u128;
        let count = |member: &Member| match (u128::from(member.capacity) * all).checked_div(total) {
            None => VIRTUAL_NODES as u32,
            Some(share) => (share as u32).max(u32::from(member.capacity > 0)),
        };
        Self::build(seed, members.iter().map(|member| (member.node, count(member))).collect())
    }

    /// Returns the ring without some members. Their blocks go to the next member on the ring; all
    /// other blocks stay where they were.
    pub fn without(&self, absent: &[NodeId]) -> Self {
        Self::build(self.seed, self.counts.iter().filter(|(node, _)| !absent.contains(node)).copied().collect())
    }

    /// Returns the owner of block `part` of the sample at `path`; `None` if the ring is empty.
    pub fn owner(&self, path: &[u8], part: u32) -> Option<NodeId> {
        self.ring.get(&self.key(path, part)).map(|virtual_node| virtual_node.node)
    }

    fn build(seed: u64, counts: Vec<(NodeId, u32)>) -> Self {
        let virtual_nodes = |&(node, count): &(NodeId, u32)| (0..count).map(move |replica| VirtualNode { node, replica });
        let mut ring = HashRing::with_hasher(ExplicitHash);
        ring.batch_add(counts.iter().flat_map(virtual_nodes).collect());
        Self { ring, counts, seed }
    }

    fn key(&self, path: &[u8], part: u32) -> Key {
        let seed = self.seed ^ u64::from(part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Key(xxh3_64_with_seed(path, seed))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VirtualNode {
    node: NodeId,
    replica: u32,
}

impl Hash for VirtualNode {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut bytes = *b"node\0\0\0\0\0\0";
        bytes[4..6].copy_from_slice(&self.node.0.to_le_bytes());
        bytes[6..].copy_from_slice(&self.replica.to_le_bytes());
        state.write(&bytes);
    }
}

struct Key(u64);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0.to_le_bytes());
    }
}

/// Hashes exactly the one `write` call that the types above make, with XXH3-64.
#[derive(Clone, Default)]
struct ExplicitHash;

struct OneWrite(u64);

impl BuildHasher for ExplicitHash {
    type Hasher = OneWrite;

    fn build_hasher(&self) -> OneWrite {
        OneWrite(0)
    }
}

impl Hasher for OneWrite {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64(bytes);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equal(nodes: u16) -> Vec<Member> {
        (0..nodes).map(|node| Member { node: NodeId(node), capacity: 1 << 40 }).collect()
    }

    #[test]
    fn golden_owners() {
        let placement = Placement::new(7, &equal(4));
        let owners: Vec<u16> =
            (0..8).map(|number| placement.owner(format!("train/{number}.jpg").as_bytes(), 0).unwrap().0).collect();
        let parts: Vec<u16> = (0..8).map(|part| placement.owner(b"large.bin", part).unwrap().0).collect();
        assert_eq!((owners, parts), (vec![3, 0, 0, 1, 0, 2, 1, 1], vec![3, 0, 0, 2, 3, 2, 0, 3]));
    }

    #[test]
    fn four_equal_nodes_hold_at_most_8_percent_more_than_the_mean() {
        for seed in 0..10 {
            let placement = Placement::new(seed, &equal(4));
            let mut held = [0_u32; 4];
            for sample in 0..100_000 {
                held[placement.owner(format!("class{}/{sample}.jpg", sample % 1000).as_bytes(), 0).unwrap().index()] += 1;
            }
            assert!(held.iter().all(|&samples| samples <= 27_000), "seed {seed}: {held:?}");
        }
    }

    #[test]
    fn shares_follow_capacity() {
        let members = [1_u64, 2, 5, 0].iter().enumerate();
        let members: Vec<_> =
            members.map(|(node, &capacity)| Member { node: NodeId(node as u16), capacity: capacity << 30 }).collect();
        let placement = Placement::new(1, &members);
        let mut held = [0_f64; 4];
        (0..80_000).for_each(|sample: u32| held[placement.owner(&sample.to_le_bytes(), 0).unwrap().index()] += 1.0);
        assert!((held[0] - 10_000.0).abs() < 1_000.0 && (held[2] - 50_000.0).abs() < 3_000.0 && held[3] == 0.0, "{held:?}");
    }

    #[test]
    fn removing_a_member_moves_only_its_blocks() {
        let full = Placement::new(3, &equal(5));
        let fewer = full.without(&[NodeId(2), NodeId(4)]);
        for sample in 0..2000_u32 {
            let (before, after) = (full.owner(&sample.to_le_bytes(), 0).unwrap(), fewer.owner(&sample.to_le_bytes(), 0).unwrap());
            match before.0 {
                2 | 4 => assert!(after != NodeId(2) && after != NodeId(4)),
                _ => assert_eq!(before, after),
            }
        }
        assert_eq!(fewer.without(&(0..5).map(NodeId).collect::<Vec<_>>()).owner(b"x", 0), None);
    }

    /// Counts, for each of 1,000 classes of 100 samples, how many of the samples lie on each of 8
    /// nodes.
    fn classes_by_node(seed: u64, name: impl Fn(usize, usize) -> String) -> Vec<[f64; 8]> {
        let placement = Placement::new(seed, &equal(8));
        let on_nodes = |class: usize| {
            let mut counts = [0.0; 8];
            (0..100).for_each(|sample| counts[placement.owner(name(class, sample).as_bytes(), 0).unwrap().index()] += 1.0);
            counts
        };
        (0..1000).map(on_nodes).collect()
    }

    /// SEMANTICS: "A hash of a sample's path and of --seed chooses the sample's owner, whichever node read the sample from its
    /// source. Nodes get shares in proportion to their space. The same seed and the same space distribute the same dataset in the
    /// same way. A sample's owner is independent of its class (its directory), by a chi-square test over 1,000 classes of 100
    /// samples on 8 nodes (plot)."
    #[test]
    fn class_and_node_are_independent() {
        type Name = fn(usize, usize) -> String;
        let names: [Name; 3] = [
            |class, sample| format!("n{class:08}/n{class:08}_{sample}.JPEG"),
            |class, sample| format!("{class}/{sample:04}.png"),
            |class, sample| format!("{:07}.jpg", class * 100 + sample),
        ];
        for seed in 0..6 {
            for name in names {
                let counts = classes_by_node(seed, name);
                // The counts are compared with what each node holds in total, because a ring's shares are not quite equal.
                let of_node: Vec<f64> = (0..8).map(|node| counts.iter().map(|class| class[node]).sum()).collect();
                let chi_square: f64 = counts
                    .iter()
                    .flat_map(|class| class.iter().zip(&of_node))
                    .map(|(&count, &all)| {
                        let expected = all / 1000.0;
                        (count - expected) * (count - expected) / expected
                    })
                    .sum();
                // With this many degrees of freedom the distribution is nearly normal.
                let freedom = 999.0 * 7.0;
                let deviation = (chi_square - freedom) / (2.0_f64 * freedom).sqrt();
                assert!(deviation.abs() < 3.5, "seed {seed}: {deviation:.2} standard deviations");
            }
        }
    }
}
