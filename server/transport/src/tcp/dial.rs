//! Our requests to one peer: the links to it, what is under way on them, and whether it lives.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{BULK_LINKS, MESSAGE_LEN_MAX, PEER_REQUESTS_MAX};
use dayfly_meta::wire::frame::Kind;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::handshake;
use super::reader::{Landing, Reader};
use super::seal::{ReadHalf, WriteHalf, split};
use super::stream::{Outgoing, Sender, join_body, split_body, writer};
use super::{Identity, is_pushed_out};
use crate::{Connection, Offered, Pulled, Slot, TransportError};

/// One that had no time for us is dialled so often, at most.
const DIAL_ATTEMPTS_MAX: u32 = 5;

/// Dials a peer: one link for small messages, a few for bulk.
pub(super) async fn connect(
    identity: &Identity,
    peer: NodeId,
    address: SocketAddr,
) -> Result<Arc<dyn Connection>, TransportError> {
    let life = Arc::new(Life {
        peer,
        address,
        deadlines: identity.deadlines,
        start: Instant::now(),
        heard_ms: AtomicU64::new(0),
        lost: OnceLock::new(),
    });
    let mut tasks = JoinSet::new();
    let mut links = Vec::with_capacity(1 + BULK_LINKS);
    for _ in 0..=BULK_LINKS {
        let dialled = dial_patiently(identity, peer, address).await;
        let halves = dialled.map_err(|error| life.lost_by(&error.to_string()))?;
        links.push(Link::start(halves, life.clone(), &mut tasks));
    }
    let control = links.remove(0);
    tasks.spawn(watch(life.clone(), control.sender.clone(), all_pending(&control, &links)));
    Ok(Arc::new(TcpConnection { control, bulk: links, life, _tasks: tasks }))
}

fn all_pending(control: &Link, bulk: &[Link]) -> Vec<Arc<Pending>> {
    std::iter::once(control).chain(bulk).map(|link| link.pending.clone()).collect()
}

