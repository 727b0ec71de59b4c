//! Our requests over a queue pair. While one is under way its slots are here, not with its asker; they come back with the answer, or
//! when the queue pair is gone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::engine::{Batch, Engine, Events, QueueId};
use super::message::{Answered, Ask, Hello, Request, answer_len, request_len};
use super::queue::{Action, QueuePair, Remote, Work};
use crate::budget::{Held, Progress};
use crate::{Refusal, Region, Slot, Unread};

/// Room for an answer's message beside its lengths.
const ANSWER_MESSAGE_LEN: usize = 8 << 10;
/// In the number by which the far side tells: the request goes on, and is not answered yet.
pub(super) const PROGRESS: u32 = 1 << 31;

/// How a request ended.
pub(super) enum Outcome {
    /// It was answered: so many bytes in each slot.
    Done { lens: Vec<u32>, message: Vec<u8>, slots: Vec<Slot>, unread: Unread },
    /// The far side will not.
    Refused(Refusal),
    /// It has to go another way: it, or its answer, does not fit here.
    Unfit(Vec<Slot>),
    /// The queue pair ended while it was under way; what became of it there nobody knows. With its number.
    Failed(Vec<Slot>, u32),
    /// No answer and no progress within the deadline; the slots stay.
    Late,
}

/// Our end of a queue pair that we ask through; dropping it ends the queue pair.
pub(super) struct Asker {
    engine: Arc<Engine>,
    queue: QueueId,
    /// The queue pair's name, which the far side knows too.
    pub(super) nonce: u64,
    request_len_max: usize,
    messages: Region,
    window: Arc<Semaphore>,
    next: AtomicU32,
    pending: Arc<Pending>,
}

struct Pending {
    requests: Mutex<HashMap<u32, Waiting>>,
    ended: watch::Sender<Option<String>>,
}

impl Pending {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Waiting>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Waiting {
    slots: Vec<Slot>,
    /// The request, and behind it the answer.
    message: Arc<Slot>,
    answer_at: usize,
    is_offer: bool,
    progress: Progress,
    done: oneshot::Sender<Outcome>,
    /// Both stay as long as the slots.
    _permit: OwnedSemaphorePermit,
    _held: Option<Held>,
}

impl Asker {
    /// Puts a joined queue pair into service.
    pub(super) fn start(engine: &Arc<Engine>, pair: QueuePair, nonce: u64, far: &Hello, messages: &Region) -> Self {
        let pending = Arc::new(Pending { requests: Mutex::default(), ended: watch::Sender::new(None) });
        let depth = pair.depth();
        let queue = engine.add(pair, Box::new(Answers(pending.clone())));
        Self {
            engine: engine.clone(),
            queue,
            nonce,
            request_len_max: far.request_len as usize,
            messages: messages.clone(),
            // Not more than our own queue pair has room for.
            window: Arc::new(Semaphore::new(far.window.min(depth) as usize)),
            next: AtomicU32::new(0),
            pending,
        }
    }

    /// Waits until the queue pair is gone; tells why.
    pub(super) async fn ended(&self) -> String {
        let mut ended = self.pending.ended.subscribe();
        // The sender lives as long as `self`.
        ended.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone()).unwrap_or_default()
    }

