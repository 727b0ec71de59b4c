//! Decompresses gzip, zstd, xz, bzip2 and lz4 with established libraries.
//!
//! Each decoder has a bound on the memory that a hostile stream can make it use. As with the
//! formats' own tools, a file may consist of several streams one after another. `decoder_threads`
//! decodes a whole file on threads of its own, and `frames` finds where such a file can be split.
//! `unpacked_len` finds out what a file unpacks to, without decoding it.

pub(crate) mod decoder_threads;
mod frames;
pub(crate) mod unpacked_len;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;

use dayfly_meta::catalog::Compression;

use frames::FrameScanner;

/// Bytes that a decoder reads from its input at a time.
const READ_LEN: usize = 1 << 20;
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const BZIP2_MAGIC: &[u8] = b"BZh";
const LZ4_MAGIC: &[u8] = &[4, 0x22, 0x4d, 0x18];
/// As `lz4 -l` writes it.
const LZ4_LEGACY_MAGIC: &[u8] = &[2, 0x21, 0x4c, 0x18];
/// How many frames that decoders skip may come before the one that tells a file's compression.
const FRAMES_SKIPPED_MAX: usize = 64;
/// How many bytes of an archive within an archive are kept in memory to find out its compression, if frames that decoders skip come first.
pub(crate) const SKIPPED_LEN_MAX: u64 = 1 << 20;
/// Memory that liblzma needs in addition to the dictionary.
const XZ_MEMORY: u64 = 1 << 20;
/// The largest window that zstd's library knows, as a power of 2.
const ZSTD_WINDOW_LOG_MAX: u32 = 31;

/// Returns the compression of a file with these first bytes.
pub(crate) fn recognize(start: &[u8]) -> Compression {
    const MAGICS: [(&[u8], Compression); 6] = [
        (&[0x1f, 0x8b, 8], Compression::Gzip),
        (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
        (&[0xfd, b'7', b'z', b'X', b'Z', 0], Compression::Xz),
        (BZIP2_MAGIC, Compression::Bzip2),
        (LZ4_MAGIC, Compression::Lz4),
        (LZ4_LEGACY_MAGIC, Compression::Lz4),
    ];
    // Files from pzstd begin with a skippable frame, and lz4 files may begin with one. The frame
    // after it decides. If `start` ends before that frame, zstd is assumed, because it is more
    // likely.
    if let [0x50..=0x5f, 0x2a, 0x4d, 0x18, len @ ..] = start
        && let Some(len) = len.first_chunk()
    {
        let after = start.get(8 + u32::from_le_bytes(*len) as usize..).filter(|after| after.len() >= 4);
        return after.map_or(Compression::Zstd, recognize);
    }
    let found = MAGICS.iter().find(|(magic, _)| start.starts_with(magic));
    found.map_or(Compression::None, |&(_, compression)| compression)
}

/// Returns the compression of a file whose first bytes are `start`. Unlike [`recognize`], this finds what comes after long frames that
/// decoders skip.
pub(crate) fn recognize_file(file: &File, start: &[u8]) -> io::Result<Compression> {
    let (mut at, mut head) = (0, start.to_vec());
    for _ in 0..FRAMES_SKIPPED_MAX {
        let [0x50..=0x5f, 0x2a, 0x4d, 0x18, a, b, c, d, ..] = head[..] else { break };
        at += 8 + u64::from(u32::from_le_bytes([a, b, c, d]));
        let mut next = vec![0; 8];
        match file.read_exact_at(&mut next, at) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            read => read?,
        }
        head = next;
    }
    Ok(recognize(&head))
}

/// Returns how many of a stream's first bytes [`recognize`] needs, as far as `start` tells, if frames that decoders skip come first.
/// Returns `None` if none comes first, or more than [`recognize`] looks at.
pub(crate) fn needed_to_recognize(start: &[u8]) -> Option<u64> {
    let mut end = 0_u64;
    for frames in 0..=FRAMES_SKIPPED_MAX {
        let rest = usize::try_from(end).ok().and_then(|end| start.get(end..));
        let Some([0x50..=0x5f, 0x2a, 0x4d, 0x18, a, b, c, d, ..]) = rest else { return (frames > 0).then_some(end + 8) };
        end += 8 + u64::from(u32::from_le_bytes([*a, *b, *c, *d]));
    }
    None
}

