//! Finds the boundaries between frames without decoding. zstd, lz4 and bgzf (the block gzip of
//! `bgzip`) state the lengths of their parts, so a scanner can hop from one frame to the next.
//!
//! A scanner that meets bytes it does not understand reports no more boundaries. The stream is then
//! decoded in one piece, and the decoder reports what is wrong with it.

use dayfly_meta::catalog::Compression;

/// Scans a compressed stream, piece by piece, for the starts of frames.
pub(super) struct FrameScanner {
    format: Format,
    /// The bytes of `expected` that have been read so far.
    field: Vec<u8>,
    /// Length of `expected` in bytes.
    needed: usize,
    expected: Field,
    /// Bytes to skip before the expected field.
    skip: u64,
    /// The largest window that a frame has demanded so far, in bytes.
    window: u64,
    /// What the last header said about the content of its frame, until it is taken.
    content: Option<Content>,
}

/// What the header of a frame says about the length of the frame's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// The content has this many bytes.
    Told(u64),
    /// The header does not say.
    Untold,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Zstd,
    Lz4,
    Bgzf,
}

/// The field that the scanner reads next.
#[derive(Clone, Copy)]
enum Field {
    /// The first bytes of a frame.
    Magic,
    /// The length of a skippable frame.
    SkippableLen,
    /// The frame header after the magic number.
    Header,
    /// The header of a block in a frame.
    Block {
        /// Length of the checksum after the frame's last block.
        checksum_len: u64,
        /// Length of the checksum after every block.
        block_checksum_len: u64,
    },
    /// No field: the scanner does not understand the stream, and reports no more boundaries.
    Unknown,
}

impl FrameScanner {
    /// Creates a scanner, or returns `None` for a format whose frames do not state their lengths.
    pub(super) fn new(compression: Compression) -> Option<Self> {
        let format = match compression {
            Compression::Zstd => Format::Zstd,
            Compression::Lz4 => Format::Lz4,
            Compression::Gzip => Format::Bgzf,
            Compression::None | Compression::Xz | Compression::Bzip2 => return None,
        };
        let mut scanner =
            Self { format, field: Vec::new(), needed: 0, expected: Field::Magic, skip: 0, window: 0, content: None };
        scanner.begin_frame();
        Some(scanner)
    }

    /// Returns the largest window that a frame has demanded so far, in bytes.
    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Returns whether the next byte starts a frame.
    pub(super) fn is_at_boundary(&self) -> bool {
        self.skip == 0 && self.field.is_empty() && matches!(self.expected, Field::Magic)
    }

    /// Returns how many bytes to leave out before the next field. They must not be scanned any more.
    pub(super) fn take_skip(&mut self) -> u64 {
        std::mem::take(&mut self.skip)
    }

    /// Returns how many bytes the next field still needs, or `None` if the stream is not understood.
    pub(super) fn missing(&self) -> Option<usize> {
        (!matches!(self.expected, Field::Unknown)).then(|| self.needed - self.field.len())
    }

    /// Returns what the last header that was scanned said about its frame's content, once. In bgzf
    /// it is not the header that says this.
    pub(super) fn take_content(&mut self) -> Option<Content> {
        self.content.take()
    }

    /// Scans the next bytes of the stream. Returns the offsets in `bytes` at which frames start,
    /// except for offset 0, which [`Self::is_at_boundary`] reports.
    pub(super) fn scan(&mut self, bytes: &[u8]) -> Vec<usize> {
        let mut cuts = Vec::new();
        let mut at = 0;
        while at < bytes.len() && !matches!(self.expected, Field::Unknown) {
            if self.skip > 0 {
                let count = self.skip.min((bytes.len() - at) as u64);
                self.skip -= count;
                at += count as usize;
            } else {
                let count = (self.needed - self.field.len()).min(bytes.len() - at);
                self.field.extend_from_slice(&bytes[at..at + count]);
                at += count;
                if self.field.len() == self.needed {
                    self.parse_field();
                }
            }
            if self.is_at_boundary() && at < bytes.len() {
                cuts.push(at);
            }
        }
        cuts
    }

