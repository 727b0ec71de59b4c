//! Code that the commands share: the session that they use, its view, and paths in the namespace.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;

use dayfly_client::locate::{self, SessionFolder};
use dayfly_client::{Session, View, ViewError};
use dayfly_launch::preflight::target_below;
use dayfly_meta::path::display;

use crate::failure::Failure;

/// Finds the session to use: the one that `DAYFLY_SESSION` names, otherwise the job's session,
/// otherwise the only session.
pub(crate) fn location() -> Result<SessionFolder, Failure> {
    Ok(locate::find(dayfly_launch::current_job().as_deref())?)
}

/// Opens a view of the namespace through this process's node.
pub(crate) fn view() -> Result<View, Failure> {
    Ok(View::new(Session::attach(&location()?)?))
}

/// Returns the given paths, or the whole namespace if there are none.
pub(crate) fn paths_or_all(view: &View, paths: Vec<OsString>) -> Vec<Vec<u8>> {
    if paths.is_empty() {
        return vec![view.session().prefix().to_vec()];
    }
    paths.iter().map(|path| path.as_bytes().to_vec()).collect()
}

/// Returns a target's path below the prefix, as the server expects it.
pub(crate) fn target(session: &Session, path: &OsStr) -> Result<Vec<u8>, Failure> {
    Ok(target_below(session.prefix(), path)?)
}

/// Formats an error with the path that it is about.
pub(crate) fn about(path: &[u8], error: &ViewError) -> String {
    format!("'{}': {error}", display(path))
}

/// Writes a name: escaped for a terminal, and as raw bytes for a program, as GNU `ls` does.
pub(crate) fn write_name(output: &mut impl Write, name: &[u8], is_terminal: bool) -> io::Result<()> {
    if is_terminal { write!(output, "{}", display(name)) } else { output.write_all(name) }
}
