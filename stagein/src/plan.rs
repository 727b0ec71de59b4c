//! The coordinator's part before anything is read: sources are found, told apart and cut into units.

mod cut;
mod given;
mod preflight;
mod queue;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use dayfly_meta::catalog::{Compression, Source, SourceKind};
use dayfly_meta::limits::{RANGE_LEN_MIN, UNIT_BYTES_MAX, UNIT_FILES_MAX, UNIT_NAMES_LEN_MAX};
use dayfly_meta::path::{join, normalize};
use dayfly_meta::wire::control::{Counts, Selection, Step};
use dayfly_meta::wire::peer::{Rivalry, TarRange, TreeEntry, TreeKind, Unit, Version, Work, ZipPart};

use given::given;
pub use preflight::check_sources;
pub use queue::UnitQueue;

use crate::StageInError;
use crate::progress::{Activity, ProgressMonitor};
use crate::selection::Selector;
use crate::source::directory::{Found, single_file, subdirectories, walk};
use crate::source::plain::version_of;
use crate::source::zip::{Part, ZipError, parts};
use crate::source::{classify, without_archive_ending};

/// What is to be read.
pub struct StageInPlan {
    /// All sources, in order; units name them by number.
    pub sources: Vec<Source>,
    /// Which of them must not have a path in common, by source.
    pub rivalries: Vec<Rivalry>,
    /// The units, to be handed out.
    pub units: UnitQueue,
    /// Plain tars that are split into ranges, each a unit of its own.
    pub split_tars: Vec<SplitTar>,
    /// Bytes of the sources as they lie.
    pub source_bytes: u64,
    /// Bytes of files of trees, and of single files: what is certainly stored.
    pub known_bytes: u64,
    /// Files of trees, and single files; an archive's are known only once it is read.
    pub known_files: u64,
    /// Bytes of their names.
    pub known_names_len: u64,
    /// Whether there is no archive.
    pub files_are_all_known: bool,
    /// What the walk met that is no sample.
    pub counts: Counts,
}

/// A plain tar that is split into ranges.
pub struct SplitTar {
    /// Number of its source.
    pub source: u32,
    /// The archive.
    pub path: Vec<u8>,
    /// As it was when it was cut.
    pub version: Version,
    /// The directory of the dataset that its names go below.
    pub prefix: Vec<u8>,
    /// Of its source.
    pub rivalry: Rivalry,
    /// Where each range begins and ends, in order.
    pub ranges: Vec<(u64, u64)>,
}

/// What a plan is made from.
pub struct PlanRequest<'a> {
    /// Paths, globs and lists.
    pub patterns: &'a [Vec<u8>],
    /// What to take of them.
    pub selection: &'a Selection,
    /// Of the order in which units are handed out.
    pub seed: u64,
    /// How many there are to read units.
    pub workers: u64,
}

/// Finds, tells apart and cuts. `scratch` is a nameless file; `monitor` is told of each step, and asked whether to go on.
pub fn plan_sources(wanted: &PlanRequest<'_>, scratch: File, monitor: &ProgressMonitor) -> Result<StageInPlan, StageInError> {
    let &PlanRequest { patterns, selection, seed, workers } = wanted;
    let selector = Selector::new(selection)?;
    let watch = Watch::new(monitor);
    let paths = given(patterns, selection, &watch)?;
    let is_alone = paths.len() == 1;
    let mut planner = Planner {
        plan: StageInPlan {
            sources: Vec::new(),
            rivalries: Vec::new(),
            units: UnitQueue::new(scratch),
            split_tars: Vec::new(),
            source_bytes: 0,
            known_bytes: 0,
            known_files: 0,
            known_names_len: 0,
            files_are_all_known: true,
            counts: Counts::default(),
        },
        selector,
        selection,
        workers,
        watch: &watch,
        rivalry: Rivalry::default(),
    };
    for (path, rivalry) in paths {
        planner.rivalry = rivalry;
        planner.watch.look_at(path.as_os_str().as_bytes())?;
        let metadata = fs::metadata(&path).map_err(|error| StageInError::Read { path: path.clone(), error })?;
        let ends_with_dot = path.as_os_str().as_bytes().ends_with(b"/.");
        // As cp: a single directory becomes the target, several lie in it under their names.
        let prefix = if is_alone || ends_with_dot { Vec::new() } else { name_of(&path)? };
        if metadata.is_dir() {
            let planned = planner.tree(path, prefix, selection.strip_components);
            planned.or_else(|error| planner.forgive(error))?;
        } else if metadata.is_file() {
            planner.file(path, None, &metadata).or_else(|error| planner.forgive(error))?;
        } else {
            return Err(StageInError::SpecialFile { path });
        }
    }
    planner.plan.units.close(seed).map_err(StageInError::TempFile)?;
    Ok(planner.plan)
}

