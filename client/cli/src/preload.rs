//! Finds the preload library, which shows the namespace to unchanged programs, and checks that it
//! can be loaded.
//!
//! If the library is missing or broken, the dynamic loader skips it with at most a warning, and the
//! user's program would see no namespace. So `dayfly` first tries to load the library into a
//! process of its own.

mod entry;

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

/// The library, and how `LD_PRELOAD` names it.
pub(crate) struct Preload {
    /// The library's path.
    pub(crate) library: PathBuf,
    entry: OsString,
}

/// Finds the library, and checks that it can be loaded.
pub(crate) fn library() -> Result<Preload, Failure> {
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
    if library.as_os_str().as_bytes().iter().any(|&byte| byte == b':' || byte == b'$' || byte.is_ascii_whitespace()) {
        let path = library.display();
        return Err(Failure::new(format!(
            "the path '{path}' contains a space, a colon or a dollar sign, which the loader would not take literally; move the \
             library"
        )));
    }
    let mut reason = String::new();
    for entry in entry::entries(&library) {
        match try_to_load(&program, &entry)? {
            None => return Ok(Preload { library, entry }),
            Some(again) => reason = again,
        }
    }
    let path = library.display();
    Err(Failure::new(format!("cannot load '{path}', without which CMD would not see the namespace: {reason}")))
}

/// Runs `dayfly` with the given entry in `LD_PRELOAD`, to check that the loader loads the library. Returns the reason if the
/// library is not loaded.
fn try_to_load(program: &Path, entry: &OsStr) -> Result<Option<String>, Failure> {
    let mut trial = Command::new(program);
    trial.arg(TRIAL).env(VARIABLE, entry).env_remove(SESSION_VARIABLE).env_remove(PREFIX_VARIABLE);
    let output = trial.stdin(Stdio::null()).output()?;
    let reason = || String::from_utf8_lossy(&output.stderr).trim().lines().collect::<Vec<_>>().join("; ");
    Ok((!output.status.success()).then(reason))
}

/// The hidden command that [`try_to_load`] runs.
const TRIAL: &str = "is-preloaded";

/// Returns whether the library is loaded into this process.
pub(crate) fn is_loaded() -> bool {
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    maps.windows(NAME.len()).any(|window| window == NAME.as_bytes())
}

impl Preload {
    /// Returns the value of `LD_PRELOAD` that loads the library first, and then the libraries that
    /// the user named.
    pub(crate) fn value(&self) -> OsString {
        self.value_with(&self.entry)
    }

    /// Returns the value of `LD_PRELOAD` with the library's plain path, for programs that interpret
    /// `$` themselves.
    pub(crate) fn plain_value(&self) -> OsString {
        self.value_with(self.library.as_os_str())
    }

    fn value_with(&self, entry: &OsStr) -> OsString {
        let mut value = entry.to_owned();
        let before = env::var_os(VARIABLE).unwrap_or_default();
        let others = before.as_bytes().split(|&byte| byte == b':' || byte == b' ').map(OsStr::from_bytes);
        for other in others.filter(|other| !other.is_empty() && !entry::names(other, &self.library)) {
            value.push(":");
            value.push(other);
        }
        value
    }
}

/// Returns why the library cannot be loaded into a program, in words that complete "is ...". Returns `None` if it can be loaded, or
/// if that is unknown.
pub(crate) fn unreachable(program: &OsStr) -> Option<&'static str> {
    let path = Path::new(program);
    let in_path =
        env::var_os("PATH").map(|folders| env::split_paths(&folders).map(|folder| folder.join(path)).collect::<Vec<_>>());
    let candidates = if program.as_bytes().contains(&b'/') { vec![path.to_owned()] } else { in_path.unwrap_or_default() };
    let found = candidates.into_iter().find(|candidate| candidate.is_file());
    found.and_then(|path| reason_of(&path))
}

/// Looks at the program headers of a 64-bit ELF file, which are in its first 8 KiB, and at the interpreter that they name.
fn reason_of(path: &Path) -> Option<&'static str> {
    const INTERPRETER: u32 = 3;
    let mut start = Vec::new();
    fs::File::open(path).ok()?.take(8192).read_to_end(&mut start).ok()?;
    if start.starts_with(b"\x7fELF\x01") {
        return Some("a 32-bit program");
    }
    if !start.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize, len: usize| {
        let bytes = start.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0_u64, |number, &byte| number << 8 | u64::from(byte)))
    };
    let (table, len, count) = (number(32, 8)? as usize, number(54, 2)? as usize, number(56, 2)? as usize);
    for at in 0..count {
        let header = table.checked_add(at * len)?;
        // If the headers go beyond the bytes read, the answer is unknown, so this returns `None`.
        if number(header, 4)? as u32 == INTERPRETER {
            let (offset, len) = (number(header.saturating_add(8), 8)? as usize, number(header.saturating_add(32), 8)? as usize);
            let interpreter = start.get(offset..offset.checked_add(len)?)?;
            let is_musl = interpreter.windows(8).any(|window| window == b"ld-musl-");
            return is_musl.then_some("a program of another C library, musl");
        }
    }
    Some("a static program")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_cannot_load_the_library_are_recognized() {
        let file = std::env::temp_dir().join(format!("dayfly-static-{}", std::process::id()));
        let fake = |kind: u8, interpreter: &[u8]| {
            let mut elf = vec![0; 160];
            elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
            (elf[32], elf[54], elf[56], elf[64]) = (64, 56, 1, kind);
            (elf[72], elf[96]) = (120, interpreter.len() as u8);
            elf[120..120 + interpreter.len()].copy_from_slice(interpreter);
            fs::write(&file, elf).unwrap();
            unreachable(file.as_os_str())
        };
        assert_eq!(fake(1, b""), Some("a static program"));
        assert_eq!(fake(3, b"/lib64/ld-linux-x86-64.so.2\0"), None);
        assert_eq!(fake(3, b"/lib/ld-musl-x86_64.so.1\0"), Some("a program of another C library, musl"));
        fs::write(&file, b"\x7fELF\x01\x01").unwrap();
        assert_eq!(unreachable(file.as_os_str()), Some("a 32-bit program"));
        fs::write(&file, "#!/bin/sh\n").unwrap();
        assert!(unreachable(file.as_os_str()).is_none() && unreachable(OsStr::new("no-such-program")).is_none());
        assert!(unreachable(OsStr::new("sh")).is_none());
        fs::remove_file(&file).unwrap();
    }
}
