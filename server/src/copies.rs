//! Reads blocks from other nodes that hold them, without the arena: for the copies of a stage-in, and to restore copies after a node
//! was lost. The bytes land in the small memory for exchanges between servers and are verified.

use std::sync::Arc;

use dayfly_meta::checksum::check;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, COPY_PART_LEN, FETCH_ATTEMPTS_MAX};
use dayfly_meta::wire::peer::{ReadReply, ReadRequest, RejectionKind};

use crate::blocking::{Blocking, JobLost};
use crate::peers::{PeerError, Peers};
use crate::store::Dataset;

/// Why chunks could not be read from their holder.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error(transparent)]
    Job(#[from] JobLost),
}

impl CopyError {
    /// Returns whether the holder cannot be reached, or does not answer.
    pub(crate) fn is_absence(&self) -> bool {
        matches!(self, Self::Peer(error) if error.is_absence())
    }

    /// Returns whether the holder does not know the dataset. If it has prepared it before, it has returned since, or a new server took
    /// its place.
    pub(crate) fn is_unknown_dataset(&self) -> bool {
        matches!(self, Self::Peer(PeerError::Rejected { rejection, .. }) if rejection.kind == RejectionKind::NoSuchDataset)
    }
}

/// Splits chunks into parts that one request may ask for.
pub(crate) fn parts(dataset: &Dataset, chunks: impl IntoIterator<Item = Chunk>) -> Vec<Vec<Chunk>> {
    let (mut parts, mut bytes) = (Vec::<Vec<Chunk>>::new(), 0);
    for chunk in chunks {
        let len = dataset.chunk(chunk).map_or(0, |info| info.len);
        match parts.last_mut() {
            Some(part) if bytes + len <= COPY_PART_LEN && part.len() < BATCH_BLOCKS_MAX => {
                part.push(chunk);
                bytes += len;
            }
            _ => {
                parts.push(vec![chunk]);
                bytes = len;
            }
        }
    }
    parts
}

/// What a holder has sent.
pub(crate) struct Pulled {
    /// `None` stands for a chunk that the holder does not have, cannot read, or has sent damaged several times.
    pub(crate) found: Vec<Option<Vec<u8>>>,
    /// Why a chunk is missing, if the holder has said so.
    pub(crate) reason: Option<String>,
}

/// Reads chunks of one part from a holder. With `takes_over`, the holder reads from their origins those that it does not have.
///
/// # Errors
/// The holder cannot be reached, or rejects the request.
pub(crate) async fn pull(
    peers: &Peers,
    blocking: &dyn Blocking,
    dataset: &Arc<Dataset>,
    holder: NodeId,
    chunks: &[Chunk],
    takes_over: bool,
) -> Result<Pulled, CopyError> {
    let mut found: Vec<Option<Vec<u8>>> = vec![None; chunks.len()];
    let mut reason = None;
    for attempt in 0..FETCH_ATTEMPTS_MAX {
        let missing: Vec<usize> = (0..chunks.len()).filter(|&index| found[index].is_none()).collect();
        if missing.is_empty() {
            break;
        }
        let wanted: Vec<Chunk> = missing.iter().map(|&index| chunks[index]).collect();
        let (read, is_final) = pull_once(peers, blocking, dataset, holder, wanted, (attempt > 0, takes_over)).await?;
        // The first reason says most: at the second attempt, the holder drops a copy that it could not read.
        reason = reason.or(read.reason);
        for (index, bytes) in missing.into_iter().zip(read.found) {
            found[index] = bytes;
        }
        if is_final {
            break;
        }
    }
    Ok(Pulled { found, reason })
}

/// Makes one request. Returns also whether another request would get no more.
async fn pull_once(
    peers: &Peers,
    blocking: &dyn Blocking,
    dataset: &Arc<Dataset>,
    holder: NodeId,
    chunks: Vec<Chunk>,
    (recheck, takes_over): (bool, bool),
) -> Result<(Pulled, bool), CopyError> {
    let timeout = peers.deadlines().request;
    let mut slots = Vec::with_capacity(chunks.len());
    for &chunk in &chunks {
        let len = dataset.chunk(chunk).map_or(0, |info| info.len);
        slots.push(peers.exchange_slot(len).await?);
    }
    let request = ReadRequest::Chunks { dataset: dataset.id(), chunks: chunks.clone(), recheck, takes_over };
    let (reply, pulled) = peers.pull_pieces(holder, request, slots, timeout).await?;
    let ReadReply::Chunks { missing, reasons } = reply else { return Err(PeerError::InvalidAnswer(holder).into()) };
    if pulled.slots.len() != chunks.len() || pulled.lens.len() != chunks.len() {
        return Err(PeerError::InvalidAnswer(holder).into());
    }
    let is_final = missing.len() == chunks.len();
    let unread = (!pulled.unread.pieces.is_empty()).then(|| pulled.unread.reason.clone());
    let reason = unread.or_else(|| reasons.into_iter().next());
    let dataset = dataset.clone();
    let verifying = blocking.run(move || {
        let is_sent = |index: u32| !missing.iter().any(|chunk| chunk.index == index) && !pulled.unread.pieces.contains(&index);
        let parts = (0_u32..).zip(&chunks).zip(pulled.slots.iter().zip(&pulled.lens));
        let verified = parts.map(|((index, &chunk), (slot, &len))| {
            let expected = dataset.catalog().chunk_checksum(chunk)?;
            let is_good = is_sent(index) && len == slot.len() as u64 && check(slot, expected).is_ok();
            is_good.then(|| slot.to_vec())
        });
        verified.collect()
    });
    Ok((Pulled { found: verifying.await?, reason }, is_final))
}
