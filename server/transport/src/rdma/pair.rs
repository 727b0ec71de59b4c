//! A pair of nodes: the inner transport's connection, and alongside it a queue pair on which this node sends requests. A queue
//! pair that fails is replaced, with growing pauses, as long as the peer lives and RDMA is wanted. In the meantime, requests go
//! over the inner transport.
//!
//! The two ends agree on queue pairs through messages over the inner transport: `docs/PROTOCOL.md` has their formats.

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
use super::card::{Card, Shared, lock};
use super::engine::QueueId;
use super::message::{Ask, QueuePairHello, WireRequest};
use super::queue::QueuePair;
use crate::budget::{PeerBudget, Progress};
use crate::contract::{Answer, Connection, Incoming, Pulled, Service};
use crate::error::{Refusal, TransportError};
use crate::region::Slot;

// The last byte of each message over the inner transport names its kind.

/// A message for the service above.
const FOR_SERVICE: u8 = 0;
/// A request to set up a queue pair.
const SET_UP: u8 = 1;
/// A request that is answered when the queue pair has failed. If the connection ends first, so does the queue pair.
const HOLD: u8 = 2;
/// A request to end a queue pair.
const END: u8 = 3;
/// An offer that was sent over RDMA before, and whose answer never arrived.
const AGAIN: u8 = 4;

/// The deadline of a `HOLD` request: longer than any session.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// The pause after the first failure of a queue pair. It doubles with each failure, up to [`RDMA_RETRY_INTERVAL`].
const BACK_OFF: Duration = Duration::from_millis(100);
/// A queue pair that lived this long is assumed not to have failed for the same reason as the one before.
const GOOD_LIFE: Duration = Duration::from_secs(60);

/// Sets up a queue pair alongside `inner`, if RDMA is wanted. The first connection to a peer waits for the first attempt to end.
pub(super) async fn connect(
    shared: &Arc<Shared>,
    inner: Arc<dyn Connection>,
    address: SocketAddr,
) -> Result<Arc<dyn Connection>, TransportError> {
    let pair = Arc::new(Pair { shared: shared.clone(), inner, asker: Mutex::default() });
    let mut holder = None;
    if shared.is_wanted() {
        let (first, tried) = oneshot::channel();
        holder = Some(QueuePairHolder(tokio::spawn(keep_up(pair.clone(), first))));
        // The outcome is recorded in `fallen_back`. Later connections do not wait: their requests can go over the inner
        // transport.
        if lock(&shared.known).insert(pair.inner.peer()) {
            // The request that needs the connection has a deadline of its own. This wait may take most of it, but not all.
            let _ = timeout(shared.deadlines.request / 5 * 3, tried).await;
        }
    }
    let budget = PeerBudget::new(shared.deadlines.look_interval);
    Ok(Arc::new(PairedConnection { pair, address, budget, _holder: holder }))
}

/// A connection of the inner transport, and its queue pair while there is a working one.
struct Pair {
    shared: Arc<Shared>,
    inner: Arc<dyn Connection>,
    asker: Mutex<Option<Arc<Asker>>>,
}

/// The task that keeps a queue pair up. Dropping the holder ends the task, and with it the queue pair.
struct QueuePairHolder(JoinHandle<()>);

