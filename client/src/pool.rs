//! A pool of a process's idle connections to its server. It has no lock, so a fork never leaves a
//! lock held in the child.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use dayfly_meta::limits::IDLE_CONNECTIONS_MAX;

/// A few idle values.
pub(crate) struct Pool<T> {
    slots: [AtomicPtr<T>; IDLE_CONNECTIONS_MAX],
}

impl<T: Send> Pool<T> {
    pub(crate) fn new() -> Self {
        Self { slots: [const { AtomicPtr::new(null_mut()) }; IDLE_CONNECTIONS_MAX] }
    }

    /// Takes a value out, if one is idle.
    pub(crate) fn take(&self) -> Option<Box<T>> {
        self.slots.iter().find_map(|slot| {
            let taken = slot.swap(null_mut(), Ordering::AcqRel);
            // SAFETY: a pointer in a slot came from `Box::into_raw` in `put`, and the swap made it
            // ours alone.
            (!taken.is_null()).then(|| unsafe { Box::from_raw(taken) })
        })
    }

    /// Puts a value in, or drops it if there is no room.
    pub(crate) fn put(&self, idle: Box<T>) {
        let idle = Box::into_raw(idle);
        let put = |slot: &AtomicPtr<T>| slot.compare_exchange(null_mut(), idle, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !self.slots.iter().any(put) {
            // SAFETY: the pointer was made by `Box::into_raw` above, and no slot took it.
            drop(unsafe { Box::from_raw(idle) });
        }
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        for slot in &mut self.slots {
            let left = *slot.get_mut();
            if !left.is_null() {
                // SAFETY: as in `take`; nothing else can reach the pool anymore.
                drop(unsafe { Box::from_raw(left) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_taken_once_and_a_value_that_does_not_fit_is_dropped() {
        let counted = std::sync::Arc::new(());
        let pool = Pool::new();
        for _ in 0..IDLE_CONNECTIONS_MAX + 2 {
            pool.put(Box::new(counted.clone()));
        }
        assert_eq!(std::sync::Arc::strong_count(&counted), IDLE_CONNECTIONS_MAX + 1);
        let taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken.len(), IDLE_CONNECTIONS_MAX);
        pool.put(Box::new(counted.clone()));
        drop((pool, taken));
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
    }
}
