//! Messages to and from the node's server, with descriptors beside them. Every wait is cut into ticks: at each it is seen whether the
//! server goes on, and they are what its deadline is counted in, so that a process which was stopped itself finds nothing run out.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dayfly_meta::limits::DRIVES_MAX;
use dayfly_meta::wire::frame::{LOCAL_HEADER_LEN, decode_local, encode_local};
use dayfly_meta::wire::local::{FromClient, FromServer};
use dayfly_meta::wire::{decode, encode};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, connect, recv, recvmsg, send,
    setsockopt, shutdown, socket, sockopt,
};
use nix::sys::time::TimeVal;

use crate::ClientError;
use crate::heartbeat::{Heartbeat, Patience};
use crate::reserved_fd::ReservedFd;

/// Descriptors beside one message: a catalog, locations, and a segment a drive.
const DESCRIPTORS_MAX: usize = 2 + DRIVES_MAX;

/// A connection to the server.
pub(crate) struct Socket {
    stream: ReservedFd,
    /// The process's place in the counters, while this lives.
    slot: u32,
    /// The connection's number, by which the status page tells of its leases.
    number: u32,
    /// Not known before the server has welcomed this process.
    heartbeat: Option<Arc<Heartbeat>>,
    patience: Patience,
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
        let patience = heartbeat.as_ref().map(|heartbeat| heartbeat.patience()).unwrap_or_default();
        set_tick(&socket, patience.tick())?;
        let address = UnixAddr::new(path)?;
        wait(patience, heartbeat.as_deref(), || connect(socket.as_raw_fd(), &address))?;
        // As a file, which a stream socket can be read and written as.
        Ok(Self {
            stream: ReservedFd::new(File::from(socket)),
            slot: 0,
            number: 0,
            heartbeat,
            patience,
            home: std::process::id(),
        })
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// What the server has said of this connection.
    pub(crate) fn welcome(&mut self, slot: u32, number: u32, patience: Patience) -> io::Result<()> {
        (self.slot, self.number, self.patience) = (slot, number, patience);
        set_tick(&*self.stream, patience.tick())
    }

    pub(crate) fn patience(&self) -> Patience {
        self.patience
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
            sent += wait(self.patience, self.heartbeat.as_deref(), send)?;
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
            let got =
                wait(self.patience, self.heartbeat.as_deref(), || recv(self.stream.as_raw_fd(), buffer, MsgFlags::empty()))?;
            if got == 0 {
                return Err(closed());
            }
            buffer = &mut buffer[got..];
        }
        Ok(())
    }

    fn receive_first(&mut self, header: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
        let mut space = nix::cmsg_space!([i32; DESCRIPTORS_MAX]);
        wait(self.patience, self.heartbeat.as_deref(), || {
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

/// From here on a call that waits returns at each tick.
fn set_tick(socket: &impl AsFd, tick: Duration) -> io::Result<()> {
    let tick = TimeVal::new(tick.as_secs() as i64, i64::from(tick.subsec_micros()));
    setsockopt(socket, sockopt::SendTimeout, &tick)?;
    Ok(setsockopt(socket, sockopt::ReceiveTimeout, &tick)?)
}

/// Makes such a call until it has done something.
fn wait<T>(patience: Patience, heartbeat: Option<&Heartbeat>, mut call: impl FnMut() -> nix::Result<T>) -> io::Result<T> {
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
        // A program that is interrupted all the time has its ticks, too.
        if tick_began.elapsed() < patience.shortest_tick() {
            continue;
        }
        tick_began = Instant::now();
        ticks += 1;
        if let Some(heartbeat) = heartbeat {
            heartbeat.tick()?;
        }
        if patience.tick() * ticks >= patience.server {
            let message = format!("nothing came for {} s", patience.server.as_secs_f64());
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
    }
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")
}
