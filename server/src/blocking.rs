//! Where work that blocks runs: apart from the threads that move messages. A server is given the way to do so, so that a simulation
//! can decide in which order such work goes on.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Work that may wait for a drive, or by [`Blocking::wait`] for a future.
pub type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs.
pub trait Blocking: Send + Sync + 'static {
    /// Starts a job; returns at once. It is called where a runtime is entered, and so is the job.
    fn start(&self, job: Job);

    /// Waits for a future. Only a job may call this.
    fn wait(&self, future: Pin<&mut dyn Future<Output = ()>>);
}

/// Threads of the runtime.
pub struct Threads;

impl Blocking for Threads {
    fn start(&self, job: Job) {
        drop(tokio::task::spawn_blocking(job));
    }

    fn wait(&self, future: Pin<&mut dyn Future<Output = ()>>) {
        Handle::current().block_on(future);
    }
}

/// A job panicked, or the runtime ended before it began.
#[derive(Debug, thiserror::Error)]
#[error("work on this node ended without a result, for it panicked or the server is ending")]
pub(crate) struct JobLost;

impl dyn Blocking {
    /// Starts a job at once; the future is its result. Dropping the future does not end the job.
    pub(crate) fn run<T, F>(&self, job: F) -> impl Future<Output = Result<T, JobLost>> + Send + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (done, result) = oneshot::channel();
        // Whoever started it may be gone.
        self.start(Box::new(move || drop(done.send(job()))));
        async move { result.await.map_err(|_| JobLost) }
    }

    /// Waits for a future and returns what comes of it. Only a job may call this.
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
    async fn a_job_waits_for_what_the_runtime_does_and_a_panic_has_no_result() {
        let blocking: Arc<dyn Blocking> = Arc::new(Threads);
        let inner = blocking.clone();
        let job = blocking.run(move || {
            inner.wait_for(async {
                tokio::time::sleep(Duration::from_millis(1)).await;
                7
            })
        });
        assert_eq!(job.await.unwrap(), 7);
        assert!(blocking.run(|| panic!("as it is told to")).await.is_err());
    }
}
