//! Reads units of any kind, and the files of directory trees.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dayfly_meta::catalog::{Member, MemberKey, MemberKind, Place, Version};
use dayfly_meta::path::join;
use dayfly_meta::wire::control::Step;
use dayfly_meta::wire::peer::{RangeReport, TreeEntry, TreeKind, Work};

use super::{ProgressMonitor, Sink, Unit, Worker};
use crate::StageInError;
use crate::source::plain::version;

impl<S: Sink> Worker<S> {
    /// Reads a unit. With `--keep-going`, a source that cannot be read is skipped.
    pub(super) fn read_unit(&mut self, unit: &Unit) -> Result<Option<RangeReport>, StageInError> {
        match &unit.work {
            Work::Tar { path, compression, version } => {
                let read = self.read_compressed(unit, Path::new(OsStr::from_bytes(path)), *compression, *version);
                read.or_else(|error| self.skip_archive_or_fail(error)).map(|()| None)
            }
            Work::TarRange(range) => {
                let read = self.read_range(unit, range);
                let skip = |worker: &mut Self, error| {
                    worker.skip_or_fail(error)?;
                    worker.unit.withdrawn = true;
                    // Reports that the archive ends here, so that its later ranges are dropped.
                    Ok(RangeReport { first: range.start.as_ref().map(|start| start.offset), next: None, failure: None })
                };
                read.or_else(|error| skip(self, error)).map(Some)
            }
            Work::Zip(part) => self.read_zip(unit, part).or_else(|error| self.skip_archive_or_fail(error)).map(|()| None),
            Work::Tree { root, entries } => {
                let root = Path::new(OsStr::from_bytes(root));
                for entry in entries {
                    self.read_entry(unit, root, entry).or_else(|error| self.skip_or_fail(error))?;
                }
                Ok(None)
            }
        }
    }

    /// Does what [`Self::skip_or_fail`] does. If the archive changed, also withdraws all members
    /// that were found in this unit.
    fn skip_archive_or_fail(&mut self, error: StageInError) -> Result<(), StageInError> {
        self.unit.withdrawn = matches!(error, StageInError::Changed { .. });
        self.skip_or_fail(error)
    }

    fn read_entry(&mut self, unit: &Unit, root: &Path, entry: &TreeEntry) -> Result<(), StageInError> {
        if self.monitor.is_cancelled() {
            return Err(StageInError::Cancelled);
        }
        let key = MemberKey { source: unit.source, offset: entry.number };
        let (kind, size) = match &entry.kind {
            TreeKind::File(size) => {
                (MemberKind::File { size: 0, place: Place::Tree, blocks: Vec::new(), checksums: Vec::new() }, Some(*size))
            }
            TreeKind::Directory => (MemberKind::Directory, None),
            TreeKind::Symlink(target) => (MemberKind::Symlink(target.clone()), None),
            TreeKind::HardLink(target) => (MemberKind::HardLink(join(&unit.prefix, target)), None),
        };
        let TreeEntry { mode, mtime_s, mtime_ns, ctime_s, ctime_ns, .. } = *entry;
        let member =
            Member { path: join(&unit.prefix, &entry.path), key, ticket: self.unit.ticket, mode, mtime_s, mtime_ns, kind };
        match size {
            None => self.take_member(member),
            Some(size) => {
                let as_planned = Version { size, mtime_s, mtime_ns, ctime_s, ctime_ns };
                self.read_file(member, &file_path(root, &entry.path), as_planned)
            }
        }
    }

    fn read_file(&mut self, member: Member, path: &Path, as_planned: Version) -> Result<(), StageInError> {
        let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
        let changed = || StageInError::Changed { path: path.to_owned() };
        let start = Instant::now();
        self.activity.begin(Step::Reading, path.as_os_str().as_bytes());
        let file = File::open(path).map_err(unreadable)?;
        let planned = as_planned.size;
        let found = version(&file).map_err(unreadable)?;
        let mut data = CountedReader { input: &file, monitor: self.monitor.clone(), spent: start.elapsed(), bytes: 0 };
        if found != as_planned {
            return Err(changed());
        }
        let wrong_size = |yields_more| StageInError::WrongSize { path: path.to_owned(), size: planned, yields_more };
        let read_error = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof if version(&file).is_ok_and(|found| found == as_planned) => wrong_size(false),
            io::ErrorKind::UnexpectedEof => changed(),
            _ => unreadable(error),
        };
        let taken = self.take_file(member, planned, &mut data, &read_error);
        // Special files, such as those in /proc, have a size of 0 and yield bytes all the same. Other files are not asked for more
        // than their size, because on a parallel file system that costs as much as a read of bytes.
        let rest = if taken.is_ok() && planned == 0 { data.read(&mut [0]).map_err(unreadable) } else { Ok(0) };
        let CountedReader { spent, bytes, .. } = data;
        self.count_reading(spent, bytes);
        self.monitor.add_busy_time(Step::Reading, spent);
        taken?;
        if version(&file).map_err(unreadable)? != as_planned {
            self.withdraw_last();
            return Err(changed());
        }
        match rest {
            Ok(0) => {}
            Ok(_) => {
                self.withdraw_last();
                return Err(wrong_size(true));
            }
            Err(error) => {
                self.withdraw_last();
                return Err(error);
            }
        }
        self.flush_if_many()
    }

    /// Adds source bytes that were read, and the time that this thread waited for them.
    pub(super) fn count_reading(&mut self, waited: Duration, bytes: u64) {
        self.reading += waited;
        self.unit.source_bytes += bytes;
    }
}

fn file_path(root: &Path, path: &[u8]) -> PathBuf {
    // A single file is a tree whose only entry has an empty path. Joining an empty path would add a
    // slash.
    if path.is_empty() { root.to_owned() } else { root.join(OsStr::from_bytes(path)) }
}

/// Counts the bytes and the time of reads, and fails once the stage-in is canceled.
struct CountedReader<R> {
    input: R,
    monitor: Arc<ProgressMonitor>,
    spent: Duration,
    bytes: u64,
}

impl<R: Read> Read for CountedReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.monitor.is_cancelled() {
            return Err(io::Error::other("canceled"));
        }
        let start = Instant::now();
        let count = self.input.read(buffer)?;
        self.monitor.count_read(count as u64);
        self.spent += start.elapsed();
        self.bytes += count as u64;
        Ok(count)
    }
}
