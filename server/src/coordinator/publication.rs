//! The requests to all nodes that turn a plan into a dataset: begin, finish, merge, prepare, commit, settle or abort.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dayfly_meta::catalog::{About, Source};
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::{DIRECTORIES_MAX_DEFAULT, DIRECTORIES_PER_FILE_MAX};
use dayfly_meta::path::{display, join, link_destination};
use dayfly_meta::wire::control::{Copies, Counts, NodeShare, Phase, StageInRequest, Summary};
use dayfly_meta::wire::peer::{NodeStageInReply, NodeStageInRequest};
use futures_util::future::join_all;
use tokio::time::sleep;

use super::conflicts::Rivals;
use super::distribution::{self, Distribution};
use super::fit::Fit;
use super::merge::{MergeJob, Merged, Run};
use super::stall::StallDetector;
use super::term::{self, Outcome};
use super::{CoordinatedStageIn, Coordinator, CoordinatorContext, CoordinatorError};
use crate::membership::decision::Decision;
use crate::peers::PeerError;
use crate::store::Dataset;

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
    /// The number of the user's request.
    pub(super) id: u64,
    /// The dataset that this one replaces.
    pub(super) replaces: Option<DatasetId>,
    /// Free bytes on each node, in the order of node numbers. They are the capacities of the placement.
    pub(super) free: Vec<u64>,
    /// What is stored of the samples.
    pub(super) fit: Fit,
    /// How many nodes store each block.
    pub(super) copies: u16,
    /// How many bytes of copies each node has made.
    pub(super) copied_bytes: Mutex<HashMap<NodeId, u64>>,
}

