//! The library that shows the namespace to unchanged programs: where it is, and whether it can be used. The loader passes over
//! one that is absent or broken with at most a warning, and the program would see no namespace; so it is tried first.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dayfly_client::locate::{PREFIX_VARIABLE, SESSION_VARIABLE};

use crate::failure::Failure;

const NAME: &str = "libdayfly_preload.so";
/// What makes the loader load a library before all others.
pub(crate) const VARIABLE: &str = "LD_PRELOAD";

/// Where the library is, having seen that it loads.
pub(crate) fn library() -> Result<PathBuf, Failure> {
    let program = env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let places = [folder.join("deps"), folder.to_owned(), folder.join("../lib/dayfly")].map(|place| place.join(NAME));
    let Some(library) = places.iter().find(|place| place.is_file()) else {
        let places: Vec<String> = places.iter().map(|place| format!("'{}'", place.display())).collect();
        return Err(Failure::new(format!(
            "{NAME} is not there, without which CMD would not see the namespace; build it by 'cargo build --release', or put it beside \
             dayfly (looked for: {})",
            places.join(", ")
        )));
    };
    let library = fs::canonicalize(library)?;
    if library.as_os_str().as_bytes().iter().any(|&byte| byte == b':' || byte.is_ascii_whitespace()) {
        let path = library.display();
        return Err(Failure::new(format!(
            "'{path}' has a blank or a colon in its path, at which the loader would part it; move it"
        )));
    }
    try_to_load(&program, &library)?;
    Ok(library)
}

/// Runs this program with the library, and has it look whether it is there.
fn try_to_load(program: &Path, library: &Path) -> Result<(), Failure> {
    let mut trial = Command::new(program);
    trial.arg(TRIAL).env(VARIABLE, library).env_remove(SESSION_VARIABLE).env_remove(PREFIX_VARIABLE);
    let output = trial.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr).trim().lines().collect::<Vec<_>>().join("; ");
    let path = library.display();
    Err(Failure::new(format!("'{path}' cannot be loaded, without which CMD would not see the namespace: {reason}")))
}

/// The hidden command of [`try_to_load`].
const TRIAL: &str = "is-preloaded";

/// Whether the library is in this process.
pub(crate) fn is_loaded() -> bool {
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    maps.windows(NAME.len()).any(|window| window == NAME.as_bytes())
}

/// `LD_PRELOAD` with the library first, before what was asked for already.
pub(crate) fn value(library: &Path) -> OsString {
    let mut value = library.as_os_str().to_owned();
    let before = env::var_os(VARIABLE).unwrap_or_default();
    let others = before.as_bytes().split(|&byte| byte == b':' || byte == b' ');
    for other in others.filter(|other| !other.is_empty() && *other != library.as_os_str().as_bytes()) {
        value.push(":");
        value.push(OsStr::from_bytes(other));
    }
    value
}

/// Whether a program is an ELF that asks for no loader: then nothing is loaded before it. `false` where that cannot be told.
pub(crate) fn is_static(program: &OsStr) -> bool {
    let path = Path::new(program);
    let in_path =
        env::var_os("PATH").map(|folders| env::split_paths(&folders).map(|folder| folder.join(path)).collect::<Vec<_>>());
    let candidates = if program.as_bytes().contains(&b'/') { vec![path.to_owned()] } else { in_path.unwrap_or_default() };
    let found = candidates.into_iter().find(|candidate| candidate.is_file());
    found.and_then(|path| asks_for_no_loader(&path)).unwrap_or(false)
}

/// Looks through a 64-bit ELF's program headers, which come within its first page or so.
fn asks_for_no_loader(path: &Path) -> Option<bool> {
    const INTERPRETER: u32 = 3;
    let mut start = Vec::new();
    fs::File::open(path).ok()?.take(8192).read_to_end(&mut start).ok()?;
    let half = |at: usize| Some(u16::from_le_bytes(start.get(at..at + 2)?.try_into().ok()?));
    if !start.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = usize::try_from(u64::from_le_bytes(start.get(32..40)?.try_into().ok()?)).ok()?;
    let (len, count) = (usize::from(half(54)?), usize::from(half(56)?));
    let mut kinds = (0..count).map(|number| {
        let at = table.checked_add(number * len)?;
        Some(u32::from_le_bytes(start.get(at..at.checked_add(4)?)?.try_into().ok()?))
    });
    // A shared object is run by a loader, too.
    Some(!kinds.any(|kind| kind.is_none_or(|kind| kind == INTERPRETER)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_ask_for_a_loader_are_told_from_others() {
        let folder = std::env::temp_dir().join(format!("dayfly-static-{}", std::process::id()));
        let fake = |kind: u8| {
            let mut elf = vec![0; 128];
            elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
            (elf[32], elf[54], elf[56], elf[64]) = (64, 56, 1, kind);
            fs::write(&folder, elf).unwrap();
            is_static(folder.as_os_str())
        };
        assert!(fake(1) && !fake(3));
        fs::write(&folder, "#!/bin/sh\n").unwrap();
        assert!(!is_static(folder.as_os_str()) && !is_static(OsStr::new("no-such-program")));
        assert!(!is_static(OsStr::new("sh")));
        fs::remove_file(&folder).unwrap();
    }
}
