//! Decides what each path resolves to when all members are unpacked one after another in the order of
//! the sources.
//!
//! The rules are GNU tar's. A later member replaces an earlier one with the same path. A directory
//! replaces anything else, and anything replaces an empty directory. Nothing replaces a directory
//! that contains something, and nothing is unpacked below a path that is not a directory: such a
//! member is rejected. Unlike tar, a symlink never counts as a directory, wherever it leads.
//!
//! Members arrive sorted by path, so they are resolved as a stream. If a path is both a directory
//! and something else, the members below that path are collected, up to a bound, and replayed in
//! their order. Hard links are resolved in a separate pass, by [`LinkCollector`].

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::iter::Peekable;

use super::member::{Member, MemberKey, MemberKind};
use crate::limits::{CONTESTED_MEMBERS_MAX, HARD_LINK_MEMORY, NOTES_SHOWN_MAX};
use crate::path::{display, is_below, split_last, walk_order};

/// Why members could not be resolved.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// A run could not be read.
    #[error("cannot read the sorted members: {0}")]
    Read(#[from] io::Error),
    /// Too many members lie below a path that is a directory in one source and something else in
    /// another.
    #[error(
        "'{path}' is a directory in one place and something else in another, and more than {CONTESTED_MEMBERS_MAX} members lie below it; stage the sources into separate datasets"
    )]
    Contested {
        /// The contested path.
        path: String,
    },
    /// The sources contain the same path too many times.
    #[error("the sources contain '{path}' more than {CONTESTED_MEMBERS_MAX} times")]
    Repeated {
        /// The repeated path.
        path: String,
    },
    /// The coordinator's memory is too small to resolve all hard links.
    #[error(
        "the sources have more hard links than can be resolved in {memory} bytes of memory: {links} were found so far; allow more memory with --stage-in-memory, or stage the sources into several datasets"
    )]
    HardLinks {
        /// The memory for hard links, in bytes.
        memory: usize,
        /// The number of links that fit.
        links: usize,
    },
}

/// Members that could not be unpacked. All are counted, and the first few are named.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The number of members.
    pub count: u64,
    /// The paths of the first few, as text, each with a reason.
    pub names: Vec<String>,
}

impl Refused {
    fn add(&mut self, path: &[u8], why: &str) {
        self.count += 1;
        if self.names.len() < NOTES_SHOWN_MAX {
            self.names.push(format!("{}: {why}", display(path)));
        }
    }
}

/// The members that were unpacked at one path, in order.
#[derive(Debug, PartialEq, Eq)]
pub struct History {
    /// Normal path in the dataset.
    pub path: Vec<u8>,
    /// At least one member. The last one stands.
    pub members: Vec<Member>,
}

/// Groups members into histories, in walk order.
pub struct Histories<I: Iterator<Item = io::Result<Member>>> {
    members: Peekable<I>,
    ready: VecDeque<History>,
    /// The members rejected so far.
    pub refused: Refused,
}

impl<I: Iterator<Item = io::Result<Member>>> Histories<I> {
    /// Creates the grouping of `members`, which must arrive in [`Member::run_order`].
    pub fn new(members: I) -> Self {
        Self { members: members.peekable(), ready: VecDeque::new(), refused: Refused::default() }
    }

    /// Returns the history of the next path; `None` after the last.
    ///
    /// # Errors
    ///
    /// If a run cannot be read, or a path is contested or repeated too often.
    pub fn advance(&mut self) -> Result<Option<History>, ResolveError> {
        loop {
            if let Some(history) = self.ready.pop_front() {
                return Ok(Some(history));
            }
            let Some(first) = self.members.next().transpose()? else { return Ok(None) };
            let path = first.path.clone();
            let mut members = vec![first];
            while let Some(member) = self.next_if(|next| next.path == path)? {
                if members.len() == CONTESTED_MEMBERS_MAX {
                    return Err(ResolveError::Repeated { path: display(&path) });
                }
                members.push(member);
            }
            let contested = members.iter().any(|member| member.kind != MemberKind::Directory) && self.next_is_below(&path);
            if !contested {
                return Ok(Some(History { path, members }));
            }
            while let Some(member) = self.next_if(|next| is_below(&next.path, &path))? {
                if members.len() == CONTESTED_MEMBERS_MAX {
                    return Err(ResolveError::Contested { path: display(&path) });
                }
                members.push(member);
            }
            self.ready = replay(&path, members, &mut self.refused).into();
        }
    }

