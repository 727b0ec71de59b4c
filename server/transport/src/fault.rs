//! A transport that fails when told to: a decorator, so that what is tested is what is shipped.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::status::Network;

use crate::{Ability, Agreement, Connection, Offered, Pulled, Region, Service, Serving, Slot, Transport, TransportError};

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
}

/// Decides, for a request's number (from 0), what happens to it.
pub type Plan = Arc<dyn Fn(u64) -> Option<Fault> + Send + Sync>;

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
    async fn meet(&self, timeout: Duration) -> Result<(), TransportError> {
        let (peer, address) = (self.inner.peer(), self.address);
        let fault = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let fault = (self.plan)(state.requests);
            state.requests += 1;
            state.killed |= fault == Some(Fault::Kill);
            if state.killed { Some(Fault::Kill) } else { fault }
        };
        match fault {
            None => Ok(()),
            Some(Fault::Delay(delay)) => {
                tokio::time::sleep(delay).await;
                Ok(())
            }
            Some(Fault::Lose) => {
                tokio::time::sleep(timeout).await;
                Err(TransportError::Timeout { peer, address, timeout })
            }
            Some(Fault::Refuse) => Err(TransportError::Refused { peer, address, reason: "told to fail".to_owned() }),
            Some(Fault::Kill) => Err(TransportError::Lost { peer, address, reason: "told to die".to_owned() }),
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
        self.meet(timeout).await?;
        self.inner.pull(message, slots, timeout).await
    }

    async fn offer(&self, message: Vec<u8>, payload: Slot, len: usize, timeout: Duration) -> Result<Offered, TransportError> {
        self.meet(timeout).await?;
        self.inner.offer(message, payload, len, timeout).await
    }
}
