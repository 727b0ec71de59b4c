//! The files in which a dataset's blocks are packed, one a drive.

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

use super::drive::{Drive, Reservation, unnamed_file};
use super::pages::Pages;
use super::write_back::Unsynced;

/// A dataset's segments.
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
    /// Where the next block goes.
    end: u64,
    /// Bytes that were promised behind it.
    promised: u64,
    /// Up to where the file system has set room aside.
    filled: u64,
    /// What is only kept, if anything may be.
    kept: Option<KeptRoom>,
    reservation: Option<Reservation>,
}

/// Room of what is only kept. It lies behind all that the node owns. An offset that was given up is never used again: a reader that
/// was slow would take what lies there now for what it was told of.
struct KeptRoom {
    /// Nothing that is kept lies before this.
    start: u64,
    /// Bytes that were reserved for it.
    taken: u64,
}

/// A gap before a block that starts on a page is at most this.
static ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];
/// Fewer unused pages in a row than this are left as they are.
const FREED_PAGES_MIN: u64 = 8;
/// Pieces of memory in one write; Linux takes no more.
const SLICES_MAX: usize = 1024;

/// Room that blocks of this length may need wherever they come to lie.
pub(crate) fn room_for(len: u64) -> u64 {
    if len >= PAGE_BLOCK_SIZE_MIN { len.next_multiple_of(PAGE_SIZE) + PAGE_SIZE } else { len }
}

impl Segments {
    pub(crate) fn create(drives: &[Arc<Drive>], dataset: DatasetId) -> io::Result<Self> {
        let create = |(number, drive): (usize, &Arc<Drive>)| {
            let made = unnamed_file(drive.path()).and_then(|file| {
                file.write_all_at(&header(dataset.0, number as u8), 0)?;
                Ok(file)
            });
            let file = made.map_err(|error| drive.write_error(error))?;
            let reservation = drive.reserve(DATA_START);
            let room = Mutex::new(Room { end: DATA_START, promised: 0, filled: DATA_START, kept: None, reservation });
            let unsynced = Unsynced::new(drive.write_back().clone());
            Ok(Segment { drive: drive.clone(), file: Arc::new(file), room, unsynced })
        };
        Ok(Self { segments: drives.iter().enumerate().map(create).collect::<io::Result<_>>()? })
    }

    /// The drives, those with the most room first.
    pub(crate) fn by_room(&self) -> Vec<u8> {
        let mut numbers: Vec<u8> = (0..self.segments.len() as u8).collect();
        numbers.sort_by_key(|&number| std::cmp::Reverse(self.segments[usize::from(number)].drive.free()));
        numbers
    }

    /// Promises room on a drive, so that what is placed there later can be written. `false` if it is not there.
    pub(crate) fn promise(&self, drive: u8, len: u64) -> io::Result<bool> {
        self.segment(drive)?.promise(len)
    }

    /// Places blocks one after another into room that was promised; the rest of the promise is given back.
    pub(crate) fn place(&self, drive: u8, lens: impl Iterator<Item = u64>, promised: u64) -> io::Result<Vec<DrivePosition>> {
        let segment = self.segment(drive)?;
        let mut room = segment.room();
        let start = room.end;
        let mut places = Vec::new();
        for len in lens {
            let (offset, next) = pack(room.end, len);
            places.push(DrivePosition { drive, offset });
            room.end = next;
        }
        room.promised = room.promised.saturating_sub(promised);
        let surplus = promised.saturating_sub(room.end - start);
        if let Some(reservation) = &mut room.reservation {
            reservation.shrink(surplus);
        }
        let taken = room.end - start;
        if let Some(kept) = &mut room.kept {
            kept.taken += taken;
        }
        Ok(places)
    }

