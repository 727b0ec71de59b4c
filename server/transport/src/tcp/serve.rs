//! Our peers' requests: the listener, and for each link a task that reads frames and starts an answer for each, as many
//! at once as the limits allow.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{
    FRAME_BODY_LEN_MAX, HANDSHAKE_TIMEOUT, HANDSHAKES_MAX, MESSAGE_LEN_MAX, PEER_REQUESTS_MAX, REQUEST_TIMEOUT,
};
use dayfly_meta::wire::frame::Kind;
use tokio::io::BufReader;
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Identity;
use super::handshake;
use super::stream::{Landing, Outgoing, Sender, join_body, read_body, read_header, split_body, writer};
use crate::{Answer, Incoming, Piece, Service, Serving, Slot};

/// Accepts peers until the result is dropped.
pub(super) fn start(listener: TcpListener, identity: Identity, service: Arc<dyn Service>) -> Serving {
    let mut tasks = JoinSet::new();
    tasks.spawn(accept_all(listener, identity, service));
    Serving { _tasks: tasks }
}

async fn accept_all(listener: TcpListener, identity: Identity, service: Arc<dyn Service>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    let mut links = JoinSet::new();
    loop {
        let Ok(permit) = handshakes.clone().acquire_owned().await else { return };
        let accepted = listener.accept().await;
        while links.try_join_next().is_some() {}
        let (mut stream, address) = match accepted {
            Ok(accepted) => accepted,
            // Out of descriptors, most likely: let some close.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                continue;
            }
        };
        let (identity, service) = (identity.clone(), service.clone());
        links.spawn(async move {
            let shaken = timeout(HANDSHAKE_TIMEOUT, handshake::accept(&mut stream, &identity)).await;
            drop(permit);
            match shaken {
                Ok(Ok(peer)) => serve_link(stream, peer, service).await,
                Ok(Err(error)) => tracing::debug!(%address, %error, "a stranger was turned away"),
                Err(_) => tracing::debug!(%address, "a stranger said nothing in time"),
            }
        });
    }
}

async fn serve_link(stream: TcpStream, peer: NodeId, service: Arc<dyn Service>) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%peer, %error, "cannot set TCP_NODELAY");
    }
    let (read, write) = stream.into_split();
    let (sender, write) = writer(write);
    let link = Link { peer, service, sender, offers: Arc::default(), permits: Arc::new(Semaphore::new(PEER_REQUESTS_MAX)) };
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
    sender: Sender,
    offers: Offers,
    permits: Arc<Semaphore>,
}

/// Reads requests until the stream ends; the answers under way end with it.
async fn receive(read: OwnedReadHalf, link: &Link) -> io::Result<()> {
    let mut read = BufReader::new(read);
    let mut answers = JoinSet::new();
    loop {
        let header = read_header(&mut read).await?;
        while answers.try_join_next().is_some() {}
        if header.kind == Kind::Data {
            let (mut landing, done) = lock(&link.offers).remove(&header.request).ok_or_else(unexpected)?;
            landing.receive(&mut read, u64::from(header.body_len)).await?;
            if landing.is_complete() {
                let slot = landing.finish().0.pop().ok_or_else(unexpected)?;
                let _ = done.send(slot);
            } else {
                lock(&link.offers).insert(header.request, (landing, done));
            }
            continue;
        }
        let body = read_body(&mut read, &header).await?;
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
                answers.spawn(async move {
                    let answer = service.pulled(peer, message, room.clone()).await;
                    send_answer(&sender, request, &room, answer).await;
                    drop(permit);
                });
            }
            Kind::Offer => {
                let landing =
                    Box::new(TcpLanding { request, len: header.argument, sender: sender.clone(), offers: link.offers.clone() });
                let incoming = Incoming { len: header.argument, landing };
                let permit = permit(link).await?;
                answers.spawn(async move {
                    let answer = service.offered(peer, body, incoming).await;
                    let (kind, body) =
                        answer.map_or_else(|reason| (Kind::Refused, refusal(reason)), |message| (Kind::Offered, message));
                    let _ = sender.send(Outgoing::Frame { kind, request, argument: 0, body }).await;
                    drop(permit);
                });
            }
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

fn refusal(reason: String) -> Vec<u8> {
    let mut reason = reason.into_bytes();
    reason.truncate(MESSAGE_LEN_MAX);
    reason
}

/// Sends an answer and its pieces. A failed send means that the stream is dead, which its reader finds too.
async fn send_answer(sender: &Sender, request: u64, room: &[u64], answer: Result<Answer, String>) {
    let Answer { message, pieces } = match answer.and_then(|answer| fitting(answer, room)) {
        Ok(answer) => answer,
        Err(reason) => {
            let _ = sender.send(Outgoing::Frame { kind: Kind::Refused, request, argument: 0, body: refusal(reason) }).await;
            return;
        }
    };
    let lens: Vec<u64> = pieces.iter().map(Piece::len).collect();
    let body = join_body(&lens, &message);
    let argument = lens.iter().sum();
    if sender.send(Outgoing::Frame { kind: Kind::Pulled, request, argument, body }).await.is_err() {
        return;
    }
    let mut gather = Gather { sender, request, body: Vec::new() };
    for piece in pieces {
        if let Err(error) = gather.add(piece).await {
            tracing::warn!(%error, "cannot send a block");
            let body = refusal(format!("cannot read what it holds: {error}"));
            let _ = sender.send(Outgoing::Frame { kind: Kind::Refused, request, argument: 0, body }).await;
            return;
        }
    }
    let _ = gather.flush().await;
}

fn fitting(answer: Answer, room: &[u64]) -> Result<Answer, String> {
    let fits = answer.pieces.len() <= room.len() && answer.pieces.iter().zip(room).all(|(piece, &room)| piece.len() <= room);
    let message_fits = answer.message.len() + answer.pieces.len() * 8 + 4 <= FRAME_BODY_LEN_MAX;
    if fits && message_fits { Ok(answer) } else { Err("the answer does not fit".to_owned()) }
}

/// Gathers small pieces into frames; large ones fill frames of their own.
struct Gather<'a> {
    sender: &'a Sender,
    request: u64,
    body: Vec<u8>,
}

