//! The coordinator's part in stage-ins: plan, assign units, merge what was found, and publish on all nodes or on none.
//!
//! The roster names the coordinator: node 0, or after its loss the live node with the lowest number. A user may ask for a stage-in
//! on any node. The request reaches the coordinator as a message
//! ([`stage_in()`]), and the stage-in's events go back one by one to the node that asked ([`subscriptions`]). The parts:
//!
//! - `run`: carries out one stage-in from its request to its end, and watches for what may end it early;
//! - `publication`: the requests to all nodes, from begin to settle or abort;
//! - `stage_in`: the state of a stage-in that workers and nodes report to;
//! - `fit`: what share of the samples is stored, if not all of them fit;
//! - `conflicts`, `merge`: path conflicts, and the merge of all runs into the catalog;
//! - `term`: a node becomes the coordinator, and ends what its predecessor began;
//! - `rates`, `distribution`: figures for the summary.
//!
//! Invariants: a dataset becomes visible on all nodes, or on none. Up to the commit a stage-in can be canceled, by its user or
//! by a failure on any node; from the commit on, it is either finished or undone on all nodes. The targets of two running
//! stage-ins never overlap.
//!
//! This module reads no source and stores no block: nodes do that, each in its [`crate::stage_in`]. It reaches all nodes,
//! including its own, only through messages.

mod conflicts;
mod distribution;
mod error;
mod fit;
mod merge;
mod publication;
mod rates;
mod request;
mod run;
mod stage_in;
mod stall;
mod subscriptions;
mod term;

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::STAGE_INS_MAX;
use dayfly_meta::path::is_below;
use dayfly_meta::wire::control::{Event, StageInRequest};
use dayfly_meta::wire::peer::{CoordinatorReply, ListedDataset, Rejection, UnitReport};
use dayfly_meta::wire::status::Policy;
use dayfly_stagein::unit_ledger::WorkerId;
use tokio::sync::{Semaphore, mpsc};

use crate::blocking::Blocking;
use crate::catch_up::CatchUp;
use crate::membership::Membership;
use crate::peers::Peers;
use crate::room::Room;
use crate::stage_in::NodeStageIns;
use crate::store::Store;
use error::CoordinatorError;
pub(crate) use request::stage_in;
pub(crate) use stage_in::{CoordinatedStageIn, NodeReport};
pub(crate) use subscriptions::SubscriptionError;
use subscriptions::Subscriptions;
use term::Term;

/// How many events may be on their way to a client. A slow client may miss progress events, but never the last event.
pub(crate) const EVENTS_QUEUE_LEN: usize = 4;

/// The parts of a node that the coordinator uses.
pub(crate) struct CoordinatorContext {
    pub(crate) node: NodeId,
    /// The path below which programs see the namespace.
    pub(crate) prefix: Vec<u8>,
    /// Worker threads of each node.
    pub(crate) workers: usize,
    /// Bytes of memory for all stage-ins of this node.
    pub(crate) stage_in_memory: u64,
    pub(crate) store: Arc<Store>,
    pub(crate) room: Arc<Room>,
    pub(crate) peers: Arc<Peers>,
    /// This node's own parts of stage-ins. They take the finished catalog without a copy.
    pub(crate) stage_ins: Arc<NodeStageIns>,
    pub(crate) membership: Arc<Membership>,
    pub(crate) catch_up: Arc<CatchUp>,
    pub(crate) blocking: Arc<dyn Blocking>,
}

impl CoordinatorContext {
    fn deadlines(&self) -> &Deadlines {
        self.peers.deadlines()
    }
}

/// All stage-ins of the session.
pub(crate) struct Coordinator {
    context: CoordinatorContext,
    permits: Semaphore,
    /// The targets of stage-ins that are running or waiting.
    targets: Mutex<Vec<ClaimedTarget>>,
    registry: Registry,
    term: Term,
    subscriptions: Subscriptions,
}

impl Coordinator {
    pub(crate) fn new(context: CoordinatorContext) -> Self {
        let (subscriptions, term) = (Subscriptions::new(*context.deadlines()), Term::new(context.node));
        Self {
            context,
            permits: Semaphore::new(STAGE_INS_MAX),
            targets: Mutex::default(),
            registry: Registry::default(),
            term,
            subscriptions,
        }
    }