impl Drop for QueuePairHolder {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Keeps a queue pair up until the peer is lost or RDMA is no longer wanted. Reports on `first` when the first attempt has ended.
async fn keep_up(pair: Arc<Pair>, first: oneshot::Sender<()>) {
    let mut first = Some(first);
    let (peer, mut failures) = (pair.inner.peer(), 0);
    while pair.shared.is_wanted() {
        let start = Instant::now();
        let reason = run_queue_pair(&pair, &mut first).await;
        if pair.inner.is_lost() || !pair.shared.is_wanted() {
            break;
        }
        failures = if start.elapsed() > GOOD_LIFE { 1 } else { failures + 1 };
        let is_demoted = failures >= RDMA_FAILURES_MAX;
        if is_demoted || failures == 1 {
            tracing::warn!(node = %peer, failures, error = reason, "the queue pair to a peer is lost; requests to that peer go over TCP");
        }
        let reason = if is_demoted { format!("{reason} (attempt {failures})") } else { reason };
        lock(&pair.shared.fallen_back).insert(peer, reason);
        drop(first.take());
        tokio::time::sleep((BACK_OFF * (1 << failures.min(10))).min(RDMA_RETRY_INTERVAL)).await;
    }
    lock(&pair.shared.fallen_back).remove(&peer);
}

/// Sets up a queue pair and runs it until it ends. Returns why it ended or could not be set up.
async fn run_queue_pair(pair: &Pair, first: &mut Option<oneshot::Sender<()>>) -> String {
    let deadline = pair.shared.deadlines.connect;
    let peer = pair.inner.peer();
    let asker = match set_up(pair).await {
        Ok(asker) => Arc::new(asker),
        Err(reason) => return reason,
    };
    let message = |kind: u8| [&asker.nonce.to_le_bytes()[..], &[kind]].concat();
    let hold = pair.inner.pull(message(HOLD), Vec::new(), FOREVER);
    let serve = async {
        // The queue pair is used only after a write by the peer has arrived.
        match asker.ask(Ask::Ping, &[], Vec::new(), None, (Progress::new(), None), deadline).await {
            Outcome::Done { .. } => {}
            Outcome::Late => return format!("no write by node {peer} arrived within {} s", deadline.as_secs_f64()),
            Outcome::Failed(..) => return asker.ended().await,
            Outcome::Refused(refusal) => return refusal.to_string(),
            Outcome::Unfit(_) => return "a ping does not fit".to_owned(),
        }
        lock(&pair.shared.fallen_back).remove(&peer);
        *lock(&pair.asker) = Some(asker.clone());
        drop(first.take());
        asker.ended().await
    };
    let reason = tokio::select! {
        reason = serve => reason,
        held = hold => match held {
            Ok(pulled) => String::from_utf8_lossy(&pulled.message).into_owned(),
            Err(error) => error.to_string(),
        },
        () = pair.shared.selection.rdma_excluded() => "the nodes agreed on TCP".to_owned(),
    };
    *lock(&pair.asker) = None;
    if first.is_some() {
        // The outcome of the first attempt is known now; nothing needs to wait for the cleanup below.
        lock(&pair.shared.fallen_back).insert(peer, reason.clone());
        drop(first.take());
    }
    asker.end(&reason);
    // The engine needs less time than this, unless the card has failed entirely.
    let _ = timeout(deadline, asker.ended()).await;
    if !pair.inner.is_lost() {
        // The peer may not have noticed that the queue pair has ended.
        let _ = pair.inner.pull(message(END), Vec::new(), deadline).await;
    }
    reason
}

async fn set_up(pair: &Pair) -> Result<Asker, String> {
    let card = pair.shared.card().map_err(|error| error.to_string())?;
    let (engine, depth) = (card.engine.clone(), card.limits.window);
    let queue_pair = blocking(move || engine.queue_pair(depth).map_err(|error| error.to_string())).await?;
    let hello = our_hello(card, &queue_pair)?;
    let message = [&hello.encode()[..], &[SET_UP]].concat();
    let answered =
        pair.inner.pull(message, Vec::new(), pair.shared.deadlines.connect).await.map_err(|error| error.to_string())?;
    let far = QueuePairHello::decode(&answered.message).ok_or("the peer sent a malformed description of its queue pair")?;
    let (queue_pair, far) = join(queue_pair, far).await?;
    Ok(Asker::start(&card.engine, queue_pair, hello.nonce, &far, &card.messages))
}

fn our_hello(card: &Card, pair: &QueuePair) -> Result<QueuePairHello, String> {
    let mut nonce = [0; 8];
    getrandom::fill(&mut nonce).map_err(|error| format!("cannot get random numbers: {error}"))?;
    let nonce = u64::from_le_bytes(nonce);
    Ok(QueuePairHello { end: pair.endpoint(), nonce, window: card.limits.window, request_len: card.limits.request_len })
}

async fn join(pair: QueuePair, far: QueuePairHello) -> Result<(QueuePair, QueuePairHello), String> {
    if pair.endpoint().address.is_ethernet != far.end.address.is_ethernet {
        return Err("one end is InfiniBand and the other is Ethernet".to_owned());
    }
    blocking(move || match pair.join(&far.end) {
        Ok(()) => Ok((pair, far)),
        Err(error) => Err(format!("cannot connect a queue pair to {}: {error}", far.end.address)),
    })
    .await
}

/// Runs a call of the card's driver on another thread, because it may take milliseconds.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(call).await.map_err(|error| error.to_string())?
}

