//! Arguments of the commands that start, use and end sessions.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::{
    LOST_AFTER_MAX_S, LOST_AFTER_MIN_S, NODES_MAX, PFS_STREAMS_MAX, START_TIMEOUT, TREE_WIDTH, WORKERS_MAX,
};

use super::number;
use super::stage_in::StageInOptions;
use crate::size;

/// Start a session, with one server per node, and print its id once all servers are ready.
///
/// Within a job of Slurm, Flux, PBS or LSF, the manager's own command starts a server on each node
/// of the job. Elsewhere, --local, --hosts and --hostfile say where servers start; without them,
/// one server starts on this machine. A supervisor process stays behind, and the session ends when
/// that process ends, for example with the job.
///
/// Examples: dayfly up --data-dir /local/scratch; dayfly up --local 4; dayfly up --hosts 'n[1-8]'
#[derive(Args)]
pub(crate) struct UpArguments {
    #[command(flatten)]
    pub(crate) session: SessionArguments,
    /// Continue for this long (90s, 30m, 2h, 1d) after this job ends.
    ///
    /// Your next job on the same nodes then finds the session, and ends it with 'dayfly down'. This
    /// works only where servers may outlive a job, for example with --launcher ssh.
    ///
    /// The supervisor ends with this job. After that, the session cannot recover from the loss of a
    /// node: if a server dies, all stage-ins fail, nothing is recovered in the background, and no new
    /// server is started. Reads continue as far as other nodes have the blocks or can read their
    /// sources.
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = "Lifetime")]
    pub(crate) keep: Option<Duration>,
    /// End the session when the process PID of this machine ends, also if a signal kills it.
    ///
    /// In a shell script, '--end-with $$' ends the session with the script.
    #[arg(long, value_name = "PID", conflicts_with = "keep", help_heading = "Lifetime", value_parser = number::<i32>(1..=i32::MAX as u64))]
    pub(crate) end_with: Option<i32>,
    /// Stay in the foreground until the session ends, and end the session when interrupted.
    #[arg(long, help_heading = "Lifetime")]
    pub(crate) foreground: bool,
    /// Run as the supervisor that `up` leaves in the background.
    #[arg(long, hide = true)]
    pub(crate) background: bool,
}

/// Start a new server in the place of a lost one.
///
/// The supervisor starts the server on the lost node, or on another node of the job with --host. The
/// new server is the same member of the session, and reads the node's share of the samples again in the
/// background. Sessions do this by themselves for servers that have died, unless they were started with
/// --no-rejoin. A server that only stood still returns by itself.
///
/// Examples: dayfly rejoin; dayfly rejoin 3; dayfly rejoin 3 --host n17
#[derive(Args)]
pub(crate) struct RejoinArguments {
    /// The lost node, as 'dayfly status' names it. [default: all nodes that are lost]
    #[arg(value_name = "NODE")]
    pub(crate) node: Option<u16>,
    /// Start the server on HOST, which must belong to the job.
    #[arg(long, value_name = "HOST", requires = "node")]
    pub(crate) host: Option<String>,
}

