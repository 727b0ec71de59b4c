//! A process's idle connections to its server. Without locks: a thread that is in here while another one forks leaves
//! nothing locked in the child.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use dayfly_meta::limits::IDLE_CONNECTIONS_MAX;

/// Idle things, a few of them.
pub(crate) struct Pool<T> {
    places: [AtomicPtr<T>; IDLE_CONNECTIONS_MAX],
}

impl<T: Send> Pool<T> {
    pub(crate) fn new() -> Self {
        Self { places: [const { AtomicPtr::new(null_mut()) }; IDLE_CONNECTIONS_MAX] }
    }

    /// Takes one out, if one is idle.
    pub(crate) fn take(&self) -> Option<Box<T>> {
        self.places.iter().find_map(|place| {
            let taken = place.swap(null_mut(), Ordering::AcqRel);
            // SAFETY: what is in a place came from `Box::into_raw` in `put`, and the swap took it out for us alone.
            (!taken.is_null()).then(|| unsafe { Box::from_raw(taken) })
        })
    }

    /// Puts one in, or ends it if there is no room.
    pub(crate) fn put(&self, idle: Box<T>) {
        let idle = Box::into_raw(idle);
        let put = |place: &AtomicPtr<T>| place.compare_exchange(null_mut(), idle, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !self.places.iter().any(put) {
            // SAFETY: made by `Box::into_raw` above, and no place took it.
            drop(unsafe { Box::from_raw(idle) });
        }
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        for place in &mut self.places {
            let left = *place.get_mut();
            if !left.is_null() {
                // SAFETY: as in `take`; nobody else can reach the pool any more.
                drop(unsafe { Box::from_raw(left) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_taken_once_and_what_does_not_fit_ends() {
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
