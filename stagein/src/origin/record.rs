//! Turns the bytes of a record into the bytes of a sample: unpacks members of zips, and fills in the holes of sparse members
//! of tars.

use std::io::{self, BufRead, Read};
use std::ops::Range;
use std::path::Path;

use dayfly_meta::limits::ORIGIN_READ_LEN_MAX;

use super::error::OriginError;
use super::files::SourceFiles;
use crate::source::plain::Skip;
use crate::source::tar::{Next, TarError, TarKind, TarReader};
use crate::source::zip::data::{LOCAL_LEN, LocalHeader, decoder};

/// Bytes of a zip's local header, with its names, that a first read expects. A longer header takes another read.
const HEADERS_LEN: u64 = 512;

/// The part of a sample that is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleRange {
    /// Size of the whole sample in bytes.
    pub(super) size: u64,
    /// Offset of the first byte wanted.
    pub(super) start: u64,
    /// Number of bytes wanted.
    pub(super) len: u64,
}

impl SampleRange {
    pub(super) fn is_within(&self) -> bool {
        self.start.checked_add(self.len).is_some_and(|end| end <= self.size)
    }
}

/// A range of bytes of a source, read from its start to its end.
pub(super) struct Extent<'a, F: SourceFiles> {
    files: &'a F,
    file: &'a F::File,
    path: &'a Path,
    /// Offset of the next byte that is not in the buffer.
    next: u64,
    end: u64,
    buffer: Vec<u8>,
    /// How much of the buffer has been used.
    at: usize,
    /// How many bytes the next read into the buffer asks for.
    fill_len: u64,
    /// Why a read failed.
    failure: Option<OriginError>,
}

impl<'a, F: SourceFiles> Extent<'a, F> {
    pub(super) fn new(files: &'a F, file: &'a F::File, path: &'a Path, range: Range<u64>) -> Self {
        let (next, end, fill_len) = (range.start, range.end, ORIGIN_READ_LEN_MAX);
        Self { files, file, path, next, end, buffer: Vec::new(), at: 0, fill_len, failure: None }
    }

    /// Restricts the extent to a range of the source, and moves to the start of this range.
    pub(super) fn limit(&mut self, range: Range<u64>) {
        (self.next, self.end) = (range.start, range.end);
        self.buffer.clear();
        self.at = 0;
    }

    /// Returns why a read failed.
    pub(super) fn take_failure(&mut self) -> Option<OriginError> {
        self.failure.take()
    }

    /// Fills `bytes` from this offset of the source, which need not lie in the extent.
    pub(super) fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), OriginError> {
        let mut filled = 0;
        while filled < bytes.len() {
            let at = offset.saturating_add(filled as u64);
            match self.files.read_at(self.file, &mut bytes[filled..], at) {
                Ok(0) => {
                    let (path, wanted, got) = (self.path.to_owned(), bytes.len() as u64, filled as u64);
                    return Err(OriginError::ShortRead { path, offset, wanted, got });
                }
                Ok(count) => filled += count.min(bytes.len() - filled),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(OriginError::io(self.path, at, error)),
            }
        }
        Ok(())
    }

    /// Returns the offset of the next byte to be read.
    fn position(&self) -> u64 {
        self.next - (self.buffer.len() - self.at) as u64
    }
}

impl<F: SourceFiles> BufRead for Extent<'_, F> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.at == self.buffer.len() && self.next < self.end {
            let len = (self.end - self.next).min(std::mem::replace(&mut self.fill_len, ORIGIN_READ_LEN_MAX));
            let mut buffer = std::mem::take(&mut self.buffer);
            buffer.resize(len as usize, 0);
            // After a failure, the same bytes may be asked for again.
            self.at = 0;
            if let Err(error) = self.read_at(self.next, &mut buffer) {
                self.failure = Some(error);
                return Err(io::Error::other("the source cannot be read"));
            }
            self.buffer = buffer;
            self.next += len;
        }
        Ok(&self.buffer[self.at..])
    }

    fn consume(&mut self, count: usize) {
        self.at = (self.at + count).min(self.buffer.len());
    }
}

impl<F: SourceFiles> Read for Extent<'_, F> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut ready = self.fill_buf()?;
        let count = ready.read(bytes)?;
        self.consume(count);
        Ok(count)
    }
}

impl<F: SourceFiles> Skip for Extent<'_, F> {
    fn skip(&mut self, len: u64) -> io::Result<()> {
        let buffered = (self.buffer.len() - self.at) as u64;
        if len <= buffered {
            self.at += len as usize;
            return Ok(());
        }
        let next = self.next.checked_add(len - buffered).filter(|&next| next <= self.end);
        self.next = next.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.at = self.buffer.len();
        Ok(())
    }
}

/// Why a record does not yield its sample.
#[derive(Debug)]
enum Malformed {
    Local,
    Method(u16),
    Size,
    Unpack(io::Error),
}

