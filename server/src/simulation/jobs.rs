//! Runs blocking jobs as coroutines. Each job has its own thread, but the threads pass a baton, so that exactly one of them runs
//! at a time. The simulated clock stands still while a job runs. The seed decides in which order jobs begin.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::runtime::Handle;

use super::random::Random;
use crate::blocking::{Blocking, Job};

/// The position of the baton.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BatonState {
    /// The runtime has it, and may run.
    WithRuntime,
    /// The job has it, and may run.
    WithJob,
    /// The job has ended.
    Done,
    /// The runtime is shutting down, so the job has to unwind.
    Abandoned,
}

/// Synchronizes a job's thread with the task that represents the job in the runtime.
struct Baton {
    state: Mutex<BatonState>,
    passed: Condvar,
    /// Wakes the task.
    waker: Mutex<Option<Waker>>,
}

impl Baton {
    /// Passes the baton on, and waits until its state satisfies `until`.
    fn pass(&self, to: BatonState, until: impl Fn(BatonState) -> bool) -> BatonState {
        let mut state = self.state.lock().unwrap();
        *state = to;
        self.passed.notify_one();
        self.wait(state, until)
    }

    fn wait(&self, mut state: MutexGuard<'_, BatonState>, until: impl Fn(BatonState) -> bool) -> BatonState {
        while !until(*state) {
            state = self.passed.wait(state).unwrap();
        }
        *state
    }

    /// Called on the runtime's thread: lets the job run until it waits or ends.
    fn resume(&self, context: &Context<'_>) -> Poll<()> {
        *self.waker.lock().unwrap() = Some(context.waker().clone());
        match self.pass(BatonState::WithJob, |state| matches!(state, BatonState::WithRuntime | BatonState::Done)) {
            BatonState::Done => Poll::Ready(()),
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
    /// The baton of the job that this thread runs.
    static CURRENT: RefCell<Option<Arc<Baton>>> = const { RefCell::new(None) };
}

/// A job for a thread.
struct Task {
    job: Job,
    baton: Arc<Baton>,
    runtime: Handle,
    panics: Arc<Mutex<Vec<String>>>,
}

/// The panic payload of a job that unwinds because its runtime shuts down.
struct Abandoned;

/// Idle threads. They serve one session after another.
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

    /// Returns the messages of jobs that panicked.
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
                let state = baton.wait(baton.state.lock().unwrap(), |state| state != BatonState::WithRuntime);
                if state == BatonState::WithJob {
                    let _runtime = runtime.enter();
                    CURRENT.set(Some(baton.clone()));
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(job)) {
                        record(&panics, &*panic);
                    }
                    CURRENT.set(None);
                } else {
                    drop(job);
                }
                drop(runtime);
                baton.pass(BatonState::Done, |_| true);
            }
        });
        sender
    }
}

fn record(panics: &Mutex<Vec<String>>, panic: &(dyn Any + Send)) {
    if panic.is::<Abandoned>() {
        return;
    }
    let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    panics.lock().unwrap().push(message.unwrap_or("without a message").to_owned());
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
        let baton =
            Arc::new(Baton { state: Mutex::new(BatonState::WithRuntime), passed: Condvar::new(), waker: Mutex::new(None) });
        let task = Task { job, baton: baton.clone(), runtime: Handle::current(), panics: self.panics.clone() };
        // The job begins when it gets the baton.
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
        let baton = CURRENT.with_borrow(|current| current.clone()).expect("only a job may wait");
        let waker = Waker::from(baton.clone());
        while future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            if baton.pass(BatonState::WithRuntime, |state| matches!(state, BatonState::WithJob | BatonState::Abandoned))
                == BatonState::Abandoned
            {
                resume_unwind(Box::new(Abandoned));
            }
        }
    }
}

/// The task that represents a job in the runtime. If the runtime shuts down before the job has ended, the job unwinds.
struct Running {
    baton: Arc<Baton>,
    thread: Sender<Task>,
    pool: Pool,
}

impl Drop for Running {
    fn drop(&mut self) {
        let state = *self.baton.state.lock().unwrap();
        if state != BatonState::Done {
            self.baton.pass(BatonState::Abandoned, |state| state == BatonState::Done);
        }
        self.pool.0.lock().unwrap().push(self.thread.clone());
    }
}
