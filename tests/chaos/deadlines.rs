//! Time limits of operations. The test looks for hangs, on a machine that may be overloaded, so each limit is a multiple of the
//! session's deadlines plus a constant.

use std::sync::OnceLock;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::{KEEP_ALIVE_MAX, START_TIMEOUT};

use crate::chaos::launch::RECOVERY_TIMEOUT;
use crate::chaos::schedule::EPOCHS;

/// Sessions run with a tenth of the default deadlines, so that a seed takes seconds. See [`crate::chaos::starvation`] for machines that are
/// too busy for that.
const DIVISOR: u32 = 10;

/// Added to each limit for a machine that is busy with other work.
const SLACK: Duration = Duration::from_secs(15);

/// Returns the divisor of a session's deadlines: [`DIVISOR`], or the value of `DAYFLY_CHAOS_DIVISOR`.
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

/// Returns the time limit for a reader's operation: the time of a few waits for a server that does not answer. `what` is the
/// operation's name in the log.
pub(crate) fn of_reader(what: &str) -> Duration {
    // A large file is requested piece by piece and a batch in parts, but a reader waits only once for a stopped server.
    let waits = if what.starts_with("read") || what.starts_with("cat") || what.contains("batch") { 3 } else { 2 };
    (deadlines().server + deadlines().origin) * waits + deadlines().arena + RECOVERY_TIMEOUT + SLACK
}

/// Returns the time limit for a command that sends requests to all servers and waits for all of them.
pub(crate) fn of_command() -> Duration {
    deadlines().server * 2 + deadlines().request + SLACK
}

/// Returns the time limit for a stage-in of a few MB, counted from the last disturbance.
pub(crate) fn of_stage_in() -> Duration {
    // These deadlines count twice, because publishing may begin just before a node is lost.
    let deadlines = deadlines();
    (deadlines.offer + deadlines.peer_lost + deadlines.request) * 2 + deadlines.prepare / 10 + SLACK
}

/// Returns the time within which all servers exit after their supervisor is killed.
pub(crate) fn of_lease() -> Duration {
    deadlines().lease * 3 + SLACK
}

/// Returns the time within which a server that has died, or whose node is back, is replaced.
pub(crate) fn of_replacement() -> Duration {
    of_lease() + START_TIMEOUT
}

/// Returns the time within which a reader reads a few epochs of a few MB. It may wait for samples in each of them.
pub(crate) fn of_epochs() -> Duration {
    (RECOVERY_TIMEOUT + SLACK) * EPOCHS
}

/// Returns how long a thread of a server waits for a processor before the server may miss a deadline.
pub(crate) fn of_starvation() -> Duration {
    deadlines().peer_lost / 4
}

/// Returns how late the harness itself runs before the whole session may have stood still for so long that servers miss a deadline.
pub(crate) fn of_standstill() -> Duration {
    deadlines().peer_lost / 2
}

/// Returns how long a server may be cut off without ending. The rest is for a machine that is busy.
pub(crate) fn of_outage() -> Duration {
    deadlines().lease * 4 / 5
}

/// Returns the time after a fault within which its errors may still appear.
pub(crate) fn aftermath() -> Duration {
    let deadlines = deadlines();
    (deadlines.peer_lost + deadlines.request + deadlines.redial) * 2 + SLACK / 5
}

/// Returns the time within which servers end their connections to peers that have vanished.
pub(crate) fn of_connections() -> Duration {
    KEEP_ALIVE_MAX + aftermath() * 2
}

/// Converts a time of the schedule to a duration. Times of the schedule are in permille of the deadline after which a peer is lost.
pub(crate) fn of_schedule(permille: u32) -> Duration {
    deadlines().peer_lost * permille / 1000
}
