//! Paths that have arrived, as hashes: where two sources that one pattern names have the same, that is suspected to be a collision.
//!
//! The table never grows: it is a part of the stage-in's memory, and forgets when it is full. What it forgets, or never saw
//! because a full owner passed it on, the merge finds.

use std::sync::{Mutex, PoisonError};

use dayfly_meta::limits::SUSPECTS_REPORTED_MAX;
use dayfly_meta::wire::peer::{Question, Rival};

/// Entries looked at for one path.
const WAYS: usize = 4;

/// The table, and what is suspected and not told yet.
pub(super) struct Paths {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Made when it is first needed: most stage-ins have no rivals.
    entries: Vec<Entry>,
    entries_max: usize,
    suspects: Vec<Question>,
}

/// What is remembered of a sample; 24 bytes.
#[derive(Clone, Copy, Default)]
struct Entry {
    hash: u64,
    /// 0 in an entry that is free.
    given: u32,
    pattern: u32,
    content: Content,
}

/// Length and checksum of a sample's first block; all zeros if they are not known yet.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) len: u32,
    pub(super) checksum: u32,
}

impl Paths {
    /// With so many bytes of memory at most.
    pub(super) fn new(len: usize) -> Self {
        let entries_max = (len / size_of::<Entry>()).next_multiple_of(WAYS);
        Self { state: Mutex::new(State { entries_max, ..State::default() }) }
    }

    /// A sample's first block arrives.
    pub(super) fn see(&self, rival: Rival, content: Content) {
        let Rival { hash, pattern, given } = rival;
        if pattern == 0 {
            return;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.entries.is_empty() {
            state.entries = vec![Entry::default(); state.entries_max];
        }
        let sets = state.entries.len() / WAYS;
        let set = (hash % sets as u64) as usize * WAYS;
        let ways = &mut state.entries[set..set + WAYS];
        let known = ways.iter().find(|entry| entry.given > 0 && entry.hash == hash && entry.pattern == pattern).copied();
        match known {
            None => {
                // The one to go, where none is free, is as good as random.
                let free = ways.iter().position(|entry| entry.given == 0).unwrap_or((hash >> 60) as usize % WAYS);
                ways[free] = Entry { hash, given, pattern, content };
            }
            Some(known) => {
                let is_equal = known.content == content && content != Content::default();
                let question = Question { hash, pattern };
                if known.given != given
                    && !is_equal
                    && state.suspects.len() < SUSPECTS_REPORTED_MAX
                    && !state.suspects.contains(&question)
                {
                    state.suspects.push(question);
                }
            }
        }
    }

    /// What was suspected since the last call.
    pub(super) fn take_suspects(&self) -> Vec<Question> {
        std::mem::take(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).suspects)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rival(hash: u64, given: u32) -> Rival {
        Rival { hash, pattern: 1, given }
    }

    #[test]
    fn paths_of_two_sources_are_suspected_unless_they_are_equal() {
        let paths = Paths::new(1 << 20);
        let content = |checksum| Content { len: 5, checksum };
        (0..1000).for_each(|hash| paths.see(rival(hash, 1), content(7)));
        (0..1000).for_each(|hash| paths.see(rival(hash, 1), content(8)));
        assert!(paths.take_suspects().is_empty(), "one source may have a path twice");
        (0..1000).for_each(|hash| paths.see(rival(hash, 2), content(7)));
        assert!(paths.take_suspects().is_empty(), "equal content is no collision");
        paths.see(Rival::default(), content(9));
        paths.see(Rival { hash: 5, pattern: 2, given: 3 }, content(9));
        assert!(paths.take_suspects().is_empty(), "sources of two patterns are no rivals");
        paths.see(rival(999, 2), content(9));
        assert_eq!(paths.take_suspects(), [Question { hash: 999, pattern: 1 }]);
        // What comes in pieces has no checksum yet.
        paths.see(rival(2000, 1), Content::default());
        paths.see(rival(2000, 2), Content::default());
        assert_eq!(paths.take_suspects(), [Question { hash: 2000, pattern: 1 }]);
    }

    #[test]
    fn a_full_table_forgets_and_what_it_tells_is_bounded() {
        let paths = Paths::new(24 * 64);
        (0..100_000_u64).for_each(|hash| paths.see(rival(hash << 7, 1), Content::default()));
        (0..100_000_u64).for_each(|hash| paths.see(rival(hash << 7, 2), Content::default()));
        assert_eq!(paths.state.lock().unwrap().entries.len(), 64);
        assert!(paths.take_suspects().len() <= SUSPECTS_REPORTED_MAX);
    }
}
