//! The planner: splits sources into units.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dayfly_meta::catalog::{Compression, Source, SourceKind, Version};
use dayfly_meta::limits::{DIRECTORIES_MAX_DEFAULT, RANGE_LEN_MIN, UNIT_BYTES_MAX, UNIT_FILES_MAX, UNIT_NAMES_LEN_MAX};
use dayfly_meta::path::{join, normalize};
use dayfly_meta::wire::control::{Counts, Selection};
use dayfly_meta::wire::peer::{Rivalry, TarRange, TreeEntry, TreeKind, Unit, Work, ZipPart};

use nix::sys::statfs::{FUSE_SUPER_MAGIC, statfs};

use super::activity::PlanActivity;
use super::tar_ranges::{TarSplit, split};
use super::unit_queue::UnitQueue;
use super::{PlanRequest, SplitTar, StageInPlan};
use crate::StageInError;
use crate::selection::{Decision, Selector};
use crate::source::directory::{Ancestors, Tree, WalkItem, single_file, subdirectories, walk};
use crate::source::plain::version_of;
use crate::source::zip::{Part, Record, ZipError, ZipKind, parts};
use crate::source::{classify, without_archive_ending};

/// Adds sources to a plan one by one.
pub(super) struct Planner<'a> {
    plan: StageInPlan,
    selector: Selector,
    selection: &'a Selection,
    workers: u64,
    activity: &'a PlanActivity<'a>,
    /// The rivals of the source that is being planned.
    rivalry: Rivalry,
}

impl<'a> Planner<'a> {
    pub(super) fn new(request: &PlanRequest<'a>, temp_file: File, activity: &'a PlanActivity<'a>) -> Result<Self, StageInError> {
        let plan = StageInPlan {
            sources: Vec::new(),
            rivalries: Vec::new(),
            units: UnitQueue::new(temp_file),
            split_tars: Vec::new(),
            source_bytes: 0,
            known_bytes: 0,
            known_files: 0,
            known_names_len: 0,
            files_are_all_known: true,
            counts: Counts::default(),
            sizes: super::UnpackedSizes::default(),
        };
        let selector = Selector::new(request.selection)?;
        let (selection, workers) = (request.selection, request.workers);
        Ok(Self { plan, selector, selection, workers, activity, rivalry: Rivalry::default() })
    }

    /// Plans the file or directory at `path`. `is_only_source` tells whether there is no other
    /// source.
    pub(super) fn add_source(&mut self, path: PathBuf, rivalry: Rivalry, is_only_source: bool) -> Result<(), StageInError> {
        self.rivalry = rivalry;
        self.activity.begin(path.as_os_str().as_bytes())?;
        let metadata = fs::metadata(&path).map_err(|error| StageInError::Read { path: path.clone(), error })?;
        let ends_with_dot = path.as_os_str().as_bytes().ends_with(b"/.");
        // As with cp, a single directory becomes the target, and several directories are placed
        // below the target under their own names.
        let prefix = if is_only_source || ends_with_dot { Vec::new() } else { name_of(&path)? };
        let planned = if metadata.is_dir() {
            self.plan_tree(path, b".", prefix, self.selection.strip_components, Ancestors::default())
        } else if metadata.is_file() {
            self.plan_file(path, None, &metadata)
        } else {
            return Err(StageInError::SpecialFile { path });
        };
        planned.or_else(|error| self.skip_or_fail(error))
    }

    /// Completes the plan. `seed` decides the order of small units.
    pub(super) fn finish(mut self, seed: u64) -> Result<StageInPlan, StageInError> {
        self.plan.units.close(seed).map_err(StageInError::TempFile)?;
        Ok(self.plan)
    }

    /// With `--keep-going`, counts an error that concerns only one source, and adds a note about
    /// it. Returns every other error.
    fn skip_or_fail(&mut self, error: StageInError) -> Result<(), StageInError> {
        if !self.selection.keep_going || !error.is_of_source() {
            return Err(error);
        }
        self.plan.counts.skip(&error.skip_note());
        Ok(())
    }

    fn push_source(&mut self, source: Source) -> u32 {
        self.plan.sources.push(source);
        self.plan.rivalries.push(self.rivalry);
        (self.plan.sources.len() - 1) as u32
    }

    fn push_unit(&mut self, unit: Unit, bytes: u64) -> Result<(), StageInError> {
        self.plan.units.push(&unit, bytes).map_err(StageInError::TempFile)
    }

