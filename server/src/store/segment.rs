//! The files in which a dataset's blocks are packed, one a drive.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::id::DatasetId;
use dayfly_meta::limits::{PAGE_BLOCK_SIZE_MIN, PAGE_SIZE, ROOM_STEP};
use dayfly_meta::segment::{DATA_START, Place, header, pack};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::uio::pwritev;

use super::drive::{Drive, Reservation, nameless_file};

/// A dataset's segments.
pub(crate) struct Segments {
    segments: Vec<Segment>,
}

struct Segment {
    drive: Arc<Drive>,
    file: Arc<File>,
    room: Mutex<Room>,
}

struct Room {
    /// Where the next block goes.
    end: u64,
    /// Bytes that were promised behind it.
    promised: u64,
    /// Up to where the file system has set room aside.
    filled: u64,
    /// From here on lies what is only kept.
    kept_start: Option<u64>,
    reservation: Option<Reservation>,
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
            let file = nameless_file(drive.path())?;
            file.write_all_at(&header(dataset.0, number as u8), 0)?;
            let reservation = drive.reserve(DATA_START);
            let room = Mutex::new(Room { end: DATA_START, promised: 0, filled: DATA_START, kept_start: None, reservation });
            Ok(Segment { drive: drive.clone(), file: Arc::new(file), room })
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
    pub(crate) fn place(&self, drive: u8, lens: impl Iterator<Item = u64>, promised: u64) -> io::Result<Vec<Place>> {
        let segment = self.segment(drive)?;
        let mut room = segment.room();
        let start = room.end;
        let mut places = Vec::new();
        for len in lens {
            let (offset, next) = pack(room.end, len);
            places.push(Place { drive, offset });
            room.end = next;
        }
        room.promised = room.promised.saturating_sub(promised);
        let surplus = promised.saturating_sub(room.end - start);
        if let Some(reservation) = &mut room.reservation {
            reservation.shrink(surplus);
        }
        Ok(places)
    }

    /// Writes bytes at a place.
    pub(crate) fn write(&self, place: Place, bytes: &[u8]) -> io::Result<()> {
        self.segment(place.drive)?.file.write_all_at(bytes, place.offset)
    }

