//! How much of our memory one peer may hold. A request's slots stay with it until nothing can land in them any more, which may be long
//! after its asker has gone: so each peer has a share, and one that lets its requests run past their deadlines is asked no more until
//! it has answered them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{PEER_SHARE, STUCK_REQUESTS_MAX, STUCK_SHARE};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::{Slot, TransportError};

/// When a request last made progress.
#[derive(Clone)]
pub(crate) struct Progress(Arc<Mutex<Instant>>);

impl Progress {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    pub(crate) fn touch(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub(crate) fn age(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

/// What one peer holds of our memory.
pub(crate) struct Budget {
    /// Between two looks at what is overdue.
    look_interval: Duration,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    next: u64,
    requests: HashMap<u64, Entry>,
    /// By where the slots are from.
    regions: HashMap<usize, InRegion>,
}

struct Entry {
    region: usize,
    len: u64,
    progress: Progress,
    limit: Duration,
    /// As the last look found.
    is_overdue: bool,
}

#[derive(Default)]
struct InRegion {
    bytes: u64,
    looked: Option<Instant>,
    /// So many looks in a row found too much overdue.
    looks: u32,
    overdue: Overdue,
}

/// Requests past their deadlines whose slots the peer still holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overdue {
    pub(crate) requests: u32,
    pub(crate) bytes: u64,
}

/// Why a request may not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// The peer holds too much that is overdue.
    Stuck(Overdue),
    /// The peer's share was not free within the deadline.
    Late,
}

impl Denied {
    /// Tells it to the asker.
    pub(crate) fn tell(self, peer: NodeId, address: SocketAddr, timeout: Duration) -> TransportError {
        match self {
            Self::Stuck(Overdue { requests, bytes }) => TransportError::Stuck { peer, address, requests, bytes },
            Self::Late => TransportError::Timeout { peer, address, timeout },
        }
    }
}

/// A request's part of the budget, until it is dropped: that is for whoever has its slots.
pub(crate) struct Held {
    budget: Arc<Budget>,
    number: u64,
}

impl Budget {
    pub(crate) fn new(look_interval: Duration) -> Arc<Self> {
        Arc::new(Self { look_interval, state: Mutex::default(), changed: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the peer's share has room for these slots.
    pub(crate) async fn take(
        self: &Arc<Self>,
        slots: &[Slot],
        progress: &Progress,
        limit: Duration,
    ) -> Result<Option<Held>, Denied> {
        let Some((region, region_len)) = slots.first().map(Slot::home) else { return Ok(None) };
        let len = slots.iter().map(|slot| slot.len() as u64).sum();
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let mut state = self.lock();
                state.look(region, self.look_interval);
                let here = state.regions.entry(region).or_default();
                let is_stuck = here.overdue.requests >= STUCK_REQUESTS_MAX || here.overdue.bytes > region_len / STUCK_SHARE;
                here.looks = if is_stuck { here.looks.max(1) } else { 0 };
                if here.looks >= Deadlines::LOOKS_MIN {
                    return Err(Denied::Stuck(here.overdue));
                }
                if !is_stuck && (here.bytes == 0 || here.bytes + len <= region_len / PEER_SHARE) {
                    here.bytes += len;
                    let number = state.next;
                    state.next += 1;
                    state.requests.insert(number, Entry { region, len, progress: progress.clone(), limit, is_overdue: false });
                    return Ok(Some(Held { budget: self.clone(), number }));
                }
            }
            let left = limit.saturating_sub(progress.age());
            if left.is_zero() {
                return Err(Denied::Late);
            }
            let _ = timeout(left.min(self.look_interval), changed).await;
        }
    }
}

impl State {
    /// Counts what is overdue, now and then. Who stood still finds that time has passed, and the answers unread: only looks in a row count.
    fn look(&mut self, region: usize, interval: Duration) {
        let Self { requests, regions, .. } = self;
        let here = regions.entry(region).or_default();
        let since = here.looked.map(|looked| looked.elapsed());
        if since.is_some_and(|since| since < interval) {
            return;
        }
        here.looked = Some(Instant::now());
        here.overdue = Overdue::default();
        for entry in requests.values_mut().filter(|entry| entry.region == region) {
            entry.is_overdue = entry.progress.age() >= entry.limit;
            here.overdue.requests += u32::from(entry.is_overdue);
            here.overdue.bytes += if entry.is_overdue { entry.len } else { 0 };
        }
        let is_in_a_row = since.is_some_and(|since| since < interval * Deadlines::LOOKS_MIN);
        here.looks = if is_in_a_row { here.looks + 1 } else { 0 };
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        let Some(Entry { region, len, is_overdue, .. }) = state.requests.remove(&self.number) else { return };
        let is_last = state.regions.get_mut(&region).is_some_and(|here| {
            here.bytes -= len;
            if is_overdue {
                here.overdue.requests -= 1;
                here.overdue.bytes -= len;
            }
            here.bytes == 0
        });
        if is_last {
            state.regions.remove(&region);
        }
        drop(state);
        self.budget.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;

    const SHORT: Duration = Duration::from_millis(20);
    const LOOKS: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(60);

    async fn take(budget: &Arc<Budget>, region: &Region, len: u64, limit: Duration) -> Result<Option<Held>, Denied> {
        let slot = region.slot(len).unwrap();
        budget.take(&[slot], &Progress::new(), limit).await
    }

    /// `docs/SEMANTICS.md`: what one peer holds of the arena is bounded, and so is how long others wait for it.
    #[tokio::test]
    async fn a_peer_holds_its_share_and_one_that_is_stuck_is_asked_no_more() {
        let (budget, region, other) = (Budget::new(LOOKS), Region::new(16 << 20).unwrap(), Region::new(1 << 20).unwrap());
        let mut all = Vec::new();
        for _ in 0..4 {
            all.push(take(&budget, &region, 1 << 20, LONG).await.unwrap());
        }
        assert_eq!(take(&budget, &region, 1, SHORT).await.err(), Some(Denied::Late), "its share is taken");
        assert!(take(&budget, &other, 1 << 20, SHORT).await.is_ok(), "of another region it has a share of its own");
        assert!(budget.take(&[], &Progress::new(), SHORT).await.is_ok());
        // Room that comes back is taken by who waits.
        let waiting = take(&budget, &region, 1 << 20, LONG);
        tokio::pin!(waiting);
        assert!(timeout(SHORT, &mut waiting).await.is_err());
        all.pop();
        all.push(waiting.await.unwrap());
        all.clear();
        // What is overdue makes it stuck, until it is answered.
        for _ in 0..2 {
            all.push(take(&budget, &region, 1 << 20, SHORT).await.unwrap());
        }
        tokio::time::sleep(LOOKS * 2).await;
        let stuck = Denied::Stuck(Overdue { requests: 2, bytes: 2 << 20 });
        assert_eq!(take(&budget, &region, 1, LONG).await.err(), Some(stuck));
        let start = Instant::now();
        assert_eq!(take(&budget, &region, 1, LONG).await.err(), Some(stuck));
        assert!(start.elapsed() < LONG / 2, "at once");
        all.pop();
        assert!(take(&budget, &region, 1, LONG).await.is_ok(), "it answers again");
    }

    /// As after a process was stopped: time has passed, and the answers lie unread.
    #[tokio::test]
    async fn who_stood_still_finds_no_peer_stuck() {
        let (budget, region) = (Budget::new(LOOKS), Region::new(16 << 20).unwrap());
        let held = take(&budget, &region, 4 << 20, SHORT).await.unwrap();
        std::thread::sleep(LOOKS * 2);
        let answers = tokio::spawn(async move {
            tokio::time::sleep(SHORT).await;
            drop(held);
        });
        assert!(take(&budget, &region, 1, LONG).await.is_ok());
        answers.await.unwrap();
    }
}
