//! A node's part of a stage-in: its workers, the blocks that arrive for it, its sorted runs, and the dataset it prepares.
//!
//! [`NodeStageIns`] holds one [`NodeStageIn`] for each running stage-in. The coordinator, on node 0, drives each part with
//! requests: begin, finish, prepare, copy, commit, then settle or abort. In between, the part works on its own:
//!
//! - `workers`: threads that take units from the coordinator, read them, and ship blocks to their owners through a `sink`;
//! - `landing`: takes the blocks that other nodes ship here, and makes room for them;
//! - `report`: reports progress to the coordinator five times a second, and ends the part when the answer says so;
//! - `copying`: copies blocks from their owners, if the dataset has several copies;
//! - `publish`: fetches the catalog, and makes the dataset visible, or invisible again;
//! - `memory`: divides the node's memory for stage-ins.
//!
//! Invariants: a part ends exactly once, when it is removed from [`NodeStageIns`]. Then it is either settled (the dataset
//! stays) or aborted (nothing stays). Once the dataset is visible here, only the coordinator may hide it again, because other
//! nodes may show it too. No worker keeps waiting once its stage-in has been canceled.
//!
//! This module does not plan, merge or decide whether a stage-in succeeds: that is up to [`crate::coordinator`]. This module
//! only exchanges messages with the coordinator, as with any peer.

mod copying;
mod error;
mod landing;
mod memory;
mod publish;
mod report;
mod sink;
mod workers;

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::placement::{self, Placement};
use dayfly_meta::stored_share::StoredShare;
use dayfly_meta::wire::control::{Counted, Selection};
use dayfly_meta::wire::peer::ListedDataset;
use dayfly_stagein::StageInError;
use dayfly_stagein::path_conflicts::SuspectPaths;
use dayfly_stagein::progress::ProgressMonitor;
use dayfly_transport::{Region, Transport};
use tokio::sync::{SetOnce, watch};
use tokio::task::JoinSet;
use tracing::Instrument;

use crate::arena::{Arena, KeptNumbers};
use crate::blocking::{Blocking, assert_may_wait};
use crate::ingest::Ingest;
use crate::membership::decision::Promise;
use crate::peers::{PeerError, Peers};
use crate::room::{Room, StageInGuard};
use crate::store::{Dataset, Drive, Reservation, Segments, Store};
use copying::Copying;
pub(crate) use error::{NodeStageInError, name_drive};
use memory::MemoryShares;
pub(crate) use publish::PreparedCatalog;

/// The parts of a node that its stage-ins use.
pub(crate) struct StageInContext {
    pub(crate) node: NodeId,
    /// Worker threads of each stage-in.
    pub(crate) workers: usize,
    /// Threads that decode one compressed source.
    pub(crate) decoders: usize,
    /// Bytes of memory for all stage-ins of this node.
    pub(crate) memory: u64,
    pub(crate) store: Arc<Store>,
    pub(crate) arena: Arena,
    pub(crate) room: Arc<Room>,
    pub(crate) peers: Arc<Peers>,
    /// Registers the memory for batches.
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) blocking: Arc<dyn Blocking>,
}

impl StageInContext {
    fn deadlines(&self) -> &Deadlines {
        self.peers.deadlines()
    }
}

/// All stage-ins that this node takes part in.
pub(crate) struct NodeStageIns {
    context: Arc<StageInContext>,
    running: Mutex<BTreeMap<u64, Running>>,
    /// Held while a stage-in begins. The coordinator may ask again before the first request has ended.
    beginning: tokio::sync::Mutex<()>,
    promise: Mutex<Promise>,
}

/// A stage-in that is running on this node.
struct Running {
    stage_in: Arc<NodeStageIn>,
    /// Keeps caching paused.
    _guard: StageInGuard,
}

