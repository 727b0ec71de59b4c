//! Frames on their way out. One task writes, so that a frame is never cut by a request that is given up; it takes from a
//! bounded queue, so that who has much to send waits.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dayfly_meta::limits::FRAME_BODY_LEN_MAX;
use dayfly_meta::wire::frame::{Kind, PEER_HEADER_LEN, PeerHeader};
use rustix::net::{SendFlags, send};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::seal::WriteHalf;
use crate::cold::{blocking_here, is_cached};
use crate::{GIVEN_UP, Slot, Unread, drive_failure};

/// Frames waiting to be written on one stream; bulk ones are 1 MiB.
const QUEUE_LEN: usize = 8;

/// Frames that wait are written together up to this: one call has one deadline.
const WRITTEN_TOGETHER: usize = 256 << 10;

/// What is to be written.
pub(super) enum Outgoing {
    /// A frame.
    Frame { kind: Kind, request: u64, argument: u64, body: Vec<u8> },
    /// The last of an answer's bytes, as `Data`, and the `End` with what could not be read.
    Last { request: u64, body: Vec<u8>, unread: Unread },
    /// A slot's bytes as `Data` frames; the slot goes back when they are written.
    Payload { request: u64, slot: Slot, len: usize, back: oneshot::Sender<Slot> },
    /// A file's bytes as `Data` frames, by the kernel alone; then why they are not what they should be, if they are not.
    File { request: u64, range: FileRange, sent: oneshot::Sender<Option<String>> },
}

/// Bytes of a file.
pub(super) struct FileRange {
    pub(super) file: Arc<File>,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) revoked: Arc<AtomicBool>,
}

/// The way to the writing task. Sending fails when the stream is dead.
pub(super) type Sender = mpsc::Sender<Outgoing>;

/// Makes the queue and the future that writes what comes in; it ends with the stream, with the last sender, or when the peer takes no
/// bytes for `patience`.
pub(super) fn writer(half: WriteHalf, patience: Duration) -> (Sender, impl Future<Output = io::Result<()>>) {
    let (sender, queue) = mpsc::channel(QUEUE_LEN);
    (sender, write_all(half, queue, patience))
}

async fn write_all(mut half: WriteHalf, mut queue: mpsc::Receiver<Outgoing>, patience: Duration) -> io::Result<()> {
    let mut frames = Frames::default();
    while let Some(outgoing) = queue.recv().await {
        // Frames that wait behind each other go out together.
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
        frames.write(&mut half, patience).await?;
        match bulk {
            Some(Outgoing::Payload { request, slot, len, back }) => {
                for chunk in slot[..len].chunks(FRAME_BODY_LEN_MAX) {
                    write(&mut half, &mut [IoSlice::new(&data(request, chunk.len())), IoSlice::new(chunk)], patience).await?;
                }
                // Nobody waits for it any more if the request was given up; then the slot is free.
                let _ = back.send(slot);
            }
            Some(Outgoing::File { request, range, sent }) => {
                let failure = write_file(&mut half, request, &range, patience).await?;
                let _ = sent.send(failure);
            }
            _ => {}
        }
    }
    half.shutdown().await
}

/// Frames that are written with one call.
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

    async fn write(&mut self, half: &mut WriteHalf, patience: Duration) -> io::Result<()> {
        let frames = std::mem::take(self).frames;
        if frames.is_empty() {
            return Ok(());
        }
        let both = |(header, body)| [IoSlice::new(header), IoSlice::new(body)];
        let mut slices: Vec<IoSlice<'_>> = frames.iter().map(|(header, body)| (&header[..], &body[..])).flat_map(both).collect();
        write(half, &mut slices, patience).await
    }
}

fn data(request: u64, len: usize) -> [u8; PEER_HEADER_LEN] {
    PeerHeader { body_len: len as u32, kind: Kind::Data, request, argument: 0 }.encode()
}

