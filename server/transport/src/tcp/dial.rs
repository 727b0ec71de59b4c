//! Our requests to one peer: dialling it, and asking over its links.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BULK_LINKS, MESSAGE_LEN_MAX, MOVES_MAX};
use dayfly_meta::wire::frame::Kind;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::handshake;
use super::link::{Link, PullEnd, State};
use super::links::{Halves, Links, Watch};
use super::seal::split;
use super::stream::{Outgoing, join_body};
use super::{Identity, is_pushed_out};
use crate::budget::{Budget, Denied, Progress};
use crate::{Connection, LossCause, Offered, Pulled, Refusal, Slot, TransportError};

/// A peer that had no time for us is dialled so often, at most.
const DIAL_ATTEMPTS_MAX: u32 = 5;

/// Dials a peer: one link for small messages, which must come up, and a few for bulk, which may come up later.
pub(super) async fn connect(
    identity: &Identity,
    peer: NodeId,
    address: SocketAddr,
) -> Result<Arc<dyn Connection>, TransportError> {
    let links = Arc::new(Links::new(peer, address, identity.deadlines));
    let first = dial_patiently(identity, peer, address).await.map_err(|error| links.lost_by(&LossCause::unreachable(error)))?;
    let mut dialled = vec![Ok(first)];
    let mut dialling = JoinSet::new();
    for _ in 0..BULK_LINKS {
        let identity = identity.clone();
        dialling.spawn(async move { dial_patiently(&identity, peer, address).await });
    }
    while let Some(halves) = dialling.join_next().await {
        dialled.push(halves.unwrap_or_else(|error| Err(io::Error::other(error))));
    }
    let watch = Watch::new(links.clone(), identity.clone(), dialled);
    let mut tasks = JoinSet::new();
    tasks.spawn(watch.run());
    Ok(Arc::new(TcpConnection { links, budget: Budget::new(identity.deadlines.look_interval), _tasks: tasks }))
}

/// Very many strangers may have pushed us out before we spoke, or all other members at once: so again, ever later.
pub(super) async fn dial_patiently(identity: &Identity, peer: NodeId, address: SocketAddr) -> io::Result<Halves> {
    let start = Instant::now();
    let mut attempts = 0;
    loop {
        attempts += 1;
        match dial(identity, peer, address).await {
            Err(error)
                if is_pushed_out(&error)
                    && attempts < DIAL_ATTEMPTS_MAX
                    && (attempts == 1 || start.elapsed() < identity.deadlines.handshake) =>
            {
                sleep(identity.deadlines.look_interval * attempts).await;
            }
            dialled => return dialled,
        }
    }
}

async fn dial(identity: &Identity, peer: NodeId, address: SocketAddr) -> io::Result<Halves> {
    let late = |what: &'static str| move |_| io::Error::new(io::ErrorKind::TimedOut, what);
    let mut stream = timeout(identity.deadlines.connect, TcpStream::connect(address))
        .await
        .map_err(late("it cannot be reached in time"))??;
    stream.set_nodelay(true)?;
    let shaken = timeout(identity.deadlines.handshake, handshake::dial(&mut stream, identity, peer))
        .await
        .map_err(late("no handshake in time"))?;
    let keys = shaken.map_err(|error| io::Error::new(error.kind(), format!("the handshake failed: {error}")))?;
    Ok(split(stream, identity.purpose.seal(keys)))
}

struct TcpConnection {
    links: Arc<Links>,
    budget: Arc<Budget>,
    /// Dropping the connection ends its tasks, and with them its streams.
    _tasks: JoinSet<()>,
}

impl TcpConnection {
    fn timeout(&self, timeout: Duration) -> TransportError {
        TransportError::Timeout { peer: self.links.peer, address: self.links.address, timeout }
    }

    fn refused(&self, refusal: Refusal) -> TransportError {
        TransportError::Refused { peer: self.links.peer, address: self.links.address, refusal }
    }

    fn denied(&self, denied: Denied, limit: Duration) -> TransportError {
        denied.tell(self.links.peer, self.links.address, limit)
    }

    fn check(&self, message: &[u8]) -> Result<(), TransportError> {
        if self.links.is_lost() {
            return Err(self.links.lost_by(&LossCause::Closed));
        }
        if message.len() > MESSAGE_LEN_MAX { Err(TransportError::TooLong(message.len())) } else { Ok(()) }
    }

    /// A link, and the right to ask on it.
    async fn link(
        &self,
        is_bulk: bool,
        progress: &Progress,
        limit: Duration,
    ) -> Result<(Arc<Link>, OwnedSemaphorePermit), TransportError> {
        loop {
            // Without a link it is about to be found lost.
            let link = self.links.pick(is_bulk).ok_or_else(|| self.links.lost_by(&LossCause::Closed))?;
            match timeout(limit.saturating_sub(progress.age()), link.permits.clone().acquire_owned()).await {
                Ok(Ok(permit)) => return Ok((link, permit)),
                // That link has ended.
                Ok(Err(_)) => link.end(LossCause::Closed),
                Err(_) => return Err(self.timeout(limit)),
            }
        }
    }

