//! What `run` looks at before it starts anything. A stage-in may take hours; what would fail after it, and can be told now, is told now.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dayfly_meta::path::{is_below, join};
use dayfly_meta::wire::control::Selection;
use dayfly_server::check_sources;
use nix::unistd::{AccessFlags, access};

use super::super::{exec, stage_in};
use crate::args::Run;
use crate::failure::{Failure, NOT_STARTED};
use crate::launch::Planned;
use crate::{namespace, preload};

/// The kernel reads this much of a script's first line.
const SCRIPT_LINE_LEN: u64 = 256;

/// Checks targets, CMD, the library, the report's folder and the sources.
pub(super) fn check(arguments: &Run, planned: &Planned, stage_ins: &[(OsString, OsString)]) -> Result<(), Failure> {
    let itself = |failure: Failure| failure.with_status(NOT_STARTED);
    check_targets(planned.prefix(), stage_ins)?;
    check_command(&arguments.command, planned.prefix())?;
    preload::library().map_err(itself)?;
    if let Some(report) = &arguments.options.report {
        check_report(report).map_err(itself)?;
    }
    let options = &arguments.options;
    let selection = Selection {
        include: options.include.clone(),
        exclude: options.exclude.clone(),
        no_unpack: options.no_unpack,
        keep_going: options.keep_going,
        ..Selection::default()
    };
    for (source, target) in stage_ins {
        let path = stage_in::absolute(source).map_err(itself)?;
        // Node 0 reads them; what another machine sees is not known here.
        if planned.is_led_from_here() {
            let cannot = |error| Failure::new(format!("cannot stage in to '{}': {error}", target.display()));
            check_sources(&[path], &selection).map_err(cannot).map_err(itself)?;
        }
    }
    Ok(())
}

/// Targets are in the namespace, and none is or lies below another.
fn check_targets(prefix: &[u8], stage_ins: &[(OsString, OsString)]) -> Result<(), Failure> {
    let mut earlier: Vec<Vec<u8>> = Vec::new();
    for (_, target) in stage_ins {
        let path = namespace::target_below(prefix, target)?;
        let shown = |path: &[u8]| dayfly_meta::path::display(&join(prefix, path));
        for other in &earlier {
            if *other == path {
                return Err(Failure::usage(format!(
                    "'{}' is staged in to twice; several sources into one target are a glob or a @LIST",
                    shown(&path)
                )));
            }
            if is_below(&path, other) || is_below(other, &path) {
                return Err(Failure::usage(format!(
                    "the targets '{}' and '{}' overlap; give each --stage-in a directory of its own",
                    shown(other),
                    shown(&path)
                )));
            }
        }
        earlier.push(path);
    }
    Ok(())
}

/// CMD is there and can be run. One that lies in the namespace is known only once that is there.
fn check_command(command: &[OsString], prefix: &[u8]) -> Result<(), Failure> {
    let program = command.first().ok_or_else(|| Failure::usage("no command was given"))?;
    if exec::is_in_namespace(program, Path::new(OsStr::from_bytes(prefix))) {
        return Ok(());
    }
    find(program, &exec::search_path()?).map(drop).map_err(|error| exec::not_started(program, &error))
}

/// The file that `execvp` would run.
fn find(program: &OsStr, search_path: &OsStr) -> io::Result<PathBuf> {
    let candidates = if program.as_bytes().contains(&b'/') {
        vec![PathBuf::from(program)]
    } else {
        // An empty folder is the working directory.
        env::split_paths(search_path).map(|folder| Path::new(".").join(folder).join(program)).collect()
    };
    let mut refusal = io::Error::from_raw_os_error(nix::libc::ENOENT);
    for candidate in candidates.into_iter().filter(|_| !program.is_empty()) {
        match check_executable(&candidate) {
            Ok(()) => return Ok(candidate),
            // The next folder may have it.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
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

/// Whether the kernel would run it, and what it names as its interpreter.
fn check_executable(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::from_raw_os_error(nix::libc::EACCES));
    }
    access(path, AccessFlags::X_OK)?;
    let mut line = Vec::new();
    // A program may be run without being readable.
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

/// The report can be written once there is something to report.
fn check_report(path: &Path) -> Result<(), Failure> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_folder = path.is_dir();
    let place = if path.exists() { path } else { folder };
    match access(place, AccessFlags::W_OK) {
        Ok(()) if is_folder => Err(Failure::new(format!("--report '{}' is a directory; name a file in it", path.display()))),
        Ok(()) => Ok(()),
        Err(error) => {
            Err(Failure::new(format!("cannot write --report '{}': '{}': {}", path.display(), place.display(), error.desc())))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_command_is_looked_for_as_execvp_does() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, mode: u32, content: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
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
        let check = |program: &str, expect: Result<&str, i32>| {
            let found = find(OsStr::new(program), &search);
            match expect {
                Ok(place) => assert_eq!(found.unwrap(), folder.path().join(place).join(program), "{program}"),
                Err(status) => {
                    let failure = exec::not_started(OsStr::new(program), &found.unwrap_err());
                    assert_eq!(failure.status(), status as u8, "{program}: {failure}");
                }
            }
        };
        check("plain", Ok("two"));
        check("only-one", Ok("one"));
        check("script", Ok("two"));
        check("no-line", Ok("two"));
        check("denied", Err(126));
        check("none", Err(127));
        check("lost", Err(127));
        check("", Err(127));
        let path = |name: &str| folder.path().join(name);
        for (name, status) in [("one/plain", 126), ("one", 126), ("none/x", 127), ("file/x", 127), ("two/lost", 127)] {
            let failure = exec::not_started(OsStr::new(name), &find(path(name).as_os_str(), OsStr::new("")).unwrap_err());
            assert_eq!(failure.status(), status, "{name}: {failure}");
        }
        assert!(find(path("two/lost").as_os_str(), OsStr::new("")).unwrap_err().to_string().contains("/no/such/interpreter"));
        assert_eq!(find(path("file").as_os_str(), OsStr::new("")).unwrap(), path("file"));
    }
}
