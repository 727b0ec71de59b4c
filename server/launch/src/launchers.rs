//! The launchers: how each is told, how its nodes are found, and how it starts a process on each of them. Data, and what reads it.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use dayfly_meta::limits::NODES_MAX;

use super::hosts;
use crate::args::LaunchOptions;
use crate::failure::Failure;

/// A manager's command that is asked something answers within this.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(20);

/// One way to start servers.
#[derive(Debug)]
pub(crate) struct Launcher {
    /// Of `--launcher`.
    pub(crate) name: &'static str,
    /// A variable that is set within its jobs, unless it is for who asks for it.
    detected_by: Option<&'static str>,
    /// The variables that name the job: its number, and its place in an array where that has no number of its own.
    job: &'static [&'static str],
    nodes: Nodes,
    pub(super) start: Start,
    /// How a process gets what it is told first.
    pub(super) input: Input,
    /// Variables that would narrow what processes get.
    pub(super) without: &'static [&'static str],
    /// Whether what it starts is a step of a job, which the manager tells of the job's end, and perhaps some time before.
    pub(super) is_step: bool,
    /// The variable that names a process's node as the list does.
    pub(super) node_name: Option<&'static str>,
}

/// Where the list of nodes is.
#[derive(Debug)]
enum Nodes {
    /// In a variable.
    Variable(&'static str),
    /// In a file that a variable names.
    File(&'static str),
    /// What a command prints.
    Output(&'static [&'static str]),
    /// Given, or the list of the manager whose job this is.
    Given,
}

/// Which command starts processes. In its words, `{count}` and `{hosts}` stand for the nodes, `{host}` for one, and `{args}` alone for
/// `--launcher-args`; the program follows.
#[derive(Debug)]
pub(super) enum Start {
    /// One command for all.
    Once(&'static [&'static str]),
    /// One a node; of many nodes, those that were started start others.
    Each(&'static [&'static str]),
    /// The same, its words read by a shell on the node.
    EachByShell(&'static [&'static str]),
    /// The user does.
    ByHand,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// By standard input.
    Standard,
    /// By a file that all nodes see, for as long as they start, because the launcher does not pass standard input on to all.
    File,
}

/// What narrows a step to less than its node, of the batch script's own options.
const SLURM_NARROWING: &[&str] = &[
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_MEM_PER_GPU",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_DISTRIBUTION",
    "SLURM_CPU_BIND",
    "SLURM_HINT",
    "SLURM_THREADS_PER_CORE",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_EXCLUSIVE",
    "SLURM_EXACT",
    "SLURM_LABELIO",
    "SLURM_MPI_TYPE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_CPUS_PER_GPU",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPU_BIND",
    "SLURM_TRES_BIND",
    "SLURM_MEM_BIND",
    "SLURM_CORE_SPEC",
    "SLURM_THREAD_SPEC",
    "SLURM_TIMELIMIT",
    "SLURM_STDINMODE",
    "SLURM_STDOUTMODE",
    "SLURM_STDERRMODE",
    "SRUN_INPUT",
    "SRUN_OUTPUT",
    "SRUN_ERROR",
];

