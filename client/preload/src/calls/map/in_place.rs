//! Address ranges in which blocks are mapped in place. Such a mapping must not grow.
//!
//! The table is a fixed array of atomics: lookups and changes take no lock, and a fork copies it as it is.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The most ranges that the table holds. Once it is full, blocks are copied instead.
const RANGES_MAX: usize = 1024;

/// Start and length of each range. A start of 0 means that the entry is free.
static RANGES: [(AtomicUsize, AtomicUsize); RANGES_MAX] = [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; RANGES_MAX];
/// One more than the index of the last entry ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

fn used() -> &'static [(AtomicUsize, AtomicUsize)] {
    &RANGES[..USED.load(Ordering::Acquire)]
}

/// Adds a range. Returns `false` if the table is full.
pub(super) fn add(start: usize, len: usize) -> bool {
    let take = |(at, (free, _)): &(usize, &(AtomicUsize, AtomicUsize))| {
        let taken = free.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if taken {
            USED.fetch_max(at + 1, Ordering::AcqRel);
        }
        taken
    };
    let taken = RANGES.iter().enumerate().find(take);
    if let Some((_, (_, entry_len))) = taken {
        entry_len.store(len, Ordering::Release);
    }
    taken.is_some()
}

/// Returns whether a range contains an address.
pub(super) fn contains(address: usize) -> bool {
    used().iter().any(|(start, len)| {
        let start = start.load(Ordering::Acquire);
        start != 0 && (start..start + len.load(Ordering::Acquire)).contains(&address)
    })
}

/// Removes the ranges that begin within memory that was unmapped.
pub(super) fn forget(first: usize, len: usize) {
    for (start, _) in used() {
        let begin = start.load(Ordering::Acquire);
        if begin >= first && begin - first < len {
            // Fails if another thread has removed the range, or has mapped memory there again since the kernel unmapped it.
            let _ = start.compare_exchange(begin, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_known_until_they_are_unmapped() {
        assert!(add(0x10_000, 0x2000) && add(0x50_000, 0x1000));
        assert!(contains(0x11_fff) && !contains(0x12_000) && contains(0x50_000));
        forget(0x50_000, 0x1000);
        forget(0, 0x1000);
        assert!(contains(0x10_000) && !contains(0x50_000));
        forget(0, usize::MAX);
        assert!(!contains(0x10_000));
    }
}
