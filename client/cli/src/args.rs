//! The command line, as data.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::size;

/// An ad hoc distributed file system for deep-learning jobs.
///
/// A session lives as long as its job: servers, one a node, hold a data set unpacked on the nodes' local drives under one
/// namespace. The whole of a job is
///
///   dayfly run --stage-in 'train.tar:/dayfly/train' -- CMD
///
/// CMD and all its children, unchanged, see the namespace below /dayfly (or --prefix), read-only: a library that is loaded
/// before the C library shows it to them. It cannot reach static programs, programs for musl, set-user-ID programs and raw
/// system calls.
///
/// A path of the namespace is written as programs see it, prefix included (/dayfly/train); any other path is a local file.
/// The session meant is that of DAYFLY_SESSION, else your job's, else the only one you run on this machine.
/// Exit status: 0 done, 1 failed, 2 wrong usage, 3 staged in but for what --keep-going left out; of run and exec, CMD's own, or 125 if they failed themselves, 126 if CMD cannot be
/// run, 127 if it is not there.
#[derive(Parser)]
#[command(name = "dayfly", version, max_term_width = 110)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    Up(Up),
    StageIn(StageIn),
    Run(Run),
    Exec(Exec),
    Env(Env),
    Ls(Ls),
    Stat(Stat),
    Cat(Cat),
    Cp(Cp),
    Du(Du),
    Df(Df),
    Verify(Verify),
    Status(Status),
    Top(Top),
    Metrics(Metrics),
    Tune(Tune),
    Doctor(Doctor),
    Down(Down),
    Clean(Clean),
    Serve(Serve),
    #[command(hide = true)]
    IsPreloaded,
}

/// Start a session: one server a node; print its id once all are ready.
///
/// Within a job of Slurm, Flux, PBS or LSF one is started on each of its nodes, by the manager's own command; elsewhere one on this
/// machine, or those of --local, --hosts or --hostfile. A process stays behind that keeps the session: it ends when that process is
/// ended, with the job for one.
#[derive(Args)]
pub(crate) struct Up {
    #[command(flatten)]
    pub(crate) session: SessionOptions,
    /// Go on for so long (90s, 30m, 2h, 1d) after this job has ended: for a following job of yours on the same nodes, which finds the
    /// session there, and ends it with 'dayfly down'. Only where servers may outlive a job: by ssh, for one.
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = "How long it lives")]
    pub(crate) keep: Option<std::time::Duration>,
    /// Stay until the session ends, and end it when this is interrupted.
    #[arg(long, help_heading = "How long it lives")]
    pub(crate) foreground: bool,
    /// The same, for an `up` that does not.
    #[arg(long, hide = true)]
    pub(crate) background: bool,
}

#[derive(Args, Clone)]
#[command(next_help_heading = "What each server has")]
pub(crate) struct SessionOptions {
    /// Keep blocks below DIR; may be given for several drives. [default: $SLURM_TMPDIR, else $TMPDIR, else /tmp]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Vec<PathBuf>,
    /// What each node may take on its data dirs. [default: its share of 90 % of what is free]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) capacity: Option<u64>,
    /// Each server's memory for blocks of other nodes. [default: 256MiB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: Option<u64>,
    /// Each server's memory for stage-ins, all that run at once together. [default: 1GiB, or less where the control group has little]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) stage_in_memory: Option<u64>,
    /// How many units of its sources each server reads at a time in a stage-in. [default: its share of the cores, 16 at most]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=dayfly_meta::limits::WORKERS_MAX as i64))]
    pub(crate) stage_in_workers: Option<u16>,
    /// A stage-in of which no node makes progress for so long ends, and says what it waits for. [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub(crate) stage_in_timeout: Option<u64>,
    /// Where programs see the namespace.
    #[arg(long, value_name = "PATH", default_value = "/dayfly")]
    pub(crate) prefix: OsString,
    /// How nodes reach each other: rdma, or no session; tcp; auto takes RDMA where every pair of nodes has it. `dayfly status` says which.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = Network::Auto)]
    pub(crate) transport: Network,
    /// The RDMA card to take, and its port. [default: of those whose port is up the nearest to the data dir]
    #[arg(long, value_name = "NAME[:PORT]")]
    pub(crate) rdma_device: Option<String>,
    /// Service level (RoCE: priority) of RDMA traffic, by which a site keeps it apart from other traffic.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=15))]
    pub(crate) service_level: u8,
    /// Traffic class of RDMA packets; of RoCE the IP header's: DSCP x 4.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) traffic_class: u8,
    /// Encrypt and authenticate every byte between nodes: by TCP then, for a card writes bytes as they are. See docs/SECURITY.md.
    #[arg(long)]
    pub(crate) encrypt: bool,
    /// Check every chunk that a process reads, also out of memory and drives of its own node, against the checksum taken at stage-in.
    #[arg(long)]
    pub(crate) verify_reads: bool,
    /// Accept a data dir on a network file system, which is what a session exists to avoid.
    #[arg(long)]
    pub(crate) allow_network_data_dir: bool,
    /// For tests: every deadline of the session divided by this.
    #[arg(long, hide = true, value_name = "N", env = "DAYFLY_DEADLINES_DIVISOR", hide_env = true, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=dayfly_meta::deadlines::Deadlines::DIVISOR_MAX as i64))]
    pub(crate) deadlines_divisor: u32,
    #[command(flatten)]
    pub(crate) launch: LaunchOptions,
}

