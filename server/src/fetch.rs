//! The one read path: a block is here, or in the arena already, or is fetched from its owner. Equal wishes are joined;
//! all blocks of one request that one owner has are asked for in one message.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::limits::{ARENA_TIMEOUT, BATCH_BLOCKS_MAX, REQUEST_TIMEOUT};
use dayfly_meta::path::display;
use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_transport::{Answer, Slot};
use futures_util::future::join_all;

use crate::arena::{Arena, Claim, Key, Lease, Ticket};
use crate::peers::Peers;
use crate::store::Dataset;

/// What became of a wish.
pub(crate) enum Fetched {
    /// It is in the locations.
    Here,
    /// It is in the arena.
    Leased(Lease),
    /// It cannot be had; for the user.
    Failed(String),
}

/// Fetches for this node's processes.
pub(crate) struct Fetcher {
    arena: Arena,
    peers: Arc<Peers>,
    remote_reads: AtomicU64,
    remote_bytes: AtomicU64,
    served_blocks: AtomicU64,
    served_bytes: AtomicU64,
}

/// A block to be loaded: its place in the request, the right to load it, and room for it.
struct Load {
    at: usize,
    block: BlockId,
    ticket: Ticket,
    slot: Slot,
}

impl Fetcher {
    pub(crate) fn new(arena: Arena, peers: Arc<Peers>) -> Self {
        let zero = || AtomicU64::new(0);
        Self { arena, peers, remote_reads: zero(), remote_bytes: zero(), served_blocks: zero(), served_bytes: zero() }
    }

    /// Blocks that came over the network, and their bytes.
    pub(crate) fn remote(&self) -> (u64, u64) {
        (self.remote_reads.load(Ordering::Relaxed), self.remote_bytes.load(Ordering::Relaxed))
    }

    /// Blocks sent to others, and their bytes.
    pub(crate) fn served(&self) -> (u64, u64) {
        (self.served_blocks.load(Ordering::Relaxed), self.served_bytes.load(Ordering::Relaxed))
    }

    /// Gets as many of the first blocks as there is room for, at least one.
    ///
    /// Only for the first block is anything waited for, room or another's load: a request that holds some blocks never waits
    /// for more, so requests cannot wait for each other in a ring.
    pub(crate) async fn fetch(&self, dataset: &Dataset, blocks: &[BlockId]) -> Vec<Fetched> {
        let mut fetched: Vec<Option<Fetched>> = Vec::with_capacity(blocks.len());
        let mut loads: BTreeMap<NodeId, Vec<Load>> = BTreeMap::new();
        for (at, &block) in blocks.iter().take(BATCH_BLOCKS_MAX).enumerate() {
            let (Some(owner), Some((_, len))) = (dataset.catalog().owner(block), dataset.catalog().block(block)) else {
                fetched.push(Some(Fetched::Failed("there is no such block".to_owned())));
                continue;
            };
            if dataset.is_here(block) {
                fetched.push(Some(Fetched::Here));
                continue;
            }
            let key = (dataset.id(), block);
            let claim = if at == 0 { self.claim_patiently(key).await } else { Ok(self.arena.claim(key)) };
            match claim {
                Ok(Claim::Held(lease)) => fetched.push(Some(Fetched::Leased(lease))),
                Ok(Claim::Wait(_)) => break,
                Ok(Claim::Load(ticket)) => {
                    let room = if at == 0 { self.arena.room_within(len, ARENA_TIMEOUT).await } else { self.arena.room(len) };
                    match room {
                        Some(slot) => {
                            loads.entry(owner).or_default().push(Load { at, block, ticket, slot });
                            fetched.push(None);
                        }
                        None if at == 0 => {
                            let reason = "the arena is full of leased blocks; give more with --memory";
                            ticket.fail(reason);
                            fetched.push(Some(Fetched::Failed(reason.to_owned())));
                        }
                        None => break,
                    }
                }
                Err(reason) => fetched.push(Some(Fetched::Failed(reason))),
            }
        }
        let loading = loads.into_iter().map(|(owner, loads)| self.load(dataset, owner, loads));
        for (at, result) in join_all(loading).await.into_iter().flatten() {
            fetched[at] = Some(result);
        }
        fetched.into_iter().map_while(|result| result).collect()
    }

