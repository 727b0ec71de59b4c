//! The thread that posts work to the card and takes its completions. Whatever memory an operation touches belongs to this thread
//! until the operation has completed or its queue pair is gone, whoever has given up waiting for it.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dayfly_meta::limits;
use dayfly_meta::wire::status::Network;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::oneshot;

use super::device::Device;
use super::queue::{Action, Completions, QueuePair, Receives, Remote, Work};
use super::verbs::{WC_WITH_IMM, Wc};
use super::{Limits, RdmaError};
use crate::Slot;

/// After the last thing that happened it looks for more this long before it sleeps: a wake-up takes about as long.
const SPIN: Duration = Duration::from_micros(20);
/// A failed queue pair's work is waited for this long; then the queue pair goes, and with it the card's hold on its memory.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Behind the mark, receives that the queue pair had taken are waited for this long: what comes after is lost to all.
const RECEIVES_TIMEOUT: Duration = Duration::from_millis(20);
/// Completions taken at a time.
const POLLED_TOGETHER: usize = 64;
/// Identifies completions: of receives, and of the mark behind a failed queue pair's work.
const RECEIVE: u64 = 1 << 63;
const LAST: u64 = 1 << 62;
/// What the kernel tells of the card: its port went down; itself or its completion queue is of no use any more.
const PORT_DOWN: u32 = 10;
const FATAL: [u32; 3] = [0, 8, 14];

/// What happens on a queue pair. Called on the engine's thread, which must not be kept waiting.
pub(super) trait Events: Send {
    /// A message came; the reason why it makes no sense ends the queue pair.
    fn received(&mut self, message: &[u8]) -> Result<(), &'static str>;
    /// The far side has written into our memory, and tells so.
    fn told(&mut self, number: u32) -> Result<(), &'static str>;
    /// The queue pair is gone, and nothing lands through it any more.
    fn ended(&mut self, reason: &str);
}

/// Operations that are posted together. They complete in order with all others of their queue pair.
pub(super) struct Batch {
    pub(super) works: Vec<Work>,
    /// The memory that they touch.
    pub(super) hold: Box<dyn Any + Send>,
    /// Gets that memory back when they have completed; dropped if they fail.
    pub(super) done: Option<oneshot::Sender<Box<dyn Any + Send>>>,
}

impl Batch {
    fn bytes(&self) -> u64 {
        self.works.iter().map(|work| u64::from(work.len)).sum()
    }
}

/// A queue pair of an engine. Its number on the card may be another's once it is gone; this never is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct QueueId(u64);

enum Command {
    Add { id: QueueId, pair: QueuePair, events: Box<dyn Events> },
    Post { queue: QueueId, batch: Batch },
    End { queue: QueueId, reason: String },
    Stop,
}

/// What the thread has done.
#[derive(Default)]
struct Counters {
    posts: AtomicU64,
    works: AtomicU64,
    completions: AtomicU64,
    wake_ups: AtomicU64,
    written_bytes: AtomicU64,
    read_bytes: AtomicU64,
    queue_pairs: AtomicU64,
    failed: AtomicU64,
}

fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

#[derive(Default)]
struct Commands {
    waiting: VecDeque<Command>,
    /// Nobody obeys any more.
    is_dead: bool,
}

struct Shared {
    commands: Mutex<Commands>,
    next_id: AtomicU64,
    is_asleep: AtomicBool,
    bell: EventFd,
    counters: Counters,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, command: Command) {
        {
            let mut commands = self.lock();
            // Dropped, whoever waits for it hears so.
            if commands.is_dead {
                return;
            }
            commands.waiting.push_back(command);
        }
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            // Fails only where it rings already.
            let _ = self.bell.write(1);
        }
    }
}

