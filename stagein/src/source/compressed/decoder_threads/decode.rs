//! The decoder threads: each decodes one piece of a file.

use std::io::{self, BufReader, Read};
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use dayfly_meta::catalog::Compression;
use dayfly_meta::wire::control::Step;

use super::independent::inflate_part;
use super::{CHUNK_LEN, ChunkPool, CompressedChunk, Decoded, Output};
use crate::progress::ProgressMonitor;
use crate::source::compressed::{Streams, is_trailing, piece_decoder};

/// Decodes one part of a gzip stream that consists of independent parts.
pub(super) fn decode_part(is_first: bool, mut input: ChunkReader, output: &SyncSender<Output>, monitor: &ProgressMonitor) {
    let start = Instant::now();
    let mut sending = Duration::ZERO;
    let inflated = inflate_part(&mut input, is_first, CHUNK_LEN, &mut |decoded| {
        let start = Instant::now();
        let is_wanted = output.send(Ok(decoded)).is_ok();
        sending += start.elapsed();
        is_wanted
    });
    if let Err(error) = inflated {
        // This fails if the reader is gone. In that case nobody needs the error.
        let _ = output.send(Err(error));
    }
    monitor.add_busy_time(Step::Decoding, start.elapsed().saturating_sub(input.waited + sending));
}

/// Decodes a piece that consists of complete streams or frames.
pub(super) fn decode_stream(
    (compression, memory_max, is_first): (Compression, u64, bool),
    mut input: ChunkReader,
    output: &SyncSender<Output>,
    threads: usize,
    monitor: &ProgressMonitor,
) {
    let pool = input.pool.clone();
    let mut busy = Duration::ZERO;
    let mut failure = None;
    {
        let opened = match compression {
            Compression::Xz if threads > 1 => xz_decoder(&mut input, threads, memory_max),
            _ => piece_decoder(compression, &mut input, memory_max, is_first),
        };
        match opened {
            Err(error) => failure = Some(error),
            Ok(mut decoder) => loop {
                let mut chunk = pool.take();
                let start = Instant::now();
                let filled = fill(&mut decoder, &mut chunk, &mut failure);
                busy += start.elapsed();
                chunk.truncate(filled);
                if filled == 0 || output.send(Ok(Decoded::Bytes(chunk))).is_err() || failure.is_some() {
                    break;
                }
            },
        }
    }
    if let Some(error) = failure {
        let last = if is_trailing(&error) { Ok(Decoded::Trailing) } else { Err(error) };
        // This fails if the reader is gone. In that case nobody needs the error.
        let _ = output.send(last);
    }
    monitor.add_busy_time(Step::Decoding, busy.saturating_sub(input.waited));
}

/// Fills the chunk, up to the end of the stream or a failure. Returns the number of bytes even
/// after a failure, because the bytes before the failure are valid.
fn fill(decoder: &mut dyn Read, chunk: &mut [u8], failure: &mut Option<io::Error>) -> usize {
    let mut filled = 0;
    while filled < chunk.len() {
        match decoder.read(&mut chunk[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                *failure = Some(error);
                break;
            }
        }
    }
    filled
}

/// Returns an xz decoder with threads of its own. The library uses these threads for blocks whose
/// lengths are in the block headers. Several streams are decoded one after another.
fn xz_decoder<'a>(input: impl Read + Send + 'a, threads: usize, memory_max: u64) -> io::Result<Box<dyn Read + Send + 'a>> {
    let open = move |input| {
        let stream = liblzma::stream::MtStreamBuilder::new()
            .threads(threads as u32)
            .memlimit_threading(memory_max / 4)
            .memlimit_stop(memory_max)
            .decoder()?;
        Ok(liblzma::bufread::XzDecoder::new_stream(input, stream))
    };
    // As for xz, whatever follows a stream must be another one.
    Streams::boxed(BufReader::with_capacity(CHUNK_LEN, input), true, open, liblzma::bufread::XzDecoder::into_inner, |_| true)
}

/// Reads the compressed bytes that come through a channel.
pub(super) struct ChunkReader {
    chunks: Receiver<CompressedChunk>,
    pool: ChunkPool,
    chunk: Vec<u8>,
    /// Offset in `chunk` of the next byte to return.
    at: usize,
    /// Time spent waiting for the splitter.
    waited: Duration,
}

impl ChunkReader {
    pub(super) fn new(chunks: Receiver<CompressedChunk>, pool: ChunkPool) -> Self {
        Self { chunks, pool, chunk: Vec::new(), at: 0, waited: Duration::ZERO }
    }
}

impl Read for ChunkReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.chunk.len() {
            let start = Instant::now();
            let next = self.chunks.recv();
            self.waited += start.elapsed();
            match next {
                Ok(chunk) => {
                    self.pool.give(std::mem::replace(&mut self.chunk, chunk?));
                    self.at = 0;
                }
                Err(_) => return Ok(0),
            }
        }
        let count = out.len().min(self.chunk.len() - self.at);
        out[..count].copy_from_slice(&self.chunk[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}
