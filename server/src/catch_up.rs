//! Makes a node's datasets the same as the coordinator's. A node that was lost does this before it is a member again, because
//! datasets may have appeared and disappeared meanwhile.
//!
//! The node keeps the blocks that it has: a dataset that still exists stays as it is. Of a dataset that is new to the node it takes
//! the catalog only; the blocks that it owns are read from their origins when they are needed.
//!
//! It also takes over how the others prefetch and cache, because that may have been changed with `tune`.
//!
//! A dataset that was replaced meanwhile stays visible until its successor takes its place, so that a path that exists before and
//! after is never absent. Only a node without room for both catalogs gives up the old one first.

use std::collections::HashSet;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::{BATCH_LEN_MAX, CATALOG_READS_RETRIED};
use dayfly_meta::wire::peer::{CoordinatorReply, CoordinatorRequest, ListedDataset, ReadRequest, Rejection, RejectionKind};
use dayfly_meta::wire::status::Policy;
use tokio::time::{Instant, sleep};

use crate::arena::Arena;
use crate::blocking::{Blocking, JobLost};
use crate::peers::{PeerError, Peers};
use crate::room::{Room, RoomError};
use crate::stage_in::{NodeStageInError, NodeStageIns};
use crate::store::{Dataset, Drive, NewDataset, PrepareError, Reservation, Segments, Store};

/// Why a node cannot catch up with the session.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct CatchUpError(#[from] Cause);