/// Where servers run, and how they are started.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Where servers run")]
pub(crate) struct LaunchOptions {
    /// Start N servers on this machine, each a node with its own data folder, socket and address. [default: 1, where this is no job]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=250))]
    pub(crate) local: Option<u16>,
    /// Start one on each of these, by ssh unless --launcher says otherwise. As managers write it: n[1-3,7],m01
    #[arg(long, value_name = "HOST,...", conflicts_with = "hostfile")]
    pub(crate) hosts: Vec<String>,
    /// The same, from a file: the first word of each line.
    #[arg(long, value_name = "FILE")]
    pub(crate) hostfile: Option<PathBuf>,
    /// How to start them. [default: the manager's whose job this is, on all of its nodes]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(crate::launch::launcher_names()))]
    pub(crate) launcher: Option<String>,
    /// More options for what starts them, parted at spaces; may be given several times.
    #[arg(long, value_name = "OPTIONS", allow_hyphen_values = true)]
    pub(crate) launcher_args: Vec<String>,
    /// With --launcher manual: how many will be started by hand, by 'dayfly serve'.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) nodes: Option<u16>,
    /// Where the launcher gives servers no standard input, and by hand: the file that tells them the session and its key, on a file
    /// system that all nodes see. It is readable by you alone, and removed once all have come. [default: in the working directory]
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// How long nodes may take to come and to find each other.
    #[arg(long, value_name = "SECONDS", default_value_t = dayfly_meta::limits::START_TIMEOUT.as_secs(), value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub(crate) start_timeout: u64,
    /// Go on without nodes that do not come, if so many do. [default: all]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) min_nodes: Option<u16>,
    /// The network interface by which nodes reach each other. [default: that by which they find who started them]
    #[arg(long, value_name = "NAME")]
    pub(crate) interface: Option<String>,
}

/// Values of --transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Network {
    /// RDMA where every pair of nodes has it, else TCP.
    Auto,
    /// RDMA, or no session.
    Rdma,
    /// TCP.
    Tcp,
    /// RDMA by the crate async-rdma, or no session: a second provider, to compare with.
    #[cfg(feature = "async-rdma")]
    AsyncRdma,
}

