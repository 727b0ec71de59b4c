//! Regular reports to the coordinator. The coordinator's answers decide when and how the stage-in ends on this node.

use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use dayfly_meta::wire::peer::{CoordinatorReply, CoordinatorRequest};
use tokio::time::{Instant, sleep};

use super::{NodeStageIn, NodeStageIns};
use crate::peers::PeerError;

/// As long as the stage-in lasts, keeps room free for its catalog and its sorted runs, even if other programs fill the drive.
pub(super) async fn maintain_headroom(stage_in: Arc<NodeStageIn>) {
    while stage_in.unless_cancelled(sleep(stage_in.deadlines().progress_interval)).await.is_ok() {
        if let Err(error) = stage_in.context.room.make_headroom(0).await {
            tracing::warn!(%error, "cannot evict cached blocks for a stage-in");
        }
    }
}

/// Reports to the coordinator until the stage-in has ended there, then ends it here. The stage-in also ends here if the
/// coordinator is lost.
pub(super) async fn report_until_end(stage_ins: Weak<NodeStageIns>, stage_in: Arc<NodeStageIn>) {
    let end = report(&stage_in).await;
    stage_in.cancel();
    let number = stage_in.number;
    let Some(stage_ins) = stage_ins.upgrade() else { return };
    // The end runs on a task of its own, because ending the stage-in aborts this task.
    tokio::spawn(async move {
        let is_published = match end {
            // A node that was lost meanwhile may have missed the request to make the dataset visible.
            End::Published => match stage_in.commit() {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(%error, "a stage-in was published without this node's part, which ends here");
                    false
                }
            },
            End::Aborted => false,
            End::Unknown => stage_in.is_visible(),
        };
        // Planning the cache may wait for processes; the stage-in's memory is freed before that.
        drop(stage_in);
        let ended = match is_published {
            true => stage_ins.settle(number).await,
            false => stage_ins.abort(number).await,
        };
        if let Err(error) = ended {
            tracing::warn!(%error, "cannot plan the cache after a stage-in; no more blocks are cached");
        }
    });
}

/// How a stage-in has ended, as far as a node knows.
enum End {
    Published,
    Aborted,
    /// The coordinator does not say.
    Unknown,
}

/// Reports until the stage-in has ended or the coordinator is lost.
async fn report(stage_in: &NodeStageIn) -> End {
    let deadlines = *stage_in.deadlines();
    let mut unanswered = Duration::ZERO;
    let mut number = 0;
    loop {
        number += 1;
        sleep(deadlines.progress_interval).await;
        let asked_at = Instant::now();
        let answer = send_report(stage_in, number).await;
        // If this node itself stood still, that counts as one try in vain.
        let waited = asked_at.elapsed().min(deadlines.lost_after + deadlines.node_silent) + deadlines.progress_interval;
        unanswered = if answer.is_ok() { Duration::ZERO } else { unanswered + waited };
        match answer {
            Ok(CoordinatorReply::Continue { files, suspects, max_rate }) => {
                max_rate.into_iter().for_each(|rate| stage_in.monitor.set_max_rate(rate));
                stage_in.suspect_paths.set(suspects);
                stage_in.reserve_room_for_catalog(files).await;
            }
            // A new coordinator does not know yet how the stage-in ends.
            Ok(CoordinatorReply::Wait) => {}
            Ok(CoordinatorReply::Settle) => return End::Published,
            Ok(CoordinatorReply::Abort) => return End::Aborted,
            Ok(_) => return End::Unknown,
            // Only the coordinator knows whether the dataset is visible on all nodes or must disappear again. So a node that has
            // prepared the dataset keeps asking for longer than publishing may take: the coordinator may stand still until just
            // before it is lost, and wait for another node as long. If the coordinator is lost, another one answers.
            Err(_) if stage_in.is_prepared() && unanswered < deadlines.offer + 2 * deadlines.lost_after => {}
            Err(error) => {
                tracing::warn!(coordinator = %stage_in.coordinator(), %error, "the coordinator does not answer; the stage-in ends here");
                *stage_in.coordinator_silence.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                return End::Unknown;
            }
        }
    }
}

async fn send_report(stage_in: &NodeStageIn, number: u64) -> Result<CoordinatorReply, PeerError> {
    let progress = stage_in.monitor.take_counted();
    let request = CoordinatorRequest::Report {
        stage_in: stage_in.number,
        report: number,
        progress,
        waits: if progress.is_still() { stage_in.monitor.current_activities() } else { Vec::new() },
        suspects: stage_in.ingest.take_suspects(),
        sightings: stage_in.suspect_paths.take_sightings(),
    };
    stage_in.context.peers.ask_until_lost(stage_in.coordinator(), request).await
}