/// The coordinator's announcement that a stage-in is beginning.
pub(crate) struct StageInOrder {
    pub(crate) number: u64,
    /// The number of the user's request.
    pub(crate) request: u64,
    pub(crate) selection: Selection,
    pub(crate) seed: u64,
    /// Source bytes that this node may read per second.
    pub(crate) max_rate: Option<u64>,
    /// Free bytes on each node, in the order of node numbers.
    pub(crate) capacities: Vec<u64>,
    /// Which of the blocks that can be read again from their origins are stored; `None` if all blocks must be stored.
    pub(crate) stored_share: Option<StoredShare>,
    /// An estimate of the number of files.
    pub(crate) expected_files: u64,
}

impl NodeStageIns {
    pub(crate) fn new(context: StageInContext) -> Self {
        Self { context: Arc::new(context), running: Mutex::default(), beginning: Default::default(), promise: Mutex::default() }
    }

    /// Begins this node's part of a stage-in, unless it has begun before, and pauses caching, because stage-ins need the room.
    pub(crate) async fn begin(self: &Arc<Self>, order: StageInOrder) -> Result<(), NodeStageInError> {
        let stage_ins = self.clone();
        // On a task of its own, which goes on if the connection is lost over which the coordinator has asked.
        let beginning = tokio::spawn(async move { stage_ins.begin_once(order).await });
        beginning.await.unwrap_or(Err(NodeStageInError::NotRunning))
    }

    async fn begin_once(self: &Arc<Self>, order: StageInOrder) -> Result<(), NodeStageInError> {
        let stage_ins = self.clone();
        let (number, expected_files) = (order.number, order.expected_files);
        let _beginning = self.beginning.lock().await;
        if self.get(number).is_ok() {
            return Ok(());
        }
        // Creates files, so it must not run on a runtime thread.
        self.context.blocking.run(move || stage_ins.begin_now(order)).await??;
        self.context.room.pause_caching();
        // Blocks may take all room that is left, so the catalog gets its room before them.
        self.get(number)?.reserve_room_for_catalog(expected_files).await;
        Ok(())
    }

    fn begin_now(self: &Arc<Self>, order: StageInOrder) -> Result<(), NodeStageInError> {
        let (number, seed) = (order.number, order.seed);
        let members = (0..).map(NodeId).zip(order.capacities.clone());
        let members = members.map(|(node, capacity)| placement::Member { node, capacity }).collect::<Vec<_>>();
        let stage_in = Arc::new(NodeStageIn::new(self.context.clone(), order)?);
        let placement = Arc::new(Placement::new(seed, &members));
        let span = tracing::info_span!("stage_in", node = %self.context.node, stage_in = number);
        let mut tasks = stage_in.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(workers::run_all(stage_in.clone(), placement).instrument(span.clone()));
        tasks.spawn(report::report_until_end(Arc::downgrade(self), stage_in.clone()).instrument(span.clone()));
        tasks.spawn(report::maintain_headroom(stage_in.clone()).instrument(span));
        drop(tasks);
        let _guard = self.context.room.stage_in(stage_in.is_partial());
        let running = Running { stage_in, _guard };
        self.running().insert(number, running);
        Ok(())
    }

    pub(crate) fn get(&self, number: u64) -> Result<Arc<NodeStageIn>, NodeStageInError> {
        self.running().get(&number).map(|running| running.stage_in.clone()).ok_or(NodeStageInError::NotRunning)
    }

    /// Returns all stage-ins that are running on this node.
    pub(crate) fn all(&self) -> Vec<Arc<NodeStageIn>> {
        self.running().values().map(|running| running.stage_in.clone()).collect()
    }

    /// Returns whether any stage-in is running on this node.
    #[cfg(test)]
    pub(crate) fn is_any(&self) -> bool {
        !self.running().is_empty()
    }

