//! Samples of different sources that have one path, noticed while sources are still read.
//!
//! Owners compare hashes of paths as blocks arrive, for the blocks of one path come to one owner. What they suspect the coordinator
//! makes a [`Question`] to all workers, who know paths; what workers find is a [`Sighting`]. Only two sightings of one path
//! are a collision, so hashes that are equal by chance end nothing. Whatever is missed here, the merge notices.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::catalog::{Member, MemberKind};
use dayfly_meta::limits::SIGHTINGS_MAX;
use dayfly_meta::wire::peer::{Question, Rival, Rivalry, Sighting};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// What a node's workers are asked, and what they found.
#[derive(Default)]
pub struct Questions {
    /// Raised with every change of `open`; 0 while nothing was asked.
    generation: AtomicU64,
    open: Mutex<Vec<Question>>,
    sightings: Mutex<Vec<Sighting>>,
}

impl Questions {
    /// Asks all workers; of each, also what it found before.
    pub fn ask(&self, questions: Vec<Question>) {
        let mut open = lock(&self.open);
        if *open != questions {
            *open = questions;
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// What was found since the last call.
    pub fn take_sightings(&self) -> Vec<Sighting> {
        std::mem::take(&mut *lock(&self.sightings))
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Notes each question that a member answers.
    pub(crate) fn look_at(&self, member: &Member) {
        let MemberKind::File { size, checksums, .. } = &member.kind else { return };
        let open = lock(&self.open);
        for question in open.iter().filter(|question| path_hash(&member.path, question.pattern) == question.hash) {
            let words = checksums.iter().flat_map(|checksum| checksum.to_le_bytes());
            let content = xxh3_64(&size.to_le_bytes().into_iter().chain(words).collect::<Vec<u8>>());
            let (hash, path, source, ticket) = (question.hash, member.path.clone(), member.key.source, member.ticket);
            let sighting = Sighting { hash, path, source, ticket, content };
            let mut sightings = lock(&self.sightings);
            if sightings.len() < SIGHTINGS_MAX && !sightings.contains(&sighting) {
                sightings.push(sighting);
            }
        }
    }
}

/// What an owner compares of a sample.
pub(crate) fn rival(path: &[u8], Rivalry { pattern, given }: Rivalry) -> Rival {
    if pattern == 0 { Rival::default() } else { Rival { hash: path_hash(path, pattern), pattern, given } }
}

fn path_hash(path: &[u8], pattern: u32) -> u64 {
    xxh3_64_with_seed(path, u64::from(pattern))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