static LAUNCHERS: [Launcher; 9] = [
    Launcher {
        name: "slurm",
        detected_by: Some("SLURM_JOB_ID"),
        job: &["SLURM_JOB_ID"],
        nodes: Nodes::Variable("SLURM_JOB_NODELIST"),
        // All of each node's processors, unbound; no memory limit of its own, no GPU; beside the job's own steps; alive when a node fails.
        start: Start::Once(&[
            "srun",
            "--overlap",
            "--nodes={count}",
            "--ntasks={count}",
            "--ntasks-per-node=1",
            "--nodelist={hosts}",
            "--cpu-bind=none",
            "--mem=0",
            "--gres=none",
            "--mpi=none",
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--job-name=dayfly",
            "{args}",
        ]),
        input: Input::Standard,
        without: SLURM_NARROWING,
        is_step: true,
        node_name: Some("SLURMD_NODENAME"),
    },
    Launcher {
        name: "flux",
        detected_by: Some("FLUX_URI"),
        job: &["FLUX_ENCLOSING_ID"],
        nodes: Nodes::Output(&["flux", "getattr", "hostlist"]),
        start: Start::Once(&["flux", "exec", "{args}"]),
        input: Input::Standard,
        without: &[],
        is_step: true,
        node_name: None,
    },
    Launcher {
        name: "pbs",
        detected_by: Some("PBS_JOBID"),
        job: &["PBS_JOBID"],
        nodes: Nodes::File("PBS_NODEFILE"),
        // It may start one for each slot of a node; all but the first are sent away.
        start: Start::Once(&["pbsdsh", "{args}", "--"]),
        input: Input::File,
        without: &[],
        is_step: true,
        node_name: None,
    },
    Launcher {
        name: "lsf",
        detected_by: Some("LSB_JOBID"),
        job: &["LSB_JOBID", "LSB_JOBINDEX"],
        nodes: Nodes::File("LSB_DJOB_HOSTFILE"),
        start: Start::Once(&["blaunch", "{args}", "-z", "{hosts by spaces}"]),
        input: Input::File,
        without: &[],
        is_step: true,
        node_name: None,
    },
    Launcher {
        name: "mpich",
        detected_by: None,
        job: &[],
        nodes: Nodes::Given,
        start: Start::Once(&["mpiexec", "-ppn", "1", "-n", "{count}", "-hosts", "{hosts}", "-bind-to", "none", "{args}"]),
        input: Input::File,
        without: &[],
        is_step: false,
        node_name: None,
    },
    Launcher {
        name: "openmpi",
        detected_by: None,
        job: &[],
        nodes: Nodes::Given,
        start: Start::Once(&[
            "mpiexec",
            "--map-by",
            "ppr:1:node",
            "-n",
            "{count}",
            "--host",
            "{hosts}",
            "--bind-to",
            "none",
            "--mca",
            "orte_abort_on_non_zero_status",
            "0",
            "{args}",
        ]),
        input: Input::File,
        without: &[],
        is_step: false,
        node_name: None,
    },
    Launcher {
        name: "ssh",
        detected_by: None,
        job: &[],
        nodes: Nodes::Given,
        start: Start::EachByShell(&["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "{args}", "{host}"]),
        input: Input::Standard,
        without: &[],
        is_step: false,
        node_name: None,
    },
    Launcher {
        name: "local",
        detected_by: None,
        job: &[],
        nodes: Nodes::Given,
        start: Start::Each(&[]),
        input: Input::Standard,
        without: &[],
        is_step: false,
        node_name: None,
    },
    Launcher {
        name: "manual",
        detected_by: None,
        job: &[],
        nodes: Nodes::Given,
        start: Start::ByHand,
        input: Input::File,
        without: &[],
        is_step: false,
        node_name: None,
    },
];

/// The values of `--launcher`, besides those that are found out.
pub(crate) fn names() -> Vec<&'static str> {
    LAUNCHERS.iter().map(|launcher| launcher.name).chain(["mpiexec"]).collect()
}

/// The launcher of that name.
pub(super) fn by_name(name: &str) -> Option<&'static Launcher> {
    LAUNCHERS.iter().find(|launcher| launcher.name == name)
}

/// What to start, where and how.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) launcher: &'static Launcher,
    /// In the order of the list. Of `manual` only how many is known.
    pub(super) hosts: Vec<String>,
    /// The manager's name of the job that this is part of.
    pub(super) job: Option<String>,
    /// Nothing was said, and this is no job.
    pub(super) is_fallback: bool,
}

impl Launcher {
    /// Whether its servers are all on this machine.
    pub(super) fn is_local(&self) -> bool {
        matches!(self.start, Start::Each([]))
    }
}

/// What of the environment says whose job this is.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The manager's name of the job that this process is part of.
pub(crate) fn job() -> Option<String> {
    job_of(&|name| env::var(name).ok())
}

