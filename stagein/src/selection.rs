//! What to take of a source, and under which name: `--include`, `--exclude`, `--strip-components`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use dayfly_meta::path::{InvalidPath, components, join, normalize};
use dayfly_meta::wire::control::Selection;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::StageInError;

/// A [`Selection`], ready to use.
pub(crate) struct Selector {
    include: Option<GlobSet>,
    exclude: GlobSet,
    strip: usize,
}

/// What becomes of a name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Named {
    /// It is taken, under this path below the source's prefix.
    Taken(Vec<u8>),
    /// It is not selected.
    Left,
    /// It cannot be kept.
    Refused(InvalidPath),
}

impl Selector {
    pub(crate) fn new(selection: &Selection) -> Result<Self, StageInError> {
        let include = if selection.include.is_empty() { None } else { Some(compile(&selection.include)?) };
        let exclude = compile(&selection.exclude)?;
        Ok(Self { include, exclude, strip: selection.strip_components as usize })
    }

    /// What becomes of a member's name. Patterns see the name before components are stripped, as tar's do.
    pub(crate) fn name(&self, name: &[u8], is_directory: bool) -> Named {
        let path = match normalize(name) {
            Ok(path) => path,
            Err(reason) => return Named::Refused(reason),
        };
        if self.excludes(&path) || !self.includes(&path, is_directory) {
            return Named::Left;
        }
        self.strip(&path).map_or(Named::Left, Named::Taken)
    }

    /// A hard link's target: named as the member that it points to.
    pub(crate) fn link_target(&self, target: &[u8]) -> Result<Option<Vec<u8>>, InvalidPath> {
        normalize(target).map(|path| self.strip(&path))
    }

    /// Whether a directory of a tree need not be looked into.
    pub(crate) fn excludes(&self, path: &[u8]) -> bool {
        if self.exclude.is_empty() {
            return false;
        }
        let ends = path.iter().enumerate().filter(|&(_, &byte)| byte == b'/').map(|(at, _)| at);
        ends.chain([path.len()]).any(|end| matches(&self.exclude, &path[..end]))
    }

    pub(crate) fn includes(&self, path: &[u8], is_directory: bool) -> bool {
        // Directories on the way to an included file appear by themselves; others would be empty shells.
        self.include.as_ref().is_none_or(|include| !is_directory && matches(include, path))
    }

    fn strip(&self, path: &[u8]) -> Option<Vec<u8>> {
        if self.strip == 0 {
            return Some(path.to_vec());
        }
        let kept = components(path).skip(self.strip).fold(Vec::new(), |kept, name| join(&kept, name));
        (!kept.is_empty()).then_some(kept)
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
        // As tar's: `*` also matches a slash, and a pattern without a slash may match at any depth.
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
    fn names_are_taken_left_or_refused() {
        let check = |include: &[&str], exclude: &[&str], strip_components, name: &str, expect: Option<&str>| {
            let own = |patterns: &[&str]| patterns.iter().map(|&pattern| pattern.to_owned()).collect();
            let selection = Selection { include: own(include), exclude: own(exclude), strip_components, ..Selection::default() };
            let expect = expect.map_or(Named::Left, |path| Named::Taken(path.as_bytes().to_vec()));
            assert_eq!(Selector::new(&selection).unwrap().name(name.as_bytes(), name.ends_with('/')), expect, "{name}");
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
        let refused = Selector::new(&Selection::default()).unwrap().name(b"../x", false);
        assert_eq!(refused, Named::Refused(InvalidPath::Leaves));
        let broken = Selection { include: vec!["[".into()], ..Selection::default() };
        assert!(matches!(Selector::new(&broken), Err(StageInError::InvalidPattern { .. })));
    }
}
