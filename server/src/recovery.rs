//! What this node does when the session loses a member, and when a lost member returns.
//!
//! At each change of the roster it divides its room again, because it now holds other blocks. While members are lost, it reads the
//! blocks that it holds in their place and lacks, in the background, and stores them. It stops when the members return. A node whose
//! server is new in the session reads the blocks that it owns in the same way.
//!
//! # Parts
//!
//! - [`scan`]: finds the blocks to recover, in the order of their origins.
//! - [`streams`]: reads the blocks that lie in compressed tars.
//! - [`pace`]: bounds the rate.
//! - `fetch::recover` reads and stores blocks; readers that want the same blocks share these reads.
//!
//! # Invariants
//!
//! - Recovery has a bounded number of bytes and of blocks in memory, however large the datasets are.
//! - Readers go first: recovery waits while readers use all streams to the parallel file system, and uses a part of them.
//! - Recovery stores only blocks that the plan of the cache has room for. It reads nothing while a stage-in needs the room.

mod pace;
mod scan;
mod streams;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::limits::{
    BAD_HOLDER_PAUSE, RECOVERY_BATCH_BLOCKS_MAX, RECOVERY_BATCH_LEN_MAX, RECOVERY_BATCH_LEN_MIN, RECOVERY_LOOK_INTERVAL,
    RECOVERY_PAUSE_MAX, RECOVERY_PAUSE_MIN, RECOVERY_WINDOW_BLOCKS,
};
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::peer::{AdministrationReply, AdministrationRequest};
use dayfly_meta::wire::status::{Reads, RecoveryStatus};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

use crate::blocking::Blocking;
use crate::fetch::Fetcher;
use crate::peers::Peers;
use crate::room::Room;
use crate::store::{BlockPosition, Dataset, Store, Window};
use pace::Pace;
use scan::{LeftOut, left_out, window};

/// Does work, or waits forever.
async fn only_if(is_on: bool, work: impl Future<Output = ()>) {
    match is_on {
        true => work.await,
        false => std::future::pending().await,
    }
}

/// How far recovery has come since the members last changed.
#[derive(Default)]
pub(crate) struct RecoveryProgress {
    /// The lost members whose blocks the rest is about.
    lost: Mutex<NodeSet>,
    /// Whether recovery has begun to look for blocks since then.
    has_begun: AtomicBool,
    /// Blocks that are read by themselves.
    read: Progress,
    /// Blocks for which compressed tars are read again.
    streamed: Progress,
    /// The other blocks that this node lacks.
    left_out: Mutex<LeftOut>,
}

/// How far recovery has come with the blocks of one kind.
#[derive(Default)]
struct Progress {
    wanted: Total,
    recovered: Total,
    failed: Total,
    /// The blocks that a pass found no room for, although the plan has some.
    without_room: Total,
    /// The datasets whose blocks `wanted` does not count yet.
    uncounted: AtomicUsize,
}

#[derive(Default)]
struct Total {
    blocks: AtomicU64,
    bytes: AtomicU64,
}

impl Total {
    fn add(&self, more: Reads) {
        self.blocks.fetch_add(more.count, Ordering::Relaxed);
        self.bytes.fetch_add(more.bytes, Ordering::Relaxed);
    }

    fn set(&self, reads: Reads) {
        self.blocks.store(reads.count, Ordering::Relaxed);
        self.bytes.store(reads.bytes, Ordering::Relaxed);
    }

    fn get(&self) -> Reads {
        Reads { count: self.blocks.load(Ordering::Relaxed), bytes: self.bytes.load(Ordering::Relaxed) }
    }
}