    /// Asks; the far side moves bytes into `slots`, or takes the first `offered` bytes of the only one.
    pub(super) async fn ask(
        &self,
        ask: Ask,
        message: &[u8],
        slots: Vec<Slot>,
        offered: Option<usize>,
        (progress, held): (Progress, Option<Held>),
        limit: Duration,
    ) -> Outcome {
        let Some(places) = slots.iter().map(|slot| place(slot, offered)).collect::<Option<Vec<_>>>() else {
            return Outcome::Unfit(slots);
        };
        let is_one_region = places.windows(2).all(|pair| pair[0].0.key == pair[1].0.key);
        let (asked_len, room) = (request_len(slots.len(), message.len()), answer_len(slots.len(), ANSWER_MESSAGE_LEN));
        if asked_len > self.request_len_max || !is_one_region {
            return Outcome::Unfit(slots);
        }
        // Where too much waits for its answers already, there is the other way.
        let patience = limit / 4;
        let Ok(Ok(permit)) = timeout(patience, self.window.clone().acquire_owned()).await else { return Outcome::Unfit(slots) };
        let answer_at = asked_len.next_multiple_of(8);
        let Some(mut buffer) = self.messages.slot_within((answer_at + room) as u64, patience).await else {
            return Outcome::Unfit(slots);
        };
        let Some(keys) = buffer.keys() else { return Outcome::Unfit(slots) };
        let answer = Remote { address: buffer.address() + answer_at as u64, key: keys.remote };
        let (done, mut outcome) = oneshot::channel();
        let message = {
            let mut requests = self.pending.lock();
            // Looked at under the lock under which the end takes all requests.
            if self.pending.ended.borrow().is_some() {
                return Outcome::Unfit(slots);
            }
            // Numbers come round again, and some request may be waiting still.
            let number = loop {
                let next = self.next.fetch_add(1, Ordering::Relaxed) & !PROGRESS;
                if !requests.contains_key(&next) {
                    break next;
                }
            };
            let request = Request { ask, number, answer, answer_len: room as u32, places, message: message.to_vec() };
            request.encode(&mut buffer[..asked_len]);
            let (message, is_offer) = (Arc::new(buffer), ask == Ask::Offer);
            let (shared, progress) = (message.clone(), progress.clone());
            let waiting = Waiting { slots, message: shared, answer_at, is_offer, progress, done, _permit: permit, _held: held };
            requests.insert(number, waiting);
            message
        };
        let work = Work { action: Action::Send, address: message.address(), len: asked_len as u32, local_key: keys.local };
        self.engine.post(self.queue, Batch { works: vec![work], hold: Box::new(message), done: None });
        loop {
            let left = limit.saturating_sub(progress.age());
            if left.is_zero() {
                return Outcome::Late;
            }
            if let Ok(outcome) = timeout(left, &mut outcome).await {
                // The sender is dropped nowhere without having sent.
                return outcome.unwrap_or(Outcome::Late);
            }
        }
    }

    /// Ends the queue pair.
    pub(super) fn end(&self, reason: &str) {
        self.engine.end(self.queue, reason);
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.end("it is not needed any more");
    }
}

fn place(slot: &Slot, offered: Option<usize>) -> Option<(Remote, u32)> {
    let len = u32::try_from(offered.unwrap_or(slot.len())).ok()?;
    Some((Remote { address: slot.address(), key: slot.keys()?.remote }, len))
}

/// Takes answers, on the engine's thread.
struct Answers(Arc<Pending>);

impl Events for Answers {
    fn received(&mut self, _message: &[u8]) -> Result<(), &'static str> {
        Err("it sends messages where it is asked")
    }

    fn told(&mut self, number: u32) -> Result<(), &'static str> {
        if number & PROGRESS != 0 {
            if let Some(waiting) = self.0.lock().get(&(number & !PROGRESS)) {
                waiting.progress.touch();
            }
            return Ok(());
        }
        let mut requests = self.0.lock();
        let waiting = requests.get(&number).ok_or("it answers what was not asked")?;
        // After an answer that makes no sense the slots stay until the queue pair is gone: who knows what else it does.
        let answered = Answered::decode(&waiting.message[waiting.answer_at..]).ok_or("its answer makes no sense")?;
        if let Answered::Done { lens, .. } = &answered {
            let slots = &waiting.slots;
            let fits = lens.len() <= slots.len() && lens.iter().zip(slots).all(|(&len, slot)| len as usize <= slot.len());
            if !fits {
                return Err("it answers with more than there is room for");
            }
        }
        let Some(Waiting { slots, is_offer, done, .. }) = requests.remove(&number) else { return Ok(()) };
        drop(requests);
        let outcome = match answered {
            Answered::Done { lens, message, unread } => Outcome::Done { lens, message, slots, unread },
            Answered::Refused(refusal) => Outcome::Refused(refusal),
            // It was taken, and only its answer did not fit.
            Answered::TooLong if is_offer => Outcome::Failed(slots, number),
            Answered::TooLong => Outcome::Unfit(slots),
        };
        // An asker that has given up is not there any more; then the slots are free now.
        let _ = done.send(outcome);
        Ok(())
    }

    fn ended(&mut self, reason: &str) {
        let requests = {
            let mut requests = self.0.lock();
            self.0.ended.send_replace(Some(reason.to_owned()));
            std::mem::take(&mut *requests)
        };
        for (number, Waiting { slots, done, .. }) in requests {
            let _ = done.send(Outcome::Failed(slots, number));
        }
    }
}
