//! The checks that `dayfly run` makes before it starts anything.
//!
//! A stage-in may take hours. A mistake that would show only after the stage-in, such as a command
//! that does not exist, is reported at once.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dayfly_meta::path::{InvalidPath, display, is_below, join, normalize};
use dayfly_meta::wire::control::Selection;
use dayfly_server::StageInError;
use nix::unistd::{AccessFlags, access};

/// How many bytes of a script's first line the kernel reads.
const SCRIPT_LINE_LEN: u64 = 256;

/// A mistake that would cause a failure later.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreflightError {
    /// A target is outside the namespace.
    #[error("'{}' is not in the namespace; a target begins with {}/", display(.target), display(.prefix))]
    OutsideNamespace {
        /// The target as given.
        target: Vec<u8>,
        /// The prefix of the namespace.
        prefix: Vec<u8>,
    },
    /// A target is not a valid path.
    #[error("'{}' cannot be a target: {source}", display(.target))]
    InvalidTarget {
        /// The target as given.
        target: Vec<u8>,
        /// What is wrong with it.
        source: InvalidPath,
    },
    /// Two stage-ins have the same target.
    #[error("'{0}' is the target of two --stage-in options; to stage several sources into one target, use a glob or an @LIST")]
    SameTarget(String),
    /// One target lies below another.
    #[error("the targets '{0}' and '{1}' overlap; give each --stage-in a directory of its own")]
    OverlappingTargets(String, String),
    /// The report is a directory.
    #[error("--report '{}' is a directory; name a file in it", .0.display())]
    ReportIsDirectory(PathBuf),
    /// The report cannot be written.
    #[error("cannot write --report '{}': '{}': {source}", .path.display(), .blocked.display())]
    ReportNotWritable {
        /// The path of the report.
        path: PathBuf,
        /// The file or folder that is not writable.
        blocked: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A source cannot be staged in.
    #[error("cannot stage in to '{}': {source}", display(.target))]
    Source {
        /// The target of the stage-in.
        target: Vec<u8>,
        /// Why the source was refused.
        source: StageInError,
    },
}

impl PreflightError {
    /// Returns whether the command line is at fault.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::OutsideNamespace { .. } | Self::InvalidTarget { .. } | Self::SameTarget(_) | Self::OverlappingTargets(..)
        )
    }
}

/// Returns a target's path below the prefix, as servers expect it.
///
/// # Errors
/// Fails if the target is outside the namespace or not a valid path.
pub fn target_below(prefix: &[u8], target: &OsStr) -> Result<Vec<u8>, PreflightError> {
    let target = target.as_bytes();
    let prefix = prefix.strip_suffix(b"/").unwrap_or(prefix);
    let below = target.strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with(b"/"));
    let below = below.ok_or_else(|| PreflightError::OutsideNamespace { target: target.to_vec(), prefix: prefix.to_vec() })?;
    normalize(below).map_err(|source| PreflightError::InvalidTarget { target: target.to_vec(), source })
}

/// Checks that the targets are in the namespace, and that none equals another or lies below it.
///
/// # Errors
/// Fails at the first target that violates this rule.
pub fn check_targets<'a>(prefix: &[u8], targets: impl IntoIterator<Item = &'a OsStr>) -> Result<(), PreflightError> {
    let mut earlier: Vec<Vec<u8>> = Vec::new();
    for target in targets {
        let path = target_below(prefix, target)?;
        let shown = |path: &[u8]| display(&join(prefix, path));
        for other in &earlier {
            if *other == path {
                return Err(PreflightError::SameTarget(shown(&path)));
            }
            if is_below(&path, other) || is_below(other, &path) {
                return Err(PreflightError::OverlappingTargets(shown(other), shown(&path)));
            }
        }
        earlier.push(path);
    }
    Ok(())
}

/// Checks that sources exist and can be read. This is useful only if node 0 runs on this machine,
/// because node 0 reads them.
///
/// # Errors
/// Fails if a source does not exist or cannot be read.
pub fn check_sources(sources: &[Vec<u8>], target: &OsStr, selection: &Selection) -> Result<(), PreflightError> {
    let failed = |source| PreflightError::Source { target: target.as_bytes().to_vec(), source };
    dayfly_server::check_sources(sources, selection).map_err(failed)
}

/// Checks that the report can be written once there is something to report.
///
/// # Errors
/// Fails if it is a directory, or if it or its folder is not writable.
pub fn check_report(path: &Path) -> Result<(), PreflightError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_directory = path.is_dir();
    let blocked = if path.exists() { path } else { folder };
    match access(blocked, AccessFlags::W_OK) {
        Ok(()) if is_directory => Err(PreflightError::ReportIsDirectory(path.to_owned())),
        Ok(()) => Ok(()),
        Err(error) => {
            Err(PreflightError::ReportNotWritable { path: path.to_owned(), blocked: blocked.to_owned(), source: error.into() })
        }
    }
}

