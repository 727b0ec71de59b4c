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

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dayfly_meta::id::BlockId;
use dayfly_meta::limits::{
    RECOVERY_BATCH_BLOCKS_MAX, RECOVERY_BATCH_LEN_MAX, RECOVERY_BATCH_LEN_MIN, RECOVERY_LOOK_INTERVAL, RECOVERY_PAUSE_MAX,
    RECOVERY_PAUSE_MIN, RECOVERY_WINDOW_BLOCKS,
};
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::status::{Reads, RecoveryStatus};
use tokio::time::{Instant, sleep};

use crate::blocking::Blocking;
use crate::fetch::Fetcher;
use crate::peers::Peers;
use crate::room::Room;
use crate::store::{BlockPosition, Dataset, Store, Window};
use pace::Pace;
use scan::window;

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
    wanted: Total,
    recovered: Total,
    failed: Total,
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
    pub(crate) fn status(&self) -> RecoveryStatus {
        let (wanted, recovered) = (self.wanted.get(), self.recovered.get());
        // A scan that begins again has not found all of what was recovered yet.
        let wanted = Reads { count: wanted.count.max(recovered.count), bytes: wanted.bytes.max(recovered.bytes) };
        RecoveryStatus { wanted, recovered, failed: self.failed.get() }
    }

    fn reset(&self) {
        [&self.wanted, &self.recovered, &self.failed].into_iter().for_each(|total| total.set(Reads::default()));
    }

    /// Prepares for a scan that will find again what could not be recovered so far.
    fn begin_pass(&self) {
        self.wanted.set(self.recovered.get());
        self.failed.set(Reads::default());
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
    pub(crate) progress: Arc<RecoveryProgress>,
}

impl Recovery {
    /// Follows the roster until the session ends.
    pub(crate) async fn run(self) {
        let mut roster = self.peers.roster_changes();
        let mut lost = roster.current().lost();
        loop {
            let recovering = async {
                // A new server may learn of a dataset only after it has become a member.
                while lost.is_empty() && !self.store.datasets().iter().any(|dataset| dataset.is_refilled()) {
                    sleep(RECOVERY_LOOK_INTERVAL).await;
                }
                let (reading, streaming) = (self.rate > 0, !self.timeout.is_zero());
                tokio::join!(only_if(reading, self.recover(&lost)), only_if(streaming, self.stream_all(&lost)));
            };
            tokio::select! {
                biased;
                _ = roster.next() => {}
                () = recovering => {}
            }
            let now_lost = roster.current().lost();
            if now_lost == lost {
                continue;
            }
            lost = now_lost;
            self.progress.reset();
            if let Err(error) = self.room.plan_cache().await {
                tracing::warn!(%error, "cannot plan again which blocks this node caches after the members have changed");
            }
        }
    }

    /// Recovers all datasets, and does so again whenever room has been planned again or some blocks have failed. Runs until it is
    /// dropped.
    async fn recover(&self, lost: &NodeSet) {
        let mut pace = Pace::new(self.rate);
        let mut pause = RECOVERY_PAUSE_MIN;
        loop {
            let plan = self.room.plans();
            self.progress.begin_pass();
            for dataset in self.store.datasets() {
                self.recover_dataset(&dataset, lost, &mut pace).await;
            }
            let RecoveryStatus { wanted, recovered, failed } = self.progress.status();
            if recovered.count > 0 || failed.count > 0 {
                let (blocks, bytes, failures) = (recovered.count, recovered.bytes, failed.count);
                tracing::info!(wanted = wanted.count, blocks, bytes, failures, "recovered blocks of lost nodes");
            }
            let again = Instant::now() + pause;
            while self.room.plans() == plan && (failed.count == 0 || Instant::now() < again) {
                sleep(RECOVERY_LOOK_INTERVAL).await;
            }
            pause = if self.room.plans() == plan { (pause * 2).min(RECOVERY_PAUSE_MAX) } else { RECOVERY_PAUSE_MIN };
        }
    }

    async fn recover_dataset(&self, dataset: &Arc<Dataset>, lost: &NodeSet, pace: &mut Pace) {
        let mut after = None;
        loop {
            let (scanned, lost) = (dataset.clone(), *lost);
            let scan = move || window(&scanned, &lost, after, RECOVERY_WINDOW_BLOCKS);
            let Ok(Window { blocks, is_last, found }) = self.blocking.run(scan).await else { return };
            if after.is_none() {
                self.progress.wanted.add(found);
            }
            let mut rest = &blocks[..];
            while !rest.is_empty() {
                let batch = self.next_batch(dataset, &mut rest);
                if !self.recover_batch(dataset, &batch, pace).await {
                    return;
                }
            }
            after = blocks.last().copied();
            if is_last {
                return;
            }
        }
    }

    /// Takes blocks from the front of `rest`: as many as may be in memory at once, and at least one.
    fn next_batch(&self, dataset: &Dataset, rest: &mut &[BlockPosition]) -> Vec<BlockId> {
        // A batch passes at once, so with a low rate it is small.
        let len_max = (self.rate / 4).clamp(RECOVERY_BATCH_LEN_MIN, RECOVERY_BATCH_LEN_MAX);
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while let Some((first, others)) = rest.split_first() {
            let block = BlockId(first.block);
            let len = dataset.catalog().block(block).map_or(0, |(_, len)| len);
            if !batch.is_empty() && (bytes + len > len_max || batch.len() >= RECOVERY_BATCH_BLOCKS_MAX) {
                break;
            }
            batch.push(block);
            bytes += len;
            *rest = others;
        }
        batch
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
        let absent: Vec<BlockId> = absent.into_iter().filter(|&block| dataset.is_selected(block)).collect();
        let len = |block: &BlockId| dataset.catalog().block(*block).map_or(0, |(_, len)| len);
        let total = |blocks: &[BlockId]| Reads { count: blocks.len() as u64, bytes: blocks.iter().map(len).sum() };
        self.progress.recovered.add(total(&here));
        if absent.is_empty() {
            return !dataset.is_gone();
        }
        pace.pass(total(&absent).bytes).await;
        self.fetcher.let_readers_go_first().await;
        let outcome = self.fetcher.recover(dataset, &absent).await;
        self.progress.recovered.add(total(&outcome.recovered));
        self.progress.failed.add(total(&outcome.failed));
        !outcome.is_full && !dataset.is_gone()
    }
}
