//! Watches the heartbeat of the node's server: two words of its status page. A thread of the server advances one of them every
//! second (*beats*), and the server's runtime the other (*turns*).
//!
//! The client has no thread for that. It looks at the words whenever it sends something and, while it waits for an answer, at
//! regular polls.
//! - If neither moves, the server is starved, stopped or frozen. The client waits for it for a long time, and says so once.
//! - If only the beats move, the server is deadlocked, and soon every request fails at once.
//!
//! In both cases, requests fail at once until the words move again.
//!
//! Time is counted in polls that this process waited through, and in beats. A process that was stopped, for however long, counts
//! one poll. So a server that kept running, or that was stopped and resumed together with the process, does not count as dead.
//!
//! All state is atomic: threads share it, a forked child continues with its copy, and a signal handler finds nothing locked.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::HEARTBEAT_POLLS;
use dayfly_meta::status_page::StatusPage;

use crate::notice;

/// A client looks for another server when the heartbeat has not changed for its timeout divided by this.
const SILENCE_PARTS: u64 = 4;

/// How long a client waits. The server sets all of these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// For an answer of a server that is alive.
    pub(crate) server: Duration,
    /// For a heartbeat, before it says that it waits, or, with little patience, gives up.
    pub(crate) heartbeat: Duration,
    /// For a heartbeat, before it gives up.
    pub(crate) silence: Duration,
    /// For a turn, in beats. A server that has found its runtime deadlocked has ended before that.
    pub(crate) deadlock_beats: u32,
}

impl Default for Timeouts {
    fn default() -> Self {
        let deadlines = Deadlines::DEFAULT;
        let Deadlines { server, heartbeat, .. } = deadlines;
        Self { server, heartbeat, silence: deadlines.silence(), deadlock_beats: deadlines.deadlock_beats() }
    }
}

impl Timeouts {
    /// Returns the time between two polls.
    pub(crate) fn poll_interval(&self) -> Duration {
        (self.heartbeat / HEARTBEAT_POLLS).max(Duration::from_millis(1))
    }

    /// Returns the shortest time that counts as a poll interval. The kernel's clock is coarser than
    /// ours, so a poll may come this early.
    pub(crate) fn shortest_poll_interval(&self) -> Duration {
        self.poll_interval() * 9 / 10
    }

    /// Returns what to tell the user of a process that waits for its server, and how long it may.
    pub(crate) fn waits(&self, longest: Duration) -> String {
        let (still, longest) = (self.heartbeat.as_secs_f64(), longest.as_secs_f64());
        format!("the server of this node has stood still for {still} s; waiting for it for up to {longest} s")
    }

    /// Returns the number of polls after which a silent server is given up.
    fn silent_polls(&self) -> u32 {
        (self.silence.as_nanos() / self.poll_interval().as_nanos()) as u32
    }
}

/// How long a connection waits for a server that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// As long as anything in the session may stand still. For data.
    Long,
    /// As long as a user waits before looking for the cause. For commands that show or end the session.
    Short,
    /// Before the welcome, only as long as a server that runs takes: this process has waited in vain before. Then as long as for data.
    Spent,
}

impl Patience {
    /// Returns the timeouts of a connection that has the server's timeouts.
    pub(crate) fn of(self, timeouts: Timeouts) -> Timeouts {
        match self {
            Self::Long | Self::Spent => timeouts,
            Self::Short => Timeouts { silence: timeouts.heartbeat, ..timeouts },
        }
    }

    /// Returns the timeouts of a connection before the server has welcomed it: there is no heartbeat yet.
    pub(crate) fn before_welcome(self) -> Timeouts {
        let timeouts = Timeouts::default();
        match self {
            Self::Long => Timeouts { server: timeouts.silence, ..timeouts },
            Self::Short => timeouts,
            Self::Spent => Timeouts { server: 2 * timeouts.poll_interval(), ..timeouts },
        }
    }
}

/// The server's status page, and what this process has seen of its heartbeat.
pub(crate) struct Heartbeat {
    status_page: StatusPage,
    timeouts: Timeouts,
    /// The words that were seen last.
    seen_turns: AtomicU64,
    seen_beats: AtomicU64,
    /// Polls since either word moved.
    still_polls: AtomicU32,
    /// Beats since the last turn.
    idle_beats: AtomicU64,
    /// When the last poll was counted, in microseconds since `start`.
    polled_us: AtomicU64,
    start: Instant,
    /// The turn that [`Self::is_silent`] saw last, and when it was new, in milliseconds since some time before `start`.
    last_turn: AtomicU64,
    last_turn_ms: AtomicU64,
}

