//! Messages to and from the node's server, with descriptors beside them. Every wait is cut into ticks: at each it is seen whether the
//! server goes on, and they are what its deadline is counted in, so that a process which was stopped itself finds nothing run out.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use dayfly_meta::limits::{CLIENT_TICK, DRIVES_MAX, SERVER_TIMEOUT};
use dayfly_meta::wire::frame::{LOCAL_HEADER_LEN, decode_local, encode_local};
use dayfly_meta::wire::local::{FromClient, FromServer};
use dayfly_meta::wire::{decode, encode};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, connect, recv, recvmsg, send,
    setsockopt, shutdown, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::ClientError;
use crate::heartbeat::Heartbeat;
use crate::kept::Kept;

/// Descriptors beside one message: a catalog, locations, and a segment a drive.
const DESCRIPTORS_MAX: usize = 2 + DRIVES_MAX;
/// A wait of so many ticks is too long.
const TICKS_MAX: u128 = SERVER_TIMEOUT.as_millis() / CLIENT_TICK.as_millis();

/// A connection to the server.
pub(crate) struct Socket {
    stream: Kept,
    /// The process's place in the counters, while this lives.
    slot: u32,
    /// The connection's number, by which the board tells of its leases.
    number: u32,
    /// Not known before the server has welcomed this process.
    heartbeat: Option<Arc<Heartbeat>>,
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
    pub(crate) fn connect(path: &Path, heartbeat: Option<Arc<Heartbeat>>) -> io::Result<Self> {
        // By hand, for `UnixStream::connect` waits without a deadline while a stopped server's backlog is full.
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        // A call that waits returns at each tick.
        let tick = TimeVal::milliseconds(CLIENT_TICK.as_millis() as i64);
        setsockopt(&socket, sockopt::SendTimeout, &tick)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &tick)?;
        let address = UnixAddr::new(path)?;
        wait(heartbeat.as_deref(), || connect(socket.as_raw_fd(), &address))?;
        // As a file, which a stream socket can be read and written as.
        Ok(Self { stream: Kept::new(File::from(socket)), slot: 0, number: 0, heartbeat, home: std::process::id() })
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// What the server has said of this connection.
    pub(crate) fn welcome(&mut self, slot: u32, number: u32) {
        (self.slot, self.number) = (slot, number);
    }

    /// From here on no wait outlasts the server's heartbeat.
    pub(crate) fn watch(&mut self, heartbeat: Arc<Heartbeat>) {
        self.heartbeat = Some(heartbeat);
    }

    pub(crate) fn send(&mut self, message: &FromClient) -> Result<(), ClientError> {
        let message = encode(message);
        let header = encode_local(message.len()).map_err(|_| ClientError::Protocol("a request is too long"))?;
        let bytes = [&header[..], &message].concat();
        let mut sent = 0;
        while sent < bytes.len() {
            // Not `write`: a server that has gone must not end the program by SIGPIPE.
            let send = || send(self.stream.as_raw_fd(), &bytes[sent..], MsgFlags::MSG_NOSIGNAL);
            sent += wait(self.heartbeat.as_deref(), send)?;
        }
        Ok(())
    }

    /// The next message, with what came beside it.
    pub(crate) fn receive(&mut self) -> Result<(FromServer, Vec<File>), ClientError> {
        let mut header = [0; LOCAL_HEADER_LEN];
        let (got, files) = self.receive_first(&mut header)?;
        if got == 0 {
            return Err(closed().into());
        }
        self.fill(&mut header[got..])?;
        let len = decode_local(header).map_err(|_| ClientError::Protocol("a message is too long"))?;
        let mut message = vec![0; len];
        self.fill(&mut message)?;
        let message = decode(&message).map_err(|_| ClientError::Protocol("not a message of this version"))?;
        Ok((message, files))
    }

    fn fill(&self, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            let got = wait(self.heartbeat.as_deref(), || recv(self.stream.as_raw_fd(), buffer, MsgFlags::empty()))?;
            if got == 0 {
                return Err(closed());
            }
            buffer = &mut buffer[got..];
        }
        Ok(())
    }

    fn receive_first(&mut self, header: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
        let mut space = nix::cmsg_space!([i32; DESCRIPTORS_MAX]);
        wait(self.heartbeat.as_deref(), || {
            let mut slices = [IoSliceMut::new(header)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let received = recvmsg::<()>(self.stream.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
            let mut files = Vec::new();
            for control in received.cmsgs()? {
                if let ControlMessageOwned::ScmRights(descriptors) = control {
                    // SAFETY: the kernel has just made these descriptors for us; nobody else owns them.
                    files.extend(
                        descriptors.into_iter().map(|descriptor| unsafe { File::from(OwnedFd::from_raw_fd(descriptor)) }),
                    );
                }
            }
            Ok((received.bytes, files))
        })
    }
}

/// Makes a call that returns at each tick until it has done something.
fn wait<T>(heartbeat: Option<&Heartbeat>, mut call: impl FnMut() -> nix::Result<T>) -> io::Result<T> {
    if let Some(heartbeat) = heartbeat {
        heartbeat.check()?;
    }
    let mut ticks = 0;
    let mut tick_began = Instant::now();
    loop {
        match call() {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            done => return Ok(done?),
        }
        // A program that is interrupted all the time has its ticks, too. The kernel's clock is coarser than this one.
        if tick_began.elapsed() < CLIENT_TICK * 9 / 10 {
            continue;
        }
        tick_began = Instant::now();
        ticks += 1;
        if let Some(heartbeat) = heartbeat {
            heartbeat.tick()?;
        }
        if ticks >= TICKS_MAX {
            let message = format!("nothing came for {} s", SERVER_TIMEOUT.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")
}
