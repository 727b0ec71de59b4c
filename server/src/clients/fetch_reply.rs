//! Answers a fetch: sends chunks to the client as they arrive. Chunks that arrive while the client
//! takes one message go out together in the next one.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::limits::LOCAL_MESSAGE_LEN_MAX;
use dayfly_meta::wire::decode;
use dayfly_meta::wire::local::{FetchedChunk, FromClient, FromServer};
use futures_util::future::BoxFuture;

use super::Client;
use crate::arena::{Lease, LeaseHolder};
use crate::fetch::{FetchError, Fetched, FetchedChunks, PendingFetch};
use crate::store::Dataset;

impl Client {
    /// Fetches chunks and sends each as it arrives. Chunks that arrive before the client has taken one message go out with the
    /// next message, so a slow client costs memory for at most one message and one part of the answer. A client that takes no
    /// message for a long time loses its leases, but nothing else: the messages that it reads later carry the old token, so it
    /// asks for those chunks again.
    pub(super) async fn fetch(&mut self, dataset: &Arc<Dataset>, chunks: &[Chunk], recheck: bool) -> io::Result<()> {
        let context = self.context.clone();
        let Some(budget) = self.holder.budget() else {
            let nothing = FromServer::Fetched { chunks: Vec::new(), lease: 0, token: 0, is_last: true };
            return self.sender.send(&nothing, &[]).await;
        };
        let start = Instant::now();
        let _pending_read = context.client_reads.begin();
        let bad_copies = if recheck { context.fetcher.recheck(dataset, chunks).await } else { Vec::new() };
        // A connection that holds leases must not wait for room, because two such connections could wait for each other's
        // leases forever. It gets the chunks that need no wait, and releases its leases before it asks for the others.
        let mut fetch = match budget.may_wait {
            true => context.fetcher.begin(dataset, chunks, budget.bytes).await,
            false => context.fetcher.begin_if_room(dataset, chunks, budget.bytes),
        };
        self.holder.reserve(fetch.claimed_bytes);
        context.prefetcher.note_demand(dataset.id(), fetch.awaited.iter().filter_map(|&at| chunks.get(at as usize)));
        self.read_ahead.note_request(&context.fetcher, dataset, chunks);
        let sent = self.deliver(&mut fetch, &bad_copies, || context.client_reads.end(start.elapsed())).await;
        self.holder.reserve(0);
        sent
    }

    /// Sends the chunks of a fetch as they arrive. `bad_copies` says, by position in the request, why this node's copy of a chunk
    /// cannot be read. `at_end` is called when the last message goes out.
    async fn deliver(
        &mut self,
        fetch: &mut PendingFetch,
        bad_copies: &[Option<FetchError>],
        at_end: impl Fn(),
    ) -> io::Result<()> {
        let patience = self.context.deadlines().send;
        let Self { receiver, sender, holder, .. } = self;
        let judge = |(at, fetched)| match (fetched, bad_copies.get(at as usize).cloned().flatten()) {
            (Fetched::Local, Some(error)) => (at, Fetched::Failed(error)),
            (fetched, _) => (at, fetched),
        };
        let mut pending = FetchedChunks::new();
        // The message on its way, and whether it is the last.
        let mut sending: Option<(bool, BoxFuture<'_, io::Result<()>>)> = None;
        let stuck = tokio::time::sleep(patience);
        tokio::pin!(stuck);
        let mut is_stuck = false;
        // An empty message now and then shows the client that the server is still at work, while a read waits for the parallel file
        // system.
        let quiet_max = self.context.deadlines().request;
        let quiet = tokio::time::sleep(quiet_max);
        tokio::pin!(quiet);
        let mut is_quiet = false;
        loop {
            if sending.is_none() && (!pending.is_empty() || fetch.is_done() || is_quiet) {
                is_quiet = false;
                quiet.as_mut().reset(tokio::time::Instant::now() + quiet_max);
                let part = split_message(&mut pending);
                let is_last = fetch.is_done() && pending.is_empty();
                if is_last {
                    at_end();
                }
                let (chunks, lease, token) = grant(holder, part);
                let message = FromServer::Fetched { chunks, lease, token, is_last };
                let sender = &*sender;
                let send: BoxFuture<'_, _> = Box::pin(async move { sender.send_patiently(&message, &[]).await });
                sending = Some((is_last, send));
                stuck.as_mut().reset(tokio::time::Instant::now() + patience);
                is_stuck = false;
            }
            let is_sending = sending.is_some();
            let sent = async {
                match &mut sending {
                    Some((is_last, send)) => send.await.map(|()| *is_last),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                sent = sent => {
                    sending = None;
                    if sent? {
                        return Ok(());
                    }
                }
                part = fetch.next(), if !fetch.is_done() => pending.extend(part.unwrap_or_default().into_iter().map(judge)),
                message = receiver.receive() => match message?.as_deref().map(decode::<FromClient>) {
                    Some(Ok(FromClient::Release { leases })) => holder.release(&leases),
                    Some(_) => {
                        let reason = "the client sent a request before the previous one was answered";
                        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
                    }
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                },
                () = &mut quiet, if !is_sending && !is_quiet => is_quiet = true,
                () = &mut stuck, if is_sending && !is_stuck => {
                    // The client may be stopped for hours, and must not hold memory all that time. The message goes out
                    // eventually, or the process ends.
                    is_stuck = true;
                    holder.revoke();
                    pending.retain(|(_, fetched)| !matches!(fetched, Fetched::Leased(_)));
                    fetch.cancel();
                    holder.reserve(0);
                }
            }
        }
    }
}

/// Removes from `part` the first chunks, as many as fit in one message, and returns them. Errors name paths, so they may be
/// long.
fn split_message(part: &mut FetchedChunks) -> FetchedChunks {
    let mut room = LOCAL_MESSAGE_LEN_MAX / 2;
    let mut fits = |(_, fetched): &(u32, Fetched)| {
        let len = if let Fetched::Failed(error) = fetched { error.to_string().len() } else { 0 };
        let is_within = len <= room;
        room = room.saturating_sub(len);
        is_within
    };
    let count = part.iter().take_while(|fetched| fits(fetched)).count().max(1).min(part.len());
    let rest = part.split_off(count);
    std::mem::replace(part, rest)
}

/// Records the leases of a part. Returns the part in the form that is sent to the client, the number with which the client
/// releases these leases, and their token.
fn grant(holder: &LeaseHolder<Lease>, part: FetchedChunks) -> (Vec<(u32, FetchedChunk)>, u64, u64) {
    let mut leases = Vec::new();
    let mut chunks = Vec::with_capacity(part.len());
    for (at, fetched) in part {
        let chunk = match fetched {
            Fetched::Local => FetchedChunk::Here,
            Fetched::Failed(error) => FetchedChunk::Failed { reason: error.to_string() },
            Fetched::Leased(lease) => {
                let offset = lease.offset();
                leases.push(lease);
                FetchedChunk::Leased { offset }
            }
        };
        chunks.push((at, chunk));
    }
    let (lease, token) = holder.grant(leases);
    (chunks, lease, token)
}