impl Heartbeat {
    pub(crate) fn new(status_page: StatusPage, timeouts: Timeouts) -> Self {
        Self {
            seen_turns: AtomicU64::new(status_page.turns()),
            seen_beats: AtomicU64::new(status_page.beats()),
            last_turn: AtomicU64::new(status_page.turns()),
            last_turn_ms: AtomicU64::new(coarse_ms()),
            status_page,
            timeouts,
            still_polls: AtomicU32::new(0),
            idle_beats: AtomicU64::new(0),
            polled_us: AtomicU64::new(0),
            start: Instant::now(),
        }
    }

    pub(crate) fn status_page(&self) -> &StatusPage {
        &self.status_page
    }

    pub(crate) fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    /// Fails while the server is known to be stalled.
    pub(crate) fn check(&self, timeouts: Timeouts) -> io::Result<()> {
        let (turns, beats) = (self.status_page.turns(), self.status_page.beats());
        // Both only grow. A thread that was slow may bring older values.
        let seen_beats = self.seen_beats.fetch_max(beats, Ordering::AcqRel);
        if self.seen_turns.fetch_max(turns, Ordering::AcqRel) < turns {
            self.still_polls.store(0, Ordering::Release);
            self.idle_beats.store(0, Ordering::Release);
        } else if seen_beats < beats {
            self.still_polls.store(0, Ordering::Release);
            self.idle_beats.fetch_add(beats - seen_beats, Ordering::AcqRel);
        }
        if self.idle_beats.load(Ordering::Acquire) >= u64::from(timeouts.deadlock_beats) {
            return Err(stalled(&format!("it runs, but has done nothing for {} of its heartbeats", timeouts.deadlock_beats)));
        }
        if self.still_polls.load(Ordering::Acquire) >= timeouts.silent_polls() {
            return Err(stalled(&format!("it has stood still for {} s", timeouts.silence.as_secs_f64())));
        }
        Ok(())
    }

    /// Returns whether the heartbeat has not changed for a while, so that it is worth looking for another server. Returns `true` once
    /// for each such while.
    #[inline]
    pub(crate) fn is_silent(&self) -> bool {
        let turn = self.status_page.turns();
        let is_same = self.last_turn.load(Ordering::Relaxed) == turn;
        let now_ms = coarse_ms();
        if is_same && now_ms.saturating_sub(self.last_turn_ms.load(Ordering::Relaxed)) < self.silence_ms() {
            return false;
        }
        self.last_turn.store(turn, Ordering::Relaxed);
        self.last_turn_ms.store(now_ms, Ordering::Relaxed);
        is_same
    }

    fn silence_ms(&self) -> u64 {
        self.timeouts.heartbeat.as_millis() as u64 / SILENCE_PARTS
    }

    /// Records that a thread has waited for one poll interval without an answer. Returns whether the server runs as far as this
    /// process knows: one that stands still need not answer.
    pub(crate) fn record_poll(&self, timeouts: Timeouts) -> io::Result<bool> {
        self.check(timeouts)?;
        // Threads that wait at the same time count one poll together.
        let now = self.start.elapsed().as_micros() as u64;
        let last = self.polled_us.load(Ordering::Acquire);
        let is_next = now.saturating_sub(last) >= self.timeouts.shortest_poll_interval().as_micros() as u64;
        if is_next
            && self.polled_us.compare_exchange(last, now, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            && self.still_polls.fetch_add(1, Ordering::AcqRel) + 1 == HEARTBEAT_POLLS
            && timeouts.silence > timeouts.heartbeat
        {
            notice::show(&timeouts.waits(timeouts.silence));
        }
        self.check(timeouts)?;
        Ok(self.still_polls.load(Ordering::Acquire) <= HEARTBEAT_POLLS / 2)
    }
}

fn stalled(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, message.to_owned())
}