/// Tells the monitor how planning goes.
struct Watch<'a> {
    monitor: &'a ProgressMonitor,
    activity: Activity,
}

impl<'a> Watch<'a> {
    fn new(monitor: &'a ProgressMonitor) -> Self {
        Self { monitor, activity: monitor.new_activity() }
    }

    /// It goes on with this path, unless the stage-in was cancelled.
    fn look_at(&self, path: &[u8]) -> Result<(), StageInError> {
        self.activity.begin(Step::Reading, path);
        self.monitor.advance();
        if self.monitor.is_cancelled() { Err(StageInError::Cancelled) } else { Ok(()) }
    }
}

/// The directory for an archive, after its name: without the ending that says that it is one, or without any.
fn prefix_of(path: &Path) -> Result<Vec<u8>, StageInError> {
    let name = name_of(path)?;
    let stem = without_archive_ending(&name).map(<[u8]>::to_vec);
    Ok(stem.unwrap_or_else(|| Path::new(OsStr::from_bytes(&name)).file_stem().unwrap_or_default().as_bytes().to_vec()))
}

fn name_of(path: &Path) -> Result<Vec<u8>, StageInError> {
    let name = path.file_name().unwrap_or_default();
    normalize(name.as_bytes()).map_err(|_| StageInError::NoMatch(path.display().to_string()))
}

struct Planner<'a> {
    plan: StageInPlan,
    selector: Selector,
    selection: &'a Selection,
    workers: u64,
    watch: &'a Watch<'a>,
    /// Of what is planned now.
    rivalry: Rivalry,
}

