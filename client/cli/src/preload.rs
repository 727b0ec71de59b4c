//! Finds the preload library, which shows the namespace to unchanged programs, and checks that it
//! can be loaded.
//!
//! If a library is missing or broken, the loader skips it with at most a warning, and the program
//! would then see no namespace. So this program tries to load it first.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dayfly_client::locate::{PREFIX_VARIABLE, SESSION_VARIABLE};

use crate::failure::Failure;

/// The library's file name.
const NAME: &str = "libdayfly_preload.so";
/// The variable that makes the loader load a library before all others.
pub(crate) const VARIABLE: &str = "LD_PRELOAD";

/// Finds the library, and checks that it can be loaded.
pub(crate) fn library() -> Result<PathBuf, Failure> {
    let program = env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let places = [folder.join("deps"), folder.to_owned(), folder.join("../lib/dayfly")].map(|place| place.join(NAME));
    let Some(library) = places.iter().find(|place| place.is_file()) else {
        let places: Vec<String> = places.iter().map(|place| format!("'{}'", place.display())).collect();
        return Err(Failure::new(format!(
            "cannot find {NAME}, without which CMD would not see the namespace; build it with 'cargo build --release', or put it \
             next to dayfly (searched: {})",
            places.join(", ")
        )));
    };
    let library = fs::canonicalize(library)?;
    if library.as_os_str().as_bytes().iter().any(|&byte| byte == b':' || byte.is_ascii_whitespace()) {
        let path = library.display();
        return Err(Failure::new(format!(
            "the path '{path}' contains a space or a colon, where the loader would split it; move the library"
        )));
    }
    try_to_load(&program, &library)?;
    Ok(library)
}

/// Runs this program with the library, and has it check whether the library is loaded.
fn try_to_load(program: &Path, library: &Path) -> Result<(), Failure> {
    let mut trial = Command::new(program);
    trial.arg(TRIAL).env(VARIABLE, library).env_remove(SESSION_VARIABLE).env_remove(PREFIX_VARIABLE);
    let output = trial.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr).trim().lines().collect::<Vec<_>>().join("; ");
    let path = library.display();
    Err(Failure::new(format!("cannot load '{path}', without which CMD would not see the namespace: {reason}")))
}

/// The hidden command that [`try_to_load`] runs.
const TRIAL: &str = "is-preloaded";

/// Returns whether the library is loaded into this process.
pub(crate) fn is_loaded() -> bool {
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    maps.windows(NAME.len()).any(|window| window == NAME.as_bytes())
}

/// Returns the value of `LD_PRELOAD` that loads the library first, and then what the user asked
/// for.
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

/// Returns whether a program is a static ELF file, into which no library can be preloaded. Returns
/// `false` if this is unknown.
pub(crate) fn is_static(program: &OsStr) -> bool {
    let path = Path::new(program);
    let in_path =
        env::var_os("PATH").map(|folders| env::split_paths(&folders).map(|folder| folder.join(path)).collect::<Vec<_>>());
    let candidates = if program.as_bytes().contains(&b'/') { vec![path.to_owned()] } else { in_path.unwrap_or_default() };
    let found = candidates.into_iter().find(|candidate| candidate.is_file());
    found.and_then(|path| has_no_interpreter(&path)).unwrap_or(false)
}

/// Searches the program headers of a 64-bit ELF file, which are in its first 8 KiB, for an
/// interpreter. `None` if the file is not such a file.
fn has_no_interpreter(path: &Path) -> Option<bool> {
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
    // Headers that are cut off count as an interpreter.
    Some(!kinds.any(|kind| kind.is_none_or(|kind| kind == INTERPRETER)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_without_an_interpreter_is_static() {
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