    /// Plans a file. Members of an archive are placed below `prefix`. Without a prefix, the file
    /// itself is a source, and its members are placed below the target or, with
    /// `--prefix-by-source`, below a directory with the archive's name.
    fn plan_file(&mut self, path: PathBuf, prefix: Option<Vec<u8>>, metadata: &fs::Metadata) -> Result<(), StageInError> {
        let (kind, compression) = match self.selection.no_unpack {
            true => (SourceKind::File, Compression::None),
            false => classify(&path, prefix.is_some(), self.selection.decoder_memory_max())?,
        };
        self.plan.source_bytes = self.plan.source_bytes.saturating_add(metadata.len());
        let (version, inode) = (version_of(metadata), inode_of(&path, metadata));
        if kind != SourceKind::File {
            self.plan.files_are_all_known = false;
            let prefix = match prefix {
                Some(prefix) => prefix,
                None if self.selection.prefix_by_source => prefix_of(&path)?,
                None => Vec::new(),
            };
            let name = path.as_os_str().as_bytes().to_vec();
            let (rivalry, ticket) = (self.rivalry, 0);
            let source =
                self.push_source(Source { path: name.clone(), prefix: prefix.clone(), kind, compression, version, inode });
            match compression {
                Compression::None if kind == SourceKind::Zip => {}
                Compression::None => self.plan.sizes.add_readable(metadata.len()),
                _ => self.plan.sizes.add_compressed(metadata.len()),
            }
            return match (kind, compression) {
                (SourceKind::Zip, _) => self.plan_zip(source, path, &prefix, metadata),
                (_, Compression::None) => self.plan_plain_tar(source, path, &prefix, metadata),
                _ => {
                    let work = Work::Tar { path: name, compression, version };
                    self.push_unit(Unit { source, ticket, prefix, rivalry, work }, metadata.len())
                }
            };
        }
        let name = name_of(&path)?;
        if self.selector.excludes(&name) || !self.selector.includes(&name, false) {
            self.plan.counts.unselected += 1;
            return Ok(());
        }
        self.plan.known_files += 1;
        self.plan.known_bytes = self.plan.known_bytes.saturating_add(metadata.len());
        self.plan.sizes.add_readable(metadata.len());
        self.plan.known_names_len += name.len() as u64;
        let root = path.into_os_string().into_vec();
        let source = self.push_source(Source { path: root.clone(), prefix: name.clone(), kind, compression, version, inode });
        let work = Work::Tree { root, entries: vec![single_file(metadata)] };
        self.push_unit(Unit { source, ticket: 0, prefix: name, rivalry: self.rivalry, work }, metadata.len())
    }

    fn plan_plain_tar(&mut self, source: u32, path: PathBuf, prefix: &[u8], metadata: &fs::Metadata) -> Result<(), StageInError> {
        let version = version_of(metadata);
        let unreadable = |error| StageInError::Read { path: path.clone(), error };
        let splits = File::open(&path).and_then(|file| split(file, version.size, self.workers)).map_err(unreadable)?;
        let path = path.clone().into_os_string().into_vec();
        if splits.len() > 1 {
            let ranges = splits.iter().map(|split| (split.from, split.to)).collect();
            let (prefix, rivalry) = (prefix.to_vec(), self.rivalry);
            self.plan.split_tars.push(SplitTar { source, path: path.clone(), version, prefix, rivalry, ranges });
        }
        // Even a short last range counts as large, because only small units are assigned together,
        // and a range must be assigned alone.
        let bytes_min = if splits.len() > 1 { RANGE_LEN_MIN } else { 0 };
        for TarSplit { from, to, start } in splits {
            let work = Work::TarRange(TarRange { path: path.clone(), version, from, to, start });
            let bytes = (to.min(version.size) - from.min(version.size)).max(bytes_min);
            self.push_unit(Unit { source, ticket: 0, prefix: prefix.to_vec(), rivalry: self.rivalry, work }, bytes)?;
        }
        Ok(())
    }

