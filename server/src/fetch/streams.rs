//! Blocks of compressed tars that are read again by unpacking the whole tar: which readers wait for them, and how long.
//!
//! One node unpacks a tar again, the *streamer*: the first candidate of the tar's path that is not absent. A reader's node asks the
//! streamer for a block. As long as the block is not there, the streamer answers that it is late, and the reader's node asks again
//! after a pause. Meanwhile the request holds no room in the arena. On the streamer, the request makes recovery unpack the tar next.
//!
//! This module keeps the state of both sides. `recovery` unpacks.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::DatasetId;
use dayfly_meta::limits::{RECOVERY_PAUSE_MIN, STREAM_ASKED_INTERVAL_MAX, STREAM_ASKED_INTERVAL_MIN, STREAMS_MAX};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Fetcher;
use crate::arena::Wanted;
use crate::fetch::error::{ChunkName, FetchError};
use crate::fetch::{Fetched, FetchedChunks};
use crate::store::Dataset;

/// A source of a dataset.
pub(crate) type SourceKey = (DatasetId, u32);

/// What the streamer does about a source.
#[derive(Clone, Debug)]
enum Work {
    /// A reader waits for it.
    Demanded,
    Running {
        is_demanded: bool,
    },
    /// All its blocks that this plan of the cache has room for have been stored.
    Done {
        at: Instant,
        plan: u64,
    },
    /// Other programs have left no room for some of its blocks: for blocks that the plan has room for, or for others, too.
    NoRoom {
        at: Instant,
        is_for_all: bool,
    },
    Failed {
        at: Instant,
        reason: String,
    },
}

/// How the streamer's work on a source has ended.
pub(crate) enum StreamEnd {
    /// All blocks are here that this plan of the cache has room for.
    Done {
        plan: u64,
    },
    /// Other programs have left no room on the drives for blocks that the plan has room for, or, with `is_for_all`, for others, too.
    NoRoom {
        is_for_all: bool,
    },
    /// Whether there is room is not known, because a stage-in has begun.
    Paused,
    Failed(String),
}

/// A reader's node that waits for a source.
struct Wait {
    since: Instant,
    again_at: Instant,
    pause: Duration,
}

/// The answer about a block that is not there yet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Late {
    Wait,
    Failed(String),
}

/// The sources that are being read again, as this node sees them.
#[derive(Default)]
pub(crate) struct Streams {
    /// On the streamer.
    work: Mutex<HashMap<SourceKey, Work>>,
    /// The epoch of the roster whose lost nodes recovery knows, and has divided the room for.
    epoch: AtomicU32,
    demanded: Notify,
    /// On a reader's node.
    waits: Mutex<HashMap<SourceKey, Wait>>,
    is_any_wait: AtomicBool,
}

impl Streams {
    fn work(&self) -> MutexGuard<'_, HashMap<SourceKey, Work>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waits(&self) -> MutexGuard<'_, HashMap<SourceKey, Wait>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what has become of sources, because the members have changed. `epoch` is that of their roster.
    pub(crate) fn begin_epoch(&self, epoch: u32) {
        let mut all = self.work();
        all.retain(|_, work| matches!(work, Work::Demanded));
        self.epoch.store(epoch, Ordering::Relaxed);
    }

    /// Records that a reader wants a block of a source that this node lacks. `epoch` is that of the roster, `plan` is the plan of the
    /// cache that is in force, and `is_selected` says whether it has room for the block.
    fn demand(&self, key: SourceKey, epoch: u32, plan: u64, is_selected: bool) -> Late {
        let mut all = self.work();
        let is_behind = self.epoch.load(Ordering::Relaxed) != epoch;
        if all.len() >= STREAMS_MAX && !all.contains_key(&key) {
            return Late::Wait;
        }
        let work = all.entry(key).or_insert_with(|| Work::Demanded);
        match work {
            Work::Demanded => {}
            Work::Running { is_demanded } => *is_demanded = true,
            // The node that owns the block may have been lost since then.
            _ if is_behind => *work = Work::Demanded,
            Work::Done { plan: old, .. } if *old != plan => *work = Work::Demanded,
            Work::Done { at, .. } | Work::NoRoom { at, .. } | Work::Failed { at, .. } if at.elapsed() > RECOVERY_PAUSE_MIN => {
                *work = Work::Demanded;
            }
            Work::NoRoom { is_for_all, .. } if is_selected || *is_for_all => return Late::Wait,
            Work::Done { .. } | Work::NoRoom { .. } => return Late::Failed("it has no room to keep the block".to_owned()),
            Work::Failed { reason, .. } => return Late::Failed(reason.clone()),
        }
        drop(all);
        self.demanded.notify_one();
        Late::Wait
    }

    /// Returns a source that a reader waits for.
    pub(crate) fn next_demand(&self) -> Option<SourceKey> {
        self.work().iter().find(|(_, work)| matches!(work, Work::Demanded)).map(|(key, _)| *key)
    }

