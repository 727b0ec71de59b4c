//! What patterns and lists name. Both are a user's, who may name a device by mistake: what is read and what is kept is bounded.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirEntry, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use dayfly_meta::limits::{LIST_LEN_MAX, PATH_LEN_MAX, SOURCE_PATHS_LEN_MAX, SOURCES_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::control::{OnConflict, Selection};
use dayfly_meta::wire::peer::Rivalry;
use glob::{MatchOptions, Pattern};
use nix::fcntl::OFlag;

use super::Watch;
use crate::StageInError;

/// As a shell's: a star does not match a leading dot.
const OPTIONS: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: false, require_literal_leading_dot: true };

/// All that patterns name, in order. What one pattern or list names together are rivals.
pub(super) fn given(
    patterns: &[Vec<u8>],
    selection: &Selection,
    watch: &Watch<'_>,
) -> Result<Vec<(PathBuf, Rivalry)>, StageInError> {
    let mut all = Vec::new();
    let mut named = Named::default();
    for (pattern, number) in patterns.iter().zip(1..) {
        expand_one(pattern, watch, &mut named)?;
        let paths = std::mem::take(&mut named.paths);
        let are_rivals = paths.len() > 1 && selection.on_conflict == OnConflict::Error;
        for path in paths {
            let given = all.len() as u32 + 1;
            let rivalry = if are_rivals { Rivalry { pattern: number, given } } else { Rivalry::default() };
            all.push((path, rivalry));
        }
    }
    Ok(all)
}

/// Literal paths stay as they are; globs become what they match, by their bytes; lists what their lines name.
pub(super) fn expand(patterns: &[Vec<u8>], watch: &Watch<'_>) -> Result<Vec<PathBuf>, StageInError> {
    let mut named = Named::default();
    for pattern in patterns {
        expand_one(pattern, watch, &mut named)?;
    }
    Ok(named.paths)
}

/// What was named, counted also once it is taken away.
#[derive(Default)]
struct Named {
    paths: Vec<PathBuf>,
    count: usize,
    len: usize,
}

impl Named {
    /// `by` is the pattern or list that names it.
    fn push(&mut self, path: PathBuf, by: &[u8]) -> Result<(), StageInError> {
        self.count += 1;
        self.len += path.as_os_str().len();
        if self.count > SOURCES_MAX || self.len > SOURCE_PATHS_LEN_MAX {
            return Err(StageInError::TooManySources { pattern: display(by) });
        }
        self.paths.push(path);
        Ok(())
    }
}

fn expand_one(pattern: &[u8], watch: &Watch<'_>, named: &mut Named) -> Result<(), StageInError> {
    watch.look_at(pattern)?;
    if let Some(list) = pattern.strip_prefix(b"@")
        && fs::symlink_metadata(OsStr::from_bytes(pattern)).is_err()
    {
        return listed(Path::new(OsStr::from_bytes(list)), watch, named);
    }
    matched(Path::new(""), pattern, pattern, watch, named)
}

/// What a path or glob names in a folder. `by` is the pattern or list that it stands in.
fn matched(folder: &Path, pattern: &[u8], by: &[u8], watch: &Watch<'_>, named: &mut Named) -> Result<(), StageInError> {
    let whole = folder.join(OsStr::from_bytes(pattern));
    if fs::symlink_metadata(&whole).is_ok() {
        return named.push(whole, by);
    }
    let no_match = || StageInError::NoMatch(display(whole.as_os_str().as_bytes()));
    if !is_glob(pattern) {
        return Err(no_match());
    }
    let first = named.paths.len();
    let start = if pattern.starts_with(b"/") { PathBuf::from("/") } else { folder.to_owned() };
    let walk = Walk { steps: steps(pattern)?, wants_folders: pattern.ends_with(b"/"), by, watch };
    walk.find(start, named)?;
    let mut found = named.paths.split_off(first);
    if found.is_empty() {
        return Err(no_match());
    }
    found.sort_by(|left, right| left.as_os_str().as_bytes().cmp(right.as_os_str().as_bytes()));
    // Two `**` find some in several ways.
    found.dedup_by(|left, right| left.as_os_str() == right.as_os_str());
    named.paths.append(&mut found);
    Ok(())
}

fn is_glob(text: &[u8]) -> bool {
    text.iter().any(|byte| b"*?[".contains(byte))
}

/// A component of a glob.
enum Step {
    /// A name.
    Name(OsString),
    /// All names that match.
    Names(Pattern),
    /// `**`: the folder, and all below it.
    Below,
}

fn steps(pattern: &[u8]) -> Result<Vec<Step>, StageInError> {
    let invalid = |reason: &str| StageInError::InvalidPattern { pattern: display(pattern), reason: reason.to_owned() };
    let mut steps = Vec::new();
    for part in pattern.split(|&byte| byte == b'/').filter(|part| !part.is_empty()) {
        if !is_glob(part) {
            steps.push(Step::Name(OsStr::from_bytes(part).to_owned()));
        } else if part != b"**" {
            let text = std::str::from_utf8(part).map_err(|_| invalid("its wildcards stand among bytes that are not UTF-8"))?;
            steps.push(Step::Names(Pattern::new(text).map_err(|error| invalid(error.msg))?));
        } else if !matches!(steps.last(), Some(Step::Below)) {
            steps.push(Step::Below);
        }
    }
    Ok(steps)
}

