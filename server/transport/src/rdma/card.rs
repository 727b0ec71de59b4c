//! A card at work, with its memory and its limits, and the state that the node's connections and listener share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits;

use super::device::{Choice, Device};
use super::direct::DirectFiles;
use super::engine::Engine;
use super::error::RdmaError;
use super::limits::Limits;
use super::offers::OfferOutcomes;
use crate::fair_queue::FairQueue;
use crate::region::Region;
use crate::selection::Selection;

/// State that connections, the listener and the status share.
pub(super) struct Shared {
    pub(super) deadlines: Deadlines,
    pub(super) card: Result<Card, RdmaError>,
    /// Set if the card turned out to be unusable after it was opened.
    pub(super) unusable: OnceLock<RdmaError>,
    pub(super) selection: Selection,
    /// Peers that are reached only over the inner transport, each with the reason.
    pub(super) fallen_back: Mutex<BTreeMap<NodeId, String>>,
    /// Peers to which a connection was made before.
    pub(super) known: Mutex<BTreeSet<NodeId>>,
    /// Requests with slots that went over the inner transport although the card should be used.
    pub(super) requests_by_tcp: AtomicU64,
}

impl Shared {
    /// Returns the card, or why there is none that works.
    pub(super) fn card(&self) -> Result<&Card, &RdmaError> {
        match (&self.card, self.unusable.get()) {
            (Ok(card), None) => Ok(card),
            (Err(error), _) | (_, Some(error)) => Err(error),
        }
    }

    /// Returns whether connections should use the card.
    pub(super) fn is_wanted(&self) -> bool {
        self.selection.allows_rdma() && self.card().is_ok()
    }

    /// Counts a request with slots that goes over the inner transport.
    pub(super) fn count_by_tcp(&self) {
        if self.is_wanted() {
            self.requests_by_tcp.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// An open card with everything needed to send and answer requests through it.
pub(super) struct Card {
    /// Fields are dropped in order, so the engine stops before the objects that it uses are dropped.
    pub(super) engine: Arc<Engine>,
    pub(super) device: Arc<Device>,
    pub(super) limits: Limits,
    /// Memory through which the bytes of answers pass.
    pub(super) staging: Region,
    /// Memory for this node's requests, and for the answers to them.
    pub(super) messages: Region,
    /// Memory for this node's answers to its peers' requests.
    pub(super) answers: Region,
    pub(super) drive_readers: FairQueue,
    pub(super) direct: Arc<DirectFiles>,
    pub(super) outcomes: Arc<OfferOutcomes>,
}

impl Card {
    pub(super) fn open(choice: &Choice, limits: Limits) -> Result<Self, RdmaError> {
        let device = Device::open(choice)?;
        let limits = limits.within(&device.limits);
        let (staging, messages) = (device.region(limits.staging_len)?, device.region(limits.messages_len / 4 * 3)?);
        let answers = device.region(limits.messages_len / 4)?;
        let engine = Arc::new(Engine::start(&device, limits)?);
        let drive_readers = FairQueue::new(limits::DRIVE_READERS_MAX, limits.deadlines.landing);
        let (direct, outcomes) = (Arc::default(), Arc::default());
        Ok(Self { engine, device, limits, staging, messages, answers, drive_readers, direct, outcomes })
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
