//! Sorts the blocks of a dataset in bounded memory.
//!
//! A list of all blocks could be longer than a node's memory. So each scan of the catalog returns a *window*: the blocks that come
//! next in an order, at most as many as the caller has memory for.

use dayfly_meta::wire::status::Reads;

/// A block, and where it lies. Positions are sorted by group first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockPosition {
    /// What blocks are read from together: a source, or a node.
    pub(crate) group: u32,
    pub(crate) offset: u64,
    pub(crate) block: u32,
}

/// The next blocks in an order.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) blocks: Vec<BlockPosition>,
    /// Whether no block comes after these.
    pub(crate) is_last: bool,
    /// In the first window: all blocks, and their bytes.
    pub(crate) found: Reads,
}

/// Selects the first positions of many, which come in any order.
pub(crate) struct WindowSelection {
    after: Option<BlockPosition>,
    len_max: usize,
    blocks: Vec<BlockPosition>,
    /// Positions from this one on are not among the first `len_max`.
    end: Option<BlockPosition>,
    found: Reads,
}

impl WindowSelection {
    /// Begins to select at most `len_max` positions after `after`.
    pub(crate) fn new(after: Option<BlockPosition>, len_max: usize) -> Self {
        Self { after, len_max: len_max.max(1), blocks: Vec::new(), end: None, found: Reads::default() }
    }

    /// Returns whether a block is of interest: it may be in this window, or this is the first window, which counts all blocks.
    pub(crate) fn wants(&self, position: BlockPosition) -> bool {
        match self.after {
            None => true,
            Some(after) => position > after && self.end.is_none_or(|end| position < end),
        }
    }

    /// Considers a block of `len` bytes.
    pub(crate) fn see(&mut self, position: BlockPosition, len: u64) {
        if !self.wants(position) {
            return;
        }
        self.found.add(Reads { count: 1, bytes: len });
        if self.end.is_some_and(|end| position >= end) {
            return;
        }
        self.blocks.push(position);
        if self.blocks.len() == 2 * self.len_max {
            let (_, first_of_next, _) = self.blocks.select_nth_unstable(self.len_max);
            self.end = Some(*first_of_next);
            self.blocks.truncate(self.len_max);
        }
    }

    pub(crate) fn finish(mut self) -> Window {
        self.blocks.sort_unstable();
        let is_last = self.end.is_none() && self.blocks.len() <= self.len_max;
        self.blocks.truncate(self.len_max);
        Window { blocks: self.blocks, is_last, found: self.found }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn windows_return_all_blocks_once_in_order() {
        let position = |block: u32| BlockPosition { group: block % 3, offset: u64::from(block * 37 % 1000), block };
        let mut all: Vec<BlockPosition> = (0..1000).map(position).collect();
        all.sort_unstable();
        for len_max in [1, 7, 333, 500, 999, 1000, 5000] {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let mut selection = WindowSelection::new(after, len_max);
                (0..1000).for_each(|block| {
                    selection.see(position(block), 10);
                    assert!(selection.blocks.len() < 2 * len_max, "memory is bounded");
                });
                let window = selection.finish();
                if after.is_none() {
                    assert_eq!(window.found, Reads { count: 1000, bytes: 10_000 });
                }
                assert!(window.blocks.len() <= len_max);
                found.extend(window.blocks);
                after = found.last().copied();
                if window.is_last {
                    break;
                }
            }
            assert_eq!(found, all, "{len_max}");
        }
    }

    #[test]
    fn nothing_to_recover_is_an_empty_last_window() {
        let window = WindowSelection::new(None, 5).finish();
        assert!(window.is_last && window.blocks.is_empty() && window.found == Reads::default());
    }
}