/// A clock that costs a few nanoseconds and is precise to a few milliseconds.
pub(crate) fn coarse_ms() -> u64 {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC_COARSE)
        .map_or(0, |now| now.tv_sec() as u64 * 1000 + now.tv_nsec() as u64 / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (StatusPage, Heartbeat) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(dayfly_meta::status_page::FILE_LEN).unwrap();
        (StatusPage::map(&file, true).unwrap(), Heartbeat::new(StatusPage::map(&file, false).unwrap(), Timeouts::default()))
    }

    /// Records a poll after a poll interval, by the client's clock.
    fn poll(client: &Heartbeat) -> io::Result<bool> {
        client.polled_us.store(0, Ordering::Relaxed);
        client.record_poll(client.timeouts)
    }

    /// Returns a client that was attached an hour ago.
    fn aged(client: Heartbeat) -> Heartbeat {
        Heartbeat { start: client.start.checked_sub(Duration::from_secs(3600)).unwrap(), ..client }
    }

    #[test]
    fn polls_of_many_threads_count_once_and_a_heartbeat_resets_the_count() {
        let (server, client) = pair();
        // This is the state of a process that was stopped for an hour. However late a poll is, it
        // counts as one poll.
        let client = aged(client);
        (0..3 * HEARTBEAT_POLLS).for_each(|_| assert!(client.record_poll(client.timeouts).unwrap()));
        assert_eq!(client.still_polls.load(Ordering::Relaxed), 1, "within one poll");
        client.still_polls.store(client.timeouts.silent_polls(), Ordering::Relaxed);
        assert!(client.check(client.timeouts).is_err() && client.record_poll(client.timeouts).is_err());
        server.advance_beats();
        client.check(client.timeouts).unwrap();
        assert_eq!(client.still_polls.load(Ordering::Relaxed), 0);
    }

    /// SEMANTICS: "Time during which the reader itself was stopped does not count."
    #[test]
    fn a_server_that_stands_still_is_waited_for_and_then_fails_and_recovers_at_once() {
        let (server, client) = pair();
        let client = aged(client);
        let waited = (0..).take_while(|_| poll(&client).is_ok()).count() as u32;
        assert_eq!(waited, client.timeouts.silent_polls() - 1);
        assert_eq!(client.timeouts.poll_interval() * client.timeouts.silent_polls(), Duration::from_secs(110));
        server.advance_turns();
        assert!(poll(&client).unwrap(), "it runs again");
        // A server that stands still need not answer in time.
        let answers = (0..2 * HEARTBEAT_POLLS).map(|_| poll(&client).unwrap()).collect::<Vec<_>>();
        assert!(answers[..9].iter().all(|is_running| *is_running) && !answers[9..].iter().any(|is_running| *is_running));
    }

    #[test]
    fn a_server_whose_process_runs_while_its_runtime_does_not_fails_sooner() {
        let (server, client) = pair();
        let client = aged(client);
        let longest = client.timeouts.deadlock_beats;
        for _ in 0..3 {
            let beats = (0..).take_while(|_| {
                server.advance_beats();
                (0..4).all(|_| poll(&client).is_ok())
            });
            assert_eq!(beats.count() as u32, longest - 1);
            assert!(client.check(client.timeouts).is_err());
            server.advance_turns();
            client.check(client.timeouts).unwrap();
        }
        // A starved server makes turns, however few.
        for _ in 0..3 * longest {
            server.advance_beats();
            server.advance_beats();
            server.advance_turns();
            assert!((0..2 * HEARTBEAT_POLLS).all(|_| poll(&client).is_ok()));
        }
    }

    /// What the server does for a while, and what this process does meanwhile, at random. The client gives up exactly when its own
    /// polls, or the server's beats, have reached their bound since the last sign of life, and goes on with the next one.
    #[test]
    fn whatever_server_and_client_do_the_client_gives_up_exactly_at_its_bounds() {
        let (mut gave_up, mut returned) = (0, 0);
        for seed in 1..=2000_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut below = |limit: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % limit
            };
            let (server, client) = pair();
            let client = aged(client);
            let bounds = (u64::from(client.timeouts.silent_polls()), u64::from(client.timeouts.deadlock_beats));
            // Polls since the client saw a word move, beats since it saw a turn, and what has moved since it looked.
            let (mut polls, mut beats, mut unseen, mut was_given_up) = (0, 0, (0, false), false);
            for _ in 0..6 {
                // It runs, its runtime does not, or neither does; and the process is stopped, works, or waits.
                let (does, waits) = (below(3), below(3));
                for _ in 0..below(2 * bounds.0) {
                    if does <= 1 && below(4) == 0 {
                        server.advance_beats();
                        unseen.0 += 1;
                    }
                    if does == 0 && below(4) == 0 {
                        server.advance_turns();
                        unseen.1 = true;
                    }
                    if waits == 0 {
                        continue;
                    }
                    match std::mem::take(&mut unseen) {
                        (_, true) => (polls, beats) = (0, 0),
                        (0, false) => {}
                        (more, false) => (polls, beats) = (0, beats + more),
                    }
                    let is_given_up = |polls, beats| polls >= bounds.0 || beats >= bounds.1;
                    let has_failed = if waits == 1 || is_given_up(polls, beats) {
                        client.check(client.timeouts).is_err()
                    } else {
                        polls += 1;
                        poll(&client).is_err()
                    };
                    assert_eq!(has_failed, is_given_up(polls, beats), "seed {seed}");
                    gave_up += u64::from(has_failed && !was_given_up);
                    returned += u64::from(!has_failed && was_given_up);
                    was_given_up = has_failed;
                }
            }
        }
        assert!(gave_up > 1000 && returned > 1000, "{gave_up} {returned}");
    }
}
