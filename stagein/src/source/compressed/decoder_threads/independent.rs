//! One gzip stream in parts that do not need each other, as `pigz --independent` writes it: between two parts stand two empty
//! blocks. Each part is inflated by itself; a part that does need the one before is an error, and then the whole is decoded
//! again, in one piece.

use std::io::{self, Read};

use flate2::{Decompress, FlushDecompress, Status};

/// The ends of two empty stored blocks, one behind the other.
const MARKER: u128 = 0x00_00_ff_ff_00_00_00_ff_ff;
const MARKER_MASK: u128 = (1 << (9 * 8)) - 1;
/// A gzip header's longest name or comment that is passed over.
const HEADER_LEN_MAX: usize = 128 << 10;

/// Finds where parts begin, however the stream is read.
#[derive(Default)]
pub(super) struct Markers {
    last: u128,
}

impl Markers {
    /// Whether the next byte begins a part.
    pub(super) fn is_between(&self) -> bool {
        self.last & MARKER_MASK == MARKER
    }

    /// Passes over some bytes; the offsets among them where parts begin, but for the first.
    pub(super) fn over(&mut self, bytes: &[u8]) -> Vec<usize> {
        let mut cuts = Vec::new();
        for (at, &byte) in bytes.iter().enumerate() {
            if at > 0 && self.is_between() {
                cuts.push(at);
            }
            self.last = self.last << 8 | u128::from(byte);
        }
        cuts
    }
}

/// What comes of a part.
pub(super) enum Inflated {
    /// Bytes.
    Bytes(Vec<u8>),
    /// The end of the stream: CRC32 and length, modulo 2^32, of all that it unpacks to.
    Trailer(u32, u32),
}

/// Inflates a part; the first one begins with the stream's header, and the last ends with its trailer.
pub(super) fn inflate(
    mut input: impl Read,
    is_first: bool,
    chunk_len: usize,
    give: &mut dyn FnMut(Inflated) -> bool,
) -> io::Result<()> {
    if is_first {
        skip_header(&mut input)?;
    }
    let mut inflate = Decompress::new(false);
    let mut compressed = vec![0; 64 << 10];
    let (mut start, mut end) = (0, 0);
    let mut out = vec![0; chunk_len];
    let mut filled = 0;
    loop {
        if start == end {
            (start, end) = (0, input.read(&mut compressed)?);
            if end == 0 {
                // A part that another follows.
                out.truncate(filled);
                give(Inflated::Bytes(out));
                return Ok(());
            }
        }
        let (taken, given) = (inflate.total_in(), inflate.total_out());
        let status = inflate.decompress(&compressed[start..end], &mut out[filled..], FlushDecompress::None)?;
        start += (inflate.total_in() - taken) as usize;
        filled += (inflate.total_out() - given) as usize;
        if filled == out.len() && !give(Inflated::Bytes(std::mem::replace(&mut out, vec![0; chunk_len]))) {
            return Ok(());
        }
        filled %= chunk_len;
        if status == Status::StreamEnd {
            break;
        }
    }
    out.truncate(filled);
    let mut rest = compressed[start..end].chain(input);
    let mut trailer = [0; 8];
    rest.read_exact(&mut trailer)?;
    let word = |at: usize| trailer[at..at + 4].iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte));
    // Another stream behind it is left to those who read one after another.
    if rest.read(&mut [0])? != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "something follows the stream"));
    }
    let _ = give(Inflated::Bytes(out)) && give(Inflated::Trailer(word(0), word(4)));
    Ok(())
}

fn skip_header(input: &mut impl Read) -> io::Result<()> {
    let mut fixed = [0; 10];
    input.read_exact(&mut fixed)?;
    let flags = fixed[3];
    let mut byte = || {
        let mut byte = [0];
        input.read_exact(&mut byte).map(|()| byte[0])
    };
    if flags & 4 != 0 {
        let len = u16::from_le_bytes([byte()?, byte()?]);
        for _ in 0..len {
            byte()?;
        }
    }
    for text in [8, 16] {
        if flags & text != 0 {
            let mut len = 0;
            while byte()? != 0 {
                len += 1;
                if len > HEADER_LEN_MAX {
                    return Err(io::ErrorKind::InvalidData.into());
                }
            }
        }
    }
    if flags & 2 != 0 {
        byte()?;
        byte()?;
    }
    Ok(())
}
