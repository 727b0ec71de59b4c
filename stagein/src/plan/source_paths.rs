//! Expands the user's patterns to source paths. A pattern is a path, a glob, or `@LIST`, the name
//! of a file with one path or glob per line.
//!
//! Users may name a device or a huge file by mistake, so both the bytes read from a list and the
//! memory for its paths are bounded.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use dayfly_meta::limits::{LIST_LEN_MAX, PATH_LEN_MAX, SOURCE_PATHS_LEN_MAX, SOURCES_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::control::{OnConflict, Selection};
use dayfly_meta::wire::peer::Rivalry;
use nix::fcntl::OFlag;

use super::activity::PlanActivity;
use super::glob::{Glob, is_glob};
use crate::StageInError;

/// Returns the paths that the patterns expand to, in order, each with its rivals. With
/// `--on-conflict error`, all paths of one pattern or list are rivals.
pub(super) fn expand_with_rivals(
    patterns: &[Vec<u8>],
    selection: &Selection,
    activity: &PlanActivity<'_>,
) -> Result<Vec<(PathBuf, Rivalry)>, StageInError> {
    let mut all = Vec::new();
    let mut expanded = SourcePaths::default();
    for (pattern, number) in patterns.iter().zip(1..) {
        expand_pattern(pattern, activity, &mut expanded)?;
        let paths = std::mem::take(&mut expanded.paths);
        let are_rivals = paths.len() > 1 && selection.on_conflict == OnConflict::Error;
        for path in paths {
            let match_number = all.len() as u32 + 1;
            let rivalry = if are_rivals { Rivalry { pattern: number, match_number } } else { Rivalry::default() };
            all.push((path, rivalry));
        }
    }
    Ok(all)
}

/// Returns the paths that the patterns expand to, in the order of the patterns. The matches of one
/// glob are sorted by their bytes.
pub(super) fn expand(patterns: &[Vec<u8>], activity: &PlanActivity<'_>) -> Result<Vec<PathBuf>, StageInError> {
    let mut expanded = SourcePaths::default();
    for pattern in patterns {
        expand_pattern(pattern, activity, &mut expanded)?;
    }
    Ok(expanded.paths)
}

/// A bounded list of paths.
#[derive(Default)]
struct SourcePaths {
    paths: Vec<PathBuf>,
    /// Number of paths ever added, including those that have since been removed.
    count: usize,
    /// Bytes of all paths ever added.
    len: usize,
}

impl SourcePaths {
    /// Adds a path. `origin` is the pattern or list that names it.
    fn push(&mut self, path: PathBuf, origin: &[u8]) -> Result<(), StageInError> {
        self.count += 1;
        self.len += path.as_os_str().len();
        if self.count > SOURCES_MAX || self.len > SOURCE_PATHS_LEN_MAX {
            return Err(StageInError::TooManySources { pattern: display(origin) });
        }
        self.paths.push(path);
        Ok(())
    }
}

fn expand_pattern(pattern: &[u8], activity: &PlanActivity<'_>, expanded: &mut SourcePaths) -> Result<(), StageInError> {
    activity.begin(pattern)?;
    if let Some(list) = pattern.strip_prefix(b"@")
        && fs::symlink_metadata(OsStr::from_bytes(pattern)).is_err()
    {
        return expand_list(Path::new(OsStr::from_bytes(list)), activity, expanded);
    }
    expand_path_or_glob(Path::new(""), pattern, pattern, activity, expanded)
}

/// Expands a path or glob that is relative to `folder`. A path that exists is not treated as a glob,
/// even if it contains wildcards. `origin` is the pattern or list that contains it.
fn expand_path_or_glob(
    folder: &Path,
    pattern: &[u8],
    origin: &[u8],
    activity: &PlanActivity<'_>,
    expanded: &mut SourcePaths,
) -> Result<(), StageInError> {
    let path = folder.join(OsStr::from_bytes(pattern));
    if fs::symlink_metadata(&path).is_ok() {
        return expanded.push(path, origin);
    }
    let no_match = || StageInError::NoMatch(display(path.as_os_str().as_bytes()));
    if !is_glob(pattern) {
        return Err(no_match());
    }
    let first = expanded.paths.len();
    Glob::parse(pattern, origin)?.find(folder, activity, &mut |path| expanded.push(path, origin))?;
    let mut matches = expanded.paths.split_off(first);
    if matches.is_empty() {
        return Err(no_match());
    }
    matches.sort_by(|left, right| left.as_os_str().as_bytes().cmp(right.as_os_str().as_bytes()));
    matches.dedup_by(|left, right| left.as_os_str() == right.as_os_str());
    expanded.paths.append(&mut matches);
    Ok(())
}

/// Expands the lines of a list. The lines are relative to the list's folder.
fn expand_list(list: &Path, activity: &PlanActivity<'_>, expanded: &mut SourcePaths) -> Result<(), StageInError> {
    let invalid = |reason| StageInError::InvalidList { path: list.to_owned(), reason };
    let unreadable = |error: io::Error| invalid(format!("it cannot be read: {error}; every node must be able to read it"));
    let not_regular = || invalid("it is not a regular file; write the paths of the sources to a file, one per line".to_owned());
    // Opening a device may have side effects, so the type is checked first. If a FIFO takes the
    // file's place in the meantime, O_NONBLOCK keeps the open from waiting for a writer.
    if !fs::metadata(list).map_err(unreadable)?.is_file() {
        return Err(not_regular());
    }
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(list).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(not_regular());
    }
    let too_long = || {
        invalid(format!("it has more than {LIST_LEN_MAX} bytes; use several lists, or name the folder that contains the sources"))
    };
    if metadata.len() > LIST_LEN_MAX {
        return Err(too_long());
    }
    let folder = list.parent().unwrap_or(Path::new("/"));
    let mut lines = BufReader::new(file);
    let (mut len, mut number) = (0, 0_u64);
    loop {
        activity.begin(list.as_os_str().as_bytes())?;
        number += 1;
        let mut line = Vec::new();
        let count = (&mut lines).take(PATH_LEN_MAX as u64 + 1).read_until(b'\n', &mut line).map_err(unreadable)?;
        if count == 0 {
            return Ok(());
        }
        len += count as u64;
        // Some special files yield more bytes than their size.
        if len > LIST_LEN_MAX {
            return Err(too_long());
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        } else if count > PATH_LEN_MAX {
            return Err(invalid(format!("its line {number} is longer than {PATH_LEN_MAX} bytes, the longest possible path")));
        }
        let line = without_marks(folder, &line, number == 1);
        if line.is_empty() {
            continue;
        }
        // A line that starts with @ is a path, not another list.
        expand_path_or_glob(folder, line, list.as_os_str().as_bytes(), activity, expanded).map_err(|error| match error {
            StageInError::NoMatch(_) | StageInError::InvalidPattern { .. } => invalid(format!("line {number}: {error}")),
            error => error,
        })?;
    }
}

/// Returns a line without what programs on Windows write: a byte order mark before the first line, and a carriage return at the end of
/// each line. A file whose name has these bytes is found all the same.
fn without_marks<'a>(folder: &Path, line: &'a [u8], is_first: bool) -> &'a [u8] {
    let unmarked = line.strip_prefix(b"\xef\xbb\xbf").filter(|_| is_first).unwrap_or(line);
    let unmarked = unmarked.strip_suffix(b"\r").unwrap_or(unmarked);
    let is_path = || fs::symlink_metadata(folder.join(OsStr::from_bytes(line))).is_ok();
    if unmarked.len() < line.len() && is_path() { line } else { unmarked }
}

#[cfg(test)]
mod tests;
