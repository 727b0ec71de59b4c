//! Copying: before a dataset with several copies becomes visible, each node copies the blocks of which it is a holder from their
//! owners, in the order in which they lie on the owners' drives.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::catalog::block_len;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, NodeId, SampleId};
use dayfly_meta::limits::{COPY_REQUESTS, COPY_WINDOW_BLOCKS};
use dayfly_meta::segment::DrivePosition;
use dayfly_meta::wire::peer::NodeStageInReply;
use dayfly_meta::wire::status::Reads;
use dayfly_stagein::origin::is_readable;
use futures_util::stream::{self, StreamExt};
use tokio::time::{Instant, sleep};
use tracing::Instrument;

use super::landing::ROOM_ATTEMPTS_MAX;
use super::{NodeStageIn, NodeStageInError};
use crate::copies::{self, parts, pull};
use crate::store::{BlockPosition, Dataset, Window, WindowSelection, room_for};

/// While a node looks for the blocks to copy, each time that it has looked at so many samples counts as progress.
const SAMPLES_PER_STEP: u32 = 1 << 16;

/// How far a node has come with its copies.
#[derive(Default)]
pub(super) struct Copying {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    wanted: Reads,
    copied: Reads,
    /// Grows as long as there is progress.
    steps: u64,
    end: Option<Result<(), Arc<NodeStageInError>>>,
}

impl Copying {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Chunks that one request brings: whole blocks, or one chunk of a larger block.
struct PulledBlocks {
    chunks: Vec<Chunk>,
    bytes: Vec<Vec<u8>>,
}

/// A large block whose chunks arrive one after another.
type Partial = Option<(BlockId, DrivePosition)>;

impl NodeStageIn {
    /// Begins to copy blocks, unless this node has begun, and returns how far it has come. With `is_required`, a copy that finds no
    /// room is an error.
    pub(crate) fn copy(self: &Arc<Self>, is_required: bool) -> Result<NodeStageInReply, NodeStageInError> {
        let mut copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        if copying.is_none() {
            let dataset = self.publication().prepared.clone().ok_or(NodeStageInError::NotPrepared)?;
            let started = Arc::<Copying>::default();
            let (stage_in, progress) = (self.clone(), started.clone());
            let task = async move {
                let copied = stage_in.copy_all(&dataset, &progress, is_required).await;
                progress.state().end = Some(copied.map_err(Arc::new));
            };
            let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
            tasks.spawn(task.instrument(tracing::info_span!("copy", node = %self.context.node, stage_in = self.number)));
            *copying = Some(started);
        }
        let Some(copying) = &*copying else { return Err(NodeStageInError::NotRunning) };
        let state = copying.state();
        let is_done = match &state.end {
            Some(Err(error)) => return Err(NodeStageInError::Failed(error.clone())),
            Some(Ok(())) => true,
            None => false,
        };
        let State { wanted, copied, steps, .. } = *state;
        Ok(NodeStageInReply::Copying { wanted, copied, steps, is_done })
    }

    /// Returns whether this node has made its copies. One that was lost while it did is told to stop when it returns.
    pub(super) fn has_copied(&self) -> bool {
        let copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        copying.as_ref().is_some_and(|copying| matches!(copying.state().end, Some(Ok(()))))
    }

    async fn copy_all(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        progress: &Arc<Copying>,
        is_required: bool,
    ) -> Result<(), NodeStageInError> {
        let (mut after, me, nodes) = (None, self.context.node, self.context.peers.count());
        loop {
            let (scanned, scanning) = (dataset.clone(), progress.clone());
            let scan = move || window(&scanned, me, nodes, after, &scanning);
            let Window { blocks, is_last, found } = self.context.blocking.run(scan).await?;
            if after.is_none() {
                progress.state().wanted = found;
            }
            for of_owner in blocks.chunk_by(|one, other| one.group == other.group) {
                let Some(owner) = of_owner.first().and_then(|block| dataset.catalog().owner(BlockId(block.block))) else {
                    continue;
                };
                self.copy_from(owner, dataset, of_owner, progress, is_required).await?;
            }
            after = blocks.last().copied();
            if is_last {
                break;
            }
        }
        let synced = dataset.clone();
        self.context.blocking.run(move || synced.sync_copies()).await?.map_err(NodeStageInError::WriteCopy)
    }