async fn write(half: &mut WriteHalf, slices: &mut [IoSlice<'_>], patience: Duration) -> io::Result<()> {
    timeout(patience, half.write_all(slices))
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the peer takes no bytes"))?
}

/// Sends a file's bytes; out of the page cache without copying them, if they go as they are. All bytes were announced: those that cannot
/// be read are made up with zeros, and the answer says why the piece does not count. An error is the stream's, never the file's.
async fn write_file(half: &mut WriteHalf, request: u64, range: &FileRange, patience: Duration) -> io::Result<Option<String>> {
    let (mut at, end) = (range.offset, range.offset + range.len);
    let mut failure = None;
    while at < end {
        if failure.is_none() && range.revoked.load(Ordering::Acquire) {
            failure = Some(GIVEN_UP.to_owned());
        }
        let until = end.min(at + FRAME_BODY_LEN_MAX as u64);
        let header = data(request, (until - at) as usize);
        match half {
            WriteHalf::Plain(half) if failure.is_none() => {
                failure = send_range(half, &header, range, (at, until), patience).await?
            }
            _ => {
                let mut bytes = vec![0; (until - at) as usize];
                if failure.is_none() {
                    let mut read = || read_whole(range, at, &mut bytes);
                    let read = if is_cached(&range.file, at, until - at) { read() } else { blocking_here(read) };
                    failure = read.err().map(|error| drive_failure(&error));
                }
                write(half, &mut [IoSlice::new(&header), IoSlice::new(&bytes)], patience).await?;
            }
        }
        at = until;
    }
    // What was given up in the meantime may have been read as zeros.
    if failure.is_none() && range.revoked.load(Ordering::Acquire) {
        failure = Some(GIVEN_UP.to_owned());
    }
    Ok(failure)
}

/// Sends one frame out of the page cache.
async fn send_range(
    half: &mut OwnedWriteHalf,
    mut header: &[u8],
    range: &FileRange,
    (mut at, until): (u64, u64),
    patience: Duration,
) -> io::Result<Option<String>> {
    let sending = async {
        while !header.is_empty() {
            let stream = half.as_ref();
            let more = || Ok(send(stream, header, SendFlags::MORE | SendFlags::NOSIGNAL)?);
            header = &header[stream.async_io(Interest::WRITABLE, more).await?..];
        }
        while at < until {
            let (stream, left) = (half.as_ref(), (until - at) as usize);
            // It was in the page cache when the answer began; should it have gone meanwhile, a drive may keep us waiting.
            let is_here = is_cached(&range.file, at, left as u64);
            let mut send = || rustix::fs::sendfile(stream, &range.file, Some(&mut at), left);
            let more = || Ok(if is_here { send()? } else { blocking_here(&mut send)? });
            match stream.async_io(Interest::WRITABLE, more).await {
                Ok(0) => return Ok(Some(drive_failure(&io::ErrorKind::UnexpectedEof.into()))),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Of the file or of the stream: the zeros that follow tell, for a broken stream takes none.
                Err(error) => return Ok(Some(drive_failure(&error))),
            }
        }
        io::Result::Ok(None)
    };
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the peer takes no bytes");
    let failure = timeout(patience, sending).await.map_err(late)??;
    if failure.is_some() {
        let zeros = vec![0; (until - at) as usize];
        timeout(patience, half.write_all(&zeros)).await.map_err(late)??;
    }
    Ok(failure)
}

/// What is at a place of the file, which has just been read into the page cache.
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

/// What an `End` says of pieces that could not be read; nothing if there are none.
fn join_unread(unread: &Unread) -> Vec<u8> {
    if unread.pieces.is_empty() {
        return Vec::new();
    }
    let mut body = (unread.reason.len() as u32).to_le_bytes().to_vec();
    body.extend_from_slice(unread.reason.as_bytes());
    unread.pieces.iter().for_each(|piece| body.extend_from_slice(&piece.to_le_bytes()));
    body
}

/// Takes that apart; `None` if it names pieces that the answer has not.
pub(super) fn split_unread(body: &[u8], pieces: usize) -> Option<Unread> {
    let Some((len, rest)) = body.split_first_chunk::<4>() else { return body.is_empty().then(Unread::default) };
    let (reason, numbers) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let (numbers, left) = numbers.as_chunks::<4>();
    let numbers: Vec<u32> = numbers.iter().map(|&number| u32::from_le_bytes(number)).collect();
    let is_ascending = numbers.windows(2).all(|pair| pair[0] < pair[1]);
    let is_valid = left.is_empty() && is_ascending && numbers.last().is_some_and(|&last| (last as usize) < pieces);
    is_valid.then(|| Unread { pieces: numbers, reason: String::from_utf8_lossy(reason).into_owned() })
}

/// Lengths and a message in one body: what `Pull` and `Pulled` carry.
pub(super) fn join_body(lens: &[u64], message: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(4 + lens.len() * 8 + message.len());
    body.extend_from_slice(&(lens.len() as u32).to_le_bytes());
    lens.iter().for_each(|len| body.extend_from_slice(&len.to_le_bytes()));
    body.extend_from_slice(message);
    body
}

/// Takes such a body apart.
pub(super) fn split_body(body: &[u8]) -> Option<(Vec<u64>, Vec<u8>)> {
    let (count, rest) = body.split_first_chunk::<4>()?;
    let (lens, message) = rest.split_at_checked(u32::from_le_bytes(*count) as usize * 8)?;
    let lens = lens.chunks_exact(8).map(|len| u64::from_le_bytes(std::array::from_fn(|byte| len[byte]))).collect();
    Some((lens, message.to_vec()))
}
