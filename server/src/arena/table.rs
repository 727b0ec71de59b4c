//! Records which chunks are resident and which ones are being loaded, and chooses which ones to evict. This state machine has
//! no locks and never waits, so that a test can explore its interleavings.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use quick_cache::unsync::Cache;
use quick_cache::{Lifecycle, OptionsBuilder, Weighter};
use rustc_hash::{FxBuildHasher, FxHashMap};

/// Once the table is full, one new value in this many joins those that stay. Each epoch of a training reads each sample once, in a
/// new order. If every new value displaced an older one, many would be evicted before the next epoch reads them. But some must join,
/// or values that nobody reads any more would stay forever.
const ADMITTED_ONE_IN: u64 = 16;
/// The same for a value that another node has, while the table has values that only the parallel file system has.
const FETCHED_ADMITTED_ONE_IN: u64 = 64;
/// The same for a value that only the parallel file system has, while more than a quarter of the values are not of this kind.
const ORIGIN_ADMITTED_ONE_IN: u64 = 4;
/// How often eviction spares such a value after each time that it was read. Other values are spared once.
const ORIGIN_CHANCES: u8 = 3;

/// The capacity of the table follows what really fits, in steps of this part, but not below [`CAPACITY_SHARE_MIN`] of its size.
const CAPACITY_STEPS: u64 = 64;
const CAPACITY_SHARE_MIN: u64 = 4;

/// A resident value, which knows its weight, and whether it was read again.
pub(super) trait Resident {
    /// Bytes that the value takes in the arena.
    fn weight(&self) -> u64;
    /// Returns whether the value, once it is evicted, has to be read from the parallel file system again.
    fn is_from_origin(&self) -> bool;
    /// Records that a request has found the value.
    fn set_mark(&self);
    /// Returns whether the value was read again since the last call.
    fn take_mark(&self) -> bool;
    /// How often eviction will spare the value before it is read again.
    fn chances(&self) -> &AtomicU8;
}

/// Returns whether eviction spares a value, and counts that.
fn spares(value: &impl Resident) -> bool {
    if value.take_mark() {
        value.chances().store(if value.is_from_origin() { ORIGIN_CHANCES } else { 1 }, Ordering::Relaxed);
    }
    value.chances().fetch_update(Ordering::Relaxed, Ordering::Relaxed, |chances| chances.checked_sub(1)).is_ok()
}

/// The state of a key.
#[derive(Debug)]
pub(super) enum Lookup<R, P> {
    /// The value is in the table.
    Resident(Arc<R>),
    /// Another caller is loading the value.
    Loading(P),
    /// The caller has to load the value.
    Absent,
}

/// Keys whose values are resident or being loaded. A value is pinned while anything outside the table has a reference to it.
pub(super) struct Table<K, R, P> {
    loading: FxHashMap<K, P>,
    /// Values stay once the cache is full, and newer ones pass through a small part of it, except for those that are admitted
    /// ([`ADMITTED_ONE_IN`]). These displace values that nobody has read for the longest time.
    resident: Cache<Entry<K>, Option<Arc<R>>, Weights, FxBuildHasher, Pins>,
    capacity_min: u64,
    /// The state of a generator of numbers that decide which values are admitted. A mere count of loads could be in step with the
    /// order of reads.
    random: u64,
    /// Number of resident values that are from their origins.
    from_origin: usize,
}

/// A key, or ballast. Inserting ballast of some weight makes the cache evict values of that weight.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Entry<K> {
    Key(K),
    Ballast(u64),
}

#[derive(Clone)]
struct Weights;

impl<K, R: Resident> Weighter<Entry<K>, Option<Arc<R>>> for Weights {
    fn weight(&self, entry: &Entry<K>, value: &Option<Arc<R>>) -> u64 {
        match entry {
            Entry::Key(_) => value.as_ref().map_or(1, |value| value.weight().max(1)),
            Entry::Ballast(weight) => *weight,
        }
    }
}

#[derive(Clone)]
struct Pins;

impl<K, R: Resident> Lifecycle<Entry<K>, Option<Arc<R>>> for Pins {
    type RequestState = Vec<Arc<R>>;

    fn begin_request(&self) -> Vec<Arc<R>> {
        Vec::new()
    }

    fn is_pinned(&self, entry: &Entry<K>, value: &Option<Arc<R>>) -> bool {
        match (entry, value) {
            (Entry::Key(_), Some(value)) => Arc::strong_count(value) > 1 || spares(&**value),
            _ => true,
        }
    }

    fn on_evict(&self, evicted: &mut Vec<Arc<R>>, _: Entry<K>, value: Option<Arc<R>>) {
        evicted.extend(value);
    }
}

impl<K: Clone + Eq + std::hash::Hash, R: Resident, P: Clone> Table<K, R, P> {
    /// Creates a table for `capacity` bytes, sized for about `entries` values.
    pub(super) fn new(capacity: u64, entries: usize) -> Self {
        let mut options = OptionsBuilder::new();
        // A cache that remembered what it has evicted would admit all that the next epoch reads.
        options.estimated_items_capacity(entries).weight_capacity(capacity).ghost_allocation(0.0);
        let options = options.build().unwrap_or_else(|error| unreachable!("both sizes are set: {error:?}"));
        let resident = Cache::with_options(options, Weights, FxBuildHasher, Pins);
        Self { loading: FxHashMap::default(), resident, capacity_min: capacity / CAPACITY_SHARE_MIN, random: 1, from_origin: 0 }
    }

