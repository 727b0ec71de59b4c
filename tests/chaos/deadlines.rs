//! How long operations may take. What is looked for are hangs, on a machine that may have more to do than it can: so each deadline is
//! taken several times, and a constant is added.

use std::time::Duration;

use dayfly_meta::limits::{
    ARENA_TIMEOUT, LEASE_TIMEOUT, OFFER_TIMEOUT, PEER_LOST_TIMEOUT, PREPARE_TIMEOUT, REDIAL_INTERVAL, REQUEST_TIMEOUT,
    SERVER_TIMEOUT,
};

/// For a machine with much else to do.
const SLACK: Duration = Duration::from_secs(15);

/// An operation of a reader, by its name in the log: at most so many waits for a server that does not answer.
pub(crate) fn of_reader(what: &str) -> Duration {
    // A large file is asked for piece by piece, a batch in parts; one server that stands still is waited for once.
    let waits = if what.starts_with("read") || what.starts_with("cat") || what.contains("batch") { 3 } else { 2 };
    SERVER_TIMEOUT * waits + ARENA_TIMEOUT + SLACK
}

/// A command that asks servers and waits for all of them.
pub(crate) fn of_command() -> Duration {
    SERVER_TIMEOUT * 2 + REQUEST_TIMEOUT + SLACK
}

/// A stage-in of a few MB, from the last thing that was done to it.
pub(crate) fn of_stage_in() -> Duration {
    // Publishing may begin just before a node is lost.
    (OFFER_TIMEOUT + PEER_LOST_TIMEOUT + REQUEST_TIMEOUT) * 2 + PREPARE_TIMEOUT / 10 + SLACK
}

/// Servers whose supervisor was killed are gone.
pub(crate) fn of_lease() -> Duration {
    LEASE_TIMEOUT * 3 + SLACK
}

/// For so long after a fault its errors may still be met.
pub(crate) fn aftermath() -> Duration {
    (PEER_LOST_TIMEOUT + REQUEST_TIMEOUT + REDIAL_INTERVAL) * 2 + SLACK / 5
}

/// The permille of a schedule as time.
pub(crate) fn of_schedule(permille: u32) -> Duration {
    PEER_LOST_TIMEOUT * permille / 1000
}
