//! One link to a peer, on the dialing side: the requests under way on it, and the times at which bytes last moved. While a
//! request is under way, its slots are held here rather than by its caller. They are returned with the answer, or when the link
//! has ended: in both cases no more bytes can land in them.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::limits::PEER_REQUESTS_MAX;
use dayfly_meta::wire::frame::Kind;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::reader::{Landing, Reader};
use super::seal::{ReadHalf, WriteHalf};
use super::stream::{Outgoing, Sender, Timestamp, split_body, split_unread, writer};
use crate::budget::{BudgetShare, Progress};
use crate::contract::{Pulled, Unread};
use crate::error::{LossCause, Refusal};
use crate::region::Slot;

/// The outcome of a pull on one link.
pub(super) enum PullOutcome {
    /// The peer answered.
    Done(Pulled),
    /// The peer refused.
    Refused(Refusal),
    /// The link ended before the answer was complete. The slots can be used again.
    Unanswered(Vec<Slot>),
}

/// A request under way.
struct PendingRequest {
    progress: Progress,
    state: RequestState,
    /// The permit and the share are held as long as the slots are, so a peer's share is bounded even if callers give up early.
    _permit: OwnedSemaphorePermit,
    _share: Option<Arc<BudgetShare>>,
}

/// The progress of a request.
pub(super) enum RequestState {
    /// A pull whose answer has not arrived.
    Pull { slots: Vec<Slot>, done: oneshot::Sender<PullOutcome> },
    /// A pull whose answer has arrived, and whose bytes are arriving.
    Landing { message: Vec<u8>, landing: Landing, done: oneshot::Sender<PullOutcome> },
    /// An offer that the peer has not accepted.
    Offer { ready: oneshot::Sender<OfferClaim>, done: oneshot::Sender<Result<Vec<u8>, Refusal>> },
    /// An offer that the peer has accepted.
    Sending { done: oneshot::Sender<Result<Vec<u8>, Refusal>>, claim: OfferClaim },
}

/// Decides how an accepted offer ends. Either its caller takes the claim and sends the bytes, or
/// this link takes it and sends `Withdrawn`. The peer, which has reserved a slot, thus gets exactly
/// one of the two.
#[derive(Clone, Default)]
pub(super) struct OfferClaim(Arc<AtomicBool>);

impl OfferClaim {
    /// Takes the claim. Returns whether it was free.
    pub(super) fn take(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}

impl RequestState {
    /// Returns the slots of a request whose link has ended. The caller of an offer notices that its channel is dropped here.
    fn return_slots(self) {
        let (slots, done) = match self {
            Self::Pull { slots, done } => (slots, done),
            Self::Landing { landing, done, .. } => (landing.finish().0, done),
            Self::Offer { .. } | Self::Sending { .. } => return,
        };
        // If the caller has given up, this drops the slots, which frees them.
        let _ = done.send(PullOutcome::Unanswered(slots));
    }
}

/// The requests under way on a link, by number; `None` once the link has ended.
struct Pending(Mutex<Option<HashMap<u64, PendingRequest>>>);

impl Pending {
    fn lock(&self) -> MutexGuard<'_, Option<HashMap<u64, PendingRequest>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, number: u64) -> Option<PendingRequest> {
        self.lock().as_mut()?.remove(&number)
    }

    fn insert(&self, number: u64, request: PendingRequest) {
        if let Some(requests) = &mut *self.lock() {
            requests.insert(number, request);
        }
    }
}

/// One TCP stream to a peer. The future that [`Link::start`] returns runs it.
pub(super) struct Link {
    pub(super) sender: Sender,
    pub(super) permits: Arc<Semaphore>,
    pending: Pending,
    next: AtomicU64,
    last_received: Arc<Timestamp>,
    last_sent: Arc<Timestamp>,
    /// Set once the link has ended or is about to.
    ended: OnceLock<LossCause>,
    ending: Notify,
}

