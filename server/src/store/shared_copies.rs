//! Copies of blocks that processes map. A block that this node does not own cannot be mapped where it lies: a cached block may be
//! evicted at any time, and a mapping may last as long as its process. So the block gets a file of its own, which all processes of
//! the node map. The file has no name: the kernel frees it when the server has dropped it and no process maps it anymore. So a
//! mapping keeps its bytes, however it ends and whatever becomes of the server, and no process has to say that it is done.
//!
//! A process fills the file. Before other processes get it, its bytes must be on the drive and have the block's checksums.
//!
//! Invariants: one process at a time fills the copy of a block. A copy counts as used room of its drive as long as the server
//! keeps it. The server drops whole copies when a stage-in or another copy needs their room.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::checksum::check;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId};
use dayfly_meta::limits::{CHUNK_LEN, SHARED_COPIES_MAX};

use super::{Dataset, Drive, Reservation, read_only};

#[cfg(test)]
mod tests;

/// Why a block has no copy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShareError {
    #[error("the dataset has no block {}", .0.0)]
    Unknown(BlockId),
    #[error("the node has no room for a copy of {0} bytes")]
    NoRoom(u64),
    #[error("the node cannot create a copy: {0}")]
    Create(#[source] io::Error),
    #[error("the copy cannot be used: {0}")]
    Unreadable(#[source] io::Error),
    #[error("the copy of block {} was filled with other bytes", .0.0)]
    Mismatch(BlockId),
    #[error("the copy has made way")]
    Dropped,
}

type Key = (DatasetId, BlockId);

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
    file: Arc<File>,
    is_whole: bool,
    /// The last request for this copy.
    last: u64,
    room: Reservation,
}

/// The answer to a request for a copy.
pub(crate) enum Share {
    /// The copy has all bytes of the block. The file is open for reading only.
    Whole(File),
    /// The copy is empty, and whoever asked is to fill it.
    Assigned(Filling),
    /// Somebody else fills it.
    Busy,
}

/// The right to fill a copy. Dropping it gives the copy up, unless it is whole.
pub(crate) struct Filling {
    copies: Arc<SharedCopies>,
    drive: Arc<Drive>,
    dataset: Arc<Dataset>,
    block: BlockId,
    file: Arc<File>,
}

impl SharedCopies {
    /// Returns the copy of a block, or begins one on this drive. Waits for the drive.
    pub(crate) fn share(
        self: &Arc<Self>,
        drive: &Arc<Drive>,
        dataset: &Arc<Dataset>,
        block: BlockId,
    ) -> Result<Share, ShareError> {
        let (_, len) = dataset.catalog().block(block).ok_or(ShareError::Unknown(block))?;
        let mut kept = self.lock();
        kept.requests += 1;
        let last = kept.requests;
        if let Some(copy) = kept.copies.get_mut(&(dataset.id(), block)) {
            copy.last = last;
            return match copy.is_whole {
                true => read_only(&copy.file).map(Share::Whole).map_err(ShareError::Unreadable),
                false => Ok(Share::Busy),
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
        let file = drive.unnamed_file().and_then(|file| file.set_len(len).map(|()| file)).map_err(ShareError::Create)?;
        let file = Arc::new(file);
        kept.copies.insert((dataset.id(), block), SharedCopy { file: file.clone(), is_whole: false, last, room });
        Ok(Share::Assigned(Filling { copies: self.clone(), drive: drive.clone(), dataset: dataset.clone(), block, file }))
    }

    /// Drops the copies of a dataset.
    pub(super) fn forget(&self, dataset: DatasetId) {
        self.lock().copies.retain(|(of, _), _| *of != dataset);
    }

    /// Drops all whole copies, because their room is needed. Returns the bytes of room that they had. Copies that processes still
    /// map keep taking room on the drive.
    pub(crate) fn make_way(&self) -> u64 {
        let dropped: Vec<SharedCopy> = self.lock().copies.extract_if(|_, copy| copy.is_whole).map(|(_, copy)| copy).collect();
        dropped.iter().map(|copy| copy.room.bytes()).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// Drops the whole copy that was not wanted for the longest time. Returns `false` if there is none.
    fn drop_oldest(&mut self) -> bool {
        let whole = self.copies.iter().filter(|(_, copy)| copy.is_whole);
        let oldest = whole.min_by_key(|(_, copy)| copy.last).map(|(&key, _)| key);
        oldest.is_some_and(|key| self.copies.remove(&key).is_some())
    }
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
        let (_, len) = self.dataset.catalog().block(self.block).ok_or(ShareError::Unknown(self.block))?;
        let mut buffer = vec![0; len.min(CHUNK_LEN) as usize];
        for chunk in Chunk::all(self.block, len) {
            let expected = self.dataset.catalog().chunk_checksum(chunk).ok_or(ShareError::Unknown(self.block))?;
            let bytes = &mut buffer[..chunk.len_in(len).unwrap_or(0) as usize];
            self.file.read_exact_at(bytes, chunk.start()).map_err(ShareError::Unreadable)?;
            check(bytes, expected).map_err(|_| ShareError::Mismatch(self.block))?;
        }
        let reader = read_only(&self.file).map_err(ShareError::Unreadable)?;
        let mut kept = self.copies.lock();
        // There is none if the dataset was hidden in the meantime.
        let copy = kept.copies.get_mut(&self.key()).filter(|copy| Arc::ptr_eq(&copy.file, &self.file));
        let is_kept = copy.map(|copy| copy.is_whole = true).is_some();
        drop(kept);
        if is_kept { Ok(reader) } else { Err(ShareError::Dropped) }
    }

    fn key(&self) -> Key {
        (self.dataset.id(), self.block)
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
