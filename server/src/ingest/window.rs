//! Blocks that wait to be written together.

use std::io;

use dayfly_meta::segment::DrivePosition;
use dayfly_meta::wire::peer::ShippedBlock;
use dayfly_transport::Slot;

use super::arrivals::Arrivals;
use crate::store::Segments;

/// What is kept of a block beside its bytes, while it waits and while it is written.
const BLOCK_MEMORY: usize = 2 * size_of::<Waiting>();

/// Blocks for one drive, and the memory in which they lie.
pub(super) struct Window {
    drive: u8,
    blocks: Vec<Waiting>,
    slots: Vec<Slot>,
    slots_len: u64,
    /// Room promised for all of them.
    promised: u64,
}

struct Waiting {
    shuffle: u64,
    arrival: u32,
    slot: u32,
    start: u32,
    len: u32,
}

impl Window {
    pub(super) fn new(drive: u8) -> Self {
        Self { drive, blocks: Vec::new(), slots: Vec::new(), slots_len: 0, promised: 0 }
    }

    pub(super) fn drive(&self) -> u8 {
        self.drive
    }

    /// Bytes of memory that it holds.
    pub(super) fn slots_len(&self) -> u64 {
        self.slots_len
    }

    /// Takes a batch, whose blocks lie back to back in the slot.
    pub(super) fn push(&mut self, blocks: &[ShippedBlock], slot: Slot, first: u32, room: u64) {
        let number = self.slots.len() as u32;
        let mut start = 0;
        for (block, arrival) in blocks.iter().zip(first..) {
            self.blocks.push(Waiting { shuffle: block.shuffle, arrival, slot: number, start, len: block.len });
            start += block.len;
        }
        self.slots_len += (slot.len() + blocks.len() * BLOCK_MEMORY) as u64;
        self.slots.push(slot);
        self.promised += room;
    }

    /// Writes all blocks in the order of their random numbers, and notes where they lie.
    pub(super) fn write(mut self, segments: &Segments, arrivals: &Arrivals) -> io::Result<()> {
        self.blocks.sort_unstable_by_key(|block| (block.shuffle, block.arrival));
        let places = segments.allocate(self.drive, self.blocks.iter().map(|block| u64::from(block.len)), self.promised)?;
        let bytes = self.blocks.iter().map(|block| {
            let start = block.start as usize;
            &self.slots[block.slot as usize][start..start + block.len as usize]
        });
        segments.write_blocks(&places, bytes)?;
        let mut numbered: Vec<(u32, DrivePosition)> = self.blocks.iter().map(|block| block.arrival).zip(places).collect();
        numbered.sort_unstable_by_key(|(arrival, _)| *arrival);
        for run in numbered.chunk_by(|left, right| left.0 + 1 == right.0) {
            let places: Vec<DrivePosition> = run.iter().map(|(_, place)| *place).collect();
            arrivals.write(run[0].0, &places)?;
        }
        Ok(())
    }
}
