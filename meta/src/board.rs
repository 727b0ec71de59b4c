//! Two small shared memories of a server: the board, which only it writes, and the counters, which its clients write.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use crate::limits::{CLIENTS_MAX, PAGE_SIZE};
use crate::shared::SharedWords;
use crate::wire::status::{Reads, SOURCES, Source};

const GONE_WORD: usize = 0;
const GENERATION_WORD: usize = 1;
const BOARD_WORDS: usize = 2;

/// Bytes of a board's file.
pub const FILE_LEN: u64 = PAGE_SIZE;

/// What a client looks at before it trusts what it knows: one memory read.
pub struct Board(SharedWords);

impl Board {
    /// Maps a board; only its server writes.
    pub fn map(file: &File, writable: bool) -> io::Result<Self> {
        SharedWords::map(file, BOARD_WORDS, writable).map(Self)
    }

    /// Whether the session has ended.
    pub fn is_gone(&self) -> bool {
        self.0.load(GONE_WORD) != 0
    }

    /// Says that the session has ended.
    pub fn set_gone(&self) {
        self.0.store(GONE_WORD, 1);
    }

    /// A number that changes whenever a dataset appears or goes.
    pub fn generation(&self) -> u64 {
        self.0.load(GENERATION_WORD)
    }

    /// Says that the datasets have changed.
    pub fn bump_generation(&self) {
        self.0.add(GENERATION_WORD, 1);
    }
}

/// What clients count for `status`, since most reads never meet the server: a slot a process, in it a cache line a thread, or
/// nearly so.
pub struct Counters(SharedWords);

/// Bytes of the counters' file; what no process uses takes no memory.
pub const COUNTERS_LEN: u64 = (CLIENTS_MAX * SLOT_WORDS * 8) as u64;

const STRIPES: usize = 4;
const STRIPE_WORDS: usize = 2 * SOURCES;
/// After the stripes a line of its own: the views that a process has.
const VIEWS_WORD: usize = STRIPES * STRIPE_WORDS;
const SLOT_WORDS: usize = VIEWS_WORD + STRIPE_WORDS;

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Threads of one process take one stripe after another.
    static STRIPE: usize = THREADS.fetch_add(1, Ordering::Relaxed) % STRIPES;
}

impl Counters {
    /// Maps the counters.
    pub fn map(file: &File) -> io::Result<Self> {
        SharedWords::map(file, CLIENTS_MAX * SLOT_WORDS, true).map(Self)
    }

    /// Counts reads of a process.
    pub fn count(&self, slot: u32, source: Source, reads: Reads) {
        let first = STRIPE.with(|stripe| slot as usize * SLOT_WORDS + stripe * STRIPE_WORDS + source as usize * 2);
        self.0.add(first, reads.count);
        self.0.add(first + 1, reads.bytes);
    }

    /// What a process has counted, by source.
    pub fn of(&self, slot: u32) -> [Reads; SOURCES] {
        let sum = |word: usize| {
            let words = (0..STRIPES).map(|stripe| self.0.load(slot as usize * SLOT_WORDS + stripe * STRIPE_WORDS + word));
            words.fold(0, u64::wrapping_add)
        };
        std::array::from_fn(|source| Reads { count: sum(source * 2), bytes: sum(source * 2 + 1) })
    }

    /// Says that a process will look at bytes in place, before it asks where they are; or that it does so no longer.
    pub fn begin_view(&self, slot: u32) {
        self.0.add(slot as usize * SLOT_WORDS + VIEWS_WORD, 1);
        // The server withdraws a location and then looks here; we say this and then look at locations.
        fence(Ordering::SeqCst);
    }

    /// See [`Self::begin_view`].
    pub fn end_view(&self, slot: u32) {
        // What was looked at was read before this can be seen.
        fence(Ordering::Release);
        self.0.add(slot as usize * SLOT_WORDS + VIEWS_WORD, u64::MAX);
    }

    /// Whether a process looks at bytes in place.
    pub fn has_views(&self, slot: u32) -> bool {
        self.0.load(slot as usize * SLOT_WORDS + VIEWS_WORD) != 0
    }

    /// Makes a slot ready for another process.
    pub fn clear(&self, slot: u32) {
        (0..SLOT_WORDS).for_each(|word| self.0.store(slot as usize * SLOT_WORDS + word, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_count_apart() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(COUNTERS_LEN).unwrap();
        let counters = Counters::map(&file).unwrap();
        let last = CLIENTS_MAX as u32 - 1;
        counters.count(last, Source::Asked, Reads { count: 2, bytes: 300 });
        counters.count(last, Source::Asked, Reads { count: 1, bytes: 30 });
        counters.count(0, Source::Segment, Reads { count: 1, bytes: 1 });
        assert_eq!(counters.of(last)[Source::Asked as usize], Reads { count: 3, bytes: 330 });
        assert_eq!(counters.of(last)[Source::Segment as usize], Reads::default());
        counters.begin_view(last);
        counters.begin_view(last);
        counters.end_view(last);
        assert!(counters.has_views(last) && !counters.has_views(0));
        counters.clear(last);
        assert!(!counters.has_views(last));
        assert_eq!(counters.of(last), [Reads::default(); SOURCES]);
        assert_eq!(counters.of(0)[0].count, 1);
    }
}
