//! Sends requests to this process's server on behalf of several commands.

use dayfly_client::Session;
use dayfly_client::locate::SessionFolder;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::status::Status;

use crate::failure::Failure;
use crate::namespace;

/// Asks this process's server for the status of all nodes.
pub(super) fn status() -> Result<(Session, Status), Failure> {
    let location = namespace::location()?;
    status_from(&location, location.my_node()?)
}

/// Asks the server of a node on this machine for the status of all nodes.
pub(super) fn status_from(location: &SessionFolder, node: NodeId) -> Result<(Session, Status), Failure> {
    let session = Session::attach_to(location, node)?;
    let mut found = None;
    session.control(Command::Status, &mut |event| {
        if let Event::Status(status) = event {
            found = Some(status);
        }
    })?;
    Ok((session, found.ok_or_else(|| Failure::new("the server ended the connection without a status; try again"))?))
}
