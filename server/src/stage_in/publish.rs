//! Publishing on one node: the catalog arrives, its dataset is prepared, becomes visible, and is settled or aborted.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, PoisonError};

use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::wire::control::Counts;
use dayfly_meta::wire::peer::ReadRequest;

use super::{NodeStageIn, NodeStageInError};
use crate::store::{Drive, NewDataset, Reservation};

/// Bytes that a file takes in a catalog and in the table of locations, if its name has the usual length.
const CATALOG_FILE_LEN: u64 = 128;
/// Bytes that a catalog takes in addition: each of its columns begins on a page.
const CATALOG_LEN_MIN: u64 = 64 << 10;
/// The table of locations takes less room than the catalog, so twice the catalog's length suffices for both.
const CATALOG_AND_LOCATIONS: u64 = 2;

/// A finished catalog, as the coordinator announces it.
pub(crate) struct PreparedCatalog {
    pub(crate) dataset: DatasetId,
    /// The dataset's root, below the prefix.
    pub(crate) target: Vec<u8>,
    /// A node that has the catalog.
    pub(crate) from: NodeId,
    /// Length in bytes.
    pub(crate) len: u64,
    /// CRC32C of the whole catalog.
    pub(crate) checksum: u32,
    /// The dataset that the new one replaces.
    pub(crate) replaces: Option<DatasetId>,
    /// What the stage-in has encountered.
    pub(crate) counts: Counts,
}

impl NodeStageIn {
    /// Reserves room for the catalog of `files` files, in addition to what is reserved already. Evicts cached blocks if there is
    /// not enough. If there still is no room, the stage-in fails when the catalog arrives, and the user learns why.
    pub(super) async fn reserve_room_for_catalog(&self, files: u64) {
        let missing = self.reserve_catalog_room(files);
        if missing > 0 && self.context.room.make_room(missing).await.is_ok_and(|made| made) {
            self.reserve_catalog_room(files);
        }
    }

    /// Reserves room for the catalog of `files` files. If there is not enough room, reserves none, and returns how many bytes
    /// are missing.
    fn reserve_catalog_room(&self, files: u64) -> u64 {
        let mut room = self.catalog_room.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(room) = &mut *room else { return 0 };
        let more = (files.saturating_mul(CATALOG_FILE_LEN) + CATALOG_LEN_MIN).saturating_sub(room.bytes());
        if room.grow(more) { 0 } else { more }
    }

    /// Returns the drive for the catalog, and takes over the room that was reserved there.
    fn take_catalog_room(&self) -> (Arc<Drive>, Reservation) {
        let reserved = self.catalog_room.lock().unwrap_or_else(PoisonError::into_inner).take();
        let room = reserved.unwrap_or_else(|| Reservation::empty(&self.catalog_drive));
        (self.catalog_drive.clone(), room)
    }

    /// Takes over the catalog on the node that built it.
    pub(crate) fn set_catalog(&self, catalog: Arc<File>) {
        self.publication().catalog = Some(catalog);
    }

    /// Fetches the catalog unless it is already here, checks it, and prepares the dataset. Does nothing if that has been done.
    pub(crate) async fn prepare(self: &Arc<Self>, announced: PreparedCatalog) -> Result<(), NodeStageInError> {
        let _preparing = self.preparing.lock().await;
        if self.is_prepared() {
            return Ok(());
        }
        let PreparedCatalog { dataset: id, target, from, len, checksum, replaces, counts } = announced;
        let (drive, mut room) = self.take_catalog_room();
        let more = len.saturating_sub(room.bytes());
        if !(room.grow(more) || self.context.room.make_room(more).await? && room.grow(more)) {
            return Err(NodeStageInError::NoCatalogRoom(len));
        }
        room.shrink_to(len);
        self.context.room.make_headroom(len.saturating_mul(CATALOG_AND_LOCATIONS)).await?;
        let catalog = self.publication().catalog.clone();
        let catalog = match catalog {
            Some(catalog) => catalog,
            None => {
                let catalog = self.fetch_catalog(&drive, from, len).await?;
                self.set_catalog(catalog.clone());
                catalog
            }
        };
        let stage_in = self.clone();
        let (me, nodes) = (self.context.node, self.context.peers.count());
        let preparing = self.context.blocking.run(move || {
            let (ingest, segments) = (&stage_in.ingest, stage_in.ingest.segments().clone());
            let stored_bytes = ingest.stored_bytes();
            let request = stage_in.request;
            let new = NewDataset {
                id,
                request,
                counts,
                target,
                catalog: &catalog,
                drive: &drive,
                checksum,
                room,
                segments,
                stored_bytes,
            };
            let dataset = new.prepare(me, nodes, Some(&|arrival| ingest.find(arrival)))?;
            stage_in.context.arena.adopt(&dataset);
            let mut publication = stage_in.publication();
            (publication.prepared, publication.replaces) = (Some(Arc::new(dataset)), replaces);
            Ok(())
        });
        preparing.await?
    }

