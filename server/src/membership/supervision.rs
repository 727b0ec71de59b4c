//! The supervisor's rules: which members are live, lost, or returning. This is a state machine without sockets or a clock; the
//! supervisor tells it what happens, and calls [`Supervision::tick`] once per interval of the lease.
//!
//! Invariants: only a tick changes the roster, so that several changes make one epoch. A member that was lost is a member again
//! only after it has said that it caught up, and then with a higher incarnation. The coordinator is live as long as any member is.
//! A member that has returned may lack what appeared while it returned, until it has said so once more. It becomes the coordinator
//! only if no other member is left.

use std::net::SocketAddr;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::LAST_MEMBERS_PATIENCE;
use dayfly_meta::roster::{Roster, RosterChange, RosterMember};

/// How many ticks a member may be silent, or without a control channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Patience {
    /// After this many ticks without a sign of life, a member is lost.
    pub silent_ticks: u32,
    /// After this many ticks, a member that closed its control channel and has not dialed again is lost.
    pub closed_ticks: u32,
    /// Members without which no other is left are lost only after members that were lost and continued have waited for them for so
    /// many ticks.
    pub last_ticks: u32,
}

impl Patience {
    /// Counts the deadlines in ticks.
    pub fn new(deadlines: &Deadlines) -> Self {
        let ticks = |limit: std::time::Duration| limit.as_millis().div_ceil(deadlines.lease_interval.as_millis().max(1)) as u32;
        let silent_ticks = ticks(deadlines.lost_after);
        Self {
            silent_ticks,
            closed_ticks: ticks(deadlines.reconnect),
            last_ticks: silent_ticks.saturating_mul(LAST_MEMBERS_PATIENCE),
        }
    }
}

/// The supervisor's answer to a sign of life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Greeting {
    /// The server is a member and remains one.
    Continue,
    /// The server was lost. To be a member again, it catches up with the session as this incarnation.
    Return {
        /// The number of the incarnation.
        incarnation: u32,
    },
    /// Another server has taken the place of the one that dials, which must end.
    Replaced,
}

/// What a tick has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Members that have been lost, and why.
    pub lost: Vec<(NodeId, Loss)>,
    /// Members that have returned.
    pub returned: Vec<NodeId>,
}

/// Why a member counts as lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loss {
    /// No message came from it.
    Silent,
    /// It closed its control channel and did not dial again.
    Closed,
    /// It said that it ended.
    Ended,
    /// Another server has taken its place.
    Replaced,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State {
    /// A member that was heard of this many ticks ago.
    Live {
        silent_ticks: u32,
    },
    /// A member whose control channel was closed this many ticks ago.
    Closed {
        ticks: u32,
    },
    /// A member whose server said this many ticks ago that it ends. At the end of a session, all do.
    Ended {
        ticks: u32,
    },
    Lost,
    /// A lost member that was told to catch up, and has been silent for so many ticks.
    Returning {
        silent_ticks: u32,
    },
    /// A lost member that has caught up.
    CaughtUp,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Supervised {
    state: State,
    /// The last incarnation that was handed out.
    incarnation: u32,
    /// Whether the member shows all datasets, as far as it has said.
    is_complete: bool,
    /// The first incarnation of the server that is this member now. A server with an older one has been replaced.
    first_incarnation: u32,
    address: SocketAddr,
}

/// The members of a session, as their supervisor sees them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Supervision {
    patience: Patience,
    members: Vec<Supervised>,
    initial: Vec<SocketAddr>,
    roster: Roster,
    /// For how many ticks others have waited for members that are all silent, beginning with the first one that was told to catch up.
    waited_ticks: u32,
}

impl Supervision {
    /// Begins with members that are all live.
    pub fn new(addresses: &[SocketAddr], patience: Patience) -> Self {
        let member = |&address| Supervised {
            state: State::Live { silent_ticks: 0 },
            incarnation: 0,
            is_complete: true,
            first_incarnation: 0,
            address,
        };
        Self {
            patience,
            members: addresses.iter().map(member).collect(),
            initial: addresses.to_vec(),
            roster: Roster::new(addresses),
            waited_ticks: 0,
        }
    }

