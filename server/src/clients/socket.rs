//! Messages on a Unix socket, along with descriptors. Receiving and sending are separate, so that
//! the server can read from a client while it sends to that client: if both sides only sent, both
//! would wait forever.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::wire::encode;
use dayfly_meta::wire::frame::{LOCAL_HEADER_LEN, decode_local, encode_local};
use dayfly_meta::wire::local::FromServer;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Bytes to read with one call. Nearly all requests fit.
const BUFFER_LEN: usize = 16 << 10;

/// Receives a client's messages.
pub(super) struct Receiver {
    stream: Arc<UnixStream>,
    /// Bytes that have been read but not decoded yet.
    buffer: Vec<u8>,
}

/// Sends messages to a client.
pub(super) struct Sender {
    stream: Arc<UnixStream>,
    /// A client that needs longer than this to take a message is stuck or stopped.
    patience: Duration,
}

/// Splits a connection into its two directions.
pub(super) fn split(stream: UnixStream, patience: Duration) -> (Receiver, Sender) {
    let stream = Arc::new(stream);
    (Receiver { stream: stream.clone(), buffer: Vec::with_capacity(BUFFER_LEN) }, Sender { stream, patience })
}

impl Receiver {
    /// Returns the next message, or `None` at the end. Dropping the future loses nothing.
    pub(super) async fn receive(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some((&header, rest)) = self.buffer.split_first_chunk::<LOCAL_HEADER_LEN>() {
                let len = decode_local(header).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                if let Some(message) = rest.get(..len) {
                    let message = message.to_vec();
                    self.buffer.drain(..LOCAL_HEADER_LEN + len);
                    return Ok(Some(message));
                }
                self.buffer.reserve(LOCAL_HEADER_LEN + len - self.buffer.len());
            } else {
                self.buffer.reserve(BUFFER_LEN);
            }
            self.stream.readable().await?;
            match self.stream.try_read_buf(&mut self.buffer) {
                Ok(0) if self.buffer.is_empty() => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                // The readiness may be left over from the previous message; only a read shows whether there are bytes.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Sender {
    /// Sends a message. The descriptors travel with its first byte. Fails if the client does not take the message in time.
    pub(super) async fn send(&self, message: &FromServer, files: &[&File]) -> io::Result<()> {
        let send = self.send_patiently(message, files);
        timeout(self.patience, send).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Like [`Self::send`], but waits as long as it takes. The caller must ensure that, until then,
    /// the client holds nothing that others need.
    pub(super) async fn send_patiently(&self, message: &FromServer, files: &[&File]) -> io::Result<()> {
        let message = encode(message);
        let header = encode_local(message.len()).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let bytes = [&header[..], &message].concat();
        let descriptors: Vec<RawFd> = files.iter().map(|file| file.as_raw_fd()).collect();
        let mut sent = 0;
        while sent < bytes.len() {
            let rights = [ControlMessage::ScmRights(&descriptors)];
            let control = if sent > 0 || descriptors.is_empty() { &[][..] } else { &rights[..] };
            let send = || {
                let slices = [IoSlice::new(&bytes[sent..])];
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                sendmsg::<()>(self.stream.as_raw_fd(), &slices, control, flags, None).map_err(io::Error::from)
            };
            sent += self.stream.async_io(Interest::WRITABLE, send).await?;
        }
        Ok(())
    }
}
