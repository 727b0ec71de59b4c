//! What became of offers whose answer may not have arrived. An asker whose queue pair failed asks again another way; an offer that was
//! taken is not taken twice.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::id::NodeId;
use tokio::sync::watch;

use crate::Refusal;

/// Offers remembered; of a failed queue pair at most its window is asked for again, and at once.
const REMEMBERED_MAX: usize = 1024;

/// Who offered, through which queue pair (its name), as which request.
type Key = (NodeId, u64, u32);
/// How it ended, once it has.
type End = Option<Result<Vec<u8>, Refusal>>;

/// Offers that are being taken, and those that were taken of late without the asker knowing.
#[derive(Default)]
pub(super) struct Outcomes {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    offers: HashMap<Key, watch::Receiver<End>>,
    order: VecDeque<Key>,
}

impl Outcomes {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An offer is about to be taken.
    pub(super) fn begin(&self, peer: NodeId, nonce: u64, number: u32) -> Outcome<'_> {
        let key = (peer, nonce, number);
        let (sender, receiver) = watch::channel(None);
        let mut state = self.lock();
        state.offers.insert(key, receiver);
        state.order.push_back(key);
        while state.order.len() > REMEMBERED_MAX {
            if let Some(oldest) = state.order.pop_front() {
                state.offers.remove(&oldest);
            }
        }
        Outcome { outcomes: self, key, sender }
    }

    /// How an offer ended, if it was begun: what is asked for again and was never begun, or failed, is to be taken now.
    pub(super) async fn of(&self, peer: NodeId, nonce: u64, number: u32) -> Option<Vec<u8>> {
        let mut offer = self.lock().offers.get(&(peer, nonce, number))?.clone();
        // Dropped without an end, it was not taken.
        let ended = offer.wait_for(Option::is_some).await.ok()?;
        ended.clone()?.ok()
    }
}

/// An offer that is being taken.
pub(super) struct Outcome<'a> {
    outcomes: &'a Outcomes,
    key: Key,
    sender: watch::Sender<End>,
}

impl Outcome<'_> {
    /// It has been answered.
    pub(super) fn end(&self, answer: Result<Vec<u8>, Refusal>) {
        self.sender.send_replace(Some(answer));
    }

    /// The asker knows.
    pub(super) fn forget(self) {
        let mut state = self.outcomes.lock();
        state.offers.remove(&self.key);
        state.order.retain(|key| *key != self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn what_was_taken_is_told_what_failed_or_never_began_is_not() {
        let outcomes = Outcomes::default();
        let (peer, queue) = (NodeId(1), 17);
        let taken = outcomes.begin(peer, queue, 1);
        let waiting = outcomes.of(peer, queue, 1);
        tokio::pin!(waiting);
        assert!(timeout(Duration::from_millis(10), &mut waiting).await.is_err(), "it is not decided yet");
        taken.end(Ok(b"taken".to_vec()));
        assert_eq!(waiting.await, Some(b"taken".to_vec()));
        assert_eq!(outcomes.of(peer, queue, 1).await, Some(b"taken".to_vec()), "and again");
        outcomes.begin(peer, queue, 2).end(Err("no".into()));
        drop(outcomes.begin(peer, queue, 3));
        for number in [2, 3, 4] {
            assert_eq!(outcomes.of(peer, queue, number).await, None, "{number}");
        }
        taken.forget();
        assert_eq!(outcomes.of(peer, queue, 1).await, None);
        for number in 0..3000 {
            outcomes.begin(peer, queue, number).end(Ok(Vec::new()));
        }
        let state = outcomes.lock();
        assert_eq!((state.offers.len(), state.order.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
    }
}
