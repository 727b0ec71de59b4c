//! Members of archives: what becomes of each, and archives within archives.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use dayfly_meta::catalog::{Compression, Member, MemberKey, MemberKind};
use dayfly_meta::limits::{NESTED_DECODER_MEMORY_MAX, NESTED_DEPTH_MAX, NESTED_ZIP_LEN_MAX, SYMLINK_LEN_MAX};
use dayfly_meta::path::{display, join};

use super::{Sink, Unit, Worker};
use crate::StageInError;
use crate::selection::Named;
use crate::source::compressed::{decoder_within, recognize, stage};
use crate::source::plain::{Skip, version};
use crate::source::tar::{BLOCK_LEN, End, Next, TarError, TarKind, TarMember, TarReader, is_tar};
use crate::source::{is_archive_start, without_archive_ending, zip};

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
            Self::Count { .. } => return Err(StageInError::Crowded { path: archive.path.clone() }),
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

/// What stands in an archive, and what it was read through.
struct Inner<'a>(io::Chain<&'a [u8], &'a mut (dyn Read + Send)>);

impl Read for Inner<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Skip for Inner<'_> {}

impl<S: Sink> Worker<S> {
    /// A compressed tar, decoded by other threads.
    pub(super) fn read_compressed(&mut self, unit: &Unit, path: &Path, compression: Compression) -> Result<(), StageInError> {
        let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
        let file = File::open(path).map_err(unreadable)?;
        let opened = version(&file).map_err(unreadable)?;
        let archive = Archive { source: unit.source, path: path.to_owned(), prefix: &unit.prefix, inner: Vec::new(), depth: 0 };
        let (decoders, gauge) = (self.decoders, self.gauge.clone());
        std::thread::scope(|scope| {
            let input = file.try_clone().and_then(|file| stage::start(scope, compression, file, decoders, gauge));
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
    fn read_members<R: Skip + Send>(
        &mut self,
        archive: &Archive<'_>,
        tar: &mut TarReader<R>,
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        loop {
            if self.gauge.is_cancelled() {
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
        let kind = MemberKind::File { size: 0, blocks: Vec::new() };
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
        if self.gauge.is_cancelled() {
            return StageInError::Cancelled;
        }
        StageInError::Damaged { path: path.to_owned(), offset, reason }
    }

    /// The archive that a member is, if it is to be unpacked.
    pub(super) fn nested<'a>(&self, archive: &Archive<'a>, name: &[u8]) -> Option<Archive<'a>> {
        if !self.selection.nested || archive.depth == NESTED_DEPTH_MAX {
            return None;
        }
        let Archive { source, prefix, depth, .. } = *archive;
        // A name that leads out is refused as a file would be.
        let full = dayfly_meta::path::normalize(&join(&archive.inner, name)).ok()?;
        let inner = without_archive_ending(&full)?.to_vec();
        let path = archive.path.join(display(name));
        (!self.selector.excludes(&full)).then_some(Archive { source, path, prefix, inner, depth: depth + 1 })
    }

    /// Unpacks a member that is an archive by its name. One that is none by its content stays a file. `end` bounds its members'
    /// numbers, should they be counted.
    pub(super) fn take_nested(
        &mut self,
        archive: &Archive<'_>,
        found: Found,
        (size, end): (u64, u64),
        data: &mut (dyn Read + Send),
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        let damaged = |offset: u64, error: io::Error| StageInError::Damaged {
            path: archive.path.clone(),
            offset,
            reason: error.to_string(),
        };
        let mut start = Vec::new();
        let read = data.take(BLOCK_LEN as u64).read_to_end(&mut start);
        if let Err(error) = read {
            return self.forgive(damaged(0, error));
        }
        let compression = recognize(&start);
        let mut input = Inner(start.chain(data));
        let is_too_long = zip::is_zip(&start) && size > NESTED_ZIP_LEN_MAX;
        if compression == Compression::None && !is_archive_start(&start) || is_too_long {
            let outer = Archive { path: archive.path.clone(), inner: Vec::new(), prefix: archive.prefix, ..*archive };
            let name = self.nested_name(archive, &found.name);
            return self.take_data(&outer, Found { name, ..found }, size, &mut input, &|error| damaged(0, error));
        }
        self.take_directory(archive, &found)?;
        let mut counted = Keys::Count { next: found.key.offset.saturating_add(1), end };
        let keys = match keys {
            Keys::Offset(_) if compression == Compression::None && is_tar(&start) => &mut Keys::Offset(found.key.offset),
            Keys::Offset(_) => &mut counted,
            Keys::Count { .. } => keys,
        };
        let result = if zip::is_zip(&start) {
            self.read_spooled_zip(archive, &mut input, keys)
        } else if compression == Compression::None {
            let mut tar = TarReader::new(input);
            self.read_members(archive, &mut tar, keys)
                .and_then(|()| tar.drain().map_err(|error| self.tar_error(&archive.path, error)))
        } else {
            decoder_within(compression, &mut input, NESTED_DECODER_MEMORY_MAX).map_err(|error| damaged(0, error)).and_then(
                |decoder| {
                    let mut tar = TarReader::new(decoder);
                    self.read_members(archive, &mut tar, keys)?;
                    tar.drain().map_err(|error| self.tar_error(&archive.path, error))
                },
            )
        };
        result.or_else(|error| self.forgive(error))
    }

    /// The name by which a nested archive's file is selected when it stays a file: that of the whole path.
    fn nested_name(&self, archive: &Archive<'_>, name: &[u8]) -> Vec<u8> {
        let folder = dayfly_meta::path::split_last(&archive.inner).map_or(&b""[..], |(folder, _)| folder);
        let last = dayfly_meta::path::components(name).last().unwrap_or_default();
        join(folder, last)
    }

    /// The directory that stands for an archive within an archive.
    fn take_directory(&mut self, archive: &Archive<'_>, found: &Found) -> Result<(), StageInError> {
        let Named::Taken(path) = self.selector.name(&archive.inner, true) else { return Ok(()) };
        let Found { key, mtime_s, mtime_ns, .. } = *found;
        let path = join(archive.prefix, &path);
        self.take_member(Member { path, key, ticket: self.ticket, mode: 0o755, mtime_s, mtime_ns, kind: MemberKind::Directory })
    }

    /// A zip is read from its end, so it is put aside first.
    fn read_spooled_zip(&mut self, archive: &Archive<'_>, input: &mut dyn Read, keys: &mut Keys) -> Result<(), StageInError> {
        let mut file = self.runs.scratch().map_err(StageInError::Scratch)?;
        let mut chunk = vec![0; 256 << 10];
        loop {
            if self.gauge.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            let count = input.read(&mut chunk).map_err(|error| StageInError::Damaged {
                path: archive.path.clone(),
                offset: 0,
                reason: error.to_string(),
            })?;
            if count == 0 {
                break;
            }
            io::Write::write_all(&mut file, &chunk[..count]).map_err(StageInError::Scratch)?;
        }
        file.rewind().map_err(StageInError::Scratch)?;
        self.read_whole_zip(archive, &file, keys)
    }
}
