//! `dayfly exec` and `dayfly env` make a process part of a session.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use dayfly_client::Session;
use dayfly_client::locate::{NODE_VARIABLE, PREFIX_VARIABLE, RUNTIME_DIR_VARIABLE, SESSION_VARIABLE, SessionFolder};
use dayfly_meta::id::NodeId;

use crate::args::{EnvArguments, ExecArguments};
use crate::failure::{Failure, NOT_EXECUTABLE, NOT_FOUND, NOT_STARTED, complain, print_line};
use crate::{namespace, preload};

pub(super) fn run(arguments: ExecArguments) -> Result<ExitCode, Failure> {
    let own = |failure: Failure| failure.with_status(NOT_STARTED);
    let location = namespace::location().map_err(own)?;
    let variables = variables(&location, arguments.node).map_err(own)?;
    let (program, rest) = split(&arguments.command, &variables)?;
    let error = Command::new(&program).args(rest).envs(variables).exec();
    Err(not_started(&program, &error))
}

pub(super) fn print(arguments: EnvArguments) -> Result<ExitCode, Failure> {
    for (name, value) in variables(&namespace::location()?, arguments.node)? {
        // Within single quotes a shell takes everything literally except a single quote.
        print_line!("export {name}='{}'", value.to_string_lossy().replace('\'', r"'\''"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the program to start and its arguments. A program in the namespace is started through
/// the system's `env`, because this process does not see the namespace.
pub(super) fn split(command: &[OsString], variables: &[(String, OsString)]) -> Result<(OsString, Vec<OsString>), Failure> {
    let (program, rest) = command.split_first().ok_or_else(|| Failure::usage("no command was given"))?;
    let prefix = variables.iter().find(|(name, _)| name == PREFIX_VARIABLE).map(|(_, prefix)| Path::new(prefix));
    if prefix.is_some_and(|prefix| is_in_namespace(program, prefix)) {
        return Ok(("env".into(), command.to_vec()));
    }
    if let Some(reason) = preload::unreachable(program) {
        let program = Path::new(program).display();
        complain(format_args!("'{program}' is {reason}: the preload library cannot reach it, so it will not see the namespace"));
    }
    Ok((program.clone(), rest.to_vec()))
}

/// Returns whether a program is in the namespace.
pub(super) fn is_in_namespace(program: &OsStr, prefix: &Path) -> bool {
    Path::new(program).starts_with(prefix)
}

/// Describes why CMD could not be started, with the exit status that shells use.
pub(super) fn not_started(program: &OsStr, error: &io::Error) -> Failure {
    let is_absent = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory);
    let status = if is_absent { NOT_FOUND } else { NOT_EXECUTABLE };
    Failure::new(format!("cannot run '{}': {error}", program.display())).with_status(status)
}

/// Returns the variables that make a process part of a session: the preload library, what the
/// library needs to find the session, and a PATH that begins with this program's folder. All except
/// PATH are repeated under the names that Apptainer passes into containers.
pub(super) fn variables(location: &SessionFolder, node: Option<u16>) -> Result<Vec<(String, OsString)>, Failure> {
    let node = match node {
        None => location.my_node()?,
        Some(node) => Some(NodeId(node)).filter(|node| location.live_nodes().contains(node)).ok_or_else(|| {
            let session = location.session;
            Failure::usage(format!(
                "session {session} has no live node {node} on this machine; 'dayfly status' shows whether it is lost"
            ))
        })?,
    };
    let prefix = Session::attach_briefly(location, node)?.prefix().to_vec();
    let preload = preload::library()?;
    // `DAYFLY_NODE` is set only if this machine has several nodes, because CMD may start processes
    // on other machines, which have other nodes.
    let is_one_of_many = location.live_nodes().len() > 1;
    let mut variables: Vec<(&str, OsString)> = vec![
        (SESSION_VARIABLE, location.session.to_string().into()),
        (PREFIX_VARIABLE, OsString::from_vec(prefix)),
        (preload::VARIABLE, preload.value()),
    ];
    if is_one_of_many {
        variables.push((NODE_VARIABLE, node.to_string().into()));
    }
    if let Some(folder) = env::var_os(RUNTIME_DIR_VARIABLE).filter(|folder| !folder.is_empty()) {
        variables.push((RUNTIME_DIR_VARIABLE, std::path::absolute(folder)?.into()));
    }
    let inside = |(name, value): &(&str, OsString)| {
        // A container has only the files that are bound into it, so a path with `$PLATFORM` may not exist there. Also, the
        // container's shell may expand the `$`, which is meant for the loader.
        let value = if *name == preload::VARIABLE { preload.plain_value() } else { value.clone() };
        CONTAINERS.map(|program| (format!("{program}ENV_{name}"), value.clone()))
    };
    let for_containers: Vec<_> = variables.iter().flat_map(inside).chain(binds(&[&preload.library, &location.folder])).collect();
    variables.push(("PATH", search_path()?));
    Ok(variables.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(for_containers).collect())
}

/// Returns the PATH for finding CMD. It begins with this program's folder, and continues with the
/// PATH of this process or, if PATH is not set, with the folders that the C library searches.
pub(super) fn search_path() -> io::Result<OsString> {
    let mut path = env::current_exe()?.parent().map_or_else(OsString::new, |folder| folder.as_os_str().to_owned());
    let rest = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    if !rest.is_empty() {
        path.push(":");
        path.push(rest);
    }
    Ok(path)
}

/// Both names of the program that is now called Apptainer.
const CONTAINERS: [&str; 2] = ["APPTAINER", "SINGULARITY"];

/// Returns the variables that make paths visible in containers under the same names, in addition to
/// the paths that the user asked for.
fn binds(paths: &[&Path]) -> impl Iterator<Item = (String, OsString)> {
    let ours: Vec<&OsStr> = paths.iter().map(|path| path.as_os_str()).collect();
    let ours = ours.join(OsStr::new(","));
    CONTAINERS.into_iter().map(move |program| {
        let name = format!("{program}_BIND");
        let before = env::var_os(&name).filter(|before| !before.is_empty());
        let value = before.map_or_else(|| ours.clone(), |before| [before, ours.clone()].join(OsStr::new(",")));
        (name, value)
    })
}
