//! One link to a peer: what was asked on it and is not answered yet, and when it was last heard. While a request is under way its slots
//! are here, not with its asker; when the link ends they go back, for then nothing lands in them any more.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::limits::PEER_REQUESTS_MAX;
use dayfly_meta::wire::frame::Kind;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;

use super::reader::{Landing, Reader};
use super::seal::{ReadHalf, WriteHalf};
use super::stream::{Clock, Outgoing, Sender, split_body, split_unread, writer};
use crate::budget::{Held, Progress};
use crate::{LossCause, Pulled, Refusal, Slot, Unread};

/// How a pull on one link ended.
pub(super) enum PullEnd {
    /// It was answered.
    Done(Pulled),
    /// The peer will not.
    Refused(Refusal),
    /// The link ended before; the slots can be used again.
    Unanswered(Vec<Slot>),
}

/// A request under way.
struct Request {
    progress: Progress,
    state: State,
    /// Both stay as long as the slots: what a peer may have of us is bounded whatever its askers do.
    _permit: OwnedSemaphorePermit,
    _held: Option<Arc<Held>>,
}

/// How far it is.
pub(super) enum State {
    /// Waiting for the answer to a pull.
    Pull { slots: Vec<Slot>, done: oneshot::Sender<PullEnd> },
    /// The answer has come; its bytes are coming.
    Landing { message: Vec<u8>, landing: Landing, done: oneshot::Sender<PullEnd> },
    /// An offer, not accepted yet.
    Offer { ready: oneshot::Sender<Turn>, done: oneshot::Sender<Result<Vec<u8>, Refusal>> },
    /// An accepted offer.
    Sending { done: oneshot::Sender<Result<Vec<u8>, Refusal>>, turn: Turn },
}

/// Who has the last word on an accepted offer: its asker, who sends its bytes, or this link, which tells the peer that none come.
/// Whichever comes first; so the peer, which lends a slot meanwhile, hears one of the two and not both.
#[derive(Clone, Default)]
pub(super) struct Turn(Arc<AtomicBool>);

impl Turn {
    /// Whether it is ours.
    pub(super) fn take(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }
}

impl State {
    /// The link has ended. An offer's asker learns it by what is dropped here.
    fn give_back(self) {
        let (slots, done) = match self {
            Self::Pull { slots, done } => (slots, done),
            Self::Landing { landing, done, .. } => (landing.finish().0, done),
            Self::Offer { .. } | Self::Sending { .. } => return,
        };
        // An asker that has given up is not there any more; then the slots are free now.
        let _ = done.send(PullEnd::Unanswered(slots));
    }
}

/// What is under way on a link; `None` once it has ended.
struct Pending(Mutex<Option<HashMap<u64, Request>>>);

impl Pending {
    fn lock(&self) -> MutexGuard<'_, Option<HashMap<u64, Request>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, number: u64) -> Option<Request> {
        self.lock().as_mut()?.remove(&number)
    }

    fn insert(&self, number: u64, request: Request) {
        if let Some(requests) = &mut *self.lock() {
            requests.insert(number, request);
        }
    }
}

/// A link. Its task, which [`Link::start`] returns, ends with it.
pub(super) struct Link {
    pub(super) sender: Sender,
    pub(super) permits: Arc<Semaphore>,
    pending: Pending,
    next: AtomicU64,
    heard: Arc<Clock>,
    sent: Arc<Clock>,
    /// Why it ended.
    ended: OnceLock<LossCause>,
    ending: Notify,
}

impl Link {
    /// Makes a link of a stream, and the future that takes in answers until it ends.
    pub(super) fn start(
        (read, write): (ReadHalf, WriteHalf),
        start: Instant,
        patience: Duration,
    ) -> (Arc<Self>, impl Future<Output = ()>) {
        let (heard, sent) = (Clock::new(start), Clock::new(start));
        heard.tick();
        let (sender, write) = writer(write, patience, sent.clone());
        let link = Arc::new(Self {
            sender,
            permits: Arc::new(Semaphore::new(PEER_REQUESTS_MAX)),
            pending: Pending(Mutex::new(Some(HashMap::new()))),
            next: AtomicU64::new(1),
            heard,
            sent,
            ended: OnceLock::new(),
            ending: Notify::new(),
        });
        (link.clone(), async move { link.run(read, write).await })
    }

    async fn run(&self, read: ReadHalf, write: impl Future<Output = io::Result<()>>) {
        // What is landing when the link ends has slots to give back too.
        let mut landing = None;
        let ended = tokio::select! {
            read = self.receive(read, &mut landing) => read,
            write = write => write,
            () = self.ending.notified() => Ok(()),
        };
        self.end(ended.map_or_else(LossCause::ended, |()| LossCause::Closed));
        // The stream is closed: nothing lands any more.
        self.permits.close();
        let requests = self.pending.lock().take().unwrap_or_default();
        requests.into_values().chain(landing).for_each(|request| request.state.give_back());
    }

    /// Has it end, for a reason that only the first to call this gives.
    pub(super) fn end(&self, cause: LossCause) {
        // It has ended already if this fails.
        let _ = self.ended.set(cause);
        self.ending.notify_one();
    }

