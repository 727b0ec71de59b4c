//! The session that a process was started in, as its environment names it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use dayfly_meta::id::{NodeId, SessionId};

use super::names::names_in;
use super::{NODE_VARIABLE, RUNTIME_DIR_VARIABLE, SESSION_VARIABLE, SessionFolder, runtime_base_in, runtime_dir_in};
use crate::ClientError;
use crate::privacy::check_private;

/// What the environment says about the session. A process that may need it in a signal handler reads it beforehand, because the
/// handler may have interrupted a change of the environment.
pub struct Environment {
    /// The session's id; empty if the variable is missing.
    session: OsString,
    /// The node; `None` if the variable is missing or is not a number.
    node: Option<NodeId>,
    /// The folder that contains one folder for each user.
    base: PathBuf,
}

impl Environment {
    /// Reads the variables of the environment as they are now. `variable` returns a variable's value.
    pub fn read(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let node = variable(NODE_VARIABLE).and_then(|node| node.to_str()?.parse().ok()).map(NodeId);
        let session = variable(SESSION_VARIABLE).unwrap_or_default();
        Self { session, node, base: runtime_base_in(variable(RUNTIME_DIR_VARIABLE)) }
    }

    /// Returns the session's id as the environment has it; empty if the environment names no session.
    pub fn session(&self) -> &OsStr {
        &self.session
    }

    /// Returns the folder of the session, without checking that the session is alive. Meant for processes that were started as
    /// part of the session.
    ///
    /// # Errors
    ///
    /// If the environment names no session, or its folder does not exist or is not private.
    pub fn folder(&self) -> Result<SessionFolder, ClientError> {
        let name = self.session.to_str().unwrap_or_default();
        let unknown = || ClientError::Unknown { name: name.to_owned(), running: Vec::new() };
        let session: SessionId = name.parse().map_err(|_| unknown())?;
        // Only the session's own folder must be private. In a container, the folder above it may have been created as a mount
        // point.
        let folder = runtime_dir_in(&self.base).join(name);
        if folder.is_dir() {
            check_private(&folder)?;
            return Ok(SessionFolder { session, folder });
        }
        // In a user namespace this process may have another user id than the one in the folder's name.
        let others = names_in(&self.base).unwrap_or_default().into_iter();
        let found = others
            .filter(|other| other.as_bytes().starts_with(b"dayfly-"))
            .map(|other| self.base.join(other).join(name))
            .find(|folder| check_private(folder).is_ok());
        found.map(|folder| SessionFolder { session, folder }).ok_or_else(unknown)
    }

    /// Returns the node that the environment names, without checking that it is alive. If the environment names none, returns the
    /// session's lowest live node on this machine.
    ///
    /// # Errors
    ///
    /// If none is named and none is alive.
    pub fn node(&self, session: &SessionFolder) -> Result<NodeId, ClientError> {
        self.node.map_or_else(|| session.my_node(), Ok)
    }
}
