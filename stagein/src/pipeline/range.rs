//! Reads ranges of a plain tar. A range contains the members whose first header starts in it.
//!
//! The start of a range's first member is known only after the previous range has been read. Until
//! then, a worker starts at the first block that looks like a header and reports the block's
//! offset. The coordinator's ledger rejects the result if the guess was wrong
//! ([`crate::unit_ledger`]).
//!
//! The search starts [`TAR_LOOK_BACK`] bytes before the range, and members found there are skipped.
//! This prevents two kinds of wrong guesses. If a member's extended header lies just before the
//! range, the search does not miss it, and the member gets its right name. If a small member's data
//! contains headers, the search does not mistake them for members.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use dayfly_meta::limits::TAR_LOOK_BACK;
use dayfly_meta::wire::peer::{RangeReport, TarPosition, TarRange};

use super::archive::{Archive, Keys};
use super::{Sink, Unit, Worker};
use crate::StageInError;
use crate::source::plain::{PlainReader, version};
use crate::source::tar::{BLOCK_LEN, End, Extension, Next, TarReader, find_header, is_archive_next};

/// How reading a range ended.
enum RangeEnd {
    /// The next member starts here, in a later range.
    NextMember(TarPosition),
    /// The archive ended, and the reader is positioned after its end.
    Archive,
}

impl<S: Sink> Worker<S> {
    pub(super) fn read_range(&mut self, unit: &Unit, range: &TarRange) -> Result<RangeReport, StageInError> {
        let path = PathBuf::from(OsStr::from_bytes(&range.path));
        let unreadable = |error| StageInError::Read { path: path.clone(), error };
        let file = File::open(&path).map_err(unreadable)?;
        let changed = || StageInError::Changed { path: path.clone() };
        if version(&file).map_err(unreadable)? != range.version {
            return Err(changed());
        }
        let mut reader = PlainReader::new(file, range.from, range.to, self.monitor.clone()).map_err(unreadable)?;
        let archive = Archive::of_unit(unit, &path, false, self.decoders.memory_max);
        let report = match &range.start {
            Some(start) => self.read_from(&archive, range, start, &mut reader),
            None => self.search(&archive, range, &mut reader),
        };
        self.count_reading(reader.waited(), reader.bytes_read());
        let report = report?;
        if version(reader.file()).map_err(unreadable)? == range.version { Ok(report) } else { Err(changed()) }
    }

    /// Reads a range whose first member is known to start at `start`.
    fn read_from(
        &mut self,
        archive: &Archive<'_>,
        range: &TarRange,
        start: &TarPosition,
        reader: &mut PlainReader,
    ) -> Result<RangeReport, StageInError> {
        let mut globals = Extension::default();
        globals.parse(&start.globals).map_err(|reason| archive.damaged(start.offset, reason))?;
        reader.seek(start.offset);
        let mut first = Some(start.offset);
        let end = self.read_members_of(archive, range, TarReader::at(&mut *reader, start.offset, globals), &mut first);
        let next = match end.or_else(|error| self.skip_or_fail(error).map(|()| RangeEnd::Archive))? {
            RangeEnd::NextMember(position) => Some(position),
            RangeEnd::Archive => None,
        };
        Ok(RangeReport { first, next, failure: None })
    }

    /// Reads a range, starting at the first block that looks like a header.
    fn search(&mut self, archive: &Archive<'_>, range: &TarRange, reader: &mut PlainReader) -> Result<RangeReport, StageInError> {
        let unreadable = |error| StageInError::Read { path: archive.path.clone(), error };
        let until = range.to.min(reader.size());
        reader.seek(range.from.saturating_sub(TAR_LOOK_BACK));
        let mut report = RangeReport::default();
        while let Some(at) = find_header(reader, until).map_err(unreadable)? {
            let mut first = None;
            let tar = TarReader::at(&mut *reader, at, Extension::default());
            let end = self.read_members_of(archive, range, tar, &mut first);
            match end {
                Ok(RangeEnd::NextMember(position)) => return Ok(RangeReport { first, next: Some(position), failure: None }),
                Ok(RangeEnd::Archive) => {
                    report.first = first;
                    // This may be only the end of an inner archive, a member of this archive. In
                    // that case more headers follow.
                    if first.is_none() {
                        continue;
                    }
                    if find_header(reader, until).map_err(unreadable)?.is_none() {
                        return Ok(report);
                    }
                    if self.unit.has_flushed {
                        // Members that are already in a run can no longer be discarded. If members
                        // do start in this range, the ledger rejects the empty report and assigns
                        // the range again with its true start.
                        return Ok(RangeReport::default());
                    }
                    self.discard()?;
                }
                // The block before the range only looked like a header.
                Err(error) if first.is_none() && at < range.from && error.is_of_source() => {
                    self.discard()?;
                    reader.seek(at + BLOCK_LEN as u64);
                }
                Err(error) if error.is_of_source() || matches!(error, StageInError::NoRoom { .. }) => {
                    if self.monitor.is_cancelled() {
                        return Err(StageInError::Cancelled);
                    }
                    self.discard()?;
                    return Ok(RangeReport { first, next: None, failure: Some(error.to_string()) });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(report)
    }

    /// Reads members up to the range's end. Members that start before the range are skipped;
    /// `first` becomes the offset of the first member in the range.
    fn read_members_of(
        &mut self,
        archive: &Archive<'_>,
        range: &TarRange,
        mut tar: TarReader<&mut PlainReader>,
        first: &mut Option<u64>,
    ) -> Result<RangeEnd, StageInError> {
        let mut keys = Keys::Offset(0);
        loop {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            let offset = tar.next_start();
            if offset >= range.to {
                if offset > tar.input().size() {
                    let error = archive.damaged(tar.input().size(), "the archive is truncated");
                    if first.is_none() {
                        return Err(error);
                    }
                    return self.skip_or_fail(error).map(|()| RangeEnd::Archive);
                }
                return Ok(RangeEnd::NextMember(TarPosition { offset, globals: tar.globals().records() }));
            }
            let next = tar.next();
            if tar.member_start() >= range.from && first.is_none() {
                *first = Some(tar.member_start());
            }
            match next {
                Ok(Next::Member(_)) if first.is_none() => {}
                Ok(Next::Member(member)) => self.take_from_tar(archive, member, &mut tar, &mut keys)?,
                Ok(Next::End(end)) => {
                    if first.is_some() {
                        let is_followed = end == End::Marked && is_archive_next(tar.input()).unwrap_or(false);
                        self.note_end(archive, end, is_followed);
                    }
                    return Ok(RangeEnd::Archive);
                }
                Err(error) => {
                    let error = self.tar_error(archive, error);
                    if first.is_none() {
                        return Err(error);
                    }
                    self.skip_or_fail(error)?;
                    if !tar.resume(range.to) && tar.next_start() < range.to {
                        return Ok(RangeEnd::Archive);
                    }
                }
            }
        }
    }
}