fn job_of(environment: Environment) -> Option<String> {
    let manager = detected(environment)?;
    let numbers: Vec<String> = manager.job.iter().filter_map(|name| environment(name)).collect();
    (!numbers.is_empty()).then(|| format!("{}:{}", manager.name, numbers.join(".")))
}

fn detected(environment: Environment) -> Option<&'static Launcher> {
    let is_here =
        |launcher: &&Launcher| launcher.detected_by.is_some_and(|name| environment(name).is_some_and(|value| !value.is_empty()));
    LAUNCHERS.iter().find(is_here)
}

/// Finds out what was meant.
pub(super) fn choose(options: &LaunchOptions) -> Result<Chosen, Failure> {
    choose_in(options, &|name| env::var(name).ok())
}

fn choose_in(options: &LaunchOptions, environment: Environment) -> Result<Chosen, Failure> {
    let manager = detected(environment);
    let given = given_hosts(options)?;
    let launcher = match (&options.launcher, options.local, &given) {
        (Some(name), _, _) if name == "mpiexec" => mpi()?,
        (Some(name), _, _) => by_name(name).ok_or_else(|| Failure::usage(format!("there is no launcher '{name}'")))?,
        (None, Some(_), _) => by_name_of_ours("local"),
        (None, None, Some(_)) => by_name_of_ours("ssh"),
        (None, None, None) => manager.unwrap_or(by_name_of_ours("local")),
    };
    if options.local.is_some() && !launcher.is_local() {
        return Err(Failure::usage(format!("--local starts servers on this machine, and --launcher {} does not", launcher.name)));
    }
    let hosts = if launcher.is_local() {
        if given.is_some() {
            return Err(Failure::usage("servers of --local are all on this machine: leave --hosts and --hostfile out"));
        }
        (0..options.local.unwrap_or(1)).map(|node| node.to_string()).collect()
    } else if matches!(launcher.start, Start::ByHand) {
        let nodes = options.nodes.ok_or_else(|| Failure::usage("with --launcher manual say how many will come by --nodes N"))?;
        (0..nodes).map(|_| String::new()).collect()
    } else {
        match given {
            Some(hosts) => hosts,
            None => listed(launcher, manager, environment)?,
        }
    };
    if options.min_nodes.is_some_and(|nodes| usize::from(nodes) > hosts.len()) {
        return Err(Failure::usage(format!("--min-nodes asks for more than the {} nodes that there are", hosts.len())));
    }
    if hosts.is_empty() || hosts.len() > NODES_MAX {
        return Err(Failure::usage(format!("a session has 1 to {NODES_MAX} nodes, and {} are listed", hosts.len())));
    }
    let is_fallback = launcher.is_local() && options.local.is_none() && options.launcher.is_none();
    Ok(Chosen { launcher, hosts, job: job_of(environment), is_fallback })
}

fn by_name_of_ours(name: &str) -> &'static Launcher {
    // The first stands for a row that is missing, which the test of the table would find.
    by_name(name).unwrap_or(&LAUNCHERS[0])
}

fn given_hosts(options: &LaunchOptions) -> Result<Option<Vec<String>>, Failure> {
    let listed = match (&options.hosts[..], &options.hostfile) {
        ([], None) => return Ok(None),
        ([], Some(path)) => {
            let content = fs::read_to_string(path);
            let content =
                content.map_err(|error| Failure::usage(format!("cannot read the hostfile '{}': {error}", path.display())))?;
            hosts::of_file(&content)
        }
        (given, _) => hosts::expand(&given.join(",")),
    };
    let listed = listed.map_err(Failure::usage)?;
    match listed.iter().enumerate().find(|(at, host)| listed[..*at].contains(host)) {
        Some((_, twice)) => Err(Failure::usage(format!("'{twice}' is listed twice; a host has one server of a session"))),
        None => Ok(Some(listed)),
    }
}

