//! Decoding as stages of their own: one thread reads the file, others decode, and the worker takes the bytes in order. Where
//! the format tells its frames apart, several are decoded at a time; `xz` has its own way of that.
//!
//! A gzip stream in independent parts is told by its first marks alone. Should one of its parts not be what it seems, all is decoded
//! again from the start, in one piece, and what the worker has had already is passed over.
//!
//! Memory is bounded by the channels: a decoder that is ahead of the worker by its share waits, and so does then the reader.

mod independent;

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use dayfly_meta::catalog::Compression;
use dayfly_meta::limits::DECODER_MEMORY_MAX;
use dayfly_meta::wire::control::Step;

use super::frames::Walk;
use super::{Streams, decoder, xz_dictionary_len};
use crate::progress::ProgressMonitor;
use crate::source::plain::{PlainReader, Skip};
use independent::{Inflated, Markers, inflate};

/// Bytes that go from one stage to the next at a time.
const CHUNK_LEN: usize = 256 << 10;
/// Frames are gathered until they have so many bytes: a thread for less is not worth it.
const PIECE_LEN_MIN: usize = 1 << 20;
/// Compressed chunks that wait for a piece's decoder.
const INPUT_CHUNKS: usize = 8;
/// Chunks that are kept though nobody uses them.
const POOL_CHUNKS_MAX: usize = 16;
/// DecoderLimits with a larger window than this run one at a time on a node.
const WINDOW_LEN_SHARED_MAX: u64 = 16 << 20;

/// Bytes, or why there are no more.
type Chunk = io::Result<Vec<u8>>;
/// What comes from a decoder.
type Output = io::Result<Inflated>;

/// Chunks that were used and may be used again: memory that is new costs more than what is done with it.
#[derive(Clone, Default)]
struct Pool {
    chunks: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Pool {
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

/// How many threads may decode one source, and how many bytes they may be ahead.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLimits {
    /// At least one.
    pub threads: usize,
    /// Of all threads together.
    pub ahead_len: usize,
}

/// The unpacked stream.
pub(crate) struct Decoded<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    file: File,
    compression: Compression,
    decoders: DecoderLimits,
    pool: Pool,
    pieces: Receiver<Receiver<Output>>,
    piece: Option<Receiver<Output>>,
    chunk: Vec<u8>,
    at: usize,
    /// Of a stream in independent parts: what the worker has had, by number and checksum.
    independent: Option<(u64, crc32fast::Hasher)>,
    monitor: Arc<ProgressMonitor>,
    waited: Duration,
    /// After a failure there is nothing more, whatever other decoders have.
    has_failed: bool,
}

/// Starts to decode `file`; all threads end when what this returns is dropped, or with the stream.
pub(crate) fn start<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    compression: Compression,
    file: File,
    decoders: DecoderLimits,
    monitor: Arc<ProgressMonitor>,
) -> io::Result<Decoded<'scope, 'env>> {
    let mut input = PlainReader::new(file.try_clone()?, 0, u64::MAX, monitor.clone())?;
    let (sender, pieces) = sync_channel(decoders.threads.saturating_sub(1));
    let cuts = match Walk::new(compression) {
        _ if decoders.threads == 1 => Cuts::None,
        Some(_) if compression == Compression::Gzip && is_independent(&mut input)? => Cuts::Markers(Markers::default()),
        walk => walk.map_or(Cuts::None, Cuts::Frames),
    };
    let independent = matches!(cuts, Cuts::Markers(_)).then(|| (0, crc32fast::Hasher::new()));
    let pool = Pool::default();
    let splitter = Splitter { scope, compression, decoders, pool: pool.clone(), monitor: monitor.clone(), pieces: sender };
    scope.spawn(move || splitter.run(input, cuts));
    let (piece, chunk, at, waited) = (None, Vec::new(), 0, Duration::ZERO);
    Ok(Decoded {
        scope,
        file,
        compression,
        decoders,
        pool,
        pieces,
        piece,
        chunk,
        at,
        independent,
        monitor,
        waited,
        has_failed: false,
    })
}

/// Whether there is a mark between parts near the start; only streams in independent parts have them.
fn is_independent(input: &mut PlainReader) -> io::Result<bool> {
    Ok(!Markers::default().over(input.peek(CHUNK_LEN)?).is_empty())
}

/// How a stream is cut.
enum Cuts {
    None,
    Frames(Walk),
    Markers(Markers),
}