    /// Starts a stage-in that a user of the node `from` asks for. Returns the number of the subscription to its events. `id` is the
    /// number of the user's request.
    pub(crate) fn start(self: &Arc<Self>, from: NodeId, id: u64, request: StageInRequest) -> Result<u64, SubscriptionError> {
        if !self.term.is_ready() {
            return Err(self.unready());
        }
        // The answer to an earlier request may have been lost.
        if let Some(number) = self.subscriptions.unused(id) {
            return Ok(number);
        }
        let (sender, events) = mpsc::channel(EVENTS_QUEUE_LEN);
        let number = self.subscriptions.open(id, events)?;
        let coordinator = self.clone();
        // The stage-in runs on a task of its own, because it must undo what it did even if nobody asks for its events anymore.
        tokio::spawn(async move {
            let is_lost = || !coordinator.context.peers.roster().is_live(from);
            tokio::join!(run::run(&coordinator, (from, id), request, sender), coordinator.subscriptions.expire(number, is_lost));
        });
        Ok(number)
    }

    /// Returns the events of stage-ins, for the nodes that started them.
    pub(crate) fn subscriptions(&self) -> &Subscriptions {
        &self.subscriptions
    }

    /// Returns whether this node coordinates any stage-in.
    #[cfg(test)]
    pub(crate) fn is_any_running(&self) -> bool {
        !self.registry.running().is_empty()
    }

    /// Answers a worker that has finished units and wants more.
    pub(crate) async fn next_units(
        &self,
        number: u64,
        (worker, request): (WorkerId, u64),
        finished: Vec<UnitReport>,
    ) -> CoordinatorReply {
        match self.registry.get(number) {
            Some(stage_in) => stage_in.next_units((worker, request), finished).await,
            None => CoordinatorReply::Over,
        }
    }

    /// Answers a node's regular report. A new coordinator does not know at once how an earlier stage-in ends.
    pub(crate) fn report(&self, number: u64, node: NodeId, report: NodeReport) -> Result<CoordinatorReply, SubscriptionError> {
        if self.term.is_other() {
            return Err(self.unready());
        }
        Ok(match self.registry.report(number, node, report) {
            CoordinatorReply::Abort if !self.term.is_ready() => CoordinatorReply::Wait,
            // An earlier coordinator has published it, and it has ended here already.
            CoordinatorReply::Abort if self.is_published(number) => CoordinatorReply::Settle,
            reply => reply,
        })
    }

    /// Returns whether a stage-in that is not running has become a dataset.
    fn is_published(&self, number: u64) -> bool {
        let dataset = u32::try_from(number).ok().and_then(|number| self.context.store.dataset(DatasetId(number)));
        self.registry.get(number).is_none() && dataset.is_some()
    }

    /// Returns how the nodes of the session prefetch and cache.
    pub(crate) fn policy(&self) -> Policy {
        self.context.room.policy()
    }

    /// Returns the datasets of the session.
    pub(crate) fn list_datasets(&self, epoch: u32) -> Result<Vec<ListedDataset>, SubscriptionError> {
        // A coordinator that has just heard that it was lost may show datasets that are gone. One that has not heard of this epoch
        // may publish a dataset without asking the node that asks now.
        let (roster, node) = (self.context.peers.roster(), self.context.node);
        if roster.coordinator() != node || !self.term.is_ready() {
            return Err(self.unready());
        }
        if roster.epoch() < epoch {
            return Err(SubscriptionError::OldEpoch { node, epoch });
        }
        Ok(self.context.store.listed())
    }

    /// Returns why this node does not answer as the coordinator now.
    fn unready(&self) -> SubscriptionError {
        let (node, coordinator) = (self.context.node, self.context.peers.roster().coordinator());
        match node == coordinator {
            true => SubscriptionError::NotReady { node },
            false => SubscriptionError::NotCoordinator { node, coordinator },
        }
    }

    /// Fails a stage-in, because it failed on a node. A node that was lost takes no part anymore, so its failure does not count.
    pub(crate) fn fail(&self, number: u64, node: NodeId, rejection: Rejection) {
        if let Some(stage_in) = self.registry.get(number).filter(|stage_in| stage_in.participants().contains(&node)) {
            stage_in.fail(CoordinatorError::on_node(&self.context.peers, node, rejection));
        }
    }
}

/// The stage-ins that are running, and the outcomes of those that have ended.
#[derive(Default)]
struct Registry {
    running: Mutex<BTreeMap<u64, Arc<CoordinatedStageIn>>>,
    /// Stage-ins that have become datasets. A node that missed the request to settle learns the outcome from the answer to its
    /// next report.
    published: Mutex<HashSet<u64>>,
}