/// Options that are the same for all servers of a session.
#[derive(Args, Clone)]
#[command(next_help_heading = "Servers")]
pub(crate) struct SessionArguments {
    /// Store blocks below DIR on each node; may be repeated to use several drives. [default:
    /// $SLURM_TMPDIR, or else $TMPDIR, or else /tmp]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Vec<PathBuf>,
    /// Bytes that each node may use in its data dirs. [default: its share of 90 % of the free
    /// space]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) capacity: Option<u64>,
    /// Memory that each server uses for other nodes' blocks. [default: 256MiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: Option<u64>,
    /// Memory that each server uses for all its stage-ins together. [default: 1GiB, or less in a
    /// small control group]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) stage_in_memory: Option<u64>,
    /// Number of units (pieces of the sources) that each server reads at the same time. [default:
    /// its share of the cores, at most 16]
    #[arg(long, value_name = "N", value_parser = number::<u16>(1..=WORKERS_MAX as u64))]
    pub(crate) stage_in_workers: Option<u16>,
    /// Number of reads that each server makes at the same time on the parallel file system, for
    /// samples that are not stored. [default: 16]
    #[arg(long, value_name = "N", value_parser = number::<u16>(1..=u64::from(PFS_STREAMS_MAX)))]
    pub(crate) pfs_streams: Option<u16>,
    /// Bytes per second that each server reads to recover the blocks of a lost node in the
    /// background; 0 to read them only when they are needed. [default: 128MiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) recovery_rate: Option<u64>,
    /// Let reads wait for this long while a compressed archive is read again from the start, because it
    /// contains samples of a lost node; 0 to let them fail at once and not read such archives again.
    /// [default: 600]
    #[arg(long, value_name = "SECONDS", value_parser = number::<u64>(0..=86400))]
    pub(crate) recovery_timeout: Option<u64>,
    /// Fail a stage-in that makes no progress on any node for this long. [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = number::<u64>(1..=86400))]
    pub(crate) stage_in_timeout: Option<u64>,
    /// Count a server as lost when nothing has been heard of it for this long. Other nodes then take its
    /// place. [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = number::<u64>(LOST_AFTER_MIN_S..=LOST_AFTER_MAX_S))]
    pub(crate) lost_after: Option<u64>,
    /// Wait N times as long as usual before a node is given up or a request fails, for machines that are
    /// very busy. The time that another option sets stays as given.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number::<u32>(1..=Deadlines::PATIENCE_MAX.into()))]
    pub(crate) patience: u32,
    /// Start no new server in the place of one that has died. 'dayfly rejoin' starts one at any time.
    #[arg(long)]
    pub(crate) no_rejoin: bool,
    /// Path at which programs see the namespace.
    #[arg(long, value_name = "PATH", default_value = "/dayfly")]
    pub(crate) prefix: OsString,
    /// How nodes reach each other. 'dayfly status' shows what was chosen.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Transport::Auto)]
    pub(crate) transport: Transport,
    /// RDMA card to use, and its port. [default: of the cards with a port that is up, the one
    /// nearest to the data dir]
    #[arg(long, value_name = "NAME[:PORT]")]
    pub(crate) rdma_device: Option<String>,
    /// Service level of RDMA traffic (with RoCE, its priority), so that the network can separate it
    /// from other traffic.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number::<u8>(0..=15))]
    pub(crate) service_level: u8,
    /// Traffic class of RDMA packets. With RoCE it is a field of the IP header: DSCP x 4.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number::<u8>(0..=255))]
    pub(crate) traffic_class: u8,
    /// Encrypt and authenticate every byte between nodes. Implies TCP. See docs/SECURITY.md.
    #[arg(long)]
    pub(crate) encrypt: bool,
    /// Check every chunk that a process reads against its checksum, even if it comes from the
    /// node's own memory or drives.
    #[arg(long)]
    pub(crate) verify_reads: bool,
    /// Allow a data dir on a network file system. Normally a session exists to avoid one.
    #[arg(long)]
    pub(crate) allow_network_data_dir: bool,
    /// Divide every deadline of the session by N. For tests.
    #[arg(
        long,
        hide = true,
        value_name = "N",
        env = "DAYFLY_DEADLINES_DIVISOR",
        hide_env = true,
        default_value_t = 1,
        value_parser = number::<u32>(1..=Deadlines::DIVISOR_MAX.into())
    )]
    pub(crate) deadlines_divisor: u32,
    /// Renew leases along a tree of this width, as sessions of many nodes do. For tests.
    #[arg(
        long,
        hide = true,
        value_name = "N",
        env = "DAYFLY_LEASE_TREE_WIDTH",
        hide_env = true,
        value_parser = number::<u16>(1..=TREE_WIDTH as u64)
    )]
    pub(crate) lease_tree_width: Option<u16>,
    #[command(flatten)]
    pub(crate) launch: LaunchArguments,
}

