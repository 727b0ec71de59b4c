//! Messages on a Unix socket, with descriptors beside them.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use dayfly_meta::wire::encode;
use dayfly_meta::wire::frame::{LOCAL_HEADER_LEN, decode_local, encode_local};
use dayfly_meta::wire::local::FromServer;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Read with one call: nearly all requests fit.
const BUFFER_LEN: usize = 16 << 10;

pub(super) struct Socket {
    stream: tokio::sync::Mutex<UnixStream>,
    /// What was read and not looked at yet.
    buffer: Vec<u8>,
    /// A client that takes no bytes for so long is stuck or stopped; its leases must not be.
    patience: Duration,
}

impl Socket {
    pub(super) fn new(stream: UnixStream, patience: Duration) -> Self {
        Self { stream: tokio::sync::Mutex::new(stream), buffer: Vec::with_capacity(BUFFER_LEN), patience }
    }

    /// The next message; `None` at the end.
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
            if self.stream.get_mut().read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
        }
    }

    /// Sends a message; the descriptors travel with its first byte.
    pub(super) async fn send(&self, message: &FromServer, files: &[&File]) -> io::Result<()> {
        let message = encode(message);
        let header = encode_local(message.len()).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let bytes = [&header[..], &message].concat();
        let descriptors: Vec<RawFd> = files.iter().map(|file| file.as_raw_fd()).collect();
        let mut stream = self.stream.lock().await;
        let send = async {
            let rights = [ControlMessage::ScmRights(&descriptors)];
            let control = if descriptors.is_empty() { &[][..] } else { &rights[..] };
            let first = |stream: &UnixStream| {
                let sent = sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(&bytes)], control, MsgFlags::MSG_NOSIGNAL, None);
                sent.map_err(io::Error::from)
            };
            let sent = stream.async_io(Interest::WRITABLE, || first(&stream)).await?;
            stream.write_all(&bytes[sent..]).await
        };
        timeout(self.patience, send).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    /// Waits until the client is gone (or says something out of turn, which is as good).
    pub(super) async fn gone(&self) {
        let stream = self.stream.lock().await;
        loop {
            let mut byte = [0];
            // Readiness may be left over from the message before; only a read tells.
            let read = match stream.readable().await {
                Ok(()) => stream.try_read(&mut byte),
                Err(error) => Err(error),
            };
            if !matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
                return;
            }
        }
    }
}
