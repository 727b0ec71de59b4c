//! RDMA beside another transport, which proves the key, sets the queue pairs up, carries what is small, shows who lives, and takes over
//! where a queue pair fails. Requests with bulk bytes go by SEND, their bytes by WRITE into the asker's slots (an offer's by READ out of
//! them), and the last write, the answer, tells of itself. Nothing above knows which way its bytes went.

mod agree;
mod answer;
mod ask;
mod device;
mod direct;
mod engine;
mod message;
mod outcomes;
mod pair;
mod queue;
mod verbs;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits;
use dayfly_meta::wire::status::Network;
use tokio::sync::watch;

use crate::cold::blocking_here;
use crate::turns::Turns;
use crate::{Connection, Region, Service, Serving, Transport, TransportError};

pub use agree::{Ability, Agreement, Port, Preference, agree};
pub use device::Choice;
use device::{Device, DeviceLimits};
use direct::DirectFiles;
use engine::Engine;
use outcomes::Outcomes;

/// Why there is no RDMA.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// It was declined.
    #[error("TCP was asked for")]
    Declined,
    /// It cannot be had together with encryption.
    #[error("--encrypt seals every byte between nodes, and a card writes bytes as they are")]
    Sealed,
    /// The library is not installed.
    #[error("libibverbs.so.1 cannot be opened ({reason}): install rdma-core (Debian: libibverbs1 and ibverbs-providers)")]
    NoLibrary {
        /// The loader's words.
        reason: String,
    },
    /// The kernel has no card.
    #[error("there is no RDMA device: /sys/class/infiniband is empty; is the card's driver loaded?")]
    NoDevice,
    /// Not the one that was asked for.
    #[error("there is no RDMA device '{0}'; there are: {known}", known = if .1.is_empty() { "none".to_owned() } else { .1.join(", ") })]
    NoSuchDevice(String, Vec<String>),
    /// The kernel has a card; the library does not know how to drive it.
    #[error("no provider library drives {0}: install the card's (Debian: ibverbs-providers)")]
    NoProvider(String),
    /// The file by which programs reach the card.
    #[error(
        "{device} has no file below /dev/infiniband that may be opened ({error}): load ib_uverbs; in a container pass /dev/infiniband on"
    )]
    NoDeviceFile {
        /// The card.
        device: String,
        /// Why.
        error: io::Error,
    },
    /// No cable, or no subnet manager.
    #[error(
        "port {port} of {device} is not active (it is '{state}'): check its cable and, of InfiniBand, the subnet manager (ibstat)"
    )]
    PortDown {
        /// The card.
        device: String,
        /// Its port.
        port: u8,
        /// In the kernel's words.
        state: String,
    },
    /// No address of RoCE version 2.
    #[error("port {port} of {device} has no address of RoCE version 2: give its network interface an IP address")]
    NoGid {
        /// The card.
        device: String,
        /// Its port.
        port: u8,
    },
    /// Memory cannot be locked.
    #[error(
        "cannot register {bytes} bytes of memory ({error}); locked memory is limited to {limit}: 'ulimit -l unlimited' (in Slurm \
         PropagateResourceLimitsExcept=MEMLOCK, LimitMEMLOCK=infinity for slurmd), or a smaller --memory",
        limit = limit.map_or_else(|| "what there is".to_owned(), |limit| format!("{limit} bytes"))
    )]
    Memory {
        /// How many.
        bytes: u64,
        /// The soft limit, if there is one.
        limit: Option<u64>,
        /// The kernel's words.
        error: io::Error,
    },
    /// Anything else.
    #[error("{call} failed: {error}")]
    Call {
        /// What was called.
        call: &'static str,
        /// Why.
        error: io::Error,
    },
}

/// A card that another provider may use.
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

/// Looks for the card that `choice` names, or the best.
#[cfg(feature = "async-rdma")]
pub(crate) fn find(choice: &Choice) -> Result<Found, RdmaError> {
    let device = Device::open(choice)?;
    let described = device.describe();
    let (port, gid_index, packet_len) = (device.port, device.address.gid_index, described.packet_len);
    Ok(Found { device: device.name.clone(), port, gid_index, packet_len, described })
}

