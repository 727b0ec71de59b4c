//! Reading through the page cache. Part of an answer's bytes may be in the page cache, and the rest on a drive. The
//! [`PageCacheLoader`] of an answer requests all missing ranges from the drive at once, sorted by position, and waits for them on a
//! thread of its own.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::PAGE_SIZE;
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::contract::Piece;
use crate::error::PieceError;
use crate::fair_queue::{FairPermit, FairQueue};

/// The thread waits for a range by reading single bytes of it, at this distance from each other.
/// The drive reads what lies between them in one go.
const WAIT_STEP: u64 = 128 << 10;

/// How far the thread has progressed.
#[derive(Default)]
struct LoadProgress {
    /// The thread has waited for all pieces before this one.
    until: usize,
    /// The pieces among them that could not be read. They are remembered, because reading a failing
    /// drive again would only waste time.
    failed: BTreeMap<usize, PieceError>,
}

/// Brings the pieces of one answer into the page cache.
pub(crate) struct PageCacheLoader<'a> {
    pieces: &'a [Piece],
    peer: NodeId,
    drive_readers: &'a FairQueue,
    /// Longer pieces are read in another way.
    len_max: u64,
    /// The answer's permit to read from the drives, once the answer has needed one.
    permit: Option<Arc<FairPermit>>,
    /// The thread's progress, once there is a thread.
    progress: Option<watch::Receiver<LoadProgress>>,
}

impl<'a> PageCacheLoader<'a> {
    pub(crate) fn new(pieces: &'a [Piece], peer: NodeId, drive_readers: &'a FairQueue, len_max: u64) -> Self {
        Self { pieces, peer, drive_readers, len_max, permit: None, progress: None }
    }

    /// Returns whether the loader has started, which means that some piece was not in the page cache.
    pub(crate) fn is_started(&self) -> bool {
        self.progress.is_some()
    }

    /// Returns the answer's permit to read from the drives: one for all of its pieces, however they are read.
    pub(crate) async fn permit(&mut self) -> Option<Arc<FairPermit>> {
        if self.permit.is_none() {
            // After this timeout the asker has given up anyway. Reading without a permit is then the lesser harm.
            self.permit = timeout(self.drive_readers.timeout, self.drive_readers.acquire(self.peer)).await.ok().map(Arc::new);
        }
        self.permit.clone()
    }

    /// Returns why a piece could not be read, if the thread has waited for it without success.
    pub(crate) fn failure(&self, piece: usize) -> Option<PieceError> {
        self.progress.as_ref()?.borrow().failed.get(&piece).cloned()
    }

    /// Starts to load the rest of the answer, from piece `at` on, and waits for the pieces before `until`.
    pub(crate) async fn load(&mut self, at: usize, until: usize) {
        if self.progress.is_none() {
            let permit = self.permit().await;
            let ranges: Vec<Option<Range>> = self.pieces[at..].iter().map(|piece| range(piece, self.len_max)).collect();
            let (sender, progress) = watch::channel(LoadProgress { until: at, failed: BTreeMap::new() });
            self.progress = Some(progress);
            // Nothing waits for the thread itself: it finishes on its own, at the drive's pace.
            drop(tokio::task::spawn_blocking(move || load_ranges(&ranges, &sender, permit)));
        }
        if let Some(progress) = &mut self.progress {
            // If the thread is gone, the pieces are read one by one, which is slower, but not wrong.
            let _ = progress.wait_for(|progress| progress.until >= until).await;
        }
    }
}

type Range = (Arc<File>, u64, u64);

/// Returns the range that the loader must bring in for a piece; `None` if the piece is in memory, empty or too long.
fn range(piece: &Piece, len_max: u64) -> Option<Range> {
    match piece {
        Piece::File { file, offset, len, .. } if (1..=len_max).contains(len) => Some((file.clone(), *offset, *len)),
        _ => None,
    }
}

/// Requests all ranges from the drive, sorted by position, and then waits for them one by one.
fn load_ranges(ranges: &[Option<Range>], progress: &watch::Sender<LoadProgress>, permit: Option<Arc<FairPermit>>) {
    let mut sorted: Vec<&Range> = ranges.iter().flatten().collect();
    sorted.sort_by_key(|(file, offset, _)| (Arc::as_ptr(file), *offset));
    for (file, offset, len) in sorted {
        // This is a hint. If the kernel ignores it, the reads below take longer.
        let _ = fadvise(file, *offset, std::num::NonZeroU64::new(*len), Advice::WillNeed);
    }
    let mut byte = [0];
    for range in ranges {
        let read = range.as_ref().map_or(Ok(()), |(file, offset, len)| {
            let mut steps = (*offset..offset + len).step_by(WAIT_STEP as usize).chain([offset + len - 1]);
            steps.try_for_each(|at| file.read_exact_at(&mut byte, at))
        });
        progress.send_modify(|progress| {
            if let Err(error) = read {
                progress.failed.insert(progress.until, error.into());
            }
            progress.until += 1;
        });
    }
    drop(permit);
}

/// Reads bytes that are in the page cache and never waits for a drive, so it may run on a runtime thread. Returns how many bytes,
/// starting with the first, it could read.
pub(crate) fn read_cached(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    match preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(count),
        // The bytes are not cached, or the file system cannot tell.
        Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Makes, on the current thread, a call that may block. In the meantime, the runtime moves its other tasks to other threads.
pub(crate) fn blocking_here<R>(call: impl FnOnce() -> R) -> R {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(call),
        _ => call(),
    }
}

/// Returns whether a range is probably in the page cache, judged by its first, middle and last byte.
pub(crate) fn is_cached(file: &File, offset: u64, len: u64) -> bool {
    let last = offset + len - 1;
    let positions = [offset, (offset + len / 2) / PAGE_SIZE * PAGE_SIZE, last];
    positions.into_iter().all(|position| read_cached(file, position, &mut [0]).is_ok_and(|count| count == 1))
}