    /// Waits until a reader has asked for a source. May return early.
    pub(crate) async fn wait_for_demand(&self) {
        self.demanded.notified().await;
    }

    /// Returns whether a reader waits for a source that is being read.
    pub(crate) fn is_demanded(&self, key: SourceKey) -> bool {
        matches!(self.work().get(&key), Some(Work::Demanded | Work::Running { is_demanded: true }))
    }

    pub(crate) fn begin(&self, key: SourceKey) {
        let is_demanded = self.is_demanded(key);
        self.work().insert(key, Work::Running { is_demanded });
    }

    pub(crate) fn end(&self, key: SourceKey, end: StreamEnd) {
        let (at, mut all) = (Instant::now(), self.work());
        match end {
            StreamEnd::Done { plan } => drop(all.insert(key, Work::Done { at, plan })),
            StreamEnd::NoRoom { is_for_all } => drop(all.insert(key, Work::NoRoom { at, is_for_all })),
            StreamEnd::Failed(reason) => drop(all.insert(key, Work::Failed { at, reason })),
            // The next reader who asks makes this node begin again.
            StreamEnd::Paused => drop(all.remove(&key)),
        }
    }

    /// Records that the streamer has said that a block is late. Nobody on this node asks for the source until a pause is over.
    pub(super) fn note_late(&self, key: SourceKey) {
        let now = Instant::now();
        let mut waits = self.waits();
        if waits.len() >= STREAMS_MAX && !waits.contains_key(&key) {
            waits.retain(|_, wait| wait.is_current());
        }
        let pause = STREAM_ASKED_INTERVAL_MIN;
        let wait = waits.entry(key).or_insert(Wait { since: now, again_at: now, pause });
        if !wait.is_current() {
            *wait = Wait { since: now, again_at: now, pause };
        }
        wait.again_at = now + wait.pause;
        wait.pause = (wait.pause * 2).min(STREAM_ASKED_INTERVAL_MAX);
        self.is_any_wait.store(true, Ordering::Release);
    }

    /// Records that a block of a source has arrived.
    pub(super) fn note_arrival(&self, key: SourceKey) {
        if self.is_any_wait() {
            let mut waits = self.waits();
            waits.remove(&key);
            self.is_any_wait.store(!waits.is_empty(), Ordering::Release);
        }
    }

    /// Returns whether this node waits for any source.
    fn is_any_wait(&self) -> bool {
        self.is_any_wait.load(Ordering::Acquire)
    }

    /// Returns whether the streamer of a source may be asked now: `None` means yes.
    fn wait(&self, key: SourceKey, timeout: Duration) -> Option<Late> {
        if !self.is_any_wait() {
            return None;
        }
        let waits = self.waits();
        let wait = waits.get(&key).filter(|wait| wait.is_current())?;
        if wait.since.elapsed() > timeout {
            return Some(Late::Failed(String::new()));
        }
        (Instant::now() < wait.again_at).then_some(Late::Wait)
    }
}

impl Wait {
    /// Returns whether somebody has waited until now. Otherwise, a new wait begins.
    fn is_current(&self) -> bool {
        Instant::now() < self.again_at + STREAM_ASKED_INTERVAL_MAX * 4
    }
}

impl Fetcher {
    /// Returns whether a block whose owner is absent can be read by unpacking its tar again.
    pub(crate) fn is_streamed(&self, dataset: &Dataset, chunk: Chunk) -> bool {
        !self.recovery_timeout.is_zero() && dataset.is_streamed(chunk.block)
    }

    pub(super) fn source_key(dataset: &Dataset, chunk: Chunk) -> SourceKey {
        (dataset.id(), dataset.source_of_block(chunk.block).unwrap_or(u32::MAX))
    }

    /// Takes those chunks from `wanted` that have to be waited for, and returns their indexes in the request. Those that have been
    /// waited for in vain get an error.
    pub(super) fn take_late(&self, dataset: &Dataset, ready: &mut FetchedChunks, wanted: &mut Vec<Wanted>) -> Vec<u32> {
        let mut all_late = Vec::new();
        wanted.retain(|Wanted { index, chunk, info }| {
            let (chunk, node) = (*chunk, info.owner);
            // In nearly all cases, the owner is asked. If its copy is bad, nothing is late.
            let is_owner = dataset.catalog().owner(chunk.block) == Some(node);
            let is_own = node == self.peers.own_node();
            let is_to_come_back = match is_own {
                true => dataset.is_to_come_back(chunk.block),
                false => self.streams.is_any_wait() && self.has_said_late(dataset, chunk, node),
            };
            let is_asked_as_owner = is_owner && !is_to_come_back;
            if is_asked_as_owner || !self.is_streamed(dataset, chunk) || self.arena.find(&(dataset.id(), chunk)).is_some() {
                return true;
            }
            let key = Self::source_key(dataset, chunk);
            let late = match self.streams.wait(key, self.recovery_timeout) {
                None if is_own => {
                    let late = self.late(dataset, chunk);
                    // Only one reader would learn in each pause that there is no room. The others would wait for nothing.
                    if late == Late::Wait {
                        self.streams.note_late(key);
                    }
                    late
                }
                None => return true,
                // A node that holds a copy is asked, however late others are.
                Some(_) if !is_own && !is_to_come_back && dataset.is_copied_to(chunk.block, node) => return true,
                Some(late) => late,
            };
            match late {
                Late::Wait => all_late.push(*index),
                Late::Failed(reason) => {
                    let seconds = self.recovery_timeout.as_secs();
                    let reason =
                        if reason.is_empty() { format!("it takes longer than {seconds} s (--recovery-timeout)") } else { reason };
                    let error = FetchError::NotRecovered { chunk: ChunkName::new(dataset, chunk), node, reason };
                    ready.push((*index, Fetched::Failed(error)));
                }
            }
            false
        });
        all_late
    }

