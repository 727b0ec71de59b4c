//! The lease that a supervisor holds over its servers: heartbeats in both directions, until the session ends.
//!
//! [`Supervision`] decides who is a member; this module tells it what happens on the control channels, and tells the servers what it
//! decided.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_server::channel::{Channel, Receiver, Sender};
use dayfly_server::{Changes, Greeting, Loss, Patience, Supervision};
use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::start::{Member, StartedSession, receive_from_server};
use crate::control::{self, FromServer, FromSupervisor};
use crate::folder_watch::gone_message;
use crate::notices::Notices;
use crate::processes::LauncherProcesses;

/// Messages of servers that wait to be handled.
const MESSAGES_WAITING_MAX: usize = 256;
/// Servers that have dialed again and have not said who they are.
const DIALERS_MAX: usize = 1024;

/// Renews the lease of all members until they have ended or are told to end.
///
/// Returns a reason if the session is lost because something that it needs is gone: a watched file
/// here (`gone`), or something on a node, whose server reports it.
pub(super) async fn hold(
    session: StartedSession,
    processes: &mut LauncherProcesses,
    deadlines: Deadlines,
    notices: &Notices,
    mut ending: oneshot::Receiver<()>,
    mut gone: impl Future<Output = PathBuf> + Unpin,
) -> Option<String> {
    let StartedSession { members, addresses, mut listener } = session;
    let mut lease = Lease::new(members, &addresses, deadlines, notices);
    let mut ticks = interval(deadlines.lease_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !lease.supervision.is_over() {
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
                if let Err(reason) = lease.handle(message).await {
                    lease.send_to_all(&FromSupervisor::End).await;
                    return Some(reason);
                }
            }
            channel = listener.accept() => lease.dialed(channel),
            Some(Ok(Some((resumed, channel)))) = lease.dialers.join_next() => lease.resume(resumed, channel).await,
            _ = ticks.tick() => lease.tick().await,
            line = processes.line() => notices.show(line),
        }
    }
    None
}

/// What a server that dials again says about itself.
struct Resumed {
    node: NodeId,
    incarnation: u32,
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
    channel: Option<SupervisedChannel>,
    /// Why its channel was closed last.
    closed: String,
}

struct SupervisedChannel {
    number: u64,
    sender: Sender,
    /// The membership epoch that the server has been told of.
    told_epoch: u32,
}

struct Lease<'a> {
    supervision: Supervision,
    members: Vec<Supervised>,
    deadlines: Deadlines,
    notices: &'a Notices,
    last_channel: u64,
    messages: mpsc::Receiver<Message>,
    message_sender: mpsc::Sender<Message>,
    /// One task for each channel. They end with the lease.
    receivers: JoinSet<()>,
    dialers: JoinSet<Option<(Resumed, Channel)>>,
}