/// Bounds of what a card is made to do. In tests they are smaller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) receives: u32,
    pub(crate) request_len: u32,
    pub(crate) completions: u32,
    pub(crate) send_depth: u32,
    pub(crate) bytes_in_flight: u64,
    pub(crate) write_len: u32,
    pub(crate) window: u32,
    pub(crate) staging_len: u64,
    pub(crate) messages_len: u64,
    pub(crate) deadlines: Deadlines,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            receives: limits::RDMA_RECEIVES,
            request_len: limits::RDMA_REQUEST_LEN_MAX,
            completions: limits::RDMA_COMPLETIONS_MAX,
            send_depth: limits::RDMA_SEND_DEPTH,
            bytes_in_flight: limits::RDMA_BYTES_IN_FLIGHT_MAX,
            write_len: limits::RDMA_WRITE_LEN_MAX,
            window: limits::RDMA_WINDOW,
            staging_len: limits::RDMA_STAGING_LEN,
            messages_len: limits::RDMA_MESSAGES_LEN,
            deadlines: Deadlines::DEFAULT,
        }
    }
}

impl Limits {
    /// What is left of them on a card.
    fn within(self, device: &DeviceLimits) -> Self {
        Self {
            receives: self.receives.min(device.receives),
            completions: self.completions.min(device.completions),
            // One is for the mark behind the work of a queue pair that fails.
            send_depth: self.send_depth.min(device.send_depth.saturating_sub(1)),
            write_len: self.write_len.min(device.message_len),
            ..self
        }
    }
}

/// A transport that uses RDMA where it can, and `inner` for the rest.
pub struct Rdma<T> {
    inner: T,
    core: Arc<Core>,
}

/// What connections, the listener and status share.
struct Core {
    preference: Preference,
    deadlines: Deadlines,
    card: Result<Card, RdmaError>,
    /// Why the card is of no use after all.
    spoilt: OnceLock<String>,
    agreement: watch::Sender<Option<Agreement>>,
    /// Pairs that go by the inner transport, and why.
    fallen_back: Mutex<BTreeMap<NodeId, String>>,
    /// Peers that were connected to before.
    known: Mutex<BTreeSet<NodeId>>,
}

/// A card at work.
struct Card {
    /// Ends before what it works on.
    engine: Arc<Engine>,
    device: Arc<Device>,
    limits: Limits,
    staging: Region,
    messages: Region,
    answers: Region,
    turns: Turns,
    direct: Arc<DirectFiles>,
    outcomes: Arc<Outcomes>,
}

impl Card {
    fn open(choice: &Choice, limits: Limits) -> Result<Self, RdmaError> {
        let device = Device::open(choice)?;
        let limits = limits.within(&device.limits);
        let (staging, messages) = (device.region(limits.staging_len)?, device.region(limits.messages_len / 4 * 3)?);
        let answers = device.region(limits.messages_len / 4)?;
        let engine = Arc::new(Engine::start(&device, limits)?);
        let (turns, direct, outcomes) =
            (Turns::new(limits::DRIVE_READERS_MAX, limits.deadlines.landing), Arc::default(), Arc::default());
        Ok(Self { engine, device, limits, staging, messages, answers, turns, direct, outcomes })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// The card, if there is one that works.
    fn card(&self) -> Result<&Card, String> {
        match (&self.card, self.spoilt.get()) {
            (Ok(card), None) => Ok(card),
            (Err(error), _) => Err(error.to_string()),
            (_, Some(reason)) => Err(reason.clone()),
        }
    }

    /// Whether pairs are to use it.
    fn is_wanted(&self) -> bool {
        !matches!(*self.agreement.borrow(), Some(Agreement::Tcp { .. })) && self.card().is_ok()
    }

    /// Waits until it is agreed that they are not.
    async fn unwanted(&self) {
        // The sender lives as long as `self`.
        let _ = self.agreement.subscribe().wait_for(|agreement| matches!(agreement, Some(Agreement::Tcp { .. }))).await;
    }
}

impl<T: Transport> Rdma<T> {
    /// Opens a card, as far as that is wanted and there is one. That there is none is told in [`Transport::ability`].
    pub fn new(inner: T, preference: Preference, choice: &Choice, deadlines: Deadlines) -> Self {
        Self::with_limits(inner, preference, choice, Limits { deadlines, ..Limits::default() })
    }

