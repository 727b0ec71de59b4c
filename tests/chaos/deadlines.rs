//! How long operations may take. What is looked for are hangs, on a machine that may have more to do than it can: so each deadline is
//! taken several times, and a constant is added.

use std::sync::OnceLock;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;

/// Sessions run with a part of the deadlines, so that a seed takes seconds; not with a tenth, for on a machine with many runs at once
/// a server may not come to its turn for half a second.
const DIVISOR: u32 = 4;

/// For a machine with much else to do.
const SLACK: Duration = Duration::from_secs(15);

/// By what the deadlines of a session are divided; `DAYFLY_CHAOS_DIVISOR` says otherwise.
pub(crate) fn divisor() -> u32 {
    static DIVISOR_OF_RUN: OnceLock<u32> = OnceLock::new();
    *DIVISOR_OF_RUN.get_or_init(|| {
        let given = std::env::var("DAYFLY_CHAOS_DIVISOR").ok();
        given.map_or(DIVISOR, |given| given.parse().expect("DAYFLY_CHAOS_DIVISOR is a number"))
    })
}

fn deadlines() -> Deadlines {
    Deadlines::DEFAULT.scaled(divisor())
}

/// An operation of a reader, by its name in the log: at most so many waits for a server that does not answer.
pub(crate) fn of_reader(what: &str) -> Duration {
    // A large file is asked for piece by piece, a batch in parts; one server that stands still is waited for once.
    let waits = if what.starts_with("read") || what.starts_with("cat") || what.contains("batch") { 3 } else { 2 };
    deadlines().server * waits + deadlines().arena + SLACK
}

/// A command that asks servers and waits for all of them.
pub(crate) fn of_command() -> Duration {
    deadlines().server * 2 + deadlines().request + SLACK
}

/// A stage-in of a few MB, from the last thing that was done to it.
pub(crate) fn of_stage_in() -> Duration {
    // Publishing may begin just before a node is lost.
    let deadlines = deadlines();
    (deadlines.offer + deadlines.peer_lost + deadlines.request) * 2 + deadlines.prepare / 10 + SLACK
}

/// Servers whose supervisor was killed are gone.
pub(crate) fn of_lease() -> Duration {
    deadlines().lease * 3 + SLACK
}

/// For so long after a fault its errors may still be met.
pub(crate) fn aftermath() -> Duration {
    let deadlines = deadlines();
    (deadlines.peer_lost + deadlines.request + deadlines.redial) * 2 + SLACK / 5
}

/// The permille of a schedule as time.
pub(crate) fn of_schedule(permille: u32) -> Duration {
    deadlines().peer_lost * permille / 1000
}
