//! Decodes a compressed file on threads of its own.
//!
//! ```text
//! file → splitter thread → decoder threads → DecodedStream (read by the worker)
//! ```
//!
//! The splitter reads the file and gives each piece of it to a new decoder thread; the worker takes
//! the decoded bytes in the order of the pieces. Where a piece may start depends on the format:
//!
//! - zstd, lz4 and bgzf: between frames, which are independent of each other (`frames`).
//! - gzip as `pigz --independent` writes it: at markers between parts (`independent`). A marker may
//!   occur by chance. If a part cannot be decoded on its own, the whole file is decoded again in
//!   one piece, and the bytes that the worker already has are skipped.
//! - xz: the file is one piece, and the library decodes its blocks on several threads.
//! - any other gzip, and bzip2: the file is one piece and one thread decodes it.
//!
//! Channels between the threads bound the memory. All decoders together may be ahead of the worker
//! by a limited number of decoded bytes, and each decoder has a share of this limit. A decoder that
//! has used up its share waits, and then the splitter waits for the decoder. On
//! each node, a stage-in runs only one decoder with a large window at a time. All threads end when
//! the [`DecodedStream`] is dropped.

mod decode;
mod independent;
mod splitter;

use std::fs::File;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};

use dayfly_meta::catalog::Compression;

use super::frames::FrameScanner;
use crate::progress::ProgressMonitor;
use crate::source::plain::{PlainReader, Skip};
use independent::MarkerScanner;
use splitter::{Boundaries, Splitter};

/// Bytes that go through a channel at a time.
const CHUNK_LEN: usize = 256 << 10;
/// How many unused chunks are kept for reuse. Any further chunks are freed.
const POOL_CHUNKS_MAX: usize = 16;

/// Compressed bytes for a decoder. An error ends these bytes and says why.
type CompressedChunk = io::Result<Vec<u8>>;
/// Output of a decoder. An error ends the output and says why.
type Output = io::Result<Decoded>;

/// A message from a decoder to the worker.
enum Decoded {
    Bytes(Vec<u8>),
    /// The end of a gzip stream that was decoded in parts: the CRC-32 and the length, modulo 2^32,
    /// of everything that the stream unpacks to.
    Trailer(u32, u32),
    /// Bytes that begin no stream follow the last one.
    Trailing,
}

/// Limits for decoding one source.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLimits {
    /// Threads that decode at the same time, at least 1.
    pub threads: usize,
    /// Decoded bytes by which all threads together may be ahead of the worker.
    pub ahead_len: usize,
    /// Bytes of memory that a decoder may take for its window.
    pub memory_max: u64,
}

/// Chunks for reuse. Allocating and clearing new memory for each chunk would cost more than copying
/// bytes into the chunk and out of it.
#[derive(Clone, Default)]
struct ChunkPool {
    chunks: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl ChunkPool {
    /// Returns a chunk of [`CHUNK_LEN`] bytes.
    fn take(&self) -> Vec<u8> {
        let mut chunk = self.chunks.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        chunk.resize(CHUNK_LEN, 0);
        chunk
    }

    fn give(&self, chunk: Vec<u8>) {
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        if chunks.len() < POOL_CHUNKS_MAX && chunk.capacity() >= CHUNK_LEN {
            chunks.push(chunk);
        }
    }
}

/// The decompressed stream of a file.
pub(crate) struct DecodedStream<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    file: File,
    compression: Compression,
    limits: DecoderLimits,
    pool: ChunkPool,
    /// The outputs of the pieces, in order.
    pieces: Receiver<Receiver<Output>>,
    /// The output of the current piece.
    piece: Option<Receiver<Output>>,
    chunk: Vec<u8>,
    /// Offset in `chunk` of the next byte to return.
    at: usize,
    /// Length and CRC-32 of the bytes decoded so far, if the stream is a gzip stream in independent
    /// parts; `None` for other streams, and after the trailer.
    independent: Option<(u64, crc32fast::Hasher)>,
    monitor: Arc<ProgressMonitor>,
    waited: Duration,
    /// Whether decoding has failed, which ends the stream. Later pieces may be intact, but bytes
    /// before them are missing.
    has_failed: bool,
    /// Whether the stream has ended before the file.
    has_trailing: bool,
}

