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
use crate::Slot;

/// Frames waiting to be written on one stream; bulk ones are 1 MiB.
const QUEUE_LEN: usize = 8;

/// Frames that wait are written together up to this: one call has one deadline.
const WRITTEN_TOGETHER: usize = 256 << 10;

/// What is to be written.
pub(super) enum Outgoing {
    /// A frame.
    Frame { kind: Kind, request: u64, argument: u64, body: Vec<u8> },
    /// The last of an answer's bytes, as `Data`, and the `End`.
    Last { request: u64, body: Vec<u8> },
    /// A slot's bytes as `Data` frames; the slot goes back when they are written.
    Payload { request: u64, slot: Slot, len: usize, back: oneshot::Sender<Slot> },
    /// A file's bytes as `Data` frames, by the kernel alone; then whether they are all there.
    File { request: u64, range: FileRange, sent: oneshot::Sender<bool> },
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
                Some(Outgoing::Last { request, body }) => {
                    if !body.is_empty() {
                        frames.add(Kind::Data, request, 0, body);
                    }
                    frames.add(Kind::End, request, 0, Vec::new());
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
                let is_whole = write_file(&mut half, request, &range, patience).await?;
                let _ = sent.send(is_whole);
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

/// Sends a file's bytes; out of the page cache without copying them, if they go as they are. A file that was cut short in the meantime is made up with zeros,
/// for they were announced; `false` says that they do not count.
async fn write_file(half: &mut WriteHalf, request: u64, range: &FileRange, patience: Duration) -> io::Result<bool> {
    let (mut at, end) = (range.offset, range.offset + range.len);
    while at < end {
        if range.revoked.load(Ordering::Acquire) {
            return Ok(false);
        }
        let len = (end - at).min(FRAME_BODY_LEN_MAX as u64);
        let header = data(request, len as usize);
        let until = at + len;
        let half = match half {
            WriteHalf::Plain(half) => half,
            WriteHalf::Sealed(_) => {
                let mut bytes = vec![0; len as usize];
                let is_whole = read_whole(range, at, &mut bytes)?;
                write(half, &mut [IoSlice::new(&header), IoSlice::new(&bytes)], patience).await?;
                if !is_whole {
                    return Ok(false);
                }
                at = until;
                continue;
            }
        };
        let mut header = &header[..];
        let writing = async {
            while !header.is_empty() {
                let stream = half.as_ref();
                let more = || Ok(send(stream, header, SendFlags::MORE | SendFlags::NOSIGNAL)?);
                header = &header[stream.async_io(Interest::WRITABLE, more).await?..];
            }
            while at < until {
                let (stream, left) = (half.as_ref(), (until - at) as usize);
                let more = || Ok(rustix::fs::sendfile(stream, &range.file, Some(&mut at), left)?);
                let sent = stream.async_io(Interest::WRITABLE, more).await?;
                if sent == 0 {
                    return Ok(false);
                }
            }
            io::Result::Ok(true)
        };
        let written = timeout(patience, writing).await;
        let is_whole = written.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the peer takes no bytes"))??;
        if !is_whole {
            write_zeros(half, until - at, patience).await?;
            return Ok(false);
        }
    }
    Ok(true)
}

/// What is at a place of the file, which has just been read into the page cache; zeros, and `false`, where it was cut short.
fn read_whole(range: &FileRange, mut at: u64, bytes: &mut [u8]) -> io::Result<bool> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let got = range.file.read_at(rest, at)?;
        if got == 0 {
            return Ok(false);
        }
        at += got as u64;
        rest = &mut rest[got..];
    }
    // What was given up in the meantime may have been read as zeros.
    Ok(!range.revoked.load(Ordering::Acquire))
}

async fn write_zeros(half: &mut OwnedWriteHalf, len: u64, patience: Duration) -> io::Result<()> {
    let zeros = vec![0; len as usize];
    let writing = timeout(patience, half.write_all(&zeros)).await;
    writing.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the peer takes no bytes"))?
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
