//! Moves bytes from one descriptor to another. The kernel cannot read our descriptors, so their bytes are read and written here.
//! `sendmsg` is also here: a descriptor of ours that goes to another process is replaced by a kernel copy.

use std::ffi::{c_int, c_uint};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use dayfly_client::reserved_fd::is_hidden;
use dayfly_client::{cancellation, raw_call};
use libc::{cmsghdr, mmsghdr, mode_t, msghdr, off_t, size_t};

use super::hidden::as_seen;
use super::hook;
use crate::attach::{known_view, view};
use crate::fault::{Fault, answer};
use crate::memory::{self, Errno, FromC, fail};
use crate::pages;
use crate::table::{self, Reference};
use crate::{exec_handoff, next};

/// No kernel takes more control data with a message.
const CONTROL_LEN_MAX: usize = 1 << 20;
/// The flags that `splice` takes.
const SPLICE_FLAGS: c_uint = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;
/// Bytes that are moved at a time: as many as a pipe holds, so that an empty one takes them without waiting.
const CHUNK_LEN: usize = 64 << 10;

hook! {
    fn sendfile | sendfile64 (sink: c_int, source: c_int, offset: FromC<*mut off_t>, count: size_t) -> isize {
        match table::find(source) {
            None => sendfile::next(sink, source, offset, count),
            Some(open) if open.is_place() => sendfile::next(sink, source, offset, count),
            Some(open) => answer(|| {
                check_offset(offset, libc::EINVAL)?;
                let sink = Sink::new(sink)?;
                sink.check_writable()?;
                if sink.kind == libc::S_IFIFO {
                    sink.check_room(0)?;
                }
                if sink.flags & libc::O_APPEND != 0 || open.file().is_err() && count != 0 {
                    return Err(Fault::Errno(libc::EINVAL));
                }
                if count == 0 {
                    return Ok(0);
                }
                transfer(&open, offset, sink.number, FromC::<*mut off_t>::null(), count)
            }),
        }
    }

    fn copy_file_range(
        source: c_int,
        from_offset: FromC<*mut off_t>,
        sink: c_int,
        to_offset: FromC<*mut off_t>,
        len: size_t,
        flags: c_uint,
    ) -> isize {
        match table::find(source) {
            // Our files are open for reading only.
            None if table::is_ours(sink) => fail(libc::EBADF),
            None => copy_file_range::next(source, from_offset, sink, to_offset, len, flags),
            Some(open) if open.is_place() => copy_file_range::next(source, from_offset, sink, to_offset, len, flags),
            Some(open) => {
                next::act_on_cancel();
                answer(|| {
                    let sink = Sink::new(sink)?;
                    from_offset.get_if_given()?;
                    to_offset.get_if_given()?;
                    if flags != 0 {
                        return Err(Fault::Errno(libc::EINVAL));
                    }
                    if open.file().is_err() || sink.kind == libc::S_IFDIR {
                        return Err(Fault::Errno(libc::EISDIR));
                    }
                    if sink.kind != libc::S_IFREG {
                        return Err(Fault::Errno(libc::EINVAL));
                    }
                    sink.check_writable()?;
                    if sink.flags & libc::O_APPEND != 0 {
                        return Err(Fault::Errno(libc::EBADF));
                    }
                    check_offset(from_offset, libc::EOVERFLOW)?;
                    transfer(&open, from_offset, sink.number, to_offset, len)
                })
            }
        }
    }

    fn splice(
        source: c_int,
        from_offset: FromC<*mut off_t>,
        sink: c_int,
        to_offset: FromC<*mut off_t>,
        len: size_t,
        flags: c_uint,
    ) -> isize {
        match table::find(source) {
            None => splice::next(source, from_offset, sink, to_offset, len, flags),
            Some(open) if open.is_place() => splice::next(source, from_offset, sink, to_offset, len, flags),
            Some(open) => {
                next::act_on_cancel();
                answer(|| {
                    if len == 0 {
                        return Ok(0);
                    }
                    if flags & !SPLICE_FLAGS != 0 {
                        return Err(Fault::Errno(libc::EINVAL));
                    }
                    let sink = Sink::new(sink)?;
                    let is_pipe = sink.kind == libc::S_IFIFO;
                    if is_pipe && !to_offset.is_null() {
                        return Err(Fault::Errno(libc::ESPIPE));
                    }
                    sink.check_writable()?;
                    if !is_pipe {
                        return Err(Fault::Errno(libc::EINVAL));
                    }
                    check_offset(from_offset, libc::EINVAL)?;
                    sink.check_room(flags)?;
                    if open.file().is_err() {
                        return Err(Fault::Errno(libc::EINVAL));
                    }
                    // No more than a pipe holds: the caller may be the program that empties it.
                    transfer(&open, from_offset, sink.number, to_offset, len.min(CHUNK_LEN))
                })
            }
        }
    }

    fn sendmsg(socket, message, flags) {
        let Some(header) = message.get().filter(has_control) else { return sendmsg::next(socket, message, flags) };
        let passed = passed(&header);
        if passes_hidden(&passed) {
            return fail(libc::EBADF);
        }
        if !passed.iter().any(|number| number.get().is_some_and(table::is_ours)) {
            return sendmsg::next(socket, message, flags);
        }
        match put_copies(&passed) {
            Ok(copies) => {
                let copies = Restored(copies);
                let sent = sendmsg::next(socket, message, flags);
                let _deferral = cancellation::defer();
                drop(copies);
                sent
            }
            Err(errno) => fail(errno),
        }
    }

    fn sendmmsg(socket: c_int, messages: FromC<*mut mmsghdr>, count: c_uint, flags: c_int) -> c_int {
        // Linux sends at most this many.
        let count_max = count.min(libc::UIO_MAXIOV as c_uint);
        let headers = messages.as_const().values(if known_view().is_some() { count_max as usize } else { 0 });
        // The kernel fails for an array that cannot be read.
        let Ok(headers) = headers else { return sendmmsg::next(socket, messages, count, flags) };
        let headers: Vec<msghdr> = headers.map(|message| message.msg_hdr).filter(has_control).collect();
        let passed: Vec<_> = headers.iter().flat_map(passed).collect();
        if passes_hidden(&passed) {
            return fail(libc::EBADF);
        }
        if !passed.iter().any(|number| number.get().is_some_and(table::is_ours)) {
            return sendmmsg::next(socket, messages, count, flags);
        }
        match put_copies(&passed) {
            Ok(copies) => {
                let copies = Restored(copies);
                let sent = sendmmsg::next(socket, messages, count, flags);
                let _deferral = cancellation::defer();
                drop(copies);
                sent
            }
            Err(errno) => fail(errno),
        }
    }
}

