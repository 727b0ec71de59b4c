//! The owner's side of a stage-in: takes the blocks that workers ship to this node. Blocks wait in memory until there are many,
//! and are then written together in shuffled order. So a process that reads a segment from front to back gets samples in random
//! order at the speed of the drive.
//!
//! Each block gets a number when it arrives. The catalog names blocks by these arrival numbers, and a table in a file says
//! where each block lies.
//!
//! # Parts
//!
//! - [`Ingest`]: everything that one stage-in ships to this node.
//! - [`check`]: verifies blocks before they are stored.
//! - [`write_buffer`]: the blocks that wait to be written to one drive.
//! - [`arrival_table`]: records the position of each block, by arrival number.
//! - [`path_table`]: finds paths that rival sources have in common.
//!
//! # Invariants
//!
//! - A batch is stored whole or not at all, and only after every block in it has been verified.
//! - Room on a drive is reserved before a batch is acknowledged, so an acknowledged block can be written.
//! - After [`Ingest::finish`], all blocks are on the drives.

mod arrival_table;
pub(crate) mod check;
mod path_table;
mod write_buffer;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dayfly_meta::catalog::NOT_STORED_MIN;
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BATCH_LEN_MAX, BLOCK_SIZE_MAX};
use dayfly_meta::segment::DrivePosition;
use dayfly_meta::wire::control::Step;
use dayfly_meta::wire::peer::{Damaged, Rival, ShippedBlock, SuspectPath};
use dayfly_stagein::progress::ProgressMonitor;
use dayfly_transport::Slot;

use crate::store::{Drive, Segments, room_for};
use arrival_table::ArrivalTable;
use path_table::{Content, PathTable};
use write_buffer::WriteBuffer;

/// The blocks that one stage-in ships to this node.
pub(crate) struct Ingest {
    segments: Arc<Segments>,
    arrivals: ArrivalTable,
    intake: Mutex<Intake>,
    /// Bytes of memory for blocks that wait to be written.
    buffer_len: u64,
    gauge: Arc<ProgressMonitor>,
    paths: PathTable,
}

#[derive(Default)]
struct Intake {
    buffer: Option<WriteBuffer>,
    next_arrival: u32,
    stored_bytes: u64,
    /// The positions and lengths of blocks that arrive in pieces, by arrival number.
    in_pieces: HashMap<u32, (DrivePosition, u64)>,
}

/// The result of storing a batch.
pub(crate) enum Stored {
    /// The batch is stored. Its blocks have consecutive arrival numbers, which start at this one.
    At(u32),
    /// No drive has room for the batch. None of it is stored, and its slot goes back to the caller.
    Full(Slot),
}

/// Why a batch or a piece was not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IngestError {
    #[error("the batch is malformed: its block lengths do not match its bytes")]
    Malformed,
    #[error("the batch is damaged: block {} has the checksum {:08x}, and had {:08x} at its source", .0.at, .0.found, .0.expected)]
    Damaged(Damaged),
    #[error("a piece arrived for a block that has no reservation")]
    NotReserved,
    #[error("one node cannot store this many blocks in one stage-in; stage the sources into several datasets")]
    Numbers,
    #[error(transparent)]
    Write(#[from] io::Error),
}

impl Ingest {
    /// Creates an ingest without blocks. `buffer_len` is the memory for blocks that wait to be written, and `paths_len` the
    /// memory for the table of paths. The table of positions lies on `drive`.
    pub(crate) fn new(
        segments: Arc<Segments>,
        drive: Arc<Drive>,
        (buffer_len, paths_len): (u64, usize),
        gauge: Arc<ProgressMonitor>,
    ) -> io::Result<Self> {
        let (arrivals, paths) = (ArrivalTable::new(drive)?, PathTable::new(paths_len));
        Ok(Self { segments, arrivals, intake: Mutex::default(), buffer_len, gauge, paths })
    }

    /// Returns the path conflicts that have been suspected since the last call.
    pub(crate) fn take_suspects(&self) -> Vec<SuspectPath> {
        self.paths.take_suspects()
    }

    pub(crate) fn segments(&self) -> &Arc<Segments> {
        &self.segments
    }

    /// Returns where the block with this arrival number lies. Returns `None` before [`Self::finish`].
    pub(crate) fn find(&self, arrival: u32) -> Option<DrivePosition> {
        self.arrivals.find(arrival)
    }