impl Publication<'_> {
    /// Does everything up to the point where all nodes could make the dataset visible.
    pub(super) async fn prepare(&self) -> Result<Merged, CoordinatorError> {
        let (start, context) = (Instant::now(), &self.coordinator.context);
        let (selection, seed) = (self.request.selection.clone(), self.request.seed);
        let max_rate = self.stage_in.share_of_max_rate();
        let stage_in = self.stage_in.number;
        let Fit { stored_share, expected_files, .. } = self.fit;
        let capacities = self.free.clone();
        let request = self.id;
        let begin =
            NodeStageInRequest::Begin { stage_in, request, selection, seed, max_rate, capacities, stored_share, expected_files };
        self.ask_all_until_lost(&begin, context.deadlines().request).await?;
        self.stage_in.set_all_begun();
        self.stage_in.all_read().await;
        let read = start.elapsed();
        let runs = self.finish().await?;
        let finished = start.elapsed();
        self.stage_in.progress().phase = Phase::Merging;
        let merged = self.merge(runs).await?;
        let Counts { unselected, refused, skipped, .. } = self.counts(&merged);
        if merged.samples + merged.symlinks == 0 && unselected + refused + skipped > 0 {
            return Err(CoordinatorError::NothingLeft { unselected, refused, skipped });
        }
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
        let replies = self.ask_all_until_lost(&request, context.deadlines().offer).await?;
        let mut runs = Vec::new();
        for (node, reply) in replies {
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
            root: link_destination(b"", &join(&context.prefix, &self.request.target)),
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
        let mut lack: Vec<NodeId> = self.stage_in.participants().into_iter().filter(|&node| node != own).collect();
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

    /// Makes all nodes copy the blocks of which they are holders, and waits until they have done so. Does without nodes that are lost
    /// meanwhile.
    async fn make_copies(&self) -> Result<(), CoordinatorError> {
        let (context, deadlines) = (&self.coordinator.context, self.coordinator.context.deadlines());
        let is_required = self.request.copies != Copies::Auto;
        let request = NodeStageInRequest::Copy { stage_in: self.stage_in.number, is_required };
        self.stage_in.progress().phase = Phase::Copying;
        let mut detector = StallDetector::new(deadlines);
        let mut copied_bytes = HashMap::new();
        loop {
            let (mut wanted_bytes, mut all_steps, mut left, mut slowest) = (0, 0, 0, None);
            let nodes = self.stage_in.participants().into_iter().filter(|&node| context.peers.roster().is_live(node));
            let asking = nodes.map(|node| {
                let asked = context.peers.ask(node, request.clone(), deadlines.request);
                async move { (node, asked.await) }
            });
            for (node, reply) in join_all(asking).await {
                let is_done = match reply {
                    Ok(NodeStageInReply::Copying { wanted, copied, steps, is_done }) => {
                        wanted_bytes += wanted.bytes;
                        copied_bytes.insert(node, copied.bytes);
                        all_steps += steps;
                        is_done
                    }
                    Ok(_) => return Err(PeerError::InvalidAnswer(node).into()),
                    // Either it answers again, or it will be lost, or the stage-in stalls.
                    Err(error) if error.is_absence() => false,
                    Err(error) => return Err(error.into()),
                };
                if !is_done {
                    left += 1;
                    slowest.get_or_insert(node);
                }
            }
            {
                let mut progress = self.stage_in.progress();
                (progress.copied_bytes, progress.to_copy_bytes) = (copied_bytes.values().sum(), wanted_bytes);
            }
            let Some(node) = slowest else {
                *self.copied_bytes.lock().unwrap_or_else(PoisonError::into_inner) = copied_bytes;
                return Ok(());
            };
            if detector.is_stalled(all_steps) {
                return Err(detector.error(format!("{left} nodes, node {node} among them, to copy blocks")));
            }
            // The more nodes there are, the longer it takes to ask them all.
            sleep(deadlines.progress_interval * (1 + self.free.len() as u32 / 64)).await;
        }
    }

    /// Makes a node prepare the catalog. A node that does not answer is asked again until it is lost: then the dataset does without
    /// it. If `from` is lost, this node gives the catalog.
    async fn prepare_on(&self, node: NodeId, from: NodeId, merged: &Merged) -> Result<(), PeerError> {
        let (context, start) = (&self.coordinator.context, Instant::now());
        let patience = context.deadlines().lost_after + context.deadlines().node_silent;
        let mut request = NodeStageInRequest::Prepare {
            stage_in: self.stage_in.number,
            dataset: self.dataset(),
            target: self.request.target.clone(),
            from,
            len: merged.len,
            checksum: merged.checksum,
            replaces: self.replaces,
            counts: self.counts(merged),
        };
        loop {
            let asked = context.peers.ask(node, request.clone(), context.deadlines().prepare).await;
            let Err(error) = asked else { return Ok(()) };
            if !context.peers.roster().is_live(node) {
                return Ok(());
            }
            if !error.is_absence() || start.elapsed() > patience {
                return Err(error);
            }
            if let NodeStageInRequest::Prepare { from, .. } = &mut request {
                *from = context.node;
            }
            sleep(context.deadlines().progress_interval).await;
        }
    }

    /// Returns what the stage-in has encountered, in its sources and when it merged what lies in them.
    fn counts(&self, merged: &Merged) -> Counts {
        let mut counts = self.stage_in.counts();
        counts.refused += merged.refused.count;
        counts.replaced += merged.replaced.count;
        counts.symlinks += merged.symlinks;
        counts.symlinks_out += merged.symlinks_out.count;
        counts.symlink_out = merged.symlinks_out.first.clone();
        merged.replaced.notes.iter().for_each(|note| counts.note(note));
        merged.refused.names.iter().for_each(|name| counts.note(&format!("refused: {name}")));
        counts
    }

    fn dataset(&self) -> DatasetId {
        DatasetId(self.stage_in.number as u32)
    }

    /// Makes the dataset visible on all nodes. Fails before that if this node may no longer decide.
    pub(super) async fn commit(&self) -> Result<(), CoordinatorError> {
        let context = &self.coordinator.context;
        if !context.membership.tenure().may_publish() {
            return Err(CoordinatorError::CutOff(context.deadlines().publish_lease.as_secs_f64()));
        }
        // A node may have been lost since the last look.
        for node in self.stage_in.lost(&context.peers.roster()) {
            if !self.stage_in.publish_without(node) {
                return Err(CoordinatorError::NodeLost { node, address: context.peers.address(node) });
            }
        }
        match term::carry_out(context, self.stage_in.number, Decision::Commit, &self.stage_in.members()).await {
            Outcome::Done { strangers } => {
                term::catch_up(context, strangers).await;
                Ok(())
            }
            Outcome::StoodDown => Err(CoordinatorError::StoodDown),
            Outcome::Failed(error) => Err(error.into()),
        }
    }

    /// Frees, on all nodes, the dataset that this one replaced. Returns the error of a node that could not.
    pub(super) async fn settle(&self) -> Option<PeerError> {
        term::settle(&self.coordinator.context, self.stage_in.number).await.into_iter().next()
    }

    /// Undoes the stage-in on all nodes that answer. The others undo it when their next reports are answered.
    pub(super) async fn abort(&self) {
        let epoch = self.coordinator.context.peers.roster().epoch();
        let request = NodeStageInRequest::Abort { stage_in: self.stage_in.number, epoch };
        let (peers, timeout) = (&self.coordinator.context.peers, self.coordinator.context.deadlines().request);
        let asking = self.stage_in.participants().into_iter().map(|node| peers.ask(node, request.clone(), timeout));
        join_all(asking).await;
    }

    /// Asks all nodes that take part at once, each until it is lost, and waits for all of them. Returns their replies, or the first error.
    async fn ask_all_until_lost(
        &self,
        request: &NodeStageInRequest,
        timeout: Duration,
    ) -> Result<Vec<(NodeId, NodeStageInReply)>, PeerError> {
        let peers = &self.coordinator.context.peers;
        let ask = |node| async move {
            Ok((node, peers.until_lost(node, timeout, || peers.ask(node, request.clone(), timeout)).await?))
        };
        join_all(self.stage_in.participants().into_iter().map(ask)).await.into_iter().collect()
    }

    /// Returns how many bytes of copies there are and how many are missing. What is on a node that has been lost does not count, even
    /// if the node has returned.
    fn copied(&self, nodes: &[NodeShare]) -> (u64, u64) {
        if self.copies == 1 {
            return (0, 0);
        }
        let lost = self.stage_in.lost(&self.coordinator.context.peers.roster());
        let members: Vec<NodeId> = self.stage_in.participants().into_iter().filter(|node| !lost.contains(node)).collect();
        let copied_by = self.copied_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let copied: u64 = members.iter().filter_map(|node| copied_by.get(node)).sum();
        let owned: u64 = members.iter().filter_map(|node| Some(nodes.get(node.index())?.bytes)).sum();
        // Unless the dataset fits only in part, a block is not stored because its owner was lost before it arrived there.
        let is_whole = self.fit.partial.is_none();
        let of = |node: &NodeShare| node.bytes + if is_whole { node.unstored_bytes } else { 0 };
        let promised = nodes.iter().map(of).sum::<u64>() * u64::from(self.copies);
        (copied, promised.saturating_sub(owned + copied))
    }

    /// Returns the summary for the user. `unsettled` is the error if a node could not settle.
    pub(super) async fn summary(
        &self,
        merged: Merged,
        unsettled: Option<PeerError>,
        start: Instant,
    ) -> Result<Summary, CoordinatorError> {
        let context = &self.coordinator.context;
        let mut counts = self.counts(&merged);
        if let Some(error) = unsettled {
            counts.note(&format!("the dataset is visible, but not all nodes have freed what it replaced yet: {error}"));
        }
        let dataset = context.store.dataset(self.dataset());
        let dataset = dataset.ok_or_else(|| CoordinatorError::ReplacedAtOnce(display(&self.request.target)))?;
        let nodes = context.peers.count();
        let distribution = context.blocking.run(move || Distribution::of(&dataset, nodes)).await?;
        let Distribution { mut nodes, sizes, classes, archives, .. } = distribution;
        let imbalance_permille = distribution::imbalance_permille(&nodes, self.stage_in.participants());
        let (rates, rate_interval_ms) = self.stage_in.rates();
        for ((node, counted), rates) in nodes.iter_mut().zip(&self.stage_in.progress().nodes).zip(rates) {
            (node.counted, node.rates) = (*counted, rates);
        }
        let (copied_bytes, uncopied_bytes) = self.copied(&nodes);
        Ok(Summary {
            copies: self.copies,
            copied_bytes,
            uncopied_bytes,
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

/// Returns the summary of a dataset that an earlier coordinator made. How it was made is not known here.
pub(super) async fn summary_of(
    context: &CoordinatorContext,
    dataset: Arc<Dataset>,
    start: Instant,
) -> Result<Summary, CoordinatorError> {
    let (nodes, header, roster) = (context.peers.count(), *dataset.catalog().header(), context.peers.roster());
    let (counted, counts) = (roster.clone(), dataset.counts().clone());
    let read = move || (Distribution::of(&dataset, nodes), dataset.bytes_of_copies_on(|node| counted.is_live(node)));
    let (distribution, held_bytes) = context.blocking.run(read).await?;
    let promised_bytes = if header.copies > 1 { header.bytes.saturating_mul(header.copies.into()) } else { 0 };
    let Distribution { nodes, sizes, classes, archives, others } = distribution;
    let owned: u64 = roster.live().filter_map(|node| Some(nodes.get(node.index())?.bytes)).sum();
    Ok(Summary {
        copies: header.copies,
        copied_bytes: held_bytes.saturating_sub(owned),
        uncopied_bytes: promised_bytes.saturating_sub(held_bytes),
        samples: header.samples.into(),
        bytes: header.bytes,
        others,
        archives,
        catalog_bytes: header.file_len,
        source_bytes: 0,
        counts,
        elapsed_ms: start.elapsed().as_millis() as u64,
        imbalance_permille: distribution::imbalance_permille(&nodes, context.peers.roster().live()),
        redone_bytes: 0,
        nodes,
        sizes,
        classes,
        rate_interval_ms: context.deadlines().progress_interval.as_millis() as u64,
    })
}