/// A descriptor that gets bytes, and what the kernel knows about it.
struct Sink {
    number: RawFd,
    flags: c_int,
    /// The type bits of its mode.
    kind: mode_t,
}

impl Sink {
    /// # Errors
    ///
    /// EBADF if nothing can be read or written through the number.
    fn new(number: RawFd) -> Result<Self, Errno> {
        let number = as_seen(number);
        let (flags, mode) = raw_call::flags(number).zip(raw_call::mode(number)).ok_or(libc::EBADF)?;
        match table::find(number) {
            Some(open) if !open.is_place() => Ok(Self { number, flags: libc::O_RDONLY, kind: open.stat().mode() & libc::S_IFMT }),
            _ if flags & libc::O_PATH != 0 => Err(libc::EBADF),
            _ => Ok(Self { number, flags, kind: mode & libc::S_IFMT }),
        }
    }

    fn check_writable(&self) -> Result<(), Errno> {
        if self.flags & libc::O_ACCMODE == libc::O_RDONLY { Err(libc::EBADF) } else { Ok(()) }
    }

    /// Checks that a pipe takes bytes now, if the call must not wait. `flags` are those of `splice`.
    fn check_room(&self, flags: c_uint) -> Result<(), Errno> {
        if self.flags & libc::O_NONBLOCK == 0 && flags & libc::SPLICE_F_NONBLOCK == 0 {
            return Ok(());
        }
        let mut polled = libc::pollfd { fd: self.number, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one live structure.
        if unsafe { libc::poll(&raw mut polled, 1, 0) } == 0 { Err(libc::EAGAIN) } else { Ok(()) }
    }
}

/// Checks an offset that the program may have given. A negative one is the error `negative`.
fn check_offset(offset: FromC<*mut off_t>, negative: Errno) -> Result<(), Errno> {
    if offset.get_if_given()?.is_some_and(|offset| offset < 0) { Err(negative) } else { Ok(()) }
}

/// Returns whether a message has control data that can be read, and no more than the kernel takes. The kernel fails for the rest.
fn has_control(header: &msghdr) -> bool {
    !header.msg_control.is_null()
        && header.msg_controllen <= CONTROL_LEN_MAX
        && pages::is_readable(header.msg_control as usize, header.msg_controllen)
}

/// Returns whether a message passes descriptors of ours, or reserved ones.
pub(super) fn concerns_us(message: FromC<*const msghdr>) -> bool {
    message.get().is_some_and(|header| has_ours(&header))
}

/// Like [`concerns_us`], for several messages.
pub(super) fn any_concerns_us(messages: FromC<*const mmsghdr>, count: c_uint) -> bool {
    let count = if known_view().is_some() { count.min(libc::UIO_MAXIOV as c_uint) } else { 0 };
    messages.values(count as usize).is_ok_and(|mut messages| messages.any(|message| has_ours(&message.msg_hdr)))
}

fn has_ours(header: &msghdr) -> bool {
    let is_ours = |number: RawFd| table::is_ours(number) || is_hidden(number);
    has_control(header) && passed(header).iter().any(|number| number.get().is_some_and(is_ours))
}

/// Returns whether control data passes reserved descriptors, which look closed.
fn passes_hidden(passed: &[FromC<*mut RawFd>]) -> bool {
    passed.iter().any(|number| number.get().is_some_and(is_hidden))
}

/// Reads from one of our files and writes to another descriptor, at offsets that the program gives or at the descriptors' own.
/// Returns the number of bytes written.
fn transfer(
    open: &Reference,
    from_offset: FromC<*mut off_t>,
    to: RawFd,
    to_offset: FromC<*mut off_t>,
    len: usize,
) -> Result<isize, Fault> {
    let file = open.file()?;
    let view = view()?;
    let given = from_offset.get_if_given()?;
    let start = match given {
        Some(offset) => u64::try_from(offset).map_err(|_| libc::EINVAL)?,
        None => open.offset.load(),
    };
    let mut at_target = to_offset.get_if_given()?;
    let len = (len as u64).min(file.stat().size.saturating_sub(start)) as usize;
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
            Some(offset) => next::write_bytes_at(to, &buffer[..count], offset),
            None => next::write_bytes(to, &buffer[..count]),
        };
        match usize::try_from(written) {
            Ok(written) => {
                done += written;
                at_target = at_target.map(|offset| offset + written as off_t);
                if written < count {
                    break;
                }
            }
            // The program learns how much was written; the next call fails.
            Err(_) if done > 0 => break,
            Err(_) => return Err(Fault::Errno(memory::errno())),
        }
    }
    match given {
        Some(offset) => from_offset.put(offset + done as off_t)?,
        None => open.offset.store(start + done as u64),
    }
    if let Some(offset) = at_target {
        to_offset.put(offset)?;
    }
    Ok(done as isize)
}

