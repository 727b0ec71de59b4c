//! Detects path conflicts while the sources are still being read. There is a path conflict if two
//! samples from rival sources have the same path.
//!
//! 1. If several samples have the same path, their first blocks all go to the same owner. Owners
//!    therefore compare path hashes as blocks arrive. Two equal hashes make the path a suspect.
//! 2. The coordinator sends the suspects to all nodes. Workers know whole paths; each worker checks
//!    the members that it has already found, and those that it finds later ([`SuspectPaths`]).
//! 3. Two samples that really share a path, and whose contents differ, are a conflict. Hashes that
//!    are equal by chance therefore never fail a stage-in.
//!
//! This is an early warning that may miss conflicts. The merge of all runs finds every one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::catalog::{Member, MemberKind};
use dayfly_meta::limits::SIGHTINGS_MAX;
use dayfly_meta::wire::peer::{Rival, Rivalry, Sighting, SuspectPath};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The suspect paths of a stage-in, and the samples with these paths that workers on this node have
/// found.
#[derive(Default)]
pub struct SuspectPaths {
    /// Incremented when `suspects` changes; 0 until there is a first suspect.
    generation: AtomicU64,
    suspects: Mutex<Vec<SuspectPath>>,
    sightings: Mutex<Vec<Sighting>>,
}

impl SuspectPaths {
    /// Replaces the list of suspects. Workers look for them among the members that they have
    /// already found and those that they find from then on.
    pub fn set(&self, new: Vec<SuspectPath>) {
        let mut suspects = lock(&self.suspects);
        if *suspects != new {
            *suspects = new;
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns the samples with suspect paths that were found since the last call.
    pub fn take_sightings(&self) -> Vec<Sighting> {
        std::mem::take(&mut *lock(&self.sightings))
    }

    /// Returns a number that changes with the list of suspects, so that a worker can tell whether
    /// the list has changed since the last check.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Records a sighting for every suspect whose path hash equals this member's path hash.
    pub(crate) fn check(&self, member: &Member) {
        let MemberKind::File { size, checksums, .. } = &member.kind else { return };
        let suspects = lock(&self.suspects);
        for suspect in suspects.iter().filter(|suspect| path_hash(&member.path, suspect.pattern) == suspect.hash) {
            let words = checksums.iter().flat_map(|checksum| checksum.to_le_bytes());
            let content = xxh3_64(&size.to_le_bytes().into_iter().chain(words).collect::<Vec<u8>>());
            let (hash, path, source, ticket) = (suspect.hash, member.path.clone(), member.key.source, member.ticket);
            let sighting = Sighting { hash, path, source, ticket, content };
            let mut sightings = lock(&self.sightings);
            if sightings.len() < SIGHTINGS_MAX && !sightings.contains(&sighting) {
                sightings.push(sighting);
            }
        }
    }
}

/// Returns the values by which an owner recognizes a path conflict. They are empty for a source
/// without rivals.
pub(crate) fn rival(path: &[u8], Rivalry { pattern, match_number }: Rivalry) -> Rival {
    if pattern == 0 { Rival::default() } else { Rival { hash: path_hash(path, pattern), pattern, match_number } }
}

/// Hashes a path, with the pattern's number as the seed. Equal paths from different patterns thus
/// have different hashes, because only sources of the same pattern are rivals.
fn path_hash(path: &[u8], pattern: u32) -> u64 {
    xxh3_64_with_seed(path, u64::from(pattern))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
