//! The placeholder: the kernel descriptor behind each of our open files.
//!
//! A file of the namespace needs a number in the kernel's descriptor table, so that the kernel gives that number to no other file
//! and inherits, duplicates and closes it as usual. Each such number is a duplicate of one descriptor: the server's socket,
//! opened with `O_PATH`. Nothing can be read through it. A system call that bypasses this library gets EBADF, and opening it
//! again through /proc gives ENXIO: an error, never an early end of file.
//!
//! The placeholder is opened when the process attaches, and stays open as long as the process lives. If the program closes it by a
//! system call of its own, this library opens it again when it notices. Until then, a new number may be a duplicate of one of the
//! program's files: [`is_suspect`] says whether that can have happened.

use std::ffi::CString;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

use dayfly_client::raw_call;
use dayfly_client::reserved_fd::ReservedFd;

use crate::memory::{self, Errno};
use crate::next;

/// The flags that the kernel reports for the placeholder and its duplicates, and for hardly any other file.
const FLAGS: i32 = libc::O_PATH | libc::O_NOFOLLOW;

/// The descriptor that all others are duplicates of.
static PLACEHOLDER: AtomicPtr<Placeholder> = AtomicPtr::new(null_mut());
/// Whether the placeholder may have been another file for a moment.
static IS_SUSPECT: AtomicBool = AtomicBool::new(false);
/// Whether the last request for a new number failed because none was free.
static ARE_SCARCE: AtomicBool = AtomicBool::new(false);
/// The number that the placeholder had when the program closed it.
static LOST: AtomicI32 = AtomicI32::new(-1);

struct Placeholder {
    reserved: ReservedFd,
    socket: CString,
}

fn placeholder() -> Option<&'static Placeholder> {
    let placeholder = PLACEHOLDER.load(Ordering::Acquire);
    // SAFETY: published once by `open`, from a box that is never freed.
    (!placeholder.is_null()).then(|| unsafe { &*placeholder })
}

/// Opens the placeholder, unless another thread already has.
pub(crate) fn open(socket: &Path) -> Result<(), Errno> {
    let socket = CString::new(socket.as_os_str().as_bytes()).map_err(|_| libc::EINVAL)?;
    let reserved = ReservedFd::new(open_socket(&socket)?);
    let opened = Box::into_raw(Box::new(Placeholder { reserved, socket }));
    if PLACEHOLDER.compare_exchange(null_mut(), opened, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: created just above and not published.
        drop(unsafe { Box::from_raw(opened) });
    }
    Ok(())
}

fn open_socket(socket: &CString) -> Result<std::fs::File, Errno> {
    memory::owned(next::open(socket.as_c_str().into(), FLAGS | libc::O_CLOEXEC, 0))
}

/// Creates a duplicate at the lowest free number.
pub(crate) fn new_number(close_on_exec: bool) -> Result<RawFd, Errno> {
    let placeholder = placeholder().ok_or(libc::EIO)?;
    let number = placeholder.reserved.number();
    if IS_SUSPECT.load(Ordering::Relaxed) {
        placeholder.restore()?;
        return duplicate(placeholder.reserved.number(), close_on_exec);
    }
    match duplicate(number, close_on_exec) {
        Err(libc::EBADF) => {
            placeholder.restore()?;
            duplicate(placeholder.reserved.number(), close_on_exec)
        }
        result => result,
    }
}

/// Returns whether the process may open another file.
pub(crate) fn has_free_number() -> bool {
    let has_one = match new_number(true) {
        Ok(number) => {
            // SAFETY: made just above, and nobody else knows it.
            raw_call::close(unsafe { OwnedFd::from_raw_fd(number) });
            true
        }
        Err(errno) => errno != libc::EMFILE,
    };
    ARE_SCARCE.store(!has_one, Ordering::Relaxed);
    has_one
}

/// Returns whether a call has failed because no number was free, and none has been free since.
#[inline]
pub(crate) fn are_numbers_scarce() -> bool {
    ARE_SCARCE.load(Ordering::Relaxed)
}

/// Learns that a call for a new number has failed.
#[cold]
pub(crate) fn note_failed(errno: Errno) {
    if errno == libc::EMFILE {
        ARE_SCARCE.store(true, Ordering::Relaxed);
    }
}

fn duplicate(placeholder: RawFd, close_on_exec: bool) -> Result<RawFd, Errno> {
    let number = match close_on_exec {
        true => next::fcntl_number(placeholder, libc::F_DUPFD_CLOEXEC, 0),
        false => next::dup(placeholder),
    };
    if number >= 0 {
        return Ok(number);
    }
    note_failed(memory::errno());
    Err(memory::errno())
}

impl Placeholder {
    /// Opens the placeholder again if the program has closed it.
    ///
    /// # Errors
    ///
    /// EIO if the server's socket is no longer there.
    fn restore(&self) -> Result<(), Errno> {
        if self.reserved.is_intact() {
            return Ok(());
        }
        IS_SUSPECT.store(true, Ordering::Release);
        LOST.store(self.reserved.number(), Ordering::Release);
        let file = open_socket(&self.socket).map_err(|_| libc::EIO)?;
        if self.reserved.restore(file) { Ok(()) } else { Err(libc::EIO) }
    }
}

/// Returns whether each new number is checked, and therefore certainly a duplicate of the placeholder.
#[inline]
pub(crate) fn is_checked_each_time() -> bool {
    IS_SUSPECT.load(Ordering::Relaxed)
}

/// Returns whether a number that was created as a duplicate of the placeholder may be a duplicate of another file.
#[cold]
pub(crate) fn is_suspect() -> bool {
    if placeholder().is_some_and(|placeholder| !placeholder.reserved.is_intact()) {
        IS_SUSPECT.store(true, Ordering::Release);
    }
    IS_SUSPECT.load(Ordering::Acquire)
}

/// Repairs a number that was created while the program had a file of its own at the placeholder's number, and that is therefore a
/// duplicate of that file. Returns whether the number was such a duplicate and is now a duplicate of the placeholder.
#[cold]
pub(crate) fn repair(number: RawFd) -> bool {
    let Some(placeholder) = placeholder() else { return false };
    let is_restored = placeholder.restore().is_ok();
    if !is_restored || raw_call::are_same(number, LOST.load(Ordering::Acquire)) != Some(true) {
        return false;
    }
    let flags = if next::fcntl_number(number, libc::F_GETFD, 0) == libc::FD_CLOEXEC { libc::O_CLOEXEC } else { 0 };
    next::dup3(placeholder.reserved.number(), number, flags) == number
}

/// Learns that the program has a file of its own at a number that was reserved, or is about to have one. A thread that is just
/// creating a duplicate of the placeholder may not have noticed.
pub(crate) fn note_given(number: RawFd) {
    if placeholder().is_some_and(|placeholder| placeholder.reserved.number() == number) {
        IS_SUSPECT.store(true, Ordering::Release);
    }
}

/// Returns whether the kernel has a duplicate of the placeholder at a number.
pub(crate) fn is_at(number: RawFd) -> bool {
    // The flags are checked first: they rule out almost every other file, and reading them never waits for a file system.
    if raw_call::flags(number).is_none_or(|flags| flags & FLAGS != FLAGS) {
        return false;
    }
    let Some(placeholder) = placeholder() else { return false };
    // The cheaper of two checks comes first. It fails if the program has closed or replaced the placeholder.
    let is_duplicate = raw_call::are_same(number, placeholder.reserved.number()) == Some(true);
    is_duplicate || raw_call::identity(number) == Some(placeholder.reserved.identity())
}
