//! A network for tests: forwards the TCP streams to one peer, and can hold back, slow down or close each of them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What happens to the bytes of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamState {
    /// Bytes pass unchanged.
    Open,
    /// Bytes are held back in both directions, and neither end notices, as when one member of a bonded network link fails.
    Black,
    /// The stream is closed at both ends.
    Closed,
    /// Bytes pass at 400 KB per second in each direction.
    Slow,
}

pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    streams: Arc<Mutex<Vec<watch::Sender<StreamState>>>>,
    /// The state of new streams.
    next: Arc<Mutex<StreamState>>,
    _accepting: JoinSet<()>,
}

impl Relay {
    pub(crate) async fn to(address: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (near, streams) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let next = Arc::new(Mutex::new(StreamState::Open));
        let (all, new, mut accepting) = (streams.clone(), next.clone(), JoinSet::new());
        accepting.spawn(async move {
            let mut passing = JoinSet::new();
            loop {
                let near = listener.accept().await.unwrap().0;
                let Ok(far) = TcpStream::connect(address).await else { continue };
                let (state, seen) = watch::channel(*new.lock().unwrap());
                all.lock().unwrap().push(state);
                let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                for (mut from, mut to) in [(near_read, far_write), (far_read, near_write)] {
                    let mut seen = seen.clone();
                    passing.spawn(async move {
                        let mut buffer = vec![0; 20_000];
                        loop {
                            let got = tokio::select! {
                                _ = seen.wait_for(|state| *state == StreamState::Closed) => return,
                                got = from.read(&mut buffer) => got,
                            };
                            let Ok(got @ 1..) = got else { return };
                            if *seen.borrow() == StreamState::Slow {
                                tokio::time::sleep(Duration::from_micros(got as u64 * 5 / 2)).await;
                            }
                            if seen.wait_for(|state| *state != StreamState::Black).await.is_err()
                                || to.write_all(&buffer[..got]).await.is_err()
                            {
                                return;
                            }
                        }
                    });
                }
            }
        });
        Self { address: near, streams, next, _accepting: accepting }
    }

    /// Returns the number of streams so far.
    pub(crate) fn count(&self) -> usize {
        self.streams.lock().unwrap().len()
    }

    /// Sets the state of a stream. Streams are numbered in the order in which they were made.
    pub(crate) fn set(&self, stream: usize, state: StreamState) {
        self.streams.lock().unwrap()[stream].send_replace(state);
    }

    /// Sets the state of all streams, including future ones.
    pub(crate) fn set_all(&self, state: StreamState) {
        *self.next.lock().unwrap() = state;
        self.streams.lock().unwrap().iter().for_each(|stream| {
            let _ = stream.send_replace(state);
        });
    }
}
