//! Writes frames. One task owns the writing half of a link, so an aborted request never leaves a partial frame behind. The task
//! takes frames from a bounded queue, which slows down senders that are faster than the link.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dayfly_meta::limits::{FRAME_BODY_LEN_MAX, MESSAGE_LEN_MAX};
use dayfly_meta::wire::frame::{Kind, PEER_HEADER_LEN, PeerHeader};
use rustix::net::{SendFlags, send};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::seal::WriteHalf;
use crate::contract::Unread;
use crate::error::{PieceError, Refusal};
use crate::page_cache::{blocking_here, is_cached};
use crate::region::Slot;

/// The number of frames that may wait in the queue of one link. Bulk frames have up to 1 MiB each.
const QUEUE_LEN: usize = 8;

/// Waiting frames are written together in one call. Once they have this many bytes, no more frames
/// are added, because a call has a single deadline.
const WRITTEN_TOGETHER: usize = 256 << 10;

/// An entry of the queue.
pub(super) enum Outgoing {
    /// A frame whose body is in memory.
    Frame { kind: Kind, request: u64, argument: u64, body: Vec<u8> },
    /// The last bytes of an answer, as a `Data` frame, and the `End` frame that names the pieces that could not be read.
    Last { request: u64, body: Vec<u8>, unread: Unread },
    /// The bytes of a slot, as `Data` frames. The slot is returned through `back` once they are written.
    Payload { request: u64, lent: Lent, len: usize },
    /// A range of a file, as `Data` frames, sent by the kernel alone where possible. `done` reports whether its bytes are valid.
    File { request: u64, range: FileRange, done: oneshot::Sender<Result<(), PieceError>> },
}

/// A range of a file.
pub(super) struct FileRange {
    pub(super) file: Arc<File>,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) revoked: Arc<AtomicBool>,
}

/// The time at which something last happened, shared between tasks.
pub(super) struct Timestamp {
    start: Instant,
    ms: AtomicU64,
}

impl Timestamp {
    /// Creates a timestamp that means "never". Times are relative to `start`.
    pub(super) fn new(start: Instant) -> Arc<Self> {
        Arc::new(Self { start, ms: AtomicU64::new(0) })
    }

    /// Sets the time to now.
    pub(super) fn touch(&self) {
        self.ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Returns the time of the last occurrence, relative to the start; 0 means never.
    pub(super) fn at(&self) -> Duration {
        Duration::from_millis(self.ms.load(Ordering::Relaxed))
    }
}

/// A slot whose bytes are being sent. It goes back when this is dropped: when they have been sent, or the stream has ended.
pub(super) struct Lent(Option<(Slot, oneshot::Sender<Slot>)>);

impl Lent {
    pub(super) fn new(slot: Slot, back: oneshot::Sender<Slot>) -> Self {
        Self(Some((slot, back)))
    }

