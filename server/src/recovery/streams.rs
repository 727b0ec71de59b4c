//! Reads blocks of compressed tars again: unpacks each tar once, and stores the blocks that this node is to hold.
//!
//! Tars that readers wait for come first, and are read without a bound on the rate. A tar that is being read in the background stands
//! still meanwhile.

use std::ops::ControlFlow;
use std::sync::Arc;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::BlockId;
use dayfly_meta::limits::{
    RECOVERY_BATCH_BLOCKS_MAX, RECOVERY_BATCH_LEN_MAX, RECOVERY_LOOK_INTERVAL, RECOVERY_PAUSE_MAX, RECOVERY_PAUSE_MIN,
    RECOVERY_WRITE_LEN, STREAM_PARTS_WAITING_MAX, STREAM_READERS_MAX,
};
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::status::Reads;
use dayfly_stagein::origin::Streamed;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::Recovery;
use super::pace::Pace;
use super::scan::{streamed_blocks, streamed_sources};
use crate::blocking::JobLost;
use crate::fetch::streams::{SourceKey, StreamEnd};
use crate::store::Dataset;

/// Chunks that were unpacked, and the bytes of the source that were read for them.
#[derive(Default)]
struct Part {
    chunks: Vec<(Chunk, Arc<Vec<u8>>)>,
    len: usize,
    source_bytes: u64,
}

/// What has become of blocks that were read again.
enum Kept {
    /// All are here for which the plan of the cache has room.
    All,
    /// The drives did not take some. The shortest of these has this length in bytes.
    Part { shortest: u64 },
}

impl Kept {
    fn of(dataset: &Dataset, blocks: &[BlockId]) -> Self {
        let absent = blocks.iter().filter(|block| !dataset.is_local(**block) && dataset.is_selected(**block));
        let lens = absent.map(|block| dataset.catalog().block(*block).map_or(0, |(_, len)| len));
        lens.min().map_or(Self::All, |shortest| Self::Part { shortest })
    }
}

/// Waits until caching goes on: until the stage-ins under way have ended, and the first plan for the dataset has been made.
async fn wait_while_paused(dataset: &Dataset) {
    while dataset.cached_blocks().is_paused() && !dataset.is_gone() {
        sleep(RECOVERY_LOOK_INTERVAL).await;
    }
}

impl Recovery {
    /// Reads the compressed tars again from which this node is to hold blocks. Runs until it is dropped.
    pub(super) async fn stream_all(&self, epoch: u32, lost: &NodeSet) {
        let streams = self.fetcher.streams();
        streams.begin_epoch(epoch);
        let mut pace = Pace::new(self.rate.max(1));
        let mut pause = RECOVERY_PAUSE_MIN;
        loop {
            let plan = self.room.plans();
            let mut has_failed = false;
            if self.rate > 0 {
                let datasets = self.store.datasets();
                self.progress.streamed.begin_pass(datasets.len());
                for dataset in &datasets {
                    let (scanned, lost_now) = (dataset.clone(), *lost);
                    let Ok((sources, found)) = self.blocking.run(move || streamed_sources(&scanned, &lost_now)).await else {
                        continue;
                    };
                    self.progress.streamed.count(found);
                    for source in sources {
                        self.stream_demanded(lost).await;
                        has_failed |= !self.stream(dataset, source, lost, Some(&mut pace)).await;
                    }
                }
                self.count_missing(&datasets, lost, has_failed).await;
            }
            let again = Instant::now() + pause;
            while self.rate == 0 || self.room.plans() == plan && !(has_failed && Instant::now() > again) {
                self.stream_demanded(lost).await;
                // The bound is for a notification that came while a tar was read.
                let _ = timeout(RECOVERY_LOOK_INTERVAL, streams.wait_for_demand()).await;
            }
            pause = if self.room.plans() == plan { (pause * 2).min(RECOVERY_PAUSE_MAX) } else { RECOVERY_PAUSE_MIN };
        }
    }

    /// Counts what is still missing after a pass; unless it has failed, for lack of room. Readers may have brought some of the blocks that
    /// it had counted.
    async fn count_missing(&self, datasets: &[Arc<Dataset>], lost: &NodeSet, has_failed: bool) {
        let mut missing = Reads::default();
        for dataset in datasets {
            let (scanned, lost) = (dataset.clone(), *lost);
            let Ok((_, found)) = self.blocking.run(move || streamed_sources(&scanned, &lost)).await else { return };
            missing.add(found);
        }
        match has_failed {
            true => self.progress.streamed.end_pass(Reads::default(), missing),
            false => self.progress.streamed.end_pass(missing, Reads::default()),
        }
    }

