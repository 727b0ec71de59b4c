//! Sends the answer to a pull. Small pieces in the page cache are gathered into frames; large ones are sent by the kernel without
//! a copy. Pieces that are not in the page cache are loaded first, by the [`PageCacheLoader`] of the answer.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::FRAME_BODY_LEN_MAX;
use dayfly_meta::wire::frame::Kind;
use tokio::sync::oneshot;

use super::stream::{FileRange, Outgoing, Sender, join_body, refusal_body};
use crate::contract::{Answer, Piece, Unread};
use crate::error::{PieceError, Refusal};
use crate::fair_queue::FairQueue;
use crate::page_cache::{PageCacheLoader, is_cached, read_cached};

/// The kernel sends pieces of at least this length. For shorter ones, handing over pages costs more than copying the bytes.
const SENDFILE_LEN_MIN: u64 = 32 << 10;
/// Number of small pieces that an answer waits for at a time.
const WAIT_TOGETHER: usize = 64;

/// Sends an answer and its pieces. A failed send means that the stream is dead; the reader of the stream reports that.
pub(super) async fn send_answer(
    sender: &Sender,
    request: u64,
    room: &[u64],
    answer: Result<Answer, Refusal>,
    peer: NodeId,
    drive_readers: &FairQueue,
) {
    let Answer { message, pieces } = match answer.and_then(|answer| fitting(answer, room)) {
        Ok(answer) => answer,
        Err(refusal) => {
            let _ =
                sender.send(Outgoing::Frame { kind: Kind::Refused, request, argument: 0, body: refusal_body(&refusal) }).await;
            return;
        }
    };
    let lens: Vec<u64> = pieces.iter().map(Piece::len).collect();
    let body = join_body(&lens, &message);
    let argument = lens.iter().sum();
    if sender.send(Outgoing::Frame { kind: Kind::Pulled, request, argument, body }).await.is_err() || argument == 0 {
        return;
    }
    let (left, loader) = (argument as usize, PageCacheLoader::new(&pieces, peer, drive_readers, u64::MAX));
    let gather = Gather { sender, request, body: Vec::new(), left, loader, unread: Unread::default() };
    if let Err(error) = gather.send(&pieces).await {
        tracing::debug!(node = %peer, %error, "answer aborted");
        let body = refusal_body(&format!("cannot send the answer: {error}").into());
        let _ = sender.send(Outgoing::Frame { kind: Kind::Refused, request, argument: 0, body }).await;
    }
}

fn is_revoked(piece: &Piece) -> bool {
    matches!(piece, Piece::File { revoked, .. } if revoked.load(Ordering::Acquire))
}

fn fitting(answer: Answer, room: &[u64]) -> Result<Answer, Refusal> {
    let fits = answer.pieces.len() <= room.len() && answer.pieces.iter().zip(room).all(|(piece, &room)| piece.len() <= room);
    let message_fits = answer.message.len() + answer.pieces.len() * 8 + 4 <= FRAME_BODY_LEN_MAX;
    if fits && message_fits { Ok(answer) } else { Err("the answer does not fit".into()) }
}

/// An answer that is being sent.
struct Gather<'a> {
    sender: &'a Sender,
    request: u64,
    /// The body of the next `Data` frame.
    body: Vec<u8>,
    /// Bytes of the pieces that have not been added yet.
    left: usize,
    loader: PageCacheLoader<'a>,
    unread: Unread,
}

