//! The splitter thread: reads a compressed file and gives each piece of it to a new decoder thread.

use std::io::Read;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};

use dayfly_meta::catalog::Compression;

use super::decode::{ChunkReader, decode_part, decode_stream};
use super::independent::MarkerScanner;
use super::{CHUNK_LEN, ChunkPool, CompressedChunk, DecoderLimits, Output};
use crate::progress::ProgressMonitor;
use crate::source::compressed::frames::FrameScanner;
use crate::source::compressed::window_len;
use crate::source::plain::PlainReader;

/// A piece has at least this many compressed bytes. A shorter piece would not be worth a thread.
pub(super) const PIECE_LEN_MIN: usize = 1 << 20;
/// Number of compressed chunks that may wait for a piece's decoder.
const INPUT_CHUNKS: usize = 8;
/// Decoders with a larger window than this run one at a time.
const WINDOW_LEN_SHARED_MAX: u64 = 16 << 20;

/// Finds the offsets at which a stream may be split.
pub(super) enum Boundaries {
    /// The stream is not split.
    None,
    Frames(FrameScanner),
    Markers(MarkerScanner),
}

impl Boundaries {
    /// Returns whether a piece may start with the next byte.
    fn is_at_boundary(&self) -> bool {
        match self {
            Self::None => false,
            Self::Frames(scanner) => scanner.is_at_boundary(),
            Self::Markers(scanner) => scanner.is_at_boundary(),
        }
    }

    /// Scans the next bytes and returns the offsets in `bytes` at which a piece may start, except
    /// for offset 0.
    fn scan(&mut self, bytes: &[u8]) -> Vec<usize> {
        match self {
            Self::None => Vec::new(),
            Self::Frames(scanner) => scanner.scan(bytes),
            Self::Markers(scanner) => scanner.scan(bytes),
        }
    }
}

/// The kind of a piece, which decides how it is decoded.
#[derive(Clone, Copy)]
enum PieceKind {
    /// Complete streams or frames.
    Streams { is_first: bool },
    /// One part of a gzip stream that consists of independent parts.
    Part { is_first: bool },
}

pub(super) struct Splitter<'scope, 'env> {
    pub(super) scope: &'scope Scope<'scope, 'env>,
    pub(super) compression: Compression,
    pub(super) limits: DecoderLimits,
    pub(super) pool: ChunkPool,
    pub(super) monitor: Arc<ProgressMonitor>,
    /// Sends the output channel of each piece to the worker, in the order of the pieces. The capacity limits how
    /// many pieces are decoded at once.
    pub(super) pieces: SyncSender<Receiver<Output>>,
}

impl<'scope> Splitter<'scope, '_> {
    /// Splits the file. Returns early when the reader of the decoded stream is gone.
    pub(super) fn run(self, mut input: PlainReader, mut boundaries: Boundaries) {
        let monitor = self.monitor.clone();
        let mut threads = self.limits.threads;
        let mut chunk = self.pool.take();
        let mut read = input.read(&mut chunk);
        let window_len = |start| window_len(self.compression, start);
        let needs_large_window = read.as_ref().is_ok_and(|&count| window_len(&chunk[..count]) > WINDOW_LEN_SHARED_MAX);
        let permit = if needs_large_window {
            // The stage-in may be canceled while this waits for the permit. The worker notices that
            // on its own.
            let Some(permit) = monitor.wait_for_large_window() else { return };
            // One decoder decodes the whole file, and the permit is held until that decoder is
            // done.
            (boundaries, threads) = (Boundaries::None, 1);
            Some(permit)
        } else {
            None
        };
        let is_independent = matches!(boundaries, Boundaries::Markers(_));
        let kind = |is_first| if is_independent { PieceKind::Part { is_first } } else { PieceKind::Streams { is_first } };
        let Some((mut piece, decoder)) = self.start_piece(threads, kind(true)) else { return };
        let mut piece_len = 0;
        loop {
            let count = match read {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) => {
                    let _ = piece.send(Err(error));
                    return;
                }
            };
            let bytes = &chunk[..count];
            let mut sent = 0;
            let at_start = boundaries.is_at_boundary().then_some(0);
            for at in at_start.into_iter().chain(boundaries.scan(bytes)) {
                if piece_len + at - sent >= PIECE_LEN_MIN {
                    if at > sent && piece.send(Ok(bytes[sent..at].to_vec())).is_err() {
                        return;
                    }
                    drop(piece);
                    let Some((next, _)) = self.start_piece(threads, kind(false)) else { return };
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
            read = input.read(&mut chunk);
        }
        drop(piece);
        if permit.is_some() {
            // The decoder ends once its output has been taken or is no longer wanted.
            let _ = decoder.join();
        }
    }

    /// Starts a decoder thread. Returns the channel for its input, or `None` if the reader of the
    /// decoded stream is gone.
    fn start_piece(
        &self,
        threads: usize,
        kind: PieceKind,
    ) -> Option<(SyncSender<CompressedChunk>, ScopedJoinHandle<'scope, ()>)> {
        let (input, compressed) = sync_channel(INPUT_CHUNKS);
        let chunks_ahead = self.limits.ahead_len / CHUNK_LEN / threads.max(1);
        let (sender, output) = sync_channel(chunks_ahead.max(1));
        self.pieces.send(output).ok()?;
        let (compression, memory_max, monitor) = (self.compression, self.limits.memory_max, self.monitor.clone());
        let compressed = ChunkReader::new(compressed, self.pool.clone());
        let decoder = self.scope.spawn(move || match kind {
            PieceKind::Streams { is_first } => {
                decode_stream((compression, memory_max, is_first), compressed, &sender, threads, &monitor)
            }
            PieceKind::Part { is_first } => decode_part(is_first, compressed, &sender, &monitor),
        });
        Some((input, decoder))
    }
}
