//! `dayfly down`: ends a session on all nodes.

use std::io;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use dayfly_client::locate::{self, SessionFolder};
use dayfly_client::{ClientError, Session};
use dayfly_launch::cleanup;
use dayfly_launch::units::counted;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::DOWN_TIMEOUT;
use dayfly_meta::path::display;
use dayfly_meta::wire::control::{Command, Event};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::failure::{Failure, complain, print_line};
use crate::process::is_ancestor;
use crate::size;

/// A process that is still alive this long after SIGKILL is stuck in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the supervisor may take to notice the end of the last server, before it is told to end.
const LAST_SERVER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server may take to let this process attach. A new server lets nobody attach before it is a member, which it never will
/// be if the others have ended, so it gets a SIGTERM. One that stands still is killed after [`DOWN_TIMEOUT`].
const NEW_SERVER_PATIENCE: Duration = Duration::from_secs(3);
/// How long to wait for an answer at a time. Such waits are counted, because a job that is suspended has no time to answer.
const ANSWER_POLL: Duration = Duration::from_millis(100);
/// How long the supervisor may take to end after SIGTERM. That of `run` gives its command 30 s.
const SUPERVISOR_TIMEOUT: Duration = Duration::from_secs(35);

pub(super) fn run() -> Result<ExitCode, Failure> {
    let clean = || cleanup::sweep_patiently(&locate::runtime_dir(), &[]);
    let location = match locate::find(dayfly_launch::current_job().as_deref()) {
        Ok(location) => location,
        Err(ClientError::NoSession) => {
            clean()?;
            print_line!("no session is running: nothing to do");
            return Ok(ExitCode::SUCCESS);
        }
        Err(ClientError::Unknown { name, .. }) => {
            clean()?;
            print_line!("you have no session '{}' on this machine: nothing to do", display(name.as_bytes()));
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) => return Err(error.into()),
    };
    let ending = location.begin_ending();
    let ended = end_servers(&location)?;
    // Held until this process exits. Without it, the supervisor takes servers that are killed for lost.
    let ending = ending.and_then(|mut ending| ending.finish().map(|()| ending));
    if let Err(error) = &ending {
        tracing::info!(%error, folder = %location.folder.display(), "could not tell the supervisor that the session is being ended");
    }
    match location.supervisor() {
        // It waits for the command that has called this one, and removes the session's folder afterward.
        Some(pid) if is_ancestor(pid) => {}
        _ => {
            end_supervisor(&location, ended.is_partial);
            let is_gone = cleanup::remove_soon(&location)?;
            if let Some(pid) = location.supervisor().filter(|_| !is_gone) {
                return Err(Failure::new(format!(
                    "all servers of session {} have ended, but its supervisor (process {pid}) has not, so '{}' is still there; end that \
                     process, and then call 'dayfly clean'",
                    location.session,
                    location.folder.display(),
                )));
            }
        }
    }
    let nodes = counted(ended.nodes as u64, "node");
    print_line!("session {} is down: {nodes} ended, {} freed", location.session, size::show(ended.freed_bytes));
    Ok(ExitCode::SUCCESS)
}

