//! Connects to one peer, when the peer is first needed and again when the connection has been lost.
//!
//! A dial runs as a task of its own. All requests that need the peer during that time share the dial. None of them waits longer
//! than its own deadline allows, and a later request finds the dial's outcome.
//!
//! The log says when the peer is lost, when it cannot be reached, and when it can be reached again. A peer that stays away is dialed
//! as long as the session lasts, so of its failed dials only the 1st, 2nd, 4th, 8th and so on are logged.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_transport::{Connection, LossCause, Transport, TransportError};
use tokio::sync::SetOnce;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::timeout;

type DialOutcome = Result<Arc<dyn Connection>, TransportError>;
/// A dial. Once it has ended, it contains the time at which it ended, and its outcome. Waiters get the outcome in the order in
/// which they came.
type Dial = SetOnce<(Instant, DialOutcome)>;

/// Dials one peer, and keeps the connection.
pub(super) struct Dialer {
    peer: NodeId,
    redial: Duration,
    last_dial: Mutex<LastDial>,
}

struct LastDial {
    address: SocketAddr,
    /// The last dial. Its `SetOnce` is unset while the dial is in progress.
    dial: Option<Arc<Dial>>,
    /// The task of a dial in progress. It ends with the dialer.
    task: JoinSet<()>,
    /// How many dials have failed since the peer was last reached.
    failed_dials: Arc<AtomicU32>,
}

impl LastDial {
    fn none(address: SocketAddr) -> Self {
        Self { address, dial: None, task: JoinSet::new(), failed_dials: Arc::default() }
    }
}

impl Dialer {
    pub(super) fn new(peer: NodeId, address: SocketAddr, deadlines: &Deadlines) -> Self {
        Self { peer, redial: deadlines.redial, last_dial: Mutex::new(LastDial::none(address)) }
    }

    pub(super) fn peer(&self) -> NodeId {
        self.peer
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.last_dial().address
    }

    /// Dials the peer at this address from now on, because its server was replaced or has returned.
    pub(super) fn redirect(&self, address: SocketAddr) {
        *self.last_dial() = LastDial::none(address);
    }

    fn last_dial(&self) -> MutexGuard<'_, LastDial> {
        self.last_dial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the peer could not be reached, or was reached once and is lost now. A peer that is being dialed is not
    /// lost.
    pub(super) fn is_lost(&self) -> bool {
        let last_dial = self.last_dial();
        match last_dial.dial.as_ref().and_then(|dial| dial.get()) {
            Some((_, Ok(connection))) => connection.is_lost(),
            Some((_, Err(_))) => true,
            None => false,
        }
    }

    /// Returns whether nothing has been heard from the peer for so long, or it is being dialed, or cannot be reached.
    pub(super) fn is_quiet(&self, limit: Duration) -> bool {
        let last_dial = self.last_dial();
        match last_dial.dial.as_ref().and_then(|dial| dial.get()) {
            Some((_, Ok(connection))) => connection.is_lost() || connection.quiet_for() >= limit,
            _ => true,
        }
    }

    /// Returns the connection. If there is none, dials, and waits for the outcome as long as `limit` allows.
    pub(super) async fn connection(&self, transport: &Arc<dyn Transport>, limit: Duration) -> DialOutcome {
        let dial = self.usable_dial(transport);
        let late = || {
            let error = io::Error::new(io::ErrorKind::TimedOut, format!("it has not answered within {} ms", limit.as_millis()));
            TransportError::Lost { peer: self.peer, address: self.address(), cause: LossCause::unreachable(error) }
        };
        timeout(limit, dial.wait()).await.map_or_else(|_| Err(late()), |(_, outcome)| outcome.clone())
    }