    /// Returns the roster of the present epoch.
    pub fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Returns the present epoch's difference from the first one.
    pub fn change(&self) -> RosterChange {
        let first = |&address| RosterMember { address, incarnation: 0, is_lost: false };
        let members = (0..).zip(&self.initial).filter_map(|(node, address)| {
            let member = self.roster.member(NodeId(node))?;
            (*member != first(address)).then(|| (node, member.clone()))
        });
        RosterChange { epoch: self.roster.epoch(), coordinator: self.roster.coordinator().0, members: members.collect() }
    }

    /// Returns whether no member is left that has the session's datasets.
    pub fn is_over(&self) -> bool {
        let is_gone = |state: &State| matches!(state, State::Lost | State::Ended { .. } | State::Returning { .. });
        self.members.iter().all(|member| is_gone(&member.state))
    }

    /// Returns whether a session that somebody has ended is over: nothing waits for members that are silent, which end by themselves.
    pub fn is_over_once_ended(&self) -> bool {
        self.members.iter().all(|member| match member.state {
            State::Live { silent_ticks } => silent_ticks > self.patience.silent_ticks,
            State::Closed { .. } | State::CaughtUp => false,
            State::Ended { .. } | State::Lost | State::Returning { .. } => true,
        })
    }

    /// Returns whether a new server can take a node's place: its server is lost, and none is about to return.
    pub fn is_vacant(&self, node: NodeId) -> bool {
        let is_gone = |state: &State| matches!(state, State::Lost | State::Ended { .. });
        self.members.get(node.index()).is_some_and(|member| is_gone(&member.state) && !self.roster.is_live(node))
    }

    /// Returns whether a node's lease is to be renewed: it is a member, or about to be one again.
    pub fn is_renewed(&self, node: NodeId) -> bool {
        self.members.get(node.index()).is_some_and(|member| !matches!(member.state, State::Lost | State::Ended { .. }))
    }

    /// Returns for how many ticks a member has been silent. A member without a control channel is not silent, but gone.
    pub fn silent_ticks(&self, node: NodeId) -> u32 {
        match self.members.get(node.index()).map(|member| &member.state) {
            Some(State::Live { silent_ticks } | State::Returning { silent_ticks }) => *silent_ticks,
            _ => 0,
        }
    }

    /// Records that another member has heard of a member. That is a sign of life only as long as the member is not lost.
    pub fn reported(&mut self, node: NodeId) {
        if let Some(Supervised { state: State::Live { silent_ticks }, .. }) = self.members.get_mut(node.index()) {
            *silent_ticks = 0;
        }
    }

    /// Records a message of a member on its control channel.
    pub fn heard(&mut self, node: NodeId) -> Greeting {
        let Some(member) = self.members.get_mut(node.index()) else { return Greeting::Continue };
        match &mut member.state {
            State::Live { silent_ticks } | State::Returning { silent_ticks } => *silent_ticks = 0,
            State::Closed { .. } => member.state = State::Live { silent_ticks: 0 },
            State::Ended { .. } | State::CaughtUp => {}
            State::Lost => return member.invite(),
        }
        Greeting::Continue
    }

    /// Records that a member has dialed the supervisor again. `incarnation` is the one that its server believes to be.
    pub fn dialed(&mut self, node: NodeId, incarnation: u32) -> Greeting {
        let Some(member) = self.members.get_mut(node.index()) else { return Greeting::Continue };
        match member.state {
            _ if incarnation < member.first_incarnation => Greeting::Replaced,
            State::Live { .. } | State::Closed { .. } if incarnation == member.incarnation => {
                member.state = State::Live { silent_ticks: 0 };
                Greeting::Continue
            }
            State::CaughtUp if incarnation == member.incarnation => Greeting::Continue,
            // The server that dials is not the one that this member is, or it has to catch up again.
            _ => member.invite(),
        }
    }

    /// Lets a new server take a node's place. It is a member once it has caught up with the session as the incarnation that is
    /// returned. `None` if the place is taken.
    pub fn replace(&mut self, node: NodeId) -> Option<u32> {
        if !self.is_vacant(node) {
            return None;
        }
        let member = self.members.get_mut(node.index())?;
        let Greeting::Return { incarnation } = member.invite() else { return None };
        member.first_incarnation = incarnation;
        Some(incarnation)
    }

    /// Records that a member's control channel was closed by its server.
    pub fn closed(&mut self, node: NodeId) {
        let Some(member) = self.members.get_mut(node.index()) else { return };
        match member.state {
            State::Live { .. } => member.state = State::Closed { ticks: 0 },
            State::Returning { .. } | State::CaughtUp => member.state = State::Lost,
            State::Closed { .. } | State::Ended { .. } | State::Lost => {}
        }
    }

