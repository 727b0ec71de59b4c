//! Decides where a session's servers run: with which launcher, on which hosts, and as part of which
//! job.

use std::env;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use dayfly_meta::limits::NODES_MAX;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::time::timeout;

use crate::error::LaunchError;
use crate::hosts::{HostListError, expand_host_list, hosts_of_file, read_hosts_file};
use crate::launchers::{self, Environment, Launcher, MPIEXEC, NodeList};
use crate::node_names::{is_same_host, own_host_name};
use crate::options::LaunchOptions;
use crate::processes::REASON_LEN_MAX;
use crate::units::shortened;

/// How long a command may take to answer a question, and a FIFO to deliver a list of hosts. A shorter start timeout takes precedence.
const QUERY_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum length of an answer, in bytes.
const ANSWER_LEN_MAX: u64 = 1 << 20;

/// Where the servers of a session will run.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) launcher: &'static Launcher,
    /// The hosts, in the order of the list. With a manual launcher all names are empty, because
    /// only their number is known.
    pub(crate) hosts: Vec<String>,
    /// The manager's name for the job that the session is part of.
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

/// Returns the manager's name for the job that this process is part of, such as `slurm:4711`.
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
        (Some(name), _, _) if name == MPIEXEC => installed_mpi(options.start_timeout)?,
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
            let option = if options.local.is_some() { "--local" } else { "--launcher local" };
            return Err(LaunchError::LocalWithHosts { option });
        }
        (0..options.local.unwrap_or(1)).map(|node| node.to_string()).collect()
    } else if launcher.is_manual() {
        let nodes = options.nodes.ok_or(LaunchError::ManualNeedsNodes)?;
        (0..nodes).map(|_| String::new()).collect()
    } else {
        match given {
            Some(hosts) => hosts,
            None => listed_by_manager(launcher, manager, environment, options.start_timeout)?,
        }
    };
    if let Some(wanted) = options.min_nodes.filter(|&wanted| usize::from(wanted) > hosts.len()) {
        return Err(LaunchError::MinNodes { wanted, nodes: hosts.len() });
    }
    if hosts.is_empty() || hosts.len() > NODES_MAX {
        return Err(LaunchError::NodeCount { nodes: hosts.len() });
    }
    let is_fallback = launcher.is_local() && options.local.is_none() && options.launcher.is_none();
    if is_fallback {
        let unused = [("--launcher-args", !options.launcher_args.is_empty()), ("--key-file", options.key_file.is_some())];
        if let Some((option, _)) = unused.into_iter().find(|(_, is_given)| *is_given) {
            return Err(LaunchError::NoLauncher { option });
        }
    }
    let job = manager.and_then(|manager| manager.job_name(environment));
    Ok(Allocation { launcher, hosts, job, is_fallback })
}

/// Returns the hosts that the user named, if any.
fn given_hosts(options: &LaunchOptions) -> Result<Option<Vec<String>>, LaunchError> {
    let (place, listed) = match (&options.hosts[..], &options.hostfile) {
        ([], None) => return Ok(None),
        ([], Some(path)) => {
            let content = read_hosts_file(path, QUERY_TIMEOUT.min(options.start_timeout))
                .map_err(|source| LaunchError::Hostfile { path: path.clone(), source })?;
            (format!("the hostfile '{}'", path.display()), hosts_of_file(&content))
        }
        (given, _) => ("--hosts".to_owned(), expand_host_list(&given.join(","))),
    };
    let listed = listed.and_then(not_empty).map_err(|source| LaunchError::GivenHosts { place, source })?;
    match listed.iter().enumerate().find(|(at, host)| listed[..*at].contains(host)) {
        Some((_, twice)) => Err(LaunchError::DuplicateHost { host: twice.clone() }),
        None => Ok(Some(listed)),
    }
}

fn not_empty(hosts: Vec<String>) -> Result<Vec<String>, HostListError> {
    if hosts.is_empty() { Err(HostListError::Empty) } else { Ok(hosts) }
}

