//! Reads blocks that this node holds in place of a lost node, in the background, and stores them on its drives. They come from other
//! nodes that hold copies, or from their origins.
//!
//! The bytes do not pass through the arena, where they would displace what readers want. But readers that want a chunk while it is
//! being recovered share its read, and recovery takes chunks that readers have brought or are bringing from the arena. So a chunk
//! is read from its origin once.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::Arc;

use dayfly_meta::checksum::check;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::limits::{COPY_REQUESTS, RECOVERY_WRITE_LEN, RECOVERY_YIELD, RECOVERY_YIELD_MAX};
use dayfly_stagein::origin::{OriginReader, SharedFiles};
use futures_util::stream::{self, StreamExt};
use tokio::time::{Instant, sleep, timeout};

use super::Fetcher;
use super::shared_read::{JoinedRead, OpenRead, SharedRead, open_read};
use crate::arena::{Claimed, Lease, PendingLoad, Wanted};
use crate::cache_writer::sync_copies;
use crate::copies::{CopyError, parts, pull};
use crate::origins::has_origin;
use crate::store::Dataset;

/// What became of blocks.
#[derive(Debug, Default)]
pub(crate) struct Recovered {
    pub(crate) recovered: Vec<BlockId>,
    /// Blocks that could not be read.
    pub(crate) failed: Vec<BlockId>,
    /// Whether blocks were read that no drive had room for, or that no drive could write.
    pub(crate) is_full: bool,
}

/// Where the chunks of a batch come from.
#[derive(Default)]
struct Begun {
    /// Chunks in the arena.
    leased: Vec<(Chunk, Lease)>,
    /// Chunks that a reader is loading into the arena.
    pending: Vec<(Chunk, PendingLoad)>,
    /// Chunks that are being read for a peer.
    joined: Vec<(Chunk, JoinedRead)>,
    /// Chunks for recovery to read.
    new: Vec<(Chunk, OpenRead)>,
}

/// The reads of a batch that others may join. Dropping it takes them from the table.
struct Registered<'a> {
    fetcher: &'a Fetcher,
    dataset: &'a Dataset,
    chunks: Vec<Chunk>,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.fetcher.without_arena.remove(self.dataset.id(), &self.chunks);
    }
}

impl Fetcher {
    /// Waits a moment while readers use all streams to the parallel file system.
    pub(crate) async fn let_readers_go_first(&self) {
        let start = Instant::now();
        while self.origins.is_busy() && start.elapsed() < RECOVERY_YIELD_MAX {
            sleep(RECOVERY_YIELD).await;
        }
    }

    /// Reads blocks from their origins, unless readers have brought them, and stores them on this node's drives. The caller bounds
    /// their bytes.
    pub(crate) async fn recover(self: &Arc<Self>, dataset: &Arc<Dataset>, blocks: &[BlockId]) -> Recovered {
        let len = |block: BlockId| dataset.catalog().block(block).map_or(0, |(_, len)| len);
        let chunks: Vec<Chunk> = blocks.iter().flat_map(|&block| Chunk::all(block, len(block))).collect();
        let begun = self.begin_recovery(dataset, &chunks);
        let registered = Registered { fetcher: self, dataset, chunks: begun.new.iter().map(|(chunk, _)| *chunk).collect() };
        let read = self.read_to_recover(dataset, begun).await;
        self.store_recovered(dataset, read.clone()).await;
        // From here on, readers find the blocks on the drives.
        drop(registered);
        let mut outcome = Recovered::default();
        let read: HashSet<Chunk> = read.into_iter().map(|(chunk, _)| chunk).collect();
        for &block in blocks {
            if dataset.is_local(block) {
                outcome.recovered.push(block);
            } else if Chunk::all(block, len(block)).all(|chunk| read.contains(&chunk)) {
                outcome.is_full = true;
            } else {
                outcome.failed.push(block);
            }
        }
        outcome
    }

    /// Finds the chunks that readers have brought or are bringing, and announces that recovery reads the others.
    ///
    /// The table of reads is locked during both, and a reader looks into that table after it has claimed a chunk in the arena. So
    /// no chunk is read by both, and neither waits for the other in a circle.
    fn begin_recovery(&self, dataset: &Arc<Dataset>, chunks: &[Chunk]) -> Begun {
        let mut begun = Begun::default();
        let mut reads = self.without_arena.lock();
        let wanted = (0..).zip(chunks).filter_map(|(index, &chunk)| Some(Wanted { index, chunk, info: dataset.chunk(chunk)? }));
        // Nothing is loaded into the arena here, so there are no loads among the claims.
        let Claimed { leased, pending, .. } = self.arena.claim(dataset, wanted, u64::MAX, false);
        let mut is_found = vec![false; chunks.len()];
        for (index, lease) in leased {
            is_found[index as usize] = true;
            begun.leased.push((chunks[index as usize], lease));
        }
        for (index, chunk, load) in pending {
            is_found[index as usize] = true;
            begun.pending.push((chunk, load));
        }
        for (&chunk, _) in chunks.iter().zip(&is_found).filter(|(_, is_found)| !**is_found) {
            match reads.entry((dataset.id(), chunk)) {
                Entry::Occupied(read) => begun.joined.push((chunk, read.get().clone())),
                Entry::Vacant(vacant) => {
                    let (open, joined) = open_read();
                    vacant.insert(joined);
                    begun.new.push((chunk, open));
                }
            }
        }
        begun
    }

