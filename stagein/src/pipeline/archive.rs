//! Members of archives: what becomes of each.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use dayfly_meta::catalog::{Compression, Member, MemberKey, MemberKind};
use dayfly_meta::limits::SYMLINK_LEN_MAX;
use dayfly_meta::path::{display, join};

use super::{Sink, Unit, Worker};
use crate::StageInError;
use crate::selection::Named;
use crate::source::compressed::decoder_threads;
use crate::source::plain::{Skip, version};
use crate::source::tar::{End, Next, TarError, TarKind, TarMember, TarReader};

/// The archive that is read.
pub(super) struct Archive<'a> {
    pub(super) source: u32,
    /// For messages: an archive within an archive is named like a file in a directory.
    pub(super) path: PathBuf,
    /// The directory of the dataset that its names go below.
    pub(super) prefix: &'a [u8],
    /// The directory that stands for it in the archive that it lies in; of others, empty.
    pub(super) inner: Vec<u8>,
    pub(super) depth: usize,
}

/// How members are numbered.
pub(super) enum Keys {
    /// By where their data lie, counted from here.
    Offset(u64),
    /// One after another, for they lie compressed in an archive: from a number, up to another.
    Count { next: u64, end: u64 },
}

impl Keys {
    pub(super) fn key(&mut self, archive: &Archive<'_>, offset: u64) -> Result<MemberKey, StageInError> {
        let offset = match self {
            Self::Offset(base) => *base + offset,
            Self::Count { next, end } if *next < *end => {
                *next += 1;
                *next - 1
            }
            Self::Count { .. } => return Err(StageInError::TooManyMembers { path: archive.path.clone() }),
        };
        Ok(MemberKey { source: archive.source, offset })
    }
}

/// A member before it has a path in the dataset.
pub(super) struct Found {
    pub(super) name: Vec<u8>,
    pub(super) key: MemberKey,
    pub(super) mode: u32,
    pub(super) mtime_s: i64,
    pub(super) mtime_ns: u32,
}

impl<S: Sink> Worker<S> {
    /// A compressed tar, decoded by other threads.
    pub(super) fn read_compressed(&mut self, unit: &Unit, path: &Path, compression: Compression) -> Result<(), StageInError> {
        let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
        let file = File::open(path).map_err(unreadable)?;
        let opened = version(&file).map_err(unreadable)?;
        let archive = Archive { source: unit.source, path: path.to_owned(), prefix: &unit.prefix, inner: Vec::new(), depth: 0 };
        let (decoders, monitor) = (self.decoders, self.monitor.clone());
        std::thread::scope(|scope| {
            let input = file.try_clone().and_then(|file| decoder_threads::start(scope, compression, file, decoders, monitor));
            let mut tar = TarReader::new(input.map_err(unreadable)?);
            let read = self.read_members(&archive, &mut tar, &mut Keys::Offset(0));
            // The checksum that a compressed stream ends with has not been seen yet.
            let read = read.and_then(|()| tar.drain().map_err(|error| self.tar_error(path, error)));
            let waited = tar.input().waited();
            self.count_reading(waited, 0);
            read
        })?;
        let is_same = version(&file).map_err(unreadable)? == opened;
        self.source_bytes += opened.size;
        if is_same { Ok(()) } else { Err(StageInError::Changed { path: path.to_owned() }) }
    }

    /// All members of a tar, to its end.
    pub(super) fn read_members<R: Skip + Send>(
        &mut self,
        archive: &Archive<'_>,
        tar: &mut TarReader<R>,
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        loop {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            match tar.next() {
                Ok(Next::Member(member)) => self.take_from_tar(archive, member, tar, keys)?,
                Ok(Next::End(end)) => {
                    self.see_end(archive, end);
                    return Ok(());
                }
                Err(error) => {
                    let error = self.tar_error(&archive.path, error);
                    self.forgive(error)?;
                    if !tar.resume(u64::MAX) {
                        return Ok(());
                    }
                }
            }
        }
    }

    pub(super) fn see_end(&mut self, archive: &Archive<'_>, end: End) {
        if end == End::Unmarked {
            self.counts.unmarked_ends += 1;
            self.note(&format!("'{}' ends without an end mark: it may have been cut short", archive.path.display()));
        }
    }

