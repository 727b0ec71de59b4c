//! The options of a session, independent of any command line.

use std::path::PathBuf;
use std::time::Duration;

use dayfly_meta::limits::START_TIMEOUT;
use dayfly_server::Preference;

/// The settings that each server of a session gets, and where the servers run.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Directories on the nodes' drives that hold blocks. Empty: chosen from the environment.
    pub data_dirs: Vec<PathBuf>,
    /// Bytes that each server may use in its data dirs. `None`: its share of what is free.
    pub capacity: Option<u64>,
    /// Bytes of each server's arena. `None`: the default.
    pub memory: Option<u64>,
    /// Bytes of memory for all stage-ins on a server. `None`: a bound that fits its control group.
    pub stage_in_memory: Option<u64>,
    /// Stage-in workers of each server. `None`: its share of the cores.
    pub stage_in_workers: Option<u16>,
    /// Reads of samples that each server makes at the same time on the parallel file system. `None`: the default.
    pub pfs_streams: Option<u16>,
    /// Bytes per second that each server reads to recover the blocks of lost nodes; 0 to recover nothing in the background. `None`:
    /// the default.
    pub recovery_rate: Option<u64>,
    /// How long readers wait for samples of compressed archives that are read again after the loss of a node; 0 to not read them
    /// again. `None`: the default.
    pub recovery_timeout: Option<Duration>,
    /// How long a stage-in may stand still before it fails. `None`: the default.
    pub stage_in_timeout: Option<Duration>,
    /// How long a server may be silent before it counts as lost. `None`: the default.
    pub lost_after: Option<Duration>,
    /// The factor of [`dayfly_meta::deadlines::Deadlines::patient`]. Options that set a deadline override it.
    pub patience: u32,
    /// Whether the supervisor starts a new server in the place of one that has died.
    pub restarts_lost: bool,
    /// The absolute path below which programs see the namespace.
    pub prefix: Vec<u8>,
    /// How nodes reach each other.
    pub transport: Preference,
    /// RDMA card, as `NAME` or `NAME:PORT`. `None`: the one nearest to the data dir.
    pub rdma_device: Option<String>,
    /// Service level of RDMA traffic, 0 to 15.
    pub service_level: u8,
    /// Traffic class of RDMA packets.
    pub traffic_class: u8,
    /// Whether every byte between nodes is encrypted.
    pub encrypt: bool,
    /// Whether clients check every chunk that they read.
    pub verify_reads: bool,
    /// Whether a data dir may lie on a network file system.
    pub allow_network_data_dir: bool,
    /// Divides every deadline of the session; for tests.
    pub deadlines_divisor: u32,
    /// Renews leases along a tree of this width, even in a small session; for tests.
    pub lease_tree_width: Option<u16>,
    /// Where the servers run.
    pub launch: LaunchOptions,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            data_dirs: Vec::new(),
            capacity: None,
            memory: None,
            stage_in_memory: None,
            stage_in_workers: None,
            pfs_streams: None,
            recovery_rate: None,
            recovery_timeout: None,
            stage_in_timeout: None,
            lost_after: None,
            patience: 1,
            restarts_lost: true,
            prefix: b"/dayfly".to_vec(),
            transport: Preference::Auto,
            rdma_device: None,
            service_level: 0,
            traffic_class: 0,
            encrypt: false,
            verify_reads: false,
            allow_network_data_dir: false,
            deadlines_divisor: 1,
            lease_tree_width: None,
            launch: LaunchOptions::default(),
        }
    }
}

/// Where the servers of a session run, and how they are started.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// Start this many servers on this machine.
    pub local: Option<u16>,
    /// Host lists such as `n[1-3]`.
    pub hosts: Vec<String>,
    /// File with one host per line.
    pub hostfile: Option<PathBuf>,
    /// Name of the launcher; `mpiexec` stands for whichever MPI is installed.
    pub launcher: Option<String>,
    /// More options for the launcher, separated by spaces.
    pub launcher_args: Vec<String>,
    /// Number of servers that the user starts by hand.
    pub nodes: Option<u16>,
    /// Where to write the key file, if the launcher needs one. `None`: the working directory.
    pub key_file: Option<PathBuf>,
    /// How long nodes may take to join, and then to connect to each other.
    pub start_timeout: Duration,
    /// The session starts without some nodes if at least this many join. `None`: all must.
    pub min_nodes: Option<u16>,
    /// Network interface through which nodes reach each other.
    pub interface: Option<String>,
}

impl Default for LaunchOptions {
    fn default() -> Self {
        Self {
            local: None,
            hosts: Vec::new(),
            hostfile: None,
            launcher: None,
            launcher_args: Vec::new(),
            nodes: None,
            key_file: None,
            start_timeout: START_TIMEOUT,
            min_nodes: None,
            interface: None,
        }
    }
}
