//! Decides where a session's servers run: with which launcher, on which hosts, and as part of which
//! job.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dayfly_meta::limits::NODES_MAX;

use crate::error::LaunchError;
use crate::hosts::{expand_host_list, hosts_of_file};
use crate::launchers::{self, Environment, Launcher, MPIEXEC, NodeList};
use crate::node_names::{is_same_host, own_host_name};
use crate::options::LaunchOptions;

/// How long a manager's command may take to answer a question.
const QUERY_TIMEOUT: Duration = Duration::from_secs(20);

/// Where the servers of a session will run.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) launcher: &'static Launcher,
    /// The hosts, in the order of the list. With a manual launcher all names are empty, because
    /// only their number is known.
    pub(crate) hosts: Vec<String>,
    /// The manager's name of the job that the session is part of.
    pub(crate) job: Option<String>,
    /// Whether the user named no nodes, and no manager was detected.
    pub(crate) is_fallback: bool,
}

impl Allocation {
    /// Returns whether node 0 will run on this machine, so that this process sees the same files as
    /// node 0.
    pub(crate) fn has_node_0_here(&self) -> bool {
        let own = own_host_name();
        self.launcher.is_local() || self.hosts.iter().any(|host| is_same_host(host, &own))
    }
}

/// Returns the manager's name of the job that this process is part of, such as `slurm:4711`.
pub fn current_job() -> Option<String> {
    let environment = |name: &str| env::var(name).ok();
    launchers::detected(&environment)?.job_name(&environment)
}

/// Chooses the launcher and the hosts from the options and the environment.
pub(crate) fn choose(options: &LaunchOptions) -> Result<Allocation, LaunchError> {
    choose_in(options, &|name| env::var(name).ok())
}

fn choose_in(options: &LaunchOptions, environment: Environment) -> Result<Allocation, LaunchError> {
    let manager = launchers::detected(environment);
    let given = given_hosts(options)?;
    let launcher = match (&options.launcher, options.local, &given) {
        (Some(name), _, _) if name == MPIEXEC => installed_mpi()?,
        (Some(name), _, _) => launchers::find(name)?,
        (None, Some(_), _) => launchers::find("local")?,
        (None, None, Some(_)) => launchers::find("ssh")?,
        (None, None, None) => match manager {
            Some(manager) => manager,
            None => launchers::find("local")?,
        },
    };
    if options.local.is_some() && !launcher.is_local() {
        return Err(LaunchError::LocalWithLauncher { launcher: launcher.name });
    }
    let hosts: Vec<String> = if launcher.is_local() {
        if given.is_some() {
            return Err(LaunchError::LocalWithHosts);
        }
        (0..options.local.unwrap_or(1)).map(|node| node.to_string()).collect()
    } else if launcher.is_manual() {
        let nodes = options.nodes.ok_or(LaunchError::ManualNeedsNodes)?;
        (0..nodes).map(|_| String::new()).collect()
    } else {
        match given {
            Some(hosts) => hosts,
            None => listed_by_manager(launcher, manager, environment)?,
        }
    };
    if let Some(wanted) = options.min_nodes.filter(|&wanted| usize::from(wanted) > hosts.len()) {
        return Err(LaunchError::MinNodes { wanted, nodes: hosts.len() });
    }
    if hosts.is_empty() || hosts.len() > NODES_MAX {
        return Err(LaunchError::NodeCount { nodes: hosts.len() });
    }
    let is_fallback = launcher.is_local() && options.local.is_none() && options.launcher.is_none();
    let job = manager.and_then(|manager| manager.job_name(environment));
    Ok(Allocation { launcher, hosts, job, is_fallback })
}

/// Returns the hosts that the user named, if any.
fn given_hosts(options: &LaunchOptions) -> Result<Option<Vec<String>>, LaunchError> {
    let listed = match (&options.hosts[..], &options.hostfile) {
        ([], None) => return Ok(None),
        ([], Some(path)) => {
            let content = fs::read_to_string(path);
            hosts_of_file(&content.map_err(|source| LaunchError::Hostfile { path: path.clone(), source })?)?
        }
        (given, _) => expand_host_list(&given.join(","))?,
    };
    match listed.iter().enumerate().find(|(at, host)| listed[..*at].contains(host)) {
        Some((_, twice)) => Err(LaunchError::DuplicateHost { host: twice.clone() }),
        None => Ok(Some(listed)),
    }
}

/// Returns the hosts that a manager lists: the manager that the launcher belongs to, or the one in
/// whose job this process runs.
fn listed_by_manager(
    launcher: &'static Launcher,
    manager: Option<&'static Launcher>,
    environment: Environment,
) -> Result<Vec<String>, LaunchError> {
    let lister = if matches!(launcher.node_list, NodeList::Given) { manager } else { Some(launcher) };
    let lister = lister.ok_or(LaunchError::NoHosts { launcher: launcher.name })?;
    let value = |variable: &'static str| {
        let value = environment(variable).filter(|value| !value.is_empty());
        value.ok_or(LaunchError::NoJobVariable { variable, manager: lister.name })
    };
    match lister.node_list {
        NodeList::Variable(name) => Ok(expand_host_list(&value(name)?)?),
        NodeList::File(variable) => {
            let path = PathBuf::from(value(variable)?);
            let content = fs::read_to_string(&path);
            Ok(hosts_of_file(&content.map_err(|source| LaunchError::ManagerList { path, variable, source })?)?)
        }
        NodeList::Output(command) => Ok(expand_host_list(output_of(command)?.trim())?),
        NodeList::Given => Ok(Vec::new()),
    }
}

