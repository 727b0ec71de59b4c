//! Subscriptions: the events of a stage-in, kept until the node that started it asks for them.
//!
//! A node asks for one event after another. Each request says how many events have arrived, so if an answer is lost, its event
//! is delivered again. The subscription expires, which cancels the stage-in, when the supervisor has declared the node lost.
//! It also expires if nobody asks for the stage-in's events for longer than that may take.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::FORWARDED_STAGE_INS_MAX;
use dayfly_meta::wire::control::Event;
use dayfly_meta::wire::peer::{Rejection, RejectionKind};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// Why a subscription cannot be opened, or has no next event.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SubscriptionError {
    /// The roster of this node names another coordinator.
    #[error(
        "node {node} does not coordinate stage-ins, because it takes node {coordinator} for the coordinator; run 'dayfly status' on \
         node {node} to see which nodes it does not reach"
    )]
    NotCoordinator { node: NodeId, coordinator: NodeId },
    /// This node is still ending the stage-ins of an earlier coordinator.
    #[error(
        "node {node} has become the coordinator of stage-ins, and begins none before each live node has answered it; run 'dayfly \
         status' on node {node} to see which does not, and try again when all do"
    )]
    NotReady { node: NodeId },
    /// The asker knows a newer roster.
    #[error("node {node} coordinates stage-ins, and has not heard of membership epoch {epoch} yet; try again in a moment")]
    OldEpoch { node: NodeId, epoch: u32 },
    #[error(
        "{FORWARDED_STAGE_INS_MAX} stage-ins are running or waiting, and a session takes no more; try again when one has ended"
    )]
    TooMany,
    #[error("canceled, because the node that started the stage-in did not ask for its events for too long")]
    Expired,
    #[error("the last event of this stage-in has already been delivered")]
    Ended,
}

impl From<SubscriptionError> for Rejection {
    fn from(error: SubscriptionError) -> Self {
        let kind = match error {
            SubscriptionError::NotCoordinator { .. }
            | SubscriptionError::NotReady { .. }
            | SubscriptionError::OldEpoch { .. } => RejectionKind::NotCoordinator,
            SubscriptionError::TooMany => RejectionKind::Busy,
            SubscriptionError::Expired => RejectionKind::Cancelled,
            SubscriptionError::Ended => RejectionKind::NoSuchStageIn,
        };
        Self::new(kind, error)
    }
}

/// All open subscriptions, by number.
#[derive(Default)]
pub(crate) struct Subscriptions {
    table: Mutex<SubscriptionTable>,
    deadlines: Deadlines,
}

#[derive(Default)]
struct SubscriptionTable {
    last_number: u64,
    open: HashMap<u64, Arc<Subscription>>,
}

struct Subscription {
    /// The number of the user's request.
    request: u64,
    delivery: tokio::sync::Mutex<Delivery>,
    /// How many times the node has asked.
    asked: AtomicU64,
    /// How many times [`Subscriptions::expire`] has looked since the node last asked. While this node does not run, it does not look.
    looks: AtomicU32,
}

struct Delivery {
    events: mpsc::Receiver<Event>,
    /// Number of events that have been delivered so far.
    count: u64,
    /// The last of these events. The answer that carried it may have been lost. `None` once the stage-in has dropped its
    /// sender.
    last: Option<Event>,
}

impl Subscriptions {
    pub(super) fn new(deadlines: Deadlines) -> Self {
        Self { table: Mutex::default(), deadlines }
    }

    /// Returns the subscription of a user's request whose number has not reached the node that asks: it has not taken any event.
    pub(super) fn unused(&self, request: u64) -> Option<u64> {
        let table = self.table();
        let is_unused =
            |of: &Subscription| of.request == request && of.delivery.try_lock().is_ok_and(|delivery| delivery.count == 0);
        let (number, subscription) = table.open.iter().find(|(_, subscription)| is_unused(subscription))?;
        subscription.looks.store(0, Ordering::Relaxed);
        Some(*number)
    }

    /// Returns how many times a node has asked for the events of a user's request. It asks at least once a second, unless its user has
    /// interrupted the stage-in.
    pub(super) fn asked(&self, request: u64) -> Option<u64> {
        let of = self.table().open.values().find(|subscription| subscription.request == request).cloned()?;
        Some(of.asked.load(Ordering::Relaxed))
    }

    /// Opens a subscription to the events of a stage-in that a user requests. Closing it drops `events`, which cancels the stage-in.
    pub(super) fn open(&self, request: u64, events: mpsc::Receiver<Event>) -> Result<u64, SubscriptionError> {
        let delivery = tokio::sync::Mutex::new(Delivery { events, count: 0, last: None });
        let mut table = self.table();
        if table.open.len() >= FORWARDED_STAGE_INS_MAX {
            return Err(SubscriptionError::TooMany);
        }
        table.last_number += 1;
        let number = table.last_number;
        table
            .open
            .insert(number, Arc::new(Subscription { request, delivery, asked: AtomicU64::new(0), looks: AtomicU32::new(0) }));
        Ok(number)
    }

    fn table(&self) -> MutexGuard<'_, SubscriptionTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the subscription when the node is lost, or nobody has asked about it for too long. Returns once it is closed, for this or
    /// another reason.
    pub(super) async fn expire(&self, number: u64, is_lost: impl Fn() -> bool) {
        let Deadlines { lost_after, node_silent, ping_interval, .. } = self.deadlines;
        loop {
            sleep(ping_interval).await;
            let mut table = self.table();
            let Some(subscription) = table.open.get(&number) else { return };
            let looks = 1 + subscription.looks.fetch_add(1, Ordering::Relaxed);
            if is_lost() || ping_interval * looks > lost_after + node_silent {
                tracing::warn!(subscription = number, "a stage-in is canceled, because nobody asks for its events");
                drop(table.open.remove(&number));
                return;
            }
        }
    }