    /// Writes blocks that were placed together, with zeros between them.
    pub(crate) fn write_placed<'a>(&self, places: &[Place], blocks: impl Iterator<Item = &'a [u8]>) -> io::Result<()> {
        let Some(first) = places.first() else { return Ok(()) };
        let file = &self.segment(first.drive)?.file;
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(SLICES_MAX);
        let (mut start, mut end) = (first.offset, first.offset);
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
        write_all_vectored(file, &mut slices, start)
    }

    /// As [`Self::promise`], on the drive with the most room that has enough.
    pub(crate) fn promise_anywhere(&self, len: u64) -> io::Result<Option<u8>> {
        for drive in self.by_room() {
            if self.promise(drive, len)? {
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
            if room.kept_start.is_none() {
                let start = room.end.next_multiple_of(PAGE_SIZE);
                (room.end, room.filled) = (start, room.filled.max(start));
                room.kept_start = Some(start);
            }
            let wanted = (room.end + len).next_multiple_of(PAGE_SIZE);
            if segment.file.metadata()?.len() < wanted { segment.file.set_len(wanted) } else { Ok(()) }
        })
    }

    /// Room taken by what was placed since [`Self::begin_kept`].
    pub(crate) fn kept_room(&self) -> u64 {
        let taken = |segment: &Segment| {
            let room = segment.room();
            room.kept_start.map_or(0, |start| room.end - start)
        };
        self.segments.iter().map(taken).sum()
    }

    /// Gives back the room of all that was placed since [`Self::begin_kept`].
    pub(crate) fn free_kept(&self) -> io::Result<()> {
        self.segments.iter().try_for_each(|segment| {
            let mut room = segment.room();
            let Some(start) = room.kept_start else { return Ok(()) };
            let (taken, len) = (room.end - start, room.filled.max(room.end).saturating_sub(start));
            if len > 0 {
                let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                fallocate(&segment.file, flags, start as i64, len as i64)?;
            }
            (room.end, room.filled) = (start, start);
            if let Some(reservation) = &mut room.reservation {
                reservation.shrink(taken);
            }
            Ok(())
        })
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
    pub(crate) fn free_unused(&self, live: impl Fn(&mut dyn FnMut(Place, u64))) -> io::Result<u64> {
        let mut pages: Vec<Vec<u64>> = Vec::new();
        for segment in &self.segments {
            pages.push(vec![0; segment.room().end.div_ceil(PAGE_SIZE).div_ceil(64) as usize]);
        }
        live(&mut |place, len| {
            let Some(pages) = pages.get_mut(usize::from(place.drive)) else { return };
            for page in place.offset / PAGE_SIZE..(place.offset + len).div_ceil(PAGE_SIZE) {
                if let Some(word) = pages.get_mut((page / 64) as usize) {
                    *word |= 1 << (page % 64);
                }
            }
        });
        let mut freed = 0;
        for (segment, pages) in self.segments.iter().zip(pages) {
            let mut room = segment.room();
            let is_free = |page: u64| pages[(page / 64) as usize] >> (page % 64) & 1 == 0;
            // The header is no block; the last page may be one's in part.
            let end = room.end / PAGE_SIZE;
            let mut page = DATA_START / PAGE_SIZE;
            while page < end {
                let start = page;
                while page < end && is_free(page) {
                    page += 1;
                }
                if page - start >= FREED_PAGES_MIN {
                    let (offset, len) = (start * PAGE_SIZE, (page - start) * PAGE_SIZE);
                    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                    match fallocate(&segment.file, flags, offset as i64, len as i64) {
                        Ok(()) => freed += len,
                        // Then it stays taken until the dataset goes.
                        Err(Errno::EOPNOTSUPP) => break,
                        Err(error) => return Err(error.into()),
                    }
                    if let Some(reservation) = &mut room.reservation {
                        reservation.shrink(len);
                    }
                }
                page += 1;
            }
        }
        Ok(freed)
    }

    /// The file of a place's drive.
    pub(crate) fn file(&self, drive: u8) -> Option<&Arc<File>> {
        self.segments.get(usize::from(drive)).map(|segment| &segment.file)
    }

    /// All files, by drive.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<File>> {
        self.segments.iter().map(|segment| &segment.file)
    }

    /// Gives the room back to the file systems, whoever still has the files open.
    pub(crate) fn give_up(&self) {
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

    fn promise(&self, len: u64) -> io::Result<bool> {
        let mut room = self.room();
        if !room.reservation.as_mut().is_some_and(|reservation| reservation.grow(len)) {
            return Ok(false);
        }
        let needed = room.end + room.promised + len;
        if needed > room.filled && !self.set_aside(&mut room, needed)? {
            // The file system is full before our capacity is.
            if let Some(reservation) = &mut room.reservation {
                reservation.shrink(len);
            }
            self.drive.set_full();
            return Ok(false);
        }
        room.promised += len;
        Ok(true)
    }

    /// Makes the file system set room aside up to `needed`, and some more if it has it.
    fn set_aside(&self, room: &mut Room, needed: u64) -> io::Result<bool> {
        // On a drive of which little was given, no more than a small part of that.
        let step = ROOM_STEP.min((self.drive.capacity() / 64).next_multiple_of(PAGE_SIZE)).max(PAGE_SIZE);
        for until in [needed.next_multiple_of(step), needed] {
            match fallocate(&self.file, FallocateFlags::empty(), room.filled as i64, (until - room.filled) as i64) {
                // Where it cannot do that, a full one is met when blocks are written.
                Ok(()) | Err(Errno::EOPNOTSUPP) => {
                    room.filled = until;
                    return Ok(true);
                }
                Err(Errno::ENOSPC | Errno::EDQUOT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }
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
        segments.give_up();
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
        let kept: Vec<Place> = places.iter().copied().step_by(3).collect();
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