    /// Writes bytes at a place, and has the drive begin to take them.
    pub(crate) fn write(&self, place: DrivePosition, bytes: &[u8]) -> io::Result<()> {
        let segment = self.segment(place.drive)?;
        let written = segment.file.write_all_at(bytes, place.offset);
        written.map_err(|error| segment.drive.write_error(error))?;
        segment.written(place.offset..place.offset + bytes.len() as u64)
    }

    /// Writes blocks that were placed together, with zeros between them, and has the drive begin to take them.
    pub(crate) fn write_placed<'a>(&self, places: &[DrivePosition], blocks: impl Iterator<Item = &'a [u8]>) -> io::Result<()> {
        let Some(first) = places.first() else { return Ok(()) };
        let segment = self.segment(first.drive)?;
        let end = write_all_placed(&segment.file, first.offset, places, blocks);
        segment.written(first.offset..end.map_err(|error| segment.drive.write_error(error))?)
    }

    /// Waits until the drives have all that was written before.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.segments.iter().try_for_each(Segment::sync)
    }

    /// As [`Self::sync`], of those drives that have lost nothing yet; the first error, once all have been asked.
    pub(crate) fn sync_others(&self) -> io::Result<()> {
        let others = self.segments.iter().filter(|segment| !segment.unsynced.has_failed());
        let synced: Vec<io::Result<()>> = others.map(Segment::sync).collect();
        synced.into_iter().collect()
    }

    /// Whether a drive has lost something that was written: then nothing that was written since the last good sync counts.
    pub(crate) fn has_failed(&self, drive: u8) -> bool {
        self.segments.get(usize::from(drive)).is_none_or(|segment| segment.unsynced.has_failed())
    }

    /// As [`Self::promise`], for what is only kept, on the drive with the most room that has enough.
    pub(crate) fn promise_kept(&self, len: u64) -> io::Result<Option<u8>> {
        for drive in self.by_room() {
            let segment = self.segment(drive)?;
            if segment.room().kept.is_some() && !segment.unsynced.has_failed() && segment.promise(len)? {
                return Ok(Some(drive));
            }
        }
        Ok(None)
    }

    /// What is placed from now on can be given back by [`Self::free_kept`]. The files are made long enough for `len` bytes more,
    /// without taking room for them.
    pub(crate) fn begin_kept(&self, len: u64) -> io::Result<()> {
        self.segments.iter().try_for_each(|segment| {
            let mut room = segment.room();
            if room.kept.is_none() {
                let start = room.end.next_multiple_of(PAGE_SIZE);
                match punch(&segment.file, start, PAGE_SIZE) {
                    Ok(()) => {}
                    // What could not be given up is not kept.
                    Err(Errno::EOPNOTSUPP) => return Ok(()),
                    Err(error) => return Err(error.into()),
                }
                (room.end, room.filled) = (start, room.filled.max(start));
                room.kept = Some(KeptRoom { start, taken: 0 });
            }
            let wanted = room.end.saturating_add(len).min(OFFSET_MAX).next_multiple_of(PAGE_SIZE);
            if segment.file.metadata()?.len() >= wanted {
                return Ok(());
            }
            match segment.file.set_len(wanted) {
                // Its file system has no files of that length. What finds no place is not kept.
                Err(error) if error.kind() == io::ErrorKind::FileTooLarge => Ok(()),
                set => set,
            }
        })
    }

    /// What is kept from now on shares no page with what was kept before.
    pub(crate) fn begin_kept_group(&self) {
        self.segments.iter().for_each(|segment| segment.room().align_kept());
    }

    /// Room taken by what was placed since [`Self::begin_kept`] and not given back.
    pub(crate) fn cached_room(&self) -> u64 {
        self.segments.iter().map(|segment| segment.room().kept.as_ref().map_or(0, |kept| kept.taken)).sum()
    }

    /// Gives back the pages of what was placed since [`Self::begin_kept`] in which nothing lies that `live` names. Returns the bytes
    /// given back.
    pub(crate) fn free_cached(&self, live: impl Fn(&mut dyn FnMut(DrivePosition, u64))) -> io::Result<u64> {
        self.begin_kept_group();
        let pages = |segment: &Segment| {
            let room = segment.room();
            room.kept.as_ref().map(|kept| Pages::new(kept.start..room.end))
        };
        let mut pages: Vec<Option<Pages>> = self.segments.iter().map(pages).collect();
        live(&mut |place, len| {
            if let Some(Some(pages)) = pages.get_mut(usize::from(place.drive)) {
                pages.mark(place.offset, len);
            }
        });
        let mut all_freed = 0;
        for (segment, pages) in self.segments.iter().zip(pages) {
            let mut room = segment.room();
            let Some(pages) = pages else { continue };
            pages.unused(1).try_for_each(|unused| punch(&segment.file, unused.start, unused.end - unused.start))?;
            let used = pages.used_bytes();
            if used == 0 && room.filled > room.end {
                punch(&segment.file, room.end, room.filled - room.end)?;
                room.filled = room.end;
            }
            let end = room.end;
            let Some(kept) = &mut room.kept else { continue };
            kept.start = pages.first_used().unwrap_or(end);
            let freed = kept.taken.saturating_sub(used);
            kept.taken -= freed;
            if let Some(reservation) = &mut room.reservation {
                reservation.shrink(freed);
            }
            segment.drive.set_not_full();
            all_freed += freed;
        }
        Ok(all_freed)
    }

    /// Gives back what was set aside and is not needed, once all is written.
    pub(crate) fn trim(&self) -> io::Result<()> {
        self.segments.iter().try_for_each(|segment| {
            let mut room = segment.room();
            room.filled = room.end;
            // A block that owns its pages can be mapped to the end of the last.
            segment.file.set_len(room.end.next_multiple_of(PAGE_SIZE))
        })
    }

    /// Gives back the pages that no block lies in: blocks of ranges that were begun at a wrong place, and of files that others
    /// replaced. `live` names all that count. Returns the bytes given back.
    pub(crate) fn free_unused(&self, live: impl Fn(&mut dyn FnMut(DrivePosition, u64))) -> io::Result<u64> {
        // The header is no block; the last page may be one's in part.
        let pages = |segment: &Segment| Pages::new(DATA_START..segment.room().end / PAGE_SIZE * PAGE_SIZE);
        let mut pages: Vec<Pages> = self.segments.iter().map(pages).collect();
        live(&mut |place, len| {
            if let Some(pages) = pages.get_mut(usize::from(place.drive)) {
                pages.mark(place.offset, len);
            }
        });
        let mut freed = 0;
        for (segment, pages) in self.segments.iter().zip(pages) {
            let mut room = segment.room();
            for unused in pages.unused(FREED_PAGES_MIN) {
                let len = unused.end - unused.start;
                match punch(&segment.file, unused.start, len) {
                    Ok(()) => freed += len,
                    // Then it stays taken until the dataset goes.
                    Err(Errno::EOPNOTSUPP) => break,
                    Err(error) => return Err(error.into()),
                }
                if let Some(reservation) = &mut room.reservation {
                    reservation.shrink(len);
                }
            }
        }
        Ok(freed)
    }

    /// The file of a place's drive.
    pub(crate) fn file(&self, drive: u8) -> Option<&Arc<File>> {
        self.segments.get(usize::from(drive)).map(|segment| &segment.file)
    }

    /// The folder on a drive, for messages.
    pub(crate) fn drive_path(&self, drive: u8) -> &[u8] {
        self.segments.get(usize::from(drive)).map_or(b"", |segment| segment.drive.path().as_os_str().as_encoded_bytes())
    }

    /// All files, by drive.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<File>> {
        self.segments.iter().map(|segment| &segment.file)
    }

    /// Gives the room back to the file systems, whoever still has the files open.
    pub(crate) fn free(&self) {
        for segment in &self.segments {
            let mut room = segment.room();
            // Cut off, not punched: whoever has it mapped shall not read zeros.
            if let Err(error) = segment.file.set_len(0) {
                tracing::warn!(%error, "cannot empty a segment; its room is free when its last reader ends");
            }
            room.reservation = None;
        }
    }

    fn segment(&self, drive: u8) -> io::Result<&Segment> {
        let segment = self.segments.get(usize::from(drive));
        segment.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a place on a drive that is not there"))
    }
}

