//! Serves the peers' requests. The listener starts a task for each link, which reads frames and starts an answer for each request,
//! as many at once as the limits allow.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{DRIVE_READERS_MAX, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_MAX, KEEP_ALIVE_PROBES, PEER_REQUESTS_MAX};
use dayfly_meta::wire::frame::Kind;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::answer::send_answer;
use super::handshake;
use super::handshake_limiter::HandshakeLimiter;
use super::identity::Identity;
use super::reader::{Landing, Reader};
use super::seal::{ReadHalf, WriteHalf, split};
use super::stream::{Outgoing, Sender, Timestamp, refusal_body, split_body, writer};
use crate::contract::{Incoming, Service, Serving};
use crate::fair_queue::FairQueue;
use crate::region::Slot;

/// Accepts peers until the returned guard is dropped.
pub(super) fn start(listener: TcpListener, identity: Identity, service: Arc<dyn Service>) -> Serving {
    let mut tasks = JoinSet::new();
    tasks.spawn(accept_all(listener, identity, service));
    Serving::new(tasks)
}

async fn accept_all(listener: TcpListener, identity: Identity, service: Arc<dyn Service>) {
    let mut limiter = HandshakeLimiter::new(listener, identity.deadlines.handshake);
    let drive_readers = FairQueue::new(DRIVE_READERS_MAX, identity.deadlines.landing);
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
        let (peer, halves) = limiter.accept(shake).await;
        while links.try_join_next().is_some() {}
        links.spawn(serve_link(halves, peer, service.clone(), drive_readers.clone(), identity.deadlines));
    }
}

/// Makes the kernel close a connection whose other end vanished without closing it. Nothing else would notice, because this side
/// only writes answers. The connection of a peer that is merely suspended stays open, because the peer's kernel answers the
/// probes, unless answers find no room there. If answers are not confirmed, the kernel does not probe, and would repeat them for a
/// quarter of an hour.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_PROBES)?;
    sockopt::set_tcp_user_timeout(stream, KEEP_ALIVE_MAX.as_millis() as u32)?;
    Ok(())
}

async fn serve_link(
    (read, write): (ReadHalf, WriteHalf),
    peer: NodeId,
    service: Arc<dyn Service>,
    drive_readers: FairQueue,
    deadlines: Deadlines,
) {
    let (sender, write) = writer(write, deadlines.peer_lost, Timestamp::new(Instant::now()));
    let permits = Arc::new(Semaphore::new(PEER_REQUESTS_MAX));
    let link = ServedLink { peer, service, drive_readers, sender, offers: Arc::default(), permits, deadlines };
    let ended = tokio::select! { read = receive(read, &link) => read, write = write => write };
    if let Err(error) = ended {
        tracing::debug!(node = %peer, %error, "link closed by the peer that dialed it");
    }
}

/// Accepted offers whose bytes have not all arrived, by the number of the request.
type Offers = Arc<Mutex<HashMap<u64, (Landing, oneshot::Sender<Slot>)>>>;

fn lock(offers: &Offers) -> MutexGuard<'_, HashMap<u64, (Landing, oneshot::Sender<Slot>)>> {
    offers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A link that a peer dialed, on which this node answers.
struct ServedLink {
    peer: NodeId,
    service: Arc<dyn Service>,
    drive_readers: FairQueue,
    sender: Sender,
    offers: Offers,
    permits: Arc<Semaphore>,
    deadlines: Deadlines,
}

/// Reads requests until the stream ends. Answers that are still in progress are then aborted.
async fn receive(read: ReadHalf, link: &ServedLink) -> io::Result<()> {
    let mut read = Reader::new(read);
    let mut answers = JoinSet::new();
    loop {
        let header = read.header().await?;
        while let Some(answered) = answers.try_join_next() {
            // An answer panicked. A request that is never answered would keep its asker's slots, so the link must end.
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
                // If the queue is full, the pong may be lost: the frames in the queue also show the peer that the link is alive.
                let _ = sender.try_send(Outgoing::Frame { kind: Kind::Pong, request, argument: 0, body: Vec::new() });
            }
            Kind::Pull => {
                let (room, message) = split_body(&body).ok_or_else(unexpected)?;
                let permit = permit(link).await?;
                let drive_readers = link.drive_readers.clone();
                answers.spawn(async move {
                    let answer = service.pulled(peer, message, room.clone()).await;
                    send_answer(&sender, request, &room, answer, peer, &drive_readers).await;
                    drop(permit);
                });
            }
            Kind::Offer => {
                let landing = Box::new(TcpLanding {
                    request,
                    len: header.argument,
                    sender: sender.clone(),
                    offers: link.offers.clone(),
                    timeout: link.deadlines.request,
                });
                let incoming = Incoming::new(header.argument, landing);
                let permit = permit(link).await?;
                answers.spawn(async move {
                    let answer = service.offered(peer, body, incoming).await;
                    let (kind, body) = match answer {
                        Ok(message) => (Kind::Offered, message),
                        Err(refusal) => (Kind::Refused, refusal_body(&refusal)),
                    };
                    let _ = sender.send(Outgoing::Frame { kind, request, argument: 0, body }).await;
                    drop(permit);
                });
            }
            // This frees the slot that was reserved for the offer.
            Kind::Withdrawn => drop(lock(&link.offers).remove(&request)),
            _ => return Err(unexpected()),
        }
    }
}

async fn permit(link: &ServedLink) -> io::Result<tokio::sync::OwnedSemaphorePermit> {
    link.permits.clone().acquire_owned().await.map_err(io::Error::other)
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer sent an unexpected frame")
}

struct TcpLanding {
    request: u64,
    len: u64,
    sender: Sender,
    offers: Offers,
    timeout: Duration,
}

#[async_trait]
impl crate::contract::Landing for TcpLanding {
    async fn land(self: Box<Self>, slot: Slot) -> io::Result<Slot> {
        let landing = Landing::new(vec![slot], vec![self.len]).ok_or_else(unexpected)?;
        if landing.is_complete() {
            return landing.finish().0.pop().ok_or_else(unexpected);
        }
        let (done, landed) = oneshot::channel();
        lock(&self.offers).insert(self.request, (landing, done));
        let ready = Outgoing::Frame { kind: Kind::Ready, request: self.request, argument: 0, body: Vec::new() };
        self.sender.send(ready).await.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        // After a timeout the slot stays in the table: bytes may still land in it until the offer is withdrawn or the link ends.
        let landed = timeout(self.timeout, landed).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        landed.map_err(|_| io::ErrorKind::ConnectionReset.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer can vanish while answers to it are on their way. The kernel does not probe then, so this alone ends the connection.
    #[tokio::test]
    async fn a_connection_whose_answers_nobody_confirms_has_an_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _dialed = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        keep_alive(&stream).unwrap();
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 40_000);
    }
}