impl Cuts {
    fn is_between(&self) -> bool {
        match self {
            Self::None => false,
            Self::Frames(walk) => walk.is_between(),
            Self::Markers(markers) => markers.is_between(),
        }
    }

    fn over(&mut self, bytes: &[u8]) -> Vec<usize> {
        match self {
            Self::None => Vec::new(),
            Self::Frames(walk) => walk.over(bytes),
            Self::Markers(markers) => markers.over(bytes),
        }
    }
}

impl Decoded<'_, '_> {
    /// For how long the worker had to wait for bytes.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Decodes again, in one piece, up to where the worker is.
    fn restart(&mut self, passed: u64) -> io::Result<()> {
        let decoders = DecoderLimits { threads: 1, ..self.decoders };
        let mut again = start(self.scope, self.compression, self.file.try_clone()?, decoders, self.monitor.clone())?;
        again.skip(passed)?;
        again.waited += self.waited;
        *self = again;
        Ok(())
    }

    /// A part's output is what it should be, or the whole is decoded again.
    fn take(&mut self, output: Output) -> io::Result<()> {
        let Some((passed, checksum)) = &mut self.independent else {
            if let Inflated::Bytes(bytes) = output? {
                self.pool.give(std::mem::replace(&mut self.chunk, bytes));
                self.at = 0;
            }
            return Ok(());
        };
        let passed_now = *passed;
        match output {
            Ok(Inflated::Bytes(bytes)) => {
                checksum.update(&bytes);
                *passed += bytes.len() as u64;
                self.pool.give(std::mem::replace(&mut self.chunk, bytes));
                self.at = 0;
                Ok(())
            }
            Ok(Inflated::Trailer(crc, len)) if (crc, len) == (checksum.clone().finalize(), passed_now as u32) => {
                self.independent = None;
                Ok(())
            }
            Ok(Inflated::Trailer(..)) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "corrupt gzip stream does not have a matching checksum"))
            }
            Err(_) => self.restart(passed_now),
        }
    }
}

