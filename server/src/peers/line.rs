//! The connection to one peer, dialled when it is first needed, and again when it was lost. A dial is a task of its own: all who ask
//! meanwhile share it, none waits for it longer than its own deadline allows, and who asks later finds what it came to.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_transport::{Connection, Transport, TransportError};
use tokio::sync::SetOnce;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::timeout;

type Dialled = Result<Arc<dyn Connection>, TransportError>;
/// When a dial ended, and how; those who wait for it hear it in the order in which they came.
type Dial = SetOnce<(Instant, Dialled)>;

/// The line to one peer.
pub(super) struct Line {
    peer: NodeId,
    pub(super) address: SocketAddr,
    redial: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The last dial, unset while it is under way.
    dialled: Option<Arc<Dial>>,
    /// The dial under way; ends with the line.
    task: JoinSet<()>,
}

impl Line {
    pub(super) fn new(peer: NodeId, address: SocketAddr, deadlines: &Deadlines) -> Self {
        Self { peer, address, redial: deadlines.redial, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the peer was reached once and is lost now. While it is dialled again it is not: how that ends, the next look will tell.
    pub(super) fn is_lost(&self) -> bool {
        let state = self.lock();
        match state.dialled.as_ref().and_then(|dialled| dialled.get()) {
            Some((_, Ok(connection))) => connection.is_lost(),
            Some((_, Err(_))) => true,
            None => false,
        }
    }

    /// The connection; where there is none, dials, and waits for that as long as `limit` allows.
    pub(super) async fn connection(&self, transport: &Arc<dyn Transport>, limit: Duration) -> Dialled {
        let dialled = self.dialled(transport);
        let late = || TransportError::Timeout { peer: self.peer, address: self.address, timeout: limit };
        timeout(limit, dialled.wait()).await.map_or_else(|_| Err(late()), |(_, dialled)| dialled.clone())
    }

    /// What the last dial came to, or will; a new one, if that is of no use any more.
    fn dialled(&self, transport: &Arc<dyn Transport>) -> Arc<Dial> {
        let mut state = self.lock();
        let State { dialled, task } = &mut *state;
        if let Some(dialled) = dialled {
            let is_good = match dialled.get() {
                Some((_, Ok(connection))) => !connection.is_lost(),
                // Who comes within a moment of a failure hears the same and need not dial.
                Some((at, Err(_))) => at.elapsed() < self.redial,
                // One whose task panicked never ends.
                None => task.try_join_next().is_none(),
            };
            if is_good {
                return dialled.clone();
            }
        }
        let dial = Arc::new(Dial::new());
        let (transport, peer, address, dialling) = (transport.clone(), self.peer, self.address, dial.clone());
        *task = JoinSet::new();
        task.spawn(async move {
            let dialled = transport.connect(peer, address).await;
            // Kept here until the next dial, whoever still waits for it; it is set here alone.
            let _ = dialling.set((Instant::now(), dialled));
        });
        *dialled = Some(dial.clone());
        dial
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use async_trait::async_trait;
    use dayfly_meta::wire::status::Network;
    use dayfly_transport::{Ability, Agreement, LossCause, Offered, Pulled, Region, Service, Serving, Slot};
    use tokio::sync::watch;

    use super::*;

    /// A peer that is reached when the test says so.
    struct Slow {
        dials: AtomicUsize,
        open: watch::Receiver<bool>,
    }

    struct Way(AtomicBool);

    #[async_trait]
    impl Connection for Way {
        fn peer(&self) -> NodeId {
            NodeId(1)
        }

        fn is_lost(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }

        async fn pull(&self, _message: Vec<u8>, _slots: Vec<Slot>, _timeout: Duration) -> Result<Pulled, TransportError> {
            Err(TransportError::TooLong(0))
        }

        async fn offer(&self, _: Vec<u8>, _: Slot, _: usize, _: Duration) -> Result<Offered, TransportError> {
            Err(TransportError::TooLong(0))
        }
    }

    #[async_trait]
    impl Transport for Slow {
        fn region(&self, len: u64) -> io::Result<Region> {
            Region::new(len)
        }

        async fn connect(&self, peer: NodeId, address: SocketAddr) -> Dialled {
            let lost = || TransportError::Lost { peer, address, cause: LossCause::Closed };
            self.dials.fetch_add(1, Ordering::Relaxed);
            self.open.clone().wait_for(|open| *open).await.map_err(|_| lost())?;
            Ok(Arc::new(Way(AtomicBool::new(false))))
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

    /// `docs/SEMANTICS.md`: dialling counts towards a request's deadline, and goes on for the next request.
    #[tokio::test]
    async fn askers_share_a_dial_that_goes_on_past_their_deadlines() {
        let (open, opened) = watch::channel(false);
        let slow = Arc::new(Slow { dials: AtomicUsize::new(0), open: opened });
        let transport: Arc<dyn Transport> = slow.clone();
        let address = "127.0.0.1:1".parse().unwrap();
        let line = Line::new(NodeId(1), address, &Deadlines::DEFAULT);
        let limit = Duration::from_millis(50);
        let start = Instant::now();
        let asking = (0..10).map(|_| line.connection(&transport, limit));
        for dialled in futures_util::future::join_all(asking).await {
            assert!(matches!(dialled.err(), Some(TransportError::Timeout { peer: NodeId(1), .. })));
        }
        assert!(start.elapsed() < Duration::from_secs(10), "none waits for the other");
        assert!(!line.is_lost(), "it is being dialled");
        open.send_replace(true);
        let connection = line.connection(&transport, Duration::from_secs(30)).await.unwrap();
        assert_eq!(connection.peer(), NodeId(1));
        assert!(line.connection(&transport, Duration::ZERO).await.is_ok(), "without a wait");
        assert_eq!(slow.dials.load(Ordering::Relaxed), 1, "one dial served all");
        // The next failure is told to all who come soon after it.
        drop(open);
        let (_, closed) = watch::channel(false);
        let gone = Arc::new(Slow { dials: AtomicUsize::new(0), open: closed });
        let (transport, line): (Arc<dyn Transport>, Line) = (gone.clone(), Line::new(NodeId(1), address, &Deadlines::DEFAULT));
        for _ in 0..2 {
            assert!(matches!(line.connection(&transport, limit * 100).await.err(), Some(TransportError::Lost { .. })));
        }
        assert!(line.is_lost());
        assert_eq!(gone.dials.load(Ordering::Relaxed), 1);
    }
}