impl SessionArguments {
    /// Converts the arguments to the options that `dayfly-launch` takes.
    pub(crate) fn to_options(&self) -> dayfly_launch::SessionOptions {
        dayfly_launch::SessionOptions {
            data_dirs: self.data_dir.clone(),
            capacity: self.capacity,
            memory: self.memory,
            stage_in_memory: self.stage_in_memory,
            stage_in_workers: self.stage_in_workers,
            pfs_streams: self.pfs_streams,
            recovery_rate: self.recovery_rate,
            recovery_timeout: self.recovery_timeout.map(Duration::from_secs),
            stage_in_timeout: self.stage_in_timeout.map(Duration::from_secs),
            lost_after: self.lost_after.map(Duration::from_secs),
            patience: self.patience,
            restarts_lost: !self.no_rejoin,
            prefix: self.prefix.as_bytes().to_vec(),
            transport: self.transport.into(),
            rdma_device: self.rdma_device.clone(),
            service_level: self.service_level,
            traffic_class: self.traffic_class,
            encrypt: self.encrypt,
            verify_reads: self.verify_reads,
            allow_network_data_dir: self.allow_network_data_dir,
            deadlines_divisor: self.deadlines_divisor,
            lease_tree_width: self.lease_tree_width,
            launch: dayfly_launch::LaunchOptions {
                local: self.launch.local,
                hosts: self.launch.hosts.clone(),
                hostfile: self.launch.hostfile.clone(),
                launcher: self.launch.launcher.clone(),
                launcher_args: self.launch.launcher_args.clone(),
                nodes: self.launch.nodes,
                key_file: self.launch.key_file.clone(),
                start_timeout: Duration::from_secs(self.launch.start_timeout),
                min_nodes: self.launch.min_nodes,
                interface: self.launch.interface.clone(),
            },
        }
    }
}

/// Where servers run, and how they are started.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Where servers run")]
pub(crate) struct LaunchArguments {
    /// Start N servers on this machine, each of them a node with its own data dir, socket and
    /// address. [default: 1, outside of jobs]
    #[arg(long, value_name = "N", value_parser = number::<u16>(1..=250))]
    pub(crate) local: Option<u16>,
    /// Start a server on each of these hosts, through ssh unless --launcher is given. A list such
    /// as n[1-3,7],m01 works.
    #[arg(long, value_name = "HOST,...", conflicts_with = "hostfile")]
    pub(crate) hosts: Vec<String>,
    /// Like --hosts, but read the hosts from FILE: the first word of each line.
    #[arg(long, value_name = "FILE")]
    pub(crate) hostfile: Option<PathBuf>,
    /// How to start the servers. [default: within a job, the workload manager's own command, on all
    /// nodes of the job]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(dayfly_launch::launcher_names()))]
    pub(crate) launcher: Option<String>,
    /// More options for the launcher's command, separated by spaces; may be repeated.
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    pub(crate) launcher_args: Vec<String>,
    /// With --launcher manual: how many servers you will start with 'dayfly serve'.
    #[arg(long, value_name = "N", value_parser = number::<u16>(1..=NODES_MAX as u64))]
    pub(crate) nodes: Option<u16>,
    /// File for the session's key, on a file system that all nodes see. [default: a new file in the
    /// working directory]
    ///
    /// The file is needed only if the launcher gives servers no standard input. Only you can read
    /// it, and it is removed once all servers have joined.
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// How long the nodes may take to join, and then to connect to each other.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = START_TIMEOUT.as_secs(),
        value_parser = number::<u64>(1..=86400)
    )]
    pub(crate) start_timeout: u64,
    /// Start without the missing nodes if at least K join. [default: all must join]
    #[arg(long, value_name = "K", value_parser = number::<u16>(1..=NODES_MAX as u64))]
    pub(crate) min_nodes: Option<u16>,
    /// Network interface through which nodes reach each other. [default: the one that leads to the
    /// supervisor]
    #[arg(long, value_name = "NAME")]
    pub(crate) interface: Option<String>,
}

impl LaunchArguments {
    /// Checks that no option is given that would have no effect.
    pub(crate) fn check(&self) -> Result<(), String> {
        let launcher = self.launcher.as_deref();
        if self.nodes.is_some() && launcher != Some("manual") {
            return Err("--nodes works only with --launcher manual; use --local, --hosts or --hostfile instead".to_owned());
        }
        let is_local = self.local.is_some() || launcher == Some("local");
        match (is_local, &self.launcher_args[..], &self.key_file) {
            (true, [_, ..], _) => Err("--launcher-args has no effect on servers on this machine; leave it out".to_owned()),
            (true, _, Some(_)) => Err("--key-file has no effect on servers on this machine; leave it out".to_owned()),
            _ => Ok(()),
        }
    }
}

