//! Taking what stage-in ships to this node. Blocks wait in memory until there are many, and are then written in shuffled order, in
//! one go: whoever reads a segment front to back reads samples in random order at the speed of the drive.
//!
//! Each block gets a number as it arrives; the catalog tells it back, and a table in a file tells where the block lies.

mod arrivals;
pub(crate) mod check;
mod paths;
mod window;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BATCH_LEN_MAX, BLOCK_SIZE_MAX};
use dayfly_meta::segment::DrivePosition;
use dayfly_meta::wire::control::Step;
use dayfly_meta::wire::peer::{Damaged, Question, Rival, ShippedBlock};
use dayfly_stagein::progress::ProgressMonitor;
use dayfly_transport::Slot;

use crate::store::{Segments, room_for};
use arrivals::Arrivals;
use paths::{Content, Paths};
use window::Window;

/// What was shipped here in one stage-in.
pub(crate) struct Ingest {
    segments: Arc<Segments>,
    arrivals: Arrivals,
    state: Mutex<State>,
    /// Bytes of memory that may wait to be written.
    window_len: u64,
    gauge: Arc<ProgressMonitor>,
    paths: Paths,
}

#[derive(Default)]
struct State {
    window: Option<Window>,
    next_arrival: u32,
    taken_bytes: u64,
    /// Blocks that come in pieces: where, and how long.
    in_pieces: HashMap<u32, (DrivePosition, u64)>,
}

/// What became of a batch.
pub(crate) enum Stored {
    /// It is taken: the number of its first block, which the others' follow.
    At(u32),
    /// Nothing of it is, for there is no room: it comes back.
    Full(Slot),
}

/// Why a batch cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IngestError {
    #[error("the batch's table contradicts its bytes")]
    Malformed,
    #[error("the batch is damaged: the checksum of block {} is {:08x}, at its source it was {:08x}", .0.at, .0.found, .0.expected)]
    Damaged(Damaged),
    #[error("{0}")]
    Room(String),
    #[error("a piece came of a block for which no room was asked")]
    NotReserved,
    #[error("more blocks than one node can number in a stage-in; stage the sources into several datasets")]
    Numbers,
    #[error("{0}")]
    Write(#[from] io::Error),
}

impl Ingest {
    /// With so much memory for what waits to be written, and for the table of paths.
    pub(crate) fn new(
        segments: Arc<Segments>,
        arrivals: std::fs::File,
        (window_len, paths_len): (u64, usize),
        gauge: Arc<ProgressMonitor>,
    ) -> Self {
        let (arrivals, paths) = (Arrivals::new(arrivals), Paths::new(paths_len));
        Self { segments, arrivals, state: Mutex::default(), window_len, gauge, paths }
    }

    /// Paths that several sources may have, suspected since the last call.
    pub(crate) fn take_suspects(&self) -> Vec<Question> {
        self.paths.take_suspects()
    }

    pub(crate) fn segments(&self) -> &Arc<Segments> {
        &self.segments
    }

    /// Where a block lies, by its number; known once [`Self::finish`] was called.
    pub(crate) fn find(&self, arrival: u32) -> Option<DrivePosition> {
        self.arrivals.find(arrival)
    }