impl Read for Decoded<'_, '_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.chunk.len() {
            if self.has_failed {
                return Ok(0);
            }
            if self.monitor.is_cancelled() {
                return Err(io::Error::other("cancelled"));
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
                    // The trailer did not come: the stream breaks off, or is not what it seemed.
                    Err(_) => match &self.independent {
                        Some((passed, _)) => self.restart(*passed)?,
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

impl Skip for Decoded<'_, '_> {}

/// Reads the file, cuts it between frames, and gives each piece a thread.
struct Splitter<'scope, 'env> {
    scope: &'scope Scope<'scope, 'env>,
    compression: Compression,
    decoders: DecoderLimits,
    pool: Pool,
    monitor: Arc<ProgressMonitor>,
    pieces: SyncSender<Receiver<Output>>,
}

impl<'scope> Splitter<'scope, '_> {
    /// Ends early when nobody wants the bytes any more.
    fn run(self, mut input: PlainReader, mut cuts: Cuts) {
        let monitor = self.monitor.clone();
        let alone;
        let mut threads = self.decoders.threads;
        let start = input.peek(64).map(<[u8]>::to_vec).unwrap_or_default();
        let mut needs_much = self.compression == Compression::Xz && xz_dictionary_len(&start) > WINDOW_LEN_SHARED_MAX;
        let mut chunk = self.pool.take();
        let mut first = input.read(&mut chunk);
        if let (Ok(count), Compression::Zstd) = (&first, self.compression) {
            let mut look = Walk::new(Compression::Zstd);
            if let Some(look) = &mut look {
                look.over(&chunk[..*count]);
                needs_much = look.window() > WINDOW_LEN_SHARED_MAX;
            }
        }
        if needs_much {
            // Held until the whole file is decoded. The frames then are not told apart, so there is one decoder.
            alone = monitor.wait_for_large_window();
            if alone.is_none() {
                // It was cancelled; the worker that has this stream looks at that itself.
                return;
            }
            (cuts, threads) = (Cuts::None, 1);
        } else {
            alone = None;
        }
        let is_independent = matches!(cuts, Cuts::Markers(_));
        let part = |is_first| if is_independent { Part::Independent { is_first } } else { Part::Whole };
        let Some((mut piece, decoding)) = self.piece(threads, part(true)) else { return };
        let mut piece_len = 0;
        loop {
            let count = match first {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) => {
                    let _ = piece.send(Err(error));
                    return;
                }
            };
            let bytes = &chunk[..count];
            let mut sent = 0;
            let begins = cuts.is_between().then_some(0);
            for at in begins.into_iter().chain(cuts.over(bytes)) {
                if piece_len + at - sent >= PIECE_LEN_MIN {
                    if at > sent && piece.send(Ok(bytes[sent..at].to_vec())).is_err() {
                        return;
                    }
                    drop(piece);
                    let Some((next, _)) = self.piece(threads, part(false)) else { return };
                    (piece, piece_len, sent) = (next, 0, at);
                }
            }
            let rest = if sent > 0 {
                bytes[sent..].to_vec()
            } else {
                chunk.truncate(count);
                std::mem::replace(&mut chunk, self.pool.take())
            };
            if piece.send(Ok(rest)).is_err() {
                return;
            }
            piece_len += count - sent;
            first = input.read(&mut chunk);
        }
        drop(piece);
        if alone.is_some() {
            // It ends when its output is taken, or nobody wants that any more.
            let _ = decoding.join();
        }
    }

    /// A thread that decodes what is sent to it.
    fn piece(&self, threads: usize, part: Part) -> Option<(SyncSender<Chunk>, ScopedJoinHandle<'scope, ()>)> {
        let (input, compressed) = sync_channel(INPUT_CHUNKS);
        let ahead = self.decoders.ahead_len / CHUNK_LEN / threads.max(1);
        let (sender, output) = sync_channel(ahead.max(1));
        self.pieces.send(output).ok()?;
        let (compression, monitor) = (self.compression, self.monitor.clone());
        let compressed = ChunkReader::new(compressed, self.pool.clone());
        let decoding = self.scope.spawn(move || match part {
            Part::Whole => decode(compression, compressed, &sender, threads, &monitor),
            Part::Independent { is_first } => decode_part(is_first, compressed, &sender, &monitor),
        });
        Some((input, decoding))
    }
}

/// How a piece is decoded.
#[derive(Clone, Copy)]
enum Part {
    /// As a stream of its own.
    Whole,
    /// As a part of one.
    Independent { is_first: bool },
}

fn decode_part(is_first: bool, mut input: ChunkReader, output: &SyncSender<Output>, monitor: &ProgressMonitor) {
    let start = Instant::now();
    let mut sending = Duration::ZERO;
    let inflated = inflate(&mut input, is_first, CHUNK_LEN, &mut |inflated| {
        let start = Instant::now();
        let is_wanted = output.send(Ok(inflated)).is_ok();
        sending += start.elapsed();
        is_wanted
    });
    if let Err(error) = inflated {
        // Whoever would be told may be gone.
        let _ = output.send(Err(error));
    }
    monitor.add_busy_time(Step::Decoding, start.elapsed().saturating_sub(input.waited + sending));
}

fn decode(
    compression: Compression,
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
            Compression::Xz if threads > 1 => xz_threads(&mut input, threads),
            _ => decoder(compression, &mut input),
        };
        match opened {
            Err(error) => failure = Some(error),
            Ok(mut decoder) => loop {
                let mut chunk = pool.take();
                let start = Instant::now();
                let filled = fill(&mut decoder, &mut chunk, &mut failure);
                busy += start.elapsed();
                chunk.truncate(filled);
                if filled == 0 || output.send(Ok(Inflated::Bytes(chunk))).is_err() || failure.is_some() {
                    break;
                }
            },
        }
    }
    if let Some(error) = failure {
        // Whoever would be told may be gone.
        let _ = output.send(Err(error));
    }
    monitor.add_busy_time(Step::Decoding, busy.saturating_sub(input.waited));
}

/// As many bytes as there are, up to the chunk's length, or to a failure.
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

/// The library decodes blocks in threads of its own where their lengths are told; streams it reads one at a time.
fn xz_threads<'a>(input: impl Read + Send + 'a, threads: usize) -> io::Result<Box<dyn Read + Send + 'a>> {
    let open = move |input| {
        let stream = liblzma::stream::MtStreamBuilder::new()
            .threads(threads as u32)
            .memlimit_threading(DECODER_MEMORY_MAX / 4)
            .memlimit_stop(DECODER_MEMORY_MAX)
            .decoder()?;
        Ok(liblzma::bufread::XzDecoder::new_stream(input, stream))
    };
    Streams::boxed(BufReader::with_capacity(CHUNK_LEN, input), open, liblzma::bufread::XzDecoder::into_inner)
}

/// Reads what comes through a channel.
struct ChunkReader {
    chunks: Receiver<Chunk>,
    pool: Pool,
    chunk: Vec<u8>,
    at: usize,
    waited: Duration,
}