    fn plan_zip(&mut self, source: u32, path: PathBuf, prefix: &[u8], metadata: &fs::Metadata) -> Result<(), StageInError> {
        let version = version_of(metadata);
        let file = File::open(&path).map_err(|error| StageInError::Read { path: path.clone(), error })?;
        let name = path.as_os_str().as_bytes().to_vec();
        let read = parts::<ZipPlanError>(&file, &mut |Part { records, offset, bytes }, shift| {
            for record in Record::read_all(&records, offset, shift).map_err(ZipPlanError::Zip)? {
                let is_directory = record.kind == ZipKind::Directory;
                if let Decision::Take(_) = self.selector.decide(&record.name, is_directory) {
                    self.plan.sizes.zip_members += 1;
                    self.plan.sizes.add_readable(record.size);
                }
            }
            let work = Work::Zip(ZipPart { path: name.clone(), version, records, offset, shift });
            let unit = Unit { source, ticket: 0, prefix: prefix.to_vec(), rivalry: self.rivalry, work };
            self.push_unit(unit, bytes).map_err(ZipPlanError::StageIn)
        });
        match read {
            Ok(()) => Ok(()),
            Err(ZipPlanError::StageIn(error)) => Err(error),
            Err(ZipPlanError::Zip(error)) => Err(error.into_stage_in_error(&path)),
        }
    }

    /// Plans a tree. If components are to be stripped, its subdirectories become trees of their
    /// own, as if the user had named them. Patterns match the names before that, in which the tree is `spelled`.
    fn plan_tree(
        &mut self,
        root: PathBuf,
        spelled: &[u8],
        prefix: Vec<u8>,
        strip: u32,
        mut above: Ancestors,
    ) -> Result<(), StageInError> {
        let is_dereferenced = self.selection.dereference;
        if strip > 0 {
            if is_dereferenced {
                let unreadable = |error| StageInError::Read { path: root.clone(), error };
                if let Err(error) = above.enter(&root, &fs::metadata(&root).map_err(unreadable)?) {
                    return self.skip_or_fail(error);
                }
            }
            let (subdirectories, others) = subdirectories(&root, is_dereferenced)?;
            self.plan.counts.unselected += others;
            for subdirectory in subdirectories {
                let spelled = join(spelled, subdirectory.file_name().unwrap_or_default().as_bytes());
                match self.selector.excludes(&spelled) {
                    true => self.plan.counts.unselected += 1,
                    false => self.plan_tree(subdirectory, &spelled, prefix.clone(), strip - 1, above.clone())?,
                }
            }
            return Ok(());
        }
        let path = root.as_os_str().as_bytes().to_vec();
        // Each file of a tree has times of its own, so the version of the root is not recorded.
        let source = self.push_source(Source {
            path: path.clone(),
            prefix: prefix.clone(),
            kind: if is_dereferenced { SourceKind::FollowedDirectory } else { SourceKind::Directory },
            compression: Compression::None,
            version: Version::default(),
            inode: 0,
        });
        let (mut batch, mut unpacked) = (TreeBatch::default(), HashMap::new());
        let selector = std::mem::replace(&mut self.selector, Selector::new(&Selection::default())?);
        let activity = self.activity;
        let check_in = |path: &Path| activity.begin(path.as_os_str().as_bytes());
        // The directories that a selection leaves out count here, but not in the dataset.
        let directories_max = self.selection.max_directories.unwrap_or(0).max(DIRECTORIES_MAX_DEFAULT);
        let tree = Tree { root: &root, spelled, selector: &selector, is_dereferenced, above, directories_max };
        let result = walk(tree, &check_in, &mut |item| {
            match item {
                WalkItem::Special => self.plan.counts.special += 1,
                WalkItem::Unselected => self.plan.counts.unselected += 1,
                WalkItem::Unreadable(error) => self.skip_or_fail(error)?,
                WalkItem::TooLong(path) => {
                    self.plan.counts.refused += 1;
                    self.plan.counts.note(&format!("'{}' is refused: its path is too long", path.display()));
                }
                WalkItem::Entry(mut entry) => {
                    if self.selection.nested {
                        match self.plan_in_tree(&root, &prefix, &mut entry, &mut unpacked) {
                            Ok(false) => {}
                            planned => return planned.map(drop).or_else(|error| self.skip_or_fail(error)),
                        }
                    }
                    if let TreeKind::File(size) = entry.kind {
                        self.plan.known_files += 1;
                        self.plan.source_bytes = self.plan.source_bytes.saturating_add(size);
                        self.plan.known_bytes = self.plan.known_bytes.saturating_add(size);
                        self.plan.sizes.add_readable(size);
                    }
                    self.plan.known_names_len += entry.path.len() as u64;
                    if batch.push(entry) {
                        self.push_tree_unit(source, &prefix, &path, &mut batch)?;
                    }
                }
            }
            Ok(())
        });
        self.selector = selector;
        result?;
        self.push_tree_unit(source, &prefix, &path, &mut batch)
    }

