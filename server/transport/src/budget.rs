//! Bounds the memory that one peer can hold. A request keeps its slots until no more bytes can land in them, which may be long
//! after the caller has given up. Therefore, each peer has a share of every region, and a peer that lets requests run past their
//! deadlines gets no new ones until it has answered.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{PEER_SHARE, STUCK_REQUESTS_MAX, STUCK_SHARE};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::error::TransportError;
use crate::region::Slot;

/// A wait is divided into so many ticks.
const WAIT_TICKS: u32 = 16;

/// How long a request has waited since it last made progress; clones share it. Waits are counted in ticks: if this process stands still,
/// that is one tick at most, because what has arrived meanwhile is still unread, and the peer may have stood still at the same time.
#[derive(Clone)]
pub(crate) struct Progress(Arc<Mutex<Waited>>);

struct Waited {
    since: Instant,
    counted: Duration,
    /// How often there has been progress.
    steps: u64,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Waited { since: Instant::now(), counted: Duration::ZERO, steps: 0 })))
    }

    fn lock(&self) -> MutexGuard<'_, Waited> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn touch(&self) {
        let mut waited = self.lock();
        *waited = Waited { since: Instant::now(), counted: Duration::ZERO, steps: waited.steps + 1 };
    }

    /// Returns how long there has been no progress by the clock.
    pub(crate) fn age(&self) -> Duration {
        self.lock().since.elapsed()
    }

    /// Returns what is left of a limit.
    pub(crate) fn left(&self, limit: Duration) -> Duration {
        limit.saturating_sub(self.lock().counted)
    }

    /// Waits for a future until there has been no progress for `limit`; then returns `None`. The future gets one more chance of
    /// `look_interval` at the end.
    pub(crate) async fn wait<T>(&self, limit: Duration, look_interval: Duration, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        let longest = (limit / WAIT_TICKS).max(Duration::from_millis(1));
        loop {
            let tick = longest.min(self.left(limit));
            if tick.is_zero() {
                return timeout(look_interval, future).await.ok();
            }
            if let Some(output) = self.tick(tick, &mut future).await {
                return Some(output);
            }
        }
    }

    /// Waits for a future for one tick, and counts the tick if there is no progress meanwhile.
    async fn tick<T>(&self, tick: Duration, future: impl Future<Output = T>) -> Option<T> {
        let (start, steps) = (Instant::now(), self.lock().steps);
        let output = timeout(tick, future).await.ok();
        let mut waited = self.lock();
        if waited.steps == steps {
            waited.counted += if output.is_some() { start.elapsed().min(tick) } else { tick };
        }
        output
    }
}

/// The memory of this node that one peer holds.
pub(crate) struct PeerBudget {
    /// Time between two checks for overdue requests.
    look_interval: Duration,
    state: Mutex<BudgetState>,
    changed: Notify,
}

#[derive(Default)]
struct BudgetState {
    next: u64,
    requests: HashMap<u64, RequestShare>,
    /// The shares of each region, by the region's number: see [`Slot::home`].
    regions: HashMap<usize, RegionShare>,
}

struct RequestShare {
    region: usize,
    len: u64,
    progress: Progress,
    limit: Duration,
    /// Whether the last check found the request past its deadline.
    is_overdue: bool,
}

#[derive(Default)]
struct RegionShare {
    bytes: u64,
    checked: Option<Instant>,
    /// Number of checks in a row that found too many overdue requests or bytes.
    checks: u32,
    overdue: Overdue,
}

/// The requests past their deadlines whose slots the peer still holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Overdue {
    pub(crate) requests: u32,
    pub(crate) bytes: u64,
}

/// Why a request may not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Overdue requests hold too much memory.
    Stuck(Overdue),
    /// The peer's share had no room within the request's deadline.
    Late,
}

impl Denied {
    /// Returns the error for the caller of the request.
    pub(crate) fn into_error(self, peer: NodeId, address: SocketAddr, timeout: Duration) -> TransportError {
        match self {
            Self::Stuck(Overdue { requests, bytes }) => TransportError::Stuck { peer, address, requests, bytes },
            Self::Late => TransportError::Timeout { peer, address, timeout },
        }
    }
}

/// A request's share of the budget. Dropping the share returns it. The owner of the request's slots keeps the share.
pub(crate) struct BudgetShare {
    budget: Arc<PeerBudget>,
    number: u64,
}

