//! A pair of nodes: the inner transport's connection, and beside it a queue pair, made anew when it fails, as long as that helps.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{MESSAGE_LEN_MAX, RDMA_FAILURES_MAX, RDMA_RETRY_INTERVAL};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::answer::{Answerer, Requests};
use super::ask::{Asker, Outcome};
use super::engine::QueueId;
use super::message::{Ask, Hello, Request};
use super::queue::QueuePair;
use super::{Card, Core, lock};
use crate::budget::{Budget, Progress};
use crate::{Answer, Connection, Incoming, Offered, Pulled, Refusal, Service, Slot, TransportError};

/// The last byte of each message of the inner transport tells whom it is for: the service above,
const FOR_SERVICE: u8 = 0;
/// or us: a queue pair is to be made,
const SET_UP: u8 = 1;
/// is held for as long as this request is not answered,
const HOLD: u8 = 2;
/// is to end;
const END: u8 = 3;
/// an offer is made again, whose first answer never came.
const AGAIN: u8 = 4;

/// Longer than any session.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// After a failure the next queue pair is tried twice this later, then four times, eight times... but for the longest interval.
const BACK_OFF: Duration = Duration::from_millis(100);
/// A queue pair that lived this long did not fail for the reason that the last one did.
const GOOD_LIFE: Duration = Duration::from_secs(60);

/// Brings a queue pair up beside `inner`, if RDMA is wanted; of a peer that is new, waits for how the first attempt ends.
pub(super) async fn connect(
    core: &Arc<Core>,
    inner: Arc<dyn Connection>,
    address: SocketAddr,
) -> Result<Arc<dyn Connection>, TransportError> {
    let link = Arc::new(Link { core: core.clone(), inner, asker: Mutex::default() });
    let mut holder = None;
    if core.is_wanted() {
        let (first, tried) = oneshot::channel();
        holder = Some(QueuePairHolder(tokio::spawn(keep_up(link.clone(), first))));
        // How it went stands in `fallen_back`. Who dials again has requests that need not wait for a card.
        if lock(&core.known).insert(link.inner.peer()) {
            // The request that needs the connection has a deadline of its own, most of which is for dialling.
            let _ = timeout(core.deadlines.request / 5 * 3, tried).await;
        }
    }
    let budget = Budget::new(core.deadlines.look_interval);
    Ok(Arc::new(PairedConnection { link, address, budget, _holder: holder }))
}

struct Link {
    core: Arc<Core>,
    inner: Arc<dyn Connection>,
    asker: Mutex<Option<Arc<Asker>>>,
}

/// Ends the task that makes queue pairs.
struct QueuePairHolder(JoinHandle<()>);

