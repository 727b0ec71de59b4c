//! Which system calls concern this library, and how each is answered.
//!
//! A rule says when a call concerns the namespace, and which hook answers it then. All other calls of that number are passed on. If
//! the library has to learn of their result, the rule has an expression after `else`, which passes them on.

use std::ffi::{c_int, c_long};

use libc::{EBADF, mode_t};

use super::super::attributes::{fgetxattr, flistxattr, fstatfs, getxattr, lgetxattr, listxattr, llistxattr, statfs};
#[cfg(target_arch = "x86_64")]
use super::super::change::{chmod, chown, futimesat, lchown, mkdir, mknod, rmdir, symlink, unlink, utime, utimes};
use super::super::change::{
    fchmod, fchmodat, fchown, fchownat, fremovexattr, fsetxattr, ftruncate, lremovexattr, lsetxattr, mkdirat, mknodat,
    removexattr, setxattr, symlinkat, truncate, unlinkat, utimensat,
};
use super::super::descriptor::{close_range, fdatasync, flock, fsync, ioctl, may_close, sync_file_range, syncfs};
use super::super::directory::getdents64;
use super::super::exec::{execve, execveat};
use super::super::map::{maps_ours, mmap};
use super::super::message::{any_passes_ours, passes_ours, sendmmsg, sendmsg};
use super::super::names::{chdir, faccessat, fchdir, name_to_handle_at, readlinkat};
use super::super::open::openat;
use super::super::poll::epoll_ctl;
use super::super::read::{lseek, pread, preadv, preadv2, read, readahead, readv};
use super::super::stat::{fstat, fstatat, statx};
use super::super::transfer::{copy_file_range, sendfile, splice, tee};
use super::super::two_paths::{linkat, renameat2};
#[cfg(target_arch = "x86_64")]
use super::super::{
    directory::old_getdents,
    names::{access, readlink},
    open::{creat, open},
    stat::{lstat, stat},
    two_paths::{link, rename, renameat},
};
use super::Call;
use crate::memory::{FromC, fail};

/// The flag of `openat2` that forbids links such as `/proc/self/fd/N` in a path.
const RESOLVE_NO_MAGICLINKS: u64 = 0x02;

/// `struct open_how`, as far as its fields are known here.
#[repr(C)]
#[derive(Clone, Copy)]
struct HowToOpen {
    flags: u64,
    mode: u64,
    resolve: u64,
}

