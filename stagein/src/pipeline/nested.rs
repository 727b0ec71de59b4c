//! Unpacks archives within archives (`--nested`).
//!
//! A member is unpacked if its name has an archive's ending and its first bytes confirm that it is
//! an archive. Otherwise the member stays a file, and the bytes that were read for this check are
//! needed again: [`Rewound`] puts the start of a member back, and [`Recorder`] keeps what a decoder
//! consumed.

use std::io::{self, Read, Seek};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dayfly_meta::catalog::{Compression, Member, MemberKind};
use dayfly_meta::limits::{NESTED_DECODER_MEMORY_MAX, NESTED_DEPTH_MAX, NESTED_ZIP_LEN_MAX};
use dayfly_meta::path::{components, display, join, normalize, split_last};

use super::archive::{Archive, FoundMember, Keys, nested_place};
use super::{Sink, Worker};
use crate::StageInError;
use crate::selection::Decision;
use crate::source::compressed::{Decoded, SKIPPED_LEN_MAX, decoder, needed_to_recognize, recognize};
use crate::source::plain::Skip;
use crate::source::tar::{BLOCK_LEN, End, TarReader, is_tar};
use crate::source::{without_archive_ending, zip};

/// A stream that returns its first bytes once more, although they have already been read.
struct Rewound<'a>(io::Chain<&'a [u8], &'a mut (dyn Read + Send)>);

impl Read for Rewound<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Skip for Rewound<'_> {}

/// A reader that records the bytes that pass through it while `is_on` is set, because they may be
/// needed again. `is_on` is shared, because a decoder borrows the recorder meanwhile.
struct Recorder<R> {
    input: R,
    record: Vec<u8>,
    is_on: Arc<AtomicBool>,
}

impl<R: Read> Read for Recorder<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        if self.is_on.load(Ordering::Relaxed) {
            self.record.extend_from_slice(&buffer[..count]);
        }
        Ok(count)
    }
}

