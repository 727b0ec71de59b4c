//! Arguments of stage-ins, which `stage-in` and `run` share.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use dayfly_meta::limits::{COPIES_MAX, DECODER_MEMORY_MAX};
use dayfly_meta::wire::control::Copies;

use super::number;
use crate::size;

/// Stage sources into the namespace, as one dataset at TARGET.
///
/// A source is a file, a glob, a directory, or @LIST: a file that names one source per line,
/// relative to the list's folder. Sources are placed as cp would place them: a single directory
/// becomes TARGET; several directories, and all files, go into TARGET under their names. A tar
/// archive (plain or compressed with gzip, zstd, xz, bzip2 or lz4, detected by its content) and a
/// zip (named .zip, .whl, .egg, .jar or .cbz) are unpacked into TARGET.
///
/// If sources overlap, the result is the same as if they had been unpacked one after another in the
/// order given. The dataset appears on all nodes at once, or not at all. Blocks are stored in
/// random order; see docs/SEMANTICS.md on shuffling.
///
/// Examples: dayfly stage-in '/pfs/train-*.tar' /dayfly/train; dayfly stage-in /pfs/images
/// /dayfly/images
#[derive(Args)]
#[command(override_usage = "dayfly stage-in [OPTIONS] <SOURCE>... <TARGET>")]
pub(crate) struct StageInArguments {
    /// SOURCE... TARGET, where TARGET is a path in the namespace.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<OsString>,
    #[command(flatten)]
    pub(crate) options: StageInOptions,
    /// Print each event as a line of JSON on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How sources become a dataset.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Stage-in")]
pub(crate) struct StageInOptions {
    /// Drop the first N components of each name, as tar does.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number::<u32>(0..=u32::MAX.into()))]
    pub(crate) strip_components: u32,
    /// Stage in only files whose name matches GLOB. A * also matches slashes, and a match may start
    /// at any component of the path.
    #[arg(long, value_name = "GLOB")]
    pub(crate) include: Vec<String>,
    /// Leave out whatever matches GLOB, and everything below it.
    #[arg(long, value_name = "GLOB")]
    pub(crate) exclude: Vec<String>,
    /// Keep each archive as one file, for loaders that read archives themselves.
    #[arg(long)]
    pub(crate) no_unpack: bool,
    /// Also unpack archives within archives and directories. Each becomes a directory that is named
    /// after it, without the extension.
    #[arg(long, conflicts_with = "no_unpack")]
    pub(crate) nested: bool,
    /// In directories, stage in what symbolic links lead to, as 'tar -h' does. A file that several
    /// links lead to is stored once.
    #[arg(long)]
    pub(crate) dereference: bool,
    /// Give files that belong together one owner, and store them side by side.
    ///
    /// With 'stem', files of one directory belong together if their names differ only after the
    /// last dot (k.jpg, k.json).
    #[arg(long, value_name = "BY")]
    pub(crate) group: Option<Group>,
    /// What to do if several sources of one glob or @LIST contain the same path with different
    /// content.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = OnConflict::Error)]
    pub(crate) on_conflict: OnConflict,
    /// Maximum number of directories in the dataset. [default: 1 million, plus 4 for each file]
    #[arg(long, value_name = "N", value_parser = number::<u64>(0..=u64::MAX))]
    pub(crate) max_directories: Option<u64>,
    /// Unpack each archive into a directory of its own, which is named after the archive, without
    /// the extension.
    #[arg(long, conflicts_with = "no_unpack")]
    pub(crate) prefix_by_source: bool,
    /// Leave out and list whatever cannot be read, instead of failing.
    ///
    /// 'dayfly stage-in' then exits with 3 if anything was left out; 'dayfly run' continues.
    #[arg(long)]
    pub(crate) keep_going: bool,
    /// Memory that the decoder of an archive may take on each node. [default: 256MiB]
    ///
    /// Archives that were compressed with a large window need more, such as those of 'zstd --long=31'. A node decodes one of these at
    /// a time. At most 4GiB, and at most the session's --stage-in-memory.
    #[arg(long, value_name = "SIZE", value_parser = decoder_memory)]
    pub(crate) decoder_memory: Option<u64>,
    /// Read at most SIZE per second from the sources, on all nodes together, to reduce the load on
    /// the parallel file system and the nodes.
    #[arg(long, value_name = "SIZE", value_parser = size::parse_rate)]
    pub(crate) max_rate: Option<u64>,
    /// Fail if not all samples fit on the nodes. Without this, a part of them is stored, and the
    /// others are read from the sources whenever they are needed. Samples in compressed archives
    /// must fit in any case.
    #[arg(long)]
    pub(crate) require_fit: bool,
    /// Number of nodes that store each block, so that the loss of a node costs no read of the sources.
    ///
    /// Fails if there is not enough room for N times the samples. With 'auto', two nodes store each
    /// block if there is certainly enough room for that, else one.
    #[arg(long, value_name = "N|auto", default_value = "1", value_parser = copies)]
    pub(crate) copies: Copies,
    /// Write a page with plots to FILE: rates, balance, sizes, classes, and where the time went.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Seed for the placement and for the order in which blocks are stored. The same seed
    /// distributes the same dataset in the same way.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = number::<u64>(0..=u64::MAX))]
    pub(crate) seed: u64,
    /// Replace the dataset at TARGET. Programs read the old one until the new one is complete.
    #[arg(long)]
    pub(crate) replace: bool,
}

fn decoder_memory(text: &str) -> Result<u64, String> {
    let allowed = 1 << 20..=DECODER_MEMORY_MAX;
    size::parse(text).and_then(|size| allowed.contains(&size).then_some(size).ok_or("a decoder may take 1MiB to 4GiB".to_owned()))
}

fn copies(text: &str) -> Result<Copies, String> {
    if text == "auto" {
        return Ok(Copies::Auto);
    }
    let number = text.parse().ok().filter(|number| (1..=COPIES_MAX).contains(number));
    number.map(Copies::Number).ok_or_else(|| format!("a number from 1 to {COPIES_MAX}, or 'auto', is wanted"))
}

/// What to do if several samples have the same path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnConflict {
    /// Fail; nothing is staged in.
    #[default]
    Error,
    /// The later sample replaces the earlier one, as if the sources had been unpacked one after
    /// another. Replacements are counted.
    Replace,
}

/// Which files belong together.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    /// Files in one directory with the same name up to the last dot.
    Stem,
}
