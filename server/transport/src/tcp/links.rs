//! All links to one peer, and the monitor that watches them. Each link is judged on its own: a link that is silent while others
//! receive bytes is ended and dialed again in the background. The peer is lost when all of its links have ended, or when all have
//! been silent for too long.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::frame::Kind;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::dial::{Halves, dial_with_retries};
use super::identity::Identity;
use super::link::Link;
use super::stream::Outgoing;
use crate::error::{LossCause, TransportError};
use crate::silence::{Moved, SilenceWatch};

/// A link that lived this long is not part of a series of failures.
const GOOD_LIFE: Duration = Duration::from_secs(10);
/// The longest pause before a link is dialed again after a series of failures, as a multiple of [`Deadlines::redial`].
const BACK_OFF_MAX: u32 = 8;

/// The links to one peer: the first for small messages, the others for bulk.
pub(super) struct Links {
    pub(super) peer: NodeId,
    pub(super) address: SocketAddr,
    pub(super) deadlines: Deadlines,
    start: Instant,
    up: Mutex<Vec<Option<Arc<Link>>>>,
    lost: OnceLock<LossCause>,
}

impl Links {
    pub(super) fn new(peer: NodeId, address: SocketAddr, deadlines: Deadlines) -> Self {
        Self { peer, address, deadlines, start: Instant::now(), up: Mutex::default(), lost: OnceLock::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<Link>>>> {
        self.up.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the peer is lost. A peer without links is lost for good, even before the monitor has noticed.
    pub(super) fn is_lost(&self) -> bool {
        if self.lost.get().is_none() {
            let ended = {
                let links = self.lock();
                let is_any_open = links.iter().flatten().any(|link| link.ended().is_none());
                let cause = || links.iter().flatten().find_map(|link| link.ended()).unwrap_or(&LossCause::Closed).clone();
                (!is_any_open).then(cause)
            };
            ended.into_iter().for_each(|cause| self.lose(cause));
        }
        self.lost.get().is_some()
    }

    /// Returns the error for a lost peer. `cause` applies only if the peer was not found lost before.
    pub(super) fn lost_by(&self, cause: &LossCause) -> TransportError {
        let cause = self.lost.get().unwrap_or(cause).clone();
        TransportError::Lost { peer: self.peer, address: self.address, cause }
    }

    /// Records that the peer is lost; only the first cause is recorded.
    fn lose(&self, cause: LossCause) {
        if self.lost.set(cause).is_ok() {
            let error = self.lost.get();
            tracing::warn!(node = %self.peer, address = %self.address, error = error.map(tracing::field::display), "peer lost");
        }
    }

    /// Returns how long no byte has arrived on any link.
    pub(super) fn quiet_for(&self) -> Duration {
        let newest = self.lock().iter().flatten().map(|link| link.last_received()).max().unwrap_or_default();
        self.start.elapsed().saturating_sub(newest)
    }

    /// Picks the link for a request. It prefers links that received bytes recently, then those of the right kind, then those with
    /// few requests.
    pub(super) fn pick(&self, is_bulk: bool) -> Option<Arc<Link>> {
        let now = self.start.elapsed();
        let links = self.lock();
        let open = links.iter().enumerate().filter_map(|(number, link)| Some((number, link.as_ref()?)));
        open.filter(|(_, link)| link.ended().is_none())
            .min_by_key(|(number, link)| {
                let is_quiet = now.saturating_sub(link.last_received()) > self.deadlines.ping_interval * 3 / 2;
                (is_quiet, (*number > 0) != is_bulk, link.load())
            })
            .map(|(_, link)| link.clone())
    }
}

/// Watches the links and replaces those that fail, until the peer is lost.
pub(super) struct LinkMonitor {
    links: Arc<Links>,
    identity: Identity,
    running: JoinSet<usize>,
    dialing: JoinSet<(usize, io::Result<Halves>)>,
    histories: Vec<LinkHistory>,
    silence: SilenceWatch,
}

/// The history of one link.
struct LinkHistory {
    began: Instant,
    /// How often in a row the link ended soon after it was dialed.
    failures: u32,
}

impl LinkMonitor {
    /// Starts with the results of the first dials, one for each link.
    pub(super) fn new(links: Arc<Links>, identity: Identity, dialed: Vec<io::Result<Halves>>) -> Self {
        let histories = dialed.iter().map(|_| LinkHistory { began: Instant::now(), failures: 0 }).collect();
        let silence = SilenceWatch::new(links.deadlines, dialed.len());
        let mut monitor = Self { links, identity, running: JoinSet::new(), dialing: JoinSet::new(), histories, silence };
        *monitor.links.lock() = dialed.iter().map(|_| None).collect();
        for (number, halves) in dialed.into_iter().enumerate() {
            monitor.dialed(number, halves);
        }
        monitor
    }

    /// Runs until the peer is lost. Afterward no link is left.
    pub(super) async fn run(mut self) {
        while !self.links.is_lost() {
            self.ping();
            let wait = self.silence.pause(self.links.start.elapsed(), &self.moved());
            let asleep = Instant::now();
            tokio::select! {
                Some(ended) = self.running.join_next() => match ended {
                    Ok(number) => self.ended(number),
                    // The link's task panicked, so the requests under way on it are no longer in any table.
                    Err(error) => self.links.lose(LossCause::ended(io::Error::other(error))),
                },
                Some(Ok((number, halves))) = self.dialing.join_next() => self.dialed(number, halves),
                () = sleep(wait) => self.check_silence((wait, asleep.elapsed())),
            }
        }
        self.dialing.shutdown().await;
        let cause = self.links.lost.get().unwrap_or(&LossCause::Closed);
        self.links.lock().iter().flatten().for_each(|link| link.end(cause.clone()));
        while self.running.join_next().await.is_some() {}
        self.links.lock().iter_mut().for_each(|link| *link = None);
    }

    fn ping(&self) {
        for link in self.links.lock().iter().flatten() {
            // If the queue is full, it is being written, which tests the link as well as a ping does.
            let _ = link.sender.try_send(Outgoing::Frame { kind: Kind::Ping, request: 0, argument: 0, body: Vec::new() });
        }
    }

    /// Returns when bytes last moved on each link that is up.
    fn moved(&self) -> Vec<Option<Moved>> {
        let moved = |link: &Arc<Link>| Moved { received: link.last_received(), sent: link.last_sent() };
        self.links.lock().iter().map(|link| link.as_ref().map(moved)).collect()
    }

    /// Ends the links that have been silent for too long. If all of them have been, the peer is lost.
    fn check_silence(&mut self, slept: (Duration, Duration)) {
        let silent = self.silence.look(self.links.start.elapsed(), slept, &self.moved());
        let Deadlines { link_silent, peer_lost, .. } = self.links.deadlines;
        let links = self.links.lock().clone();
        for link in silent.links.into_iter().filter_map(|number| links[number].as_ref()) {
            link.end(LossCause::Silent(link_silent));
        }
        if silent.is_peer {
            self.links.lose(LossCause::Silent(peer_lost));
        }
    }

    /// Handles the end of a link, which has returned the slots of its requests.
    fn ended(&mut self, number: usize) {
        let (link, is_last) = {
            let mut links = self.links.lock();
            let link = links[number].take();
            (link, links.iter().all(|link| link.as_ref().is_none_or(|link| link.ended().is_some())))
        };
        let cause = link.as_ref().and_then(|link| link.ended()).unwrap_or(&LossCause::Closed).clone();
        if is_last {
            self.links.lose(cause);
            return;
        }
        let Links { peer, address, .. } = &*self.links;
        tracing::warn!(node = %peer, %address, link = number, error = %cause, "link lost; dialing it again");
        self.dial(number);
    }

    /// Dials a link again, with growing pauses if it ends soon after each dial.
    fn dial(&mut self, number: usize) {
        self.silence.forget(number);
        let history = &mut self.histories[number];
        history.failures = if history.began.elapsed() > GOOD_LIFE { 0 } else { history.failures + 1 };
        let pause = match history.failures {
            0 => Duration::ZERO,
            failures => self.links.deadlines.redial * failures.min(BACK_OFF_MAX),
        };
        let (identity, peer, address) = (self.identity.clone(), self.links.peer, self.links.address);
        self.dialing.spawn(async move {
            sleep(pause).await;
            (number, dial_with_retries(&identity, peer, address).await)
        });
    }

    fn dialed(&mut self, number: usize, halves: io::Result<Halves>) {
        let halves = match halves {
            Ok(halves) => halves,
            Err(error) => {
                let Links { peer, address, .. } = &*self.links;
                tracing::warn!(node = %peer, %address, link = number, %error, "cannot dial a link; dialing it again");
                self.dial(number);
                return;
            }
        };
        let (link, running) = Link::start(halves, self.links.start, self.links.deadlines.peer_lost);
        self.running.spawn(async move {
            running.await;
            number
        });
        self.histories[number].began = Instant::now();
        self.links.lock()[number] = Some(link);
    }
}
