//! A network in memory. The seed decides how long each message takes. Links between two nodes fall silent, slow down, break,
//! refuse requests and flip bits; nodes freeze and are killed. The network keeps the promises of the transport's contract, and no
//! others.

mod silence;

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::decode_sealed;
use dayfly_meta::wire::peer::{OfferRequest, Request};
use dayfly_meta::wire::status::Network;
use dayfly_transport::{
    Ability, Agreement, Connection, Incoming, Landing, LossCause, Piece, Pulled, Refusal, Region, Service, Serving, Slot,
    Transport, TransportError, Unread,
};
use rustc_hash::FxHasher;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::random::Random;

/// The number of slots in a region. It is smaller than in production, because each seed creates new tables of slots.
const SLOTS_MAX: u32 = 512;

/// The faults of the link between two nodes, in both directions.
#[derive(Clone, Default)]
pub(super) struct LinkHealth {
    /// No message gets through.
    pub(super) is_silent: bool,
    /// Each message takes this much longer.
    pub(super) slow: Duration,
    /// How many of the next requests are refused.
    pub(super) refused: u32,
    /// How many of the next bulk transfers have a bit flipped.
    pub(super) flipped: u32,
}

/// The faults of a node.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct NodeHealth {
    /// The node neither receives nor sends at this time.
    pub(super) is_frozen: bool,
    /// The node reaches nobody, not even the supervisor, while its clock goes on.
    pub(super) is_cut_off: bool,
    pub(super) is_killed: bool,
    /// How many of the next pieces cannot be read from the node's drive.
    pub(super) unreadable: u32,
}

/// The supervisor's end of the control channels.
pub(super) const SUPERVISOR: NodeId = NodeId(u16::MAX);

/// Strikes the sender of a message.
struct Trap {
    /// The name of the message.
    message: &'static str,
    /// How many more such messages arrive before the sender is struck.
    count: u32,
    sprung: oneshot::Sender<NodeId>,
}

/// The network of one session.
pub(super) struct Net {
    state: Mutex<NetState>,
    /// Notified when the health of a link or node changes.
    changed: Notify,
    pub(super) deadlines: Deadlines,
    start: Instant,
    /// Whether each message and each fault is printed.
    is_verbose: bool,
    /// The folders of this run. Their names differ from run to run, so they must not enter the trace.
    folders: Vec<String>,
}

struct NetState {
    random: Random,
    services: BTreeMap<NodeId, Arc<dyn Service>>,
    nodes: BTreeMap<NodeId, NodeHealth>,
    links: BTreeMap<(NodeId, NodeId), LinkHealth>,
    traps: Vec<Trap>,
    connections: Vec<Weak<SimConnection>>,
    /// All regions that were created, to check at the end that all of their slots were freed.
    regions: Vec<(NodeId, Region)>,
    /// A hash of everything that happened.
    trace: FxHasher,
    messages: u64,
}

impl NetState {
    fn spring_traps(&mut self, from: NodeId, what: &str) {
        for trap in self.traps.iter_mut().filter(|trap| trap.message == what) {
            trap.count = trap.count.saturating_sub(1);
        }
        for trap in self.traps.extract_if(.., |trap| trap.count == 0) {
            // The session may be over.
            let _ = trap.sprung.send(from);
        }
    }
}

fn pair(one: NodeId, other: NodeId) -> (NodeId, NodeId) {
    (one.min(other), one.max(other))
}

impl Net {
    /// Creates the network of a session. With `is_verbose`, it prints each message and each fault.
    pub(super) fn new(random: Random, deadlines: Deadlines, folders: Vec<String>, is_verbose: bool) -> Arc<Self> {
        let state = NetState {
            random,
            services: BTreeMap::new(),
            nodes: BTreeMap::new(),
            links: BTreeMap::new(),
            traps: Vec::new(),
            connections: Vec::new(),
            regions: Vec::new(),
            trace: FxHasher::default(),
            messages: 0,
        };
        Arc::new(Self { state: Mutex::new(state), changed: Notify::new(), deadlines, start: Instant::now(), is_verbose, folders })
    }

