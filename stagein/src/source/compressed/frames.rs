//! Where one frame ends and the next begins, found without decoding: zstd, lz4 and bgzf say how long their parts are. What is
//! not understood is never cut; the decoder will say what is wrong with it.

use dayfly_meta::catalog::Compression;

/// Walks over a compressed stream as it is read.
pub(super) struct Walk {
    format: Format,
    /// What is gathered of the field that comes next, and how much of it is needed.
    field: Vec<u8>,
    needed: usize,
    state: State,
    /// Bytes to pass over before the next field.
    skip: u64,
    /// The largest window that a frame has asked for so far, in bytes.
    window: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Zstd,
    Lz4,
    Bgzf,
}

#[derive(Clone, Copy)]
enum State {
    Magic,
    Skippable,
    Header,
    Block {
        checksum_len: u64,
        block_checksum_len: u64,
    },
    /// Nothing is understood any more: no cuts.
    Lost,
}

impl Walk {
    /// `None` for a stream whose parts cannot be told.
    pub(super) fn new(compression: Compression) -> Option<Self> {
        let format = match compression {
            Compression::Zstd => Format::Zstd,
            Compression::Lz4 => Format::Lz4,
            Compression::Gzip => Format::Bgzf,
            Compression::None | Compression::Xz | Compression::Bzip2 => return None,
        };
        let mut walk = Self { format, field: Vec::new(), needed: 0, state: State::Magic, skip: 0, window: 0 };
        walk.begin_frame();
        Some(walk)
    }

    /// The largest window that a frame has asked for so far.
    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Whether the next byte begins a frame.
    pub(super) fn is_between(&self) -> bool {
        self.skip == 0 && self.field.is_empty() && matches!(self.state, State::Magic)
    }

    /// Walks over some bytes; the offsets among them where frames begin, but for the first.
    pub(super) fn over(&mut self, bytes: &[u8]) -> Vec<usize> {
        let mut cuts = Vec::new();
        let mut at = 0;
        while at < bytes.len() && !matches!(self.state, State::Lost) {
            if self.skip > 0 {
                let count = self.skip.min((bytes.len() - at) as u64);
                self.skip -= count;
                at += count as usize;
            } else {
                let count = (self.needed - self.field.len()).min(bytes.len() - at);
                self.field.extend_from_slice(&bytes[at..at + count]);
                at += count;
                if self.field.len() == self.needed {
                    self.step();
                }
            }
            if self.is_between() && at < bytes.len() {
                cuts.push(at);
            }
        }
        cuts
    }

    fn begin_frame(&mut self) {
        let needed = if self.format == Format::Bgzf { 18 } else { 4 };
        self.expect(State::Magic, needed);
    }

    fn expect(&mut self, state: State, needed: usize) {
        self.field.clear();
        (self.state, self.needed) = (state, needed);
    }

    fn number(&self) -> u64 {
        self.field.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    fn step(&mut self) {
        match (self.state, self.format) {
            (State::Magic, Format::Bgzf) => match &self.field[..] {
                // One extra field, which tells the length of the whole.
                [0x1f, 0x8b, 8, 4, _, _, _, _, _, _, 6, 0, b'B', b'C', 2, 0, low, high] => {
                    let len = u64::from(u16::from_le_bytes([*low, *high])) + 1;
                    match len.checked_sub(18) {
                        Some(rest) => {
                            self.skip = rest;
                            self.begin_frame();
                        }
                        None => self.state = State::Lost,
                    }
                }
                _ => self.state = State::Lost,
            },
            (State::Magic, format) => match (self.number(), format) {
                (0x184d_2a50..=0x184d_2a5f, _) => self.expect(State::Skippable, 4),
                (0xfd2f_b528, Format::Zstd) | (0x184d_2204, Format::Lz4) => {
                    // Zstd's descriptor and at least one byte more; lz4's two flag bytes.
                    self.expect(State::Header, 2);
                }
                _ => self.state = State::Lost,
            },
            (State::Skippable, _) => {
                self.skip = self.number();
                self.begin_frame();
            }
            (State::Header, Format::Zstd) => self.zstd_header(),
            (State::Header, _) => {
                let flags = self.field[0];
                let flag = |bit: u8| u64::from(flags >> bit & 1);
                let (checksum_len, block_checksum_len) = (flag(2) * 4, flag(4) * 4);
                // Content length, dictionary, and the header's own checksum.
                self.skip = flag(3) * 8 + flag(0) * 4 + 1;
                self.expect(State::Block { checksum_len, block_checksum_len }, 4);
            }
            (State::Block { checksum_len, block_checksum_len }, Format::Lz4) => match self.number() {
                0 => {
                    self.skip = checksum_len;
                    self.begin_frame();
                }
                len => {
                    self.skip = (len & 0x7fff_ffff) + block_checksum_len;
                    self.expect(State::Block { checksum_len, block_checksum_len }, 4);
                }
            },
            (State::Block { checksum_len, .. }, _) => self.zstd_block(checksum_len),
            (State::Lost, _) => {}
        }
    }

    fn zstd_header(&mut self) {
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
        let window = if is_single {
            // The window is the content. Two bytes of it begin to count where one byte's numbers end.
            let content = self.field[content_at..].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte));
            if content_len == 2 { content + 256 } else { content }
        } else {
            let (exponent, mantissa) = (u32::from(self.field[1] >> 3), u64::from(self.field[1] & 7));
            let base = 1_u64 << (10 + exponent);
            base + base / 8 * mantissa
        };
        self.window = self.window.max(window);
        self.expect(State::Block { checksum_len: u64::from(descriptor >> 2 & 1) * 4, block_checksum_len: 0 }, 3);
    }

    fn zstd_block(&mut self, checksum_len: u64) {
        let header = self.number();
        let (is_last, kind, size) = (header & 1 == 1, header >> 1 & 3, header >> 3);
        self.skip = match kind {
            0 | 2 => size,
            1 => 1,
            _ => {
                self.state = State::Lost;
                return;
            }
        };
        if is_last {
            self.skip += checksum_len;
            self.begin_frame();
        } else {
            self.expect(State::Block { checksum_len, block_checksum_len: 0 }, 3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::compress;
    use super::*;

    /// A block of `bgzip`: stored, for what is in it does not matter here.
    pub(super) fn bgzf(bytes: &[u8]) -> Vec<u8> {
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
    fn frames_are_found_however_the_stream_is_cut() {
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
                let mut walk = Walk::new(compression).unwrap();
                let mut cuts = Vec::new();
                for (number, piece) in stream.chunks(step).enumerate() {
                    cuts.extend(walk.over(piece).into_iter().map(|at| number * step + at));
                }
                // Where pieces meet exactly at a frame's beginning, that is not told.
                let told: Vec<usize> = expect.iter().copied().filter(|at| at % step != 0).collect();
                assert_eq!(cuts, told, "{compression:?} in pieces of {step}");
            }
        }
    }

    #[test]
    fn what_is_not_understood_is_not_cut() {
        for compression in [Compression::Zstd, Compression::Lz4, Compression::Gzip] {
            let good = compress(compression, b"content");
            for at in 0..good.len() {
                let mut bad = good.repeat(3);
                bad[at] ^= 0x10;
                Walk::new(compression).unwrap().over(&bad);
            }
            assert!(Walk::new(compression).unwrap().over(&[0xff; 1000]).is_empty());
        }
        let plain = compress(Compression::Gzip, b"no bgzf");
        assert!(Walk::new(Compression::Gzip).unwrap().over(&plain.repeat(2)).is_empty());
    }
}
