//! Reading and seeking.

use std::ffi::{c_int, c_void};

use dayfly_client::View;
use libc::{iovec, off_t, size_t};

use super::hook;
use crate::memory::{self, array, buffer, fail};
use crate::next;
use crate::process::{Fault, answer, view};
use crate::table::{self, Description};

hook! {
    fn read | __read (descriptor: c_int, out: *mut c_void, len: size_t) -> isize {
        match table::find(descriptor) {
            None => next::read(descriptor, out, len),
            Some(open) => answer(|| read_next(&*view()?, &open, out, len)),
        }
    }

    fn __read_chk(descriptor: c_int, out: *mut c_void, len: size_t, room: size_t) -> isize {
        read(descriptor, out, len.min(room))
    }

    fn pread | pread64 | __pread64 (descriptor: c_int, out: *mut c_void, len: size_t, offset: off_t) -> isize {
        match table::find(descriptor) {
            None => next::pread(descriptor, out, len, offset),
            Some(open) => answer(|| read_from(&*view()?, &open, out, len, offset)),
        }
    }

    fn __pread_chk | __pread64_chk (descriptor: c_int, out: *mut c_void, len: size_t, offset: off_t, room: size_t) -> isize {
        pread(descriptor, out, len.min(room), offset)
    }

    fn readv(descriptor: c_int, vector: *const iovec, count: c_int) -> isize {
        match table::find(descriptor) {
            None => next::readv(descriptor, vector, count),
            Some(open) => answer(|| read_all(vector, count, |out, len| read_next(&*view()?, &open, out, len))),
        }
    }

    fn preadv | preadv64 (descriptor: c_int, vector: *const iovec, count: c_int, offset: off_t) -> isize {
        match table::find(descriptor) {
            None => next::preadv(descriptor, vector, count, offset),
            Some(open) => answer(|| read_all_from(&open, vector, count, offset)),
        }
    }

    fn preadv2 | preadv64v2 (descriptor: c_int, vector: *const iovec, count: c_int, offset: off_t, flags: c_int) -> isize {
        match table::find(descriptor) {
            None => next::preadv2(descriptor, vector, count, offset, flags),
            Some(open) if offset == -1 => answer(|| read_all(vector, count, |out, len| read_next(&*view()?, &open, out, len))),
            Some(open) => answer(|| read_all_from(&open, vector, count, offset)),
        }
    }

    fn lseek | lseek64 | __lseek (descriptor: c_int, offset: off_t, whence: c_int) -> off_t {
        match table::find(descriptor) {
            None => next::lseek(descriptor, offset, whence),
            Some(open) => answer(|| seek(&open, offset, whence)),
        }
    }
}

/// Reads on from the description's offset.
pub(crate) fn read_next(view: &View, open: &Description, out: *mut c_void, len: size_t) -> Result<isize, Fault> {
    let file = open.file()?;
    let Some((start, count)) = open.offset.claim(len as u64, file.stat().size) else {
        // Another program shares the offset: the kernel has a file with the same bytes.
        let kernel = open.offset.kernel().ok_or(libc::EIO)?;
        let count = next::read(kernel, out, len);
        return if count < 0 { Err(memory::errno().into()) } else { Ok(count) };
    };
    let result = buffer(out, count as usize).map_err(Fault::Errno).and_then(|out| Ok(view.read_at(file, start, out)?));
    match result {
        Ok(count) => Ok(count as isize),
        Err(fault) => {
            open.offset.unclaim(start, count);
            Err(fault)
        }
    }
}

fn read_from(view: &View, open: &Description, out: *mut c_void, len: size_t, offset: off_t) -> Result<isize, Fault> {
    let file = open.file()?;
    let offset = u64::try_from(offset).map_err(|_| libc::EINVAL)?;
    let count = (len as u64).min(file.stat().size.saturating_sub(offset));
    Ok(view.read_at(file, offset, buffer(out, count as usize)?)? as isize)
}

/// Fills the parts of a vector one after another, up to the end of the file.
fn read_all(
    vector: *const iovec,
    count: c_int,
    mut read: impl FnMut(*mut c_void, size_t) -> Result<isize, Fault>,
) -> Result<isize, Fault> {
    if !(0..=libc::UIO_MAXIOV).contains(&count) {
        return Err(Fault::Errno(libc::EINVAL));
    }
    let mut total = 0;
    for part in array(vector, count as usize) {
        match read(part.iov_base, part.iov_len) {
            Ok(count) => {
                total += count;
                if (count as usize) < part.iov_len {
                    break;
                }
            }
            // What was read before is not lost.
            Err(_) if total > 0 => break,
            Err(fault) => return Err(fault),
        }
    }
    Ok(total)
}

fn read_all_from(open: &Description, vector: *const iovec, count: c_int, offset: off_t) -> Result<isize, Fault> {
    let view = view()?;
    let mut at = offset;
    read_all(vector, count, |out, len| {
        let count = read_from(&view, open, out, len, at)?;
        at += count as off_t;
        Ok(count)
    })
}

fn seek(open: &Description, offset: off_t, whence: c_int) -> Result<off_t, Fault> {
    let size = open.stat().size as i64;
    let base = match whence {
        libc::SEEK_SET => 0,
        libc::SEEK_CUR => open.offset.load() as i64,
        libc::SEEK_END => size,
        // There are no holes but the one at the end.
        libc::SEEK_DATA if (0..size).contains(&offset) => 0,
        libc::SEEK_HOLE if (0..size).contains(&offset) => size - offset,
        libc::SEEK_DATA | libc::SEEK_HOLE => return Err(Fault::Errno(libc::ENXIO)),
        _ => return Err(Fault::Errno(libc::EINVAL)),
    };
    let target = base.checked_add(offset).ok_or(libc::EOVERFLOW)?;
    open.offset.store(u64::try_from(target).map_err(|_| libc::EINVAL)?);
    Ok(target)
}

/// `readahead` and its kin: the bytes are where they can be read fast already.
pub(crate) fn advise(descriptor: c_int) -> Option<c_int> {
    let open = table::find(descriptor)?;
    Some(if open.file().is_ok() { 0 } else { libc::EINVAL })
}

hook! {
    fn posix_fadvise | posix_fadvise64 (descriptor: c_int, offset: off_t, len: off_t, advice: c_int) -> c_int {
        advise(descriptor).unwrap_or_else(|| next::posix_fadvise(descriptor, offset, len, advice))
    }

    fn readahead(descriptor: c_int, offset: off_t, count: size_t) -> isize {
        match advise(descriptor) {
            None => next::readahead(descriptor, offset, count),
            Some(0) => 0,
            Some(errno) => fail(errno),
        }
    }
}