    fn state(&self) -> MutexGuard<'_, NetState> {
        self.state.lock().unwrap()
    }

    /// Returns a hash of everything that happened, and the number of messages.
    pub(super) fn trace(&self) -> (u64, u64) {
        let state = self.state();
        (state.trace.finish(), state.messages)
    }

    /// Returns the nodes that did not free all of their slots.
    pub(super) fn leaks(&self) -> Vec<NodeId> {
        let regions = std::mem::take(&mut self.state().regions);
        regions.into_iter().filter(|(_, region)| region.slot(region.len()).is_none()).map(|(node, _)| node).collect()
    }

    /// Adds an event to the trace.
    pub(super) fn note(&self, what: &str) {
        let now = self.start.elapsed();
        let mut state = self.state();
        state.trace.write_u64(now.as_micros() as u64);
        let what = self.folders.iter().fold(what.to_owned(), |what, folder| what.replace(folder, "FOLDER"));
        // A catalog contains the time and the sources' paths, so its checksum must not enter the trace either.
        state.trace.write(what.split("its checksum is").next().unwrap_or_default().as_bytes());
        if self.is_verbose {
            eprintln!("{:>12.6} {what}", now.as_secs_f64());
        }
    }

    /// Changes the health of the link between two nodes.
    pub(super) fn change_link(self: &Arc<Self>, one: NodeId, other: NodeId, change: impl FnOnce(&mut LinkHealth)) {
        change(self.state().links.entry(pair(one, other)).or_default());
        self.changed.notify_waiters();
        self.watch();
    }

    /// Changes the health of a node.
    pub(super) fn change_node(self: &Arc<Self>, node: NodeId, change: impl FnOnce(&mut NodeHealth)) {
        let is_killed = {
            let mut state = self.state();
            let health = state.nodes.entry(node).or_default();
            change(health);
            let is_killed = health.is_killed;
            if is_killed {
                state.services.remove(&node);
            }
            is_killed
        };
        if is_killed {
            self.lose(|from, to| from == node || to == node, &LossCause::Closed);
        }
        self.changed.notify_waiters();
        self.watch();
    }

    /// Breaks the connections between two nodes.
    pub(super) fn reset(&self, one: NodeId, other: NodeId) {
        self.lose(|from, to| pair(from, to) == pair(one, other), &LossCause::ended(io::ErrorKind::ConnectionReset.into()));
    }

    /// Ends all faults. Killed nodes stay dead.
    pub(super) fn heal(&self) {
        let mut state = self.state();
        state.links.clear();
        state.traps.clear();
        state.nodes.values_mut().for_each(|node| *node = NodeHealth { is_killed: node.is_killed, ..NodeHealth::default() });
        drop(state);
        self.changed.notify_waiters();
    }

    /// Returns a node's health.
    pub(super) fn health(&self, node: NodeId) -> NodeHealth {
        self.state().nodes.get(&node).copied().unwrap_or_default()
    }

    /// Waits until a node is killed.
    pub(super) async fn killed(&self, node: NodeId) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.health(node).is_killed {
                return;
            }
            changed.await;
        }
    }

    /// Waits until this many messages of this name have arrived. Returns the sender of the last one; `None` if all faults end before.
    pub(super) async fn trap(&self, message: &'static str, count: u32) -> Option<NodeId> {
        let (sprung, sender) = oneshot::channel();
        self.state().traps.push(Trap { message, count, sprung });
        sender.await.ok()
    }

    /// Returns whether messages get through from one node to another.
    pub(super) fn is_open(&self, from: NodeId, to: NodeId) -> bool {
        let state = self.state();
        let is_down =
            |node| state.nodes.get(&node).is_some_and(|health| health.is_frozen || health.is_cut_off || health.is_killed);
        !is_down(from) && !is_down(to) && !state.links.get(&pair(from, to)).is_some_and(|link| link.is_silent)
    }

    fn live(&self) -> Vec<Arc<SimConnection>> {
        let mut state = self.state();
        state.connections.retain(|connection| connection.strong_count() > 0);
        state.connections.iter().filter_map(Weak::upgrade).collect()
    }

    fn lose(&self, which: impl Fn(NodeId, NodeId) -> bool, cause: &LossCause) {
        for connection in self.live() {
            if which(connection.from, connection.peer) {
                connection.lose(cause.clone());
            }
        }
    }

    /// Delays a message as long as it takes to travel, and adds it to the trace.
    pub(super) async fn travel(&self, from: NodeId, to: NodeId, bytes: usize, what: &str) {
        let delay = {
            let mut state = self.state();
            let usual = state.random.log_duration(Duration::from_micros(20), Duration::from_millis(2));
            let slow = state.links.get(&pair(from, to)).map_or(Duration::ZERO, |link| link.slow);
            // One nanosecond per byte: a gigabyte per second.
            usual + slow + Duration::from_nanos(bytes as u64)
        };
        sleep(delay).await;
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.is_open(from, to) {
                break;
            }
            changed.await;
        }
        let now = self.start.elapsed();
        let mut state = self.state();
        state.spring_traps(from, what);
        state.messages += 1;
        state.trace.write_u64(now.as_micros() as u64);
        state.trace.write_u32(u32::from(from.0) << 16 | u32::from(to.0));
        state.trace.write(what.as_bytes());
        if self.is_verbose {
            eprintln!("{:>12.6} {from} > {to} {what} {bytes}", now.as_secs_f64());
        }
    }

    /// Returns whether the next request between two nodes is to be refused.
    fn takes_refusal(&self, from: NodeId, to: NodeId) -> bool {
        let mut state = self.state();
        let refused = state.links.get_mut(&pair(from, to)).map(|link| &mut link.refused);
        refused.filter(|count| **count > 0).map(|count| *count -= 1).is_some()
    }

    /// Flips a bit of a transfer if a fault asks for it.
    fn corrupt(&self, from: NodeId, to: NodeId, bytes: &mut [u8]) {
        let mut state = self.state();
        let flipped = state.links.get_mut(&pair(from, to)).map(|link| &mut link.flipped);
        if !bytes.is_empty() && flipped.filter(|count| **count > 0).map(|count| *count -= 1).is_some() {
            let at = state.random.below(bytes.len() as u64 * 8) as usize;
            bytes[at / 8] ^= 1 << (at % 8);
        }
    }

    /// Reads a piece of an answer, from memory or from the node's drive.
    fn read(&self, node: NodeId, piece: &Piece, out: &mut [u8]) -> Result<(), String> {
        match piece {
            Piece::Bytes(bytes) => out.copy_from_slice(bytes),
            Piece::File { file, offset, revoked, .. } => {
                {
                    let mut state = self.state();
                    let unreadable = state.nodes.get_mut(&node).map(|health| &mut health.unreadable);
                    if unreadable.filter(|count| **count > 0).map(|count| *count -= 1).is_some() {
                        return Err("its drive cannot be read: Input/output error (os error 5)".to_owned());
                    }
                }
                file.read_exact_at(out, *offset).map_err(|error| format!("its drive cannot be read: {error}"))?;
                if revoked.load(Ordering::Acquire) {
                    return Err("the dataset was freed in the meantime".to_owned());
                }
            }
        }
        Ok(())
    }
}

