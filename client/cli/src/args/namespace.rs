//! Arguments of the commands that inspect the namespace and the nodes.

use std::ffi::OsString;

use clap::Args;
use dayfly_meta::wire::status::{CACHE_ALL_ROOM, Depth};

use super::number;
use crate::size;

/// List directories in the namespace.
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct LsArguments {
    /// Print this help.
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Long format: type and permissions, links, owner, group, size, time.
    #[arg(short)]
    pub(crate) long: bool,
    /// List subdirectories recursively.
    #[arg(short = 'R')]
    pub(crate) recursive: bool,
    /// Print sizes with units.
    #[arg(short = 'h')]
    pub(crate) human: bool,
    /// Paths in the namespace. [default: the whole namespace]
    pub(crate) paths: Vec<OsString>,
}

/// Show everything about a path: attributes, blocks, their nodes, and the source on the parallel
/// file system.
#[derive(Args)]
pub(crate) struct StatArguments {
    /// Paths in the namespace.
    #[arg(required = true)]
    pub(crate) paths: Vec<OsString>,
}

/// Write files in the namespace to standard output.
#[derive(Args)]
pub(crate) struct CatArguments {
    /// Paths in the namespace.
    #[arg(required = true)]
    pub(crate) paths: Vec<OsString>,
}

/// Copy files out of the namespace, with permissions, times, symbolic links and hard links.
///
/// An existing file is replaced once its copy is complete. If the target is a device or FIFO, the
/// content is written into it, and its permissions stay as they are.
#[derive(Args)]
#[command(override_usage = "dayfly cp [OPTIONS] <SOURCE>... <TARGET>")]
pub(crate) struct CpArguments {
    /// Copy directories with everything in them.
    #[arg(short, visible_short_alias = 'R')]
    pub(crate) recursive: bool,
    /// SOURCE... TARGET, where the sources are in the namespace and TARGET is a local file or
    /// directory.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<OsString>,
}

/// Show the total size of the files below a directory.
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct DuArguments {
    /// Print this help.
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Print only a total for each path.
    #[arg(short)]
    pub(crate) summarize: bool,
    /// Print sizes with units, instead of in KiB.
    #[arg(short = 'h')]
    pub(crate) human: bool,
    /// Paths in the namespace. [default: the whole namespace]
    pub(crate) paths: Vec<OsString>,
}

/// Show how much space the nodes have.
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct DfArguments {
    /// Print this help.
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Print sizes with units, instead of in KiB.
    #[arg(short = 'h')]
    pub(crate) human: bool,
}

/// Read blocks back, and check them against the checksums taken at stage-in.
///
/// Each block is read once, through a node that does not own it. It therefore crosses the network
/// and the arena, as it does for a program on that node.
#[derive(Args)]
pub(crate) struct VerifyArguments {
    /// Read every block from every node on this machine. 'srun --overlap dayfly verify
    /// --from-every-node' does so on all machines.
    #[arg(long)]
    pub(crate) from_every_node: bool,
    /// A path in the namespace. [default: the whole namespace]
    pub(crate) path: Option<OsString>,
}

/// Show what each node holds, its free space, where reads came from, and how nodes reach each other.
///
/// Below each table, lines explain its columns. Counts run from the start of the session; 'dayfly
/// top' shows rates and what slows readers down.
#[derive(Args)]
pub(crate) struct StatusArguments {
    /// Print the result as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Watch what nodes and their processes read, from where, and what slows them down.
///
/// Each screen shows the rates since the previous one, for each node and, below it, for its busiest
/// processes. The last line names the bottleneck. Columns:
///
/// 'reads/s', 'bytes/s': what processes read. The next four columns say from where, in percent of
/// the bytes: 'own', this node's segment; 'cached', its copy of a block that another node owns;
/// 'arena', chunks that were fetched ahead or by another process; 'asked', chunks that were fetched
/// while the reader waited.
///
/// 'remote/s': bytes that arrived from other nodes, asked for or fetched ahead. 'wait p50/p99': the
/// time within which half of all requests to other nodes were answered, and the time for 99 % of
/// them.
///
/// 'prefetch': samples that arrived before they were read ('hit'), that arrived too late ('late'),
/// and that were prefetched but never read ('lost'). 'ahead': how far the node fetches ahead of its
/// readers. 'queued': requests that wait for space in the arena.
#[derive(Args)]
pub(crate) struct TopArguments {
    /// Seconds between two screens.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    pub(crate) interval: f64,
    /// Stop after N screens. [default: never; one if the output is not a terminal]
    #[arg(long, value_name = "N", value_parser = number::<u64>(0..=u64::MAX))]
    pub(crate) count: Option<u64>,
}

/// Print this node's metrics in the format of Prometheus. docs/METRICS.md describes them.
#[derive(Args)]
pub(crate) struct MetricsArguments {
    /// Print the metrics of all nodes.
    #[arg(long)]
    pub(crate) all_nodes: bool,
    /// Print a page that explains each metric.
    #[arg(long)]
    pub(crate) describe: bool,
}

/// Change how all nodes prefetch and cache, and print the settings.
///
/// Example: dayfly tune --prefetch 512 --cache 20GiB
#[derive(Args)]
pub(crate) struct TuneArguments {
    /// How far to prefetch for readers that submitted their order: 'auto', 'off' or a number of
    /// samples.
    #[arg(long, value_name = "auto|off|N", value_parser = depth)]
    pub(crate) prefetch: Option<Depth>,
    /// How much of each server's arena may be used for prefetching. [initially: half]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) prefetch_memory: Option<u64>,
    /// How much space each node may use to cache other nodes' blocks on its drives: 'all' free
    /// space, 'off' or a size. [initially: all]
    ///
    /// Each node then decides again which of its cached blocks to keep. What it recovers after the loss of a
    /// node is not limited.
    #[arg(long, value_name = "all|off|SIZE", value_parser = cache)]
    pub(crate) cache: Option<u64>,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.05..=3600.0).contains(seconds));
    seconds.ok_or_else(|| format!("'{text}' is not a number of seconds between 0.05 and 3600"))
}

fn depth(text: &str) -> Result<Depth, String> {
    match text {
        "auto" => Ok(Depth::Auto),
        "off" => Ok(Depth::Samples(0)),
        number => number.parse().map(Depth::Samples).map_err(|_| format!("'{text}' is not 'auto', 'off' or a number of samples")),
    }
}

fn cache(text: &str) -> Result<u64, String> {
    match text {
        "all" => Ok(CACHE_ALL_ROOM),
        "off" => Ok(0),
        number => size::parse(number),
    }
}
