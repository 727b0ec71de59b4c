//! What the commands share: the session that is meant, its view, and paths.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;

use dayfly_client::locate::{self, Location};
use dayfly_client::{Session, View, ViewError};
use dayfly_meta::path::{display, normalize};

use crate::failure::Failure;
use crate::launch;

/// The session that is meant.
pub(crate) fn location() -> Result<Location, Failure> {
    Ok(locate::find(launch::job().as_deref())?)
}

/// The view of this process's node.
pub(crate) fn view() -> Result<View, Failure> {
    Ok(View::new(Session::attach(&location()?)?))
}

/// The paths given, or the whole namespace.
pub(crate) fn paths_or_all(view: &View, paths: Vec<OsString>) -> Vec<Vec<u8>> {
    if paths.is_empty() {
        return vec![view.session().prefix().to_vec()];
    }
    paths.iter().map(|path| path.as_bytes().to_vec()).collect()
}

/// A target below the prefix, as the server wants it.
pub(crate) fn target(session: &Session, path: &OsStr) -> Result<Vec<u8>, Failure> {
    target_below(session.prefix(), path)
}

/// The same, of a session that is not there yet.
pub(crate) fn target_below(prefix: &[u8], path: &OsStr) -> Result<Vec<u8>, Failure> {
    let prefix = prefix.strip_suffix(b"/").unwrap_or(prefix);
    let below = path.as_bytes().strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with(b"/"));
    let below = below.ok_or_else(|| {
        let (path, prefix) = (display(path.as_bytes()), display(prefix));
        Failure::usage(format!("'{path}' is not in the namespace; a target begins with {prefix}/"))
    })?;
    normalize(below).map_err(|reason| Failure::usage(format!("'{}' cannot be a target: {reason}", display(path.as_bytes()))))
}

/// A path in words, with what is wrong with it.
pub(crate) fn about(path: &[u8], error: &ViewError) -> String {
    format!("'{}': {error}", display(path))
}

/// Writes a name: bytes as they are for a program, escaped for a terminal, as GNU's `ls` does too.
pub(crate) fn write_name(output: &mut impl Write, name: &[u8], is_terminal: bool) -> io::Result<()> {
    if is_terminal { write!(output, "{}", display(name)) } else { output.write_all(name) }
}
