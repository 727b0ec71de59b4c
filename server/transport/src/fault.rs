//! A transport that fails when told to: a decorator, so that what is tested is what is shipped.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::status::Network;

use crate::{
    Ability, Agreement, Connection, LossCause, Offered, Pulled, Region, Service, Serving, Slot, Transport, TransportError,
};

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It goes through, later.
    Delay(Duration),
    /// It never arrives: its asker waits until the deadline.
    Lose,
    /// The far side refuses.
    Refuse,
    /// The peer dies; so do all later requests.
    Kill,
    /// A bit of its bulk bytes flips on their way, whichever way they go.
    FlipOnWire,
    /// A bit of the bytes that it offers flips in the memory that they are offered from.
    FlipInBuffer,
}

/// A request that is about to be made.
pub struct Seen<'a> {
    /// Its number on its connection, from 0.
    pub number: u64,
    /// To whom.
    pub peer: NodeId,
    /// What it says.
    pub message: &'a [u8],
    /// Bytes that it offers, or that it has slots for.
    pub bulk_len: u64,
}

/// Decides what happens to a request.
pub type Plan = Arc<dyn Fn(&Seen<'_>) -> Option<Fault> + Send + Sync>;

/// A transport whose connections meet faults.
pub struct Faulty<T> {
    inner: T,
    plan: Plan,
}

impl<T> Faulty<T> {
    /// Decorates `inner`.
    pub fn new(inner: T, plan: Plan) -> Self {
        Self { inner, plan }
    }
}

#[async_trait]
impl<T: Transport> Transport for Faulty<T> {
    fn region(&self, len: u64) -> io::Result<Region> {
        self.inner.region(len)
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        let inner = self.inner.connect(peer, address).await?;
        let state = Mutex::new(State { requests: 0, killed: false });
        Ok(Arc::new(FaultyConnection { inner, address, plan: self.plan.clone(), state }))
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        self.inner.serve(service).await
    }

    fn ability(&self) -> Ability {
        self.inner.ability()
    }

    fn agree(&self, agreement: Agreement) {
        self.inner.agree(agreement);
    }

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        self.inner.fallen_back()
    }

    fn status(&self) -> Network {
        self.inner.status()
    }
}

/// So that one whose kind is known only when it runs can be decorated.
#[async_trait]
impl Transport for Arc<dyn Transport> {
    fn region(&self, len: u64) -> io::Result<Region> {
        (**self).region(len)
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        (**self).connect(peer, address).await
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        (**self).serve(service).await
    }

    fn ability(&self) -> Ability {
        (**self).ability()
    }

    fn agree(&self, agreement: Agreement) {
        (**self).agree(agreement);
    }

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        (**self).fallen_back()
    }

    fn status(&self) -> Network {
        (**self).status()
    }
}

struct State {
    requests: u64,
    killed: bool,
}

struct FaultyConnection {
    inner: Arc<dyn Connection>,
    address: SocketAddr,
    plan: Plan,
    state: Mutex<State>,
}

impl FaultyConnection {
    /// What happens before the request goes out; how its bytes are damaged, if they are.
    async fn meet(&self, message: &[u8], bulk_len: u64, timeout: Duration) -> Result<Option<Fault>, TransportError> {
        let (peer, address) = (self.inner.peer(), self.address);
        let fault = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let fault = (self.plan)(&Seen { number: state.requests, peer, message, bulk_len });
            state.requests += 1;
            state.killed |= fault == Some(Fault::Kill);
            if state.killed { Some(Fault::Kill) } else { fault }
        };
        match fault {
            None | Some(Fault::FlipOnWire | Fault::FlipInBuffer) => Ok(fault),
            Some(Fault::Delay(delay)) => {
                tokio::time::sleep(delay).await;
                Ok(None)
            }
            Some(Fault::Lose) => {
                tokio::time::sleep(timeout).await;
                Err(TransportError::Timeout { peer, address, timeout })
            }
            Some(Fault::Refuse) => Err(TransportError::Refused { peer, address, refusal: "an injected refusal".into() }),
            Some(Fault::Kill) => Err(TransportError::Lost { peer, address, cause: LossCause::Closed }),
        }
    }
}

#[async_trait]
impl Connection for FaultyConnection {
    fn peer(&self) -> NodeId {
        self.inner.peer()
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost() || self.state.lock().unwrap_or_else(PoisonError::into_inner).killed
    }

    async fn pull(&self, message: Vec<u8>, slots: Vec<Slot>, timeout: Duration) -> Result<Pulled, TransportError> {
        let bulk_len = slots.iter().map(|slot| slot.len() as u64).sum();
        let fault = self.meet(&message, bulk_len, timeout).await?;
        let mut pulled = self.inner.pull(message, slots, timeout).await?;
        if fault == Some(Fault::FlipOnWire)
            && let Some((slot, &len)) = pulled.slots.iter_mut().zip(&pulled.lens).find(|(_, len)| **len > 0)
        {
            flip(&mut slot[..len as usize]);
        }
        Ok(pulled)
    }

    async fn offer(&self, message: Vec<u8>, mut payload: Slot, len: usize, timeout: Duration) -> Result<Offered, TransportError> {
        let fault = self.meet(&message, len as u64, timeout).await?;
        if fault.is_some() {
            flip(&mut payload[..len]);
        }
        let mut offered = self.inner.offer(message, payload, len, timeout).await?;
        if fault == Some(Fault::FlipOnWire) {
            flip(&mut offered.payload[..len]);
        }
        Ok(offered)
    }
}

/// Flips a bit in the middle.
fn flip(bytes: &mut [u8]) {
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 0x10;
    }
}