    /// Looks a key up, and marks its value as read again.
    pub(super) fn look_up(&self, key: &K) -> Lookup<R, P> {
        if let Some(pending) = self.loading.get(key) {
            return Lookup::Loading(pending.clone());
        }
        match self.resident.peek(&Entry::Key(key.clone())) {
            Some(Some(value)) => {
                value.set_mark();
                Lookup::Resident(value.clone())
            }
            _ => Lookup::Absent,
        }
    }

    /// Returns the value of a key. This does not count as a use of the value.
    #[cfg(test)]
    pub(super) fn peek(&self, key: &K) -> Option<Arc<R>> {
        self.resident.peek(&Entry::Key(key.clone())).cloned().flatten()
    }

    /// Records that the caller is loading an absent key. Other callers that look it up get `pending`.
    pub(super) fn begin_load(&mut self, key: K, pending: P) {
        debug_assert!(matches!(self.look_up(&key), Lookup::Absent));
        self.loading.insert(key, pending);
    }

    /// Records that a load succeeded. Returns the values that were evicted for it.
    #[must_use = "dropping the evicted values frees their slots, which is best done without the lock"]
    pub(super) fn finish_load(&mut self, key: K, value: Arc<R>) -> Vec<Arc<R>> {
        self.loading.remove(&key);
        // Knuth's MMIX generator; its upper bits are the better ones.
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The caller has found room for the value, whatever the cache would say.
        let weight = self.resident.weight().saturating_add(value.weight());
        if weight > self.resident.capacity() {
            self.resident.set_capacity(weight + weight / CAPACITY_STEPS);
        }
        let entry = Entry::Key(key);
        let one_in = match value.is_from_origin() {
            false if self.from_origin > 0 => FETCHED_ADMITTED_ONE_IN,
            // There are many values that can make way.
            true if self.from_origin < self.resident.len() / 4 * 3 => ORIGIN_ADMITTED_ONE_IN,
            _ => ADMITTED_ONE_IN,
        };
        self.from_origin += usize::from(value.is_from_origin());
        let evicted = self.resident.insert_with_lifecycle(entry.clone(), Some(value));
        if (self.random >> 32).is_multiple_of(one_in) {
            // A value that was looked up is admitted at the next eviction.
            let _ = self.resident.get(&entry);
        }
        self.count_removed(&evicted);
        evicted
    }

    /// Records that a load was given up. The next caller that looks the key up has to load it.
    pub(super) fn abandon_load(&mut self, key: &K) {
        self.loading.remove(key);
    }

    /// Evicts about `bytes`, or less if too much is pinned. Call this when there is no more room for values. Returns the evicted
    /// values.
    pub(super) fn evict(&mut self, bytes: u64) -> Vec<Arc<R>> {
        // While most of the room is taken by loads, few values are resident.
        let full = self.resident.weight().max(self.capacity_min);
        if full + full / CAPACITY_STEPS < self.resident.capacity() {
            // Between the values there is room that is of no use. The cache must know that it is full, or all values would be
            // among those that stay.
            self.resident.set_capacity(full);
        }
        let target = self.resident.weight().saturating_sub(bytes);
        let mut evicted = Vec::new();
        // If all values are spared, these rounds only use up their chances.
        for _ in 0..=ORIGIN_CHANCES {
            let Some(missing) = self.resident.weight().checked_sub(target).filter(|&missing| missing > 0) else { break };
            let free = self.resident.capacity().saturating_sub(self.resident.weight());
            let ballast = Entry::Ballast(free.saturating_add(missing));
            evicted.extend(self.resident.insert_with_lifecycle(ballast.clone(), None));
            self.resident.remove(&ballast);
        }
        self.count_removed(&evicted);
        evicted
    }

    /// Removes the values whose keys match. References to them stay valid.
    #[must_use = "dropping the removed values frees their slots, which is best done without the lock"]
    pub(super) fn forget(&mut self, matches: impl Fn(&K) -> bool) -> Vec<Arc<R>> {
        let forgotten = RefCell::new(Vec::new());
        self.resident.retain(|entry, value| {
            let stays = !matches!(entry, Entry::Key(key) if matches(key));
            if !stays {
                forgotten.borrow_mut().extend(value.clone());
            }
            stays
        });
        let forgotten = forgotten.into_inner();
        self.count_removed(&forgotten);
        forgotten
    }

    /// Removes the value of one key if the value matches, and returns whether it matched. References to the value stay valid.
    pub(super) fn forget_one(&mut self, key: &K, matches: impl Fn(&Arc<R>) -> bool) -> bool {
        let entry = Entry::Key(key.clone());
        let found = matches!(self.resident.peek(&entry), Some(Some(value)) if matches(value));
        found && self.take(key).is_some()
    }

    /// Returns all resident keys.
    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.resident.iter().filter_map(|(entry, _)| match entry {
            Entry::Key(key) => Some(key),
            Entry::Ballast(_) => None,
        })
    }

    /// Removes the value of a key, and returns it.
    pub(super) fn take(&mut self, key: &K) -> Option<Arc<R>> {
        let taken = self.resident.remove(&Entry::Key(key.clone())).and_then(|(_, value)| value);
        self.count_removed(taken.as_slice());
        taken
    }

    fn count_removed(&mut self, removed: &[Arc<R>]) {
        self.from_origin -= removed.iter().filter(|value| value.is_from_origin()).count();
    }

    /// Bytes of all resident values.
    pub(super) fn weight(&self) -> u64 {
        self.resident.weight()
    }
}

#[cfg(test)]
mod tests;
