//! Moves bytes from one descriptor to another. The kernel cannot read our descriptors, so their bytes are read and written here.

use std::ffi::{c_int, c_uint, c_ulong};
use std::os::fd::RawFd;

use dayfly_client::{cancellation, raw_call};
use libc::{mode_t, off_t, size_t};

use super::descriptor::ioctl;
use super::hidden::as_seen;
use super::hook;
use super::poll::poll;
use crate::attach::view;
use crate::fault::{Fault, answer};
use crate::heap::buffer;
use crate::memory::{self, Errno, FromC, fail};
use crate::next;
use crate::table::{self, Reference};

/// All flags of `splice` and `tee`.
const SPLICE_FLAGS: c_uint = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;
/// The number of bytes that a pipe takes without waiting if `poll` says that the pipe can be written to.
const PIPE_PART_LEN: usize = libc::PIPE_BUF;
/// The number of bytes that are moved at a time: as many as a pipe holds, so that an empty pipe takes them without waiting.
const CHUNK_LEN: usize = 64 << 10;

hook! {
    fn sendfile | sendfile64 (sink: c_int, source: c_int, offset: FromC<*mut off_t>, count: size_t) -> isize {
        match table::find(source) {
            None => sendfile::next(sink, source, offset, count),
            Some(open) if open.is_place() => sendfile::next(sink, source, offset, count),
            Some(open) => {
                let checked = answer(|| {
                    check_offset(offset, libc::EINVAL)?;
                    let sink = Sink::new(sink)?;
                    sink.check_writable()?;
                    if sink.kind == libc::S_IFIFO {
                        sink.check_room(0)?;
                    }
                    if sink.flags & libc::O_APPEND != 0 || open.file().is_err() && count != 0 {
                        return Err(Fault::Errno(libc::EINVAL));
                    }
                    Ok(0)
                });
                match count {
                    0 => checked,
                    _ if checked < 0 => checked,
                    _ => transfer(&open, offset, sink, FromC::<*mut off_t>::null(), count),
                }
            }
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
                let checked = answer(|| {
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
                    Ok(0)
                });
                if checked < 0 { checked } else { transfer(&open, from_offset, sink, to_offset, len) }
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
            Some(_) if len == 0 => 0,
            Some(open) => {
                next::act_on_cancel();
                let checked = answer(|| {
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
                    Ok(0)
                });
                if checked < 0 { checked } else { splice_to_pipe(&open, from_offset, sink, len, flags) }
            }
        }
    }

    fn tee(source: c_int, sink: c_int, len: size_t, flags: c_uint) -> isize {
        match table::find(source) {
            None => tee::next(source, sink, len, flags),
            Some(open) if open.is_place() => tee::next(source, sink, len, flags),
            Some(_) if flags & !SPLICE_FLAGS != 0 => fail(libc::EINVAL),
            Some(_) if len == 0 => 0,
            Some(_) => answer(|| {
                Sink::new(sink)?.check_writable()?;
                // A file is not a pipe.
                Err(Fault::Errno(libc::EINVAL))
            }),
        }
    }
}

/// A descriptor that gets bytes, and what the kernel knows about it.
struct Sink {
    number: RawFd,
    flags: c_int,
    /// The type bits of the file's mode.
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

