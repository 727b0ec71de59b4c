//! `dayfly exec` and `dayfly env`: making a process part of the session.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use dayfly_client::locate::{Location, NODE_VARIABLE, RUNTIME_DIR_VARIABLE, SESSION_VARIABLE};
use dayfly_meta::id::NodeId;

use crate::args::{Env, Exec};
use crate::failure::say;
use crate::failure::{Failure, NOT_EXECUTABLE, NOT_FOUND, NOT_STARTED};
use crate::namespace;

pub(super) fn run(arguments: Exec) -> Result<ExitCode, Failure> {
    let outside = |failure: Failure| failure.with_status(NOT_STARTED);
    let location = namespace::location().map_err(outside)?;
    let variables = variables(&location, arguments.node).map_err(outside)?;
    let (program, rest) = split(&arguments.command)?;
    let error = Command::new(program).args(rest).envs(variables).exec();
    Err(not_started(program, &error))
}

pub(super) fn print(arguments: Env) -> Result<ExitCode, Failure> {
    for (name, value) in variables(&namespace::location()?, arguments.node)? {
        // Single quotes keep everything but themselves.
        say!("export {name}='{}'", value.to_string_lossy().replace('\'', r"'\''"));
    }
    Ok(ExitCode::SUCCESS)
}

/// The program and its arguments.
pub(super) fn split(command: &[OsString]) -> Result<(&OsStr, &[OsString]), Failure> {
    let (program, rest) = command.split_first().ok_or_else(|| Failure::usage("no command was given"))?;
    Ok((program, rest))
}

/// Why CMD could not be started, with the exit status that shells give.
pub(super) fn not_started(program: &OsStr, error: &io::Error) -> Failure {
    let status = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
    Failure::new(format!("cannot run '{}': {error}", program.display())).with_status(status)
}

/// What makes a process part of the session, with our own folder first in its PATH.
pub(super) fn variables(location: &Location, node: Option<u16>) -> Result<Vec<(&'static str, OsString)>, Failure> {
    let node = match node {
        None => location.my_node()?,
        Some(node) => Some(NodeId(node))
            .filter(|node| location.live_nodes().contains(node))
            .ok_or_else(|| Failure::usage(format!("session {} has no live node {node} on this machine", location.session)))?,
    };
    let mut path = env::current_exe()?.parent().map_or_else(OsString::new, |folder| folder.as_os_str().to_owned());
    if let Some(rest) = env::var_os("PATH").filter(|rest| !rest.is_empty()) {
        path.push(OsStr::from_bytes(b":"));
        path.push(rest);
    }
    let mut variables =
        vec![(SESSION_VARIABLE, location.session.to_string().into()), (NODE_VARIABLE, node.to_string().into()), ("PATH", path)];
    if let Some(folder) = env::var_os(RUNTIME_DIR_VARIABLE) {
        variables.push((RUNTIME_DIR_VARIABLE, folder));
    }
    Ok(variables)
}
