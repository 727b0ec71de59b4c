//! The requests to all nodes that turn a plan into a dataset: begin, finish, merge, prepare, commit, settle or abort.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dayfly_meta::catalog::{About, Source};
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::{DIRECTORIES_MAX_DEFAULT, DIRECTORIES_PER_FILE_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::control::{Copies, Phase, StageInRequest, Summary};
use dayfly_meta::wire::peer::{NodeStageInReply, NodeStageInRequest};
use dayfly_meta::wire::status::Reads;
use futures_util::future::join_all;
use tokio::time::sleep;

use super::conflicts::Rivals;
use super::distribution::{self, Distribution};
use super::fit::Fit;
use super::merge::{MergeJob, Merged, Run};
use super::stall::StallDetector;
use super::{CoordinatedStageIn, Coordinator, CoordinatorError};
use crate::peers::PeerError;

/// A merge writes at most about this many bytes for each byte of a run: the members that it sets aside, the catalog, and
/// what it sorts for the catalog.
const MERGED_PER_RUN: u64 = 4;
/// The most nodes that one node gives the catalog to at a time.
const CATALOG_FAN_OUT: usize = 4;

/// A stage-in on its way to becoming a dataset.
pub(super) struct Publication<'a> {
    pub(super) coordinator: &'a Arc<Coordinator>,
    pub(super) stage_in: &'a Arc<CoordinatedStageIn>,
    pub(super) request: &'a StageInRequest,
    pub(super) sources: Vec<Source>,
    pub(super) rivals: Arc<Rivals>,
    /// Free bytes on each node, in the order of node numbers. They are the capacities of the placement.
    pub(super) free: Vec<u64>,
    /// What is stored of the samples.
    pub(super) fit: Fit,
    /// How many nodes store each block.
    pub(super) copies: u16,
    /// What has been copied.
    pub(super) copied: Mutex<Copied>,
}

/// What all nodes have copied.
#[derive(Clone, Copy, Default)]
pub(super) struct Copied {
    wanted_bytes: u64,
    copied: Reads,
    uncopied: Reads,
}

