//! How long each wait of a session may take. The launcher decides, the invitation tells every server, and a server tells its clients
//! what concerns them. A test runs a session with a tenth of the defaults; the relations between them are checked either way.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Two deadlines that do not go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these deadlines do not go together: {0}")]
pub struct DeadlineError(pub &'static str);

/// Declares the table once: its fields, their defaults, and what is done with each of them.
macro_rules! deadlines {
    ($($(#[$about:meta])+ $name:ident = $default:expr;)+) => {
        /// The deadlines and intervals of a session.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Deadlines {
            $($(#[$about])+ pub $name: Duration,)+
        }

        impl Deadlines {
            /// What a session has when nothing else is said.
            pub const DEFAULT: Self = Self { $($name: $default,)+ };

            /// Each of them divided by `divisor`; 0 counts as 1.
            pub fn scaled(&self, divisor: u32) -> Self {
                let divisor = divisor.max(1);
                Self { $($name: self.$name / divisor,)+ }
            }

            /// Whether each of them is at least a millisecond.
            const fn are_all_some(&self) -> bool {
                $(self.$name.as_millis() > 0)&&+
            }
        }
    };
}

deadlines! {
    /// Connecting to a peer.
    connect = Duration::from_secs(2);
    /// The handshake of a new connection.
    handshake = Duration::from_secs(2);
    /// A peer that could not be reached is not dialled again for so long.
    redial = Duration::from_secs(1);
    /// A request to a peer, from its last progress.
    request = Duration::from_secs(5);
    /// A peer from which no byte came for so long is lost.
    peer_lost = Duration::from_secs(5);
    /// A link from which no byte came for so long, while others of the same peer had some, is replaced.
    link_silent = Duration::from_secs(2);
    /// A sign of life is sent on every connection at this interval.
    ping_interval = Duration::from_secs(1);
    /// Between two looks at a peer that is overdue, and before one that had no time for us is dialled again.
    look_interval = Duration::from_millis(100);
    /// A client's wait for its server.
    server = Duration::from_secs(30);
    /// A server says so often in shared memory that it serves.
    heartbeat_interval = Duration::from_secs(1);
    /// A client that waits for its server gives it up once it has not said so for this long. Counted in ticks during which the client
    /// itself ran, so that one that was stopped does not find it run out.
    heartbeat = Duration::from_secs(5);
    /// A server's wait for a client that takes no bytes: then it revokes the client's leases.
    send = Duration::from_secs(5);
    /// A request that has waited for room in the arena for so long asks all who have leases to give them back.
    recall_after = Duration::from_millis(500);
    /// A client that was asked for so long loses its leases if somebody still waits, the largest holder first.
    recall = Duration::from_secs(5);
    /// The launcher tells each server so often that the session goes on, and hears that the server does.
    lease_interval = Duration::from_secs(1);
    /// A server that does not hear it for so long ends. Counted in intervals, so that a server that was stopped does not find it run out.
    lease = Duration::from_secs(6);
    /// Preparing a dataset on a node: it reads the catalog from another node and checks it whole.
    prepare = Duration::from_secs(300);
    /// A batch's wait for room at its owner, whose drive may be slow: back pressure, not failure. Its sender waits a little longer;
    /// an owner that is dead is found by its silence much sooner.
    landing = Duration::from_secs(60);
    /// See [`Deadlines::landing`].
    offer = Duration::from_secs(70);
    /// A batch that waits this long for room has what was written before it go out to the drive.
    landing_patience = Duration::from_millis(100);
    /// A request's wait for room in the arena, all of which is leased.
    arena = Duration::from_secs(15);
    /// How long a server waits for processes to end the views they have, before it gives kept blocks up.
    views = Duration::from_secs(2);
    /// An order of which nothing was read for so long gives its blocks back until something is.
    order_idle = Duration::from_secs(30);
    /// How often a stage-in's workers report, and hear whether to go on.
    progress_interval = Duration::from_millis(200);
    /// A stage-in of which no node reads, decodes, sends or writes anything, nor merges what was found, for so long ends. File systems of
    /// sites stand still for minutes when one of their servers is replaced by another; `--stage-in-timeout` sets it.
    stall = Duration::from_secs(300);
    /// A stage-in's coordinator gives a node up that has not reported for so long.
    node_silent = Duration::from_secs(15);
    /// A worker that asks for a unit when there is none is told within this to ask again.
    unit = Duration::from_millis(2500);
    /// The last answer of a server that ends goes out within this, or its asker hears of the end by the connection's.
    last_answer = Duration::from_millis(50);
}

const _: () = assert!(Deadlines::DEFAULT.check().is_ok());

impl Default for Deadlines {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Deadlines {
    /// Divisors that [`Deadlines::scaled`] takes from a user: with more, the shortest of them would be nothing.
    pub const DIVISOR_MAX: u32 = 20;
    /// A peer is lost, and a link replaced, only after so many looks without a byte from it: a process that was stopped or starved finds that time has
    /// passed, and what came meanwhile unread.
    pub const LOOKS_MIN: u32 = 4;

    /// Whether they go together, as each wait within another must be the shorter.
    ///
    /// # Errors
    /// Names the first relation that does not hold.
    pub const fn check(&self) -> Result<(), DeadlineError> {
        const fn ms(duration: Duration) -> u128 {
            duration.as_millis()
        }
        macro_rules! ensure {
            ($($holds:expr, $relation:literal;)+) => {
                $(if !$holds {
                    return Err(DeadlineError($relation));
                })+
            };
        }
        ensure! {
            ms(self.ping_interval) * 3 <= ms(self.peer_lost), "two pings may be late before a peer is lost";
            ms(self.ping_interval) * 2 <= ms(self.link_silent), "a ping may be late before a link is replaced";
            (ms(self.link_silent) + ms(self.look_interval) * Self::LOOKS_MIN as u128) * 2 <= ms(self.request),
            "a request that is moved to another link has as much time again";
            ms(self.link_silent) < ms(self.peer_lost), "a link is replaced before its peer is lost";
            ms(self.look_interval) <= ms(self.ping_interval), "a peer that is overdue is looked at more often than one that is not";
            ms(self.look_interval) * Self::LOOKS_MIN as u128 <= ms(self.peer_lost), "all looks fit the time after which a peer is lost";
            ms(self.ping_interval) * 2 <= ms(self.request), "a wait to be told of a stage-in ends before its request does";
            ms(self.unit) < ms(self.request), "a wait for a unit ends before its request does";
            ms(self.landing) + ms(self.request) < ms(self.offer), "an offer outwaits the batches before it";
            ms(self.arena) + ms(self.request) < ms(self.server), "a client outwaits its server's wait for room and its request";
            ms(self.heartbeat_interval) * 3 <= ms(self.heartbeat), "two heartbeats may be late before a client gives its server up";
            ms(self.heartbeat) < ms(self.server), "a client learns that its server stands still before it has waited long enough";
            ms(self.recall_after) + ms(self.recall) * 2 < ms(self.arena), "leases are revoked in time for who waits for their room";
            ms(self.request) < ms(self.node_silent), "a node may miss a report before its stage-in is given up";
            ms(self.progress_interval) < ms(self.request), "a node reports more often than its reports may take";
            ms(self.lease_interval) * 3 <= ms(self.lease), "two signs of life may be late before a server ends";
            ms(self.progress_interval) * 4 <= ms(self.stall), "a stage-in stands still only after several reports without progress";
            self.are_all_some(), "each is at least a millisecond";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_defaults_keeps_their_relations() {
        for divisor in 0..=Deadlines::DIVISOR_MAX {
            let scaled = Deadlines::DEFAULT.scaled(divisor);
            assert_eq!(scaled.check(), Ok(()), "{divisor}");
        }
        assert_eq!(Deadlines::DEFAULT.scaled(10).request, Duration::from_millis(500));
    }

    #[test]
    fn deadlines_that_do_not_go_together_are_refused() {
        let defaults = Deadlines::DEFAULT;
        let wrong = [
            Deadlines { ping_interval: defaults.peer_lost / 2, ..defaults },
            Deadlines { offer: defaults.landing, ..defaults },
            Deadlines { server: defaults.arena, ..defaults },
            Deadlines { lease: defaults.lease_interval, ..defaults },
            Deadlines { unit: defaults.request, ..defaults },
            Deadlines { lease_interval: Duration::ZERO, ..defaults },
        ];
        for deadlines in wrong {
            assert!(deadlines.check().is_err(), "{deadlines:?}");
        }
    }
}
