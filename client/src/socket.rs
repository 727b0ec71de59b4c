//! Messages to and from the node's server, with descriptors beside them.

use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::DRIVES_MAX;
use dayfly_meta::wire::frame::{LOCAL_HEADER_LEN, decode_local, encode_local};
use dayfly_meta::wire::local::{FromClient, FromServer};
use dayfly_meta::wire::{decode, encode};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, connect, recvmsg, send, setsockopt,
    shutdown, socket, sockopt,
};
use nix::sys::time::TimeVal;

use crate::ClientError;
use crate::kept::Kept;

/// Descriptors beside one message: a catalog, locations, and a segment a drive.
const DESCRIPTORS_MAX: usize = 2 + DRIVES_MAX;

/// A connection to the server.
pub(crate) struct Socket {
    stream: Kept,
    /// The process's place in the counters, while this lives.
    slot: u32,
    /// How long the server is waited for.
    patience: Duration,
    /// The process that made it.
    home: u32,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // A forked child may have it open; in it, closing its copy must not end ours.
        if self.home == std::process::id() {
            // Closed by the server already, perhaps.
            let _ = shutdown(self.stream.as_raw_fd(), Shutdown::Both);
        }
    }
}

impl Socket {
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        // By hand, for `UnixStream::connect` waits without a deadline while a stopped server's backlog is full.
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        let patience = Deadlines::DEFAULT.server;
        set_timeouts(&socket, patience)?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?).map_err(|error| late(error.into(), patience))?;
        // As a file, which a stream socket can be read and written as.
        Ok(Self { stream: Kept::new(File::from(socket)), slot: 0, patience, home: std::process::id() })
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn set_slot(&mut self, slot: u32) {
        self.slot = slot;
    }

    /// Waits as long as the server says from now on.
    pub(crate) fn set_patience(&mut self, patience: Duration) -> io::Result<()> {
        self.patience = patience;
        set_timeouts(&*self.stream, patience)
    }

    pub(crate) fn send(&mut self, message: &FromClient) -> Result<(), ClientError> {
        let message = encode(message);
        let header = encode_local(message.len()).map_err(|_| ClientError::Protocol("a request is too long"))?;
        let bytes = [&header[..], &message].concat();
        let mut sent = 0;
        while sent < bytes.len() {
            // Not `write`: a server that has gone must not end the program by SIGPIPE.
            match send(self.stream.as_raw_fd(), &bytes[sent..], MsgFlags::MSG_NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(late(error.into(), self.patience).into()),
            }
        }
        Ok(())
    }

    /// The next message, with what came beside it.
    pub(crate) fn receive(&mut self) -> Result<(FromServer, Vec<File>), ClientError> {
        let mut header = [0; LOCAL_HEADER_LEN];
        let (got, files) = self.receive_first(&mut header).map_err(|error| late(error, self.patience))?;
        if got == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection").into());
        }
        (&*self.stream).read_exact(&mut header[got..]).map_err(|error| late(error, self.patience))?;
        let len = decode_local(header).map_err(|_| ClientError::Protocol("a message is too long"))?;
        let mut message = vec![0; len];
        (&*self.stream).read_exact(&mut message).map_err(|error| late(error, self.patience))?;
        let message = decode(&message).map_err(|_| ClientError::Protocol("not a message of this version"))?;
        Ok((message, files))
    }

    fn receive_first(&mut self, header: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
        let mut space = nix::cmsg_space!([i32; DESCRIPTORS_MAX]);
        let mut slices = [IoSliceMut::new(header)];
        loop {
            let received = recvmsg::<()>(self.stream.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC);
            let received = match received {
                Err(Errno::EINTR) => continue,
                received => received?,
            };
            let mut files = Vec::new();
            for control in received.cmsgs()? {
                if let ControlMessageOwned::ScmRights(descriptors) = control {
                    // SAFETY: the kernel has just made these descriptors for us; nobody else owns them.
                    files.extend(
                        descriptors.into_iter().map(|descriptor| unsafe { File::from(OwnedFd::from_raw_fd(descriptor)) }),
                    );
                }
            }
            return Ok((received.bytes, files));
        }
    }
}

fn set_timeouts(socket: &impl AsFd, patience: Duration) -> io::Result<()> {
    let timeout = TimeVal::new(patience.as_secs() as i64, i64::from(patience.subsec_micros()));
    setsockopt(socket, sockopt::SendTimeout, &timeout)?;
    Ok(setsockopt(socket, sockopt::ReceiveTimeout, &timeout)?)
}

fn late(error: io::Error, patience: Duration) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, format!("nothing came for {} s", patience.as_secs_f64()))
        }
        _ => error,
    }
}
