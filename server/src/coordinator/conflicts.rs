//! Path conflicts: samples with the same path in several sources that must not share a path. Most conflicts are found while
//! sources are read; the merge finds the others.

use std::collections::HashMap;

use dayfly_meta::catalog::{Member, MemberKind, Source};
use dayfly_meta::limits::{NOTES_SHOWN_MAX, SIGHTINGS_MAX, SUSPECT_PATHS_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::peer::{Rivalry, Sighting, SuspectPath};

/// Two rival sources contain different samples with the same path.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{path}' is in '{first}' and, with other content, in '{second}', and one pattern or list names both; --prefix-by-source \
     gives each archive a directory of its own, and --on-conflict replace lets the later sample win"
)]
pub(crate) struct PathConflict {
    path: String,
    first: String,
    second: String,
}

/// Knows which sources must not contain the same path.
#[derive(Default)]
pub(super) struct Rivals {
    /// The rivalry of each source.
    rivalries: Vec<Rivalry>,
    /// Paths of the sources.
    paths: Vec<Vec<u8>>,
}

impl Rivals {
    pub(super) fn new(rivalries: Vec<Rivalry>, sources: &[Source]) -> Self {
        Self { rivalries, paths: sources.iter().map(|source| source.path.clone()).collect() }
    }

    /// Returns whether two sources are different matches of one pattern.
    fn are_rivals(&self, left: u32, right: u32) -> bool {
        let rivalry = |source: u32| self.rivalries.get(source as usize).copied().unwrap_or_default();
        let (left, right) = (rivalry(left), rivalry(right));
        left.pattern > 0 && left.pattern == right.pattern && left.match_number != right.match_number
    }

    fn name(&self, source: u32) -> String {
        self.paths.get(source as usize).map_or_else(|| format!("source {source}"), |path| display(path))
    }

    fn path_conflict(&self, path: &[u8], first: u32, second: u32) -> PathConflict {
        PathConflict { path: display(path), first: self.name(first), second: self.name(second) }
    }

    /// Looks for a path conflict between neighbors among the members that have the same path.
    pub(super) fn check(&self, members: &[Member]) -> Result<(), PathConflict> {
        let is_conflict =
            |pair: &&[Member]| self.are_rivals(pair[0].key.source, pair[1].key.source) && differ(&pair[0], &pair[1]);
        match members.windows(2).find(is_conflict) {
            Some(pair) => Err(self.path_conflict(&pair[0].path, pair[0].key.source, pair[1].key.source)),
            None => Ok(()),
        }
    }
}

/// Returns whether it matters which of two members with the same path wins.
fn differ(left: &Member, right: &Member) -> bool {
    match (&left.kind, &right.kind) {
        (
            MemberKind::File { size: left, checksums: left_sums, .. },
            MemberKind::File { size: right, checksums: right_sums, .. },
        ) => (left, left_sums) != (right, right_sums),
        (left, right) => left != right,
    }
}

/// Samples that were replaced by a later, different sample with the same path. All are counted, and the first few are named.
#[derive(Default)]
pub(super) struct ReplacedSamples {
    pub(super) count: u64,
    pub(super) notes: Vec<String>,
}

impl ReplacedSamples {
    /// Counts the members that `winner` replaces. All `members` have the same path.
    pub(super) fn count_all(&mut self, members: &[Member], winner: &Member, rivals: &Rivals) {
        for member in members {
            let is_sample = matches!(member.kind, MemberKind::File { .. });
            if !is_sample || member.key == winner.key || !differ(member, winner) {
                continue;
            }
            self.count += 1;
            if self.notes.len() < NOTES_SHOWN_MAX {
                let (of, by) = (rivals.name(member.key.source), rivals.name(winner.key.source));
                self.notes.push(format!("'{}' from '{of}' was replaced by the one from '{by}'", display(&member.path)));
            }
        }
    }
}

/// The paths that owners suspect of conflicts, and the samples with these paths that workers have found. See
/// [`dayfly_meta::wire::peer`] for how conflicts are found.
#[derive(Default)]
pub(super) struct Suspicions {
    suspects: Vec<SuspectPath>,
    /// The samples found, by the hash of the suspect path.
    sightings: HashMap<u64, Vec<Sighting>>,
}

