//! The world in which the rules are explored.

mod bug;
mod reductions;
mod rosters;
mod successor;

use std::collections::{BTreeSet, HashSet};
use std::sync::Mutex;

use dayfly_meta::id::NodeId;
use dayfly_meta::roster::Roster;
use stateright::{Model, Property};

use super::super::decision::{Decision, Inquiry, Next, Promise, Round};
use super::super::supervision::{Greeting, Patience, Supervision};
use super::super::tenure::Tenure;
pub(super) use bug::Bug;
use rosters::{addresses, deadlines, roster_led_by, roster_with};
use successor::{note_if_gone, take_what_is_shown};

pub(super) const SERVERS: usize = 3;
/// Stands for a coordinator that no longer waits for the answer to its request.
const NOBODY: u16 = u16::MAX;
/// The number of the stage-in.
const STAGE_IN: u64 = 1;
const PATIENCE: Patience = Patience { silent_ticks: 1, closed_ticks: 0, last_ticks: 1 };

/// The part of a stage-in on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Shown {
    /// The node takes no part, or has undone its part.
    Nothing,
    Prepared,
    Visible,
    /// Visible, and the stage-in has ended here.
    Settled,
}

/// What a server does as a coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Role {
    None,
    /// It is ready to coordinate, and has nothing to decide.
    Ready,
    /// The stage-in is prepared on all nodes.
    Preparing,
    Committing(Round),
    Inquiring(Inquiry),
    Ending(Decision, Round),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Server {
    is_running: bool,
    is_stopped: bool,
    /// It is stopped, and a tick has passed without a message from it.
    is_silent: bool,
    is_connected: bool,
    pub(super) roster: Roster,
    promise: Promise,
    tenure: Tenure,
    pub(super) shown: Shown,
    pub(super) incarnation: u32,
    /// The incarnation as which it has been told to return.
    returning_as: Option<u32>,
    /// It is a member again, and has to look once more for datasets.
    has_to_look_again: bool,
    role: Role,
    /// The nodes that have answered a coordinator's commit without knowing the stage-in. It asks them to look for datasets.
    strangers: [bool; SERVERS],
    /// It took the place of a dead server.
    pub(super) is_new: bool,
}

impl Server {
    fn new(roster: Roster) -> Self {
        Self {
            is_running: true,
            is_stopped: false,
            is_silent: false,
            is_connected: true,
            roster,
            promise: Promise::default(),
            tenure: Tenure::new(&deadlines()),
            shown: Shown::Nothing,
            incarnation: 0,
            returning_as: None,
            has_to_look_again: false,
            role: Role::None,
            strangers: [false; SERVERS],
            is_new: false,
        }
    }

    pub(super) fn shows(&self) -> bool {
        matches!(self.shown, Shown::Visible | Shown::Settled)
    }

    /// The process is gone, with all it knew. So all dead servers are the same state.
    fn die(&mut self) {
        *self = Self::new(Roster::new(&addresses()));
        (self.is_running, self.is_connected) = (false, false);
    }

    pub(super) fn is_deciding(&self) -> bool {
        matches!(self.role, Role::Committing(_) | Role::Ending(..))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum What {
    Inquire,
    Commit,
    Abort,
}

/// A request of a coordinator that has not been handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Request {
    from: u16,
    to: u16,
    epoch: u32,
    /// The incarnation of the asked node, as the coordinator knows it.
    incarnation: u32,
    what: What,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) supervision: Supervision,
    pub(super) servers: Vec<Server>,
    requests: BTreeSet<Request>,
    faults_left: u8,
    /// A coordinator has carried out a decision on all nodes.
    pub(super) is_published: bool,
    pub(super) is_aborted: bool,
    pub(super) has_two_rosters_of_an_epoch: bool,
    /// A successor has decided to abort what a member shows.
    pub(super) aborts_what_is_shown: bool,
    /// All that showed what was published have been lost, so nobody can take it from them.
    pub(super) is_gone: bool,
}

/// What users can see of a state: the part of each running server in the stage-in, and whether it was published or aborted.
pub(super) type Outcome = ([Option<Shown>; SERVERS], bool, bool);

