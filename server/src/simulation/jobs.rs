//! Blocking work as coroutines: each job has a thread of its own, but a single baton goes from thread to thread, so that exactly one
//! of them runs at a time, and the runtime's clock stands still while a job does. In which order jobs begin, the seed decides.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::runtime::Handle;

use super::random::Random;
use crate::blocking::{Blocking, Job};

/// Who has the baton.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Runtime,
    Job,
    /// The job has ended.
    Done,
    /// The runtime ends: the job is to unwind.
    Abandoned,
}

/// Between a job's thread and the task that stands for it.
struct Baton {
    turn: Mutex<Turn>,
    passed: Condvar,
    waker: Mutex<Option<Waker>>,
}

impl Baton {
    fn pass(&self, to: Turn, until: impl Fn(Turn) -> bool) -> Turn {
        let mut turn = self.turn.lock().unwrap();
        *turn = to;
        self.passed.notify_one();
        self.wait(turn, until)
    }

    fn wait(&self, mut turn: std::sync::MutexGuard<'_, Turn>, until: impl Fn(Turn) -> bool) -> Turn {
        while !until(*turn) {
            turn = self.passed.wait(turn).unwrap();
        }
        *turn
    }

    /// On the runtime's thread: lets the job run until it waits or ends.
    fn resume(&self, context: &Context<'_>) -> Poll<()> {
        *self.waker.lock().unwrap() = Some(context.waker().clone());
        match self.pass(Turn::Job, |turn| matches!(turn, Turn::Runtime | Turn::Done)) {
            Turn::Done => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }
}

impl Wake for Baton {
    fn wake(self: Arc<Self>) {
        if let Some(waker) = &*self.waker.lock().unwrap() {
            waker.wake_by_ref();
        }
    }
}

thread_local! {
    /// The job that this thread runs.
    static CURRENT: RefCell<Option<Arc<Baton>>> = const { RefCell::new(None) };
}

/// What a thread is to do.
struct Task {
    job: Job,
    baton: Arc<Baton>,
    runtime: Handle,
    panics: Arc<Mutex<Vec<String>>>,
}

/// Why a job unwinds when its runtime ends.
struct Abandoned;

/// Threads that wait for jobs, of one session after another.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<Sender<Task>>>>);

/// The jobs of one simulated session.
pub(super) struct Jobs {
    random: Mutex<Random>,
    pool: Pool,
    panics: Arc<Mutex<Vec<String>>>,
}

impl Jobs {
    pub(super) fn new(random: Random, pool: Pool) -> Arc<Self> {
        Arc::new(Self { random: Mutex::new(random), pool, panics: Arc::default() })
    }

    /// What jobs panicked with.
    pub(super) fn panics(&self) -> Vec<String> {
        self.panics.lock().unwrap().clone()
    }
}

impl Pool {
    fn take(&self) -> Sender<Task> {
        if let Some(idle) = self.0.lock().unwrap().pop() {
            return idle;
        }
        let (sender, tasks) = channel::<Task>();
        std::thread::spawn(move || {
            for Task { job, baton, runtime, panics } in tasks {
                let turn = baton.wait(baton.turn.lock().unwrap(), |turn| turn != Turn::Runtime);
                if turn == Turn::Job {
                    let _runtime = runtime.enter();
                    CURRENT.set(Some(baton.clone()));
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(job)) {
                        note(&panics, &*panic);
                    }
                    CURRENT.set(None);
                } else {
                    drop(job);
                }
                drop(runtime);
                baton.pass(Turn::Done, |_| true);
            }
        });
        sender
    }
}

fn note(panics: &Mutex<Vec<String>>, panic: &(dyn Any + Send)) {
    if panic.is::<Abandoned>() {
        return;
    }
    let words = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    panics.lock().unwrap().push(words.unwrap_or("without a word").to_owned());
}

impl Blocking for Jobs {
    fn start(&self, job: Job) {
        let delay = {
            let mut random = self.random.lock().unwrap();
            if random.is_one_in(4) {
                random.duration(Duration::from_micros(10), Duration::from_millis(5))
            } else {
                Duration::ZERO
            }
        };
        let baton = Arc::new(Baton { turn: Mutex::new(Turn::Runtime), passed: Condvar::new(), waker: Mutex::new(None) });
        let task = Task { job, baton: baton.clone(), runtime: Handle::current(), panics: self.panics.clone() };
        // It begins when it gets the baton.
        let thread = self.pool.take();
        thread.send(task).unwrap();
        let running = Running { baton, thread, pool: self.pool.clone() };
        tokio::spawn(async move {
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            std::future::poll_fn(|context| running.baton.resume(context)).await;
        });
    }

    fn wait(&self, mut future: Pin<&mut dyn Future<Output = ()>>) {
        let baton = CURRENT.with_borrow(|current| current.clone()).expect("only a job waits");
        let waker = Waker::from(baton.clone());
        while future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            if baton.pass(Turn::Runtime, |turn| matches!(turn, Turn::Job | Turn::Abandoned)) == Turn::Abandoned {
                resume_unwind(Box::new(Abandoned));
            }
        }
    }
}

/// The task that stands for a job. When the runtime ends before the job has, the job unwinds.
struct Running {
    baton: Arc<Baton>,
    thread: Sender<Task>,
    pool: Pool,
}

impl Drop for Running {
    fn drop(&mut self) {
        let turn = *self.baton.turn.lock().unwrap();
        if turn != Turn::Done {
            self.baton.pass(Turn::Abandoned, |turn| turn == Turn::Done);
        }
        self.pool.0.lock().unwrap().push(self.thread.clone());
    }
}