impl Drop for QueuePairHolder {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Keeps a queue pair up until the peer is lost, or RDMA is not wanted any more.
async fn keep_up(link: Arc<Link>, first: oneshot::Sender<()>) {
    let mut first = Some(first);
    let (peer, mut failures) = (link.inner.peer(), 0);
    while link.core.is_wanted() {
        let start = Instant::now();
        let reason = live(&link, &mut first).await;
        if link.inner.is_lost() || !link.core.is_wanted() {
            break;
        }
        failures = if start.elapsed() > GOOD_LIFE { 1 } else { failures + 1 };
        let is_demoted = failures >= RDMA_FAILURES_MAX;
        let reason = if is_demoted { format!("{reason}; that was attempt {failures}") } else { reason };
        if is_demoted || failures == 1 {
            tracing::warn!(%peer, reason, "no queue pair: what is asked of this peer goes by TCP");
        }
        lock(&link.core.fallen_back).insert(peer, reason);
        drop(first.take());
        tokio::time::sleep((BACK_OFF * (1 << failures.min(10))).min(RDMA_RETRY_INTERVAL)).await;
    }
    lock(&link.core.fallen_back).remove(&peer);
}

/// One queue pair's life; returns why it ended, or never began.
async fn live(link: &Link, first: &mut Option<oneshot::Sender<()>>) -> String {
    let asker = match set_up(link).await {
        Ok(asker) => Arc::new(asker),
        Err(reason) => return reason,
    };
    let message = |kind: u8| [&asker.nonce.to_le_bytes()[..], &[kind]].concat();
    let hold = link.inner.pull(message(HOLD), Vec::new(), FOREVER);
    let serve = async {
        // Nothing is trusted before a write has come through.
        match asker.ask(Ask::Ping, &[], Vec::new(), None, (Progress::new(), None), link.core.deadlines.connect).await {
            Outcome::Done { .. } => {}
            Outcome::Late => {
                return format!(
                    "no write of node {} came through within {} s",
                    link.inner.peer(),
                    link.core.deadlines.connect.as_secs_f64()
                );
            }
            Outcome::Failed(..) => return asker.ended().await,
            Outcome::Refused(refusal) => return refusal.to_string(),
            Outcome::Unfit(_) => return "a ping does not fit".to_owned(),
        }
        lock(&link.core.fallen_back).remove(&link.inner.peer());
        *lock(&link.asker) = Some(asker.clone());
        drop(first.take());
        asker.ended().await
    };
    let reason = tokio::select! {
        reason = serve => reason,
        held = hold => match held {
            Ok(pulled) => String::from_utf8_lossy(&pulled.message).into_owned(),
            Err(error) => error.to_string(),
        },
        () = link.core.unwanted() => "it was agreed on TCP".to_owned(),
    };
    *lock(&link.asker) = None;
    if first.is_some() {
        // It is known how the first attempt went; what is left to do keeps nobody waiting.
        lock(&link.core.fallen_back).insert(link.inner.peer(), reason.clone());
        drop(first.take());
    }
    asker.end(&reason);
    // The engine ends it within less, unless its card has failed altogether.
    let _ = timeout(link.core.deadlines.connect, asker.ended()).await;
    if !link.inner.is_lost() {
        // The far side may not have noticed.
        let _ = link.inner.pull(message(END), Vec::new(), link.core.deadlines.connect).await;
    }
    reason
}

async fn set_up(link: &Link) -> Result<Asker, String> {
    let card = link.core.card()?;
    let (engine, depth) = (card.engine.clone(), card.limits.window);
    let pair = blocking(move || engine.queue_pair(depth).map_err(|error| error.to_string())).await?;
    let hello = our_hello(card, &pair)?;
    let message = [&hello.encode()[..], &[SET_UP]].concat();
    let answered = link.inner.pull(message, Vec::new(), link.core.deadlines.connect).await.map_err(|error| error.to_string())?;
    let far = Hello::decode(&answered.message).ok_or("its end of a queue pair makes no sense")?;
    let (pair, far) = join(pair, far).await?;
    Ok(Asker::start(&card.engine, pair, hello.nonce, &far, &card.messages))
}

fn our_hello(card: &Card, pair: &QueuePair) -> Result<Hello, String> {
    let mut nonce = [0; 8];
    getrandom::fill(&mut nonce).map_err(|error| format!("no randomness: {error}"))?;
    let nonce = u64::from_le_bytes(nonce);
    Ok(Hello { end: pair.end(), nonce, window: card.limits.window, request_len: card.limits.request_len })
}

async fn join(pair: QueuePair, far: Hello) -> Result<(QueuePair, Hello), String> {
    if pair.end().address.is_ethernet != far.end.address.is_ethernet {
        return Err("one end is InfiniBand, the other Ethernet".to_owned());
    }
    blocking(move || match pair.join(&far.end) {
        Ok(()) => Ok((pair, far)),
        Err(error) => Err(format!("cannot join a queue pair to {}: {error}", super::queue::show(&far.end.address))),
    })
    .await
}

/// Calls of the card's driver may take milliseconds.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(call).await.map_err(|error| error.to_string())?
}

struct PairedConnection {
    link: Arc<Link>,
    address: SocketAddr,
    /// Of what goes by the queue pair; the inner transport has its own.
    budget: Arc<Budget>,
    /// Dropping the connection ends its queue pair.
    _holder: Option<QueuePairHolder>,
}

impl PairedConnection {
    fn asker(&self) -> Option<Arc<Asker>> {
        lock(&self.link.asker).clone()
    }

    fn refused(&self, refusal: Refusal) -> TransportError {
        TransportError::Refused { peer: self.peer(), address: self.address, refusal }
    }

