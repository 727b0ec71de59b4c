//! Reads: chunks of datasets, and bytes of runs and catalogs.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dayfly_meta::checksum::checksum;
use dayfly_meta::id::DatasetId;
use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::wire::peer::{Answered, ReadReply, ReadRequest, Rejection, RejectionKind};
use dayfly_transport::Piece;

use crate::blocking::Blocking;
use crate::fetch::{Fetcher, Served};
use crate::stage_in::NodeStageIns;
use crate::store::{Dataset, Store};

/// Answers the reads of peers.
pub(crate) struct Reads {
    pub(crate) store: Arc<Store>,
    pub(crate) stage_ins: Arc<NodeStageIns>,
    pub(crate) fetcher: Arc<Fetcher>,
    pub(crate) blocking: Arc<dyn Blocking>,
}

impl Reads {
    /// Answers a read. `room` has the length of each of the asker's slots.
    pub(super) async fn answer(&self, request: ReadRequest, room: &[u64]) -> Answered<(ReadReply, Vec<Piece>)> {
        let first_room = room.first().copied().unwrap_or(0);
        match request {
            ReadRequest::Chunks { dataset, chunks, recheck, takes_over } => {
                let dataset = self.readable_dataset(dataset).ok_or_else(no_such_dataset)?;
                if chunks.len() != room.len() {
                    let reason = format!("{} chunks are wanted in {} slots", chunks.len(), room.len());
                    return Err(Rejection::new(RejectionKind::Invalid, reason));
                }
                let Served { missing, reasons, pieces } = self.fetcher.serve(&dataset, &chunks, recheck, takes_over).await;
                Ok((ReadReply::Chunks { missing, reasons }, pieces))
            }
            ReadRequest::Run { stage_in, run, offset } => {
                let stage_in = self.stage_ins.get(stage_in)?;
                self.read_bytes(move || stage_in.read_run(run, offset, first_room)).await
            }
            ReadRequest::DatasetCatalog { dataset, offset } => {
                let dataset = self.readable_dataset(dataset).ok_or_else(no_such_dataset)?;
                let len = dataset.catalog().header().file_len.saturating_sub(offset).min(first_room).min(BATCH_LEN_MAX as u64);
                let failed = |error| Rejection::new(RejectionKind::DriveFailed, format!("cannot read a catalog: {error}"));
                let read = move || {
                    let mut bytes = vec![0; len as usize];
                    dataset.catalog_file().read_exact_at(&mut bytes, offset).map_err(failed)?;
                    Ok::<_, Rejection>(bytes)
                };
                self.read_bytes(read).await
            }
            ReadRequest::Catalog { stage_in, offset } => {
                let stage_in = self.stage_ins.get(stage_in)?;
                self.read_bytes(move || stage_in.read_catalog(offset, first_room)).await
            }
        }
    }

    /// Answers with what `read` reads from a drive.
    async fn read_bytes<E: 'static>(
        &self,
        read: impl FnOnce() -> Result<Vec<u8>, E> + Send + 'static,
    ) -> Answered<(ReadReply, Vec<Piece>)>
    where
        Rejection: From<E>,
    {
        let answer = move || {
            let bytes = read()?;
            Ok((ReadReply::Bytes { checksum: checksum(&bytes) }, vec![Piece::Bytes(bytes)]))
        };
        self.blocking.run(answer).await.map_err(|lost| Rejection::new(RejectionKind::Failed, lost))?
    }

    /// Returns a dataset that peers may read: one that is visible here, or one that peers show before or after this node does.
    fn readable_dataset(&self, id: DatasetId) -> Option<Arc<Dataset>> {
        let visible = || self.store.dataset(id);
        // Between the first two lookups the dataset may have become visible, and its stage-in may have settled.
        visible().or_else(|| self.stage_ins.dataset(id)).or_else(visible)
    }
}

fn no_such_dataset() -> Rejection {
    Rejection::new(RejectionKind::NoSuchDataset, "the dataset does not exist, or no longer exists")
}