struct PairedConnection {
    pair: Arc<Pair>,
    address: SocketAddr,
    /// The budget of requests on the queue pair. The inner transport has one of its own.
    budget: Arc<PeerBudget>,
    /// Ends the queue pair with the connection.
    _holder: Option<QueuePairHolder>,
}

impl PairedConnection {
    fn asker(&self) -> Option<Arc<Asker>> {
        lock(&self.pair.asker).clone()
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
        self.pair.inner.peer()
    }

    fn is_lost(&self) -> bool {
        self.pair.inner.is_lost()
    }

    fn quiet_for(&self) -> Duration {
        self.pair.inner.quiet_for()
    }

    async fn pull(&self, mut message: Vec<u8>, mut slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        // Requests without slots go over the inner transport: some of them must not be answered twice, and a request that fails
        // over RDMA is sent again.
        if !slots.is_empty()
            && let Some(asker) = self.asker()
        {
            let progress = Progress::new();
            let held = self.budget.take(&slots, &progress, limit).await;
            let held = held.map_err(|denied| denied.into_error(self.peer(), self.address, limit))?;
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
        if !slots.is_empty() {
            self.pair.shared.count_by_tcp();
        }
        if message.len() >= MESSAGE_LEN_MAX {
            return Err(TransportError::TooLong(message.len()));
        }
        message.push(FOR_SERVICE);
        self.pair.inner.pull(message, slots, limit).await
    }

    async fn offer(
        &self,
        mut message: Vec<u8>,
        payload: &mut Option<Slot>,
        len: usize,
        limit: Duration,
    ) -> Result<Vec<u8>, TransportError> {
        if payload.as_ref().is_none_or(|payload| len > payload.len()) {
            return Err(TransportError::TooLong(len));
        }
        let mut again = Vec::new();
        if let Some(asker) = self.asker() {
            let slots = Vec::from_iter(payload.take());
            let mut slots = match asker.ask(Ask::Offer, &message, slots, Some(len), (Progress::new(), None), limit).await {
                Outcome::Done { message, mut slots, .. } => {
                    *payload = slots.pop();
                    return Ok(message);
                }
                Outcome::Refused(refusal) => return Err(self.refused(refusal)),
                Outcome::Late => return Err(self.late(limit)),
                Outcome::Unfit(slots) => slots,
                Outcome::Failed(slots, number) => {
                    again = [&asker.nonce.to_le_bytes()[..], &number.to_le_bytes()].concat();
                    slots
                }
            };
            *payload = slots.pop();
        }
        self.pair.shared.count_by_tcp();
        if message.len() + again.len() >= MESSAGE_LEN_MAX {
            return Err(TransportError::TooLong(message.len()));
        }
        message.extend_from_slice(&again);
        message.push(if again.is_empty() { FOR_SERVICE } else { AGAIN });
        self.pair.inner.offer(message, payload, len, limit).await
    }
}

/// A queue pair that a peer set up.
struct AcceptedQueuePair {
    nonce: u64,
    queue: QueueId,
    /// Taken by the `HOLD` request, which answers the requests that arrive.
    requests: Option<mpsc::Receiver<WireRequest>>,
}

/// The service that the inner transport sees. It handles messages about queue pairs and passes all others to the service above.
pub(super) struct QueuePairService {
    shared: Arc<Shared>,
    service: Arc<dyn Service>,
    /// The latest queue pair of each peer. A peer sends requests on one queue pair, and sets up another after that one fails.
    accepted: Mutex<HashMap<NodeId, AcceptedQueuePair>>,
}

/// Ends a queue pair when the `HOLD` request that runs it ends or is aborted.
struct HeldQueuePair<'a> {
    welcome: &'a QueuePairService,
    card: &'a Card,
    peer: NodeId,
    nonce: u64,
    queue: QueueId,
}

impl Drop for HeldQueuePair<'_> {
    fn drop(&mut self) {
        self.card.engine.end(self.queue, "the connection to its peer ended");
        let mut all = lock(&self.welcome.accepted);
        if all.get(&self.peer).is_some_and(|accepted| accepted.nonce == self.nonce) {
            all.remove(&self.peer);
        }
    }
}