    /// Returns the chunks that could be read.
    async fn read_to_recover(&self, dataset: &Arc<Dataset>, begun: Begun) -> Vec<(Chunk, Arc<Vec<u8>>)> {
        let Begun { leased, pending, joined, new } = begun;
        let copy = |(chunk, lease): (Chunk, Lease)| (chunk, Arc::new(lease.bytes().to_vec()));
        let mut read: Vec<(Chunk, Arc<Vec<u8>>)> = leased.into_iter().map(copy).collect();
        let mut new = self.read_from_holders(dataset, new, &mut read).await;
        new.retain(|(chunk, _)| has_origin(dataset, *chunk));
        let chunks: Vec<Chunk> = new.iter().map(|(chunk, _)| *chunk).collect();
        let buffers = chunks.iter().map(|&chunk| vec![0; dataset.chunk(chunk).map_or(0, |info| info.len as usize)]).collect();
        let reading = stream::iter(self.origins.read(dataset, &chunks, buffers));
        let mut reading = reading.buffer_unordered(self.origins.background_streams());
        while let Some(part) = reading.next().await {
            for (number, result) in part {
                let (chunk, open) = &new[number];
                let result: SharedRead = result.map(Arc::new);
                read.extend(result.iter().map(|bytes| (*chunk, bytes.clone())));
                open.end(result);
            }
        }
        let limit = self.peers.deadlines().origin;
        for (chunk, joined) in joined {
            if let Ok(Some(Ok(bytes))) = timeout(limit, joined.outcome()).await {
                read.push((chunk, bytes));
            }
        }
        for (chunk, load) in pending {
            // This wait is bounded by the deadlines of the request that loads the chunk. Perhaps the chunk does not stay in the
            // arena; then the reader's copy may have been cached, or a later scan finds the block again.
            let _ = load.end.await;
            read.extend(self.arena.find(&(dataset.id(), chunk)).map(|lease| copy((chunk, lease))));
        }
        read
    }

    /// Reads the chunks of which other nodes hold copies, also in place of lost nodes or of this one. Returns the others.
    ///
    /// Each holder is asked until one has the chunk: another new server lacks the same chunks as this one, and a node that holds blocks
    /// in place of a lost one may not have got them yet.
    async fn read_from_holders(
        &self,
        dataset: &Arc<Dataset>,
        mut new: Vec<(Chunk, OpenRead)>,
        read: &mut Vec<(Chunk, Arc<Vec<u8>>)>,
    ) -> Vec<(Chunk, OpenRead)> {
        let (absent, lost) = (self.absent(dataset), self.peers.roster().lost());
        let sources: HashMap<BlockId, Vec<(NodeId, bool)>> = new
            .iter()
            .map(|(chunk, _)| {
                let mut holders = Vec::new();
                if dataset.copies() > 1 {
                    holders = self.good_holders(dataset, chunk.block, absent.as_ref());
                    holders.extend(self.good_stand_ins(dataset, chunk.block, &lost, absent.as_ref()));
                }
                let substitute = self.substitute(dataset, chunk.block).map(|node| (node, true));
                (chunk.block, holders.into_iter().map(|node| (node, false)).chain(substitute).collect())
            })
            .collect();
        for turn in 0..sources.values().map(Vec::len).max().unwrap_or(0) {
            let mut by_holder = BTreeMap::<(NodeId, bool), Vec<Chunk>>::new();
            for (chunk, _) in &new {
                if let Some(&source) = sources.get(&chunk.block).and_then(|sources| sources.get(turn)) {
                    by_holder.entry(source).or_default().push(*chunk);
                }
            }
            new = self.read_from(dataset, by_holder, new, read).await;
        }
        new
    }