impl RecoveryProgress {
    /// Returns the progress with the blocks of `lost`, the members that are lost now, and with those that are to come to this node
    /// even if no member is lost, which `is_incomplete` says.
    pub(crate) fn status(&self, lost: &NodeSet, is_incomplete: bool) -> RecoveryStatus {
        let known = self.lost();
        let (mut status, streamed) = (self.read.status(), self.streamed.status());
        status.wanted.add(streamed.wanted);
        status.recovered.add(streamed.recovered);
        status.failed.add(streamed.failed);
        status.without_room.add(streamed.without_room);
        let LeftOut { without_room, unrecoverable } = *self.left_out();
        status.without_room.add(without_room);
        status.unrecoverable.add(unrecoverable);
        // Recovery learns a moment later than others that members have changed.
        status.is_scanned &= streamed.is_scanned && *known == *lost && (self.has_begun.load(Ordering::Acquire) || !is_incomplete);
        status
    }

    /// Begins anew with other lost members. Each kind of blocks will be looked for in as many datasets.
    fn reset(&self, lost: &NodeSet, to_read: usize, to_stream: usize) {
        let mut known = self.lost();
        *known = *lost;
        self.has_begun.store(false, Ordering::Release);
        self.read.reset(to_read);
        self.streamed.reset(to_stream);
        *self.left_out() = LeftOut::default();
    }

    /// Begins to look for blocks of each kind in so many datasets.
    fn begin(&self, to_read: usize, to_stream: usize) {
        self.read.begin_pass(to_read);
        self.streamed.begin_pass(to_stream);
        self.has_begun.store(true, Ordering::Release);
    }

    fn left_out(&self) -> MutexGuard<'_, LeftOut> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self) -> MutexGuard<'_, NodeSet> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress {
    fn status(&self) -> RecoveryStatus {
        // Read first: the blocks of a dataset are counted before the dataset is.
        let is_scanned = self.uncounted.load(Ordering::Acquire) == 0;
        let (wanted, recovered) = (self.wanted.get(), self.recovered.get());
        // A scan that begins again has not found all of what was recovered yet.
        let wanted = Reads { count: wanted.count.max(recovered.count), bytes: wanted.bytes.max(recovered.bytes) };
        let (failed, without_room) = (self.failed.get(), self.without_room.get());
        RecoveryStatus { wanted, recovered, failed, without_room, unrecoverable: Reads::default(), is_scanned }
    }

    fn reset(&self, datasets: usize) {
        self.uncounted.store(datasets, Ordering::Release);
        [&self.wanted, &self.recovered, &self.failed, &self.without_room]
            .into_iter()
            .for_each(|total| total.set(Reads::default()));
    }

    /// Prepares for a scan of `datasets` datasets that will find again what could not be recovered so far.
    fn begin_pass(&self, datasets: usize) {
        self.uncounted.store(datasets, Ordering::Release);
        self.wanted.set(self.recovered.get());
        [&self.failed, &self.without_room].into_iter().for_each(|total| total.set(Reads::default()));
    }

    /// Ends a pass after which so many blocks are still missing: those that had no room, and others.
    fn end_pass(&self, without_room: Reads, others: Reads) {
        let mut wanted = self.recovered.get();
        wanted.add(others);
        self.without_room.set(without_room);
        self.wanted.set(wanted);
    }

    /// Counts the blocks that were found in one more dataset.
    fn count(&self, found: Reads) {
        self.wanted.add(found);
        self.uncounted.fetch_sub(1, Ordering::Release);
    }
}

/// The recovery of one node.
pub(crate) struct Recovery {
    pub(crate) peers: Arc<Peers>,
    pub(crate) room: Arc<Room>,
    pub(crate) store: Arc<Store>,
    pub(crate) fetcher: Arc<Fetcher>,
    pub(crate) blocking: Arc<dyn Blocking>,
    /// Bytes per second; 0 to recover nothing in the background.
    pub(crate) rate: u64,
    /// How long readers wait for blocks of compressed tars; 0 if these are not read again.
    pub(crate) timeout: Duration,
    /// A permit for each thread that reads a compressed tar. A thread whose read hangs in the kernel cannot be ended, and keeps its own.
    pub(crate) stream_readers: Arc<Semaphore>,
    pub(crate) progress: Arc<RecoveryProgress>,
}

impl Recovery {
    /// Follows the roster until the session ends.
    pub(crate) async fn run(self) {
        let mut roster = self.peers.roster_changes();
        let mut now = roster.current();
        let mut lost = now.lost();
        let (reading, streaming) = (self.rate > 0, !self.timeout.is_zero());
        self.begin_anew(&lost);
        loop {
            let recovering = async {
                // A new server may learn of a dataset only after it has become a member, and a stage-in may leave out copies.
                while lost.is_empty() && !self.store.datasets().iter().any(|dataset| dataset.is_incomplete()) {
                    sleep(RECOVERY_LOOK_INTERVAL).await;
                }
                let count = if reading { self.store.datasets().len() } else { 0 };
                self.progress.begin(count, if streaming { count } else { 0 });
                tokio::join!(only_if(reading, self.recover(&lost)), only_if(streaming, self.stream_all(now.epoch(), &lost)));
            };
            tokio::select! {
                biased;
                _ = roster.next() => {}
                () = recovering => {}
                () = self.keep_until_refilled() => {}
            }
            now = roster.current();
            if now.lost() == lost {
                continue;
            }
            lost = now.lost();
            self.begin_anew(&lost);
            if let Err(error) = self.room.plan_cache().await {
                tracing::warn!(%error, "cannot plan again which blocks this node caches after the members have changed");
            }
        }
    }