/// The transport of one node.
pub(super) struct SimTransport {
    pub(super) net: Arc<Net>,
    pub(super) me: NodeId,
}

#[async_trait]
impl Transport for SimTransport {
    fn region(&self, len: u64) -> io::Result<Region> {
        let region = Region::with_slots(len, SLOTS_MAX)?;
        self.net.state().regions.push((self.me, region.clone()));
        Ok(region)
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        let lost = |kind: io::ErrorKind| TransportError::Lost { peer, address, cause: LossCause::unreachable(kind.into()) };
        let dialled = timeout(self.net.deadlines.connect, self.net.travel(self.me, peer, 0, "dial")).await;
        dialled.map_err(|_| lost(io::ErrorKind::TimedOut))?;
        if !self.net.state().services.contains_key(&peer) {
            return Err(lost(io::ErrorKind::ConnectionRefused));
        }
        let connection = Arc::new(SimConnection {
            net: self.net.clone(),
            from: self.me,
            peer,
            address,
            lost: OnceLock::new(),
            ended: Notify::new(),
            is_watched: AtomicBool::new(false),
            tasks: Mutex::default(),
        });
        self.net.state().connections.push(Arc::downgrade(&connection));
        self.net.watch();
        Ok(connection)
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        self.net.state().services.insert(self.me, service);
        let closing = Closing { net: self.net.clone(), me: self.me };
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let _closing = closing;
            std::future::pending::<()>().await;
        });
        Ok(Serving::new(tasks))
    }

    fn ability(&self) -> Ability {
        Ability { rdma: Err("it is simulated".to_owned()) }
    }

    fn agree(&self, _agreement: Agreement) {}

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        Vec::new()
    }

    fn status(&self) -> Network {
        Network::default()
    }
}

