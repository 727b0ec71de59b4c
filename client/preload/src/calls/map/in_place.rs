//! Where blocks are mapped in place: such a mapping must not grow.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Mappings in place at a time; beyond, blocks are copied.
const RANGES_MAX: usize = 1024;

/// Starts and lengths; a start of 0 is free.
static RANGES: [(AtomicUsize, AtomicUsize); RANGES_MAX] = [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; RANGES_MAX];
/// One more than the last that was ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

fn used() -> &'static [(AtomicUsize, AtomicUsize)] {
    &RANGES[..USED.load(Ordering::Acquire)]
}

/// Notes a mapping; `false` where there is no room for it.
pub(super) fn note(start: usize, len: usize) -> bool {
    let take = |(at, (place, _)): &(usize, &(AtomicUsize, AtomicUsize))| {
        let taken = place.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if taken {
            USED.fetch_max(at + 1, Ordering::AcqRel);
        }
        taken
    };
    let taken = RANGES.iter().enumerate().find(take);
    if let Some((_, (_, place))) = taken {
        place.store(len, Ordering::Release);
    }
    taken.is_some()
}

/// Whether an address lies in one.
pub(super) fn has(address: usize) -> bool {
    used().iter().any(|(start, len)| {
        let start = start.load(Ordering::Acquire);
        start != 0 && (start..start + len.load(Ordering::Acquire)).contains(&address)
    })
}

/// Forgets those that begin in a range that is unmapped.
pub(super) fn forget(first: usize, len: usize) {
    for (start, _) in used() {
        let begin = start.load(Ordering::Acquire);
        if begin >= first && begin - first < len {
            // Unless somebody has mapped there again meanwhile, which the kernel lets happen only now.
            let _ = start.compare_exchange(begin, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_known_until_they_are_unmapped() {
        assert!(note(0x10_000, 0x2000) && note(0x50_000, 0x1000));
        assert!(has(0x11_fff) && !has(0x12_000) && has(0x50_000));
        forget(0x50_000, 0x1000);
        forget(0, 0x1000);
        assert!(has(0x10_000) && !has(0x50_000));
        forget(0, usize::MAX);
        assert!(!has(0x10_000));
    }
}
