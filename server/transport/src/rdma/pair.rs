//! A pair of nodes: the inner transport's connection, and beside it a queue pair, made anew when it fails, as long as that helps.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{CONNECT_TIMEOUT, MESSAGE_LEN_MAX, RDMA_FAILURES_MAX, RDMA_RETRY_INTERVAL, REQUEST_TIMEOUT};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::answer::{Answerer, Requests};
use super::ask::{Asker, Outcome};
use super::message::{Ask, Hello, Request};
use super::queue::QueuePair;
use super::{Card, Core, lock};
use crate::{Answer, Connection, Incoming, Offered, Pulled, Service, Slot, TransportError};

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
/// After a failure the next queue pair is tried this much later, then twice, four times...
const BACK_OFF: Duration = Duration::from_millis(100);
/// A queue pair that lived this long did not fail for the reason that the last one did.
const GOOD_LIFE: Duration = Duration::from_secs(60);
/// A queue pair that was set up and is not held by then is forgotten.
const HOLD_TIMEOUT: Duration = Duration::from_secs(10);
/// Queue pairs that a peer may have set up and not hold.
const UNHELD_MAX: usize = 4;

/// Brings a queue pair up beside `inner`, if RDMA is wanted; waits for how the first attempt ends.
pub(super) async fn connect(
    core: &Arc<Core>,
    inner: Arc<dyn Connection>,
    address: SocketAddr,
) -> Result<Arc<dyn Connection>, TransportError> {
    let link = Arc::new(Link { core: core.clone(), inner, asker: Mutex::default() });
    let mut keeper = None;
    if core.is_wanted() {
        let (first, tried) = oneshot::channel();
        keeper = Some(Keeper(tokio::spawn(keep_up(link.clone(), first))));
        // Its own deadlines bound this; how it went stands in `fallen_back`.
        let _ = tried.await;
    }
    Ok(Arc::new(PairedConnection { link, address, _keeper: keeper }))
}

struct Link {
    core: Arc<Core>,
    inner: Arc<dyn Connection>,
    asker: Mutex<Option<Arc<Asker>>>,
}

/// Ends the task that makes queue pairs.
struct Keeper(JoinHandle<()>);

impl Drop for Keeper {
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
        tokio::time::sleep(if is_demoted { RDMA_RETRY_INTERVAL } else { BACK_OFF * (1 << failures) }).await;
    }
    lock(&link.core.fallen_back).remove(&peer);
}