impl Link {
    /// Creates a link from a stream, and the future that receives the link's answers until the link ends. `limit` bounds every
    /// write.
    pub(super) fn start(
        (read, write): (ReadHalf, WriteHalf),
        start: Instant,
        limit: Duration,
    ) -> (Arc<Self>, impl Future<Output = ()>) {
        let (last_received, last_sent) = (Timestamp::new(start), Timestamp::new(start));
        last_received.touch();
        let (sender, write) = writer(write, limit, last_sent.clone());
        let link = Arc::new(Self {
            sender,
            permits: Arc::new(Semaphore::new(PEER_REQUESTS_MAX)),
            pending: Pending(Mutex::new(Some(HashMap::new()))),
            next: AtomicU64::new(1),
            last_received,
            last_sent,
            ended: OnceLock::new(),
            ending: Notify::new(),
        });
        (link.clone(), async move { link.run(read, write).await })
    }

    async fn run(&self, read: ReadHalf, write: impl Future<Output = io::Result<()>>) {
        // The request whose bytes are landing is not in the table, but its slots must be returned too.
        let mut landing = None;
        let ended = tokio::select! {
            read = self.receive(read, &mut landing) => read,
            write = write => write,
            () = self.ending.notified() => Ok(()),
        };
        self.end(ended.map_or_else(LossCause::ended, |()| LossCause::Closed));
        // The stream is closed now, so no more bytes can land.
        self.permits.close();
        let requests = self.pending.lock().take().unwrap_or_default();
        requests.into_values().chain(landing).for_each(|request| request.state.return_slots());
    }

    /// Ends the link. Only the first cause is recorded.
    pub(super) fn end(&self, cause: LossCause) {
        let _ = self.ended.set(cause);
        self.ending.notify_one();
    }

    /// Returns why the link has ended or is about to end.
    pub(super) fn ended(&self) -> Option<&LossCause> {
        self.ended.get()
    }

    /// Returns the number of requests that wait for their answers.
    pub(super) fn load(&self) -> usize {
        PEER_REQUESTS_MAX - self.permits.available_permits()
    }

    /// Returns the time, since the start, at which bytes last arrived.
    pub(super) fn last_received(&self) -> Duration {
        self.last_received.at()
    }

    /// Returns the time, since the start, at which the stream last took bytes of an offer. A ping queued behind them may arrive
    /// late.
    pub(super) fn last_sent(&self) -> Duration {
        self.last_sent.at()
    }

    /// Enters a request into the table and returns its number, or returns its state if the link has ended.
    pub(super) fn register(
        &self,
        progress: &Progress,
        permit: OwnedSemaphorePermit,
        share: Option<Arc<BudgetShare>>,
        state: RequestState,
    ) -> Result<u64, RequestState> {
        let mut pending = self.pending.lock();
        let Some(requests) = &mut *pending else { return Err(state) };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let request = PendingRequest { progress: progress.clone(), state, _permit: permit, _share: share };
        requests.insert(number, request);
        Ok(number)
    }

    /// Queues the first frame of a request. If that takes longer than `limit`, or the caller gives up meanwhile, the request leaves
    /// the table with its slots and its permit, because the peer will never answer it. Fails only after `limit`; if the link has
    /// ended, the request's channels report that.
    pub(super) async fn send(
        &self,
        kind: Kind,
        request: u64,
        (argument, body): (u64, Vec<u8>),
        limit: Duration,
    ) -> Result<(), Elapsed> {
        let mut unsent = Unsent { link: self, request: Some(request) };
        // The send itself fails only if the link has ended.
        let _ = timeout(limit, self.sender.send(Outgoing::Frame { kind, request, argument, body })).await?;
        unsent.request = None;
        Ok(())
    }

