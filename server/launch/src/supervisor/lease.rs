//! The lease that a supervisor holds over its servers: heartbeats in both directions, until the
//! session ends.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dayfly_meta::deadlines::Deadlines;
use dayfly_server::channel::Sender;
use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::start::{Member, receive_from_server};
use crate::control::{self, FromServer, FromSupervisor};
use crate::folder_watch::gone_message;
use crate::notices::Notices;
use crate::processes::LauncherProcesses;

/// Renews the lease of all members until they have ended or are told to end.
///
/// Returns a reason if the session is lost because something that it needs is gone: a watched file
/// here (`gone`), or something on a node, whose server reports it.
pub(super) async fn hold(
    members: Vec<Member>,
    processes: &mut LauncherProcesses,
    deadlines: Deadlines,
    notices: &Notices,
    mut ending: oneshot::Receiver<()>,
    mut gone: impl Future<Output = PathBuf> + Unpin,
) -> Option<String> {
    let (mut live, mut receivers) = (Vec::new(), JoinSet::new());
    for Member { name, sender, mut receiver } in members {
        let was_heard = Arc::new(AtomicBool::new(true));
        let (index, heard) = (live.len(), was_heard.clone());
        live.push(Some(LiveMember { name, sender, was_heard, silent_ticks: 0 }));
        receivers.spawn(async move {
            loop {
                match receive_from_server(&mut receiver).await {
                    Ok(FromServer::Ended) => return (index, Departure::Ended),
                    Ok(FromServer::Failed { reason, .. }) => return (index, Departure::Failed(reason)),
                    Ok(_) => heard.store(true, Ordering::Relaxed),
                    Err(reason) => return (index, Departure::Lost(reason)),
                }
            }
        });
    }
    let mut ticks = interval(deadlines.lease_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while live.iter().any(Option::is_some) {
        tokio::select! {
            _ = &mut ending => {
                end_all(&mut live, &deadlines).await;
                return None;
            }
            path = &mut gone => {
                end_all(&mut live, &deadlines).await;
                return Some(gone_message(&path));
            }
            Some(Ok((index, departure))) = receivers.join_next() => match (live[index].take(), departure) {
                (Some(member), Departure::Lost(reason)) => report_loss(notices, &member.name, &reason),
                (Some(member), Departure::Failed(reason)) => {
                    end_all(&mut live, &deadlines).await;
                    return Some(format!("{}: {reason}", member.name));
                }
                _ => {}
            },
            _ = ticks.tick() => {
                for slot in &mut live {
                    if let Some(silent) = slot.take_if(|member| member.is_silent(&deadlines)) {
                        let reason = format!("no heartbeat came from it for {} s", deadlines.lease.as_secs_f64());
                        report_loss(notices, &silent.name, &reason);
                    }
                }
                // A server that accepts no bytes is detected by its silence.
                send_to_all(&mut live, FromSupervisor::Renew, &deadlines).await;
            }
            line = processes.line() => notices.show(line),
        }
    }
    None
}

fn report_loss(notices: &Notices, member: &str, reason: &str) {
    tracing::warn!(member, reason, "a server is lost");
    notices.show(format_args!("{member} is lost: {reason}"));
}

/// How a server leaves the session.
enum Departure {
    /// The server was asked to end.
    Ended,
    /// The server lacks something that the session needs, so neither can continue.
    Failed(String),
    /// The server's control channel broke.
    Lost(String),
}

async fn end_all(live: &mut [Option<LiveMember>], deadlines: &Deadlines) {
    send_to_all(live, FromSupervisor::End, deadlines).await;
}

async fn send_to_all(live: &mut [Option<LiveMember>], message: FromSupervisor, deadlines: &Deadlines) {
    let sends =
        live.iter_mut().flatten().map(|member| timeout(deadlines.lease_interval, control::send(&mut member.sender, &message)));
    drop(join_all(sends).await);
}

/// A member whose server lives.
struct LiveMember {
    name: String,
    sender: Sender,
    /// Set by each message, cleared by each tick.
    was_heard: Arc<AtomicBool>,
    /// Ticks without a message. A suspended job's processes are stopped, and there are no ticks
    /// while this process is stopped, so a suspended job loses no server.
    silent_ticks: u128,
}

impl LiveMember {
    fn is_silent(&mut self, deadlines: &Deadlines) -> bool {
        self.silent_ticks = if self.was_heard.swap(false, Ordering::Relaxed) { 0 } else { self.silent_ticks + 1 };
        self.silent_ticks >= deadlines.lease.as_millis() / deadlines.lease_interval.as_millis()
    }
}