/// Returns the places in a message's control data that hold descriptors.
fn passed<'a>(header: &'a msghdr) -> Vec<FromC<'a, *mut RawFd>> {
    let mut places = Vec::new();
    // SAFETY: the header is the program's and describes its control data; the macros stay within that.
    unsafe {
        let mut at: *mut cmsghdr = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            if (*at).cmsg_level == libc::SOL_SOCKET && (*at).cmsg_type == libc::SCM_RIGHTS {
                let first = libc::CMSG_DATA(at).cast::<RawFd>();
                let len = (*at).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                places.extend((0..len / size_of::<RawFd>()).map(|number| FromC::new(first.wrapping_add(number))));
            }
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
    places
}

/// A descriptor of ours in a message, and the copy that stands there while the message is sent.
struct Replaced<'a> {
    place: FromC<'a, *mut RawFd>,
    number: RawFd,
    /// Closed after the message is sent.
    _copy: File,
}

/// The copies in a message. Our descriptors stand there again when this is dropped, even if the thread is cancelled.
struct Restored<'a>(Vec<Replaced<'a>>);

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        restore(&self.0);
    }
}

/// Puts copies in place of our descriptors.
fn put_copies<'a>(passed: &[FromC<'a, *mut RawFd>]) -> Result<Vec<Replaced<'a>>, Errno> {
    let _deferral = cancellation::defer();
    let mut copies = Vec::new();
    let result = passed.iter().try_for_each(|&place| {
        let number = place.get().unwrap_or(-1);
        if let Some(copy) = exec_handoff::for_another_process(number)? {
            place.put(copy.as_raw_fd())?;
            copies.push(Replaced { place, number, _copy: copy });
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

fn restore(copies: &[Replaced<'_>]) {
    for replaced in copies {
        // Cannot fail: the place was written before.
        let _ = replaced.place.put(replaced.number);
    }
}
