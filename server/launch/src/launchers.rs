//! The launchers: how each is detected, how it lists its nodes, and which command starts a server
//! on each of them.
//!
//! A launcher is data, one row of [`table`]. A new manager is a new row, and a row in the table of
//! `docs/OPERATIONS.md`.

mod table;

use std::collections::HashMap;

use crate::error::LaunchError;
use table::LAUNCHERS;

/// The value of `--launcher` that stands for whichever MPI is installed.
pub(crate) const MPIEXEC: &str = "mpiexec";

/// One way to start servers.
#[derive(Debug)]
pub(crate) struct Launcher {
    /// Value of `--launcher`.
    pub(crate) name: &'static str,
    /// A variable that is set within the manager's jobs. `None` if the launcher is used only when
    /// the user names it.
    detected_by: Option<&'static str>,
    /// The variables that identify the job: its number, and its index in an array if array elements
    /// share a number.
    job_variables: &'static [&'static str],
    pub(crate) node_list: NodeList,
    pub(crate) start: Start,
    pub(crate) input: Input,
    /// Variables that are removed from the launcher's environment because they would narrow what
    /// the servers get.
    pub(crate) removed_variables: &'static [&'static str],
    /// Whether the servers run as a job step. Slurm signals job steps at the end of the job, and on
    /// request some time before.
    pub(crate) is_job_step: bool,
    /// The variable that holds a server's node name as the manager lists it.
    pub(crate) node_name_variable: Option<&'static str>,
    /// What the user can do if the launcher's command fails.
    pub(crate) advice: &'static str,
}

/// Where a launcher's list of nodes comes from.
#[derive(Debug)]
pub(crate) enum NodeList {
    /// A variable holds the list.
    Variable(&'static str),
    /// A variable names a file that holds the list.
    File(&'static str),
    /// A command prints the list.
    Output(&'static [&'static str]),
    /// The user gives the list; otherwise it comes from the manager in whose job this process runs.
    Given,
}

/// How servers are started. In a command's words, `{count}` and `{hosts}` stand for all nodes,
/// `{host}` for one, and a lone `{args}` for the words of `--launcher-args`. The command line of
/// the server follows.
#[derive(Debug)]
pub(crate) enum Start {
    /// One command starts all servers.
    Once(&'static [&'static str]),
    /// One command per node. A shell on the node parses the command's last words. With many nodes,
    /// the first servers start the others.
    EachByShell(&'static [&'static str]),
    /// One process per server on this machine.
    Local,
    /// The user starts the servers.
    Manual,
}

/// How a server gets its invitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// On standard input.
    Standard,
    /// In the key file, for launchers that do not pass standard input to every server.
    File,
}

/// Looks up an environment variable; tests pass their own.
pub(crate) type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Launcher {
    /// Returns whether all servers run on this machine. All code that treats local sessions
    /// differently calls this.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.start, Start::Local)
    }

    /// Returns whether the user starts the servers.
    pub(crate) fn is_manual(&self) -> bool {
        matches!(self.start, Start::Manual)
    }

    /// Returns the manager's name for the job, if this process runs in one of its jobs.
    pub(crate) fn job_name(&self, environment: Environment) -> Option<String> {
        let numbers: Vec<String> = self.job_variables.iter().filter_map(|name| environment(name)).collect();
        (!numbers.is_empty()).then(|| format!("{}:{}", self.name, numbers.join(".")))
    }
}

/// Returns the valid values of `--launcher`.
pub fn launcher_names() -> Vec<&'static str> {
    LAUNCHERS.iter().map(|launcher| launcher.name).chain([MPIEXEC]).collect()
}

/// Returns the launcher with this name.
///
/// # Errors
/// Fails if no launcher has this name; the error lists the launchers.
pub(crate) fn find(name: &str) -> Result<&'static Launcher, LaunchError> {
    let found = LAUNCHERS.iter().find(|launcher| launcher.name == name);
    found.ok_or_else(|| LaunchError::UnknownLauncher { name: name.to_owned(), known: launcher_names() })
}

/// Returns the launcher of the workload manager in whose job this process runs.
pub(crate) fn detected(environment: Environment) -> Option<&'static Launcher> {
    let is_set = |name: &str| environment(name).is_some_and(|value| !value.is_empty());
    LAUNCHERS.iter().find(|launcher| launcher.detected_by.is_some_and(is_set))
}

/// Fills in the placeholders of a command's words.
pub(crate) fn fill(words: &[&str], hosts: &[String], arguments: &[String]) -> Vec<String> {
    let values = HashMap::from([
        ("{count}", hosts.len().to_string()),
        ("{hosts}", hosts.join(",")),
        ("{hosts by spaces}", hosts.join(" ")),
        ("{host}", hosts.first().cloned().unwrap_or_default()),
    ]);
    let mut filled = Vec::new();
    for word in words {
        if *word == "{args}" {
            filled.extend_from_slice(arguments);
            continue;
        }
        filled.push(values.iter().fold((*word).to_owned(), |word, (name, value)| word.replace(name, value)));
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_of_the_table_fills_in_completely() {
        for launcher in &LAUNCHERS {
            let (Start::Once(words) | Start::EachByShell(words)) = launcher.start else { continue };
            let filled = fill(words, &["a".to_owned(), "b".to_owned()], &["-x".to_owned()]);
            assert!(filled.iter().all(|word| !word.contains('{')), "{filled:?}");
            assert!(filled.contains(&"-x".to_owned()), "{filled:?}");
        }
        let Start::EachByShell(words) = find("ssh").unwrap().start else { panic!("ssh starts one server per command") };
        assert_eq!(fill(words, &["n1".to_owned()], &[]).join(" "), "ssh -o BatchMode=yes -o ConnectTimeout=10 n1");
    }

    #[test]
    fn an_unknown_launcher_is_an_error_that_lists_the_known_ones() {
        let error = find("none").unwrap_err().to_string();
        assert!(error.contains("no launcher 'none'") && error.contains("slurm, flux") && error.contains("mpiexec"), "{error}");
    }
}
