//! Looks up early the functions of the next library that are called in signal handlers, by the program or by this library itself. A
//! lookup takes locks of the dynamic linker and may allocate, so it must not happen in a handler. These functions are looked up
//! when the program sets its first handler: together they take about 50 us, which programs without handlers should not pay.
//!
//! A function that is missing here works, but its first call is not async-signal-safe.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::UNKNOWN;

macro_rules! early {
    ($($name:ident)*) => {
        static ADDRESSES: [(&CStr, AtomicUsize); [$(stringify!($name)),*].len()] =
            [$((super::c_name!($name), AtomicUsize::new(UNKNOWN))),*];
    };
}

early! {
    accept accept4 access bind chdir chmod chown close close_range connect dup dup2 dup3 epoll_create1 epoll_pwait
    epoll_wait eventfd eventfd_read eventfd_write execve execveat faccessat fchdir fchmod fchmodat fchown fchownat fcntl
    fdatasync fexecve flock fstatat fstatfs fsync ftruncate futimens getcwd getpeername getsockname getsockopt ioctl lchown
    link linkat listen lseek mkdir mkdirat mkfifo mkfifoat mknod mknodat mmap mprotect mremap munmap open openat pipe pipe2
    poll posix_fadvise ppoll pread preadv pselect pthread_sigmask pwrite pwritev read readlink readlinkat readv recv
    recvfrom recvmmsg recvmsg rename renameat rmdir select send sendmsg sendto setsockopt shutdown sigaction signal signalfd
    sigprocmask sockatmark socket socketpair statfs statx symlink symlinkat tcgetattr tcsetattr timerfd_create truncate
    unlink unlinkat utime utimensat utimes write writev
}

/// Looks all of them up, unless that has been done.
pub(crate) fn look_up_all() {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    if IS_DONE.load(Ordering::Relaxed) {
        return;
    }
    for (name, address) in &ADDRESSES {
        address.store(super::find(name), Ordering::Relaxed);
    }
    IS_DONE.store(true, Ordering::Relaxed);
}

/// Returns what [`look_up_all`] has found; [`UNKNOWN`] for other functions.
pub(super) fn address(name: &CStr) -> usize {
    ADDRESSES.iter().find(|(known, _)| *known == name).map_or(UNKNOWN, |(_, address)| address.load(Ordering::Relaxed))
}