#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error("cannot ask for the session's datasets: {0}")]
    Ask(#[from] PeerError),
    #[error("node {0} has less of a catalog than it announced")]
    ShortCatalog(NodeId),
    #[error("no other node has the catalog of '{0}' anymore")]
    NoHolder(String),
    #[error("'{0}' has been replaced on this node in the meantime")]
    Replaced(String),
    #[error(
        "there is no room for the catalog of '{dataset}' ({len} bytes) in the data dir '{}', where this server may take {free} more \
         bytes; make room there",
        data_dir.display()
    )]
    NoRoom { dataset: String, len: u64, data_dir: PathBuf, free: u64 },
    #[error("cannot write a catalog: {0}")]
    Write(#[from] std::io::Error),
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Room(#[from] RoomError),
    #[error(transparent)]
    StageIn(#[from] NodeStageInError),
    #[error(transparent)]
    JobLost(#[from] JobLost),
}

impl Cause {
    /// Returns whether the cause may be that a drive has no room.
    fn is_for_room(&self) -> bool {
        matches!(self, Self::NoRoom { .. } | Self::Write(_) | Self::Prepare(PrepareError::Write(_)))
    }
}

impl From<CatchUpError> for Rejection {
    fn from(error: CatchUpError) -> Self {
        Self::new(RejectionKind::Failed, error)
    }
}

/// The parts of a node that it catches up with.
pub(crate) struct CatchUp {
    pub(crate) peers: Arc<Peers>,
    pub(crate) store: Arc<Store>,
    pub(crate) stage_ins: Arc<NodeStageIns>,
    pub(crate) arena: Arena,
    pub(crate) room: Arc<Room>,
    pub(crate) blocking: Arc<dyn Blocking>,
    /// Locked while the node catches up, because two tasks may want to at once.
    pub(crate) brought: tokio::sync::Mutex<Brought>,
}

/// With what this node returned.
#[derive(Default)]
pub(crate) struct Brought {
    /// The datasets, until the node has looked again which of them still exist.
    datasets: HashSet<DatasetId>,
    /// How the other nodes prefetched and cached.
    policy: Policy,
}

impl CatchUp {
    /// Makes the datasets of this node, which is not a member, the same as the coordinator's.
    pub(crate) async fn catch_up(&self) -> Result<(), CatchUpError> {
        let mut brought = self.brought.lock().await;
        Ok(self.catch_up_locked(&mut brought).await?)
    }

    /// Looks for what has changed since this node caught up, now that it is a member again.
    pub(crate) async fn look_again(&self) -> Result<(), CatchUpError> {
        let mut brought = self.brought.lock().await;
        Ok(self.look_again_locked(&mut brought).await?)
    }

    async fn catch_up_locked(&self, brought: &mut Brought) -> Result<(), Cause> {
        let (coordinator, listed, policy) = self.list().await?;
        if coordinator == self.peers.own_node() {
            return Ok(());
        }
        let wanted: HashSet<DatasetId> = listed.iter().map(|listed| listed.dataset).collect();
        // What this node took part in has ended meanwhile, one way or the other.
        self.stage_ins.end_all(&wanted).await?;
        self.follow(coordinator, listed, |dataset| wanted.contains(&dataset)).await?;
        self.room.set_policy(policy).await?;
        *brought = Brought { datasets: wanted, policy };
        Ok(())
    }

    async fn look_again_locked(&self, brought: &mut Brought) -> Result<(), Cause> {
        let (coordinator, listed, policy) = self.list().await?;
        if coordinator == self.peers.own_node() {
            return Ok(());
        }
        // Otherwise it has changed since this node is a member, and this node knows that.
        if self.room.policy() == brought.policy && policy != brought.policy {
            self.room.set_policy(policy).await?;
        }
        let wanted: HashSet<DatasetId> = listed.iter().map(|listed| listed.dataset).collect();
        // Stage-ins in which this node takes part began after its return. The coordinator does not list their datasets before all
        // nodes show them.
        self.follow(coordinator, listed, |dataset| wanted.contains(&dataset) || !brought.datasets.contains(&dataset)).await?;
        brought.datasets.clear();
        Ok(())
    }

    /// Adds the listed datasets that this node does not have, and drops its own that do not exist.
    async fn follow(
        &self,
        coordinator: NodeId,
        listed: Vec<ListedDataset>,
        exists: impl Fn(DatasetId) -> bool + Copy,
    ) -> Result<(), Cause> {
        let targets: HashSet<Vec<u8>> = listed.iter().map(|listed| listed.target.clone()).collect();
        self.drop_all(|own| !exists(own.id()) && !targets.contains(own.target())).await?;
        let is_gone = |own: &Dataset| !exists(own.id());
        for listed in listed {
            if self.store.dataset(listed.dataset).is_some() {
                continue;
            }
            tracing::info!(dataset = listed.dataset.0, "this dataset has appeared while this node was lost");
            match self.add(coordinator, listed.clone(), exists).await {
                Err(error) if error.is_for_room() && self.store.datasets().iter().any(|own| is_gone(own)) => {
                    tracing::warn!(%error, "datasets that were replaced make room first");
                    self.drop_all(is_gone).await?;
                    self.add(coordinator, listed, exists).await?;
                }
                added => added?,
            }
        }
        self.drop_all(is_gone).await?;
        Ok(self.room.plan_cache().await?)
    }

    async fn drop_all(&self, is_gone: impl Fn(&Dataset) -> bool) -> Result<(), Cause> {
        let gone: Vec<Arc<Dataset>> = self.store.datasets().into_iter().filter(|dataset| is_gone(dataset)).collect();
        for dataset in gone {
            tracing::info!(dataset = dataset.id().0, "this dataset has disappeared while this node was lost");
            self.drop_dataset(dataset).await?;
        }
        Ok(())
    }

    /// Takes the datasets that other nodes show and this node, the new coordinator, does not: they appeared before it was a member
    /// again, and its predecessor could not tell it of them anymore.
    pub(crate) async fn take(&self, shown: Vec<ListedDataset>) -> Result<(), CatchUpError> {
        let _brought = self.brought.lock().await;
        Ok(self.take_locked(shown).await?)
    }

    /// The newest dataset comes first, because it has replaced older ones at the same target. A node that has not heard of it still
    /// shows these.
    async fn take_locked(&self, mut shown: Vec<ListedDataset>) -> Result<(), Cause> {
        shown.sort_by_key(|listed| std::cmp::Reverse(listed.dataset));
        let mut are_any_taken = false;
        for listed in shown {
            if self.store.dataset_at(&listed.target).is_some_and(|own| own.id() >= listed.dataset) {
                continue;
            }
            tracing::info!(dataset = listed.dataset.0, "this dataset has appeared while this node was lost");
            let roster = self.peers.roster();
            let mut taken = Err(Cause::NoHolder(dayfly_meta::path::display(&listed.target)));
            for node in roster.live().filter(|node| *node != self.peers.own_node()) {
                taken = self.add(node, listed.clone(), |_| true).await;
                if taken.is_ok() {
                    break;
                }
            }
            taken?;
            are_any_taken = true;
        }
        if are_any_taken {
            self.room.plan_cache().await?;
        }
        Ok(())
    }

    /// Asks the coordinator for its datasets, and how nodes prefetch and cache. A new coordinator is not ready at once. If this node has
    /// only heard of a new one by its requests, the old one must not answer, for it does not know what the new one has published.
    async fn list(&self) -> Result<(NodeId, Vec<ListedDataset>, Policy), Cause> {
        let (start, deadlines) = (Instant::now(), *self.peers.deadlines());
        loop {
            let roster = self.peers.roster();
            let coordinator = roster.coordinator();
            let request = CoordinatorRequest::Datasets { epoch: self.stage_ins.newest_epoch() };
            match self.peers.ask(coordinator, request, deadlines.request).await {
                Ok(CoordinatorReply::Datasets { datasets, policy }) => return Ok((coordinator, datasets, policy)),
                Ok(_) => return Err(PeerError::InvalidAnswer(coordinator).into()),
                Err(error) if start.elapsed() > deadlines.lost_after => return Err(error.into()),
                Err(_) => sleep(deadlines.progress_interval).await,
            }
        }
    }

    async fn drop_dataset(&self, dataset: Arc<Dataset>) -> Result<(), Cause> {
        self.store.hide(dataset.id());
        self.arena.forget(dataset.id());
        self.free(dataset).await
    }

    /// Frees the room of a dataset that is not visible.
    async fn free(&self, dataset: Arc<Dataset>) -> Result<(), Cause> {
        // Peers may still be reading a dataset that another has replaced here.
        dataset.set_gone(true);
        Ok(self.blocking.run(move || dataset.free()).await?)
    }

    /// Takes the catalog of a dataset, and shows the dataset in place of the one at its target.
    ///
    /// While the catalog arrives, a stage-in in which this node takes part may replace the dataset. Then nothing changes, and the
    /// caller should look again: perhaps the stage-in fails, and the dataset of the list is there again.
    async fn add(&self, from: NodeId, listed: ListedDataset, exists: impl Fn(DatasetId) -> bool) -> Result<(), Cause> {
        let (id, name) = (listed.dataset, dayfly_meta::path::display(&listed.target));
        let must_stay = |own: &Dataset| own.id() >= id && exists(own.id());
        if self.store.dataset_at(&listed.target).is_some_and(|own| must_stay(&own)) {
            return Err(Cause::Replaced(name));
        }
        let store = self.store.clone();
        let drive = self.blocking.run(move || store.roomiest_drive()).await?;
        let mut room = Reservation::empty(&drive);
        if !(room.grow(listed.len) || self.room.make_room(listed.len).await? && room.grow(listed.len)) {
            let data_dir = drive.path().to_owned();
            return Err(Cause::NoRoom { dataset: name, len: listed.len, data_dir, free: drive.free() });
        }
        let file = self.fetch_catalog(&drive, from, &listed).await?;
        let (me, nodes, drives) = (self.peers.own_node(), self.peers.count(), self.store.drives().to_vec());
        let preparing = self.blocking.run(move || -> Result<Dataset, Cause> {
            let segments = Arc::new(Segments::create(&drives, listed.dataset)?);
            let ListedDataset { dataset: id, request, counts, target, checksum, .. } = listed;
            let new = NewDataset {
                id,
                request,
                counts,
                target,
                catalog: &file,
                drive: &drive,
                checksum,
                room,
                segments,
                stored_bytes: 0,
            };
            Ok(new.prepare(me, nodes, None)?)
        });
        match self.store.show_over(Arc::new(preparing.await??), must_stay) {
            Ok(Some(replaced)) => self.drop_dataset(replaced).await,
            Ok(None) => Ok(()),
            Err(dataset) => {
                self.free(dataset).await?;
                Err(Cause::Replaced(name))
            }
        }
    }

    async fn fetch_catalog(&self, drive: &Arc<Drive>, from: NodeId, listed: &ListedDataset) -> Result<std::fs::File, Cause> {
        let creating = drive.clone();
        let mut file = self.blocking.run(move || creating.unnamed_file()).await??;
        let (mut offset, mut failures) = (0, 0);
        while offset < listed.len {
            let request = ReadRequest::DatasetCatalog { dataset: listed.dataset, offset };
            let bytes = match self.peers.pull_bytes(from, request, (listed.len - offset).min(BATCH_LEN_MAX as u64)).await {
                Err(PeerError::Transport(_)) if failures < CATALOG_READS_RETRIED => {
                    failures += 1;
                    continue;
                }
                read => read?,
            };
            if bytes.is_empty() {
                return Err(Cause::ShortCatalog(from));
            }
            let len = bytes.len() as u64;
            let writing = self.blocking.run(move || {
                let written = file.write_all_at(&bytes, offset);
                (file, written)
            });
            let (returned, written) = writing.await?;
            file = returned;
            written.map_err(|error| drive.failure(error))?;
            offset += len;
        }
        Ok(file)
    }
}