    /// Waits out another's load; its failure is ours too.
    async fn claim_patiently(&self, key: Key) -> Result<Claim, String> {
        loop {
            let mut loading = match self.arena.claim(key) {
                Claim::Wait(loading) => loading,
                claim => return Ok(claim),
            };
            // The loader's own deadlines bound this wait.
            if let Ok(reason) = loading.wait_for(Option::is_some).await
                && let Some(reason) = reason.as_deref()
            {
                return Err(reason.to_owned());
            }
        }
    }

    fn had(&self, lease: Lease) -> Fetched {
        self.remote_reads.fetch_add(1, Ordering::Relaxed);
        self.remote_bytes.fetch_add(lease.len(), Ordering::Relaxed);
        Fetched::Leased(lease)
    }

    /// One message to one owner.
    async fn load(&self, dataset: &Dataset, owner: NodeId, loads: Vec<Load>) -> Vec<(usize, Fetched)> {
        let blocks: Vec<BlockId> = loads.iter().map(|load| load.block).collect();
        let lens: Vec<u64> = loads.iter().map(|load| load.slot.len() as u64).collect();
        let (slots, tickets): (Vec<Slot>, Vec<_>) =
            loads.into_iter().map(|load| (load.slot, (load.at, load.block, load.ticket))).unzip();
        let request = Request::Read { dataset: dataset.id(), blocks };
        let pulled = self.peers.pull(owner, &request, slots, REQUEST_TIMEOUT).await;
        let (found, slots, got) = match pulled {
            Ok((Reply::Read { found }, pulled)) if found.len() == tickets.len() => (found, pulled.slots, pulled.lens),
            Ok(_) => return failed(dataset, tickets, &format!("node {owner} answers what was not asked")),
            Err(error) => return failed(dataset, tickets, &error.to_string()),
        };
        let mut results = Vec::with_capacity(tickets.len());
        for ((((at, block, ticket), slot), found), (got, len)) in
            tickets.into_iter().zip(slots).zip(found).zip(got.into_iter().zip(lens))
        {
            results.push((
                at,
                match found && got == len {
                    true => self.had(ticket.fill(slot)),
                    false => Fetched::Failed(format!("node {owner} does not hold {}", name(dataset, block))),
                },
            ));
        }
        results
    }

    /// The owner's side.
    pub(crate) fn serve(&self, dataset: &Dataset, blocks: &[BlockId]) -> Answer {
        let pieces: Vec<_> = blocks.iter().map(|&block| dataset.piece(block)).collect();
        let found: Vec<bool> = pieces.iter().map(Option::is_some).collect();
        let nothing = || dayfly_transport::Piece::Bytes(Vec::new());
        let pieces: Vec<_> = pieces.into_iter().map(|piece| piece.unwrap_or_else(nothing)).collect();
        self.served_blocks.fetch_add(found.iter().filter(|&&found| found).count() as u64, Ordering::Relaxed);
        self.served_bytes.fetch_add(pieces.iter().map(|piece| piece.len()).sum(), Ordering::Relaxed);
        Answer { message: dayfly_meta::wire::encode(&Reply::Read { found }), pieces }
    }
}

fn failed(dataset: &Dataset, tickets: Vec<(usize, BlockId, Ticket)>, reason: &str) -> Vec<(usize, Fetched)> {
    let failed = |(at, block, ticket): (usize, BlockId, Ticket)| {
        let reason = format!("cannot read {}: {reason}", name(dataset, block));
        ticket.fail(&reason);
        (at, Fetched::Failed(reason))
    };
    tickets.into_iter().map(failed).collect()
}

fn name(dataset: &Dataset, block: BlockId) -> String {
    let sample = dataset.catalog().block(block).map_or(0, |(sample, _)| sample.0);
    format!("block {} (sample {sample} of '{}')", block.0, display(dataset.target()))
}