/// Very many strangers may have pushed us out before we spoke, or all other members at once: so again, ever later.
async fn dial_patiently(identity: &Identity, peer: NodeId, address: SocketAddr) -> io::Result<(ReadHalf, WriteHalf)> {
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

async fn dial(identity: &Identity, peer: NodeId, address: SocketAddr) -> io::Result<(ReadHalf, WriteHalf)> {
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

/// Whether the peer lives; shared by all links to it.
struct Life {
    peer: NodeId,
    address: SocketAddr,
    deadlines: Deadlines,
    start: Instant,
    heard_ms: AtomicU64,
    lost: OnceLock<String>,
}

impl Life {
    fn hear(&self) {
        self.heard_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// When, from the start.
    fn heard(&self) -> Duration {
        Duration::from_millis(self.heard_ms.load(Ordering::Relaxed))
    }

    fn silence(&self) -> Duration {
        self.start.elapsed().saturating_sub(self.heard())
    }

    fn lose(&self, reason: &str) {
        if self.lost.set(reason.to_owned()).is_ok() {
            tracing::debug!(peer = %self.peer, address = %self.address, reason, "peer lost");
        }
    }

    fn lost_by(&self, reason: &str) -> TransportError {
        let reason = self.lost.get().map_or(reason, String::as_str).to_owned();
        TransportError::Lost { peer: self.peer, address: self.address, reason }
    }
}

/// Pings, and gives the peer up when it has been silent for too long or a link has died.
async fn watch(life: Arc<Life>, control: Sender, links: Vec<Arc<Pending>>) {
    let (mut heard, mut looks) = (Duration::ZERO, 0);
    let Deadlines { peer_lost, ping_interval, look_interval, .. } = life.deadlines;
    while life.lost.get().is_none() {
        let ping = Outgoing::Frame { kind: Kind::Ping, request: 0, argument: 0, body: Vec::new() };
        // A full queue is being written, which tells as much as a ping.
        let _ = control.try_send(ping);
        // Not past the moment at which it is lost.
        sleep(peer_lost.saturating_sub(life.silence()).clamp(look_interval, ping_interval)).await;
        looks = if life.heard() == heard { looks + 1 } else { 0 };
        heard = life.heard();
        if life.silence() >= peer_lost && looks >= Deadlines::LOOKS_MIN {
            life.lose(&format!("no byte came from it for {} s", peer_lost.as_secs_f64()));
        }
    }
    links.iter().for_each(|pending| pending.fail_all());
}

/// A request under way.
struct Request {
    progress: Arc<Progress>,
    state: State,
}

enum State {
    /// Waiting for the answer to a pull; the slots are here, not with the asker.
    Pull { slots: Vec<Slot>, done: oneshot::Sender<Result<Pulled, String>> },
    /// The answer has come; its bytes are coming.
    Landing { message: Vec<u8>, landing: Landing, done: oneshot::Sender<Result<Pulled, String>> },
    /// An offer, not accepted yet.
    Offer { ready: oneshot::Sender<()>, done: oneshot::Sender<Result<Vec<u8>, String>> },
    /// An accepted offer.
    Sending { done: oneshot::Sender<Result<Vec<u8>, String>> },
}

/// When a request last made progress.
struct Progress(Mutex<Instant>);

impl Progress {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Instant::now())))
    }

    fn touch(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn age(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

#[derive(Default)]
struct Pending(Mutex<HashMap<u64, Request>>);

impl Pending {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Request>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops all requests: their askers are told, their slots are free, for nothing lands any more.
    fn fail_all(&self) {
        let requests = std::mem::take(&mut *self.lock());
        drop(requests);
    }
}

struct Link {
    sender: Sender,
    pending: Arc<Pending>,
    next: AtomicU64,
    permits: Semaphore,
}

impl Link {
    fn start((read, write): (ReadHalf, WriteHalf), life: Arc<Life>, tasks: &mut JoinSet<()>) -> Self {
        let (sender, write) = writer(write, life.deadlines.peer_lost);
        let pending = Arc::new(Pending::default());
        tasks.spawn({
            let (life, pending) = (life.clone(), pending.clone());
            async move {
                let error = match tokio::select! { read = receive(read, &life, &pending) => read, write = write => write } {
                    Ok(()) => "the connection ended".to_owned(),
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
                    Err(error) => error.to_string(),
                };
                life.lose(&error);
                pending.fail_all();
            }
        });
        Self { sender, pending, next: AtomicU64::new(1), permits: Semaphore::new(PEER_REQUESTS_MAX) }
    }

    fn load(&self) -> usize {
        PEER_REQUESTS_MAX - self.permits.available_permits()
    }
}

/// Takes in answers until the stream ends.
async fn receive(read: ReadHalf, life: &Life, pending: &Pending) -> io::Result<()> {
    let mut read = Reader::new(read);
    loop {
        let header = read.header().await?;
        life.hear();
        // While a frame's bytes land, its request is out of the table; nobody else touches it.
        let request = pending.lock().remove(&header.request);
        if let Some(request) = &request {
            request.progress.touch();
        }
        if header.kind == Kind::Data {
            let Some(Request { progress, state: State::Landing { message, mut landing, done } }) = request else {
                return Err(unexpected());
            };
            read.land(&mut landing, u64::from(header.body_len)).await?;
            life.hear();
            progress.touch();
            let state = State::Landing { message, landing, done };
            pending.lock().insert(header.request, Request { progress, state });
            continue;
        }
        let body = read.body(&header).await?;
        match (header.kind, request) {
            (Kind::Pong, None) => {}
            (Kind::Pulled, Some(Request { progress, state: State::Pull { slots, done } })) => {
                let (lens, message) = split_body(&body).ok_or_else(unexpected)?;
                let landing = Landing::new(slots, lens).ok_or_else(unexpected)?;
                if header.argument == 0 {
                    finish(message, landing, done)?;
                } else {
                    let state = State::Landing { message, landing, done };
                    pending.lock().insert(header.request, Request { progress, state });
                }
            }
            (Kind::End, Some(Request { state: State::Landing { message, landing, done }, .. })) => {
                finish(message, landing, done)?;
            }
            (Kind::Ready, Some(Request { progress, state: State::Offer { ready, done } })) => {
                pending.lock().insert(header.request, Request { progress, state: State::Sending { done } });
                let _ = ready.send(());
            }
            (Kind::Offered, Some(Request { state: State::Offer { done, .. } | State::Sending { done }, .. })) => {
                let _ = done.send(Ok(body));
            }
            (Kind::Refused, Some(Request { state, .. })) => {
                let reason = String::from_utf8_lossy(&body).into_owned();
                match state {
                    State::Pull { done, .. } | State::Landing { done, .. } => drop(done.send(Err(reason))),
                    State::Offer { done, .. } | State::Sending { done } => drop(done.send(Err(reason))),
                }
            }
            _ => return Err(unexpected()),
        }
    }
}

/// Answers the asker: all bytes have landed.
fn finish(message: Vec<u8>, landing: Landing, done: oneshot::Sender<Result<Pulled, String>>) -> io::Result<()> {
    if !landing.is_complete() {
        return Err(unexpected());
    }
    let (slots, lens) = landing.finish();
    // An asker that has given up is not there any more; then the slots are free now.
    let _ = done.send(Ok(Pulled { message, slots, lens }));
    Ok(())
}

fn unexpected() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it sent a frame that answers nothing")
}

struct TcpConnection {
    control: Link,
    bulk: Vec<Link>,
    life: Arc<Life>,
    /// Dropping the connection ends its tasks, and with them its streams.
    _tasks: JoinSet<()>,
}

impl TcpConnection {
    fn link(&self, is_bulk: bool) -> &Link {
        if is_bulk { self.bulk.iter().min_by_key(|link| link.load()).unwrap_or(&self.control) } else { &self.control }
    }

    fn timeout(&self, timeout: Duration) -> TransportError {
        TransportError::Timeout { peer: self.life.peer, address: self.life.address, timeout }
    }

    fn refused(&self, reason: String) -> TransportError {
        TransportError::Refused { peer: self.life.peer, address: self.life.address, reason }
    }

    fn check(&self, message: &[u8]) -> Result<(), TransportError> {
        if self.life.lost.get().is_some() {
            return Err(self.life.lost_by(""));
        }
        if message.len() > MESSAGE_LEN_MAX { Err(TransportError::TooLong(message.len())) } else { Ok(()) }
    }

    async fn send(&self, link: &Link, outgoing: Outgoing, limit: Duration) -> Result<(), TransportError> {
        let sent = timeout(limit, link.sender.send(outgoing)).await.map_err(|_| self.timeout(limit))?;
        sent.map_err(|_| self.life.lost_by("the connection ended"))
    }

    /// Waits for an answer for as long as there is progress.
    async fn wait<T>(&self, mut answer: oneshot::Receiver<T>, progress: &Progress, limit: Duration) -> Result<T, TransportError> {
        loop {
            let left = limit.saturating_sub(progress.age());
            match timeout(left, &mut answer).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(_)) => return Err(self.life.lost_by("the connection ended")),
                Err(_) if progress.age() < limit => {}
                // It may have come while this process stood still.
                Err(_) => match timeout(self.life.deadlines.look_interval, &mut answer).await {
                    Ok(Ok(answer)) => return Ok(answer),
                    _ => return Err(self.timeout(limit)),
                },
            }
        }
    }

    fn register(&self, link: &Link, progress: &Arc<Progress>, state: State) -> Result<u64, TransportError> {
        let request = link.next.fetch_add(1, Ordering::Relaxed);
        link.pending.lock().insert(request, Request { progress: progress.clone(), state });
        // Lost in the meantime? Then nobody clears the table any more.
        if self.life.lost.get().is_some() {
            link.pending.fail_all();
            return Err(self.life.lost_by(""));
        }
        Ok(request)
    }
}

