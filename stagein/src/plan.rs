//! The lead's part before anything is read: sources are found, told apart and cut into units. The units go to a nameless
//! file, so a plan of many million files costs no memory.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use dayfly_meta::catalog::{Compression, Source, SourceKind};
use dayfly_meta::limits::{FRAME_BODY_LEN_MAX, UNIT_BYTES_MAX, UNIT_FILES_MAX, UNIT_NAMES_LEN_MAX};
use dayfly_meta::path::{display, normalize};
use dayfly_meta::wire::control::{Counts, Selection};
use dayfly_meta::wire::peer::{TreeEntry, TreeKind, Unit, Work};
use dayfly_meta::wire::{decode, encode};

use crate::StageInError;
use crate::selection::Selector;
use crate::source::classify;
use crate::source::directory::{Found, single_file, subdirectories, walk};

/// What is to be read.
pub struct Plan {
    /// All sources, in order; units name them by number.
    pub sources: Vec<Source>,
    /// The units, to be handed out.
    pub units: UnitQueue,
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

/// Finds, tells apart and cuts. `scratch` gives a nameless file; `is_cancelled` is asked now and then.
pub fn plan(
    patterns: &[Vec<u8>],
    selection: &Selection,
    scratch: File,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<Plan, StageInError> {
    let selector = Selector::new(selection)?;
    let paths = expand(patterns)?;
    let is_alone = paths.len() == 1;
    let mut planner = Planner {
        plan: Plan {
            sources: Vec::new(),
            units: UnitQueue::new(scratch),
            source_bytes: 0,
            known_bytes: 0,
            known_files: 0,
            known_names_len: 0,
            files_are_all_known: true,
            counts: Counts::default(),
        },
        selector,
        is_cancelled,
    };
    for path in paths {
        if is_cancelled() {
            return Err(StageInError::Cancelled);
        }
        let metadata = fs::metadata(&path).map_err(|error| StageInError::Read { path: path.clone(), error })?;
        let ends_with_dot = path.as_os_str().as_bytes().ends_with(b"/.");
        // As cp: a single directory becomes the target, several lie in it under their names.
        let prefix = if is_alone || ends_with_dot { Vec::new() } else { name_of(&path)? };
        if metadata.is_dir() {
            planner.tree(path, prefix, selection.strip_components)?;
        } else if metadata.is_file() {
            planner.file(path, &metadata, selection.no_unpack)?;
        } else {
            return Err(StageInError::Special { path });
        }
    }
    planner.plan.units.rewind().map_err(StageInError::Scratch)?;
    Ok(planner.plan)
}

/// Literal paths stay as they are; globs become what they match, by their bytes.
fn expand(patterns: &[Vec<u8>]) -> Result<Vec<PathBuf>, StageInError> {
    let mut paths = Vec::new();
    for pattern in patterns {
        let path = Path::new(OsStr::from_bytes(pattern));
        if fs::symlink_metadata(path).is_ok() {
            paths.push(path.to_owned());
            continue;
        }
        if let Some(list) = pattern.strip_prefix(b"@") {
            paths.append(&mut listed(Path::new(OsStr::from_bytes(list)))?);
            continue;
        }
        let no_match = || StageInError::NoMatch(display(pattern));
        let text = std::str::from_utf8(pattern).map_err(|_| no_match())?;
        if !text.contains(['*', '?', '[']) {
            return Err(no_match());
        }
        // As a shell's: a star does not match a leading dot.
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
        let matches = glob::glob_with(text, options)
            .map_err(|error| StageInError::Pattern { pattern: text.to_owned(), reason: error.msg.to_owned() })?;
        let unreadable = |error: glob::GlobError| StageInError::Read { path: error.path().to_owned(), error: error.into() };
        let mut found = matches.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        if found.is_empty() {
            return Err(no_match());
        }
        found.sort_by(|left, right| left.as_os_str().as_bytes().cmp(right.as_os_str().as_bytes()));
        paths.append(&mut found);
    }
    Ok(paths)
}

/// The sources that a list names, one a line.
fn listed(list: &Path) -> Result<Vec<PathBuf>, StageInError> {
    let failed = |error| StageInError::Read { path: list.to_owned(), error };
    let folder = list.parent().unwrap_or(Path::new("/"));
    let mut paths = Vec::new();
    for line in BufReader::new(File::open(list).map_err(failed)?).split(b'\n') {
        let line = line.map_err(failed)?;
        if !line.is_empty() {
            // With its folder before it, a line is never a list again.
            paths.append(&mut expand(&[folder.join(OsStr::from_bytes(&line)).into_os_string().into_vec()])?);
        }
    }
    Ok(paths)
}

fn name_of(path: &Path) -> Result<Vec<u8>, StageInError> {
    let name = path.file_name().unwrap_or_default();
    normalize(name.as_bytes()).map_err(|_| StageInError::NoMatch(path.display().to_string()))
}

struct Planner<'a> {
    plan: Plan,
    selector: Selector,
    is_cancelled: &'a dyn Fn() -> bool,
}

impl Planner<'_> {
    fn source(&mut self, source: Source) -> u32 {
        self.plan.sources.push(source);
        (self.plan.sources.len() - 1) as u32
    }