    fn next_if(&mut self, wanted: impl Fn(&Member) -> bool) -> io::Result<Option<Member>> {
        self.members.next_if(|next| next.as_ref().map_or(true, &wanted)).transpose()
    }

    fn next_is_below(&mut self, path: &[u8]) -> bool {
        matches!(self.members.peek(), Some(Ok(next)) if is_below(&next.path, path))
    }
}

/// The state of a path while members are replayed.
#[derive(Default)]
struct Replayed {
    is_directory: bool,
    children: usize,
    members: Vec<Member>,
}

/// Unpacks `members` in their order. All of them are at or below `top`.
fn replay(top: &[u8], mut members: Vec<Member>, refused: &mut Refused) -> Vec<History> {
    members.sort_by_key(|member| member.key);
    let mut tree: HashMap<Vec<u8>, Replayed> = HashMap::new();
    for member in members {
        let ancestors = ancestors_within(&member.path, top);
        if ancestors.iter().any(|&path| tree.get(path).is_some_and(|at| !at.is_directory)) {
            refused.add(&member.path, "a path above it is not a directory");
            continue;
        }
        let makes_directory = member.kind == MemberKind::Directory;
        if !makes_directory && tree.get(&member.path).is_some_and(|at| at.is_directory && at.children > 0) {
            refused.add(&member.path, "a directory that is not empty has this path");
            continue;
        }
        let mut is_new = !tree.contains_key(&member.path);
        let at = tree.entry(member.path.clone()).or_default();
        at.is_directory = makes_directory;
        for &path in ancestors.iter().rev() {
            let parent_is_new = !tree.contains_key(path);
            let parent = tree.entry(path.to_vec()).or_default();
            parent.is_directory = true;
            parent.children += usize::from(is_new);
            is_new = parent_is_new;
        }
        if let Some(at) = tree.get_mut(&member.path) {
            at.members.push(member);
        }
    }
    let stand = tree.into_iter().filter(|(_, at)| !at.members.is_empty());
    let mut histories: Vec<_> = stand.map(|(path, at)| History { path, members: at.members }).collect();
    histories.sort_by(|left, right| walk_order(&left.path, &right.path));
    histories
}

/// Returns the directories from `top` down to the one that contains `path`.
fn ancestors_within<'a>(path: &'a [u8], top: &[u8]) -> Vec<&'a [u8]> {
    let mut found = Vec::new();
    let mut at = path;
    while let Some((parent, _)) = split_last(at).filter(|(parent, _)| parent.len() >= top.len()) {
        found.push(parent);
        at = parent;
    }
    found.reverse();
    found
}

/// The hard links among all members, collected before they are resolved.
pub struct LinkCollector {
    /// Bytes that may be taken, and bytes that are taken.
    memory: usize,
    taken: usize,
    links: Vec<(MemberKey, Vec<u8>)>,
    paths: HashSet<Vec<u8>>,
}

impl LinkCollector {
    /// Creates a collector that may take this many bytes of memory.
    pub fn new(memory: usize) -> Self {
        Self { memory, taken: 0, links: Vec::new(), paths: HashSet::new() }
    }

    /// Records a member if it is a hard link.
    ///
    /// # Errors
    ///
    /// If the links take more memory than is available.
    pub fn see(&mut self, member: &Member) -> Result<(), ResolveError> {
        if let MemberKind::HardLink(target) = &member.kind {
            self.taken += HARD_LINK_MEMORY + 3 * (target.len() + member.path.len());
            if self.taken > self.memory {
                return Err(ResolveError::HardLinks { memory: self.memory, links: self.links.len() });
            }
            self.links.push((member.key, target.clone()));
            self.paths.insert(target.clone());
            self.paths.insert(member.path.clone());
        }
        Ok(())
    }