    /// Copies blocks of one owner.
    async fn copy_from(
        self: &Arc<Self>,
        owner: NodeId,
        dataset: &Arc<Dataset>,
        blocks: &[BlockPosition],
        progress: &Copying,
        is_required: bool,
    ) -> Result<(), NodeStageInError> {
        let chunks = blocks.iter().flat_map(|block| {
            let len = dataset.catalog().block(BlockId(block.block)).map_or(0, |(_, len)| len);
            Chunk::all(BlockId(block.block), len)
        });
        let pulling = parts(dataset, chunks).into_iter().flat_map(|part| whole_blocks(dataset, part)).map(|chunks| async move {
            let Some(read) = self.pull_from(owner, dataset, &chunks).await? else {
                return Ok(PulledBlocks { chunks, bytes: Vec::new() });
            };
            let bytes: Option<Vec<Vec<u8>>> = read.found.into_iter().collect();
            let reason = read.reason.unwrap_or_else(|| "its copy is damaged".to_owned());
            bytes.map(|bytes| PulledBlocks { chunks, bytes }).ok_or(NodeStageInError::NoGoodCopy { owner, reason })
        });
        let mut pulled = stream::iter(pulling).buffered(COPY_REQUESTS);
        let mut partial = None;
        while let Some(pulled) = pulled.next().await {
            partial = self.store(dataset, pulled?, partial, progress, is_required).await?;
        }
        Ok(())
    }

    /// Reads chunks from their owner. An owner that does not answer is asked again until it is lost or has returned; then there is
    /// nothing to copy.
    async fn pull_from(
        &self,
        owner: NodeId,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
    ) -> Result<Option<copies::Pulled>, NodeStageInError> {
        let (start, peers) = (Instant::now(), &self.context.peers);
        let patience = self.deadlines().lost_after + self.deadlines().node_silent;
        loop {
            let error = match pull(peers, &*self.context.blocking, dataset, owner, chunks, false).await {
                Ok(read) => return Ok(Some(read)),
                Err(error) => error,
            };
            if !peers.roster().is_live(owner) || error.is_unknown_dataset() {
                return Ok(None);
            }
            if !error.is_absence() || start.elapsed() > patience {
                return Err(NodeStageInError::Copy { owner, error });
            }
            sleep(self.deadlines().progress_interval).await;
        }
    }

    /// Stores what one request has brought.
    async fn store(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        pulled: PulledBlocks,
        partial: Partial,
        progress: &Copying,
        is_required: bool,
    ) -> Result<Partial, NodeStageInError> {
        let PulledBlocks { chunks, bytes } = pulled;
        let Some(&first) = chunks.first() else { return Ok(partial) };
        let catalog = dataset.catalog();
        let block_len = catalog.block(first.block).map_or(0, |(_, len)| len);
        let is_piece = dataset.chunk(first).is_some_and(|info| !info.is_block);
        let len = |chunk: &Chunk| dataset.chunk(*chunk).map_or(0, |info| info.len);
        let owner = |chunk: &Chunk| catalog.owner(chunk.block);
        let lens: Vec<u64> = if is_piece { vec![block_len] } else { chunks.iter().map(len).collect() };
        let total = Reads { count: lens.len() as u64, bytes: lens.iter().sum() };
        if bytes.is_empty() {
            // The owner is lost. Perhaps no live node has what cannot be read again by itself.
            let has_origin = |block| catalog.block(block).is_some_and(|(sample, _)| is_readable(catalog, sample));
            if let Some(owner) = chunks.iter().find(|chunk| !has_origin(chunk.block)).and_then(owner) {
                return Err(NodeStageInError::LostUncopied { owner });
            }
            // Recovery reads the others from their origins.
            dataset.set_lacks_copies();
            return Ok(None);
        }
        let positions = match partial {
            Some((block, position)) if is_piece && block == first.block => vec![position],
            // The first chunk of this block found no room.
            _ if is_piece && first.index > 0 => return Ok(None),
            _ => match self.allocate(dataset, &lens).await? {
                Some(positions) => positions,
                None if is_required => return Err(NodeStageInError::NoCopyRoom(total.bytes)),
                None => return Ok(None),
            },
        };
        let Some(&position) = positions.first() else { return Ok(None) };
        let is_last = !is_piece || Chunk::all(first.block, block_len).last() == Some(first);
        let target = dataset.clone();
        let writing = self.context.blocking.run(move || {
            if is_piece {
                let piece = bytes.first().map_or(&[][..], Vec::as_slice);
                target.write_copy_chunk(position, first, piece)?;
                if is_last {
                    target.publish_copy(first.block, position, block_len);
                }
                return Ok(());
            }
            let blocks: Vec<(BlockId, Vec<u8>)> = chunks.iter().map(|chunk| chunk.block).zip(bytes).collect();
            target.write_copies(&positions, &blocks)
        });
        writing.await?.map_err(NodeStageInError::WriteCopy)?;
        progress.state().steps += 1;
        if is_last {
            progress.state().copied.add(total);
        }
        Ok((is_piece && !is_last).then_some((first.block, position)))
    }