impl Publication<'_> {
    /// Does everything up to the point where all nodes could make the dataset visible.
    pub(super) async fn prepare(&self) -> Result<Merged, CoordinatorError> {
        let (start, context) = (Instant::now(), &self.coordinator.context);
        let (selection, seed) = (self.request.selection.clone(), self.request.seed);
        let max_rate = self.request.max_rate.map(|rate| rate.div_ceil(self.free.len().max(1) as u64));
        let stage_in = self.stage_in.number;
        let Fit { stored_share, expected_files, .. } = self.fit;
        let capacities = self.free.clone();
        let begin = NodeStageInRequest::Begin { stage_in, selection, seed, max_rate, capacities, stored_share, expected_files };
        self.ask_all(&begin, context.deadlines().request).await?;
        self.stage_in.set_all_begun();
        self.stage_in.all_read().await;
        let read = start.elapsed();
        let runs = self.finish().await?;
        let finished = start.elapsed();
        self.stage_in.progress().phase = Phase::Merging;
        let merged = self.merge(runs).await?;
        self.stage_in.progress().phase = Phase::Publishing;
        let built = start.elapsed();
        self.distribute_catalog(&merged).await?;
        let prepared = start.elapsed();
        if self.copies > 1 {
            self.make_copies().await?;
        }
        tracing::info!(?read, ?finished, ?built, ?prepared, "a stage-in is ready to commit; times since it began");
        Ok(merged)
    }

    /// Makes all nodes write their blocks to their drives. Returns all runs.
    async fn finish(&self) -> Result<Vec<Run>, CoordinatorError> {
        let context = &self.coordinator.context;
        let request = NodeStageInRequest::Finish { stage_in: self.stage_in.number };
        let replies = self.ask_all(&request, context.deadlines().offer).await?;
        let mut runs = Vec::new();
        for (node, reply) in context.peers.nodes().zip(replies) {
            let NodeStageInReply::Finished { run_lens, counted } = reply else {
                return Err(PeerError::InvalidAnswer(node).into());
            };
            self.stage_in.count(node, counted);
            runs.extend((0..).zip(run_lens).map(|(number, len)| Run { node, number, len }));
        }
        Ok(runs)
    }

    async fn merge(&self, runs: Vec<Run>) -> Result<Merged, CoordinatorError> {
        let context = &self.coordinator.context;
        let created_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        let by_files = DIRECTORIES_MAX_DEFAULT + self.stage_in.counts().files * DIRECTORIES_PER_FILE_MAX;
        let directories_max = Some(self.request.selection.max_directories.unwrap_or(by_files));
        let runs_len: u64 = runs.iter().map(|run| run.len).sum();
        context.room.make_headroom(runs_len.saturating_mul(MERGED_PER_RUN)).await?;
        let job = MergeJob {
            coordinator: self.coordinator.clone(),
            stage_in: self.stage_in.clone(),
            runs,
            about: About {
                seed: self.request.seed,
                capacities: self.free.clone(),
                created_s,
                group: self.request.selection.group,
                copies: self.copies,
                directories_max,
            },
            sources: self.sources.clone(),
            rivals: self.rivals.clone(),
        };
        context.blocking.run(move || job.run()).await?
    }

    /// Makes all nodes prepare the catalog. The catalog spreads along a tree: in each round, every node that has the catalog
    /// gives it to a few more nodes.
    async fn distribute_catalog(&self, merged: &Merged) -> Result<(), CoordinatorError> {
        let context = &self.coordinator.context;
        context.stage_ins.get(self.stage_in.number)?.set_catalog(merged.file.clone());
        let own = context.node;
        let mut have = vec![own];
        let mut lack: Vec<NodeId> = context.peers.nodes().filter(|&node| node != own).collect();
        let others = async {
            while !lack.is_empty() {
                let next = lack.split_off(lack.len().saturating_sub(have.len() * CATALOG_FAN_OUT));
                let from = have.iter().cycle();
                let preparing = next.iter().zip(from).map(|(&node, &from)| self.prepare_on(node, from, merged));
                join_all(preparing).await.into_iter().collect::<Result<(), PeerError>>()?;
                have.extend(next);
            }
            Ok(())
        };
        tokio::try_join!(self.prepare_on(own, own, merged), others)?;
        Ok(())
    }

    /// Makes all nodes copy the blocks of which they are holders, and waits until they have done so.
    async fn make_copies(&self) -> Result<(), CoordinatorError> {
        let deadlines = self.coordinator.context.deadlines();
        let is_required = self.request.copies != Copies::Auto;
        let request = NodeStageInRequest::Copy { stage_in: self.stage_in.number, is_required };
        self.stage_in.progress().phase = Phase::Copying;
        let mut detector = StallDetector::new(deadlines);
        loop {
            let (mut all, mut all_steps, mut left, mut slowest) = (Copied::default(), 0, 0, None);
            for (node, reply) in self.coordinator.context.peers.nodes().zip(self.ask_all(&request, deadlines.request).await?) {
                let NodeStageInReply::Copying { wanted, copied, uncopied, steps, is_done } = reply else {
                    return Err(PeerError::InvalidAnswer(node).into());
                };
                all.wanted_bytes += wanted.bytes;
                all.copied.add(copied);
                all.uncopied.add(uncopied);
                all_steps += steps;
                if !is_done {
                    left += 1;
                    slowest.get_or_insert(node);
                }
            }
            {
                let mut progress = self.stage_in.progress();
                (progress.copied_bytes, progress.to_copy_bytes) = (all.copied.bytes, all.wanted_bytes);
            }
            let Some(node) = slowest else {
                *self.copied.lock().unwrap_or_else(PoisonError::into_inner) = all;
                return Ok(());
            };
            if detector.is_stalled(all_steps) {
                return Err(detector.error(format!("{left} nodes, node {node} among them, to copy blocks")));
            }
            // The more nodes there are, the longer it takes to ask them all.
            sleep(deadlines.progress_interval * (1 + self.free.len() as u32 / 64)).await;
        }
    }

    async fn prepare_on(&self, node: NodeId, from: NodeId, merged: &Merged) -> Result<(), PeerError> {
        let context = &self.coordinator.context;
        let request = NodeStageInRequest::Prepare {
            stage_in: self.stage_in.number,
            dataset: self.dataset(),
            target: self.request.target.clone(),
            from,
            len: merged.len,
            checksum: merged.checksum,
        };
        context.peers.ask(node, request, context.deadlines().prepare).await.map(drop)
    }

    fn dataset(&self) -> DatasetId {
        DatasetId(self.stage_in.number as u32)
    }

    /// Makes the dataset visible on all nodes.
    pub(super) async fn commit(&self, replaces: Option<DatasetId>) -> Result<(), CoordinatorError> {
        let request = NodeStageInRequest::Commit { stage_in: self.stage_in.number, replaces };
        self.ask_all(&request, self.coordinator.context.deadlines().request).await?;
        Ok(())
    }

    /// Frees, on all nodes, the dataset that this one replaced.
    pub(super) async fn settle(&self) -> Result<(), PeerError> {
        let request = NodeStageInRequest::Settle { stage_in: self.stage_in.number };
        self.ask_all(&request, self.coordinator.context.deadlines().request).await.map(drop)
    }

    /// Undoes the stage-in on all nodes.
    pub(super) async fn abort(&self) -> Result<(), PeerError> {
        let request = NodeStageInRequest::Abort { stage_in: self.stage_in.number };
        self.ask_all(&request, self.coordinator.context.deadlines().request).await.map(drop)
    }

    /// Asks all nodes at once, and waits for all of them. Returns their replies in order, or the first error.
    async fn ask_all(&self, request: &NodeStageInRequest, timeout: Duration) -> Result<Vec<NodeStageInReply>, PeerError> {
        let peers = &self.coordinator.context.peers;
        let asking = peers.nodes().map(|node| peers.ask(node, request.clone(), timeout));
        join_all(asking).await.into_iter().collect()
    }

    /// Returns the summary for the user. `unsettled` is the error if a node could not settle.
    pub(super) async fn summary(
        &self,
        merged: Merged,
        unsettled: Option<PeerError>,
        start: Instant,
    ) -> Result<Summary, CoordinatorError> {
        let context = &self.coordinator.context;
        let mut counts = self.stage_in.counts().clone();
        if let Some(error) = unsettled {
            counts.note(&format!("the dataset is visible, but not all nodes have freed what it replaced yet: {error}"));
        }
        counts.refused += merged.refused.count;
        counts.replaced += merged.replaced.count;
        merged.replaced.notes.iter().for_each(|note| counts.note(note));
        merged.refused.names.iter().for_each(|name| counts.note(&format!("refused: {name}")));
        let dataset = context.store.dataset(self.dataset());
        let dataset = dataset.ok_or_else(|| CoordinatorError::ReplacedAtOnce(display(&self.request.target)))?;
        let nodes = context.peers.count();
        let distribution = context.blocking.run(move || Distribution::of(&dataset, nodes)).await?;
        let Distribution { mut nodes, sizes, classes, archives } = distribution;
        let imbalance_permille = distribution::imbalance_permille(&nodes);
        let (rates, rate_interval_ms) = self.stage_in.rates();
        for ((node, counted), rates) in nodes.iter_mut().zip(&self.stage_in.progress().nodes).zip(rates) {
            (node.counted, node.rates) = (*counted, rates);
        }
        let copied = *self.copied.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Summary {
            copies: self.copies,
            copied_bytes: copied.copied.bytes,
            uncopied_bytes: copied.uncopied.bytes,
            samples: merged.samples,
            bytes: merged.bytes,
            others: merged.others,
            archives,
            catalog_bytes: merged.len,
            source_bytes: self.stage_in.progress().source_bytes,
            counts,
            elapsed_ms: start.elapsed().as_millis() as u64,
            imbalance_permille,
            redone_bytes: self.stage_in.redone_bytes(),
            nodes,
            sizes,
            classes,
            rate_interval_ms,
        })
    }
}
