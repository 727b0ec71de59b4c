//! A table with the hashes of the sample paths that have arrived. If two rival sources (sources that the same pattern matched)
//! contain the same path, the table suspects a path conflict.
//!
//! The table's size is fixed, because it is a part of the stage-in's memory. When the table is full, it forgets paths. The
//! merge finds the conflicts that are missed for this reason, and those that the table never saw because a full owner rejected
//! the sample.

use std::sync::{Mutex, PoisonError};

use dayfly_meta::limits::SUSPECTS_REPORTED_MAX;
use dayfly_meta::wire::peer::{Rival, SuspectPath};

/// The number of entries in which a path's hash may be stored. The hash determines which entries these are.
const WAYS: usize = 4;

/// The paths that have arrived, and the suspected conflicts that have not been reported yet.
pub(super) struct PathTable {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// Allocated when it is first needed: most stage-ins have no rival sources.
    entries: Vec<Entry>,
    entries_max: usize,
    /// Suspected conflicts that have not been reported yet.
    suspects: Vec<SuspectPath>,
}

/// The table's record of a sample, in 24 bytes.
#[derive(Clone, Copy, Default)]
struct Entry {
    hash: u64,
    /// The number of the source file that the sample came from; 0 in a free entry.
    match_number: u32,
    pattern: u32,
    content: Content,
}

/// Length and checksum of a sample's first block, or zeros if they are not known yet.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) len: u32,
    pub(super) checksum: u32,
}

impl PathTable {
    /// Creates a table that takes at most `len` bytes of memory.
    pub(super) fn new(len: usize) -> Self {
        let entries_max = (len / size_of::<Entry>()).next_multiple_of(WAYS);
        Self { table: Mutex::new(Table { entries_max, ..Table::default() }) }
    }

    /// Records the path of a sample whose first block has arrived.
    pub(super) fn record(&self, rival: Rival, content: Content) {
        let Rival { hash, pattern, match_number } = rival;
        if pattern == 0 {
            return;
        }
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.entries.is_empty() {
            table.entries = vec![Entry::default(); table.entries_max];
        }
        let sets = table.entries.len() / WAYS;
        let set = (hash % sets as u64) as usize * WAYS;
        let ways = &mut table.entries[set..set + WAYS];
        let known = ways.iter().find(|entry| entry.match_number > 0 && entry.hash == hash && entry.pattern == pattern).copied();
        match known {
            None => {
                // If no entry is free, the hash determines which entry is overwritten.
                let free = ways.iter().position(|entry| entry.match_number == 0).unwrap_or((hash >> 60) as usize % WAYS);
                ways[free] = Entry { hash, match_number, pattern, content };
            }
            Some(known) => {
                let is_equal = known.content == content && content != Content::default();
                let suspect = SuspectPath { hash, pattern };
                if known.match_number != match_number
                    && !is_equal
                    && table.suspects.len() < SUSPECTS_REPORTED_MAX
                    && !table.suspects.contains(&suspect)
                {
                    table.suspects.push(suspect);
                }
            }
        }
    }

    /// Returns the conflicts that have been suspected since the last call.
    pub(super) fn take_suspects(&self) -> Vec<SuspectPath> {
        std::mem::take(&mut self.table.lock().unwrap_or_else(PoisonError::into_inner).suspects)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rival(hash: u64, match_number: u32) -> Rival {
        Rival { hash, pattern: 1, match_number }
    }

    #[test]
    fn equal_paths_of_rival_sources_are_suspected_unless_their_content_is_equal() {
        let paths = PathTable::new(1 << 20);
        let content = |checksum| Content { len: 5, checksum };
        (0..1000).for_each(|hash| paths.record(rival(hash, 1), content(7)));
        (0..1000).for_each(|hash| paths.record(rival(hash, 1), content(8)));
        assert!(paths.take_suspects().is_empty(), "one source may contain a path twice");
        (0..1000).for_each(|hash| paths.record(rival(hash, 2), content(7)));
        assert!(paths.take_suspects().is_empty(), "equal content is not a conflict");
        paths.record(Rival::default(), content(9));
        paths.record(Rival { hash: 5, pattern: 2, match_number: 3 }, content(9));
        assert!(paths.take_suspects().is_empty(), "sources of two patterns are not rivals");
        paths.record(rival(999, 2), content(9));
        assert_eq!(paths.take_suspects(), [SuspectPath { hash: 999, pattern: 1 }]);
        // A block that arrives in pieces has no checksum yet.
        paths.record(rival(2000, 1), Content::default());
        paths.record(rival(2000, 2), Content::default());
        assert_eq!(paths.take_suspects(), [SuspectPath { hash: 2000, pattern: 1 }]);
    }

    #[test]
    fn a_full_table_forgets_paths_and_reports_a_bounded_number_of_suspects() {
        let paths = PathTable::new(24 * 64);
        (0..100_000_u64).for_each(|hash| paths.record(rival(hash << 7, 1), Content::default()));
        (0..100_000_u64).for_each(|hash| paths.record(rival(hash << 7, 2), Content::default()));
        assert_eq!(paths.table.lock().unwrap().entries.len(), 64);
        assert!(paths.take_suspects().len() <= SUSPECTS_REPORTED_MAX);
    }
}