    /// Asks members that have returned whether they have their copies again, until all have. From then on, this node need not keep
    /// those that it has held in their place, as soon as nobody remembers anymore that a member did not have a copy yet. Runs until
    /// it is dropped.
    async fn keep_until_refilled(&self) {
        let mut refilled = HashMap::new();
        loop {
            sleep(self.peers.deadlines().ping_interval).await;
            for dataset in self.store.datasets() {
                for node in dataset.refilling().iter() {
                    let key = (dataset.id(), node);
                    let since = match refilled.get(&key) {
                        Some(since) => *since,
                        None if self.has_copies(node, &dataset).await => *refilled.entry(key).or_insert_with(Instant::now),
                        None => continue,
                    };
                    if since.elapsed() < BAD_HOLDER_PAUSE {
                        continue;
                    }
                    refilled.remove(&key);
                    if let Err(error) = self.room.note_copies_back(&dataset, node).await {
                        tracing::warn!(%error, "cannot plan again which blocks this node caches after a node has got its copies back");
                    }
                }
            }
        }
    }

    async fn has_copies(&self, node: NodeId, dataset: &Dataset) -> bool {
        let request = AdministrationRequest::HasCopies { dataset: dataset.id() };
        let answer = self.peers.ask(node, request, self.peers.deadlines().request).await;
        matches!(answer, Ok(AdministrationReply::HasCopies(true)))
    }

    /// Forgets the progress, because other members are lost now.
    fn begin_anew(&self, lost: &NodeSet) {
        let datasets = if lost.is_empty() || self.rate == 0 { 0 } else { self.store.datasets().len() };
        self.progress.reset(lost, datasets, if self.timeout.is_zero() { 0 } else { datasets });
    }