    /// Why it ended, once it has, or is about to.
    pub(super) fn ended(&self) -> Option<&LossCause> {
        self.ended.get()
    }

    /// How many requests wait for their answers.
    pub(super) fn load(&self) -> usize {
        PEER_REQUESTS_MAX - self.permits.available_permits()
    }

    /// When it was last heard, from the start.
    pub(super) fn heard(&self) -> Duration {
        self.heard.at()
    }

    /// When it last took bytes of an offer. A ping behind these may be long on its way.
    pub(super) fn sent(&self) -> Duration {
        self.sent.at()
    }

    /// Enters a request; where the link has ended, gives it back.
    pub(super) fn register(
        &self,
        progress: &Progress,
        permit: OwnedSemaphorePermit,
        held: Option<Arc<Held>>,
        state: State,
    ) -> Result<u64, State> {
        let mut pending = self.pending.lock();
        let Some(requests) = &mut *pending else { return Err(state) };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        requests.insert(number, Request { progress: progress.clone(), state, _permit: permit, _held: held });
        Ok(number)
    }

    /// Forgets a request that was never sent.
    pub(super) fn withdraw(&self, number: u64) {
        drop(self.pending.remove(number));
    }

    /// Takes in answers until the stream ends.
    async fn receive(&self, read: ReadHalf, now: &mut Option<Request>) -> io::Result<()> {
        let mut read = Reader::new(read);
        // Not sent from here: the queue may be full, and this must go on reading. As many as requests, for each has its permit.
        let mut withdrawing = JoinSet::new();
        loop {
            let header = read.header().await?;
            while withdrawing.try_join_next().is_some() {}
            self.heard.tick();
            // While a frame's bytes land, its request is out of the table; nobody else touches it.
            let request = self.pending.remove(header.request);
            if let Some(request) = &request {
                request.progress.touch();
            }
            if header.kind == Kind::Data {
                let request = now.insert(request.ok_or_else(unexpected)?);
                let State::Landing { landing, .. } = &mut request.state else { return Err(unexpected()) };
                let progress = &request.progress;
                let heard = || {
                    self.heard.tick();
                    progress.touch();
                };
                read.land(landing, u64::from(header.body_len), heard).await?;
                progress.touch();
                if let Some(request) = now.take() {
                    self.pending.insert(header.request, request);
                }
                continue;
            }
            *now = request;
            let body = read.body(&header).await?;
            let request = now.take();
            if header.kind == Kind::Pong && request.is_none() {
                continue;
            }
            let Request { progress, state, _permit: permit, _held: held } = request.ok_or_else(unexpected)?;
            let again = |state, _permit, _held| self.pending.insert(header.request, Request { progress, state, _permit, _held });
            match (header.kind, state) {
                (Kind::Pulled, State::Pull { slots, done }) => {
                    let (lens, message) = split_body(&body).ok_or_else(unexpected)?;
                    let landing = Landing::new(slots, lens).ok_or_else(unexpected)?;
                    if header.argument == 0 {
                        finish(message, landing, Unread::default(), done)?;
                    } else {
                        again(State::Landing { message, landing, done }, permit, held);
                    }
                }
                (Kind::End, State::Landing { message, landing, done }) => {
                    let unread = split_unread(&body, landing.pieces()).ok_or_else(unexpected)?;
                    finish(message, landing, unread, done)?;
                }
                (Kind::Ready, State::Offer { ready, done }) => {
                    let turn = Turn::default();
                    again(State::Sending { done, turn: turn.clone() }, permit, held);
                    // An asker that has given up sends nothing; the peer then gives up too, and hears of it below.
                    let _ = ready.send(turn);
                }
                (Kind::Offered, State::Offer { done, .. } | State::Sending { done, .. }) => {
                    let _ = done.send(Ok(body));
                }
                (Kind::Refused, state) => {
                    let refusal = Refusal::new(String::from_utf8_lossy(&body));
                    match state {
                        State::Pull { done, .. } | State::Landing { done, .. } => drop(done.send(PullEnd::Refused(refusal))),
                        State::Offer { done, .. } => drop(done.send(Err(refusal))),
                        State::Sending { done, turn } => {
                            drop(done.send(Err(refusal)));
                            if turn.take() {
                                withdrawing.spawn(tell_withdrawn(self.sender.clone(), header.request, permit));
                            }
                        }
                    }
                }
                _ => return Err(unexpected()),
            }
        }
    }
}

/// Tells the peer that the bytes for which it lends a slot do not come. That the link has ended is as good.
async fn tell_withdrawn(sender: Sender, request: u64, _permit: OwnedSemaphorePermit) {
    let _ = sender.send(Outgoing::Frame { kind: Kind::Withdrawn, request, argument: 0, body: Vec::new() }).await;
}

/// Answers the asker: all bytes have landed.
fn finish(message: Vec<u8>, landing: Landing, unread: Unread, done: oneshot::Sender<PullEnd>) -> io::Result<()> {
    if !landing.is_complete() {
        return Err(unexpected());
    }
    let (slots, lens) = landing.finish();
    // An asker that has given up is not there any more; then the slots are free now.
    let _ = done.send(PullEnd::Done(Pulled { message, slots, lens, unread }));
    Ok(())
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it sent a frame that answers nothing")
}
