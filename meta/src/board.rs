//! Two small shared memories of a server: the board, which only it writes, and the counters, which its clients write.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limits::PAGE_SIZE;
use crate::shared::SharedWords;

const GONE_WORD: usize = 0;
const GENERATION_WORD: usize = 1;
const BOARD_WORDS: usize = 2;

/// Bytes of a board's or of the counters' file.
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

/// What clients count for `status`, since local reads never meet the server: a cache line a thread, or nearly so.
pub struct Counters(SharedWords);

const STRIPES: usize = FILE_LEN as usize / STRIPE_WORDS / 8;
const STRIPE_WORDS: usize = 8;

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Threads of one process take one stripe after another; processes start at different ones.
    static STRIPE: usize = (THREADS.fetch_add(1, Ordering::Relaxed) + std::process::id() as usize) % STRIPES;
}

impl Counters {
    /// Maps the counters.
    pub fn map(file: &File) -> io::Result<Self> {
        SharedWords::map(file, STRIPES * STRIPE_WORDS, true).map(Self)
    }

    /// Counts a read of a block from the node's own segment.
    pub fn count_local(&self, bytes: u64) {
        let first = STRIPE.with(|stripe| stripe * STRIPE_WORDS);
        self.0.add(first, 1);
        self.0.add(first + 1, bytes);
    }

    /// Local reads, and their bytes.
    pub fn local(&self) -> (u64, u64) {
        let sum = |word| (0..STRIPES).map(|stripe| self.0.load(stripe * STRIPE_WORDS + word)).fold(0, u64::wrapping_add);
        (sum(0), sum(1))
    }
}
