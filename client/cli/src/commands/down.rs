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
/// The supervisor hears of the last server's end within this.
const LAST_SERVER_TIMEOUT: Duration = Duration::from_secs(2);

/// Who keeps the session, once it is told to end, ends within this.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn run() -> Result<ExitCode, Failure> {
    let clean = || launch::sweep_patiently(&locate::runtime_dir(), &[]);
    let location = match locate::find(launch::job().as_deref()) {
        Ok(location) => location,
        Err(ClientError::NoSession) => {
            clean()?;
            say!("no session is running: nothing to do");
            return Ok(ExitCode::SUCCESS);
        }
        Err(ClientError::Unknown { name, .. }) => {
            clean()?;
            say!("session {name} is not running: nothing to do");
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
    };
    let ended = end_servers(&location)?;
    end_supervisor(&location, ended.is_partial);
    launch::remove_soon(&location)?;
    say!("session {} is down: {} nodes ended, {} freed", location.session, ended.nodes, size::show(ended.freed_bytes));
    Ok(ExitCode::SUCCESS)
}

/// Waits for who keeps the session, if it is on this machine: once all servers have ended, it removes the session's folder. It is told
/// to only where servers could not be: of a `run`, that ends its command too.
fn end_supervisor(location: &Location, is_partial: bool) {
    let Some(pid) = location.supervisor().map(Pid::from_raw) else { return };
    let start = Instant::now();
    let mut was_told = false;
    let timeout = if is_partial { KEEPER_TIMEOUT } else { LAST_SERVER_TIMEOUT };
    // Signal 0 asks whether it is there.
    while location.folder.exists() && kill(pid, None).is_ok() && start.elapsed() < timeout {
        if is_partial && location.supervisor() == Some(pid.as_raw()) && !std::mem::replace(&mut was_told, true) {
            // It may have ended just now.
            let _ = kill(pid, Signal::SIGTERM);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// What a `down` did.
pub(super) struct Ended {
    pub(super) nodes: usize,
    pub(super) freed_bytes: u64,
    /// Some could not be told.
    pub(super) is_partial: bool,
}

/// Ends a session's servers; one of this machine that does not end in time is killed.
pub(super) fn end_servers(location: &Location) -> Result<Ended, Failure> {
    let here = location.live_nodes();
    let numbers: Vec<u16> = here.iter().map(|node| node.0).collect();
    let ending: Vec<_> = here
        .iter()
        .map(|&node| {
            // One of them tells the other machines' nodes.
            let but = (Some(&node) == here.first()).then(|| numbers.clone());
            (
                node,
                thread::spawn({
                    let location = location.clone();
                    move || end_node(&location, node, but)
                }),
            )
        })
        .collect();
    let (mut nodes, mut freed_bytes, mut is_partial) = (0, 0, false);
    for (node, ending) in ending {
        match ending.join() {
            Ok(Ok((ended, freed, untold))) => {
                nodes += usize::from(ended);
                freed_bytes += freed;
                is_partial |= !untold.is_empty();
                untold.iter().for_each(complain);
            }
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
    Ok(Ended { nodes, freed_bytes, is_partial })
}

fn end_node(location: &Location, node: NodeId, but: Option<Vec<u16>>) -> Result<(u16, u64, Vec<String>), ClientError> {
    let session = Session::attach_to(location, node)?;
    let mut ended = (0, 0, Vec::new());
    session.control(Command::Down { but }, &mut |event| {
        if let Event::Down { nodes, freed_bytes, untold } = event {
            ended = (nodes, freed_bytes, untold);
        }
    })?;
    Ok(ended)
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
