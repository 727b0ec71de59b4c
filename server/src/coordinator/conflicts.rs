//! Samples of one path in several sources: which of them are a conflict, found while sources are read or by the merge.

use std::collections::HashMap;

use dayfly_meta::catalog::{Member, MemberKind, Source};
use dayfly_meta::limits::{NOTES_SHOWN_MAX, QUESTIONS_MAX, SIGHTINGS_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::peer::{Question, Rivalry, Sighting};

/// Which sources may not have a path in common, by source.
#[derive(Default)]
pub(super) struct Rivals {
    rivalries: Vec<Rivalry>,
    paths: Vec<Vec<u8>>,
}

impl Rivals {
    pub(super) fn new(rivalries: Vec<Rivalry>, sources: &[Source]) -> Self {
        Self { rivalries, paths: sources.iter().map(|source| source.path.clone()).collect() }
    }

    /// Whether one pattern names both.
    fn are_rivals(&self, left: u32, right: u32) -> bool {
        let rivalry = |source: u32| self.rivalries.get(source as usize).copied().unwrap_or_default();
        let (left, right) = (rivalry(left), rivalry(right));
        left.pattern > 0 && left.pattern == right.pattern && left.given != right.given
    }

    fn name(&self, source: u32) -> String {
        self.paths.get(source as usize).map_or_else(|| format!("source {source}"), |path| display(path))
    }

    fn told(&self, path: &[u8], left: u32, right: u32) -> String {
        format!(
            "'{}' is in '{}' and, with other content, in '{}', which one pattern or list names: --prefix-by-source gives each archive a directory of its name, --on-conflict replace lets the later one win",
            display(path),
            self.name(left),
            self.name(right)
        )
    }

    /// Why the members that happened to one path, in this order, are a conflict, if they are.
    pub(super) fn conflict(&self, members: &[Member]) -> Option<String> {
        let pair = members
            .windows(2)
            .find(|pair| self.are_rivals(pair[0].key.source, pair[1].key.source) && differ(&pair[0], &pair[1]))?;
        Some(self.told(&pair[0].path, pair[0].key.source, pair[1].key.source))
    }
}

/// Whether it matters which of two members of one path stands.
fn differ(left: &Member, right: &Member) -> bool {
    match (&left.kind, &right.kind) {
        (
            MemberKind::File { size: left, checksums: left_sums, .. },
            MemberKind::File { size: right, checksums: right_sums, .. },
        ) => (left, left_sums) != (right, right_sums),
        (left, right) => left != right,
    }
}

/// Samples that a later one of their path took the place of; all are counted, the first few named.
#[derive(Default)]
pub(super) struct Replaced {
    pub(super) count: u64,
    pub(super) names: Vec<String>,
}

impl Replaced {
    /// Of what happened to one path, `standing` is what it ends as.
    pub(super) fn see(&mut self, members: &[Member], standing: &Member, rivals: &Rivals) {
        for member in members {
            let is_sample = matches!(member.kind, MemberKind::File { .. });
            if !is_sample || member.key == standing.key || !differ(member, standing) {
                continue;
            }
            self.count += 1;
            if self.names.len() < NOTES_SHOWN_MAX {
                let (of, by) = (rivals.name(member.key.source), rivals.name(standing.key.source));
                self.names.push(format!("'{}' of '{of}' is replaced by that of '{by}'", display(&member.path)));
            }
        }
    }
}

/// What owners suspect and workers have seen.
#[derive(Default)]
pub(super) struct Suspicions {
    questions: Vec<Question>,
    sightings: HashMap<u64, Vec<Sighting>>,
}

impl Suspicions {
    /// Takes what a node tells.
    pub(super) fn take(&mut self, suspects: Vec<Question>, sightings: Vec<Sighting>) {
        for question in suspects {
            if self.questions.len() < QUESTIONS_MAX && !self.questions.contains(&question) {
                self.questions.push(question);
            }
        }
        for sighting in sightings {
            if !self.questions.iter().any(|question| question.hash == sighting.hash) {
                continue;
            }
            let of_hash = self.sightings.entry(sighting.hash).or_default();
            if of_hash.len() < SIGHTINGS_MAX && !of_hash.contains(&sighting) {
                of_hash.push(sighting);
            }
        }
    }

    /// What all workers are to look for.
    pub(super) fn questions(&self) -> Vec<Question> {
        self.questions.clone()
    }

    /// The first two sightings that are a conflict, told; `is_certain` says whether what a ticket found will count.
    pub(super) fn conflict(&self, rivals: &Rivals, is_certain: impl Fn(u32) -> bool) -> Option<String> {
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
                    return Some(rivals.told(&left.path, first, second));
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

    #[test]
    fn only_paths_of_rivals_that_count_and_differ_are_a_conflict() {
        let rivalry = |pattern, given| Rivalry { pattern, given };
        let rivalries = vec![rivalry(1, 1), rivalry(1, 2), rivalry(2, 3), rivalry(1, 1)];
        let rivals = Rivals { rivalries, paths: ["a", "b", "c", "d"].map(|name| name.as_bytes().to_vec()).to_vec() };
        let check = |left: Sighting, right: Sighting, expect: bool| {
            let mut suspicions = Suspicions::default();
            suspicions.take(vec![Question { hash: 7, pattern: 1 }], vec![left.clone(), right.clone()]);
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
        suspicions.take(Vec::new(), vec![sighting("x", 0, 1, 1), sighting("x", 1, 2, 2)]);
        assert!(suspicions.conflict(&rivals, |_| true).is_none() && suspicions.sightings.is_empty(), "nobody asked");
    }
}
