//! How a server follows its supervisor: it carries out the supervisor's instructions, sends heartbeats, and dials again when the
//! control channel breaks.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::roster::RosterChange;
use dayfly_server::channel::{self, Channel, Receiver, Sender};
use dayfly_server::{Key, Node, RejoinRequest};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

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
    /// The server was to take the place of a lost one, and cannot catch up with the session.
    GaveUp(String),
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
    /// The ticks since the supervisor was heard last, or since a dial began because of its silence.
    silent_ticks: u128,
    /// The dial in progress while there is no control channel, or while it is silent.
    dialing: JoinSet<io::Result<Channel>>,
    /// The incarnation that is catching up with the session.
    catching_up: JoinSet<Result<u32, String>>,
    /// Since when a new server tries to catch up with the session. `None` if it is a member, or has been one: it has blocks that
    /// nobody else has, so it never gives up.
    new_since: Option<Instant>,
    /// The server is a member again, and looks once more for what appeared meanwhile.
    catching_up_again: JoinSet<bool>,
    /// Requests of users for new servers, by their numbers, which the supervisor has not answered yet.
    rejoins: BTreeMap<u64, oneshot::Sender<Result<String, String>>>,
    last_rejoin: u64,
}

impl<'a> Follower<'a> {
    pub(super) fn new(server: &'a Arc<Node>, node: NodeId, dialer: Dialer, sender: Sender, receiver: Receiver) -> Self {
        let connected = Some(Connected::new(sender, receiver));
        let (dialing, catching_up, catching_up_again) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
        Self {
            server,
            node,
            dialer,
            incarnation: 0,
            connected,
            silent_ticks: 0,
            dialing,
            catching_up,
            new_since: None,
            catching_up_again,
            rejoins: BTreeMap::new(),
            last_rejoin: 0,
        }
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
                instruction = next_instruction(&mut self.connected) => {
                    self.hear();
                    match instruction {
                        None if server.has_begun() => {
                            self.dial_again();
                            continue;
                        }
                        None => return parting("the supervisor is gone"),
                        Some(FromSupervisor::End) => return Parting::Ended("the supervisor ended it"),
                        Some(FromSupervisor::Surplus) => return Parting::Ended("another server has taken its place"),
                        Some(instruction) => match self.carry_out(instruction).await {
                            Some(answer) => answer,
                            None => continue,
                        },
                    }
                },
                Some(dialed) = self.dialing.join_next() => match dialed {
                    Ok(Ok(channel)) => {
                        self.hear();
                        // The supervisor's answers to these are lost.
                        self.rejoins.clear();
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
                    Ok(Ok(incarnation)) => {
                        self.incarnation = incarnation;
                        FromServer::CaughtUp { incarnation, address: server.address() }
                    }
                    Ok(Err(reason)) => return Parting::GaveUp(reason),
                    // A new channel gets a new invitation to return.
                    Err(_) => {
                        self.dial_again();
                        continue;
                    }
                },
                Some(caught_up) = self.catching_up_again.join_next() => match caught_up {
                    Ok(true) => FromServer::CaughtUp { incarnation: self.incarnation, address: server.address() },
                    _ => continue,
                },
                RejoinRequest { node, host, answer } = server.next_rejoin() => {
                    self.last_rejoin += 1;
                    // A user who no longer waits needs no answer.
                    self.rejoins.retain(|_, answer| !answer.is_closed());
                    self.rejoins.insert(self.last_rejoin, answer);
                    FromServer::Rejoin { number: self.last_rejoin, node: node.0, host }
                }
                _ = ticks.tick() => {
                    if server.has_begun() {
                        if !server.tick() {
                            self.silent_ticks = 0;
                            continue;
                        }
                        self.dial_if_silent();
                    } else {
                        start_ticks_left = start_ticks_left.saturating_sub(1);
                    }
                    if server.tenure().is_over() || start_ticks_left == 0 {
                        return parting("no heartbeat came from the supervisor");
                    }
                    FromServer::Alive
                }
            };
            let Some(connected) = &mut self.connected else {
                self.rejoins.clear();
                continue;
            };
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
            FromSupervisor::Round(round) => return Some(FromServer::Heard(server.take_round(&round))),
            FromSupervisor::Roster { addresses, agreement } => {
                let joined = server.join(&addresses, agreement).await;
                return Some(joined.map_or_else(failed, |fallen_back| FromServer::Met { fallen_back }));
            }
            FromSupervisor::Agree(agreement) => {
                return Some(server.agree(agreement).await.map_or_else(failed, |()| FromServer::Ready));
            }
            FromSupervisor::Change(change) => {
                if server.change_roster(&change) {
                    self.new_since = None;
                    // A dataset may have appeared after this node caught up and before it was a member again.
                    let server = server.clone();
                    self.catching_up_again = JoinSet::new();
                    self.catching_up_again.spawn(async move { server.catch_up_again().await });
                }
            }
            FromSupervisor::Return { incarnation, change } => self.catch_up(incarnation, change),
            FromSupervisor::Replace { addresses, agreement, incarnation, change } => {
                server.take_place(&addresses, agreement);
                self.incarnation = incarnation;
                self.new_since = Some(Instant::now());
                self.catch_up(incarnation, change);
            }
            FromSupervisor::Rejoined { number, outcome } => {
                if let Some(request) = self.rejoins.remove(&number) {
                    // The command that asked may have been interrupted.
                    let _ = request.send(outcome);
                }
            }
            FromSupervisor::JoinAs { .. } | FromSupervisor::Surplus | FromSupervisor::End => {}
        }
        None
    }

    /// Catches up with the session, in as many attempts as it takes. The pauses between them grow. A new server gives up in the end:
    /// the room that it may take was measured when it started, so another one may find more.
    fn catch_up(&mut self, incarnation: u32, change: RosterChange) {
        let (server, new_since) = (self.server.clone(), self.new_since);
        let Deadlines { progress_interval, catch_up, .. } = self.dialer.deadlines;
        self.catching_up = JoinSet::new();
        self.catching_up.spawn(async move {
            server.change_roster(&change);
            let mut pause = progress_interval;
            loop {
                let Err(error) = server.catch_up().await else { return Ok(incarnation) };
                if new_since.is_some_and(|since| since.elapsed() + pause > catch_up) {
                    return Err(format!("its new server cannot catch up with the session: {error}"));
                }
                tracing::warn!(%error, seconds = pause.as_secs_f64(), "cannot catch up with the session; trying again");
                sleep(pause).await;
                pause = (pause * 2).min(catch_up);
            }
        });
    }

    /// Notes that the supervisor can be heard. A dial that has begun because it was silent is not needed anymore.
    fn hear(&mut self) {
        self.silent_ticks = 0;
        self.dialing = JoinSet::new();
    }

    /// Lets a tick pass without a word of the supervisor. After some of them, a new channel is dialed: when a link that was down is
    /// up again, a new connection is made at once, while TCP may take as long again to send on the old one what was lost.
    fn dial_if_silent(&mut self) {
        let Deadlines { peer_lost, lease_interval, .. } = self.dialer.deadlines;
        self.silent_ticks += 1;
        let is_silent = self.silent_ticks > peer_lost.as_millis() / lease_interval.as_millis().max(1);
        if is_silent && self.connected.is_some() && self.dialing.is_empty() {
            self.dialing.spawn(self.dialer.clone().dial());
        }
    }

    fn dial_again(&mut self) {
        // The supervisor's answers to these are lost.
        self.rejoins.clear();
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
