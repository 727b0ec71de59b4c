//! How a server follows its supervisor: it carries out the supervisor's instructions, sends heartbeats, and dials again when the
//! control channel breaks.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::roster::RosterChange;
use dayfly_server::channel::{self, Channel, Receiver, Sender};
use dayfly_server::{Key, Node};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::CONNECT_RETRY_INTERVAL;
use crate::control::{self, FromServer, FromSupervisor};

/// Maximum number of the supervisor's instructions that wait to be carried out.
const INSTRUCTIONS_WAITING_MAX: usize = 4;

/// How a supervisor parted from its server, and thus why the server ends.
pub(super) enum Parting {
    /// The supervisor ended the session, or the session never began.
    Ended(&'static str),
    /// The supervisor was lost after the session had begun.
    Lost(&'static str),
}

/// How to dial the supervisor.
#[derive(Clone)]
pub(super) struct Dialer {
    pub(super) session: SessionId,
    pub(super) key: Arc<Key>,
    pub(super) deadlines: Deadlines,
    /// The address of the supervisor that this server has reached before.
    pub(super) supervisor: Vec<SocketAddr>,
}

impl Dialer {
    /// Dials until the supervisor answers. Fails if nothing listens at its address anymore.
    async fn dial(self) -> io::Result<Channel> {
        loop {
            match channel::dial(self.session, &self.key, self.deadlines, &self.supervisor).await {
                Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => {
                    tracing::info!(%error, "cannot reach the supervisor; dialing again");
                    sleep(CONNECT_RETRY_INTERVAL).await;
                }
                dialed => return dialed,
            }
        }
    }
}

/// A control channel whose messages are received by a task.
struct Connected {
    sender: Sender,
    instructions: mpsc::Receiver<FromSupervisor>,
    /// The task ends with the connection.
    _receiving: JoinSet<()>,
}

impl Connected {
    /// The receiver runs on its own task. Inside a select, a message that is partly read would be lost whenever another branch
    /// comes first.
    fn new(sender: Sender, mut receiver: Receiver) -> Self {
        let (instruction_sender, instructions) = mpsc::channel(INSTRUCTIONS_WAITING_MAX);
        let mut receiving = JoinSet::new();
        receiving.spawn(async move {
            while let Ok(instruction) = control::receive::<FromSupervisor>(&mut receiver).await {
                if instruction_sender.send(instruction).await.is_err() {
                    return;
                }
            }
        });
        Self { sender, instructions, _receiving: receiving }
    }
}

/// A server at work, as its supervisor sees it.
pub(super) struct Follower<'a> {
    server: &'a Arc<Node>,
    node: NodeId,
    dialer: Dialer,
    incarnation: u32,
    connected: Option<Connected>,
    /// The dial in progress while there is no control channel.
    dialing: JoinSet<io::Result<Channel>>,
    /// The incarnation that is catching up with the session.
    catching_up: JoinSet<Option<u32>>,
    catching_up_again: JoinSet<()>,
}

impl<'a> Follower<'a> {
    pub(super) fn new(server: &'a Arc<Node>, node: NodeId, dialer: Dialer, sender: Sender, receiver: Receiver) -> Self {
        let connected = Some(Connected::new(sender, receiver));
        let (dialing, catching_up, catching_up_again) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
        Self { server, node, dialer, incarnation: 0, connected, dialing, catching_up, catching_up_again }
    }

    /// Sends a message on the control channel as it is now. Whoever is gone does not need to know.
    pub(super) async fn tell(&mut self, message: &FromServer) {
        if let Some(connected) = &mut self.connected {
            let _ = timeout(self.dialer.deadlines.lease_interval, control::send(&mut connected.sender, message)).await;
        }
    }