/// A card's thread; dropping it ends all queue pairs.
pub(super) struct Engine {
    device: Arc<Device>,
    completions: Arc<Completions>,
    receives: Arc<Receives>,
    limits: Limits,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the thread.
    pub(super) fn start(device: &Arc<Device>, limits: Limits) -> Result<Self, RdmaError> {
        let completions = Arc::new(Completions::new(device, limits.completions)?);
        let receives = Arc::new(Receives::new(device, limits.receives)?);
        let count = limits.receives;
        let len = u64::from(count) * u64::from(limits.request_len);
        let buffer = device
            .region(len)?
            .slot(len)
            .ok_or(RdmaError::Call { call: "a slot for receives", error: io::ErrorKind::OutOfMemory.into() })?;
        let bell = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        let bell = bell.map_err(|error| RdmaError::Call { call: "eventfd", error: error.into() })?;
        let shared = Arc::new(Shared {
            commands: Mutex::default(),
            next_id: AtomicU64::new(0),
            is_asleep: AtomicBool::new(false),
            bell,
            counters: Counters::default(),
        });
        // Each operation may tell of itself when its queue pair fails, as do each receive and the marks: there must be room for all.
        let marks = (completions.entries() / 16).min(limits::NODES_MAX as u32);
        let room = completions.entries().saturating_sub(count + marks);
        if room < limits.send_depth {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "its queues are too short");
            return Err(RdmaError::Call { call: "ibv_create_cq", error });
        }
        let running = Running {
            device: device.clone(),
            completions: completions.clone(),
            receives: receives.clone(),
            limits,
            shared: shared.clone(),
            buffer,
            queues: HashMap::new(),
            numbers: HashMap::new(),
            waiting: VecDeque::new(),
            next: 0,
            works: 0,
            works_max: room,
            is_stopping: false,
        };
        (0..count).try_for_each(|index| running.post_receive(index))?;
        let thread = std::thread::Builder::new().name("rdma".to_owned()).spawn(move || running.run());
        let thread = thread.map_err(|error| RdmaError::Call { call: "clone", error })?;
        Ok(Self { device: device.clone(), completions, receives, limits, shared, thread: Some(thread) })
    }

    /// Tells what the thread has done.
    pub(super) fn count_into(&self, network: &mut Network) {
        let Counters { posts, works, completions, wake_ups, written_bytes, read_bytes, queue_pairs, failed } =
            &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (network.posts, network.works, network.completions) = (get(posts), get(works), get(completions));
        (network.wake_ups, network.queue_pairs, network.failed) = (get(wake_ups), get(queue_pairs), get(failed));
        (network.written_bytes, network.read_bytes) = (get(written_bytes), get(read_bytes));
    }

    /// A queue pair for this engine, not joined to its far end yet.
    pub(super) fn queue_pair(&self, depth: u32) -> Result<QueuePair, RdmaError> {
        QueuePair::new(&self.device, &self.completions, &self.receives, depth)
    }

    /// Takes a queue pair over, which can receive from now on.
    pub(super) fn add(&self, pair: QueuePair, events: Box<dyn Events>) -> QueueId {
        let id = QueueId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        self.shared.send(Command::Add { id, pair, events });
        id
    }

    /// Posts a batch when there is room for it. Who posts bounds how many batches wait.
    pub(super) fn post(&self, queue: QueueId, batch: Batch) {
        debug_assert!(batch.works.len() <= self.limits.send_depth as usize);
        self.shared.send(Command::Post { queue, batch });
    }

    /// Ends a queue pair.
    pub(super) fn end(&self, queue: QueueId, reason: &str) {
        self.shared.send(Command::End { queue, reason: reason.to_owned() });
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // It panics nowhere; and if it did, it has ended.
            let _ = thread.join();
        }
    }
}

struct Queue {
    pair: QueuePair,
    events: Box<dyn Events>,
    waiting: VecDeque<Batch>,
    posted: VecDeque<(u64, Batch)>,
    works: u32,
    bytes: u64,
    ending: Option<(Instant, String)>,
}

