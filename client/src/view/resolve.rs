//! Resolves a path to what it names. Usually this takes one lookup in one catalog. If that lookup
//! fails or ends at a symlink, the path is walked name by name, as a kernel would do.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use dayfly_meta::catalog::{EntryId, EntryKind};
use dayfly_meta::limits::{NAME_LEN_MAX, PATH_LEN_MAX, SYMLINKS_FOLLOWED_MAX};
use dayfly_meta::path::{components, is_below, join};

use super::{View, ViewError, entry};
use crate::Dataset;

/// What a path names.
pub(super) enum ResolvedPath {
    /// A directory above datasets, which contains nothing else. The value is its path below the
    /// prefix.
    Virtual(Vec<u8>),
    /// An entry of a dataset.
    Entry(Arc<Dataset>, EntryId),
}

impl View {
    /// Returns the part of an absolute path below the prefix; `None` if the path is not in the namespace.
    pub(super) fn below_prefix<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        let rest = path.strip_prefix(self.root())?;
        (rest.is_empty() || rest.starts_with(b"/")).then_some(rest)
    }

    pub(super) fn above_prefix(&self, below: &[u8]) -> Vec<u8> {
        join(self.root(), below)
    }

    fn root(&self) -> &[u8] {
        self.session.prefix().strip_suffix(b"/").unwrap_or(self.session.prefix())
    }

    /// Resolves a path. A symlink at the end of the path is followed if `follow` is set or if a
    /// slash comes after the symlink.
    pub(super) fn resolve(&self, path: &[u8], follow: bool) -> Result<ResolvedPath, ViewError> {
        if path.len() > PATH_LEN_MAX {
            return Err(ViewError::TooLong);
        }
        let below = self.below_prefix(path).ok_or_else(|| ViewError::Elsewhere(self.session.prefix().to_vec()))?;
        let datasets = self.session.datasets()?;
        let plain = below.strip_prefix(b"/").unwrap_or(below);
        if let Some(ResolvedPath::Entry(dataset, id)) = find(&datasets, plain)
            && (!follow || entry(&dataset, id)?.kind != EntryKind::Symlink)
        {
            return Ok(ResolvedPath::Entry(dataset, id));
        }
        self.walk(&datasets, below, follow)
    }

    fn walk(&self, datasets: &[Arc<Dataset>], below: &[u8], follow: bool) -> Result<ResolvedPath, ViewError> {
        let mut wants_directory = must_be_directory(below);
        let mut waiting: VecDeque<Vec<u8>> = components(below).map(<[u8]>::to_vec).collect();
        let mut reached: Vec<u8> = Vec::new();
        let mut resolved = find(datasets, b"").ok_or(ViewError::NotFound)?;
        let mut followed = 0;
        while let Some(name) = waiting.pop_front() {
            if !is_directory(&resolved)? {
                return Err(ViewError::NotADirectory);
            }
            match name.as_slice() {
                b"." => continue,
                b".." if reached.is_empty() => {
                    let prefix = self.root();
                    let above = &prefix[..prefix.iter().rposition(|&byte| byte == b'/').unwrap_or(0)];
                    return Err(outside(above, waiting, wants_directory));
                }
                b".." => reached.truncate(reached.iter().rposition(|&byte| byte == b'/').unwrap_or(0)),
                _ if name.len() > NAME_LEN_MAX => return Err(ViewError::TooLong),
                _ => {
                    let next = join(&reached, &name);
                    let found = find(datasets, &next).ok_or(ViewError::NotFound)?;
                    let is_last = waiting.is_empty() && !wants_directory;
                    if let Some(target) = symlink_target(&found)?.filter(|_| !is_last || follow) {
                        followed += 1;
                        if followed > SYMLINKS_FOLLOWED_MAX {
                            return Err(ViewError::Loop);
                        }
                        let rest = match target.starts_with(b"/") {
                            true => {
                                reached.clear();
                                match self.below_prefix(&target) {
                                    Some(below) => below,
                                    None => return Err(outside(&target, waiting, wants_directory)),
                                }
                            }
                            false => target.as_slice(),
                        };
                        wants_directory |= waiting.is_empty() && must_be_directory(rest);
                        let names: Vec<Vec<u8>> = components(rest).map(<[u8]>::to_vec).collect();
                        names.into_iter().rev().for_each(|name| waiting.push_front(name));
                    } else {
                        reached = next;
                    }
                }
            }
            resolved = find(datasets, &reached).ok_or(ViewError::NotFound)?;
        }
        if wants_directory && !is_directory(&resolved)? { Err(ViewError::NotADirectory) } else { Ok(resolved) }
    }

    /// Returns the names in a directory above datasets.
    pub(super) fn virtual_names(&self, path: &[u8]) -> Result<Vec<Vec<u8>>, ViewError> {
        let datasets = self.session.datasets()?;
        let depth = components(path).count();
        let below = datasets.iter().filter(|dataset| is_below(dataset.target(), path));
        let names: BTreeSet<Vec<u8>> =
            below.filter_map(|dataset| components(dataset.target()).nth(depth).map(<[u8]>::to_vec)).collect();
        Ok(names.into_iter().collect())
    }
}

/// Returns the error for a path that leaves the namespace. It contains the rest of the path, so
/// that the caller may continue from there.
fn outside(reached: &[u8], waiting: VecDeque<Vec<u8>>, wants_directory: bool) -> ViewError {
    let mut path = waiting.iter().fold(reached.to_vec(), |path, name| [&path, &b"/"[..], name].concat());
    if path.is_empty() || wants_directory && !path.ends_with(b"/") {
        path.push(b'/');
    }
    ViewError::Outside(path)
}

/// Returns whether a path ends with `/` or `/.`, so that it can only name a directory.
fn must_be_directory(path: &[u8]) -> bool {
    path.ends_with(b"/") || path.ends_with(b"/.")
}

/// Returns the dataset that contains a path below the prefix, and the path within that dataset. `.` and `..` are not resolved.
pub(super) fn split<'a, 'b>(datasets: &'a [Arc<Dataset>], path: &'b [u8]) -> Option<(&'a Arc<Dataset>, &'b [u8])> {
    datasets.iter().find_map(|dataset| {
        let target = dataset.target();
        let within = match path.strip_prefix(target)? {
            rest if rest.is_empty() || target.is_empty() => rest,
            rest => rest.strip_prefix(b"/")?,
        };
        Some((dataset, within))
    })
}

/// Returns what a path below the prefix names. Symlinks, `.` and `..` are not resolved.
fn find(datasets: &[Arc<Dataset>], path: &[u8]) -> Option<ResolvedPath> {
    if let Some((dataset, within)) = split(datasets, path) {
        return dataset.catalog().find(within).map(|entry| ResolvedPath::Entry(dataset.clone(), entry.id));
    }
    let is_virtual = path.is_empty() || datasets.iter().any(|dataset| is_below(dataset.target(), path));
    is_virtual.then(|| ResolvedPath::Virtual(path.to_vec()))
}

fn is_directory(resolved: &ResolvedPath) -> Result<bool, ViewError> {
    match resolved {
        ResolvedPath::Virtual(_) => Ok(true),
        ResolvedPath::Entry(dataset, id) => Ok(entry(dataset, *id)?.kind == EntryKind::Directory),
    }
}

fn symlink_target(resolved: &ResolvedPath) -> Result<Option<Vec<u8>>, ViewError> {
    match resolved {
        ResolvedPath::Virtual(_) => Ok(None),
        ResolvedPath::Entry(dataset, id) => Ok(dataset.catalog().symlink_target(&entry(dataset, *id)?).map(<[u8]>::to_vec)),
    }
}
