//! Reads frames. Small frames pass through a buffer. Bulk bytes go from the socket straight into their slots, many slots with one
//! system call.

use std::io::{self, IoSliceMut};

use dayfly_meta::wire::frame::{PEER_HEADER_LEN, PeerHeader};

use super::seal::ReadHalf;
use crate::region::Slot;

/// Length of the buffer for small frames.
const BUFFER_LEN: usize = 64 << 10;
/// Bytes that a call reads beyond the bulk bytes it asks for: enough for the one or two headers that follow. A longer read would
/// reach into the next bulk bytes, which would then have to be copied.
const BEHIND_LEN: usize = 256;
/// The most slots that one call fills.
const SLICES_MAX: usize = 256;

/// Reads the frames of one link.
pub(super) struct Reader {
    half: ReadHalf,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Reader {
    pub(super) fn new(half: ReadHalf) -> Self {
        Self { half, buffer: vec![0; BUFFER_LEN].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Reads the next frame's header. The end of the stream is an error.
    pub(super) async fn header(&mut self) -> io::Result<PeerHeader> {
        let mut bytes = [0; PEER_HEADER_LEN];
        self.exactly(&mut bytes).await?;
        PeerHeader::decode(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Reads a frame's body, whose length was checked when the header was decoded.
    pub(super) async fn body(&mut self, header: &PeerHeader) -> io::Result<Vec<u8>> {
        let mut body = vec![0; header.body_len as usize];
        self.exactly(&mut body).await?;
        Ok(body)
    }

    /// Reads the `len` bytes of a `Data` frame into the slots, and calls `on_bytes` after each read from the socket.
    pub(super) async fn land(&mut self, landing: &mut Landing, len: u64, on_bytes: impl Fn()) -> io::Result<()> {
        let mut left = len as usize;
        while left > 0 {
            if self.start < self.end {
                let space = landing.space().ok_or_else(too_many)?;
                let count = space.len().min(left).min(self.end - self.start);
                space[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
                self.start += count;
                landing.advance(count);
                left -= count;
                continue;
            }
            let (start, end) = (&mut self.start, &mut self.end);
            let mut slices = landing.spaces(left);
            let room: usize = slices.iter().map(|slice| slice.len()).sum();
            if room == 0 {
                return Err(too_many());
            }
            if room == left {
                // The same call reads what follows the frame.
                slices.push(IoSliceMut::new(&mut self.buffer[..BEHIND_LEN]));
            }
            let got = self.half.read(&mut slices).await?;
            drop(slices);
            on_bytes();
            (*start, *end) = (0, got.saturating_sub(left));
            landing.advance(got.min(left));
            left -= got.min(left);
        }
        Ok(())
    }

    async fn exactly(&mut self, mut out: &mut [u8]) -> io::Result<()> {
        loop {
            let count = out.len().min(self.end - self.start);
            out[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
            self.start += count;
            out = &mut out[count..];
            if out.is_empty() {
                return Ok(());
            }
            (self.start, self.end) = (0, 0);
            let long = out.len() >= BUFFER_LEN;
            let target = if long { &mut *out } else { &mut self.buffer };
            let got = self.half.read(&mut [IoSliceMut::new(target)]).await?;
            if long {
                out = &mut out[got..];
            } else {
                self.end = got;
            }
        }
    }
}

fn too_many() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer sent more bytes than it announced")
}

/// Bulk bytes that land in slots, in order.
pub(super) struct Landing {
    slots: Vec<Slot>,
    lens: Vec<u64>,
    slot: usize,
    offset: usize,
}

impl Landing {
    /// Expects `lens[i]` bytes for `slots[i]`. Returns `None` if they do not fit.
    pub(super) fn new(slots: Vec<Slot>, lens: Vec<u64>) -> Option<Self> {
        let fits = lens.len() <= slots.len() && slots.iter().zip(&lens).all(|(slot, &len)| len <= slot.len() as u64);
        fits.then(|| {
            let mut landing = Self { slots, lens, slot: 0, offset: 0 };
            landing.advance(0);
            landing
        })
    }

    /// Returns the number of pieces that land.
    pub(super) fn pieces(&self) -> usize {
        self.lens.len()
    }

    /// Returns whether all bytes have landed.
    pub(super) fn is_complete(&self) -> bool {
        self.slot == self.lens.len()
    }

    /// Returns the slots and the number of bytes for each.
    pub(super) fn finish(mut self) -> (Vec<Slot>, Vec<u64>) {
        self.lens.resize(self.slots.len(), 0);
        (self.slots, self.lens)
    }

    /// Returns the part of the current slot that is not filled yet.
    fn space(&mut self) -> Option<&mut [u8]> {
        let len = *self.lens.get(self.slot)? as usize;
        self.slots.get_mut(self.slot)?.get_mut(self.offset..len)
    }

    /// Returns the destinations of the next `len` bytes, as many as one call can fill.
    fn spaces(&mut self, len: usize) -> Vec<IoSliceMut<'_>> {
        let (mut left, mut offset) = (len, self.offset);
        let mut slices = Vec::with_capacity(SLICES_MAX.min(self.lens.len() - self.slot) + 1);
        for (slot, &slot_len) in self.slots[self.slot..].iter_mut().zip(&self.lens[self.slot..]) {
            if left == 0 || slices.len() == SLICES_MAX {
                break;
            }
            let count = (slot_len as usize - offset).min(left);
            if count > 0 {
                slices.push(IoSliceMut::new(&mut slot[offset..offset + count]));
            }
            left -= count;
            offset = 0;
        }
        slices
    }

    fn advance(&mut self, mut count: usize) {
        while let Some(&len) = self.lens.get(self.slot) {
            let here = count.min(len as usize - self.offset);
            self.offset += here;
            count -= here;
            if self.offset < len as usize {
                return;
            }
            self.slot += 1;
            self.offset = 0;
        }
    }
}
