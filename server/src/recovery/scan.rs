//! Finds the blocks to recover, in the order of their origins, so that sources are read from front to back.

use std::collections::BTreeSet;

use dayfly_meta::catalog::{Place, block_len};
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::{BLOCK_SIZE_MAX, STREAM_BLOCKS_MAX};
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::status::Reads;

use crate::origins::is_readable_alone;
use crate::store::{BlockPosition, Dataset, Window, WindowSelection};

/// Returns the blocks to recover that come after `after`, at most `len_max` of them: those that this node should store in place of a
/// lost holder, or of a server that was lost on this node, and lacks. Without `with_streamed`, leaves out what [`streamed_sources`]
/// finds. Looks at the whole catalog.
pub(super) fn window(
    dataset: &Dataset,
    lost: &NodeSet,
    after: Option<BlockPosition>,
    len_max: usize,
    with_streamed: bool,
) -> Window {
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
            let is_found = || with_streamed || !dataset.is_streamed(BlockId(block));
            if selection.wants(position) && is_found() && is_to_recover(dataset, lost, sample, BlockId(block)) {
                selection.see(position, block_len(size, part));
            }
        }
    }
    selection.finish()
}

/// What a node lacks and does not try to recover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut {
    pub(super) without_room: Reads,
    pub(super) unrecoverable: Reads,
}

/// Returns the blocks that this node lacks and that neither [`window`] nor, `with_streamed`, [`streamed_sources`] finds. Looks at the
/// whole catalog.
pub(super) fn left_out(dataset: &Dataset, lost: &NodeSet, with_streamed: bool) -> LeftOut {
    let (catalog, mut found) = (dataset.catalog(), LeftOut::default());
    for sample in (0..catalog.header().samples).map(SampleId) {
        let Some((size, blocks)) = catalog.sample(sample) else { continue };
        for (part, block) in (0..).zip(blocks) {
            let id = BlockId(block);
            if !is_lacking(dataset, lost, id) {
                continue;
            }
            let this = Reads { count: 1, bytes: block_len(size, part) };
            let is_streamed_again = with_streamed && dataset.is_streamed(id);
            if !(is_streamed_again || can_be_recovered(dataset, sample, id)) {
                found.unrecoverable.add(this);
            } else if !dataset.is_selected(id) {
                found.without_room.add(this);
            }
        }
    }
    found
}

/// Returns the compressed tars from which this node is to hold blocks that it lacks, and counts those blocks. Looks at the whole
/// catalog.
pub(super) fn streamed_sources(dataset: &Dataset, lost: &NodeSet) -> (BTreeSet<u32>, Reads) {
    let (mut sources, mut found) = (BTreeSet::new(), Reads::default());
    each_streamed(dataset, lost, None, &mut |source, _, _, len| {
        sources.insert(source);
        found.add(Reads { count: 1, bytes: len });
    });
    (sources, found)
}

/// Returns the blocks of a compressed tar that this node is to hold and lacks, in the order in which they lie in the tar. There are
/// at most [`STREAM_BLOCKS_MAX`]; the others are found again later.
pub(super) fn streamed_blocks(dataset: &Dataset, lost: &NodeSet, source: u32) -> Vec<BlockId> {
    let mut blocks: Vec<(u64, u32)> = Vec::new();
    each_streamed(dataset, lost, Some(source), &mut |_, offset, block, _| {
        if blocks.len() < STREAM_BLOCKS_MAX {
            blocks.push((offset, block));
        }
    });
    blocks.sort_unstable();
    blocks.into_iter().map(|(_, block)| BlockId(block)).collect()
}

/// Calls `see` with the source, the offset, the number and the length of each block of compressed tars that this node is to hold and
/// lacks.
fn each_streamed(dataset: &Dataset, lost: &NodeSet, only: Option<u32>, see: &mut dyn FnMut(u32, u64, u32, u64)) {
    let catalog = dataset.catalog();
    for sample in (0..catalog.header().samples).map(SampleId) {
        let Some(origin) = catalog.origin(sample) else { continue };
        if only.is_some_and(|only| only != origin.source) {
            continue;
        }
        let (Place::Bytes { offset } | Place::SparseTar { offset, .. }) = origin.place else { continue };
        let Some((size, blocks)) = catalog.sample(sample) else { continue };
        for (part, block) in (0..).zip(blocks) {
            let id = BlockId(block);
            if is_lacking(dataset, lost, id) && dataset.is_streamed(id) && dataset.is_selected(id) {
                see(origin.source, offset.saturating_add(u64::from(part) * BLOCK_SIZE_MAX), block, block_len(size, part));
            }
        }
    }
}

fn is_to_recover(dataset: &Dataset, lost: &NodeSet, sample: SampleId, block: BlockId) -> bool {
    is_lacking(dataset, lost, block) && dataset.is_selected(block) && can_be_recovered(dataset, sample, block)
}

/// Returns whether a block may be on another node, or can be read from its source without reading all of that again.
fn can_be_recovered(dataset: &Dataset, sample: SampleId, block: BlockId) -> bool {
    is_readable_alone(dataset, sample) || dataset.copies() > 1 || dataset.is_to_come_back(block)
}

/// Returns whether this node is to hold a block, and does not.
fn is_lacking(dataset: &Dataset, lost: &NodeSet, block: BlockId) -> bool {
    !dataset.is_local(block) && (dataset.is_to_come_back(block) || dataset.takes_over(block, lost))
}
