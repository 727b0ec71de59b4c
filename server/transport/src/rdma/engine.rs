//! The thread that posts work to the card and takes its completions. The memory that an operation touches belongs to this thread
//! until the operation has completed or its queue pair has been destroyed, even if the caller has given up.
//!
//! The thread sleeps on one `poll` for completions, commands and events from the card. A queue pair that fails is drained before
//! it is destroyed: a marker is posted after its work, and the thread waits until the marker has come back or a deadline has
//! passed.

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
use super::error::RdmaError;
use super::limits::Limits;
use super::queue::{Action, Completions, QueuePair, Receives, Remote, Work};
use super::verbs::{WC_WITH_IMM, Wc};
use crate::region::Slot;

/// How long the thread keeps polling after the last activity before it sleeps. A wake-up takes about as long.
const SPIN: Duration = Duration::from_micros(20);
/// The longest wait for the work of a failed queue pair. When it is over, the queue pair is
/// destroyed, and the card no longer touches the memory of that work.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// The longest wait, after the marker, for receives that a failed queue pair had consumed. A
/// receive that has not come back by then may be lost, so that it is never posted again.
const RECEIVES_TIMEOUT: Duration = Duration::from_millis(20);
/// The number of completions taken with one call.
const POLLED_TOGETHER: usize = 64;
/// A flag in the identifier of a receive.
const RECEIVE: u64 = 1 << 63;
/// The identifier of the marker after the work of a failed queue pair.
const MARKER: u64 = 1 << 62;
/// The library's number for the event that a port went down.
const PORT_DOWN: u32 = 10;
/// The library's numbers for events after which the card or its completion queue is unusable.
const FATAL: [u32; 3] = [0, 8, 14];

/// Callbacks for the events of a queue pair. They run on the engine's thread and must not block it.
pub(super) trait Events: Send {
    /// Called when a message has arrived. An error, which says what is wrong with the message, ends the queue pair.
    fn on_message(&mut self, message: &[u8]) -> Result<(), &'static str>;
    /// Called when a write by the peer into this node's memory has completed. `number` is what the peer attached to the write. An
    /// error ends the queue pair.
    fn on_completion(&mut self, number: u32) -> Result<(), &'static str>;
    /// Called when the queue pair has been destroyed and no more bytes can land through it.
    fn on_end(&mut self, reason: &str);
}

/// Operations that are posted together. All operations of a queue pair complete in order.
pub(super) struct Batch {
    pub(super) works: Vec<Work>,
    /// Owns the memory that the operations touch.
    pub(super) hold: Box<dyn Any + Send>,
    /// Returns `hold` when the operations have completed. Dropped if they fail.
    pub(super) done: Option<oneshot::Sender<Box<dyn Any + Send>>>,
}

impl Batch {
    fn bytes(&self) -> u64 {
        self.works.iter().map(|work| u64::from(work.len)).sum()
    }
}

/// Identifies a queue pair of an engine. Unlike the queue pair's number on the card, it is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct QueueId(u64);

enum Command {
    Add { id: QueueId, pair: QueuePair, events: Box<dyn Events> },
    Post { queue: QueueId, batch: Batch },
    End { queue: QueueId, reason: String },
    Stop,
}

/// Counts what the thread has done, for the status.
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
    /// Whether the thread has ended, after which no command is applied.
    is_dead: bool,
}

struct Shared {
    commands: Mutex<Commands>,
    next_id: AtomicU64,
    is_asleep: AtomicBool,
    wake_up: EventFd,
    counters: Counters,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, command: Command) {
        {
            let mut commands = self.lock();
            // Dropping the command notifies the callers that wait for its outcome.
            if commands.is_dead {
                return;
            }
            commands.waiting.push_back(command);
        }
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            // This fails only if the wake-up is already pending.
            let _ = self.wake_up.write(1);
        }
    }
}

/// The handle of a card's thread. Dropping it ends all queue pairs and the thread.
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
        let wake_up = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        let wake_up = wake_up.map_err(|error| RdmaError::Call { call: "eventfd", error: error.into() })?;
        let shared = Arc::new(Shared {
            commands: Mutex::default(),
            next_id: AtomicU64::new(0),
            is_asleep: AtomicBool::new(false),
            wake_up,
            counters: Counters::default(),
        });
        // When queue pairs fail, each operation has a completion of its own, and so do the receives and markers. The completion
        // queue must have room for all of them.
        let markers = (completions.entries() / 16).min(limits::NODES_MAX as u32);
        let room = completions.entries().saturating_sub(count + markers);
        if room < limits.send_depth {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "the card's completion queue is too short");
            return Err(RdmaError::Call { call: "ibv_create_cq", error });
        }
        let running = EngineThread {
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

    /// Copies the counters into a status.
    pub(super) fn count_into(&self, network: &mut Network) {
        let Counters { posts, works, completions, wake_ups, written_bytes, read_bytes, queue_pairs, failed } =
            &self.shared.counters;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (network.posts, network.works, network.completions) = (get(posts), get(works), get(completions));
        (network.wake_ups, network.queue_pairs, network.failed) = (get(wake_ups), get(queue_pairs), get(failed));
        (network.written_bytes, network.read_bytes) = (get(written_bytes), get(read_bytes));
    }

    /// Creates, for this engine, a queue pair that is not connected to its other end yet.
    pub(super) fn queue_pair(&self, depth: u32) -> Result<QueuePair, RdmaError> {
        QueuePair::new(&self.device, &self.completions, &self.receives, depth)
    }

    /// Adds a connected queue pair, whose events go to `events` from then on.
    pub(super) fn add(&self, pair: QueuePair, events: Box<dyn Events>) -> QueueId {
        let id = QueueId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        self.shared.send(Command::Add { id, pair, events });
        id
    }

    /// Posts a batch when there is room for it. Callers must bound the number of batches that wait.
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
            // An error means that the thread panicked; it has ended in any case.
            let _ = thread.join();
        }
    }
}