/// What the manager lists whose launcher this is, or in whose job this is.
fn listed(launcher: &Launcher, manager: Option<&'static Launcher>, environment: Environment) -> Result<Vec<String>, Failure> {
    let lister = if matches!(launcher.nodes, Nodes::Given) { manager } else { Some(launcher) };
    let lister = lister.ok_or_else(|| {
        Failure::usage(format!(
            "this is no job of a known manager: say where with --hosts or --hostfile (--launcher {})",
            launcher.name
        ))
    })?;
    let of_variable = |name: &str| {
        environment(name).filter(|value| !value.is_empty()).ok_or_else(|| {
            Failure::usage(format!("{name} is not set, as it is in a job of {}: say where with --hosts", lister.name))
        })
    };
    match lister.nodes {
        Nodes::Variable(name) => hosts::expand(&of_variable(name)?),
        Nodes::File(name) => {
            let path = of_variable(name)?;
            let content = fs::read_to_string(&path);
            hosts::of_file(
                &content.map_err(|error| Failure::new(format!("cannot read the list of nodes '{path}' ({name}): {error}")))?,
            )
        }
        Nodes::Output(command) => hosts::expand(output(command)?.trim()),
        Nodes::Given => Ok(Vec::new()),
    }
    .map_err(Failure::new)
}

/// What a command prints, if it does so in time.
fn output(command: &[&str]) -> Result<String, Failure> {
    let words = command.join(" ");
    let started =
        Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = started.map_err(|error| Failure::new(format!("cannot run '{words}': {error}")))?;
    let deadline = Instant::now() + QUESTION_TIMEOUT;
    // What it prints is a line or a few: it fits the pipe.
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            // It may have ended just now.
            let _ = child.kill();
            let _ = child.wait();
            return Err(Failure::new(format!("'{words}' does not answer within {} s", QUESTION_TIMEOUT.as_secs())));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().lines().collect::<Vec<_>>().join("; ");
        return Err(Failure::new(format!("'{words}' failed: {said}")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whose `mpiexec` is in the PATH.
fn mpi() -> Result<&'static Launcher, Failure> {
    let version = output(&["mpiexec", "--version"])?;
    // MPICH and its descendants, Intel MPI among them, start by Hydra.
    let name = if version.contains("Open MPI") || version.contains("OpenRTE") || version.contains("PRRTE") {
        "openmpi"
    } else {
        "mpich"
    };
    Ok(by_name_of_ours(name))
}

/// A command's words, filled in.
pub(super) fn fill(words: &[&str], hosts: &[String], arguments: &[String]) -> Vec<String> {
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

    fn check(options: LaunchOptions, environment: &[(&str, &str)], expect: Result<(&str, &[&str]), &str>) {
        let found = choose_in(&options, &|name| {
            environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        match (found, expect) {
            (Ok(found), Ok((name, hosts))) => assert_eq!(
                (found.launcher.name, &found.hosts[..]),
                (name, &hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>()[..])
            ),
            (Err(failure), Err(word)) => assert!(failure.to_string().contains(word), "{failure}"),
            (found, expect) => panic!("{found:?} is not {expect:?}"),
        }
    }

    #[test]
    fn the_launcher_is_the_managers_unless_hosts_or_another_are_named() {
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
        let job = job_of(&|name| slurm.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()));
        assert_eq!(job.as_deref(), Some("slurm:7"));
    }

    #[test]
    fn every_row_has_its_words() {
        for launcher in &LAUNCHERS {
            let (Start::Once(words) | Start::Each(words) | Start::EachByShell(words)) = launcher.start else { continue };
            let filled = fill(words, &["a".to_owned(), "b".to_owned()], &["-x".to_owned()]);
            assert!(filled.iter().all(|word| !word.contains('{')), "{filled:?}");
            assert!(words.is_empty() || filled.contains(&"-x".to_owned()), "{filled:?}");
        }
        let ssh = by_name("ssh").map(|ssh| match ssh.start {
            Start::EachByShell(words) => fill(words, &["n1".to_owned()], &[]).join(" "),
            _ => String::new(),
        });
        assert_eq!(ssh.as_deref(), Some("ssh -o BatchMode=yes -o ConnectTimeout=10 n1"));
    }
}