/// Runs a command and returns its standard output, provided that it finishes in time.
fn output_of(command: &[&str]) -> Result<String, LaunchError> {
    let words = command.join(" ");
    let failed = |source| LaunchError::Command { command: words.clone(), source };
    let started =
        Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = started.map_err(failed)?;
    let deadline = Instant::now() + QUERY_TIMEOUT;
    // The output is a few lines, which fit in the pipe, so nothing has to read them in the
    // meantime.
    while child.try_wait().map_err(failed)?.is_none() {
        if Instant::now() > deadline {
            // The command may have just finished.
            let _ = child.kill();
            let _ = child.wait();
            return Err(LaunchError::CommandTimeout { command: words, seconds: QUERY_TIMEOUT.as_secs() });
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().map_err(failed)?;
    if !output.status.success() {
        let output = String::from_utf8_lossy(&output.stderr).trim().lines().collect::<Vec<_>>().join("; ");
        return Err(LaunchError::CommandFailed { command: words, output });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Finds out which MPI the `mpiexec` in the PATH belongs to.
fn installed_mpi() -> Result<&'static Launcher, LaunchError> {
    let version = output_of(&["mpiexec", "--version"])?;
    // MPICH and its descendants, among them Intel MPI, start processes with Hydra and take its
    // options.
    let is_openmpi = version.contains("Open MPI") || version.contains("OpenRTE") || version.contains("PRRTE");
    launchers::find(if is_openmpi { "openmpi" } else { "mpich" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(options: LaunchOptions, environment: &[(&str, &str)], expect: Result<(&str, &[&str]), &str>) {
        let found = choose_in(&options, &|name| {
            environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        match (found, expect) {
            (Ok(found), Ok((name, hosts))) => assert_eq!(
                (found.launcher.name, &found.hosts[..]),
                (name, &hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>()[..])
            ),
            (Err(error), Err(word)) => assert!(error.to_string().contains(word), "{error}"),
            (found, expect) => panic!("{found:?} is not {expect:?}"),
        }
    }

    #[test]
    fn the_managers_launcher_is_chosen_unless_hosts_or_another_launcher_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("nodes");
        fs::write(&file, "a\na\nb\n").unwrap();
        let file = file.to_str().unwrap();
        let given = |hosts: &[&str]| LaunchOptions {
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            ..LaunchOptions::default()
        };
        let named = |name: &str| LaunchOptions { launcher: Some(name.to_owned()), ..LaunchOptions::default() };
        let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[1-2]")];
        check(LaunchOptions::default(), &[], Ok(("local", &["0"])));
        check(LaunchOptions { local: Some(2), ..LaunchOptions::default() }, &slurm, Ok(("local", &["0", "1"])));
        check(LaunchOptions::default(), &slurm, Ok(("slurm", &["n1", "n2"])));
        check(named("ssh"), &slurm, Ok(("ssh", &["n1", "n2"])));
        check(given(&["n2"]), &slurm, Ok(("ssh", &["n2"])));
        check(given(&["x[1-2]"]), &[], Ok(("ssh", &["x1", "x2"])));
        check(LaunchOptions { hostfile: Some(file.into()), ..LaunchOptions::default() }, &[], Ok(("ssh", &["a", "b"])));
        check(LaunchOptions::default(), &[("PBS_JOBID", "1.x"), ("PBS_NODEFILE", file)], Ok(("pbs", &["a", "b"])));
        check(LaunchOptions::default(), &[("LSB_JOBID", "1"), ("LSB_DJOB_HOSTFILE", file)], Ok(("lsf", &["a", "b"])));
        check(named("mpich"), &[("PBS_JOBID", "1.x"), ("PBS_NODEFILE", file)], Ok(("mpich", &["a", "b"])));
        check(LaunchOptions { nodes: Some(2), ..named("manual") }, &[], Ok(("manual", &["", ""])));
        check(named("manual"), &[], Err("--nodes"));
        check(named("ssh"), &[], Err("--hosts"));
        check(named("slurm"), &[], Err("SLURM_JOB_NODELIST"));
        check(named("none"), &[], Err("no launcher 'none'"));
        check(given(&["a", "a"]), &[], Err("twice"));
        check(LaunchOptions { local: Some(2), ..given(&["a"]) }, &[], Err("--local"));
        check(LaunchOptions { local: Some(2), ..named("ssh") }, &[], Err("--local"));
        let job = choose_in(&LaunchOptions::default(), &|name| {
            slurm.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        assert_eq!(job.unwrap().job.as_deref(), Some("slurm:7"));
    }
}