/// Stage sources into the namespace, as one dataset at TARGET.
///
/// A source is a file, a glob, a directory, or @LIST: a file with such sources, one a line, relative to its own folder. They are taken as cp would: one directory becomes TARGET, several lie in it under
/// their names; a file lies in TARGET under its name. A tar archive (plain or in gzip, zstd, xz, bzip2 or lz4, told by its content) and a zip (named .zip, .whl, .egg,
/// .jar or .cbz) are unpacked into TARGET.
/// Where sources overlap, it comes out as if they had been unpacked one after another in the order given. The dataset
/// appears on all nodes at once, or not at all. Blocks are stored in random order: see docs/SEMANTICS.md on shuffling.
#[derive(Args)]
pub(crate) struct StageIn {
    /// SOURCE... TARGET; TARGET is a path of the namespace.
    #[arg(required = true, num_args = 2.., value_names = ["SOURCE", "TARGET"])]
    pub(crate) paths: Vec<OsString>,
    #[command(flatten)]
    pub(crate) options: StageInOptions,
    /// Tell each event as a line of JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Default)]
#[command(next_help_heading = "What is staged in")]
pub(crate) struct StageInOptions {
    /// Drop the first N components of each name, as tar does.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) strip_components: u32,
    /// Take only files whose name matches GLOB; * also matches slashes, and a match may begin at any component.
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,
    /// Leave out what matches GLOB, and what lies below it.
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Keep archives as they are, each one file: for loaders that read archives themselves.
    #[arg(long)]
    pub(crate) no_unpack: bool,
    /// Unpack archives within archives and trees too: each becomes a directory, named as it is without its ending.
    #[arg(long, conflicts_with = "no_unpack")]
    pub(crate) nested: bool,
    /// Keep files together that are one sample: by their stem, those of a directory whose names differ only after their last
    /// dot (k.jpg, k.json). They have one owner and lie side by side.
    #[arg(long, value_name = "BY")]
    pub(crate) group: Option<Group>,
    /// What becomes of samples of one path, with different content, in several sources that one pattern or @LIST names.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = OnConflict::Error)]
    pub(crate) on_conflict: OnConflict,
    /// Directories that the dataset may have. [default: 1 million, and 4 more for each file]
    #[arg(long, value_name = "N")]
    pub(crate) max_directories: Option<u64>,
    /// Unpack each archive into a directory of its own, named as it is without its ending.
    #[arg(long, conflicts_with = "no_unpack")]
    pub(crate) prefix_by_source: bool,
    /// Leave out what cannot be read, and list it, rather than fail. `stage-in` then exits with 3 if anything was left out; `run` goes on.
    #[arg(long)]
    pub(crate) keep_going: bool,
    /// Read no more than SIZE of the sources in a second, all nodes together: for the sake of others on the file system and of
    /// programs on the nodes.
    #[arg(long, value_name = "SIZE", value_parser = size::parse_rate)]
    pub(crate) max_rate: Option<u64>,
    /// Write a page with plots to FILE: rates, balance, sizes, classes, and what took the time.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Seed of the placement and of the order in which blocks are stored: the same seed parts the same data set in the same way.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Replace the dataset at TARGET. Until the new one is whole, the old one is read.
    #[arg(long)]
    pub(crate) replace: bool,
}

/// What becomes of samples of one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnConflict {
    /// They end the stage-in; nothing is staged in.
    #[default]
    Error,
    /// The later one stands, as if they had been unpacked one after another; replaced ones are counted.
    Replace,
}

/// What files are kept together by.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    /// Directory and name up to its last dot.
    Stem,
}

/// Run CMD in a session of its own: up, stage in, CMD, down.
///
/// The session ends when CMD does, whatever else it has started. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to CMD, which has
/// 30 seconds to end; SIGUSR1 and SIGUSR2 are passed on. Exits with CMD's status.
#[derive(Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) session: SessionOptions,
    /// Stage SOURCE (a file, glob or directory) into TARGET before CMD starts; the two part at the last ':/'. May be given
    /// several times, each with a TARGET of its own; several archives into one TARGET are a glob.
    #[arg(long, value_name = "SOURCE:TARGET", help_heading = "What is staged in")]
    pub(crate) stage_in: Vec<OsString>,
    #[command(flatten)]
    pub(crate) options: StageInOptions,
    /// The command.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

