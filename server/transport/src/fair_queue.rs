//! A fair queue for a limited number of permits. Each peer waits in a queue of its own, and the queues are served in turn, so a
//! peer that sends many requests does not delay the requests of other peers. Transports use it to bound how many answers read from
//! the drives at once.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::id::NodeId;
use tokio::sync::oneshot;

/// A number of permits that peers share; clones share them too.
#[derive(Clone)]
pub(crate) struct FairQueue {
    /// How long an answer should wait for a permit before it continues without one.
    pub(crate) timeout: Duration,
    waiters: Arc<Mutex<Waiters>>,
}

struct Waiters {
    free_permits: usize,
    by_peer: BTreeMap<NodeId, VecDeque<oneshot::Sender<FairPermit>>>,
    /// The peer that was served last.
    last: NodeId,
}

/// A permit, which returns to the queue when it is dropped.
pub(crate) struct FairPermit {
    /// `None` if the permit has been passed on or was never counted.
    queue: Option<FairQueue>,
}

impl FairQueue {
    pub(crate) fn new(permits: usize, timeout: Duration) -> Self {
        let waiters = Waiters { free_permits: permits, by_peer: BTreeMap::new(), last: NodeId(0) };
        Self { timeout, waiters: Arc::new(Mutex::new(waiters)) }
    }

    /// Waits for a permit, on behalf of `peer`.
    pub(crate) async fn acquire(&self, peer: NodeId) -> FairPermit {
        let permit = {
            let mut waiters = self.lock();
            if waiters.free_permits > 0 {
                waiters.free_permits -= 1;
                return FairPermit { queue: Some(self.clone()) };
            }
            let (sender, permit) = oneshot::channel();
            waiters.by_peer.entry(peer).or_default().push_back(sender);
            permit
        };
        // The sender stays in the queue until it has sent, so this cannot fail.
        permit.await.unwrap_or(FairPermit { queue: None })
    }

    fn lock(&self) -> MutexGuard<'_, Waiters> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiters {
    /// Removes the next waiter: the oldest one of the peer whose turn is next.
    fn next(&mut self) -> Option<oneshot::Sender<FairPermit>> {
        let after = self.by_peer.range((Excluded(self.last), Unbounded)).next();
        let peer = *after.or_else(|| self.by_peer.first_key_value())?.0;
        self.last = peer;
        let queue = self.by_peer.get_mut(&peer)?;
        let next = queue.pop_front();
        if queue.is_empty() {
            self.by_peer.remove(&peer);
        }
        next
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        loop {
            let next = {
                let mut waiters = queue.lock();
                let next = waiters.next();
                waiters.free_permits += usize::from(next.is_none());
                next
            };
            let Some(next) = next else { return };
            match next.send(FairPermit { queue: Some(queue.clone()) }) {
                Ok(()) => return,
                // This waiter has given up. Its permit must not return itself here: the loop passes it to the next waiter.
                Err(mut permit) => permit.queue = None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn peers_are_served_in_turn_however_much_one_of_them_asks() {
        let queue = FairQueue::new(1, Duration::from_secs(60));
        let held = queue.acquire(NodeId(1)).await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = tokio::task::JoinSet::new();
        for peer in [1, 1, 1, 1, 2, 2, 3] {
            let (queue, order) = (queue.clone(), order.clone());
            tasks.spawn(async move {
                let _permit = queue.acquire(NodeId(peer)).await;
                order.lock().unwrap().push(peer);
            });
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        // A waiter that gives up does not block the others.
        drop(tokio::time::timeout(std::time::Duration::from_millis(1), queue.acquire(NodeId(2))).await);
        drop(held);
        while tasks.join_next().await.is_some() {}
        assert_eq!(*order.lock().unwrap(), [1, 2, 3, 1, 2, 1, 1]);
        let again = tokio::time::timeout(std::time::Duration::from_secs(1), queue.acquire(NodeId(9))).await;
        assert!(again.is_ok(), "the permit was returned");
    }
}