/// Returns the hosts that a manager lists: the manager that the launcher belongs to, or the one in
/// whose job this process runs.
fn listed_by_manager(
    launcher: &'static Launcher,
    manager: Option<&'static Launcher>,
    environment: Environment,
    start_timeout: Duration,
) -> Result<Vec<String>, LaunchError> {
    let lister = if matches!(launcher.node_list, NodeList::Given) { manager } else { Some(launcher) };
    let lister = lister.ok_or(LaunchError::NoHosts { launcher: launcher.name })?;
    let value = |variable: &'static str| {
        let value = environment(variable).filter(|value| !value.is_empty());
        value.ok_or(LaunchError::NoJobVariable { variable, manager: lister.name })
    };
    let (place, listed) = match lister.node_list {
        NodeList::Variable(variable) => (variable.to_owned(), expand_host_list(&value(variable)?)),
        NodeList::File(variable) => {
            let path = PathBuf::from(value(variable)?);
            let place = format!("'{}' ({variable})", path.display());
            let content = read_hosts_file(&path, QUERY_TIMEOUT.min(start_timeout))
                .map_err(|source| LaunchError::ManagerList { path, variable, source })?;
            (place, hosts_of_file(&content))
        }
        NodeList::Output(command) => {
            let output = output_of(command, start_timeout, "name the nodes with --hosts")?;
            (format!("the output of '{}'", command.join(" ")), expand_host_list(output.trim()))
        }
        NodeList::Given => return Err(LaunchError::NoHosts { launcher: launcher.name }),
    };
    listed.and_then(not_empty).map_err(|source| LaunchError::ManagerHosts { place, source })
}

/// Runs a command and returns its standard output, provided that it finishes in time.
fn output_of(command: &[&str], start_timeout: Duration, way_out: &'static str) -> Result<String, LaunchError> {
    let words = command.join(" ");
    let allowed = QUERY_TIMEOUT.min(start_timeout);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(LaunchError::io("cannot start a runtime"))?;
    let answer = runtime.block_on(async { timeout(allowed, answer_of(command)).await });
    let (status, output, errors) = answer
        .map_err(|_| LaunchError::CommandTimeout { command: words.clone(), seconds: allowed.as_secs(), way_out })?
        .map_err(|source| LaunchError::Command { command: words.clone(), source, way_out })?;
    if !status.success() {
        let lines: Vec<&str> = errors.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let reason = if lines.is_empty() { status.to_string() } else { shortened(&lines.join("; "), REASON_LEN_MAX) };
        return Err(LaunchError::CommandFailed { command: words, reason, way_out });
    }
    Ok(output)
}

