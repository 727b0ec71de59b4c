//! Copies that the processes of this node share. A block that this node does not own cannot be mapped where it lies: a cached block
//! may be evicted at any time, and a mapping may last as long as its process. And a program that reads a sample as its standard input,
//! or that lies in the namespace itself, needs one file with all of the sample. So the block or the sample gets a file of its own. The
//! file has no name: the kernel frees it when the server has dropped it and no process uses it anymore. So a mapping keeps its bytes,
//! however it ends and whatever becomes of the server, and no process has to say that it is done.
//!
//! A process fills the file. Before other processes get it, its bytes must be on the drive and have the catalog's checksums.
//!
//! Invariants: one process at a time fills a copy, from its beginning to its end. Nobody has a whole copy open for writing, because the
//! kernel would not run it. A copy counts as used room of its drive as long as the server keeps it. The server drops whole copies that
//! nobody uses when a stage-in or another copy needs their room, and when nobody has wanted them for a while. Where the file system
//! cannot tell whether somebody uses a file, it drops copies that are used, too: these take room on the drive until nobody does.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::checksum::check;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId};
use dayfly_meta::limits::{CHUNK_LEN, SHARED_COPIES_MAX};
use dayfly_meta::wire::local::Original;

use super::in_use::is_used_elsewhere;
use super::{Dataset, Drive, Reservation, read_only};

