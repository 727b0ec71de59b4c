//! Reading and seeking.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;

use dayfly_client::{View, cancellation};
use libc::{off_t, size_t};

use super::hook;
use crate::attach::view;
use crate::fault::{Fault, answer_from_memory, answer_until_signal};
use crate::memory::{self, FromC, fail};
use crate::next::act_on_cancel;
use crate::table::{self, Description, Object};

/// `struct iovec`. C's promise for the pointer to the structure also covers the pointer in it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    start: FromC<'a, *mut c_void>,
    len: size_t,
}

const _: () = assert!(size_of::<Part<'_>>() == size_of::<libc::iovec>());

/// The flags that any version of Linux accepts for `preadv2` (`RWF_HIPRI` to `RWF_DONTCACHE`). All of them are hints about reading.
const READ_FLAGS: c_int = 0xff;
/// The highest offset in a file of ext4 with blocks of 4 KiB. Programs that probe for the highest offset expect this one.
const FILE_OFFSET_MAX: off_t = ((1 << 32) - 1) * 4096;

/// A vector of buffers.
pub(super) type Parts<'a> = FromC<'a, *const Part<'a>>;

hook! {
    fn read | __read (descriptor: c_int, out: FromC<*mut c_void>, len: size_t) -> isize {
        match table::presume(descriptor) {
            None => read::next(descriptor, out, len),
            Some(open) => {
                act_on_cancel();
                answer_until_signal(|| read_next(&*view()?, &open, out, len))
            }
        }
    }

    fn __read_chk(descriptor: c_int, out: FromC<*mut c_void>, len: size_t, room: size_t) -> isize {
        read(descriptor, out, len.min(room))
    }

    fn pread | pread64 | __pread64 (descriptor: c_int, out: FromC<*mut c_void>, len: size_t, offset: off_t) -> isize {
        match table::find(descriptor) {
            None => pread::next(descriptor, out, len, offset),
            Some(open) if open.is_place() => pread::next(descriptor, out, len, offset),
            Some(open) => {
                act_on_cancel();
                answer_until_signal(|| read_from(&*view()?, &open, out, len, offset))
            }
        }
    }

    fn __pread_chk | __pread64_chk (
        descriptor: c_int,
        out: FromC<*mut c_void>,
        len: size_t,
        offset: off_t,
        room: size_t,
    ) -> isize {
        pread(descriptor, out, len.min(room), offset)
    }

    fn readv(descriptor: c_int, vector: Parts, count: c_int) -> isize {
        match table::find(descriptor) {
            None => readv::next(descriptor, vector, count),
            Some(open) if open.is_place() => readv::next(descriptor, vector, count),
            Some(open) => {
                act_on_cancel();
                answer_until_signal(|| read_all(vector, count, |out, len| read_next(&*view()?, &open, out, len)))
            }
        }
    }

    fn preadv | preadv64 (descriptor: c_int, vector: Parts, count: c_int, offset: off_t) -> isize {
        match table::find(descriptor) {
            None => preadv::next(descriptor, vector, count, offset),
            Some(open) if open.is_place() => preadv::next(descriptor, vector, count, offset),
            Some(open) => {
                act_on_cancel();
                answer_until_signal(|| read_all_from(&open, vector, count, offset))
            }
        }
    }

    fn preadv2 | preadv64v2 (descriptor: c_int, vector: Parts, count: c_int, offset: off_t, flags: c_int) -> isize {
        match table::find(descriptor) {
            None => preadv2::next(descriptor, vector, count, offset, flags),
            Some(open) if open.is_place() => preadv2::next(descriptor, vector, count, offset, flags),
            Some(open) if flags & !flags_of(&open) != 0 && offset >= -1 => {
                answer_from_memory(|| read_all(vector, count, |_, _| Err(Fault::Errno(libc::EOPNOTSUPP))))
            }
            Some(_) if offset == -1 => readv(descriptor, vector, count),
            Some(_) => preadv(descriptor, vector, count, offset),
        }
    }

    fn lseek | lseek64 | __lseek (descriptor, offset, whence) {
        match table::presume(descriptor) {
            None => lseek::next(descriptor, offset, whence),
            Some(open) => answer_from_memory(|| seek(&open, offset, whence)),
        }
    }

    fn posix_fadvise | posix_fadvise64 (descriptor: c_int, offset: off_t, len: off_t, advice: c_int) -> c_int {
        advise(descriptor, len, advice).unwrap_or_else(|| posix_fadvise::next(descriptor, offset, len, advice))
    }

    fn readahead(descriptor: c_int, offset: off_t, count: size_t) -> isize {
        match table::find_early(descriptor).map(|open| open.file().map(drop)) {
            None | Some(Err(libc::EBADF)) => readahead::next(descriptor, offset, count),
            Some(Err(_)) => fail(libc::EINVAL),
            Some(Ok(())) => 0,
        }
    }
}

/// Like `read`, for a stream, whose readers take EINTR for a failure of the drive.
pub(super) fn read_for_stream(descriptor: c_int, out: FromC<*mut c_void>, len: size_t) -> isize {
    match table::presume(descriptor) {
        None => read::next(descriptor, out, len),
        Some(open) => {
            act_on_cancel();
            answer_from_memory(|| read_next(&*view()?, &open, out, len))
        }
    }
}

/// Reads from the description's offset, and advances the offset.
fn read_next(view: &View, open: &Description, out: FromC<*mut c_void>, len: size_t) -> Result<isize, Fault> {
    let file = open.file();
    // A place is refused before the kernel looks at the buffer.
    if !matches!(file, Err(libc::EBADF)) {
        out.check_range(len)?;
    }
    let file = match file {
        // Only a directory's offset comes near the highest.
        Err(libc::EISDIR) if ends_too_high(open.offset.load(), len) => return Err(Fault::Errno(libc::EINVAL)),
        file => file?,
    };
    while let Some(start) = open.offset.position() {
        let count = (len as u64).min(file.stat().size.saturating_sub(start));
        let done = view.read_at(file, start, out.start_of_buffer(count as usize)?)?;
        // The offset moves last: a signal handler that jumps out of the read leaves the offset where it was. If another reader of the
        // description was faster, these bytes are that reader's.
        if done == 0 || open.offset.advance(start, done as u64) {
            return Ok(done as isize);
        }
    }
    // Another program shares the offset, so the kernel keeps it, along with a file that has the same bytes.
    let _deferral = cancellation::uninterrupted();
    let kernel = open.offset.kernel().and_then(|copy| copy.get().ok()).ok_or(libc::EIO)?;
    // The read does not wait, because the file is in memory or on a drive.
    let count = read::next(kernel.as_raw_fd(), out, len);
    if count < 0 { Err(memory::errno().into()) } else { Ok(count) }
}

/// Reads at an offset that the program gives.
fn read_from(view: &View, open: &Description, out: FromC<*mut c_void>, len: size_t, offset: off_t) -> Result<isize, Fault> {
    let offset = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
    out.check_range(len)?;
    if ends_too_high(offset, len) {
        return Err(Fault::Errno(libc::EINVAL));
    }
    let file = open.file()?;
    let count = (len as u64).min(file.stat().size.saturating_sub(offset));
    Ok(view.read_at(file, offset, out.start_of_buffer(count as usize)?)? as isize)
}

/// Returns whether a range ends above the highest offset.
fn ends_too_high(offset: u64, len: usize) -> bool {
    len as u64 > (off_t::MAX as u64).saturating_sub(offset)
}

/// Fills the parts of a vector one after another, up to the end of the file. `read` fills one part.
fn read_all<'a>(
    vector: Parts<'a>,
    count: c_int,
    mut read: impl FnMut(FromC<'a, *mut c_void>, size_t) -> Result<isize, Fault>,
) -> Result<isize, Fault> {
    if !(0..=libc::UIO_MAXIOV).contains(&count) {
        return Err(Fault::Errno(libc::EINVAL));
    }
    let parts = vector.values(count as usize)?;
    // The kernel checks all parts before it reads.
    let mut is_empty = true;
    for part in parts.clone() {
        if part.len > isize::MAX as usize {
            return Err(Fault::Errno(libc::EINVAL));
        }
        part.start.check_range(part.len)?;
        is_empty &= part.len == 0;
    }
    if is_empty {
        return Ok(0);
    }
    let mut total = 0;
    for part in parts {
        match read(part.start, part.len) {
            Ok(count) => {
                total += count;
                if (count as usize) < part.len {
                    break;
                }
            }
            // The program gets the bytes of the preceding parts; the next call fails.
            Err(_) if total > 0 => break,
            Err(fault) => return Err(fault),
        }
    }
    Ok(total)
}

/// Returns the flags that `preadv2` accepts.
fn flags_of(open: &Description) -> c_int {
    if matches!(open.object, Object::Directory(_)) { libc::RWF_HIPRI } else { READ_FLAGS }
}

fn read_all_from(open: &Description, vector: Parts, count: c_int, offset: off_t) -> Result<isize, Fault> {
    if offset < 0 {
        return Err(Fault::Errno(libc::EINVAL));
    }
    let view = view()?;
    let mut at = offset;
    read_all(vector, count, |out, len| {
        let count = read_from(&view, open, out, len, at)?;
        at += count as off_t;
        Ok(count)
    })
}

fn seek(open: &Description, offset: off_t, whence: c_int) -> Result<off_t, Fault> {
    // As on ext4, the end of a directory is the highest offset.
    let (size, highest) = match &open.object {
        Object::File(file) => (file.stat().size as i64, FILE_OFFSET_MAX.max(file.stat().size as i64)),
        Object::Directory(_) => (off_t::MAX, off_t::MAX),
        Object::Place(_) => return Err(Fault::Errno(libc::EBADF)),
    };
    let base = match whence {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => open.offset.load() as i64,
        libc::SEEK_END => size,
        // The only hole is the one at the end.
        libc::SEEK_DATA if (0..size).contains(&offset) => 0,
        libc::SEEK_HOLE if (0..size).contains(&offset) => size - offset,
        libc::SEEK_DATA | libc::SEEK_HOLE => return Err(Fault::Errno(libc::ENXIO)),
        _ => return Err(Fault::Errno(libc::EINVAL)),
    };
    let target = base.checked_add(offset).filter(|target| (0..=highest).contains(target)).ok_or(libc::EINVAL)?;
    open.offset.store(target as u64);
    Ok(target)
}

/// Answers advice about a file of ours with success and does nothing: its bytes are already fast to read. `None` for a kernel
/// descriptor.
fn advise(descriptor: c_int, len: off_t, advice: c_int) -> Option<c_int> {
    table::find_early(descriptor).filter(|open| !open.is_place())?;
    let is_known = (libc::POSIX_FADV_NORMAL..=libc::POSIX_FADV_NOREUSE).contains(&advice);
    let is_valid = len >= 0 && is_known;
    Some(if is_valid { 0 } else { libc::EINVAL })
}
