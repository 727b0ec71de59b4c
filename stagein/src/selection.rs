//! Decides which members of a source to take, and under which paths: `--include`, `--exclude` and
//! `--strip-components`.
//!
//! As in tar, all of them apply to a name as its archive spells it: `./a/b` has three components, and `./a` and `a` match it, `*/b`
//! too. A tree is spelled as `tar .` within it spells it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use dayfly_meta::path::{InvalidPath, normalize};
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
        // Tar drops slashes at the end of the names that it is to take, not of those that it is to leave out.
        let named: Vec<String> = selection.include.iter().map(|pattern| pattern.trim_end_matches('/').to_owned()).collect();
        let include = if named.is_empty() { None } else { Some(compile(&named)?) };
        let exclude = compile(&selection.exclude)?;
        Ok(Self { include, exclude, strip: selection.strip_components as usize })
    }

    /// Decides whether to take a member with this name. As in tar, patterns match the name before
    /// components are stripped.
    pub(crate) fn decide(&self, name: &[u8], is_directory: bool) -> Decision {
        if let Err(reason) = normalize(name) {
            return Decision::Reject(reason);
        }
        if self.excludes(name) || !self.includes(name, is_directory) {
            return Decision::Leave;
        }
        match self.strip(name) {
            Ok(path) => path.map_or(Decision::Leave, Decision::Take),
            Err(reason) => Decision::Reject(reason),
        }
    }

    /// Returns the path that a hard link's target has in the dataset, if any. The target is itself
    /// a member, so components are stripped from the target's path too.
    pub(crate) fn link_target(&self, target: &[u8]) -> Result<Option<Vec<u8>>, InvalidPath> {
        normalize(target)?;
        self.strip(target)
    }

    /// Returns whether `--exclude` matches the name or one of the directories that contain it. A
    /// walk need not enter an excluded directory.
    pub(crate) fn excludes(&self, name: &[u8]) -> bool {
        !self.exclude.is_empty() && matches(&self.exclude, name)
    }

    /// Returns true if there is no `--include`, or if the name belongs to a file and `--include`
    /// matches the name or one of the directories that contain it.
    pub(crate) fn includes(&self, name: &[u8], is_directory: bool) -> bool {
        // With `--include`, no directory is taken by itself. A dataset has the directories above
        // its files anyway, and other directories would be empty.
        self.include.as_ref().is_none_or(|include| !is_directory && matches(include, name))
    }

    /// Strips components, of which `.` is one, and returns the path that is left; `None` if nothing is.
    fn strip(&self, name: &[u8]) -> Result<Option<Vec<u8>>, InvalidPath> {
        if self.strip == 0 {
            return normalize(name).map(Some);
        }
        let mut rest = from_first_name(without_slashes(name));
        for _ in 0..self.strip {
            let Some(slash) = rest.iter().position(|&byte| byte == b'/') else { return Ok(None) };
            rest = from_first_name(&rest[slash..]);
        }
        normalize(rest).map(|path| (!path.is_empty()).then_some(path))
    }
}

/// Returns a name without the slashes at its end, which mark a directory.
fn without_slashes(name: &[u8]) -> &[u8] {
    &name[..name.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1)]
}

/// Returns a name without the slashes at its beginning.
fn from_first_name(name: &[u8]) -> &[u8] {
    &name[name.iter().position(|&byte| byte != b'/').unwrap_or(name.len())..]
}

/// Returns whether a pattern matches the name or one of the directories that contain it.
fn matches(set: &GlobSet, name: &[u8]) -> bool {
    let name = without_slashes(name);
    let ends = name.iter().enumerate().filter(|&(_, &byte)| byte == b'/').map(|(at, _)| at);
    ends.chain([name.len()]).any(|end| set.is_match(OsStr::from_bytes(&name[..end])))
}

fn compile(patterns: &[String]) -> Result<GlobSet, StageInError> {
    let invalid = |pattern: &str, error: globset::Error| {
        let (pattern, reason) = (pattern.to_owned(), error.kind().to_string());
        StageInError::InvalidPattern { pattern, reason }
    };
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        // As in tar, `*` also matches slashes, and a pattern may match at any depth.
        for glob in [with_ordinary_braces(pattern), format!("*/{}", with_ordinary_braces(pattern))] {
            set.add(GlobBuilder::new(&glob).literal_separator(false).build().map_err(|error| invalid(pattern, error))?);
        }
    }
    set.build().map_err(|error| invalid(&patterns.join(" "), error))
}

