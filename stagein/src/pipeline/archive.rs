//! Reads the members of a tar one by one, and takes each member. The functions that take a member
//! also serve zips and archives within archives.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use dayfly_meta::catalog::{Compression, Member, MemberKey, MemberKind, Place, Version};
use dayfly_meta::limits::{NESTED_DECODER_MEMORY_MAX, SYMLINK_LEN_MAX};
use dayfly_meta::path::{display, join};

use super::{Sink, Unit, Worker};
use crate::StageInError;
use crate::error::{exceeds_memory, is_of_system};
use crate::selection::Decision;
use crate::source::compressed::decoder_threads;
use crate::source::plain::{Skip, version};
use crate::source::tar::{End, Next, TarError, TarKind, TarMember, TarReader};

/// The archive that is being read.
pub(super) struct Archive<'a> {
    /// Number of the source that is this archive or contains it.
    pub(super) source: u32,
    /// The path for messages. An archive within an archive is named like a file in a directory.
    pub(super) path: PathBuf,
    /// The directory in the dataset below which the source's members are placed.
    pub(super) prefix: &'a [u8],
    /// For an archive within an archive, the directory that replaces the inner archive in the outer
    /// one; otherwise empty.
    pub(super) inner: Vec<u8>,
    /// How many archives contain this one.
    pub(super) depth: usize,
    /// Whether offsets in this archive are counted after decompression.
    pub(super) is_decompressed: bool,
    /// Bytes of memory that its decoder may take.
    pub(super) decoder_memory: u64,
}

impl<'a> Archive<'a> {
    /// Returns the archive that is the source of a unit.
    pub(super) fn of_unit(unit: &'a Unit, path: &Path, is_decompressed: bool, decoder_memory: u64) -> Self {
        let (path, prefix) = (path.to_owned(), &unit.prefix[..]);
        Self { source: unit.source, path, prefix, inner: Vec::new(), depth: 0, is_decompressed, decoder_memory }
    }

    /// Returns the error for damage in this archive.
    pub(super) fn damaged(&self, offset: u64, reason: impl ToString) -> StageInError {
        let (path, is_decompressed) = (self.path.clone(), self.is_decompressed);
        StageInError::Damaged { path, offset, is_decompressed, reason: reason.to_string() }
    }

    /// Returns the error for what a decoder needs too much memory for: this archive, or a member of it.
    pub(super) fn window_too_large(&self, path: PathBuf) -> StageInError {
        let is_member = path != self.path;
        let memory_max = if is_member { NESTED_DECODER_MEMORY_MAX } else { self.decoder_memory };
        StageInError::WindowTooLarge { path, window: 0, memory_max, is_nested: is_member || self.depth > 0 }
    }

    /// Returns the error for bytes of this archive that cannot be read or decoded.
    pub(super) fn unreadable(&self, offset: u64, error: io::Error) -> StageInError {
        if exceeds_memory(&error) {
            return self.window_too_large(self.path.clone());
        }
        if !is_of_system(&error) {
            return self.damaged(offset, error);
        }
        StageInError::ReadAt { path: self.path.clone(), offset, is_decompressed: self.is_decompressed, error }
    }
}

/// Assigns keys to members. Within a source, keys increase in the order in which unpacking would
/// reach the members, because the later of two members with the same path wins.
pub(super) enum Keys {
    /// The key is the offset of the member's data, plus this base.
    Offset(u64),
    /// Keys count from `next` up to `end`. Members of a compressed archive within an archive have no
    /// offset in the outer archive. They get the keys between the inner archive's own key and the end
    /// of the inner archive's data. Their place in the source is `within`, the outermost archive that
    /// must be unpacked to reach them.
    Count { next: u64, end: u64, within: Place },
}