impl QueuePairService {
    pub(super) fn new(shared: Arc<Shared>, service: Arc<dyn Service>) -> Self {
        Self { shared, service, accepted: Mutex::default() }
    }

    async fn set_up(&self, from: NodeId, message: &[u8]) -> Result<Vec<u8>, Refusal> {
        if !self.shared.is_wanted() {
            return Err(self.shared.card().err().map_or_else(|| "the nodes agreed on TCP".into(), Refusal::new));
        }
        let card = self.shared.card().map_err(Refusal::new)?;
        let far = QueuePairHello::decode(message).ok_or("the description of the queue pair is malformed")?;
        let (engine, depth) = (card.engine.clone(), card.limits.send_depth);
        let pair = blocking(move || engine.queue_pair(depth).map_err(|error| error.to_string())).await?;
        let (pair, far) = join(pair, far).await?;
        let hello = our_hello(card, &pair)?.encode();
        let (sender, requests) = mpsc::channel(card.limits.window as usize);
        let queue = card.engine.add(pair, Box::new(Requests(Some(sender))));
        let accepted = AcceptedQueuePair { nonce: far.nonce, queue, requests: Some(requests) };
        if let Some(before) = lock(&self.accepted).insert(from, accepted) {
            card.engine.end(before.queue, "its peer has set up another one");
        }
        Ok(hello)
    }

    async fn hold(&self, from: NodeId, nonce: u64) -> Result<Vec<u8>, Refusal> {
        let card = self.shared.card().map_err(Refusal::new)?;
        let found = match lock(&self.accepted).get_mut(&from) {
            Some(accepted) if accepted.nonce == nonce => accepted.requests.take().map(|requests| (accepted.queue, requests)),
            _ => None,
        };
        let (queue, requests) = found.ok_or("there is no such queue pair")?;
        let _held = HeldQueuePair { welcome: self, card, peer: from, nonce, queue };
        let answerer = Answerer {
            engine: card.engine.clone(),
            write_len: u64::from(card.limits.write_len),
            staging: card.staging.clone(),
            answers: card.answers.clone(),
            drive_readers: card.drive_readers.clone(),
            direct: card.direct.clone(),
            service: self.service.clone(),
            outcomes: card.outcomes.clone(),
            deadlines: self.shared.deadlines,
        };
        answerer.run((from, nonce), queue, requests).await;
        Ok(b"the other end of the queue pair failed".to_vec())
    }

    fn end(&self, from: NodeId, nonce: u64) {
        let all = lock(&self.accepted);
        let accepted = all.get(&from).filter(|accepted| accepted.nonce == nonce);
        if let (Some(accepted), Ok(card)) = (accepted, self.shared.card()) {
            card.engine.end(accepted.queue, "its other end has ended");
        }
    }
}

/// Splits the nonce of a queue pair off the end of a message.
fn split_nonce(message: &[u8]) -> Result<(&[u8], u64), Refusal> {
    let (rest, nonce) = message.split_last_chunk::<8>().ok_or("the message is malformed")?;
    Ok((rest, u64::from_le_bytes(*nonce)))
}

#[async_trait]
impl Service for QueuePairService {
    async fn pulled(&self, from: NodeId, mut message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        let answer = match message.pop() {
            Some(FOR_SERVICE) => return self.service.pulled(from, message, room).await,
            Some(SET_UP) => self.set_up(from, &message).await?,
            Some(HOLD) => self.hold(from, split_nonce(&message)?.1).await?,
            Some(END) => {
                self.end(from, split_nonce(&message)?.1);
                Vec::new()
            }
            _ => return Err("the message is malformed".into()),
        };
        Ok(Answer { message: answer, pieces: Vec::new() })
    }

    async fn offered(&self, from: NodeId, mut message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        match message.pop() {
            Some(FOR_SERVICE) => self.service.offered(from, message, incoming).await,
            Some(AGAIN) => {
                let (rest, number) = message.split_last_chunk::<4>().ok_or("the message is malformed")?;
                let (rest, nonce) = split_nonce(rest)?;
                if let Ok(card) = self.shared.card()
                    && let Some(answer) = card.outcomes.of(from, nonce, u32::from_le_bytes(*number)).await
                {
                    return Ok(answer);
                }
                self.service.offered(from, rest.to_vec(), incoming).await
            }
            _ => Err("the message is malformed".into()),
        }
    }
}
