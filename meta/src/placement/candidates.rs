//! The order of all members for one block.
//!
//! A block looks at the ring in rounds, each with [`PROBES`] points of its own. The candidates are:
//!
//! 1. the nearest member of each round, so that a lost member's blocks are spread over the others as
//!    evenly as all blocks are;
//! 2. all other members that the rounds have found, the first round's first, the nearer ones first.
//!    When most members are skipped, this is quicker than further rounds;
//! 3. the other members with capacity, in one of many orders that the block's hash chooses;
//! 4. the members without capacity, in such an order.

use super::Placement;
use super::node_set::NodeSet;
use super::ring::{Hit, Key, first_position};
use crate::id::NodeId;
use crate::limits::{PROBE_ROUNDS, PROBES};

/// The members that may own a block, the most preferred one first. Each member comes once.
#[derive(Clone)]
pub struct Candidates<'a> {
    placement: &'a Placement,
    key: Key,
    /// Members that have already come, or that the caller skips.
    skipped: NodeSet,
    /// Rounds that have no further candidate; from [`PROBE_ROUNDS`] on, those of the second kind.
    rounds: u32,
    /// Steps taken through the members with and without capacity.
    steps: [u32; 2],
}

impl<'a> Candidates<'a> {
    pub(super) fn new(placement: &'a Placement, key: Key, skipped: NodeSet) -> Self {
        Self { placement, key, skipped, rounds: 0, steps: [0; 2] }
    }

    /// Returns what the points of a round lead to.
    fn hits(&self, round: u32) -> impl Iterator<Item = Hit> + '_ {
        (round * PROBES..(round + 1) * PROBES).filter_map(|number| self.placement.ring.next(self.key.point(number)))
    }

    fn is_left(&self, hit: &Hit) -> bool {
        !self.skipped.contains(hit.node)
    }

    fn find(&mut self) -> Option<NodeId> {
        while self.rounds < 2 * PROBE_ROUNDS {
            let found = match self.rounds.checked_sub(PROBE_ROUNDS) {
                None => self.hits(self.rounds).min_by_key(|hit| hit.distance).filter(|hit| self.is_left(hit)),
                Some(again) => self.hits(again).filter(|hit| self.is_left(hit)).min_by_key(|hit| hit.distance),
            };
            if let Some(hit) = found {
                return Some(hit.node);
            }
            self.rounds += 1;
            if self.placement.members.is_subset(&self.skipped) {
                return None;
            }
        }
        let hash = self.key.point(PROBE_ROUNDS * PROBES).0;
        let rotations = [&self.placement.weighted, &self.placement.weightless];
        rotations.into_iter().zip(&mut self.steps).find_map(|(rotation, step)| rotation.next(hash, step, &self.skipped))
    }
}

impl Iterator for Candidates<'_> {
    type Item = NodeId;

    fn next(&mut self) -> Option<NodeId> {
        let node = self.find()?;
        self.skipped.insert(node);
        Some(node)
    }
}

/// Members that a hash puts into one of many orders.
pub(super) struct Rotation {
    nodes: Vec<NodeId>,
    /// The smallest prime that is greater than the number of nodes. Steps of any length modulo the
    /// prime visit every number below it once.
    prime: u32,
}

impl Rotation {
    pub(super) fn new(mut nodes: Vec<NodeId>) -> Self {
        let is_prime = |number: &u32| {
            (2..*number).take_while(|divisor| divisor * divisor <= *number).all(|divisor| !number.is_multiple_of(divisor))
        };
        // Neighbors by number are often skipped together, and must not be neighbors here.
        nodes.sort_by_key(|&node| first_position(node));
        let prime = (nodes.len() as u32 + 1..).filter(|&number| number > 1).find(is_prime).unwrap_or(u32::MAX);
        Self { nodes, prime }
    }

    /// Returns the length of the memory that the nodes take, in bytes.
    pub(super) fn memory_len(&self) -> usize {
        self.nodes.len() * size_of::<NodeId>()
    }

    /// Returns the next node that is not skipped, from the given step on. The hash's halves choose
    /// the start and the length of a step.
    fn next(&self, hash: u64, step: &mut u32, skipped: &NodeSet) -> Option<NodeId> {
        let prime = u64::from(self.prime);
        let (start, stride) = ((hash >> 32) % prime, 1 + (hash & 0xffff_ffff) % (prime - 1));
        while u64::from(*step) < prime {
            let index = (start + u64::from(*step) * stride) % prime;
            *step += 1;
            if let Some(&node) = self.nodes.get(index as usize)
                && !skipped.contains(node)
            {
                return Some(node);
            }
        }
        None
    }
}