/// Defines [`NUMBERS`] and [`follow`] from the rules.
macro_rules! rules {
    ($($(#[$only:meta])* $name:ident: $call:ident $(if $condition:expr)? => $answer:expr $(, else $other:expr)?;)*) => {
        /// The numbers of the calls below.
        pub(super) const NUMBERS: &[c_long] = &[$($(#[$only])* libc::$name),*];

        /// Answers a call, or passes it on.
        pub(super) fn follow(call: &Call) -> c_long {
            match call.number {
                $($(#[$only])* libc::$name => {
                    let $call = call;
                    rules!(@answer $call [$($condition)?] [$answer] [$($other)?])
                })*
                _ => call.kernel(),
            }
        }
    };
    (@answer $call:ident [] [$answer:expr] []) => { c_long::from($answer) };
    (@answer $call:ident [$condition:expr] [$answer:expr] []) => {
        if $condition { $answer as c_long } else { $call.kernel() }
    };
    (@answer $call:ident [$condition:expr] [$answer:expr] [$other:expr]) => {
        if $condition { $answer as c_long } else { $other }
    };
}

rules! {
    // Reading. Where the rule only asks whether the number may be ours, the hook itself decides whether to ask the kernel.
    SYS_read: c if c.may_be_ours(0) => read(c.get(0), c.get(1), c.get(2));
    SYS_lseek: c if c.may_be_ours(0) => lseek(c.get(0), c.get(1), c.get(2));
    SYS_fstat: c if c.may_be_ours(0) => fstat(c.get(0), c.get(1));
    SYS_pread64: c if c.is_ours(0) => pread(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_readv: c if c.is_ours(0) => readv(c.get(0), c.get(1), c.get(2));
    SYS_preadv: c if c.is_ours(0) => preadv(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_preadv2: c if c.is_ours(0) => preadv2(c.get(0), c.get(1), c.get(2), c.get(3), c.get(5));
    SYS_getdents64: c if c.is_ours(0) => getdents64(c.get(0), c.get(1), c.get(2));
    SYS_mmap: c if maps_ours(c.get(3), c.get(4))
        => Call::address(mmap(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4), c.get(5))), else c.maps();
    SYS_fadvise64: c if c.may_be_ours(0) => c.advise();
    SYS_readahead: c if c.is_ours(0) => readahead(c.get(0), c.get(1), c.get(2));
    SYS_sendfile: c if c.is_ours(1) => sendfile(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_copy_file_range: c if c.is_ours(0) || c.is_ours(2)
        => copy_file_range(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4), c.get(5));
    SYS_splice: c if c.is_ours(0) => splice(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4), c.get(5));
    SYS_tee: c if c.is_ours(0) => tee(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_sync_file_range: c if c.is_ours(0) => sync_file_range(c.get(0), c.get(1), c.get(2), c.get(3));

    // Waiting.
    SYS_ppoll: c => c.polls(no_time(&mut [0; 2]));
    SYS_pselect6: c => c.selects(no_time(&mut [0; 2]));

    // Reads by the kernel, which cannot read a placeholder.
    SYS_io_submit: c => c.submits();
    SYS_io_uring_setup: c => c.sets_up_ring();

    // Memory, so that the library forgets which pages it may touch.
    SYS_munmap: c => c.unmaps();
    SYS_mremap: c => c.resizes();
    SYS_mprotect: c => c.protects();
    SYS_pkey_mprotect: c => c.protects();
    SYS_shmdt: c => c.detaches();

    // Descriptors.
    SYS_close: c if !may_close(c.get(0)) => fail::<c_int>(EBADF);
    SYS_close_range: c => close_range(c.get(0), c.get(1), c.get(2));
    SYS_dup: c => c.duplicates();
    SYS_dup3: c => c.duplicates_to();
    SYS_fcntl: c => c.controls();
    SYS_ioctl: c if c.may_be_ours(0) => ioctl(c.get(0), c.get(1), c.get(2)), else c.may_create();
    SYS_flock: c if c.is_ours(0) => flock(c.get(0), c.get(1));
    SYS_fsync: c if c.is_ours(0) => fsync(c.get(0));
    SYS_fdatasync: c if c.is_ours(0) => fdatasync(c.get(0));
    SYS_syncfs: c if c.is_ours(0) => syncfs(c.get(0));
    SYS_fstatfs: c if c.is_ours(0) => fstatfs(c.get(0), c.get(1));
    SYS_fgetxattr: c if c.is_ours(0) => fgetxattr(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_flistxattr: c if c.is_ours(0) => flistxattr(c.get(0), c.get(1), c.get(2));
    SYS_fsetxattr: c if c.is_ours(0) => fsetxattr(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_fremovexattr: c if c.is_ours(0) => fremovexattr(c.get(0), c.get(1));
    SYS_ftruncate: c if c.is_ours(0) => ftruncate(c.get(0), c.get(1));
    SYS_fchmod: c if c.is_ours(0) => fchmod(c.get(0), c.get(1));
    SYS_fchown: c if c.is_ours(0) => fchown(c.get(0), c.get(1), c.get(2));
    SYS_fchdir: c if c.is_ours(0) => fchdir(c.get(0)), else c.leaves();
    SYS_epoll_ctl: c if c.is_ours(2) => epoll_ctl(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_sendmsg: c if passes_ours(c.get(1)) => sendmsg(c.get(0), c.get(1), c.get(2));
    SYS_sendmmsg: c if any_passes_ours(c.get(1), c.get(2)) => sendmmsg(c.get(0), c.get(1), c.get(2), c.get(3));

    // Paths.
    SYS_openat: c if c.leads_in_from(0, 1) => openat(c.get(0), c.get(1), c.get(2), c.get(3)), else c.creates();
    SYS_openat2: c if c.leads_in_from(0, 1) => open_as(c), else c.creates();
    SYS_newfstatat: c if c.leads_in_from(0, 1) => fstatat(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_statx: c if c.leads_in_from(0, 1) => statx(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_statfs: c if c.leads_in(0) => statfs(c.get(0), c.get(1));
    SYS_faccessat: c if c.leads_in_from(0, 1) => faccessat(c.get(0), c.get(1), c.get(2), 0);
    SYS_faccessat2: c if c.leads_in_from(0, 1) => faccessat(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_readlinkat: c if c.leads_in_from(0, 1) => readlinkat(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_name_to_handle_at: c if c.leads_in_from(0, 1) => name_to_handle_at(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_getcwd: c => c.working_directory();
    SYS_chdir: c if c.leads_in(0) => chdir(c.get(0)), else c.leaves();
    SYS_execve: c => execve(c.get(0), c.get(1), c.get(2));
    SYS_execveat: c => execveat(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_getxattr: c if c.leads_in(0) => getxattr(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_lgetxattr: c if c.leads_in(0) => lgetxattr(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_listxattr: c if c.leads_in(0) => listxattr(c.get(0), c.get(1), c.get(2));
    SYS_llistxattr: c if c.leads_in(0) => llistxattr(c.get(0), c.get(1), c.get(2));

    // Changes, which fail.
    SYS_mkdirat: c if c.leads_in_from(0, 1) => mkdirat(c.get(0), c.get(1), c.get(2));
    SYS_mknodat: c if c.leads_in_from(0, 1) => mknodat(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_unlinkat: c if c.leads_in_from(0, 1) => unlinkat(c.get(0), c.get(1), c.get(2));
    SYS_symlinkat: c if c.leads_in_from(1, 2) => symlinkat(c.get(0), c.get(1), c.get(2));
    SYS_linkat: c if c.leads_in_from(0, 1) || c.leads_in_from(2, 3)
        => linkat(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_renameat2: c if c.leads_in_from(0, 1) || c.leads_in_from(2, 3)
        => renameat2(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_truncate: c if c.leads_in(0) => truncate(c.get(0), c.get(1));
    SYS_fchmodat: c if c.leads_in_from(0, 1) => fchmodat(c.get(0), c.get(1), c.get(2), 0);
    SYS_fchownat: c if c.leads_in_from(0, 1) => fchownat(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_utimensat: c if c.leads_in_from(0, 1) => utimensat(c.get(0), c.get(1), c.get(2), c.get(3));
    SYS_setxattr: c if c.leads_in(0) => setxattr(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_lsetxattr: c if c.leads_in(0) => lsetxattr(c.get(0), c.get(1), c.get(2), c.get(3), c.get(4));
    SYS_removexattr: c if c.leads_in(0) => removexattr(c.get(0), c.get(1));
    SYS_lremovexattr: c if c.leads_in(0) => lremovexattr(c.get(0), c.get(1));

    // New descriptors.
    SYS_accept: c => c.creates();
    SYS_accept4: c => c.creates();
    SYS_bpf: c => c.may_create();
    SYS_epoll_create1: c => c.creates();
    SYS_eventfd2: c => c.creates();
    SYS_fanotify_init: c => c.creates();
    SYS_fsmount: c => c.creates();
    SYS_fsopen: c => c.creates();
    SYS_fspick: c => c.creates();
    SYS_inotify_init1: c => c.creates();
    SYS_landlock_create_ruleset: c => c.may_create();
    SYS_memfd_create: c => c.creates();
    SYS_mq_open: c => c.creates();
    SYS_open_by_handle_at: c => c.creates();
    SYS_open_tree: c => c.creates();
    SYS_perf_event_open: c => c.creates();
    SYS_pidfd_getfd: c => c.creates();
    SYS_pidfd_open: c => c.creates();
    SYS_pipe2: c => c.creates_two(0);
    SYS_recvmmsg: c => c.receives_many(1);
    SYS_recvmsg: c => c.receives(1);
    SYS_seccomp: c => c.may_create();
    SYS_signalfd4: c => c.creates();
    SYS_socket: c => c.creates();
    SYS_socketpair: c => c.creates_two(3);
    SYS_timerfd_create: c => c.creates();
    SYS_userfaultfd: c => c.creates();

    // Older forms of calls, which newer processor architectures do not have, and calls that `libc` does not name for all of them.
    #[cfg(target_arch = "x86_64")]
    SYS_fchmodat2: c if c.leads_in_from(0, 1) => fchmodat(c.get(0), c.get(1), c.get(2), c.get(3));
    #[cfg(target_arch = "x86_64")]
    SYS_renameat: c if c.leads_in_from(0, 1) || c.leads_in_from(2, 3)
        => renameat(c.get(0), c.get(1), c.get(2), c.get(3));
    #[cfg(target_arch = "x86_64")]
    SYS_open: c if c.leads_in(0) => open(c.get(0), c.get(1), c.get(2)), else c.creates();
    #[cfg(target_arch = "x86_64")]
    SYS_creat: c if c.leads_in(0) => creat(c.get(0), c.get(1)), else c.creates();
    #[cfg(target_arch = "x86_64")]
    SYS_stat: c if c.leads_in(0) => stat(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_lstat: c if c.leads_in(0) => lstat(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_access: c if c.leads_in(0) => access(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_readlink: c if c.leads_in(0) => readlink(c.get(0), c.get(1), c.get(2));
    #[cfg(target_arch = "x86_64")]
    SYS_dup2: c => c.duplicates_to();
    #[cfg(target_arch = "x86_64")]
    SYS_mkdir: c if c.leads_in(0) => mkdir(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_mknod: c if c.leads_in(0) => mknod(c.get(0), c.get(1), c.get(2));
    #[cfg(target_arch = "x86_64")]
    SYS_rmdir: c if c.leads_in(0) => rmdir(c.get(0));
    #[cfg(target_arch = "x86_64")]
    SYS_unlink: c if c.leads_in(0) => unlink(c.get(0));
    #[cfg(target_arch = "x86_64")]
    SYS_symlink: c if c.leads_in(1) => symlink(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_link: c if c.leads_in(0) || c.leads_in(1) => link(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_rename: c if c.leads_in(0) || c.leads_in(1) => rename(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_chmod: c if c.leads_in(0) => chmod(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_chown: c if c.leads_in(0) => chown(c.get(0), c.get(1), c.get(2));
    #[cfg(target_arch = "x86_64")]
    SYS_lchown: c if c.leads_in(0) => lchown(c.get(0), c.get(1), c.get(2));
    #[cfg(target_arch = "x86_64")]
    SYS_utime: c if c.leads_in(0) => utime(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_utimes: c if c.leads_in(0) => utimes(c.get(0), c.get(1));
    #[cfg(target_arch = "x86_64")]
    SYS_futimesat: c if c.leads_in_from(0, 1) => futimesat(c.get(0), c.get(1), c.get(2));
    #[cfg(target_arch = "x86_64")]
    SYS_getdents: c if c.is_ours(0) => old_getdents(c.get(0), c.get(1), c.get::<u32>(2) as usize).unwrap_or(-1);
    #[cfg(target_arch = "x86_64")]
    SYS_poll: c => c.polls(0);
    #[cfg(target_arch = "x86_64")]
    SYS_select: c => c.selects(no_time(&mut [0; 2]));
    #[cfg(target_arch = "x86_64")]
    SYS_memfd_secret: c => c.creates();
    #[cfg(target_arch = "x86_64")]
    SYS_pipe: c => c.creates_two(0);
    #[cfg(target_arch = "x86_64")]
    SYS_eventfd: c => c.creates();
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_create: c => c.creates();
    #[cfg(target_arch = "x86_64")]
    SYS_inotify_init: c => c.creates();
    #[cfg(target_arch = "x86_64")]
    SYS_signalfd: c => c.creates();
}

/// Answers `openat2` for a path of ours. If the caller restricts how the path is resolved, the call fails with ENOSYS, so that the
/// caller restricts it by other means.
fn open_as(call: &Call) -> c_int {
    let how: FromC<*const HowToOpen> = call.get(2);
    if call.get::<usize>(3) < size_of::<HowToOpen>() {
        return fail(libc::EINVAL);
    }
    match how.get() {
        None => fail(libc::EFAULT),
        Some(how) if how.resolve & !RESOLVE_NO_MAGICLINKS != 0 => fail(libc::ENOSYS),
        Some(how) => openat(call.get(0), call.get(1), how.flags as c_int, how.mode as mode_t),
    }
}

/// Returns the address of a timeout of zero, in either of C's two forms. Both consist of seconds and a fraction.
fn no_time(words: &mut [i64; 2]) -> usize {
    words.as_mut_ptr().addr()
}
