//! The roster as this node knows it, and those who wait until it changes.

use std::sync::Arc;

use dayfly_meta::roster::Roster;
use tokio::sync::{Notify, watch};

/// Holds the newest roster.
pub(super) struct RosterCell {
    roster: watch::Sender<Arc<Roster>>,
    /// Wakes those who wait in the order in which they began to. The channel above wakes its receivers in a random order, and a
    /// simulated session could not be repeated.
    changed: Arc<Notify>,
}

impl RosterCell {
    pub(super) fn new(roster: Roster) -> Self {
        Self { roster: watch::Sender::new(Arc::new(roster)), changed: Arc::default() }
    }

    pub(super) fn get(&self) -> Arc<Roster> {
        self.roster.borrow().clone()
    }

    /// Replaces the roster by the one that `newer` returns, if it returns one.
    pub(super) fn change(&self, newer: impl FnOnce(&Roster) -> Option<Roster>) {
        let is_changed = self.roster.send_if_modified(|roster| match newer(roster) {
            Some(newer) => {
                *roster = Arc::new(newer);
                true
            }
            None => false,
        });
        if is_changed {
            self.changed.notify_waiters();
        }
    }

    pub(super) fn changes(&self) -> RosterChanges {
        RosterChanges { roster: self.roster.subscribe(), changed: self.changed.clone() }
    }
}

/// Learns of every change of the roster.
pub(crate) struct RosterChanges {
    roster: watch::Receiver<Arc<Roster>>,
    changed: Arc<Notify>,
}

impl RosterChanges {
    /// Returns the roster as it is now.
    pub(crate) fn current(&mut self) -> Arc<Roster> {
        self.roster.borrow_and_update().clone()
    }

    /// Waits until the roster is another one than this last returned. If it is dropped while it waits, nothing is missed.
    pub(crate) async fn next(&mut self) -> Arc<Roster> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.roster.has_changed().unwrap_or(false) {
                break;
            }
            changed.await;
        }
        self.current()
    }

    /// Makes [`Self::next`] return the current roster once more.
    pub(crate) fn look_again(&mut self) {
        self.roster.mark_changed();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn each_change_is_seen_once_unless_asked_for_again() {
        let cell = RosterCell::new(Roster::new(&[]));
        let mut changes = cell.changes();
        assert!(changes.next().now_or_never().is_none());
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 7));
        cell.change(|_| Some(Roster::new(&[address])));
        assert_eq!(changes.next().now_or_never().map(|roster| roster.count()), Some(1));
        cell.change(|_| None);
        assert!(changes.next().now_or_never().is_none());
        changes.look_again();
        assert!(changes.next().now_or_never().is_some());
        assert_eq!(cell.get().count(), 1);
    }
}