    /// Returns the event that follows the first `received` events, or `None` if that event does not come soon.
    pub(crate) async fn next(&self, number: u64, received: u64) -> Result<Option<Event>, SubscriptionError> {
        let subscription = self.table().open.get(&number).cloned().ok_or(SubscriptionError::Expired)?;
        subscription.asked.fetch_add(1, Ordering::Relaxed);
        subscription.looks.store(0, Ordering::Relaxed);
        // The wait ends well within the asker's deadline.
        let next = timeout(self.deadlines.ping_interval, async {
            let mut delivery = subscription.delivery.lock().await;
            if delivery.count <= received {
                delivery.last = delivery.events.recv().await;
                delivery.count += 1;
            }
            delivery.last.clone()
        });
        let next = next.await;
        subscription.looks.store(0, Ordering::Relaxed);
        match next {
            Ok(None) => Err(SubscriptionError::Ended),
            Ok(event) => Ok(event),
            Err(_) => Ok(None),
        }
    }

    /// Closes a subscription, which cancels its stage-in if the stage-in is running.
    pub(crate) fn close(&self, number: u64) {
        self.table().open.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(reason: &str) -> Event {
        Event::Failed { reason: reason.to_owned(), can_restart: false }
    }

    #[tokio::test]
    async fn an_event_whose_answer_was_lost_is_delivered_again() {
        let subscriptions = Subscriptions::default();
        let (sender, events) = mpsc::channel(2);
        let number = subscriptions.open(7, events).unwrap();
        sender.send(failed("one")).await.unwrap();
        sender.send(failed("two")).await.unwrap();
        for (received, expect) in [(0, "one"), (0, "one"), (1, "two"), (1, "two")] {
            assert_eq!(subscriptions.next(number, received).await, Ok(Some(failed(expect))));
        }
        assert_eq!(subscriptions.next(number, 2).await, Ok(None), "nothing has happened yet");
        drop(sender);
        assert_eq!(subscriptions.next(number, 2).await, Err(SubscriptionError::Ended));
        subscriptions.close(number);
        assert_eq!(subscriptions.next(number, 2).await, Err(SubscriptionError::Expired));
    }

    #[tokio::test]
    async fn a_request_that_is_repeated_because_its_answer_was_lost_gets_the_same_subscription() {
        let subscriptions = Subscriptions::default();
        let (sender, events) = mpsc::channel(2);
        let number = subscriptions.open(7, events).unwrap();
        assert_eq!((subscriptions.unused(7), subscriptions.unused(8)), (Some(number), None));
        sender.send(failed("one")).await.unwrap();
        subscriptions.next(number, 0).await.unwrap();
        assert_eq!(subscriptions.unused(7), None, "the node knows it, and has given it up");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stage_in_that_nobody_asks_about_is_canceled() {
        let subscriptions = Subscriptions::default();
        let (sender, events) = mpsc::channel(2);
        let number = subscriptions.open(7, events).unwrap();
        let asking = async {
            loop {
                assert_eq!(subscriptions.next(number, 0).await, Ok(None));
            }
        };
        tokio::select! {
            _ = timeout(4 * Deadlines::DEFAULT.lost_after, asking) => assert!(!sender.is_closed(), "it is asked about often enough"),
            () = subscriptions.expire(number, || false) => panic!("it was asked about"),
        }
        // As long as the supervisor may take to declare the node lost, nobody else does.
        let quiet = timeout(Deadlines::DEFAULT.lost_after, subscriptions.expire(number, || false));
        assert!(quiet.await.is_err() && !sender.is_closed());
        subscriptions.expire(number, || false).await;
        assert!(sender.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stage_in_whose_node_is_lost_is_canceled_at_once() {
        let subscriptions = Subscriptions::default();
        let (sender, events) = mpsc::channel(2);
        let number = subscriptions.open(7, events).unwrap();
        timeout(2 * Deadlines::DEFAULT.ping_interval, subscriptions.expire(number, || true)).await.unwrap();
        assert!(sender.is_closed());
    }

    #[test]
    fn a_node_that_does_not_coordinate_stage_ins_says_which_node_it_is_and_what_to_do() {
        let node = NodeId(7);
        let errors = [SubscriptionError::NotCoordinator { node, coordinator: NodeId(2) }, SubscriptionError::NotReady { node }];
        for error in errors {
            let rejection = Rejection::from(error);
            // The node that was asked for the stage-in asks again for a while because of the kind, and shows only the reason.
            assert_eq!(rejection.kind, RejectionKind::NotCoordinator);
            assert!(rejection.reason.starts_with("node 7 "), "{}", rejection.reason);
            assert!(rejection.reason.contains("run 'dayfly status' on node 7 to see which"), "{}", rejection.reason);
        }
    }

    #[test]
    fn the_number_of_subscriptions_is_bounded() {
        let subscriptions = Subscriptions::default();
        for _ in 0..FORWARDED_STAGE_INS_MAX {
            subscriptions.open(7, mpsc::channel(1).1).unwrap();
        }
        assert_eq!(subscriptions.open(7, mpsc::channel(1).1), Err(SubscriptionError::TooMany));
    }
}
