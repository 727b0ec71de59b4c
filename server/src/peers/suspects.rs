//! The absent peers: those that did not answer lately, called suspects, and those that the roster calls lost. Reads go to other
//! nodes meanwhile. A task asks each suspect again and again, and takes it from the list once it answers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::SUSPECT_ASKED_INTERVAL_MAX;
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::peer::AdministrationRequest;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::Peers;

/// The list of absent peers. Nearly always it is empty.
pub(super) struct Suspects {
    is_any: AtomicBool,
    list: Mutex<List>,
}

struct List {
    nodes: NodeSet,
    /// The lost members, and when this node learned that they are.
    lost: BTreeMap<NodeId, Instant>,
    /// When each former suspect answered again, and how long it was last left alone before it was asked.
    answered: BTreeMap<NodeId, (Instant, Duration)>,
    /// A task for each suspect. They end with the peers.
    asking: JoinSet<()>,
}

impl List {
    fn all(&self) -> NodeSet {
        self.nodes.iter().chain(self.lost.keys().copied()).collect()
    }
}

impl Suspects {
    pub(super) fn new() -> Self {
        Self {
            is_any: AtomicBool::new(false),
            list: Mutex::new(List {
                nodes: NodeSet::new(),
                lost: BTreeMap::new(),
                answered: BTreeMap::new(),
                asking: JoinSet::new(),
            }),
        }
    }

    fn list(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn remove(&self, node: NodeId) {
        let mut list = self.list();
        list.nodes.remove(node);
        self.is_any.store(!list.all().is_empty(), Ordering::Release);
    }

    /// Removes a node that has answered after `pause`.
    fn has_answered(&self, node: NodeId, pause: Duration) {
        self.list().answered.insert(node, (Instant::now(), pause));
        self.remove(node);
    }

    /// Records which members are lost.
    pub(super) fn set_lost(&self, lost: NodeSet) {
        let mut list = self.list();
        list.lost.retain(|&node, _| lost.contains(node));
        lost.iter().for_each(|node| {
            list.lost.entry(node).or_insert_with(Instant::now);
        });
        self.is_any.store(!list.all().is_empty(), Ordering::Release);
    }
}

impl Peers {
    /// Returns the peers that are lost or did not answer lately; `None` if there are none.
    pub(crate) fn absent(&self) -> Option<NodeSet> {
        self.suspects.is_any.load(Ordering::Acquire).then(|| self.suspects.list().all())
    }

    /// Returns how long a member has been lost; `None` for a member that is not lost.
    pub(crate) fn lost_for(&self, node: NodeId) -> Option<Duration> {
        self.suspects.list().lost.get(&node).map(Instant::elapsed)
    }

    /// Records that a peer did not answer. From now on, the peer is asked until it answers.
    pub(crate) fn suspect(self: &Arc<Self>, node: NodeId) {
        let mut list = self.suspects.list();
        if node == self.node || !list.nodes.insert(node) {
            return;
        }
        self.suspects.is_any.store(true, Ordering::Release);
        tracing::warn!(%node, "this node does not answer; its blocks are read from other nodes or from their origins");
        let (peers, timeout) = (Arc::downgrade(self), self.deadlines.request);
        let answered = list.answered.remove(&node).map(|(at, pause)| (at.elapsed(), pause));
        let mut pause = first_pause(answered, self.deadlines.redial);
        while list.asking.try_join_next().is_some() {}
        list.asking.spawn(async move {
            loop {
                sleep(pause).await;
                let Some(peers) = peers.upgrade() else { return };
                if peers.ask(node, AdministrationRequest::Status, timeout).await.is_ok() {
                    tracing::warn!(%node, "this node answers again");
                    peers.suspects.has_answered(node, pause);
                    return;
                }
                pause = (pause * 2).min(SUSPECT_ASKED_INTERVAL_MAX);
            }
        });
    }
}

/// Returns how long a new suspect is left alone before it is asked. `answered` says how long ago it answered last, and after what
/// pause. A node whose drive hangs answers each time, and then fails the next read, so its pauses grow, too.
fn first_pause(answered: Option<(Duration, Duration)>, shortest: Duration) -> Duration {
    match answered {
        Some((ago, pause)) if ago < SUSPECT_ASKED_INTERVAL_MAX => (pause * 2).min(SUSPECT_ASKED_INTERVAL_MAX),
        _ => shortest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_answers_and_fails_in_turns_is_asked_less_and_less_often() {
        let shortest = Duration::from_secs(1);
        let soon = Duration::from_millis(3);
        let first = first_pause(None, shortest);
        let pauses = std::iter::successors(Some(first), |&pause| Some(first_pause(Some((soon, pause)), shortest)));
        let seconds: Vec<u64> = pauses.take(6).map(|pause| pause.as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 8, 8]);
        let later = SUSPECT_ASKED_INTERVAL_MAX;
        assert_eq!(first_pause(Some((later, later)), shortest), shortest, "it has answered well for a while");
    }
}