impl<S: Sink> Worker<S> {
    /// Returns the member as an archive if it has an archive's name and may be unpacked. Returns
    /// `None` if the member stays a file.
    pub(super) fn nested<'a>(&self, archive: &Archive<'a>, name: &[u8]) -> Option<Archive<'a>> {
        if !self.selection.nested || archive.depth == NESTED_DEPTH_MAX {
            return None;
        }
        let Archive { source, prefix, depth, .. } = *archive;
        // Patterns match names as archives spell them. A name that leads out of the tree is refused later, just as a file's name would
        // be.
        let full = join(&archive.inner, name);
        normalize(&full).ok()?;
        let inner = without_archive_ending(&full)?.to_vec();
        let path = archive.path.join(display(name));
        let decoder_memory = NESTED_DECODER_MEMORY_MAX;
        let nested = Archive { source, path, prefix, inner, depth: depth + 1, is_decompressed: false, decoder_memory };
        (!self.selector.excludes(&full)).then_some(nested)
    }

    /// Unpacks a member that has an archive's name. A member without an archive's contents stays a
    /// file. If the inner members get counted keys ([`Keys::Count`]), these keys stay below `end`.
    pub(super) fn take_nested(
        &mut self,
        archive: &Archive<'_>,
        found: FoundMember,
        (size, end): (u64, u64),
        data: &mut (dyn Read + Send),
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        let mut start = Vec::new();
        if let Err(error) = data.take(BLOCK_LEN as u64).read_to_end(&mut start) {
            return self.skip_or_fail(archive.unreadable(0, error));
        }
        // Long frames to skip may come before the one that tells the compression.
        while let Some(needed) = needed_to_recognize(&start).filter(|&needed| needed <= SKIPPED_LEN_MAX) {
            let missing = needed.saturating_sub(start.len() as u64);
            match data.take(missing).read_to_end(&mut start) {
                Ok(1..) => {}
                Ok(0) => break,
                Err(error) => return self.skip_or_fail(archive.unreadable(0, error)),
            }
        }
        let compression = recognize(&start);
        let within = nested_place(found.place, end.saturating_sub(found.key.offset));
        let mut counted = Keys::Count { next: found.key.offset.saturating_add(1), end, within };
        let mut offset = Keys::Offset(found.key.offset);
        let is_plain_tar = compression == Compression::None && is_tar(&start);
        let keys = match keys {
            Keys::Offset(_) if is_plain_tar => &mut offset,
            Keys::Offset(_) => &mut counted,
            Keys::Count { .. } => keys,
        };
        let mut rewound = Rewound(start.chain(data));
        if is_plain_tar {
            self.take_directory(archive, &found)?;
            let read = self.read_nested_tar(archive, &mut TarReader::new(rewound), keys);
            return read.map(drop).or_else(|error| self.skip_or_fail(error));
        }
        if compression != Compression::None {
            return self.take_compressed(archive, found, (size, compression), rewound, keys);
        }
        if zip::is_zip(&start) && size <= NESTED_ZIP_LEN_MAX {
            self.take_directory(archive, &found)?;
            return self.read_spooled_zip(archive, &mut rewound, keys).or_else(|error| self.skip_or_fail(error));
        }
        self.take_as_file(archive, found, size, &mut rewound)
    }

    /// Takes a compressed member, which may contain a tar or anything else.
    fn take_compressed(
        &mut self,
        archive: &Archive<'_>,
        found: FoundMember,
        (size, compression): (u64, Compression),
        input: Rewound<'_>,
        keys: &mut Keys,
    ) -> Result<(), StageInError> {
        let is_on = Arc::new(AtomicBool::new(true));
        let mut recorder = Recorder { input, record: Vec::new(), is_on: is_on.clone() };
        let mut head = Vec::new();
        {
            let opened =
                decoder(compression, &mut recorder, NESTED_DECODER_MEMORY_MAX).map(Decoded::new).and_then(|mut decoder| {
                    decoder.by_ref().take(BLOCK_LEN as u64).read_to_end(&mut head)?;
                    Ok(decoder)
                });
            match opened {
                Err(error) => return self.skip_or_fail(archive.unreadable(0, error)),
                Ok(mut decoder) if is_tar(&head) => {
                    is_on.store(false, Ordering::Relaxed);
                    self.take_directory(archive, &found)?;
                    let mut tar = TarReader::new(Rewound(head.chain(&mut decoder)));
                    let read = self.read_nested_tar(archive, &mut tar, keys);
                    let at = tar.next_start();
                    let read = read.and_then(|end| match end.filter(|_| decoder.has_trailing) {
                        Some(end) => self.note_trailing(archive, at, end),
                        None => Ok(()),
                    });
                    return read.or_else(|error| self.skip_or_fail(error));
                }
                Ok(_) => {}
            }
        }
        let Recorder { mut input, record, .. } = recorder;
        self.take_as_file(archive, found, size, &mut Rewound(record.chain(&mut input)))
    }

    /// Reads a tar and then the rest of the input, which may contain a decoder's checksum.
    fn read_nested_tar<R: Skip + Send>(
        &mut self,
        archive: &Archive<'_>,
        tar: &mut TarReader<R>,
        keys: &mut Keys,
    ) -> Result<Option<End>, StageInError> {
        let end = self.read_members(archive, tar, keys)?;
        tar.drain().map_err(|error| self.tar_error(archive, error))?;
        Ok(end)
    }

    /// Takes a member as a file, although it has an archive's name.
    fn take_as_file(
        &mut self,
        archive: &Archive<'_>,
        found: FoundMember,
        size: u64,
        data: &mut dyn Read,
    ) -> Result<(), StageInError> {
        // `archive.inner` lacks the ending, so the last component is taken from the member's own
        // name.
        let folder = split_last(&archive.inner).map_or(&b""[..], |(folder, _)| folder);
        let last = components(&found.name).last().unwrap_or_default();
        let name = join(folder, last);
        let outer = Archive { path: archive.path.clone(), inner: Vec::new(), prefix: archive.prefix, ..*archive };
        self.take_data(&outer, FoundMember { name, ..found }, size, data, &|error| archive.unreadable(0, error))
    }

    /// Takes the directory that replaces an archive within an archive.
    fn take_directory(&mut self, archive: &Archive<'_>, found: &FoundMember) -> Result<(), StageInError> {
        let Decision::Take(path) = self.selector.decide(&archive.inner, true) else { return Ok(()) };
        let FoundMember { key, mtime_s, mtime_ns, .. } = *found;
        let path = join(archive.prefix, &path);
        self.take_member(Member {
            path,
            key,
            ticket: self.unit.ticket,
            mode: 0o755,
            mtime_s,
            mtime_ns,
            kind: MemberKind::Directory,
        })
    }

    /// Copies a zip to a temporary file and unpacks it from there. A zip cannot be unpacked as a
    /// stream, because its directory is at its end.
    fn read_spooled_zip(&mut self, archive: &Archive<'_>, input: &mut dyn Read, keys: &mut Keys) -> Result<(), StageInError> {
        let mut file = self.runs.temp_file().map_err(StageInError::TempFile)?;
        let mut chunk = vec![0; 256 << 10];
        loop {
            if self.monitor.is_cancelled() {
                return Err(StageInError::Cancelled);
            }
            let count = input.read(&mut chunk).map_err(|error| archive.unreadable(0, error))?;
            if count == 0 {
                break;
            }
            io::Write::write_all(&mut file, &chunk[..count]).map_err(StageInError::TempFile)?;
        }
        file.rewind().map_err(StageInError::TempFile)?;
        self.read_whole_zip(archive, &file, keys)
    }
}
