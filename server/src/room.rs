//! Manages the room on this node's drives: stage-ins get what they need, and cached blocks may use the rest.
//!
//! Cached blocks are copies of other nodes' blocks, and blocks that this node owns but found no room for when they were staged in.
//! Except for what is kept, they give way to stage-ins: a stage-in that finds no room calls
//! [`Room::make_room`] (for blocks) or [`Room::make_headroom`] (for what it writes in addition to blocks). Both evict cached
//! blocks. Whenever datasets, policies or the members of the session change, [`Room::plan_cache`] divides the free room among the datasets again.
//!
//! Invariants: one plan or eviction runs at a time. While a stage-in runs, nothing more is cached. The room of cached blocks is
//! freed only while no process reads blocks in place.
//!
//! This module decides how much is cached. It does not write, read or place a single block: that is up to `store` and
//! `cache_writer`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, DatasetId, NodeId};
use dayfly_meta::limits::SHARED_COPY_LOOK_INTERVAL;
use dayfly_meta::wire::peer::{Rejection, RejectionKind};
use dayfly_meta::wire::status::{CACHE_ALL_ROOM, Policy};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use crate::blocking::{Blocking, JobLost};
use crate::peers::Peers;
use crate::prefetch::Prefetcher;
use crate::processes::Processes;
use crate::store::{CacheShares, Dataset, Store, lowered_threshold, room_for};

/// How often to check whether processes still have views.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// A stage-in that needs room gets at least the node's capacity divided by this, because searching all cached blocks for each
/// batch would take longer than writing the batch.
const ROOM_STEPS: u64 = 64;
/// The amount to evict doubles in each round of one call, at most this many times. By then, it exceeds all cached blocks.
const ROUNDS_MAX: u32 = 16;