/// A walk over what a glob may match. The crate that knows the patterns has one too, which ends the process at a name that is not UTF-8.
struct Walk<'a> {
    steps: Vec<Step>,
    wants_folders: bool,
    by: &'a [u8],
    watch: &'a Watch<'a>,
}

impl Walk<'_> {
    fn find(&self, start: PathBuf, named: &mut Named) -> Result<(), StageInError> {
        // Places, and how many steps led to each: depth costs memory and not stack.
        let mut waiting = vec![(start, 0)];
        while let Some((path, done)) = waiting.pop() {
            self.watch.look_at(path.as_os_str().as_bytes())?;
            let Some(step) = self.steps.get(done) else {
                if !self.wants_folders || path.is_dir() {
                    named.push(path, self.by)?;
                }
                continue;
            };
            match step {
                Step::Name(name) => {
                    let next = path.join(name);
                    // Also a symlink that leads nowhere, which is told of later.
                    let is_there = if name == "." || name == ".." { path.is_dir() } else { next.symlink_metadata().is_ok() };
                    if is_there {
                        waiting.push((next, done + 1));
                    }
                }
                Step::Names(pattern) => self.each(&path, &mut |name, entry| {
                    if pattern.matches_with(name, OPTIONS) {
                        waiting.push((entry.path(), done + 1));
                    }
                    self.check(waiting.len())
                })?,
                Step::Below => {
                    let next = self.steps.get(done + 1);
                    if let Some(Step::Name(_)) = next {
                        waiting.push((path.clone(), done + 1));
                    }
                    self.each(&path, &mut |name, entry| {
                        if let Some(Step::Names(pattern)) = next
                            && pattern.matches_with(name, OPTIONS)
                        {
                            waiting.push((entry.path(), done + 2));
                        }
                        if !name.starts_with('.') && is_folder(entry) {
                            waiting.push((entry.path(), done));
                            if next.is_none() {
                                named.push(entry.path(), self.by)?;
                            }
                        }
                        self.check(waiting.len())
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Calls `take` for each name in a folder; in what is none there are none. Bytes that are not UTF-8 match as the sign that stands for
    /// such bytes: a star matches them.
    fn each(&self, folder: &Path, take: &mut dyn FnMut(&str, &DirEntry) -> Result<(), StageInError>) -> Result<(), StageInError> {
        if !folder.is_dir() && !folder.as_os_str().is_empty() {
            return Ok(());
        }
        let unreadable = |error| StageInError::Read { path: folder.to_owned(), error };
        let readable = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        for entry in fs::read_dir(readable).map_err(unreadable)? {
            self.watch.look_at(self.by)?;
            let entry = entry.map_err(unreadable)?;
            take(&entry.file_name().to_string_lossy(), &entry)?;
        }
        Ok(())
    }

    fn check(&self, waiting: usize) -> Result<(), StageInError> {
        if waiting > SOURCES_MAX { Err(StageInError::TooManySources { pattern: display(self.by) }) } else { Ok(()) }
    }
}

/// Whether it is a folder, or a symlink to one.
fn is_folder(entry: &DirEntry) -> bool {
    entry.file_type().is_ok_and(|kind| kind.is_dir() || kind.is_symlink() && entry.path().is_dir())
}

/// The sources that a list names, one a line.
fn listed(list: &Path, watch: &Watch<'_>, named: &mut Named) -> Result<(), StageInError> {
    let failed = |error| StageInError::Read { path: list.to_owned(), error };
    let refused = |reason| StageInError::InvalidList { path: list.to_owned(), reason };
    let no_file = || refused("it is no regular file; write the names of the sources to a file, one a line".to_owned());
    // To open a device may do something. What takes its place meanwhile is opened without waiting for who writes to it.
    if !fs::metadata(list).map_err(failed)?.is_file() {
        return Err(no_file());
    }
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(list).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(no_file());
    }
    let too_long = || refused(format!("it has more than {LIST_LEN_MAX} bytes; give several lists, or the folder of the sources"));
    if metadata.len() > LIST_LEN_MAX {
        return Err(too_long());
    }
    let folder = list.parent().unwrap_or(Path::new("/"));
    let mut lines = BufReader::new(file);
    let (mut len, mut number) = (0, 0_u64);
    loop {
        watch.look_at(list.as_os_str().as_bytes())?;
        number += 1;
        let mut line = Vec::new();
        let count = (&mut lines).take(PATH_LEN_MAX as u64 + 1).read_until(b'\n', &mut line).map_err(failed)?;
        if count == 0 {
            return Ok(());
        }
        len += count as u64;
        // Some files are longer than they say.
        if len > LIST_LEN_MAX {
            return Err(too_long());
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        } else if count > PATH_LEN_MAX {
            return Err(refused(format!("its line {number} is longer than a path may be, {PATH_LEN_MAX} bytes")));
        }
        if !line.is_empty() {
            // In its folder, a line is never a list again.
            matched(folder, &line, list.as_os_str().as_bytes(), watch, named)?;
        }
    }
}

#[cfg(test)]
mod tests;
