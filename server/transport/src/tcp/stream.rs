//! Frames on a stream. One task writes, so that a frame is never cut by a request that is given up; it takes from a
//! bounded queue, so that who has much to send waits.

use std::io;

use dayfly_meta::limits::{FRAME_BODY_LEN_MAX, PEER_LOST_TIMEOUT};
use dayfly_meta::wire::frame::{Kind, PEER_HEADER_LEN, PeerHeader};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::Slot;

/// Frames waiting to be written on one stream; bulk ones are 1 MiB.
const QUEUE_LEN: usize = 8;

/// What is to be written.
pub(super) enum Outgoing {
    /// A frame.
    Frame { kind: Kind, request: u64, argument: u64, body: Vec<u8> },
    /// A slot's bytes as `Data` frames; the slot goes back when they are written.
    Payload { request: u64, slot: Slot, len: usize, back: oneshot::Sender<Slot> },
}

/// The way to the writing task. Sending fails when the stream is dead.
pub(super) type Sender = mpsc::Sender<Outgoing>;

/// Makes the queue and the future that writes what comes in; it ends with the stream, or with the last sender.
pub(super) fn writer(half: OwnedWriteHalf) -> (Sender, impl Future<Output = io::Result<()>>) {
    let (sender, queue) = mpsc::channel(QUEUE_LEN);
    (sender, write_all(half, queue))
}

async fn write_all(mut half: OwnedWriteHalf, mut queue: mpsc::Receiver<Outgoing>) -> io::Result<()> {
    while let Some(outgoing) = queue.recv().await {
        match outgoing {
            Outgoing::Frame { kind, request, argument, body } => write_frame(&mut half, kind, request, argument, &body).await?,
            Outgoing::Payload { request, slot, len, back } => {
                for chunk in slot[..len].chunks(FRAME_BODY_LEN_MAX) {
                    write_frame(&mut half, Kind::Data, request, 0, chunk).await?;
                }
                // Nobody waits for it any more if the request was given up; then the slot is free.
                let _ = back.send(slot);
            }
        }
    }
    half.shutdown().await
}

async fn write_frame(half: &mut OwnedWriteHalf, kind: Kind, request: u64, argument: u64, body: &[u8]) -> io::Result<()> {
    let header = PeerHeader { body_len: body.len() as u32, kind, request, argument }.encode();
    let write = async {
        let mut slices = [io::IoSlice::new(&header), io::IoSlice::new(body)];
        let mut slices = &mut slices[..];
        while !slices.is_empty() {
            let written = half.write_vectored(slices).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            io::IoSlice::advance_slices(&mut slices, written);
        }
        Ok(())
    };
    timeout(PEER_LOST_TIMEOUT, write).await.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the peer takes no bytes"))?
}

/// Reads the next frame's header; an error also where the stream ends.
pub(super) async fn read_header(half: &mut (impl AsyncRead + Unpin)) -> io::Result<PeerHeader> {
    let mut bytes = [0; PEER_HEADER_LEN];
    half.read_exact(&mut bytes).await?;
    PeerHeader::decode(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Reads a frame's body, whose length the header's reader has bounded.
pub(super) async fn read_body(half: &mut (impl AsyncRead + Unpin), header: &PeerHeader) -> io::Result<Vec<u8>> {
    let mut body = vec![0; header.body_len as usize];
    half.read_exact(&mut body).await?;
    Ok(body)
}

/// Bytes of bulk on their way into slots, in order.
pub(super) struct Landing {
    slots: Vec<Slot>,
    lens: Vec<u64>,
    slot: usize,
    offset: u64,
}

impl Landing {
    /// `lens[i]` bytes will land in `slots[i]`; `None` if they do not fit.
    pub(super) fn new(slots: Vec<Slot>, lens: Vec<u64>) -> Option<Self> {
        let fits = lens.len() <= slots.len() && slots.iter().zip(&lens).all(|(slot, &len)| len <= slot.len() as u64);
        fits.then_some(Self { slots, lens, slot: 0, offset: 0 })
    }

    /// Whether all bytes have landed.
    pub(super) fn is_complete(&mut self) -> bool {
        while self.lens.get(self.slot).is_some_and(|&len| self.offset == len) {
            self.slot += 1;
            self.offset = 0;
        }
        self.slot == self.lens.len()
    }

    /// Reads a `Data` frame's bytes straight into the slots.
    pub(super) async fn receive(&mut self, half: &mut (impl AsyncRead + Unpin), mut len: u64) -> io::Result<()> {
        while len > 0 {
            if self.is_complete() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "more bytes than were announced"));
            }
            let count = len.min(self.lens[self.slot] - self.offset);
            let space = &mut self.slots[self.slot][self.offset as usize..][..count as usize];
            half.read_exact(space).await?;
            self.offset += count;
            len -= count;
        }
        Ok(())
    }

    /// The slots, and how many bytes landed in each.
    pub(super) fn finish(mut self) -> (Vec<Slot>, Vec<u64>) {
        self.lens.resize(self.slots.len(), 0);
        (self.slots, self.lens)
    }
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