    /// Bytes of all blocks that were taken.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.state().taken_bytes
    }

    /// Takes room for a block that comes in pieces; its number, or `None` if there is no room.
    pub(crate) fn reserve(&self, block_len: u64, rival: Rival) -> Result<Option<u32>, IngestError> {
        if block_len > BLOCK_SIZE_MAX {
            return Err(IngestError::Malformed);
        }
        let promised = room_for(block_len);
        let mut state = self.state();
        for drive in self.segments.by_room() {
            if !self.segments.promise(drive, promised)? {
                continue;
            }
            let places = self.segments.place(drive, [block_len].into_iter(), promised)?;
            let arrival = state.number(1)?;
            self.arrivals.write(arrival, &places)?;
            state.taken_bytes += block_len;
            state.in_pieces.extend(places.into_iter().map(|place| (arrival, (place, block_len))));
            self.paths.see(rival, Content::default());
            return Ok(Some(arrival));
        }
        Ok(None)
    }

    /// Stores a piece of such a block. Blocks; call it where that does no harm.
    pub(crate) fn store_piece(&self, arrival: u32, offset: u64, checksum: u32, bytes: &[u8]) -> Result<(), IngestError> {
        let (place, block_len) = self.state().in_pieces.get(&arrival).copied().ok_or(IngestError::NotReserved)?;
        let end = offset.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > block_len) {
            return Err(IngestError::Malformed);
        }
        check::piece(checksum, bytes).map_err(IngestError::Damaged)?;
        let start = Instant::now();
        let activity = self.gauge.new_activity();
        activity.begin(Step::Writing, self.segments.drive_path(place.drive));
        self.segments.write(DrivePosition { offset: place.offset + offset, ..place }, bytes)?;
        self.gauge.add_busy_time(Step::Writing, start.elapsed());
        Ok(())
    }

    /// Takes a batch, whose first `len` bytes in the slot are the blocks'. Blocks; call it where that does no harm.
    pub(crate) fn store(&self, blocks: &[ShippedBlock], slot: Slot, len: usize) -> Result<Stored, IngestError> {
        let total = blocks.iter().try_fold(0_usize, |total, block| total.checked_add(block.len as usize));
        if total != Some(len) || len > slot.len() || len > BATCH_LEN_MAX || blocks.len() > BATCH_BLOCKS_MAX {
            return Err(IngestError::Malformed);
        }
        check::batch(blocks, &slot[..len]).map_err(IngestError::Damaged)?;
        let room = blocks.iter().map(|block| room_for(u64::from(block.len))).sum();
        let told = blocks.iter().map(|block| (block.rival, Content { len: block.len, checksum: block.checksum }));
        let mut state = self.state();
        let Some(drive) = self.drive_for(&state, room)? else { return Ok(Stored::Full(slot)) };
        let arrival = state.number(blocks.len())?;
        state.taken_bytes += len as u64;
        // Blocks that are written together lie on one drive.
        let other = state.window.take_if(|window| window.drive() != drive);
        let window = state.window.get_or_insert_with(|| Window::new(drive));
        window.push(blocks, slot, arrival, room);
        let full = if window.slots_len() >= self.window_len { state.window.take() } else { None };
        drop(state);
        for (rival, content) in told {
            self.paths.see(rival, content);
        }
        // By whoever brought the last batch: so a slow drive slows those who ship to it.
        for window in [other, full].into_iter().flatten() {
            self.write(window)?;
        }
        Ok(Stored::At(arrival))
    }

    /// Writes what waits, so that its memory is free again.
    pub(crate) fn flush(&self) -> Result<(), IngestError> {
        let window = self.state().window.take();
        window.map_or(Ok(()), |window| self.write(window))
    }

    /// All that was shipped is on the drives, and found by its number.
    pub(crate) fn finish(&self) -> Result<(), IngestError> {
        self.flush()?;
        self.segments.trim()?;
        self.segments.sync()?;
        let count = self.state().next_arrival;
        Ok(self.arrivals.finish(count)?)
    }

    /// A drive on which there is room, which is taken: the present one, or the one with the most.
    fn drive_for(&self, state: &State, room: u64) -> Result<Option<u8>, IngestError> {
        let present = state.window.as_ref().map(Window::drive);
        for drive in present.into_iter().chain(self.segments.by_room()) {
            if self.segments.promise(drive, room)? {
                return Ok(Some(drive));
            }
        }
        Ok(None)
    }

    fn write(&self, window: Window) -> Result<(), IngestError> {
        let start = Instant::now();
        let activity = self.gauge.new_activity();
        activity.begin(Step::Writing, self.segments.drive_path(window.drive()));
        window.write(&self.segments, &self.arrivals)?;
        self.gauge.add_busy_time(Step::Writing, start.elapsed());
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Numbers for so many blocks; the first of them.
    fn number(&mut self, blocks: usize) -> Result<u32, IngestError> {
        let first = self.next_arrival;
        self.next_arrival = u32::try_from(blocks).ok().and_then(|count| first.checked_add(count)).ok_or(IngestError::Numbers)?;
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
        let ingest = Ingest::new(segments, tempfile::tempfile().unwrap(), (4 << 20, 1 << 20), Arc::default());
        (ingest, Region::new(16 << 20).unwrap(), folder)
    }

    fn slot(region: &Region, bytes: &[u8]) -> Slot {
        let mut slot = region.slot(bytes.len() as u64).unwrap();
        slot[..bytes.len()].copy_from_slice(bytes);
        slot
    }

    /// A block whose bytes are all `byte`; one that is longer than a batch has no right checksum.
    fn filled(len: u32, byte: u8, shuffle: u64) -> ShippedBlock {
        let bytes = vec![byte; (len as usize).min(BATCH_LEN_MAX)];
        ShippedBlock { len, checksum: checksum(&bytes), shuffle, rival: Rival::default() }
    }

    fn block(len: u32, shuffle: u64) -> ShippedBlock {
        filled(len, 0, shuffle)
    }

    fn read(ingest: &Ingest, arrival: u32, len: usize) -> Vec<u8> {
        let place = ingest.find(arrival).unwrap();
        let mut bytes = vec![0; len];
        ingest.segments.file(place.drive).unwrap().read_exact_at(&mut bytes, place.offset).unwrap();
        bytes
    }

    #[test]
    fn batches_are_stored_whole_and_found_and_lie_in_shuffled_order() {
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
        assert!((800..1300).contains(&ascents), "{ascents} of {} follow the one before", sizes.len());
        assert_eq!(ingest.find(large + 1), None);
    }

    #[test]
    fn malformed_batches_and_full_drives() {
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

    /// Promise: "an owner compares every block and piece before it takes it".
    #[test]
    fn a_bit_that_flips_before_landing_is_refused_and_nothing_of_the_batch_is_stored() {
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

    /// SEMANTICS: "a drive that loses what was staged in fails the stage-in".
    #[test]
    fn an_error_of_any_call_ends_the_stage_in_and_is_not_forgotten() {
        for call in 0..2 {
            let folder = tempfile::tempdir().unwrap();
            let failing = Arc::new(Failing::default());
            let write_back: Arc<dyn WriteBack> = failing.clone();
            let drives = Drive::open_all_with(&[folder.path().to_owned()], 1 << 24, &write_back).unwrap();
            let segments = Arc::new(Segments::create(&drives, DatasetId(1)).unwrap());
            let ingest = Ingest::new(segments, tempfile::tempfile().unwrap(), (4 << 20, 1 << 20), Arc::default());
            let region = Region::new(16 << 20).unwrap();
            let stored = ingest.store(&[block(1000, 0)], slot(&region, &[0; 1000]), 1000).unwrap();
            assert!(matches!(stored, Stored::At(0)));
            [&failing.start, &failing.sync][call].store(true, Ordering::Relaxed);
            // The kernel reports an error once.
            for _ in 0..2 {
                let message = ingest.finish().unwrap_err().to_string();
                let folder = folder.path().to_str().unwrap();
                assert!(message.contains(folder) && message.contains("has lost what was written to it"), "{message}");
            }
        }
    }
}