impl PeerBudget {
    pub(crate) fn new(look_interval: Duration) -> Arc<Self> {
        Arc::new(Self { look_interval, state: Mutex::default(), changed: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, BudgetState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the peer's share has room for these slots. Requests without slots need no share.
    pub(crate) async fn take(
        self: &Arc<Self>,
        slots: &[Slot],
        progress: &Progress,
        limit: Duration,
    ) -> Result<Option<BudgetShare>, Denied> {
        let Some((region, region_len)) = slots.first().map(Slot::home) else { return Ok(None) };
        let len = slots.iter().map(|slot| slot.len() as u64).sum();
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let mut state = self.lock();
                state.check_overdue(region, self.look_interval);
                let here = state.regions.entry(region).or_default();
                let is_stuck = here.overdue.requests >= STUCK_REQUESTS_MAX || here.overdue.bytes > region_len / STUCK_SHARE;
                here.checks = if is_stuck { here.checks.max(1) } else { 0 };
                if here.checks >= Deadlines::LOOKS_MIN {
                    return Err(Denied::Stuck(here.overdue));
                }
                if !is_stuck && (here.bytes == 0 || here.bytes + len <= region_len / PEER_SHARE) {
                    here.bytes += len;
                    let number = state.next;
                    state.next += 1;
                    state
                        .requests
                        .insert(number, RequestShare { region, len, progress: progress.clone(), limit, is_overdue: false });
                    return Ok(Some(BudgetShare { budget: self.clone(), number }));
                }
            }
            let left = progress.left(limit);
            if left.is_zero() {
                return Err(Denied::Late);
            }
            progress.tick(left.min(self.look_interval), changed).await;
        }
    }
}

impl BudgetState {
    /// Counts overdue requests, at most once per interval. A single check proves nothing: when a
    /// suspended process continues, answers that have arrived are still unread, so their requests
    /// look overdue. Therefore, only several checks in a row count.
    fn check_overdue(&mut self, region: usize, interval: Duration) {
        let Self { requests, regions, .. } = self;
        let here = regions.entry(region).or_default();
        let since = here.checked.map(|checked| checked.elapsed());
        if since.is_some_and(|since| since < interval) {
            return;
        }
        here.checked = Some(Instant::now());
        here.overdue = Overdue::default();
        for entry in requests.values_mut().filter(|entry| entry.region == region) {
            entry.is_overdue = entry.progress.age() >= entry.limit;
            here.overdue.requests += u32::from(entry.is_overdue);
            here.overdue.bytes += if entry.is_overdue { entry.len } else { 0 };
        }
        let is_in_a_row = since.is_some_and(|since| since < interval * Deadlines::LOOKS_MIN);
        here.checks = if is_in_a_row { here.checks + 1 } else { 0 };
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        let mut state = self.budget.lock();
        let Some(RequestShare { region, len, is_overdue, .. }) = state.requests.remove(&self.number) else { return };
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
    use crate::region::Region;

    const SHORT: Duration = Duration::from_millis(20);
    const LOOKS: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(60);

    async fn take(budget: &Arc<PeerBudget>, region: &Region, len: u64, limit: Duration) -> Result<Option<BudgetShare>, Denied> {
        let slot = region.slot(len).unwrap();
        budget.take(&[slot], &Progress::new(), limit).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_counts_its_own_ticks_and_begins_again_with_each_progress() {
        let (limit, look) = (Duration::from_secs(4), Duration::from_millis(100));
        let start = tokio::time::Instant::now();
        assert_eq!(Progress::new().wait(limit, look, std::future::pending::<()>()).await, None);
        let waited = start.elapsed();
        assert!(waited >= limit && waited <= limit + 2 * look, "{waited:?}");
        let (progress, start) = (Progress::new(), tokio::time::Instant::now());
        let touch = async {
            tokio::time::sleep(limit / 2).await;
            progress.touch();
            std::future::pending::<()>().await;
        };
        assert_eq!(progress.wait(limit, look, touch).await, None);
        let waited = start.elapsed();
        assert!(waited >= limit * 3 / 2 && waited <= limit * 3 / 2 + limit / WAIT_TICKS + 2 * look, "{waited:?}");
        // This process stands still for longer than the limit. Then the answer takes another moment to be read.
        let answer = async {
            tokio::time::sleep(limit / 8).await;
            tokio::time::advance(limit * 3).await;
            tokio::time::sleep(limit / 4).await;
        };
        assert_eq!(Progress::new().wait(limit, look, answer).await, Some(()));
    }

    /// `docs/SEMANTICS.md`: the part of the arena that one peer holds is bounded, and so is the time that others wait because of
    /// that peer.
    #[tokio::test]
    async fn a_peer_holds_at_most_its_share_and_a_stuck_peer_gets_no_new_requests() {
        let (budget, region, other) = (PeerBudget::new(LOOKS), Region::new(16 << 20).unwrap(), Region::new(1 << 20).unwrap());
        let mut all = Vec::new();
        for _ in 0..4 {
            all.push(take(&budget, &region, 1 << 20, LONG).await.unwrap());
        }
        assert_eq!(take(&budget, &region, 1, SHORT).await.err(), Some(Denied::Late), "its share is used up");
        assert!(take(&budget, &other, 1 << 20, SHORT).await.is_ok(), "every region has a share of its own");
        assert!(budget.take(&[], &Progress::new(), SHORT).await.is_ok());
        // A waiting request gets the room that another request returns.
        let waiting = take(&budget, &region, 1 << 20, LONG);
        tokio::pin!(waiting);
        assert!(timeout(SHORT, &mut waiting).await.is_err());
        all.pop();
        all.push(waiting.await.unwrap());
        all.clear();
        // Overdue requests make the peer stuck until they are answered.
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

    /// The situation after a process has been suspended: time has passed, and the answers are unread.
    #[tokio::test]
    async fn a_suspended_process_finds_no_peer_stuck() {
        let (budget, region) = (PeerBudget::new(LOOKS), Region::new(16 << 20).unwrap());
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