    /// Waits for an answer for as long as there is progress. `None`: the link ended.
    async fn wait<T>(
        &self,
        mut answer: oneshot::Receiver<T>,
        progress: &Progress,
        limit: Duration,
    ) -> Result<Option<T>, TransportError> {
        loop {
            let left = limit.saturating_sub(progress.age());
            match timeout(left, &mut answer).await {
                Ok(answer) => return Ok(answer.ok()),
                Err(_) if progress.age() < limit => {}
                // It may have come while this process stood still.
                Err(_) => match timeout(self.links.deadlines.look_interval, &mut answer).await {
                    Ok(answer) => return Ok(answer.ok()),
                    Err(_) => return Err(self.timeout(limit)),
                },
            }
        }
    }

    fn ended(&self, link: &Link) -> TransportError {
        self.links.lost_by(link.ended().unwrap_or(&LossCause::Closed))
    }
}

#[async_trait]
impl Connection for TcpConnection {
    fn peer(&self) -> NodeId {
        self.links.peer
    }

    fn is_lost(&self) -> bool {
        self.links.is_lost()
    }

    async fn pull(&self, message: Vec<u8>, mut slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        self.check(&message)?;
        let is_bulk = !slots.is_empty();
        let progress = Progress::new();
        let held = self.budget.take(&slots, &progress, limit).await.map_err(|denied| self.denied(denied, limit))?.map(Arc::new);
        let lens: Vec<u64> = slots.iter().map(|slot| slot.len() as u64).collect();
        let argument = lens.iter().sum();
        let body = join_body(&lens, &message);
        // Links that ended under it, and why the last one did.
        let (mut moves, mut ended) = (0, None);
        loop {
            let linked = self.link(is_bulk, &progress, limit).await;
            let (link, permit) = linked.map_err(|error| ended.take().unwrap_or(error))?;
            let (done, answer) = oneshot::channel();
            let request = match link.register(&progress, permit, held.clone(), State::Pull { slots, done }) {
                Ok(request) => request,
                Err(State::Pull { slots: back, .. }) => {
                    slots = back;
                    continue;
                }
                Err(_) => return Err(self.ended(&link)),
            };
            let frame = Outgoing::Frame { kind: Kind::Pull, request, argument, body: body.clone() };
            // That the link has ended shows in the answer.
            if timeout(limit.saturating_sub(progress.age()), link.sender.send(frame)).await.is_err() {
                link.withdraw(request);
                return Err(self.timeout(limit));
            }
            match self.wait(answer, &progress, limit).await? {
                Some(PullEnd::Done(pulled)) => return Ok(pulled),
                Some(PullEnd::Refused(refusal)) => return Err(self.refused(refusal)),
                // Bulk is only read, which may be done twice.
                Some(PullEnd::Unanswered(back)) if is_bulk && moves < MOVES_MAX && !self.is_lost() => {
                    slots = back;
                    moves += 1;
                    ended = Some(self.ended(&link));
                }
                Some(PullEnd::Unanswered(_)) | None => return Err(self.ended(&link)),
            }
        }
    }

    async fn offer(&self, message: Vec<u8>, payload: Slot, len: usize, limit: Duration) -> Result<Offered, TransportError> {
        self.check(&message)?;
        if len > payload.len() {
            return Err(TransportError::TooLong(len));
        }
        let progress = Progress::new();
        let (link, permit) = self.link(true, &progress, limit).await?;
        let (ready, accepted) = oneshot::channel();
        let (done, answer) = oneshot::channel();
        let Ok(request) = link.register(&progress, permit, None, State::Offer { ready, done }) else {
            return Err(self.ended(&link));
        };
        let frame = Outgoing::Frame { kind: Kind::Offer, request, argument: len as u64, body: message };
        if timeout(limit, link.sender.send(frame)).await.is_err() {
            link.withdraw(request);
            return Err(self.timeout(limit));
        }
        // Not accepted: it is answered, or the link has ended.
        let payload = if let Some(turn) = self.wait(accepted, &progress, limit).await? {
            let (back, returned) = oneshot::channel();
            // A place in the queue first: from the moment that the turn is taken, nothing may keep the bytes back.
            let place = timeout(limit, link.sender.reserve()).await.map_err(|_| self.timeout(limit))?;
            let place = place.map_err(|_| self.ended(&link))?;
            if turn.take() {
                place.send(Outgoing::Payload { request, slot: payload, len, back });
                progress.touch();
                self.wait(returned, &progress, limit).await?.ok_or_else(|| self.ended(&link))?
            } else {
                // The peer has not waited so long. Its refusal is here.
                payload
            }
        } else {
            payload
        };
        let answer = self.wait(answer, &progress, limit).await?.ok_or_else(|| self.ended(&link))?;
        Ok(Offered { message: answer.map_err(|refusal| self.refused(refusal))?, payload })
    }
}
