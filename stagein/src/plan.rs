//! Planning: the coordinator's work before anything is read.
//!
//! [`plan_sources`] expands the user's patterns to source paths (`source_paths`, `glob`),
//! determines the format of each source, and splits the sources into units (`planner`). Large plain
//! tars become several ranges (`tar_ranges`). Units are written to a temporary file (`unit_queue`),
//! so a plan of many millions of files takes little memory.
//!
//! [`check_sources`] quickly finds most errors of a plan before anything is started.
//!
//! Planning reads directories, central directories of zips and some tar headers, but no data.
//! [`sample_tars`] and [`sample_compressed`] look into tars to estimate what they contain.

mod activity;
mod compressed_samples;
mod glob;
mod planner;
mod preflight;
mod source_paths;
mod tar_ranges;
mod tar_samples;
mod unit_queue;

use std::fs::File;

use dayfly_meta::catalog::{Source, Version};
use dayfly_meta::wire::control::{Counts, Selection};
use dayfly_meta::wire::peer::Rivalry;

use activity::PlanActivity;
pub use compressed_samples::{CompressedSamples, sample_compressed};
use planner::Planner;
pub use preflight::check_sources;
pub use tar_samples::{TarSamples, sample_tars};
pub use unit_queue::UnitQueue;

use crate::StageInError;
use crate::progress::ProgressMonitor;

/// The sources that a stage-in will read, and its units of work.
pub struct StageInPlan {
    /// All sources, in order. Units refer to them by index.
    pub sources: Vec<Source>,
    /// For each source, its rivals: the other sources that must not contain any path that this
    /// source contains.
    pub rivalries: Vec<Rivalry>,
    /// The units of work for the workers.
    pub units: UnitQueue,
    /// Plain tars that are split into ranges. Each range is a unit of its own.
    pub split_tars: Vec<SplitTar>,
    /// Bytes of the sources as they are on the PFS, before any decompression.
    pub source_bytes: u64,
    /// Bytes of single files and of files in trees, which will certainly be stored.
    pub known_bytes: u64,
    /// Number of single files and files in trees. Files in archives are known only once the
    /// archives are read.
    pub known_files: u64,
    /// Total length of these files' paths, in bytes.
    pub known_names_len: u64,
    /// Whether no source is an archive, so that `known_files` counts all files.
    pub files_are_all_known: bool,
    /// What was left out while planning, such as devices in a tree.
    pub counts: Counts,
    /// What the sources unpack to.
    pub sizes: UnpackedSizes,
}

/// What sources unpack to, as far as planning tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnpackedSizes {
    /// Upper bound on the bytes of the samples that can be read again from their sources, one by one.
    pub readable_bytes_max: u64,
    /// Number of members of zips that the selection takes.
    pub zip_members: u64,
    /// Length of the compressed tars.
    pub compressed_bytes: u64,
}

impl UnpackedSizes {
    // Holes make files of any length, and zips claim any, so sums could overflow.

    fn add_readable(&mut self, bytes: u64) {
        self.readable_bytes_max = self.readable_bytes_max.saturating_add(bytes);
    }

    fn add_compressed(&mut self, bytes: u64) {
        self.compressed_bytes = self.compressed_bytes.saturating_add(bytes);
    }
}

/// A plain tar that is split into ranges.
pub struct SplitTar {
    /// Index of the tar's source.
    pub source: u32,
    /// Path of the archive.
    pub path: Vec<u8>,
    /// The file's version when it was split. A worker that finds another version fails.
    pub version: Version,
    /// The directory in the dataset below which the tar's members are placed.
    pub prefix: Vec<u8>,
    /// The rivals of the tar's source.
    pub rivalry: Rivalry,
    /// Start and end of each range, in order. The last one ends at `u64::MAX`.
    pub ranges: Vec<(u64, u64)>,
}

/// The input of planning.
pub struct PlanRequest<'a> {
    /// Paths, globs, and `@LIST`s as the user gave them.
    pub patterns: &'a [Vec<u8>],
    /// Which members to take, and how.
    pub selection: &'a Selection,
    /// Seed for the order of small units.
    pub seed: u64,
    /// Number of workers on all nodes, which decides how many ranges a large tar gets.
    pub workers: u64,
}

/// Plans a stage-in. The units are written to `temp_file`, which needs no name. `monitor` shows
/// what planning is looking at, and can cancel it.
///
/// # Errors
///
/// Any error of [`StageInError`] about a pattern or source, [`StageInError::TempFile`], and
/// [`StageInError::Cancelled`]. With `--keep-going`, sources that cannot be read are counted in
/// [`StageInPlan::counts`] instead.
pub fn plan_sources(request: &PlanRequest<'_>, temp_file: File, monitor: &ProgressMonitor) -> Result<StageInPlan, StageInError> {
    let activity = PlanActivity::new(monitor);
    let mut planner = Planner::new(request, temp_file, &activity)?;
    let paths = source_paths::expand_with_rivals(request.patterns, request.selection, &activity)?;
    let is_only_source = paths.len() == 1;
    for (path, rivalry) in paths {
        planner.add_source(path, rivalry, is_only_source)?;
    }
    planner.finish(request.seed)
}

#[cfg(test)]
mod tests;