    /// Plans a file of a tree that is an archive. Returns `false` for all others. `unpacked` are the archives of the tree so far, with
    /// their lengths.
    fn plan_in_tree(
        &mut self,
        root: &Path,
        prefix: &[u8],
        entry: &mut TreeEntry,
        unpacked: &mut HashMap<Vec<u8>, u64>,
    ) -> Result<bool, StageInError> {
        // Nothing can be a hard link to the directory that an archive has become.
        if let TreeKind::HardLink(first) = &entry.kind
            && let Some(len) = unpacked.get(first)
        {
            entry.kind = TreeKind::File(*len);
        }
        let (TreeKind::File(len), Some(stem)) = (&entry.kind, without_archive_ending(&entry.path)) else { return Ok(false) };
        let file = root.join(OsStr::from_bytes(&entry.path));
        let metadata = fs::metadata(&file).map_err(|error| StageInError::Read { path: file.clone(), error })?;
        match self.plan_file(file, Some(join(prefix, stem)), &metadata) {
            // A file with an archive's name may be just a file.
            Err(StageInError::NotAnArchive { .. }) => Ok(false),
            Err(error) => Err(error),
            Ok(()) => {
                unpacked.insert(entry.path.clone(), *len);
                Ok(true)
            }
        }
    }

    fn push_tree_unit(&mut self, source: u32, prefix: &[u8], root: &[u8], batch: &mut TreeBatch) -> Result<(), StageInError> {
        let TreeBatch { entries, bytes, .. } = std::mem::take(batch);
        if entries.is_empty() {
            return Ok(());
        }
        let work = Work::Tree { root: root.to_vec(), entries };
        self.push_unit(Unit { source, ticket: 0, prefix: prefix.to_vec(), rivalry: self.rivalry, work }, bytes)
    }
}

/// Returns the directory below which an archive's members are placed with `--prefix-by-source`: the
/// archive's file name without an ending such as `.tar.gz`. If the name has no such ending, its
/// last extension is removed.
fn prefix_of(path: &Path) -> Result<Vec<u8>, StageInError> {
    let name = name_of(path)?;
    let stem = without_archive_ending(&name).map(<[u8]>::to_vec);
    Ok(stem.unwrap_or_else(|| Path::new(OsStr::from_bytes(&name)).file_stem().unwrap_or_default().as_bytes().to_vec()))
}

/// Returns the inode for the catalog. On FUSE each node may number inodes in its own way, so 0 is returned there.
fn inode_of(path: &Path, metadata: &fs::Metadata) -> u64 {
    let is_fuse = statfs(path).is_ok_and(|answer| answer.filesystem_type() == FUSE_SUPER_MAGIC);
    if is_fuse { 0 } else { metadata.ino() }
}

fn name_of(path: &Path) -> Result<Vec<u8>, StageInError> {
    let name = path.file_name().unwrap_or_default();
    normalize(name.as_bytes()).map_err(|_| StageInError::NoMatch(path.display().to_string()))
}

/// Why a zip cannot be planned.
enum ZipPlanError {
    /// The zip is to blame.
    Zip(ZipError),
    /// The plan itself failed.
    StageIn(StageInError),
}

impl From<ZipError> for ZipPlanError {
    fn from(error: ZipError) -> Self {
        Self::Zip(error)
    }
}

/// Entries of a tree that become one unit.
#[derive(Default)]
struct TreeBatch {
    entries: Vec<TreeEntry>,
    /// Total size of their files, in bytes.
    bytes: u64,
    /// Total length of their paths and link targets, in bytes.
    names_len: usize,
}

impl TreeBatch {
    /// Adds an entry. Returns whether the batch is now large enough for a unit.
    fn push(&mut self, entry: TreeEntry) -> bool {
        self.names_len += entry.path.len();
        match &entry.kind {
            TreeKind::File(size) => self.bytes += size,
            TreeKind::Symlink(target) | TreeKind::HardLink(target) => self.names_len += target.len(),
            TreeKind::Directory => {}
        }
        self.entries.push(entry);
        self.entries.len() >= UNIT_FILES_MAX || self.bytes >= UNIT_BYTES_MAX || self.names_len >= UNIT_NAMES_LEN_MAX
    }
}
