//! Sends messages to the node's server, and receives its messages with the descriptors that they carry.
//!
//! Every wait is divided into polls. At each poll the client checks the server's heartbeat.
//! Deadlines are counted in polls, so a process that was stopped does not find its deadlines
//! expired when it continues.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dayfly_meta::limits::{DRIVES_MAX, HEARTBEAT_POLLS};
use dayfly_meta::wire::frame::{LOCAL_HEADER_LEN, decode_local, encode_local};
use dayfly_meta::wire::local::{FromClient, FromServer};
use dayfly_meta::wire::{decode, encode};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, connect, recv, send, setsockopt, shutdown, socket, sockopt,
};
use nix::sys::time::TimeVal;

use crate::heartbeat::{Heartbeat, Patience, Timeouts};
use crate::reserved_fd::ReservedFd;
use crate::{ClientError, cancellation, interruption, notice};

/// The maximum number of descriptors that one message carries: a catalog, locations, and one segment for
/// each drive.
const DESCRIPTORS_MAX: usize = 2 + DRIVES_MAX;
/// Length of the control data of a message with so many descriptors.
// SAFETY: only computes a number.
const CONTROL_LEN: usize = unsafe { libc::CMSG_SPACE((DESCRIPTORS_MAX * size_of::<RawFd>()) as u32) } as usize;

/// A connection to the server.
pub(crate) struct Socket {
    stream: ReservedFd,
    /// The process's slot in the counters, for as long as the connection is open.
    slot: u32,
    /// The connection's number, which selects its word on the status page.
    number: u32,
    /// `None` until the server has welcomed this process.
    heartbeat: Option<Arc<Heartbeat>>,
    timeouts: Timeouts,
    /// Whether a part of a message has arrived, and nobody waits for the rest.
    is_midway: bool,
    /// The process that opened the connection.
    process: u32,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // A forked child may have a copy of the descriptor. Closing the copy must not shut the
        // parent's connection down.
        if self.process == std::process::id()
            && let Ok(stream) = self.stream.get()
        {
            // Fails if the server has closed the connection already, which is fine.
            let _ = shutdown(stream.as_raw_fd(), Shutdown::Both);
        }
    }
}

impl Socket {
    /// Connects to a server. Without a heartbeat, `patience` says how long this waits for each answer of a server that stands still.
    pub(crate) fn connect(path: &Path, heartbeat: Option<Arc<Heartbeat>>, patience: Patience) -> io::Result<Self> {
        // Does not use `UnixStream::connect`, which waits without a deadline while the backlog of a
        // stopped server is full.
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        let timeouts = heartbeat.as_ref().map_or_else(|| patience.before_welcome(), |heartbeat| heartbeat.timeouts());
        set_poll_interval(&socket, timeouts.poll_interval())?;
        let address = UnixAddr::new(path)?;
        wait(timeouts, heartbeat.as_deref(), &cancellation::has_arrived, || connect(socket.as_raw_fd(), &address))?;
        // Stored as a file, because a stream socket can be read and written as one.
        Ok(Self {
            stream: ReservedFd::new(File::from(socket)),
            slot: 0,
            number: 0,
            heartbeat,
            timeouts,
            is_midway: false,
            process: std::process::id(),
        })
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Records the server's settings for this connection.
    pub(crate) fn welcome(&mut self, slot: u32, number: u32, timeouts: Timeouts) -> io::Result<()> {
        (self.slot, self.number, self.timeouts) = (slot, number, timeouts);
        set_poll_interval(&*self.stream.get()?, timeouts.poll_interval())
    }

    pub(crate) fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    /// Sets how long this connection waits for a server that stands still.
    pub(crate) fn set_patience(&mut self, patience: Patience) {
        if let Some(heartbeat) = &self.heartbeat {
            self.timeouts = patience.of(heartbeat.timeouts());
        }
    }

    /// Returns whether a wait ended within a message, so that nothing else can be received.
    pub(crate) fn is_midway(&self) -> bool {
        self.is_midway
    }

    /// Returns whether the connection's descriptor is still there. A program can close it by a system call of its own.
    pub(crate) fn is_intact(&self) -> bool {
        self.stream.is_intact()
    }

    /// Makes all later waits end if the server's heartbeat stands still for too long.
    pub(crate) fn watch(&mut self, heartbeat: Arc<Heartbeat>) {
        self.heartbeat = Some(heartbeat);
    }

    pub(crate) fn send(&mut self, message: &FromClient) -> Result<(), ClientError> {
        let message = encode(message);
        let header = encode_local(message.len()).map_err(|_| ClientError::Protocol("a request is too long"))?;
        let bytes = [&header[..], &message].concat();
        let mut sent = 0;
        let stream = self.stream.get()?;
        while sent < bytes.len() {
            // Does not use `write`, because SIGPIPE must not end the program if the server is gone.
            let send = || send(stream.as_raw_fd(), &bytes[sent..], MsgFlags::MSG_NOSIGNAL);
            sent += wait(self.timeouts, self.heartbeat.as_deref(), &never, send)?;
        }
        Ok(())
    }

    /// Receives the next message, with the files that came with it.
    pub(crate) fn receive(&mut self) -> Result<(FromServer, Vec<File>), ClientError> {
        let mut header = [0; LOCAL_HEADER_LEN];
        let (got, files) = self.receive_first(&mut header)?;
        if got == 0 {
            return Err(closed().into());
        }
        self.is_midway = true;
        self.fill(&mut header[got..])?;
        let len = decode_local(header).map_err(|_| ClientError::Protocol("a message is too long"))?;
        let mut message = vec![0; len];
        self.fill(&mut message)?;
        self.is_midway = false;
        let message = decode(&message).map_err(|_| ClientError::Protocol("not a message of this version"))?;
        Ok((message, files))
    }

    fn fill(&self, mut buffer: &mut [u8]) -> io::Result<()> {
        let stream = self.stream.get()?;
        while !buffer.is_empty() {
            let receive = || recv(stream.as_raw_fd(), buffer, MsgFlags::empty());
            let got = wait(self.timeouts, self.heartbeat.as_deref(), &never, receive)?;
            if got == 0 {
                return Err(closed());
            }
            buffer = &mut buffer[got..];
        }
        Ok(())
    }

    fn receive_first(&mut self, header: &mut [u8]) -> io::Result<(usize, Vec<File>)> {
        let stream = self.stream.get()?;
        wait(self.timeouts, self.heartbeat.as_deref(), &cancellation::has_arrived, || receive_with_files(&stream, header))
    }
}

/// Receives bytes, and the files that come with them.
///
/// # Errors
///
/// The error of the system call. EMFILE if this process has no numbers for all of the files; those that it got are closed.
fn receive_with_files(stream: &File, bytes: &mut [u8]) -> nix::Result<(usize, Vec<File>)> {
    // Words, because headers in the control data are aligned like words.
    let mut control = [0_u64; CONTROL_LEN.div_ceil(size_of::<u64>())];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: a header without name and data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
    // SAFETY: the header refers to live buffers of the lengths that it says.
    let received = Errno::result(unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) })?;
    let mut files = Vec::new();
    // SAFETY: the kernel has filled in the header and the control data, in which the macros stay. Each descriptor in the data is one
    // that the kernel has just made for this process; nothing else owns it.
    unsafe {
        let mut at: *const libc::cmsghdr = libc::CMSG_FIRSTHDR(&raw const header);
        while let Some(message) = at.as_ref() {
            if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let first = libc::CMSG_DATA(at).cast::<RawFd>();
                let len = message.cmsg_len - libc::CMSG_LEN(0) as usize;
                let numbers = (0..len / size_of::<RawFd>()).map(|number| first.add(number).read_unaligned());
                files.extend(numbers.map(|number| File::from(OwnedFd::from_raw_fd(number))));
            }
            at = libc::CMSG_NXTHDR(&raw const header, at);
        }
    }
    match header.msg_flags & libc::MSG_CTRUNC {
        0 => Ok((received as usize, files)),
        // There is room for all of a message's descriptors, so the numbers were too few.
        _ => Err(Errno::EMFILE),
    }
}