/// Values of --transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// RDMA if every pair of nodes has it, otherwise TCP.
    Auto,
    /// RDMA; the session fails to start without it.
    Rdma,
    /// TCP, even where RDMA is available.
    Tcp,
    /// RDMA through the crate async-rdma, a second provider to compare with.
    #[cfg(feature = "async-rdma")]
    AsyncRdma,
}

impl From<Transport> for dayfly_launch::Preference {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Auto => Self::Auto,
            Transport::Rdma => Self::Rdma,
            Transport::Tcp => Self::Tcp,
            #[cfg(feature = "async-rdma")]
            Transport::AsyncRdma => Self::AsyncRdma,
        }
    }
}

/// Run CMD in a session of its own: start the session, stage in, run CMD, end the session.
///
/// The session ends when CMD ends, even if CMD has started processes that are still running.
/// SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to CMD, which then has 30 seconds to end.
/// SIGUSR1 and SIGUSR2 are passed on too. The exit status is CMD's.
///
/// Example: dayfly run --stage-in '/pfs/train-*.tar:/dayfly/train' -- python3 train.py
/// /dayfly/train
#[derive(Args)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    pub(crate) session: SessionArguments,
    /// Stage SOURCE (a file, glob or directory) into TARGET before CMD starts.
    ///
    /// The argument is split at its last ':/'. The option may be repeated, each time with another
    /// TARGET; use a glob to stage several archives into one TARGET.
    #[arg(
        long,
        value_name = "SOURCE:TARGET",
        help_heading = "Stage-in",
        value_parser = OsStringValueParser::new().try_map(source_and_target)
    )]
    pub(crate) stage_in: Vec<SourceAndTarget>,
    #[command(flatten)]
    pub(crate) options: StageInOptions,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

/// Run CMD as part of a running session.
///
/// Example: dayfly exec -- ls /dayfly
#[derive(Args)]
pub(crate) struct ExecArguments {
    /// Run CMD as a process of node K. [default: the lowest node on this machine]
    #[arg(long, value_name = "K", value_parser = number::<u16>(0..=NODES_MAX as u64 - 1))]
    pub(crate) node: Option<u16>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

/// Print the environment variables that make a process part of the session.
///
/// Use it as: eval "$(dayfly env)". Programs that the shell starts afterward see the namespace, but
/// the shell's own cd, globs and < do not. They do in a shell that 'dayfly exec -- bash' starts.
#[derive(Args)]
pub(crate) struct EnvArguments {
    /// Make the process part of node K. [default: the lowest node on this machine]
    #[arg(long, value_name = "K", value_parser = number::<u16>(0..=NODES_MAX as u64 - 1))]
    pub(crate) node: Option<u16>,
}

/// Check whether nodes, and the network between them, have what a session needs.
///
/// Each finding is ok, slow or missing, and comes with advice. RDMA is tested with a real transfer.
/// The exit status is 1 if something is missing that every session needs or that --rdma-device
/// names; otherwise it is 0.
///
/// Examples: dayfly doctor; dayfly doctor --hosts n1,n2,n3
#[derive(Args, Clone)]
pub(crate) struct DoctorArguments {
    /// Run 'dayfly doctor' on each of these hosts, and check the network between each pair of them.
    /// A list such as n[1-3,7],m01 works. If there are more than 8 hosts, check each host only with
    /// the next one.
    #[arg(long, value_name = "HOST,...")]
    pub(crate) hosts: Vec<String>,
    /// Command that starts a program on a host; it is called as COMMAND HOST PROGRAM...
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes -o ConnectTimeout=10")]
    pub(crate) ssh: String,
    /// Data dirs to check. [default: the same as for 'dayfly up']
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Vec<PathBuf>,
    /// RDMA card to check, and its port. [default: the same as for 'dayfly up']
    #[arg(long, value_name = "NAME[:PORT]")]
    pub(crate) rdma_device: Option<String>,
    /// Print the result as JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Answer the probes of another node. 'dayfly doctor --hosts' uses this.
    #[arg(long, hide = true)]
    pub(crate) answer: bool,
    /// Probe the node that answers at ADDRESS. 'dayfly doctor --hosts' uses this.
    #[arg(long, hide = true, value_name = "ADDRESS")]
    pub(crate) reach: Option<String>,
}

/// Run the server of a node. Normally 'dayfly up' starts servers; you need this only with a
/// workload manager that 'dayfly up' does not know.
///
/// In that case 'dayfly up --launcher manual --nodes N --key-file FILE' waits for N servers, which
/// you start with the same --key-file. The servers end when the session or the supervisor ends.
#[derive(Args)]
pub(crate) struct ServeArguments {
    /// The file that 'dayfly up' wrote for its servers, or '-' for standard input.
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub(crate) key_file: PathBuf,
    /// Where 'dayfly up' listens, if servers cannot reach it at the addresses in the key file.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) rendezvous: Option<String>,
}

/// Remove what killed sessions left on this machine: empty folders, sockets and locks.
///
/// A running session is never touched. The command is for users, and for batch systems' epilogs,
/// which run it as the job's user. 'dayfly up' does the same before it starts anything.
#[derive(Args)]
pub(crate) struct CleanArguments {
    /// Clean this data dir too; may be repeated. [default: $SLURM_TMPDIR, or else $TMPDIR, or else
    /// /tmp]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Vec<PathBuf>,
}

/// End the session on all nodes and free everything that it holds.
///
/// If no session is running, there is nothing to do, and the command succeeds. If you have several
/// sessions, DAYFLY_SESSION names the one to end.
#[derive(Args)]
pub(crate) struct DownArguments {}

/// An argument of `run --stage-in`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SourceAndTarget {
    pub(crate) source: OsString,
    pub(crate) target: OsString,
}