/// One queue pair's life; returns why it ended, or never began.
async fn live(link: &Link, first: &mut Option<oneshot::Sender<()>>) -> String {
    let asker = match set_up(link).await {
        Ok(asker) => Arc::new(asker),
        Err(reason) => return reason,
    };
    let message = |kind: u8| [&asker.queue().to_le_bytes()[..], &[kind]].concat();
    let hold = link.inner.pull(message(HOLD), Vec::new(), FOREVER);
    let serve = async {
        // Nothing is trusted before a write has come through.
        match asker.ask(Ask::Ping, &[], Vec::new(), None, CONNECT_TIMEOUT).await {
            Outcome::Done { .. } => {}
            Outcome::Late => {
                return format!("no write of node {} came through within {} s", link.inner.peer(), CONNECT_TIMEOUT.as_secs());
            }
            _ => return asker.ended().await,
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
    asker.end(&reason);
    // The engine ends it within less, unless its card has failed altogether.
    let _ = timeout(CONNECT_TIMEOUT, asker.ended()).await;
    if !link.inner.is_lost() {
        // The far side may not have noticed.
        let _ = link.inner.pull(message(END), Vec::new(), CONNECT_TIMEOUT).await;
    }
    reason
}

async fn set_up(link: &Link) -> Result<Asker, String> {
    let card = link.core.card()?;
    let (engine, depth) = (card.engine.clone(), card.limits.window);
    let pair = blocking(move || engine.queue_pair(depth).map_err(|error| error.to_string())).await?;
    let hello = our_hello(card, &pair);
    let message = [&hello.encode()[..], &[SET_UP]].concat();
    let answered = link.inner.pull(message, Vec::new(), REQUEST_TIMEOUT).await.map_err(|error| error.to_string())?;
    let far = Hello::decode(&answered.message).ok_or("its end of a queue pair makes no sense")?;
    let (pair, far) = join(pair, far).await?;
    Ok(Asker::start(&card.engine, pair, &far, &card.messages))
}

fn our_hello(card: &Card, pair: &QueuePair) -> Hello {
    Hello { end: pair.end(), window: card.limits.window, request_len: card.limits.request_len }
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
    /// Dropping the connection ends its queue pair.
    _keeper: Option<Keeper>,
}

impl PairedConnection {
    fn asker(&self) -> Option<Arc<Asker>> {
        lock(&self.link.asker).clone()
    }

    fn refused(&self, reason: String) -> TransportError {
        TransportError::Refused { peer: self.peer(), address: self.address, reason }
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
            slots = match asker.ask(Ask::Pull, &message, slots, None, limit).await {
                Outcome::Done { lens, message, slots } => {
                    let mut lens: Vec<u64> = lens.into_iter().map(u64::from).collect();
                    lens.resize(slots.len(), 0);
                    return Ok(Pulled { message, slots, lens });
                }
                Outcome::Refused(reason) => return Err(self.refused(reason)),
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
            slots = match asker.ask(Ask::Offer, &message, slots, Some(len), limit).await {
                Outcome::Done { message, mut slots, .. } => {
                    let payload = slots.pop().ok_or_else(|| self.refused("it kept what was offered".to_owned()))?;
                    return Ok(Offered { message, payload });
                }
                Outcome::Refused(reason) => return Err(self.refused(reason)),
                Outcome::Late => return Err(self.late(limit)),
                Outcome::Unfit(slots) => slots,
                Outcome::Failed(slots, number) => {
                    again = [asker.queue().to_le_bytes(), number.to_le_bytes()].concat();
                    slots
                }
            };
        }
        let payload = slots.pop().ok_or_else(|| self.refused("what was offered is gone".to_owned()))?;
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
    queue: u32,
    since: Instant,
    /// Until it is held.
    requests: Option<mpsc::Receiver<Request>>,
}

/// A peer's queue pair, by the peer's number of it.
type Key = (NodeId, u32);

/// The service that the inner transport sees: ours, for queue pairs, before the one above.
pub(super) struct Welcome {
    core: Arc<Core>,
    service: Arc<dyn Service>,
    accepted: Mutex<HashMap<Key, Accepted>>,
}

/// Ends a queue pair with the request that holds it.
struct Held<'a> {
    welcome: &'a Welcome,
    card: &'a Card,
    key: Key,
    queue: u32,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.card.engine.end(self.queue, "its peer's connection ended");
        lock(&self.welcome.accepted).remove(&self.key);
    }
}

impl Welcome {
    pub(super) fn new(core: Arc<Core>, service: Arc<dyn Service>) -> Self {
        Self { core, service, accepted: Mutex::default() }
    }

    async fn set_up(&self, from: NodeId, message: &[u8]) -> Result<Vec<u8>, String> {
        if !self.core.is_wanted() {
            return Err(self.core.card().err().unwrap_or_else(|| "it has agreed on TCP".to_owned()));
        }
        let card = self.core.card()?;
        let far = Hello::decode(message).ok_or("an end of a queue pair that makes no sense")?;
        let (engine, depth) = (card.engine.clone(), card.limits.send_depth);
        let pair = blocking(move || engine.queue_pair(depth).map_err(|error| error.to_string())).await?;
        let (pair, far) = join(pair, far).await?;
        let hello = our_hello(card, &pair).encode();
        let (sender, requests) = mpsc::channel(card.limits.window as usize);
        let accepted = Accepted { queue: pair.number(), since: Instant::now(), requests: Some(requests) };
        let mut all = lock(&self.accepted);
        all.retain(|_, accepted| {
            let is_kept = accepted.requests.is_none() || accepted.since.elapsed() < HOLD_TIMEOUT;
            if !is_kept {
                card.engine.end(accepted.queue, "nobody holds it");
            }
            is_kept
        });
        let is_unheld = |(key, accepted): &(&Key, &Accepted)| key.0 == from && accepted.requests.is_some();
        if all.iter().filter(is_unheld).count() >= UNHELD_MAX {
            return Err("too many queue pairs are set up and not held".to_owned());
        }
        card.engine.add(pair, Box::new(Requests(Some(sender))));
        if let Some(before) = all.insert((from, far.end.queue), accepted) {
            card.engine.end(before.queue, "its far end is of another queue pair now");
        }
        Ok(hello)
    }

    async fn hold(&self, key: Key) -> Result<Vec<u8>, String> {
        let card = self.core.card()?;
        let unknown = || "there is no such queue pair".to_owned();
        let (queue, requests) = {
            let mut all = lock(&self.accepted);
            let accepted = all.get_mut(&key).ok_or_else(unknown)?;
            (accepted.queue, accepted.requests.take().ok_or_else(unknown)?)
        };
        let _held = Held { welcome: self, card, key, queue };
        let answerer = Answerer {
            engine: card.engine.clone(),
            write_len: u64::from(card.limits.write_len),
            staging: card.staging.clone(),
            turns: card.turns.clone(),
            direct: card.direct.clone(),
            service: self.service.clone(),
            outcomes: card.outcomes.clone(),
        };
        answerer.run(key, queue, requests).await;
        Ok(b"the far end of the queue pair failed".to_vec())
    }

    fn end(&self, key: Key) {
        let queue = lock(&self.accepted).get(&key).map(|accepted| accepted.queue);
        if let (Some(queue), Ok(card)) = (queue, self.core.card()) {
            card.engine.end(queue, "its far end has ended");
        }
    }
}

fn split_number(message: &[u8]) -> Result<(&[u8], u32), String> {
    let (rest, number) = message.split_last_chunk::<4>().ok_or("a message that no peer sends")?;
    Ok((rest, u32::from_le_bytes(*number)))
}

#[async_trait]
impl Service for Welcome {
    async fn pulled(&self, from: NodeId, mut message: Vec<u8>, room: Vec<u64>) -> Result<Answer, String> {
        let told = match message.pop() {
            Some(FOR_SERVICE) => return self.service.pulled(from, message, room).await,
            Some(SET_UP) => self.set_up(from, &message).await?,
            Some(HOLD) => self.hold((from, split_number(&message)?.1)).await?,
            Some(END) => {
                self.end((from, split_number(&message)?.1));
                Vec::new()
            }
            _ => return Err("a message that no peer sends".to_owned()),
        };
        Ok(Answer { message: told, pieces: Vec::new() })
    }

    async fn offered(&self, from: NodeId, mut message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, String> {
        match message.pop() {
            Some(FOR_SERVICE) => self.service.offered(from, message, incoming).await,
            Some(AGAIN) => {
                let (rest, number) = split_number(&message)?;
                let (rest, queue) = split_number(rest)?;
                if let Ok(card) = self.core.card()
                    && let Some(answer) = card.outcomes.of(from, queue, number).await
                {
                    return Ok(answer);
                }
                self.service.offered(from, rest.to_vec(), incoming).await
            }
            _ => Err("a message that no peer sends".to_owned()),
        }
    }
}
