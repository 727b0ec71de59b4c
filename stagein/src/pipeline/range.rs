//! A range of a plain tar: the members whose first header begins in it.
//!
//! Where the first one begins is known only once the range before has been read. Until then a worker begins at the first
//! header that it finds, and tells where that was. It begins to look a little before its range, and passes over what it finds
//! there: so extended headers are not taken apart from what they head, nor small members' data for members.

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
use crate::source::tar::{BLOCK_LEN, Extension, Next, TarReader, find_header};

/// How reading a range ended.
enum Passed {
    /// The next member is the next range's.
    To(TarPosition),
    /// The archive is at its end; the reader stands behind it.
    End,
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
        let archive = Archive { source: unit.source, path: path.clone(), prefix: &unit.prefix, inner: Vec::new(), depth: 0 };
        let report = match &range.start {
            Some(start) => self.read_from(&archive, range, start, &mut reader),
            None => self.search(&archive, range, &mut reader),
        };
        self.count_reading(reader.waited(), reader.bytes_read());
        let report = report?;
        if version(reader.file()).map_err(unreadable)? == range.version { Ok(report) } else { Err(changed()) }
    }

    /// From where the first member certainly begins.
    fn read_from(
        &mut self,
        archive: &Archive<'_>,
        range: &TarRange,
        start: &TarPosition,
        reader: &mut PlainReader,
    ) -> Result<RangeReport, StageInError> {
        let damaged =
            |reason: &str| StageInError::Damaged { path: archive.path.clone(), offset: start.offset, reason: reason.to_owned() };
        let mut globals = Extension::default();
        globals.parse(&start.globals).map_err(damaged)?;
        reader.seek(start.offset);
        let mut first = Some(start.offset);
        let passed = self.read_members_of(archive, range, TarReader::at(&mut *reader, start.offset, globals), &mut first);
        let next = match passed.or_else(|error| self.forgive(error).map(|()| Passed::End))? {
            Passed::To(position) => Some(position),
            Passed::End => None,
        };
        Ok(RangeReport { first, next, failure: None })
    }

    /// From the first header that can be found.
    fn search(&mut self, archive: &Archive<'_>, range: &TarRange, reader: &mut PlainReader) -> Result<RangeReport, StageInError> {
        let unreadable = |error| StageInError::Read { path: archive.path.clone(), error };
        let until = range.to.min(reader.size());
        reader.seek(range.from.saturating_sub(TAR_LOOK_BACK));
        let mut report = RangeReport::default();
        while let Some(at) = find_header(reader, until).map_err(unreadable)? {
            let mut first = None;
            let tar = TarReader::at(&mut *reader, at, Extension::default());
            let passed = self.read_members_of(archive, range, tar, &mut first);
            match passed {
                Ok(Passed::To(position)) => return Ok(RangeReport { first, next: Some(position), failure: None }),
                Ok(Passed::End) => {
                    report.first = first;
                    // The end of an archive that lies in this one, perhaps: then something follows.
                    if first.is_none() {
                        continue;
                    }
                    if find_header(reader, until).map_err(unreadable)?.is_none() {
                        return Ok(report);
                    }
                    if self.has_flushed {
                        // It cannot be told here which it is, nor undone: if the range was begun at the right place, it is
                        // read again from there.
                        return Ok(RangeReport::default());
                    }
                    self.discard()?;
                }
                // What looked like a header was none.
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

    /// Members up to the range's end. `first` becomes the first that begins in the range; those before are passed over.
    fn read_members_of(
        &mut self,
        archive: &Archive<'_>,
        range: &TarRange,
        mut tar: TarReader<&mut PlainReader>,
        first: &mut Option<u64>,
    ) -> Result<Passed, StageInError> {
        let mut keys = Keys::Offset(0);
        loop {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            let offset = tar.next_start();
            if offset >= range.to {
                if offset > tar.input().size() {
                    let (path, reason) = (archive.path.clone(), "it breaks off".to_owned());
                    let error = StageInError::Damaged { path, offset: tar.input().size(), reason };
                    if first.is_none() {
                        return Err(error);
                    }
                    return self.forgive(error).map(|()| Passed::End);
                }
                return Ok(Passed::To(TarPosition { offset, globals: tar.globals().records() }));
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
                        self.see_end(archive, end);
                    }
                    return Ok(Passed::End);
                }
                Err(error) => {
                    let error = self.tar_error(&archive.path, error);
                    if first.is_none() {
                        return Err(error);
                    }
                    self.forgive(error)?;
                    if !tar.resume(range.to) && tar.next_start() < range.to {
                        return Ok(Passed::End);
                    }
                }
            }
        }
    }
}
