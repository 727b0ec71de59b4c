//! `FILE` streams over our files. They are libc's own streams with our functions below (`fopencookie`), so everything that
//! reads from a stream works: `fread`, `getline`, `fscanf`, C++'s `ifstream`.
//!
//! libc gives such a stream no descriptor. We store our descriptor in the field where every other stream has its own, for `fileno`
//! and for programs that read that field without a call.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use dayfly_client::{View, cancellation};
use libc::{FILE, size_t};

use super::descriptor::{close, dup2, dup3};
use super::hook;
use super::open::{open, open_in};
use super::read::{lseek, read_for_stream};
use crate::fault::{Fault, answer};
use crate::memory::{self, FromC, fail};
use crate::{kernel_copy, path, table, vfork};

type Cookie = *mut c_void;

/// `cookie_io_functions_t`.
#[repr(C)]
struct Functions {
    read: Option<extern "C-unwind" fn(Cookie, FromC<*mut c_char>, size_t) -> isize>,
    write: Option<extern "C-unwind" fn(Cookie, FromC<*const c_char>, size_t) -> isize>,
    seek: Option<extern "C-unwind" fn(Cookie, FromC<*mut i64>, c_int) -> c_int>,
    close: Option<extern "C-unwind" fn(Cookie) -> c_int>,
}

unsafe extern "C" {
    fn fopencookie(cookie: Cookie, mode: *const c_char, functions: Functions) -> *mut FILE;
    fn __fpurge(stream: *mut FILE);
}

/// The offset of the descriptor in glibc's `FILE`. It is part of glibc's binary interface.
const FILENO_OFFSET: usize = 112;
/// The offset of the table of functions that glibc keeps behind each `FILE`.
const TABLE_OFFSET: usize = 216;
/// The offset of `read` in what `fopencookie` creates. glibc scrambles the pointer, in the same way for the whole process.
const READ_OFFSET: usize = 232;

/// The words at [`TABLE_OFFSET`] and [`READ_OFFSET`] of each stream that [`new_stream`] has created; 0 before the first.
static TABLE: AtomicUsize = AtomicUsize::new(0);
static READ: AtomicUsize = AtomicUsize::new(0);

hook! {
    fn fopen | fopen64 (path: FromC<*const c_char>, mode: FromC<*const c_char>) -> *mut FILE {
        let ours = |view: &View, path: &[u8]| {
            let flags = open_flags(mode)?;
            let number = open_in(view, path, flags)?;
            new_stream(number).inspect_err(|_| {
                let _deferral = cancellation::defer();
                close(number);
            })
        };
        path::at(libc::AT_FDCWD, path, ours, |_, path| created(fopen::next(path, mode)))
    }

    fn fdopen(descriptor: c_int, mode: FromC<*const c_char>) -> *mut FILE {
        match table::is_ours(descriptor) {
            false => fdopen::next(descriptor, mode),
            true => answer(|| match open_flags(mode)? & libc::O_ACCMODE {
                libc::O_RDONLY => new_stream(descriptor),
                _ => Err(Fault::Errno(libc::EINVAL)),
            }),
        }
    }

    fn freopen | freopen64 (path: FromC<*const c_char>, mode: FromC<*const c_char>, stream: FromC<*mut FILE>) -> *mut FILE {
        if !path.is_null() && is_our_stream(stream) {
            return reopen(path, mode, stream);
        }
        if path.is_null() {
            // This reopens the same file in another mode. Our files support only the mode they were opened with.
            let is_ours = number_of(stream).is_some_and(table::is_ours);
            return if is_ours { stream.raw() } else { freopen::next(path, mode, stream) };
        }
        // The stream stays libc's own, so it gets a kernel copy.
        let ours = |view: &View, path: &[u8]| {
            if open_flags(mode)? & libc::O_ACCMODE != libc::O_RDONLY {
                return Err(Fault::Errno(libc::EROFS));
            }
            let _deferral = cancellation::defer();
            let copy = kernel_copy::copy_of(view, &view.open(path)?)?;
            forget_number(stream);
            let stream = freopen::next(c"/dev/null".into(), mode, stream);
            // SAFETY: libc returns the program's stream, which stays open.
            let opened = unsafe { FromC::new(stream) };
            if stream.is_null() || dup2::next(copy.as_raw_fd(), fileno::next(opened)) < 0 {
                return Err(Fault::Errno(memory::errno()));
            }
            Ok(stream)
        };
        path::at(libc::AT_FDCWD, path, ours, |_, path| {
            forget_number(stream);
            created(freopen::next(path, mode, stream))
        })
    }

    fn fclose(stream: FromC<*mut FILE>) -> c_int {
        forget_number(stream);
        fclose::next(stream)
    }

    fn daemon(no_chdir: c_int, no_close: c_int) -> c_int {
        if no_close == 0 {
            (0..=2).for_each(table::forget);
        }
        daemon::next(no_chdir, no_close)
    }

    fn fileno | fileno_unlocked (stream: FromC<*mut FILE>) -> c_int {
        match number_of(stream).filter(|&number| table::is_ours(number)) {
            Some(number) => number,
            None => fileno::next(stream),
        }
    }
}

