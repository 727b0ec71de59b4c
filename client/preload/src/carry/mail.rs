//! What a `vfork` child has made for the program that it becomes, its parent must have too, for both read on from one offset. The
//! child has its parent's memory but not its descriptors: it sends them over a socket that both have.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use dayfly_client::reserved_fd::ReservedFd;
use libc::{c_int, cmsghdr, msghdr};

use crate::next;
use crate::table::{self, Reference};

/// Both ends, once there are any.
static ENDS: AtomicPtr<(ReservedFd, ReservedFd)> = AtomicPtr::new(null_mut());

/// Room for one descriptor, aligned as control data must be.
#[repr(C)]
union Control {
    _align: cmsghdr,
    bytes: [u8; 64],
}

fn ends() -> Option<&'static (ReservedFd, ReservedFd)> {
    let ends = ENDS.load(Ordering::Acquire);
    // SAFETY: published once by `open`, from a box that is never ended.
    (!ends.is_null()).then(|| unsafe { &*ends })
}

/// Makes the socket, in the parent, before there is a child.
pub(crate) fn open() {
    if ends().is_some() {
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
    let made = Box::into_raw(Box::new((receiver, sender)));
    if ENDS.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: made just above, and not published.
        drop(unsafe { Box::from_raw(made) });
    }
}

/// In a forked child: its mail is its own.
pub(crate) fn end() {
    let ends = ENDS.swap(null_mut(), Ordering::AcqRel);
    if !ends.is_null() {
        // SAFETY: made by `open`; of this memory's threads only this one is left.
        drop(unsafe { Box::from_raw(ends) });
    }
}

/// Sends what stands for a description now. Should that fail, each side goes on from an offset of its own.
pub(super) fn send(description: &Reference, file: RawFd) {
    let Some((_, sender)) = ends() else { return };
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
    next::sendmsg(sender.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL);
}

/// Takes what children have sent, in the parent.
pub(crate) fn take() {
    while let Some((word, file)) = receive() {
        if let Some(description) = table::find_word(word) {
            description.offset.adopt(file);
        }
    }
}

fn receive() -> Option<(u64, ReservedFd)> {
    let (receiver, _) = ends()?;
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