/// Finds the file that `execvp` would run.
///
/// # Errors
/// Fails as `execvp` would: with `NotFound` if there is no such program or its interpreter is
/// missing, and with another kind if the program cannot be executed.
pub fn find_program(program: &OsStr, search_path: &OsStr) -> io::Result<PathBuf> {
    let candidates = if program.as_bytes().contains(&b'/') {
        vec![PathBuf::from(program)]
    } else {
        // An empty folder means the working directory.
        env::split_paths(search_path).map(|folder| Path::new(".").join(folder).join(program)).collect()
    };
    let mut refusal = io::Error::from_raw_os_error(nix::libc::ENOENT);
    for candidate in candidates.into_iter().filter(|_: &PathBuf| !program.is_empty()) {
        match check_executable(&candidate) {
            Ok(()) => return Ok(candidate),
            // The next folder may have the program.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                // An error without a number is about a missing interpreter, which says more than
                // "not found".
                if error.raw_os_error().is_none() {
                    refusal = error;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => refusal = error,
            Err(error) => return Err(error),
        }
    }
    Err(refusal)
}

/// Checks that the kernel would run a file, and that the interpreter of a script exists.
fn check_executable(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::from_raw_os_error(nix::libc::EACCES));
    }
    access(path, AccessFlags::X_OK)?;
    let mut line = Vec::new();
    // A program can be executable without being readable.
    if File::open(path).and_then(|file| file.take(SCRIPT_LINE_LEN).read_to_end(&mut line)).is_err() {
        return Ok(());
    }
    let Some(interpreter) = line.strip_prefix(b"#!").and_then(|line| line.split(|&byte| byte == b'\n').next()) else {
        return Ok(());
    };
    let interpreter = interpreter.trim_ascii().split(|byte| b" \t".contains(byte)).next().unwrap_or_default();
    let interpreter = Path::new(OsStr::from_bytes(interpreter));
    access(interpreter, AccessFlags::X_OK).map_err(|error| {
        let kind = io::Error::from(error).kind();
        io::Error::new(kind, format!("its interpreter '{}': {}", interpreter.display(), error.desc()))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_program_is_found_as_execvp_finds_it() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, mode: u32, content: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        make("one/plain", 0o644, "");
        make("one/only-one", 0o755, "#!/bin/sh\n");
        make("two/plain", 0o755, "\x7fELF");
        make("two/denied", 0o644, "");
        make("two/script", 0o755, "#! /bin/sh -e\n");
        make("two/no-line", 0o755, "true\n");
        make("two/lost", 0o755, "#!/no/such/interpreter -x\n");
        fs::create_dir(folder.path().join("one/script")).unwrap();
        make("file", 0o755, "");
        let search = ["file", "none", "one", "two"].map(|name| folder.path().join(name));
        let search = env::join_paths(search).unwrap();
        let is_absent = |error: &io::Error| matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
        let check = |program: &str, expect: Result<&str, bool>| {
            let found = find_program(OsStr::new(program), &search);
            match expect {
                Ok(at) => assert_eq!(found.unwrap(), folder.path().join(at).join(program), "{program}"),
                Err(absent) => assert_eq!(is_absent(&found.unwrap_err()), absent, "{program}"),
            }
        };
        check("plain", Ok("two"));
        check("only-one", Ok("one"));
        check("script", Ok("two"));
        check("no-line", Ok("two"));
        check("denied", Err(false));
        check("none", Err(true));
        check("lost", Err(true));
        check("", Err(true));
        let path = |name: &str| folder.path().join(name);
        for (name, absent) in [("one/plain", false), ("one", false), ("none/x", true), ("file/x", true), ("two/lost", true)] {
            let error = find_program(path(name).as_os_str(), OsStr::new("")).unwrap_err();
            assert_eq!(is_absent(&error), absent, "{name}: {error}");
        }
        let lost = find_program(path("two/lost").as_os_str(), OsStr::new("")).unwrap_err().to_string();
        assert!(lost.contains("/no/such/interpreter"), "{lost}");
        assert_eq!(find_program(path("file").as_os_str(), OsStr::new("")).unwrap(), path("file"));
    }

    #[test]
    fn targets_are_in_the_namespace_and_do_not_overlap() {
        let check = |targets: &[&str], expect: Result<(), &str>| {
            let found = check_targets(b"/dayfly", targets.iter().map(OsStr::new));
            match expect {
                Ok(()) => assert!(found.is_ok(), "{targets:?}"),
                Err(word) => {
                    let error = found.unwrap_err();
                    assert!(error.is_usage() && error.to_string().contains(word), "{error}");
                }
            }
        };
        check(&["/dayfly/a", "/dayfly/b"], Ok(()));
        check(&["/dayfly/a", "/dayfly/a/"], Err("the target of two"));
        check(&["/dayfly/a/b", "/dayfly/a"], Err("overlap"));
        check(&["/tmp/a"], Err("begins with /dayfly/"));
    }
}
