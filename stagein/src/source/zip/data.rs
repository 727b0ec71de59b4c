//! Unpacks the data of a zip's members. The data follows the local header, and is checked against
//! the size and the checksum in the central directory.

use std::io::{self, BufRead, BufReader, Read, Take};

use dayfly_meta::limits::NESTED_DECODER_MEMORY_MAX;

use super::{Record, ZipError, damaged, u16_at};
use crate::source::plain::{PlainReader, Skip};

/// Bytes of a local header without the name and the extra fields.
pub(crate) const LOCAL_LEN: usize = 30;
/// Compressed bytes that are read at once.
const INPUT_LEN: usize = 32 << 10;

/// The part of a local header that the central directory does not make superfluous.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalHeader {
    /// Number of the compression method; 0 is none.
    pub(crate) method: u16,
    pub(crate) is_encrypted: bool,
    /// Bytes of the name and the extra fields, which follow the header.
    pub(crate) names_len: u64,
}

impl LocalHeader {
    /// Returns `None` if there is no local header in these bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < LOCAL_LEN || !bytes.starts_with(b"PK\x03\x04") {
            return None;
        }
        let names_len = u64::from(u16_at(bytes, 26)) + u64::from(u16_at(bytes, 28));
        Some(Self { method: u16_at(bytes, 8), is_encrypted: u16_at(bytes, 6) & 1 != 0, names_len })
    }
}

/// Moves the reader to a member's data and returns the data's offset.
pub(crate) fn seek(reader: &mut PlainReader, record: &Record) -> Result<u64, ZipError> {
    reader.seek(record.local);
    let Some(header) = LocalHeader::parse(reader.peek(LOCAL_LEN)?) else {
        return Err(damaged(record.local, "the central directory lists a member here, but there is none"));
    };
    let data = record.local + LOCAL_LEN as u64 + header.names_len;
    if data.checked_add(record.stored_len).is_none_or(|end| end > reader.size()) {
        return Err(damaged(record.local, "the archive is truncated within a member's data"));
    }
    reader.skip(data - record.local)?;
    Ok(data)
}

/// Returns a decoder of data that are compressed with a method; `None` if this version does not support the method, or if the
/// data are not compressed.
pub(crate) fn decoder<'a>(method: u16, packed: impl BufRead + Send + 'a) -> io::Result<Option<Box<dyn Read + Send + 'a>>> {
    Ok(Some(match method {
        8 => Box::new(flate2::bufread::DeflateDecoder::new(packed)),
        12 => Box::new(bzip2::bufread::BzDecoder::new(packed)),
        93 => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
            decoder.window_log_max(NESTED_DECODER_MEMORY_MAX.ilog2())?;
            Box::new(decoder)
        }
        95 => {
            let stream = liblzma::stream::Stream::new_stream_decoder(2 * NESTED_DECODER_MEMORY_MAX, 0)?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(packed, stream))
        }
        _ => return Ok(None),
    }))
}

type Input<'a> = BufReader<Take<&'a mut PlainReader>>;

/// Returns a reader of a member's unpacked data. The reader returns the last bytes only if the size
/// and the checksum are right.
pub(crate) fn open<'a>(reader: &'a mut PlainReader, record: &Record) -> Result<Box<dyn Read + Send + 'a>, ZipError> {
    let stored = record.stored_len;
    let unsupported = |reason: String| ZipError::Unsupported { offset: record.local, reason };
    if record.is_encrypted {
        return Err(unsupported("it is encrypted".to_owned()));
    }
    let packed = |reader: &'a mut PlainReader| -> Input<'a> { BufReader::with_capacity(INPUT_LEN, reader.take(stored)) };
    let checked = |size: u64| Check { left: size, expect: record.checksum, hasher: crc32fast::Hasher::new() };
    Ok(match record.method {
        0 if stored != record.size => return Err(damaged(record.local, "an uncompressed member has two different sizes")),
        0 => Box::new(Checked { input: reader.take(stored), check: checked(record.size) }),
        method => match decoder(method, packed(reader))? {
            Some(input) => Box::new(Checked { input, check: checked(record.size) }),
            None => return Err(unsupported(format!("it is compressed with method {method}"))),
        },
    })
}

/// The checks that a member's data still has to pass.
struct Check {
    /// Bytes that are still to come.
    left: u64,
    /// CRC-32 according to the central directory.
    expect: u32,
    hasher: crc32fast::Hasher,
}

/// A reader that checks the data as it passes through.
struct Checked<R> {
    input: R,
    check: Check,
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = usize::try_from(self.check.left).unwrap_or(usize::MAX).min(buffer.len());
        if len == 0 {
            return Ok(0);
        }
        let count = self.input.read(&mut buffer[..len])?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a member unpacks to fewer bytes than it should"));
        }
        self.check.hasher.update(&buffer[..count]);
        self.check.left -= count as u64;
        if self.check.left == 0 {
            if self.input.read(&mut [0])? != 0 {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a member unpacks to more bytes than it should"));
            }
            if self.check.hasher.clone().finalize() != self.check.expect {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a member's checksum does not match"));
            }
        }
        Ok(count)
    }
}