    async fn fetch_catalog(&self, drive: &Arc<Drive>, from: NodeId, len: u64) -> Result<Arc<File>, NodeStageInError> {
        let blocking = &self.context.blocking;
        let creating = drive.clone();
        let created = blocking.run(move || creating.unnamed_file()).await?;
        let file = Arc::new(created.map_err(NodeStageInError::WriteCatalog)?);
        let mut offset = 0;
        while offset < len {
            let request = ReadRequest::Catalog { stage_in: self.number, offset };
            let room = (len - offset).min(BATCH_LEN_MAX as u64);
            let bytes = self.context.peers.pull_bytes(from, request, room).await.map_err(NodeStageInError::ReadCatalog)?;
            if bytes.is_empty() {
                return Err(NodeStageInError::ShortCatalog { from });
            }
            let (written, drive) = (file.clone(), drive.clone());
            let writing =
                move || written.write_all_at(&bytes, offset).map(|()| bytes.len()).map_err(|error| drive.failure(error));
            offset += blocking.run(writing).await?.map_err(NodeStageInError::WriteCatalog)? as u64;
        }
        Ok(file)
    }

    /// Makes the prepared dataset visible. Does nothing if it is visible already.
    pub(crate) fn commit(&self) -> Result<(), NodeStageInError> {
        let mut publication = self.publication();
        if publication.visible.is_some() {
            return Ok(());
        }
        // The dataset also stays in `prepared`, so that at every moment a peer finds it either there or among the visible
        // datasets.
        let dataset = publication.prepared.clone().ok_or(NodeStageInError::NotPrepared)?;
        if dataset.copies() > 1 && !self.has_copied() {
            dataset.set_lacks_copies();
        }
        publication.visible = Some(dataset.id());
        publication.replaced = self.context.store.show(dataset, publication.replaces);
        Ok(())
    }

    /// Frees the dataset that the new one replaced, because the new one is visible on all nodes.
    pub(super) fn settle(&self) {
        self.stop();
        if let Some(replaced) = self.publication().replaced.take() {
            replaced.set_gone(true);
            replaced.free();
            self.context.arena.forget(replaced.id());
        }
    }

    /// Undoes the stage-in on this node, however far it got.
    pub(super) fn abort(&self) {
        self.stop();
        drop(self.catalog_room.lock().unwrap_or_else(PoisonError::into_inner).take());
        let mut publication = self.publication();
        match (publication.visible.take(), publication.replaced.take()) {
            // The target is never absent in between.
            (visible, Some(replaced)) => drop(self.context.store.show(replaced, visible)),
            (Some(visible), None) => self.context.store.hide(visible),
            (None, None) => {}
        }
        self.context.arena.forget(self.dataset());
        // Peers that already show the dataset may be reading it. Whatever is sent to them from now on must not be used.
        if let Some(prepared) = publication.prepared.take() {
            prepared.set_gone(true);
        }
        self.ingest.segments().free();
    }

    /// Returns whether the dataset is prepared on this node. From then on, the coordinator may make it visible on other nodes.
    pub(super) fn is_prepared(&self) -> bool {
        self.publication().prepared.is_some()
    }

    /// Returns whether the dataset is visible on this node. From then on, only the coordinator may hide the dataset again,
    /// because other nodes may show it too.
    pub(super) fn is_visible(&self) -> bool {
        self.publication().visible.is_some()
    }
}