impl Gather<'_> {
    /// Sends all pieces. Pieces that cannot be read are named at the end, and the others are sent as usual.
    async fn send(mut self, pieces: &[Piece]) -> io::Result<()> {
        for (at, piece) in pieces.iter().enumerate() {
            let read = match piece {
                Piece::Bytes(bytes) => {
                    self.add_bytes(bytes).await?;
                    continue;
                }
                Piece::File { len, .. } if *len >= SENDFILE_LEN_MIN => self.add_large(piece, at).await?,
                Piece::File { .. } => self.add_small(pieces, at).await?,
            };
            let read = read.and_then(|()| if is_revoked(piece) { Err(PieceError::Revoked) } else { Ok(()) });
            if let Err(error) = read {
                tracing::warn!(piece = at, %error, "cannot read a piece of an answer");
                self.unread.add(at, &error);
            }
        }
        let last = Outgoing::Last { request: self.request, body: self.body, unread: self.unread };
        let _ = self.sender.send(last).await;
        Ok(())
    }

    async fn add_bytes(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let count = bytes.len().min(FRAME_BODY_LEN_MAX - self.body.len());
            self.body.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            self.flush_if_full(1).await?;
        }
        Ok(())
    }

    /// Adds zeros in place of bytes that cannot be read, because all announced bytes must be sent.
    async fn add_zeros(&mut self, mut len: usize) -> io::Result<()> {
        while len > 0 {
            let count = len.min(FRAME_BODY_LEN_MAX - self.body.len());
            self.body.resize(self.body.len() + count, 0);
            len -= count;
            self.flush_if_full(1).await?;
        }
        Ok(())
    }

    /// Adds a piece by copying it. The outer error is about the stream, the inner one about the piece.
    async fn add_small(&mut self, pieces: &[Piece], at: usize) -> io::Result<Result<(), PieceError>> {
        let Piece::File { file, offset, len, .. } = &pieces[at] else { return Ok(Ok(())) };
        let len = *len as usize;
        self.flush_if_full(len).await?;
        if self.body.capacity() == 0 {
            self.body.reserve_exact(self.left.min(FRAME_BODY_LEN_MAX));
        }
        let start = self.body.len();
        self.body.resize(start + len, 0);
        self.left -= len;
        let mut cached = read_cached(file, *offset, &mut self.body[start..]);
        if cached.as_ref().is_ok_and(|&cached| cached < len) {
            self.loader.load(at, (at + WAIT_TOGETHER).min(pieces.len())).await;
            if let Some(error) = self.loader.failure(at) {
                return Ok(Err(error));
            }
            cached = read_cached(file, *offset, &mut self.body[start..]);
        }
        match cached {
            Ok(cached) if cached == len => Ok(Ok(())),
            Ok(cached) => {
                let (file, from) = (file.clone(), offset + cached as u64);
                let mut body = std::mem::take(&mut self.body);
                let reading = tokio::task::spawn_blocking(move || {
                    let read = file.read_exact_at(&mut body[start + cached..], from);
                    (body, read)
                });
                let (body, read) = reading.await.map_err(io::Error::other)?;
                self.body = body;
                Ok(read.map_err(PieceError::from))
            }
            Err(error) => Ok(Err(error.into())),
        }
    }

    /// Adds a piece that the kernel sends. The outer error is about the stream, the inner one about the piece.
    async fn add_large(&mut self, piece: &Piece, at: usize) -> io::Result<Result<(), PieceError>> {
        let Piece::File { file, offset, len, revoked } = piece else { return Ok(Ok(())) };
        if self.loader.is_started() || !is_cached(file, *offset, *len) {
            self.loader.load(at, at + 1).await;
            if let Some(error) = self.loader.failure(at) {
                self.left -= *len as usize;
                self.add_zeros(*len as usize).await?;
                return Ok(Err(error));
            }
        }
        self.flush().await?;
        self.left -= *len as usize;
        let (done, sent) = oneshot::channel();
        let range = FileRange { file: file.clone(), offset: *offset, len: *len, revoked: revoked.clone() };
        let file = Outgoing::File { request: self.request, range, done };
        self.sender.send(file).await.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        sent.await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Sends the frame if it has no room for `len` more bytes.
    async fn flush_if_full(&mut self, len: usize) -> io::Result<()> {
        if self.body.len() + len > FRAME_BODY_LEN_MAX { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> io::Result<()> {
        if self.body.is_empty() {
            return Ok(());
        }
        let body = std::mem::take(&mut self.body);
        let frame = Outgoing::Frame { kind: Kind::Data, request: self.request, argument: 0, body };
        self.sender.send(frame).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}