    fn file(&mut self, path: PathBuf, metadata: &fs::Metadata, no_unpack: bool) -> Result<(), StageInError> {
        let (kind, compression) = if no_unpack { (SourceKind::File, Compression::None) } else { classify(&path)? };
        self.plan.source_bytes += metadata.len();
        if kind == SourceKind::Tar {
            self.plan.files_are_all_known = false;
            let path = path.into_os_string().into_vec();
            let source = self.source(Source { path: path.clone(), prefix: Vec::new(), kind, compression });
            return self.unit(Unit { source, prefix: Vec::new(), work: Work::Tar { path, compression } });
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
        self.unit(Unit { source, prefix: name, work: Work::Tree { root, entries: vec![single_file(metadata)] } })
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
        let result = walk(&root, &selector, &mut |found| {
            match found {
                Found::Special => self.plan.counts.special += 1,
                Found::TooLong(path) => {
                    self.plan.counts.refused += 1;
                    self.plan.counts.note(&format!("'{}' is refused: its path is too long", path.display()));
                }
                Found::Entry(entry) => {
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
            if (self.is_cancelled)() { Err(StageInError::Cancelled) } else { Ok(()) }
        });
        self.selector = selector;
        result?;
        self.tree_unit(source, &prefix, &path, &mut batch)
    }

    fn tree_unit(&mut self, source: u32, prefix: &[u8], root: &[u8], batch: &mut TreeBatch) -> Result<(), StageInError> {
        let entries = std::mem::take(batch).entries;
        if entries.is_empty() {
            return Ok(());
        }
        self.unit(Unit { source, prefix: prefix.to_vec(), work: Work::Tree { root: root.to_vec(), entries } })
    }

    fn unit(&mut self, unit: Unit) -> Result<(), StageInError> {
        self.plan.units.push(&unit).map_err(StageInError::Scratch)
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

/// Units in the order in which they are handed out, in a file.
pub struct UnitQueue {
    file: QueueFile,
}

enum QueueFile {
    Writing(BufWriter<File>),
    Reading(BufReader<File>),
    Lost,
}

impl UnitQueue {
    fn new(scratch: File) -> Self {
        Self { file: QueueFile::Writing(BufWriter::new(scratch)) }
    }

    fn push(&mut self, unit: &Unit) -> io::Result<()> {
        let QueueFile::Writing(file) = &mut self.file else { return Err(io::ErrorKind::InvalidInput.into()) };
        let bytes = encode(unit);
        file.write_all(&(bytes.len() as u32).to_le_bytes())?;
        file.write_all(&bytes)
    }

    fn rewind(&mut self) -> io::Result<()> {
        if let QueueFile::Writing(file) = std::mem::replace(&mut self.file, QueueFile::Lost) {
            let mut file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.rewind()?;
            self.file = QueueFile::Reading(BufReader::new(file));
        }
        Ok(())
    }

    /// The next unit; `None` after the last.
    pub fn next_unit(&mut self) -> Result<Option<Unit>, StageInError> {
        self.read().map_err(StageInError::Scratch)
    }

    fn read(&mut self) -> io::Result<Option<Unit>> {
        let QueueFile::Reading(file) = &mut self.file else { return Err(io::ErrorKind::InvalidInput.into()) };
        let mut len = [0; 4];
        if file.read(&mut len[..1])? == 0 {
            return Ok(None);
        }
        file.read_exact(&mut len[1..])?;
        let len = u32::from_le_bytes(len) as usize;
        if len > FRAME_BODY_LEN_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = vec![0; len];
        file.read_exact(&mut bytes)?;
        decode(&bytes).map(Some).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use dayfly_meta::path::join;

    use super::*;

    fn units(patterns: &[&Path], selection: &Selection) -> Result<(Plan, Vec<Unit>), StageInError> {
        let patterns: Vec<Vec<u8>> = patterns.iter().map(|path| path.as_os_str().as_bytes().to_vec()).collect();
        let mut plan = plan(&patterns, selection, tempfile::tempfile().unwrap(), &|| false)?;
        let mut units = Vec::new();
        while let Some(unit) = plan.units.next_unit()? {
            units.push(unit);
        }
        Ok((plan, units))
    }

    fn paths(units: &[Unit]) -> Vec<String> {
        let mut paths = Vec::new();
        for unit in units {
            match &unit.work {
                Work::Tar { .. } => paths.push("(tar)".to_owned()),
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