    pub(crate) fn with_limits(inner: T, preference: Preference, choice: &Choice, limits: Limits) -> Self {
        let card = if preference == Preference::Tcp { Err(RdmaError::Declined) } else { Card::open(choice, limits) };
        Self::with_card(inner, preference, card, limits.deadlines)
    }

    /// No card is opened, for this reason.
    pub fn without(inner: T, preference: Preference, reason: RdmaError) -> Self {
        // Without a card there is nothing to wait for.
        Self::with_card(inner, preference, Err(reason), Deadlines::DEFAULT)
    }

    fn with_card(inner: T, preference: Preference, card: Result<Card, RdmaError>, deadlines: Deadlines) -> Self {
        let (spoilt, agreement, fallen_back, known) =
            (OnceLock::new(), watch::Sender::default(), Mutex::default(), Mutex::default());
        Self { inner, core: Arc::new(Core { preference, deadlines, card, spoilt, agreement, fallen_back, known }) }
    }
}

#[async_trait]
impl<T: Transport> Transport for Rdma<T> {
    fn region(&self, len: u64) -> io::Result<Region> {
        let Ok(card) = self.core.card() else { return self.inner.region(len) };
        // To register memory makes all of its pages, which takes a while.
        match blocking_here(|| card.device.region(len)) {
            Ok(region) => Ok(region),
            Err(error) => {
                let is_agreed = self.core.agreement.borrow().is_some();
                if self.core.preference == Preference::Rdma && !is_agreed {
                    return Err(io::Error::other(error));
                }
                if is_agreed {
                    // Its bytes go by the inner transport; all others as before.
                    tracing::warn!(%error, "what takes its way through this memory goes by TCP");
                } else {
                    // It is set once, by whoever comes first.
                    let _ = self.core.spoilt.set(error.to_string());
                }
                self.inner.region(len)
            }
        }
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        let inner = self.inner.connect(peer, address).await?;
        pair::connect(&self.core, inner, address).await
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        self.inner.serve(Arc::new(pair::Welcome::new(self.core.clone(), service))).await
    }

    fn ability(&self) -> Ability {
        Ability { rdma: self.core.card().map(|card| card.device.describe()) }
    }

    fn agree(&self, agreement: Agreement) {
        self.core.agreement.send_replace(Some(agreement));
    }

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        lock(&self.core.fallen_back).clone().into_iter().collect()
    }

    fn status(&self) -> Network {
        let mut network = Network { fallen_back: self.fallen_back(), ..Network::default() };
        match (&*self.core.agreement.borrow(), self.core.card()) {
            (Some(Agreement::Tcp { why }), _) => network.detail.clone_from(why),
            (_, Err(why)) => network.detail = why,
            (agreement, Ok(card)) => {
                let Device { name, port, address, .. } = &*card.device;
                let kind = if address.is_ethernet { "RoCE v2" } else { "InfiniBand" };
                let packet_len = 128_u32 << address.mtu;
                network.is_rdma = true;
                network.detail = format!("{name} port {port}, {kind}, {}, packets of {packet_len} bytes", queue::show(address));
                if let Some(Agreement::Rdma { note: Some(note) }) = agreement {
                    network.detail = format!("{}; {note}", network.detail);
                }
            }
        }
        if let Ok(card) = &self.core.card {
            card.engine.count_into(&mut network);
            network.registered_bytes = card.device.registered_bytes();
        }
        network
    }
}

#[cfg(test)]
pub(crate) mod tests;
