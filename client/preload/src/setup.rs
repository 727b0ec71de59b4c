//! Reads the environment, which names the session, once, before the program's `main`. It does not attach to the session.
//!
//! Everything that this library wants to know from the environment later is read here, because a signal handler may have
//! interrupted a change of the environment.
//!
//! Without a session in the environment nothing is set up, and every hook passes every call on.

use std::ffi::{CString, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::OnceLock;

use dayfly_client::locate::{Environment, PREFIX_VARIABLE};

use crate::environment;

/// What the environment said when the process began.
pub(crate) struct Setup {
    /// The namespace's prefix, without a slash at its end.
    pub(crate) prefix: CString,
    /// The prefix's last name, which every path into the namespace contains.
    pub(crate) last: CString,
    /// `st_dev` of every file in the namespace.
    pub(crate) device: u64,
    /// The session and this process's node.
    pub(crate) environment: Environment,
    /// The folder for temporary files.
    pub(crate) temporary: PathBuf,
}

static SETUP: OnceLock<Setup> = OnceLock::new();

/// Reads the environment. Returns whether this process is part of a session.
pub(crate) fn read_environment() -> bool {
    read().is_some_and(|setup| SETUP.set(setup).is_ok())
}

fn read() -> Option<Setup> {
    let prefix = variable(PREFIX_VARIABLE)?.into_vec();
    let environment = Environment::read(environment::variable);
    let session = environment.session().as_bytes();
    if session.is_empty() {
        return None;
    }
    let prefix = prefix.strip_suffix(b"/").unwrap_or(&prefix);
    let slash = prefix.iter().rposition(|&byte| byte == b'/').filter(|_| prefix.starts_with(b"/"))?;
    // Major number 0, as the kernel gives to file systems without a block device.
    let device = session.iter().fold(0_u64, |hash, &byte| hash.wrapping_mul(31) + u64::from(byte));
    Some(Setup {
        prefix: CString::new(prefix).ok()?,
        last: CString::new(&prefix[slash + 1..]).ok()?,
        device: libc::makedev(0, 0x8_0000 | (device as u32 & 0x7_ffff)),
        environment,
        temporary: variable("TMPDIR").map_or_else(|| "/tmp".into(), PathBuf::from),
    })
}

/// Returns a variable of the environment, unless it is empty.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    environment::variable(name).filter(|value| !value.is_empty())
}

/// Returns what the environment said; `None` if this process is not part of a session.
#[inline]
pub(crate) fn setup() -> Option<&'static Setup> {
    SETUP.get()
}