    /// Returns the last dial, or starts a new one if the last can no longer be used.
    fn usable_dial(&self, transport: &Arc<dyn Transport>) -> Arc<Dial> {
        let mut last_dial = self.last_dial();
        let LastDial { address, dial, task, failed_dials } = &mut *last_dial;
        let address = *address;
        if let Some(dial) = dial {
            let is_usable = match dial.get() {
                Some((_, Ok(connection))) => {
                    if connection.is_lost() {
                        tracing::warn!(peer = %self.peer, %address, "peer lost; dialing again");
                    }
                    !connection.is_lost()
                }
                // A request that comes within a moment of a failure shares that failure instead of dialing again.
                Some((at, Err(_))) => at.elapsed() < self.redial,
                // A dial whose task has panicked never ends.
                None => task.try_join_next().is_none(),
            };
            if is_usable {
                return dial.clone();
            }
        }
        let new = Arc::new(Dial::new());
        let (transport, peer, dialing, failed_dials) = (transport.clone(), self.peer, new.clone(), failed_dials.clone());
        *task = JoinSet::new();
        task.spawn(async move {
            let outcome = transport.connect(peer, address).await;
            match &outcome {
                Ok(_) => {
                    let failed_dials = failed_dials.swap(0, Ordering::Relaxed);
                    if failed_dials > 0 {
                        tracing::info!(%peer, %address, failed_dials, "reached a peer");
                    }
                }
                Err(error) => {
                    let failed_dials = failed_dials.fetch_add(1, Ordering::Relaxed).saturating_add(1);
                    if failed_dials.is_power_of_two() {
                        tracing::warn!(%peer, %address, failed_dials, %error, "cannot reach a peer");
                    }
                }
            }
            // This cannot fail, because only this task sets the outcome. The outcome stays until the next dial, even if nothing
            // waits for it anymore.
            let _ = dialing.set((Instant::now(), outcome));
        });
        *dial = Some(new.clone());
        new
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use async_trait::async_trait;
    use dayfly_meta::wire::status::Network;
    use dayfly_transport::{Ability, Agreement, Pulled, Region, Service, Serving, Slot};
    use tokio::sync::watch;
    use tokio::time::sleep;
    use tracing::span;

    use super::*;

    /// A peer that can be reached once the test opens it. If the test drops the sender instead, each dial fails.
    struct Slow {
        dials: AtomicUsize,
        open: watch::Receiver<bool>,
        /// Whether its connections are lost.
        is_lost: Arc<AtomicBool>,
    }

    impl Slow {
        fn new(open: watch::Receiver<bool>) -> Arc<Self> {
            Arc::new(Self { dials: AtomicUsize::new(0), open, is_lost: Arc::default() })
        }
    }

    struct TestConnection(Arc<AtomicBool>);

    /// Counts the lines of the log.
    struct LineCounter(Arc<AtomicUsize>);

    impl tracing::Subscriber for LineCounter {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _: &span::Id) {}

        fn exit(&self, _: &span::Id) {}
    }

    #[async_trait]
    impl Connection for TestConnection {
        fn peer(&self) -> NodeId {
            NodeId(1)
        }

        fn is_lost(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }

        async fn pull(&self, _message: Vec<u8>, _slots: Vec<Slot>, _timeout: Duration) -> Result<Pulled, TransportError> {
            Err(TransportError::TooLong(0))
        }

        async fn offer(&self, _: Vec<u8>, _: &mut Option<Slot>, _: usize, _: Duration) -> Result<Vec<u8>, TransportError> {
            Err(TransportError::TooLong(0))
        }
    }

    #[async_trait]
    impl Transport for Slow {
        fn region(&self, len: u64) -> io::Result<Region> {
            Region::new(len)
        }

        async fn connect(&self, peer: NodeId, address: SocketAddr) -> DialOutcome {
            let lost = || TransportError::Lost { peer, address, cause: LossCause::Closed };
            self.dials.fetch_add(1, Ordering::Relaxed);
            self.open.clone().wait_for(|open| *open).await.map_err(|_| lost())?;
            Ok(Arc::new(TestConnection(self.is_lost.clone())))
        }