    fn bytes(&self, len: usize) -> &[u8] {
        self.0.as_ref().and_then(|(slot, _)| slot.get(..len)).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some((slot, back)) = self.0.take() {
            // If the request was given up, nothing waits for the slot, and it is freed here.
            let _ = back.send(slot);
        }
    }
}

/// The queue to the writing task. Sending fails when the stream is dead.
pub(super) type Sender = mpsc::Sender<Outgoing>;

/// Creates the queue, and the future that writes its entries. The future ends with the stream, with the last sender, or when the
/// peer takes no bytes for `limit`. `sent` records when the stream last took bytes of a payload.
pub(super) fn writer(half: WriteHalf, limit: Duration, sent: Arc<Timestamp>) -> (Sender, impl Future<Output = io::Result<()>>) {
    let (sender, queue) = mpsc::channel(QUEUE_LEN);
    (sender, write_all(half, queue, limit, sent))
}

async fn write_all(
    mut half: WriteHalf,
    mut queue: mpsc::Receiver<Outgoing>,
    limit: Duration,
    sent: Arc<Timestamp>,
) -> io::Result<()> {
    let mut frames = Frames::default();
    while let Some(outgoing) = queue.recv().await {
        // Frames that wait are written together.
        let mut next = Some(outgoing);
        let bulk = loop {
            let is_enough = frames.bytes >= WRITTEN_TOGETHER;
            match next.take().or_else(|| if is_enough { None } else { queue.try_recv().ok() }) {
                Some(Outgoing::Frame { kind, request, argument, body }) => frames.add(kind, request, argument, body),
                Some(Outgoing::Last { request, body, unread }) => {
                    if !body.is_empty() {
                        frames.add(Kind::Data, request, 0, body);
                    }
                    frames.add(Kind::End, request, 0, join_unread(&unread));
                }
                other => break other,
            }
        };
        frames.write(&mut half, limit).await?;
        match bulk {
            Some(Outgoing::Payload { request, lent, len }) => {
                for chunk in lent.bytes(len).chunks(FRAME_BODY_LEN_MAX) {
                    let header = data(request, chunk.len());
                    let mut slices = &mut [IoSlice::new(&header), IoSlice::new(chunk)][..];
                    while !slices.is_empty() {
                        let written = timeout(limit, half.write(slices)).await.map_err(late)??;
                        IoSlice::advance_slices(&mut slices, written);
                        sent.touch();
                    }
                }
            }
            Some(Outgoing::File { request, range, done }) => {
                let read = write_file(&mut half, request, &range, limit).await?;
                let _ = done.send(read);
            }
            _ => {}
        }
    }
    half.shutdown().await
}

/// Frames that are written by one call.
#[derive(Default)]
struct Frames {
    frames: Vec<([u8; PEER_HEADER_LEN], Vec<u8>)>,
    bytes: usize,
}

impl Frames {
    fn add(&mut self, kind: Kind, request: u64, argument: u64, body: Vec<u8>) {
        self.bytes += body.len();
        self.frames.push((PeerHeader { body_len: body.len() as u32, kind, request, argument }.encode(), body));
    }

