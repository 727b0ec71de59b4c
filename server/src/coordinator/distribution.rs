//! How the samples of a finished dataset are distributed over nodes, sizes and directories.

use std::collections::HashMap;

use dayfly_meta::catalog::{EntryId, block_len};
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::wire::control::{ClassShare, NodeShare};

use dayfly_stagein::has_archive_ending;

use crate::store::Dataset;

/// A summary has one number for each class on each node. It has room for at most this many of them.
const SHARES_MAX: usize = 16 << 10;
/// The most classes (top-level directories) that a reader of the summary can tell apart.
const CLASSES_MAX: usize = 200;
/// The most top-level directories that are counted. Samples in further directories belong to no class.
const DIRECTORIES_MAX: usize = 100_000;

/// Figures about the whole catalog, for the summary.
pub(super) struct Distribution {
    pub(super) nodes: Vec<NodeShare>,
    pub(super) sizes: Vec<u64>,
    pub(super) classes: Vec<ClassShare>,
    /// Samples whose names end like the names of archives.
    pub(super) archives: u64,
    /// Directories and symlinks.
    pub(super) others: u64,
}

impl Distribution {
    /// Reads the whole catalog. Blocks the calling thread.
    pub(super) fn of(dataset: &Dataset, nodes: usize) -> Self {
        let catalog = dataset.catalog();
        let mut distribution =
            Self { nodes: vec![NodeShare::default(); nodes], sizes: vec![0; 65], classes: Vec::new(), archives: 0, others: 1 };
        let mut classes: HashMap<EntryId, Vec<u64>> = HashMap::new();
        let root = EntryId(0);
        let (mut top, mut top_end) = (root, root);
        for id in (1..catalog.header().entries).map(EntryId) {
            let Some(entry) = catalog.entry(id) else { continue };
            if id >= top_end {
                (top, top_end) = (id, entry.next);
            }
            let Some(sample) = entry.sample() else {
                distribution.others += 1;
                continue;
            };
            // A sample that has several names counts once.
            if catalog.entry_of(sample).is_none_or(|first| first.id != id) {
                continue;
            }
            let Some((size, blocks)) = catalog.sample(sample) else { continue };
            distribution.archives += u64::from(has_archive_ending(entry.name));
            distribution.sizes[64 - size.leading_zeros() as usize] += 1;
            for (part, block) in (0..).zip(blocks.map(BlockId)) {
                let Some(owner) = catalog.owner(block) else { continue };
                let Some(node) = distribution.nodes.get_mut(owner.index()) else { continue };
                let len = block_len(size, part);
                if catalog.is_stored(block) {
                    node.bytes += len
                } else {
                    node.unstored_bytes += len
                }
                if part > 0 {
                    continue;
                }
                node.samples += 1;
                // A sample directly in the root belongs to no class.
                if top != id && (classes.len() < DIRECTORIES_MAX || classes.contains_key(&top)) {
                    classes.entry(top).or_insert_with(|| vec![0; nodes])[owner.index()] += 1;
                }
            }
        }
        let name = |id: EntryId| catalog.entry(id).map_or_else(Vec::new, |entry| entry.name.to_vec());
        let mut largest: Vec<(EntryId, Vec<u64>)> = classes.into_iter().collect();
        largest.sort_by_key(|(id, samples)| (std::cmp::Reverse(samples.iter().sum::<u64>()), *id));
        largest.truncate((SHARES_MAX / nodes.max(1)).clamp(1, CLASSES_MAX));
        distribution.classes = largest.into_iter().map(|(id, samples)| ClassShare { name: name(id), samples }).collect();
        distribution
    }
}

/// Returns how much more the fullest node stores than the mean, in thousandths of the mean. Both are of the nodes in `among`: a lost
/// node stores nothing.
pub(super) fn imbalance_permille(nodes: &[NodeShare], among: impl IntoIterator<Item = NodeId>) -> u64 {
    let bytes: Vec<u64> = among.into_iter().filter_map(|node| Some(nodes.get(node.index())?.bytes)).collect();
    let (all, fullest): (u64, _) = (bytes.iter().sum(), bytes.iter().max().copied().unwrap_or(0));
    let share = (u128::from(fullest) * bytes.len() as u128 * 1000).checked_div(u128::from(all));
    share.map_or(0, |share| (share as u64).saturating_sub(1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_takes_no_part_is_not_in_the_mean() {
        let stored = |bytes: &[u64]| bytes.iter().map(|&bytes| NodeShare { bytes, ..NodeShare::default() }).collect::<Vec<_>>();
        let cases = [
            (&[100, 100, 100, 100][..], &[0, 1, 2, 3][..], 0),
            (&[150, 50, 100, 100], &[0, 1, 2, 3], 500),
            (&[100, 0, 100, 100], &[0, 2, 3], 0),
            (&[100, 900, 110, 90], &[0, 2, 3], 100),
            (&[0, 0], &[0, 1], 0),
            (&[5], &[], 0),
            (&[5], &[0, 7], 0),
        ];
        for (bytes, among, imbalance) in cases {
            let among_nodes = among.iter().copied().map(NodeId);
            assert_eq!(imbalance_permille(&stored(bytes), among_nodes), imbalance, "{bytes:?} among {among:?}");
        }
    }
}