    fn begin_frame(&mut self) {
        let needed = if self.format == Format::Bgzf { 18 } else { 4 };
        self.expect(Field::Magic, needed);
    }

    fn expect(&mut self, expected: Field, needed: usize) {
        self.field.clear();
        (self.expected, self.needed) = (expected, needed);
    }

    /// Returns the field as a little-endian number.
    fn number(&self) -> u64 {
        self.field.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    /// Parses the complete field and decides what comes next.
    fn parse_field(&mut self) {
        match (self.expected, self.format) {
            (Field::Magic, Format::Bgzf) => match &self.field[..] {
                // bgzf has one extra field, with the length of the whole block.
                [0x1f, 0x8b, 8, 4, _, _, _, _, _, _, 6, 0, b'B', b'C', 2, 0, low, high] => {
                    let len = u64::from(u16::from_le_bytes([*low, *high])) + 1;
                    match len.checked_sub(18) {
                        Some(rest) => {
                            self.skip = rest;
                            self.begin_frame();
                        }
                        None => self.expected = Field::Unknown,
                    }
                }
                _ => self.expected = Field::Unknown,
            },
            (Field::Magic, format) => match (self.number(), format) {
                (0x184d_2a50..=0x184d_2a5f, _) => self.expect(Field::SkippableLen, 4),
                (0xfd2f_b528, Format::Zstd) | (0x184d_2204, Format::Lz4) => {
                    // For zstd, this is the descriptor and at least one more byte; for lz4, two
                    // flag bytes.
                    self.expect(Field::Header, 2);
                }
                _ => self.expected = Field::Unknown,
            },
            (Field::SkippableLen, _) => {
                self.skip = self.number();
                self.begin_frame();
            }
            (Field::Header, Format::Zstd) => self.parse_zstd_header(),
            (Field::Header, _) => {
                let flags = self.field[0];
                let flag = |bit: u8| u64::from(flags >> bit & 1);
                if flag(3) == 1 && self.needed == 2 {
                    // The length of the content comes after the flags.
                    self.needed = 10;
                    return;
                }
                let content = self.field[2..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
                self.content = Some(content.map_or(Content::Untold, Content::Told));
                let (checksum_len, block_checksum_len) = (flag(2) * 4, flag(4) * 4);
                // Skips the dictionary number and the header's own checksum.
                self.skip = flag(0) * 4 + 1;
                self.expect(Field::Block { checksum_len, block_checksum_len }, 4);
            }
            (Field::Block { checksum_len, block_checksum_len }, Format::Lz4) => match self.number() {
                0 => {
                    self.skip = checksum_len;
                    self.begin_frame();
                }
                len => {
                    self.skip = (len & 0x7fff_ffff) + block_checksum_len;
                    self.expect(Field::Block { checksum_len, block_checksum_len }, 4);
                }
            },
            (Field::Block { checksum_len, .. }, _) => self.parse_zstd_block(checksum_len),
            (Field::Unknown, _) => {}
        }
    }

    fn parse_zstd_header(&mut self) {
        let descriptor = self.field[0];
        let is_single = descriptor >> 5 & 1 == 1;
        let dictionary_len = [0, 1, 2, 4][usize::from(descriptor & 3)];
        let content_len = match descriptor >> 6 {
            0 => usize::from(is_single),
            bits => 1 << bits,
        };
        let content_at = 1 + usize::from(!is_single) + dictionary_len;
        if self.field.len() < content_at + content_len {
            self.needed = content_at + content_len;
            return;
        }
        // A two-byte field holds the length minus 256, because a length below 256 fits into one byte.
        let number = self.field[content_at..].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
        let content = if content_len == 2 { number + 256 } else { number };
        self.content = Some(if content_len == 0 { Content::Untold } else { Content::Told(content) });
        let window = if is_single {
            // The window of a single-segment frame is its whole content.
            content
        } else {
            let (exponent, mantissa) = (u32::from(self.field[1] >> 3), u64::from(self.field[1] & 7));
            let base = 1_u64 << (10 + exponent);
            base + base / 8 * mantissa
        };
        self.window = self.window.max(window);
        self.expect(Field::Block { checksum_len: u64::from(descriptor >> 2 & 1) * 4, block_checksum_len: 0 }, 3);
    }

    fn parse_zstd_block(&mut self, checksum_len: u64) {
        let header = self.number();
        let (is_last, kind, size) = (header & 1 == 1, header >> 1 & 3, header >> 3);
        self.skip = match kind {
            0 | 2 => size,
            1 => 1,
            _ => {
                self.expected = Field::Unknown;
                return;
            }
        };
        if is_last {
            self.skip += checksum_len;
            self.begin_frame();
        } else {
            self.expect(Field::Block { checksum_len, block_checksum_len: 0 }, 3);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::compress;
    use super::*;

    /// Returns a block as `bgzip` writes it.
    pub(in super::super) fn bgzf(bytes: &[u8]) -> Vec<u8> {
        use std::io::Write;
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        let deflated = encoder.finish().unwrap();
        let mut block = vec![0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff, 6, 0, b'B', b'C', 2, 0];
        block.extend((deflated.len() as u16 + 25).to_le_bytes());
        block.extend(deflated);
        block.extend(crc32fast::hash(bytes).to_le_bytes());
        block.extend((bytes.len() as u32).to_le_bytes());
        block
    }

    #[test]
    fn frames_are_found_however_the_stream_is_cut_into_pieces() {
        let content: Vec<u8> = (0..30_000_u32).flat_map(|number| (number / 5).to_le_bytes()).collect();
        for compression in [Compression::Zstd, Compression::Lz4, Compression::Gzip] {
            let frame = |len: usize| match compression {
                Compression::Gzip => bgzf(&content[..len % 60_000]),
                _ => compress(compression, &content[..len]),
            };
            let skippable = [&0x184d_2a53_u32.to_le_bytes()[..], &3_u32.to_le_bytes(), b"abc"].concat();
            let mut frames = vec![frame(10), frame(0), frame(100_000), frame(1)];
            if compression != Compression::Gzip {
                frames.insert(2, skippable);
            }
            let mut expect: Vec<usize> =
                frames.iter().scan(0, |end, frame| Some(std::mem::replace(end, *end + frame.len()))).collect();
            expect.remove(0);
            let stream = frames.concat();
            for step in [1, 3, 1000, stream.len()] {
                let mut scanner = FrameScanner::new(compression).unwrap();
                let mut cuts = Vec::new();
                for (number, piece) in stream.chunks(step).enumerate() {
                    cuts.extend(scanner.scan(piece).into_iter().map(|at| number * step + at));
                }
                // `scan` does not report a frame that starts where a piece starts.
                let expect: Vec<usize> = expect.iter().copied().filter(|at| at % step != 0).collect();
                assert_eq!(cuts, expect, "{compression:?} in pieces of {step}");
            }
        }
    }

    #[test]
    fn a_stream_that_is_not_understood_has_no_boundaries() {
        for compression in [Compression::Zstd, Compression::Lz4, Compression::Gzip] {
            let good = compress(compression, b"content");
            for at in 0..good.len() {
                let mut bad = good.repeat(3);
                bad[at] ^= 0x10;
                FrameScanner::new(compression).unwrap().scan(&bad);
            }
            assert!(FrameScanner::new(compression).unwrap().scan(&[0xff; 1000]).is_empty());
        }
        let plain = compress(Compression::Gzip, b"no bgzf");
        assert!(FrameScanner::new(Compression::Gzip).unwrap().scan(&plain.repeat(2)).is_empty());
    }
}
