//! A value that some threads read while others replace it. Readers may be signal handlers: reading takes no lock and allocates
//! nothing, not even on a thread's first read.
//!
//! A reader announces in a *slot* which value it uses, and then checks that the value is still current. A thread that replaces the
//! value looks for the old value in all slots. Wherever it finds the old value, it clears the slot and gives the reader a counted
//! reference instead. If a reader that is done finds its slot cleared, it drops that reference. So an old value is dropped with its
//! last reader, and a read costs two atomic changes of a slot that other threads rarely use.

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::thread_number;

/// Number of lines of slots. A thread begins at the line that its thread number selects, and searches from there for a free slot.
const LINES: usize = 32;
const SLOTS: usize = 8;

/// The slots that lie in one cache line.
#[repr(align(64))]
struct Line<T>([AtomicPtr<T>; SLOTS]);

/// The current value, or none.
pub struct Current<T> {
    /// The current value, from `Arc::into_raw`, or null. This pointer is one counted reference.
    value: AtomicPtr<T>,
    /// Each slot holds a value that a reader uses without a counted reference, or null.
    slots: [Line<T>; LINES],
    /// Number of readers that found no free slot and are about to make a counted reference. While it is not 0, nobody drops a
    /// replaced value.
    counting: AtomicUsize,
    owns: PhantomData<Arc<T>>,
}

/// How many times a thread that replaces the value checks whether readers are still making a reference. Making one takes a few
/// instructions. If a reader never finishes, because a signal handler jumped out of it, the old value stays in memory.
const PATIENCE_TURNS: usize = 1000;

/// A value that was current when it was read. The value stays alive as long as this `InUse` does.
pub struct InUse<'a, T> {
    value: *mut T,
    /// The slot that holds the value. If the slot was cleared, or there is none, `value` is a counted reference.
    slot: Option<&'a AtomicPtr<T>>,
}

// SAFETY: like an `Arc` that is moved to another thread; a slot may be cleared by any thread.
unsafe impl<T: Send + Sync> Send for InUse<'_, T> {}
// SAFETY: like an `Arc` that threads share.
unsafe impl<T: Send + Sync> Sync for InUse<'_, T> {}

impl<T> Current<T> {
    /// Creates a `Current` without a value.
    pub const fn none() -> Self {
        let slots = [const { Line([const { AtomicPtr::new(null_mut()) }; SLOTS]) }; LINES];
        Self { value: AtomicPtr::new(null_mut()), slots, counting: AtomicUsize::new(0), owns: PhantomData }
    }

    /// Returns the current value.
    #[inline]
    pub fn load(&self) -> Option<InUse<'_, T>> {
        let mut value = self.value.load(Ordering::SeqCst);
        if value.is_null() {
            return None;
        }
        let Some(slot) = self.announce(value) else { return self.count_reference() };
        loop {
            let now = self.value.load(Ordering::SeqCst);
            if now == value {
                return Some(InUse { value, slot: Some(slot) });
            }
            // If the slot has been cleared, this reader has a reference to the old value, which is good enough.
            if slot.compare_exchange(value, now, Ordering::SeqCst, Ordering::SeqCst).is_err() {
                return Some(InUse { value, slot: Some(slot) });
            }
            if now.is_null() {
                return None;
            }
            value = now;
        }
    }

    /// Puts a value into a free slot, if there is one.
    #[inline]
    fn announce(&self, value: *mut T) -> Option<&AtomicPtr<T>> {
        let first = thread_number::spread(LINES);
        let slot = &self.slots[first].0[0];
        if Self::take(slot, value) { Some(slot) } else { self.announce_elsewhere(first, value) }
    }

    #[cold]
    fn announce_elsewhere(&self, first: usize, value: *mut T) -> Option<&AtomicPtr<T>> {
        let lines = self.slots[first..].iter().chain(&self.slots[..first]);
        let mut slots = lines.flat_map(|line| &line.0);
        slots.find(|slot| slot.load(Ordering::Relaxed).is_null() && Self::take(slot, value))
    }

    /// Returns the current value with a counted reference, for a reader that finds all slots taken. Either many threads use the
    /// value now, or signal handlers have jumped out of readers and left their slots taken. So this also frees the slots that hold
    /// the value, and gives each of their readers a counted reference instead.
    #[cold]
    fn count_reference(&self) -> Option<InUse<'_, T>> {
        self.counting.fetch_add(1, Ordering::SeqCst);
        let value = self.value.load(Ordering::SeqCst);
        if !value.is_null() {
            // SAFETY: the value is current, and a `store` that replaces it does not drop it before `counting` is 0 again.
            unsafe { Arc::increment_strong_count(value) };
        }
        self.counting.fetch_sub(1, Ordering::SeqCst);
        if value.is_null() {
            return None;
        }
        self.leave_references(value);
        Some(InUse { value, slot: None })
    }

    #[inline]
    fn take(slot: &AtomicPtr<T>, value: *mut T) -> bool {
        slot.compare_exchange(null_mut(), value, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Replaces the value.
    pub fn store(&self, new: Option<Arc<T>>) {
        let new = new.map_or(null_mut(), |new| Arc::into_raw(new).cast_mut());
        let old = self.value.swap(new, Ordering::SeqCst);
        if !old.is_null() {
            self.retire(old);
        }
    }

    /// Replaces a value if it is still current. Returns whether it was.
    pub fn replace(&self, old: &InUse<'_, T>, new: Arc<T>) -> bool {
        let new = Arc::into_raw(new).cast_mut();
        // The old value is in use, so no other value has its address.
        if self.value.compare_exchange(old.value, new, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            // SAFETY: from `Arc::into_raw` above, and nobody has seen it.
            drop(unsafe { Arc::from_raw(new) });
            return false;
        }
        self.retire(old.value);
        true
    }

    /// Drops the reference to a value that was in `self.value` and was replaced just now.
    fn retire(&self, old: *mut T) {
        self.leave_references(old);
        if self.nobody_counts() {
            // SAFETY: the pointer that was in `self.value` is one counted reference, which is dropped here.
            drop(unsafe { Arc::from_raw(old) });
        }
    }

    /// Waits until no reader is about to make a reference to the old value. Returns `false` if that takes too long.
    fn nobody_counts(&self) -> bool {
        (0..PATIENCE_TURNS).any(|turn| {
            if turn > 0 {
                std::thread::yield_now();
            }
            self.counting.load(Ordering::SeqCst) == 0
        })
    }

    /// Gives each reader of a value a reference of its own. The caller has a reference to the value.
    fn leave_references(&self, value: *mut T) {
        for slot in self.slots.iter().flat_map(|line| &line.0) {
            if slot.load(Ordering::SeqCst) != value {
                continue;
            }
            // SAFETY: from `Arc::into_raw`, and kept alive by the caller's reference.
            unsafe { Arc::increment_strong_count(value) };
            if slot.compare_exchange(value, null_mut(), Ordering::SeqCst, Ordering::Relaxed).is_err() {
                // The reader was done first. SAFETY: this drops the reference that was just made.
                unsafe { Arc::decrement_strong_count(value) };
            }
        }
    }

    /// Frees the slots of threads that exist only in the parent. A forked child must call this. The references that those threads
    /// get instead are never dropped.
    pub fn after_fork(&self) {
        let value = self.value.load(Ordering::SeqCst);
        if !value.is_null() {
            self.leave_references(value);
        }
    }
}

impl<T> Drop for Current<T> {
    fn drop(&mut self) {
        self.store(None);
    }
}

impl<T> Deref for InUse<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value is alive, because the slot holds it or because we own a counted reference to it.
        unsafe { &*self.value }
    }
}

