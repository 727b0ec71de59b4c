//! Simulates whole sessions, each on one thread, with a simulated network and clock. A seed decides how long each message takes,
//! in which order blocking jobs proceed, and which faults happen when. The code under test is the code that ships: the
//! coordinator, the stage-in workers, the fetcher, the arena and the service for peers.
//!
//! `DAYFLY_SIMULATION_SEED=7` runs one seed and prints each message. `DAYFLY_SIMULATION_SEEDS` is the number of seeds to run, or
//! a range of them (`5000..9000`).
//!
//! # Parts
//!
//! - [`session`]: the sequence of events in one session, and the promises that are checked. [`reader`]: a process that reads.
//!   [`copies`]: whether all copies are there in the end.
//! - [`net`]: the simulated network. [`faults`]: what goes wrong, and when.
//! - [`supervisor`]: who is a member, by the production rules. Nodes are lost, return, and take over from lost coordinators.
//! - [`jobs`]: blocking work, one job at a time, in an order that the seed decides.
//! - [`origins`]: sessions that read a dataset from its origin, because it does not fit, while the parallel file system fails.
//! - [`steps`]: nodes that are struck at each step of a stage-in.
//! - [`planted`]: deliberate bugs that the simulation must find.
//! - [`returns`]: nodes that return to a session whose datasets have changed.
//! - [`source`]: the archives that are staged in. [`random`]: random numbers from a seed.

mod copies;
mod faults;
mod jobs;
mod net;
mod origins;
mod planted;
mod random;
mod reader;
mod returns;
mod session;
mod source;
mod steps;
mod supervisor;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dayfly_meta::id::NodeId;
use faults::{Blow, Fault};
use jobs::Pool;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use planted::Planted;
use session::{Outcome, TimedFault, Variant, run};
use source::Sources;

/// The environment variable that selects one seed, whose messages are printed.
const ONE_SEED: &str = "DAYFLY_SIMULATION_SEED";
/// Number of seeds in one test run by default. `.ci/long` runs many more.
const SEEDS: u64 = 500;
/// A planted bug must be found within this many seeds.
const SEEDS_TO_FIND: u64 = 60;
/// Reads and faults that each seed must have at least, so that no seed is too easy.
const READS_MIN: u64 = 50;
const FAULTS_MIN: u64 = 3;

fn number(value: &str) -> u64 {
    value.parse().expect("a number")
}

/// Returns the seeds that the environment selects: one seed, the first N, or `FROM..TO`.
fn seeds() -> Range<u64> {
    let variable = |name: &str| std::env::var(name).ok();
    match (variable(ONE_SEED), variable("DAYFLY_SIMULATION_SEEDS")) {
        (Some(one), _) => number(&one)..number(&one) + 1,
        (None, Some(seeds)) => match seeds.split_once("..") {
            Some((from, to)) => number(from)..number(to),
            None => 0..number(&seeds),
        },
        (None, None) => 0..SEEDS,
    }
}

/// Returns the cores that this process may use, each as a set of its own.
fn cores() -> Vec<CpuSet> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let alone = |core| {
        let mut set = CpuSet::new();
        set.set(core).map(|()| set)
    };
    (0..CpuSet::count()).filter(|&core| allowed.is_set(core).unwrap_or(false)).map(|core| alone(core).unwrap()).collect()
}

