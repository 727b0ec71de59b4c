//! Segments: the files in which a dataset packs its blocks, one on each drive.
//!
//! First come the blocks that the node owns, and after them the *cached region* with copies of other nodes' blocks. Blocks go
//! through three steps: their room is reserved, their positions are allocated in it, and their bytes are written. Reserving also
//! makes the file system allocate the room, so that a write into it does not find the file system full.

use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::id::DatasetId;
use dayfly_meta::limits::{PAGE_BLOCK_SIZE_MIN, PAGE_SIZE, RESERVATION_STEP};
use dayfly_meta::segment::{DATA_START, DrivePosition, OFFSET_MAX, header, pack};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::uio::pwritev;

use super::drive::{Drive, Reservation};
use super::pages::Pages;
use super::write_back::Unsynced;
use crate::blocking::assert_may_wait;

/// A dataset's segments, by drive.
pub(crate) struct Segments {
    segments: Vec<Segment>,
}

struct Segment {
    drive: Arc<Drive>,
    file: Arc<File>,
    room: Mutex<Room>,
    unsynced: Unsynced,
}

struct Room {
    /// The offset after the last allocated block.
    end: u64,
    /// Bytes after `end` that are reserved, but not allocated to blocks yet.
    reserved: u64,
    /// The offset up to which the file system has allocated room.
    preallocated_to: u64,
    /// Set once the dataset may cache blocks.
    cached: Option<CachedRegion>,
    /// `None` once the segment has been freed, or if the drive had no room even for the header.
    reservation: Option<Reservation>,
}

/// The part of a segment that holds cached blocks. An offset in this region is never used again after the block at this offset
/// has been withdrawn, because a slow reader would mistake the new block's bytes for those of the old one.
struct CachedRegion {
    /// No cached block lies before this offset.
    start: u64,
    /// Bytes that are reserved for cached blocks.
    reserved: u64,
}

/// Fills the gap before a block that starts on a page. The gap is shorter than a page.
static ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];
/// The shortest run of unused pages that is freed.
const FREED_PAGES_MIN: u64 = 8;
/// Slices in one vectored write; Linux accepts no more.
const SLICES_MAX: usize = 1024;

/// Returns the most room that a block of this length needs, wherever it is placed.
pub(crate) fn room_for(len: u64) -> u64 {
    if len >= PAGE_BLOCK_SIZE_MIN { len.next_multiple_of(PAGE_SIZE) + PAGE_SIZE } else { len }
}

impl Segments {
    /// Creates a segment with its header on each drive.
    pub(crate) fn create(drives: &[Arc<Drive>], dataset: DatasetId) -> io::Result<Self> {
        let create = |(number, drive): (usize, &Arc<Drive>)| {
            let made = drive.unnamed_file().and_then(|file| {
                file.write_all_at(&header(dataset.0, number as u8), 0)?;
                Ok(file)
            });
            let file = made.map_err(|error| drive.failure(error))?;
            let reservation = drive.reserve(DATA_START);
            let room = Room { end: DATA_START, reserved: 0, preallocated_to: DATA_START, cached: None, reservation };
            let unsynced = Unsynced::new(drive.write_back().clone());
            Ok(Segment { drive: drive.clone(), file: Arc::new(file), room: Mutex::new(room), unsynced })
        };
        Ok(Self { segments: drives.iter().enumerate().map(create).collect::<io::Result<_>>()? })
    }

    /// Returns the drives' numbers, the one with the most free room first.
    pub(crate) fn drives_by_room(&self) -> Vec<u8> {
        let mut numbers: Vec<u8> = (0..self.segments.len() as u8).collect();
        numbers.sort_by_key(|&number| std::cmp::Reverse(self.segments[usize::from(number)].drive.free()));
        numbers
    }

    /// Reserves room on a drive, so that blocks that are allocated in this room can be written. Returns `false` if there is not
    /// enough room.
    pub(crate) fn reserve(&self, drive: u8, len: u64) -> io::Result<bool> {
        self.segment(drive)?.reserve(len)
    }

    /// Allocates positions for blocks, one after another, in `reserved` bytes that were reserved for them. The part of the
    /// reservation that the blocks do not need is freed.
    pub(crate) fn allocate(&self, drive: u8, lens: impl Iterator<Item = u64>, reserved: u64) -> io::Result<Vec<DrivePosition>> {
        let segment = self.segment(drive)?;
        let mut room = segment.room();
        let start = room.end;
        let mut positions = Vec::new();
        for len in lens {
            let (offset, next) = pack(room.end, len);
            positions.push(DrivePosition { drive, offset });
            room.end = next;
        }
        room.reserved = room.reserved.saturating_sub(reserved);
        let allocated = room.end - start;
        if let Some(reservation) = &mut room.reservation {
            reservation.shrink(reserved.saturating_sub(allocated));
        }
        if let Some(cached) = &mut room.cached {
            cached.reserved += allocated;
        }
        Ok(positions)
    }

