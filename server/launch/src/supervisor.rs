//! The supervisor of a session.
//!
//! The supervisor starts the servers, waits until they join, and makes them one session
//! ([`start`]). Then it holds the session's lease over them ([`lease`]): as long as the supervisor
//! lives, it sends each server a heartbeat. When the supervisor ends, for whatever reason, the
//! servers end: at once if nothing listens at its address anymore, and otherwise when no heartbeat
//! has come for the length of the lease. The supervisor alone decides which servers are members, and
//! starts new ones in the place of those that have died ([`replacement`], [`newcomer`]).
//!
//! The supervisor runs on a thread of its own with a single-threaded runtime.

mod lease;
mod newcomer;
mod replacement;
mod start;

use std::pin::pin;
use std::thread::{self, JoinHandle};

use dayfly_client::locate::Watch;
use dayfly_meta::limits::LAUNCHER_END_TIMEOUT;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::{Instrument, Span};

use crate::ended::Ended;
use crate::error::LaunchError;
use crate::folder_watch::{gone_message, until_gone};
use crate::notices::Notices;
use crate::processes::LauncherProcesses;
use start::SessionStart;
pub(crate) use start::StartRequest;

/// A supervisor at work. Dropping it ends the session.
pub(crate) struct Supervisor {
    end: Option<oneshot::Sender<()>>,
    loss: Option<oneshot::Receiver<String>>,
    ended: Ended,
    thread: Option<JoinHandle<()>>,
}

impl Supervisor {
    /// Starts all servers, and waits until they are ready or `cancelled` fires. Ends the session
    /// when a watched file is gone.
    pub(crate) fn start(
        request: StartRequest,
        watch: Watch,
        ended: Ended,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<Self, LaunchError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(LaunchError::io("cannot start the supervisor's runtime"))?;
        let (end, ending) = oneshot::channel();
        let (loss_sender, loss) = oneshot::channel();
        let (result_sender, result) = std::sync::mpsc::channel();
        let known_ended = ended.clone();
        let span = Span::current();
        let thread = thread::Builder::new().name("supervisor".to_owned()).spawn(move || {
            runtime.block_on(async {
                let cancelled = async { drop(cancelled.await) };
                let notices = request.notices.clone();
                let session = request.session;
                let mut start = SessionStart::new(request);
                let mut gone = pin!(until_gone(watch));
                let started = tokio::select! {
                    started = start.run().instrument(span) => started,
                    () = cancelled => Err(LaunchError::Interrupted),
                    path = &mut gone => Err(LaunchError::Lost(gone_message(&path))),
                };
                match started {
                    Ok(started) => {
                        tracing::info!(%session, nodes = started.members.len(), "the session is up");
                        // The caller of this function waits for the result.
                        let _ = result_sender.send(Ok(()));
                        let (mut processes, request) = start.into_parts();
                        let loss = lease::hold(started, request, &mut processes, known_ended, ending, gone).await;
                        if let Some(reason) = loss {
                            tracing::warn!(%session, reason, "the session is lost");
                            // If nobody waits for the reason, ending the session is all that can be
                            // done.
                            let _ = loss_sender.send(reason);
                        }
                        wind_down(&mut processes, &notices).await;
                    }
                    Err(error) => {
                        tracing::warn!(%session, %error, "the session did not start");
                        // This closes all control channels, so servers that have joined end.
                        let (mut processes, _) = start.into_parts();
                        wind_down(&mut processes, &notices).await;
                        let _ = result_sender.send(Err(error));
                    }
                }
            });
            // A check of the session's folder may still wait for its file system.
            runtime.shutdown_background();
        });
        let thread = thread.map_err(LaunchError::io("cannot start the supervisor's thread"))?;
        let supervisor = Self { end: Some(end), loss: Some(loss), ended, thread: Some(thread) };
        result.recv().map_err(|_| LaunchError::SupervisorEnded)??;
        Ok(supervisor)
    }

    /// Returns what is known about who has ended the session.
    pub(crate) fn ended(&self) -> Ended {
        self.ended.clone()
    }

    /// Waits until all servers have ended.
    pub(crate) fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the panic was printed already.
            let _ = thread.join();
        }
    }

    /// Returns a channel that receives the reason if the session is lost. Its sender is dropped if
    /// the session ends otherwise.
    pub(crate) fn loss(&mut self) -> Option<oneshot::Receiver<String>> {
        self.loss.take()
    }

    /// Returns a handle that ends the session when it is sent or dropped.
    pub(crate) fn end_handle(&mut self) -> Option<oneshot::Sender<()>> {
        self.end.take()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        drop(self.end.take());
        self.wait();
    }
}

/// Waits until the launcher's processes have exited, as they do after their servers. The caller
/// then drops, and so kills, the others.
async fn wind_down(processes: &mut LauncherProcesses, notices: &Notices) {
    if timeout(LAUNCHER_END_TIMEOUT, processes.all_exited()).await.is_err() {
        let hosts = processes.running_on().join(", ");
        notices.show(format_args!("the process that started the server on {hosts} does not exit; killing it"));
    }
}
