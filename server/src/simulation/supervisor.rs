//! The supervisor of a simulated session, and the servers' side of its control channels.
//!
//! [`Supervision`] and each server's tenure are the production rules; here they are driven by the simulated clock. The code around
//! them does what `supervisor::lease` and `serve::follow` do in the crate `dayfly-launch`. Instructions travel over the simulated
//! network, in order on each channel, and are lost with their channel. So do rounds of renewals along a tree of servers, which some
//! sessions have. Direct heartbeats and renewals do not: in each tick, a server is heard and its lease is renewed if its channel is
//! open at that moment.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use dayfly_meta::id::NodeId;
use dayfly_meta::roster::{LeaseRound, RosterChange};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};

use super::net::{Net, SUPERVISOR};
use super::planted::Planted;
use crate::membership::{Changes, Greeting, LeaseTree, Patience, Renewals, Supervision};
use crate::{CatchUpError, Node};

/// How long a server waits before it dials again because it could not catch up.
const RETRY: Duration = Duration::from_millis(500);

/// What the supervisor tells a server.
enum Instruction {
    Change(RosterChange),
    Return { incarnation: u32, change: RosterChange },
}

/// A server, as the supervisor knows it and as it knows itself.
struct Member {
    server: Arc<Node>,
    channel: Option<Channel>,
    /// The incarnation that the server believes to be.
    incarnation: u32,
    /// Instructions under way, each with the number of its channel.
    instructions: mpsc::UnboundedSender<(u64, Instruction)>,
}

struct Channel {
    number: u64,
    /// The membership epoch that the server has been told of.
    told_epoch: u32,
}

struct State {
    supervision: Supervision,
    tree: Option<LeaseTree>,
    members: Vec<Member>,
    last_channel: u64,
    counts: Counts,
}

/// How often members have changed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    pub(super) losses: u64,
    pub(super) returns: u64,
    pub(super) takeovers: u64,
}

