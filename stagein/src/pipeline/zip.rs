//! Reads the members of a zip in the order of their data in the file.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use dayfly_meta::catalog::{MemberKey, MemberKind, Place};
use dayfly_meta::limits::SYMLINK_LEN_MAX;
use dayfly_meta::wire::peer::{Unit, ZipPart};

use super::archive::{Archive, FoundMember, Keys, nested_place};
use super::{Sink, Worker};
use crate::StageInError;
use crate::error::{exceeds_memory, is_of_system};
use crate::source::plain::{PlainReader, version};
use crate::source::zip::{Part, Record, ZipError, ZipKind, data, parts};

/// Keys reserved for each member of a zip. If the member is an archive, its own members get keys
/// between the archive's key and the next member's key.
const NESTED_ZIP_KEYS: u64 = 1 << 22;

impl<S: Sink> Worker<S> {
    /// Reads the members of one part of a zip.
    pub(super) fn read_zip(&mut self, unit: &Unit, part: &ZipPart) -> Result<(), StageInError> {
        let path = PathBuf::from(OsStr::from_bytes(&part.path));
        let unreadable = |error| StageInError::Read { path: path.clone(), error };
        let file = File::open(&path).map_err(unreadable)?;
        let changed = || StageInError::Changed { path: path.clone() };
        if version(&file).map_err(unreadable)? != part.version {
            return Err(changed());
        }
        let archive = Archive::of_unit(unit, &path, false, self.decoders.memory_max);
        let records =
            Record::read_all(&part.records, part.offset, part.shift).map_err(|error| error.into_stage_in_error(&path))?;
        let again = file.try_clone().map_err(unreadable)?;
        self.read_records(&archive, again, records, &mut Keys::Offset(0))?;
        if version(&file).map_err(unreadable)? == part.version { Ok(()) } else { Err(changed()) }
    }

    /// Reads all members of a zip that is within another archive and was copied to `file`.
    pub(super) fn read_whole_zip(&mut self, archive: &Archive<'_>, file: &File, keys: &mut Keys) -> Result<(), StageInError> {
        let mut result = Ok(());
        let read = parts::<ZipError>(file, &mut |Part { records, offset, .. }, shift| {
            let records = Record::read_all(&records, offset, shift)?;
            if result.is_ok() {
                result = self.read_records(archive, file.try_clone()?, records, keys);
            }
            Ok(())
        });
        result.and(read.map_err(|error| error.into_stage_in_error(&archive.path)))
    }

    fn read_records(
        &mut self,
        archive: &Archive<'_>,
        file: File,
        mut records: Vec<Record>,
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        records.sort_by_key(|record| record.local);
        let start = records.first().map_or(0, |record| record.local);
        // The last local header may have extra fields, so its data may end after `end`. The reader
        // still returns the bytes after `end`, but does not read ahead there.
        let end = records.last().map_or(0, |last| last.local.saturating_add(30 + last.name.len() as u64 + last.stored_len));
        let mut reader = PlainReader::new(file, start, end, self.monitor.clone())
            .map_err(|error| StageInError::Read { path: archive.path.clone(), error })?;
        let mut free = 0;
        for record in records {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            let taken = if record.local < free {
                Err(archive.damaged(record.local, "members overlap"))
            } else {
                self.take_record(archive, &record, &mut reader, keys)
            };
            free = record.local + record.stored_len;
            taken.or_else(|error| self.skip_or_fail(error))?;
        }
        self.count_reading(reader.waited(), reader.bytes_read());
        Ok(())
    }

    fn take_record(
        &mut self,
        archive: &Archive<'_>,
        record: &Record,
        reader: &mut PlainReader,
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        let Record { kind, mode, mtime_s, mtime_ns, size, .. } = *record;
        let key = match keys {
            Keys::Offset(_) if self.selection.nested => {
                let crowded = || StageInError::TooManyMembers { path: archive.path.clone() };
                let offset = record.offset.checked_mul(NESTED_ZIP_KEYS).filter(|&key| key < 1 << 63).ok_or_else(crowded)?;
                MemberKey { source: archive.source, offset }
            }
            Keys::Offset(_) => MemberKey { source: archive.source, offset: record.offset },
            Keys::Count { .. } => keys.key(archive, 0)?,
        };
        let mut found = FoundMember { name: record.name.clone(), key, place: Place::Tree, mode, mtime_s, mtime_ns };
        match kind {
            ZipKind::Directory => return self.take_found(archive, found, MemberKind::Directory),
            ZipKind::Special => {
                self.unit.counts.special += 1;
                return Ok(());
            }
            ZipKind::File | ZipKind::Symlink => {}
        }
        let name_source = |error: ZipError| error.into_stage_in_error(&archive.path);
        let data_offset = data::seek(reader, record).map_err(name_source)?;
        let record_len = data_offset - record.local + record.stored_len;
        found.place = match keys {
            Keys::Offset(_) => Place::ZipRecord { offset: record.local, len: record_len },
            Keys::Count { within, .. } => *within,
        };
        let mut data = data::open(reader, record).map_err(name_source)?;
        let name = dayfly_meta::path::display(&record.name);
        let damaged = |error: io::Error| match is_of_system(&error) {
            _ if exceeds_memory(&error) => archive.window_too_large(archive.path.join(&name)),
            true => archive.unreadable(record.local, error),
            false => archive.damaged(record.local, format_args!("'{name}': {error}")),
        };
        if kind == ZipKind::Symlink {
            let mut target = Vec::new();
            (&mut data).take(SYMLINK_LEN_MAX as u64 + 1).read_to_end(&mut target).map_err(damaged)?;
            return self.take_found(archive, found, MemberKind::Symlink(target));
        }
        if let Some(inner) = self.nested(archive, &found.name) {
            let within = nested_place(found.place, record_len);
            let mut inner_keys = Keys::Count { next: key.offset + 1, end: key.offset + NESTED_ZIP_KEYS, within };
            let keys = if matches!(keys, Keys::Offset(_)) { &mut inner_keys } else { keys };
            return self.take_nested(&inner, found, (size, 0), &mut data, keys);
        }
        self.take_data(archive, found, size, &mut data, &damaged)
    }
}
