//! Requests over a queue pair, on the asking side. While a request is under way, its slots are held
//! here rather than by its caller. They are returned with the answer, or when the queue pair has
//! been destroyed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::engine::{Batch, Engine, Events, QueueId};
use super::message::{Ask, QueuePairHello, WireAnswer, WireRequest, answer_len, request_len};
use super::queue::{Action, QueuePair, Remote, Work};
use crate::budget::{BudgetShare, Progress};
use crate::contract::Unread;
use crate::error::Refusal;
use crate::region::{Region, Slot};

/// Bytes reserved for an answer's message, in addition to the list of slot lengths.
const ANSWER_MESSAGE_LEN: usize = 8 << 10;
/// A flag in the number of a completion: the request is making progress but has not been answered yet.
pub(super) const PROGRESS: u32 = 1 << 31;

/// The outcome of a request.
pub(super) enum Outcome {
    /// The peer answered. `lens` has the number of bytes in each slot.
    Done { lens: Vec<u32>, message: Vec<u8>, slots: Vec<Slot>, unread: Unread },
    /// The peer refused.
    Refused(Refusal),
    /// The request or its answer does not fit here, so the request must go over the inner transport.
    Unfit(Vec<Slot>),
    /// The queue pair ended while the request with this number was under way. The peer may or may not have answered it.
    Failed(Vec<Slot>, u32),
    /// There was no answer and no progress within the deadline. The slots stay with the queue pair.
    Late,
}

/// The asking end of a queue pair. Dropping it ends the queue pair.
pub(super) struct Asker {
    engine: Arc<Engine>,
    queue: QueueId,
    /// A random number with which both ends identify the queue pair.
    pub(super) nonce: u64,
    request_len_max: usize,
    messages: Region,
    window: Arc<Semaphore>,
    next: AtomicU32,
    pending: Arc<Pending>,
}

struct Pending {
    requests: Mutex<HashMap<u32, PendingRequest>>,
    ended: watch::Sender<Option<String>>,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, PendingRequest>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct PendingRequest {
    slots: Vec<Slot>,
    /// Holds the request, followed by the answer.
    message: Arc<Slot>,
    answer_at: usize,
    is_offer: bool,
    progress: Progress,
    done: oneshot::Sender<Outcome>,
    /// The permit and the share are held for as long as the slots are.
    _permit: OwnedSemaphorePermit,
    _share: Option<BudgetShare>,
}

impl Asker {
    /// Hands a connected queue pair to the engine. From then on, requests go through it.
    pub(super) fn start(engine: &Arc<Engine>, pair: QueuePair, nonce: u64, far: &QueuePairHello, messages: &Region) -> Self {
        let pending = Arc::new(Pending { requests: Mutex::default(), ended: watch::Sender::new(None) });
        let depth = pair.depth();
        let queue = engine.add(pair, Box::new(Answers(pending.clone())));
        Self {
            engine: engine.clone(),
            queue,
            nonce,
            request_len_max: far.request_len as usize,
            messages: messages.clone(),
            // The depth of this end's queue bounds the window too.
            window: Arc::new(Semaphore::new(far.window.min(depth) as usize)),
            next: AtomicU32::new(0),
            pending,
        }
    }

    /// Waits until the queue pair has been destroyed. Returns why.
    pub(super) async fn ended(&self) -> String {
        let mut ended = self.pending.ended.subscribe();
        // The sender lives as long as `self`, so this cannot fail.
        ended.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    }

