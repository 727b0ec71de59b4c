//! Reading a unit: from a source's members to the worker's.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dayfly_meta::catalog::{Compression, Member, MemberKey, MemberKind};
use dayfly_meta::limits::SYMLINK_LEN_MAX;
use dayfly_meta::path::{display, join};
use dayfly_meta::wire::peer::{TreeEntry, TreeKind, Unit, Work};

use super::{Gauge, Sink, Worker};
use crate::StageInError;
use crate::selection::Named;
use crate::source::compressed::decoder;
use crate::source::tar::{End, Next, TarError, TarKind, TarMember, TarReader};

impl<S: Sink> Worker<S> {
    pub(super) fn read_unit(&mut self, unit: &Unit) -> Result<(), StageInError> {
        match &unit.work {
            Work::Tar { path, compression } => self.read_tar(unit, Path::new(OsStr::from_bytes(path)), *compression),
            Work::Tree { root, entries } => {
                let root = Path::new(OsStr::from_bytes(root));
                entries.iter().try_for_each(|entry| self.read_entry(unit, root, entry))
            }
        }
    }

    fn read_tar(&mut self, unit: &Unit, path: &Path, compression: Compression) -> Result<(), StageInError> {
        let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
        let archive = File::open(path).map_err(unreadable)?;
        let opened = Version::of(&archive).map_err(unreadable)?;
        let file = Counted { input: &archive, gauge: self.gauge.clone() };
        let mut tar = TarReader::new(decoder(compression, file).map_err(unreadable)?);
        loop {
            if self.gauge.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            match tar.next().map_err(|error| self.tar_error(path, error))? {
                Next::Member(member) => self.read_tar_member(unit, path, member, &mut tar)?,
                Next::End(end) => {
                    if end == End::Unmarked {
                        self.counts.unmarked_ends += 1;
                        self.note(&format!("'{}' ends without an end mark: it may have been cut short", path.display()));
                    }
                    // The checksum that a compressed stream ends with has not been seen yet.
                    if compression != Compression::None {
                        tar.drain().map_err(|error| self.tar_error(path, error))?;
                    }
                    let is_same = Version::of(&archive).map_err(unreadable)? == opened;
                    return if is_same { Ok(()) } else { Err(StageInError::Changed { path: path.to_owned() }) };
                }
            }
        }
    }

    fn read_tar_member(
        &mut self,
        unit: &Unit,
        archive: &Path,
        found: TarMember,
        tar: &mut impl TarData,
    ) -> Result<(), StageInError> {
        if found.kind == TarKind::Special {
            self.counts.special += 1;
            return Ok(());
        }
        let is_directory = found.kind == TarKind::Directory;
        let path = match self.selector.name(&found.name, is_directory) {
            Named::Taken(path) => join(&unit.prefix, &path),
            Named::Left => return Ok(()),
            Named::Refused(reason) => return self.refuse(archive, &found.name, &reason.to_string()),
        };
        if path.is_empty() && !is_directory {
            return self.refuse(archive, &found.name, "it names the root, and is no directory");
        }
        self.counts.made_relative += u64::from(found.name.starts_with(b"/"));
        let kind = match found.kind {
            TarKind::Directory => MemberKind::Directory,
            TarKind::Symlink(target) if target.is_empty() || target.len() > SYMLINK_LEN_MAX => {
                return self.refuse(archive, &found.name, "a symlink whose target is empty or too long");
            }
            TarKind::Symlink(target) => MemberKind::Symlink(target),
            TarKind::HardLink(target) => match self.selector.link_target(&target) {
                Ok(Some(target)) => MemberKind::HardLink(join(&unit.prefix, &target)),
                Ok(None) => return self.refuse(archive, &found.name, "a hard link to what is not selected"),
                Err(reason) => return self.refuse(archive, &found.name, &format!("a hard link to a name where {reason}")),
            },
            TarKind::File | TarKind::Special => MemberKind::File { size: 0, blocks: Vec::new() },
        };
        let is_file = matches!(kind, MemberKind::File { .. });
        let key = MemberKey { source: unit.source, offset: found.data_offset };
        let member = Member { path, key, mode: found.mode, mtime_s: found.mtime_s, mtime_ns: found.mtime_ns, kind };
        if !is_file {
            return self.take_member(member);
        }
        let start = found.data_offset;
        let damaged =
            |error: io::Error| StageInError::Damaged { path: archive.to_owned(), offset: start, reason: error.to_string() };
        self.take_file(member, found.size, tar.data(), &damaged)
    }

