//! Answers the requests of peers for blocks that this node owns.

use std::sync::Arc;

use dayfly_meta::checksum::check;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::limits::MISSING_REASONS_MAX;
use dayfly_meta::wire::peer::{MissingChunk, WhyMissing};
use dayfly_transport::Piece;
use tokio::time::{Instant, timeout_at};

use super::error::{ReadError, read_error};
use super::streams::Late;
use super::{FetchError, Fetched, Fetcher};
use crate::origins::OriginFailure;
use crate::store::Dataset;

/// The answer to a peer's request for chunks.
pub(crate) struct Served {
    /// Chunks that are not sent.
    pub(crate) missing: Vec<MissingChunk>,
    /// Why chunks cannot be read; each reason once.
    pub(crate) reasons: Vec<String>,
    /// A piece for each chunk; an empty one for a chunk that is not sent.
    pub(crate) pieces: Vec<Piece>,
}

/// A chunk that this node owns, but has on no drive. `None` until it is read.
type Absent = Option<Result<Vec<u8>, FetchError>>;

impl Fetcher {
    /// Answers a peer that reads chunks of blocks that this node owns, or with `takes_over`, of blocks whose owner does not answer
    /// that peer. With `recheck`, this node first examines its copies, and no longer uses those that are bad.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
        recheck: bool,
        takes_over: bool,
    ) -> Served {
        if recheck {
            // Whoever asked gets the errors of the chunks themselves.
            self.recheck(dataset, chunks).await;
        }
        dataset.prefetch(chunks);
        let mut pieces: Vec<Option<Piece>> = chunks.iter().map(|&chunk| dataset.piece(chunk)).collect();
        let is_absent = |&index: &usize| pieces[index].is_none() && (takes_over || dataset.is_source(chunks[index].block));
        let absent: Vec<usize> = (0..chunks.len()).filter(is_absent).collect();
        let mut served = Served { missing: Vec::new(), reasons: Vec::new(), pieces: Vec::new() };
        // Other holders are asked for blocks that are to come back to this node. If they lack them, too, readers wait.
        let is_coming = |index: usize| {
            let block = chunks[index].block;
            let is_to_come = || dataset.is_to_come_back(block) || dataset.takes_over(block, &self.peers.roster().lost());
            dataset.copies() > 1 && pieces[index].is_none() && self.is_streamed(dataset, chunks[index]) && is_to_come()
        };
        let reason = |index| if is_coming(index) { WhyMissing::Late } else { WhyMissing::NotOwned };
        let mut why: Vec<WhyMissing> = (0..chunks.len()).map(reason).collect();
        let (late, absent): (Vec<usize>, Vec<usize>) = absent.into_iter().partition(|&index| {
            let chunk = chunks[index];
            let is_late = takes_over || dataset.is_to_come_back(chunk.block);
            is_late && !dataset.is_local(chunk.block) && self.is_streamed(dataset, chunk)
        });
        for index in late {
            why[index] = match self.late(dataset, chunks[index]) {
                Late::Wait => WhyMissing::Late,
                Late::Failed(reason) => served.reason_of(format!("{reason}; such archives can be staged in with --copies 2")),
            };
        }
        if !absent.is_empty() {
            let wanted: Vec<Chunk> = absent.iter().map(|&index| chunks[index]).collect();
            for (index, read) in absent.into_iter().zip(self.read_absent(dataset, &wanted).await) {
                match read {
                    Some(Ok(bytes)) => pieces[index] = Some(Piece::Bytes(bytes)),
                    Some(Err(error)) => why[index] = served.reason(&error),
                    None => why[index] = WhyMissing::Late,
                }
            }
        }
        for (index, (piece, why)) in (0..).zip(pieces.into_iter().zip(why)) {
            if piece.is_none() {
                served.missing.push(MissingChunk { index, why });
            }
            served.pieces.push(piece.unwrap_or(Piece::Bytes(Vec::new())));
        }
        let sent = (chunks.len() - served.missing.len()) as u64;
        self.served.add(sent, served.pieces.iter().map(Piece::len).sum());
        served
    }

    /// Reads chunks for peers that this node owns, or reads in place of their owner, and has on no drive. They go through the arena as
    /// long as it has room, so that equal requests are joined, and this node's processes find the chunks there. A request of a peer
    /// waits neither for room in the arena nor for what this node asks another one for: two nodes could wait for each other.
    ///
    /// The answer must leave before the peer's deadline. What has not been read by then goes on being read, and the peer asks again.
    async fn read_absent(self: &Arc<Self>, dataset: &Arc<Dataset>, chunks: &[Chunk]) -> Vec<Absent> {
        let deadline = Instant::now() + self.peers.deadlines().request / 2;
        let mut read: Vec<Absent> = chunks.iter().map(|_| None).collect();
        let mut is_left = vec![true; chunks.len()];
        let mut fetch = self.begin_as_owner(dataset, chunks);
        fetch.awaited.iter().for_each(|&index| is_left[index as usize] = false);
        while let Ok(part) = timeout_at(deadline, fetch.next()).await {
            let Some(part) = part else {
                // Some may have been evicted again at once.
                is_left.iter_mut().zip(&read).for_each(|(is_left, read)| *is_left |= read.is_none());
                break;
            };
            for (index, fetched) in part {
                let index = index as usize;
                is_left[index] = false;
                match fetched {
                    Fetched::Leased(lease) => {
                        read[index] = Some(Ok(lease.bytes().to_vec()));
                        // There may be room for it on a drive now, even if there was none when it arrived.
                        self.cache_writer.enqueue(dataset, chunks[index], || Some(lease));
                    }
                    Fetched::Failed(error) => read[index] = Some(Err(error)),
                    // The copy that this node caches may be freed at any moment.
                    Fetched::Local => read[index] = self.read_cached(dataset, chunks[index]).await,
                }
                is_left[index] |= read[index].is_none();
            }
        }
        // The arena has no room for the others, or this node is getting them from another one.
        let others: Vec<usize> = (0..chunks.len()).filter(|&index| is_left[index]).collect();
        if !others.is_empty() {
            let wanted: Vec<Chunk> = others.iter().map(|&index| chunks[index]).collect();
            let outcomes = self.read_without_arena(dataset, &wanted, deadline).await;
            for (index, outcome) in others.into_iter().zip(outcomes) {
                let named = |error: OriginFailure| read_error(dataset, chunks[index], ReadError::Origin(error));
                read[index] = outcome.map(|read| read.map(|bytes| bytes.to_vec()).map_err(named));
            }
        }
        read
    }

    /// Reads a chunk from this node's cache and verifies it. Returns `None` if that fails.
    async fn read_cached(&self, dataset: &Arc<Dataset>, chunk: Chunk) -> Absent {
        let from = dataset.clone();
        let bytes = self.blocking.run(move || from.read_cached(chunk)).await.ok()??;
        let expected = dataset.catalog().chunk_checksum(chunk)?;
        check(&bytes, expected).is_ok().then_some(Ok(bytes))
    }
}

impl Served {
    /// Adds the reason of an error, unless it is there already. The reply has room for a few reasons.
    fn reason(&mut self, error: &FetchError) -> WhyMissing {
        self.reason_of(match error {
            FetchError::Read { source, .. } => source.to_string(),
            error => error.to_string(),
        })
    }

    fn reason_of(&mut self, text: String) -> WhyMissing {
        let known = self.reasons.iter().position(|reason| *reason == text);
        let number = known.unwrap_or_else(|| {
            if self.reasons.len() < MISSING_REASONS_MAX {
                self.reasons.push(text);
            }
            self.reasons.len() - 1
        });
        WhyMissing::Failed { reason: number as u32 }
    }
}