/// Splits `SOURCE:TARGET` at the last `:/`.
fn source_and_target(argument: OsString) -> Result<SourceAndTarget, &'static str> {
    let bytes = argument.as_bytes();
    let colon = bytes.windows(2).rposition(|pair| pair == b":/").filter(|&colon| colon > 0);
    let colon = colon.ok_or("a source, a colon and a target are needed, as in train.tar:/dayfly/train")?;
    let part = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
    Ok(SourceAndTarget { source: part(&bytes[..colon]), target: part(&bytes[colon + 1..]) })
}

/// Parses a time with a unit, of at most 30 days.
fn duration(text: &str) -> Result<Duration, String> {
    let unit = text.chars().next_back().and_then(|unit| match unit {
        's' => Some(1),
        'm' => Some(60),
        'h' => Some(3600),
        'd' => Some(86400),
        _ => None,
    });
    let seconds = unit.and_then(|unit| text[..text.len() - 1].parse::<u64>().ok()?.checked_mul(unit));
    let seconds = seconds.filter(|seconds| (1..=30 * 86400).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| format!("'{text}' is not a time; write it as 90s, 30m, 2h or 1d, at most 30d"))
}

#[cfg(test)]
mod tests {
    use super::SourceAndTarget;

    #[test]
    fn a_stage_in_argument_splits_at_its_last_colon_slash() {
        let check = |argument: &str, expect: Option<(&str, &str)>| {
            let expect = expect.map(|(source, target)| SourceAndTarget { source: source.into(), target: target.into() });
            assert_eq!(super::source_and_target(argument.into()).ok(), expect, "{argument}");
        };
        check("a.tar:/dayfly/a", Some(("a.tar", "/dayfly/a")));
        check("/pfs/x:/y/*.tar:/dayfly/a", Some(("/pfs/x:/y/*.tar", "/dayfly/a")));
        check("a.tar", None);
        check("a.tar:dayfly", None);
        check(":/dayfly", None);
    }

    #[test]
    fn times_need_a_unit() {
        let check =
            |text: &str, expect: Option<u64>| assert_eq!(super::duration(text).ok().map(|time| time.as_secs()), expect, "{text}");
        check("90s", Some(90));
        check("2h", Some(7200));
        check("30d", Some(2_592_000));
        ["", "s", "5", "0s", "31d", "-1h", "1 h", "1é", "18446744073709551615d"].iter().for_each(|text| check(text, None));
    }
}