/// Returns the window in bytes that a decoder will need, according to the first bytes of the file. Returns 0 for formats whose
/// windows are always small.
pub(crate) fn window_len(compression: Compression, start: &[u8]) -> u64 {
    match compression {
        Compression::Xz => xz_dictionary_len(&start[..start.len().min(64)]),
        Compression::Zstd => FrameScanner::new(Compression::Zstd).map_or(0, |mut scanner| {
            scanner.scan(start);
            scanner.window()
        }),
        Compression::None | Compression::Gzip | Compression::Bzip2 | Compression::Lz4 => 0,
    }
}

/// Returns a reader of the decompressed stream, with a window of at most `memory_max` bytes.
pub(crate) fn decoder<'a>(
    compression: Compression,
    input: impl Read + Send + 'a,
    memory_max: u64,
) -> io::Result<Box<dyn Read + Send + 'a>> {
    piece_decoder(compression, input, memory_max, true)
}

/// Like [`decoder`], for a piece of a file. Before a piece that is not the first, a stream has ended.
fn piece_decoder<'a>(
    compression: Compression,
    input: impl Read + Send + 'a,
    memory_max: u64,
    is_first: bool,
) -> io::Result<Box<dyn Read + Send + 'a>> {
    let input = BufReader::with_capacity(READ_LEN, input);
    Ok(match compression {
        Compression::None => Box::new(input),
        Compression::Gzip => {
            let open = |input| Ok(flate2::bufread::GzDecoder::new(input));
            Streams::boxed(input, is_first, open, flate2::bufread::GzDecoder::into_inner, |next| begins_with(next, GZIP_MAGIC))?
        }
        Compression::Bzip2 => {
            let open = |input| Ok(bzip2::bufread::BzDecoder::new(input));
            Streams::boxed(input, is_first, open, bzip2::bufread::BzDecoder::into_inner, |next| begins_with(next, BZIP2_MAGIC))?
        }
        Compression::Xz => {
            let stream = liblzma::stream::Stream::new_stream_decoder(memory_max + XZ_MEMORY, liblzma::stream::CONCATENATED)?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(input, stream))
        }
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(input)?;
            decoder.window_log_max(memory_max.max(1).ilog2().min(ZSTD_WINDOW_LOG_MAX))?;
            Box::new(decoder)
        }
        Compression::Lz4 => {
            let open = |input| Ok(Lz4Frame(lz4_flex::frame::FrameDecoder::new(input)));
            Streams::boxed(input, is_first, open, Lz4Frame::into_inner, begins_lz4_frame)?
        }
    })
}

/// Bytes that begin no stream follow the last one. All streams have been read to their ends.
#[derive(Debug, thiserror::Error)]
#[error("bytes that belong to no compressed stream follow the last one")]
struct Trailing;

/// Returns whether a decoder reported that it has read everything, and that other bytes follow.
fn is_trailing(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<Trailing>())
}

/// Reads what a decoder decodes, up to bytes that begin no stream.
pub(crate) struct Decoded<'a> {
    decoder: Box<dyn Read + Send + 'a>,
    /// Whether there are such bytes.
    pub(crate) has_trailing: bool,
}

impl<'a> Decoded<'a> {
    pub(crate) fn new(decoder: Box<dyn Read + Send + 'a>) -> Self {
        Self { decoder, has_trailing: false }
    }
}

impl Read for Decoded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.decoder.read(buffer) {
            Err(error) if is_trailing(&error) => {
                self.has_trailing = true;
                Ok(0)
            }
            result => result,
        }
    }
}

/// Reads several streams one after another, although each decoder stops at the end of its stream.
/// Zeros between streams and after the last one are skipped: tapes and block devices pad files with
/// them. Other bytes end the streams with [`Trailing`].
pub(super) struct Streams<R, D> {
    /// The decoder of the current stream.
    decoder: Option<D>,
    /// The input between two streams.
    input: Option<R>,
    open: Box<dyn Fn(R) -> io::Result<D> + Send>,
    close: fn(D) -> R,
    /// Returns whether bytes may begin a stream.
    begins: fn(&[u8]) -> bool,
}

impl<'a, R: BufRead + Send + 'a, D: Read + Send + 'a> Streams<R, D> {
    pub(super) fn boxed(
        input: R,
        is_first: bool,
        open: impl Fn(R) -> io::Result<D> + Send + 'static,
        close: fn(D) -> R,
        begins: fn(&[u8]) -> bool,
    ) -> io::Result<Box<dyn Read + Send + 'a>>
    where
        R: 'a,
    {
        let (decoder, input) = if is_first { (Some(open(input)?), None) } else { (None, Some(input)) };
        Ok(Box::new(Self { decoder, input, open: Box::new(open), close, begins }))
    }
}