    /// Returns a dataset that other nodes may show while this node does not: one that is prepared here, or one that was
    /// replaced here.
    pub(crate) fn dataset(&self, id: DatasetId) -> Option<Arc<Dataset>> {
        let datasets = |stage_in: Arc<NodeStageIn>| {
            let publication = stage_in.publication();
            [publication.prepared.clone(), publication.replaced.clone()]
        };
        self.all().into_iter().flat_map(datasets).flatten().find(|dataset| dataset.id() == id)
    }

    /// Before a stage-in begins, makes room for what it will write in addition to blocks.
    pub(crate) async fn make_headroom(&self) -> Result<(), NodeStageInError> {
        Ok(self.context.room.make_headroom(0).await?)
    }

    /// Admits a coordinator's request of this epoch, unless this node knows a newer epoch.
    pub(crate) fn admit(&self, epoch: u32) -> Result<(), NodeStageInError> {
        let mut promise = self.promise.lock().unwrap_or_else(PoisonError::into_inner);
        // A roster that arrives later raises the promise before the next request is admitted.
        let _ = promise.admit(self.context.peers.roster().epoch());
        Ok(promise.admit(epoch)?)
    }

    /// Returns the newest membership epoch that this node has heard of, from the supervisor or from a coordinator.
    pub(crate) fn newest_epoch(&self) -> u32 {
        let promise = self.promise.lock().unwrap_or_else(PoisonError::into_inner);
        promise.epoch().max(self.context.peers.roster().epoch())
    }

    /// Returns the stage-ins that have not ended here, and the datasets that are visible here.
    pub(crate) fn inquired(&self) -> (Vec<u64>, Vec<ListedDataset>) {
        (self.running().keys().copied().collect(), self.context.store.listed())
    }

    /// Ends a stage-in that has become a dataset on all nodes. Does nothing if it has already ended.
    pub(crate) async fn settle(&self, number: u64) -> Result<(), NodeStageInError> {
        self.end(number, NodeStageIn::settle).await.map(drop)
    }

    /// Ends a stage-in and undoes everything that it did. Does nothing if it has already ended.
    pub(crate) async fn abort(&self, number: u64) -> Result<(), NodeStageInError> {
        self.end(number, NodeStageIn::abort).await.map(drop)
    }

    /// Ends all stage-ins, because they have ended on the other nodes while this node was lost. Those whose datasets are in
    /// `published` are settled, the others aborted.
    pub(crate) async fn end_all(&self, published: &HashSet<DatasetId>) -> Result<(), NodeStageInError> {
        for stage_in in self.all() {
            // A node that had prepared the dataset has its blocks, though it missed the request to make it visible.
            match stage_in.is_prepared() && published.contains(&stage_in.dataset()) {
                true => {
                    stage_in.commit()?;
                    self.settle(stage_in.number).await?;
                }
                false => self.abort(stage_in.number).await?,
            }
        }
        Ok(())
    }

