//! Sends requests to servers on behalf of several commands.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use dayfly_client::locate::SessionFolder;
use dayfly_client::{ClientError, Session};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::status::Status;

use crate::failure::Failure;
use crate::namespace;

/// The status of all nodes, and the session that was asked for it.
type Found = Result<(Session, Status), Failure>;

/// Asks this process's server for the status of all nodes. If it stands still, asks the other servers on this machine, too.
pub(super) fn status() -> Found {
    let location = namespace::location()?;
    let own = location.my_node()?;
    let (sender, answers) = channel();
    ask(&location, own, &sender);
    if let Ok(found) = answers.recv_timeout(Deadlines::DEFAULT.heartbeat) {
        return found;
    }
    location.live_nodes().into_iter().filter(|node| *node != own).for_each(|node| ask(&location, node, &sender));
    drop(sender);
    first(answers)
}

/// Asks servers on this machine for the status of all nodes, all at once, because the server of a lost node may stand still. Returns
/// the first status that arrives.
pub(super) fn status_from_any(location: &SessionFolder, nodes: &[NodeId]) -> Found {
    let (sender, answers) = channel();
    nodes.iter().for_each(|&node| ask(location, node, &sender));
    drop(sender);
    first(answers)
}

/// Asks a server in the background. A thread that is still waiting ends with this process.
fn ask(location: &SessionFolder, node: NodeId, answers: &Sender<Found>) {
    let (location, answers) = (location.clone(), answers.clone());
    thread::spawn(move || {
        // Nobody waits for the later answers.
        let _ = answers.send(status_from(&location, node));
    });
}

/// Returns the first status, or if there is none, the first failure.
fn first(answers: Receiver<Found>) -> Found {
    let mut failure = None;
    for answer in answers {
        match answer {
            Err(error) => failure = failure.or(Some(error)),
            found => return found,
        }
    }
    Err(failure.unwrap_or_else(|| ClientError::NoSession.into()))
}

fn status_from(location: &SessionFolder, node: NodeId) -> Found {
    let session = Session::attach_briefly(location, node)?;
    let mut found = None;
    session.control(Command::Status, &mut |event| {
        if let Event::Status(status) = event {
            found = Some(status);
        }
    })?;
    Ok((session, found.ok_or_else(|| Failure::new("the server ended the connection without a status; try again"))?))
}
