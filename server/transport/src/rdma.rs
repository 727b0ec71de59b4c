//! RDMA alongside another transport. That inner transport authenticates peers, sets up the queue pairs, carries small messages,
//! detects lost peers, and takes over when a queue pair fails. Requests with bulk bytes go over RDMA.
//!
//! A request is one SEND. The peer that receives it moves the bytes: it WRITEs them into the asker's slots or, for an offer, READs
//! them from the asker's slot. The last WRITE is the answer, which also notifies the asker.
//!
//! # Parts
//! - `verbs` binds `libibverbs`; `device` opens a card and registers memory; `queue` has queue pairs and completion queues;
//!   `engine` is the thread that posts work and takes completions.
//! - `message` has the formats; `ask` sends requests and `answer` answers them; `offers` remembers answered offers;
//!   `direct` reads files in a way that bypasses the page cache.
//! - `pair` keeps a queue pair to each peer and replaces one that fails; `card` has the state that all of these parts share.
//!
//! # Invariants
//! - Memory that an operation touches belongs to the engine until the operation has completed or its queue pair is destroyed.
//! - A failure ends one queue pair. The requests on it go over the inner transport instead, and no caller sees the difference.
//! - An offer is taken only once, even if its answer was lost and the offer is sent again.
//!
//! [`selection`](crate::selection) decides which network the nodes of a session use; this module only follows that decision.

mod answer;
mod ask;
mod card;
mod device;
mod direct;
mod engine;
mod error;
mod limits;
mod message;
mod offers;
mod pair;
mod queue;
mod verbs;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::status::Network;

use crate::contract::{Connection, Service, Serving, Transport};
use crate::error::TransportError;
use crate::page_cache::blocking_here;
use crate::region::Region;
#[cfg(feature = "async-rdma")]
use crate::selection::Port;
use crate::selection::{Ability, Agreement, Preference, Selection};

use card::{Card, Shared, lock};
use device::Device;
use limits::Limits;

pub use device::Choice;
pub use error::RdmaError;

/// A card that the second provider, `async_rdma`, can use.
#[cfg(feature = "async-rdma")]
#[derive(Clone)]
pub(crate) struct Found {
    pub(crate) device: String,
    pub(crate) port: u8,
    pub(crate) gid_index: u8,
    pub(crate) packet_len: u32,
    described: Port,
}

#[cfg(feature = "async-rdma")]
impl Found {
    pub(crate) fn to_port(&self) -> Port {
        self.described.clone()
    }
}

/// Looks for the card that `choice` names, or for the best one.
#[cfg(feature = "async-rdma")]
pub(crate) fn find(choice: &Choice) -> Result<Found, RdmaError> {
    let device = Device::open(choice)?;
    let described = device.describe();
    let (port, gid_index, packet_len) = (device.port, device.address.gid_index, described.packet_len);
    Ok(Found { device: device.name.clone(), port, gid_index, packet_len, described })
}

/// A transport that uses RDMA where it can, and `inner` for everything else.
pub struct Rdma<T> {
    inner: T,
    shared: Arc<Shared>,
}

impl<T: Transport> Rdma<T> {
    /// Opens a card, unless the preference is TCP. If no card can be opened, [`Transport::ability`] reports why.
    pub fn new(inner: T, preference: Preference, choice: &Choice, deadlines: Deadlines) -> Self {
        Self::with_limits(inner, preference, choice, Limits { deadlines, ..Limits::default() })
    }

    pub(crate) fn with_limits(inner: T, preference: Preference, choice: &Choice, limits: Limits) -> Self {
        let card = if preference == Preference::Tcp { Err(RdmaError::Declined) } else { Card::open(choice, limits) };
        Self::with_card(inner, preference, card, limits.deadlines)
    }

    /// Creates a transport that opens no card. [`Transport::ability`] reports `reason`.
    pub fn without(inner: T, preference: Preference, reason: RdmaError) -> Self {
        // Without a card no deadline is ever used.
        Self::with_card(inner, preference, Err(reason), Deadlines::DEFAULT)
    }

    fn with_card(inner: T, preference: Preference, card: Result<Card, RdmaError>, deadlines: Deadlines) -> Self {
        let (unusable, fallen_back, known) = (OnceLock::new(), Mutex::default(), Mutex::default());
        let selection = Selection::new(preference);
        Self {
            inner,
            shared: Arc::new(Shared {
                deadlines,
                card,
                unusable,
                selection,
                fallen_back,
                known,
                requests_by_tcp: AtomicU64::new(0),
            }),
        }
    }
}

#[async_trait]
impl<T: Transport> Transport for Rdma<T> {
    fn region(&self, len: u64) -> io::Result<Region> {
        let Ok(card) = self.shared.card() else { return self.inner.region(len) };
        // Registering memory allocates all of its pages, which takes a while.
        match blocking_here(|| card.device.region(len)) {
            Ok(region) => Ok(region),
            Err(error) => {
                let selection = &self.shared.selection;
                if selection.insists_on_rdma() {
                    return Err(io::Error::other(error));
                }
                if selection.is_agreed() {
                    // Bytes in this region go over the inner transport. Bytes in other regions still go over RDMA.
                    tracing::warn!(bytes = len, %error, "cannot register memory; transfers through it use TCP");
                } else {
                    // Only the first error is kept.
                    let _ = self.shared.unusable.set(error);
                }
                self.inner.region(len)
            }
        }
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        let inner = self.inner.connect(peer, address).await?;
        pair::connect(&self.shared, inner, address).await
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        self.inner.serve(Arc::new(pair::QueuePairService::new(self.shared.clone(), service))).await
    }

    fn ability(&self) -> Ability {
        Ability { rdma: self.shared.card().map(|card| card.device.describe()).map_err(RdmaError::to_string) }
    }

    fn agree(&self, agreement: Agreement) {
        self.shared.selection.agree(agreement);
    }

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        lock(&self.shared.fallen_back).clone().into_iter().collect()
    }

    fn status(&self) -> Network {
        let mut network = Network { fallen_back: self.fallen_back(), ..Network::default() };
        let port = self.shared.card().map_err(RdmaError::to_string).map(|card| {
            let Device { name, port, address, .. } = &*card.device;
            let kind = if address.is_ethernet { "RoCE v2" } else { "InfiniBand" };
            let packet_len = 128_u32 << address.mtu;
            format!("{name} port {port}, {kind}, {address}, packets of {packet_len} bytes")
        });
        let description = self.shared.selection.describe(port);
        network.is_rdma = description.is_ok();
        network.detail = description.unwrap_or_else(|why| why);
        if let Ok(card) = &self.shared.card {
            card.engine.count_into(&mut network);
            network.registered_bytes = card.device.registered_bytes();
            network.requests_by_tcp = self.shared.requests_by_tcp.load(Ordering::Relaxed);
        }
        network
    }
}

#[cfg(test)]
pub(crate) mod tests;
