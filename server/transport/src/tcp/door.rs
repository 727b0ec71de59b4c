//! Who knocks at a listener: any number may, few are listened to at a time, and who says nothing makes way for who comes after. So
//! strangers cost bounded memory, and members, who speak at once, are not kept waiting by them.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

use dayfly_meta::limits::HANDSHAKES_MAX;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Duration, sleep, timeout};

/// A listener and the handshakes under way on it.
pub(crate) struct Door<T> {
    listener: TcpListener,
    knocking: JoinSet<Option<T>>,
    /// The oldest first.
    order: VecDeque<AbortHandle>,
    /// How long each may take.
    patience: Duration,
}

impl<T: Send + 'static> Door<T> {
    pub(crate) fn new(listener: TcpListener, patience: Duration) -> Self {
        Self { listener, knocking: JoinSet::new(), order: VecDeque::new(), patience }
    }

    /// The next one who proves to be a member, by `shake`.
    pub(crate) async fn admit<F>(&mut self, shake: impl Fn(TcpStream) -> F) -> T
    where
        F: Future<Output = io::Result<T>> + Send + 'static,
    {
        loop {
            tokio::select! {
                Some(shaken) = self.knocking.join_next() => {
                    if let Ok(Some(member)) = shaken {
                        return member;
                    }
                }
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, address)) => self.listen_to(address, shake(stream)),
                    // Out of descriptors, most likely: let some close.
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        sleep(Duration::from_millis(50)).await;
                    }
                },
            }
        }
    }

    fn listen_to<F>(&mut self, address: SocketAddr, shaking: F)
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
        let patience = self.patience;
        self.order.push_back(self.knocking.spawn(async move {
            match timeout(patience, shaking).await {
                Ok(Ok(member)) => return Some(member),
                Ok(Err(error)) => tracing::debug!(%address, %error, "a stranger was turned away"),
                Err(_) => tracing::debug!(%address, "a stranger said nothing in time"),
            }
            None
        }));
    }
}