impl<T> Drop for InUse<'_, T> {
    #[inline]
    fn drop(&mut self) {
        let is_mine =
            |slot: &AtomicPtr<T>| slot.compare_exchange(self.value, null_mut(), Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if !self.slot.is_some_and(is_mine) {
            // The slot was cleared, so we own a counted reference. If another reader of the same value has taken the slot since,
            // our exchange succeeds and clears the slot, and that reader later drops our reference as if it were its own.
            self.drop_reference();
        }
    }
}

impl<T> InUse<'_, T> {
    #[cold]
    fn drop_reference(&self) {
        // SAFETY: from `Arc::into_raw`, and the reference is this value's own, because its slot was cleared.
        drop(unsafe { Arc::from_raw(self.value) });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    static ALIVE: AtomicUsize = AtomicUsize::new(0);

    struct Counted(u64);

    impl Counted {
        fn new(value: u64) -> Arc<Self> {
            ALIVE.fetch_add(1, Ordering::SeqCst);
            Arc::new(Self(value))
        }
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0 = u64::MAX;
            ALIVE.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn readers_see_values_that_are_alive_and_each_value_goes_away_with_its_last_reader() {
        let current = Current::none();
        assert!(current.load().is_none());
        current.store(Some(Counted::new(0)));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut last = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        let [first, second] = [current.load().unwrap(), current.load().unwrap()];
                        assert!(last <= first.0 && first.0 <= second.0 && second.0 != u64::MAX);
                        last = second.0;
                    }
                });
            }
            for value in 1..20_000 {
                current.store(Some(Counted::new(value)));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(ALIVE.load(Ordering::SeqCst), 1);
        let kept = current.load().unwrap();
        current.after_fork();
        current.store(None);
        assert_eq!((kept.0, ALIVE.load(Ordering::SeqCst)), (19_999, 1));
        drop(kept);
        assert_eq!(ALIVE.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn of_several_threads_that_replace_a_value_one_succeeds() {
        let current = Current::none();
        current.store(Some(Arc::new(0_u64)));
        let replaced = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        let old = current.load().unwrap();
                        if current.replace(&old, Arc::new(*old + 1)) {
                            replaced.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert_eq!(*current.load().unwrap(), replaced.load(Ordering::SeqCst) as u64);
    }

    #[test]
    fn slots_of_readers_that_never_end_become_free_again() {
        let current = Current::none();
        let value = Arc::new(7);
        current.store(Some(value.clone()));
        for _ in 0..3 * LINES * SLOTS {
            std::mem::forget(current.load().unwrap());
        }
        let taken = current.slots.iter().flat_map(|line| &line.0).filter(|slot| !slot.load(Ordering::SeqCst).is_null()).count();
        assert!(taken < LINES * SLOTS, "{taken}");
        let other = Arc::new(8);
        current.store(Some(other.clone()));
        assert_eq!(*current.load().unwrap(), 8);
        current.store(None);
        assert_eq!((Arc::strong_count(&other), Arc::strong_count(&value) > LINES * SLOTS), (1, true));
    }

    #[test]
    fn more_readers_than_one_line_has_slots_can_read_at_once() {
        let current = Current::none();
        current.store(Some(Arc::new(7)));
        let all: Vec<_> = (0..3 * SLOTS).map(|_| current.load().unwrap()).collect();
        assert!(all.iter().all(|value| **value == 7));
    }
}