    /// Writes bytes at an allocated position, and starts to bring them onto the drive.
    pub(crate) fn write(&self, position: DrivePosition, bytes: &[u8]) -> io::Result<()> {
        assert_may_wait();
        let segment = self.segment(position.drive)?;
        let written = segment.file.write_all_at(bytes, position.offset);
        written.map_err(|error| segment.drive.failure(error))?;
        segment.start_write_back(position.offset..position.offset + bytes.len() as u64)
    }

    /// Writes blocks that were allocated together, with zeros in the gaps, and starts to bring them onto the drive.
    pub(crate) fn write_blocks<'a>(&self, positions: &[DrivePosition], blocks: impl Iterator<Item = &'a [u8]>) -> io::Result<()> {
        let Some(first) = positions.first() else { return Ok(()) };
        let segment = self.segment(first.drive)?;
        let end = write_blocks_at(&segment.file, first.offset, positions, blocks);
        segment.start_write_back(first.offset..end.map_err(|error| segment.drive.failure(error))?)
    }

    /// Waits until everything written so far is on the drives.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.segments.iter().try_for_each(Segment::sync)
    }

    /// Like [`Self::sync`], but skips drives that have already lost something. Syncs all others, and then returns the first error.
    pub(crate) fn sync_healthy(&self) -> io::Result<()> {
        let healthy = self.segments.iter().filter(|segment| !segment.unsynced.has_failed());
        let synced: Vec<io::Result<()>> = healthy.map(Segment::sync).collect();
        synced.into_iter().collect()
    }

    /// Returns whether a drive has lost written bytes. If so, nothing that was written to it since
    /// the last successful sync can be relied on.
    pub(crate) fn has_failed(&self, drive: u8) -> bool {
        self.segments.get(usize::from(drive)).is_none_or(|segment| segment.unsynced.has_failed())
    }

    /// Reserves room for cached blocks on the emptiest healthy drive that has enough room; `None` if there is no such drive.
    pub(crate) fn reserve_cached(&self, len: u64) -> io::Result<Option<u8>> {
        for drive in self.drives_by_room() {
            let segment = self.segment(drive)?;
            if segment.can_cache() && segment.reserve(len)? {
                return Ok(Some(drive));
            }
        }
        Ok(None)
    }

    /// Returns whether a drive takes cached blocks, if it has room.
    pub(crate) fn can_cache(&self) -> bool {
        self.segments.iter().any(Segment::can_cache)
    }

    /// Starts the cached region: blocks that are allocated after this call are cached blocks, and [`Self::free_cached`] can
    /// free their room. Extends the files by `len` bytes without allocating room for them.
    pub(crate) fn begin_cached_region(&self, len: u64) -> io::Result<()> {
        self.segments.iter().try_for_each(|segment| {
            let mut room = segment.room();
            if room.cached.is_none() {
                let start = room.end.next_multiple_of(PAGE_SIZE);
                match punch(&segment.file, start, PAGE_SIZE) {
                    Ok(()) => {}
                    // This file system cannot free ranges of a file, so nothing is cached on it.
                    Err(Errno::EOPNOTSUPP) => return Ok(()),
                    Err(error) => return Err(segment.drive.failure(error.into())),
                }
                (room.end, room.preallocated_to) = (start, room.preallocated_to.max(start));
                room.cached = Some(CachedRegion { start, reserved: 0 });
            }
            let wanted = room.end.saturating_add(len).min(OFFSET_MAX).next_multiple_of(PAGE_SIZE);
            let extended = segment.file.metadata().and_then(|metadata| match metadata.len() >= wanted {
                true => Ok(()),
                false => segment.file.set_len(wanted),
            });
            match extended {
                // The file system does not support files of that length. Blocks that would lie beyond its limit are not cached.
                Err(error) if error.kind() == io::ErrorKind::FileTooLarge => Ok(()),
                extended => extended.map_err(|error| segment.drive.failure(error)),
            }
        })
    }

    /// Ensures that blocks cached after this call share no page with blocks cached before it.
    pub(crate) fn begin_cached_group(&self) {
        self.segments.iter().for_each(|segment| segment.room().align_cached());
    }

    /// Returns the bytes of room that cached blocks take.
    pub(crate) fn cached_room(&self) -> u64 {
        self.segments.iter().map(|segment| segment.room().cached.as_ref().map_or(0, |cached| cached.reserved)).sum()
    }

    /// Frees the pages of the cached region that hold no live block. `live` calls its argument with the position and length of
    /// every cached block that stays. Returns the bytes freed.
    pub(crate) fn free_cached(&self, live: impl Fn(&mut dyn FnMut(DrivePosition, u64))) -> io::Result<u64> {
        self.begin_cached_group();
        let pages = |segment: &Segment| {
            let room = segment.room();
            room.cached.as_ref().map(|cached| Pages::new(cached.start..room.end))
        };
        let mut pages: Vec<Option<Pages>> = self.segments.iter().map(pages).collect();
        live(&mut |position, len| {
            if let Some(Some(pages)) = pages.get_mut(usize::from(position.drive)) {
                pages.mark(position.offset, len);
            }
        });
        let mut all_freed = 0;
        for (segment, pages) in self.segments.iter().zip(pages) {
            let mut room = segment.room();
            let Some(pages) = pages else { continue };
            pages.unused(1).try_for_each(|unused| punch(&segment.file, unused.start, unused.end - unused.start))?;
            let used = pages.used_bytes();
            if used == 0 && room.preallocated_to > room.end {
                punch(&segment.file, room.end, room.preallocated_to - room.end)?;
                room.preallocated_to = room.end;
            }
            let end = room.end;
            let Some(cached) = &mut room.cached else { continue };
            cached.start = pages.first_used().unwrap_or(end);
            let freed = cached.reserved.saturating_sub(used);
            cached.reserved -= freed;
            if let Some(reservation) = &mut room.reservation {
                reservation.shrink(freed);
            }
            segment.drive.set_not_full();
            all_freed += freed;
        }
        Ok(all_freed)
    }

    /// Frees the preallocated room after the last block, once all blocks have been written.
    pub(crate) fn trim(&self) -> io::Result<()> {
        self.segments.iter().try_for_each(|segment| {
            let mut room = segment.room();
            room.preallocated_to = room.end;
            // The file keeps whole pages, because a block that starts on a page is mapped up to the end of its last page.
            let trimmed = segment.file.set_len(room.end.next_multiple_of(PAGE_SIZE));
            trimmed.map_err(|error| segment.drive.failure(error))
        })
    }

    /// Frees the pages that hold no live block. Dead blocks come from tar ranges that were read from a wrong start, and from
    /// files that other files replaced. `live` calls its argument with the position and length of every live block. Returns the
    /// bytes freed.
    pub(crate) fn free_unused(&self, live: impl Fn(&mut dyn FnMut(DrivePosition, u64))) -> io::Result<u64> {
        // Excludes the header, and the last page, which a block may partly fill.
        let pages = |segment: &Segment| Pages::new(DATA_START..segment.room().end / PAGE_SIZE * PAGE_SIZE);
        let mut pages: Vec<Pages> = self.segments.iter().map(pages).collect();
        live(&mut |position, len| {
            if let Some(pages) = pages.get_mut(usize::from(position.drive)) {
                pages.mark(position.offset, len);
            }
        });
        let mut freed = 0;
        for (segment, pages) in self.segments.iter().zip(pages) {
            let mut room = segment.room();
            for unused in pages.unused(FREED_PAGES_MIN) {
                let len = unused.end - unused.start;
                match punch(&segment.file, unused.start, len) {
                    Ok(()) => freed += len,
                    // This file system cannot free ranges of a file: the room stays taken until the dataset is freed.
                    Err(Errno::EOPNOTSUPP) => break,
                    Err(error) => return Err(segment.drive.failure(error.into())),
                }
                if let Some(reservation) = &mut room.reservation {
                    reservation.shrink(len);
                }
            }
        }
        Ok(freed)
    }

    /// Returns the segment on a drive.
    pub(crate) fn file(&self, drive: u8) -> Option<&Arc<File>> {
        self.segments.get(usize::from(drive)).map(|segment| &segment.file)
    }

    /// Returns the path of a drive's data dir, for messages.
    pub(crate) fn drive_path(&self, drive: u8) -> &[u8] {
        self.segments.get(usize::from(drive)).map_or(b"", |segment| segment.drive.path().as_os_str().as_encoded_bytes())
    }

    /// Returns all segments, by drive.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<File>> {
        self.segments.iter().map(|segment| &segment.file)
    }

    /// Frees the room of the segments, even if processes still have them open.
    pub(crate) fn free(&self) {
        for segment in &self.segments {
            let mut room = segment.room();
            // The segment is truncated, not punched: a process that has it mapped must fault rather than read zeros.
            if let Err(error) = segment.file.set_len(0) {
                tracing::warn!(
                    path = %segment.drive.path().display(),
                    %error,
                    "cannot truncate a segment; its room is freed when its last reader ends"
                );
            }
            room.reservation = None;
        }
    }

    fn segment(&self, drive: u8) -> io::Result<&Segment> {
        let missing = || io::Error::new(io::ErrorKind::InvalidInput, format!("there is no drive {drive} on this node"));
        self.segments.get(usize::from(drive)).ok_or_else(missing)
    }
}