/// Runs seeds on all cores, and returns their outcomes in order. The threads of a seed run one at a time and stay on one core,
/// because waking a thread on another core takes longer than the work it then does.
fn run_all(seeds: Range<u64>, variant: Variant<'_>) -> Vec<Outcome> {
    let (sources, next, outcomes) = (Sources::write(), AtomicU64::new(seeds.start), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for core in cores() {
            let (sources, next, outcomes, seeds) = (&sources, &next, &outcomes, &seeds);
            scope.spawn(move || {
                // If this is not permitted, the run only takes longer.
                let _ = sched_setaffinity(Pid::from_raw(0), &core);
                let pool = Pool::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if !seeds.contains(&seed) {
                        return;
                    }
                    let outcome = run(seed, sources, &pool, variant);
                    outcomes.lock().unwrap().push(outcome);
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap();
    outcomes.sort_by_key(|outcome| outcome.seed);
    outcomes
}

/// SEMANTICS: "When `stage-in` returns, the dataset is visible on every node. For a few milliseconds before that, it may be visible
/// on one node and not yet on another. A node that is cut off during these milliseconds asks the coordinator until it learns whether the
/// dataset is visible everywhere."
/// SEMANTICS: "Damaged bytes are requested once more; if they arrive damaged again, the stage-in ends with an error that names
/// the node."
#[test]
fn thousands_of_seeded_sessions_keep_every_promise() {
    let start = Instant::now();
    let outcomes = run_all(seeds(), Variant { is_verbose: std::env::var_os(ONE_SEED).is_some(), ..Variant::default() });
    let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>();
    eprintln!(
        "{} seeds in {:.1} s: {} reads ({} failed), {} faults, {} losses, {} returns, {} new coordinators, {} of {} stage-ins failed, {} messages, {:.0} s of simulated time, traces {:016x}",
        outcomes.len(),
        start.elapsed().as_secs_f64(),
        sum(|outcome| outcome.reads),
        sum(|outcome| outcome.failed_reads),
        sum(|outcome| outcome.faults),
        sum(|outcome| outcome.changes.losses),
        sum(|outcome| outcome.changes.returns),
        sum(|outcome| outcome.changes.takeovers),
        sum(|outcome| outcome.failed_stage_ins),
        sum(|outcome| outcome.stage_ins),
        sum(|outcome| outcome.messages),
        outcomes.iter().map(|outcome| outcome.took.as_secs_f64()).sum::<f64>(),
        outcomes.iter().fold(0_u64, |all, outcome| all.wrapping_add(outcome.trace)),
    );
    let broken: Vec<String> = outcomes.iter().filter_map(Outcome::failure).collect();
    assert!(broken.is_empty(), "{} seeds broke a promise:\n{}", broken.len(), broken[..broken.len().min(20)].join("\n"));
    // One seed in ten has each of these, so that hundreds of seeds have enough of them.
    let changes: [u64; 3] =
        [sum(|outcome| outcome.changes.losses), sum(|outcome| outcome.changes.returns), sum(|outcome| outcome.changes.takeovers)];
    assert!(outcomes.len() < 500 || changes.iter().all(|&count| count > outcomes.len() as u64 / 10), "{changes:?}");
    for outcome in &outcomes {
        assert!(outcome.reads >= READS_MIN && outcome.faults >= FAULTS_MIN, "seed {} is too easy: {outcome:?}", outcome.seed);
    }
}

#[test]
fn a_seed_reproduces_its_session() {
    let seeds = || 1_000_000..1_000_030;
    let (first, second) = (run_all(seeds(), Variant::default()), run_all(seeds(), Variant::default()));
    for (first, second) in first.iter().zip(&second) {
        assert_eq!(first, second);
    }
}

#[test]
fn each_planted_bug_is_found() {
    for bug in Planted::ALL {
        let run_few = |from| run_all(from..from + 4, Variant { bug: Some(bug), ..Variant::default() });
        let failures = (0..SEEDS_TO_FIND).step_by(4).flat_map(run_few);
        let first = failures.into_iter().find_map(|outcome| Some((outcome.seed, outcome.failure()?)));
        let (seed, failure) = first.unwrap_or_else(|| panic!("{bug:?} was not found"));
        eprintln!("{bug:?} was found by seed {seed}: {failure:.200}");
    }
}

/// Runs some seeds with the same faults. In all of them a node returns, and no promise is broken.
fn check_returns(faults: &[TimedFault]) {
    for outcome in run_all(0..20, Variant { faults: Some(faults), ..Variant::default() }) {
        assert_eq!(outcome.failure(), None);
        assert!(outcome.changes.returns > 0, "{outcome:?}");
    }
}

#[test]
fn a_node_that_was_lost_after_it_had_committed_shows_the_dataset_when_it_returns() {
    let second = Duration::from_secs(1);
    check_returns(&[
        (Duration::ZERO, Fault::Strike("Commit", 1, Blow::Silence(NodeId(1), 8 * second))),
        (second / 2, Fault::Break(NodeId(2), 4 * second)),
    ]);
}

#[test]
fn a_new_coordinator_makes_nodes_that_returned_during_the_stage_in_show_its_dataset() {
    let second = Duration::from_secs(1);
    check_returns(&[
        (Duration::ZERO, Fault::Strike("Prepare", 1, Blow::Freeze(8 * second))),
        (Duration::ZERO, Fault::Strike("Commit", 2, Blow::Freeze(60 * second))),
        (second / 2, Fault::Break(NodeId(2), 4 * second)),
    ]);
}