    /// Carries out the supervisor's instructions and sends heartbeats, until the supervisor ends the session or is lost.
    pub(super) async fn follow(&mut self, start_ticks: u64) -> Parting {
        let server = self.server;
        let mut ticks = interval(self.dialer.deadlines.lease_interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut start_ticks_left = start_ticks;
        // The supervisor's messages do not decide this: if the supervisor is killed, those that have not been read may be lost.
        let parting = |cause| if server.has_begun() { Parting::Lost(cause) } else { Parting::Ended(cause) };
        loop {
            let answer = tokio::select! {
                instruction = next_instruction(&mut self.connected) => match instruction {
                    None if server.has_begun() => {
                        self.dial_again();
                        continue;
                    }
                    None => return parting("the supervisor is gone"),
                    Some(FromSupervisor::End) => return Parting::Ended("the supervisor ended it"),
                    Some(instruction) => match self.carry_out(instruction).await {
                        Some(answer) => answer,
                        None => continue,
                    },
                },
                Some(dialed) = self.dialing.join_next() => match dialed {
                    Ok(Ok(channel)) => {
                        self.connected = Some(Connected::new(channel.sender, channel.receiver));
                        FromServer::Resume { node: self.node.0, incarnation: self.incarnation }
                    }
                    Ok(Err(_)) => return parting("the supervisor is gone"),
                    Err(_) => {
                        self.dial_again();
                        continue;
                    }
                },
                Some(caught_up) = self.catching_up.join_next() => match caught_up {
                    Ok(Some(incarnation)) => {
                        self.incarnation = incarnation;
                        FromServer::CaughtUp { incarnation, address: server.address() }
                    }
                    // A new channel gets a new invitation to return.
                    _ => {
                        self.dial_again();
                        continue;
                    }
                },
                _ = ticks.tick() => {
                    if server.has_begun() {
                        server.tenure().tick();
                    } else {
                        start_ticks_left = start_ticks_left.saturating_sub(1);
                    }
                    if server.tenure().is_over() || start_ticks_left == 0 {
                        return parting("no heartbeat came from the supervisor");
                    }
                    FromServer::Alive
                }
            };
            let Some(connected) = &mut self.connected else { continue };
            if control::send(&mut connected.sender, &answer).await.is_err() {
                if !server.has_begun() {
                    return parting("the supervisor accepts no messages");
                }
                self.dial_again();
            }
        }
    }

    /// Carries out an instruction. Returns the answer, if it has one.
    async fn carry_out(&mut self, instruction: FromSupervisor) -> Option<FromServer> {
        let server = self.server;
        let failed = |error: dayfly_server::JoinError| FromServer::Failed { names: Vec::new(), reason: error.to_string() };
        match instruction {
            FromSupervisor::Renew => server.tenure().renew(),
            FromSupervisor::Roster { addresses, agreement } => {
                let joined = server.join(&addresses, agreement).await;
                return Some(joined.map_or_else(failed, |fallen_back| FromServer::Met { fallen_back }));
            }
            FromSupervisor::Agree(agreement) => {
                return Some(server.agree(agreement).await.map_or_else(failed, |()| FromServer::Ready));
            }
            FromSupervisor::Change(change) => {
                if server.change_roster(&change) {
                    // A dataset may have appeared after this node caught up and before it was a member again.
                    let server = server.clone();
                    self.catching_up_again.spawn(async move {
                        if let Err(error) = server.catch_up().await {
                            tracing::warn!(%error, "cannot look for new datasets");
                        }
                    });
                }
            }
            FromSupervisor::Return { incarnation, change } => self.catch_up(incarnation, change),
            FromSupervisor::JoinAs { .. } | FromSupervisor::Surplus | FromSupervisor::End => {}
        }
        None
    }

    fn catch_up(&mut self, incarnation: u32, change: RosterChange) {
        let server = self.server.clone();
        self.catching_up = JoinSet::new();
        self.catching_up.spawn(async move {
            server.change_roster(&change);
            match server.catch_up().await {
                Ok(()) => Some(incarnation),
                Err(error) => {
                    tracing::warn!(%error, "cannot catch up with the session; trying again");
                    sleep(CONNECT_RETRY_INTERVAL).await;
                    None
                }
            }
        });
    }

    fn dial_again(&mut self) {
        self.connected = None;
        self.dialing = JoinSet::new();
        self.dialing.spawn(self.dialer.clone().dial());
    }
}

/// Waits for the next instruction; `None` once the channel has closed. Waits forever while there is no channel.
async fn next_instruction(connected: &mut Option<Connected>) -> Option<FromSupervisor> {
    match connected {
        Some(connected) => connected.instructions.recv().await,
        None => std::future::pending().await,
    }
}