    /// If the call must not wait, checks that a pipe takes bytes now. `flags` are those of `splice`.
    fn check_room(&self, flags: c_uint) -> Result<(), Errno> {
        if self.flags & libc::O_NONBLOCK == 0 && flags & libc::SPLICE_F_NONBLOCK == 0 {
            return Ok(());
        }
        let mut polled = libc::pollfd { fd: self.number, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one live structure.
        if unsafe { libc::poll(&raw mut polled, 1, 0) } == 0 { Err(libc::EAGAIN) } else { Ok(()) }
    }
}

/// Checks an offset that the program may have given. Fails with the error `negative` if the offset is negative.
fn check_offset(offset: FromC<*mut off_t>, negative: Errno) -> Result<(), Errno> {
    if offset.get_if_given()?.is_some_and(|offset| offset < 0) { Err(negative) } else { Ok(()) }
}

/// Reads from one of our files and writes to another descriptor, at offsets that the program gives or at the descriptors' own.
/// Returns the number of bytes written. A write may wait for long, so it is outside of `answer`: signal handlers run meanwhile.
fn transfer(open: &Reference, from_offset: FromC<*mut off_t>, to: RawFd, to_offset: FromC<*mut off_t>, len: usize) -> isize {
    let before = memory::errno();
    let (mut start, mut rest, mut given, mut at_target) = (0, 0, None, None);
    let begun = answer(|| {
        let file = open.file()?;
        view()?;
        given = from_offset.get_if_given()?;
        start = match given {
            Some(offset) => u64::try_from(offset).map_err(|_| libc::EINVAL)?,
            None => open.offset.load(),
        };
        at_target = to_offset.get_if_given()?;
        rest = (len as u64).min(file.stat().size.saturating_sub(start)) as usize;
        Ok(0)
    });
    if begun < 0 {
        return -1;
    }
    let mut buffer = match buffer(rest.min(CHUNK_LEN)) {
        Ok(buffer) => buffer,
        Err(errno) => return fail(errno),
    };
    let (part_len, mut done) = (buffer.len(), 0);
    while done < rest {
        let part = &mut buffer[..(rest - done).min(part_len)];
        let count = answer(|| Ok(view()?.read_at(open.file()?, start + done as u64, part)? as isize));
        let written = if count < 0 { -1 } else { write_at(to, &part[..count as usize], at_target) };
        match usize::try_from(written) {
            Ok(written) => {
                done += written;
                at_target = at_target.map(|offset| offset + written as off_t);
                if written < part.len() {
                    break;
                }
            }
            // The program learns how much was written; the next call fails.
            Err(_) if done > 0 => break,
            Err(_) => return -1,
        }
    }
    memory::set_errno(before);
    answer(|| {
        match given {
            Some(offset) => from_offset.put(offset + done as off_t)?,
            None => open.offset.store(start + done as u64),
        }
        if let Some(offset) = at_target {
            to_offset.put(offset)?;
        }
        Ok(done as isize)
    })
}

/// Writes, at an offset if one is given. The system call is made by number, because the C library's functions are cancellation
/// points, and `sendfile` is not one.
fn write_at(to: RawFd, bytes: &[u8], offset: Option<off_t>) -> isize {
    let (start, len) = (bytes.as_ptr().addr(), bytes.len());
    let written = match offset {
        Some(offset) => next::syscall(libc::SYS_pwrite64, to as usize, start, len, offset as usize, 0, 0),
        None => next::syscall(libc::SYS_write, to as usize, start, len, 0, 0, 0),
    };
    written as isize
}

/// Reads from one of our files and writes to a pipe. Fills only the free part of the pipe, because the caller may be the program
/// that empties it. A thread may be canceled while it waits for room, so during the wait nothing holds a deferral or runs inside of
/// `answer`.
fn splice_to_pipe(open: &Reference, from_offset: FromC<*mut off_t>, to: RawFd, len: usize, flags: c_uint) -> isize {
    let before = memory::errno();
    let room = next::fcntl_number(to, libc::F_GETPIPE_SZ, 0);
    memory::set_errno(before);
    if room < 0 {
        return fail(libc::EINVAL);
    }
    let mut bytes = match buffer(len.min(CHUNK_LEN).min(room as usize)) {
        Ok(bytes) => bytes,
        Err(errno) => return fail(errno),
    };
    let read = answer(|| {
        let file = open.file()?;
        let start = match from_offset.get_if_given()? {
            Some(offset) => u64::try_from(offset).map_err(|_| libc::EINVAL)?,
            None => open.offset.load(),
        };
        Ok(view()?.read_at(file, start, &mut bytes)? as isize)
    });
    if read <= 0 {
        return read;
    }
    let does_wait = flags & libc::SPLICE_F_NONBLOCK == 0;
    // An empty pipe takes as many bytes as were read.
    let part_len = if is_empty(to) { bytes.len() } else { PIPE_PART_LEN };
    let (mut done, mut deferral) = (0, None);
    while done < read as usize && (done == 0 && does_wait || is_ready(to)) {
        let part = &bytes[done..read as usize];
        let written = next::write_bytes(to, &part[..part.len().min(part_len)]);
        // From here on, the program must learn what was written.
        deferral.get_or_insert_with(cancellation::defer);
        match usize::try_from(written) {
            Ok(written) => done += written,
            // The program learns how much was written; the next call fails.
            Err(_) if done > 0 => break,
            Err(_) => return -1,
        }
    }
    drop(deferral);
    if done == 0 {
        return fail(libc::EAGAIN);
    }
    memory::set_errno(before);
    match from_offset.get() {
        Some(offset) => answer(|| Ok(from_offset.put(offset + done as off_t).map(|()| done as isize)?)),
        None => {
            open.offset.store(open.offset.load() + done as u64);
            done as isize
        }
    }
}

/// Returns whether a pipe is empty.
fn is_empty(pipe: RawFd) -> bool {
    let mut count: c_int = 0;
    ioctl::next(pipe, libc::FIONREAD, FromC::number((&raw mut count).addr() as c_ulong)) == 0 && count == 0
}

/// Returns whether a pipe can be written to without waiting.
fn is_ready(pipe: RawFd) -> bool {
    let mut entry = [libc::pollfd { fd: pipe, events: libc::POLLOUT, revents: 0 }];
    // SAFETY: a live array of one element.
    poll::next(unsafe { FromC::new(entry.as_mut_ptr()) }, 1, 0) == 1
}