impl ChunkReader {
    fn new(chunks: Receiver<Chunk>, pool: Pool) -> Self {
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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::tests::compress;
    use super::*;

    fn unpack(compression: Compression, packed: &[u8], threads: usize) -> io::Result<Vec<u8>> {
        let mut file = tempfile::tempfile()?;
        file.write_all(packed)?;
        let decoders = DecoderLimits { threads, ahead_len: 1 << 20 };
        std::thread::scope(|scope| {
            let mut all = Vec::new();
            start(scope, compression, file, decoders, Arc::default())?.read_to_end(&mut all)?;
            Ok(all)
        })
    }

    #[test]
    fn several_frames_come_out_in_order_and_damage_is_an_error() {
        let content: Vec<u8> = (0..1_500_000_u32).flat_map(|number| number.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
        for compression in [Compression::Gzip, Compression::Zstd, Compression::Xz, Compression::Bzip2, Compression::Lz4] {
            let packed: Vec<u8> = content.chunks(1_300_000).flat_map(|piece| compress(compression, piece)).collect();
            for threads in [1, 3] {
                assert!(unpack(compression, &packed, threads).unwrap() == content, "{compression:?} by {threads}");
                assert!(unpack(compression, &packed[..packed.len() - 1], threads).is_err(), "{compression:?} by {threads}");
            }
            let mut damaged = packed.clone();
            damaged[packed.len() / 2] ^= 0x55;
            let unpacked = unpack(compression, &damaged, 3);
            // Not every stream has a checksum of what is in it.
            assert!(compression == Compression::Zstd || unpacked.is_err(), "{compression:?}");
        }
    }

    /// As `pigz --independent` writes: a full flush after each part, and an empty block more.
    fn in_parts(content: &[u8], part_len: usize, is_independent: bool) -> Vec<u8> {
        let mut deflate = flate2::Compress::new(flate2::Compression::fast(), false);
        let mut packed = vec![0x1f, 0x8b, 8, 8, 0, 0, 0, 0, 0, 3, b'n', 0];
        let parts: Vec<&[u8]> = content.chunks(part_len).collect();
        for (number, part) in parts.iter().enumerate() {
            let mut out = Vec::with_capacity(part.len() * 2 + 1000);
            let is_last = number + 1 == parts.len();
            let flush = if is_independent { flate2::FlushCompress::Full } else { flate2::FlushCompress::Sync };
            let flush = if is_last { flate2::FlushCompress::Finish } else { flush };
            deflate.compress_vec(part, &mut out, flush).unwrap();
            packed.extend(out);
            if !is_last {
                packed.extend([0, 0, 0, 0xff, 0xff]);
            }
        }
        packed.extend(crc32fast::hash(content).to_le_bytes());
        packed.extend((content.len() as u32).to_le_bytes());
        packed
    }

    #[test]
    fn independent_parts_come_out_in_order_and_false_ones_are_decoded_again() {
        let content: Vec<u8> =
            (0..2_000_000_u32).flat_map(|number| (number / 3).wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
        let true_parts = in_parts(&content, 100_000, true);
        assert!(true_parts.len() > 3 * PIECE_LEN_MIN, "there are several pieces");
        let false_parts = in_parts(&content, 100_000, false);
        let two = [&true_parts[..], &true_parts].concat();
        for threads in [1, 3] {
            assert!(unpack(Compression::Gzip, &true_parts, threads).unwrap() == content, "by {threads}");
            assert!(unpack(Compression::Gzip, &false_parts, threads).unwrap() == content, "by {threads}");
            assert!(unpack(Compression::Gzip, &two, threads).unwrap() == content.repeat(2), "by {threads}");
            assert!(unpack(Compression::Gzip, &true_parts[..true_parts.len() - 1], threads).is_err());
            for at in [true_parts.len() - 6, true_parts.len() / 2] {
                let mut damaged = true_parts.clone();
                damaged[at] ^= 1;
                assert!(unpack(Compression::Gzip, &damaged, threads).is_err(), "{at} by {threads}");
            }
        }
    }

    #[test]
    fn who_stops_reading_ends_the_threads() {
        let content = vec![7; 40 << 20];
        let packed = compress(Compression::Zstd, &content).repeat(4);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&packed).unwrap();
        std::thread::scope(|scope| {
            let decoders = DecoderLimits { threads: 2, ahead_len: 1 << 20 };
            let mut decoded = start(scope, Compression::Zstd, file, decoders, Arc::default()).unwrap();
            decoded.read_exact(&mut [0; 1000]).unwrap();
        });
    }
}