    /// Receives answers until the stream ends. `current` is the request whose frame is being read.
    async fn receive(&self, read: ReadHalf, current: &mut Option<PendingRequest>) -> io::Result<()> {
        let mut read = Reader::new(read);
        // `Withdrawn` frames are sent by tasks, because the queue may be full and this loop must continue to read. There are never
        // more tasks than requests, because each task keeps its request's permit.
        let mut withdrawing = JoinSet::new();
        loop {
            let header = read.header().await?;
            while withdrawing.try_join_next().is_some() {}
            self.last_received.touch();
            // The request leaves the table while a frame for it is read, so that nothing else touches it.
            let request = self.pending.remove(header.request);
            if let Some(request) = &request {
                request.progress.touch();
            }
            if header.kind == Kind::Data {
                let request = current.insert(request.ok_or_else(unexpected)?);
                let RequestState::Landing { landing, .. } = &mut request.state else { return Err(unexpected()) };
                let progress = &request.progress;
                let on_bytes = || {
                    self.last_received.touch();
                    progress.touch();
                };
                read.land(landing, u64::from(header.body_len), on_bytes).await?;
                progress.touch();
                if let Some(request) = current.take() {
                    self.pending.insert(header.request, request);
                }
                continue;
            }
            *current = request;
            let body = read.body(&header).await?;
            let request = current.take();
            if header.kind == Kind::Pong && request.is_none() {
                continue;
            }
            let PendingRequest { progress, state, _permit: permit, _share: share } = request.ok_or_else(unexpected)?;
            let keep = |state, _permit, _share| {
                self.pending.insert(header.request, PendingRequest { progress, state, _permit, _share });
            };
            match (header.kind, state) {
                (Kind::Pulled, RequestState::Pull { slots, done }) => {
                    let (lens, message) = split_body(&body).ok_or_else(unexpected)?;
                    let landing = Landing::new(slots, lens).ok_or_else(unexpected)?;
                    if header.argument == 0 {
                        finish(message, landing, Unread::default(), done)?;
                    } else {
                        keep(RequestState::Landing { message, landing, done }, permit, share);
                    }
                }
                (Kind::End, RequestState::Landing { message, landing, done }) => {
                    let unread = split_unread(&body, landing.pieces()).ok_or_else(unexpected)?;
                    finish(message, landing, unread, done)?;
                }
                (Kind::Ready, RequestState::Offer { ready, done }) => {
                    let claim = OfferClaim::default();
                    keep(RequestState::Sending { done, claim: claim.clone() }, permit, share);
                    // A caller that has given up sends nothing. The peer then answers after its deadline, which is handled below.
                    let _ = ready.send(claim);
                }
                (Kind::Offered, RequestState::Offer { done, .. }) => drop(done.send(Ok(body))),
                (Kind::Refused, RequestState::Offer { done, .. }) => drop(done.send(Err(refusal(&body)))),
                (Kind::Offered | Kind::Refused, RequestState::Sending { done, claim }) => {
                    let answer = if header.kind == Kind::Offered { Ok(body) } else { Err(refusal(&body)) };
                    let _ = done.send(answer);
                    // Whatever the answer says, the peer may have reserved a slot for bytes that will not come.
                    if claim.take() {
                        withdrawing.spawn(send_withdrawn(self.sender.clone(), header.request, permit));
                    }
                }
                (Kind::Refused, RequestState::Pull { done, .. } | RequestState::Landing { done, .. }) => {
                    let _ = done.send(PullOutcome::Refused(refusal(&body)));
                }
                _ => return Err(unexpected()),
            }
        }
    }
}

/// A request in the table whose first frame is not queued yet. Dropping it removes the request.
struct Unsent<'a> {
    link: &'a Link,
    request: Option<u64>,
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        if let Some(request) = self.request {
            drop(self.link.pending.remove(request));
        }
    }
}

fn refusal(body: &[u8]) -> Refusal {
    Refusal::new(String::from_utf8_lossy(body))
}

/// Announces that the bytes for which the peer has reserved a slot will not come. If the link has ended, the peer already knows.
async fn send_withdrawn(sender: Sender, request: u64, _permit: OwnedSemaphorePermit) {
    let _ = sender.send(Outgoing::Frame { kind: Kind::Withdrawn, request, argument: 0, body: Vec::new() }).await;
}

/// Returns the answer to the caller; all of its bytes must have landed.
fn finish(message: Vec<u8>, landing: Landing, unread: Unread, done: oneshot::Sender<PullOutcome>) -> io::Result<()> {
    if !landing.is_complete() {
        return Err(unexpected());
    }
    let (slots, lens) = landing.finish();
    // If the caller has given up, this drops the slots, which frees them.
    let _ = done.send(PullOutcome::Done(Pulled { message, slots, lens, unread }));
    Ok(())
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer sent a frame that answers no request")
}
