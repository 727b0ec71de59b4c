//! Finds the blocks to recover, in the order of their origins, so that sources are read from front to back.
//!
//! A list of all blocks could be longer than a node's memory. So each scan of the catalog returns a *window*: the blocks that come
//! next in this order, at most as many as the caller has memory for.

use dayfly_meta::catalog::{Place, block_len};
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::BLOCK_SIZE_MAX;
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::status::Reads;

use crate::origins::is_readable_alone;
use crate::store::Dataset;

/// Where a block lies on the parallel file system. The blocks of one directory are in the order of the catalog, which is the order
/// of a walk of the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OriginPosition {
    source: u32,
    /// The offset in the source, or 0 in a directory.
    offset: u64,
    pub(super) block: u32,
}

/// The next blocks to recover.
#[derive(Debug)]
pub(super) struct Window {
    /// In the order of their origins.
    pub(super) blocks: Vec<OriginPosition>,
    /// Whether no block comes after these.
    pub(super) is_last: bool,
    /// All blocks to recover that come after the previous window, and their bytes.
    pub(super) found: Reads,
}

/// Returns the blocks to recover that come after `after`, at most `len_max` of them. Looks at the whole catalog.
pub(super) fn window(dataset: &Dataset, lost: &NodeSet, after: Option<OriginPosition>, len_max: usize) -> Window {
    let mut selection = Selection::new(after, len_max);
    each_to_recover(dataset, lost, &mut |position, len| selection.see(position, len));
    selection.finish()
}

/// Selects the first positions of many, which come in any order.
struct Selection {
    after: Option<OriginPosition>,
    len_max: usize,
    blocks: Vec<OriginPosition>,
    /// Positions from this one on are not among the first `len_max`.
    end: Option<OriginPosition>,
    found: Reads,
}

impl Selection {
    fn new(after: Option<OriginPosition>, len_max: usize) -> Self {
        Self { after, len_max: len_max.max(1), blocks: Vec::new(), end: None, found: Reads::default() }
    }

    fn see(&mut self, position: OriginPosition, len: u64) {
        if self.after.is_some_and(|after| position <= after) {
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

    fn finish(mut self) -> Window {
        self.blocks.sort_unstable();
        let is_last = self.end.is_none() && self.blocks.len() <= self.len_max;
        self.blocks.truncate(self.len_max);
        Window { blocks: self.blocks, is_last, found: self.found }
    }
}

/// Calls `see` with the position and length of each block that this node should store in place of a lost owner, and lacks.
fn each_to_recover(dataset: &Dataset, lost: &NodeSet, see: &mut dyn FnMut(OriginPosition, u64)) {
    let catalog = dataset.catalog();
    for sample in (0..catalog.header().samples).map(SampleId) {
        let Some((size, blocks)) = catalog.sample(sample) else { continue };
        let is_wanted = |block: &u32| {
            let block = BlockId(*block);
            dataset.takes_over(block, lost) && !dataset.is_local(block) && dataset.is_selected(block)
        };
        let first = blocks.start;
        let mut wanted = blocks.filter(is_wanted).peekable();
        if wanted.peek().is_none() || !is_readable_alone(dataset, sample) {
            continue;
        }
        let Some(origin) = catalog.origin(sample) else { continue };
        let offset = match origin.place {
            Place::Bytes { offset } | Place::SparseTar { offset, .. } | Place::ZipRecord { offset, .. } => offset,
            Place::Tree | Place::Nested { .. } => 0,
        };
        for block in wanted {
            let part = block - first;
            let offset = offset.saturating_add(u64::from(part) * BLOCK_SIZE_MAX);
            see(OriginPosition { source: origin.source, offset, block }, block_len(size, part));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn windows_return_all_blocks_once_in_the_order_of_their_origins() {
        let position = |block: u32| OriginPosition { source: block % 3, offset: u64::from(block * 37 % 1000), block };
        let mut all: Vec<OriginPosition> = (0..1000).map(position).collect();
        all.sort_unstable();
        for len_max in [1, 7, 333, 500, 999, 1000, 5000] {
            let (mut found, mut after) = (Vec::new(), None);
            loop {
                let mut selection = Selection::new(after, len_max);
                (0..1000).for_each(|block| {
                    selection.see(position(block), 10);
                    assert!(selection.blocks.len() < 2 * len_max, "memory is bounded");
                });
                let window = selection.finish();
                let left = (all.len() - found.len()) as u64;
                assert_eq!(window.found, Reads { count: left, bytes: 10 * left });
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
        let window = Selection::new(None, 5).finish();
        assert!(window.is_last && window.blocks.is_empty() && window.found == Reads::default());
    }
}