impl Keys {
    /// Returns the key of a member whose data starts at `offset`.
    pub(super) fn key(&mut self, archive: &Archive<'_>, offset: u64) -> Result<MemberKey, StageInError> {
        let offset = match self {
            Self::Offset(base) => *base + offset,
            Self::Count { next, end, .. } if *next < *end => {
                *next += 1;
                *next - 1
            }
            Self::Count { .. } => return Err(StageInError::TooManyMembers { path: archive.path.clone() }),
        };
        Ok(MemberKey { source: archive.source, offset })
    }

    /// Returns the place of a member of a tar. `start` is the offset of the member's first header.
    fn place_in_tar(&self, start: u64, member: &TarMember) -> Place {
        let base = match self {
            Self::Offset(base) => *base,
            Self::Count { within, .. } => return *within,
        };
        let offset = base.saturating_add(member.data_offset);
        if member.stored_len == member.size {
            return Place::Bytes { offset };
        }
        let len = (member.data_offset - start.min(member.data_offset)).saturating_add(member.stored_len);
        Place::SparseTar { offset: base.saturating_add(start), len }
    }
}

/// Returns the place of the members of an inner archive that must be unpacked. The inner archive
/// lies at `place`; `len` is its length if it lies there as it is.
pub(super) fn nested_place(place: Place, len: u64) -> Place {
    match place {
        Place::Bytes { offset } => Place::Nested { offset, len },
        Place::SparseTar { offset, len } | Place::ZipRecord { offset, len } => Place::Nested { offset, len },
        Place::Nested { .. } | Place::Tree => place,
    }
}

/// A member as its archive describes it, before it has a path in the dataset.
pub(super) struct FoundMember {
    pub(super) name: Vec<u8>,
    pub(super) key: MemberKey,
    /// Where the bytes of a file lie.
    pub(super) place: Place,
    pub(super) mode: u32,
    pub(super) mtime_s: i64,
    pub(super) mtime_ns: u32,
}

impl<S: Sink> Worker<S> {
    /// Reads a compressed tar, which other threads decode.
    pub(super) fn read_compressed(
        &mut self,
        unit: &Unit,
        path: &Path,
        compression: Compression,
        as_planned: Version,
    ) -> Result<(), StageInError> {
        let unreadable = |error| StageInError::Read { path: path.to_owned(), error };
        let changed = || StageInError::Changed { path: path.to_owned() };
        let file = File::open(path).map_err(unreadable)?;
        if version(&file).map_err(unreadable)? != as_planned {
            return Err(changed());
        }
        let archive = Archive::of_unit(unit, path, true, self.decoders.memory_max);
        let (decoders, monitor) = (self.decoders, self.monitor.clone());
        std::thread::scope(|scope| {
            let input = file.try_clone().and_then(|file| decoder_threads::start(scope, compression, file, decoders, monitor));
            let mut tar = TarReader::new(input.map_err(unreadable)?);
            let read = self.read_members(&archive, &mut tar, &mut Keys::Offset(0));
            // In a compressed stream, a checksum may follow the tar's end mark, so the stream is
            // read to its end.
            let read = read.and_then(|end| {
                tar.drain().map_err(|error| self.tar_error(&archive, error))?;
                match end.filter(|_| tar.input().has_trailing()) {
                    Some(end) => self.note_trailing(&archive, tar.next_start(), end),
                    None => Ok(()),
                }
            });
            let waited = tar.input().waited();
            self.count_reading(waited, 0);
            read
        })?;
        let is_same = version(&file).map_err(unreadable)? == as_planned;
        self.unit.source_bytes += as_planned.size;
        if is_same { Ok(()) } else { Err(changed()) }
    }

