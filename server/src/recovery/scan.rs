//! Finds the blocks to recover, in the order of their origins, so that sources are read from front to back.

use dayfly_meta::catalog::{Place, block_len};
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::BLOCK_SIZE_MAX;
use dayfly_meta::placement::NodeSet;

use crate::origins::is_readable_alone;
use crate::store::{BlockPosition, Dataset, Window, WindowSelection};

/// Returns the blocks to recover that come after `after`, at most `len_max` of them: those that this node should store in place of a
/// lost holder, and lacks. Looks at the whole catalog.
pub(super) fn window(dataset: &Dataset, lost: &NodeSet, after: Option<BlockPosition>, len_max: usize) -> Window {
    let (catalog, mut selection) = (dataset.catalog(), WindowSelection::new(after, len_max));
    for sample in (0..catalog.header().samples).map(SampleId) {
        let (Some((size, blocks)), Some(origin)) = (catalog.sample(sample), catalog.origin(sample)) else { continue };
        let start = match origin.place {
            Place::Bytes { offset } | Place::SparseTar { offset, .. } | Place::ZipRecord { offset, .. } => offset,
            // The blocks of a directory stay in the order of the catalog, which is the order of a walk of the directory.
            Place::Tree | Place::Nested { .. } => 0,
        };
        for (part, block) in (0..).zip(blocks) {
            let offset = start.saturating_add(u64::from(part) * BLOCK_SIZE_MAX);
            let position = BlockPosition { group: origin.source, offset, block };
            if selection.wants(position) && is_to_recover(dataset, lost, sample, BlockId(block)) {
                selection.see(position, block_len(size, part));
            }
        }
    }
    selection.finish()
}

fn is_to_recover(dataset: &Dataset, lost: &NodeSet, sample: SampleId, block: BlockId) -> bool {
    dataset.takes_over(block, lost)
        && !dataset.is_local(block)
        && dataset.is_selected(block)
        && (is_readable_alone(dataset, sample) || dataset.has_surviving_copy(block, lost))
}
