//! The lease that a supervisor holds over its servers: heartbeats in both directions, until the session ends.
//!
//! [`Supervision`] decides who is a member; this module tells it what happens on the control channels, and tells the servers what it
//! decided. [`Replacements`] decides when a new server starts in the place of a lost one.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{LEASE_TREE_NODES, TREE_WIDTH};
use dayfly_server::channel::{Channel, Receiver, Sender};
use dayfly_server::{Agreement, Changes, Greeting, LeaseTree, Loss, Patience, Renewals, Supervision};
use futures_util::future::join_all;
use nix::sys::signal::Signal;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::newcomer::{self, Candidate, Dialed};
use super::replacement::{Answer, Asker, Replacements};
use super::start::{Member, StartRequest, StartedSession, local_address, receive_from_server};
use crate::control::{self, FromServer, FromSupervisor};
use crate::ended::Ended;
use crate::folder_watch::gone_message;
use crate::node_names::host_index;
use crate::processes::{Event, Exit, LauncherProcesses};

/// Messages of servers that wait to be handled.
const MESSAGES_WAITING_MAX: usize = 256;
/// Servers that have dialed again and have not said who they are.
const DIALERS_MAX: usize = 1024;

/// Renews the lease of all members until they have ended or are told to end.
///
/// Returns a reason if the session is lost because something that it needs is gone: a watched file
/// here (`gone`), something on a node, whose server reports it, or the last server.
pub(super) async fn hold(
    session: StartedSession,
    request: StartRequest,
    processes: &mut LauncherProcesses,
    ended: Ended,
    mut ending: oneshot::Receiver<()>,
    mut gone: impl Future<Output = PathBuf> + Unpin,
) -> Option<String> {
    let StartedSession { members, addresses, mut listener, agreement, own_address } = session;
    let mut looking = pin!(ended.clone().look_always());
    let mut lease = Lease::new(members, addresses, agreement, own_address, request, ended);
    let mut ticks = interval(lease.deadlines.lease_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !lease.is_over() {
        tokio::select! {
            _ = &mut ending => {
                lease.send_to_all(&FromSupervisor::End).await;
                return None;
            }
            path = &mut gone => {
                lease.send_to_all(&FromSupervisor::End).await;
                return Some(gone_message(&path));
            }
            Some(message) = lease.messages.recv() => {
                if let Err(reason) = lease.handle(message, processes).await {
                    lease.send_to_all(&FromSupervisor::End).await;
                    return Some(reason);
                }
            }
            channel = listener.accept() => lease.dialed(channel),
            Some(Ok(Some(dialed))) = lease.dialers.join_next() => lease.use_dialed(dialed).await,
            () = &mut looking => {}
            _ = ticks.tick() => lease.tick(processes).await,
            event = processes.next() => match event {
                Event::Line(line) => lease.replacements.request().notices.show(line),
                Event::Exit(exit) => lease.process_exited(&exit),
            },
        }
    }
    // Servers that stand still or are cut off have not heard of the end.
    lease.send_to_all(&FromSupervisor::End).await;
    lease.why_over()
}

/// What happened on the control channel of a member. Channels have numbers, because a member may have dialed again by the time that
/// the end of its old channel is noticed.
struct Message {
    node: NodeId,
    channel: u64,
    what: Result<FromServer, String>,
}

/// A member's name, and the channel to its server.
struct Supervised {
    name: String,
    /// The host as the list of hosts names it.
    host: String,
    channel: Option<SupervisedChannel>,
    /// Why its channel was closed last.
    closed: String,
    /// The signal that has ended its last server.
    signal: Option<Signal>,
}

struct SupervisedChannel {
    number: u64,
    sender: Sender,
    /// The membership epoch that the server has been told of.
    told_epoch: u32,
}

struct Lease {
    supervision: Supervision,
    /// `None` if the session is small enough for a message to each server.
    tree: Option<LeaseTree>,
    members: Vec<Supervised>,
    /// The roster with which the session began.
    addresses: Vec<SocketAddr>,
    agreement: Agreement,
    /// Where servers on this machine listen for peers.
    own_address: Option<IpAddr>,
    replacements: Replacements,
    deadlines: Deadlines,
    last_channel: u64,
    /// The member that was lost last, and why; `None` if its server was told to end.
    last_loss: Option<(String, String)>,
    /// What is known about who has ended the session. Once somebody has, servers that die before they have heard of it, or because they
    /// stand still, are then no loss.
    ended: Ended,
    messages: mpsc::Receiver<Message>,
    message_sender: mpsc::Sender<Message>,
    /// One task for each channel. They end with the lease.
    receivers: JoinSet<()>,
    dialers: JoinSet<Option<Dialed>>,
}

impl Lease {
    fn new(
        members: Vec<Member>,
        addresses: Vec<SocketAddr>,
        agreement: Agreement,
        own_address: Option<IpAddr>,
        request: StartRequest,
        ended: Ended,
    ) -> Self {
        let deadlines = request.invitation.settings.deadlines;
        let (message_sender, messages) = mpsc::channel(MESSAGES_WAITING_MAX);
        let width = request.lease_tree_width.or((addresses.len() > LEASE_TREE_NODES).then_some(TREE_WIDTH as u16));
        let capacities = members.iter().map(|member| member.capacity).collect();
        let mut lease = Self {
            tree: width.map(LeaseTree::new),
            supervision: Supervision::new(&addresses, Patience::new(&deadlines)),
            members: Vec::new(),
            addresses,
            agreement,
            own_address,
            replacements: Replacements::new(request, capacities),
            deadlines,
            last_channel: 0,
            last_loss: None,
            ended,
            messages,
            message_sender,
            receivers: JoinSet::new(),
            dialers: JoinSet::new(),
        };
        for (node, Member { name, host, sender, receiver, .. }) in (0..).map(NodeId).zip(members) {
            let channel = lease.receive(node, sender, receiver);
            lease.members.push(Supervised { name, host, channel: Some(channel), closed: String::new(), signal: None });
        }
        lease
    }

    fn is_over(&self) -> bool {
        self.supervision.is_over() || self.ended.is_known() && self.supervision.is_over_once_ended()
    }

    /// Returns why the session is over, unless somebody has ended its servers.
    fn why_over(&self) -> Option<String> {
        let (last, reason) = self.last_loss.as_ref().filter(|_| !self.ended.is_known())?;
        Some(format!("all servers of the session are lost, and its datasets with them; the last one was {last}: {reason}"))
    }

    /// Starts to receive messages on a channel.
    fn receive(&mut self, node: NodeId, sender: Sender, mut receiver: Receiver) -> SupervisedChannel {
        self.last_channel += 1;
        let (number, messages) = (self.last_channel, self.message_sender.clone());
        while self.receivers.try_join_next().is_some() {}
        self.receivers.spawn(async move {
            loop {
                let what = receive_from_server(&mut receiver).await;
                let is_last = what.is_err();
                if messages.send(Message { node, channel: number, what }).await.is_err() || is_last {
                    return;
                }
            }
        });
        SupervisedChannel { number, sender, told_epoch: 0 }
    }

    /// Handles what happened on a channel. Fails if the session cannot go on.
    async fn handle(
        &mut self,
        Message { node, channel, what }: Message,
        processes: &mut LauncherProcesses,
    ) -> Result<(), String> {
        let member = &mut self.members[node.index()];
        if member.channel.as_ref().is_none_or(|current| current.number != channel) {
            return Ok(());
        }
        match what {
            Ok(FromServer::Ended { ends_session }) => {
                // The server was told to exit, so the end of its channel, however late, must not look like a death.
                member.channel = None;
                self.last_loss = None;
                if ends_session {
                    self.ended.set();
                }
                self.supervision.ended(node);
            }
            Ok(FromServer::Failed { reason, .. }) => return Err(format!("{}: {reason}", member.name)),
            Ok(FromServer::GaveUp { reason }) => {
                (member.channel, member.closed) = (None, reason.clone());
                self.supervision.closed(node);
                let answer = self.replacements.failed(node, &reason);
                self.answer(answer).await;
            }
            Ok(FromServer::CaughtUp { incarnation, address }) => self.supervision.caught_up(node, incarnation, address),
            Ok(FromServer::Rejoin { number, node: lost, host }) => {
                let answer = self.rejoin(Asker { node, channel, number }, NodeId(lost), host, processes);
                self.answer(answer).await;
            }
            Ok(FromServer::Heard(nodes)) => nodes.into_iter().for_each(|node| self.supervision.reported(NodeId(node))),
            Ok(_) => {
                if let Some(tree) = &mut self.tree {
                    tree.spoke(node);
                }
                let greeting = self.supervision.heard(node);
                self.greet(node, greeting).await;
            }
            Err(reason) => {
                tracing::info!(member = member.name, reason, "a control channel was closed");
                (member.channel, member.closed) = (None, reason);
                self.closed(node);
            }
        }
        Ok(())
    }

    /// Records that a server has closed its control channel. A server that is lost already gets some time to dial again.
    fn closed(&mut self, node: NodeId) {
        self.supervision.closed(node);
        if self.supervision.is_vacant(node) {
            self.replacements.lost(node, &self.members[node.index()].host, self.deadlines.reconnect);
        }
    }

    /// Waits for a server that has dialed to say who it is.
    fn dialed(&mut self, channel: Channel) {
        if self.dialers.len() < DIALERS_MAX {
            self.dialers.spawn(newcomer::greet(channel, self.replacements.request().start_timeout));
        }
    }

    async fn use_dialed(&mut self, dialed: Dialed) {
        match dialed {
            Dialed::Resumed { node, incarnation, channel } => self.resume(node, incarnation, channel).await,
            Dialed::Asking(candidate) => self.consider(candidate).await,
            Dialed::Started { node, address, channel } => self.replace(node, address, channel).await,
            Dialed::Failed { names, node, reason } => {
                let answer = match node {
                    Some(node) => self.replacements.failed(node, &reason),
                    None => self.replacements.failed_on(&names, &reason),
                };
                self.answer(answer).await;
            }
        }
    }

    /// Uses the new channel of a server that has dialed again.
    async fn resume(&mut self, node: NodeId, incarnation: u32, channel: Channel) {
        if node.index() >= self.members.len() {
            return;
        }
        tracing::info!(%node, incarnation, "a server has dialed again");
        let greeting = self.supervision.dialed(node, incarnation);
        if greeting == Greeting::Replaced {
            tracing::info!(%node, incarnation, "another server has taken this server's place");
            return newcomer::dismiss(channel).await;
        }
        self.connect(node, channel);
        self.greet(node, greeting).await;
    }

    fn connect(&mut self, node: NodeId, channel: Channel) {
        let channel = self.receive(node, channel.sender, channel.receiver);
        let member = &mut self.members[node.index()];
        (member.channel, member.signal) = (Some(channel), None);
    }

    /// Records the end of a process that was to start servers, or that is one.
    fn process_exited(&mut self, exit: &Exit) {
        let of_it = self.members.iter_mut().filter(|member| exit.signal.is_some() && exit.hosts.contains(&member.host));
        of_it.for_each(|member| member.signal = exit.signal);
        self.replacements.process_exited(exit);
    }

    async fn greet(&mut self, node: NodeId, greeting: Greeting) {
        if let Greeting::Return { incarnation } = greeting {
            let change = self.supervision.change();
            let epoch = change.epoch;
            self.send(node, &FromSupervisor::Return { incarnation, change }, Some(epoch)).await;
        }
    }

    /// Starts a server in the place of a lost one, because a user asks for it. Returns an answer unless the user has to wait.
    fn rejoin(&mut self, asker: Asker, node: NodeId, host: Option<String>, processes: &mut LauncherProcesses) -> Option<Answer> {
        let refuse = |reason: String| Some(Answer { asker, outcome: Err(reason) });
        let Some(member) = self.members.get(node.index()) else {
            return refuse(format!("node {node} is not a node of this session"));
        };
        if !self.supervision.is_vacant(node) {
            let why = match self.supervision.roster().is_live(node) {
                true => "is not lost",
                false => "has a server that catches up with the session; its log says what it waits for",
            };
            return refuse(format!("{} {why}", member.name));
        }
        let host = host.unwrap_or_else(|| member.host.clone());
        self.replacements.start_for(asker, node, host, processes)
    }

    /// Sends an answer to the server on whose node the user waits for it.
    async fn answer(&mut self, answer: impl IntoIterator<Item = Answer>) {
        for Answer { asker: Asker { node, channel, number }, outcome } in answer {
            let current = self.members.get(node.index()).and_then(|member| member.channel.as_ref());
            if current.is_some_and(|current| current.number == channel) {
                self.send(node, &FromSupervisor::Rejoined { number, outcome }, None).await;
            }
        }
    }

    /// Lets a new server start as the node whose place it is to take. Some launchers start servers on all hosts; only the right one
    /// is used.
    async fn consider(&mut self, candidate: Candidate) {
        let Candidate { node, names, addresses, warnings, channel } = candidate;
        let wanted = self.replacements.host(node).map(|host| vec![host.to_owned()]);
        let is_wanted = wanted.is_some_and(|hosts| host_index(&hosts, &names, &addresses, &|_| true).is_some());
        if !is_wanted || !self.supervision.is_vacant(node) {
            return newcomer::dismiss(channel).await;
        }
        let request = self.replacements.request();
        let name = self.members[node.index()].name.clone();
        for warning in warnings {
            request.notices.show(format_args!("warning: {name}: {warning}"));
        }
        let is_here = channel.far.is_loopback() || channel.far == channel.local;
        let listen = match request.invitation.is_local {
            true => Some(local_address(node.index())),
            false => self.own_address.filter(|_| is_here),
        };
        let preference = request.invitation.settings.transport;
        self.dialers.spawn(newcomer::start(node, listen, preference, channel, request.start_timeout));
    }

    /// Tells a new server to catch up with the session.
    async fn replace(&mut self, node: NodeId, address: SocketAddr, channel: Channel) {
        let Some(incarnation) = self.supervision.replace(node) else {
            return newcomer::dismiss(channel).await;
        };
        tracing::info!(%node, %address, incarnation, "a new server takes the place of a lost one");
        self.connect(node, channel);
        let change = self.supervision.change();
        let epoch = change.epoch;
        let (addresses, agreement) = (self.addresses.clone(), self.agreement.clone());
        self.send(node, &FromSupervisor::Replace { addresses, agreement, incarnation, change }, Some(epoch)).await;
    }

    /// Lets one interval pass: renews leases, tells all servers about changes, and starts new servers.
    async fn tick(&mut self, processes: &mut LauncherProcesses) {
        let Changes { lost, returned } = self.supervision.tick();
        for (node, loss) in lost {
            let Supervised { name, closed, signal, .. } = &self.members[node.index()];
            let reason = match loss {
                Loss::Silent => format!("no heartbeat came from it for {} s", self.deadlines.lost_after.as_secs_f64()),
                Loss::Closed => signal.map_or_else(|| closed.clone(), ended_by),
                Loss::Ended => "its server has ended".to_owned(),
                Loss::Replaced => "another server has taken its place".to_owned(),
            };
            tracing::warn!(member = name, reason, "a server is lost");
            if self.ended.is_known() {
                self.last_loss = None;
                continue;
            }
            self.last_loss = (loss != Loss::Ended).then(|| (name.clone(), reason.clone()));
            self.replacements.request().notices.show(format_args!("{name} is lost: {reason}"));
            if loss == Loss::Closed {
                self.replacements.lost(node, &self.members[node.index()].host, Duration::ZERO);
            }
        }
        for node in returned {
            let name = &self.members[node.index()].name;
            tracing::warn!(member = name, "a server has returned");
            self.replacements.request().notices.show(format_args!("{name} has returned"));
            let answer = self.replacements.joined(node, name);
            self.answer(answer).await;
        }
        let supervision = &self.supervision;
        let answers = self.replacements.tick(|node| supervision.is_vacant(node), processes);
        self.answer(answers).await;
        let change = self.supervision.change();
        let (epoch, change) = (change.epoch, FromSupervisor::Change(change));
        let behind = |member: &Supervised| member.channel.as_ref().is_some_and(|channel| channel.told_epoch < epoch);
        let nodes = (0..).map(NodeId).zip(&self.members);
        let behind: Vec<NodeId> = nodes.filter(|(_, member)| behind(member)).map(|(node, _)| node).collect();
        for node in behind {
            // A server that returns has to know which node it can ask for datasets.
            if self.supervision.is_renewed(node) {
                self.send(node, &change, Some(epoch)).await;
            }
        }
        // A server that accepts no bytes is detected by its silence.
        let (supervision, members) = (&self.supervision, &self.members);
        let renewals = match &mut self.tree {
            Some(tree) => tree.next_round(supervision, |node| members[node.index()].channel.is_some()),
            None => {
                let all = (0..members.len() as u16).map(NodeId);
                Renewals { round: None, direct: all.filter(|&node| supervision.is_renewed(node)).collect() }
            }
        };
        self.send_to(&renewals.direct, &FromSupervisor::Renew).await;
        if let Some((root, round)) = renewals.round {
            self.send_to(&[root], &FromSupervisor::Round(round)).await;
        }
    }

    async fn send(&mut self, node: NodeId, message: &FromSupervisor, epoch: Option<u32>) {
        let Some(channel) = &mut self.members[node.index()].channel else { return };
        if let Some(epoch) = epoch {
            channel.told_epoch = epoch;
        }
        self.send_to(&[node], message).await;
    }

    async fn send_to_all(&mut self, message: &FromSupervisor) {
        let all: Vec<NodeId> = (0..self.members.len() as u16).map(NodeId).collect();
        self.send_to(&all, message).await;
    }

    /// Sends a message to servers. A channel on which a message cannot be sent whole is given up: its server dials again. If the
    /// server has closed the channel, it has probably died.
    async fn send_to(&mut self, nodes: &[NodeId], message: &FromSupervisor) {
        let limit = self.deadlines.lease_interval;
        let wanted: BTreeSet<NodeId> = nodes.iter().copied().collect();
        let members = (0..).map(NodeId).zip(&mut self.members).filter(|(node, _)| wanted.contains(node));
        let sends = members.map(|(node, member)| async move {
            let channel = member.channel.as_mut()?;
            let sent = timeout(limit, control::send(&mut channel.sender, message)).await;
            let (failure, is_closed) = match sent {
                Ok(Ok(())) => return None,
                Ok(Err(error)) => (error.to_string(), is_closed_by_peer(&error)),
                Err(_) => ("it takes no messages".to_owned(), false),
            };
            tracing::info!(member = member.name, failure, "giving up a control channel");
            member.channel = None;
            // Nobody looks at what is received on a channel that has been given up, not even at its end.
            is_closed.then(|| member.closed = failure).map(|()| node)
        });
        let closed: Vec<NodeId> = join_all(sends).await.into_iter().flatten().collect();
        closed.into_iter().for_each(|node| self.closed(node));
    }
}

/// Says that a signal has ended a server.
fn ended_by(signal: Signal) -> String {
    let advice = match signal {
        Signal::SIGKILL => "; if nobody has sent it, look in the kernel log (dmesg) for a lack of memory",
        _ => "",
    };
    format!("{signal} has ended its server{advice}")
}

/// Returns whether a message could not be sent because the other end has closed the connection.
fn is_closed_by_peer(error: &control::ControlError) -> bool {
    matches!(error, control::ControlError::Channel(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset))
}
