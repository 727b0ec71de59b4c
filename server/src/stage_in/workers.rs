//! The worker threads of a stage-in on one node: each takes units from the coordinator until none are left.

use std::fs::File;
use std::sync::{Arc, PoisonError};

use dayfly_meta::placement::Placement;
use dayfly_meta::wire::peer::{CoordinatorReply, CoordinatorRequest, Rejection, UnitReport};
use dayfly_stagein::StageInError;
use dayfly_stagein::pipeline::{DecoderLimits, Worker, WorkerConfig};
use dayfly_stagein::runs::RunWriter;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::sink::NodeSink;
use super::{NodeStageIn, NodeStageInError, Run, name_drive};
use crate::peers::PeerError;
use crate::store::Drive;

/// Runs all workers, then stores their runs. Reports the first failure to the coordinator at once,
/// while other workers are still running: otherwise the coordinator would wait for the failed
/// worker's unit, and the other workers for the coordinator.
pub(super) async fn run_all(stage_in: Arc<NodeStageIn>, placement: Arc<Placement>) {
    let mut workers = JoinSet::new();
    for number in (0..).take(stage_in.context.workers) {
        let (worker, placement) = (stage_in.clone(), placement.clone());
        workers.spawn(stage_in.context.blocking.run(move || run_worker(&worker, number, placement)));
    }
    let mut all = Vec::new();
    let mut failure = None;
    while let Some(joined) = workers.join_next().await {
        let finished = match joined {
            Ok(Ok(Ok(runs))) => Ok(runs),
            Ok(Ok(Err(StageInError::Cancelled))) => {
                let silence = stage_in.coordinator_silence.lock().unwrap_or_else(PoisonError::into_inner).take();
                Err(silence.map_or(NodeStageInError::Worker(StageInError::Cancelled), NodeStageInError::CoordinatorSilent))
            }
            Ok(Ok(Err(error))) => Err(NodeStageInError::Worker(error)),
            Ok(Err(job_lost)) => Err(NodeStageInError::JobLost(job_lost)),
            // Only this task could abort the workers, and it does not.
            Err(_) => Err(NodeStageInError::NotRunning),
        };
        match finished {
            Ok(mut runs) => all.append(&mut runs),
            // Only the first failure counts: the other workers end because of it.
            Err(error) if failure.is_none() => {
                stage_in.cancel();
                report_failure(&stage_in, &error).await;
                failure = Some(error);
            }
            Err(_) => {}
        }
    }
    stage_in.runs.send_replace(Some(failure.map_or_else(|| Ok(Arc::new(all)), |error| Err(error.share()))));
}

/// Reports to the coordinator that the stage-in failed here. If it cannot be reached at all, both sides end the stage-in on their
/// own, because the coordinator receives no reports and this node receives no answers.
async fn report_failure(stage_in: &NodeStageIn, error: &NodeStageInError) {
    let request = CoordinatorRequest::Fail { stage_in: stage_in.number, rejection: Rejection::from(error) };
    if let Err(unreported) = stage_in.context.peers.ask_until_lost(stage_in.coordinator(), request).await {
        tracing::warn!(%error, %unreported, "the stage-in failed on this node, and the coordinator cannot be reached");
    }
}

/// Runs one worker. Blocks the calling thread.
fn run_worker(stage_in: &Arc<NodeStageIn>, number: u16, placement: Arc<Placement>) -> Result<Vec<Run>, StageInError> {
    let drive = stage_in.context.store.roomiest_drive();
    let runs = work(stage_in, number, placement, drive.clone()).map_err(|error| name_drive(&drive, error))?;
    Ok(runs.into_iter().map(|(file, len)| Run { file, len, drive: drive.clone() }).collect())
}

fn work(
    stage_in: &Arc<NodeStageIn>,
    number: u16,
    placement: Arc<Placement>,
    drive: Arc<Drive>,
) -> Result<Vec<(File, u64)>, StageInError> {
    let (context, memory) = (&stage_in.context, stage_in.memory);
    let runs = RunWriter::new(Box::new(move || drive.unnamed_file()), memory.run_len);
    let sink = NodeSink::new(stage_in.clone(), memory.batches, Handle::current())?;
    let decoder_memory_max = stage_in.selection.decoder_memory_max();
    let config = WorkerConfig {
        placement,
        selection: &stage_in.selection,
        seed: stage_in.seed,
        decoders: DecoderLimits {
            threads: context.decoders,
            ahead_len: memory.decoded_ahead_len,
            memory_max: decoder_memory_max,
        },
        suspect_paths: stage_in.suspect_paths.clone(),
        stored_share: stage_in.stored_share,
    };
    let mut worker = Worker::new(sink, runs, config, stage_in.monitor.clone())?;
    let mut finished: Vec<UnitReport> = Vec::new();
    let mut request = 0;
    loop {
        request += 1;
        let finished_now = std::mem::take(&mut finished);
        let next = CoordinatorRequest::NextUnits { stage_in: stage_in.number, worker: number, request, finished: finished_now };
        let asking = context.peers.ask_until_lost(stage_in.coordinator(), next);
        let reply = context.blocking.wait_for(stage_in.unless_cancelled(asking))?;
        worker.check_suspect_paths()?;
        let no_assignment =
            |error: PeerError| StageInError::NoAssignment { coordinator: stage_in.coordinator(), cause: error.into() };
        match reply.map_err(no_assignment)? {
            CoordinatorReply::Units(units) => finished = worker.run(&units)?,
            // If the stage-in has been canceled in the meantime, the reply to the next request ends this worker.
            CoordinatorReply::Wait => {}
            CoordinatorReply::NoUnit => return worker.finish()?.finish().map_err(StageInError::TempFile),
            _ => return Err(StageInError::Cancelled),
        }
    }
}
