//! The two halves of a stream after its handshake: plain, or sealed in Noise frames. A frame consists of a length of 16 bits and
//! that many bytes, which the handshake's keys encrypt and authenticate. Frames are numbered implicitly, so none can be dropped or
//! reordered.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

use snow::StatelessTransportState;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// The longest Noise frame in bytes.
const CIPHER_LEN_MAX: usize = 65535;
/// Length of the authentication tag of a frame.
const TAG_LEN: usize = 16;
/// Payload bytes in the longest frame.
const PLAIN_LEN_MAX: usize = CIPHER_LEN_MAX - TAG_LEN;

/// The result of a handshake: keys for both directions, and the number of frames that it has used in each direction.
pub(crate) struct Keys {
    pub(crate) noise: StatelessTransportState,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// The reading half of a stream.
pub(crate) enum ReadHalf {
    Plain(OwnedReadHalf),
    Sealed(Unsealing),
}

/// The writing half of a stream.
pub(crate) enum WriteHalf {
    Plain(OwnedWriteHalf),
    Sealed(Sealing),
}

/// Splits a stream into its halves, sealed by `keys` if there are any.
pub(crate) fn split(stream: TcpStream, keys: Option<Keys>) -> (ReadHalf, WriteHalf) {
    let (read, write) = stream.into_split();
    let Some(Keys { noise, sent, received }) = keys else { return (ReadHalf::Plain(read), WriteHalf::Plain(write)) };
    let noise = Arc::new(noise);
    let unsealing =
        Unsealing { half: read, noise: noise.clone(), count: received, cipher: Vec::new(), plain: Vec::new(), start: 0, end: 0 };
    (ReadHalf::Sealed(unsealing), WriteHalf::Sealed(Sealing { half: write, noise, count: sent, cipher: Vec::new() }))
}

impl ReadHalf {
    /// Reads at least one byte. The end of the stream is an error.
    pub(crate) async fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let half = match self {
            Self::Plain(half) => half,
            Self::Sealed(unsealing) => return unsealing.read(slices).await,
        };
        loop {
            match half.try_read_vectored(slices) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => return Ok(got),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => half.readable().await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Fills the whole buffer.
    pub(crate) async fn read_exact(&mut self, mut out: &mut [u8]) -> io::Result<()> {
        while !out.is_empty() {
            let got = self.read(&mut [IoSliceMut::new(out)]).await?;
            out = &mut out[got..];
        }
        Ok(())
    }
}

impl WriteHalf {
    /// Writes some of the bytes, at least one if there are any. Returns how many.
    pub(crate) async fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(half) => half.write_vectored(slices).await,
            Self::Sealed(sealing) => sealing.write(slices).await,
        }
    }

    /// Writes all bytes.
    pub(crate) async fn write_all(&mut self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        while !slices.is_empty() {
            let written = self.write(slices).await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut slices, written);
        }
        Ok(())
    }

    pub(crate) async fn shutdown(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(half) => half.shutdown().await,
            Self::Sealed(sealing) => sealing.half.shutdown().await,
        }
    }
}

/// The sealed variant of [`ReadHalf`].
pub(crate) struct Unsealing {
    half: OwnedReadHalf,
    noise: Arc<StatelessTransportState>,
    count: u64,
    cipher: Vec<u8>,
    plain: Vec<u8>,
    start: usize,
    end: usize,
}

impl Unsealing {
    async fn read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        while self.start == self.end {
            self.next_frame().await?;
        }
        let mut copied = 0;
        for slice in slices {
            let count = slice.len().min(self.end - self.start);
            slice[..count].copy_from_slice(&self.plain[self.start..self.start + count]);
            self.start += count;
            copied += count;
        }
        Ok(copied)
    }

    async fn next_frame(&mut self) -> io::Result<()> {
        let len = usize::from(self.half.read_u16_le().await?);
        self.cipher.resize(len, 0);
        self.half.read_exact(&mut self.cipher).await?;
        self.plain.resize(PLAIN_LEN_MAX, 0);
        let forged = |_| io::Error::new(io::ErrorKind::InvalidData, "a sealed frame was changed in transit");
        self.end = self.noise.read_message(self.count, &self.cipher, &mut self.plain).map_err(forged)?;
        self.start = 0;
        self.count += 1;
        Ok(())
    }
}

/// The sealed variant of [`WriteHalf`].
pub(crate) struct Sealing {
    half: OwnedWriteHalf,
    noise: Arc<StatelessTransportState>,
    count: u64,
    cipher: Vec<u8>,
}

impl Sealing {
    /// Writes one frame with as many bytes as fit.
    async fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut plain = Vec::with_capacity(slices.iter().map(|slice| slice.len()).sum::<usize>().min(PLAIN_LEN_MAX));
        for slice in slices {
            plain.extend_from_slice(&slice[..slice.len().min(PLAIN_LEN_MAX - plain.len())]);
        }
        self.cipher.resize(2 + plain.len() + TAG_LEN, 0);
        let len = self.noise.write_message(self.count, &plain, &mut self.cipher[2..]).map_err(io::Error::other)?;
        self.cipher[..2].copy_from_slice(&(len as u16).to_le_bytes());
        self.count += 1;
        self.half.write_all(&self.cipher[..2 + len]).await?;
        Ok(plain.len())
    }
}