/// Run CMD as part of the session.
#[derive(Args)]
pub(crate) struct Exec {
    /// As a process of node K. [default: the lowest of this machine]
    #[arg(long, value_name = "K")]
    pub(crate) node: Option<u16>,
    /// The command.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

/// Print the variables that make a process part of the session.
///
/// Use it as: eval "$(dayfly env)". It reaches what the shell then starts, not the shell itself: its own cd, globs and < see no
/// namespace; those of `dayfly exec -- bash` do.
#[derive(Args)]
pub(crate) struct Env {
    /// As a process of node K. [default: the lowest of this machine]
    #[arg(long, value_name = "K")]
    pub(crate) node: Option<u16>,
}

/// Look at a node, or at nodes and the ways between them: whether each has what a session takes.
///
/// Tells of each thing whether it is ok, slow or missing, and what to do. RDMA is tried in earnest: by a write that has to come
/// through. Exit status: 0, or 1 where something is missing that no session can do without.
#[derive(Args, Clone)]
pub(crate) struct Doctor {
    /// Look at these, each by a `dayfly doctor` there, and at each pair of them (of more than 8 at each with the next).
    #[arg(long, value_name = "HOST,...", value_delimiter = ',')]
    pub(crate) hosts: Vec<String>,
    /// How to start a program on a host: COMMAND HOST PROGRAM...
    #[arg(long, value_name = "COMMAND", default_value = "ssh -o BatchMode=yes -o ConnectTimeout=10")]
    pub(crate) ssh: String,
    /// The data dirs to try. [default: as of `dayfly up`]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Vec<PathBuf>,
    /// The RDMA card to try, and its port. [default: as of `dayfly up`]
    #[arg(long, value_name = "NAME[:PORT]")]
    pub(crate) rdma_device: Option<String>,
    /// Tell it as JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// For --hosts: be the far side of a pair.
    #[arg(long, hide = true)]
    pub(crate) answer: bool,
    /// For --hosts: be the near side of a pair.
    #[arg(long, hide = true, value_name = "ADDRESS")]
    pub(crate) reach: Option<String>,
}

/// List directories of the namespace.
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Ls {
    /// Print help.
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Long: type and permissions, links, owner, group, size, time.
    #[arg(short)]
    pub(crate) long: bool,
    /// Also what lies below.
    #[arg(short = 'R')]
    pub(crate) recursive: bool,
    /// Sizes for people.
    #[arg(short = 'h')]
    pub(crate) human: bool,
    /// Paths of the namespace. [default: all of it]
    pub(crate) paths: Vec<OsString>,
}

/// Tell all about a path: attributes, blocks and their nodes, where on the PFS it came from.
#[derive(Args)]
pub(crate) struct Stat {
    /// Paths of the namespace.
    #[arg(required = true)]
    pub(crate) paths: Vec<OsString>,
}

/// Write files of the namespace to standard output.
#[derive(Args)]
pub(crate) struct Cat {
    /// Paths of the namespace.
    #[arg(required = true)]
    pub(crate) paths: Vec<OsString>,
}

/// Copy out of the namespace, with permissions, times, symlinks and hard links.
#[derive(Args)]
pub(crate) struct Cp {
    /// Directories with all that is in them.
    #[arg(short, visible_short_alias = 'R')]
    pub(crate) recursive: bool,
    /// SOURCE... TARGET; the sources in the namespace, TARGET a local file or directory.
    #[arg(required = true, num_args = 2.., value_names = ["SOURCE", "TARGET"])]
    pub(crate) paths: Vec<OsString>,
}

/// Tell how many bytes the files below a directory have.
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Du {
    /// Print help.
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Only the sum of each path.
    #[arg(short)]
    pub(crate) summarize: bool,
    /// Sizes for people; else in KiB.
    #[arg(short = 'h')]
    pub(crate) human: bool,
    /// Paths of the namespace. [default: all of it]
    pub(crate) paths: Vec<OsString>,
}

/// Tell how much room the nodes have.
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Df {
    /// Print help.
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
    /// Sizes for people; else in KiB.
    #[arg(short = 'h')]
    pub(crate) human: bool,
}

/// Read blocks back and check them against the checksums taken at stage-in.
///
/// Each block is read once, from a node that does not own it: through the network and the arena, as a program there would.
#[derive(Args)]
pub(crate) struct Verify {
    /// Read every block from every node of this machine; 'srun --overlap dayfly verify --from-every-node' does so on all.
    #[arg(long)]
    pub(crate) from_every_node: bool,
    /// A path of the namespace. [default: all of it]
    pub(crate) path: Option<OsString>,
}

/// Tell what each node holds and has room for, what was read from where, and what holds readers up.
#[derive(Args)]
pub(crate) struct Status {
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Watch what nodes and their processes read, from where, and what holds them up.
///
/// Rates are those since the line before. Sources: 'own', this node's segment; 'kept', its copy of what others own; 'arena', fetched by
/// another process or ahead; 'asked', waited for. Of prefetch: 'hits' had come before they were read, 'late' had not, 'wasted' were not
/// read. The last line names the bottleneck.
#[derive(Args)]
pub(crate) struct Top {
    /// Seconds between two looks.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = positive)]
    pub(crate) interval: f64,
    /// End after N looks. [default: never; once where the output is no terminal]
    #[arg(long, value_name = "N")]
    pub(crate) count: Option<u64>,
}

fn duration(text: &str) -> Result<std::time::Duration, String> {
    let unit = text.chars().next_back().and_then(|unit| match unit {
        's' => Some(1),
        'm' => Some(60),
        'h' => Some(3600),
        'd' => Some(86400),
        _ => None,
    });
    let seconds = unit.and_then(|unit| text[..text.len() - 1].parse::<u64>().ok()?.checked_mul(unit));
    let seconds = seconds.filter(|seconds| (1..=30 * 86400).contains(seconds));
    seconds
        .map(std::time::Duration::from_secs)
        .ok_or_else(|| format!("'{text}' is no time like 90s, 30m, 2h or 1d, of 30 days at most"))
}

fn positive(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.05..=3600.0).contains(seconds));
    seconds.ok_or_else(|| format!("'{text}' is no number of seconds between 0.05 and 3600"))
}

