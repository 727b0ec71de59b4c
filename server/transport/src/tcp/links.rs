//! All links to one peer, and who looks after them. Each link is judged by itself: one that is silent while its siblings are not is
//! ended, and dialled again in the background. The peer is lost when all its links have ended, or all have been silent for too long.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::frame::Kind;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::Identity;
use super::dial::dial_patiently;
use super::link::Link;
use super::seal::{ReadHalf, WriteHalf};
use super::stream::Outgoing;
use crate::{LossCause, TransportError};

/// A link that lived so long did not end for what made the one before it end.
const GOOD_LIFE: Duration = Duration::from_secs(10);
/// A link that ends again and again is dialled ever later, up to so many times [`Deadlines::redial`].
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

/// The streams of a link.
pub(super) type Halves = (ReadHalf, WriteHalf);

impl Links {
    pub(super) fn new(peer: NodeId, address: SocketAddr, deadlines: Deadlines) -> Self {
        Self { peer, address, deadlines, start: Instant::now(), up: Mutex::default(), lost: OnceLock::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<Link>>>> {
        self.up.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the peer is lost. Without a link it is, for good, also before the watch has seen it.
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

    /// The error that the peer is lost. `cause` applies only if the peer was not found lost before.
    pub(super) fn lost_by(&self, cause: &LossCause) -> TransportError {
        let cause = self.lost.get().unwrap_or(cause).clone();
        TransportError::Lost { peer: self.peer, address: self.address, cause }
    }

    /// Records that the peer is lost; only the first cause counts.
    fn lose(&self, cause: LossCause) {
        if self.lost.set(cause).is_ok() {
            let error = self.lost.get();
            tracing::warn!(node = %self.peer, address = %self.address, error = error.map(tracing::field::display), "peer lost");
        }
    }

    /// The link that a request should take: one that was heard of late, of the right kind, and with little to do.
    pub(super) fn pick(&self, is_bulk: bool) -> Option<Arc<Link>> {
        let now = self.start.elapsed();
        let links = self.lock();
        let open = links.iter().enumerate().filter_map(|(number, link)| Some((number, link.as_ref()?)));
        open.filter(|(_, link)| link.ended().is_none())
            .min_by_key(|(number, link)| {
                let is_quiet = now.saturating_sub(link.heard()) > self.deadlines.ping_interval * 3 / 2;
                (is_quiet, (*number > 0) != is_bulk, link.load())
            })
            .map(|(_, link)| link.clone())
    }
}

/// Looks after the links until the peer is lost.
pub(super) struct Watch {
    links: Arc<Links>,
    identity: Identity,
    running: JoinSet<usize>,
    dialling: JoinSet<(usize, io::Result<Halves>)>,
    notes: Vec<Note>,
    /// Looks in a row that found all links silent for too long.
    looks: u32,
}

/// What is known of one link's past.
struct Note {
    began: Instant,
    /// It ended so often without a good life between.
    failures: u32,
    /// Looks in a row that found it silent while others were not.
    looks: u32,
}

impl Watch {
    /// Begins with what the first dials gave.
    pub(super) fn new(links: Arc<Links>, identity: Identity, dialled: Vec<io::Result<Halves>>) -> Self {
        let note = || Note { began: Instant::now(), failures: 0, looks: 0 };
        let notes = dialled.iter().map(|_| note()).collect();
        let mut watch = Self { links, identity, running: JoinSet::new(), dialling: JoinSet::new(), notes, looks: 0 };
        *watch.links.lock() = dialled.iter().map(|_| None).collect();
        for (number, halves) in dialled.into_iter().enumerate() {
            watch.dialled(number, halves);
        }
        watch
    }

    /// Runs until the peer is lost; then no link is left.
    pub(super) async fn run(mut self) {
        while !self.links.is_lost() {
            self.ping();
            let wait = self.pause();
            let asleep = Instant::now();
            tokio::select! {
                Some(ended) = self.running.join_next() => match ended {
                    Ok(number) => self.ended(number),
                    // What was asked on it is in no table any more.
                    Err(error) => self.links.lose(LossCause::ended(io::Error::other(error))),
                },
                Some(Ok((number, halves))) = self.dialling.join_next() => self.dialled(number, halves),
                () = sleep(wait) => {
                    // Who stood still looks first at what came meanwhile.
                    if asleep.elapsed() > wait + self.links.deadlines.ping_interval {
                        self.looks = 0;
                        self.notes.iter_mut().for_each(|note| note.looks = 0);
                    }
                    self.look();
                }
            }
        }
        self.dialling.shutdown().await;
        let cause = self.links.lost.get().unwrap_or(&LossCause::Closed);
        self.links.lock().iter().flatten().for_each(|link| link.end(cause.clone()));
        while self.running.join_next().await.is_some() {}
        self.links.lock().iter_mut().for_each(|link| *link = None);
    }

    fn ping(&self) {
        for link in self.links.lock().iter().flatten() {
            // A full queue is being written, which tells as much as a ping.
            let _ = link.sender.try_send(Outgoing::Frame { kind: Kind::Ping, request: 0, argument: 0, body: Vec::new() });
        }
    }

    /// How long to sleep: not past the moment at which something is overdue.
    fn pause(&self) -> Duration {
        let now = self.links.start.elapsed();
        let oldest = self.links.lock().iter().flatten().map(|link| link.heard()).min().unwrap_or(now);
        let Deadlines { link_silent, look_interval, ping_interval, .. } = self.links.deadlines;
        link_silent.saturating_sub(now.saturating_sub(oldest)).clamp(look_interval, ping_interval)
    }

    /// Judges all links.
    fn look(&mut self) {
        let Deadlines { link_silent, peer_lost, ping_interval, .. } = self.links.deadlines;
        let now = self.links.start.elapsed();
        let links = self.links.lock().clone();
        let newest = links.iter().flatten().map(|link| link.heard()).max().unwrap_or_default();
        for (link, note) in links.iter().zip(&mut self.notes) {
            let Some(link) = link else { continue };
            // What we send may be slow on its way, and a ping waits behind it: as long as it is taken, the link lives.
            let is_behind_ours = !link.sent().is_zero() && link.heard() < link.sent() + peer_lost;
            let patience = if is_behind_ours { peer_lost } else { link_silent };
            let is_silent = now.saturating_sub(link.heard().max(link.sent())) >= patience;
            // Others were heard after it: it is not the peer, nor we, who stood still.
            let is_behind = newest.saturating_sub(link.heard()) >= ping_interval;
            note.looks = if is_silent && is_behind { note.looks + 1 } else { 0 };
            if note.looks >= Deadlines::LOOKS_MIN {
                link.end(LossCause::Silent(link_silent));
            }
        }
        self.looks = if now.saturating_sub(newest) >= peer_lost { self.looks + 1 } else { 0 };
        if self.looks >= Deadlines::LOOKS_MIN {
            self.links.lose(LossCause::Silent(peer_lost));
        }
    }

    /// A link has ended: what was asked on it has been handed back.
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
        tracing::warn!(node = %self.links.peer, address = %self.links.address, link = number, error = %cause, "link lost; dialing again");
        self.dial(number);
    }

    /// Dials a link again, ever later if it ends at once.
    fn dial(&mut self, number: usize) {
        let note = &mut self.notes[number];
        note.failures = if note.began.elapsed() > GOOD_LIFE { 0 } else { note.failures + 1 };
        note.looks = 0;
        let pause =
            if note.failures == 0 { Duration::ZERO } else { self.links.deadlines.redial * note.failures.min(BACK_OFF_MAX) };
        let (identity, peer, address) = (self.identity.clone(), self.links.peer, self.links.address);
        self.dialling.spawn(async move {
            sleep(pause).await;
            (number, dial_patiently(&identity, peer, address).await)
        });
    }

    fn dialled(&mut self, number: usize, halves: io::Result<Halves>) {
        let halves = match halves {
            Ok(halves) => halves,
            Err(error) => {
                tracing::info!(peer = %self.links.peer, address = %self.links.address, link = number, %error, "a link to a peer cannot be made");
                self.dial(number);
                return;
            }
        };
        let (link, running) = Link::start(halves, self.links.start, self.links.deadlines.peer_lost);
        self.running.spawn(async move {
            running.await;
            number
        });
        self.notes[number].began = Instant::now();
        self.links.lock()[number] = Some(link);
    }
}