impl Segment {
    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the drive begin to take what was just written.
    fn written(&self, range: Range<u64>) -> io::Result<()> {
        // What is kept waits for nobody: its groups bound how much is on its way.
        let started = if self.room().kept.is_some() {
            self.unsynced.start(&self.file, &range)
        } else {
            self.unsynced.start_and_bound(&self.file, range)
        };
        started.map_err(|error| self.drive.loss_error(error))
    }

    fn sync(&self) -> io::Result<()> {
        self.unsynced.sync(&self.file).map_err(|error| self.drive.loss_error(error))
    }

    fn promise(&self, len: u64) -> io::Result<bool> {
        let mut room = self.room();
        if !room.reservation.as_mut().is_some_and(|reservation| reservation.grow(len)) {
            return Ok(false);
        }
        let needed = (room.end + room.promised).saturating_add(len);
        let is_there = needed <= room.filled || needed <= OFFSET_MAX && self.set_aside(&mut room, needed)?;
        if !is_there {
            if let Some(reservation) = &mut room.reservation {
                reservation.shrink(len);
            }
            return Ok(false);
        }
        room.promised += len;
        Ok(true)
    }

    /// Makes the file system set room aside up to `needed`, and some more if it has it.
    fn set_aside(&self, room: &mut Room, needed: u64) -> io::Result<bool> {
        // On a drive of which little was given, no more than a small part of that.
        let step = RESERVATION_STEP.min((self.drive.capacity() / 64).next_multiple_of(PAGE_SIZE)).max(PAGE_SIZE);
        let spared = self.drive.spared();
        for until in [needed.next_multiple_of(step), needed] {
            if spared > 0 && self.drive.free_on_file_system() < (until - room.filled).saturating_add(spared) {
                continue;
            }
            match fallocate(&self.file, FallocateFlags::empty(), room.filled as i64, (until - room.filled) as i64) {
                // Where it cannot do that, a full one is met when blocks are written.
                Ok(()) | Err(Errno::EOPNOTSUPP) => {
                    room.filled = until;
                    return Ok(true);
                }
                Err(Errno::ENOSPC | Errno::EDQUOT) => {}
                // As long as its file system lets a file be.
                Err(Errno::EFBIG) => return Ok(false),
                Err(error) => return Err(self.drive.write_error(error.into())),
            }
        }
        // The file system is full before our capacity is, but for what is left to others than blocks.
        self.drive.set_full();
        Ok(false)
    }
}