    /// A member of a tar, at whose data the reader stands.
    pub(super) fn take_from_tar<R: Skip + Send>(
        &mut self,
        archive: &Archive<'_>,
        member: TarMember,
        tar: &mut TarReader<R>,
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        let TarMember { name, kind, size, stored_len, mode, mtime_s, mtime_ns, data_offset } = member;
        let key = keys.key(archive, data_offset)?;
        let found = Found { name, key, mode, mtime_s, mtime_ns };
        let kind = match kind {
            TarKind::Special => {
                self.counts.special += 1;
                return Ok(());
            }
            TarKind::File => {
                if let Some(inner) = self.nested(archive, &found.name) {
                    let mut counted =
                        Keys::Count { next: key.offset.saturating_add(1), end: key.offset.saturating_add(stored_len) };
                    // What lies in a sparse file lies elsewhere in the archive.
                    let keys = if stored_len == size { keys } else { &mut counted };
                    let end = key.offset.saturating_add(stored_len);
                    return self.take_nested(&inner, found, (size, end), tar, keys);
                }
                let path = archive.path.as_path();
                let damaged = |error: io::Error| {
                    let reason = error.to_string();
                    StageInError::Damaged { path: path.to_owned(), offset: data_offset, reason }
                };
                return self.take_data(archive, found, size, tar, &damaged);
            }
            TarKind::Directory => MemberKind::Directory,
            TarKind::Symlink(target) => MemberKind::Symlink(target),
            TarKind::HardLink(target) => MemberKind::HardLink(target),
        };
        self.take_found(archive, found, kind)
    }

    /// A file, whose bytes come from `data`. That it cannot be read may be forgiven.
    pub(super) fn take_data(
        &mut self,
        archive: &Archive<'_>,
        found: Found,
        size: u64,
        data: &mut dyn Read,
        damaged: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        let Some(path) = self.path_of(archive, &found.name, false)? else { return Ok(()) };
        let Found { key, mode, mtime_s, mtime_ns, .. } = found;
        let kind = MemberKind::File { size: 0, blocks: Vec::new(), checksums: Vec::new() };
        let member = Member { path, key, ticket: self.ticket, mode, mtime_s, mtime_ns, kind };
        self.take_file(member, size, data, damaged).or_else(|error| self.forgive(error))?;
        self.flush_if_many()
    }

    /// What is not a file.
    pub(super) fn take_found(&mut self, archive: &Archive<'_>, found: Found, kind: MemberKind) -> Result<(), StageInError> {
        let Some(path) = self.path_of(archive, &found.name, kind == MemberKind::Directory)? else { return Ok(()) };
        let kind = match kind {
            MemberKind::Symlink(target) if target.is_empty() || target.len() > SYMLINK_LEN_MAX => {
                return self.refuse(archive, &found.name, "a symlink whose target is empty or too long");
            }
            MemberKind::Symlink(target) if target.contains(&0) => {
                return self.refuse(archive, &found.name, "a symlink whose target holds a NUL byte");
            }
            MemberKind::HardLink(target) => match self.selector.link_target(&join(&archive.inner, &target)) {
                Ok(Some(target)) => MemberKind::HardLink(join(archive.prefix, &target)),
                Ok(None) => return self.refuse(archive, &found.name, "a hard link to what is not selected"),
                Err(reason) => return self.refuse(archive, &found.name, &format!("a hard link to a name where {reason}")),
            },
            other => other,
        };
        let Found { key, mode, mtime_s, mtime_ns, .. } = found;
        self.take_member(Member { path, key, ticket: self.ticket, mode, mtime_s, mtime_ns, kind })
    }

    /// The path in the dataset of a member's name; `None` for what is not taken.
    fn path_of(&mut self, archive: &Archive<'_>, name: &[u8], is_directory: bool) -> Result<Option<Vec<u8>>, StageInError> {
        let full = if archive.inner.is_empty() { name.to_vec() } else { [&archive.inner, &b"/"[..], name].concat() };
        let path = match self.selector.name(&full, is_directory) {
            Named::Taken(path) => join(archive.prefix, &path),
            Named::Left => return Ok(None),
            Named::Refused(reason) => return self.refuse(archive, name, &reason.to_string()).map(|()| None),
        };
        if path.is_empty() && !is_directory {
            return self.refuse(archive, name, "it names the root, and is no directory").map(|()| None);
        }
        self.counts.made_relative += u64::from(name.starts_with(b"/"));
        Ok(Some(path))
    }

    fn refuse(&mut self, archive: &Archive<'_>, name: &[u8], reason: &str) -> Result<(), StageInError> {
        self.counts.refused += 1;
        self.note(&format!("'{}' in '{}' is refused: {reason}", display(name), archive.path.display()));
        Ok(())
    }

    pub(super) fn tar_error(&self, path: &Path, error: TarError) -> StageInError {
        let TarError::Damaged { offset, reason } = error;
        if self.monitor.is_cancelled() {
            return StageInError::Cancelled;
        }
        StageInError::Damaged { path: path.to_owned(), offset, reason }
    }
}