/// Ends a node's listener and the connections that it accepted, when it is dropped.
struct Closing {
    net: Arc<Net>,
    me: NodeId,
}

impl Drop for Closing {
    fn drop(&mut self) {
        let service = self.net.state().services.remove(&self.me);
        drop(service);
        self.net.lose(|_, to| to == self.me, &LossCause::Closed);
    }
}

struct SimConnection {
    net: Arc<Net>,
    from: NodeId,
    peer: NodeId,
    address: SocketAddr,
    lost: OnceLock<LossCause>,
    ended: Notify,
    is_watched: AtomicBool,
    /// Requests in flight. Dropping them frees their slots.
    tasks: Mutex<JoinSet<()>>,
}

impl SimConnection {
    fn lose(&self, cause: LossCause) {
        if self.lost.set(cause).is_ok() {
            let tasks = std::mem::take(&mut *self.tasks.lock().unwrap());
            drop(tasks);
            self.ended.notify_waiters();
        }
    }

    fn lost_by(&self) -> TransportError {
        let cause = self.lost.get().cloned().unwrap_or(LossCause::Closed);
        TransportError::Lost { peer: self.peer, address: self.address, cause }
    }

    /// Runs a request as a task of its own, which continues even if the caller stops waiting.
    fn begin(&self, request: impl Future<Output = ()> + Send + 'static) -> Result<(), TransportError> {
        if self.lost.get().is_some() {
            return Err(self.lost_by());
        }
        let mut tasks = self.tasks.lock().unwrap();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(request);
        Ok(())
    }

    async fn wait<T>(&self, answer: oneshot::Receiver<Result<T, Refusal>>, limit: Duration) -> Result<T, TransportError> {
        let (peer, address) = (self.peer, self.address);
        match timeout(limit, answer).await {
            Ok(Ok(Ok(answer))) => Ok(answer),
            Ok(Ok(Err(refusal))) => Err(TransportError::Refused { peer, address, refusal }),
            Ok(Err(_)) => Err(self.lost_by()),
            Err(_) => Err(TransportError::Timeout { peer, address, timeout: limit }),
        }
    }
}

/// Returns the first word of a message, for the trace.
pub(super) fn name(message: &[u8]) -> String {
    let words = match decode_sealed::<Request>(message) {
        Ok(Request::Read(request)) => format!("{request:?}"),
        Ok(Request::Coordinator(request)) => format!("{request:?}"),
        Ok(Request::NodeStageIn(request)) => format!("{request:?}"),
        Ok(Request::Administration(request)) => format!("{request:?}"),
        Err(_) => decode_sealed::<OfferRequest>(message).map_or_else(|_| "?".to_owned(), |request| format!("{request:?}")),
    };
    words.split([' ', '{', '(']).next().unwrap_or_default().to_owned()
}

