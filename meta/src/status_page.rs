//! Two small regions of shared memory that every server has: the status page, which only the server
//! writes, and the counters, which its clients write.
//!
//! The status page also says which leases hold. Each connection has a word there, its *token*. A
//! lease is granted under the token's current value. To revoke leases, the server first changes the
//! token and then reuses their room. A client checks the token after each copy, so it never uses
//! bytes that were written after its leases had ended.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use crate::limits::{CLIENTS_MAX, PAGE_SIZE};
use crate::shared::SharedWords;
use crate::wire::status::{Reads, SOURCES, Source};

const GONE_WORD: usize = 0;
const GENERATION_WORD: usize = 1;
const TURNS_WORD: usize = 2;
const BEATS_WORD: usize = 3;
/// The words of the connections start on the second page.
const FIRST_TOKEN_WORD: usize = PAGE_SIZE as usize / 8;
const PAGE_WORDS: usize = FIRST_TOKEN_WORD + CLIENTS_MAX;
/// The lowest bit of a connection's word: the server asks for the leases back. The other bits are
/// the token.
const RECALL_BIT: u64 = 1;

/// Length of a status page's file in bytes.
pub const FILE_LEN: u64 = (PAGE_WORDS * 8) as u64;

/// The state of a server. A client checks it before it relies on what it learned from the server
/// earlier. Each check is one read of memory.
pub struct StatusPage(SharedWords);

impl StatusPage {
    /// Maps a status page. Only its server maps it writable.
    ///
    /// # Errors
    ///
    /// If the file is too short, or the kernel refuses the mapping.
    pub fn map(file: &File, writable: bool) -> io::Result<Self> {
        SharedWords::map(file, PAGE_WORDS, writable).map(Self)
    }

    /// Returns whether the session has ended.
    pub fn is_gone(&self) -> bool {
        self.0.load(GONE_WORD) != 0
    }

    /// Announces that the session has ended.
    pub fn set_gone(&self) {
        self.0.store(GONE_WORD, 1);
    }

    /// Returns a number that changes whenever a dataset appears or disappears.
    pub fn generation(&self) -> u64 {
        self.0.load(GENERATION_WORD)
    }

    /// Announces that the datasets have changed.
    pub fn bump_generation(&self) {
        self.0.add(GENERATION_WORD, 1);
    }

    /// Returns a number that the server's runtime changes every second while it is serving.
    pub fn turns(&self) -> u64 {
        self.0.load(TURNS_WORD)
    }

    /// Announces that the server's runtime is alive.
    pub fn advance_turns(&self) {
        self.0.add(TURNS_WORD, 1);
    }

    /// Returns a number that a thread of its own changes every second while the server's process runs, whatever its runtime does.
    pub fn beats(&self) -> u64 {
        self.0.load(BEATS_WORD)
    }

    /// Announces that the server's process runs.
    pub fn advance_beats(&self) {
        self.0.add(BEATS_WORD, 1);
    }

    /// Returns the token under which the server currently grants leases to a connection.
    pub fn token(&self, connection: u32) -> u64 {
        self.0.load(token_word(connection)) & !RECALL_BIT
    }

    /// Returns whether leases granted under this token still hold. Call it after the leased bytes
    /// have been copied or looked at: if it returns `true`, they were the bytes that were leased.
    pub fn holds(&self, connection: u32, token: u64) -> bool {
        // The leased bytes must be read before this word is read. The server changes the word
        // before it reuses the room, and writes other bytes there only after that. A reader that
        // has seen such a byte therefore sees the new word, too.
        fence(Ordering::Acquire);
        self.token(connection) == token
    }

    /// Revokes all leases of a connection. The server calls this before it reuses their room.
    pub fn revoke(&self, connection: u32) {
        self.0.store(token_word(connection), self.token(connection) + 2 * RECALL_BIT);
        // The word must be written before any new bytes in that room.
        fence(Ordering::SeqCst);
    }

    /// Asks the client to release the leases of a connection, or withdraws that request.
    pub fn set_recalled(&self, connection: u32, is_recalled: bool) {
        self.0.store(token_word(connection), self.token(connection) | if is_recalled { RECALL_BIT } else { 0 });
    }

    /// Returns whether the server asks the client to release the leases of a connection, because
    /// others wait for room.
    pub fn is_recalled(&self, connection: u32) -> bool {
        self.0.load(token_word(connection)) & RECALL_BIT != 0
    }
}

/// Returns the index of a connection's word. The index for an impossible connection number is outside the page, where all words
/// read as 0.
fn token_word(connection: u32) -> usize {
    FIRST_TOKEN_WORD.saturating_add(connection as usize)
}

/// Counters that clients keep for `status`, because most reads never reach the server. Each process has a
/// slot. Within the slot, each thread has a cache line of its own, as far as possible.
pub struct Counters(SharedWords);

/// Length of the counters' file in bytes. Slots that no process uses take no memory.
pub const COUNTERS_LEN: u64 = (CLIENTS_MAX * SLOT_WORDS * 8) as u64;

const STRIPES: usize = 4;
const STRIPE_WORDS: usize = 2 * SOURCES;
/// The number of views that a process has, in a separate cache line after the stripes.
const VIEWS_WORD: usize = STRIPES * STRIPE_WORDS;
const SLOT_WORDS: usize = VIEWS_WORD + STRIPE_WORDS;

static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The stripe that this thread counts in. The threads of a process take the stripes in turn.
    static STRIPE: usize = THREADS.fetch_add(1, Ordering::Relaxed) % STRIPES;
}