impl Room {
    fn align_kept(&mut self) {
        let gap = self.end.next_multiple_of(PAGE_SIZE) - self.end;
        let Some(kept) = &mut self.kept else { return };
        self.end += gap;
        // Where there is no room for a gap, there is none for what would follow it.
        if self.reservation.as_mut().is_some_and(|reservation| reservation.grow(gap)) {
            kept.taken += gap;
        }
    }
}

/// Gives a range of a file back to its file system.
fn punch(file: &File, offset: u64, len: u64) -> Result<(), Errno> {
    fallocate(file, FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE, offset as i64, len as i64)
}

/// Writes blocks with zeros between them; where the last one ends.
fn write_all_placed<'a>(
    file: &File,
    first: u64,
    places: &[DrivePosition],
    blocks: impl Iterator<Item = &'a [u8]>,
) -> io::Result<u64> {
    let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(SLICES_MAX);
    let (mut start, mut end) = (first, first);
    for (place, bytes) in places.iter().zip(blocks) {
        if slices.len() + 2 > SLICES_MAX {
            write_all_vectored(file, &mut slices, start)?;
            slices.clear();
            start = end;
        }
        let gap = place.offset.saturating_sub(end).min(PAGE_SIZE);
        slices.push(IoSlice::new(&ZEROS[..gap as usize]));
        slices.push(IoSlice::new(bytes));
        end = place.offset + bytes.len() as u64;
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
    fn blocks_are_placed_in_promised_room_read_back_and_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 20).unwrap();
        let segments = Segments::create(&drives, DatasetId(1)).unwrap();
        let lens = [10, 100_000, 5];
        let promised = lens.iter().map(|&len| room_for(len)).sum();
        assert!(segments.promise(0, promised).unwrap());
        let places = segments.place(0, lens.into_iter(), promised).unwrap();
        assert_eq!(places.iter().map(|place| place.offset).collect::<Vec<_>>(), [4096, 8192, 110_592]);
        let blocks: Vec<Vec<u8>> = lens.iter().map(|&len| vec![len as u8; len as usize]).collect();
        segments.write_placed(&places, blocks.iter().map(Vec::as_slice)).unwrap();
        assert!(!segments.promise(0, 1 << 20).unwrap());
        assert_eq!(drives[0].used(), 110_597);
        segments.trim().unwrap();
        let file = segments.file(0).unwrap().clone();
        assert_eq!(file.metadata().unwrap().len(), 110_597_u64.next_multiple_of(4096));
        for (place, block) in places.iter().zip(&blocks) {
            let mut bytes = vec![0; block.len()];
            file.read_exact_at(&mut bytes, place.offset).unwrap();
            assert!(bytes == *block);
        }
        let mut byte = [1];
        file.read_exact_at(&mut byte, 8191).unwrap();
        assert_eq!(byte, [0]);
        segments.free();
        assert!(file.read_exact_at(&mut byte, 108_191).is_err());
        assert_eq!((file.metadata().unwrap().len(), drives[0].used()), (0, 0));
        assert!(!segments.promise(0, 1).unwrap());
    }

    #[test]
    fn pages_of_no_block_are_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 24).unwrap();
        let segments = Segments::create(&drives, DatasetId(1)).unwrap();
        let lens = [100_000_u64; 20];
        let promised = lens.iter().map(|&len| room_for(len)).sum();
        assert!(segments.promise(0, promised).unwrap());
        let places = segments.place(0, lens.into_iter(), promised).unwrap();
        let block = vec![7; 100_000];
        segments.write_placed(&places, lens.iter().map(|_| block.as_slice())).unwrap();
        segments.trim().unwrap();
        let before = drives[0].used();
        let kept: Vec<DrivePosition> = places.iter().copied().step_by(3).collect();
        let freed = segments.free_unused(|keep| kept.iter().for_each(|&place| keep(place, 100_000))).unwrap();
        assert_eq!((freed, drives[0].used()), (13 * 102_400, before - freed));
        for place in kept {
            let mut bytes = vec![0; 100_000];
            segments.file(0).unwrap().read_exact_at(&mut bytes, place.offset).unwrap();
            assert!(bytes == block);
        }
    }

    #[test]
    fn many_small_blocks_are_written_in_several_calls() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 24).unwrap();
        let segments = Segments::create(&drives, DatasetId(1)).unwrap();
        let blocks: Vec<Vec<u8>> = (0..3000_usize).map(|number| vec![number as u8; number % 700]).collect();
        let lens = || blocks.iter().map(|block| block.len() as u64);
        assert!(segments.promise(0, lens().sum()).unwrap());
        let places = segments.place(0, lens(), lens().sum()).unwrap();
        segments.write_placed(&places, blocks.iter().map(Vec::as_slice)).unwrap();
        let all = blocks.concat();
        let mut found = vec![0; all.len()];
        segments.file(0).unwrap().read_exact_at(&mut found, DATA_START).unwrap();
        assert!(found == all);
    }
}