    /// Returns what to say about a block of a compressed tar that this node is to read in place of its owner, and lacks.
    pub(super) fn late(&self, dataset: &Dataset, chunk: Chunk) -> Late {
        let roster = self.peers.roster();
        // As long as the owner only does not answer somebody, it may come back.
        if !dataset.is_to_come_back(chunk.block) && !dataset.takes_over(chunk.block, &roster.lost()) {
            return Late::Wait;
        }
        let (plan, is_selected) = (dataset.cached_blocks().plan(), dataset.is_selected(chunk.block));
        self.streams.demand(Self::source_key(dataset, chunk), roster.epoch(), plan, is_selected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: SourceKey = (DatasetId(1), 2);

    #[tokio::test(start_paused = true)]
    async fn the_streamer_answers_late_until_it_is_done_and_tries_again_after_a_while() {
        let streams = Streams::default();
        let demand = || streams.demand(KEY, 0, 1, true);
        assert_eq!((demand(), streams.next_demand()), (Late::Wait, Some(KEY)));
        streams.begin(KEY);
        assert_eq!((demand(), streams.next_demand(), streams.is_demanded(KEY)), (Late::Wait, None, true));
        streams.end(KEY, StreamEnd::Failed("the source is gone".to_owned()));
        assert_eq!(demand(), Late::Failed("the source is gone".to_owned()));
        tokio::time::advance(RECOVERY_PAUSE_MIN * 2).await;
        assert_eq!((demand(), streams.next_demand()), (Late::Wait, Some(KEY)));
        streams.end(KEY, StreamEnd::Done { plan: 1 });
        assert!(matches!(demand(), Late::Failed(_)), "it has not kept the block");
        assert_eq!(streams.demand(KEY, 1, 1, true), Late::Wait, "other members are lost now");
        streams.end(KEY, StreamEnd::Done { plan: 1 });
        assert_eq!(streams.demand(KEY, 1, 1, true), Late::Wait, "recovery still reads for those that were lost before");
        streams.begin_epoch(1);
        assert_eq!(streams.next_demand(), Some(KEY));
        let demand = || streams.demand(KEY, 1, 1, true);
        assert_eq!(demand(), Late::Wait);
        streams.end(KEY, StreamEnd::Done { plan: 1 });
        assert!(matches!(demand(), Late::Failed(_)), "it has not kept the block");
        streams.end(KEY, StreamEnd::Done { plan: 0 });
        assert_eq!((demand(), streams.next_demand()), (Late::Wait, Some(KEY)), "the room has been divided again");
        streams.end(KEY, StreamEnd::Paused);
        assert_eq!((demand(), streams.next_demand()), (Late::Wait, Some(KEY)), "a stage-in has begun");
        streams.end(KEY, StreamEnd::NoRoom { is_for_all: false });
        assert_eq!((demand(), streams.next_demand()), (Late::Wait, None), "others may make room");
        assert!(matches!(streams.demand(KEY, 1, 1, false), Late::Failed(_)), "our own capacity has no room for this block");
        tokio::time::advance(RECOVERY_PAUSE_MIN * 2).await;
        assert_eq!((demand(), streams.next_demand()), (Late::Wait, Some(KEY)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_asks_at_growing_intervals_and_gives_up_at_the_timeout() {
        let (streams, timeout) = (Streams::default(), Duration::from_secs(60));
        assert_eq!(streams.wait(KEY, timeout), None);
        let start = Instant::now();
        let mut asked = 0;
        while streams.wait(KEY, timeout) != Some(Late::Failed(String::new())) {
            if streams.wait(KEY, timeout).is_none() {
                streams.note_late(KEY);
                asked += 1;
            }
            tokio::time::advance(Duration::from_millis(20)).await;
        }
        assert!(start.elapsed() > timeout && start.elapsed() < timeout * 2);
        assert!((30..80).contains(&asked), "{asked}");
        tokio::time::advance(timeout).await;
        assert_eq!(streams.wait(KEY, timeout), None, "nobody has waited for a while");
        streams.note_late(KEY);
        assert_eq!(streams.wait(KEY, timeout), Some(Late::Wait));
        streams.note_arrival(KEY);
        assert_eq!(streams.wait(KEY, timeout), None);
    }
}
