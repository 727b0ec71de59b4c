//! Blocks that wait in memory to be written to one drive together.

use std::io;

use dayfly_meta::segment::DrivePosition;
use dayfly_meta::wire::peer::ShippedBlock;
use dayfly_transport::Slot;

use super::arrival_table::ArrivalTable;
use crate::store::Segments;

/// Memory that a block takes in addition to its bytes, while it waits and while it is written.
const BLOCK_MEMORY: usize = 2 * size_of::<Waiting>();

/// Blocks for one drive, and the slots that hold their bytes.
pub(super) struct WriteBuffer {
    drive: u8,
    blocks: Vec<Waiting>,
    slots: Vec<Slot>,
    memory: u64,
    /// Room on the drive that is reserved for all blocks.
    reserved: u64,
}

struct Waiting {
    /// Blocks are written in the order of these random numbers.
    shuffle: u64,
    arrival: u32,
    /// The index of the slot that holds the block; `start` is the block's offset in that slot.
    slot: u32,
    start: u32,
    len: u32,
}

impl WriteBuffer {
    pub(super) fn new(drive: u8) -> Self {
        Self { drive, blocks: Vec::new(), slots: Vec::new(), memory: 0, reserved: 0 }
    }

    pub(super) fn drive(&self) -> u8 {
        self.drive
    }

    /// Returns the bytes of memory that the buffer takes.
    pub(super) fn memory(&self) -> u64 {
        self.memory
    }

    /// Adds a batch whose blocks lie back to back in `slot`. Their arrival numbers start at `first`, and `room` bytes are
    /// reserved for them on the drive.
    pub(super) fn push(&mut self, blocks: &[ShippedBlock], slot: Slot, first: u32, room: u64) {
        let number = self.slots.len() as u32;
        let mut start = 0;
        for (block, arrival) in blocks.iter().zip(first..) {
            self.blocks.push(Waiting { shuffle: block.shuffle, arrival, slot: number, start, len: block.len });
            start += block.len;
        }
        self.memory += (slot.len() + blocks.len() * BLOCK_MEMORY) as u64;
        self.slots.push(slot);
        self.reserved += room;
    }

    /// Writes all blocks in the order of their random numbers, and records their positions.
    pub(super) fn write(mut self, segments: &Segments, arrivals: &ArrivalTable) -> io::Result<()> {
        self.blocks.sort_unstable_by_key(|block| (block.shuffle, block.arrival));
        let positions = segments.allocate(self.drive, self.blocks.iter().map(|block| u64::from(block.len)), self.reserved)?;
        let bytes = self.blocks.iter().map(|block| {
            let start = block.start as usize;
            &self.slots[block.slot as usize][start..start + block.len as usize]
        });
        segments.write_blocks(&positions, bytes)?;
        let mut numbered: Vec<(u32, DrivePosition)> = self.blocks.iter().map(|block| block.arrival).zip(positions).collect();
        numbered.sort_unstable_by_key(|(arrival, _)| *arrival);
        for run in numbered.chunk_by(|left, right| left.0 + 1 == right.0) {
            let positions: Vec<DrivePosition> = run.iter().map(|(_, position)| *position).collect();
            arrivals.write(run[0].0, &positions)?;
        }
        Ok(())
    }
}
