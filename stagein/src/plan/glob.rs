//! Expands glob patterns over paths that need not be UTF-8.
//!
//! The `glob` crate parses and matches patterns. It can also walk the file system, but its walk
//! panics at a name that is not UTF-8, so this module walks by itself.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirEntry};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dayfly_meta::limits::SOURCES_MAX;
use dayfly_meta::path::display;
use glob::{MatchOptions, Pattern};

use super::activity::PlanActivity;
use crate::StageInError;

/// As in a shell, a star does not match a leading dot.
const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: false, require_literal_leading_dot: true };

/// Returns whether the text has wildcards.
pub(super) fn is_glob(text: &[u8]) -> bool {
    text.iter().any(|byte| b"*?[".contains(byte))
}

/// A component of a glob.
enum Component {
    /// One name, without wildcards.
    Name(OsString),
    /// All names that match a pattern.
    Names(Pattern),
    /// `**`: a directory and all directories below it.
    Tree,
}

/// A parsed glob.
pub(super) struct Glob<'a> {
    components: Vec<Component>,
    is_absolute: bool,
    /// Whether the pattern ends with a slash and so matches only directories.
    matches_only_directories: bool,
    /// The pattern or list that the user gave, for messages.
    origin: &'a [u8],
}

impl<'a> Glob<'a> {
    /// Parses a pattern. `origin` is what the user gave: the pattern itself, or the list that
    /// contains it.
    pub(super) fn parse(pattern: &[u8], origin: &'a [u8]) -> Result<Self, StageInError> {
        let invalid = |reason: &str| StageInError::InvalidPattern { pattern: display(pattern), reason: reason.to_owned() };
        let mut components = Vec::new();
        for part in pattern.split(|&byte| byte == b'/').filter(|part| !part.is_empty()) {
            if !is_glob(part) {
                components.push(Component::Name(OsStr::from_bytes(part).to_owned()));
            } else if part != b"**" {
                let not_utf8 = |_| invalid("a component with wildcards must be valid UTF-8");
                let text = std::str::from_utf8(part).map_err(not_utf8)?;
                components.push(Component::Names(Pattern::new(text).map_err(|error| invalid(error.msg))?));
            } else if !matches!(components.last(), Some(Component::Tree)) {
                components.push(Component::Tree);
            }
        }
        let (is_absolute, matches_only_directories) = (pattern.starts_with(b"/"), pattern.ends_with(b"/"));
        Ok(Self { components, is_absolute, matches_only_directories, origin })
    }

    /// Calls `found` for every path below `folder` that matches, in no particular order. With
    /// several `**`, a path can be found more than once.
    pub(super) fn find(
        &self,
        folder: &Path,
        activity: &PlanActivity<'_>,
        found: &mut dyn FnMut(PathBuf) -> Result<(), StageInError>,
    ) -> Result<(), StageInError> {
        let start = if self.is_absolute { PathBuf::from("/") } else { folder.to_owned() };
        // Paths to continue from, each with the number of components that led to it. This is an
        // explicit stack, so that a deep tree does not overflow the thread's stack.
        let mut waiting = vec![(start, 0)];
        while let Some((path, done)) = waiting.pop() {
            activity.begin(path.as_os_str().as_bytes())?;
            let Some(component) = self.components.get(done) else {
                if !self.matches_only_directories || path.is_dir() {
                    found(path)?;
                }
                continue;
            };
            match component {
                Component::Name(name) => {
                    let next = path.join(name);
                    // A dangling symlink counts as existing; opening it fails later.
                    let exists = if name == "." || name == ".." { path.is_dir() } else { next.symlink_metadata().is_ok() };
                    if exists {
                        waiting.push((next, done + 1));
                    }
                }
                Component::Names(pattern) => self.for_each_name(&path, activity, &mut |name, entry| {
                    if pattern.matches_with(name, OPTIONS) {
                        waiting.push((entry.path(), done + 1));
                    }
                    self.check_bound(waiting.len())
                })?,
                Component::Tree => {
                    let next = self.components.get(done + 1);
                    if let Some(Component::Name(_)) = next {
                        waiting.push((path.clone(), done + 1));
                    }
                    self.for_each_name(&path, activity, &mut |name, entry| {
                        if let Some(Component::Names(pattern)) = next
                            && pattern.matches_with(name, OPTIONS)
                        {
                            waiting.push((entry.path(), done + 2));
                        }
                        if !name.starts_with('.') && is_directory(entry) {
                            waiting.push((entry.path(), done));
                            if next.is_none() {
                                found(entry.path())?;
                            }
                        }
                        self.check_bound(waiting.len())
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Calls `visit` for each name in `folder`; a path that is not a directory has no names. A name
    /// that is not UTF-8 is converted lossily, so a star matches it.
    fn for_each_name(
        &self,
        folder: &Path,
        activity: &PlanActivity<'_>,
        visit: &mut dyn FnMut(&str, &DirEntry) -> Result<(), StageInError>,
    ) -> Result<(), StageInError> {
        if !folder.is_dir() && !folder.as_os_str().is_empty() {
            return Ok(());
        }
        let unreadable = |error| StageInError::Read { path: folder.to_owned(), error };
        let readable = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        for entry in fs::read_dir(readable).map_err(unreadable)? {
            activity.begin(self.origin)?;
            let entry = entry.map_err(unreadable)?;
            visit(&entry.file_name().to_string_lossy(), &entry)?;
        }
        Ok(())
    }

    fn check_bound(&self, waiting: usize) -> Result<(), StageInError> {
        if waiting > SOURCES_MAX { Err(StageInError::TooManySources { pattern: display(self.origin) }) } else { Ok(()) }
    }
}

/// Returns whether the entry is a directory, or a symlink to one.
fn is_directory(entry: &DirEntry) -> bool {
    entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_symlink() && entry.path().is_dir())
}