impl Suspicions {
    /// Adds a node's suspicions and sightings. Sightings of paths that are not suspect are dropped.
    pub(super) fn add(&mut self, suspects: Vec<SuspectPath>, sightings: Vec<Sighting>) {
        for suspect in suspects {
            if self.suspects.len() < SUSPECT_PATHS_MAX && !self.suspects.contains(&suspect) {
                self.suspects.push(suspect);
            }
        }
        for sighting in sightings {
            if !self.suspects.iter().any(|suspect| suspect.hash == sighting.hash) {
                continue;
            }
            let of_hash = self.sightings.entry(sighting.hash).or_default();
            if of_hash.len() < SIGHTINGS_MAX && !of_hash.contains(&sighting) {
                of_hash.push(sighting);
            }
        }
    }

    /// Returns the paths that all workers look for.
    pub(super) fn suspects(&self) -> Vec<SuspectPath> {
        self.suspects.clone()
    }

    /// Returns the first conflict between two sightings, if there is one. `is_certain` says whether the members that carry a
    /// ticket are certain to be accepted.
    pub(super) fn conflict(&self, rivals: &Rivals, is_certain: impl Fn(u32) -> bool) -> Option<PathConflict> {
        for of_hash in self.sightings.values() {
            for (at, left) in of_hash.iter().enumerate() {
                let is_conflict = |right: &&Sighting| {
                    left.path == right.path
                        && left.content != right.content
                        && rivals.are_rivals(left.source, right.source)
                        && is_certain(left.ticket)
                        && is_certain(right.ticket)
                };
                if let Some(right) = of_hash[at + 1..].iter().find(is_conflict) {
                    let (first, second) = (left.source.min(right.source), left.source.max(right.source));
                    return Some(rivals.path_conflict(&left.path, first, second));
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sighting(path: &str, source: u32, ticket: u32, content: u64) -> Sighting {
        Sighting { hash: 7, path: path.as_bytes().to_vec(), source, ticket, content }
    }

    /// SEMANTICS: "Two different paths with equal hashes do not end a stage-in. Nor does a path conflict in which one of the
    /// samples comes from a discarded attempt."
    #[test]
    fn only_different_and_accepted_samples_of_rival_sources_conflict() {
        let rivalry = |pattern, match_number| Rivalry { pattern, match_number };
        let rivalries = vec![rivalry(1, 1), rivalry(1, 2), rivalry(2, 3), rivalry(1, 1)];
        let rivals = Rivals { rivalries, paths: ["a", "b", "c", "d"].map(|name| name.as_bytes().to_vec()).to_vec() };
        let check = |left: Sighting, right: Sighting, expect: bool| {
            let mut suspicions = Suspicions::default();
            suspicions.add(vec![SuspectPath { hash: 7, pattern: 1 }], vec![left.clone(), right.clone()]);
            let found = suspicions.conflict(&rivals, |ticket| ticket < 10);
            assert_eq!(found.is_some(), expect, "{left:?} {right:?}: {found:?}");
        };
        check(sighting("x", 0, 1, 1), sighting("x", 1, 2, 2), true);
        check(sighting("x", 0, 1, 1), sighting("y", 1, 2, 2), false);
        check(sighting("x", 0, 1, 1), sighting("x", 1, 2, 1), false);
        check(sighting("x", 0, 1, 1), sighting("x", 2, 2, 2), false);
        check(sighting("x", 0, 1, 1), sighting("x", 3, 2, 2), false);
        check(sighting("x", 0, 1, 1), sighting("x", 1, 10, 2), false);
        let mut suspicions = Suspicions::default();
        suspicions.add(Vec::new(), vec![sighting("x", 0, 1, 1), sighting("x", 1, 2, 2)]);
        assert!(suspicions.conflict(&rivals, |_| true).is_none() && suspicions.sightings.is_empty(), "there is no suspect");
    }
}