/// Runs a command, and returns its status, standard output and standard error. Dropping the future
/// kills the command.
async fn answer_of(command: &[&str]) -> io::Result<(ExitStatus, String, String)> {
    let mut child = Command::new(command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let (output, errors) = tokio::try_join!(read_part(child.stdout.take()), read_part(child.stderr.take()))?;
    Ok((child.wait().await?, output, errors))
}

/// Reads a stream to its end, or to its first [`ANSWER_LEN_MAX`] bytes. Then closes it, so that a
/// command that writes forever ends.
async fn read_part(stream: Option<impl AsyncRead + Unpin>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(ANSWER_LEN_MAX).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Finds out which MPI the `mpiexec` in the PATH belongs to.
fn installed_mpi(start_timeout: Duration) -> Result<&'static Launcher, LaunchError> {
    let way_out = "name the MPI with --launcher mpich or --launcher openmpi";
    let version = output_of(&["mpiexec", "--version"], start_timeout, way_out)?;
    // MPICH and its descendants, among them Intel MPI, start processes with Hydra and take its
    // options.
    let is_openmpi = version.contains("Open MPI") || version.contains("OpenRTE") || version.contains("PRRTE");
    launchers::find(if is_openmpi { "openmpi" } else { "mpich" })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

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
    fn options_of_a_launcher_are_refused_where_no_launcher_is_used() {
        let arguments = || LaunchOptions { launcher_args: vec!["-v".to_owned()], ..LaunchOptions::default() };
        let key_file = || LaunchOptions { key_file: Some("k".into()), ..LaunchOptions::default() };
        check(arguments(), &[], Err("--launcher-args has no effect"));
        check(key_file(), &[], Err("--key-file has no effect"));
        let slurm = [("SLURM_JOB_ID", "1"), ("SLURM_JOB_NODELIST", "n[1-2]")];
        check(arguments(), &slurm, Ok(("slurm", &["n1", "n2"])));
        check(key_file(), &slurm, Ok(("slurm", &["n1", "n2"])));
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

    #[test]
    fn a_message_about_a_list_names_its_place_and_only_the_users_own_list_is_wrong_usage() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let (wrong, empty) = (file("wrong", "a[\n"), file("empty", "# none\n"));
        let hosts = |list: &str| LaunchOptions { hosts: vec![list.to_owned()], ..LaunchOptions::default() };
        let hostfile = |path: &str| LaunchOptions { hostfile: Some(path.into()), ..LaunchOptions::default() };
        let job = LaunchOptions::default;
        let slurm = |list| [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", list)];
        for (options, environment, is_usage, words) in [
            (hosts("n["), slurm("n1"), true, ["--hosts: 'n['", ""]),
            (hosts("n[1-5000]"), slurm("n1"), true, ["--hosts: it names more than 4096 hosts", ""]),
            (hosts(""), slurm("n1"), true, ["--hosts: it names no hosts", ""]),
            (hostfile(&wrong), slurm("n1"), true, [&format!("the hostfile '{wrong}': 'a['"), ""]),
            (hostfile(&empty), slurm("n1"), true, [&format!("the hostfile '{empty}': it names no hosts"), ""]),
            (hostfile("/dev/zero"), slurm("n1"), true, ["the hostfile '/dev/zero': it is longer than", ""]),
            (job(), slurm("n["), false, ["SLURM_JOB_NODELIST: 'n['", "--hosts"]),
            (job(), slurm(" "), false, ["SLURM_JOB_NODELIST: it names no hosts", "--hosts"]),
            (
                job(),
                [("PBS_JOBID", "1"), ("PBS_NODEFILE", &wrong)],
                false,
                [&format!("'{wrong}' (PBS_NODEFILE): 'a['"), "--hosts"],
            ),
            (
                job(),
                [("LSB_JOBID", "1"), ("LSB_DJOB_HOSTFILE", &empty)],
                false,
                ["(LSB_DJOB_HOSTFILE): it names no hosts", "--hosts"],
            ),
        ] {
            let find = |name: &str| environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
            let error = choose_in(&options, &find).unwrap_err();
            let said = error.to_string();
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
            assert_eq!(error.is_usage(), is_usage, "{said}");
        }
        let local = LaunchOptions { launcher: Some("local".to_owned()), ..hosts("a") };
        assert!(choose_in(&local, &|_| None).unwrap_err().to_string().starts_with("--launcher local starts all"));
    }

    #[test]
    fn a_command_that_gives_no_answer_is_an_error_with_its_reason_and_a_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let check = |script: &str, allowed: Duration, reason: &str| {
            let path = folder.path().join("mpiexec");
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            let said = output_of(&[path.to_str().unwrap(), "--version"], allowed, "do this").unwrap_err().to_string();
            assert!(said.contains(reason) && said.ends_with("; do this"), "{said}");
        };
        let long = Duration::from_secs(600);
        check("exit 3", long, "exit status: 3");
        check("echo no >&2; echo license >&2; exit 1", long, "failed: no; license;");
        // A command that writes forever ends once nobody reads, and one that hangs is killed.
        check("exec yes", long, "failed: signal: 13");
        check("exec sleep 100", Duration::from_millis(10), "did not finish");
        // Nobody waits for a child that outlives the command.
        check("sleep 100 & exit 0", Duration::from_millis(10), "did not finish");
    }
}
