//! Our peers' requests: the listener, and for each link a task that reads frames and starts an answer for each, as many
//! at once as the limits allow.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{DRIVE_READERS_MAX, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_PROBES, MESSAGE_LEN_MAX, PEER_REQUESTS_MAX};
use dayfly_meta::wire::frame::Kind;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Identity;
use super::answer::send_answer;
use super::door::Door;
use super::handshake;
use super::reader::{Landing, Reader};
use super::seal::{ReadHalf, WriteHalf, split};
use super::stream::{Clock, Outgoing, Sender, split_body, writer};
use crate::turns::Turns;
use crate::{Incoming, Refusal, Service, Serving, Slot};

/// Accepts peers until the result is dropped.
pub(super) fn start(listener: TcpListener, identity: Identity, service: Arc<dyn Service>) -> Serving {
    let mut tasks = JoinSet::new();
    tasks.spawn(accept_all(listener, identity, service));
    Serving::new(tasks)
}

async fn accept_all(listener: TcpListener, identity: Identity, service: Arc<dyn Service>) {
    let mut door = Door::new(listener, identity.deadlines.handshake);
    let turns = Turns::new(DRIVE_READERS_MAX, identity.deadlines.landing);
    let mut links = JoinSet::new();
    let shake = |mut stream: TcpStream| {
        let identity = identity.clone();
        async move {
            let (peer, keys) = handshake::accept(&mut stream, &identity).await?;
            stream.set_nodelay(true)?;
            keep_alive(&stream)?;
            Ok((peer, split(stream, identity.purpose.seal(keys))))
        }
    };
    loop {
        let (peer, halves) = door.admit(shake).await;
        while links.try_join_next().is_some() {}
        links.spawn(serve_link(halves, peer, service.clone(), turns.clone(), identity.deadlines));
    }
}

/// Has the kernel end a connection whose far end is gone without a word. Nobody else would: on this side only answers are written. The far
/// end's kernel answers also for a process that is stopped.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_PROBES)?;
    Ok(())
}

async fn serve_link(
    (read, write): (ReadHalf, WriteHalf),
    peer: NodeId,
    service: Arc<dyn Service>,
    turns: Turns,
    deadlines: Deadlines,
) {
    let (sender, write) = writer(write, deadlines.peer_lost, Clock::new(Instant::now()));
    let permits = Arc::new(Semaphore::new(PEER_REQUESTS_MAX));
    let link = Link { peer, service, turns, sender, offers: Arc::default(), permits, deadlines };
    let ended = tokio::select! { read = receive(read, &link) => read, write = write => write };
    if let Err(error) = ended {
        tracing::debug!(%peer, %error, "a peer's connection ended");
    }
}

/// Accepted offers, by request.
type Offers = Arc<Mutex<HashMap<u64, (Landing, oneshot::Sender<Slot>)>>>;

fn lock(offers: &Offers) -> MutexGuard<'_, HashMap<u64, (Landing, oneshot::Sender<Slot>)>> {
    offers.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Link {
    peer: NodeId,
    service: Arc<dyn Service>,
    turns: Turns,
    sender: Sender,
    offers: Offers,
    permits: Arc<Semaphore>,
    deadlines: Deadlines,
}

/// Reads requests until the stream ends; the answers under way end with it.
async fn receive(read: ReadHalf, link: &Link) -> io::Result<()> {
    let mut read = Reader::new(read);
    let mut answers = JoinSet::new();
    loop {
        let header = read.header().await?;
        while let Some(answered) = answers.try_join_next() {
            // A request that is never answered keeps its asker's slots: better that the link ends.
            answered.map_err(io::Error::other)?;
        }
        if header.kind == Kind::Data {
            let (mut landing, done) = lock(&link.offers).remove(&header.request).ok_or_else(unexpected)?;
            read.land(&mut landing, u64::from(header.body_len), || {}).await?;
            if landing.is_complete() {
                let slot = landing.finish().0.pop().ok_or_else(unexpected)?;
                let _ = done.send(slot);
            } else {
                lock(&link.offers).insert(header.request, (landing, done));
            }
            continue;
        }
        let body = read.body(&header).await?;
        let (peer, request) = (link.peer, header.request);
        let (service, sender) = (link.service.clone(), link.sender.clone());
        match header.kind {
            Kind::Ping => {
                // Not waited for: a full queue is being written, which tells the peer as much.
                let _ = sender.try_send(Outgoing::Frame { kind: Kind::Pong, request, argument: 0, body: Vec::new() });
            }
            Kind::Pull => {
                let (room, message) = split_body(&body).ok_or_else(unexpected)?;
                let permit = permit(link).await?;
                let turns = link.turns.clone();
                answers.spawn(async move {
                    let answer = service.pulled(peer, message, room.clone()).await;
                    send_answer(&sender, request, &room, answer, peer, &turns).await;
                    drop(permit);
                });
            }
            Kind::Offer => {
                let landing = Box::new(TcpLanding {
                    request,
                    len: header.argument,
                    sender: sender.clone(),
                    offers: link.offers.clone(),
                    patience: link.deadlines.request,
                });
                let incoming = Incoming { len: header.argument, landing };
                let permit = permit(link).await?;
                answers.spawn(async move {
                    let answer = service.offered(peer, body, incoming).await;
                    let (kind, body) =
                        answer.map_or_else(|refusal| (Kind::Refused, refusal_body(&refusal)), |message| (Kind::Offered, message));
                    let _ = sender.send(Outgoing::Frame { kind, request, argument: 0, body }).await;
                    drop(permit);
                });
            }
            // With it goes the slot that was lent.
            Kind::Withdrawn => drop(lock(&link.offers).remove(&request)),
            _ => return Err(unexpected()),
        }
    }
}

async fn permit(link: &Link) -> io::Result<tokio::sync::OwnedSemaphorePermit> {
    link.permits.clone().acquire_owned().await.map_err(io::Error::other)
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a frame that no peer sends")
}

/// The body of a `Refused` frame: the reason, cut to the length of a message.
pub(super) fn refusal_body(refusal: &Refusal) -> Vec<u8> {
    let mut reason = refusal.to_string().into_bytes();
    reason.truncate(MESSAGE_LEN_MAX);
    reason
}

struct TcpLanding {
    request: u64,
    len: u64,
    sender: Sender,
    offers: Offers,
    patience: Duration,
}

#[async_trait]
impl crate::Landing for TcpLanding {
    async fn land(self: Box<Self>, slot: Slot) -> io::Result<Slot> {
        let landing = Landing::new(vec![slot], vec![self.len]).ok_or_else(unexpected)?;
        if landing.is_complete() {
            return landing.finish().0.pop().ok_or_else(unexpected);
        }
        let (done, landed) = oneshot::channel();
        lock(&self.offers).insert(self.request, (landing, done));
        let ready = Outgoing::Frame { kind: Kind::Ready, request: self.request, argument: 0, body: Vec::new() };
        self.sender.send(ready).await.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        // On a deadline the slot stays in the table: bytes may still land in it, until the offer is withdrawn or the link ends.
        let landed = timeout(self.patience, landed).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        landed.map_err(|_| io::ErrorKind::ConnectionReset.into())
    }
}
