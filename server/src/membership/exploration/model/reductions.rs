//! What makes the exploration small enough. Each reduction merges or leaves out states that can do nothing that another explored state
//! cannot do, too. A state can do no less than another one if it has more requests on their way (each may be late for ever), promises
//! of older epochs (a promise only rejects), or more faults left. A test explores one fault without the reductions, and sees the same.
//!
//! - A dead process has no state. Requests to it die with it, and a coordinator that waits for the reply asks its successor.
//! - A request that is rejected for ever, or changes nothing and is not waited for, is removed. Promises and rosters never get older, and
//!   no node prepares the stage-in again.
//! - A request whose coordinator no longer waits for the reply may come from anybody.
//! - A promise is forgotten if no request is on its way, and no coordinator leads, in an older epoch.
//! - A bystander need not be told of a roster: [`World::is_bystander`].
//! - A server that was stopped continues only after a tick has missed it: before, it is like one that was only slow, with one fault
//!   less. In the same way, a server dials again only after a tick has seen that its channel was closed. (A server that has returned
//!   dials at any time, because it may have looked for datasets without a channel.)

use dayfly_meta::id::NodeId;

use super::{Bug, Decision, NOBODY, Promise, Request, Role, Rules, SERVERS, Server, Shown, What, World, roster_with};

impl World {
    /// Returns whether a newer roster would only make a server reject requests of older epochs: it is a member all the time, leads in
    /// neither roster, and does not look for datasets. Whatever can happen once it knows the roster can happen before, too, so it need
    /// not be told. It counts as settled as if it were.
    pub(super) fn is_bystander(&self, node: u16) -> bool {
        let (server, newest) = (&self.servers[usize::from(node)], self.supervision.roster());
        let node = NodeId(node);
        let leads = server.role != Role::None || server.roster.coordinator() == node || newest.coordinator() == node;
        let looks = server.returning_as.is_some() || server.has_to_look_again;
        server.roster.is_live(node) && newest.is_live(node) && !leads && !looks
    }
}

impl Rules {
    /// Removes what can change nothing any more, so that states that differ only in it are one.
    pub(super) fn forget_what_is_idle(&self, world: &mut World) {
        let servers = &mut world.servers;
        let forget = |request: &Request| self.reduce(servers, *request);
        world.requests = world.requests.iter().filter_map(forget).collect();
        for node in 0..SERVERS {
            // The roster counts, too. Without a request of an older epoch, or a coordinator that knows only an older one, nothing is
            // rejected, and nobody old is asked for datasets.
            let mut promise = servers[node].promise.clone();
            let rejects = |epoch: u32| promise.clone().admit(epoch).is_err() && servers[node].roster.epoch() <= epoch;
            let may_ask = |server: &Server| server.role != Role::None && rejects(server.roster.epoch());
            let is_idle = !servers.iter().any(may_ask)
                && !world.requests.iter().any(|request| usize::from(request.to) == node && rejects(request.epoch));
            if is_idle {
                promise = Promise::default();
            }
            servers[node].promise = promise;
        }
    }

    /// Returns what is left of a request, if it can still change anything.
    fn reduce(&self, servers: &[Server], request: Request) -> Option<Request> {
        let (to, from) = (&servers[usize::from(request.to)], servers.get(usize::from(request.from)));
        let is_rejected = to.roster.epoch() > request.epoch || to.promise.clone().admit(request.epoch).is_err();
        // A connection ends with its server. Who still waits for the answer asks the next server, too.
        if !to.is_running || (is_rejected && !self.has(Bug::OldEpochs)) {
            return None;
        }
        let is_awaited = from.is_some_and(|from| match (&from.role, request.what) {
            (Role::Inquiring(_), What::Inquire) => true,
            (Role::Committing(round) | Role::Ending(Decision::Commit, round), What::Commit)
            | (Role::Ending(Decision::Abort, round), What::Abort) => {
                let mut with = round.clone();
                with.answered(NodeId(request.to), &roster_with(NodeId(request.to), request.incarnation));
                with != *round
            }
            _ => false,
        });
        let does_something = match request.what {
            What::Inquire => false,
            What::Commit => to.shown == Shown::Prepared,
            What::Abort => matches!(to.shown, Shown::Prepared | Shown::Visible),
        };
        match (is_awaited, does_something) {
            (true, _) => Some(request),
            (false, true) => Some(Request { from: NOBODY, incarnation: 0, ..request }),
            (false, false) => None,
        }
    }
}