/// Dropped, however that comes, nobody waits for it any more.
struct Running {
    device: Arc<Device>,
    completions: Arc<Completions>,
    receives: Arc<Receives>,
    limits: Limits,
    shared: Arc<Shared>,
    /// Where messages land.
    buffer: Slot,
    queues: HashMap<QueueId, Queue>,
    /// By their numbers on the card, which completions have.
    numbers: HashMap<u32, QueueId>,
    /// Queue pairs whose batches wait for room, in turn.
    waiting: VecDeque<QueueId>,
    next: u64,
    works: u32,
    works_max: u32,
    is_stopping: bool,
}

impl Running {
    fn run(mut self) {
        let mut busy = Instant::now();
        loop {
            let mut is_active = self.obey();
            match self.take_completions() {
                Ok(taken) => is_active |= taken > 0,
                // Without completions nothing is known of anything any more.
                Err(error) => {
                    tracing::error!(device = self.device.name, %error, "the card's completions cannot be taken: it is not used any more");
                    return;
                }
            }
            self.post_waiting();
            self.finish_late();
            if self.is_stopping && self.queues.is_empty() {
                return;
            }
            if is_active {
                busy = Instant::now();
            } else if busy.elapsed() < SPIN {
                std::hint::spin_loop();
            } else if self.sleep() {
                busy = Instant::now();
            }
        }
    }

    /// Does as it was told.
    fn obey(&mut self) -> bool {
        let commands = std::mem::take(&mut self.shared.lock().waiting);
        let is_active = !commands.is_empty();
        for command in commands {
            match command {
                Command::Add { id, pair, events } => {
                    let queue = Queue {
                        pair,
                        events,
                        waiting: VecDeque::new(),
                        posted: VecDeque::new(),
                        works: 0,
                        bytes: 0,
                        ending: None,
                    };
                    count(&self.shared.counters.queue_pairs, 1);
                    self.numbers.insert(queue.pair.number(), id);
                    self.queues.insert(id, queue);
                }
                Command::Post { queue: id, batch } => {
                    // Of a queue pair that has ended: the batch is dropped, which tells its owner.
                    if let Some(queue) = self.queues.get_mut(&id).filter(|queue| queue.ending.is_none()) {
                        queue.waiting.push_back(batch);
                        if queue.waiting.len() == 1 {
                            self.waiting.push_back(id);
                        }
                    }
                }
                Command::End { queue, reason } => self.begin_end(queue, &reason, false),
                Command::Stop => {
                    self.is_stopping = true;
                    self.end_all("this server ends");
                }
            }
        }
        is_active
    }