/// Print what this node counts, as Prometheus reads it; docs/METRICS.md describes it.
#[derive(Args)]
pub(crate) struct Metrics {
    /// Of all nodes.
    #[arg(long)]
    pub(crate) all_nodes: bool,
    /// Print what each of them means instead, as a page.
    #[arg(long)]
    pub(crate) describe: bool,
}

/// Change how nodes fetch ahead and what they keep, at once and on all of them; prints what holds now.
#[derive(Args)]
pub(crate) struct Tune {
    /// How far to fetch ahead of readers that have submitted their order: 'auto', 'off' or a number of samples.
    #[arg(long, value_name = "auto|off|N", value_parser = depth)]
    pub(crate) prefetch: Option<dayfly_meta::wire::status::Depth>,
    /// What may be taken of each server's arena for it. [at first: half]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) prefetch_memory: Option<u64>,
    /// What each node may keep of other nodes' blocks on its drives: 'all' that is free, 'off' or a size. What is kept already is
    /// chosen anew. [at first: all]
    #[arg(long, value_name = "all|off|SIZE", value_parser = cache)]
    pub(crate) cache: Option<u64>,
}

fn depth(text: &str) -> Result<dayfly_meta::wire::status::Depth, String> {
    use dayfly_meta::wire::status::Depth;
    match text {
        "auto" => Ok(Depth::Auto),
        "off" => Ok(Depth::Samples(0)),
        number => {
            number.parse().map(Depth::Samples).map_err(|_| format!("'{text}' is neither auto nor off nor a number of samples"))
        }
    }
}

fn cache(text: &str) -> Result<u64, String> {
    match text {
        "all" => Ok(dayfly_meta::wire::status::CACHE_ALL_ROOM),
        "off" => Ok(0),
        number => size::parse(number),
    }
}

/// Be a node's server. 'dayfly up' starts these; by hand only where it does not know how.
///
/// There, 'dayfly up --launcher manual --nodes N --key-file FILE' waits for N of them, started with the same --key-file. They end
/// with the session, or with who started it.
#[derive(Args)]
pub(crate) struct Serve {
    /// What 'dayfly up' has written for its servers; '-' is standard input.
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub(crate) key_file: PathBuf,
    /// Where 'dayfly up' is, if servers cannot find it at the addresses that its file tells.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) rendezvous: Option<String>,
}

/// Remove what sessions left on this machine whose servers were killed: empty folders, sockets and locks; never a running one's.
///
/// For users, and for epilogs of batch systems, on behalf of the job's user. 'dayfly up' does the same before it starts anything.
#[derive(Args)]
pub(crate) struct Clean {
    /// Clean in this data dir, besides where sessions have their sockets; may be given several times. [default: $SLURM_TMPDIR, else $TMPDIR, else /tmp]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Vec<PathBuf>,
}

/// End the session on all nodes and give everything back; done already is as good.
///
/// Which one, where you have several, is said by DAYFLY_SESSION.
#[derive(Args)]
pub(crate) struct Down {}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn times_have_a_unit() {
        let check =
            |text: &str, expect: Option<u64>| assert_eq!(super::duration(text).ok().map(|time| time.as_secs()), expect, "{text}");
        check("90s", Some(90));
        check("2h", Some(7200));
        check("30d", Some(2_592_000));
        ["", "s", "5", "0s", "31d", "-1h", "1 h", "1é", "18446744073709551615d"].iter().for_each(|text| check(text, None));
    }

    #[test]
    fn the_command_line_contradicts_itself_nowhere() {
        super::Arguments::command().debug_assert();
    }
}
