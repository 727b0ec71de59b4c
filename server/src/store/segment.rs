//! The files in which a dataset's blocks are packed, one a drive.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use dayfly_meta::id::DatasetId;
use dayfly_meta::segment::{DATA_START, Place, header, pack};

use super::drive::{Drive, Reservation, fill_room, nameless_file};

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
    end: u64,
    reservation: Option<Reservation>,
}

impl Segments {
    pub(crate) fn create(drives: &[Arc<Drive>], dataset: DatasetId) -> io::Result<Self> {
        let create = |(number, drive): (usize, &Arc<Drive>)| {
            let file = nameless_file(drive.path())?;
            file.write_all_at(&header(dataset.0, number as u8), 0)?;
            let room = Mutex::new(Room { end: DATA_START, reservation: drive.reserve(DATA_START) });
            Ok(Segment { drive: drive.clone(), file: Arc::new(file), room })
        };
        Ok(Self { segments: drives.iter().enumerate().map(create).collect::<io::Result<_>>()? })
    }

    /// Room for blocks of these lengths, side by side on one drive; `None` if no drive has it.
    pub(crate) fn allocate(&self, lens: &[u64]) -> Option<Vec<Place>> {
        let mut numbers: Vec<usize> = (0..self.segments.len()).collect();
        numbers.sort_by_key(|&number| std::cmp::Reverse(self.segments[number].drive.free()));
        numbers.into_iter().find_map(|number| self.segments[number].allocate(number as u8, lens))
    }

    /// Writes bytes at a place that was allocated. `false` where the file system is full.
    pub(crate) fn write(&self, place: Place, bytes: &[u8]) -> io::Result<bool> {
        let segment = self.segment(place)?;
        segment.or_full(segment.file.write_all_at(bytes, place.offset))
    }

    /// Makes the file system set aside what was allocated. `false` where it is full.
    pub(crate) fn fill_room(&self, place: Place, len: u64) -> io::Result<bool> {
        let segment = self.segment(place)?;
        segment.or_full(fill_room(&segment.file, place.offset, len))
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
            let mut room = segment.room.lock().unwrap_or_else(PoisonError::into_inner);
            // Cut off, not punched: whoever has it mapped shall not read zeros.
            if let Err(error) = segment.file.set_len(0) {
                tracing::warn!(%error, "cannot empty a segment; its room is free when its last reader ends");
            }
            room.reservation = None;
        }
    }

    fn segment(&self, place: Place) -> io::Result<&Segment> {
        let segment = self.segments.get(usize::from(place.drive));
        segment.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a place on a drive that is not there"))
    }
}

impl Segment {
    /// That the file system is full is no failure, but the drive's end.
    fn or_full(&self, written: io::Result<()>) -> io::Result<bool> {
        match written {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                self.drive.set_full();
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn allocate(&self, drive: u8, lens: &[u64]) -> Option<Vec<Place>> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let mut end = room.end;
        let mut places = Vec::with_capacity(lens.len());
        for &len in lens {
            let (offset, next) = pack(end, len);
            places.push(Place { drive, offset });
            end = next;
        }
        let more = end - room.end;
        if !room.reservation.as_mut()?.grow(more) {
            return None;
        }
        room.end = end;
        Some(places)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_packed_read_back_and_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 20).unwrap();
        let segments = Segments::create(&drives, DatasetId(1)).unwrap();
        let places = segments.allocate(&[10, 100_000, 5]).unwrap();
        assert_eq!(places.iter().map(|place| place.offset).collect::<Vec<_>>(), [4096, 8192, 110_592]);
        assert!(segments.write(places[1], &[7; 100_000]).unwrap());
        assert!(segments.allocate(&[1 << 20]).is_none());
        assert_eq!(drives[0].used(), 110_597);
        let file = segments.file(0).unwrap().clone();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 108_191).unwrap();
        assert_eq!(byte, [7]);
        segments.give_up();
        assert!(file.read_exact_at(&mut byte, 108_191).is_err());
        assert_eq!((file.metadata().unwrap().len(), drives[0].used()), (0, 0));
        assert!(segments.allocate(&[1]).is_none());
    }
}