    async fn write(&mut self, half: &mut WriteHalf, limit: Duration) -> io::Result<()> {
        let frames = std::mem::take(self).frames;
        if frames.is_empty() {
            return Ok(());
        }
        let both = |(header, body)| [IoSlice::new(header), IoSlice::new(body)];
        let mut slices: Vec<IoSlice<'_>> = frames.iter().map(|(header, body)| (&header[..], &body[..])).flat_map(both).collect();
        write(half, &mut slices, limit).await
    }
}

impl FileRange {
    fn check_revoked(&self) -> Result<(), PieceError> {
        if self.revoked.load(Ordering::Acquire) { Err(PieceError::Revoked) } else { Ok(()) }
    }
}

fn data(request: u64, len: usize) -> [u8; PEER_HEADER_LEN] {
    PeerHeader { body_len: len as u32, kind: Kind::Data, request, argument: 0 }.encode()
}

async fn write(half: &mut WriteHalf, slices: &mut [IoSlice<'_>], limit: Duration) -> io::Result<()> {
    timeout(limit, half.write_all(slices)).await.map_err(late)?
}

fn late(_: tokio::time::error::Elapsed) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the peer took no bytes in time")
}

/// Sends a range of a file. On a plain stream, bytes go from the page cache to the socket without a copy. All bytes were announced,
/// so those that cannot be read are replaced by zeros. The outer error is about the stream; the inner one says why the piece must
/// not be used.
async fn write_file(
    half: &mut WriteHalf,
    request: u64,
    range: &FileRange,
    limit: Duration,
) -> io::Result<Result<(), PieceError>> {
    let (mut at, end) = (range.offset, range.offset + range.len);
    let mut valid = Ok(());
    while at < end {
        valid = valid.and_then(|()| range.check_revoked());
        let until = end.min(at + FRAME_BODY_LEN_MAX as u64);
        let header = data(request, (until - at) as usize);
        match half {
            WriteHalf::Plain(half) if valid.is_ok() => valid = send_range(half, &header, range, (at, until), limit).await?,
            _ => {
                let mut bytes = vec![0; (until - at) as usize];
                if valid.is_ok() {
                    let mut read = || read_whole(range, at, &mut bytes);
                    let read = if is_cached(&range.file, at, until - at) { read() } else { blocking_here(read) };
                    valid = read.map_err(PieceError::from);
                }
                write(half, &mut [IoSlice::new(&header), IoSlice::new(&bytes)], limit).await?;
            }
        }
        at = until;
    }
    // Bytes that were freed in the meantime may have been read as zeros.
    Ok(valid.and_then(|()| range.check_revoked()))
}

/// Sends one frame from the page cache. The outer error is about the stream, the inner one about the file.
async fn send_range(
    half: &mut OwnedWriteHalf,
    mut header: &[u8],
    range: &FileRange,
    (mut at, until): (u64, u64),
    limit: Duration,
) -> io::Result<Result<(), PieceError>> {
    let sending = async {
        while !header.is_empty() {
            let stream = half.as_ref();
            let more = || Ok(send(stream, header, SendFlags::MORE | SendFlags::NOSIGNAL)?);
            header = &header[stream.async_io(Interest::WRITABLE, more).await?..];
        }
        while at < until {
            let (stream, left) = (half.as_ref(), (until - at) as usize);
            // The range was in the page cache when the answer began. If it has been evicted since, the drive blocks this thread.
            let is_here = is_cached(&range.file, at, left as u64);
            let mut send = || rustix::fs::sendfile(stream, &range.file, Some(&mut at), left);
            let more = || Ok(if is_here { send()? } else { blocking_here(&mut send)? });
            match stream.async_io(Interest::WRITABLE, more).await {
                Ok(0) => return Ok(Err(PieceError::Truncated)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The error may come from the file or from the stream. Sending the zeros below tells which: a broken stream does
                // not take them.
                Err(error) => return Ok(Err(error.into())),
            }
        }
        io::Result::Ok(Ok(()))
    };
    let valid = timeout(limit, sending).await.map_err(late)??;
    if valid.is_err() {
        let zeros = vec![0; (until - at) as usize];
        timeout(limit, half.write_all(&zeros)).await.map_err(late)??;
    }
    Ok(valid)
}

/// Fills `rest` with the bytes of a range from `at` on. Blocks the thread unless they are in the page cache.
fn read_whole(range: &FileRange, mut at: u64, mut rest: &mut [u8]) -> io::Result<()> {
    while !rest.is_empty() {
        match range.file.read_at(rest, at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => {
                at += got as u64;
                rest = &mut rest[got..];
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the body of an `End` frame: the pieces that could not be read, or nothing if there are none.
fn join_unread(unread: &Unread) -> Vec<u8> {
    if unread.pieces.is_empty() {
        return Vec::new();
    }
    let mut body = (unread.reason.len() as u32).to_le_bytes().to_vec();
    body.extend_from_slice(unread.reason.as_bytes());
    unread.pieces.iter().for_each(|piece| body.extend_from_slice(&piece.to_le_bytes()));
    body
}

/// Parses the body of an `End` frame. Returns `None` if it is malformed or names pieces that the answer does not have.
pub(super) fn split_unread(body: &[u8], pieces: usize) -> Option<Unread> {
    let Some((len, rest)) = body.split_first_chunk::<4>() else { return body.is_empty().then(Unread::default) };
    let (reason, numbers) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let (numbers, left) = numbers.as_chunks::<4>();
    let numbers: Vec<u32> = numbers.iter().map(|&number| u32::from_le_bytes(number)).collect();
    let is_ascending = numbers.windows(2).all(|pair| pair[0] < pair[1]);
    let is_valid = left.is_empty() && is_ascending && numbers.last().is_some_and(|&last| (last as usize) < pieces);
    is_valid.then(|| Unread { pieces: numbers, reason: String::from_utf8_lossy(reason).into_owned() })
}

/// Returns the body of a `Refused` frame: the reason, cut to the length that a message may have.
pub(super) fn refusal_body(refusal: &Refusal) -> Vec<u8> {
    let mut reason = refusal.to_string().into_bytes();
    reason.truncate(MESSAGE_LEN_MAX);
    reason
}

/// Returns the body of `Pull` and `Pulled` frames: lengths and a message.
pub(super) fn join_body(lens: &[u64], message: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(4 + lens.len() * 8 + message.len());
    body.extend_from_slice(&(lens.len() as u32).to_le_bytes());
    lens.iter().for_each(|len| body.extend_from_slice(&len.to_le_bytes()));
    body.extend_from_slice(message);
    body
}

/// Parses the body of a `Pull` or `Pulled` frame.
pub(super) fn split_body(body: &[u8]) -> Option<(Vec<u64>, Vec<u8>)> {
    let (count, rest) = body.split_first_chunk::<4>()?;
    let (lens, message) = rest.split_at_checked(u32::from_le_bytes(*count) as usize * 8)?;
    let lens = lens.chunks_exact(8).map(|len| u64::from_le_bytes(std::array::from_fn(|byte| len[byte]))).collect();
    Some((lens, message.to_vec()))
}
