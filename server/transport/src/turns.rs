//! Who may read the drives: peers that wait take turns, so that one who asks for much does not keep the others waiting.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::id::NodeId;
use tokio::sync::oneshot;

/// A number of places, for which peers wait in queues of their own.
#[derive(Clone)]
pub(crate) struct Turns {
    /// How long an answer waits for a place.
    pub(crate) patience: Duration,
    state: Arc<Mutex<State>>,
}

struct State {
    free: usize,
    waiting: BTreeMap<NodeId, VecDeque<oneshot::Sender<Turn>>>,
    /// Whose turn was last.
    last: NodeId,
}

/// A place, until it is dropped.
pub(crate) struct Turn {
    turns: Option<Turns>,
}

impl Turns {
    pub(crate) fn new(places: usize, patience: Duration) -> Self {
        Self { patience, state: Arc::new(Mutex::new(State { free: places, waiting: BTreeMap::new(), last: NodeId(0) })) }
    }

    /// Waits for a place.
    pub(crate) async fn take(&self, peer: NodeId) -> Turn {
        let turn = {
            let mut state = self.lock();
            if state.free > 0 {
                state.free -= 1;
                return Turn { turns: Some(self.clone()) };
            }
            let (sender, turn) = oneshot::channel();
            state.waiting.entry(peer).or_default().push_back(sender);
            turn
        };
        // The sender lives in the queue until it has sent.
        turn.await.unwrap_or(Turn { turns: None })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Who is next: the first peer after the last one's that waits.
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        let after = self.waiting.range((Excluded(self.last), Unbounded)).next();
        let peer = *after.or_else(|| self.waiting.first_key_value())?.0;
        self.last = peer;
        let queue = self.waiting.get_mut(&peer)?;
        let next = queue.pop_front();
        if queue.is_empty() {
            self.waiting.remove(&peer);
        }
        next
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(turns) = self.turns.take() else { return };
        loop {
            let next = {
                let mut state = turns.lock();
                let next = state.next();
                state.free += usize::from(next.is_none());
                next
            };
            let Some(next) = next else { return };
            match next.send(Turn { turns: Some(turns.clone()) }) {
                Ok(()) => return,
                // It has given up; its turn is not to be given back here, for that is what we do.
                Err(mut turn) => turn.turns = None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn peers_take_turns_however_much_one_asks() {
        let turns = Turns::new(1, Duration::from_secs(60));
        let held = turns.take(NodeId(1)).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = tokio::task::JoinSet::new();
        for peer in [1, 1, 1, 1, 2, 2, 3] {
            let (turns, order) = (turns.clone(), order.clone());
            tasks.spawn(async move {
                let _turn = turns.take(NodeId(peer)).await;
                order.lock().unwrap().push(peer);
            });
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        // One who gives up does not stop the others.
        drop(tokio::time::timeout(std::time::Duration::from_millis(1), turns.take(NodeId(2))).await);
        drop(held);
        while tasks.join_next().await.is_some() {}
        assert_eq!(*order.lock().unwrap(), [1, 2, 3, 1, 2, 1, 1]);
        let again = tokio::time::timeout(std::time::Duration::from_secs(1), turns.take(NodeId(9))).await;
        assert!(again.is_ok(), "the place came back");
    }
}