    /// Returns positions for blocks. Evicts cached blocks if there is no room.
    async fn allocate(&self, dataset: &Arc<Dataset>, lens: &[u64]) -> Result<Option<Vec<DrivePosition>>, NodeStageInError> {
        let room = lens.iter().copied().map(room_for).sum();
        for attempts_left in (0..ROOM_ATTEMPTS_MAX).rev() {
            let (target, wanted) = (dataset.clone(), lens.to_vec());
            let allocating = self.context.blocking.run(move || target.allocate_copies(&wanted));
            let positions = allocating.await?.map_err(NodeStageInError::WriteCopy)?;
            if positions.is_some() || attempts_left == 0 || !self.context.room.make_room(room).await? {
                return Ok(positions);
            }
        }
        Ok(None)
    }
}

/// Divides a part so that each chunk of a larger block comes alone.
fn whole_blocks(dataset: &Dataset, part: Vec<Chunk>) -> Vec<Vec<Chunk>> {
    let is_whole = |chunk: &Chunk| dataset.chunk(*chunk).is_some_and(|info| info.is_block);
    part.chunk_by(|one, other| is_whole(one) && is_whole(other)).map(<[Chunk]>::to_vec).collect()
}

/// Returns the blocks to copy that come after `after`: of one owner after another, in the order in which they arrived there. Each
/// node begins with another owner, so that not all of them read from the same one.
fn window(dataset: &Dataset, me: NodeId, nodes: usize, after: Option<BlockPosition>, progress: &Copying) -> Window {
    let catalog = dataset.catalog();
    let mut selection = WindowSelection::new(after, COPY_WINDOW_BLOCKS);
    for sample in (0..catalog.header().samples).map(SampleId) {
        if sample.0.is_multiple_of(SAMPLES_PER_STEP) {
            progress.state().steps += 1;
        }
        let Some((size, blocks)) = catalog.sample(sample) else { continue };
        for (part, block) in (0..).zip(blocks) {
            let (Some(owner), Some(arrival)) = (catalog.owner(BlockId(block)), catalog.arrival(BlockId(block))) else { continue };
            let id = BlockId(block);
            if !catalog.is_stored(id) {
                // Its owner was lost, or had no room. Recovery reads it from its origin.
                if dataset.holders(id).contains(&me) {
                    dataset.set_lacks_copies();
                }
                continue;
            }
            let turn = (owner.index() + nodes - me.index()) % nodes.max(1);
            let position = BlockPosition { group: turn as u32, offset: arrival.into(), block };
            if owner != me && selection.wants(position) && dataset.holders(id).contains(&me) {
                selection.see(position, block_len(size, part));
            }
        }
    }
    selection.finish()
}