    /// Posts what waits, a batch of each queue pair in turn, as far as there is room.
    fn post_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some(queue_id) = self.waiting.pop_front() else { return };
            let Some(queue) = self.queues.get_mut(&queue_id) else { continue };
            let Some(batch) = queue.waiting.front() else { continue };
            let (works, bytes) = (batch.works.len() as u32, batch.bytes());
            let fits = queue.works + works <= queue.pair.depth()
                && self.works + works <= self.works_max
                && (queue.bytes == 0 || queue.bytes + bytes <= self.limits.bytes_in_flight);
            if !fits {
                // Completions make room, and this is looked at after each round of them.
                self.waiting.push_back(queue_id);
                continue;
            }
            let Some(batch) = queue.waiting.pop_front() else { continue };
            if !queue.waiting.is_empty() {
                self.waiting.push_back(queue_id);
            }
            self.next = (self.next + 1) & !(RECEIVE | LAST);
            let id = self.next;
            let posted = queue.pair.post(id, &batch.works);
            let taken = posted.as_ref().map_or_else(|(_, taken)| *taken as u32, |()| works);
            count(&self.shared.counters.posts, 1);
            count(&self.shared.counters.works, u64::from(taken));
            queue.works += taken;
            queue.bytes += bytes;
            self.works += taken;
            queue.posted.push_back((id, batch));
            if let Err((error, _)) = posted {
                self.begin_end(queue_id, &error.to_string(), true);
            }
        }
    }

    fn take_completions(&mut self) -> Result<usize, RdmaError> {
        let mut completions = [Wc::ZERO; POLLED_TOGETHER];
        let mut taken = 0;
        loop {
            let polled = self.completions.poll(&mut completions)?;
            taken += polled;
            count(&self.shared.counters.completions, polled as u64);
            for completion in &completions[..polled] {
                if completion.wr_id & RECEIVE != 0 {
                    self.received(completion);
                    continue;
                }
                // Of one that is gone already nothing is owed.
                let Some(&queue) = self.numbers.get(&completion.qp_num) else { continue };
                match completion.wr_id {
                    id if id & LAST != 0 => self.drained(queue),
                    id if completion.status == 0 => self.completed(queue, id),
                    id => self.failed(queue, id, completion.status),
                }
            }
            if polled < POLLED_TOGETHER {
                return Ok(taken);
            }
        }
    }

    fn failed(&mut self, queue: QueueId, id: u64, status: u32) {
        // It may be of one that is gone and had the number before.
        let is_ours = |queue: &Queue| queue.posted.iter().any(|(posted, _)| *posted == id);
        if self.queues.get(&queue).is_some_and(is_ours) {
            let reason = self.device.status_words(status);
            self.begin_end(queue, &reason, true);
        }
    }

    fn completed(&mut self, queue: QueueId, id: u64) {
        let Some(queue) = self.queues.get_mut(&queue) else { return };
        while queue.posted.front().is_some_and(|(first, _)| *first <= id) {
            let Some((_, batch)) = queue.posted.pop_front() else { return };
            let works = batch.works.len() as u32;
            queue.works -= works;
            self.works -= works;
            queue.bytes -= batch.bytes();
            for work in &batch.works {
                match work.action {
                    Action::Read(_) => count(&self.shared.counters.read_bytes, u64::from(work.len)),
                    Action::Write(_) | Action::WriteAndTell(..) => {
                        count(&self.shared.counters.written_bytes, u64::from(work.len));
                    }
                    Action::Send => {}
                }
            }
            if let Some(done) = batch.done {
                // Nobody waits any more: the memory is free.
                let _ = done.send(batch.hold);
            }
        }
    }

    fn received(&mut self, completion: &Wc) {
        let index = (completion.wr_id & !RECEIVE) as u32;
        if !self.numbers.contains_key(&completion.qp_num) {
            // Its far end was quicker than we: that it is ours stands in the commands.
            self.obey();
        }
        let id = self.numbers.get(&completion.qp_num).copied();
        let queue = id.and_then(|id| self.queues.get_mut(&id)).filter(|queue| queue.ending.is_none());
        let mut wrong = None;
        if let Some(queue) = queue {
            let result = if completion.status != 0 {
                Ok(())
            } else if completion.wc_flags & WC_WITH_IMM != 0 {
                queue.events.told(u32::from_be(completion.imm_data))
            } else {
                let start = index as usize * self.limits.request_len as usize;
                let len = completion.byte_len.min(self.limits.request_len) as usize;
                queue.events.received(&self.buffer[start..start + len])
            };
            wrong = result.err();
        }
        if let Some((id, reason)) = id.zip(wrong) {
            self.begin_end(id, reason, true);
        }
        if let Err(error) = self.post_receive(index) {
            tracing::warn!(%error, "a receive is lost");
        }
    }

    fn post_receive(&self, index: u32) -> Result<(), RdmaError> {
        let len = self.limits.request_len;
        let (address, key) =
            (self.buffer.address() + u64::from(index) * u64::from(len), self.buffer.keys().map_or(0, |keys| keys.local));
        self.receives.post(RECEIVE | u64::from(index), address, len, key)
    }

    fn end_all(&mut self, reason: &str) {
        let all: Vec<QueueId> = self.queues.keys().copied().collect();
        all.into_iter().for_each(|queue| self.begin_end(queue, reason, !self.is_stopping));
    }

    /// Has a queue pair's work flushed, with a mark behind it.
    fn begin_end(&mut self, id: QueueId, reason: &str, is_failure: bool) {
        let Some(queue) = self.queues.get_mut(&id).filter(|queue| queue.ending.is_none()) else { return };
        tracing::debug!(queue = queue.pair.number(), reason, "a queue pair ends");
        queue.waiting.clear();
        queue.ending = Some((Instant::now() + DRAIN_TIMEOUT, reason.to_owned()));
        count(&self.shared.counters.failed, u64::from(is_failure));
        let mark = Work { action: Action::Write(Remote { address: 0, key: 0 }), address: 0, len: 0, local_key: 0 };
        let marked = queue.pair.fail().and_then(|()| queue.pair.post(LAST, &[mark]).map_err(|(error, _)| error));
        if marked.is_err() {
            self.drained(id);
        }
    }

    /// All of its own work has come back. Receives that it has taken come back at the same time, if not in the same order.
    fn drained(&mut self, id: QueueId) {
        if let Some((deadline, _)) = self.queues.get_mut(&id).and_then(|queue| queue.ending.as_mut()) {
            *deadline = Instant::now() + RECEIVES_TIMEOUT;
        }
    }

    /// The queue pair goes; then what its work touched is free.
    fn finish(&mut self, id: QueueId) {
        let Some(queue) = self.queues.remove(&id) else { return };
        let Queue { pair, mut events, waiting, posted, works, ending, .. } = queue;
        self.numbers.remove(&pair.number());
        drop(pair);
        self.works -= works;
        drop((waiting, posted));
        count(&self.shared.counters.queue_pairs, 1_u64.wrapping_neg());
        events.ended(ending.as_ref().map_or("it ended", |(_, reason)| reason));
    }

    fn finish_late(&mut self) {
        let now = Instant::now();
        let is_late = |queue: &Queue| queue.ending.as_ref().is_some_and(|(deadline, _)| *deadline <= now);
        let late: Vec<QueueId> = self.queues.iter().filter(|(_, queue)| is_late(queue)).map(|(&id, _)| id).collect();
        late.into_iter().for_each(|id| self.finish(id));
    }

    /// Waits for a completion, a command or news of the card; returns whether it slept.
    fn sleep(&mut self) -> bool {
        if let Err(error) = self.completions.arm() {
            self.end_all(&error.to_string());
        }
        self.shared.is_asleep.store(true, Ordering::SeqCst);
        // What came between the last look and now is not told of.
        let has_more = !self.shared.lock().waiting.is_empty() || !matches!(self.take_completions(), Ok(0));
        if has_more {
            self.shared.is_asleep.store(false, Ordering::SeqCst);
            return false;
        }
        let mut descriptors = [
            PollFd::new(self.completions.descriptor(), PollFlags::POLLIN),
            PollFd::new(self.shared.bell.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.device.events_descriptor(), PollFlags::POLLIN),
        ];
        let is_ending = self.queues.values().any(|queue| queue.ending.is_some());
        let timeout = if is_ending { PollTimeout::from(RECEIVES_TIMEOUT.as_millis() as u8) } else { PollTimeout::NONE };
        // An interrupted wait is as good as one that ended.
        let _ = poll(&mut descriptors, timeout);
        let has_news = descriptors[2].any().unwrap_or(false);
        self.shared.is_asleep.store(false, Ordering::SeqCst);
        count(&self.shared.counters.wake_ups, 1);
        let _ = self.shared.bell.read();
        self.completions.take_events();
        if has_news {
            self.hear();
        }
        true
    }

    /// News of the card.
    fn hear(&mut self) {
        for (kind, about, words) in self.device.events() {
            tracing::debug!(device = self.device.name, news = words, "the card tells");
            if kind == PORT_DOWN && about == u32::from(self.device.port) {
                // What is under way would only wait for its time-out.
                self.end_all("the card's port went down");
            } else if FATAL.contains(&kind) {
                self.end_all(&format!("the card failed: {words}"));
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let left = {
            let mut commands = self.shared.lock();
            commands.is_dead = true;
            std::mem::take(&mut commands.waiting)
        };
        drop(left);
        let all: Vec<QueueId> = self.queues.keys().copied().collect();
        all.into_iter().for_each(|id| self.finish(id));
    }
}