impl Registry {
    fn get(&self, number: u64) -> Option<Arc<CoordinatedStageIn>> {
        self.running().get(&number).cloned()
    }

    fn insert(&self, stage_in: Arc<CoordinatedStageIn>) {
        self.running().insert(stage_in.number, stage_in);
    }

    fn remove(&self, number: u64) {
        self.running().remove(&number);
    }

    fn fail_all(&self, error: impl Fn() -> CoordinatorError) {
        self.running().values().for_each(|stage_in| stage_in.fail(error()));
    }

    fn set_published(&self, number: u64) {
        self.published.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
    }

    fn report(&self, number: u64, node: NodeId, report: NodeReport) -> CoordinatorReply {
        match self.get(number) {
            Some(stage_in) => stage_in.report(node, report),
            None if self.published.lock().unwrap_or_else(PoisonError::into_inner).contains(&number) => CoordinatorReply::Settle,
            None => CoordinatorReply::Abort,
        }
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<CoordinatedStageIn>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct ClaimedTarget {
    target: Vec<u8>,
    /// The number of the stage-in's request.
    id: u64,
    events: mpsc::Sender<Event>,
}

/// Why a target cannot be claimed.
#[derive(Debug, PartialEq, Eq)]
enum ClaimError {
    /// The stage-in that has claimed it was canceled, or its user has lost it and asks again. It is about to end.
    Ending,
    /// A running stage-in has claimed this target, which overlaps. `id` is the number of its request.
    Claimed { target: Vec<u8>, id: u64 },
}

/// A claim on a target: until it is dropped, no other stage-in may have a target above, below or equal to it.
struct TargetClaim<'a> {
    targets: &'a Mutex<Vec<ClaimedTarget>>,
    target: Vec<u8>,
}

impl<'a> TargetClaim<'a> {
    /// Claims a target for the request `id`, whose user receives `events`.
    fn new(
        targets: &'a Mutex<Vec<ClaimedTarget>>,
        target: &[u8],
        id: u64,
        events: &mpsc::Sender<Event>,
    ) -> Result<Self, ClaimError> {
        let mut claimed = targets.lock().unwrap_or_else(PoisonError::into_inner);
        let overlaps =
            |other: &&ClaimedTarget| other.target == target || is_below(&other.target, target) || is_below(target, &other.target);
        match claimed.iter().find(overlaps) {
            Some(other) if other.id == id || other.events.is_closed() => Err(ClaimError::Ending),
            Some(other) => Err(ClaimError::Claimed { target: other.target.clone(), id: other.id }),
            None => {
                claimed.push(ClaimedTarget { target: target.to_vec(), id, events: events.clone() });
                Ok(Self { targets, target: target.to_vec() })
            }
        }
    }
}

impl Drop for TargetClaim<'_> {
    fn drop(&mut self) {
        let mut claimed = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = claimed.iter().position(|claimed| claimed.target == self.target) {
            claimed.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "A `stage-in` to the target of an interrupted one that has not ended yet waits until it has."
    #[test]
    fn a_target_is_claimed_until_its_stage_in_ends_and_a_canceled_one_is_waited_for() {
        let (targets, (sender, receiver)) = (Mutex::default(), mpsc::channel(1));
        let claim = |target: &[u8], id| TargetClaim::new(&targets, target, id, &sender);
        let first = claim(b"a/b", 1);
        for overlapping in [&b"a/b"[..], b"a", b"a/b/c"] {
            assert_eq!(claim(overlapping, 2).err(), Some(ClaimError::Claimed { target: b"a/b".to_vec(), id: 1 }));
            assert_eq!(claim(overlapping, 1).err(), Some(ClaimError::Ending), "the same request is sent again");
        }
        assert!(claim(b"a/bc", 2).is_ok(), "it does not overlap");
        drop(receiver);
        assert_eq!(claim(b"a", 2).err(), Some(ClaimError::Ending), "the first is canceled");
        drop(first);
        assert!(claim(b"a", 2).is_ok());
    }

    #[test]
    fn a_report_after_the_end_is_answered_with_the_outcome() {
        let registry = Registry::default();
        let report = || registry.report(5, NodeId(1), NodeReport::default());
        assert_eq!(report(), CoordinatorReply::Abort, "a node that shows the dataset already must hide it again");
        registry.set_published(5);
        assert_eq!(report(), CoordinatorReply::Settle);
    }
}