    /// Recovers all datasets, and does so again whenever room has been planned again, and after a while if some blocks have failed or
    /// drives were full. Runs until it is dropped.
    async fn recover(&self, lost: &NodeSet) {
        let mut pace = Pace::new(self.rate);
        let mut pause = RECOVERY_PAUSE_MIN;
        loop {
            self.room.plan_again_if_freed().await;
            let plan = self.room.plans();
            let datasets = self.store.datasets();
            self.progress.read.begin_pass(datasets.len());
            let mut was_room = true;
            self.count_left_out(&datasets, lost).await;
            for dataset in datasets {
                was_room &= self.recover_dataset(&dataset, lost, &mut pace).await;
            }
            let RecoveryStatus { wanted, recovered, failed, .. } = self.progress.read.status();
            if recovered.count > 0 || failed.count > 0 {
                let (blocks, bytes, failures) = (recovered.count, recovered.bytes, failed.count);
                tracing::info!(wanted = wanted.count, blocks, bytes, failures, "recovered blocks of lost nodes");
            }
            if !was_room {
                let rest = |all: u64, parts: [u64; 2]| all.saturating_sub(parts.iter().sum());
                let count = rest(wanted.count, [recovered.count, failed.count]);
                let bytes = rest(wanted.bytes, [recovered.bytes, failed.bytes]);
                self.progress.read.end_pass(Reads { count, bytes }, failed);
            }
            let is_done = was_room && failed.count == 0;
            let mut again = Instant::now() + pause;
            while self.room.plans() == plan {
                sleep(RECOVERY_LOOK_INTERVAL).await;
                if Instant::now() < again {
                    continue;
                }
                pause = (pause * 2).min(RECOVERY_PAUSE_MAX);
                again = Instant::now() + pause;
                if !is_done {
                    break;
                }
                // The plan leaves blocks out if other programs had filled the drives.
                self.room.plan_again_if_freed().await;
            }
            if self.room.plans() != plan {
                pause = RECOVERY_PAUSE_MIN;
            }
        }
    }

    async fn count_left_out(&self, datasets: &[Arc<Dataset>], lost: &NodeSet) {
        let mut all = LeftOut::default();
        for dataset in datasets {
            let (scanned, lost, with_streamed) = (dataset.clone(), *lost, !self.timeout.is_zero());
            let Ok(found) = self.blocking.run(move || left_out(&scanned, &lost, with_streamed)).await else { return };
            all.without_room.add(found.without_room);
            all.unrecoverable.add(found.unrecoverable);
        }
        *self.progress.left_out() = all;
    }

    /// Recovers a dataset. Returns `false` if the drives did not have room for all blocks that the plan has room for.
    async fn recover_dataset(&self, dataset: &Arc<Dataset>, lost: &NodeSet, pace: &mut Pace) -> bool {
        let mut after = None;
        loop {
            // If compressed tars are not read again, their blocks can only come from other nodes, like those that are read by themselves.
            let (scanned, lost, with_streamed) = (dataset.clone(), *lost, self.timeout.is_zero());
            let scan = move || window(&scanned, &lost, after, RECOVERY_WINDOW_BLOCKS, with_streamed);
            let Ok(Window { blocks, is_last, found }) = self.blocking.run(scan).await else { return true };
            if after.is_none() {
                self.progress.read.count(found);
            }
            let mut rest = &blocks[..];
            while !rest.is_empty() {
                let batch = self.next_batch(dataset, &mut rest);
                if !self.recover_batch(dataset, &batch, pace).await {
                    return dataset.is_gone();
                }
            }
            after = blocks.last().copied();
            if is_last {
                return true;
            }
        }
    }

    /// Returns how many bytes of blocks are recovered together. They pass at once, so with a low rate they are few.
    fn batch_len_max(&self) -> u64 {
        (self.rate / 4).clamp(RECOVERY_BATCH_LEN_MIN, RECOVERY_BATCH_LEN_MAX)
    }

    /// Takes blocks from the front of `rest`: as many as may be in memory at once, and at least one.
    fn next_batch(&self, dataset: &Dataset, rest: &mut &[BlockPosition]) -> Vec<BlockId> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while let Some((first, others)) = rest.split_first() {
            let block = BlockId(first.block);
            let len = dataset.catalog().block(block).map_or(0, |(_, len)| len);
            if !batch.is_empty() && (bytes + len > self.batch_len_max() || batch.len() >= RECOVERY_BATCH_BLOCKS_MAX) {
                break;
            }
            batch.push(block);
            bytes += len;
            *rest = others;
        }
        batch
    }

