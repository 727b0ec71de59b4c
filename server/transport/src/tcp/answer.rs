//! Sending what was pulled. What the page cache has of small pieces is gathered into frames, and of large ones sent by the kernel
//! without a copy; for what it has not, a thread asks the drive for all of the answer at once, sorted by place, and waits.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::FRAME_BODY_LEN_MAX;
use dayfly_meta::wire::frame::Kind;
use tokio::sync::oneshot;

use super::serve::refusal_body;
use super::stream::{FileRange, Outgoing, Sender, join_body};
use crate::cold::{Cold, is_cached, read_cached};
use crate::turns::Turns;
use crate::{Answer, GIVEN_UP, Piece, Refusal, Unread, drive_failure};

/// Pieces of at least this are sent by the kernel: below, what it costs to hand pages over is more than what it costs to copy them.
const SENDFILE_LEN_MIN: u64 = 32 << 10;
/// Small cold pieces are waited for so many at a time.
const WAIT_TOGETHER: usize = 64;

/// Sends an answer and its pieces. A failed send means that the stream is dead, which its reader finds too.
pub(super) async fn send_answer(
    sender: &Sender,
    request: u64,
    room: &[u64],
    answer: Result<Answer, Refusal>,
    peer: NodeId,
    turns: &Turns,
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
    let (left, cold) = (argument as usize, Cold::new(&pieces, peer, turns, u64::MAX));
    let gather = Gather { sender, request, body: Vec::new(), left, cold, unread: Unread::default() };
    if let Err(error) = gather.send(&pieces).await {
        tracing::debug!(%error, "an answer is given up");
        let body = refusal_body(&format!("cannot send what it holds: {error}").into());
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

/// An answer on its way.
struct Gather<'a> {
    sender: &'a Sender,
    request: u64,
    body: Vec<u8>,
    left: usize,
    cold: Cold<'a>,
    unread: Unread,
}

impl Gather<'_> {
    /// Sends all pieces. One that cannot be read is named at the end; the others are sent as ever.
    async fn send(mut self, pieces: &[Piece]) -> io::Result<()> {
        for (at, piece) in pieces.iter().enumerate() {
            let failure = match piece {
                Piece::Bytes(bytes) => {
                    self.add_bytes(bytes).await?;
                    continue;
                }
                Piece::File { len, .. } if *len >= SENDFILE_LEN_MIN => self.add_large(piece, at).await?,
                Piece::File { .. } => self.add_small(pieces, at).await?,
            };
            let failure = failure.or_else(|| is_revoked(piece).then(|| GIVEN_UP.to_owned()));
            if let Some(reason) = failure {
                tracing::warn!(piece = at, reason, "a block cannot be read");
                self.unread.add(at, &reason);
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

    /// Adds zeros in place of bytes that cannot be read.
    async fn add_zeros(&mut self, mut len: usize) -> io::Result<()> {
        while len > 0 {
            let count = len.min(FRAME_BODY_LEN_MAX - self.body.len());
            self.body.resize(self.body.len() + count, 0);
            len -= count;
            self.flush_if_full(1).await?;
        }
        Ok(())
    }

    /// Adds a piece that is copied; tells why it could not be read.
    async fn add_small(&mut self, pieces: &[Piece], at: usize) -> io::Result<Option<String>> {
        let Piece::File { file, offset, len, .. } = &pieces[at] else { return Ok(None) };
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
            self.cold.warm(at, (at + WAIT_TOGETHER).min(pieces.len())).await;
            if let Some(reason) = self.cold.failure(at) {
                return Ok(Some(reason));
            }
            cached = read_cached(file, *offset, &mut self.body[start..]);
        }
        match cached {
            Ok(cached) if cached == len => Ok(None),
            Ok(cached) => {
                let (file, from) = (file.clone(), offset + cached as u64);
                let mut body = std::mem::take(&mut self.body);
                let reading = tokio::task::spawn_blocking(move || {
                    let read = file.read_exact_at(&mut body[start + cached..], from);
                    (body, read)
                });
                let (body, read) = reading.await.map_err(io::Error::other)?;
                self.body = body;
                Ok(read.err().map(|error| drive_failure(&error)))
            }
            Err(error) => Ok(Some(drive_failure(&error))),
        }
    }

    /// Adds a piece that the kernel sends; tells why it could not be read.
    async fn add_large(&mut self, piece: &Piece, at: usize) -> io::Result<Option<String>> {
        let Piece::File { file, offset, len, revoked } = piece else { return Ok(None) };
        if self.cold.is_any() || !is_cached(file, *offset, *len) {
            self.cold.warm(at, at + 1).await;
            if let Some(reason) = self.cold.failure(at) {
                self.left -= *len as usize;
                self.add_zeros(*len as usize).await?;
                return Ok(Some(reason));
            }
        }
        self.flush().await?;
        self.left -= *len as usize;
        let (sent, failure) = oneshot::channel();
        let range = FileRange { file: file.clone(), offset: *offset, len: *len, revoked: revoked.clone() };
        let file = Outgoing::File { request: self.request, range, sent };
        self.sender.send(file).await.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        failure.await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Makes room for so many bytes in the frame.
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