impl Segment {
    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to bring written bytes onto the drive.
    fn start_write_back(&self, range: Range<u64>) -> io::Result<()> {
        // Cached blocks are synced in groups, which already bound the bytes in flight.
        let started = if self.room().cached.is_some() {
            self.unsynced.start(&self.file, &range)
        } else {
            self.unsynced.start_and_bound(&self.file, range)
        };
        started.map_err(|error| self.drive.loss_error(error))
    }

    fn sync(&self) -> io::Result<()> {
        self.unsynced.sync(&self.file).map_err(|error| self.drive.loss_error(error))
    }

    /// Returns whether cached blocks may be written here: not after a failure, nor on a file system that cannot free parts of files.
    fn can_cache(&self) -> bool {
        self.room().cached.is_some() && !self.unsynced.has_failed()
    }

    fn reserve(&self, len: u64) -> io::Result<bool> {
        let mut room = self.room();
        let left = self.drive.left_for_catalogs();
        if !room.reservation.as_mut().is_some_and(|reservation| reservation.grow_leaving(len, left)) {
            return Ok(false);
        }
        let needed = (room.end + room.reserved).saturating_add(len);
        let has_room = needed <= room.preallocated_to || needed <= OFFSET_MAX && self.preallocate(&mut room, needed)?;
        if !has_room {
            if let Some(reservation) = &mut room.reservation {
                reservation.shrink(len);
            }
            return Ok(false);
        }
        room.reserved += len;
        Ok(true)
    }

