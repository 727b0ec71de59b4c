//! How the node reads ahead and what it keeps: told by `tune`, and thought over again whenever datasets come and go.

use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::wire::peer::Request;
use dayfly_meta::wire::status::{CACHE_ALL_ROOM, Policy};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::Server;

/// How often processes are looked at that have views.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

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

    /// Gives up all that is kept of other nodes' blocks, so that its room is free.
    pub(crate) async fn give_up_kept(self: &Arc<Self>) -> Result<(), String> {
        let _alone = self.planning.lock().await;
        self.give_up_kept_alone().await
    }

    /// As [`Self::give_up_kept`], by who is the only one: what one withdraws, another must not plan anew before its room is free.
    async fn give_up_kept_alone(self: &Arc<Self>) -> Result<(), String> {
        let is_kept = |server: &Self| server.store.datasets().iter().any(|dataset| dataset.has_kept());
        if !is_kept(self) {
            return Ok(());
        }
        self.on_drives(|server| server.store.datasets().iter().for_each(|dataset| dataset.withdraw_kept())).await?;
        let deadline = Instant::now() + self.deadlines().views;
        while self.processes.have_views(self.store.counters()) {
            if Instant::now() > deadline {
                tracing::warn!("processes still look at blocks that were kept; their room stays taken");
                return Ok(());
            }
            sleep(LOOK_INTERVAL).await;
        }
        let freed = self.on_drives(|server| server.store.datasets().iter().try_for_each(|dataset| dataset.free_kept())).await?;
        freed.map_err(|error| format!("cannot give back what is kept: {error}"))
    }

    /// Parts the room that is left among the datasets, for what they may keep from now on. What is kept is chosen anew.
    pub(crate) async fn plan_kept(self: &Arc<Self>) -> Result<(), String> {
        let _alone = self.planning.lock().await;
        self.give_up_kept_alone().await?;
        if self.stages.is_any() {
            // They need the room; when the last has ended, this comes again.
            return Ok(());
        }
        let limit = self.prefetcher.policy().cache_bytes.unwrap_or(CACHE_ALL_ROOM);
        let planned = self.on_drives(move |server| {
            let room = server.store.capacity().saturating_sub(server.store.used()).min(limit);
            let datasets = server.store.datasets();
            let wanted = datasets.iter().map(|dataset| dataset.others_bytes()).sum();
            datasets.iter().try_for_each(|dataset| dataset.plan_kept(room, wanted))
        });
        planned.await?.map_err(|error| format!("cannot prepare for what is kept: {error}"))?;
        // One may have begun in the meantime.
        if self.stages.is_any() { self.give_up_kept_alone().await } else { Ok(()) }
    }
}