/// Why room could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RoomError {
    /// A drive did not free the blocks that were evicted.
    #[error("cannot free cached blocks: {0}")]
    Free(#[source] io::Error),
    /// A segment could not be prepared for cached blocks.
    #[error("cannot prepare for caching blocks: {0}")]
    Prepare(#[source] io::Error),
    #[error(transparent)]
    JobLost(#[from] JobLost),
}

impl From<RoomError> for Rejection {
    fn from(error: RoomError) -> Self {
        let kind = match &error {
            RoomError::Free(_) | RoomError::Prepare(_) => RejectionKind::DriveFailed,
            RoomError::JobLost(_) => RejectionKind::Failed,
        };
        Self::new(kind, error)
    }
}

/// The room of one node.
pub(crate) struct Room {
    store: Arc<Store>,
    peers: Arc<Peers>,
    processes: Arc<Processes>,
    prefetcher: Arc<Prefetcher>,
    blocking: Arc<dyn Blocking>,
    deadlines: Deadlines,
    /// The number of plans that have been carried out as a whole.
    plans: AtomicU64,
    /// Held while a plan or an eviction runs.
    planning: Mutex<()>,
    stage_ins: AtomicUsize,
    /// The stage-ins among them whose blocks do not use the headroom.
    partial_stage_ins: AtomicUsize,
}

/// A stage-in that needs room. While any guard exists, nothing more is cached.
pub(crate) struct StageInGuard {
    room: Arc<Room>,
    is_partial: bool,
}

impl Drop for StageInGuard {
    fn drop(&mut self) {
        self.room.partial_stage_ins.fetch_sub(usize::from(self.is_partial), Ordering::AcqRel);
        self.room.stage_ins.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Room {
    pub(crate) fn new(
        store: Arc<Store>,
        peers: Arc<Peers>,
        processes: Arc<Processes>,
        prefetcher: Arc<Prefetcher>,
        blocking: Arc<dyn Blocking>,
        deadlines: Deadlines,
    ) -> Self {
        let (stage_ins, partial_stage_ins) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self {
            store,
            peers,
            processes,
            prefetcher,
            blocking,
            deadlines,
            plans: AtomicU64::new(0),
            planning: Mutex::default(),
            stage_ins,
            partial_stage_ins,
        }
    }

    /// Counts a stage-in. Drop the guard when the stage-in has ended, then call [`Self::plan_cache`]. A partial stage-in takes all
    /// room that it finds, so its blocks must leave the headroom to its catalog and its runs.
    pub(crate) fn stage_in(self: &Arc<Self>, is_partial: bool) -> StageInGuard {
        self.stage_ins.fetch_add(1, Ordering::AcqRel);
        self.partial_stage_ins.fetch_add(usize::from(is_partial), Ordering::AcqRel);
        StageInGuard { room: self.clone(), is_partial }
    }

    fn has_partial_stage_in(&self) -> bool {
        self.partial_stage_ins.load(Ordering::Acquire) > 0
    }

    /// Returns how this node prefetches and caches.
    pub(crate) fn policy(&self) -> Policy {
        self.prefetcher.policy()
    }

    /// Applies a policy to this node.
    pub(crate) async fn set_policy(self: &Arc<Self>, policy: Policy) -> Result<(), RoomError> {
        self.prefetcher.set_policy(policy);
        match policy.cache_bytes {
            Some(_) => self.plan_cache().await,
            None => Ok(()),
        }
    }

    /// Evicts cached blocks, because a stage-in found no room for `bytes`. It evicts more than `bytes`, so that the next
    /// batches find room too. Returns whether another attempt may succeed.
    pub(crate) async fn make_room(self: &Arc<Self>, bytes: u64) -> Result<bool, RoomError> {
        let _alone = self.planning.lock().await;
        let (has_room, missing) =
            self.on_drives(move |room| (room.store.has_room(bytes), room.store.headroom_missing(0))).await?;
        if has_room {
            // Another caller has already made room.
            return Ok(true);
        }
        let wanted = bytes.max(self.store.capacity() / ROOM_STEPS).saturating_add(missing);
        if self.evict(wanted).await? > 0 {
            return Ok(true);
        }
        // With no cached blocks to evict, the stage-in's blocks may use the headroom too.
        Ok(!self.has_partial_stage_in() && self.store.release_headroom())
    }

    /// Evicts cached blocks until a drive has room for a copy of `bytes`. Returns `false` if there is none even without them; then it
    /// evicts few or none. What this node has recovered counts as needed: it may be nowhere else. Call [`Self::plan_cache`] when the
    /// copy is gone.
    pub(crate) async fn make_room_for_copy(self: &Arc<Self>, bytes: u64) -> Result<bool, RoomError> {
        loop {
            let _alone = self.planning.lock().await;
            if self.on_drives(move |room| room.store.has_room(bytes)).await? {
                return Ok(true);
            }
            let could_have_room = move |room: &Self| {
                let evictable = room.store.evictable_room().saturating_sub(room.recovered_bytes());
                room.store.roomiest_drive().free().saturating_add(evictable) >= bytes
            };
            let freed = match self.on_drives(could_have_room).await? {
                true => self.evict(bytes).await?,
                false => self.on_drives(|room| room.store.drop_shared_copies()).await?,
            };
            if freed == 0 {
                return Ok(false);
            }
        }
    }

    /// Evicts cached blocks that this node does not hold, until the drives have room for blocks that it is to hold, or until there are no
    /// others. For blocks that a new server owns, those make way, too, that it holds in place of lost nodes; then the plan selects fewer
    /// of them. The plan only estimates how many bytes it selects, so others may have taken the room.
    pub(crate) async fn make_room_for_held(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        blocks: &[BlockId],
    ) -> Result<(), RoomError> {
        let _alone = self.planning.lock().await;
        if self.processes.have_views(self.store.counters()) && self.on_drives(Self::has_withdrawn).await? {
            // An earlier call has waited for these processes in vain.
            return Ok(());
        }
        let has_own = blocks.iter().any(|&block| dataset.is_own_again(block));
        let blocks: Arc<[BlockId]> = blocks.into();
        let mut wanted = 0;
        loop {
            let (dataset, blocks) = (dataset.clone(), blocks.clone());
            let needed = move |room: &Self| {
                let is_wanted = |block: &&BlockId| dataset.is_selected(**block) && !dataset.is_local(**block);
                let lens = blocks.iter().filter(is_wanted).filter_map(|&block| Some(room_for(dataset.catalog().block(block)?.1)));
                let (bytes, longest) = lens.fold((0, 0), |(sum, longest), room| (sum + room, room.max(longest)));
                (!room.store.has_room_for_all(bytes) || !room.store.has_room(longest)).then_some(bytes)
            };
            let Some(bytes) = self.on_drives(needed).await? else { return Ok(()) };
            wanted = bytes.max(wanted);
            if !self.on_drives(move |room| room.withdraw_others(wanted, has_own)).await? {
                return Ok(());
            }
            if self.free_withdrawn().await?.is_none() {
                return Ok(());
            }
            // What is written now lies behind what was there before, so the segments must be longer.
            let extend = |room: &Self| room.store.datasets().iter().try_for_each(|dataset| dataset.extend_cached_region());
            self.on_drives(extend).await?.map_err(RoomError::Prepare)?;
            wanted = wanted.saturating_mul(2);
        }
    }

    /// Evicts cached blocks, so that a stage-in has at least `bytes` for what it writes in addition to blocks, even if other
    /// programs have filled the file system. If nothing is cached, the writes themselves fail on the full drive.
    pub(crate) async fn make_headroom(self: &Arc<Self>, bytes: u64) -> Result<(), RoomError> {
        let missing = move |room: &Self| {
            room.store.look_for_room();
            room.store.headroom_missing(bytes)
        };
        if self.on_drives(missing).await? == 0 {
            return Ok(());
        }
        let _alone = self.planning.lock().await;
        let missing = self.on_drives(missing).await?;
        self.evict(missing).await.map(drop)
    }

    /// Stops caching, because a stage-in needs the room. Caching resumes when [`Self::plan_cache`] finds no stage-in.
    pub(crate) fn pause_caching(&self) {
        self.store.datasets().iter().for_each(|dataset| dataset.cached_blocks().pause());
        // As long as cached blocks can be evicted, the stage-in's blocks do not use the headroom.
        self.store.protect_headroom(self.has_partial_stage_in() || self.store.evictable_room() > 0);
    }

    /// Divides the room that is free, or taken by cached blocks, among the datasets. Cached blocks stay unless they exceed
    /// the new share of their dataset.
    pub(crate) async fn plan_cache(self: &Arc<Self>) -> Result<(), RoomError> {
        let _alone = self.planning.lock().await;
        let lost = self.peers.roster().lost();
        let planned = self.on_drives(move |room| {
            room.store.look_for_room();
            let datasets = room.store.datasets();
            datasets.iter().for_each(|dataset| dataset.set_lost(&lost));
            let shares = room.shares(room.store.free());
            datasets.iter().for_each(|dataset| dataset.lower_cache_threshold(dataset.cache_threshold(shares)));
            (shares, room.has_withdrawn())
        });
        let (shares, has_withdrawn) = planned.await?;
        if has_withdrawn {
            // If processes still have views of withdrawn blocks, the next plan frees these blocks.
            self.free_withdrawn().await?;
        }
        if self.has_stage_in() {
            // Stage-ins need the room. When the last of them ends, it calls this function again.
            return Ok(());
        }
        self.store.release_headroom();
        let raised = self.on_drives(move |room| {
            room.store.datasets().iter().try_for_each(|dataset| {
                dataset.raise_cache_threshold(dataset.cache_threshold(shares))?;
                dataset.cached_blocks().resume();
                Ok(())
            })
        });
        raised.await?.map_err(RoomError::Prepare)?;
        // A stage-in may have begun in the meantime.
        if self.has_stage_in() {
            self.pause_caching();
        } else {
            self.plans.fetch_add(1, Ordering::Release);
            self.prefetcher.fetcher().cache_resident(self.store.datasets());
        }
        Ok(())
    }

    /// Returns whether all copies of a dataset that are to be on this node are here.
    pub(crate) async fn has_copies(self: &Arc<Self>, dataset: DatasetId) -> Result<bool, JobLost> {
        let Some(dataset) = self.store.dataset(dataset) else { return Ok(false) };
        self.on_drives(move |_| dataset.has_come_back()).await
    }

    /// Takes note that a node that has returned has its copies again, so that this node need not keep those that it has held in its
    /// place.
    pub(crate) async fn note_copies_back(self: &Arc<Self>, dataset: &Arc<Dataset>, node: NodeId) -> Result<(), RoomError> {
        let alone = self.planning.lock().await;
        let dataset = dataset.clone();
        self.on_drives(move |_| dataset.set_refilled(node)).await?;
        drop(alone);
        self.plan_cache().await
    }

    /// Returns the bytes of the blocks that come to this node because of losses, without those that it keeps in any case.
    fn recovered_bytes(&self) -> u64 {
        let lost: u64 = self.store.datasets().iter().map(|dataset| dataset.lost_bytes()).sum();
        lost.saturating_sub(self.store.kept_bytes())
    }

    /// Returns the shares of the blocks that can be cached in `free` bytes.
    fn shares(&self, free: u64) -> CacheShares {
        let limit = self.prefetcher.policy().cache_bytes.unwrap_or(CACHE_ALL_ROOM);
        let datasets = self.store.datasets();
        let sum = |bytes: fn(&Dataset) -> u64| datasets.iter().map(|dataset| bytes(dataset)).sum::<u64>();
        // `free` leaves room for what is kept.
        let kept = self.store.kept_bytes();
        let (unstored, remote) = (sum(Dataset::unstored_bytes), sum(Dataset::remote_bytes));
        CacheShares::that_fit(free, limit, self.recovered_bytes(), unstored.saturating_sub(kept), remote.saturating_sub(unstored))
    }

    /// Divides the room again if other programs had filled the drives, and have freed some of that.
    pub(crate) async fn plan_again_if_freed(self: &Arc<Self>) {
        let has_grown = |room: &Self| {
            room.store.look_for_room();
            let shares = room.shares(room.store.free());
            room.store.datasets().iter().any(|dataset| dataset.can_cache_more(shares))
        };
        let is_freed = !self.has_stage_in() && self.on_drives(has_grown).await.unwrap_or(false);
        if is_freed && let Err(error) = self.plan_cache().await {
            tracing::warn!(%error, "cannot plan again which blocks this node caches");
        }
    }

    /// Drops shared copies that nobody uses anymore, so that blocks can be cached in their room. Runs until it is dropped.
    pub(crate) async fn drop_idle_copies(self: Arc<Self>) {
        loop {
            sleep(SHARED_COPY_LOOK_INTERVAL).await;
            let is_freed = self.on_drives(|room| room.store.drop_idle_copies()).await.unwrap_or(false);
            if is_freed && let Err(error) = self.plan_cache().await {
                tracing::warn!(%error, "cannot plan again which blocks this node caches after copies have been dropped");
            }
        }
    }

    /// Returns whether more blocks of a dataset could be cached if other programs had left our capacity on the drives free.
    pub(crate) async fn is_taken_by_others(self: &Arc<Self>, dataset: &Arc<Dataset>) -> bool {
        let dataset = dataset.clone();
        self.on_drives(move |room| dataset.can_cache_more(room.shares(room.store.free_capacity()))).await.unwrap_or(false)
    }

    /// Returns a number that changes whenever room has been divided again and caching goes on.
    pub(crate) fn plans(&self) -> u64 {
        self.plans.load(Ordering::Acquire)
    }

    fn has_stage_in(&self) -> bool {
        self.stage_ins.load(Ordering::Acquire) > 0
    }

    /// Drops the copies that processes have shared, and evicts about `wanted` bytes of cached blocks, or all of them. Returns the bytes freed.
    async fn evict(self: &Arc<Self>, wanted: u64) -> Result<u64, RoomError> {
        let mut freed = self.on_drives(|room| room.store.drop_shared_copies()).await?;
        let mut rounds = 0;
        while freed < wanted {
            // A page on a drive becomes free when the last block in it is evicted. Where blocks are
            // small, the first rounds free little, so each round evicts more.
            let more = (wanted - freed).saturating_mul(1 << rounds);
            rounds = (rounds + 1).min(ROUNDS_MAX);
            if !self.on_drives(move |room| room.has_withdrawn() || room.withdraw(more)).await? {
                break;
            }
            match self.free_withdrawn().await? {
                Some(bytes) => freed += bytes,
                None => break,
            }
        }
        Ok(freed)
    }

    fn has_withdrawn(&self) -> bool {
        self.store.datasets().iter().any(|dataset| dataset.has_withdrawn())
    }

    /// Withdraws about `bytes` of cached blocks, so that no process starts to read them. Returns `false` if none are cached.
    fn withdraw(&self, bytes: u64) -> bool {
        let evictable = self.store.evictable_room();
        let cached: Vec<Arc<Dataset>> = self.store.datasets().into_iter().filter(|dataset| dataset.can_cache_less()).collect();
        for dataset in &cached {
            dataset.lower_cache_threshold(lowered_threshold(dataset.cached_blocks().threshold(), bytes, evictable));
        }
        !cached.is_empty()
    }

    /// Withdraws about `bytes` of cached blocks that this node does not hold. If there are none and `for_own` is set, withdraws those that
    /// it holds in place of lost nodes. Returns `false` if none are cached.
    fn withdraw_others(&self, bytes: u64, for_own: bool) -> bool {
        let evictable = self.store.evictable_room();
        let lower = |lowest: fn(&Dataset) -> u64| {
            let mut is_any = false;
            for dataset in self.store.datasets() {
                let (threshold, lowest) = (dataset.cached_blocks().threshold(), lowest(&dataset));
                if threshold > lowest {
                    dataset.lower_cache_threshold(lowered_threshold(threshold, bytes, evictable).max(lowest));
                    is_any = true;
                }
            }
            is_any
        };
        lower(Dataset::threshold_of_held) || for_own && lower(Dataset::threshold_of_own)
    }

    /// Frees all withdrawn blocks once no process has views of them. Returns the bytes freed, or `None` if a process keeps
    /// its views for too long.
    async fn free_withdrawn(self: &Arc<Self>) -> Result<Option<u64>, RoomError> {
        let deadline = Instant::now() + self.deadlines.views;
        while self.processes.have_views(self.store.counters()) {
            if Instant::now() > deadline {
                tracing::warn!("processes still read withdrawn cached blocks in place; their room stays taken for now");
                return Ok(None);
            }
            sleep(LOOK_INTERVAL).await;
        }
        let free = |room: &Self| room.store.datasets().iter().map(|dataset| dataset.free_withdrawn()).sum::<io::Result<u64>>();
        self.on_drives(free).await?.map(Some).map_err(RoomError::Free)
    }

    /// Runs work that waits for drives, away from the runtime threads.
    async fn on_drives<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, JobLost> {
        let room = self.clone();
        self.blocking.run(move || work(&room)).await
    }
}