/// The supervisor. It ends when it is dropped.
pub(super) struct Supervisor {
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

pub(super) struct Shared {
    net: Arc<Net>,
    bug: Option<Planted>,
    state: Mutex<State>,
    /// The node that has returned last.
    returned: watch::Sender<Option<NodeId>>,
}

impl Supervisor {
    /// Supervises servers that have joined their session. `tree_width` is the width of the tree along which leases are renewed.
    pub(super) fn start(net: Arc<Net>, servers: &[Arc<Node>], tree_width: Option<u16>, bug: Option<Planted>) -> Self {
        let addresses: Vec<_> = servers.iter().map(|server| server.address()).collect();
        let (mut members, mut queues) = (Vec::new(), Vec::new());
        for (server, number) in servers.iter().zip(0..) {
            let (instructions, queue) = mpsc::unbounded_channel();
            let channel = Some(Channel { number, told_epoch: 0 });
            members.push(Member { server: server.clone(), channel, incarnation: 0, instructions });
            queues.push(queue);
        }
        let supervision = Supervision::new(&addresses, Patience::new(&net.deadlines));
        let tree = tree_width.map(LeaseTree::new);
        let state = State { supervision, tree, last_channel: members.len() as u64, members, counts: Counts::default() };
        let shared = Arc::new(Shared { net, bug, state: Mutex::new(state), returned: watch::Sender::default() });
        let mut tasks = JoinSet::new();
        tasks.spawn(shared.clone().supervise());
        for (node, queue) in (0..).map(NodeId).zip(queues) {
            tasks.spawn(shared.clone().follow(node, queue));
        }
        Self { shared, _tasks: tasks }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Waits until a node has returned.
    pub(super) async fn returned(&self) -> NodeId {
        let mut returned = self.shared.returned.subscribe();
        let node = *returned.wait_for(Option::is_some).await.expect("the sender lives as long as this");
        node.expect("waited for")
    }

    /// Returns how often members have changed.
    pub(super) fn counts(&self) -> Counts {
        self.shared.state().counts
    }

    /// Returns the promises that are broken once no fault is left: all servers that have not ended are members, and know it.
    pub(super) fn broken(&self) -> Vec<String> {
        let state = self.shared.state();
        let roster = state.supervision.roster();
        let mut broken = Vec::new();
        for (node, member) in (0..).map(NodeId).zip(&state.members) {
            let is_running = !self.shared.net.health(node).is_killed;
            if roster.is_live(node) != is_running {
                broken.push(format!("node {node} runs: {is_running}, but is a member: {}", !is_running));
            }
            let known = member.server.parts.peers.roster();
            if is_running && *known != *roster {
                broken.push(format!("node {node} knows epoch {} instead of {}", known.epoch(), roster.epoch()));
            }
        }
        broken
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    async fn supervise(self: Arc<Self>) {
        let mut ticks = interval(self.net.deadlines.lease_interval);
        // The first tick is over at once.
        ticks.tick().await;
        let mut rounds = JoinSet::new();
        loop {
            ticks.tick().await;
            let (ended, round) = self.tick();
            for node in ended {
                self.net.note(&format!("the lease of node {node} ends"));
                self.net.change_node(node, |health| health.is_killed = true);
            }
            // This ends what is left of the round before.
            rounds.shutdown().await;
            if let Some((root, round)) = round {
                rounds.spawn(self.clone().send_round(root, round));
            }
        }
    }

    async fn send_round(self: Arc<Self>, root: NodeId, round: LeaseRound) {
        let (channel, server) = {
            let state = self.state();
            (state.channel(root), state.members[root.index()].server.clone())
        };
        self.net.travel(SUPERVISOR, root, 0, "round").await;
        if self.net.health(root).is_killed || self.state().channel(root) != channel {
            return;
        }
        let heard = server.take_round(&round);
        self.net.travel(root, SUPERVISOR, 0, "heard").await;
        let mut state = self.state();
        if state.channel(root) == channel {
            heard.into_iter().for_each(|node| state.supervision.reported(NodeId(node)));
        }
    }

    /// Lets one interval pass. Returns the nodes whose servers end, and the round of renewals for the root.
    fn tick(&self) -> (Vec<NodeId>, Option<(NodeId, LeaseRound)>) {
        let mut state = self.state();
        let nodes = (0..state.members.len() as u16).map(NodeId);
        let is_running = |node: &NodeId| !self.net.health(*node).is_killed && !self.net.health(*node).is_frozen;
        let speaking: Vec<NodeId> =
            nodes.clone().filter(is_running).filter(|node| state.members[node.index()].server.tick()).collect();
        for node in nodes.clone() {
            if self.net.health(node).is_killed {
                state.close(node);
            } else if speaking.contains(&node)
                && state.members[node.index()].channel.is_some()
                && self.net.is_open(node, SUPERVISOR)
            {
                if let Some(tree) = &mut state.tree {
                    tree.spoke(node);
                }
                let greeting = state.supervision.heard(node);
                state.greet(node, greeting);
            }
        }
        let coordinator = state.supervision.roster().coordinator();
        let changes = state.supervision.tick();
        if changes != Changes::default() {
            self.net.note(&format!("{changes:?}"));
            state.counts.losses += changes.lost.len() as u64;
            state.counts.returns += changes.returned.len() as u64;
            if let Some(node) = changes.returned.first() {
                self.returned.send_replace(Some(*node));
            }
            state.counts.takeovers += u64::from(state.supervision.roster().coordinator() != coordinator);
        }
        let change = state.supervision.change();
        for node in nodes.clone() {
            let is_deaf = self.bug == Some(Planted::UntoldChange) && node == NodeId(1);
            let is_told = state.supervision.is_renewed(node);
            let is_behind = state.members[node.index()].channel.as_ref().is_some_and(|channel| channel.told_epoch < change.epoch);
            if is_behind && is_told && !is_deaf {
                state.send(node, change.epoch, Instruction::Change(change.clone()));
            }
        }
        let State { supervision, tree, members, .. } = &mut *state;
        let Renewals { round, direct } = match tree {
            Some(tree) => tree.next_round(supervision, |node| members[node.index()].channel.is_some()),
            None => Renewals { round: None, direct: nodes.clone().filter(|&node| supervision.is_renewed(node)).collect() },
        };
        let is_over = |node: &NodeId| {
            let is_reached = members[node.index()].channel.is_some() && self.net.is_open(SUPERVISOR, *node);
            let mut tenure = members[node.index()].server.tenure();
            if is_reached && direct.contains(node) {
                tenure.renew();
            }
            tenure.is_over() || supervision.is_over()
        };
        (nodes.filter(is_running).filter(is_over).collect(), round)
    }

    /// Breaks a server's control channel. The server dials again after some time.
    pub(super) async fn break_channel(&self, node: NodeId, redialed_after: Duration) {
        self.state().close(node);
        sleep(redialed_after).await;
        self.dial(node).await;
    }

    async fn dial(&self, node: NodeId) {
        tokio::select! {
            biased;
            () = self.net.travel(node, SUPERVISOR, 0, "resume") => {}
            () = self.net.killed(node) => return,
        }
        let mut state = self.state();
        state.connect(node);
        let incarnation = state.members[node.index()].incarnation;
        let greeting = state.supervision.dialed(node, incarnation);
        state.greet(node, greeting);
    }

    async fn tell_caught_up(&self, node: NodeId, server: &Node) {
        let (channel, incarnation) = {
            let state = self.state();
            (state.channel(node), state.members[node.index()].incarnation)
        };
        self.net.travel(node, SUPERVISOR, 0, "caught up").await;
        let mut state = self.state();
        if channel.is_some() && state.channel(node) == channel {
            state.supervision.caught_up(node, incarnation, server.address());
        }
    }

    /// Carries out the supervisor's instructions on a server.
    async fn follow(self: Arc<Self>, node: NodeId, mut queue: mpsc::UnboundedReceiver<(u64, Instruction)>) {
        let server = self.state().members[node.index()].server.clone();
        let mut catching_up: JoinSet<Option<u32>> = JoinSet::new();
        let mut catching_up_again: JoinSet<bool> = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                Some((channel, instruction)) = queue.recv() => {
                    self.net.travel(SUPERVISOR, node, 0, "instruction").await;
                    if self.state().channel(node) != Some(channel) {
                        continue;
                    }
                    match instruction {
                        Instruction::Change(change) => {
                            if server.change_roster(&change) {
                                let (server, bug) = (server.clone(), self.bug);
                                catching_up_again = JoinSet::new();
                                catching_up_again.spawn(async move {
                                    bug == Some(Planted::HastyReturn) || server.catch_up_again().await
                                });
                            }
                        }
                        Instruction::Return { incarnation, change } => {
                            let (server, bug) = (server.clone(), self.bug);
                            catching_up = JoinSet::new();
                            catching_up.spawn(async move {
                                server.change_roster(&change);
                                let caught_up = catch_up(&server, bug).await;
                                if caught_up.is_err() {
                                    sleep(RETRY).await;
                                }
                                caught_up.is_ok().then_some(incarnation)
                            });
                        }
                    }
                }
                Some(caught_up) = catching_up.join_next() => match caught_up {
                    Ok(Some(incarnation)) => {
                        self.state().members[node.index()].incarnation = incarnation;
                        self.tell_caught_up(node, &server).await;
                    }
                    _ => {
                        self.state().close(node);
                        self.dial(node).await;
                    }
                },
                Some(caught_up) = catching_up_again.join_next() => {
                    if let Ok(true) = caught_up {
                        self.tell_caught_up(node, &server).await;
                    }
                }
            }
        }
    }
}

async fn catch_up(server: &Node, bug: Option<Planted>) -> Result<(), CatchUpError> {
    match bug {
        Some(Planted::HastyReturn) => Ok(()),
        _ => server.catch_up().await,
    }
}

impl State {
    /// Returns the number of a server's channel.
    fn channel(&self, node: NodeId) -> Option<u64> {
        self.members[node.index()].channel.as_ref().map(|channel| channel.number)
    }

    fn connect(&mut self, node: NodeId) {
        self.last_channel += 1;
        self.members[node.index()].channel = Some(Channel { number: self.last_channel, told_epoch: 0 });
    }

    fn close(&mut self, node: NodeId) {
        if self.members[node.index()].channel.take().is_some() {
            self.supervision.closed(node);
        }
    }

    fn greet(&mut self, node: NodeId, greeting: Greeting) {
        if let Greeting::Return { incarnation } = greeting {
            let change = self.supervision.change();
            self.send(node, change.epoch, Instruction::Return { incarnation, change });
        }
    }

    fn send(&mut self, node: NodeId, epoch: u32, instruction: Instruction) {
        let member = &mut self.members[node.index()];
        if let Some(channel) = &mut member.channel {
            channel.told_epoch = epoch;
            // The server's side ends only with the session.
            let _ = member.instructions.send((channel.number, instruction));
        }
    }
}
