//! `FILE` streams over ours: libc's own, with our functions below (`fopencookie`). All that reads from a stream then works as
//! ever: `fread`, `getline`, `fscanf`, C++'s `ifstream`.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsRawFd, RawFd};

use dayfly_client::View;
use libc::{FILE, size_t};

use super::hook;
use super::open::open_in;
use super::{descriptor, read};
use crate::memory::{self, fail, get, put, string};
use crate::process::{Fault, answer};
use crate::{carry, next, path, table, vfork};

type Read = extern "C" fn(*mut c_void, *mut c_char, size_t) -> isize;
type Write = extern "C" fn(*mut c_void, *const c_char, size_t) -> isize;
type Seek = extern "C" fn(*mut c_void, *mut i64, c_int) -> c_int;
type Close = extern "C" fn(*mut c_void) -> c_int;

/// `cookie_io_functions_t`.
#[repr(C)]
struct Functions {
    read: Option<Read>,
    write: Option<Write>,
    seek: Option<Seek>,
    close: Option<Close>,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
}

/// Where glibc's `FILE` has its descriptor; part of its binary interface, for old programs read it without a call.
const FILENO_OFFSET: usize = 112;

hook! {
    fn fopen | fopen64 (path: *const c_char, mode: *const c_char) -> *mut FILE {
        let ours = |view: &View, path: &[u8]| {
            let flags = open_flags(mode)?;
            let number = open_in(view, path, flags)?;
            // A directory can be opened to be read, and then is not.
            new_stream(number).inspect_err(|_| { descriptor::close(number); })
        };
        path::at(libc::AT_FDCWD, path, ours, |_, path| next::fopen(path, mode))
    }

    fn fdopen(number: c_int, mode: *const c_char) -> *mut FILE {
        match table::is_ours(number) {
            false => next::fdopen(number, mode),
            true => answer(|| match open_flags(mode)? & libc::O_ACCMODE {
                libc::O_RDONLY => new_stream(number),
                _ => Err(Fault::Errno(libc::EINVAL)),
            }),
        }
    }

    fn freopen | freopen64 (path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
        if path.is_null() {
            // Another mode for the same file: reading again is all that there is.
            let is_ours = number_of(stream).is_some_and(table::is_ours);
            return if is_ours { stream } else { next::freopen(path, mode, stream) };
        }
        // The stream stays libc's own, whatever it is; behind it comes a file of the kernel's.
        let ours = |view: &View, path: &[u8]| {
            if open_flags(mode)? & libc::O_ACCMODE != libc::O_RDONLY {
                return Err(Fault::Errno(libc::EROFS));
            }
            let copy = carry::copy_of(view, &view.open(path)?)?;
            closes(stream);
            let stream = next::freopen(c"/dev/null".as_ptr(), mode, stream);
            if stream.is_null() || next::dup2(copy.as_raw_fd(), next::fileno(stream)) < 0 {
                return Err(Fault::Errno(memory::errno()));
            }
            Ok(stream)
        };
        path::at(libc::AT_FDCWD, path, ours, |_, path| {
            closes(stream);
            next::freopen(path, mode, stream)
        })
    }

    fn fclose(stream: *mut FILE) -> c_int {
        closes(stream);
        next::fclose(stream)
    }

    fn daemon(stay: c_int, keep_open: c_int) -> c_int {
        if keep_open == 0 {
            (0..=2).for_each(table::forget);
        }
        next::daemon(stay, keep_open)
    }

    fn fileno | fileno_unlocked (stream: *mut FILE) -> c_int {
        match number_of(stream).filter(|&number| table::is_ours(number)) {
            Some(number) => number,
            None => next::fileno(stream),
        }
    }
}

/// `open`'s flags for a mode of `fopen`'s.
fn open_flags(mode: *const c_char) -> Result<c_int, Fault> {
    let mode = string(mode).ok_or(libc::EINVAL)?.to_bytes();
    // After a comma come names of character sets.
    let letters = mode.split(|&byte| byte == b',').next().unwrap_or_default();
    let has = |letter| letters.contains(&letter);
    let access = if has(b'+') { libc::O_RDWR } else { libc::O_WRONLY };
    let flags = match letters.first() {
        Some(b'r') if !has(b'+') => libc::O_RDONLY,
        Some(b'r') => libc::O_RDWR,
        Some(b'w') => access | libc::O_CREAT | libc::O_TRUNC,
        Some(b'a') => access | libc::O_CREAT | libc::O_APPEND,
        _ => return Err(Fault::Errno(libc::EINVAL)),
    };
    Ok(flags | if has(b'x') { libc::O_EXCL } else { 0 } | if has(b'e') { libc::O_CLOEXEC } else { 0 })
}

/// libc closes a stream's number without a call that we see.
fn closes(stream: *mut FILE) {
    if let Some(number) = number_of(stream).filter(|_| vfork::child().is_none()) {
        table::forget(number);
    }
}

/// A stream over a number of ours.
fn new_stream(number: RawFd) -> Result<*mut FILE, Fault> {
    let functions = Functions { read: Some(read_stream), write: None, seek: Some(seek_stream), close: Some(close_stream) };
    // SAFETY: the mode is a string, and the functions take what `fopencookie` says that it passes.
    let stream = unsafe { fopencookie(number as usize as *mut c_void, c"r".as_ptr(), functions) };
    if stream.is_null() {
        return Err(Fault::Errno(memory::errno()));
    }
    // libc itself looks at a stream like this only by its functions; the number is for ours, and for `fileno`.
    put(stream.cast::<u8>().wrapping_add(FILENO_OFFSET).cast::<c_int>(), number)?;
    Ok(stream)
}

fn number_of(stream: *mut FILE) -> Option<RawFd> {
    if stream.is_null() {
        return None;
    }
    get(stream.cast::<u8>().wrapping_add(FILENO_OFFSET).cast::<c_int>().cast_const())
}

extern "C" fn read_stream(cookie: *mut c_void, out: *mut c_char, len: size_t) -> isize {
    read::read(cookie as usize as RawFd, out.cast(), len)
}

extern "C" fn seek_stream(cookie: *mut c_void, offset: *mut i64, whence: c_int) -> c_int {
    let target = read::lseek(cookie as usize as RawFd, get(offset.cast_const()).unwrap_or(0), whence);
    if target < 0 || put(offset, target).is_err() { fail(memory::errno()) } else { 0 }
}

extern "C" fn close_stream(cookie: *mut c_void) -> c_int {
    descriptor::close(cookie as usize as RawFd)
}