/// Waits for the supervisor, if it is on this machine. The supervisor removes the session's folder
/// once all servers have ended.
///
/// If some servers could not be asked to end, or the supervisor does not notice that all have ended,
/// it gets a SIGTERM. The supervisor of `run` then ends its command too.
fn end_supervisor(location: &SessionFolder, is_partial: bool) {
    let Some(pid) = location.supervisor().map(Pid::from_raw) else { return };
    let start = Instant::now();
    let (mut was_signaled, mut was_mentioned) = (false, false);
    // Nothing listens on a node whose server has ended. A new one may be about to take its place, which only the supervisor knows.
    let patience = if is_partial { Duration::ZERO } else { LAST_SERVER_TIMEOUT };
    // Signal 0 only checks whether the process exists.
    while location.folder.exists() && kill(pid, None).is_ok() && start.elapsed() < patience + SUPERVISOR_TIMEOUT {
        let is_due = start.elapsed() >= patience && location.supervisor() == Some(pid.as_raw());
        if is_due && !std::mem::replace(&mut was_signaled, true) {
            // The supervisor may have just ended.
            let _ = kill(pid, Signal::SIGTERM);
        }
        if start.elapsed() >= 2 * LAST_SERVER_TIMEOUT && !std::mem::replace(&mut was_mentioned, true) {
            complain(format_args!("waiting for the session's supervisor, process {pid}, to end"));
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// The result of ending a session's servers.
pub(super) struct EndedServers {
    pub(super) nodes: usize,
    pub(super) freed_bytes: u64,
    /// Whether some servers could not be asked to end.
    pub(super) is_partial: bool,
}

/// Ends a session's servers on all nodes. A server on this machine that does not end in time is
/// killed.
pub(super) fn end_servers(location: &SessionFolder) -> Result<EndedServers, Failure> {
    let local = location.live_nodes();
    let numbers: Vec<u16> = local.iter().map(|node| node.0).collect();
    let (sender, answers) = mpsc::channel();
    for &node in &local {
        // The first server also ends the nodes on other machines.
        let but = (Some(&node) == local.first()).then(|| numbers.clone());
        let (location, sender) = (location.clone(), sender.clone());
        thread::spawn(move || {
            // Sending fails only if this process is about to exit.
            let attached = || drop(sender.send((node, None)));
            let _ = sender.send((node, Some(end_node(&location, node, but, attached))));
        });
    }
    drop(sender);
    let (mut nodes, mut freed_bytes, mut is_partial) = (0, 0, false);
    let (mut silent, mut waited) = (local, Duration::ZERO);
    let mut terminated = Vec::new();
    loop {
        let (node, ended) = match answers.recv_timeout(ANSWER_POLL) {
            Ok(answer) => answer,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                waited += ANSWER_POLL;
                if waited == NEW_SERVER_PATIENCE {
                    terminated.clone_from(&silent);
                    terminated.retain(|&node| signal_server(location, node, Signal::SIGTERM));
                }
                if waited == DOWN_TIMEOUT {
                    terminated.clear();
                    nodes += kill_all(location, &silent);
                }
                continue;
            }
            // All threads have sent their last answer.
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        };
        silent.retain(|other| *other != node);
        let Some(ended) = ended else { continue };
        match ended {
            Ok((ended, freed, unreached)) => {
                nodes += usize::from(ended);
                freed_bytes += freed;
                is_partial |= !unreached.is_empty();
                unreached.iter().for_each(complain);
            }
            // The signal has ended this server, another command is already ending it, or it crashed. The code below handles all
            // cases.
            Err(ClientError::NodeServer { error, .. }) if is_closed(&error) => nodes += usize::from(terminated.contains(&node)),
            Err(error) => {
                complain(format_args!(
                    "{error}; the process of node {node} is killed unless it ends in {} s",
                    DOWN_TIMEOUT.as_secs()
                ));
            }
        }
    }
    nodes += wait_or_kill(location)?;
    Ok(EndedServers { nodes, freed_bytes, is_partial })
}

/// Returns whether an error means that the server has closed its socket.
fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset | NotFound | UnexpectedEof)
}

/// Waits until all servers on this machine have ended, and kills those that do not. Returns how many it has killed.
fn wait_or_kill(location: &SessionFolder) -> Result<usize, Failure> {
    let deadline = Instant::now() + DOWN_TIMEOUT;
    let mut killed = None;
    while !location.live_nodes().is_empty() {
        if Instant::now() > deadline && killed.is_none() {
            killed = Some(kill_all(location, &location.live_nodes()));
        }
        if Instant::now() > deadline + KILL_TIMEOUT {
            let left = location
                .live_nodes()
                .iter()
                .map(|&node| format!("node {node} (process {})", location.pid(node).unwrap_or(0)))
                .collect::<Vec<_>>();
            return Err(Failure::new(format!(
                "{} did not end even after SIGKILL; most likely the file system of a data dir does not respond",
                left.join(", ")
            )));
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(killed.unwrap_or(0))
}

/// Asks one server to end. If `but` is given, the server also ends all other nodes except those in
/// `but`. Calls `attached` once the server has taken notice of this process. Returns how many nodes
/// ended, the bytes that they freed, and a message for each node that could not be reached.
fn end_node(
    location: &SessionFolder,
    node: NodeId,
    but: Option<Vec<u16>>,
    attached: impl FnOnce(),
) -> Result<(u16, u64, Vec<String>), ClientError> {
    let session = Session::attach_briefly(location, node)?;
    attached();
    let mut ended = (0, 0, Vec::new());
    let asked = session.control(Command::Down { except: but }, &mut |event| {
        if let Event::Down { nodes, freed_bytes, unreached: untold } = event {
            ended = (nodes, freed_bytes, untold);
        }
    });
    asked.map_err(|error| error.of_node(node))?;
    Ok(ended)
}

/// Kills servers on this machine. Returns how many of them there were.
fn kill_all(location: &SessionFolder, nodes: &[NodeId]) -> usize {
    let mut killed = 0;
    for &node in nodes {
        if let Some(pid) = location.pid(node) {
            complain(format_args!("node {node} did not end in time; killing process {pid}"));
            killed += usize::from(signal_server(location, node, Signal::SIGKILL));
        }
    }
    killed
}

/// Sends a signal to a server on this machine. Returns `false` if it has ended.
fn signal_server(location: &SessionFolder, node: NodeId, signal: Signal) -> bool {
    location.pid(node).is_some_and(|pid| kill(Pid::from_raw(pid), signal).is_ok())
}
