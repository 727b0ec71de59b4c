//! Messages that carry descriptors. A descriptor of ours that goes to another process is replaced by a kernel copy.
//!
//! The kernel copies are put into a copy of the message's control data. The program's own control data may be in memory that cannot
//! be written, and another thread may be sending the same data.

use std::ffi::{c_int, c_uint};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use dayfly_client::cancellation;
use dayfly_client::reserved_fd::is_hidden;
use libc::{cmsghdr, mmsghdr, msghdr};

use super::hook;
use crate::attach::known_view;
use crate::fault::Fault;
use crate::memory::{Errno, FromC, fail};
use crate::{exec_handoff, pages, table};

/// No kernel takes more control data with a message.
const CONTROL_LEN_MAX: usize = 1 << 20;

hook! {
    fn sendmsg(socket, message, flags) {
        let Some(mut header) = message.get().filter(has_control) else { return sendmsg::next(socket, message, flags) };
        match Control::of(&header) {
            Ok(None) => sendmsg::next(socket, message, flags),
            Ok(Some(mut control)) => {
                control.put_in(&mut header);
                // SAFETY: a live header, which refers to live control data; all else that it refers to is the same as in the
                // program's header.
                sendmsg::next(socket, unsafe { FromC::new(&raw const header) }, flags)
            }
            Err(errno) => fail(errno),
        }
    }

    fn sendmmsg(socket: c_int, messages: FromC<*mut mmsghdr>, count: c_uint, flags: c_int) -> c_int {
        if !any_passes_ours(messages, count) {
            return sendmmsg::next(socket, messages, count, flags);
        }
        let count = at_most(count);
        let copies = messages.check_writable(count).and_then(|()| Ok(messages.as_const().values(count)?.collect::<Vec<_>>()));
        let mut copies: Vec<mmsghdr> = match copies {
            Ok(copies) => copies,
            Err(errno) => return fail(errno),
        };
        let mut controls = Vec::new();
        for copy in copies.iter_mut().filter(|copy| has_control(&copy.msg_hdr)) {
            match Control::of(&copy.msg_hdr) {
                Ok(None) => {}
                Ok(Some(mut control)) => {
                    control.put_in(&mut copy.msg_hdr);
                    controls.push(control);
                }
                Err(errno) => return fail(errno),
            }
        }
        // SAFETY: live messages, as in `sendmsg`.
        let sent = sendmmsg::next(socket, unsafe { FromC::new(copies.as_mut_ptr()) }, count as c_uint, flags);
        for (at, copy) in copies.iter().enumerate().take(usize::try_from(sent).unwrap_or(0)) {
            let Some(original) = messages.at(at).get() else { break };
            // Fails only if the program has unmapped the messages in the meantime.
            let _ = messages.at(at).put(mmsghdr { msg_len: copy.msg_len, ..original });
        }
        sent
    }
}

/// Linux sends at most this many messages.
fn at_most(count: c_uint) -> usize {
    count.min(libc::UIO_MAXIOV as c_uint) as usize
}

/// Returns whether a message has control data that can be read, and no more than the kernel takes. The kernel fails for the rest.
fn has_control(header: &msghdr) -> bool {
    !header.msg_control.is_null()
        && header.msg_controllen <= CONTROL_LEN_MAX
        && pages::is_readable(header.msg_control as usize, header.msg_controllen)
}

/// Returns whether a message passes descriptors of ours, or reserved ones, which look closed.
pub(super) fn passes_ours(message: FromC<*const msghdr>) -> bool {
    message.get().filter(has_control).is_some_and(|header| passed(&header, &copied(&header)).any(concerns_us))
}

/// Like [`passes_ours`], for several messages.
pub(super) fn any_passes_ours(messages: FromC<*mut mmsghdr>, count: c_uint) -> bool {
    let headers = messages.as_const().values(if known_view().is_some() { at_most(count) } else { 0 });
    // The kernel fails for an array that cannot be read.
    let mut headers = headers.into_iter().flatten().map(|message| message.msg_hdr).filter(has_control);
    headers.any(|header| passed(&header, &copied(&header)).any(concerns_us))
}

fn concerns_us(number: RawFd) -> bool {
    table::is_ours(number) || is_hidden(number)
}

/// Copies a message's control data to memory in which its headers are aligned. `has_control` has found that the data can be read.
fn copied(header: &msghdr) -> Vec<u64> {
    let mut words = vec![0_u64; header.msg_controllen.div_ceil(size_of::<u64>())];
    // SAFETY: readable, and the vector has room for as many bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(header.msg_control.cast::<u8>(), words.as_mut_ptr().cast(), header.msg_controllen);
    }
    words
}

/// Returns the descriptors that a message passes; `control` is a copy of its control data.
fn passed(header: &msghdr, control: &[u64]) -> impl Iterator<Item = RawFd> {
    // SAFETY: the places lie within the control data.
    places(header, control.as_ptr().cast_mut()).into_iter().map(|place| unsafe { place.read_unaligned() })
}

/// Returns the places in a copy of a message's control data that hold descriptors.
fn places(header: &msghdr, control: *mut u64) -> Vec<*mut RawFd> {
    let mut places = Vec::new();
    // SAFETY: the macros follow no other pointer of the header than this one, which leads to as many bytes as the header says, and
    // they stay within these bytes. If the program has put a greater length into the data, it is cut off at the end.
    unsafe {
        let header = msghdr { msg_control: control.cast(), ..*header };
        let end = control.addr() + header.msg_controllen;
        let mut at: *mut cmsghdr = libc::CMSG_FIRSTHDR(&raw const header);
        while !at.is_null() {
            if (*at).cmsg_level == libc::SOL_SOCKET && (*at).cmsg_type == libc::SCM_RIGHTS {
                let first = libc::CMSG_DATA(at).cast::<RawFd>();
                let len = (*at).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize).min(end.saturating_sub(first.addr()));
                places.extend((0..len / size_of::<RawFd>()).map(|number| first.wrapping_add(number)));
            }
            at = libc::CMSG_NXTHDR(&raw const header, at);
        }
    }
    places
}

/// A message's control data with kernel copies in place of our descriptors.
struct Control {
    data: Vec<u64>,
    /// Closed after the message is sent.
    copies: Vec<File>,
}

impl Control {
    /// Returns `None` for a message that passes no descriptors of ours.
    fn of(header: &msghdr) -> Result<Option<Self>, Errno> {
        let mut control = Self { data: copied(header), copies: Vec::new() };
        let places = places(header, control.data.as_mut_ptr());
        if passed(header, &control.data).any(is_hidden) {
            return Err(libc::EBADF);
        }
        if !passed(header, &control.data).any(table::is_ours) {
            return Ok(None);
        }
        let _deferral = cancellation::uninterrupted();
        for place in places {
            // SAFETY: the place lies within the control data.
            let copy = exec_handoff::for_another_process(unsafe { place.read_unaligned() }).map_err(|fault| match fault {
                Fault::Errno(errno) => errno,
                Fault::Leaves(_) => libc::EIO,
            })?;
            if let Some(copy) = copy {
                // SAFETY: as above, and nobody else knows the data yet.
                unsafe { place.write_unaligned(copy.as_raw_fd()) };
                control.copies.push(copy);
            }
        }
        Ok(Some(control))
    }

    /// Makes a header refer to this data.
    fn put_in(&mut self, header: &mut msghdr) {
        header.msg_control = self.data.as_mut_ptr().cast();
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _deferral = cancellation::uninterrupted();
        self.copies.clear();
    }
}