/// What one process has read. Unlike [`Counters`], this is in memory of its own, so a forked child goes on from its parent's sums.
#[derive(Default)]
pub struct Tally([TallyStripe; STRIPES]);

/// Counts and bytes by source, in a cache line that few threads write.
#[derive(Default)]
#[repr(align(64))]
struct TallyStripe([[AtomicU64; 2]; SOURCES]);

impl Tally {
    /// Adds reads of this thread.
    pub fn count(&self, source: Source, reads: Reads) {
        let [count, bytes] = STRIPE.with(|&stripe| &self.0[stripe].0[source as usize]);
        count.fetch_add(reads.count, Ordering::Relaxed);
        bytes.fetch_add(reads.bytes, Ordering::Relaxed);
    }

    /// Returns the sums, by source.
    pub fn sums(&self) -> [Reads; SOURCES] {
        let sum = |source: usize, word: usize| {
            self.0.iter().fold(0, |sum: u64, stripe| sum.wrapping_add(stripe.0[source][word].load(Ordering::Relaxed)))
        };
        std::array::from_fn(|source| Reads { count: sum(source, 0), bytes: sum(source, 1) })
    }
}

impl Counters {
    /// Maps the counters.
    ///
    /// # Errors
    ///
    /// If the file is too short, or the kernel refuses the mapping.
    pub fn map(file: &File) -> io::Result<Self> {
        SharedWords::map(file, CLIENTS_MAX * SLOT_WORDS, true).map(Self)
    }

    /// Adds reads to the counters of a process.
    pub fn count(&self, slot: u32, source: Source, reads: Reads) {
        let first = STRIPE.with(|stripe| slot as usize * SLOT_WORDS + stripe * STRIPE_WORDS + source as usize * 2);
        self.0.add(first, reads.count);
        self.0.add(first + 1, reads.bytes);
    }

    /// Returns what the process with this slot has counted, by source.
    pub fn of(&self, slot: u32) -> [Reads; SOURCES] {
        let sum = |word: usize| {
            let words = (0..STRIPES).map(|stripe| self.0.load(slot as usize * SLOT_WORDS + stripe * STRIPE_WORDS + word));
            words.fold(0, u64::wrapping_add)
        };
        std::array::from_fn(|source| Reads { count: sum(source * 2), bytes: sum(source * 2 + 1) })
    }

    /// Announces that a process will look at bytes in place. The process must call this before it looks up where they are. While
    /// any process has views, the server evicts no cached blocks.
    pub fn begin_view(&self, slot: u32) {
        self.0.add(slot as usize * SLOT_WORDS + VIEWS_WORD, 1);
        // The server withdraws a location and then reads this counter; we advance the counter and
        // then look locations up. So either the server sees the view, or the process finds the
        // location withdrawn.
        fence(Ordering::SeqCst);
    }

    /// Announces that the process no longer looks at bytes in place; see [`Self::begin_view`].
    pub fn end_view(&self, slot: u32) {
        // The bytes must be read before this change is visible.
        fence(Ordering::Release);
        self.0.add(slot as usize * SLOT_WORDS + VIEWS_WORD, u64::MAX);
    }

    /// Returns whether the process with this slot looks at bytes in place.
    pub fn has_views(&self, slot: u32) -> bool {
        self.0.load(slot as usize * SLOT_WORDS + VIEWS_WORD) != 0
    }

    /// Resets a slot for another process.
    pub fn clear(&self, slot: u32) {
        (0..SLOT_WORDS).for_each(|word| self.0.store(slot as usize * SLOT_WORDS + word, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "A lease that has ended is never mistaken for one that holds. Before the server
    /// revokes leases, it announces that in shared memory; a client checks there after each copy out of
    /// leased memory, before it hands out a view, and in `is_good`."
    #[test]
    fn a_revoked_token_never_holds_again() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(FILE_LEN).unwrap();
        let (server, client) = (StatusPage::map(&file, true).unwrap(), StatusPage::map(&file, false).unwrap());
        let last = CLIENTS_MAX as u32 - 1;
        let token = client.token(last);
        assert!(client.holds(last, token) && !client.is_recalled(last));
        server.set_recalled(last, true);
        assert!(client.holds(last, token) && client.is_recalled(last));
        server.revoke(last);
        assert!(!client.holds(last, token) && !client.is_recalled(last) && client.holds(0, client.token(0)));
        let next = client.token(last);
        server.set_recalled(last, true);
        server.set_recalled(last, false);
        assert!(client.holds(last, next) && !client.holds(last, token));
        server.advance_turns();
        (0..2).for_each(|_| server.advance_beats());
        assert_eq!((client.turns(), client.beats(), client.is_gone(), client.generation()), (1, 2, false, 0));
        assert_eq!((client.token(u32::MAX), client.is_recalled(CLIENTS_MAX as u32)), (0, false));
    }

    #[test]
    fn each_process_has_counters_of_its_own() {
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

    #[test]
    fn a_tally_sums_up_what_all_threads_read() {
        let tally = Tally::default();
        std::thread::scope(|scope| {
            for _ in 0..2 * STRIPES {
                scope.spawn(|| tally.count(Source::Cached, Reads { count: 1, bytes: 10 }));
            }
        });
        let reads = Reads { count: 2 * STRIPES as u64, bytes: 20 * STRIPES as u64 };
        let expected = std::array::from_fn(|source| if source == Source::Cached as usize { reads } else { Reads::default() });
        assert_eq!(tally.sums(), expected);
    }
}
