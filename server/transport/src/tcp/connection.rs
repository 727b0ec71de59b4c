//! A connection to a peer, on the dialing side: sends requests over the links and waits for their answers.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BULK_LINKS, MESSAGE_LEN_MAX, MOVES_MAX};
use dayfly_meta::wire::frame::Kind;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::dial::dial_with_retries;
use super::identity::Identity;
use super::link::{Link, PullOutcome, RequestState};
use super::links::{LinkMonitor, Links};
use super::stream::{Lent, Outgoing, join_body};
use crate::budget::{Denied, PeerBudget, Progress};
use crate::contract::{Connection, Pulled};
use crate::error::{LossCause, Refusal, TransportError};
use crate::region::Slot;

/// Dials a peer: one link for small messages, which must succeed, and several for bulk bytes, which may be made later.
pub(super) async fn connect(
    identity: &Identity,
    peer: NodeId,
    address: SocketAddr,
) -> Result<Arc<dyn Connection>, TransportError> {
    let links = Arc::new(Links::new(peer, address, identity.deadlines));
    let first =
        dial_with_retries(identity, peer, address).await.map_err(|error| links.lost_by(&LossCause::unreachable(error)))?;
    let mut dialed = vec![Ok(first)];
    let mut dialing = JoinSet::new();
    for _ in 0..BULK_LINKS {
        let identity = identity.clone();
        dialing.spawn(async move { dial_with_retries(&identity, peer, address).await });
    }
    while let Some(halves) = dialing.join_next().await {
        dialed.push(halves.unwrap_or_else(|error| Err(io::Error::other(error))));
    }
    let monitor = LinkMonitor::new(links.clone(), identity.clone(), dialed);
    let mut tasks = JoinSet::new();
    tasks.spawn(monitor.run());
    Ok(Arc::new(TcpConnection { links, budget: PeerBudget::new(identity.deadlines.look_interval), _tasks: tasks }))
}

struct TcpConnection {
    links: Arc<Links>,
    budget: Arc<PeerBudget>,
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
        denied.into_error(self.links.peer, self.links.address, limit)
    }

    fn check(&self, message: &[u8]) -> Result<(), TransportError> {
        if self.links.is_lost() {
            return Err(self.links.lost_by(&LossCause::Closed));
        }
        if message.len() > MESSAGE_LEN_MAX { Err(TransportError::TooLong(message.len())) } else { Ok(()) }
    }

    /// Picks a link and takes a permit to send a request on it.
    async fn link(
        &self,
        is_bulk: bool,
        progress: &Progress,
        limit: Duration,
    ) -> Result<(Arc<Link>, OwnedSemaphorePermit), TransportError> {
        loop {
            // If there is no link, the monitor is about to find the peer lost.
            let link = self.links.pick(is_bulk).ok_or_else(|| self.links.lost_by(&LossCause::Closed))?;
            match progress.wait(limit, self.links.deadlines.look_interval, link.permits.clone().acquire_owned()).await {
                Some(Ok(permit)) => return Ok((link, permit)),
                // The link has ended, so another is picked.
                Some(Err(_)) => link.end(LossCause::Closed),
                None => return Err(self.timeout(limit)),
            }
        }
    }

    /// Waits for an answer as long as there is progress. Returns `None` if the link ended.
    async fn wait<T>(
        &self,
        answer: oneshot::Receiver<T>,
        progress: &Progress,
        limit: Duration,
    ) -> Result<Option<T>, TransportError> {
        let answered = progress.wait(limit, self.links.deadlines.look_interval, answer).await;
        answered.map(Result::ok).ok_or_else(|| self.timeout(limit))
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

    fn quiet_for(&self) -> Duration {
        self.links.quiet_for()
    }

    async fn pull(&self, message: Vec<u8>, mut slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        self.check(&message)?;
        let is_bulk = !slots.is_empty();
        let progress = Progress::new();
        let held = self.budget.take(&slots, &progress, limit).await.map_err(|denied| self.denied(denied, limit))?.map(Arc::new);
        let lens: Vec<u64> = slots.iter().map(|slot| slot.len() as u64).collect();
        let argument = lens.iter().sum();
        let body = join_body(&lens, &message);
        // Number of links that ended during this request, and the error of the last one.
        let (mut moves, mut ended) = (0, None);
        loop {
            let linked = self.link(is_bulk, &progress, limit).await;
            let (link, permit) = linked.map_err(|error| ended.take().unwrap_or(error))?;
            let (done, answer) = oneshot::channel();
            let request = match link.register(&progress, permit, held.clone(), RequestState::Pull { slots, done }) {
                Ok(request) => request,
                Err(RequestState::Pull { slots: back, .. }) => {
                    slots = back;
                    continue;
                }
                Err(_) => return Err(self.ended(&link)),
            };
            let left = progress.left(limit).max(self.links.deadlines.look_interval);
            link.send(Kind::Pull, request, (argument, body.clone()), left).await.map_err(|_| self.timeout(limit))?;
            match self.wait(answer, &progress, limit).await? {
                Some(PullOutcome::Done(pulled)) => return Ok(pulled),
                Some(PullOutcome::Refused(refusal)) => return Err(self.refused(refusal)),
                // A pull into slots only reads, so it may be sent again.
                Some(PullOutcome::Unanswered(back)) if is_bulk && moves < MOVES_MAX && !self.is_lost() => {
                    slots = back;
                    moves += 1;
                    ended = Some(self.ended(&link));
                }
                Some(PullOutcome::Unanswered(_)) | None => return Err(self.ended(&link)),
            }
        }
    }

    async fn offer(
        &self,
        message: Vec<u8>,
        payload: &mut Option<Slot>,
        len: usize,
        limit: Duration,
    ) -> Result<Vec<u8>, TransportError> {
        self.check(&message)?;
        if payload.as_ref().is_none_or(|payload| len > payload.len()) {
            return Err(TransportError::TooLong(len));
        }
        let progress = Progress::new();
        let (link, permit) = self.link(true, &progress, limit).await?;
        let (ready, accepted) = oneshot::channel();
        let (done, answer) = oneshot::channel();
        let Ok(request) = link.register(&progress, permit, None, RequestState::Offer { ready, done }) else {
            return Err(self.ended(&link));
        };
        link.send(Kind::Offer, request, (len as u64, message), limit).await.map_err(|_| self.timeout(limit))?;
        // An offer that was not accepted has been answered, or its link has ended; the code below tells which.
        if let Some(claim) = self.wait(accepted, &progress, limit).await? {
            let (back, returned) = oneshot::channel();
            // The queue entry is reserved first, because nothing may delay the bytes once the claim is taken.
            let entry = timeout(limit, link.sender.reserve()).await.map_err(|_| self.timeout(limit))?;
            let entry = entry.map_err(|_| self.ended(&link))?;
            // Otherwise, the peer stopped waiting, and its refusal has arrived.
            if claim.take()
                && let Some(slot) = payload.take()
            {
                entry.send(Outgoing::Payload { request, lent: Lent::new(slot, back), len });
                progress.touch();
                *payload = self.wait(returned, &progress, limit).await?;
            }
        }
        let answer = self.wait(answer, &progress, limit).await?.ok_or_else(|| self.ended(&link))?;
        answer.map_err(|refusal| self.refused(refusal))
    }
}