    async fn end(&self, number: u64, how: fn(&NodeStageIn)) -> Result<(), NodeStageInError> {
        // The guard is dropped here, so that caching can resume.
        let Some(Running { stage_in, .. }) = self.running().remove(&number) else { return Ok(()) };
        self.context.blocking.run(move || how(&stage_in)).await?;
        Ok(self.context.room.plan_cache().await?)
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<u64, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One node's part of a stage-in.
pub(crate) struct NodeStageIn {
    number: u64,
    request: u64,
    seed: u64,
    selection: Selection,
    stored_share: Option<StoredShare>,
    context: Arc<StageInContext>,
    memory: MemoryShares,
    ingest: Arc<Ingest>,
    /// Memory for batches that arrive, until they are written.
    landing: Region,
    kept: KeptNumbers,
    monitor: Arc<ProgressMonitor>,
    /// Paths that the coordinator has told workers to look for.
    suspect_paths: Arc<SuspectPaths>,
    /// What was counted after the last report. The coordinator asks again if the answer that carries it was lost.
    last_counted: Mutex<Counted>,
    /// The workers' runs, once all workers have finished.
    runs: watch::Sender<Option<Runs>>,
    publication: Mutex<Publication>,
    /// Set once this node copies blocks.
    copying: Mutex<Option<Arc<Copying>>>,
    /// Held while the catalog is prepared. The coordinator may ask again before the first request has ended.
    preparing: tokio::sync::Mutex<()>,
    /// Room for the catalog. It is reserved as files are found, so that blocks do not take it.
    catalog_room: Mutex<Option<Reservation>>,
    catalog_drive: Arc<Drive>,
    /// Set together with the monitor's flag. Workers that are waiting then stop waiting at once.
    cancelled: SetOnce<()>,
    /// Why this node has ended the stage-in on its own, if the coordinator did not answer.
    coordinator_silence: Mutex<Option<PeerError>>,
    tasks: Mutex<JoinSet<()>>,
}

/// A sorted run, and the drive that it lies on.
struct Run {
    file: File,
    len: u64,
    drive: Arc<Drive>,
}

/// Sorted runs, or why there are none.
type Runs = Result<Arc<Vec<Run>>, Arc<NodeStageInError>>;

/// The progress of publishing on this node.
#[derive(Default)]
struct Publication {
    catalog: Option<Arc<File>>,
    prepared: Option<Arc<Dataset>>,
    /// The dataset that the prepared one will replace.
    replaces: Option<DatasetId>,
    /// The dataset, once it is visible.
    visible: Option<DatasetId>,
    /// The dataset that the new one replaced, until the replacement is settled.
    replaced: Option<Arc<Dataset>>,
}

impl NodeStageIn {
    /// Reserves memory and creates the files of a stage-in. Blocks the calling thread.
    fn new(context: Arc<StageInContext>, order: StageInOrder) -> Result<Self, NodeStageInError> {
        let StageInOrder { number, request, selection, seed, max_rate, capacities, stored_share, .. } = order;
        let (theirs, ours) = (capacities.len(), context.peers.count());
        if theirs != ours {
            return Err(NodeStageInError::OtherRoster { theirs, ours });
        }
        let segments = Segments::create(context.store.drives(), dataset_id(number)).map_err(NodeStageInError::Begin)?;
        let memory = MemoryShares::divide(context.memory, context.workers);
        let landing = context.transport.region(memory.landing_len()).map_err(NodeStageInError::Begin)?;
        let catalog_drive = context.store.roomiest_drive();
        let monitor = Arc::new(ProgressMonitor::new(max_rate));
        let ingest_memory = (memory.shuffle_len, memory.paths_len);
        let ingest = Ingest::new(Arc::new(segments), catalog_drive.clone(), ingest_memory, monitor.clone());
        Ok(Self {
            number,
            request,
            seed,
            selection,
            stored_share,
            memory,
            ingest: Arc::new(ingest.map_err(NodeStageInError::Begin)?),
            landing,
            kept: KeptNumbers::default(),
            monitor,
            suspect_paths: Arc::default(),
            last_counted: Mutex::default(),
            runs: watch::Sender::new(None),
            publication: Mutex::default(),
            copying: Mutex::default(),
            preparing: tokio::sync::Mutex::default(),
            catalog_room: Mutex::new(catalog_drive.reserve(0)),
            catalog_drive,
            cancelled: SetOnce::new(),
            coordinator_silence: Mutex::default(),
            tasks: Mutex::default(),
            context,
        })
    }

    /// Returns the id of the dataset that the stage-in makes.
    fn dataset(&self) -> DatasetId {
        dataset_id(self.number)
    }

    pub(crate) fn ingest(&self) -> &Arc<Ingest> {
        &self.ingest
    }

    fn deadlines(&self) -> &Deadlines {
        self.context.deadlines()
    }

    /// Returns the node that coordinates stage-ins now.
    fn coordinator(&self) -> NodeId {
        self.context.peers.roster().coordinator()
    }

    /// Returns whether it was known from the beginning that not all blocks fit.
    fn is_partial(&self) -> bool {
        self.stored_share.is_some_and(|share| share != StoredShare::ALL)
    }

    /// Makes the workers end at their next step. A worker that is waiting stops waiting at once.
    fn cancel(&self) {
        self.monitor.cancel();
        // A stage-in may be canceled more than once.
        let _ = self.cancelled.set(());
    }

    /// Returns the output of `work`, or [`StageInError::Cancelled`] as soon as the stage-in is
    /// canceled. A worker that waits by means of this function stops waiting at that moment,
    /// whatever a drive or a peer does.
    async fn unless_cancelled<T>(&self, work: impl Future<Output = T>) -> Result<T, StageInError> {
        tokio::select! {
            biased;
            _ = self.cancelled.wait() => Err(StageInError::Cancelled),
            done = work => Ok(done),
        }
    }

    /// Waits for the workers to finish, and writes all blocks to the drives. Returns the lengths of the runs, and what was
    /// counted since the last report.
    pub(crate) async fn finish(&self) -> Result<(Vec<u64>, Counted), NodeStageInError> {
        let mut finished = self.runs.subscribe();
        // The sender lives as long as `self`.
        let runs = finished.wait_for(Option::is_some).await.ok().and_then(|runs| runs.clone());
        let runs = runs.unwrap_or_else(|| Err(Arc::new(NodeStageInError::NotRunning))).map_err(NodeStageInError::Failed)?;
        let ingest = self.ingest.clone();
        self.context.blocking.run(move || ingest.finish()).await??;
        let mut counted = self.last_counted.lock().unwrap_or_else(PoisonError::into_inner);
        counted.add(&self.monitor.take_counted());
        Ok((runs.iter().map(|run| run.len).collect(), *counted))
    }

    /// Reads at most `room` bytes of a run. Waits for its drive.
    pub(crate) fn read_run(&self, run: u32, offset: u64, room: u64) -> Result<Vec<u8>, NodeStageInError> {
        let runs = self.runs.borrow().clone().ok_or(NodeStageInError::NotFinished)?.map_err(NodeStageInError::Failed)?;
        let run = runs.get(run as usize).ok_or(NodeStageInError::NoSuchRun(run))?;
        read_some(&run.file, &run.drive, offset, room.min(run.len.saturating_sub(offset)))
    }

    /// Reads at most `room` bytes of the catalog. Waits for its drive.
    pub(crate) fn read_catalog(&self, offset: u64, room: u64) -> Result<Vec<u8>, NodeStageInError> {
        let catalog = self.publication().catalog.clone().ok_or(NodeStageInError::NoCatalog)?;
        let drive = &self.catalog_drive;
        let len = catalog.metadata().map_err(|error| NodeStageInError::ReadBack(drive.failure(error)))?.len();
        read_some(&catalog, drive, offset, room.min(len.saturating_sub(offset)))
    }

    /// Stops the workers and all tasks of the stage-in. A call of [`Self::finish`] that waits for the workers fails.
    fn stop(&self) {
        self.cancel();
        self.runs.send_if_modified(|runs| {
            let is_open = runs.is_none();
            runs.get_or_insert_with(|| Err(Arc::new(NodeStageInError::NotRunning)));
            is_open
        });
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }

    fn publication(&self) -> MutexGuard<'_, Publication> {
        self.publication.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn dataset_id(stage_in: u64) -> DatasetId {
    DatasetId(stage_in as u32)
}

fn read_some(file: &File, drive: &Drive, offset: u64, len: u64) -> Result<Vec<u8>, NodeStageInError> {
    assert_may_wait();
    let mut bytes = vec![0; len.min(BATCH_LEN_MAX as u64) as usize];
    file.read_exact_at(&mut bytes, offset).map_err(|error| NodeStageInError::ReadBack(drive.failure(error)))?;
    Ok(bytes)
}