    /// Makes room for blocks that this node is to hold, and keeps those of them that the plan then still has room for.
    async fn make_room_for(&self, dataset: &Arc<Dataset>, blocks: &mut Vec<BlockId>) {
        if let Err(error) = self.room.make_room_for_held(dataset, blocks).await {
            tracing::warn!(dataset = dataset.id().0, %error, "cannot make room for blocks of lost nodes");
        }
        blocks.retain(|&block| dataset.is_selected(block));
    }

    /// Recovers a batch. Returns `false` if there is no room for more.
    async fn recover_batch(&self, dataset: &Arc<Dataset>, batch: &[BlockId], pace: &mut Pace) -> bool {
        while dataset.cached_blocks().is_paused() {
            if dataset.is_gone() {
                return false;
            }
            sleep(RECOVERY_LOOK_INTERVAL).await;
        }
        // Readers may have brought some of these blocks, and the plan may have changed.
        let is_here = |block: &BlockId| dataset.is_local(*block);
        let (here, absent): (Vec<BlockId>, Vec<BlockId>) = batch.iter().copied().partition(is_here);
        let mut absent: Vec<BlockId> = absent.into_iter().filter(|&block| dataset.is_selected(block)).collect();
        let len = |block: &BlockId| dataset.catalog().block(*block).map_or(0, |(_, len)| len);
        let total = |blocks: &[BlockId]| Reads { count: blocks.len() as u64, bytes: blocks.iter().map(len).sum() };
        self.progress.read.recovered.add(total(&here));
        if absent.is_empty() {
            return !dataset.is_gone();
        }
        pace.pass(total(&absent).bytes).await;
        self.fetcher.let_readers_go_first().await;
        self.make_room_for(dataset, &mut absent).await;
        if absent.is_empty() {
            return !dataset.is_gone();
        }
        let outcome = self.fetcher.recover(dataset, &absent).await;
        self.progress.read.recovered.add(total(&outcome.recovered));
        self.progress.read.failed.add(total(&outcome.failed));
        !outcome.is_full && !dataset.is_gone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(count: u64) -> Reads {
        Reads { count, bytes: count * 10 }
    }

    #[test]
    fn the_wanted_blocks_are_a_lower_bound_until_those_of_all_datasets_are_counted() {
        let (progress, nobody) = (RecoveryProgress::default(), NodeSet::new());
        let lost: NodeSet = [NodeId(3)].into_iter().collect();
        assert!(progress.status(&nobody, false).is_scanned, "there is nothing to look for");
        assert!(!progress.status(&nobody, true).is_scanned, "a new server has not looked for its blocks yet");
        progress.begin(1, 1);
        assert!(!progress.status(&nobody, true).is_scanned);
        progress.read.count(blocks(0));
        progress.streamed.count(blocks(0));
        assert!(progress.status(&nobody, true).is_scanned);
        assert!(!progress.status(&lost, false).is_scanned, "the loss is not known here yet");
        progress.reset(&lost, 2, 2);
        assert!(!progress.status(&lost, false).is_scanned);
        progress.read.begin_pass(2);
        progress.read.count(blocks(5));
        progress.read.recovered.add(blocks(5));
        progress.read.count(blocks(7));
        assert!(!progress.status(&lost, false).is_scanned, "blocks of compressed tars are not counted yet");
        progress.streamed.begin_pass(2);
        progress.streamed.count(blocks(0));
        progress.streamed.count(blocks(100));
        progress.streamed.recovered.add(blocks(1));
        let status = progress.status(&lost, false);
        assert_eq!((status.wanted, status.recovered, status.is_scanned), (blocks(112), blocks(6), true));
        // A new pass of one kind does not forget what the other has counted.
        progress.read.begin_pass(1);
        let status = progress.status(&lost, false);
        assert_eq!((status.wanted, status.recovered, status.is_scanned), (blocks(105), blocks(6), false));
        progress.read.count(blocks(7));
        assert_eq!((progress.status(&lost, false).wanted, progress.status(&lost, false).is_scanned), (blocks(112), true));
        assert!(!progress.status(&nobody, false).is_scanned, "the return is not known here yet");
    }
}