    fn late(&self, timeout: Duration) -> TransportError {
        TransportError::Timeout { peer: self.peer(), address: self.address, timeout }
    }
}

#[async_trait]
impl Connection for PairedConnection {
    fn peer(&self) -> NodeId {
        self.link.inner.peer()
    }

    fn is_lost(&self) -> bool {
        self.link.inner.is_lost()
    }

    async fn pull(&self, mut message: Vec<u8>, mut slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        // What has no bulk goes by the inner transport: some of it must not be done twice, as what fails here may be.
        if !slots.is_empty()
            && let Some(asker) = self.asker()
        {
            let progress = Progress::new();
            let held = self.budget.take(&slots, &progress, limit).await;
            let held = held.map_err(|denied| denied.tell(self.peer(), self.address, limit))?;
            slots = match asker.ask(Ask::Pull, &message, slots, None, (progress, held), limit).await {
                Outcome::Done { lens, message, slots, unread } => {
                    let mut lens: Vec<u64> = lens.into_iter().map(u64::from).collect();
                    lens.resize(slots.len(), 0);
                    return Ok(Pulled { message, slots, lens, unread });
                }
                Outcome::Refused(refusal) => return Err(self.refused(refusal)),
                Outcome::Late => return Err(self.late(limit)),
                Outcome::Unfit(slots) | Outcome::Failed(slots, _) => slots,
            };
        }
        if message.len() >= MESSAGE_LEN_MAX {
            return Err(TransportError::TooLong(message.len()));
        }
        message.push(FOR_SERVICE);
        self.link.inner.pull(message, slots, limit).await
    }

    async fn offer(&self, mut message: Vec<u8>, payload: Slot, len: usize, limit: Duration) -> Result<Offered, TransportError> {
        if len > payload.len() {
            return Err(TransportError::TooLong(len));
        }
        let mut slots = vec![payload];
        let mut again = Vec::new();
        if let Some(asker) = self.asker() {
            slots = match asker.ask(Ask::Offer, &message, slots, Some(len), (Progress::new(), None), limit).await {
                Outcome::Done { message, mut slots, .. } => {
                    let payload = slots.pop().ok_or_else(|| self.refused("it kept what was offered".into()))?;
                    return Ok(Offered { message, payload });
                }
                Outcome::Refused(refusal) => return Err(self.refused(refusal)),
                Outcome::Late => return Err(self.late(limit)),
                Outcome::Unfit(slots) => slots,
                Outcome::Failed(slots, number) => {
                    again = [&asker.nonce.to_le_bytes()[..], &number.to_le_bytes()].concat();
                    slots
                }
            };
        }
        let payload = slots.pop().ok_or_else(|| self.refused("what was offered is gone".into()))?;
        if message.len() + again.len() >= MESSAGE_LEN_MAX {
            return Err(TransportError::TooLong(message.len()));
        }
        message.extend_from_slice(&again);
        message.push(if again.is_empty() { FOR_SERVICE } else { AGAIN });
        self.link.inner.offer(message, payload, len, limit).await
    }
}

/// A queue pair that a peer set up.
struct Accepted {
    nonce: u64,
    queue: QueueId,
    /// Until it is held.
    requests: Option<mpsc::Receiver<Request>>,
}

/// The service that the inner transport sees: ours, for queue pairs, before the one above.
pub(super) struct Welcome {
    core: Arc<Core>,
    service: Arc<dyn Service>,
    /// Each peer's last: it asks by one, and sets up another when that one has failed.
    accepted: Mutex<HashMap<NodeId, Accepted>>,
}

/// Ends a queue pair with the request that holds it.
struct Held<'a> {
    welcome: &'a Welcome,
    card: &'a Card,
    peer: NodeId,
    nonce: u64,
    queue: QueueId,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.card.engine.end(self.queue, "its peer's connection ended");
        let mut all = lock(&self.welcome.accepted);
        if all.get(&self.peer).is_some_and(|accepted| accepted.nonce == self.nonce) {
            all.remove(&self.peer);
        }
    }
}

