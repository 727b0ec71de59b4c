//! Moving bytes from one descriptor to another, which for ours the kernel cannot: they are read and written. And passing
//! descriptors to other processes.

use std::ffi::{c_int, c_uint};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use libc::{cmsghdr, msghdr, off_t, size_t};

use super::hook;
use crate::memory::{self, fail, get, put};
use crate::process::{Fault, answer, view};
use crate::table::{self, Reference};
use crate::{carry, next};

/// Moved at a time; as much as a pipe holds, so that one that is empty takes it at once.
const CHUNK_LEN: usize = 64 << 10;

hook! {
    fn sendfile | sendfile64 (to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> isize {
        match table::find(from) {
            None => next::sendfile(to, from, offset, count),
            Some(open) => answer(|| transfer(&open, offset, to, std::ptr::null_mut(), count, usize::MAX)),
        }
    }

    fn copy_file_range(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, len: size_t, flags: c_uint) -> isize {
        match table::find(from) {
            // Not to ours, which are open to be read only.
            None if table::is_ours(to) => fail(libc::EBADF),
            None => next::copy_file_range(from, from_offset, to, to_offset, len, flags),
            Some(_) if flags != 0 => fail(libc::EINVAL),
            Some(open) => answer(|| transfer(&open, from_offset, to, to_offset, len, usize::MAX)),
        }
    }

    fn splice(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, len: size_t, flags: c_uint) -> isize {
        match table::find(from) {
            None => next::splice(from, from_offset, to, to_offset, len, flags),
            // As much as a pipe holds, then back to the program: it may be the one that empties it.
            Some(open) => answer(|| transfer(&open, from_offset, to, to_offset, len, CHUNK_LEN)),
        }
    }

    fn sendmsg(socket: c_int, message: *const msghdr, flags: c_int) -> isize {
        let Some(header) = get(message).filter(|header| !header.msg_control.is_null() && passes_ours(header)) else {
            return next::sendmsg(socket, message, flags);
        };
        let copies = put_copies(&header);
        match copies {
            Ok(copies) => {
                let sent = next::sendmsg(socket, message, flags);
                restore(&copies);
                sent
            }
            Err(errno) => fail(errno),
        }
    }
}

/// Reads from ours and writes to another, at offsets of the program's or those of the descriptors.
fn transfer(
    open: &Reference,
    from_offset: *mut off_t,
    to: RawFd,
    to_offset: *mut off_t,
    len: usize,
    at_most: usize,
) -> Result<isize, Fault> {
    let file = open.file()?;
    let view = view()?;
    let given = get(from_offset.cast_const());
    let start = match given {
        Some(offset) => u64::try_from(offset).map_err(|_| libc::EINVAL)?,
        None => open.offset.load(),
    };
    let mut at_target = get(to_offset.cast_const());
    let len = (len as u64).min(at_most as u64).min(file.stat().size.saturating_sub(start)) as usize;
    let mut buffer = vec![0; len.min(CHUNK_LEN)];
    let mut done = 0;
    while done < len {
        let count = (len - done).min(CHUNK_LEN);
        let count = match view.read_at(file, start + done as u64, &mut buffer[..count]) {
            Ok(count) => count,
            Err(_) if done > 0 => break,
            Err(error) => return Err(error.into()),
        };
        let written = match at_target {
            Some(offset) => next::pwrite(to, buffer.as_ptr().cast(), count, offset),
            None => next::write(to, buffer.as_ptr().cast(), count),
        };
        match usize::try_from(written) {
            Ok(written) => {
                done += written;
                at_target = at_target.map(|offset| offset + written as off_t);
                if written < count {
                    break;
                }
            }
            // What was written before is not lost.
            Err(_) if done > 0 => break,
            Err(_) => return Err(Fault::Errno(memory::errno())),
        }
    }
    match given {
        Some(offset) => put(from_offset, offset + done as off_t)?,
        None => open.offset.store(start + done as u64),
    }
    if let Some(offset) = at_target {
        put(to_offset, offset)?;
    }
    Ok(done as isize)
}

/// The places in a message's control data where descriptors stand.
fn passed(header: &msghdr) -> Vec<*mut RawFd> {
    let mut places = Vec::new();
    // SAFETY: the header is the program's and describes its control data; the macros keep within that.
    unsafe {
        let mut at: *mut cmsghdr = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            if (*at).cmsg_level == libc::SOL_SOCKET && (*at).cmsg_type == libc::SCM_RIGHTS {
                let first = libc::CMSG_DATA(at).cast::<RawFd>();
                let len = (*at).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                places.extend((0..len / size_of::<RawFd>()).map(|number| first.wrapping_add(number)));
            }
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
    places
}

fn passes_ours(header: &msghdr) -> bool {
    passed(header).iter().any(|&place| get(place.cast_const()).is_some_and(table::is_ours))
}

/// Puts copies into the places of ours; returns what stood there.
fn put_copies(header: &msghdr) -> Result<Vec<(*mut RawFd, RawFd, File)>, memory::Errno> {
    let mut copies = Vec::new();
    let result = passed(header).into_iter().try_for_each(|place| {
        let number = get(place.cast_const()).unwrap_or(-1);
        if let Some(copy) = carry::for_another(number)? {
            put(place, copy.as_raw_fd())?;
            copies.push((place, number, copy));
        }
        Ok(())
    });
    match result {
        Ok(()) => Ok(copies),
        Err(fault) => {
            restore(&copies);
            Err(match fault {
                Fault::Errno(errno) => errno,
                Fault::Leaves(_) => libc::EIO,
            })
        }
    }
}

fn restore(copies: &[(*mut RawFd, RawFd, File)]) {
    for &(place, number, _) in copies {
        // It was written before.
        let _ = put(place, number);
    }
}
