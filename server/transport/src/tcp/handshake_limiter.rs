//! Bounds the handshakes under way on a listener. When there are too many, the oldest makes room for the newest. Strangers who
//! connect and stay silent therefore cost bounded memory, and members, who speak at once, do not wait for them.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

use dayfly_meta::limits::HANDSHAKES_MAX;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Duration, sleep, timeout};

/// How long a listener pauses when it cannot accept, most likely because the process is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listener and the handshakes under way on it. `T` is the outcome of a handshake.
pub(crate) struct HandshakeLimiter<T> {
    listener: TcpListener,
    handshakes: JoinSet<Option<T>>,
    /// The same handshakes, the oldest first.
    order: VecDeque<AbortHandle>,
    /// The longest time that a handshake may take.
    timeout: Duration,
    /// How often the listener could not accept since it last did.
    failures: u64,
}

impl<T: Send + 'static> HandshakeLimiter<T> {
    pub(crate) fn new(listener: TcpListener, timeout: Duration) -> Self {
        Self { listener, handshakes: JoinSet::new(), order: VecDeque::new(), timeout, failures: 0 }
    }

    /// Waits for the next stream on which `shake` succeeds.
    pub(crate) async fn accept<F>(&mut self, shake: impl Fn(TcpStream) -> F) -> T
    where
        F: Future<Output = io::Result<T>> + Send + 'static,
    {
        loop {
            tokio::select! {
                Some(shaken) = self.handshakes.join_next() => {
                    if let Ok(Some(member)) = shaken {
                        return member;
                    }
                }
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, address)) => {
                        self.failures = 0;
                        self.start(address, shake(stream));
                    }
                    Err(error) => {
                        self.failures += 1;
                        // The first, the second, the fourth, ...: the cause may last for hours.
                        if self.failures.is_power_of_two() {
                            tracing::warn!(%error, failures = self.failures, "cannot accept a connection");
                        }
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
    }

    fn start<F>(&mut self, address: SocketAddr, shaking: F)
    where
        F: Future<Output = io::Result<T>> + Send + 'static,
    {
        if self.order.len() >= HANDSHAKES_MAX {
            self.order.retain(|handshake| !handshake.is_finished());
        }
        if self.order.len() >= HANDSHAKES_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            oldest.abort();
        }
        let limit = self.timeout;
        self.order.push_back(self.handshakes.spawn(async move {
            match timeout(limit, shaking).await {
                Ok(Ok(member)) => return Some(member),
                Ok(Err(error)) => tracing::debug!(%address, %error, "handshake failed"),
                Err(_) => tracing::debug!(%address, "handshake timed out"),
            }
            None
        }));
    }
}
