//! Remembers answers to offers until they have reached their askers. An asker whose queue pair failed sends the offer again over
//! another path, and an offer that was taken must not be taken twice.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::id::NodeId;
use tokio::sync::watch;

use crate::error::Refusal;

/// Number of offers remembered. After a failure, an asker sends its unanswered offers again, all at once. There are at most as
/// many of them as a queue pair's window allows, which is far fewer.
const REMEMBERED_MAX: usize = 1024;

/// Identifies an offer: the node that sent it, the nonce of the queue pair, and the number of the request.
type OfferKey = (NodeId, u64, u32);
/// The answer to an offer, once there is one.
type OfferEnd = Option<Result<Vec<u8>, Refusal>>;

/// The offers that are being answered, and recent ones whose askers may not know the answer.
#[derive(Default)]
pub(super) struct OfferOutcomes {
    state: Mutex<RememberedOffers>,
}

#[derive(Default)]
struct RememberedOffers {
    offers: HashMap<OfferKey, watch::Receiver<OfferEnd>>,
    order: VecDeque<OfferKey>,
}

impl OfferOutcomes {
    fn lock(&self) -> MutexGuard<'_, RememberedOffers> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that an offer is about to be answered.
    pub(super) fn begin(&self, peer: NodeId, nonce: u64, number: u32) -> OfferInProgress<'_> {
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
        OfferInProgress { outcomes: self, key, sender }
    }

    /// Waits for the answer to an offer that was begun. Returns `None` if the offer was never begun or was not taken; the caller
    /// must then answer the offer.
    pub(super) async fn of(&self, peer: NodeId, nonce: u64, number: u32) -> Option<Vec<u8>> {
        let mut offer = self.lock().offers.get(&(peer, nonce, number))?.clone();
        // A sender that was dropped without an answer belongs to an offer that was not taken.
        let ended = offer.wait_for(Option::is_some).await.ok()?;
        ended.clone()?.ok()
    }
}

/// An offer that is being answered.
pub(super) struct OfferInProgress<'a> {
    outcomes: &'a OfferOutcomes,
    key: OfferKey,
    sender: watch::Sender<OfferEnd>,
}

impl OfferInProgress<'_> {
    /// Records the answer.
    pub(super) fn end(&self, answer: Result<Vec<u8>, Refusal>) {
        self.sender.send_replace(Some(answer));
    }

    /// Forgets the offer, because its asker has the answer.
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
    async fn only_offers_that_were_taken_have_a_remembered_answer() {
        let outcomes = OfferOutcomes::default();
        let (peer, queue) = (NodeId(1), 17);
        let taken = outcomes.begin(peer, queue, 1);
        let waiting = outcomes.of(peer, queue, 1);
        tokio::pin!(waiting);
        assert!(timeout(Duration::from_millis(10), &mut waiting).await.is_err(), "there is no answer yet");
        taken.end(Ok(b"taken".to_vec()));
        assert_eq!(waiting.await, Some(b"taken".to_vec()));
        assert_eq!(outcomes.of(peer, queue, 1).await, Some(b"taken".to_vec()), "the answer can be read again");
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
