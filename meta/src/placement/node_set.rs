//! A set of nodes with one bit for each number that a node can have.

use std::fmt;

use crate::id::NodeId;
use crate::limits::NODES_MAX;

const WORDS: usize = NODES_MAX.div_ceil(64);

/// A set of nodes. It takes the same room whatever is in it, and copying it is cheap.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NodeSet {
    words: [u64; WORDS],
}

impl NodeSet {
    /// Creates an empty set.
    pub const fn new() -> Self {
        Self { words: [0; WORDS] }
    }

    /// Adds a node. Returns whether the set has it only now. A set never has a node whose number is
    /// [`NODES_MAX`] or more.
    pub fn insert(&mut self, node: NodeId) -> bool {
        let Some(word) = self.words.get_mut(node.index() / 64) else { return false };
        let before = *word;
        *word |= 1 << (node.index() % 64);
        *word != before
    }

    /// Removes a node. Returns whether the set had it.
    pub fn remove(&mut self, node: NodeId) -> bool {
        let had = self.contains(node);
        if had {
            self.words[node.index() / 64] &= !(1 << (node.index() % 64));
        }
        had
    }

    /// Returns whether the node is in the set.
    pub fn contains(&self, node: NodeId) -> bool {
        self.words.get(node.index() / 64).is_some_and(|word| word & 1 << (node.index() % 64) != 0)
    }

    /// Returns whether all nodes of this set are also in `other`.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.words.iter().zip(&other.words).all(|(ours, theirs)| ours & !theirs == 0)
    }

    /// Returns whether the set has no node.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Returns the number of nodes in the set.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns the nodes in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0..NODES_MAX as u16).map(NodeId).filter(|&node| self.contains(node))
    }
}

impl Default for NodeSet {
    fn default() -> Self {
        Self::new()
    }
}

impl FromIterator<NodeId> for NodeSet {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        let mut set = Self::new();
        nodes.into_iter().for_each(|node| {
            set.insert(node);
        });
        set
    }
}

impl fmt::Debug for NodeSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_set().entries(self.iter().map(|node| node.0)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_the_nodes_that_were_added_and_not_removed() {
        let numbers = [0, 1, 63, 64, 65, 700, NODES_MAX as u16 - 1];
        let mut set: NodeSet = numbers.into_iter().map(NodeId).collect();
        assert_eq!(set.iter().map(|node| node.0).collect::<Vec<_>>(), numbers);
        assert_eq!((set.len(), set.is_empty(), set.contains(NodeId(2))), (7, false, false));
        assert_eq!((set.insert(NodeId(64)), set.insert(NodeId(66))), (false, true));
        assert_eq!((set.remove(NodeId(66)), set.remove(NodeId(66))), (true, false));
        assert!(set.remove(NodeId(63)) && set.len() == 6 && set.contains(NodeId(64)) && !set.contains(NodeId(63)));
        assert_eq!(format!("{set:?}"), "{0, 1, 64, 65, 700, 4095}");
        assert!(NodeSet::new().is_empty() && NodeSet::new().is_subset(&set) && !set.is_subset(&NodeSet::new()));
    }

    #[test]
    fn numbers_that_no_session_has_are_never_in_a_set() {
        let mut set = NodeSet::new();
        for number in [NODES_MAX as u16, NODES_MAX as u16 + 1, u16::MAX] {
            assert!(!set.insert(NodeId(number)) && !set.contains(NodeId(number)) && !set.remove(NodeId(number)));
        }
        assert!(set.is_empty());
    }
}
