//! `dayfly down`.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use dayfly_client::locate::{self, Location};
use dayfly_client::{ClientError, Session};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::DOWN_TIMEOUT;
use dayfly_meta::wire::control::{Command, Event};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::failure::say;
use crate::failure::{Failure, complain};
use crate::{launch, size};

/// A killed process that still lives after this hangs in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn run() -> Result<ExitCode, Failure> {
    let location = match locate::find() {
        Ok(location) => location,
        Err(ClientError::NoSession) => {
            launch::sweep(&[])?;
            say!("no session is running: nothing to do");
            return Ok(ExitCode::SUCCESS);
        }
        Err(ClientError::Unknown { name, .. }) => {
            launch::sweep(&[])?;
            say!("session {name} is not running: nothing to do");
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
    };
    let ended = end(&location)?;
    say!("session {} is down: {} nodes ended, {} freed", location.session, ended.nodes, size::show(ended.freed_bytes));
    Ok(ExitCode::SUCCESS)
}

/// What a `down` did.
pub(super) struct Ended {
    pub(super) nodes: usize,
    pub(super) freed_bytes: u64,
}

/// Ends a session on all its nodes here; a server that does not end in time is killed.
pub(super) fn end(location: &Location) -> Result<Ended, Failure> {
    let nodes = location.live_nodes();
    let ending: Vec<_> = nodes
        .iter()
        .map(|&node| {
            (
                node,
                thread::spawn({
                    let location = location.clone();
                    move || end_node(&location, node)
                }),
            )
        })
        .collect();
    let mut freed_bytes = 0;
    for (node, ending) in ending {
        match ending.join() {
            Ok(Ok(freed)) => freed_bytes += freed,
            Ok(Err(error)) => complain(format_args!("node {node}: {error}")),
            Err(_) => complain(format_args!("node {node}: ending it failed")),
        }
    }
    let deadline = Instant::now() + DOWN_TIMEOUT;
    let mut was_killed = false;
    while !location.live_nodes().is_empty() {
        if Instant::now() > deadline && !std::mem::replace(&mut was_killed, true) {
            kill_all(location);
        }
        if Instant::now() > deadline + KILL_TIMEOUT {
            let left = location
                .live_nodes()
                .iter()
                .map(|&node| format!("node {node} (process {})", location.pid(node).unwrap_or(0)))
                .collect::<Vec<_>>();
            return Err(Failure::new(format!(
                "{} cannot be ended even by SIGKILL: it waits for a file system, most likely",
                left.join(", ")
            )));
        }
        thread::sleep(Duration::from_millis(5));
    }
    launch::remove(location)?;
    Ok(Ended { nodes: nodes.len(), freed_bytes })
}

fn end_node(location: &Location, node: NodeId) -> Result<u64, ClientError> {
    let session = Session::attach_to(location, node)?;
    let mut freed = 0;
    session.control(Command::Down, &mut |event| {
        if let Event::Down { freed_bytes } = event {
            freed = freed_bytes;
        }
    })?;
    Ok(freed)
}

fn kill_all(location: &Location) {
    for node in location.live_nodes() {
        if let Some(pid) = location.pid(node) {
            complain(format_args!("node {node} does not end; it is killed"));
            // It may have ended just now.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}
