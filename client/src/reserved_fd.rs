//! Descriptors that this library reserves for itself. They have high numbers, away from the numbers
//! that programs see, are close-on-exec, and are recorded, so that a program that closes all
//! descriptors does not close them.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::resource::{Resource, getrlimit};
use std::os::fd::{FromRawFd, OwnedFd};

/// Reserved descriptors lie just below this number, or below the process's limit. A higher ceiling
/// would cost every fork, because the kernel copies the table up to its last descriptor.
const CEILING: u64 = 1024;
/// How many numbers below the ceiling are tried first.
const ROOM: u64 = 128;
/// Numbers below this are protected. A descriptor that had to go above it works, but the program
/// can close it.
const WATCHED: usize = 2048;

static WATCH: [AtomicU64; WATCHED / 64] = [const { AtomicU64::new(0) }; WATCHED / 64];

/// A file with a reserved descriptor.
pub struct ReservedFd(ManuallyDrop<File>);

impl ReservedFd {
    /// Moves a file's descriptor out of the program's way. If no number is free there, it stays
    /// where it is.
    pub fn new(file: File) -> Self {
        let limit = getrlimit(Resource::RLIMIT_NOFILE).map_or(CEILING, |(soft, _)| soft);
        let floor = limit.min(CEILING).saturating_sub(ROOM).max(limit.min(CEILING) / 2);
        let file = match fcntl(&file, FcntlArg::F_DUPFD_CLOEXEC(floor as RawFd)) {
            // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
            Ok(high) => File::from(unsafe { OwnedFd::from_raw_fd(high) }),
            Err(_) => file,
        };
        watch(file.as_raw_fd(), true);
        Self(ManuallyDrop::new(file))
    }

    /// Reserves a duplicate of a file's descriptor, see [`ReservedFd::new`].
    ///
    /// # Errors
    ///
    /// If the descriptor cannot be duplicated.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::new(file.try_clone()?))
    }
}

impl Deref for ReservedFd {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for ReservedFd {
    fn drop(&mut self) {
        watch(self.0.as_raw_fd(), false);
        // A forked child does not have a descriptor that another thread opened while the kernel copied the process. `File` would
        // abort the process for that.
        // SAFETY: the descriptor is this value's own, or no descriptor.
        unsafe { libc::close(self.0.as_raw_fd()) };
    }
}

fn watch(descriptor: RawFd, on: bool) {
    let Some(word) = usize::try_from(descriptor).ok().and_then(|number| WATCH.get(number / 64)) else { return };
    let bit = 1 << (descriptor % 64);
    if on {
        word.fetch_or(bit, Ordering::AcqRel)
    } else {
        word.fetch_and(!bit, Ordering::AcqRel)
    };
}

/// Returns whether a descriptor is reserved by the library.
pub fn is_reserved(descriptor: RawFd) -> bool {
    let word = usize::try_from(descriptor).ok().and_then(|number| WATCH.get(number / 64));
    word.is_some_and(|word| word.load(Ordering::Acquire) >> (descriptor % 64) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_descriptor_is_high_and_known_until_it_is_dropped() {
        let reserved = ReservedFd::new(File::open("/dev/null").unwrap());
        let number = reserved.as_raw_fd();
        assert!(number >= 256, "{number}");
        assert!(is_reserved(number) && !is_reserved(0) && !is_reserved(-1) && !is_reserved(i32::MAX));
        drop(reserved);
        assert!(!is_reserved(number));
    }
}