impl<R: BufRead, D: Read> Read for Streams<R, D> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(decoder) = &mut self.decoder {
                let count = decoder.read(buffer)?;
                if count > 0 || buffer.is_empty() {
                    return Ok(count);
                }
                self.input = self.decoder.take().map(self.close);
            }
            let Some(mut input) = self.input.take() else { return Ok(0) };
            let next = after_zeros(&mut input)?;
            if next.is_empty() {
                return Ok(0);
            }
            if !(self.begins)(next) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, Trailing));
            }
            self.decoder = Some((self.open)(input)?);
        }
    }
}

/// Skips zeros, and returns some of the bytes that follow; none at the end.
fn after_zeros(input: &mut impl BufRead) -> io::Result<&[u8]> {
    loop {
        let zeros = input.fill_buf()?.iter().take_while(|&&byte| byte == 0).count();
        if zeros == 0 {
            return input.fill_buf();
        }
        input.consume(zeros);
    }
}

/// Returns the size in bytes of the dictionary that a decoder allocates for an xz file's first
/// block. For a header that cannot be parsed, returns the largest possible size.
fn xz_dictionary_len(start: &[u8]) -> u64 {
    // A stream header of 12 bytes comes first. The block header after it has its own length (one
    // byte), flags, two optional lengths, and the filters.
    let mut rest = start.get(13..).unwrap_or_default();
    let Some((&flags, after)) = rest.split_first() else { return u64::MAX };
    rest = after;
    let mut number = || {
        let len = rest.iter().position(|byte| byte & 0x80 == 0)? + 1;
        let value = rest.get(..len.min(9))?.iter().rev().fold(0_u64, |value, byte| value << 7 | u64::from(byte & 0x7f));
        rest = &rest[len..];
        Some(value)
    };
    let lens = (flags >> 6 & 1) + (flags >> 7);
    let mut find = || {
        for _ in 0..lens {
            number()?;
        }
        for _ in 0..=flags & 3 {
            let (filter, properties) = (number()?, number()?);
            let first = number()?;
            if filter == 0x21 && properties == 1 && first < 40 {
                return Some((2 | first & 1) << (first / 2 + 11));
            }
            for _ in 1..properties {
                number()?;
            }
        }
        None
    };
    find().unwrap_or(u64::MAX)
}

/// Reads one lz4 frame. Each frame needs a decoder of its own, because the library's decoder expects all frames to have blocks of one
/// size. A frame to skip is empty.
struct Lz4Frame<R: BufRead>(lz4_flex::frame::FrameDecoder<R>);

impl<R: BufRead> Lz4Frame<R> {
    fn into_inner(self) -> R {
        self.0.into_inner()
    }
}

impl<R: BufRead> Read for Lz4Frame<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer).or_else(|error| {
            let len = skippable_len(&error).ok_or(error)?;
            let skipped = io::copy(&mut self.0.get_mut().take(len), &mut io::sink())?;
            // Nothing is missing if such a frame is cut short. `lz4` does not even warn.
            if skipped < len { Err(io::Error::new(io::ErrorKind::InvalidData, Trailing)) } else { Ok(0) }
        })
    }
}

/// Returns whether bytes may begin a stream. There may be fewer than all bytes of its magic number.
fn begins_with(next: &[u8], magic: &[u8]) -> bool {
    next.iter().zip(magic).all(|(byte, expected)| byte == expected)
}

fn begins_lz4_frame(next: &[u8]) -> bool {
    // The last four bits of the first byte of a frame to skip may be any.
    let is_skippable =
        next.split_first().is_some_and(|(first, rest)| first & 0xf0 == 0x50 && begins_with(rest, &[0x2a, 0x4d, 0x18]));
    is_skippable || begins_with(next, LZ4_MAGIC) || begins_with(next, LZ4_LEGACY_MAGIC)
}

/// Returns the length of the frame to skip whose header the library has read, if that is why it stopped.
fn skippable_len(error: &io::Error) -> Option<u64> {
    match error.get_ref()?.downcast_ref() {
        Some(lz4_flex::frame::Error::SkippableFrame(len)) => Some(u64::from(*len)),
        _ => None,
    }
}