    /// Makes the file system allocate room up to the offset `needed`, and somewhat further if it can.
    fn preallocate(&self, room: &mut Room, needed: u64) -> io::Result<bool> {
        // If the drive's capacity is small, the step is a small part of that capacity.
        let step = RESERVATION_STEP.min((self.drive.capacity() / 64).next_multiple_of(PAGE_SIZE)).max(PAGE_SIZE);
        let headroom = self.drive.protected_headroom();
        for end in [needed.next_multiple_of(step), needed] {
            let more = end - room.preallocated_to;
            if headroom > 0 && self.drive.free_on_file_system() < more.saturating_add(headroom) {
                continue;
            }
            match fallocate(&self.file, FallocateFlags::empty(), room.preallocated_to as i64, more as i64) {
                // If the file system cannot preallocate, it reports only during a write that it is full.
                Ok(()) | Err(Errno::EOPNOTSUPP) => {
                    room.preallocated_to = end;
                    return Ok(true);
                }
                Err(Errno::ENOSPC | Errno::EDQUOT) => {}
                // The file has reached the length limit of its file system.
                Err(Errno::EFBIG) => return Ok(false),
                Err(error) => return Err(self.drive.failure(error.into())),
            }
        }
        // Apart from the headroom, the file system is full, although our capacity is not used up.
        self.drive.set_full();
        Ok(false)
    }
}

impl Room {
    /// Moves the end of the cached region to the next page.
    fn align_cached(&mut self) {
        let gap = self.end.next_multiple_of(PAGE_SIZE) - self.end;
        let Some(cached) = &mut self.cached else { return };
        self.end += gap;
        // If the capacity has no room for the gap, nothing is lost: it has no room for a block after the gap either.
        if self.reservation.as_mut().is_some_and(|reservation| reservation.grow(gap)) {
            cached.reserved += gap;
        }
    }
}

/// Gives the room of a range of a file back to the file system.
fn punch(file: &File, offset: u64, len: u64) -> Result<(), Errno> {
    fallocate(file, FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE, offset as i64, len as i64)
}

