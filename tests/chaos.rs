//! Runs sessions of four nodes, with readers on all nodes that check every byte, and injects faults of every kind in an order that
//! a seed determines: servers are killed, stand still and return, links fail, drives and the parallel file system return errors. The
//! test fails on a wrong byte, on a wait beyond its deadline, on an error whose cause was not injected or that the docs rule out, and
//! on anything that a run leaves behind.
//!
//! `DAYFLY_CHAOS_SEED=7` runs one seed, `DAYFLY_CHAOS_SEEDS=1..300` a range of seeds, and `DAYFLY_CHAOS_JOBS` sets how many run at
//! once. The test prints a failing seed and its steps. A seed always has the same steps, but the timing within a step depends on
//! the machine, so a failure may take several runs to reproduce.

mod causes;
mod data;
mod deadlines;
mod ending;
mod faults;
mod inject;
mod launch;
mod leftovers;
mod log;
pub(crate) mod network;
mod planted;
mod promises;
mod reader;
mod readers;
mod run;
mod schedule;
mod stage_ins;
mod starvation;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::harness;
use schedule::{Place, Schedule};

/// The seeds that `.ci/run` runs. Together their schedules have each kind of fault, which a test checks.
const SEEDS: &[u64] = &[1114, 138, 6440, 1119];
/// This many characters of a failure stand in the last message.
const FAILURE_CHARS: usize = 2000;
/// The maximum number of seeds that run at once if `DAYFLY_CHAOS_JOBS` is not set, even on a machine with more cores.
const JOBS_MAX: usize = 4;

/// This is not a test in itself. A run starts this test binary again for each reader, with [`reader::VARIABLE`] set; the new
/// process then becomes that reader.
#[test]
fn a_reader_in_a_process_of_its_own() {
    if let Ok(task) = std::env::var(reader::VARIABLE) {
        reader::main(&task);
    }
}

fn seeds() -> Vec<u64> {
    let number = |text: &str| text.trim().parse::<u64>().expect("a number");
    if let Ok(seed) = std::env::var("DAYFLY_CHAOS_SEED") {
        return vec![number(&seed)];
    }
    let Ok(range) = std::env::var("DAYFLY_CHAOS_SEEDS") else { return SEEDS.to_vec() };
    let (from, to) = range.split_once("..").expect("DAYFLY_CHAOS_SEEDS is FROM..TO");
    (number(from)..number(to)).collect()
}

/// SEMANTICS: "Never wrong bytes. A read returns the bytes that were staged in, or an error. It never returns zeros, a part of the
/// data, or another version."
/// SEMANTICS: "Nothing hangs. Every wait ends, with an answer or with an error that names the node, the object and the remedy."
/// SEMANTICS: "Nothing is left behind. However a session ends, its space is freed and its files are gone."
#[test]
fn under_faults_every_read_is_right_or_fails_with_its_cause_and_nothing_hangs() {
    let seeds = seeds();
    harness::strace::is_possible();
    // Soft-RoCE cards have no network namespaces.
    let has_namespaces = launch::transport().is_none() && network::is_possible();
    run_all(&seeds, has_namespaces);
}

/// Runs the schedules of these seeds, a few at once, and fails if one of them fails.
fn run_all(seeds: &[u64], has_namespaces: bool) {
    let jobs = std::env::var("DAYFLY_CHAOS_JOBS").ok().and_then(|jobs| jobs.parse().ok());
    let jobs = jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from).min(JOBS_MAX));
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let schedule = Schedule::new(seed);
                    if schedule.place == Place::Namespaces && !has_namespaces {
                        eprintln!("seed {seed} is SKIPPED, because network namespaces cannot be created here");
                    } else if let Err(failure) = play(schedule) {
                        failures.lock().unwrap().push(format!("seed {seed}: {failure:.FAILURE_CHARS$}"));
                    }
                }
            });
        }
    });
    let failed = failures.into_inner().unwrap();
    eprintln!("{} seeds in {:.0} s, {} failed", seeds.len(), begin.elapsed().as_secs_f64(), failed.len());
    assert!(failed.is_empty(), "these seeds failed, see above:\n{}", failed.join("\n"));
}

/// Runs one schedule, and prints what happened.
fn play(schedule: Schedule) -> Result<(), String> {
    let (start, seed, place, text) = (Instant::now(), schedule.seed, schedule.place, schedule.to_string());
    let result = catch_unwind(AssertUnwindSafe(|| run::run(schedule, None))).unwrap_or_else(|panic| {
        let owned = panic.downcast_ref::<String>().cloned();
        let message = owned.or(panic.downcast_ref::<&str>().map(|&message| message.to_owned()));
        Err(format!("PANIC: {}", message.unwrap_or_default()))
    });
    let took = start.elapsed().as_secs_f64();
    match &result {
        Ok(tally) => eprintln!(
            "seed {seed} ({place:?}): {} operations, {} epochs, {} explained errors, {} calls injected, {} faults skipped, servers \
             starved {} times, {took:.1} s",
            tally.operations,
            tally.epochs.iter().sum::<u32>(),
            tally.errors,
            tally.injected,
            tally.skipped,
            tally.starved,
        ),
        Err(failure) => eprintln!("{text}  DAYFLY_CHAOS_SEED={seed} ({place:?}) FAILED after {took:.1} s: {failure}"),
    }
    result.map(drop)
}
