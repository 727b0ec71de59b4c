//! Bytes that the page cache has, and those that it has not: these are asked of the drive for all of an answer at once, sorted by
//! place, on a thread that waits for them.

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

use crate::turns::{Turn, Turns};
use crate::{Piece, drive_failure};

/// A cold piece is waited for at steps of this; the drive reads what lies between together.
const WAIT_STEP: u64 = 128 << 10;

/// How far a thread has read ahead.
#[derive(Default)]
struct Warmed {
    /// Pieces before this were waited for.
    until: usize,
    /// Those of them that could not be read, and why: asking a failing drive once more would only take more of its time.
    failed: BTreeMap<usize, String>,
}

/// The pieces of an answer, of which some may have to be read from a drive.
pub(crate) struct Cold<'a> {
    pieces: &'a [Piece],
    peer: NodeId,
    turns: &'a Turns,
    /// Longer ones come another way.
    len_max: u64,
    /// Whose place at the drives the answer has, once it needs one.
    turn: Option<Arc<Turn>>,
    /// How far a thread has waited for the pieces, once there is one.
    warmed: Option<watch::Receiver<Warmed>>,
}

impl<'a> Cold<'a> {
    pub(crate) fn new(pieces: &'a [Piece], peer: NodeId, turns: &'a Turns, len_max: u64) -> Self {
        Self { pieces, peer, turns, len_max, turn: None, warmed: None }
    }

    /// Whether a drive had to be asked.
    pub(crate) fn is_any(&self) -> bool {
        self.warmed.is_some()
    }

    /// The answer's place at the drives: one, however its pieces are read.
    pub(crate) async fn turn(&mut self) -> Option<Arc<Turn>> {
        if self.turn.is_none() {
            // By then nobody waits for the answer any more; that too many read is then the smaller harm.
            self.turn = timeout(self.turns.patience, self.turns.take(self.peer)).await.ok().map(Arc::new);
        }
        self.turn.clone()
    }

    /// Why a piece that was waited for could not be read, if it could not.
    pub(crate) fn failure(&self, piece: usize) -> Option<String> {
        self.warmed.as_ref()?.borrow().failed.get(&piece).cloned()
    }

    /// Has the drive read all that is left of the answer, from piece `at` on, and waits for those before `until`.
    pub(crate) async fn warm(&mut self, at: usize, until: usize) {
        if self.warmed.is_none() {
            let turn = self.turn().await;
            let ranges: Vec<Option<Range>> = self.pieces[at..].iter().map(|piece| range(piece, self.len_max)).collect();
            let (progress, warmed) = watch::channel(Warmed { until: at, failed: BTreeMap::new() });
            self.warmed = Some(warmed);
            // Not waited for: it ends by itself, at the pace of the drive.
            drop(tokio::task::spawn_blocking(move || read_ahead(&ranges, &progress, turn)));
        }
        if let Some(warmed) = &mut self.warmed {
            // Without a thread any more it is slower, not wrong.
            let _ = warmed.wait_for(|warmed| warmed.until >= until).await;
        }
    }
}

type Range = (Arc<File>, u64, u64);

/// What of a piece is to be asked of a drive.
fn range(piece: &Piece, len_max: u64) -> Option<Range> {
    match piece {
        Piece::File { file, offset, len, .. } if (1..=len_max).contains(len) => Some((file.clone(), *offset, *len)),
        _ => None,
    }
}

/// Asks the drive for all ranges, sorted by place, and then waits for one after another.
fn read_ahead(ranges: &[Option<Range>], progress: &watch::Sender<Warmed>, turn: Option<Arc<Turn>>) {
    let mut sorted: Vec<&Range> = ranges.iter().flatten().collect();
    sorted.sort_by_key(|(file, offset, _)| (Arc::as_ptr(file), *offset));
    for (file, offset, len) in sorted {
        // A hint: where it is not taken, reading below waits for longer.
        let _ = fadvise(file, *offset, std::num::NonZeroU64::new(*len), Advice::WillNeed);
    }
    let mut byte = [0];
    for range in ranges {
        let read = range.as_ref().map_or(Ok(()), |(file, offset, len)| {
            let mut steps = (*offset..offset + len).step_by(WAIT_STEP as usize).chain([offset + len - 1]);
            steps.try_for_each(|at| file.read_exact_at(&mut byte, at))
        });
        progress.send_modify(|warmed| {
            if let Err(error) = &read {
                warmed.failed.insert(warmed.until, drive_failure(error));
            }
            warmed.until += 1;
        });
    }
    drop(turn);
}

/// Reads what is in the page cache, without ever waiting for a drive: from there it is not worth another thread's while.
pub(crate) fn read_cached(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    match preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(count),
        // Not cached, or a file system that cannot tell.
        Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Does what may take long where it stands: the runtime's other tasks go to other threads meanwhile.
pub(crate) fn blocking_here<R>(call: impl FnOnce() -> R) -> R {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(call),
        _ => call(),
    }
}

/// Whether a range seems to be in the page cache: its ends and its middle are.
pub(crate) fn is_cached(file: &File, offset: u64, len: u64) -> bool {
    let last = offset + len - 1;
    let places = [offset, (offset + len / 2) / PAGE_SIZE * PAGE_SIZE, last];
    places.into_iter().all(|place| read_cached(file, place, &mut [0]).is_ok_and(|count| count == 1))
}