/// Returns the flags of `open` that correspond to a mode of `fopen`.
fn open_flags(mode: FromC<*const c_char>) -> Result<c_int, Fault> {
    let mode = mode.string().ok_or(libc::EINVAL)?.to_bytes();
    // A comma begins the name of a character set.
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

/// Forgets a stream's number before libc closes it, because libc does so without calling our hooks.
fn forget_number(stream: FromC<*mut FILE>) {
    if let Some(number) = number_of(stream).filter(|_| vfork::child().is_none()) {
        table::forget(number);
    }
}

/// Tells the table the number of a stream that libc has just made, and returns the stream.
fn created(stream: *mut FILE) -> *mut FILE {
    // SAFETY: libc's new stream, or null.
    if let Some(number) = number_of(unsafe { FromC::new(stream) }) {
        table::created(number);
    }
    stream
}

/// Creates a stream over a number of ours.
fn new_stream(number: RawFd) -> Result<*mut FILE, Fault> {
    let functions = Functions { read: Some(read_stream), write: None, seek: Some(seek_stream), close: Some(close_stream) };
    // SAFETY: the mode is a string, and the functions take what `fopencookie` promises to pass.
    let stream = unsafe { fopencookie(number as usize as Cookie, c"r".as_ptr(), functions) };
    if stream.is_null() {
        return Err(Fault::Errno(memory::errno()));
    }
    // SAFETY: libc's new stream.
    let created = unsafe { FromC::new(stream) };
    number_field(created).put(number)?;
    TABLE.store(word(created, TABLE_OFFSET).unwrap_or(0), Ordering::Relaxed);
    READ.store(word(created, READ_OFFSET).unwrap_or(0), Ordering::Relaxed);
    Ok(stream)
}

/// Returns a word of a stream.
fn word(stream: FromC<*mut FILE>, offset: usize) -> Option<usize> {
    // SAFETY: the callers know that the stream has a word there; `get` checks that it can be read.
    unsafe { FromC::<*mut usize>::new(stream.raw().cast::<u8>().wrapping_add(offset).cast()) }.get()
}

/// Returns whether [`new_stream`] created a stream, whatever is open at its number now.
fn is_our_stream(stream: FromC<*mut FILE>) -> bool {
    let table = TABLE.load(Ordering::Relaxed);
    table != 0
        && !stream.is_null()
        && word(stream, TABLE_OFFSET) == Some(table)
        && word(stream, READ_OFFSET) == Some(READ.load(Ordering::Relaxed))
}

/// Opens another file at the number of one of our streams, in the namespace or outside: our functions read from the number. glibc's
/// own `freopen` crashes on a stream from `fopencookie`.
fn reopen(path: FromC<*const c_char>, mode: FromC<*const c_char>, stream: FromC<*mut FILE>) -> *mut FILE {
    let before = memory::errno();
    let number = number_of(stream).unwrap_or(-1);
    let flags = open_flags(mode).ok();
    let opened = match flags {
        None => fail(libc::EINVAL),
        // glibc has marked the stream as one that cannot be written to.
        Some(flags) if flags & libc::O_ACCMODE != libc::O_RDONLY => fail(libc::ENOTSUP),
        Some(flags) => open(path, flags, 0),
    };
    let close_on_exec = flags.unwrap_or(0) & libc::O_CLOEXEC;
    if opened < 0 || opened != number && dup3(opened, number, close_on_exec) < 0 {
        let errno = memory::errno();
        if opened >= 0 {
            close(opened);
        }
        fclose(stream);
        memory::set_errno(errno);
        return null_mut();
    }
    if opened != number {
        close(opened);
    }
    // SAFETY: the program's stream. Seeking to the end makes glibc forget what is in the buffer and where that was.
    unsafe {
        __fpurge(stream.raw());
        libc::fseek(stream.raw(), 0, libc::SEEK_END);
        libc::fseek(stream.raw(), 0, libc::SEEK_SET);
        libc::clearerr(stream.raw());
    }
    memory::set_errno(before);
    stream.raw()
}

/// Returns a stream's field for its descriptor, which libc does not use in a stream from `fopencookie`.
fn number_field<'a>(stream: FromC<'a, *mut FILE>) -> FromC<'a, *mut c_int> {
    // SAFETY: every `FILE` of glibc has a number at this offset.
    unsafe { FromC::new(stream.raw().cast::<u8>().wrapping_add(FILENO_OFFSET).cast()) }
}

fn number_of(stream: FromC<*mut FILE>) -> Option<RawFd> {
    if stream.is_null() { None } else { number_field(stream).get() }
}

extern "C-unwind" fn read_stream(cookie: Cookie, out: FromC<*mut c_char>, len: size_t) -> isize {
    read_for_stream(cookie as usize as RawFd, out.bytes(), len)
}

extern "C-unwind" fn seek_stream(cookie: Cookie, offset: FromC<*mut i64>, whence: c_int) -> c_int {
    let target = lseek(cookie as usize as RawFd, offset.get().unwrap_or(0), whence);
    if target < 0 || offset.put(target).is_err() { fail(memory::errno()) } else { 0 }
}

extern "C-unwind" fn close_stream(cookie: Cookie) -> c_int {
    close(cookie as usize as RawFd)
}
