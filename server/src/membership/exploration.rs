//! Explores all states that the rules of membership can reach, with three servers and a few faults.
//!
//! The rules are the production code: [`Supervision`], [`Tenure`], [`Promise`], [`Round`], [`Inquiry`] and the roster. The model is the
//! world around them, and the few lines with which the supervisor's lease, a server's follower, the coordinator and a node's part of a
//! stage-in use them. Node 0 has prepared one stage-in on all nodes, and commits it.
//!
//! All orders of up to two faults are explored to their end, 88,759 states; with `DAYFLY_TEST_ALL_ROWS`, as in `.ci/long`, of up to
//! three, 3,957,326 states, which take about 40 s of processor time. A fault is a killed server, one that stands still, a control channel that is cut, or a reply that is lost with the
//! link between two nodes. `model/reductions.rs` says what is left out, and why.
//!
//! Not covered: a report that aborts what a successor settled, and more than one stage-in. What was published is gone if all members
//! that showed it have been lost at the same time: the property allows that.
//!
//! What is abstracted, and why that loses nothing:
//! - Healthy servers are heard, and their leases renewed, in each tick. A message that is late looks like a server that stands still.
//! - A request of a coordinator is a member of a set until it is handled, which may be at any later time, in any order, or never. Its
//!   reply arrives at once or is lost with the coordinator. Requests are idempotent, so a repeated request is the same request.
//! - A new roster reaches each server at any later time; only the newest one, because each contains all changes.
//! - Catching up is one step. It asks the coordinator that the server knows, which answers only if it is ready.

mod model;

use std::sync::Mutex;

use dayfly_meta::id::NodeId;
use stateright::{Checker, Expectation, HasDiscoveries, Model, Property};

use model::{Bug, Rules, SERVERS, Shown, World};

/// What must hold in every state, and what must be reachable.
fn properties() -> Vec<Property<Rules>> {
    let holds = |name, condition| Property::<Rules> { expectation: Expectation::Always, name, condition };
    let happens = |name, condition| Property::<Rules> { expectation: Expectation::Sometimes, name, condition };
    vec![
        holds("what was published is not aborted", |_, world: &World| !(world.is_published && world.is_aborted)),
        holds("all members that know the roster show what was published", |_, world| {
            !world.is_published || world.is_gone || world.settled_members().all(|server| server.shows())
        }),
        holds("no member that knows the roster shows what was aborted", |_, world| {
            !world.is_aborted || world.settled_members().all(|server| !server.shows())
        }),
        holds("a successor does not abort what a member shows", |_, world| !world.aborts_what_is_shown),
        holds("at most one coordinator of an epoch decides", |_, world| {
            let roster = world.supervision.roster();
            let deciding = (0..SERVERS).filter(|&node| {
                let server = &world.servers[node];
                server.is_deciding() && server.roster.epoch() == roster.epoch()
            });
            deciding.count() <= 1
        }),
        holds("the coordinator of the roster is live as long as a member is", |_, world| {
            let roster = world.supervision.roster();
            roster.live().next().is_none() || roster.is_live(roster.coordinator())
        }),
        holds("an epoch is told only once", |_, world| !world.has_two_rosters_of_an_epoch),
        happens("a stage-in is published after a loss", |_, world| {
            world.is_published
                && world.supervision.roster().epoch() > 0
                && world.servers.iter().all(|server| !server.is_deciding())
        }),
        happens("a successor aborts a stage-in", |_, world| world.is_aborted),
        happens("a successor publishes a stage-in", |_, world| {
            world.is_published && world.supervision.roster().coordinator() != NodeId(0)
        }),
        happens("a lost server returns", |_, world| {
            let roster = world.supervision.roster();
            roster.live().count() == SERVERS && roster.epoch() > 1
        }),
        happens("a new server takes the place of a dead one", |_, world| {
            let roster = world.supervision.roster();
            (0..SERVERS as u16).any(|node| world.servers[usize::from(node)].is_new && roster.is_live(NodeId(node)))
        }),
        happens("a returned server undoes what was aborted meanwhile", |_, world| {
            world.is_aborted && world.servers.iter().any(|server| server.incarnation > 0 && server.shown == Shown::Nothing)
        }),
    ]
}

impl Rules {
    /// The rules as they are, and a number of faults.
    fn new(faults: u8) -> Self {
        Self { faults, bug: None, is_reduced: true, seen: None }
    }

    /// Explores all states that can be reached. Returns the names of the properties that do not hold, and the number
    /// of states. Stops early if a property does not hold.
    fn explore(self) -> (Vec<&'static str>, usize) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let checker = self.checker().threads(threads);
        let checker = checker.finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
        let discoveries = checker.discoveries();
        let has_failed = |property: &&Property<Self>| match property.expectation {
            Expectation::Sometimes => !discoveries.contains_key(property.name),
            _ => discoveries.contains_key(property.name),
        };
        let failures: Vec<&str> = properties().iter().filter(has_failed).map(|property| property.name).collect();
        for (name, path) in discoveries.into_iter().filter(|(name, _)| failures.contains(name)) {
            eprintln!("{name}: {:?}", path.into_actions());
        }
        (failures, checker.unique_state_count())
    }
}

/// SEMANTICS: "When `stage-in` returns, the dataset is visible on every node."
#[test]
fn no_order_of_faults_makes_members_differ() {
    // Three faults have 45 times as many states as two.
    let most = if std::env::var_os("DAYFLY_TEST_ALL_ROWS").is_some() { 3 } else { 2 };
    for faults in 1..=most {
        let start = std::time::Instant::now();
        let (failures, states) = Rules::new(faults).explore();
        eprintln!("{faults} faults: {states} states in {:.1} s", start.elapsed().as_secs_f64());
        assert!(failures.is_empty(), "{failures:?}");
    }
}

#[test]
fn the_reductions_hide_no_outcome() {
    let outcomes = |is_reduced| {
        let rules = Rules { is_reduced, seen: Some(Mutex::default()), ..Rules::new(1) };
        let checker = rules.checker().spawn_bfs().join();
        eprintln!("one fault, reduced: {is_reduced}: {} states", checker.unique_state_count());
        checker.model().seen.as_ref().unwrap().lock().unwrap().clone()
    };
    let (reduced, all) = (outcomes(true), outcomes(false));
    assert_eq!(reduced, all, "{:?}", reduced.symmetric_difference(&all));
}

#[test]
fn each_planted_defect_is_found() {
    for bug in Bug::ALL {
        let start = std::time::Instant::now();
        let (failures, states) = Rules { bug: Some(bug), ..Rules::new(2) }.explore();
        eprintln!("{bug:?}: {failures:?} in {states} states, {:.1} s", start.elapsed().as_secs_f64());
        assert!(!failures.is_empty(), "{bug:?} was not found");
    }
}