#[async_trait]
impl Connection for TcpConnection {
    fn peer(&self) -> NodeId {
        self.life.peer
    }

    fn is_lost(&self) -> bool {
        self.life.lost.get().is_some()
    }

    async fn pull(&self, message: Vec<u8>, slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        self.check(&message)?;
        let link = self.link(!slots.is_empty());
        let permit = timeout(limit, link.permits.acquire()).await.map_err(|_| self.timeout(limit))?;
        let lens: Vec<u64> = slots.iter().map(|slot| slot.len() as u64).collect();
        let (done, answer) = oneshot::channel();
        let progress = Progress::new();
        let request = self.register(link, &progress, State::Pull { slots, done })?;
        let argument = lens.iter().sum();
        let body = join_body(&lens, &message);
        self.send(link, Outgoing::Frame { kind: Kind::Pull, request, argument, body }, limit).await?;
        let answer = self.wait(answer, &progress, limit).await?;
        drop(permit);
        answer.map_err(|reason| self.refused(reason))
    }

    async fn offer(&self, message: Vec<u8>, payload: Slot, len: usize, limit: Duration) -> Result<Offered, TransportError> {
        self.check(&message)?;
        if len > payload.len() {
            return Err(TransportError::TooLong(len));
        }
        let link = self.link(true);
        let permit = timeout(limit, link.permits.acquire()).await.map_err(|_| self.timeout(limit))?;
        let (ready, accepted) = oneshot::channel();
        let (done, answer) = oneshot::channel();
        let progress = Progress::new();
        let request = self.register(link, &progress, State::Offer { ready, done })?;
        self.send(link, Outgoing::Frame { kind: Kind::Offer, request, argument: len as u64, body: message }, limit).await?;
        // Answered without being accepted: `ready` was dropped, and the answer is there.
        let payload = match self.wait(accepted, &progress, limit).await {
            Ok(()) => {
                let (back, returned) = oneshot::channel();
                self.send(link, Outgoing::Payload { request, slot: payload, len, back }, limit).await?;
                progress.touch();
                self.wait(returned, &progress, limit).await?
            }
            Err(TransportError::Lost { .. }) if !self.is_lost() => payload,
            Err(error) => return Err(error),
        };
        let answer = self.wait(answer, &progress, limit).await?;
        drop(permit);
        let message = answer.map_err(|reason| self.refused(reason))?;
        Ok(Offered { message, payload })
    }
}
