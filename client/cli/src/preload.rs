//! The library that shows the namespace to unchanged programs: where it is, and whether it can be used. The loader passes over
//! one that is absent or broken with at most a warning, and the program would see no namespace; so it is tried first.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
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
    let reason = String::from_utf8_lossy(&output.stderr);
    let path = library.display();
    Err(Failure::new(format!("'{path}' cannot be loaded, without which CMD would not see the namespace: {}", reason.trim())))
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