/// Writes blocks with zeros in the gaps. Returns the offset after the last block.
fn write_blocks_at<'a>(
    file: &File,
    first: u64,
    positions: &[DrivePosition],
    blocks: impl Iterator<Item = &'a [u8]>,
) -> io::Result<u64> {
    let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(SLICES_MAX);
    let (mut start, mut end) = (first, first);
    for (position, bytes) in positions.iter().zip(blocks) {
        if slices.len() + 2 > SLICES_MAX {
            write_all_vectored(file, &mut slices, start)?;
            slices.clear();
            start = end;
        }
        let gap = position.offset.saturating_sub(end).min(PAGE_SIZE);
        slices.push(IoSlice::new(&ZEROS[..gap as usize]));
        slices.push(IoSlice::new(bytes));
        end = position.offset + bytes.len() as u64;
    }
    write_all_vectored(file, &mut slices, start)?;
    Ok(end)
}

fn write_all_vectored(file: &File, slices: &mut [IoSlice<'_>], mut offset: u64) -> io::Result<()> {
    let mut left = slices;
    while left.iter().any(|slice| !slice.is_empty()) {
        match pwritev(file, left, offset as i64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                offset += count as u64;
                IoSlice::advance_slices(&mut left, count);
            }
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_in_reserved_room_can_be_read_back_and_freed() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 20).unwrap();
        let segments = Segments::create(&drives, DatasetId(1)).unwrap();
        let lens = [10, 100_000, 5];
        let reserved = lens.iter().map(|&len| room_for(len)).sum();
        assert!(segments.reserve(0, reserved).unwrap());
        let positions = segments.allocate(0, lens.into_iter(), reserved).unwrap();
        assert_eq!(positions.iter().map(|position| position.offset).collect::<Vec<_>>(), [4096, 8192, 110_592]);
        let blocks: Vec<Vec<u8>> = lens.iter().map(|&len| vec![len as u8; len as usize]).collect();
        segments.write_blocks(&positions, blocks.iter().map(Vec::as_slice)).unwrap();
        assert!(!segments.reserve(0, 1 << 20).unwrap());
        assert_eq!(drives[0].used(), 110_597);
        segments.trim().unwrap();
        let file = segments.file(0).unwrap().clone();
        assert_eq!(file.metadata().unwrap().len(), 110_597_u64.next_multiple_of(4096));
        for (position, block) in positions.iter().zip(&blocks) {
            let mut bytes = vec![0; block.len()];
            file.read_exact_at(&mut bytes, position.offset).unwrap();
            assert!(bytes == *block);
        }
        let mut byte = [1];
        file.read_exact_at(&mut byte, 8191).unwrap();
        assert_eq!(byte, [0]);
        segments.free();
        assert!(file.read_exact_at(&mut byte, 108_191).is_err());
        assert_eq!((file.metadata().unwrap().len(), drives[0].used()), (0, 0));
        assert!(!segments.reserve(0, 1).unwrap());
    }

    #[test]
    fn pages_without_a_live_block_are_freed() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 24).unwrap();
        let segments = Segments::create(&drives, DatasetId(1)).unwrap();
        let lens = [100_000_u64; 20];
        let reserved = lens.iter().map(|&len| room_for(len)).sum();
        assert!(segments.reserve(0, reserved).unwrap());
        let positions = segments.allocate(0, lens.into_iter(), reserved).unwrap();
        let block = vec![7; 100_000];
        segments.write_blocks(&positions, lens.iter().map(|_| block.as_slice())).unwrap();
        segments.trim().unwrap();
        let before = drives[0].used();
        let live: Vec<DrivePosition> = positions.iter().copied().step_by(3).collect();
        let freed = segments.free_unused(|see| live.iter().for_each(|&position| see(position, 100_000))).unwrap();
        assert_eq!((freed, drives[0].used()), (13 * 102_400, before - freed));
        for position in live {
            let mut bytes = vec![0; 100_000];
            segments.file(0).unwrap().read_exact_at(&mut bytes, position.offset).unwrap();
            assert!(bytes == block);
        }
    }

    #[test]
    fn more_small_blocks_than_one_write_can_take_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 24).unwrap();
        let segments = Segments::create(&drives, DatasetId(1)).unwrap();
        let blocks: Vec<Vec<u8>> = (0..3000_usize).map(|number| vec![number as u8; number % 700]).collect();
        let lens = || blocks.iter().map(|block| block.len() as u64);
        assert!(segments.reserve(0, lens().sum()).unwrap());
        let positions = segments.allocate(0, lens(), lens().sum()).unwrap();
        segments.write_blocks(&positions, blocks.iter().map(Vec::as_slice)).unwrap();
        let all = blocks.concat();
        let mut found = vec![0; all.len()];
        segments.file(0).unwrap().read_exact_at(&mut found, DATA_START).unwrap();
        assert!(found == all);
    }
}