    /// Records that a member's server has ended because it was told to.
    pub fn ended(&mut self, node: NodeId) {
        if let Some(member) = self.members.get_mut(node.index()) {
            member.state = State::Ended { ticks: 0 };
        }
    }

    /// Records that a returning server has caught up with the session, or that one that has returned has done so once more.
    pub fn caught_up(&mut self, node: NodeId, incarnation: u32, address: SocketAddr) {
        let Some(member) = self.members.get_mut(node.index()).filter(|member| member.incarnation == incarnation) else { return };
        match member.state {
            State::Returning { .. } => (member.state, member.address) = (State::CaughtUp, address),
            State::Live { .. } | State::Closed { .. } => member.is_complete = true,
            State::CaughtUp | State::Lost | State::Ended { .. } => {}
        }
    }

    /// Lets one interval pass. If any member is lost or has returned, this begins a new epoch.
    ///
    /// Silence alone does not end a session: members that are silent are not lost if no other member would be left. They may stand still
    /// together, like those of a suspended job, and have all datasets when they continue. Only if others have continued, and have
    /// waited for them much longer, are they lost, so that the session does not wait for a broken machine forever.
    pub fn tick(&mut self) -> Changes {
        let mut changes = Changes::default();
        let (mut silent, mut is_any_waiting, mut is_any_silent_again) = (Vec::new(), false, false);
        for (node, member) in (0..).map(NodeId).zip(&mut self.members) {
            match &mut member.state {
                State::Live { silent_ticks } => {
                    *silent_ticks = (*silent_ticks + 1).min(self.patience.silent_ticks + 1);
                    if *silent_ticks > self.patience.silent_ticks {
                        silent.push(node);
                    }
                }
                State::Closed { ticks } => {
                    *ticks += 1;
                    if *ticks > self.patience.closed_ticks {
                        member.state = State::Lost;
                        changes.lost.push((node, Loss::Closed));
                    }
                }
                State::Ended { ticks } => {
                    *ticks += 1;
                    if *ticks > self.patience.closed_ticks && self.roster.is_live(node) {
                        changes.lost.push((node, Loss::Ended));
                    }
                }
                State::Returning { silent_ticks } => {
                    if self.roster.is_live(node) {
                        changes.lost.push((node, Loss::Replaced));
                    }
                    *silent_ticks += 1;
                    match *silent_ticks > self.patience.silent_ticks {
                        true => (member.state, is_any_silent_again) = (State::Lost, true),
                        false => is_any_waiting = true,
                    }
                }
                State::CaughtUp => {
                    member.state = State::Live { silent_ticks: 0 };
                    changes.returned.push(node);
                }
                State::Lost => {}
            }
        }
        let is_heard = |(number, member): (u16, &Supervised)| {
            matches!(member.state, State::Live { .. }) && !silent.contains(&NodeId(number))
        };
        let is_any_left = (0..).zip(&self.members).any(is_heard);
        // Those that are lost wait for the silent ones, from which they are to learn the datasets. One whose channel is closed may dial
        // again, or another server comes in its place; one that stands still again does not wait.
        let goes_on = is_any_waiting || self.waited_ticks > 0 && !is_any_silent_again;
        self.waited_ticks = match goes_on && !is_any_left {
            true => (self.waited_ticks + 1).min(self.patience.last_ticks + 1),
            false => 0,
        };
        if is_any_left || self.waited_ticks > self.patience.last_ticks {
            for node in silent {
                self.members[node.index()].state = State::Lost;
                changes.lost.push((node, Loss::Silent));
            }
            changes.lost.sort_by_key(|(node, _)| *node);
        }
        if changes != Changes::default() {
            self.begin_epoch(&changes);
        }
        changes
    }