impl Planner<'_> {
    /// With `--keep-going`, what cannot be read is left out.
    fn forgive(&mut self, error: StageInError) -> Result<(), StageInError> {
        if !self.selection.keep_going || !error.is_of_source() {
            return Err(error);
        }
        self.plan.counts.skip(&error.skip_note());
        Ok(())
    }

    fn source(&mut self, source: Source) -> u32 {
        self.plan.sources.push(source);
        self.plan.rivalries.push(self.rivalry);
        (self.plan.sources.len() - 1) as u32
    }

    /// A file; the names in an archive go below `prefix`. One that was given itself has none, or that of its name.
    fn file(&mut self, path: PathBuf, prefix: Option<Vec<u8>>, metadata: &fs::Metadata) -> Result<(), StageInError> {
        let (kind, compression) = if self.selection.no_unpack { (SourceKind::File, Compression::None) } else { classify(&path)? };
        self.plan.source_bytes += metadata.len();
        if kind != SourceKind::File {
            self.plan.files_are_all_known = false;
            let prefix = match prefix {
                Some(prefix) => prefix,
                None if self.selection.prefix_by_source => prefix_of(&path)?,
                None => Vec::new(),
            };
            let name = path.as_os_str().as_bytes().to_vec();
            let (rivalry, ticket) = (self.rivalry, 0);
            let source = self.source(Source { path: name.clone(), prefix: prefix.clone(), kind, compression });
            return match (kind, compression) {
                (SourceKind::Zip, _) => self.zip(source, path, &prefix, metadata),
                (_, Compression::None) => self.plain_tar(source, path, &prefix, metadata),
                _ => self
                    .unit(Unit { source, ticket, prefix, rivalry, work: Work::Tar { path: name, compression } }, metadata.len()),
            };
        }
        let name = name_of(&path)?;
        if self.selector.excludes(&name) || !self.selector.includes(&name, false) {
            return Ok(());
        }
        self.plan.known_files += 1;
        self.plan.known_bytes += metadata.len();
        self.plan.known_names_len += name.len() as u64;
        let root = path.into_os_string().into_vec();
        let source = self.source(Source { path: root.clone(), prefix: name.clone(), kind, compression });
        let work = Work::Tree { root, entries: vec![single_file(metadata)] };
        self.unit(Unit { source, ticket: 0, prefix: name, rivalry: self.rivalry, work }, metadata.len())
    }

    fn plain_tar(&mut self, source: u32, path: PathBuf, prefix: &[u8], metadata: &fs::Metadata) -> Result<(), StageInError> {
        let version = version_of(metadata);
        let unreadable = |error| StageInError::Read { path: path.clone(), error };
        let ranges = File::open(&path).and_then(|file| cut::cut(file, version.size, self.workers)).map_err(unreadable)?;
        let path = path.clone().into_os_string().into_vec();
        if ranges.len() > 1 {
            let ends = ranges.iter().map(|&(from, to, _)| (from, to)).collect();
            let (prefix, rivalry) = (prefix.to_vec(), self.rivalry);
            self.plan.split_tars.push(SplitTar { source, path: path.clone(), version, prefix, rivalry, ranges: ends });
        }
        // Also what is left over at the end: a range is never one of several small units.
        let least = if ranges.len() > 1 { RANGE_LEN_MIN } else { 0 };
        for (from, to, start) in ranges {
            let work = Work::TarRange(TarRange { path: path.clone(), version, from, to, start });
            let bytes = (to.min(version.size) - from.min(version.size)).max(least);
            self.unit(Unit { source, ticket: 0, prefix: prefix.to_vec(), rivalry: self.rivalry, work }, bytes)?;
        }
        Ok(())
    }

    fn zip(&mut self, source: u32, path: PathBuf, prefix: &[u8], metadata: &fs::Metadata) -> Result<(), StageInError> {
        let version = version_of(metadata);
        let file = File::open(&path).map_err(|error| StageInError::Read { path: path.clone(), error })?;
        let name = path.as_os_str().as_bytes().to_vec();
        let read = parts::<ZipFailure>(&file, &mut |Part { records, offset, bytes }, shift| {
            let work = Work::Zip(ZipPart { path: name.clone(), version, records, offset, shift });
            let unit = Unit { source, ticket: 0, prefix: prefix.to_vec(), rivalry: self.rivalry, work };
            self.unit(unit, bytes).map_err(ZipFailure::Ours)
        });
        match read {
            Ok(()) => Ok(()),
            Err(ZipFailure::Ours(error)) => Err(error),
            Err(ZipFailure::Zip(error)) => Err(error.of(&path)),
        }
    }

    /// A tree; with components to strip, the subdirectories become trees of their own, as if each had been given.
    fn tree(&mut self, root: PathBuf, prefix: Vec<u8>, strip: u32) -> Result<(), StageInError> {
        if strip > 0 {
            for subdirectory in subdirectories(&root)? {
                self.tree(subdirectory, prefix.clone(), strip - 1)?;
            }
            return Ok(());
        }
        let path = root.as_os_str().as_bytes().to_vec();
        let source =
            Source { path: path.clone(), prefix: prefix.clone(), kind: SourceKind::Directory, compression: Compression::None };
        let source = self.source(source);
        let mut batch = TreeBatch::default();
        let selector = std::mem::replace(&mut self.selector, Selector::new(&Selection::default())?);
        let watch = self.watch;
        let look_at = |path: &Path| watch.look_at(path.as_os_str().as_bytes());
        let result = walk(&root, &selector, &look_at, &mut |found| {
            match found {
                Found::Special => self.plan.counts.special += 1,
                Found::Unreadable(error) => self.forgive(error)?,
                Found::TooLong(path) => {
                    self.plan.counts.refused += 1;
                    self.plan.counts.note(&format!("'{}' is refused: its path is too long", path.display()));
                }
                Found::Entry(entry) => {
                    if let TreeKind::File(_) = entry.kind
                        && self.selection.nested
                        && let Some(stem) = without_archive_ending(&entry.path)
                    {
                        let file = root.join(OsStr::from_bytes(&entry.path));
                        let unreadable = |error| StageInError::Read { path: file.clone(), error };
                        let planned = fs::metadata(&file).map_err(unreadable);
                        match planned.and_then(|metadata| self.file(file, Some(join(&prefix, stem)), &metadata)) {
                            // As within an archive, it stays a file.
                            Err(StageInError::NotAnArchive { .. }) => {}
                            planned => return planned.or_else(|error| self.forgive(error)),
                        }
                    }
                    if let TreeKind::File(size) = entry.kind {
                        self.plan.known_files += 1;
                        self.plan.source_bytes += size;
                        self.plan.known_bytes += size;
                    }
                    self.plan.known_names_len += entry.path.len() as u64;
                    if batch.push(entry) {
                        self.tree_unit(source, &prefix, &path, &mut batch)?;
                    }
                }
            }
            Ok(())
        });
        self.selector = selector;
        result?;
        self.tree_unit(source, &prefix, &path, &mut batch)
    }

    fn tree_unit(&mut self, source: u32, prefix: &[u8], root: &[u8], batch: &mut TreeBatch) -> Result<(), StageInError> {
        let TreeBatch { entries, bytes, .. } = std::mem::take(batch);
        if entries.is_empty() {
            return Ok(());
        }
        let work = Work::Tree { root: root.to_vec(), entries };
        self.unit(Unit { source, ticket: 0, prefix: prefix.to_vec(), rivalry: self.rivalry, work }, bytes)
    }

    fn unit(&mut self, unit: Unit, bytes: u64) -> Result<(), StageInError> {
        self.plan.units.push(&unit, bytes).map_err(StageInError::TempFile)
    }
}

