//! A test double for a network: passes the connections of one peer on, and lets flows of them go black.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What becomes of a flow's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Open,
    /// Nothing goes by, either way, and nobody is told: as over a failed member of a bundle of links.
    Black,
    /// Both ends find it closed.
    Closed,
    /// 400 KB a second go by, each way.
    Slow,
}

pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    flows: Arc<Mutex<Vec<watch::Sender<Way>>>>,
    /// What becomes of new flows.
    next: Arc<Mutex<Way>>,
    _accepting: JoinSet<()>,
}

impl Relay {
    pub(crate) async fn to(address: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (near, flows) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let next = Arc::new(Mutex::new(Way::Open));
        let (all, new, mut accepting) = (flows.clone(), next.clone(), JoinSet::new());
        accepting.spawn(async move {
            let mut passing = JoinSet::new();
            loop {
                let near = listener.accept().await.unwrap().0;
                let Ok(far) = TcpStream::connect(address).await else { continue };
                let (way, seen) = watch::channel(*new.lock().unwrap());
                all.lock().unwrap().push(way);
                let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
                for (mut from, mut to) in [(near_read, far_write), (far_read, near_write)] {
                    let mut seen = seen.clone();
                    passing.spawn(async move {
                        let mut buffer = vec![0; 20_000];
                        loop {
                            let got = tokio::select! {
                                _ = seen.wait_for(|way| *way == Way::Closed) => return,
                                got = from.read(&mut buffer) => got,
                            };
                            let Ok(got @ 1..) = got else { return };
                            if *seen.borrow() == Way::Slow {
                                tokio::time::sleep(Duration::from_micros(got as u64 * 5 / 2)).await;
                            }
                            if seen.wait_for(|way| *way != Way::Black).await.is_err()
                                || to.write_all(&buffer[..got]).await.is_err()
                            {
                                return;
                            }
                        }
                    });
                }
            }
        });
        Self { address: near, flows, next, _accepting: accepting }
    }

    /// How many flows there have been.
    pub(crate) fn count(&self) -> usize {
        self.flows.lock().unwrap().len()
    }

    /// Decides what becomes of a flow, by its number in the order in which they were made.
    pub(crate) fn set(&self, flow: usize, way: Way) {
        self.flows.lock().unwrap()[flow].send_replace(way);
    }

    /// Decides it for all flows, those to come among them.
    pub(crate) fn set_all(&self, way: Way) {
        *self.next.lock().unwrap() = way;
        self.flows.lock().unwrap().iter().for_each(|flow| {
            let _ = flow.send_replace(way);
        });
    }
}
