//! The room on a node's drives. A drive may take long to say what it has left; then what it said last counts.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dayfly_meta::wire::status::FileSystemRoom;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, timeout};

use crate::blocking::{Blocking, JobLost};
use crate::stage_in::NodeStageIns;
use crate::store::Store;

/// The unit in which `stat` counts a file's space.
const BLOCK_LEN: u64 = 512;

/// What the drives said.
#[derive(Clone)]
pub(super) struct DriveRoom {
    /// See the fields of [`NodeStatus`](dayfly_meta::wire::status::NodeStatus) with these names.
    pub(super) free_bytes: u64,
    pub(super) file_systems: Vec<FileSystemRoom>,
    pub(super) taken_bytes: u64,
}

/// Asks the drives.
pub(crate) struct DriveRooms {
    store: Arc<Store>,
    stage_ins: Arc<NodeStageIns>,
    blocking: Arc<dyn Blocking>,
    /// How long to wait for drives that have answered before.
    patience: Duration,
    /// Held while they are asked, so that a drive that hangs keeps one thread only.
    asking: Arc<AsyncMutex<()>>,
    last: Mutex<Option<(Instant, DriveRoom)>>,
}

impl DriveRooms {
    pub(crate) fn new(
        store: Arc<Store>,
        stage_ins: Arc<NodeStageIns>,
        blocking: Arc<dyn Blocking>,
        patience: Duration,
    ) -> Arc<Self> {
        Arc::new(Self { store, stage_ins, blocking, patience, asking: Arc::default(), last: Mutex::default() })
    }

    /// Returns what the drives say, and for how long they have not said anything newer: 0 if they answer within the patience.
    pub(super) async fn room(self: &Arc<Self>) -> Result<(DriveRoom, Duration), JobLost> {
        let mut asking = pin!(self.ask());
        if let Ok(answer) = timeout(self.patience, &mut asking).await {
            return Ok((answer?, Duration::ZERO));
        }
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match last {
            Some((at, room)) => Ok((room, at.elapsed())),
            None => Ok((asking.await?, Duration::ZERO)),
        }
    }

    /// Asks the drives as soon as they have answered whoever asked before. They are still asked if the future is dropped.
    async fn ask(self: &Arc<Self>) -> Result<DriveRoom, JobLost> {
        let alone = self.asking.clone().lock_owned().await;
        let asked = self.clone();
        let job = self.blocking.run(move || {
            let room = asked.look();
            *asked.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), room.clone()));
            drop(alone);
            room
        });
        job.await
    }

    /// Waits for the drives.
    fn look(&self) -> DriveRoom {
        DriveRoom {
            free_bytes: self.store.free() + self.store.unused_copies_bytes(),
            file_systems: self.store.file_systems(),
            taken_bytes: self.taken_bytes(),
        }
    }

    /// Returns the space that the files of datasets and stage-ins take, as their file systems count it.
    fn taken_bytes(&self) -> u64 {
        let datasets = self.store.datasets();
        // While a stage-in publishes its dataset, the stage-in and the dataset share their segments. The map counts each file
        // only once.
        let files: HashMap<*const File, Arc<File>> = datasets
            .iter()
            .flat_map(|dataset| dataset.segments().files().chain([dataset.catalog_file()]))
            .chain(self.stage_ins.all().iter().flat_map(|stage_in| stage_in.ingest().segments().files()))
            .map(|file| (Arc::as_ptr(file), file.clone()))
            .collect();
        files.values().filter_map(|file| file.metadata().ok()).map(|metadata| metadata.blocks() * BLOCK_LEN).sum()
    }
}