/// Why the members of a zip cannot be planned.
enum ZipFailure {
    Zip(ZipError),
    Ours(StageInError),
}

impl From<ZipError> for ZipFailure {
    fn from(error: ZipError) -> Self {
        Self::Zip(error)
    }
}

/// Entries of a tree that make a unit.
#[derive(Default)]
struct TreeBatch {
    entries: Vec<TreeEntry>,
    bytes: u64,
    names_len: usize,
}

impl TreeBatch {
    /// Adds an entry; says whether the unit is large enough.
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

#[cfg(test)]
mod tests {
    use dayfly_meta::path::display;
    use dayfly_meta::wire::control::OnConflict;

    use super::*;

    fn units(patterns: &[&Path], selection: &Selection) -> Result<(StageInPlan, Vec<Unit>), StageInError> {
        let patterns: Vec<Vec<u8>> = patterns.iter().map(|path| path.as_os_str().as_bytes().to_vec()).collect();
        let wanted = PlanRequest { patterns: &patterns, selection, seed: 1, workers: 1 };
        let mut plan = plan_sources(&wanted, tempfile::tempfile().unwrap(), &ProgressMonitor::default())?;
        let mut units = Vec::new();
        while let Some(unit) = plan.units.next_unit()? {
            units.push(unit);
        }
        units.sort_by_key(|unit| unit.source);
        Ok((plan, units))
    }

    fn paths(units: &[Unit]) -> Vec<String> {
        let mut paths = Vec::new();
        for unit in units {
            match &unit.work {
                Work::Tar { .. } | Work::TarRange(_) => paths.push("(tar)".to_owned()),
                Work::Zip(_) => paths.push("(zip)".to_owned()),
                Work::Tree { entries, .. } => paths.extend(entries.iter().map(|entry| display(&join(&unit.prefix, &entry.path)))),
            }
        }
        paths
    }