impl Malformed {
    fn into_error(self, path: &Path, offset: u64) -> OriginError {
        let reason = match self {
            Self::Local => "no member of a zip is here".to_owned(),
            Self::Method(method) => format!("the member is compressed with method {method}, which no member had at stage-in"),
            Self::Size => "the member has another size".to_owned(),
            Self::Unpack(error) => format!("the member cannot be unpacked: {error}"),
        };
        OriginError::Damaged { path: path.to_owned(), offset, reason }
    }
}

/// Fills `bytes` with a part of a zip's member, whose record is the extent.
pub(super) fn unpack_zip<F: SourceFiles>(
    source: &mut Extent<'_, F>,
    range: SampleRange,
    bytes: &mut [u8],
) -> Result<(), OriginError> {
    let (offset, path, end) = (source.position(), source.path, source.end);
    // The first read gets the whole record of a sample that is wanted as a whole. Of a part of a stored member, it gets no
    // more than the headers and the bytes wanted.
    source.fill_len = match range.start {
        0 if range.len == range.size => ORIGIN_READ_LEN_MAX,
        0 => (HEADERS_LEN + range.len).min(ORIGIN_READ_LEN_MAX),
        _ => HEADERS_LEN,
    };
    let header = read_local(source).map_err(|malformed| malformed.into_error(path, offset))?;
    let data_len = end - source.position();
    if header.method == 0 {
        if data_len != range.size {
            return Err(Malformed::Size.into_error(path, offset));
        }
        source.skip(range.start).map_err(|error| Malformed::Unpack(error).into_error(path, offset))?;
        // What the first read already fetched is not fetched again.
        let ready = &source.buffer[source.at..];
        let count = ready.len().min(bytes.len());
        bytes[..count].copy_from_slice(&ready[..count]);
        return source.read_at(source.position() + count as u64, &mut bytes[count..]);
    }
    unpack(header.method, source, range, bytes).map_err(|malformed| malformed.into_error(path, offset))
}

/// Fills `bytes` with a part of a zip's member, whose whole record is `record`. `path` and `offset` say where the record lies,
/// for messages.
pub(super) fn unpack_zip_bytes(
    mut record: &[u8],
    range: SampleRange,
    bytes: &mut [u8],
    path: &Path,
    offset: u64,
) -> Result<(), OriginError> {
    let unpacked = read_local(&mut record).and_then(|header| {
        if header.method != 0 {
            return unpack(header.method, &mut record, range, bytes);
        }
        if record.len() as u64 != range.size {
            return Err(Malformed::Size);
        }
        // The caller has checked that the range lies within the sample.
        bytes.copy_from_slice(&record[range.start as usize..][..bytes.len()]);
        Ok(())
    });
    unpacked.map_err(|malformed| malformed.into_error(path, offset))
}

/// Reads a local header and skips the names after it.
fn read_local(input: &mut impl Skip) -> Result<LocalHeader, Malformed> {
    let mut bytes = [0; LOCAL_LEN];
    input.read_exact(&mut bytes).map_err(Malformed::Unpack)?;
    let header = LocalHeader::parse(&bytes).filter(|header| !header.is_encrypted).ok_or(Malformed::Local)?;
    input.skip(header.names_len).map_err(Malformed::Unpack)?;
    Ok(header)
}

fn unpack(method: u16, packed: &mut (impl BufRead + Send), range: SampleRange, bytes: &mut [u8]) -> Result<(), Malformed> {
    let mut data = decoder(method, packed).map_err(Malformed::Unpack)?.ok_or(Malformed::Method(method))?;
    let skipped = io::copy(&mut (&mut data).take(range.start), &mut io::sink()).map_err(Malformed::Unpack)?;
    if skipped < range.start {
        return Err(Malformed::Size);
    }
    data.read_exact(bytes).map_err(Malformed::Unpack)
}

/// Fills `bytes` with a part of a sparse member of a tar. The extent begins with the member's headers.
pub(super) fn unpack_sparse<F: SourceFiles>(
    source: &mut Extent<'_, F>,
    range: SampleRange,
    bytes: &mut [u8],
) -> Result<(), OriginError> {
    let (offset, path) = (source.position(), source.path);
    let damaged = |reason: String| OriginError::Damaged { path: path.to_owned(), offset, reason };
    let mut tar = TarReader::new(source);
    match tar.next() {
        Ok(Next::Member(member)) if member.kind == TarKind::File && member.size == range.size => {}
        Ok(_) => return Err(damaged("the sparse member that was staged in is not here".to_owned())),
        Err(TarError::Damaged { reason, .. }) => return Err(damaged(reason)),
        Err(TarError::Unreadable { error, .. }) => return Err(damaged(error.to_string())),
    }
    let skipped = io::copy(&mut (&mut tar).take(range.start), &mut io::sink());
    let read = skipped.and_then(|_| tar.read_exact(bytes));
    read.map_err(|error| damaged(error.to_string()))
}
