//! The processes of this node: a Unix socket that the same user only may use. On each connection one thing is asked at a time; its
//! leases end with it, or with the process that made it, whoever has inherited it.

mod processes;
mod read_ahead;
mod socket;

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{DatasetId, SampleId};
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, CLIENTS_MAX, LOCAL_MESSAGE_LEN_MAX, ORDER_PART_SAMPLES, RECHECKED_CHUNKS_MAX};
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::local::{FetchedChunk, FromClient, FromServer};
use dayfly_meta::wire::{VERSION, decode};
use futures_util::future::BoxFuture;
use nix::unistd::geteuid;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use crate::arena::{Lease, LeaseHolder};
use crate::coordinator;
use crate::fetch::{FetchError, Fetched, FetchedChunks, PendingFetch};
use crate::prefetch::SampleOrder;
use crate::server::Server;
use crate::store::{Dataset, unnamed_file};
pub(crate) use processes::Processes;
use processes::{Place, end_of};
use read_ahead::ReadAhead;
use socket::{Receiver, Sender};

/// Events on their way to a client; a slow one misses progress, not the end.
pub(crate) const EVENTS_QUEUE_LEN: usize = 4;

/// The socket, and all that is done for those who came through it; dropping it ends all of that.
pub(crate) struct Clients {
    path: PathBuf,
    _tasks: JoinSet<()>,
}

impl Clients {
    pub(crate) fn start(server: Arc<Server>) -> io::Result<Self> {
        let path = server.config().runtime_dir.join(format!("node-{}.sock", server.config().node));
        let listener = UnixListener::bind(&path)?;
        let mut tasks = JoinSet::new();
        tasks.spawn(accept_all(listener, server));
        Ok(Self { path, _tasks: tasks })
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(%error, "the socket was gone already");
        }
    }
}

async fn accept_all(listener: UnixListener, server: Arc<Server>) {
    let permits = Arc::new(Semaphore::new(CLIENTS_MAX));
    let mut clients = JoinSet::new();
    loop {
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let accepted = listener.accept().await;
        while clients.try_join_next().is_some() {}
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a client");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                continue;
            }
        };
        // The folder is 0700 already; this also holds if somebody widens it.
        let pid = match stream.peer_cred() {
            Ok(peer) if peer.uid() == geteuid().as_raw() => peer.pid().unwrap_or(0),
            _ => {
                tracing::warn!("a process of another user was turned away");
                continue;
            }
        };
        let server = server.clone();
        clients.spawn(async move {
            let place = server.processes().enter(server.store().counters(), pid);
            let holder = server.arena().ledger().open(pid);
            let client = Client::new(socket::split(stream, server.deadlines().send), place, holder, server);
            tokio::select! {
                // Not the connection's end: a forked child may have it open.
                () = end_of(pid) => {}
                served = client.serve() => if let Err(error) = served {
                    tracing::debug!(%error, "a client's connection ended");
                },
            }
            drop(permit);
        });
    }
}

struct Client {
    receiver: Receiver,
    sender: Sender,
    place: Place,
    /// Its leases. However the connection ends, they are revoked before they end.
    holder: LeaseHolder<Lease>,
    server: Arc<Server>,
    read_ahead: ReadAhead,
    /// An order that has not come whole yet.
    order: SampleOrder,
    /// What is done for this connection meanwhile; it ends with it.
    tasks: JoinSet<()>,
}

impl Client {
    fn new((receiver, sender): (Receiver, Sender), place: Place, holder: LeaseHolder<Lease>, server: Arc<Server>) -> Self {
        Self {
            receiver,
            sender,
            place,
            holder,
            server,
            read_ahead: ReadAhead::default(),
            order: SampleOrder::default(),
            tasks: JoinSet::new(),
        }
    }

