//! Lists which arguments of system calls are descriptors that the call uses. To such a call, a reserved descriptor looks closed.
//!
//! The list leaves out calls that close or replace a number, arguments with a number of the program's own choice (the second of
//! `dup2`), and requests in memory (`io_submit`, io_uring).

use std::ffi::c_long;

/// Defines [`NUMBERS`] and [`positions`].
macro_rules! descriptors {
    ($($positions:expr => $($(#[$only:meta])* $name:ident)*;)*) => {
        /// The numbers of all calls below.
        pub(super) const NUMBERS: &[c_long] = &[$($($(#[$only])* libc::$name),*),*];

        /// Returns which arguments of a call are descriptors.
        #[inline]
        pub(super) fn positions(number: c_long) -> &'static [usize] {
            match number {
                $($($(#[$only])* libc::$name => &$positions,)*)*
                _ => &[],
            }
        }
    };
}

descriptors! {
    [0] =>
        SYS_read SYS_pread64 SYS_readv SYS_preadv SYS_preadv2 SYS_write SYS_pwrite64 SYS_writev SYS_pwritev SYS_pwritev2
        SYS_lseek SYS_fstat SYS_getdents64 SYS_fadvise64 SYS_readahead SYS_vmsplice SYS_ioctl SYS_fcntl SYS_flock SYS_fsync
        SYS_fdatasync SYS_syncfs SYS_sync_file_range SYS_fallocate SYS_ftruncate SYS_fstatfs SYS_fchmod SYS_fchown SYS_fchdir
        SYS_fgetxattr SYS_flistxattr SYS_fsetxattr SYS_fremovexattr SYS_dup SYS_dup3 SYS_finit_module SYS_setns
        SYS_openat SYS_openat2 SYS_newfstatat SYS_statx SYS_faccessat SYS_faccessat2 SYS_readlinkat SYS_execveat SYS_mkdirat
        SYS_mknodat SYS_unlinkat SYS_fchmodat SYS_fchownat SYS_utimensat SYS_name_to_handle_at SYS_open_by_handle_at SYS_open_tree
        SYS_accept SYS_accept4 SYS_bind SYS_connect SYS_listen SYS_shutdown SYS_getsockopt SYS_setsockopt SYS_getsockname
        SYS_getpeername SYS_sendto SYS_sendmsg SYS_sendmmsg SYS_recvfrom SYS_recvmsg SYS_recvmmsg
        SYS_epoll_pwait SYS_epoll_pwait2 SYS_timerfd_settime SYS_timerfd_gettime SYS_signalfd4 SYS_inotify_add_watch
        SYS_inotify_rm_watch SYS_pidfd_getfd SYS_pidfd_send_signal
        #[cfg(target_arch = "x86_64")] SYS_dup2
        #[cfg(target_arch = "x86_64")] SYS_epoll_wait
        #[cfg(target_arch = "x86_64")] SYS_signalfd
        #[cfg(target_arch = "x86_64")] SYS_futimesat
        #[cfg(target_arch = "x86_64")] SYS_getdents
        #[cfg(target_arch = "x86_64")] SYS_fchmodat2;
    [1] => SYS_symlinkat;
    [0, 1] => SYS_sendfile SYS_tee;
    [0, 2] => SYS_splice SYS_copy_file_range SYS_epoll_ctl SYS_linkat SYS_renameat2 SYS_move_mount
        #[cfg(target_arch = "x86_64")] SYS_renameat;
    [0, 3] => SYS_fanotify_mark;
    [4] => SYS_mmap;
}