#[async_trait]
impl Connection for SimConnection {
    fn peer(&self) -> NodeId {
        self.peer
    }

    fn is_lost(&self) -> bool {
        self.lost.get().is_some()
    }

    async fn pull(&self, message: Vec<u8>, mut slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        let (done, answer) = oneshot::channel();
        let (net, from, to) = (self.net.clone(), self.from, self.peer);
        self.begin(async move {
            let what = name(&message);
            net.travel(from, to, message.len(), &what).await;
            let service = net.state().services.get(&to).cloned();
            let Some(service) = service else { return std::future::pending().await };
            if net.takes_refusal(from, to) {
                net.travel(to, from, 0, "refusal").await;
                return drop(done.send(Err("the simulation refuses it".into())));
            }
            let room = slots.iter().map(|slot| slot.len() as u64).collect();
            let answered = service.pulled(from, message, room).await;
            let (message, lens, unread) = match answered.and_then(|answer| {
                let (mut lens, mut unread) = (Vec::new(), Unread::default());
                for (number, (piece, slot)) in (0..).zip(answer.pieces.iter().zip(&mut slots)) {
                    let out = slot.get_mut(..piece.len() as usize).ok_or("the answer does not fit")?;
                    if let Err(reason) = net.read(to, piece, out) {
                        unread.pieces.push(number);
                        unread.reason = reason;
                    }
                    net.corrupt(to, from, out);
                    lens.push(piece.len());
                }
                Ok((answer.message, lens, unread))
            }) {
                Ok(answer) => answer,
                Err(refusal) => {
                    net.travel(to, from, 0, "refusal").await;
                    return drop(done.send(Err(refusal)));
                }
            };
            net.travel(to, from, message.len() + lens.iter().sum::<u64>() as usize, "answer").await;
            let _ = done.send(Ok(Pulled { message, slots, lens, unread }));
        })?;
        self.wait(answer, limit).await
    }

    async fn offer(
        &self,
        message: Vec<u8>,
        payload: &mut Option<Slot>,
        len: usize,
        limit: Duration,
    ) -> Result<Vec<u8>, TransportError> {
        let offered = Arc::new(Mutex::new(payload.take()));
        let landed = offered.clone();
        let (done, answer) = oneshot::channel();
        let (net, from, to) = (self.net.clone(), self.from, self.peer);
        self.begin(async move {
            let what = name(&message);
            net.travel(from, to, message.len(), &what).await;
            let service = net.state().services.get(&to).cloned();
            let Some(service) = service else { return std::future::pending().await };
            if net.takes_refusal(from, to) {
                net.travel(to, from, 0, "refusal").await;
                return drop(done.send(Err("the simulation refuses it".into())));
            }
            let landing = SimLanding { net: net.clone(), from, to, payload: landed, len };
            let answered = service.offered(from, message, Incoming::new(len as u64, Box::new(landing))).await;
            net.travel(to, from, 0, "answer").await;
            let _ = done.send(answered);
        })?;
        let answer = self.wait(answer, limit).await;
        *payload = offered.lock().unwrap().take();
        answer
    }
}

struct SimLanding {
    net: Arc<Net>,
    from: NodeId,
    to: NodeId,
    payload: Arc<Mutex<Option<Slot>>>,
    len: usize,
}

#[async_trait]
impl Landing for SimLanding {
    async fn land(self: Box<Self>, mut slot: Slot) -> io::Result<Slot> {
        let landing = async {
            self.net.travel(self.to, self.from, 0, "ready").await;
            self.net.travel(self.from, self.to, self.len, "bytes").await;
        };
        timeout(self.net.deadlines.request, landing).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        let payload = self.payload.lock().unwrap();
        let bytes = &payload.as_ref().ok_or(io::ErrorKind::ConnectionReset)?[..self.len];
        slot[..self.len].copy_from_slice(bytes);
        self.net.corrupt(self.from, self.to, &mut slot[..self.len]);
        Ok(slot)
    }
}