    /// Determines what each link meant at its point in the order, in one pass over all histories.
    ///
    /// # Errors
    ///
    /// If the members cannot be read a second time.
    pub fn resolve<I>(mut self, mut histories: Histories<I>) -> Result<Links, ResolveError>
    where
        I: Iterator<Item = io::Result<Member>>,
    {
        let mut known: HashMap<Vec<u8>, Vec<Member>> = HashMap::new();
        while let Some(history) = histories.advance()? {
            if self.paths.contains(&history.path) {
                known.insert(history.path, history.members);
            }
        }
        // A link points only backward. If links are resolved in the order of their keys, each one
        // therefore finds its target already resolved.
        self.links.sort_unstable();
        let mut links = Links::default();
        for (key, target) in self.links {
            let before =
                known.get(&target).map_or(&[][..], |members| &members[..members.partition_point(|member| member.key < key)]);
            if let Some(version) = links.standing(before) {
                links.meaning.insert(key, version);
            }
        }
        for members in known.values() {
            if let Some(version) = links.standing(members) {
                *links.names.entry(version).or_default() += 1;
            }
        }
        let wanted: HashSet<MemberKey> = links.meaning.values().copied().collect();
        let versions = known.into_values().flatten().filter(|member| wanted.contains(&member.key));
        links.versions = versions.map(|member| (member.key, member)).collect();
        Ok(links)
    }
}

/// The targets that hard links resolve to.
#[derive(Default)]
pub struct Links {
    meaning: HashMap<MemberKey, MemberKey>,
    versions: HashMap<MemberKey, Member>,
    names: HashMap<MemberKey, u32>,
}

impl Links {
    /// Returns the file or symlink that stands after `members` were unpacked at one path in this
    /// order.
    fn standing(&self, members: &[Member]) -> Option<MemberKey> {
        for member in members.iter().rev() {
            match &member.kind {
                MemberKind::Directory => return None,
                MemberKind::File { .. } | MemberKind::Symlink(_) => return Some(member.key),
                MemberKind::HardLink(_) => {
                    if let Some(&version) = self.meaning.get(&member.key) {
                        return Some(version);
                    }
                }
            }
        }
        None
    }

    /// Returns what a path resolves to, and the number of names that share it. A link to nothing is
    /// rejected, and the member before it stands.
    pub fn outcome(&self, history: History, refused: &mut Refused) -> Option<(Member, u32)> {
        for member in history.members.into_iter().rev() {
            if member.kind.is_hard_link() {
                let Some(version) = self.meaning.get(&member.key) else {
                    refused.add(&history.path, "a hard link to a path that does not exist");
                    continue;
                };
                return self.versions.get(version).map(|member| (member.clone(), self.names_of(version)));
            }
            let names = self.names_of(&member.key);
            return Some((member, names));
        }
        None
    }

    fn names_of(&self, version: &MemberKey) -> u32 {
        self.names.get(version).copied().unwrap_or(1)
    }
}