    /// Reads the tars that readers wait for.
    async fn stream_demanded(&self, lost: &NodeSet) {
        while let Some((dataset, source)) = self.fetcher.streams().next_demand() {
            match self.store.dataset(dataset) {
                Some(dataset) => drop(self.stream(&dataset, source, lost, None).await),
                None => {
                    let gone = StreamEnd::Failed("the dataset is gone".to_owned());
                    self.fetcher.streams().end((dataset, source), gone);
                }
            }
        }
    }

    /// Reads one tar, in the background if it has a pace. Returns whether all blocks that this node is to hold are here now, as far as
    /// there is room for them.
    async fn stream(&self, dataset: &Arc<Dataset>, source: u32, lost: &NodeSet, mut pace: Option<&mut Pace>) -> bool {
        let (streams, key) = (self.fetcher.streams(), (dataset.id(), source));
        streams.begin(key);
        self.room.plan_again_if_freed().await;
        let plan = dataset.cached_blocks().plan();
        let mut waits_for_others = false;
        let outcome = match self.wanted_of(dataset, source, lost, pace.as_deref_mut()).await {
            Ok(ControlFlow::Continue(mut blocks)) => {
                let count = blocks.len();
                blocks.retain(|&block| dataset.is_streamed_here(block, lost));
                waits_for_others = blocks.len() < count;
                self.stream_blocks(dataset, source, blocks, lost, pace).await
            }
            Ok(ControlFlow::Break(kept)) => Ok(kept),
            Err(error) => Err(error.to_string()),
        };
        let is_read = outcome.is_ok();
        let is_taken_by_others = outcome.is_ok() && self.room.is_taken_by_others(dataset).await;
        let has_capacity = match outcome {
            Ok(Kept::Part { shortest }) if dataset.segments().can_cache() => {
                let store = self.store.clone();
                self.blocking.run(move || store.has_capacity(shortest)).await.unwrap_or(false)
            }
            _ => false,
        };
        let end = match outcome {
            Ok(Kept::All) if is_taken_by_others => StreamEnd::NoRoom { is_for_all: true },
            Ok(Kept::Part { .. }) if dataset.cached_blocks().is_paused() => StreamEnd::Paused,
            Ok(Kept::Part { .. }) if has_capacity => StreamEnd::NoRoom { is_for_all: is_taken_by_others },
            Ok(Kept::All | Kept::Part { .. }) => StreamEnd::Done { plan },
            Err(reason) => {
                tracing::warn!(dataset = dataset.id().0, source, reason, "cannot read blocks of a compressed tar again");
                StreamEnd::Failed(reason)
            }
        };
        streams.end(key, end);
        is_read && !waits_for_others
    }

