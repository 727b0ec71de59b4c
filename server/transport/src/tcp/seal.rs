//! The two halves of a stream that has shaken hands: plain, or sealed in Noise frames (a length in 16 bits, then what the handshake's
//! keys have encrypted and authenticated, in order).

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

use snow::StatelessTransportState;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Longest frame of Noise.
const CIPHER_LEN_MAX: usize = 65535;
/// Its tag.
const TAG_LEN: usize = 16;
/// Bytes that one frame carries.
const PLAIN_LEN_MAX: usize = CIPHER_LEN_MAX - TAG_LEN;

/// What a handshake leaves: keys both ways, and how many frames each way it has used already.
pub(crate) struct Keys {
    pub(crate) noise: StatelessTransportState,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// The reading half.
pub(crate) enum ReadHalf {
    Plain(OwnedReadHalf),
    Sealed(Unsealing),
}

/// The writing half.
pub(crate) enum WriteHalf {
    Plain(OwnedWriteHalf),
    Sealed(Sealing),
}

/// Parts a stream; `keys` seal it.
pub(crate) fn split(stream: TcpStream, keys: Option<Keys>) -> (ReadHalf, WriteHalf) {
    let (read, write) = stream.into_split();
    let Some(Keys { noise, sent, received }) = keys else { return (ReadHalf::Plain(read), WriteHalf::Plain(write)) };
    let noise = Arc::new(noise);
    let unsealing =
        Unsealing { half: read, noise: noise.clone(), count: received, cipher: Vec::new(), plain: Vec::new(), start: 0, end: 0 };
    (ReadHalf::Sealed(unsealing), WriteHalf::Sealed(Sealing { half: write, noise, count: sent, cipher: Vec::new() }))
}

impl ReadHalf {
    /// At least a byte, or an error where the stream ends.
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

    /// Fills all of it.
    pub(crate) async fn read_exact(&mut self, mut out: &mut [u8]) -> io::Result<()> {
        while !out.is_empty() {
            let got = self.read(&mut [IoSliceMut::new(out)]).await?;
            out = &mut out[got..];
        }
        Ok(())
    }
}

impl WriteHalf {
    /// At least a byte, if there is any; it may be less than all.
    pub(crate) async fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(half) => half.write_vectored(slices).await,
            Self::Sealed(sealing) => sealing.write(slices).await,
        }
    }

    /// All of it.
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

/// See [`ReadHalf`].
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
        let forged = |_| io::Error::new(io::ErrorKind::InvalidData, "a sealed frame was changed on its way");
        self.end = self.noise.read_message(self.count, &self.cipher, &mut self.plain).map_err(forged)?;
        self.start = 0;
        self.count += 1;
        Ok(())
    }
}

/// See [`WriteHalf`].
pub(crate) struct Sealing {
    half: OwnedWriteHalf,
    noise: Arc<StatelessTransportState>,
    count: u64,
    cipher: Vec<u8>,
}

impl Sealing {
    /// One frame of what fits.
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