#[cfg(test)]
mod tests;

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShareError {
    #[error("the dataset does not have what is to be copied")]
    Unknown,
    #[error("the node has no room for a copy of {0} bytes")]
    NoRoom(u64),
    #[error("the node cannot create a copy: {0}")]
    Create(#[source] io::Error),
    #[error("the copy cannot be used: {0}")]
    Unreadable(#[source] io::Error),
    #[error("the copy was filled with bytes that block {} does not have", .0.0)]
    Mismatch(BlockId),
    #[error("the copy was filled with more bytes than it is to have")]
    TooLong,
    #[error("the copy has made way")]
    Dropped,
}

type Key = (DatasetId, Original);

/// The copies that the server keeps.
#[derive(Default)]
pub(crate) struct SharedCopies {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    copies: HashMap<Key, SharedCopy>,
    /// Counts requests, to find the copy that was not wanted for the longest time.
    requests: u64,
}

struct SharedCopy {
    /// Open for reading only, once the copy is whole.
    file: Arc<File>,
    is_whole: bool,
    /// The state of the file when it was whole: its change time. A process of the same user may open it for writing by its number in
    /// `/proc`, if the file's mode allows that or the user is root.
    changed: (i64, i64),
    /// How often nobody had used or wanted the copy since the look before.
    idle_looks: u32,
    /// The last request for this copy.
    last: u64,
    room: Reservation,
}

/// The answer to a request for a copy.
pub(crate) enum Share {
    /// The copy has all bytes. The file is open for reading only.
    Whole(File),
    /// The copy is empty, and whoever asked is to fill it.
    Assigned(Filling),
    /// Somebody else fills it, and has written so many bytes.
    Busy(u64),
}

/// The right to fill a copy. Dropping it gives the copy up, unless it is whole.
pub(crate) struct Filling {
    copies: Arc<SharedCopies>,
    drive: Arc<Drive>,
    dataset: Arc<Dataset>,
    original: Original,
    file: Arc<File>,
}

/// Returns the blocks that a copy consists of, one after another, and their length together.
fn content(dataset: &Dataset, original: Original) -> Result<(Range<u32>, u64), ShareError> {
    let catalog = dataset.catalog();
    match original {
        Original::Block(block) => catalog.block(block).map(|(_, len)| (block.0..block.0 + 1, len)),
        Original::Sample(sample) => catalog.sample(sample).map(|(size, blocks)| (blocks.start..blocks.end, size)),
    }
    .ok_or(ShareError::Unknown)
}

impl SharedCopies {
    /// Returns a copy, or begins one on this drive. Waits for the drive.
    pub(crate) fn share(
        self: &Arc<Self>,
        drive: &Arc<Drive>,
        dataset: &Arc<Dataset>,
        original: Original,
    ) -> Result<Share, ShareError> {
        let (_, len) = content(dataset, original)?;
        let mut kept = self.lock();
        kept.requests += 1;
        let last = kept.requests;
        // Who has a copy that somebody has changed keeps it, but nobody else gets it.
        kept.copies.retain(|key, copy| *key != (dataset.id(), original) || copy.is_unchanged());
        if let Some(copy) = kept.copies.get_mut(&(dataset.id(), original)) {
            (copy.last, copy.idle_looks) = (last, 0);
            return match copy.is_whole {
                true => read_only(&copy.file).map(Share::Whole).map_err(ShareError::Unreadable),
                false => copy.file.metadata().map(|filled| Share::Busy(filled.len())).map_err(ShareError::Unreadable),
            };
        }
        while kept.copies.len() >= SHARED_COPIES_MAX {
            if !kept.drop_oldest() {
                return Err(ShareError::NoRoom(len));
            }
        }
        let room = loop {
            match drive.reserve(len) {
                Some(room) => break room,
                None if kept.drop_oldest() => {}
                None => return Err(ShareError::NoRoom(len)),
            }
        };
        let file = Arc::new(drive.unnamed_file().map_err(ShareError::Create)?);
        kept.copies.insert(
            (dataset.id(), original),
            SharedCopy { file: file.clone(), is_whole: false, changed: (0, 0), idle_looks: 0, last, room },
        );
        Ok(Share::Assigned(Filling { copies: self.clone(), drive: drive.clone(), dataset: dataset.clone(), original, file }))
    }

    /// Drops the copies of a dataset.
    pub(super) fn forget(&self, dataset: DatasetId) {
        self.lock().copies.retain(|(of, _), _| *of != dataset);
    }

    /// Returns the room that the copies take.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().copies.values().map(|copy| copy.room.bytes()).sum()
    }

    /// Returns the room of the copies that nobody uses.
    pub(crate) fn unused_bytes(&self) -> u64 {
        self.lock().copies.values().filter(|copy| copy.is_droppable()).map(|copy| copy.room.bytes()).sum()
    }

    /// Drops all copies that nobody uses, because their room is needed. Returns the bytes of room that they had.
    pub(crate) fn make_way(&self) -> u64 {
        self.drop_if(|copy| copy.is_droppable())
    }

    /// Drops the copies that nobody has used or wanted since the call before the last one. Returns the bytes of room that they had.
    pub(crate) fn drop_idle(&self) -> u64 {
        self.drop_if(|copy| {
            copy.idle_looks = if copy.is_droppable() { copy.idle_looks + 1 } else { 0 };
            copy.idle_looks > 1
        })
    }

    fn drop_if(&self, mut is_dropped: impl FnMut(&mut SharedCopy) -> bool) -> u64 {
        let dropped: Vec<SharedCopy> = self.lock().copies.extract_if(|_, copy| is_dropped(copy)).map(|(_, copy)| copy).collect();
        dropped.iter().map(|copy| copy.room.bytes()).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Drops the copy that nobody uses and that was not wanted for the longest time. Returns `false` if there is none.
    fn drop_oldest(&mut self) -> bool {
        let unused = self.copies.iter().filter(|(_, copy)| copy.is_droppable());
        let oldest = unused.min_by_key(|(_, copy)| copy.last).map(|(&key, _)| key);
        oldest.is_some_and(|key| self.copies.remove(&key).is_some())
    }
}

impl SharedCopy {
    /// Returns whether the copy is whole and, as far as the file system can tell, nobody uses it.
    fn is_droppable(&self) -> bool {
        self.is_whole && is_used_elsewhere(&self.file) != Some(true)
    }

    fn is_unchanged(&self) -> bool {
        !self.is_whole || change_time(&self.file).is_ok_and(|changed| changed == self.changed)
    }
}

/// Returns when a file, or its mode, was changed last.
fn change_time(file: &File) -> io::Result<(i64, i64)> {
    file.metadata().map(|metadata| (metadata.ctime(), metadata.ctime_nsec()))
}

impl Filling {
    /// Returns the file to fill.
    pub(crate) fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Gives the copy to all processes, if it has the right bytes. Waits for the drive.
    pub(crate) fn finish(self) -> Result<File, ShareError> {
        // What a drive loses after this, it reports. Before it, a page that the drive has lost would be read as zeros later.
        self.drive.sync(&self.file).map_err(ShareError::Unreadable)?;
        let (blocks, len) = content(&self.dataset, self.original)?;
        let mut buffer = vec![0; len.min(CHUNK_LEN) as usize];
        let mut start = 0;
        for block in blocks.map(BlockId) {
            let (_, block_len) = self.dataset.catalog().block(block).ok_or(ShareError::Unknown)?;
            for chunk in Chunk::all(block, block_len) {
                let expected = self.dataset.catalog().chunk_checksum(chunk).ok_or(ShareError::Unknown)?;
                let bytes = &mut buffer[..chunk.len_in(block_len).unwrap_or(0) as usize];
                self.file.read_exact_at(bytes, start + chunk.start()).map_err(ShareError::Unreadable)?;
                check(bytes, expected).map_err(|_| ShareError::Mismatch(block))?;
            }
            start += block_len;
        }
        let reader = || read_only(&self.file).map_err(ShareError::Unreadable);
        let (mine, shared) = (reader()?, reader()?);
        let changed = change_time(&mine).map_err(ShareError::Unreadable)?;
        if mine.metadata().map_err(ShareError::Unreadable)?.len() != len {
            return Err(ShareError::TooLong);
        }
        let mut kept = self.copies.lock();
        let copy = kept.copies.get_mut(&self.key()).filter(|copy| Arc::ptr_eq(&copy.file, &self.file));
        // There is none if the dataset was hidden in the meantime.
        let copy = copy.ok_or(ShareError::Dropped)?;
        (copy.is_whole, copy.changed, copy.file) = (true, changed, Arc::new(shared));
        Ok(mine)
    }

    fn key(&self) -> Key {
        (self.dataset.id(), self.original)
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        if let Entry::Occupied(copy) = self.copies.lock().copies.entry(self.key())
            && !copy.get().is_whole
            && Arc::ptr_eq(&copy.get().file, &self.file)
        {
            copy.remove();
        }
    }
}