/// Starts decoding `file` on threads of `scope`. The threads end when the stream ends or the
/// returned value is dropped.
pub(crate) fn start<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    compression: Compression,
    file: File,
    limits: DecoderLimits,
    monitor: Arc<ProgressMonitor>,
) -> io::Result<DecodedStream<'scope, 'env>> {
    let mut input = PlainReader::new(file.try_clone()?, 0, u64::MAX, monitor.clone())?;
    let (sender, pieces) = sync_channel(limits.threads.saturating_sub(1));
    let boundaries = match FrameScanner::new(compression) {
        _ if limits.threads == 1 => Boundaries::None,
        Some(_) if compression == Compression::Gzip && has_marker(&mut input)? => Boundaries::Markers(MarkerScanner::default()),
        scanner => scanner.map_or(Boundaries::None, Boundaries::Frames),
    };
    let independent = matches!(boundaries, Boundaries::Markers(_)).then(|| (0, crc32fast::Hasher::new()));
    let pool = ChunkPool::default();
    let splitter = Splitter { scope, compression, limits, pool: pool.clone(), monitor: monitor.clone(), pieces: sender };
    scope.spawn(move || splitter.run(input, boundaries));
    Ok(DecodedStream {
        scope,
        file,
        compression,
        limits,
        pool,
        pieces,
        piece: None,
        chunk: Vec::new(),
        at: 0,
        independent,
        monitor,
        waited: Duration::ZERO,
        has_failed: false,
        has_trailing: false,
    })
}

/// Returns whether the first bytes of a gzip file contain a marker. A file that does not consist of
/// independent parts contains one only by chance.
fn has_marker(input: &mut PlainReader) -> io::Result<bool> {
    Ok(!MarkerScanner::default().scan(input.peek(CHUNK_LEN)?).is_empty())
}

impl DecodedStream<'_, '_> {
    /// Returns the time that the worker had to wait for decoded bytes.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Returns whether bytes that begin no stream follow the last one. This is known at the end of the stream.
    pub(crate) fn has_trailing(&self) -> bool {
        self.has_trailing
    }

    /// Decodes the file again in one piece, and skips the `returned` bytes that the worker already
    /// has.
    fn restart(&mut self, returned: u64) -> io::Result<()> {
        let limits = DecoderLimits { threads: 1, ..self.limits };
        let mut again = start(self.scope, self.compression, self.file.try_clone()?, limits, self.monitor.clone())?;
        again.skip(returned)?;
        again.waited += self.waited;
        *self = again;
        Ok(())
    }

    fn set_chunk(&mut self, bytes: Vec<u8>) {
        self.pool.give(std::mem::replace(&mut self.chunk, bytes));
        self.at = 0;
    }

    /// Takes the next output of the current piece.
    fn take(&mut self, output: Output) -> io::Result<()> {
        let Some((len, checksum)) = &mut self.independent else {
            match output? {
                Decoded::Bytes(bytes) => self.set_chunk(bytes),
                Decoded::Trailing => self.has_trailing = true,
                Decoded::Trailer(..) => {}
            }
            return Ok(());
        };
        let len_before = *len;
        match output {
            Ok(Decoded::Bytes(bytes)) => {
                checksum.update(&bytes);
                *len += bytes.len() as u64;
                self.set_chunk(bytes);
                Ok(())
            }
            Ok(Decoded::Trailer(crc, len)) if (crc, len) == (checksum.clone().finalize(), len_before as u32) => {
                self.independent = None;
                Ok(())
            }
            Ok(Decoded::Trailer(..)) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the checksum at the end of the gzip stream does not match"))
            }
            Ok(Decoded::Trailing) | Err(_) => self.restart(len_before),
        }
    }
}

impl Read for DecodedStream<'_, '_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.chunk.len() {
            if self.has_failed || self.has_trailing {
                return Ok(0);
            }
            if self.monitor.is_cancelled() {
                return Err(io::Error::other("canceled"));
            }
            let start = Instant::now();
            let next = match &self.piece {
                Some(piece) => piece.recv().ok(),
                None => None,
            };
            match next {
                Some(output) => {
                    let taken = self.take(output);
                    self.has_failed |= taken.is_err();
                    taken?;
                }
                None => match self.pieces.recv() {
                    Ok(piece) => self.piece = Some(piece),
                    // Without a trailer, the stream is truncated, or did not consist of independent
                    // parts after all.
                    Err(_) => match &self.independent {
                        Some((len, _)) => self.restart(*len)?,
                        None => return Ok(0),
                    },
                },
            }
            self.waited += start.elapsed();
        }
        let count = out.len().min(self.chunk.len() - self.at);
        out[..count].copy_from_slice(&self.chunk[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

impl Skip for DecodedStream<'_, '_> {}

#[cfg(test)]
mod tests;