    fn refuse(&mut self, archive: &Path, name: &[u8], reason: &str) -> Result<(), StageInError> {
        self.counts.refused += 1;
        self.note(&format!("'{}' in '{}' is refused: {reason}", display(name), archive.display()));
        Ok(())
    }

    fn tar_error(&self, path: &Path, error: TarError) -> StageInError {
        let path = path.to_owned();
        match error {
            _ if self.gauge.is_cancelled() => StageInError::Cancelled,
            TarError::Damaged { offset, reason } => StageInError::Damaged { path, offset, reason },
            TarError::Unsupported { offset, reason } => StageInError::Unsupported { path, offset, reason },
        }
    }

    fn read_entry(&mut self, unit: &Unit, root: &Path, entry: &TreeEntry) -> Result<(), StageInError> {
        if self.gauge.is_cancelled() {
            return Err(StageInError::Cancelled);
        }
        let key = MemberKey { source: unit.source, offset: entry.number };
        let (kind, size) = match &entry.kind {
            TreeKind::File(size) => (MemberKind::File { size: 0, blocks: Vec::new() }, Some(*size)),
            TreeKind::Directory => (MemberKind::Directory, None),
            TreeKind::Symlink(target) => (MemberKind::Symlink(target.clone()), None),
            TreeKind::HardLink(target) => (MemberKind::HardLink(join(&unit.prefix, target)), None),
        };
        let path = join(&unit.prefix, &entry.path);
        let member = Member { path, key, mode: entry.mode, mtime_s: entry.mtime_s, mtime_ns: entry.mtime_ns, kind };
        match size {
            None => self.take_member(member),
            Some(size) => self.read_file(member, &file_path(root, &entry.path), size),
        }
    }

    fn read_file(&mut self, member: Member, path: &Path, planned: u64) -> Result<(), StageInError> {
        let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
        let changed = || StageInError::Changed { path: path.to_owned() };
        let mut data = Counted { input: File::open(path).map_err(unreadable)?, gauge: self.gauge.clone() };
        let as_planned = Version { size: planned, mtime_s: member.mtime_s, mtime_ns: i64::from(member.mtime_ns) };
        if Version::of(&data.input).map_err(unreadable)? != as_planned {
            return Err(changed());
        }
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => changed(),
            _ => unreadable(error),
        };
        self.take_file(member, planned, &mut data, &failed)?;
        if Version::of(&data.input).map_err(unreadable)? == as_planned { Ok(()) } else { Err(changed()) }
    }
}

/// By what a file that was changed is told.
#[derive(PartialEq, Eq)]
struct Version {
    size: u64,
    mtime_s: i64,
    mtime_ns: i64,
}

impl Version {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { size: metadata.len(), mtime_s: metadata.mtime(), mtime_ns: metadata.mtime_nsec() })
    }
}

fn file_path(root: &Path, path: &[u8]) -> PathBuf {
    // A single file is a tree whose only entry has no name; joining that would add a slash.
    if path.is_empty() { root.to_owned() } else { root.join(OsStr::from_bytes(path)) }
}

/// The data of the member that a tar reader stands at.
trait TarData {
    fn data(&mut self) -> &mut dyn Read;
}

impl<R: Read> TarData for TarReader<R> {
    fn data(&mut self) -> &mut dyn Read {
        self
    }
}

/// Counts what is read of a source, and stops reading when the stage-in is cancelled.
struct Counted<R> {
    input: R,
    gauge: Arc<Gauge>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.gauge.is_cancelled() {
            return Err(io::Error::other("cancelled"));
        }
        let count = self.input.read(buffer)?;
        Gauge::add(&self.gauge.source_bytes, count as u64);
        Ok(count)
    }
}