    async fn serve(mut self) -> io::Result<()> {
        let hello = self.receiver.receive().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        match decode::<FromClient>(&hello) {
            Ok(FromClient::Hello { version: VERSION }) => self.welcome().await?,
            Ok(FromClient::Hello { version }) => {
                let reason = format!(
                    "this server speaks version {VERSION} and the client {version}; use the dayfly that started the session"
                );
                return self.refuse(&reason).await;
            }
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "not a hello")),
        }
        while let Some(message) = self.receiver.receive().await? {
            let message = decode::<FromClient>(&message).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            match message {
                FromClient::Hello { .. } => self.welcome().await?,
                FromClient::Datasets => self.list_datasets().await?,
                FromClient::Fetch { dataset, chunks, recheck } => match self.server.store().dataset(dataset) {
                    Some(_) if chunks.len() > BATCH_BLOCKS_MAX => self.refuse("too many blocks at once").await?,
                    Some(_) if recheck && chunks.len() > RECHECKED_CHUNKS_MAX => {
                        self.refuse("too many bad copies at once").await?
                    }
                    Some(dataset) => self.fetch(&dataset, &chunks, recheck).await?,
                    None => self.refuse("the dataset is not there any more").await?,
                },
                FromClient::Release { leases } => self.holder.release(&leases),
                FromClient::Order { dataset, samples, is_last } => self.order(dataset, samples, is_last).await?,
                FromClient::Spill { len } => self.spill(len).await?,
                FromClient::Control(command) => self.control(command).await?,
            }
        }
        Ok(())
    }

    async fn refuse(&self, reason: &str) -> io::Result<()> {
        self.sender.send(&FromServer::Refused { reason: reason.to_owned() }, &[]).await
    }

    /// Sends what is wanted as it comes. What comes while the client has not taken the message before goes with the next one, so at
    /// most one message and one part wait for a slow client. One that takes nothing for long loses its leases, and no more: what it
    /// finds when it goes on names the old token, and it asks again.
    async fn fetch(&mut self, dataset: &Arc<Dataset>, chunks: &[Chunk], recheck: bool) -> io::Result<()> {
        let server = self.server.clone();
        let Some(budget) = self.holder.budget() else {
            let nothing = FromServer::Fetched { chunks: Vec::new(), lease: 0, token: 0, is_last: true };
            return self.sender.send(&nothing, &[]).await;
        };
        let start = Instant::now();
        let _asking = server.reading().begin();
        let bad = if recheck { server.fetcher().recheck(dataset, chunks).await } else { Vec::new() };
        // A connection that has leases does not wait for room, for others that have some may wait for its own. It is told of nothing,
        // and lets go first.
        let mut fetching = match budget.may_wait {
            true => server.fetcher().begin(dataset, chunks, budget.bytes).await,
            false => server.fetcher().begin_if_room(dataset, chunks, budget.bytes),
        };
        self.holder.reserve(fetching.claimed_bytes);
        server.prefetcher().note_demand(dataset.id(), fetching.awaited.iter().filter_map(|&at| chunks.get(at as usize)));
        self.read_ahead.asked(server.fetcher(), dataset, chunks);
        let sent = self.deliver(&mut fetching, &bad, || server.reading().end(start.elapsed())).await;
        self.holder.reserve(0);
        sent
    }

    /// `bad` says of chunks, by place in the request, why what is here cannot be read; `at_end` is called when all has come.
    async fn deliver(&mut self, fetching: &mut PendingFetch, bad: &[Option<FetchError>], at_end: impl Fn()) -> io::Result<()> {
        let patience = self.server.deadlines().send;
        let Self { receiver, sender, holder, .. } = self;
        let judge = |(at, fetched)| match (fetched, bad.get(at as usize).cloned().flatten()) {
            (Fetched::Local, Some(reason)) => (at, Fetched::Failed(reason)),
            (fetched, _) => (at, fetched),
        };
        let mut pending = FetchedChunks::new();
        // Messages on their way: whether it is the last, and how it goes.
        let mut sending: Option<(bool, BoxFuture<'_, io::Result<()>>)> = None;
        let stuck = tokio::time::sleep(patience);
        tokio::pin!(stuck);
        let mut is_stuck = false;
        loop {
            if sending.is_none() && (!pending.is_empty() || fetching.is_done()) {
                let part = split_message(&mut pending);
                let is_last = fetching.is_done() && pending.is_empty();
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
                part = fetching.next(), if !fetching.is_done() => pending.extend(part.unwrap_or_default().into_iter().map(judge)),
                message = receiver.receive() => match message?.as_deref().map(decode::<FromClient>) {
                    Some(Ok(FromClient::Release { leases })) => holder.release(&leases),
                    Some(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "a request before the answer to another")),
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                },
                () = &mut stuck, if is_sending && !is_stuck => {
                    // It may be stopped for hours, and nothing is kept for it meanwhile: the message goes out, or its process ends.
                    is_stuck = true;
                    holder.revoke();
                    pending.retain(|(_, fetched)| !matches!(fetched, Fetched::Leased(_)));
                    fetching.cancel();
                    holder.reserve(0);
                }
            }
        }
    }

    /// Takes a part of an order; with the last, begins to read it ahead, and no longer what was ordered before.
    async fn order(&mut self, dataset: DatasetId, samples: Vec<SampleId>, is_last: bool) -> io::Result<()> {
        if samples.len() > ORDER_PART_SAMPLES {
            return self.refuse("too many samples in one part of an order").await;
        }
        if !self.order.extend(self.server.prefetcher(), samples) {
            self.order = SampleOrder::default();
            return self.refuse("too many samples are ordered on this node").await;
        }
        if !is_last {
            return Ok(());
        }
        let order = std::mem::take(&mut self.order);
        self.tasks.abort_all();
        let Some(dataset) = self.server.store().dataset(dataset) else {
            return self.refuse("the dataset is not there any more").await;
        };
        self.tasks.spawn(self.server.prefetcher().clone().run(dataset, order));
        self.sender.send(&FromServer::Ordered, &[]).await
    }

    async fn welcome(&self) -> io::Result<()> {
        let config = self.server.config();
        let welcome = FromServer::Welcome {
            version: VERSION,
            session: config.session,
            node: config.node,
            nodes: self.server.peers().count() as u16,
            prefix: config.prefix.clone(),
            verify_reads: config.verify_reads,
            arena_len: self.server.arena().len(),
            slot: self.place.slot,
            connection: self.holder.connection(),
            server_timeout_ms: config.deadlines.server.as_millis() as u32,
            heartbeat_timeout_ms: config.deadlines.heartbeat.as_millis() as u32,
        };
        let (status_page, counters) = self.server.store().shared_files();
        let (arena, marks) = self.server.arena().files();
        self.sender.send(&welcome, &[status_page, counters, arena, marks]).await
    }

    async fn list_datasets(&self) -> io::Result<()> {
        // Read first: whatever changes while we list makes the client ask again.
        let generation = self.server.store().generation();
        for dataset in self.server.store().datasets() {
            let files = dataset.client_files()?;
            let message = FromServer::Dataset { id: dataset.id(), target: dataset.target().to_vec() };
            self.sender.send(&message, &files.iter().collect::<Vec<_>>()).await?;
        }
        self.sender.send(&FromServer::DatasetsEnd { generation }, &[]).await
    }

    /// A file for a program that wants one of the kernel's. It is not counted as taken, for nobody sees it end.
    async fn spill(&self, len: u64) -> io::Result<()> {
        let drive = self.server.store().roomiest_drive();
        if drive.free() < len {
            let (reason, path) = ("has no room for a copy of", drive.path().display());
            let reason = format!("node {} {reason} {len} bytes on '{path}'", self.server.config().node);
            return self.sender.send(&FromServer::Refused { reason }, &[]).await;
        }
        match unnamed_file(drive.path()) {
            Ok(file) => self.sender.send(&FromServer::Spill, &[&file]).await,
            Err(error) => {
                let reason = format!("cannot make a file on '{}': {error}", drive.path().display());
                self.sender.send(&FromServer::Refused { reason }, &[]).await
            }
        }
    }

    async fn control(&mut self, command: Command) -> io::Result<()> {
        match command {
            Command::Status => {
                let status = self.server.session_status().await;
                self.sender.send(&FromServer::Event(Event::Status(status)), &[]).await
            }
            Command::Tune(policy) => {
                let event = match self.server.tune_all(policy).await {
                    Ok(policy) => Event::Tuned(policy),
                    Err(reason) => Event::Failed { reason },
                };
                self.sender.send(&FromServer::Event(event), &[]).await
            }
            Command::Down { but } => {
                let all = || (0..=u16::MAX).collect();
                let (nodes, freed_bytes, untold) = self.server.end_all_but(&but.unwrap_or_else(all)).await;
                let sent = self.sender.send(&FromServer::Event(Event::Down { nodes, freed_bytes, untold }), &[]).await;
                self.server.end();
                sent
            }
            Command::StageIn(request) => {
                let (sender, mut events) = mpsc::channel(EVENTS_QUEUE_LEN);
                // On a task of its own: if the client goes away, the stage-in must still undo what it did.
                tokio::spawn(coordinator::stage_in(self.server.clone(), request, sender));
                loop {
                    tokio::select! {
                        event = events.recv() => match event {
                            Some(event) => self.sender.send(&FromServer::Event(event), &[]).await?,
                            None => return Ok(()),
                        },
                        // Nothing may come in the meantime but the end; returning drops `events`, which cancels.
                        _ = self.receiver.receive() => return Err(io::ErrorKind::ConnectionAborted.into()),
                    }
                }
            }
        }
    }
}

/// Takes from a part what fits one message: reasons name paths, which may be long.
fn split_message(part: &mut FetchedChunks) -> FetchedChunks {
    let mut room = LOCAL_MESSAGE_LEN_MAX / 2;
    let mut fits = |(_, fetched): &(u32, Fetched)| {
        let len = if let Fetched::Failed(reason) = fetched { reason.to_string().len() } else { 0 };
        let is_within = len <= room;
        room = room.saturating_sub(len);
        is_within
    };
    let count = part.iter().take_while(|told| fits(told)).count().max(1).min(part.len());
    let rest = part.split_off(count);
    std::mem::replace(part, rest)
}

/// Enters what has come into the books; what the client is told of it, its lease and token.
fn grant(holder: &LeaseHolder<Lease>, part: FetchedChunks) -> (Vec<(u32, FetchedChunk)>, u64, u64) {
    let mut leases = Vec::new();
    let mut told = Vec::with_capacity(part.len());
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
        told.push((at, chunk));
    }
    let (lease, token) = holder.grant(leases);
    (told, lease, token)
}
