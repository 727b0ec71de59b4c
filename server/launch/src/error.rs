//! Errors of starting, running and cleaning up sessions.

use std::io;
use std::path::PathBuf;

use dayfly_client::ClientError;
use dayfly_client::locate::NotPrivate;
use dayfly_meta::deadlines::DeadlineError;
use dayfly_meta::limits::{NODES_MAX, SERVER_DESCRIPTORS_MIN};
use dayfly_meta::path::display;
use dayfly_server::{Obstacle, StartError};
use nix::unistd::User;

use crate::hosts::HostListError;
use crate::units::{counted, show_bytes};

/// Why a session could not be planned, started, served or cleaned up.
///
/// Each message is one line: what failed, why, and what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The prefix of the namespace is not a usable path.
    #[error("'{}' cannot be the prefix: {reason}", display(.prefix))]
    InvalidPrefix {
        /// The prefix as given.
        prefix: Vec<u8>,
        /// What is wrong with it.
        reason: String,
    },
    /// The arena would be too small to read from other nodes.
    #[error(
        "--memory must be at least {}: blocks of other nodes are read through it, several chunks at a time",
        show_bytes(*.minimum)
    )]
    ArenaTooSmall {
        /// The smallest arena, in bytes.
        minimum: u64,
    },
    /// The arena would be larger than can be addressed.
    #[error("--memory must be at most {}", show_bytes(*.maximum))]
    ArenaTooLarge {
        /// The largest arena, in bytes.
        maximum: u64,
    },
    /// The memory for stage-ins is too small for the workers.
    #[error("--stage-in-memory must be at least {}{}", show_bytes(*.minimum), for_workers(*.workers))]
    StageInMemoryTooSmall {
        /// The smallest value, in bytes.
        minimum: u64,
        /// The number of workers that was asked for.
        workers: Option<u16>,
    },
    /// The scaled deadlines contradict each other.
    #[error("{0}")]
    Deadlines(#[source] DeadlineError),
    /// `--keep` with a launcher whose processes end with the job.
    #[error(
        "--keep does not work with --launcher {launcher}, whose processes end with the job; \
         where the site lets processes outlive a job, use --launcher ssh"
    )]
    KeepNeedsSurvivors {
        /// The launcher's name.
        launcher: &'static str,
    },
    /// `--encrypt` with a transport other than TCP.
    #[error("--encrypt works over TCP only, because an RDMA card sends bytes as they are; leave --transport out")]
    EncryptNeedsTcp,
    /// There is no launcher with this name.
    #[error("there is no launcher '{name}'; the launchers are {}", .known.join(", "))]
    UnknownLauncher {
        /// The name as given.
        name: String,
        /// All names that exist.
        known: Vec<&'static str>,
    },
    /// `--local` with a launcher that starts servers elsewhere.
    #[error("--local starts servers on this machine, and --launcher {launcher} does not; leave one of them out")]
    LocalWithLauncher {
        /// The launcher's name.
        launcher: &'static str,
    },
    /// Local servers with a list of hosts.
    #[error("{option} starts all servers on this machine; leave --hosts and --hostfile out")]
    LocalWithHosts {
        /// The option that the user gave: `--local` or `--launcher local`.
        option: &'static str,
    },
    /// An option of the launcher's command, although no launcher is used.
    #[error(
        "{option} has no effect, because no workload manager was detected and one server would start on this machine; leave \
         it out, or name the launcher with --launcher or the nodes with --hosts"
    )]
    NoLauncher {
        /// The option that the user gave.
        option: &'static str,
    },
    /// `--launcher manual` without a number of nodes.
    #[error("--launcher manual needs --nodes N, the number of servers that you will start")]
    ManualNeedsNodes,
    /// More nodes are required than exist.
    #[error("--min-nodes asks for {wanted}, but the session has only {}", counted(*.nodes as u64, "node"))]
    MinNodes {
        /// The value of `--min-nodes`.
        wanted: u16,
        /// The number of hosts.
        nodes: usize,
    },
    /// No servers, or more than a session can have.
    #[error("a session has 1 to {NODES_MAX} nodes, but --local or --nodes asks for {nodes}")]
    NodeCount {
        /// The number of servers.
        nodes: usize,
    },
    /// A host is listed twice.
    #[error("'{host}' is listed twice; a host runs one server of a session, so list it once")]
    DuplicateHost {
        /// The name that is listed twice.
        host: String,
    },
    /// The user's list of hosts cannot be used.
    #[error("cannot use the list of hosts in {place}: {source}")]
    GivenHosts {
        /// The option or file that holds the list.
        place: String,
        /// What is wrong with the list.
        source: HostListError,
    },
    /// The manager's list of nodes cannot be used.
    #[error("cannot use the list of nodes in {place}: {source}; name the nodes with --hosts")]
    ManagerHosts {
        /// The variable, file or command that holds the list.
        place: String,
        /// What is wrong with the list.
        source: HostListError,
    },
    /// Neither the user nor a workload manager names any hosts.
    #[error("no workload manager was detected; name the nodes with --hosts or --hostfile (--launcher {launcher})")]
    NoHosts {
        /// The launcher's name.
        launcher: &'static str,
    },
    /// A variable is missing that every job of this manager should have.
    #[error("{variable} is not set, so this is not a job of {manager}; name the nodes with --hosts")]
    NoJobVariable {
        /// The environment variable that is not set.
        variable: &'static str,
        /// The name of the workload manager.
        manager: &'static str,
    },
    /// The user's hostfile cannot be read.
    #[error("cannot read the hostfile '{}': {source}", .path.display())]
    Hostfile {
        /// The path that the user gave.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The manager's list of nodes cannot be read.
    #[error("cannot read the list of nodes '{}' ({variable}): {source}; name the nodes with --hosts", .path.display())]
    ManagerList {
        /// The path that the manager gave.
        path: PathBuf,
        /// The variable that holds this path.
        variable: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A command cannot be started.
    #[error("cannot run '{command}': {source}; {way_out}")]
    Command {
        /// The command, with its arguments if they matter.
        command: String,
        /// The error of the operating system.
        source: io::Error,
        /// What the user can do.
        way_out: &'static str,
    },
    /// A command ran and failed.
    #[error("'{command}' failed: {reason}; {way_out}")]
    CommandFailed {
        /// The command with its arguments.
        command: String,
        /// The command's standard error, or how the command ended.
        reason: String,
        /// What the user can do.
        way_out: &'static str,
    },
    /// A command did not finish in time.
    #[error("'{command}' did not finish within {seconds} s; {way_out}")]
    CommandTimeout {
        /// The command with its arguments.
        command: String,
        /// The time that was allowed, in seconds.
        seconds: u64,
        /// What the user can do.
        way_out: &'static str,
    },
    /// The session's folder cannot be used.
    #[error("{0}")]
    Client(#[from] ClientError),
    /// A data dir cannot be used.
    #[error("cannot use the data dir '{}': {source}; create it on every node, or name another with --data-dir", .path.display())]
    DataDir {
        /// The data dir.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A data dir is on a network file system.
    #[error(
        "the data dir '{}' is on {kind}, a network file system; name a local drive with --data-dir, or allow it with \
         --allow-network-data-dir",
        .path.display()
    )]
    NetworkDataDir {
        /// The data dir.
        path: PathBuf,
        /// The file system.
        kind: &'static str,
    },
    /// This user may not create a folder in a data dir.
    #[error("cannot create a folder in the data dir '{}'{owner}: {source}; name another with --data-dir", .path.display())]
    DataDirNotWritable {
        /// The data dir.
        path: PathBuf,
        /// The data dir's owner and mode, if known, as a clause.
        owner: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Others could read or replace the user's folder in a data dir.
    #[error("{source}; to use another data dir of your own, name it with --data-dir{}", owner_hint(.source))]
    ExposedDataDir {
        /// What is wrong with the folder.
        source: NotPrivate,
    },
    /// A node's folder in a data dir cannot be created or locked.
    #[error("cannot create '{}': {source}; name another data dir with --data-dir", .path.display())]
    NodeFolder {
        /// The path of the folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The node already has a server.
    #[error("node {node} of session {session} already has a server; if that stands still, end its process first")]
    NodeTaken {
        /// The node number.
        node: u16,
        /// The session id.
        session: String,
    },
    /// The network interface has no usable address.
    #[error("the network interface '{name}' does not exist, is down, or has no address; 'ip addr' lists the interfaces")]
    Interface {
        /// The interface that the user named.
        name: String,
    },
    /// The key file cannot be written.
    #[error("cannot write the key file '{}': {source}; all nodes must see this file, and --key-file names another", .path.display())]
    WriteKeyFile {
        /// The path of the key file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The key file cannot be read.
    #[error("cannot read the key file '{}': {source}", .path.display())]
    ReadKeyFile {
        /// The path of the key file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// `dayfly serve` got no invitation.
    #[error(
        "'dayfly serve' needs the invitation that 'dayfly up' writes, on standard input or in a --key-file; see 'dayfly serve --help'"
    )]
    NoInvitation,
    /// The supervisor address that the user gave cannot be resolved.
    #[error("cannot resolve --rendezvous '{address}': {source}")]
    Rendezvous {
        /// The address as given.
        address: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The path of this program is not text, and so cannot be passed to other nodes.
    #[error("the path '{}' of this program is not UTF-8; move it", .0.display())]
    ProgramPath(PathBuf),
    /// Too few servers joined.
    #[error("no session: {0}")]
    TooFewNodes(String),
    /// A server joined, and then failed to start.
    #[error("the server of {member} did not start: {reason}")]
    ServerFailed {
        /// The node, with its host if there are several.
        member: String,
        /// What the server reported, or what happened to its control channel.
        reason: String,
    },
    /// The servers cannot become one session.
    #[error("no session: {0}")]
    CannotConnect(String),
    /// RDMA was required and some node lacks it.
    #[error("cannot start a session over RDMA, which --transport rdma requires: {0}")]
    NoRdma(#[source] Obstacle),
    /// Not all servers reached each other in time.
    #[error(
        "not all nodes reached each other within {seconds} s (--start-timeout); 'dayfly doctor --hosts ...' shows which do not"
    )]
    ConnectTimeout {
        /// The time that was allowed, in seconds.
        seconds: u64,
    },
    /// The user interrupted the start.
    #[error("interrupted")]
    Interrupted,
    /// The supervisor's thread ended without a result.
    #[error("the supervisor ended before the session started; this is a bug")]
    SupervisorEnded,
    /// Something that the session needs is gone.
    #[error("{0}")]
    Lost(String),
    /// The server cannot connect to the supervisor.
    #[error(
        "the server on {host} cannot reach the supervisor that invited it: {source}; the supervisor may have ended, or \
         a firewall may block its port"
    )]
    SupervisorUnreachable {
        /// The server's host.
        host: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The supervisor accepted the server's connection but never answered.
    #[error("the supervisor let this server join and then sent nothing for {seconds} s; it may have been killed")]
    SupervisorSilent {
        /// How long the server waited.
        seconds: u64,
    },
    /// The server may not open enough files.
    #[error(
        "a server may have only {limit} files open here, and needs at least {SERVER_DESCRIPTORS_MIN}: raise the hard limit with \
         'ulimit -n', 'nofile' in /etc/security/limits.conf, or LimitNOFILE of the workload manager's daemon"
    )]
    DescriptorLimit {
        /// How many files the process may have open, at most.
        limit: u64,
    },
    /// The control channel failed.
    #[error("the control channel to the supervisor failed: {0}")]
    ControlChannel(#[source] io::Error),
    /// The supervisor and the server are different builds.
    #[error("{}", version_mismatch(.launcher))]
    VersionMismatch {
        /// The launcher's version.
        launcher: String,
    },
    /// The server got SIGTERM before it began to serve.
    #[error("ended by SIGTERM")]
    Terminated,
    /// The server's parts failed to start.
    #[error("{0}")]
    Server(#[source] StartError),
    /// A check that is made before the session starts has failed.
    #[error("{0}")]
    Preflight(#[from] crate::preflight::PreflightError),
    /// A call of the operating system failed.
    #[error("{action}: {source}")]
    Io {
        /// What failed, beginning with "cannot".
        action: String,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl LaunchError {
    /// Adds the failed action to an I/O error.
    pub(crate) fn io<E: Into<io::Error>>(action: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { action: action.into(), source: source.into() }
    }

    /// Returns whether the options are at fault, so that the same call can never succeed.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::InvalidPrefix { .. }
            | Self::ArenaTooSmall { .. }
            | Self::ArenaTooLarge { .. }
            | Self::StageInMemoryTooSmall { .. }
            | Self::KeepNeedsSurvivors { .. }
            | Self::EncryptNeedsTcp
            | Self::UnknownLauncher { .. }
            | Self::LocalWithLauncher { .. }
            | Self::LocalWithHosts { .. }
            | Self::NoLauncher { .. }
            | Self::ManualNeedsNodes
            | Self::MinNodes { .. }
            | Self::NodeCount { .. }
            | Self::DuplicateHost { .. }
            | Self::GivenHosts { .. }
            | Self::NoHosts { .. }
            | Self::NoJobVariable { .. }
            | Self::Hostfile { .. }
            | Self::NoInvitation
            | Self::Rendezvous { .. } => true,
            Self::Preflight(error) => error.is_usage(),
            _ => false,
        }
    }
}

fn for_workers(workers: Option<u16>) -> String {
    workers.map_or_else(String::new, |workers| format!(" for {} (--stage-in-workers)", counted(workers.into(), "worker")))
}

fn version_mismatch(launcher: &str) -> String {
    let own = env!("CARGO_PKG_VERSION");
    let difference = if launcher == own {
        format!("this server's build of dayfly {own} differs from the launcher's")
    } else {
        format!("this server's version ({own}) differs from the launcher's ({launcher})")
    };
    format!("{difference}; use the same dayfly binary on all nodes")
}

/// Names, in parentheses, the user who can remove a folder that is in the place of ours. Returns an
/// empty string if the user is unknown.
pub fn owner_hint(exposed: &NotPrivate) -> String {
    let Some(owner) = exposed.owner() else { return String::new() };
    let name = User::from_uid(owner.into()).ok().flatten().map_or_else(String::new, |user| format!(" ('{}')", user.name));
    format!(" (only user {owner}{name} or root can remove it)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_mismatch_names_both_versions() {
        let own = env!("CARGO_PKG_VERSION");
        let other = LaunchError::VersionMismatch { launcher: "9.9.9".to_owned() }.to_string();
        assert!(other.contains(&format!("version ({own}) differs from the launcher's (9.9.9)")), "{other}");
        let same = LaunchError::VersionMismatch { launcher: own.to_owned() }.to_string();
        assert!(same.contains(&format!("build of dayfly {own} differs")), "{same}");
    }
}