impl Gather<'_> {
    async fn add(&mut self, piece: Piece) -> io::Result<()> {
        let (mut at, end) = (0, piece.len());
        while at < end {
            let len = (end - at).min((FRAME_BODY_LEN_MAX - self.body.len()) as u64);
            match &piece {
                Piece::Bytes(bytes) => self.body.extend_from_slice(&bytes[at as usize..(at + len) as usize]),
                Piece::File { file, offset, revoked, .. } => {
                    let start = self.body.len();
                    self.body.resize(start + len as usize, 0);
                    let cached = read_cached(file, offset + at, &mut self.body[start..])?;
                    if cached < len as usize {
                        let (file, from) = (file.clone(), offset + at + cached as u64);
                        let mut body = std::mem::take(&mut self.body);
                        let reading = tokio::task::spawn_blocking(move || {
                            file.read_exact_at(&mut body[start + cached..], from).map(|()| body)
                        });
                        self.body = reading.await.map_err(io::Error::other)??;
                    }
                    if revoked.load(Ordering::Acquire) {
                        return Err(io::Error::other("it has just been given up"));
                    }
                }
            }
            at += len;
            if self.body.len() == FRAME_BODY_LEN_MAX {
                self.flush().await?;
            }
        }
        Ok(())
    }

    async fn flush(&mut self) -> io::Result<()> {
        if self.body.is_empty() {
            return Ok(());
        }
        let frame =
            Outgoing::Frame { kind: Kind::Data, request: self.request, argument: 0, body: std::mem::take(&mut self.body) };
        self.sender.send(frame).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Reads what is in the page cache, without ever waiting for a drive: from there it is not worth another thread's while.
fn read_cached(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    use rustix::io::{Errno, ReadWriteFlags, preadv2};
    match preadv2(file, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT) {
        Ok(count) => Ok(count),
        // Not cached, or a file system that cannot tell.
        Err(Errno::AGAIN | Errno::INTR | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

struct TcpLanding {
    request: u64,
    len: u64,
    sender: Sender,
    offers: Offers,
}

#[async_trait]
impl crate::Landing for TcpLanding {
    async fn land(self: Box<Self>, slot: Slot) -> io::Result<Slot> {
        let mut landing = Landing::new(vec![slot], vec![self.len]).ok_or_else(unexpected)?;
        if landing.is_complete() {
            return landing.finish().0.pop().ok_or_else(unexpected);
        }
        let (done, landed) = oneshot::channel();
        lock(&self.offers).insert(self.request, (landing, done));
        let ready = Outgoing::Frame { kind: Kind::Ready, request: self.request, argument: 0, body: Vec::new() };
        self.sender.send(ready).await.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        // On a deadline the slot stays in the table: bytes may still land in it, until the link ends.
        let landed = timeout(REQUEST_TIMEOUT, landed).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        landed.map_err(|_| io::ErrorKind::ConnectionReset.into())
    }
}