/// Quotes the braces of a pattern, which mean alternatives in [`globset`] and themselves in tar.
fn with_ordinary_braces(pattern: &str) -> String {
    let (mut quoted, mut is_escaped, mut previous) = (String::new(), false, None);
    // Characters of the class that is open.
    let mut class: Option<usize> = None;
    for character in pattern.chars() {
        let is_ordinary = class.is_some() || is_escaped;
        class = match (class, character) {
            (None, '[') if !is_escaped => Some(0),
            (Some(0), '!' | '^') if previous == Some('[') => Some(0),
            // A bracket that comes first belongs to the class.
            (None, _) | (Some(1..), ']') => None,
            (Some(count), _) => Some(count + 1),
        };
        match character {
            '{' | '}' if !is_ordinary => quoted.extend(['[', character, ']']),
            _ => quoted.push(character),
        }
        is_escaped = !is_ordinary && character == '\\';
        previous = Some(character);
    }
    quoted
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
        check(&[], &[], 1, "./a//b", Some("a/b"));
        check(&[], &[], 2, "./a//b/", Some("b"));
        check(&[], &[], 1, "/a/b", Some("b"));
        check(&[], &[], 1, "./", None);
        check(&[], &[], 0, "./", Some(""));
        check(&[], &["./a"], 0, "./a/b", None);
        check(&[], &["./a"], 0, "a/b", Some("a/b"));
        check(&[], &["./a/*"], 0, "./a/", Some("a"));
        check(&[], &["./a/*"], 0, "./a/b/c", None);
        check(&["./a/*"], &[], 1, "./a/b", Some("a/b"));
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

    const PATTERNS: [&str; 40] = [
        "*",
        "*.jpg",
        "train",
        "./train",
        "train/",
        "train/*",
        "./train/*",
        "./*",
        "/train",
        "*/a.jpg",
        "a.jpg",
        "a*",
        "?op",
        "[tv]*",
        "[!t]*",
        "[^t]*",
        "tra",
        "rain",
        "train/a.jpg",
        "./train/a.jpg",
        "deep",
        "deep/*",
        "*/deep",
        "train/deep",
        "**",
        "**/a.jpg",
        ".",
        "./",
        "*.{jpg,txt}",
        "\\[odd\\]",
        "[[]odd]",
        "a{b}",
        "a[^]{]b}",
        "*jpg*",
        "train//a.jpg",
        "../train",
        "TRAIN",
        "*/",
        "./.",
        "[{]*",
    ];

    /// Lists the files of an archive that GNU tar takes.
    fn listed_by_tar(archive: &std::path::Path, options: &[&str]) -> Vec<String> {
        let mut tar = crate::programs::program("tar");
        let output =
            tar.args(["-Pt", "--quoting-style=literal", "--show-transformed-names", "-f"]).arg(archive).args(options).output();
        let listed = String::from_utf8(output.unwrap().stdout).unwrap();
        listed.lines().filter(|name| !name.ends_with('/')).map(str::to_owned).collect()
    }

    #[test]
    fn patterns_and_strip_components_take_the_files_that_gnu_tar_takes() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("tree");
        for name in ["train/a.jpg", "train/b.txt", "train/deep/a.jpg", "val/a.jpg", "top", "x.jpg/inner", "[odd]", "a{b}"] {
            let path = tree.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "a sample").unwrap();
        }
        let all = ["train", "val", "top", "x.jpg", "[odd]", "a{b}"];
        let absolute = [tree.to_str().unwrap()];
        for (form, names) in [("dotted", &["."][..]), ("plain", &all), ("absolute", &absolute)] {
            let archive = folder.path().join(form);
            let packed = crate::programs::program("tar").arg("-Pcf").arg(&archive).arg("-C").arg(&tree).args(names).status();
            assert!(packed.unwrap().success());
            let files = listed_by_tar(&archive, &[]);
            let taken = |selection: &Selection| {
                let selector = Selector::new(selection).unwrap();
                let decide = |name: &String| match selector.decide(name.as_bytes(), false) {
                    Decision::Take(path) => Some(String::from_utf8(path).unwrap()),
                    _ => None,
                };
                files.iter().filter_map(decide).collect::<Vec<_>>()
            };
            // Tar lists a file of which nothing is left as an empty name, and does not extract it.
            let normal = |names: Vec<String>| {
                let normal = |name: &String| normalize(name.as_bytes()).unwrap();
                names.iter().filter(|name| !name.is_empty()).map(normal).collect::<Vec<_>>()
            };
            let mut wrong = Vec::new();
            for pattern in PATTERNS {
                let patterns = vec![pattern.to_owned()];
                let excluded = taken(&Selection { exclude: patterns.clone(), ..Selection::default() });
                let expected = listed_by_tar(&archive, &["--exclude", pattern]);
                if normal(excluded.clone()) != normal(expected.clone()) {
                    wrong.push(format!("{form}: --exclude '{pattern}' leaves {excluded:?}, tar {expected:?}"));
                }
                let included = taken(&Selection { include: patterns, ..Selection::default() });
                let expected = listed_by_tar(&archive, &["--wildcards", "--no-anchored", pattern]);
                if normal(included.clone()) != normal(expected.clone()) {
                    wrong.push(format!("{form}: --include '{pattern}' takes {included:?}, tar {expected:?}"));
                }
            }
            for strip_components in 0..4 {
                let stripped = taken(&Selection { strip_components, ..Selection::default() });
                let expected = listed_by_tar(&archive, &["--strip-components", &strip_components.to_string()]);
                if normal(stripped.clone()) != normal(expected.clone()) {
                    wrong.push(format!("{form}: --strip-components {strip_components} takes {stripped:?}, tar {expected:?}"));
                }
            }
            assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        }
    }
}
