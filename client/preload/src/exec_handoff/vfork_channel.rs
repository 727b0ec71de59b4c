//! The channel from a `vfork` child to its parent.
//!
//! A child makes kernel copies for the program that it becomes. Each of them must also become the parent's copy, because both
//! programs continue from one offset. The child has its parent's memory, but not its descriptor table. So the child sends the
//! copy's descriptor over a pair of datagram sockets that both processes have, together with the word that names the description.
//!
//! The parent opens the pair before its first `vfork`, and reads from it after each `vfork`. Neither end ever blocks. If a message
//! cannot be sent, parent and child continue with separate offsets.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use dayfly_client::reserved_fd::ReservedFd;
use libc::{c_int, cmsghdr, msghdr};

use crate::memory::FromC;
use crate::next;
use crate::table::{self, Reference};

struct Channel {
    receiver: ReservedFd,
    sender: ReservedFd,
}

static CHANNEL: AtomicPtr<Channel> = AtomicPtr::new(null_mut());

/// Control data with room for one descriptor, aligned as the kernel expects.
#[repr(C)]
union Control {
    _align: cmsghdr,
    bytes: [u8; 64],
}

fn channel() -> Option<&'static Channel> {
    let channel = CHANNEL.load(Ordering::Acquire);
    // SAFETY: published once by `open`, from a box that only `close` frees, in a new process with one thread.
    (!channel.is_null()).then(|| unsafe { &*channel })
}

/// Opens the channel in the parent, before there is a child. Does nothing if it is open.
pub(crate) fn open() {
    if channel().is_some() {
        return;
    }
    let mut pair: [RawFd; 2] = [-1; 2];
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: there is room for two numbers.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) } != 0 {
        return;
    }
    // SAFETY: the kernel has just made both for us.
    let [receiver, sender] = pair.map(|end| ReservedFd::new(File::from(unsafe { OwnedFd::from_raw_fd(end) })));
    let made = Box::into_raw(Box::new(Channel { receiver, sender }));
    if CHANNEL.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: created just above and not published.
        drop(unsafe { Box::from_raw(made) });
    }
}

/// Closes the channel in a forked child, which must not read its parent's messages.
pub(crate) fn close() {
    let channel = CHANNEL.swap(null_mut(), Ordering::AcqRel);
    if !channel.is_null() {
        // SAFETY: made by `open`; this is the only thread in a new process, so nobody uses it.
        drop(unsafe { Box::from_raw(channel) });
    }
}

/// Sends the kernel copy of a description to the parent.
pub(super) fn send(description: &Reference, file: RawFd) {
    let Some(sender) = channel().and_then(|channel| channel.sender.get().ok()) else { return };
    let word = description.word().to_ne_bytes();
    let mut part = [IoSlice::new(&word)];
    let mut control = Control { bytes: [0; 64] };
    let mut message = message(part.as_mut_ptr().cast(), &mut control);
    // SAFETY: the control data has room for one header and one descriptor, and is aligned for it.
    unsafe {
        message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(file);
    }
    // SAFETY: the message describes a live buffer and live control data.
    next::sendmsg(sender.as_raw_fd(), unsafe { FromC::new(&raw const message) }, libc::MSG_NOSIGNAL);
}

/// In the parent, receives everything that children have sent.
pub(crate) fn receive_all() {
    while let Some((word, copy)) = receive() {
        if let Some(description) = table::find_word(word) {
            description.offset.adopt(copy);
        }
    }
}

fn receive() -> Option<(u64, ReservedFd)> {
    let receiver = channel()?.receiver.get().ok()?;
    let mut word = [0; 8];
    let mut part = [IoSliceMut::new(&mut word)];
    let mut control = Control { bytes: [0; 64] };
    let mut message = message(part.as_mut_ptr().cast(), &mut control);
    // SAFETY: the message describes a live buffer and live control data.
    let count = unsafe { libc::recvmsg(receiver.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC as c_int) };
    if count != 8 {
        return None;
    }
    // SAFETY: the kernel has filled in the control data; the descriptor in it is new and ours.
    let file = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return None;
        }
        File::from(OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
    };
    Some((u64::from_ne_bytes(word), ReservedFd::new(file)))
}

fn message(part: *mut libc::iovec, control: &mut Control) -> msghdr {
    msghdr {
        msg_name: null_mut(),
        msg_namelen: 0,
        msg_iov: part,
        msg_iovlen: 1,
        msg_control: (&raw mut *control).cast(),
        msg_controllen: size_of::<Control>(),
        msg_flags: 0,
    }
}
