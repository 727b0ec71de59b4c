//! The processes of this node: a Unix socket that the same user only may use. Each client asks one thing at a time; its
//! leases end with its connection.

mod socket;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dayfly_meta::limits::{BATCH_BLOCKS_MAX, CLIENTS_MAX, LEASES_PER_CLIENT_MAX};
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::local::{FetchedBlock, FromClient, FromServer};
use dayfly_meta::wire::{VERSION, decode};
use nix::unistd::geteuid;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use crate::arena::Lease;
use crate::fetch::Fetched;
use crate::lead;
use crate::server::Server;
use crate::store::nameless_file;
use socket::Socket;

/// Events on their way to a client; a slow one misses progress, not the end.
const EVENTS_QUEUE_LEN: usize = 4;

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
        if stream.peer_cred().map_or(true, |peer| peer.uid() != geteuid().as_raw()) {
            tracing::warn!("a process of another user was turned away");
            continue;
        }
        let server = server.clone();
        clients.spawn(async move {
            server.clients().fetch_add(1, Ordering::Relaxed);
            let client = Client { socket: Socket::new(stream), leases: HashMap::new(), last_lease: 0, server: server.clone() };
            if let Err(error) = client.serve().await {
                tracing::debug!(%error, "a client's connection ended");
            }
            server.clients().fetch_sub(1, Ordering::Relaxed);
            drop(permit);
        });
    }
}

struct Client {
    socket: Socket,
    leases: HashMap<u64, Lease>,
    last_lease: u64,
    server: Arc<Server>,
}

impl Client {
    async fn serve(mut self) -> io::Result<()> {
        let hello = self.socket.receive().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        match decode::<FromClient>(&hello) {
            Ok(FromClient::Hello { version: VERSION }) => self.welcome().await?,
            Ok(FromClient::Hello { version }) => {
                let reason = format!(
                    "this server speaks version {VERSION} and the client {version}; use the dayfly that started the session"
                );
                return self.socket.send(&FromServer::Refused { reason }, &[]).await;
            }
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "not a hello")),
        }
        while let Some(message) = self.socket.receive().await? {
            let message = decode::<FromClient>(&message).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            match message {
                FromClient::Hello { .. } => self.welcome().await?,
                FromClient::Datasets => self.list_datasets().await?,
                FromClient::Fetch { dataset, blocks } => {
                    let reply = match self.server.store().dataset(dataset) {
                        Some(_)
                            if blocks.len() > BATCH_BLOCKS_MAX || self.leases.len() + blocks.len() > LEASES_PER_CLIENT_MAX =>
                        {
                            FromServer::Refused { reason: "too many blocks at once".to_owned() }
                        }
                        Some(dataset) => {
                            let fetched = self.server.fetcher().fetch(&dataset, &blocks).await;
                            FromServer::Fetched { blocks: fetched.into_iter().map(|block| self.lease(block)).collect() }
                        }
                        None => FromServer::Refused { reason: "the dataset is not there any more".to_owned() },
                    };
                    self.socket.send(&reply, &[]).await?;
                }
                FromClient::Release { leases } => leases.iter().for_each(|lease| drop(self.leases.remove(lease))),
                FromClient::Spill { len } => self.spill(len).await?,
                FromClient::Control(command) => self.control(command).await?,
            }
        }
        Ok(())
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
        };
        let (board, counters) = self.server.store().shared_files();
        self.socket.send(&welcome, &[board, counters, self.server.arena().file()]).await
    }

    async fn list_datasets(&self) -> io::Result<()> {
        // Read first: whatever changes while we list makes the client ask again.
        let generation = self.server.store().generation();
        for dataset in self.server.store().datasets() {
            let files = dataset.client_files()?;
            let message = FromServer::Dataset { id: dataset.id(), target: dataset.target().to_vec() };
            self.socket.send(&message, &files.iter().collect::<Vec<_>>()).await?;
        }
        self.socket.send(&FromServer::DatasetsEnd { generation }, &[]).await
    }

    /// A file for a program that wants one of the kernel's. It is not counted as taken, for nobody sees it end.
    async fn spill(&self, len: u64) -> io::Result<()> {
        let drive = self.server.store().roomiest_drive();
        if drive.free() < len {
            let (reason, path) = ("has no room for a copy of", drive.path().display());
            let reason = format!("node {} {reason} {len} bytes on '{path}'", self.server.config().node);
            return self.socket.send(&FromServer::Refused { reason }, &[]).await;
        }
        match nameless_file(drive.path()) {
            Ok(file) => self.socket.send(&FromServer::Spill, &[&file]).await,
            Err(error) => {
                let reason = format!("cannot make a file on '{}': {error}", drive.path().display());
                self.socket.send(&FromServer::Refused { reason }, &[]).await
            }
        }
    }

    fn lease(&mut self, fetched: Fetched) -> FetchedBlock {
        match fetched {
            Fetched::Here => FetchedBlock::Here,
            Fetched::Failed(reason) => FetchedBlock::Failed { reason },
            Fetched::Leased(lease) => {
                self.last_lease += 1;
                let (offset, len) = (lease.offset(), lease.len());
                self.leases.insert(self.last_lease, lease);
                FetchedBlock::Leased { lease: self.last_lease, offset, len }
            }
        }
    }

    async fn control(&mut self, command: Command) -> io::Result<()> {
        match command {
            Command::Status => {
                let status = self.server.session_status().await;
                self.socket.send(&FromServer::Event(Event::Status(status)), &[]).await
            }
            Command::Down => {
                let freed_bytes = self.server.on_drives(|server| server.end()).await.map_err(io::Error::other)?;
                self.socket.send(&FromServer::Event(Event::Down { freed_bytes }), &[]).await
            }
            Command::StageIn(request) => {
                let (sender, mut events) = mpsc::channel(EVENTS_QUEUE_LEN);
                // On a task of its own: if the client goes away, the stage-in must still undo what it did.
                tokio::spawn(lead::stage_in(self.server.clone(), request, sender));
                loop {
                    tokio::select! {
                        event = events.recv() => match event {
                            Some(event) => self.socket.send(&FromServer::Event(event), &[]).await?,
                            None => return Ok(()),
                        },
                        // Nothing may come in the meantime but the end; returning drops `events`, which cancels.
                        () = self.socket.gone() => return Err(io::ErrorKind::ConnectionAborted.into()),
                    }
                }
            }
        }
    }
}