    fn begin_epoch(&mut self, changes: &Changes) {
        let row = |node: NodeId, is_lost| {
            let member = self.members.get(node.index())?;
            Some((node.0, RosterMember { address: member.address, incarnation: member.incarnation, is_lost }))
        };
        // A lost member keeps its incarnation in the roster, whatever was offered to it since.
        let lost = changes.lost.iter().filter_map(|(node, _)| {
            let member = self.roster.member(*node)?;
            Some((node.0, RosterMember { is_lost: true, ..member.clone() }))
        });
        let members = lost.chain(changes.returned.iter().filter_map(|&node| row(node, false))).collect();
        let mut change = RosterChange { epoch: self.roster.epoch() + 1, coordinator: self.roster.coordinator().0, members };
        let mut next = self.roster.clone();
        next.apply(&change);
        if !next.is_live(next.coordinator()) {
            let is_complete = |node: &NodeId| self.members.get(node.index()).is_some_and(|member| member.is_complete);
            let successor = next.live().find(is_complete).or_else(|| next.live().next());
            change.coordinator = successor.map_or(change.coordinator, |lowest| lowest.0);
        }
        self.roster.apply(&change);
    }
}

impl Supervised {
    fn invite(&mut self) -> Greeting {
        self.incarnation += 1;
        self.is_complete = false;
        self.state = State::Returning { silent_ticks: 0 };
        Greeting::Return { incarnation: self.incarnation }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience { silent_ticks: 5, closed_ticks: 2, last_ticks: 50 };

    fn session() -> Supervision {
        let addresses: Vec<SocketAddr> = (1..=3).map(|node| SocketAddr::from(([127, 0, 0, node], 7))).collect();
        Supervision::new(&addresses, PATIENCE)
    }

    /// Lets ticks pass while all nodes but `silent` are heard. Returns what changed.
    fn pass(supervision: &mut Supervision, ticks: u32, silent: &[u16]) -> Vec<Changes> {
        let tick = |_| {
            (0..3).filter(|node| !silent.contains(node)).for_each(|node| {
                supervision.heard(NodeId(node));
            });
            supervision.tick()
        };
        (0..ticks).map(tick).filter(|changes| *changes != Changes::default()).collect()
    }

    fn address(supervision: &Supervision, node: u16) -> SocketAddr {
        supervision.roster().member(NodeId(node)).unwrap().address
    }

    #[test]
    fn a_silent_member_is_lost_after_its_patience_and_returns_only_after_it_has_caught_up() {
        let mut supervision = session();
        assert_eq!(pass(&mut supervision, 5, &[0]), []);
        assert_eq!(pass(&mut supervision, 1, &[0]), [Changes { lost: vec![(NodeId(0), Loss::Silent)], returned: vec![] }]);
        assert_eq!((supervision.roster().epoch(), supervision.roster().coordinator()), (1, NodeId(1)));
        assert_eq!(supervision.heard(NodeId(0)), Greeting::Return { incarnation: 1 });
        assert_eq!(pass(&mut supervision, 3, &[]), [], "it has not caught up");
        let at = address(&supervision, 0);
        supervision.caught_up(NodeId(0), 7, at);
        assert_eq!(pass(&mut supervision, 1, &[]), [], "another incarnation has caught up");
        supervision.caught_up(NodeId(0), 1, at);
        assert_eq!(pass(&mut supervision, 1, &[]), [Changes { lost: vec![], returned: vec![NodeId(0)] }]);
        let member = supervision.roster().member(NodeId(0)).unwrap();
        assert_eq!((supervision.roster().epoch(), member.incarnation, member.is_lost), (2, 1, false));
        assert_eq!(supervision.roster().coordinator(), NodeId(1), "the coordinator changes only when it is lost");
        assert_eq!(supervision.change().members.len(), 1);
    }

    #[test]
    fn a_session_that_somebody_has_ended_does_not_wait_for_silent_members() {
        let mut supervision = session();
        [0, 1].into_iter().for_each(|node| supervision.ended(NodeId(node)));
        pass(&mut supervision, 5, &[0, 1, 2]);
        assert!(!supervision.is_over_once_ended(), "node 2 may be about to end");
        pass(&mut supervision, 100, &[0, 1, 2]);
        assert!(supervision.is_over_once_ended() && !supervision.is_over());
    }

    #[test]
    fn members_that_are_silent_together_are_not_lost() {
        let mut supervision = session();
        assert_eq!(pass(&mut supervision, 100, &[0, 1, 2]), []);
        assert_eq!(pass(&mut supervision, 10, &[]), []);
        assert!(!supervision.is_over());
        // The last member is alone, and others have died.
        [0, 1].into_iter().for_each(|node| supervision.closed(NodeId(node)));
        assert_eq!(pass(&mut supervision, 100, &[0, 1, 2]).len(), 1, "the two that closed their channels are lost");
        assert_eq!(supervision.roster().live().collect::<Vec<_>>(), [NodeId(2)]);
        assert!(!supervision.is_over());
        supervision.closed(NodeId(2));
        pass(&mut supervision, 3, &[0, 1, 2]);
        assert!(supervision.is_over());
        // One of those that stand still dies.
        let mut supervision = session();
        pass(&mut supervision, 100, &[0, 1, 2]);
        supervision.closed(NodeId(1));
        assert_eq!(
            pass(&mut supervision, 100, &[0, 1, 2]),
            [Changes { lost: vec![(NodeId(1), Loss::Closed)], returned: vec![] }]
        );
        assert!(!supervision.is_over());
        // Those that fell silent a little earlier are lost, and return.
        let mut supervision = session();
        pass(&mut supervision, 2, &[0]);
        let changes = pass(&mut supervision, 100, &[0, 1, 2]);
        assert_eq!(changes, [Changes { lost: vec![(NodeId(0), Loss::Silent)], returned: vec![] }]);
        assert_eq!(supervision.heard(NodeId(1)), Greeting::Continue);
        assert_eq!(supervision.heard(NodeId(0)), Greeting::Return { incarnation: 1 });
        // They continue one after the other.
        let mut supervision = session();
        pass(&mut supervision, 2, &[1, 2]);
        pass(&mut supervision, 100, &[0, 1, 2]);
        assert_eq!(supervision.roster().live().collect::<Vec<_>>(), [NodeId(0)]);
        assert_eq!(pass(&mut supervision, 25, &[0, 1]), []);
        assert_eq!(pass(&mut supervision, 20, &[0]), []);
        assert!(!supervision.is_over());
        assert_eq!(pass(&mut supervision, 1, &[]), []);
        for node in [1, 2] {
            let at = address(&supervision, node);
            supervision.caught_up(NodeId(node), 1, at);
        }
        assert_eq!(pass(&mut supervision, 1, &[]), [Changes { lost: vec![], returned: vec![NodeId(1), NodeId(2)] }]);
        // The one that had all datasets never continues: the session does not wait for it forever.
        let mut supervision = session();
        pass(&mut supervision, 2, &[1, 2]);
        pass(&mut supervision, 100, &[0, 1, 2]);
        assert_eq!(pass(&mut supervision, 50, &[0]), []);
        assert!(!supervision.is_over());
        pass(&mut supervision, 5, &[0]);
        assert!(supervision.is_over());
        // It stands still together with the one that has waited.
        let mut supervision = session();
        pass(&mut supervision, 2, &[1, 2]);
        pass(&mut supervision, 30, &[0, 1, 2]);
        assert_eq!(pass(&mut supervision, 100, &[0, 1, 2]), []);
        assert!(!supervision.is_over());
        // Neither if those that wait are new servers, which give up.
        let mut supervision = session();
        [1, 2].into_iter().for_each(|node| supervision.closed(NodeId(node)));
        pass(&mut supervision, 3, &[1, 2]);
        assert_eq!(supervision.replace(NodeId(1)), Some(1));
        pass(&mut supervision, 6, &[0, 2]);
        supervision.closed(NodeId(1));
        pass(&mut supervision, 48, &[0, 1, 2]);
        assert!(!supervision.is_over());
        pass(&mut supervision, 3, &[0, 1, 2]);
        assert!(supervision.is_over());
    }

    #[test]
    fn a_closed_channel_is_a_loss_unless_the_same_incarnation_dials_again() {
        let mut supervision = session();
        supervision.closed(NodeId(2));
        assert_eq!(pass(&mut supervision, 2, &[2]), []);
        assert_eq!(supervision.dialed(NodeId(2), 0), Greeting::Continue);
        assert_eq!(pass(&mut supervision, 5, &[2]), []);
        supervision.closed(NodeId(2));
        let changes = pass(&mut supervision, 3, &[2]);
        assert_eq!(changes, [Changes { lost: vec![(NodeId(2), Loss::Closed)], returned: vec![] }]);
        assert_eq!(supervision.dialed(NodeId(2), 0), Greeting::Return { incarnation: 1 });
        supervision.closed(NodeId(2));
        assert_eq!(supervision.dialed(NodeId(2), 1), Greeting::Return { incarnation: 2 }, "it has to catch up from the start");
        let mut supervision = session();
        supervision.closed(NodeId(2));
        assert_eq!(supervision.dialed(NodeId(2), 1), Greeting::Return { incarnation: 1 }, "that server is not the member");
        let changes = pass(&mut supervision, 1, &[]);
        assert_eq!(changes, [Changes { lost: vec![(NodeId(2), Loss::Replaced)], returned: vec![] }]);
    }

    #[test]
    fn changes_within_one_interval_make_one_epoch() {
        let mut supervision = session();
        supervision.ended(NodeId(0));
        supervision.ended(NodeId(1));
        assert_eq!(pass(&mut supervision, 3, &[0, 1]).len(), 1);
        assert_eq!((supervision.roster().epoch(), supervision.roster().coordinator()), (1, NodeId(2)));
        assert!(!supervision.is_over());
        assert_eq!(supervision.dialed(NodeId(1), 0), Greeting::Return { incarnation: 1 }, "another server on that node");
        supervision.ended(NodeId(1));
        supervision.ended(NodeId(2));
        assert!(supervision.is_over());
    }

    #[test]
    fn a_new_server_takes_the_place_of_a_lost_one_which_cannot_return_anymore() {
        let mut supervision = session();
        assert_eq!(supervision.replace(NodeId(2)), None, "it is live");
        supervision.closed(NodeId(2));
        assert_eq!(supervision.replace(NodeId(2)), None, "it may dial again");
        pass(&mut supervision, 3, &[2]);
        assert!(supervision.is_vacant(NodeId(2)));
        assert_eq!(supervision.replace(NodeId(2)), Some(1));
        assert_eq!(supervision.replace(NodeId(2)), None, "another new server is catching up");
        assert_eq!(supervision.dialed(NodeId(2), 0), Greeting::Replaced);
        let address = SocketAddr::from(([127, 0, 0, 9], 7));
        supervision.caught_up(NodeId(2), 1, address);
        assert_eq!(pass(&mut supervision, 1, &[]), [Changes { lost: vec![], returned: vec![NodeId(2)] }]);
        assert_eq!(supervision.roster().member(NodeId(2)).unwrap().address, address);
        assert_eq!(supervision.dialed(NodeId(2), 0), Greeting::Replaced);
        assert_eq!(supervision.dialed(NodeId(2), 1), Greeting::Continue);
        assert_eq!(supervision.replace(NodeId(9)), None, "there is no such node");
    }

    #[test]
    fn a_member_that_has_just_returned_coordinates_only_if_no_other_is_left() {
        for is_complete in [false, true] {
            let mut supervision = session();
            pass(&mut supervision, 6, &[1]);
            supervision.heard(NodeId(1));
            let address = address(&supervision, 1);
            supervision.caught_up(NodeId(1), 1, address);
            pass(&mut supervision, 1, &[]);
            if is_complete {
                supervision.caught_up(NodeId(1), 1, address);
            }
            pass(&mut supervision, 6, &[0]);
            assert_eq!(supervision.roster().coordinator(), NodeId(if is_complete { 1 } else { 2 }));
            pass(&mut supervision, 6, &[0, 2]);
            assert_eq!(supervision.roster().coordinator(), NodeId(1));
        }
    }

    #[test]
    fn a_session_without_a_member_that_has_its_datasets_is_over() {
        let mut supervision = session();
        [0, 1].into_iter().for_each(|node| supervision.ended(NodeId(node)));
        pass(&mut supervision, 3, &[0, 1]);
        assert_eq!(supervision.replace(NodeId(0)), Some(1));
        assert!(!supervision.is_over());
        supervision.ended(NodeId(2));
        assert!(supervision.is_over(), "nobody is left from whom node 0 could learn the datasets");
    }

    #[test]
    fn a_member_that_stops_while_it_returns_stays_lost() {
        let mut supervision = session();
        pass(&mut supervision, 6, &[1]);
        assert_eq!(supervision.heard(NodeId(1)), Greeting::Return { incarnation: 1 });
        assert_eq!(pass(&mut supervision, 7, &[1]), []);
        assert_eq!(supervision.heard(NodeId(1)), Greeting::Return { incarnation: 2 });
        supervision.caught_up(NodeId(1), 1, address(&supervision, 1));
        assert_eq!(pass(&mut supervision, 1, &[1]), []);
        assert_eq!(supervision.roster().epoch(), 1);
    }
}