impl<'a> Lease<'a> {
    fn new(members: Vec<Member>, addresses: &[SocketAddr], deadlines: Deadlines, notices: &'a Notices) -> Self {
        let (message_sender, messages) = mpsc::channel(MESSAGES_WAITING_MAX);
        let mut lease = Self {
            supervision: Supervision::new(addresses, Patience::new(&deadlines)),
            members: Vec::new(),
            deadlines,
            notices,
            last_channel: 0,
            messages,
            message_sender,
            receivers: JoinSet::new(),
            dialers: JoinSet::new(),
        };
        for (node, Member { name, sender, receiver }) in (0..).map(NodeId).zip(members) {
            let channel = lease.receive(node, sender, receiver);
            lease.members.push(Supervised { name, channel: Some(channel), closed: String::new() });
        }
        lease
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
    async fn handle(&mut self, Message { node, channel, what }: Message) -> Result<(), String> {
        let member = &mut self.members[node.index()];
        if member.channel.as_ref().is_none_or(|current| current.number != channel) {
            return Ok(());
        }
        match what {
            Ok(FromServer::Ended) => self.supervision.ended(node),
            Ok(FromServer::Failed { reason, .. }) => return Err(format!("{}: {reason}", member.name)),
            Ok(FromServer::CaughtUp { incarnation, address }) => self.supervision.caught_up(node, incarnation, address),
            Ok(_) => {
                let greeting = self.supervision.heard(node);
                self.greet(node, greeting).await;
            }
            Err(reason) => {
                tracing::info!(member = member.name, reason, "a control channel was closed");
                (member.channel, member.closed) = (None, reason);
                self.supervision.closed(node);
            }
        }
        Ok(())
    }

    /// Waits for a server that has dialed to say who it is.
    fn dialed(&mut self, mut channel: Channel) {
        if self.dialers.len() >= DIALERS_MAX {
            return;
        }
        let limit = self.deadlines.handshake;
        self.dialers.spawn(async move {
            match timeout(limit, receive_from_server(&mut channel.receiver)).await {
                Ok(Ok(FromServer::Resume { node, incarnation })) => Some((Resumed { node: NodeId(node), incarnation }, channel)),
                // The session has begun without the server that sends this.
                Ok(Ok(FromServer::Hello { .. })) => {
                    let _ = control::send(&mut channel.sender, &FromSupervisor::Surplus).await;
                    None
                }
                _ => None,
            }
        });
    }

    /// Uses the new channel of a server that has dialed again.
    async fn resume(&mut self, Resumed { node, incarnation }: Resumed, channel: Channel) {
        if node.index() >= self.members.len() {
            return;
        }
        tracing::info!(%node, incarnation, "a server has dialed again");
        let Channel { sender, receiver, .. } = channel;
        let channel = self.receive(node, sender, receiver);
        self.members[node.index()].channel = Some(channel);
        let greeting = self.supervision.dialed(node, incarnation);
        self.greet(node, greeting).await;
    }

    async fn greet(&mut self, node: NodeId, greeting: Greeting) {
        if let Greeting::Return { incarnation } = greeting {
            let change = self.supervision.change();
            let epoch = change.epoch;
            self.send(node, &FromSupervisor::Return { incarnation, change }, Some(epoch)).await;
        }
    }

    /// Lets one interval pass: renews leases, and tells all servers about changes.
    async fn tick(&mut self) {
        let Changes { lost, returned } = self.supervision.tick();
        for (node, loss) in lost {
            let Supervised { name, closed, .. } = &self.members[node.index()];
            let reason = match loss {
                Loss::Silent => format!("no heartbeat came from it for {} s", self.deadlines.lost_after.as_secs_f64()),
                Loss::Closed => closed.clone(),
                Loss::Ended => "its server has ended".to_owned(),
                Loss::Replaced => "another server has taken its place".to_owned(),
            };
            tracing::warn!(member = name, reason, "a server is lost");
            self.notices.show(format_args!("{name} is lost: {reason}"));
        }
        for node in returned {
            let name = &self.members[node.index()].name;
            tracing::warn!(member = name, "a server has returned");
            self.notices.show(format_args!("{name} has returned"));
        }
        let change = self.supervision.change();
        let (epoch, change) = (change.epoch, FromSupervisor::Change(change));
        let behind = |member: &Supervised| member.channel.as_ref().is_some_and(|channel| channel.told_epoch < epoch);
        let nodes = (0..).map(NodeId).zip(&self.members);
        let behind: Vec<NodeId> = nodes.filter(|(_, member)| behind(member)).map(|(node, _)| node).collect();
        for node in behind {
            if self.supervision.roster().is_live(node) {
                self.send(node, &change, Some(epoch)).await;
            }
        }
        // A server that accepts no bytes is detected by its silence.
        let renewed: Vec<NodeId> =
            (0..self.members.len() as u16).map(NodeId).filter(|&node| self.supervision.is_renewed(node)).collect();
        self.send_to(&renewed, &FromSupervisor::Renew).await;
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

    /// Sends a message to servers. A channel on which a message cannot be sent whole is given up: its server dials again.
    async fn send_to(&mut self, nodes: &[NodeId], message: &FromSupervisor) {
        let limit = self.deadlines.lease_interval;
        let wanted: BTreeSet<NodeId> = nodes.iter().copied().collect();
        let members = (0..).map(NodeId).zip(&mut self.members).filter(|(node, _)| wanted.contains(node));
        let sends = members.map(|(_, member)| async move {
            let Some(channel) = &mut member.channel else { return };
            let sent = timeout(limit, control::send(&mut channel.sender, message)).await;
            let failure = match sent {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "it takes no messages".to_owned(),
            };
            tracing::info!(member = member.name, failure, "giving up a control channel");
            member.channel = None;
        });
        join_all(sends).await;
    }
}