    /// Returns the total length of all blocks that have been stored.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.intake().stored_bytes
    }

    /// Reserves room for a block that will arrive in pieces, and returns its arrival number. Returns `None` if there is no room.
    pub(crate) fn reserve(&self, block_len: u64, rival: Rival) -> Result<Option<u32>, IngestError> {
        if block_len > BLOCK_SIZE_MAX {
            return Err(IngestError::Malformed);
        }
        let room = room_for(block_len);
        let mut intake = self.intake();
        for drive in self.segments.drives_by_room() {
            if !self.segments.reserve(drive, room)? {
                continue;
            }
            let positions = self.segments.allocate(drive, [block_len].into_iter(), room)?;
            let arrival = intake.number(1)?;
            self.arrivals.write(arrival, &positions)?;
            intake.stored_bytes += block_len;
            intake.in_pieces.extend(positions.into_iter().map(|position| (arrival, (position, block_len))));
            self.paths.record(rival, Content::default());
            return Ok(Some(arrival));
        }
        Ok(None)
    }

    /// Stores a piece of a block that was reserved. May wait for the drive, so it must not run on a runtime thread.
    pub(crate) fn store_piece(&self, arrival: u32, offset: u64, checksum: u32, bytes: &[u8]) -> Result<(), IngestError> {
        let (position, block_len) = self.intake().in_pieces.get(&arrival).copied().ok_or(IngestError::NotReserved)?;
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > block_len) {
            return Err(IngestError::Malformed);
        }
        check::piece(checksum, bytes).map_err(IngestError::Damaged)?;
        let start = Instant::now();
        let activity = self.gauge.new_activity();
        activity.begin(Step::Writing, self.segments.drive_path(position.drive));
        self.segments.write(DrivePosition { offset: position.offset + offset, ..position }, bytes)?;
        self.gauge.add_busy_time(Step::Writing, start.elapsed());
        Ok(())
    }

    /// Stores a batch whose blocks are the first `len` bytes in the slot. May wait for the drive, so it must not run on a
    /// runtime thread.
    pub(crate) fn store(&self, blocks: &[ShippedBlock], slot: Slot, len: usize) -> Result<Stored, IngestError> {
        let total = blocks.iter().try_fold(0_usize, |total, block| total.checked_add(block.len as usize));
        if total != Some(len) || len > slot.len() || len > BATCH_LEN_MAX || blocks.len() > BATCH_BLOCKS_MAX {
            return Err(IngestError::Malformed);
        }
        check::batch(blocks, &slot[..len]).map_err(IngestError::Damaged)?;
        let room = blocks.iter().map(|block| room_for(u64::from(block.len))).sum();
        let paths = blocks.iter().map(|block| (block.rival, Content { len: block.len, checksum: block.checksum }));
        let mut intake = self.intake();
        let Some(drive) = self.drive_for(&intake, room)? else { return Ok(Stored::Full(slot)) };
        let arrival = intake.number(blocks.len())?;
        intake.stored_bytes += len as u64;
        // A buffer holds blocks of one drive only.
        let other = intake.buffer.take_if(|buffer| buffer.drive() != drive);
        let buffer = intake.buffer.get_or_insert_with(|| WriteBuffer::new(drive));
        buffer.push(blocks, slot, arrival, room);
        let full = if buffer.memory() >= self.buffer_len { intake.buffer.take() } else { None };
        drop(intake);
        for (rival, content) in paths {
            self.paths.record(rival, content);
        }
        // The caller whose batch filled the buffer writes the buffer before the batch is acknowledged. So a slow drive slows
        // down the workers that ship to it.
        for buffer in [other, full].into_iter().flatten() {
            self.write(buffer)?;
        }
        Ok(Stored::At(arrival))
    }

    /// Writes the blocks that wait, so that their memory is free again.
    pub(crate) fn flush(&self) -> Result<(), IngestError> {
        let buffer = self.intake().buffer.take();
        buffer.map_or(Ok(()), |buffer| self.write(buffer))
    }

    /// Brings all blocks onto the drives and opens the table of their positions. Call this when no further block will arrive.
    pub(crate) fn finish(&self) -> Result<(), IngestError> {
        self.flush()?;
        self.segments.trim()?;
        self.segments.sync()?;
        let Intake { next_arrival: blocks, stored_bytes: bytes, .. } = *self.intake();
        tracing::debug!(blocks, bytes, "all shipped blocks are on the drives");
        Ok(self.arrivals.finish(blocks)?)
    }

    /// Reserves room on the drive of the current buffer, or else on the drive with the most room. Returns `None` if all drives
    /// are full.
    fn drive_for(&self, intake: &Intake, room: u64) -> Result<Option<u8>, IngestError> {
        let present = intake.buffer.as_ref().map(WriteBuffer::drive);
        for drive in present.into_iter().chain(self.segments.drives_by_room()) {
            if self.segments.reserve(drive, room)? {
                return Ok(Some(drive));
            }
        }
        Ok(None)
    }

    fn write(&self, buffer: WriteBuffer) -> Result<(), IngestError> {
        let start = Instant::now();
        let activity = self.gauge.new_activity();
        activity.begin(Step::Writing, self.segments.drive_path(buffer.drive()));
        buffer.write(&self.segments, &self.arrivals)?;
        self.gauge.add_busy_time(Step::Writing, start.elapsed());
        Ok(())
    }

    fn intake(&self) -> MutexGuard<'_, Intake> {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Intake {
    /// Assigns arrival numbers to `blocks` blocks, and returns the first of them.
    fn number(&mut self, blocks: usize) -> Result<u32, IngestError> {
        let first = self.next_arrival;
        self.next_arrival = u32::try_from(blocks)
            .ok()
            .and_then(|count| first.checked_add(count))
            .filter(|&next| next <= NOT_STORED_MIN)
            .ok_or(IngestError::Numbers)?;
        Ok(first)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::Ordering;

    use dayfly_meta::checksum::checksum;
    use dayfly_meta::id::DatasetId;
    use dayfly_transport::Region;

    use super::*;
    use crate::store::Drive;
    use crate::store::write_back::WriteBack;
    use crate::store::write_back::failing::Failing;

    fn ingest(capacity: u64) -> (Ingest, Region, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], capacity).unwrap();
        let segments = Arc::new(Segments::create(&drives, DatasetId(1)).unwrap());
        let ingest = Ingest::new(segments, drives[0].clone(), (4 << 20, 1 << 20), Arc::default()).unwrap();
        (ingest, Region::new(16 << 20).unwrap(), folder)
    }

    fn slot(region: &Region, bytes: &[u8]) -> Slot {
        let mut slot = region.slot(bytes.len() as u64).unwrap();
        slot[..bytes.len()].copy_from_slice(bytes);
        slot
    }

    /// Returns a block whose bytes are all `byte`. If it is longer than a batch, its checksum is wrong.
    fn filled(len: u32, byte: u8, shuffle: u64) -> ShippedBlock {
        let bytes = vec![byte; (len as usize).min(BATCH_LEN_MAX)];
        ShippedBlock { len, checksum: checksum(&bytes), shuffle, rival: Rival::default() }
    }

    fn block(len: u32, shuffle: u64) -> ShippedBlock {
        filled(len, 0, shuffle)
    }

    fn read(ingest: &Ingest, arrival: u32, len: usize) -> Vec<u8> {
        let position = ingest.find(arrival).unwrap();
        let mut bytes = vec![0; len];
        ingest.segments.file(position.drive).unwrap().read_exact_at(&mut bytes, position.offset).unwrap();
        bytes
    }

    #[test]
    fn batches_are_stored_whole_and_lie_in_shuffled_order() {
        let (ingest, region, _folder) = ingest(1 << 24);
        let mut sizes = Vec::new();
        for batch in 0..40_u32 {
            let lens: Vec<u32> = (0..50).map(|number| (batch * 50 + number) * 7 % 9000).chain([70_000]).collect();
            let bytes: Vec<u8> = lens.iter().flat_map(|&len| vec![len as u8; len as usize]).collect();
            let blocks: Vec<ShippedBlock> = lens
                .iter()
                .map(|&len| {
                    filled(
                        len,
                        len as u8,
                        u64::from(len).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9),
                    )
                })
                .collect();
            let stored = ingest.store(&blocks, slot(&region, &bytes), bytes.len()).unwrap();
            assert!(matches!(stored, Stored::At(first) if first == sizes.len() as u32));
            sizes.extend(lens);
        }
        let large = ingest.reserve(3 << 20, Rival::default()).unwrap().unwrap();
        for piece in [2_u64, 0, 1] {
            let bytes = vec![piece as u8; 1 << 20];
            ingest.store_piece(large, piece << 20, checksum(&bytes), &bytes).unwrap();
        }
        ingest.finish().unwrap();
        for (arrival, &len) in (0..).zip(&sizes) {
            assert!(read(&ingest, arrival, len as usize) == vec![len as u8; len as usize], "block {arrival}");
        }
        assert!(read(&ingest, large, 3 << 20)[2 << 20..] == vec![2; 1 << 20]);
        let offsets: Vec<u64> = (0..sizes.len() as u32).map(|arrival| ingest.find(arrival).unwrap().offset).collect();
        let ascents = offsets.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((800..1300).contains(&ascents), "{ascents} of {} blocks lie after the one that arrived before", sizes.len());
        assert_eq!(ingest.find(large + 1), None);
    }

    #[test]
    fn malformed_batches_are_rejected_and_batches_for_full_drives_are_returned() {
        let (ingest, region, _folder) = ingest(40_000);
        let store = |blocks: &[ShippedBlock], bytes: &[u8]| ingest.store(blocks, slot(&region, bytes), bytes.len());
        assert!(matches!(store(&[block(10, 0)], &[0; 11]), Err(IngestError::Malformed)));
        assert!(matches!(store(&[block(u32::MAX, 0), block(u32::MAX, 0)], &[0; 10]), Err(IngestError::Malformed)));
        assert!(matches!(ingest.store_piece(0, 0, 0, &[0; 10]), Err(IngestError::NotReserved)));
        assert!(matches!(ingest.reserve(BLOCK_SIZE_MAX + 1, Rival::default()), Err(IngestError::Malformed)));
        assert!(matches!(store(&[block(60_000, 0)], &[0; 60_000]).unwrap(), Stored::Full(_)));
        assert!(matches!(store(&[block(20_000, 0)], &[0; 20_000]).unwrap(), Stored::At(0)));
        assert_eq!(ingest.reserve(30_000, Rival::default()).unwrap(), None);
        let piece = ingest.reserve(1000, Rival::default()).unwrap().unwrap();
        assert!(matches!(ingest.store_piece(piece, 990, 0, &[0; 11]), Err(IngestError::Malformed)));
        assert!(matches!(ingest.store_piece(piece, u64::MAX, 0, &[0; 11]), Err(IngestError::Malformed)));
    }

    /// SEMANTICS: "The owner checks every block before it accepts the block, even a block from a worker on its own node."
    #[test]
    fn a_bit_that_flips_before_landing_is_detected_and_none_of_the_batch_is_stored() {
        let (ingest, region, _folder) = ingest(1 << 24);
        let blocks = [filled(100, 7, 0), filled(0, 0, 0), filled(5000, 9, 0)];
        let whole: Vec<u8> = [vec![7; 100], vec![9; 5000]].concat();
        for (bit, at) in [(0, 0), (99 * 8 + 7, 0), (100 * 8, 2), (5099 * 8 + 3, 2)] {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let stored = ingest.store(&blocks, slot(&region, &bytes), bytes.len());
            assert!(matches!(stored, Err(IngestError::Damaged(damaged)) if damaged.at == at), "bit {bit}");
        }
        assert_eq!(ingest.stored_bytes(), 0);
        assert!(matches!(ingest.store(&blocks, slot(&region, &whole), whole.len()).unwrap(), Stored::At(0)));
        let piece = ingest.reserve(2 << 20, Rival::default()).unwrap().unwrap();
        let mut bytes = vec![3; 1 << 20];
        let expected = checksum(&bytes);
        bytes[77] ^= 0x10;
        let stored = ingest.store_piece(piece, 0, expected, &bytes);
        assert!(matches!(stored, Err(IngestError::Damaged(Damaged { expected: sent, .. })) if sent == expected));
        bytes[77] ^= 0x10;
        ingest.store_piece(piece, 0, expected, &bytes).unwrap();
    }

    /// SEMANTICS: "A failed sync is not retried, because a second sync would succeed and prove nothing."
    #[test]
    fn a_failed_write_back_or_sync_fails_the_stage_in_for_good() {
        for call in 0..2 {
            let folder = tempfile::tempdir().unwrap();
            let failing = Arc::new(Failing::default());
            let write_back: Arc<dyn WriteBack> = failing.clone();
            let drives = Drive::open_all_with(&[folder.path().to_owned()], 1 << 24, &write_back).unwrap();
            let segments = Arc::new(Segments::create(&drives, DatasetId(1)).unwrap());
            let ingest = Ingest::new(segments, drives[0].clone(), (4 << 20, 1 << 20), Arc::default()).unwrap();
            let region = Region::new(16 << 20).unwrap();
            let stored = ingest.store(&[block(1000, 0)], slot(&region, &[0; 1000]), 1000).unwrap();
            assert!(matches!(stored, Stored::At(0)));
            [&failing.start, &failing.sync][call].store(true, Ordering::Relaxed);
            // The kernel reports an error only once, so the second call shows that we remember it.
            for _ in 0..2 {
                let message = ingest.finish().unwrap_err().to_string();
                let folder = folder.path().to_str().unwrap();
                assert!(message.contains(folder) && message.contains("has lost what was written to it"), "{message}");
            }
        }
    }
}
