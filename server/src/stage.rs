//! This node's part of a stage-in: its workers, what was shipped to it, its runs, and the dataset it has prepared.

mod memory;
mod sink;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::placement::{self, Placement};
use dayfly_meta::wire::control::{Counted, Selection};
use dayfly_meta::wire::peer::{Reply, Request, Rival, ShippedBlock, UnitReport};
use dayfly_stagein::StageInError;
use dayfly_stagein::path_conflicts::SuspectPaths;
use dayfly_stagein::pipeline::{DecoderLimits, Worker, WorkerConfig};
use dayfly_stagein::progress::ProgressMonitor;
use dayfly_stagein::runs::RunWriter;
use dayfly_transport::{Incoming, Region, Slot};
use tokio::sync::{SetOnce, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::blocking::Blocking;
use crate::ingest::{Ingest, IngestError, Stored};
use crate::peers::PeerError;
use crate::server::Server;
use crate::store::{Dataset, Drive, Reservation, Segments, room_for, unnamed_file};
use memory::Memory;
use sink::ServerSink;

/// Bytes that a file takes in a catalog and in the locations, with a name of usual length.
const CATALOG_FILE_LEN: u64 = 128;

/// Others may take the room that was made for one.
const ROOM_ATTEMPTS_MAX: usize = 8;

/// All stage-ins that this node takes part in.
#[derive(Default)]
pub(crate) struct Stages {
    stages: Mutex<HashMap<u64, Arc<Stage>>>,
}

impl Stages {
    pub(crate) fn get(&self, number: u64) -> Result<Arc<Stage>, String> {
        self.lock().get(&number).cloned().ok_or_else(|| "this stage-in is over".to_owned())
    }

    pub(crate) fn remove(&self, number: u64) -> Option<Arc<Stage>> {
        self.lock().remove(&number)
    }

    /// Those that are under way.
    pub(crate) fn all(&self) -> Vec<Arc<Stage>> {
        self.lock().values().cloned().collect()
    }

    /// A dataset that other nodes may show while this one does not: one that is prepared, or one that was replaced.
    pub(crate) fn dataset(&self, id: DatasetId) -> Option<Arc<Dataset>> {
        let known = |stage: Arc<Stage>| {
            let outcome = stage.outcome();
            [outcome.prepared.clone(), outcome.replaced.clone()]
        };
        self.all().into_iter().flat_map(known).flatten().find(|dataset| dataset.id() == id)
    }

    /// Whether one is under way.
    pub(crate) fn is_any(&self) -> bool {
        !self.lock().is_empty()
    }

    fn insert(&self, stage: Arc<Stage>) {
        self.lock().insert(stage.number, stage);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Stage>>> {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the coordinator says of a stage-in when it begins.
pub(crate) struct Beginning {
    pub(crate) number: u64,
    pub(crate) coordinator: NodeId,
    pub(crate) selection: Selection,
    pub(crate) seed: u64,
    pub(crate) max_rate: Option<u64>,
    pub(crate) capacities: Vec<u64>,
}

/// A stage-in on this node.
pub(crate) struct Stage {
    number: u64,
    coordinator: NodeId,
    seed: u64,
    selection: Selection,
    memory: Memory,
    deadlines: Deadlines,
    blocking: Arc<dyn Blocking>,
    ingest: Arc<Ingest>,
    landing: Region,
    gauge: Arc<ProgressMonitor>,
    /// What the coordinator asks the workers.
    questions: Arc<SuspectPaths>,
    /// The workers' runs, once all have ended.
    runs: watch::Sender<Option<Runs>>,
    outcome: Mutex<Outcome>,
    /// Room for the catalog, taken while files are found, so that blocks do not take it.
    catalog_room: Mutex<Option<Reservation>>,
    catalog_drive: Arc<Drive>,
    /// Set together with the gauge's flag: ends the waits of workers at once.
    cancelled: SetOnce<()>,
    /// Dropping the stage ends these.
    tasks: Mutex<JoinSet<()>>,
}

/// The runs, or why there are none.
type Runs = Result<Arc<Vec<(File, u64)>>, String>;

#[derive(Default)]
struct Outcome {
    catalog: Option<Arc<File>>,
    prepared: Option<Arc<Dataset>>,
    shown: Option<DatasetId>,
    replaced: Option<Arc<Dataset>>,
}

impl Stage {
    /// Makes room for what will come, and starts the workers.
    pub(crate) fn begin(server: &Arc<Server>, beginning: Beginning) -> Result<(), String> {
        let Beginning { number, coordinator, selection, seed, max_rate, capacities } = beginning;
        if capacities.len() != server.peers().count() {
            return Err("the coordinator knows another roster".to_owned());
        }
        let cannot = |error: std::io::Error| format!("cannot begin a stage-in: {error}");
        let segments = Segments::create(server.store().drives(), DatasetId(number as u32)).map_err(cannot)?;
        let memory = Memory::part(server.config().stage_memory, server.config().workers);
        let landing = server.transport().region(memory.landing_len()).map_err(cannot)?;
        let catalog_drive = server.store().roomiest_drive();
        let arrivals = unnamed_file(catalog_drive.path()).map_err(|error| cannot(catalog_drive.write_error(error)))?;
        let gauge = Arc::new(ProgressMonitor::new(max_rate));
        let stage = Arc::new(Self {
            number,
            coordinator,
            seed,
            selection,
            memory,
            deadlines: *server.deadlines(),
            blocking: server.blocking().clone(),
            ingest: Arc::new(Ingest::new(Arc::new(segments), arrivals, (memory.shuffle_len, memory.paths_len), gauge.clone())),
            landing,
            gauge,
            questions: Arc::default(),
            runs: watch::Sender::new(None),
            outcome: Mutex::default(),
            catalog_room: Mutex::new(catalog_drive.reserve(0)),
            catalog_drive,
            cancelled: SetOnce::new(),
            tasks: Mutex::default(),
        });
        let members = (0..).map(NodeId).zip(capacities).map(|(node, capacity)| placement::Member { node, capacity });
        let placement = Arc::new(Placement::new(seed, &members.collect::<Vec<_>>()));
        let mut tasks = stage.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(work(server.clone(), stage.clone(), placement));
        tasks.spawn(report(server.clone(), stage.clone()));
        tasks.spawn(keep_headroom(server.clone(), stage.clone()));
        drop(tasks);
        server.stages().insert(stage);
        Ok(())
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn ingest(&self) -> &Arc<Ingest> {
        &self.ingest
    }

    pub(crate) fn gauge(&self) -> &ProgressMonitor {
        &self.gauge
    }

    /// Ends the workers at their next step, and every wait of theirs now.
    fn cancel(&self) {
        self.gauge.cancel();
        // It may be cancelled more than once.
        let _ = self.cancelled.set(());
    }

    /// What `work` gives, or [`StageInError::Cancelled`] as soon as the stage-in is cancelled: no worker waits longer than that,
    /// whatever a drive or a peer does.
    async fn unless_cancelled<T>(&self, work: impl Future<Output = T>) -> Result<T, StageInError> {
        tokio::select! {
            biased;
            _ = self.cancelled.wait() => Err(StageInError::Cancelled),
            done = work => Ok(done),
        }
    }

    /// Room for a batch to land in.
    async fn landing_slot(&self, len: u64) -> Result<Slot, String> {
        if let Some(slot) = self.landing.slot_within(len, self.deadlines.landing_patience).await {
            return Ok(slot);
        }
        // What lies there may be too little to be written, and in too many pieces to let anything land between them.
        let ingest = self.ingest.clone();
        let written = self.blocking.run(move || ingest.flush()).await;
        written.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        let slot = self.landing.slot_within(len, self.deadlines.landing).await;
        slot.ok_or_else(|| "this node is too busy to take a batch".to_owned())
    }

    /// Takes a peer's batch. The answer is its first block's number, that there is no room for it, or that it is damaged.
    pub(crate) async fn land(
        &self,
        server: &Arc<Server>,
        blocks: Vec<ShippedBlock>,
        incoming: Incoming,
    ) -> Result<Reply, String> {
        let (slot, len) = self.landed(incoming).await?;
        match self.store(server, blocks.into(), slot, len).await {
            Ok(Stored::At(first)) => Ok(Reply::Shipped { arrival: Some(first) }),
            Ok(Stored::Full(_)) => Ok(Reply::Shipped { arrival: None }),
            Err(IngestError::Damaged(damaged)) => Ok(Reply::Damaged(damaged)),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Stores a batch; where there is no room for it, out of what is only kept.
    async fn store(
        &self,
        server: &Arc<Server>,
        blocks: Arc<[ShippedBlock]>,
        slot: Slot,
        len: usize,
    ) -> Result<Stored, IngestError> {
        let room = blocks.iter().map(|block| room_for(u64::from(block.len))).sum();
        let mut slot = slot;
        for attempts_left in (0..ROOM_ATTEMPTS_MAX).rev() {
            let (ingest, blocks) = (self.ingest.clone(), blocks.clone());
            let stored = self.blocking.run(move || ingest.store(&blocks, slot, len)).await;
            match stored.map_err(|error| IngestError::Room(error.to_string()))?? {
                Stored::Full(full) if attempts_left > 0 && server.make_room(room).await.map_err(IngestError::Room)? => {
                    slot = full
                }
                stored => return Ok(stored),
            }
        }
        Err(IngestError::Room("no room for a batch".to_owned()))
    }

    /// Takes room for a block that comes in pieces; its number, or `None` if there is none.
    pub(crate) async fn reserve(&self, server: &Arc<Server>, block_len: u64, rival: Rival) -> Result<Option<u32>, String> {
        for attempts_left in (0..ROOM_ATTEMPTS_MAX).rev() {
            let ingest = self.ingest.clone();
            let reserved = self.blocking.run(move || ingest.reserve(block_len, rival)).await;
            let reserved = reserved.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
            if reserved.is_some() || attempts_left == 0 || !server.make_room(room_for(block_len)).await? {
                return Ok(reserved);
            }
        }
        Ok(None)
    }

    /// Takes a piece of a block for which a peer has asked for room.
    pub(crate) async fn land_piece(
        &self,
        (arrival, offset): (u32, u64),
        checksum: u32,
        incoming: Incoming,
    ) -> Result<Reply, String> {
        let (slot, len) = self.landed(incoming).await?;
        let ingest = self.ingest.clone();
        let stored = self.blocking.run(move || ingest.store_piece(arrival, offset, checksum, &slot[..len])).await;
        match stored.map_err(|error| error.to_string())? {
            Ok(()) => Ok(Reply::Done),
            Err(IngestError::Damaged(damaged)) => Ok(Reply::Damaged(damaged)),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn landed(&self, incoming: Incoming) -> Result<(Slot, usize), String> {
        let len = incoming.len();
        if len > BATCH_LEN_MAX as u64 {
            return Err("a batch is too long".to_owned());
        }
        let slot = self.landing_slot(len).await?;
        let slot = incoming.land(slot).await.map_err(|error| format!("a batch did not arrive: {error}"))?;
        Ok((slot, len as usize))
    }

    /// Waits for the workers to end, and writes what waits to be written; the lengths of their runs, and what was counted last.
    pub(crate) async fn finish(&self) -> Result<(Vec<u64>, Counted), String> {
        let mut runs = self.runs.subscribe();
        let runs = runs.wait_for(Option::is_some).await.map_err(|_| "the workers were stopped".to_owned())?.clone();
        let runs = runs.unwrap_or_else(|| Err("no runs".to_owned()))?;
        let ingest = self.ingest.clone();
        let finished = self.blocking.run(move || ingest.finish()).await;
        finished.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        Ok((runs.iter().map(|(_, len)| *len).collect(), self.gauge.take_counted()))
    }

    /// Bytes of a run, at most `room`.
    pub(crate) fn read_run(&self, run: u32, offset: u64, room: u64) -> Result<Vec<u8>, String> {
        let runs = self.runs.borrow().clone().ok_or("the workers have not ended")??;
        let (file, len) = runs.get(run as usize).ok_or("there is no such run")?;
        read_some(file, offset, room.min(len.saturating_sub(offset)))
    }

    pub(crate) fn set_catalog(&self, catalog: Arc<File>) {
        self.outcome().catalog = Some(catalog);
    }

    pub(crate) fn catalog(&self) -> Result<Arc<File>, String> {
        self.outcome().catalog.clone().ok_or_else(|| "the catalog is not here yet".to_owned())
    }

    /// Bytes of the catalog, at most `room`.
    pub(crate) fn read_catalog(&self, offset: u64, room: u64) -> Result<Vec<u8>, String> {
        let catalog = self.catalog()?;
        let len = catalog.metadata().map_err(|error| error.to_string())?.len();
        read_some(&catalog, offset, room.min(len.saturating_sub(offset)))
    }

    /// Takes room for the catalog of so many files, as far as there is any; how much is missing.
    fn keep_catalog_room(&self, files: u64) -> u64 {
        let mut room = self.catalog_room.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(room) = &mut *room else { return 0 };
        let more = (files * CATALOG_FILE_LEN).saturating_sub(room.bytes());
        if room.grow(more) { 0 } else { more }
    }

    /// The room that was kept for the catalog, and where.
    pub(crate) fn take_catalog_room(&self) -> (Arc<Drive>, Reservation) {
        let kept = self.catalog_room.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Nothing always fits.
        let empty = || Reservation::empty(&self.catalog_drive);
        (self.catalog_drive.clone(), kept.unwrap_or_else(empty))
    }

    pub(crate) fn set_prepared(&self, dataset: Dataset) {
        self.outcome().prepared = Some(Arc::new(dataset));
    }

    /// Shows what was prepared.
    pub(crate) fn commit(&self, server: &Server, replaces: Option<DatasetId>) -> Result<(), String> {
        let mut outcome = self.outcome();
        // It stays among the prepared ones too, so that there is no moment at which a peer finds it nowhere.
        let dataset = outcome.prepared.clone().ok_or("no dataset was prepared")?;
        outcome.shown = Some(dataset.id());
        outcome.replaced = server.store().show(dataset, replaces);
        Ok(())
    }

    /// All nodes show it: gives up what it replaced.
    pub(crate) fn settle(&self, server: &Server) {
        self.stop();
        if let Some(replaced) = self.outcome().replaced.take() {
            replaced.set_gone(true);
            replaced.free();
            server.arena().forget(replaced.id());
        }
    }

    /// Undoes everything.
    pub(crate) fn abort(&self, server: &Server) {
        self.stop();
        let mut outcome = self.outcome();
        if let Some(shown) = outcome.shown.take() {
            server.store().hide(shown);
            server.arena().forget(shown);
        }
        if let Some(replaced) = outcome.replaced.take() {
            server.store().show(replaced, None);
        }
        // Peers that show it already may be reading it: what is sent to them from here on does not count.
        if let Some(prepared) = outcome.prepared.take() {
            prepared.set_gone(true);
        }
        self.ingest.segments().free();
    }

    /// Whether the coordinator said to show the dataset. From then on only the coordinator may take it back: others show it too.
    fn is_shown(&self) -> bool {
        self.outcome().shown.is_some()
    }

    fn stop(&self) {
        self.cancel();
        self.runs.send_if_modified(|runs| {
            let is_open = runs.is_none();
            runs.get_or_insert_with(|| Err("the stage-in is over".to_owned()));
            is_open
        });
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }

    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read_some(file: &File, offset: u64, len: u64) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; len.min(BATCH_LEN_MAX as u64) as usize];
    file.read_exact_at(&mut bytes, offset).map_err(|error| format!("cannot read what was put aside: {error}"))?;
    Ok(bytes)
}

/// Runs the workers, then keeps their runs. The first failure is told to the coordinator at once, while other workers still run: without
/// that the coordinator would wait for the failed worker's unit, and the other workers for the coordinator.
async fn work(server: Arc<Server>, stage: Arc<Stage>, placement: Arc<Placement>) {
    let mut workers = JoinSet::new();
    for _ in 0..server.config().workers {
        let (server, stage, placement, blocking) = (server.clone(), stage.clone(), placement.clone(), server.blocking().clone());
        let worker = move || run_worker(&server, &stage, placement);
        workers.spawn(blocking.run(worker));
    }
    let mut all = Vec::new();
    let mut failure = None;
    while let Some(ended) = workers.join_next().await {
        let ended = ended.map_err(|error| error.to_string()).and_then(|ended| ended.map_err(|error| error.to_string()));
        match ended.and_then(|ended| ended.map_err(|error| error.to_string())) {
            Ok(mut runs) => all.append(&mut runs),
            // The first failure is the one that counts: the others end because of it.
            Err(reason) if failure.is_none() => {
                stage.cancel();
                tell_failure(&server, &stage, &reason).await;
                failure = Some(reason);
            }
            Err(_) => {}
        }
    }
    stage.runs.send_replace(Some(failure.map_or_else(|| Ok(Arc::new(all)), Err)));
}

/// Tells the coordinator that the stage-in failed here. A coordinator that is pressed gets as much patience as for a report; one that does not hear
/// it at all gives this node up by its silence, as this node does the coordinator.
async fn tell_failure(server: &Arc<Server>, stage: &Stage, reason: &str) {
    let start = Instant::now();
    loop {
        let fail = Request::Fail { stage: stage.number, reason: reason.to_owned() };
        match server.ask(stage.coordinator, fail, server.deadlines().request).await {
            Err(PeerError::Transport(_)) if start.elapsed() < server.deadlines().peer_lost => {
                tokio::time::sleep(server.deadlines().progress_interval).await
            }
            Err(error) => {
                tracing::warn!(%error, reason, "a stage-in failed here and the coordinator cannot be told");
                return;
            }
            Ok(_) => return,
        }
    }
}

/// One worker: takes units from the coordinator until there are none.
fn run_worker(server: &Arc<Server>, stage: &Arc<Stage>, placement: Arc<Placement>) -> Result<Vec<(File, u64)>, StageInError> {
    let drive = server.store().roomiest_drive();
    work_through(server, stage, placement, drive.clone()).map_err(|error| match error {
        StageInError::TempFile(error) => StageInError::TempFile(drive.write_error(error)),
        error => error,
    })
}

fn work_through(
    server: &Arc<Server>,
    stage: &Arc<Stage>,
    placement: Arc<Placement>,
    drive: Arc<Drive>,
) -> Result<Vec<(File, u64)>, StageInError> {
    let runtime = tokio::runtime::Handle::current();
    let memory = stage.memory;
    let runs = RunWriter::new(Box::new(move || unnamed_file(drive.path())), memory.run_len);
    let sink = ServerSink::new(server.clone(), stage.clone(), memory.batches, runtime.clone())?;
    let decoders = DecoderLimits { threads: server.config().decoders, ahead_len: memory.decoded_ahead_len };
    let questions = stage.questions.clone();
    let orders = WorkerConfig { placement, selection: &stage.selection, seed: stage.seed, decoders, suspect_paths: questions };
    let mut worker = Worker::new(sink, runs, orders, stage.gauge.clone())?;
    let mut finished: Vec<UnitReport> = Vec::new();
    loop {
        let request = Request::NextUnit { stage: stage.number, finished: std::mem::take(&mut finished) };
        // Twice the deadline: the coordinator waits for its slowest node to begin.
        let reply = server.blocking().wait_for(stage.unless_cancelled(server.ask(
            stage.coordinator,
            request,
            2 * server.deadlines().request,
        )))?;
        worker.check_suspect_paths()?;
        let lost = |error: PeerError| StageInError::NoAssignment { coordinator: stage.coordinator, cause: error.into() };
        match reply.map_err(lost)? {
            Reply::Units(units) => finished = worker.run(&units)?,
            // A stage-in that was cancelled meanwhile ends at the next request.
            Reply::Wait => {}
            Reply::NoUnit => return worker.finish()?.finish().map_err(StageInError::TempFile),
            _ => return Err(StageInError::Cancelled),
        }
    }
}

/// Has copies make way, while the stage-in runs, for what it writes beside blocks, whoever else fills the drive.
async fn keep_headroom(server: Arc<Server>, stage: Arc<Stage>) {
    while stage.unless_cancelled(tokio::time::sleep(server.deadlines().progress_interval)).await.is_ok() {
        if let Err(reason) = server.make_headroom(0).await {
            tracing::warn!(reason, "what is kept does not make way");
        }
    }
}

/// Tells the coordinator how far we are, and hears whether to go on; a coordinator that is lost ends the stage-in here.
async fn report(server: Arc<Server>, stage: Arc<Stage>) {
    let (mut is_undone, mut unheard) = (false, None);
    loop {
        tokio::time::sleep(server.deadlines().progress_interval).await;
        let progress = stage.gauge.take_counted();
        let waits = if progress.is_still() { stage.gauge.current_activities() } else { Vec::new() };
        let (suspects, sightings) = (stage.ingest.take_suspects(), stage.questions.take_sightings());
        let request = Request::Report { stage: stage.number, progress, waits, suspects, sightings };
        let (asked_at, mut asked) = (Instant::now(), 0);
        let reply = loop {
            asked += 1;
            match server.ask(stage.coordinator, request.clone(), server.deadlines().request).await {
                // It may be pressed by all who dial it at once: no more patience than with any peer, but no less.
                Err(PeerError::Transport(_)) if asked < 2 || asked_at.elapsed() < server.deadlines().peer_lost => {
                    tokio::time::sleep(server.deadlines().progress_interval).await;
                }
                reply => break reply,
            }
        };
        match reply {
            Ok(Reply::Go { files, questions }) => {
                stage.questions.set(questions);
                let missing = stage.keep_catalog_room(files);
                // If there is none, that will be told when the catalog comes.
                if missing > 0 && server.make_room(missing).await.is_ok_and(|made| made) {
                    stage.keep_catalog_room(files);
                }
            }
            Ok(Reply::Undone) => {
                is_undone = true;
                break;
            }
            Ok(_) => break,
            // Only the coordinator knows whether the others show it too, or none does. It is asked on for longer than it may take to publish;
            // a node that is cut off for as long has been ended by its lease.
            Err(_) if stage.is_shown() && unheard.get_or_insert(asked_at).elapsed() < server.deadlines().offer => continue,
            Err(error) => {
                tracing::warn!(%error, "a stage-in ends here, for its coordinator does not answer");
                break;
            }
        }
        unheard = None;
    }
    stage.cancel();
    if server.stages().remove(stage.number).is_some() {
        // Not from within: this very task is among those that `abort` ends.
        tokio::spawn(async move {
            if stage.is_shown() && !is_undone {
                stage.settle(&server)
            } else {
                stage.abort(&server)
            }
            // What is kept was told to wait.
            if let Err(reason) = server.plan_kept().await {
                tracing::warn!(reason, "nothing more is kept");
            }
        });
    }
}