        async fn serve(&self, _service: Arc<dyn Service>) -> io::Result<Serving> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn ability(&self) -> Ability {
            Ability { rdma: Err("none".to_owned()) }
        }

        fn agree(&self, _agreement: Agreement) {}

        fn fallen_back(&self) -> Vec<(NodeId, String)> {
            Vec::new()
        }

        fn status(&self) -> Network {
            Network::default()
        }
    }

    /// Dialing counts toward the deadline of the request that needs it, and continues for later requests.
    ///
    /// SEMANTICS: "The time to connect to the owner counts toward the deadline."
    #[tokio::test]
    async fn requests_share_a_dial_that_continues_past_their_deadlines() {
        let (open, opened) = watch::channel(false);
        let slow = Slow::new(opened);
        let transport: Arc<dyn Transport> = slow.clone();
        let address = "127.0.0.1:1".parse().unwrap();
        let dialer = Dialer::new(NodeId(1), address, &Deadlines::DEFAULT);
        let limit = Duration::from_millis(50);
        let start = Instant::now();
        let asking = (0..10).map(|_| dialer.connection(&transport, limit));
        for outcome in futures_util::future::join_all(asking).await {
            assert!(matches!(outcome.err(), Some(TransportError::Lost { peer: NodeId(1), .. })));
        }
        assert!(start.elapsed() < Duration::from_secs(10), "no request waits for another");
        assert!(!dialer.is_lost(), "it is still being dialed");
        open.send_replace(true);
        let connection = dialer.connection(&transport, Duration::from_secs(30)).await.unwrap();
        assert_eq!(connection.peer(), NodeId(1));
        assert!(dialer.connection(&transport, Duration::ZERO).await.is_ok(), "it needs no wait");
        assert_eq!(slow.dials.load(Ordering::Relaxed), 1, "one dial served all requests");
        // All requests that come soon after a failure share that failure.
        drop(open);
        let (_, closed) = watch::channel(false);
        let gone = Slow::new(closed);
        let (transport, dialer): (Arc<dyn Transport>, Dialer) =
            (gone.clone(), Dialer::new(NodeId(1), address, &Deadlines::DEFAULT));
        for _ in 0..2 {
            assert!(matches!(dialer.connection(&transport, limit * 100).await.err(), Some(TransportError::Lost { .. })));
        }
        assert!(dialer.is_lost());
        assert_eq!(gone.dials.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_stays_away_is_logged_less_and_less_often() {
        let lines = Arc::new(AtomicUsize::new(0));
        let _log = tracing::subscriber::set_default(LineCounter(lines.clone()));
        let logged = || lines.swap(0, Ordering::Relaxed);
        let dialer = Dialer::new(NodeId(1), "127.0.0.1:1".parse().unwrap(), &Deadlines::DEFAULT);
        let dial = async |peer: &Arc<Slow>, times: usize| {
            let transport: Arc<dyn Transport> = peer.clone();
            for _ in 0..times {
                drop(dialer.connection(&transport, Duration::from_secs(5)).await);
                sleep(Deadlines::DEFAULT.redial).await;
            }
        };
        let ((_, closed), (_open, opened)) = (watch::channel(false), watch::channel(true));
        let (away, here) = (Slow::new(closed), Slow::new(opened));
        dial(&away, 100).await;
        assert_eq!(away.dials.load(Ordering::Relaxed), 100);
        assert_eq!(logged(), 7, "the failures 1, 2, 4, 8, 16, 32 and 64");
        dial(&here, 3).await;
        assert_eq!((logged(), here.dials.load(Ordering::Relaxed)), (1, 1), "the peer is reached");
        here.is_lost.store(true, Ordering::Relaxed);
        dial(&away, 3).await;
        assert_eq!(logged(), 3, "the peer is lost, and the failures 1 and 2");
    }
}
