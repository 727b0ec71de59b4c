//! Splits and inflates a gzip stream in independent parts, as `pigz --independent` writes it.
//!
//! Two empty deflate blocks separate the parts, and no part refers to bytes of another, so each can
//! be inflated on its own. The two blocks can also occur by chance. If a part needs bytes of the part
//! before it, inflating it alone fails, and the caller then decodes the whole stream in one piece.

use std::io::{self, Read};

use flate2::{Decompress, FlushDecompress, Status};

use super::Decoded;

/// The last bytes of two empty stored blocks in a row.
const MARKER: u128 = 0x00_00_ff_ff_00_00_00_ff_ff;
const MARKER_MASK: u128 = (1 << (9 * 8)) - 1;
/// The maximum length of a name or comment in a gzip header.
const HEADER_LEN_MAX: usize = 128 << 10;

/// Scans a stream, piece by piece, for the starts of parts.
#[derive(Default)]
pub(super) struct MarkerScanner {
    /// The last 16 bytes that were scanned.
    last: u128,
}

impl MarkerScanner {
    /// Returns whether the next byte starts a part.
    pub(super) fn is_at_boundary(&self) -> bool {
        self.last & MARKER_MASK == MARKER
    }

    /// Scans the next bytes of the stream. Returns the offsets in `bytes` at which parts start,
    /// except for offset 0, which [`Self::is_at_boundary`] reports.
    pub(super) fn scan(&mut self, bytes: &[u8]) -> Vec<usize> {
        let mut cuts = Vec::new();
        for (at, &byte) in bytes.iter().enumerate() {
            if at > 0 && self.is_at_boundary() {
                cuts.push(at);
            }
            self.last = self.last << 8 | u128::from(byte);
        }
        cuts
    }
}

/// Inflates one part and passes its output to `send`, in chunks of `chunk_len` bytes, until `send`
/// returns `false`. The first part starts with the stream's header, and the last one ends with the
/// stream's trailer.
pub(super) fn inflate_part(
    mut input: impl Read,
    is_first: bool,
    chunk_len: usize,
    send: &mut dyn FnMut(Decoded) -> bool,
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
                // The stream continues in the next part.
                out.truncate(filled);
                send(Decoded::Bytes(out));
                return Ok(());
            }
        }
        let (taken, given) = (inflate.total_in(), inflate.total_out());
        let status = inflate.decompress(&compressed[start..end], &mut out[filled..], FlushDecompress::None)?;
        start += (inflate.total_in() - taken) as usize;
        filled += (inflate.total_out() - given) as usize;
        if filled == out.len() && !send(Decoded::Bytes(std::mem::replace(&mut out, vec![0; chunk_len]))) {
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
    // A file with several streams is left to the decoder that reads the file in one piece.
    if rest.read(&mut [0])? != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "there are bytes after the end of the gzip stream"));
    }
    let _ = send(Decoded::Bytes(out)) && send(Decoded::Trailer(word(0), word(4)));
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