/// A queue pair and its work.
struct Queue {
    pair: QueuePair,
    events: Box<dyn Events>,
    /// Batches that wait for room.
    waiting: VecDeque<Batch>,
    /// Batches under way, with the identifiers of their last operations.
    posted: VecDeque<(u64, Batch)>,
    /// Number of operations under way.
    works: u32,
    /// Number of bytes under way.
    bytes: u64,
    /// Set while the queue pair is drained: the deadline, and why the queue pair ends.
    ending: Option<(Instant, String)>,
}

/// The state of the thread. Dropping it, even in a panic, drops all commands and work, which notifies their callers.
struct EngineThread {
    device: Arc<Device>,
    completions: Arc<Completions>,
    receives: Arc<Receives>,
    limits: Limits,
    shared: Arc<Shared>,
    /// The memory for the receives.
    buffer: Slot,
    queues: HashMap<QueueId, Queue>,
    /// The queue pairs by their numbers on the card, which completions carry.
    numbers: HashMap<u32, QueueId>,
    /// Queue pairs whose batches wait for room, served in turn.
    waiting: VecDeque<QueueId>,
    next: u64,
    works: u32,
    works_max: u32,
    is_stopping: bool,
}

impl EngineThread {
    fn run(mut self) {
        let mut busy = Instant::now();
        loop {
            let mut is_active = self.apply_commands();
            match self.take_completions() {
                Ok(taken) => is_active |= taken > 0,
                // Without completions, the state of the operations is unknown, so the card can no longer be used.
                Err(error) => {
                    tracing::error!(device = self.device.name, %error, "cannot take completions; the card is no longer used");
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

    /// Applies the commands that have arrived. Returns whether there were any.
    fn apply_commands(&mut self) -> bool {
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
                    // A batch for a queue pair that has ended is dropped, which notifies its owner.
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
                    self.end_all("this server is stopping");
                }
            }
        }
        is_active
    }

    /// Posts waiting batches, one of each queue pair in turn, as long as there is room.
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
                // Completions make room, and this runs again after each round of them.
                self.waiting.push_back(queue_id);
                continue;
            }
            let Some(batch) = queue.waiting.pop_front() else { continue };
            if !queue.waiting.is_empty() {
                self.waiting.push_back(queue_id);
            }
            self.next = (self.next + 1) & !(RECEIVE | MARKER);
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
                // A queue pair that has been destroyed waits for no completions.
                let Some(&queue) = self.numbers.get(&completion.qp_num) else { continue };
                match completion.wr_id {
                    id if id & MARKER != 0 => self.drained(queue),
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
        // The completion may belong to an earlier queue pair that had the same number.
        let is_ours = |queue: &Queue| queue.posted.iter().any(|(posted, _)| *posted == id);
        if self.queues.get(&queue).is_some_and(is_ours) {
            let reason = self.device.status_text(status);
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
                    Action::Write(_) | Action::WriteAndNotify(..) => {
                        count(&self.shared.counters.written_bytes, u64::from(work.len));
                    }
                    Action::Send => {}
                }
            }
            if let Some(done) = batch.done {
                // If nothing waits for the memory, this frees it.
                let _ = done.send(batch.hold);
            }
        }
    }

    fn received(&mut self, completion: &Wc) {
        let index = (completion.wr_id & !RECEIVE) as u32;
        if !self.numbers.contains_key(&completion.qp_num) {
            // The peer was faster than this thread: the command that adds the queue pair is still waiting.
            self.apply_commands();
        }
        let id = self.numbers.get(&completion.qp_num).copied();
        let queue = id.and_then(|id| self.queues.get_mut(&id)).filter(|queue| queue.ending.is_none());
        let mut wrong = None;
        if let Some(queue) = queue {
            let result = if completion.status != 0 {
                Ok(())
            } else if completion.wc_flags & WC_WITH_IMM != 0 {
                queue.events.on_completion(u32::from_be(completion.imm_data))
            } else {
                let start = index as usize * self.limits.request_len as usize;
                let len = completion.byte_len.min(self.limits.request_len) as usize;
                queue.events.on_message(&self.buffer[start..start + len])
            };
            wrong = result.err();
        }
        if let Some((id, reason)) = id.zip(wrong) {
            self.begin_end(id, reason, true);
        }
        if let Err(error) = self.post_receive(index) {
            tracing::warn!(device = self.device.name, %error, "cannot post a receive again");
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

    /// Starts to drain a queue pair: its work fails, and a marker is posted after that work.
    fn begin_end(&mut self, id: QueueId, reason: &str, is_failure: bool) {
        let Some(queue) = self.queues.get_mut(&id).filter(|queue| queue.ending.is_none()) else { return };
        tracing::debug!(queue = queue.pair.number(), reason, "the queue pair is ending");
        queue.waiting.clear();
        queue.ending = Some((Instant::now() + DRAIN_TIMEOUT, reason.to_owned()));
        count(&self.shared.counters.failed, u64::from(is_failure));
        let marker = Work { action: Action::Write(Remote { address: 0, key: 0 }), address: 0, len: 0, local_key: 0 };
        let posted = queue.pair.fail().and_then(|()| queue.pair.post(MARKER, &[marker]).map_err(|(error, _)| error));
        if posted.is_err() {
            self.drained(id);
        }
    }

    /// Shortens the deadline of a queue pair whose work has been drained, because the receives that
    /// it consumed come back at about the same time.
    fn drained(&mut self, id: QueueId) {
        if let Some((deadline, _)) = self.queues.get_mut(&id).and_then(|queue| queue.ending.as_mut()) {
            *deadline = Instant::now() + RECEIVES_TIMEOUT;
        }
    }

    /// Destroys a queue pair, and then frees the memory that its work touched.
    fn finish(&mut self, id: QueueId) {
        let Some(queue) = self.queues.remove(&id) else { return };
        let Queue { pair, mut events, waiting, posted, works, ending, .. } = queue;
        self.numbers.remove(&pair.number());
        drop(pair);
        self.works -= works;
        drop((waiting, posted));
        count(&self.shared.counters.queue_pairs, 1_u64.wrapping_neg());
        events.on_end(ending.as_ref().map_or("it ended", |(_, reason)| reason));
    }

    /// Destroys the queue pairs whose time to drain is over.
    fn finish_late(&mut self) {
        let now = Instant::now();
        let is_late = |queue: &Queue| queue.ending.as_ref().is_some_and(|(deadline, _)| *deadline <= now);
        let late: Vec<QueueId> = self.queues.iter().filter(|(_, queue)| is_late(queue)).map(|(&id, _)| id).collect();
        late.into_iter().for_each(|id| self.finish(id));
    }

    /// Sleeps until there is a completion, a command or an event from the card. Returns whether it slept.
    fn sleep(&mut self) -> bool {
        if let Err(error) = self.completions.arm() {
            self.end_all(&error.to_string());
        }
        self.shared.is_asleep.store(true, Ordering::SeqCst);
        // Anything that arrived since the last check triggers no wake-up, so this checks once more.
        let has_more = !self.shared.lock().waiting.is_empty() || !matches!(self.take_completions(), Ok(0));
        if has_more {
            self.shared.is_asleep.store(false, Ordering::SeqCst);
            return false;
        }
        let mut descriptors = [
            PollFd::new(self.completions.descriptor(), PollFlags::POLLIN),
            PollFd::new(self.shared.wake_up.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.device.events_descriptor(), PollFlags::POLLIN),
        ];
        let is_ending = self.queues.values().any(|queue| queue.ending.is_some());
        let timeout = if is_ending { PollTimeout::from(RECEIVES_TIMEOUT.as_millis() as u8) } else { PollTimeout::NONE };
        // An interrupted wait counts as a wake-up.
        let _ = poll(&mut descriptors, timeout);
        let has_events = descriptors[2].any().unwrap_or(false);
        self.shared.is_asleep.store(false, Ordering::SeqCst);
        count(&self.shared.counters.wake_ups, 1);
        let _ = self.shared.wake_up.read();
        self.completions.take_events();
        if has_events {
            self.handle_device_events();
        }
        true
    }

    /// Handles the events from the card.
    fn handle_device_events(&mut self) {
        for (kind, port, description) in self.device.events() {
            tracing::debug!(device = self.device.name, event = description, "the card reported an event");
            if kind == PORT_DOWN && port == u32::from(self.device.port) {
                // Without this, the work under way would only wait for its timeout.
                tracing::warn!(device = self.device.name, port, "the card's port went down");
                self.end_all("the card's port went down");
            } else if FATAL.contains(&kind) {
                tracing::warn!(device = self.device.name, error = description, "the card failed");
                self.end_all(&format!("the card failed: {description}"));
            }
        }
    }
}

impl Drop for EngineThread {
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