    /// Sends a request. The peer moves bytes into `slots`, or takes the first `offered` bytes of the only slot.
    pub(super) async fn ask(
        &self,
        ask: Ask,
        message: &[u8],
        slots: Vec<Slot>,
        offered: Option<usize>,
        (progress, share): (Progress, Option<BudgetShare>),
        limit: Duration,
    ) -> Outcome {
        let Some(ranges) = slots.iter().map(|slot| range(slot, offered)).collect::<Option<Vec<_>>>() else {
            return Outcome::Unfit(slots);
        };
        let is_one_region = ranges.windows(2).all(|pair| pair[0].0.key == pair[1].0.key);
        let (asked_len, room) = (request_len(slots.len(), message.len()), answer_len(slots.len(), ANSWER_MESSAGE_LEN));
        if asked_len > self.request_len_max || !is_one_region {
            return Outcome::Unfit(slots);
        }
        // If too many requests wait for their answers, this one goes over the inner transport, with most of its time left.
        let patience = limit / 4;
        let Ok(Ok(permit)) = timeout(patience, self.window.clone().acquire_owned()).await else { return Outcome::Unfit(slots) };
        let answer_at = asked_len.next_multiple_of(8);
        let Some(mut buffer) = self.messages.slot_within((answer_at + room) as u64, patience).await else {
            return Outcome::Unfit(slots);
        };
        let Some(keys) = buffer.keys() else { return Outcome::Unfit(slots) };
        let answer = Remote { address: buffer.address() + answer_at as u64, key: keys.remote };
        let (done, outcome) = oneshot::channel();
        let message = {
            let mut requests = self.pending.lock();
            // `on_end` takes all requests under the same lock, so no request is entered after that.
            if self.pending.ended.borrow().is_some() {
                return Outcome::Unfit(slots);
            }
            // Numbers wrap around, and an old request may still be pending with the next number.
            let number = loop {
                let next = self.next.fetch_add(1, Ordering::Relaxed) & !PROGRESS;
                if !requests.contains_key(&next) {
                    break next;
                }
            };
            let request = WireRequest { ask, number, answer, answer_len: room as u32, ranges, message: message.to_vec() };
            request.encode(&mut buffer[..asked_len]);
            let (message, is_offer) = (Arc::new(buffer), ask == Ask::Offer);
            let (shared, progress) = (message.clone(), progress.clone());
            let waiting =
                PendingRequest { slots, message: shared, answer_at, is_offer, progress, done, _permit: permit, _share: share };
            requests.insert(number, waiting);
            message
        };
        let work = Work { action: Action::Send, address: message.address(), len: asked_len as u32, local_key: keys.local };
        self.engine.post(self.queue, Batch { works: vec![work], hold: Box::new(message), done: None });
        // No sender is dropped before it has sent, so the receiver cannot fail.
        progress.wait(limit, Duration::ZERO, outcome).await.and_then(Result::ok).unwrap_or(Outcome::Late)
    }

    /// Ends the queue pair.
    pub(super) fn end(&self, reason: &str) {
        self.engine.end(self.queue, reason);
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.end("it is no longer needed");
    }
}

/// Returns the memory range of a slot, if its region is registered.
fn range(slot: &Slot, offered: Option<usize>) -> Option<(Remote, u32)> {
    let len = u32::try_from(offered.unwrap_or(slot.len())).ok()?;
    Some((Remote { address: slot.address(), key: slot.keys()?.remote }, len))
}

/// Receives answers, on the engine's thread.
struct Answers(Arc<Pending>);

impl Events for Answers {
    fn on_message(&mut self, _message: &[u8]) -> Result<(), &'static str> {
        Err("the peer sent a request on a queue pair on which it may only answer")
    }

    fn on_completion(&mut self, number: u32) -> Result<(), &'static str> {
        if number & PROGRESS != 0 {
            if let Some(waiting) = self.0.lock().get(&(number & !PROGRESS)) {
                waiting.progress.touch();
            }
            return Ok(());
        }
        let mut requests = self.0.lock();
        let waiting = requests.get(&number).ok_or("the peer answered a request that does not exist")?;
        // After a malformed answer the slots stay until the queue pair is destroyed, because such a peer may still write into
        // them.
        let answered = WireAnswer::decode(&waiting.message[waiting.answer_at..]).ok_or("the peer's answer is malformed")?;
        if let WireAnswer::Done { lens, .. } = &answered {
            let slots = &waiting.slots;
            let fits = lens.len() <= slots.len() && lens.iter().zip(slots).all(|(&len, slot)| len as usize <= slot.len());
            if !fits {
                return Err("the peer's answer is longer than the slots");
            }
        }
        let Some(PendingRequest { slots, is_offer, done, .. }) = requests.remove(&number) else { return Ok(()) };
        drop(requests);
        let outcome = match answered {
            WireAnswer::Done { lens, message, unread } => Outcome::Done { lens, message, slots, unread },
            WireAnswer::Refused(refusal) => Outcome::Refused(refusal),
            // The offer was taken, and only its answer did not fit.
            WireAnswer::TooLong if is_offer => Outcome::Failed(slots, number),
            WireAnswer::TooLong => Outcome::Unfit(slots),
        };
        // If the caller has given up, this drops the slots, which frees them.
        let _ = done.send(outcome);
        Ok(())
    }

    fn on_end(&mut self, reason: &str) {
        let requests = {
            let mut requests = self.0.lock();
            self.0.ended.send_replace(Some(reason.to_owned()));
            std::mem::take(&mut *requests)
        };
        for (number, PendingRequest { slots, done, .. }) in requests {
            let _ = done.send(Outcome::Failed(slots, number));
        }
    }
}
