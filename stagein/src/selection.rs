//! Decides which members of a source to take, and under which paths: `--include`, `--exclude` and
//! `--strip-components`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use dayfly_meta::path::{InvalidPath, components, join, normalize};
use dayfly_meta::wire::control::Selection;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::StageInError;

/// A [`Selection`] with its patterns compiled.
pub(crate) struct Selector {
    include: Option<GlobSet>,
    exclude: GlobSet,
    strip: usize,
}

/// The decision about a member's name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The member is taken, under this path below the source's prefix.
    Take(Vec<u8>),
    /// The member is not selected.
    Leave,
    /// The name cannot be a path in a dataset.
    Reject(InvalidPath),
}

impl Selector {
    pub(crate) fn new(selection: &Selection) -> Result<Self, StageInError> {
        let include = if selection.include.is_empty() { None } else { Some(compile(&selection.include)?) };
        let exclude = compile(&selection.exclude)?;
        Ok(Self { include, exclude, strip: selection.strip_components as usize })
    }

    /// Decides whether to take a member with this name. As in tar, patterns match the name before
    /// components are stripped.
    pub(crate) fn decide(&self, name: &[u8], is_directory: bool) -> Decision {
        let path = match normalize(name) {
            Ok(path) => path,
            Err(reason) => return Decision::Reject(reason),
        };
        if self.excludes(&path) || !self.includes(&path, is_directory) {
            return Decision::Leave;
        }
        self.strip(&path).map_or(Decision::Leave, Decision::Take)
    }

    /// Returns the path that a hard link's target has in the dataset, if any. The target is itself
    /// a member, so components are stripped from the target's path too.
    pub(crate) fn link_target(&self, target: &[u8]) -> Result<Option<Vec<u8>>, InvalidPath> {
        normalize(target).map(|path| self.strip(&path))
    }

    /// Returns whether `--exclude` matches the path or one of the directories that contain it. A
    /// walk need not enter an excluded directory.
    pub(crate) fn excludes(&self, path: &[u8]) -> bool {
        if self.exclude.is_empty() {
            return false;
        }
        let ends = path.iter().enumerate().filter(|&(_, &byte)| byte == b'/').map(|(at, _)| at);
        ends.chain([path.len()]).any(|end| matches(&self.exclude, &path[..end]))
    }

    /// Returns true if there is no `--include`, or if the path belongs to a file and `--include`
    /// matches the path.
    pub(crate) fn includes(&self, path: &[u8], is_directory: bool) -> bool {
        // With `--include`, no directory is taken by itself. A dataset has the directories above
        // its files anyway, and other directories would be empty.
        self.include.as_ref().is_none_or(|include| !is_directory && matches(include, path))
    }

    fn strip(&self, path: &[u8]) -> Option<Vec<u8>> {
        if self.strip == 0 {
            return Some(path.to_vec());
        }
        let rest = components(path).skip(self.strip).fold(Vec::new(), |rest, name| join(&rest, name));
        (!rest.is_empty()).then_some(rest)
    }
}

fn matches(set: &GlobSet, path: &[u8]) -> bool {
    set.is_match(OsStr::from_bytes(path))
}

fn compile(patterns: &[String]) -> Result<GlobSet, StageInError> {
    let invalid = |pattern: &str, error: globset::Error| {
        let (pattern, reason) = (pattern.to_owned(), error.kind().to_string());
        StageInError::InvalidPattern { pattern, reason }
    };
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        // As in tar, `*` also matches slashes, and a pattern may match at any depth.
        for pattern in [pattern.clone(), format!("*/{pattern}")] {
            set.add(GlobBuilder::new(&pattern).literal_separator(false).build().map_err(|error| invalid(&pattern, error))?);
        }
    }
    set.build().map_err(|error| invalid(&patterns.join(" "), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_either_selected_or_left_out_or_rejected() {
        let check = |include: &[&str], exclude: &[&str], strip_components, name: &str, expect: Option<&str>| {
            let own = |patterns: &[&str]| patterns.iter().map(|&pattern| pattern.to_owned()).collect();
            let selection = Selection { include: own(include), exclude: own(exclude), strip_components, ..Selection::default() };
            let expect = expect.map_or(Decision::Leave, |path| Decision::Take(path.as_bytes().to_vec()));
            assert_eq!(Selector::new(&selection).unwrap().decide(name.as_bytes(), name.ends_with('/')), expect, "{name}");
        };
        check(&[], &[], 0, "./a//b", Some("a/b"));
        check(&[], &[], 1, "a/b/c", Some("b/c"));
        check(&[], &[], 2, "a/b", None);
        check(&["*.jpg"], &[], 0, "a/b.jpg", Some("a/b.jpg"));
        check(&["*.jpg"], &[], 0, "a/b.txt", None);
        check(&["*.jpg"], &[], 0, "a/", None);
        check(&["b/*"], &[], 0, "a/b/c", Some("a/b/c"));
        check(&[], &["a/b"], 0, "a/b/c/d", None);
        check(&[], &["b"], 0, "a/b/c/d", None);
        check(&[], &["b"], 0, "a/bb", Some("a/bb"));
        check(&["*.jpg"], &["*x*"], 0, "x/b.jpg", None);
        let rejected = Selector::new(&Selection::default()).unwrap().decide(b"../x", false);
        assert_eq!(rejected, Decision::Reject(InvalidPath::Leaves));
        let broken = Selection { include: vec!["[".into()], ..Selection::default() };
        assert!(matches!(Selector::new(&broken), Err(StageInError::InvalidPattern { .. })));
    }
}
