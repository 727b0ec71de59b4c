//! The placeholder: the kernel descriptor behind each of our open files.
//!
//! A file of the namespace needs a number in the kernel's descriptor table, so that the kernel gives that number to no other file
//! and inherits, duplicates and closes it as usual. Each such number is a duplicate of one descriptor: the server's socket,
//! opened with `O_PATH`. Nothing can be read through it. A system call that bypasses this library gets EBADF, and opening it
//! again through /proc gives ENXIO: an error, never an early end of file.
//!
//! The placeholder is opened when the process attaches, and stays open as long as the process lives.

use std::ffi::CString;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use dayfly_client::reserved_fd::ReservedFd;

use crate::memory::{self, Errno};
use crate::next;

/// The descriptor that all others are duplicates of.
static PLACEHOLDER: AtomicI32 = AtomicI32::new(-1);
/// Device and inode of the socket, by which duplicates are recognized.
static DEVICE: AtomicU64 = AtomicU64::new(0);
static INODE: AtomicU64 = AtomicU64::new(0);

/// Opens the placeholder, unless another thread already has.
pub(crate) fn open(socket: &Path) -> Result<(), Errno> {
    let path = CString::new(socket.as_os_str().as_bytes()).map_err(|_| libc::EINVAL)?;
    let descriptor = next::open(path.as_c_str().into(), libc::O_PATH | libc::O_CLOEXEC, 0);
    let reserved = ReservedFd::new(memory::owned(descriptor)?);
    let stat = kernel_stat(reserved.as_raw_fd()).ok_or(libc::EIO)?;
    DEVICE.store(stat.st_dev, Ordering::Release);
    INODE.store(stat.st_ino, Ordering::Release);
    if PLACEHOLDER.compare_exchange(-1, reserved.as_raw_fd(), Ordering::AcqRel, Ordering::Acquire).is_ok() {
        // Open for as long as the process lives.
        std::mem::forget(reserved);
    }
    Ok(())
}

/// Creates a duplicate at the lowest free number.
pub(crate) fn new_number(close_on_exec: bool) -> Result<RawFd, Errno> {
    let placeholder = PLACEHOLDER.load(Ordering::Acquire);
    let number = match close_on_exec {
        true => next::fcntl_number(placeholder, libc::F_DUPFD_CLOEXEC, 0),
        false => next::dup(placeholder),
    };
    if number < 0 { Err(memory::errno()) } else { Ok(number) }
}

/// Returns whether the kernel has a duplicate of the placeholder at a number.
pub(crate) fn is_at(number: RawFd) -> bool {
    let expected = (DEVICE.load(Ordering::Acquire), INODE.load(Ordering::Acquire));
    kernel_stat(number).is_some_and(|stat| (stat.st_dev, stat.st_ino) == expected)
}

/// Returns the kernel's `fstat` of a number.
pub(crate) fn kernel_stat(number: RawFd) -> Option<libc::stat> {
    let mut stat: libc::stat = memory::zeroed();
    (next::fstatat(number, c"".into(), (&mut stat).into(), libc::AT_EMPTY_PATH) == 0).then_some(stat)
}
