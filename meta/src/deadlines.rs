//! How long each wait in a session may take. The launcher chooses the deadlines, the invitation
//! carries them to every server, and each server passes on to its clients the ones that concern
//! them. Tests run sessions with a tenth of the defaults. [`Deadlines::check`] verifies the
//! relations between deadlines in both cases.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A relation between two deadlines that does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("these deadlines break a rule: {0}")]
pub struct DeadlineError(pub &'static str);

/// Declares the table once: the fields, their defaults, and the functions that visit every field.
macro_rules! deadlines {
    ($($(#[$about:meta])+ $name:ident = $default:expr;)+) => {
        /// The deadlines and intervals of a session.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Deadlines {
            $($(#[$about])+ pub $name: Duration,)+
        }

        impl Deadlines {
            /// The deadlines of a session unless its launcher sets others.
            pub const DEFAULT: Self = Self { $($name: $default,)+ };

            /// Divides every deadline by `divisor`; 0 counts as 1. The deadline for a heartbeat is shortened less, because on a
            /// busy machine a server may not run for half a second.
            pub fn scaled(&self, divisor: u32) -> Self {
                let divisor = divisor.max(1);
                let scaled = Self { $($name: self.$name / divisor,)+ };
                Self { heartbeat: self.heartbeat.min(scaled.server / 2), ..scaled }
            }

            /// Returns whether every deadline is at least a millisecond.
            const fn are_all_some(&self) -> bool {
                $(self.$name.as_millis() > 0)&&+
            }
        }
    };
}

deadlines! {
    /// How long connecting to a peer may take.
    connect = Duration::from_secs(2);
    /// How long the handshake of a new connection may take.
    handshake = Duration::from_secs(2);
    /// How long to wait before redialing a peer that could not be reached.
    redial = Duration::from_secs(1);
    /// How long a request to a peer may go without progress.
    request = Duration::from_secs(5);
    /// How long a read may wait for the parallel file system, when a block is read from its origin. The
    /// file system of a site can hang for a minute while one of its servers fails over.
    origin = Duration::from_secs(100);
    /// How long a peer may go without sending a byte before it counts as lost.
    peer_lost = Duration::from_secs(5);
    /// How long a link may go without delivering a byte, while other links to the same peer deliver some, before it is replaced.
    link_silent = Duration::from_secs(2);
    /// How often a ping is sent on every connection.
    ping_interval = Duration::from_secs(1);
    /// How often an overdue peer is checked, and how long the dialer waits before it redials
    /// a peer that was too busy to answer.
    look_interval = Duration::from_millis(100);
    /// How long a client waits for its server.
    server = Duration::from_secs(30);
    /// How often a server advances the heartbeat on its status page.
    heartbeat_interval = Duration::from_secs(1);
    /// How long the heartbeat may stand still before a client that waits for its server says so, or, if it is a command that shows
    /// something, gives up. Reads wait for as long as a peer may stand still that reads from an origin. A client measures this
    /// time in its own polls, so a client that was stopped does not find the time expired when it continues.
    heartbeat = Duration::from_secs(5);
    /// How long a server waits for a client that reads nothing from its socket before it revokes
    /// the client's leases.
    send = Duration::from_secs(5);
    /// How long a request waits for room in the arena before the server asks all holders of leases
    /// to release them.
    recall_after = Duration::from_millis(500);
    /// How long a client may keep its leases after it was asked to release them. If a request is
    /// still waiting then, the server revokes leases, those of the largest holder first.
    recall = Duration::from_secs(5);
    /// How often the supervisor renews each server's lease. The server answers each renewal.
    lease_interval = Duration::from_secs(1);
    /// How long a server keeps serving without a renewal of its lease before it exits. The time is
    /// counted in intervals, so a server that was stopped does not find the time expired when it
    /// continues. A server that is cut off counts as lost before, and has the rest of this time to return with its blocks.
    lease = Duration::from_secs(90);
    /// How long a server goes on publishing datasets without a renewal of its lease. Counted like the lease.
    publish_lease = Duration::from_secs(20);
    /// How long a server may be silent before the supervisor counts it as lost. Counted like the lease. `--lost-after` sets this
    /// deadline.
    lost_after = Duration::from_secs(30);
    /// How long a server whose control channel was closed may take to dial the supervisor again before it counts as lost.
    reconnect = Duration::from_secs(2);
    /// How long a new server may fail to catch up with the session before it gives up its place, and ends. Counted from its first
    /// attempt. It is also the longest pause between two attempts.
    catch_up = Duration::from_secs(10);
    /// How long a node may take to prepare a dataset: it reads the catalog from another node and checks all of it.
    prepare = Duration::from_secs(300);
    /// How long a batch waits for room at its owner, whose drive may be slow. This is back
    /// pressure, not failure: a dead owner is noticed by its silence much sooner. The sender waits
    /// a little longer; see [`Deadlines::offer`].
    landing = Duration::from_secs(60);
    /// How long the sender of a batch waits for the owner; see [`Deadlines::landing`].
    offer = Duration::from_secs(70);
    /// How long a batch waits for room before the owner makes the kernel write out the bytes that the kernel
    /// has buffered so far.
    landing_patience = Duration::from_millis(100);
    /// How long a request waits for room in the arena while all of it is leased.
    arena = Duration::from_secs(15);
    /// How long a server waits for processes to end their views before it evicts cached blocks.
    views = Duration::from_secs(2);
    /// How long an order may go unread before its prefetched blocks are evicted. The order stays,
    /// and resumes when it is read.
    order_idle = Duration::from_secs(30);
    /// How often the workers of a stage-in report their progress and learn whether to continue.
    progress_interval = Duration::from_millis(200);
    /// How long a stage-in may go on without any node reading, decoding, sending, writing or
    /// merging anything. A site's file system can hang for minutes while one of its
    /// servers fails over; `--stage-in-timeout` sets this deadline.
    stall = Duration::from_secs(300);
    /// How long a node may go without reporting before the coordinator aborts the stage-in.
    node_silent = Duration::from_secs(15);
    /// How long the coordinator may hold a worker's request for a unit while no unit is free. The worker then asks again.
    unit = Duration::from_millis(2500);
    /// How long an exiting server tries to send its last answer. After that, the client learns of
    /// the exit from the closed connection.
    last_answer = Duration::from_millis(50);
}

const _: () = assert!(Deadlines::DEFAULT.check().is_ok());

impl Default for Deadlines {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Deadlines {
    /// The largest divisor that a user may pass to [`Deadlines::scaled`]. With a larger one the
    /// shortest deadlines would vanish.
    pub const DIVISOR_MAX: u32 = 20;
    /// A peer counts as lost, and a link is replaced, only after this many checks without a byte.
    /// Time alone does not show that nothing arrived: after a process was stopped or starved, there
    /// may be bytes that it has not read yet.
    pub const LOOKS_MIN: u32 = 4;

    /// Returns how long a client waits for its server without a sign of life: as long as one that reads from an origin, and at least
    /// until the supervisor has declared it lost.
    pub const fn silence(&self) -> Duration {
        let read = self.origin.saturating_add(self.request.saturating_mul(2));
        let lost = self.lost_after.saturating_add(self.node_silent);
        if read.as_nanos() > lost.as_nanos() { read } else { lost }
    }

    /// Returns how long a server's runtime may make no turn while its process runs, before the server ends itself.
    pub const fn deadlock(&self) -> Duration {
        let least = crate::limits::DEADLOCK_TIMEOUT_MIN;
        if self.lost_after.as_nanos() > least.as_nanos() { self.lost_after } else { least }
    }

    /// Returns the number of beats without a turn after which a client gives its server up. The server ends itself before.
    pub const fn deadlock_beats(&self) -> u32 {
        let beats = self.deadlock().as_nanos() / self.heartbeat_interval.as_nanos();
        (if beats > u32::MAX as u128 / 2 { u32::MAX / 2 } else { beats as u32 }) + 5
    }

    /// The largest factor that a user may pass to [`Deadlines::patient`].
    pub const PATIENCE_MAX: u32 = 100;

    /// Multiplies by `factor` the times after which somebody is judged, or a request fails; 0 counts as 1. What only sets a pace
    /// stays: intervals, pauses, and waits that slow down a sender.
    #[must_use]
    pub fn patient(&self, factor: u32) -> Self {
        let factor = factor.max(1);
        Self {
            connect: self.connect * factor,
            handshake: self.handshake * factor,
            request: self.request * factor,
            origin: self.origin * factor,
            peer_lost: self.peer_lost * factor,
            link_silent: self.link_silent * factor,
            server: self.server * factor,
            send: self.send * factor,
            recall: self.recall * factor,
            lease: self.lease * factor,
            publish_lease: self.publish_lease * factor,
            lost_after: self.lost_after * factor,
            reconnect: self.reconnect * factor,
            catch_up: self.catch_up * factor,
            prepare: self.prepare * factor,
            offer: self.offer * factor,
            arena: self.arena * factor,
            stall: self.stall * factor,
            node_silent: self.node_silent * factor,
            ..*self
        }
    }

    /// Checks the relations between the deadlines: a wait within another wait must be the shorter
    /// one.
    ///
    /// # Errors
    /// The error names the first relation that does not hold.
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
            ms(self.ping_interval) * 3 <= ms(self.peer_lost), "two pings may be late before a peer counts as lost";
            ms(self.ping_interval) * 2 <= ms(self.link_silent), "a ping may be late before a link is replaced";
            (ms(self.link_silent) + ms(self.look_interval) * Self::LOOKS_MIN as u128) * 2 <= ms(self.request),
            "a request that moves to another link has as much time there";
            ms(self.link_silent) < ms(self.peer_lost), "a link is replaced before its peer is lost";
            ms(self.look_interval) <= ms(self.ping_interval), "an overdue peer is checked more often than it is pinged";
            ms(self.look_interval) * Self::LOOKS_MIN as u128 <= ms(self.peer_lost), "all checks fit into the time after which a peer counts as lost";
            ms(self.ping_interval) * 2 <= ms(self.request), "a wait for news of a stage-in is shorter than its request";
            ms(self.request) * 2 <= ms(self.origin), "a peer may say several times that it still reads from an origin";
            ms(self.request) < ms(self.server), "a client hears from its server while both wait for an origin";
            ms(self.unit) < ms(self.request), "a wait for a unit is shorter than its request";
            ms(self.landing) + ms(self.request) < ms(self.offer), "an offer waits longer than the batches ahead of it may take";
            ms(self.arena) + ms(self.request) < ms(self.server), "a client waits longer than its server's wait for room and its request together";
            ms(self.heartbeat_interval) * 3 <= ms(self.heartbeat), "two heartbeats may be late before a client says that its server stands still";
            ms(self.heartbeat) < ms(self.server), "a client notices that its server has stopped before its own wait expires";
            ms(self.recall_after) + ms(self.recall) * 2 < ms(self.arena), "leases are revoked in time for the requests that wait for their room";
            ms(self.request) < ms(self.node_silent), "a node may miss a report before the coordinator aborts its stage-in";
            ms(self.progress_interval) < ms(self.request), "a node's reports are more frequent than the deadline of one report";
            ms(self.lease_interval) * 3 <= ms(self.publish_lease), "two renewals of the lease may be late before a server stops publishing";
            ms(self.publish_lease) + ms(self.lease_interval) <= ms(self.lease), "a server stops publishing before it exits";
            ms(self.lost_after) * 2 <= ms(self.lease), "a server that is lost because it is cut off has as long again to return";
            ms(self.publish_lease) + ms(self.lease_interval) <= ms(self.lost_after), "a silent server stops publishing before it counts as lost";
            ms(self.lease_interval) <= ms(self.reconnect), "a closed control channel is noticed by the next renewal";
            ms(self.progress_interval) * 8 <= ms(self.catch_up), "a new server tries several times to catch up";
            ms(self.peer_lost) < ms(self.lost_after), "a connection between servers is replaced before either server counts as lost";
            ms(self.progress_interval) * 4 <= ms(self.stall), "a stage-in counts as stalled only after several reports without progress";
            self.are_all_some(), "each is at least a millisecond";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaled_defaults_satisfy_all_relations() {
        for divisor in 0..=Deadlines::DIVISOR_MAX {
            let scaled = Deadlines::DEFAULT.scaled(divisor);
            assert_eq!(scaled.check(), Ok(()), "{divisor}");
        }
        assert_eq!(Deadlines::DEFAULT.scaled(10).request, Duration::from_millis(500));
        assert_eq!(Deadlines::DEFAULT.scaled(10).heartbeat, Duration::from_millis(1500));
        assert_eq!(Deadlines::DEFAULT.scaled(1), Deadlines::DEFAULT);
    }

    #[test]
    fn patience_multiplies_what_judges_and_keeps_the_pace() {
        let defaults = Deadlines::DEFAULT;
        for factor in 0..=Deadlines::PATIENCE_MAX {
            assert_eq!(defaults.patient(factor).check(), Ok(()), "{factor}");
        }
        assert_eq!(defaults.patient(1), defaults);
        let patient = defaults.patient(4);
        assert_eq!((defaults.silence(), defaults.deadlock_beats()), (Duration::from_secs(110), 35));
        assert_eq!((patient.silence(), patient.deadlock_beats()), (Duration::from_secs(440), 125));
        let judges = [(patient.lost_after, 120), (patient.request, 20), (patient.server, 120), (patient.stall, 1200)];
        assert_eq!(judges.map(|(found, _)| found), judges.map(|(_, seconds)| Duration::from_secs(seconds)));
        let pace = |deadlines: Deadlines| {
            let Deadlines {
                redial,
                ping_interval,
                look_interval,
                heartbeat_interval,
                heartbeat,
                recall_after,
                lease_interval,
                ..
            } = deadlines;
            let Deadlines { landing, landing_patience, views, order_idle, progress_interval, unit, last_answer, .. } = deadlines;
            let intervals = [redial, ping_interval, look_interval, heartbeat_interval, heartbeat, recall_after, lease_interval];
            (intervals, [landing, landing_patience, views, order_idle, progress_interval, unit, last_answer])
        };
        assert_eq!(pace(patient), pace(defaults));
    }

    #[test]
    fn deadlines_that_break_a_rule_are_rejected() {
        let defaults = Deadlines::DEFAULT;
        let wrong = [
            Deadlines { ping_interval: defaults.peer_lost / 2, ..defaults },
            Deadlines { offer: defaults.landing, ..defaults },
            Deadlines { server: defaults.arena, ..defaults },
            Deadlines { lease: defaults.publish_lease, ..defaults },
            Deadlines { lost_after: defaults.publish_lease, ..defaults },
            Deadlines { publish_lease: defaults.lease_interval, ..defaults },
            Deadlines { unit: defaults.request, ..defaults },
            Deadlines { lease_interval: Duration::ZERO, ..defaults },
        ];
        for deadlines in wrong {
            assert!(deadlines.check().is_err(), "{deadlines:?}");
        }
    }
}
