//! Which chunks the arena has, which are being loaded, and which make room: a state machine without locks or waiting of its own,
//! so that a test can run through its interleavings.

use std::cell::RefCell;
use std::sync::Arc;

use quick_cache::unsync::Cache;
use quick_cache::{Lifecycle, Weighter};
use rustc_hash::{FxBuildHasher, FxHashMap};

/// What is held: it knows its weight, and whether it was read without our being asked.
pub(super) trait Resident {
    /// Bytes that it takes.
    fn weight(&self) -> u64;
    /// Whether it was read again since this was last asked; then it is spared once.
    fn take_mark(&self) -> bool;
}

/// What becomes of a wish for a key.
#[derive(Debug)]
pub(super) enum Wish<H, W> {
    /// It is here.
    Held(Arc<H>),
    /// Somebody loads it.
    Loading(W),
    /// It is for the one who wishes to load it.
    Absent,
}

/// Keys with what is held or on its way. A held one is pinned while anybody else has a reference to it.
pub(super) struct Table<K, H, W> {
    loading: FxHashMap<K, W>,
    /// Scan-resistant (S3-FIFO): what was wished for once leaves before what was wished for again.
    held: Cache<Entry<K>, Option<Arc<H>>, Weights, FxBuildHasher, Pins>,
    capacity: u64,
}

/// A key, or the ballast by which a part of the others is pressed out.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Entry<K> {
    Key(K),
    Ballast(u64),
}

#[derive(Clone)]
struct Weights;

impl<K, H: Resident> Weighter<Entry<K>, Option<Arc<H>>> for Weights {
    fn weight(&self, entry: &Entry<K>, held: &Option<Arc<H>>) -> u64 {
        match entry {
            Entry::Key(_) => held.as_ref().map_or(1, |held| held.weight().max(1)),
            Entry::Ballast(weight) => *weight,
        }
    }
}

#[derive(Clone)]
struct Pins;

impl<K, H: Resident> Lifecycle<Entry<K>, Option<Arc<H>>> for Pins {
    type RequestState = Vec<Arc<H>>;

    fn begin_request(&self) -> Vec<Arc<H>> {
        Vec::new()
    }

    fn is_pinned(&self, entry: &Entry<K>, held: &Option<Arc<H>>) -> bool {
        match (entry, held) {
            (Entry::Key(_), Some(held)) => Arc::strong_count(held) > 1 || held.take_mark(),
            _ => true,
        }
    }

    fn on_evict(&self, evicted: &mut Vec<Arc<H>>, _: Entry<K>, held: Option<Arc<H>>) {
        evicted.extend(held);
    }
}

impl<K: Clone + Eq + std::hash::Hash, H: Resident, W: Clone> Table<K, H, W> {
    /// For `capacity` bytes, in about so many entries.
    pub(super) fn new(capacity: u64, entries: usize) -> Self {
        let held = Cache::with(entries, capacity, Weights, FxBuildHasher, Pins);
        Self { loading: FxHashMap::default(), held, capacity }
    }

    pub(super) fn wish(&self, key: &K) -> Wish<H, W> {
        if let Some(loading) = self.loading.get(key) {
            return Wish::Loading(loading.clone());
        }
        match self.held.get(&Entry::Key(key.clone())) {
            Some(Some(held)) => Wish::Held(held.clone()),
            _ => Wish::Absent,
        }
    }

    /// What is held, without its counting as a wish.
    #[cfg(test)]
    pub(super) fn peek(&self, key: &K) -> Option<Arc<H>> {
        self.held.peek(&Entry::Key(key.clone())).cloned().flatten()
    }

    /// Says that the key is being loaded; it was absent.
    pub(super) fn begin(&mut self, key: K, waiting: W) {
        debug_assert!(matches!(self.wish(&key), Wish::Absent));
        self.loading.insert(key, waiting);
    }

    /// Says that it has come. Returns what had to go for it.
    #[must_use = "what is evicted is given up when it is dropped"]
    pub(super) fn fill(&mut self, key: K, held: Arc<H>) -> Vec<Arc<H>> {
        self.loading.remove(&key);
        self.held.insert_with_lifecycle(Entry::Key(key), Some(held))
    }

    /// Says that it will not come.
    pub(super) fn give_up(&mut self, key: &K) {
        self.loading.remove(key);
    }

    /// Has about so many bytes make room, if enough is not pinned.
    pub(super) fn evict(&mut self, bytes: u64) -> Vec<Arc<H>> {
        let ballast = Entry::Ballast(self.capacity.saturating_sub(self.held.weight()).saturating_add(bytes));
        let evicted = self.held.insert_with_lifecycle(ballast.clone(), None);
        self.held.remove(&ballast);
        evicted
    }

    /// Forgets what is held of some keys. Whoever has references keeps them.
    #[must_use = "what is forgotten is given up when it is dropped"]
    pub(super) fn forget(&mut self, is_meant: impl Fn(&K) -> bool) -> Vec<Arc<H>> {
        let forgotten = RefCell::new(Vec::new());
        self.held.retain(|entry, held| {
            let keep = !matches!(entry, Entry::Key(key) if is_meant(key));
            if !keep {
                forgotten.borrow_mut().extend(held.clone());
            }
            keep
        });
        forgotten.into_inner()
    }

    /// Forgets what is held of one key, if it is meant; says whether it did. Whoever has references keeps them.
    pub(super) fn forget_one(&mut self, key: &K, is_meant: impl Fn(&Arc<H>) -> bool) -> bool {
        let entry = Entry::Key(key.clone());
        let found = matches!(self.held.peek(&entry), Some(Some(held)) if is_meant(held));
        if found {
            self.held.remove(&entry);
        }
        found
    }

    /// Bytes held.
    pub(super) fn weight(&self) -> u64 {
        self.held.weight()
    }
}

#[cfg(test)]
mod tests;