impl MemberKind {
    fn is_hard_link(&self) -> bool {
        matches!(self, Self::HardLink(_))
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Place;
    use super::*;

    /// Unpacks the lines of a script in order: `d a` is a directory, `f a` a file whose content is its line number, `s a x` a
    /// symlink, and `h a b` a hard link.
    fn unpack(script: &str) -> (Vec<String>, u64) {
        let mut members: Vec<Member> = script
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .enumerate()
            .map(|(at, line)| {
                let words: Vec<&str> = line.split(' ').collect();
                let target = || words[2].as_bytes().to_vec();
                let kind = match words[0] {
                    "d" => MemberKind::Directory,
                    "f" => MemberKind::File { size: 0, place: Place::Tree, blocks: Vec::new(), checksums: Vec::new() },
                    "s" => MemberKind::Symlink(target()),
                    _ => MemberKind::HardLink(target()),
                };
                let key = MemberKey { source: 0, offset: at as u64 };
                Member { path: words[1].as_bytes().to_vec(), key, ticket: 0, mode: 0, mtime_s: 0, mtime_ns: 0, kind }
            })
            .collect();
        members.sort_by(Member::run_order);
        let stream = || Histories::new(members.iter().cloned().map(Ok));
        let mut collector = LinkCollector::new(1 << 20);
        members.iter().for_each(|member| collector.see(member).unwrap());
        let links = collector.resolve(stream()).unwrap();
        let mut histories = stream();
        let mut tree = Vec::new();
        let mut refused = Refused::default();
        while let Some(history) = histories.advance().unwrap() {
            let path = display(&history.path);
            tree.extend(links.outcome(history, &mut refused).map(|(member, names)| match member.kind {
                MemberKind::Directory => format!("{path}/"),
                MemberKind::Symlink(target) => format!("{path}->{}", display(&target)),
                _ => format!("{path}={}x{names}", member.key.offset),
            }));
        }
        (tree, refused.count + histories.refused.count)
    }

    fn check(script: &str, expect: &[&str], refused: u64) {
        assert_eq!(unpack(script), (expect.iter().map(|line| (*line).to_owned()).collect(), refused), "{script}");
    }

    /// SEMANTICS: "A later file replaces an earlier one, and a directory replaces a file. Nothing replaces a directory that is
    /// not empty, and nothing can be placed below a path that is not a directory. Archive members that would do so are refused,
    /// counted, and named in the summary; the rest is staged in, just as tar continues after such a member."
    #[test]
    fn conflicts_are_resolved_as_gnu_tar_resolves_them() {
        check("f a\nf a", &["a=1x1"], 0);
        check("f a\nd a", &["a/"], 0);
        check("d a\nf a", &["a=1x1"], 0);
        check("f a\nf a/x", &["a=0x1"], 1);
        check("f a/x\nf a", &["a/x=0x1"], 1);
        check("d a\nf a/x\nf a", &["a/", "a/x=1x1"], 1);
        check("s a b\nd a", &["a/"], 0);
        check("d a\ns a b", &["a->b"], 0);
        check("f a/x\ns a b", &["a/x=0x1"], 1);
        check("s a b\nf a", &["a=1x1"], 0);
        check("f a\nf a/x\nd a\nf a/y\nf a", &["a/", "a/y=3x1"], 2);
        check("f a/b/c\nf a/b\nf a\nf a/b/d", &["a/b/c=0x1", "a/b/d=3x1"], 2);
        check("f a\nf a/b/c\nd a/b\nf a/z", &["a=0x1"], 3);
    }

    /// SEMANTICS: "Hard links are resolved within a stage-in's share of `--stage-in-memory`. More hard
    /// links than fit there are an error."
    #[test]
    fn hard_links_take_no_more_memory_than_is_allowed() {
        let mut collector = LinkCollector::new(10_000);
        let kind = MemberKind::HardLink(b"target".to_vec());
        let key = MemberKey { source: 0, offset: 0 };
        let member = Member { path: b"path".to_vec(), key, ticket: 0, mode: 0, mtime_s: 0, mtime_ns: 0, kind };
        let error = (0..100).find_map(|_| collector.see(&member).err()).unwrap();
        assert!(matches!(error, ResolveError::HardLinks { memory: 10_000, links: 15 }), "{error}");
        assert!(error.to_string().contains("--stage-in-memory"));
    }

    /// SEMANTICS: "A hard link refers to the file that is at its target's path when everything before the link has been
    /// unpacked."
    #[test]
    fn hard_links_refer_to_what_their_target_was_at_that_point() {
        check("f a\nh b a", &["a=0x2", "b=0x2"], 0);
        check("f a\nh b a\nf a", &["a=2x1", "b=0x1"], 0);
        check("f a\nh b a\nh c b\nf b", &["a=0x2", "b=3x1", "c=0x2"], 0);
        check("h b a\nf a", &["a=1x1"], 1);
        check("f b\nh b a\nf a", &["a=2x1", "b=0x1"], 1);
        check("f a\nh a a", &["a=0x1"], 0);
        check("s a x\nh b a", &["a->x", "b->x"], 0);
        check("d a\nh b a", &["a/"], 1);
    }
}
