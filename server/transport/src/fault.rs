//! A decorator that injects faults into another transport. It implements [`Transport`] itself, so the code under test is the code
//! that ships.
//!
//! A [`FaultSchedule`] is asked about each request before it is sent, and names the [`Fault`] that hits the request, if any.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::status::Network;

use crate::contract::{Connection, Pulled, Service, Serving, Transport};
use crate::error::{LossCause, TransportError};
use crate::region::{Region, Slot};
use crate::selection::{Ability, Agreement};

/// The fault that hits a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request is sent after this delay.
    Delay(Duration),
    /// The request never arrives, so its asker waits until the deadline.
    Lose,
    /// The request fails with a refusal.
    Refuse,
    /// The peer dies: this request and all later ones fail.
    Kill,
    /// One bit of the bulk bytes flips on the wire, in either direction.
    FlipOnWire,
    /// One bit of offered bytes flips in the memory of the node that offers them.
    FlipInBuffer,
}

/// A request that is about to be sent.
pub struct OutgoingRequest<'a> {
    /// Number of the request on its connection, from 0.
    pub number: u64,
    /// The node that is asked.
    pub peer: NodeId,
    /// The encoded message.
    pub message: &'a [u8],
    /// Number of bytes that the request offers, or that fit into its slots.
    pub bulk_len: u64,
}

/// Decides which fault hits each request. Connections on several threads share the schedule.
pub type FaultSchedule = Arc<dyn Fn(&OutgoingRequest<'_>) -> Option<Fault> + Send + Sync>;

/// A transport whose connections suffer the faults of a schedule.
pub struct Faulty<T> {
    inner: T,
    schedule: FaultSchedule,
}

impl<T> Faulty<T> {
    /// Decorates `inner`.
    pub fn new(inner: T, schedule: FaultSchedule) -> Self {
        Self { inner, schedule }
    }
}

#[async_trait]
impl<T: Transport> Transport for Faulty<T> {
    fn region(&self, len: u64) -> io::Result<Region> {
        self.inner.region(len)
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        let inner = self.inner.connect(peer, address).await?;
        let history = Mutex::new(RequestHistory { requests: 0, is_killed: false });
        Ok(Arc::new(FaultyConnection { inner, address, schedule: self.schedule.clone(), history }))
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

/// The requests that a connection has made so far.
struct RequestHistory {
    requests: u64,
    is_killed: bool,
}

struct FaultyConnection {
    inner: Arc<dyn Connection>,
    address: SocketAddr,
    schedule: FaultSchedule,
    history: Mutex<RequestHistory>,
}

impl FaultyConnection {
    /// Applies a fault that takes effect before the request is sent. Returns a fault that damages bytes, for the caller to apply.
    async fn inject(&self, message: &[u8], bulk_len: u64, timeout: Duration) -> Result<Option<Fault>, TransportError> {
        let (peer, address) = (self.inner.peer(), self.address);
        let fault = {
            let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
            let fault = (self.schedule)(&OutgoingRequest { number: history.requests, peer, message, bulk_len });
            history.requests += 1;
            history.is_killed |= fault == Some(Fault::Kill);
            if history.is_killed { Some(Fault::Kill) } else { fault }
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
        self.inner.is_lost() || self.history.lock().unwrap_or_else(PoisonError::into_inner).is_killed
    }

    fn quiet_for(&self) -> Duration {
        self.inner.quiet_for()
    }

    async fn pull(&self, message: Vec<u8>, slots: Vec<Slot>, timeout: Duration) -> Result<Pulled, TransportError> {
        let bulk_len = slots.iter().map(|slot| slot.len() as u64).sum();
        let fault = self.inject(&message, bulk_len, timeout).await?;
        let mut pulled = self.inner.pull(message, slots, timeout).await?;
        if fault == Some(Fault::FlipOnWire)
            && let Some((slot, &len)) = pulled.slots.iter_mut().zip(&pulled.lens).find(|(_, len)| **len > 0)
        {
            flip(&mut slot[..len as usize]);
        }
        Ok(pulled)
    }

    async fn offer(
        &self,
        message: Vec<u8>,
        payload: &mut Option<Slot>,
        len: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, TransportError> {
        let fault = self.inject(&message, len as u64, timeout).await?;
        if let (Some(_), Some(payload)) = (fault, payload.as_mut()) {
            flip(&mut payload[..len]);
        }
        let answer = self.inner.offer(message, payload, len, timeout).await;
        if let (Some(Fault::FlipOnWire), Some(payload)) = (fault, payload.as_mut()) {
            flip(&mut payload[..len]);
        }
        answer
    }
}

/// Flips one bit in the middle.
fn flip(bytes: &mut [u8]) {
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 0x10;
    }
}