impl World {
    fn outcome(&self) -> Outcome {
        let shown = |node: usize| self.servers[node].is_running.then_some(self.servers[node].shown);
        (std::array::from_fn(shown), self.is_published, self.is_aborted)
    }

    /// Returns the live members that know the newest roster and have nothing left to look for.
    pub(super) fn settled_members(&self) -> impl Iterator<Item = &Server> {
        let newest = self.supervision.roster();
        let members = (0..SERVERS as u16).filter(move |&node| newest.is_live(NodeId(node)));
        let is_settled = move |&node: &u16| {
            let server = &self.servers[usize::from(node)];
            let knows = server.roster.epoch() == newest.epoch() || (self.can_be_told(node) && self.is_bystander(node));
            server.is_running && knows && !server.has_to_look_again
        };
        members.filter(is_settled).map(|node| &self.servers[usize::from(node)])
    }

    /// Returns whether the newest roster can reach a server now.
    fn can_be_told(&self, node: u16) -> bool {
        let (server, newest) = (&self.servers[usize::from(node)], self.supervision.roster());
        let listens = server.is_running && !server.is_stopped && server.is_connected;
        listens && server.roster.epoch() < newest.epoch() && self.supervision.is_renewed(NodeId(node))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Action {
    Tick,
    /// The first coordinator begins to publish, if its lease allows it.
    Begin,
    /// The newest roster reaches a server.
    Tell(u16),
    /// A server that lost its channel dials the supervisor.
    Dial(u16),
    /// A returning server catches up.
    CatchUp(u16),
    /// A server that has returned looks again for datasets.
    LookAgain(u16),
    Handle(Request),
    /// A node handles a request, and the link to the coordinator is down before the reply arrives.
    HandleUnheard(Request),
    Kill(u16),
    Stop(u16),
    Continue(u16),
    Cut(u16),
    /// A new server takes the place of a dead one.
    Replace(u16),
}

pub(super) struct Rules {
    pub(super) faults: u8,
    pub(super) bug: Option<Bug>,
    /// Whether the reductions are used.
    pub(super) is_reduced: bool,
    /// What has been seen, if anybody wants to know.
    pub(super) seen: Option<Mutex<HashSet<Outcome>>>,
}

impl Rules {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn tick(&self, world: &mut World) {
        let before = world.supervision.roster().clone();
        drop(world.supervision.tick());
        let after = world.supervision.roster();
        world.has_two_rosters_of_an_epoch |= *after != before && after.epoch() != before.epoch() + 1;
        note_if_gone(world);
        for node in (0..SERVERS as u16).map(NodeId) {
            let server = &mut world.servers[node.index()];
            if !server.is_running || server.is_stopped {
                server.is_silent = server.is_stopped;
                continue;
            }
            server.tenure.tick();
            if !server.is_connected {
                if server.tenure.is_over() {
                    server.die();
                }
                continue;
            }
            let greeting = world.supervision.heard(node);
            self.greet(world, node, greeting);
            let server = &mut world.servers[node.index()];
            if world.supervision.is_renewed(node) {
                server.tenure.renew();
            } else if server.tenure.is_over() {
                server.die();
                world.supervision.closed(node);
            }
        }
    }

    /// A server that was told to return does so.
    fn greet(&self, world: &mut World, node: NodeId, greeting: Greeting) {
        let change = world.supervision.roster().clone();
        let server = &mut world.servers[node.index()];
        match greeting {
            Greeting::Continue => {}
            Greeting::Return { incarnation } => {
                server.returning_as = Some(incarnation);
                server.roster = change;
                if !self.has(Bug::NeverStandsDown) {
                    (server.role, server.strangers) = (Role::None, [false; SERVERS]);
                }
            }
            Greeting::Replaced => server.die(),
        }
    }

    /// A server takes a roster, and begins or ends its term.
    fn take_roster(&self, server: &mut Server, node: NodeId, roster: &Roster) {
        let was_live = server.roster.is_live(node);
        server.roster = roster.clone();
        if !was_live && roster.is_live(node) && !self.has(Bug::LooksOnce) {
            server.has_to_look_again = true;
        }
        let leads = roster.coordinator() == node && roster.is_live(node);
        match server.role {
            Role::None if leads => server.role = Role::Inquiring(Inquiry::default()),
            Role::Ready | Role::Preparing if !leads => server.role = Role::None,
            // The others notice it when they ask what to do next.
            _ => {}
        }
    }

    fn catch_up(&self, world: &mut World, node: usize) -> bool {
        let coordinator = world.servers[node].roster.coordinator().index();
        let promised = if self.has(Bug::AsksOldCoordinator) { 0 } else { world.servers[node].promise.epoch() };
        let epoch = world.servers[node].roster.epoch().max(promised);
        let lists = |server: &Server| {
            let knows = server.roster.epoch() >= epoch || self.has(Bug::ListsTooEarly);
            let leads = server.roster.coordinator().index() == coordinator && server.roster.is_live(NodeId(coordinator as u16));
            server.is_running
                && !server.is_stopped
                && knows
                && leads
                && matches!(server.role, Role::Ready | Role::Preparing | Role::Committing(_))
        };
        if coordinator == node {
            return lists(&world.servers[node]);
        }
        if !lists(&world.servers[coordinator]) {
            return false;
        }
        let is_listed = world.servers[coordinator].shows();
        let server = &mut world.servers[node];
        server.shown = match (is_listed, server.shown) {
            (true, _) => Shown::Settled,
            (false, shown) if self.has(Bug::KeepsWhatIsGone) => shown,
            (false, _) => Shown::Nothing,
        };
        true
    }

    /// Lets all coordinators do what they can. A coordinator that does it later is like one whose roster or whose requests are late.
    fn lead_all(&self, world: &mut World) {
        while (0..SERVERS as u16).any(|node| {
            let server = &world.servers[usize::from(node)];
            server.is_running && !server.is_stopped && self.lead(world, node)
        }) {}
    }

    /// Does the next thing that a coordinator does. Returns `false` if there is nothing to do.
    fn lead(&self, world: &mut World, node: u16) -> bool {
        let own = NodeId(node);
        let server = &mut world.servers[own.index()];
        let roster = match self.has(Bug::NeverStandsDown) && server.roster.coordinator() != own {
            true => roster_led_by(own, &server.roster),
            false => server.roster.clone(),
        };
        let (next, what) = match &server.role {
            Role::Committing(round) => (round.next(own, &roster), What::Commit),
            Role::Ending(Decision::Commit, round) => (round.next(own, &roster), What::Commit),
            Role::Ending(Decision::Abort, round) => (round.next(own, &roster), What::Abort),
            Role::Inquiring(inquiry) if self.has(Bug::AsksItself) && inquiry.has_answered(own) => (Next::Done, What::Inquire),
            Role::Inquiring(inquiry) => (inquiry.next(own, &roster), What::Inquire),
            Role::None | Role::Ready | Role::Preparing => return false,
        };
        match next {
            Next::StandDown => {
                let leads = server.roster.coordinator() == own && server.roster.is_live(own);
                server.role = if leads { Role::Inquiring(Inquiry::default()) } else { Role::None };
                server.strangers = [false; SERVERS];
                true
            }
            Next::Ask { epoch, nodes } => {
                let nodes = match self.has(Bug::AsksItself) && what == What::Inquire {
                    true => vec![own],
                    false => nodes,
                };
                let before = world.requests.len();
                let incarnation = |to| roster.member(to).map_or(0, |member| member.incarnation);
                let request = |to: NodeId| Request { from: node, to: to.0, epoch, incarnation: incarnation(to), what };
                world.requests.extend(nodes.into_iter().map(request));
                world.requests.len() > before
            }
            Next::Done => {
                match std::mem::replace(&mut server.role, Role::Ready) {
                    Role::Inquiring(inquiry) => {
                        let decision = inquiry.decisions().next().map(|(_, decision)| decision);
                        let Some(decision) = decision else {
                            take_what_is_shown(world, own, &roster);
                            return true;
                        };
                        let decision = if self.has(Bug::AbortsAll) { Decision::Abort } else { decision };
                        server.role = Role::Ending(decision, Round::default());
                        let is_shown = roster.live().any(|node| world.servers[node.index()].shows());
                        world.aborts_what_is_shown |= decision == Decision::Abort && is_shown;
                    }
                    Role::Ending(Decision::Abort, _) => world.is_aborted = true,
                    role => {
                        world.is_published = true;
                        let server = &mut world.servers[own.index()];
                        if server.shown == Shown::Visible {
                            server.shown = Shown::Settled;
                        }
                        let strangers = std::mem::take(&mut server.strangers);
                        for node in roster.live().filter(|node| strangers[node.index()]) {
                            let server = &mut world.servers[node.index()];
                            server.has_to_look_again |= server.is_running;
                        }
                        if matches!(role, Role::Ending(..)) {
                            take_what_is_shown(world, own, &roster);
                        }
                        note_if_gone(world);
                    }
                }
                true
            }
        }
    }

    /// A node handles a request, and the coordinator gets the answer.
    fn handle(&self, world: &mut World, request: Request, is_heard: bool) {
        world.requests.remove(&request);
        // A connection ends with its server. A coordinator that still waits for the reply asks the next server, too.
        if !world.servers[usize::from(request.to)].is_running {
            return;
        }
        let server = &mut world.servers[usize::from(request.to)];
        // As in `NodeStageIns::admit`: the roster counts, too.
        let _ = server.promise.admit(server.roster.epoch());
        if server.promise.admit(request.epoch).is_err() && !self.has(Bug::OldEpochs) {
            return;
        }
        let mut found = (vec![], vec![]);
        let is_stranger = server.shown == Shown::Nothing;
        match (request.what, server.shown) {
            (What::Inquire, shown) => {
                if matches!(shown, Shown::Prepared | Shown::Visible) {
                    found.0.push(STAGE_IN);
                }
                if server.shows() {
                    found.1.push(STAGE_IN);
                }
            }
            (What::Commit, Shown::Prepared) => server.shown = Shown::Visible,
            // A node that has settled the stage-in no longer knows it.
            (What::Abort, Shown::Prepared | Shown::Visible) => server.shown = Shown::Nothing,
            _ => {}
        }
        if !is_heard {
            return;
        }
        let (own, to) = (usize::from(request.from), NodeId(request.to));
        let incarnation = if self.has(Bug::CountsOldAnswers) { u32::MAX } else { request.incarnation };
        let asked = roster_with(to, incarnation);
        let Some(coordinator) = world.servers.get_mut(own) else { return };
        match (&mut coordinator.role, request.what) {
            (Role::Committing(round) | Role::Ending(Decision::Commit, round), What::Commit) => {
                round.answered(to, &asked);
                coordinator.strangers[to.index()] = is_stranger;
            }
            (Role::Ending(Decision::Abort, round), What::Abort) => round.answered(to, &asked),
            (Role::Inquiring(inquiry), What::Inquire) => inquiry.answered((to, &asked), found.0, found.1),
            _ => {}
        }
    }
}

impl Model for Rules {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let server = |node: usize| {
            let role = if node == 0 { Role::Preparing } else { Role::None };
            Server { shown: Shown::Prepared, role, ..Server::new(Roster::new(&addresses())) }
        };
        vec![World {
            supervision: Supervision::new(&addresses(), PATIENCE),
            servers: (0..SERVERS).map(server).collect(),
            requests: BTreeSet::new(),
            faults_left: self.faults,
            is_published: false,
            is_aborted: false,
            has_two_rosters_of_an_epoch: false,
            aborts_what_is_shown: false,
            is_gone: false,
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.supervision.is_over() {
            // The supervisor ends the session.
            return;
        }
        actions.push(Action::Tick);
        if world.servers[0].role == Role::Preparing && world.servers[0].is_running && !world.servers[0].is_stopped {
            actions.push(Action::Begin);
        }
        let is_stopped = |request: &&Request| world.servers[usize::from(request.to)].is_stopped;
        actions.extend(world.requests.iter().filter(|request| !is_stopped(request)).map(|&request| Action::Handle(request)));
        if world.faults_left > 0 {
            let has_link = |request: &&Request| !is_stopped(request) && request.from != request.to && request.from != NOBODY;
            actions.extend(world.requests.iter().filter(has_link).map(|&request| Action::HandleUnheard(request)));
        }
        for (node, server) in (0_u16..).zip(&world.servers) {
            if !server.is_running {
                if world.supervision.is_vacant(NodeId(node)) {
                    actions.push(Action::Replace(node));
                }
                continue;
            }
            if world.faults_left > 0 {
                actions.push(Action::Kill(node));
            }
            if server.is_stopped {
                if server.is_silent || !self.is_reduced {
                    actions.push(Action::Continue(node));
                }
                continue;
            }
            if !server.is_connected {
                let is_noticed = server.incarnation > 0 || !world.supervision.is_renewed(NodeId(node));
                if is_noticed || !self.is_reduced {
                    actions.push(Action::Dial(node));
                }
            } else if world.can_be_told(node) && !(self.is_reduced && world.is_bystander(node)) {
                actions.push(Action::Tell(node));
            }
            if server.returning_as.is_some() {
                actions.push(Action::CatchUp(node));
            }
            if server.has_to_look_again {
                actions.push(Action::LookAgain(node));
            }
            if world.faults_left > 0 {
                actions.push(Action::Stop(node));
                if server.is_connected {
                    actions.push(Action::Cut(node));
                }
            }
        }
    }

    fn next_state(&self, last: &World, action: Action) -> Option<World> {
        let mut world = last.clone();
        match action {
            Action::Tick => self.tick(&mut world),
            Action::Tell(node) => {
                let roster = world.supervision.roster().clone();
                self.take_roster(&mut world.servers[usize::from(node)], NodeId(node), &roster);
            }
            Action::Dial(node) => {
                world.servers[usize::from(node)].is_connected = true;
                let greeting = world.supervision.dialed(NodeId(node), world.servers[usize::from(node)].incarnation);
                self.greet(&mut world, NodeId(node), greeting);
            }
            Action::CatchUp(node) => {
                let index = usize::from(node);
                if !self.catch_up(&mut world, index) {
                    return None;
                }
                let server = &mut world.servers[index];
                if let Some(incarnation) = server.returning_as.take() {
                    server.incarnation = incarnation;
                    if server.is_connected {
                        world.supervision.caught_up(NodeId(node), incarnation, addresses()[index]);
                    }
                }
            }
            Action::LookAgain(node) => {
                if !self.catch_up(&mut world, usize::from(node)) {
                    return None;
                }
                let server = &mut world.servers[usize::from(node)];
                server.has_to_look_again = false;
                if server.is_connected {
                    world.supervision.caught_up(NodeId(node), server.incarnation, addresses()[usize::from(node)]);
                }
            }
            Action::Begin => {
                let server = &mut world.servers[0];
                server.role = match server.tenure.may_publish() {
                    true => Role::Committing(Round::default()),
                    false => Role::Ready,
                };
            }
            Action::Handle(request) => {
                self.handle(&mut world, request, true);
            }
            Action::HandleUnheard(request) => {
                self.handle(&mut world, request, false);
                world.faults_left -= 1;
            }
            Action::Kill(node) => {
                world.servers[usize::from(node)].die();
                world.supervision.closed(NodeId(node));
                world.faults_left -= 1;
            }
            Action::Stop(node) => {
                world.servers[usize::from(node)].is_stopped = true;
                world.faults_left -= 1;
            }
            Action::Continue(node) => {
                let server = &mut world.servers[usize::from(node)];
                (server.is_stopped, server.is_silent) = (false, false);
            }
            Action::Cut(node) => {
                world.servers[usize::from(node)].is_connected = false;
                world.supervision.closed(NodeId(node));
                world.faults_left -= 1;
            }
            Action::Replace(node) => {
                let incarnation = world.supervision.replace(NodeId(node))?;
                let roster = world.supervision.roster().clone();
                let returning_as = Some(incarnation);
                world.servers[usize::from(node)] = Server { incarnation, returning_as, is_new: true, ..Server::new(roster) };
            }
        }
        self.lead_all(&mut world);
        if self.is_reduced {
            self.forget_what_is_idle(&mut world);
        }
        if let Some(seen) = &self.seen {
            seen.lock().unwrap().insert(world.outcome());
        }
        (world != *last).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        super::properties()
    }
}