    /// Reads chunks from these nodes. Returns those that they did not send.
    async fn read_from(
        &self,
        dataset: &Arc<Dataset>,
        by_holder: BTreeMap<(NodeId, bool), Vec<Chunk>>,
        mut new: Vec<(Chunk, OpenRead)>,
        read: &mut Vec<(Chunk, Arc<Vec<u8>>)>,
    ) -> Vec<(Chunk, OpenRead)> {
        let parts = by_holder.into_iter().flat_map(|(holder, chunks)| {
            parts(dataset, chunks).into_iter().map(move |chunks| (holder, chunks)).collect::<Vec<_>>()
        });
        let pulling = parts.map(|((holder, takes_over), chunks)| self.pull_part(dataset, holder, chunks, takes_over));
        let mut pulling = stream::iter(pulling).buffer_unordered(COPY_REQUESTS);
        let open: HashMap<Chunk, &OpenRead> = new.iter().map(|(chunk, open)| (*chunk, open)).collect();
        let mut found = HashSet::new();
        // Readers wait for these reads, so each ends as soon as its bytes are here.
        while let Some(part) = pulling.next().await {
            for (chunk, bytes) in part {
                let Some((open, bytes)) = open.get(&chunk).zip(bytes.map(Arc::new)) else { continue };
                open.end(Ok(bytes.clone()));
                found.insert(chunk);
                read.push((chunk, bytes));
            }
        }
        new.retain(|(chunk, _)| !found.contains(chunk));
        new
    }

    /// Reads chunks from a node. One that does not answer is not asked again for now. Readers wait for these chunks, too, so one that is
    /// asked only to spare reads of origins must be reached soon.
    async fn pull_part(
        &self,
        dataset: &Arc<Dataset>,
        holder: NodeId,
        chunks: Vec<Chunk>,
        takes_over: bool,
    ) -> Vec<(Chunk, Option<Vec<u8>>)> {
        if self.absent(dataset).is_some_and(|absent| absent.contains(holder)) {
            return Vec::new();
        }
        let is_only_to_spare = takes_over && chunks.iter().all(|&chunk| has_origin(dataset, chunk));
        if is_only_to_spare && !self.peers.reaches(holder, self.peers.deadlines().request / 8).await {
            return Vec::new();
        }
        match pull(&self.peers, &*self.blocking, dataset, holder, &chunks, takes_over).await {
            Ok(pulled) => chunks.into_iter().zip(pulled.found).collect(),
            Err(error) => {
                if let CopyError::Peer(error) = &error {
                    self.note_absence(holder, dataset, error);
                }
                Vec::new()
            }
        }
    }

    /// Stores chunks of a compressed tar that was read again.
    pub(crate) async fn store_streamed(&self, dataset: &Arc<Dataset>, read: Vec<(Chunk, Arc<Vec<u8>>)>) {
        self.store_recovered(dataset, read).await;
    }

    /// Returns a reader of sources, and counts a read.
    pub(crate) fn stream_reader(&self) -> Arc<OriginReader<SharedFiles>> {
        self.origins.stream_reader()
    }

    /// Writes verified chunks to the drives and waits until they are there.
    async fn store_recovered(&self, dataset: &Arc<Dataset>, read: Vec<(Chunk, Arc<Vec<u8>>)>) {
        let (target, arena) = (dataset.clone(), self.arena.clone());
        let storing = self.blocking.run(move || {
            let expected = |chunk: Chunk| target.catalog().chunk_checksum(chunk);
            let is_good = |chunk: Chunk, bytes: &[u8]| expected(chunk).is_some_and(|expected| check(bytes, expected).is_ok());
            let good =
                read.iter().map(|(chunk, bytes)| (*chunk, bytes.as_slice())).filter(|(chunk, bytes)| is_good(*chunk, bytes));
            let (mut batch, mut batch_len) = (Vec::new(), 0);
            for (chunk, bytes) in good {
                if batch_len + bytes.len() > RECOVERY_WRITE_LEN && !batch.is_empty() {
                    write(&target, &std::mem::take(&mut batch))?;
                    batch_len = 0;
                }
                batch_len += bytes.len();
                batch.push((chunk, bytes));
            }
            write(&target, &batch)?;
            sync_copies(&target, &arena)
        });
        match storing.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(dataset = dataset.id().0, %error, "cannot store recovered blocks"),
            Err(error) => tracing::warn!(dataset = dataset.id().0, %error, "cannot store recovered blocks"),
        }
    }
}

/// Writes chunks to the drives, as many as there is room for.
fn write(dataset: &Dataset, chunks: &[(Chunk, &[u8])]) -> io::Result<()> {
    let is_any_written = dataset.write_cached(chunks)? > 0;
    if !is_any_written && chunks.len() > 1 {
        // There is no room for all of them together. Some may fit.
        for chunk in chunks {
            dataset.write_cached(std::slice::from_ref(chunk))?;
        }
    }
    Ok(())
}
