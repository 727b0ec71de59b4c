//! Copies: with `stage-in --copies N`, N nodes hold each block, its owner and the first of its other candidates.
//!
//! A copy is stored like a block that the node owns: before the dataset becomes visible, and never evicted. So processes find it,
//! and peers get it, in the same way.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::placement::NodeSet;
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::wire::status::Reads;

use super::Dataset;
use super::segment::room_for;

static NOBODY: NodeSet = NodeSet::new();

/// The copies on this node.
#[derive(Default)]
pub(super) struct CopiesHere {
    blocks: AtomicU64,
    bytes: AtomicU64,
}

impl Dataset {
    /// Returns how many nodes hold each block that is stored.
    pub(crate) fn copies(&self) -> usize {
        usize::from(self.catalog().header().copies).max(1)
    }

    /// Returns the copies of other nodes' blocks that the stage-in stored on this node.
    pub(crate) fn copies_here(&self) -> Reads {
        let CopiesHere { blocks, bytes } = self.copies_counters();
        Reads { count: blocks.load(Ordering::Relaxed), bytes: bytes.load(Ordering::Relaxed) }
    }

    /// Returns the bytes that the stage-in stored on this node.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.owned().bytes + self.copies_here().bytes
    }

    /// Returns the nodes on which the stage-in stored a block, its owner first.
    pub(crate) fn holders(&self, block: BlockId) -> Vec<NodeId> {
        self.holders_without(block, &NOBODY)
    }

    /// Returns how many bytes of a dataset with copies are to be on these nodes. Reads the whole catalog.
    pub(crate) fn bytes_of_copies_on(&self, is_counted: impl Fn(NodeId) -> bool) -> u64 {
        if self.copies() == 1 {
            return 0;
        }
        let blocks = (0..self.catalog().header().blocks).map(BlockId).filter(|&block| self.catalog().is_stored(block));
        let held = blocks.map(|block| {
            let len = self.catalog().block(block).map_or(0, |(_, len)| len);
            len * self.holders(block).into_iter().filter(|&node| is_counted(node)).count() as u64
        });
        held.sum()
    }

    /// Returns whether the dataset has copies, and a node is to hold one of a block.
    pub(crate) fn is_copied_to(&self, block: BlockId, node: NodeId) -> bool {
        self.copies() > 1 && self.holders(block).contains(&node)
    }

    /// Returns the nodes that hold a block if `skipped` hold none: its owner and the first of its other candidates.
    pub(crate) fn holders_without(&self, block: BlockId, skipped: &NodeSet) -> Vec<NodeId> {
        let Some(owner) = self.catalog().owner(block) else { return Vec::new() };
        let mut holders = Vec::with_capacity(self.copies());
        if !skipped.contains(owner) {
            holders.push(owner);
        }
        if holders.len() < self.copies()
            && let Some((path, part)) = self.placed(block)
        {
            let candidates = self.placement().candidates(self.catalog().header().group.of(&path), part);
            let others = candidates.filter(|node| *node != owner && !skipped.contains(*node));
            holders.extend(others.take(self.copies() - holders.len()));
        }
        holders
    }

    /// Returns whether a stage-in stored a block on this node, as its owner or as a copy.
    pub(crate) fn has_own_copy(&self, block: BlockId) -> bool {
        matches!(self.locations().find(block), Some(Location::Owned(_)))
    }

    /// Reserves room for copies on one drive, and returns their positions; `None` if no drive has room for all of them.
    pub(crate) fn allocate_copies(&self, lens: &[u64]) -> io::Result<Option<Vec<DrivePosition>>> {
        let room = lens.iter().copied().map(room_for).sum();
        for drive in self.segments().drives_by_room() {
            if self.segments().reserve(drive, room)? {
                return self.segments().allocate(drive, lens.iter().copied(), room).map(Some);
            }
        }
        Ok(None)
    }

    /// Writes copies that were allocated together.
    pub(crate) fn write_copies(&self, positions: &[DrivePosition], blocks: &[(BlockId, Vec<u8>)]) -> io::Result<()> {
        self.segments().write_blocks(positions, blocks.iter().map(|(_, bytes)| bytes.as_slice()))?;
        for (&position, (block, bytes)) in positions.iter().zip(blocks) {
            self.publish_copy(*block, position, bytes.len() as u64);
        }
        Ok(())
    }

    /// Writes one chunk of a larger copy. Call [`Self::publish_copy`] after the last one.
    pub(crate) fn write_copy_chunk(&self, position: DrivePosition, chunk: Chunk, bytes: &[u8]) -> io::Result<()> {
        self.segments().write(DrivePosition { offset: position.offset + chunk.start(), ..position }, bytes)
    }

    /// Lets processes and peers find a copy, once the dataset is visible.
    pub(crate) fn publish_copy(&self, block: BlockId, position: DrivePosition, len: u64) {
        self.locations().publish(block, Location::Owned(position));
        self.copies_counters().blocks.fetch_add(1, Ordering::Relaxed);
        self.copies_counters().bytes.fetch_add(len, Ordering::Relaxed);
    }

    /// Waits until all copies are on the drives. Call this before the dataset becomes visible.
    pub(crate) fn sync_copies(&self) -> io::Result<()> {
        self.segments().sync()?;
        self.segments().trim()
    }
}