/// Runs the parsers that look at a stream before it is decoded. The fuzz targets call this.
#[cfg(test)]
pub(crate) fn inspect(compression: Compression, bytes: &[u8]) {
    xz_dictionary_len(bytes);
    if let Some(mut scanner) = frames::FrameScanner::new(compression) {
        scanner.scan(bytes);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write;

    use dayfly_meta::limits::DECODER_MEMORY_DEFAULT;

    use super::*;

    pub(crate) fn compress(compression: Compression, bytes: &[u8]) -> Vec<u8> {
        match compression {
            Compression::None => bytes.to_vec(),
            Compression::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Bzip2 => {
                let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Xz => {
                let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
            Compression::Zstd => zstd::encode_all(bytes, 1).unwrap(),
            Compression::Lz4 => {
                let info = lz4_flex::frame::FrameInfo::new().content_checksum(true).block_checksums(true);
                let mut encoder = lz4_flex::frame::FrameEncoder::with_frame_info(info, Vec::new());
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
        }
    }

    const ALL: [Compression; 5] = [Compression::Gzip, Compression::Zstd, Compression::Xz, Compression::Bzip2, Compression::Lz4];

    fn unpack(compression: Compression, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut unpacked = Vec::new();
        decoder(compression, bytes, DECODER_MEMORY_DEFAULT)?.take(1 << 26).read_to_end(&mut unpacked)?;
        Ok(unpacked)
    }

    #[test]
    fn each_format_is_recognized_and_several_streams_in_one_file_are_unpacked() {
        let half: Vec<u8> = (0..300_000_u32).flat_map(|number| (number / 7).to_le_bytes()).collect();
        for compression in ALL {
            let packed = compress(compression, &half);
            assert_eq!(recognize(&packed), compression);
            assert!(unpack(compression, &packed).unwrap() == half, "{compression:?}");
            assert!(unpack(compression, &packed.repeat(2)).unwrap() == half.repeat(2), "{compression:?} twice");
        }
        let skipped = [&0x184d_2a50_u32.to_le_bytes()[..], &4_u32.to_le_bytes(), b"abcd"].concat();
        for compression in [Compression::Zstd, Compression::Lz4] {
            assert_eq!(recognize(&[&skipped[..], &compress(compression, b"x")].concat()), compression);
        }
        assert_eq!(recognize(&skipped), Compression::Zstd);
        for (start, needed) in [(&skipped[..], Some(20)), (&skipped[..8], Some(20)), (&skipped[..7], None), (b"ustar", None)] {
            assert_eq!(needed_to_recognize(start), needed);
        }
        assert_eq!(needed_to_recognize(&skipped.repeat(3)), Some(44));
        // Whoever reads as much as is needed, again and again, looks at each of a bounded number of frames each time.
        assert_eq!(needed_to_recognize(&skipped.repeat(FRAMES_SKIPPED_MAX)), Some(12 * FRAMES_SKIPPED_MAX as u64 + 8));
        assert_eq!(needed_to_recognize(&skipped.repeat(FRAMES_SKIPPED_MAX + 1)), None);
        for compression in [Compression::Gzip, Compression::Bzip2] {
            let packed = compress(compression, &half);
            let padded = [&packed[..], &[0; 700], &packed, &[0; 10_000]].concat();
            assert!(unpack(compression, &padded).unwrap() == half.repeat(2), "{compression:?} with zeros");
        }
        assert_eq!(recognize(b"ustar"), Compression::None);
    }

    #[test]
    fn the_dictionary_size_of_xz_is_parsed() {
        let dictionary = |preset| {
            let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), preset);
            encoder.write_all(b"content").unwrap();
            xz_dictionary_len(&encoder.finish().unwrap())
        };
        assert_eq!((dictionary(0), dictionary(6), dictionary(9)), (256 << 10, 8 << 20, 64 << 20));
        assert_eq!(xz_dictionary_len(&[0xff; 64]), u64::MAX);
        assert_eq!(xz_dictionary_len(&[]), u64::MAX);
    }

    #[test]
    fn truncated_and_damaged_streams_are_errors() {
        let bytes: Vec<u8> = (0..100_000_u32).flat_map(|number| number.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
        for compression in ALL {
            let packed = compress(compression, &bytes);
            for cut in [packed.len() / 2, packed.len() - 1] {
                assert!(unpack(compression, &packed[..cut]).is_err(), "{compression:?} cut to {cut}");
            }
            if compression != Compression::Zstd {
                let mut damaged = packed.clone();
                damaged[packed.len() / 2] ^= 0x55;
                assert!(unpack(compression, &damaged).map_or(true, |unpacked| unpacked != bytes), "{compression:?} damaged");
            }
        }
    }
}