impl Welcome {
    pub(super) fn new(core: Arc<Core>, service: Arc<dyn Service>) -> Self {
        Self { core, service, accepted: Mutex::default() }
    }

    async fn set_up(&self, from: NodeId, message: &[u8]) -> Result<Vec<u8>, Refusal> {
        if !self.core.is_wanted() {
            return Err(self.core.card().err().map_or_else(|| "it has agreed on TCP".into(), Refusal::from));
        }
        let card = self.core.card()?;
        let far = Hello::decode(message).ok_or("an end of a queue pair that makes no sense")?;
        let (engine, depth) = (card.engine.clone(), card.limits.send_depth);
        let pair = blocking(move || engine.queue_pair(depth).map_err(|error| error.to_string())).await?;
        let (pair, far) = join(pair, far).await?;
        let hello = our_hello(card, &pair)?.encode();
        let (sender, requests) = mpsc::channel(card.limits.window as usize);
        let queue = card.engine.add(pair, Box::new(Requests(Some(sender))));
        let accepted = Accepted { nonce: far.nonce, queue, requests: Some(requests) };
        if let Some(before) = lock(&self.accepted).insert(from, accepted) {
            card.engine.end(before.queue, "its peer has another now");
        }
        Ok(hello)
    }

    async fn hold(&self, from: NodeId, nonce: u64) -> Result<Vec<u8>, Refusal> {
        let card = self.core.card()?;
        let found = match lock(&self.accepted).get_mut(&from) {
            Some(accepted) if accepted.nonce == nonce => accepted.requests.take().map(|requests| (accepted.queue, requests)),
            _ => None,
        };
        let (queue, requests) = found.ok_or("there is no such queue pair")?;
        let _held = Held { welcome: self, card, peer: from, nonce, queue };
        let answerer = Answerer {
            engine: card.engine.clone(),
            write_len: u64::from(card.limits.write_len),
            staging: card.staging.clone(),
            answers: card.answers.clone(),
            turns: card.turns.clone(),
            direct: card.direct.clone(),
            service: self.service.clone(),
            outcomes: card.outcomes.clone(),
            deadlines: self.core.deadlines,
        };
        answerer.run((from, nonce), queue, requests).await;
        Ok(b"the far end of the queue pair failed".to_vec())
    }

    fn end(&self, from: NodeId, nonce: u64) {
        let all = lock(&self.accepted);
        let accepted = all.get(&from).filter(|accepted| accepted.nonce == nonce);
        if let (Some(accepted), Ok(card)) = (accepted, self.core.card()) {
            card.engine.end(accepted.queue, "its far end has ended");
        }
    }
}

/// The name of a queue pair at a message's end.
fn split_nonce(message: &[u8]) -> Result<(&[u8], u64), Refusal> {
    let (rest, nonce) = message.split_last_chunk::<8>().ok_or("a message that no peer sends")?;
    Ok((rest, u64::from_le_bytes(*nonce)))
}

#[async_trait]
impl Service for Welcome {
    async fn pulled(&self, from: NodeId, mut message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        let told = match message.pop() {
            Some(FOR_SERVICE) => return self.service.pulled(from, message, room).await,
            Some(SET_UP) => self.set_up(from, &message).await?,
            Some(HOLD) => self.hold(from, split_nonce(&message)?.1).await?,
            Some(END) => {
                self.end(from, split_nonce(&message)?.1);
                Vec::new()
            }
            _ => return Err("a message that no peer sends".into()),
        };
        Ok(Answer { message: told, pieces: Vec::new() })
    }

    async fn offered(&self, from: NodeId, mut message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        match message.pop() {
            Some(FOR_SERVICE) => self.service.offered(from, message, incoming).await,
            Some(AGAIN) => {
                let (rest, number) = message.split_last_chunk::<4>().ok_or("a message that no peer sends")?;
                let (rest, nonce) = split_nonce(rest)?;
                if let Ok(card) = self.core.card()
                    && let Some(answer) = card.outcomes.of(from, nonce, u32::from_le_bytes(*number)).await
                {
                    return Ok(answer);
                }
                self.service.offered(from, rest.to_vec(), incoming).await
            }
            _ => Err("a message that no peer sends".into()),
        }
    }
}