    /// Brings the blocks of a tar that other nodes hold, or have held in place of this one. Returns the others, which one node has to
    /// read from the tar, unless that is of no use: then returns what has become of the blocks.
    async fn wanted_of(
        &self,
        dataset: &Arc<Dataset>,
        source: u32,
        lost: &NodeSet,
        mut pace: Option<&mut Pace>,
    ) -> Result<ControlFlow<Kept, Vec<BlockId>>, JobLost> {
        let (scanned, lost_now) = (dataset.clone(), *lost);
        let mut blocks = self.blocking.run(move || streamed_blocks(&scanned, &lost_now, source)).await?;
        let held = if dataset.is_refilled() || dataset.copies() > 1 { blocks.clone() } else { Vec::new() };
        let len = |block: &BlockId| dataset.catalog().block(*block).map_or(0, |(_, len)| len);
        let total = |blocks: &[BlockId]| Reads { count: blocks.len() as u64, bytes: blocks.iter().map(len).sum() };
        let mut rest = &held[..];
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |block: &&BlockId| {
                bytes += len(block);
                bytes <= if pace.is_some() { self.batch_len_max() } else { RECOVERY_BATCH_LEN_MAX }
            };
            let count = rest.iter().take(RECOVERY_BATCH_BLOCKS_MAX).take_while(fits).count().max(1);
            let (batch, others) = rest.split_at(count);
            wait_while_paused(dataset).await;
            let plan = dataset.cached_blocks().plan();
            // Readers may have brought some of these blocks, and the plan may have changed.
            let is_absent = |block: &BlockId| !dataset.is_local(*block) && dataset.is_selected(*block);
            let mut absent: Vec<BlockId> = batch.iter().copied().filter(is_absent).collect();
            self.make_room_for(dataset, &mut absent).await;
            let outcome = self.fetcher.recover(dataset, &absent).await;
            let recovered = total(&outcome.recovered);
            self.progress.streamed.recovered.add(recovered);
            if dataset.is_gone() {
                return Ok(ControlFlow::Break(Kept::All));
            }
            if let Some(pace) = pace.as_deref_mut() {
                self.pass_in_background((dataset.id(), source), recovered.bytes, lost, pace).await;
            }
            let is_planned_again = dataset.cached_blocks().is_paused() || dataset.cached_blocks().plan() != plan;
            match outcome.is_full {
                false => rest = others,
                // A stage-in has begun or ended meanwhile, so this says nothing about the room.
                true if is_planned_again => {}
                // Large blocks may have no room while small ones, which nobody has, still do.
                true => {
                    let kept = Kept::of(dataset, &absent);
                    if !self.has_room_for_more(&kept).await? {
                        return Ok(ControlFlow::Break(kept));
                    }
                    rest = others;
                }
            }
        }
        // Until then, no plan says which blocks there is room for.
        wait_while_paused(dataset).await;
        blocks.retain(|block| !dataset.is_local(*block) && dataset.is_selected(*block));
        self.make_room_for(dataset, &mut blocks).await;
        let kept = Kept::of(dataset, &blocks);
        match self.has_room_for_more(&kept).await? {
            true => Ok(ControlFlow::Continue(blocks)),
            false => Ok(ControlFlow::Break(kept)),
        }
    }

    /// Returns whether the drives have room for the shortest block that they did not take.
    async fn has_room_for_more(&self, kept: &Kept) -> Result<bool, JobLost> {
        let Kept::Part { shortest } = *kept else { return Ok(true) };
        let store = self.store.clone();
        self.blocking.run(move || store.has_room(shortest)).await
    }

    async fn stream_blocks(
        &self,
        dataset: &Arc<Dataset>,
        source: u32,
        blocks: Vec<BlockId>,
        lost: &NodeSet,
        mut pace: Option<&mut Pace>,
    ) -> Result<Kept, String> {
        if blocks.is_empty() {
            return Ok(Kept::All);
        }
        let key = (dataset.id(), source);
        let limit = self.peers.deadlines().origin;
        let Ok(Ok(permit)) = timeout(limit, self.stream_readers.clone().acquire_owned()).await else {
            let seconds = limit.as_secs();
            return Err(format!("{STREAM_READERS_MAX} earlier reads of sources have not answered for {seconds} s"));
        };
        tracing::info!(dataset = dataset.id().0, source, blocks = blocks.len(), "reading a compressed tar again");
        let (sender, mut parts) = mpsc::channel(STREAM_PARTS_WAITING_MAX);
        let blocking = self.blocking.clone();
        let mut part = Part::default();
        let mut take = move |streamed: Option<Streamed>| {
            let is_last = streamed.is_none();
            match streamed {
                Some(Streamed::Chunk(chunk, bytes)) => {
                    part.len += bytes.len();
                    part.chunks.push((chunk, Arc::new(bytes)));
                }
                Some(Streamed::Progress(bytes)) => part.source_bytes += bytes,
                None => {}
            }
            if !is_last && part.len < RECOVERY_WRITE_LEN && part.source_bytes < RECOVERY_WRITE_LEN as u64 {
                return ControlFlow::Continue(());
            }
            match blocking.wait_for(sender.send(std::mem::take(&mut part))) {
                Ok(()) => ControlFlow::Continue(()),
                // Nobody waits for the rest.
                Err(_) => ControlFlow::Break(()),
            }
        };
        let reader = self.fetcher.stream_reader();
        let (read, blocks) = (dataset.clone(), Arc::new(blocks));
        let wanted = blocks.clone();
        let mut reading = Box::pin(self.blocking.run(move || {
            let result = reader.stream(read.catalog(), source, &blocks, &mut |streamed| take(Some(streamed)));
            // What was read before a failure is good.
            let _ = take(None);
            drop(permit);
            result
        }));
        loop {
            let part = match timeout(limit, parts.recv()).await {
                Ok(Some(part)) => part,
                Ok(None) => break,
                Err(_) => return Err(format!("its source did not answer for {} s", limit.as_secs())),
            };
            wait_while_paused(dataset).await;
            if dataset.is_gone() {
                return Ok(Kept::All);
            }
            if let Some(pace) = pace.as_deref_mut() {
                self.pass_in_background(key, part.source_bytes, lost, pace).await;
            }
            let read = Reads { count: part.chunks.len() as u64, bytes: part.len as u64 };
            self.fetcher.store_streamed(dataset, part.chunks).await;
            self.progress.streamed.recovered.add(read);
        }
        match reading.as_mut().await {
            Ok(Ok(())) => Ok(Kept::of(dataset, &wanted)),
            Ok(Err(error)) => Err(error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Waits until bytes of a tar that is read in the background may pass. If readers wait for this tar, they pass at once; other
    /// tars that readers wait for are read meanwhile.
    async fn pass_in_background(&self, key: SourceKey, source_bytes: u64, lost: &NodeSet, pace: &mut Pace) {
        let streams = self.fetcher.streams();
        while !streams.is_demanded(key) {
            // A tar that readers wait for has no pace, so this does not go deeper.
            Box::pin(self.stream_demanded(lost)).await;
            tokio::select! {
                biased;
                () = streams.wait_for_demand() => {}
                () = pace.pass(source_bytes) => return self.fetcher.let_readers_go_first().await,
            }
        }
    }
}
