//! The code that `up` and `run` share: a supervised session that signals can interrupt.

use std::ops::ControlFlow;

use dayfly_launch::{RunningSession, SessionPlan};
use tokio::sync::oneshot;
use tracing_subscriber::EnvFilter;

use crate::failure::{Failure, complain};

/// Prepares a process that will hold a session's key: protects its memory, and starts its log if
/// `DAYFLY_LOG` asks for one.
pub(super) fn prepare_supervisor() {
    protect_key();
    if let Some(filter) = std::env::var("DAYFLY_LOG").ok().filter(|filter| !filter.is_empty()) {
        start_log(Some(&filter));
    }
}

/// Keeps the session's key out of core files, and from other processes of this user.
pub(super) fn protect_key() {
    if let Err(error) = dayfly_launch::protect_key() {
        complain(format_args!("other processes of this user can read the session's key from this process: {error}"));
    }
}

/// Starts the log on standard error. `filter` has the syntax of `DAYFLY_LOG`; the default is level
/// `info` and above.
pub(super) fn start_log(filter: Option<&str>) {
    let filter = filter.and_then(|filter| filter.parse().ok()).unwrap_or_else(|| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false);
    // A line that cannot be written is lost. By default, the subscriber would report the loss on
    // standard error, which is the same log. That report would fail too, and this process would
    // panic.
    log.log_internal_errors(false).init();
}

/// Starts a session. Gives up if `interrupted` ends first, and returns its output.
pub(super) async fn start<T>(
    plan: SessionPlan,
    interrupted: impl Future<Output = T>,
) -> Result<ControlFlow<T, RunningSession>, Failure> {
    let (cancel, canceled) = oneshot::channel();
    let mut starting = tokio::task::spawn_blocking(move || RunningSession::start(plan, canceled));
    tokio::select! {
        started = &mut starting => Ok(ControlFlow::Continue(started.map_err(Failure::new)??)),
        reason = interrupted => {
            // If the start has just finished, dropping the running session ends it.
            let _ = cancel.send(());
            drop(starting.await);
            Ok(ControlFlow::Break(reason))
        }
    }
}

/// Waits for the end of a session. Returns why it was lost, or `None` if it ended as requested.
pub(super) async fn lost(loss: Option<oneshot::Receiver<String>>) -> Option<String> {
    loss?.await.ok()
}

/// Waits until a session is lost. Waits forever if it ends otherwise.
pub(super) async fn until_lost(loss: Option<oneshot::Receiver<String>>) -> String {
    match lost(loss).await {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}