    #[test]
    fn sources_are_named_as_cp_names_them() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("d/sub")).unwrap();
        fs::create_dir(at("e")).unwrap();
        for file in ["d/sub/x", "d/y", "e/z", "single"] {
            fs::write(at(file), file).unwrap();
        }
        let check = |patterns: &[PathBuf], strip_components, expect: &[&str]| {
            let selection = Selection { strip_components, ..Selection::default() };
            let patterns: Vec<&Path> = patterns.iter().map(PathBuf::as_path).collect();
            assert_eq!(paths(&units(&patterns, &selection).unwrap().1), expect);
        };
        check(&[at("d")], 0, &["", "sub", "sub/x", "y"]);
        check(&[at("d"), at("e")], 0, &["d", "d/sub", "d/sub/x", "d/y", "e", "e/z"]);
        check(&[at("[de]")], 0, &["d", "d/sub", "d/sub/x", "d/y", "e", "e/z"]);
        check(&[at("d/."), at("single")], 0, &["", "sub", "sub/x", "y", "single"]);
        check(&[at("d")], 1, &["", "x"]);
        let (plan, _) = units(&[&at("d"), &at("single")], &Selection::default()).unwrap();
        assert_eq!((plan.known_files, plan.source_bytes, plan.files_are_all_known), (3, 7 + 3 + 6, true));
        fs::write(at("list"), "d\nsingle\n\n[e]\n").unwrap();
        let list = PathBuf::from(format!("@{}", at("list").display()));
        check(&[list], 0, &["d", "d/sub", "d/sub/x", "d/y", "single", "e", "e/z"]);
        fs::write(at("list"), "d\nmissing\n").unwrap();
        let list = PathBuf::from(format!("@{}", at("list").display()));
        assert!(matches!(units(&[&list], &Selection::default()), Err(StageInError::NoMatch(_))));
        let list = PathBuf::from(format!("@{}", at("no-list").display()));
        assert!(matches!(units(&[&list], &Selection::default()), Err(StageInError::Read { .. })));
        assert!(matches!(units(&[&at("missing")], &Selection::default()), Err(StageInError::NoMatch(_))));
        assert!(matches!(units(&[&at("missing*")], &Selection::default()), Err(StageInError::NoMatch(_))));
    }

    #[test]
    fn what_one_pattern_names_are_rivals_and_may_have_directories_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a.tar", "b.tar.crate", "c"] {
            fs::write(at(name), if name == "c" { vec![1] } else { vec![0; 10240] }).unwrap();
        }
        fs::write(at("list"), "a.tar\n[c]\n").unwrap();
        let list = PathBuf::from(format!("@{}", at("list").display()));
        let check = |patterns: &[&Path], selection: &Selection, expect: &[(u32, u32)]| {
            let (plan, _) = units(patterns, selection).unwrap();
            let found: Vec<(u32, u32)> = plan.rivalries.iter().map(|rivalry| (rivalry.pattern, rivalry.given)).collect();
            assert_eq!(found, expect, "{patterns:?}");
        };
        let selection = Selection { on_conflict: OnConflict::Error, ..Selection::default() };
        check(&[&at("a.tar"), &at("c")], &selection, &[(0, 0), (0, 0)]);
        check(&[&at("[abc]*"), &list, &at("c")], &selection, &[(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (0, 0)]);
        check(&[&at("[a]*"), &at("[c]*")], &selection, &[(0, 0), (0, 0)]);
        check(&[&at("[abc]*")], &Selection { on_conflict: OnConflict::Replace, ..Selection::default() }, &[(0, 0); 3]);
        let apart = Selection { prefix_by_source: true, ..Selection::default() };
        let prefixes: Vec<String> =
            units(&[&at("[abc]*")], &apart).unwrap().0.sources.iter().map(|source| display(&source.prefix)).collect();
        assert_eq!(prefixes, ["a", "b.tar", "c"]);
    }

    #[test]
    fn content_tells_what_a_file_is_and_a_wrong_name_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "x").unwrap();
        let tar = std::process::Command::new("tar")
            .args(["-cf"])
            .arg(at("strange.jpg"))
            .arg("-C")
            .arg(folder.path())
            .arg("file")
            .status();
        assert!(tar.unwrap().success());
        fs::write(at("false.tar"), "no tar at all").unwrap();
        fs::write(at("image.raw"), [0; 4096]).unwrap();
        fs::write(at("empty.tar"), [0; 10240]).unwrap();
        fs::write(at("data.gz"), crate::source::compressed::tests::compress(Compression::Gzip, b"no tar")).unwrap();
        fs::write(at("broken.gz"), [0x1f, 0x8b, 8, 0, 1, 2, 3]).unwrap();
        let kinds = |name: &str| units(&[&at(name)], &Selection::default()).map(|(plan, _)| plan.sources[0].kind);
        assert_eq!(kinds("strange.jpg").unwrap(), SourceKind::Tar);
        assert_eq!(kinds("file").unwrap(), SourceKind::File);
        assert_eq!(kinds("data.gz").unwrap(), SourceKind::File);
        assert_eq!(kinds("image.raw").unwrap(), SourceKind::File);
        assert_eq!(kinds("empty.tar").unwrap(), SourceKind::Tar);
        assert!(matches!(kinds("false.tar"), Err(StageInError::NotAnArchive { .. })));
        assert!(matches!(kinds("broken.gz"), Err(StageInError::Damaged { .. })));
        let whole = Selection { no_unpack: true, ..Selection::default() };
        for name in ["strange.jpg", "data.gz", "broken.gz"] {
            assert_eq!(paths(&units(&[&at(name)], &whole).unwrap().1), [name], "kept whole");
        }
    }
}