/// Makes each system call that waits on the socket return after one poll interval.
fn set_poll_interval(socket: &impl AsFd, interval: Duration) -> io::Result<()> {
    let interval = TimeVal::new(interval.as_secs() as i64, i64::from(interval.subsec_micros()));
    setsockopt(socket, sockopt::SendTimeout, &interval)?;
    Ok(setsockopt(socket, sockopt::ReceiveTimeout, &interval)?)
}

/// Repeats a system call that waits on the socket until it succeeds or fails, or a deadline
/// expires. After a while, `is_signaled` may end the wait; it is given the number of polls so far.
fn wait<T>(
    timeouts: Timeouts,
    heartbeat: Option<&Heartbeat>,
    is_signaled: &dyn Fn(u32) -> bool,
    mut call: impl FnMut() -> nix::Result<T>,
) -> io::Result<T> {
    if let Some(heartbeat) = heartbeat {
        heartbeat.check(timeouts)?;
    }
    // Polls in which the server had to answer. One that has not yet welcomed this process has no heartbeat.
    let mut polls = if heartbeat.is_some() { 0 } else { cancellation::polls_before() };
    let mut polls_here = 0;
    let mut poll_began = Instant::now();
    loop {
        match call() {
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            done => return Ok(done?),
        }
        if interruption::is_requested() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        // Polls must be counted even if signals interrupt the program all the time.
        if poll_began.elapsed() < timeouts.shortest_poll_interval() {
            continue;
        }
        poll_began = Instant::now();
        polls_here += 1;
        match heartbeat {
            Some(heartbeat) => polls += u32::from(heartbeat.record_poll(timeouts)?),
            None => {
                polls += 1;
                if polls == HEARTBEAT_POLLS && timeouts.server > timeouts.heartbeat {
                    notice::show(&timeouts.waits(timeouts.server));
                }
            }
        }
        if timeouts.poll_interval() * polls >= timeouts.server {
            let message = format!("no answer for {} s", timeouts.server.as_secs_f64());
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        if is_signaled(polls_here) {
            if heartbeat.is_none() {
                cancellation::keep_polls(polls);
            }
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
}

fn never(_: u32) -> bool {
    false
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")
}
