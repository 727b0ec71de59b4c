//! How the node reads ahead and what it keeps: told by `tune`, and thought over again whenever datasets come and go.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::wire::peer::Request;
use dayfly_meta::wire::status::{CACHE_ALL_ROOM, Policy};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::Server;
use crate::store::{Dataset, lowered_threshold, threshold_for};

/// How often processes are looked at that have views.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// A stage-in that needs room gets at least this part of the node's at a time: looking through all that is kept for each batch would
/// take longer than writing it.
const ROOM_STEPS: u64 = 64;
/// Doublings of what is given up in a round, after which it is all.
const ROUNDS_MAX: u32 = 16;

impl Server {
    /// Tells all nodes; what holds now, or who could not be told.
    pub(crate) async fn tune_all(self: &Arc<Self>, policy: Policy) -> Result<Policy, String> {
        let timeout = self.deadlines().request + self.deadlines().views;
        let telling = self.peers.nodes().map(|node| self.ask(node, Request::Tune(policy), timeout));
        for told in join_all(telling).await {
            told.map_err(|error| format!("not all nodes do as told: {error}"))?;
        }
        Ok(self.prefetcher.policy())
    }

    /// Takes a policy for this node.
    pub(super) async fn tune(self: &Arc<Self>, policy: Policy) -> Result<(), String> {
        self.prefetcher.set_policy(policy);
        match policy.cache_bytes {
            Some(_) => self.plan_kept().await,
            None => Ok(()),
        }
    }

    /// Makes room for a stage-in out of what is only kept, for `bytes` that found none, and some more; says whether it is worth another
    /// try.
    pub(crate) async fn make_room(self: &Arc<Self>, bytes: u64) -> Result<bool, String> {
        let _alone = self.planning.lock().await;
        let (has_room, missing) =
            self.on_drives(move |server| (server.store.has_room(bytes), server.store.headroom_missing(0))).await?;
        if has_room {
            // Another has made some.
            return Ok(true);
        }
        let wanted = bytes.max(self.store.capacity() / ROOM_STEPS).saturating_add(missing);
        if self.give_up_kept(wanted).await? > 0 {
            return Ok(true);
        }
        // Where nothing makes way, blocks may have all that is left.
        Ok(self.store.release_headroom())
    }

    /// Makes room for what a stage-in writes beside blocks, `bytes` or some more, out of what is only kept, where others have taken
    /// the file system's. Where nothing is kept, the writes themselves meet the full drive.
    pub(crate) async fn make_headroom(self: &Arc<Self>, bytes: u64) -> Result<(), String> {
        let missing = move |server: &Self| server.store.headroom_missing(bytes);
        if self.on_drives(missing).await? == 0 {
            return Ok(());
        }
        let _alone = self.planning.lock().await;
        let missing = self.on_drives(missing).await?;
        self.give_up_kept(missing).await.map(drop)
    }

    /// Gives up `wanted` bytes, about, of what is only kept, or all of it; how much that was.
    async fn give_up_kept(self: &Arc<Self>, wanted: u64) -> Result<u64, String> {
        let (mut freed, mut rounds) = (0, 0);
        while freed < wanted {
            // A page is free when the last block in it goes: where blocks are small, more of them go in each round.
            let more = (wanted - freed).saturating_mul(1 << rounds);
            rounds = (rounds + 1).min(ROUNDS_MAX);
            if !self.on_drives(move |server| server.has_withdrawn() || server.lower_kept(more)).await? {
                break;
            }
            match self.free_withdrawn().await? {
                Some(bytes) => freed += bytes,
                None => break,
            }
        }
        Ok(freed)
    }

    /// Nothing more is kept until [`Self::plan_kept`] says so: a stage-in needs the room.
    pub(super) fn pause_keeping(&self) {
        self.store.datasets().iter().for_each(|dataset| dataset.cached_blocks().set_paused(true));
        // While it can make way, blocks do not take the last of a file system.
        self.store.protect_headroom(self.store.cached_room() > 0);
    }

    fn has_withdrawn(&self) -> bool {
        self.store.datasets().iter().any(|dataset| dataset.has_withdrawn())
    }

    /// Withdraws about so much of what is kept; `false` if nothing is.
    fn lower_kept(&self, bytes: u64) -> bool {
        let room = self.store.cached_room();
        let kept: Vec<Arc<Dataset>> =
            self.store.datasets().into_iter().filter(|dataset| dataset.cached_blocks().threshold() > 0).collect();
        for dataset in &kept {
            dataset.lower_cache_threshold(lowered_threshold(dataset.cached_blocks().threshold(), bytes, room));
        }
        !kept.is_empty()
    }

    /// Gives back the room of all that was withdrawn, once no process looks at it any more; `None` if one does for too long.
    async fn free_withdrawn(self: &Arc<Self>) -> Result<Option<u64>, String> {
        let deadline = Instant::now() + self.deadlines().views;
        while self.processes.have_views(self.store.counters()) {
            if Instant::now() > deadline {
                tracing::warn!("processes still look at blocks that were kept; their room stays taken");
                return Ok(None);
            }
            sleep(LOOK_INTERVAL).await;
        }
        let free =
            |server: &Self| server.store.datasets().iter().map(|dataset| dataset.free_withdrawn()).sum::<io::Result<u64>>();
        let freed = self.on_drives(free).await?;
        freed.map(Some).map_err(|error| format!("cannot give back what is kept: {error}"))
    }

    /// Parts the room that is left, with that of what is kept already, among the datasets, for what they may keep from now on. What
    /// they keep stays, but for what is beyond their part.
    pub(crate) async fn plan_kept(self: &Arc<Self>) -> Result<(), String> {
        let _alone = self.planning.lock().await;
        let limit = self.prefetcher.policy().cache_bytes.unwrap_or(CACHE_ALL_ROOM);
        let planned = self.on_drives(move |server| {
            let datasets = server.store.datasets();
            let wanted = datasets.iter().map(|dataset| dataset.remote_bytes()).sum();
            let threshold = threshold_for(server.store.free().min(limit), wanted);
            datasets.iter().for_each(|dataset| dataset.lower_cache_threshold(threshold));
            (threshold, server.has_withdrawn())
        });
        let (threshold, has_withdrawn) = planned.await?;
        if has_withdrawn {
            // What is still looked at is given back the next time.
            self.free_withdrawn().await?;
        }
        if self.stages.is_any() {
            // They need the room; when the last has ended, this comes again.
            return Ok(());
        }
        self.store.release_headroom();
        let raised = self.on_drives(move |server| {
            server.store.datasets().iter().try_for_each(|dataset| {
                dataset.raise_cache_threshold(threshold)?;
                dataset.cached_blocks().set_paused(false);
                Ok(())
            })
        });
        raised.await?.map_err(|error: io::Error| format!("cannot prepare for what is kept: {error}"))?;
        // One may have begun in the meantime.
        if self.stages.is_any() {
            self.pause_keeping();
        }
        Ok(())
    }
}
