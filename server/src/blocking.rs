//! Runs blocking work on threads of its own, because the runtime's threads move messages and must not wait. The server receives
//! an implementation of [`Blocking`], so that a simulation can decide in which order such work proceeds.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Work that may wait for a drive or, with [`Blocking::wait`], for a future.
pub type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs that block.
pub trait Blocking: Send + Sync + 'static {
    /// Starts a job and returns at once. The caller must be within a tokio runtime, and the job will run within it, too.
    fn start(&self, job: Job);

    /// Waits for a future. Only a job may call this.
    fn wait(&self, future: Pin<&mut dyn Future<Output = ()>>);
}

/// Runs jobs on the blocking threads of the tokio runtime.
pub struct Threads;

impl Blocking for Threads {
    fn start(&self, job: Job) {
        drop(tokio::task::spawn_blocking(job));
    }

    fn wait(&self, future: Pin<&mut dyn Future<Output = ()>>) {
        Handle::current().block_on(future);
    }
}

/// A job has no result: it panicked, or the runtime shut down before it began.
#[derive(Clone, Debug, thiserror::Error)]
#[error("work on this node ended without a result: it panicked, or the server is shutting down")]
pub(crate) struct JobLost;

thread_local! {
    /// Whether this thread runs a job.
    static IS_IN_JOB: Cell<bool> = const { Cell::new(false) };
}

/// Panics, in debug builds, on a thread that moves messages. Functions that wait for a drive call it: while such a thread waits, all
/// other nodes and processes wait for it. A thread outside the runtime moves none. Unit tests call these functions directly, and are
/// not checked.
#[track_caller]
pub(crate) fn assert_may_wait() {
    debug_assert!(
        IS_IN_JOB.get() || cfg!(test) || Handle::try_current().is_err(),
        "waits for a drive on a thread that moves messages"
    );
}

impl dyn Blocking {
    /// Starts a job at once and returns a future for its result. Dropping the future does not stop the job.
    pub(crate) fn run<T, F>(&self, job: F) -> impl Future<Output = Result<T, JobLost>> + Send + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (done, result) = oneshot::channel();
        // The receiver is gone if the caller no longer waits for the result.
        self.start(Box::new(move || {
            // The threads of jobs never run anything else.
            IS_IN_JOB.set(true);
            drop(done.send(job()));
        }));
        async move { result.await.map_err(|_| JobLost) }
    }

    /// Waits for a future and returns its output. Only a job may call this.
    pub(crate) fn wait_for<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            let mut output = None;
            let waiting = poll_fn(|context| match future.as_mut().poll(context) {
                Poll::Ready(ready) => {
                    output = Some(ready);
                    Poll::Ready(())
                }
                Poll::Pending => Poll::Pending,
            });
            self.wait(pin!(waiting));
            if let Some(output) = output {
                return output;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_job_waits_for_a_future_and_a_job_that_panics_has_no_result() {
        let blocking: Arc<dyn Blocking> = Arc::new(Threads);
        let inner = blocking.clone();
        let job = blocking.run(move || {
            inner.wait_for(async {
                tokio::time::sleep(Duration::from_millis(1)).await;
                7
            })
        });
        assert_eq!(job.await.unwrap(), 7);
        assert!(blocking.run(|| panic!("on purpose")).await.is_err());
    }
}