    /// Reads all members of a tar, up to its end. Returns how it ends, or `None` if it is damaged up to its end.
    pub(super) fn read_members<R: Skip + Send>(
        &mut self,
        archive: &Archive<'_>,
        tar: &mut TarReader<R>,
        keys: &mut Keys,
    ) -> Result<Option<End>, StageInError> {
        loop {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            match tar.next() {
                Ok(Next::Member(member)) => self.take_from_tar(archive, member, tar, keys)?,
                Ok(Next::End(end)) => {
                    let is_followed =
                        end == End::Marked && tar.is_followed_by_archive().map_err(|error| self.tar_error(archive, error))?;
                    self.note_end(archive, end, is_followed);
                    return Ok(Some(end));
                }
                Err(error) => {
                    let error = self.tar_error(archive, error);
                    self.skip_or_fail(error)?;
                    if !tar.resume(u64::MAX) {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Counts an archive that has no end mark, or whose end mark another archive follows, and adds a note.
    pub(super) fn note_end(&mut self, archive: &Archive<'_>, end: End, is_followed: bool) {
        let path = archive.path.display();
        if end == End::Unmarked {
            self.unit.counts.unmarked_ends += 1;
            self.unit.counts.note(&format!("'{path}' has no end-of-archive mark, so it may be truncated"));
        }
        if is_followed {
            self.unit.counts.followed_ends += 1;
            let note = "another archive follows its end-of-archive mark, and is left out, as by tar without --ignore-zeros";
            self.unit.counts.note(&format!("'{path}': {note}; stage in the archives one by one"));
        }
    }

    /// Counts an archive in which other bytes follow the compressed stream, and adds a note. `end` says how the tar in the stream ends
    /// at the offset `at`.
    pub(super) fn note_trailing(&mut self, archive: &Archive<'_>, at: u64, end: End) -> Result<(), StageInError> {
        if end == End::Unmarked {
            let reason = "the compressed stream ends here, but not the tar in it, and bytes that are not compressed follow";
            return Err(archive.damaged(at, reason));
        }
        self.unit.counts.trailed_streams += 1;
        self.unit.counts.note(&format!("'{}': bytes that are not compressed follow, and are left out", archive.path.display()));
        Ok(())
    }

    /// Takes a member of a tar. The reader is positioned at the member's data.
    pub(super) fn take_from_tar<R: Skip + Send>(
        &mut self,
        archive: &Archive<'_>,
        member: TarMember,
        tar: &mut TarReader<R>,
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        let place = keys.place_in_tar(tar.member_start(), &member);
        let TarMember { name, kind, size, stored_len, mode, mtime_s, mtime_ns, data_offset, remark, flaw } = member;
        if let Some((offset, reason)) = flaw {
            let error = self.tar_error(archive, TarError::Damaged { offset, reason: reason.to_owned() });
            self.skip_or_fail(error)?;
        }
        if let Some(remark) = remark {
            self.unit.counts.note(&format!("'{}' in '{}': {remark}", display(&name), archive.path.display()));
        }
        let key = keys.key(archive, data_offset)?;
        let found = FoundMember { name, key, place, mode, mtime_s, mtime_ns };
        let kind = match kind {
            TarKind::Special => {
                self.unit.counts.special += 1;
                return Ok(());
            }
            TarKind::File => {
                if let Some(inner) = self.nested(archive, &found.name) {
                    let (next, end) = (key.offset.saturating_add(1), key.offset.saturating_add(stored_len));
                    let mut counted = Keys::Count { next, end, within: nested_place(place, stored_len) };
                    // Offsets within an expanded sparse file differ from offsets in the archive.
                    let keys = if stored_len == size { keys } else { &mut counted };
                    return self.take_nested(&inner, found, (size, end), tar, keys);
                }
                return self.take_data(archive, found, size, tar, &|error| archive.unreadable(data_offset, error));
            }
            TarKind::Directory => MemberKind::Directory,
            TarKind::Symlink(target) => MemberKind::Symlink(target),
            TarKind::HardLink(target) => MemberKind::HardLink(target),
        };
        self.take_found(archive, found, kind)
    }

    /// Takes a file, whose bytes come from `data`. With `--keep-going`, a file that cannot be read
    /// is skipped.
    pub(super) fn take_data(
        &mut self,
        archive: &Archive<'_>,
        found: FoundMember,
        size: u64,
        data: &mut dyn Read,
        damaged: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        let Some(path) = self.path_of(archive, &found.name, false)? else { return Ok(()) };
        let FoundMember { key, place, mode, mtime_s, mtime_ns, .. } = found;
        let kind = MemberKind::File { size: 0, place, blocks: Vec::new(), checksums: Vec::new() };
        let member = Member { path, key, ticket: self.unit.ticket, mode, mtime_s, mtime_ns, kind };
        self.take_file(member, size, data, damaged).or_else(|error| self.skip_or_fail(error))?;
        self.flush_if_many()
    }

    /// Takes a directory, symlink or hard link.
    pub(super) fn take_found(&mut self, archive: &Archive<'_>, found: FoundMember, kind: MemberKind) -> Result<(), StageInError> {
        let Some(path) = self.path_of(archive, &found.name, kind == MemberKind::Directory)? else { return Ok(()) };
        let kind = match kind {
            MemberKind::Symlink(target) if target.is_empty() || target.len() > SYMLINK_LEN_MAX => {
                return self.refuse(archive, &found.name, "it is a symlink whose target is empty or too long");
            }
            MemberKind::Symlink(target) if target.contains(&0) => {
                return self.refuse(archive, &found.name, "it is a symlink whose target contains a NUL byte");
            }
            MemberKind::HardLink(target) => match self.selector.link_target(&join(&archive.inner, &target)) {
                Ok(Some(target)) => MemberKind::HardLink(join(archive.prefix, &target)),
                Ok(None) => return self.refuse(archive, &found.name, "it is a hard link to a member that is not selected"),
                Err(reason) => {
                    return self.refuse(
                        archive,
                        &found.name,
                        &format!("it is a hard link whose target is not a valid path: {reason}"),
                    );
                }
            },
            other => other,
        };
        let FoundMember { key, mut mode, mtime_s, mtime_ns, .. } = found;
        if matches!(kind, MemberKind::Symlink(_)) {
            // Linux gives every symlink this mode, whatever the archive says.
            mode = 0o777;
        }
        self.take_member(Member { path, key, ticket: self.unit.ticket, mode, mtime_s, mtime_ns, kind })
    }

    /// Returns a member's path in the dataset, or `None` if the member is not taken.
    fn path_of(&mut self, archive: &Archive<'_>, name: &[u8], is_directory: bool) -> Result<Option<Vec<u8>>, StageInError> {
        let full = if archive.inner.is_empty() { name.to_vec() } else { [&archive.inner, &b"/"[..], name].concat() };
        let path = match self.selector.decide(&full, is_directory) {
            Decision::Take(path) => join(archive.prefix, &path),
            Decision::Leave => {
                self.unit.counts.unselected += u64::from(!is_directory);
                return Ok(None);
            }
            Decision::Reject(reason) => return self.refuse(archive, name, &reason.to_string()).map(|()| None),
        };
        if path.is_empty() && !is_directory {
            return self.refuse(archive, name, "it has the path of the dataset's root, but is not a directory").map(|()| None);
        }
        self.unit.counts.made_relative += u64::from(name.starts_with(b"/"));
        Ok(Some(path))
    }

    /// Counts a member that a dataset cannot hold, and adds a note about it. The stage-in
    /// continues.
    fn refuse(&mut self, archive: &Archive<'_>, name: &[u8], reason: &str) -> Result<(), StageInError> {
        self.unit.counts.refused += 1;
        self.unit.counts.note(&format!("'{}' in '{}' is refused: {reason}", display(name), archive.path.display()));
        Ok(())
    }

    /// Adds the archive's path to an error. Cancellation also makes reads fail, but such a failure is
    /// not damage.
    pub(super) fn tar_error(&self, archive: &Archive<'_>, error: TarError) -> StageInError {
        match error {
            _ if self.monitor.is_cancelled() => StageInError::Cancelled,
            TarError::Damaged { offset, reason } => archive.damaged(offset, reason),
            TarError::Unreadable { offset, error } => archive.unreadable(offset, error),
        }
    }
}
