//! The functions behind ours: libc's, or those of a library that stands between. Found by name on first use.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{DIR, FILE, dirent, mode_t, off_t, size_t, ssize_t, stat};

use crate::memory::{Failed, fail};

unsafe extern "C" {
    /// `dlvsym`, for names that newer C libraries keep for old programs only.
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// Not looked for yet.
const UNKNOWN: usize = 0;
/// Looked for, and not there.
const MISSING: usize = 1;
/// The oldest version of glibc's symbols on x86-64.
const OLDEST: &CStr = c"GLIBC_2.2.5";

struct Next(AtomicUsize);

impl Next {
    #[inline]
    fn get(&self, name: &CStr) -> usize {
        match self.0.load(Ordering::Relaxed) {
            UNKNOWN => self.find(name),
            known => known,
        }
    }

    #[cold]
    fn find(&self, name: &CStr) -> usize {
        // SAFETY: both names are strings; RTLD_NEXT asks for what comes after this library.
        let found = unsafe {
            let newest = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
            if newest.is_null() { dlvsym(libc::RTLD_NEXT, name.as_ptr(), OLDEST.as_ptr()) } else { newest }
        };
        let found = if found.is_null() { MISSING } else { found as usize };
        self.0.store(found, Ordering::Relaxed);
        found
    }
}

/// Declares functions that pass their arguments on to the next library, unchanged.
macro_rules! next {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty;)*) => {$(
        #[inline]
        #[allow(clippy::too_many_arguments, reason = "as C has it")]
        pub(crate) fn $name($($argument: $kind),*) -> $result {
            static NEXT: Next = Next(AtomicUsize::new(UNKNOWN));
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name has no NUL"),
            };
            let address = NEXT.get(NAME);
            if address == MISSING {
                return missing();
            }
            // SAFETY: the C library's function of this name has this signature. What is passed is what the program passed
            // to ours, whose contract is the same, or our own live objects.
            unsafe { std::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> $result>(address)($($argument),*) }
        }
    )*};
}

fn missing<R: Failed>() -> R {
    fail(libc::ENOSYS)
}

type Strings = *const *const c_char;

next! {
    fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    fn openat(directory: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    fn fopen(path: *const c_char, mode: *const c_char) -> *mut FILE;
    fn fdopen(descriptor: c_int, mode: *const c_char) -> *mut FILE;
    fn freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE;
    fn fileno(stream: *mut FILE) -> c_int;
    fn fclose(stream: *mut FILE) -> c_int;
    fn daemon(stay: c_int, keep_open: c_int) -> c_int;
    fn access(path: *const c_char, mode: c_int) -> c_int;
    fn faccessat(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int;
    fn euidaccess(path: *const c_char, mode: c_int) -> c_int;
    fn readlink(path: *const c_char, buffer: *mut c_char, len: size_t) -> ssize_t;
    fn readlinkat(directory: c_int, path: *const c_char, buffer: *mut c_char, len: size_t) -> ssize_t;
    fn realpath(path: *const c_char, resolved: *mut c_char) -> *mut c_char;
    fn chdir(path: *const c_char) -> c_int;
    fn fchdir(descriptor: c_int) -> c_int;
    fn get_current_dir_name() -> *mut c_char;
    fn getcwd(buffer: *mut c_char, len: size_t) -> *mut c_char;
    fn opendir(path: *const c_char) -> *mut DIR;
    fn fdopendir(descriptor: c_int) -> *mut DIR;
    fn readdir(stream: *mut DIR) -> *mut dirent;
    fn readdir_r(stream: *mut DIR, entry: *mut dirent, result: *mut *mut dirent) -> c_int;
    fn seekdir(stream: *mut DIR, position: i64) -> ();
    fn telldir(stream: *mut DIR) -> i64;
    fn rewinddir(stream: *mut DIR) -> ();
    fn closedir(stream: *mut DIR) -> c_int;
    fn dirfd(stream: *mut DIR) -> c_int;
    fn getdents64(descriptor: c_int, buffer: *mut c_void, len: size_t) -> ssize_t;
    fn statfs(path: *const c_char, out: *mut libc::statfs) -> c_int;
    fn fstatfs(descriptor: c_int, out: *mut libc::statfs) -> c_int;
    fn statvfs(path: *const c_char, out: *mut libc::statvfs) -> c_int;
    fn fstatvfs(descriptor: c_int, out: *mut libc::statvfs) -> c_int;
    fn statx(directory: c_int, path: *const c_char, flags: c_int, mask: c_uint, out: *mut libc::statx) -> c_int;

    fn read(descriptor: c_int, buffer: *mut c_void, len: size_t) -> ssize_t;
    fn readv(descriptor: c_int, vector: *const libc::iovec, count: c_int) -> ssize_t;
    fn pread(descriptor: c_int, buffer: *mut c_void, len: size_t, offset: off_t) -> ssize_t;
    fn preadv(descriptor: c_int, vector: *const libc::iovec, count: c_int, offset: off_t) -> ssize_t;
    fn preadv2(descriptor: c_int, vector: *const libc::iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn write(descriptor: c_int, buffer: *const c_void, len: size_t) -> ssize_t;
    fn pwrite(descriptor: c_int, buffer: *const c_void, len: size_t, offset: off_t) -> ssize_t;
    fn lseek(descriptor: c_int, offset: off_t, whence: c_int) -> off_t;
    fn mmap(address: *mut c_void, len: size_t, protection: c_int, flags: c_int, descriptor: c_int, offset: off_t) -> *mut c_void;
    fn mremap(address: *mut c_void, old_len: size_t, new_len: size_t, flags: c_int, target: *mut c_void) -> *mut c_void;
    fn munmap(address: *mut c_void, len: size_t) -> c_int;
    fn dup(descriptor: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    fn fcntl(descriptor: c_int, command: c_int, argument: c_ulong) -> c_int;
    fn ioctl(descriptor: c_int, request: c_ulong, argument: c_ulong) -> c_int;
    fn close(descriptor: c_int) -> c_int;
    fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn copy_file_range(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, len: size_t, flags: c_uint) -> ssize_t;
    fn splice(from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, len: size_t, flags: c_uint) -> ssize_t;
    fn sendmsg(socket: c_int, message: *const libc::msghdr, flags: c_int) -> ssize_t;
    fn posix_fadvise(descriptor: c_int, offset: off_t, len: off_t, advice: c_int) -> c_int;
    fn readahead(descriptor: c_int, offset: off_t, count: size_t) -> ssize_t;
    fn flock(descriptor: c_int, operation: c_int) -> c_int;
    fn lockf(descriptor: c_int, command: c_int, len: off_t) -> c_int;
    fn isatty(descriptor: c_int) -> c_int;
    fn poll(descriptors: *mut libc::pollfd, count: libc::nfds_t, timeout_ms: c_int) -> c_int;
    fn ppoll(descriptors: *mut libc::pollfd, count: libc::nfds_t, timeout: *const libc::timespec, mask: *const libc::sigset_t) -> c_int;
    fn select(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, except: *mut libc::fd_set, timeout: *mut libc::timeval) -> c_int;
    fn pselect(count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set, except: *mut libc::fd_set, timeout: *const libc::timespec, mask: *const libc::sigset_t) -> c_int;
    fn epoll_ctl(epoll: c_int, operation: c_int, descriptor: c_int, event: *mut libc::epoll_event) -> c_int;

    fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int;
    fn execvpe(path: *const c_char, arguments: Strings, environment: Strings) -> c_int;
    fn fexecve(descriptor: c_int, arguments: Strings, environment: Strings) -> c_int;
    fn execveat(directory: c_int, path: *const c_char, arguments: Strings, environment: Strings, flags: c_int) -> c_int;
    fn posix_spawn(pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int;
    fn posix_spawnp(pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int;
    fn posix_spawn_file_actions_adddup2(actions: *mut c_void, from: c_int, to: c_int) -> c_int;
    fn posix_spawn_file_actions_addopen(actions: *mut c_void, to: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    fn posix_spawn_file_actions_addchdir_np(actions: *mut c_void, path: *const c_char) -> c_int;
    fn posix_spawn_file_actions_addfchdir_np(actions: *mut c_void, descriptor: c_int) -> c_int;
    fn posix_spawn_file_actions_init(actions: *mut c_void) -> c_int;
    fn posix_spawn_file_actions_destroy(actions: *mut c_void) -> c_int;
    fn system(command: *const c_char) -> c_int;
    fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE;
    fn signal(number: c_int, handler: size_t) -> isize;
    fn sigprocmask(how: c_int, new: *const libc::sigset_t, old: *mut libc::sigset_t) -> c_int;
    fn pthread_sigmask(how: c_int, new: *const libc::sigset_t, old: *mut libc::sigset_t) -> c_int;
    fn sigaction(number: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;

    fn glob(pattern: *const c_char, flags: c_int, on_error: *const c_void, out: *mut c_void) -> c_int;
    fn scandir(path: *const c_char, list: *mut *mut *mut dirent, filter: *const c_void, compare: *const c_void) -> c_int;
    fn scandirat(directory: c_int, path: *const c_char, list: *mut *mut *mut dirent, filter: *const c_void, compare: *const c_void) -> c_int;
    fn ftw(path: *const c_char, visit: *const c_void, descriptors: c_int) -> c_int;
    fn nftw(path: *const c_char, visit: *const c_void, descriptors: c_int, flags: c_int) -> c_int;
    fn fts_open(paths: *const *mut c_char, options: c_int, compare: *const c_void) -> *mut c_void;
    fn fts_read(walk: *mut c_void) -> *mut c_void;
    fn fts_children(walk: *mut c_void, options: c_int) -> *mut c_void;
    fn fts_set(walk: *mut c_void, entry: *mut c_void, instruction: c_int) -> c_int;
    fn fts_close(walk: *mut c_void) -> c_int;

    fn rename(from: *const c_char, to: *const c_char) -> c_int;
    fn renameat(from_directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char) -> c_int;
    fn renameat2(from_directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_uint) -> c_int;
    fn link(from: *const c_char, to: *const c_char) -> c_int;
    fn linkat(from_directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_int) -> c_int;
    fn symlink(target: *const c_char, path: *const c_char) -> c_int;
    fn symlinkat(target: *const c_char, directory: c_int, path: *const c_char) -> c_int;
    fn mkdir(path: *const c_char, mode: mode_t) -> c_int;
    fn mkdirat(directory: c_int, path: *const c_char, mode: mode_t) -> c_int;
    fn mkfifo(path: *const c_char, mode: mode_t) -> c_int;
    fn mkfifoat(directory: c_int, path: *const c_char, mode: mode_t) -> c_int;
    fn mknod(path: *const c_char, mode: mode_t, device: libc::dev_t) -> c_int;
    fn mknodat(directory: c_int, path: *const c_char, mode: mode_t, device: libc::dev_t) -> c_int;
    fn mkstemp(template: *mut c_char) -> c_int;
    fn mkostemp(template: *mut c_char, flags: c_int) -> c_int;
    fn mkstemps(template: *mut c_char, suffix_len: c_int) -> c_int;
    fn mkostemps(template: *mut c_char, suffix_len: c_int, flags: c_int) -> c_int;
    fn mkdtemp(template: *mut c_char) -> *mut c_char;
    fn unlink(path: *const c_char) -> c_int;
    fn unlinkat(directory: c_int, path: *const c_char, flags: c_int) -> c_int;
    fn rmdir(path: *const c_char) -> c_int;
    fn remove(path: *const c_char) -> c_int;
    fn truncate(path: *const c_char, len: off_t) -> c_int;
    fn chmod(path: *const c_char, mode: mode_t) -> c_int;
    fn lchmod(path: *const c_char, mode: mode_t) -> c_int;
    fn fchmodat(directory: c_int, path: *const c_char, mode: mode_t, flags: c_int) -> c_int;
    fn chown(path: *const c_char, user: libc::uid_t, group: libc::gid_t) -> c_int;
    fn lchown(path: *const c_char, user: libc::uid_t, group: libc::gid_t) -> c_int;
    fn fchownat(directory: c_int, path: *const c_char, user: libc::uid_t, group: libc::gid_t, flags: c_int) -> c_int;
    fn utime(path: *const c_char, times: *const libc::utimbuf) -> c_int;
    fn utimes(path: *const c_char, times: *const libc::timeval) -> c_int;
    fn lutimes(path: *const c_char, times: *const libc::timeval) -> c_int;
    fn futimesat(directory: c_int, path: *const c_char, times: *const libc::timeval) -> c_int;
    fn utimensat(directory: c_int, path: *const c_char, times: *const libc::timespec, flags: c_int) -> c_int;
    fn setxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: size_t, flags: c_int) -> c_int;
    fn lsetxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: size_t, flags: c_int) -> c_int;
    fn removexattr(path: *const c_char, name: *const c_char) -> c_int;
    fn lremovexattr(path: *const c_char, name: *const c_char) -> c_int;
    fn getxattr(path: *const c_char, name: *const c_char, value: *mut c_void, len: size_t) -> ssize_t;
    fn lgetxattr(path: *const c_char, name: *const c_char, value: *mut c_void, len: size_t) -> ssize_t;
    fn fgetxattr(descriptor: c_int, name: *const c_char, value: *mut c_void, len: size_t) -> ssize_t;
    fn listxattr(path: *const c_char, list: *mut c_char, len: size_t) -> ssize_t;
    fn llistxattr(path: *const c_char, list: *mut c_char, len: size_t) -> ssize_t;
    fn flistxattr(descriptor: c_int, list: *mut c_char, len: size_t) -> ssize_t;
    fn fsync(descriptor: c_int) -> c_int;
    fn fdatasync(descriptor: c_int) -> c_int;
    fn syncfs(descriptor: c_int) -> c_int;
    fn fchmod(descriptor: c_int, mode: mode_t) -> c_int;
    fn fchown(descriptor: c_int, user: libc::uid_t, group: libc::gid_t) -> c_int;
    fn futimens(descriptor: c_int, times: *const libc::timespec) -> c_int;
    fn futimes(descriptor: c_int, times: *const libc::timeval) -> c_int;
    fn fsetxattr(descriptor: c_int, name: *const c_char, value: *const c_void, len: size_t, flags: c_int) -> c_int;
    fn fremovexattr(descriptor: c_int, name: *const c_char) -> c_int;
    fn ftruncate(descriptor: c_int, len: off_t) -> c_int;
}

/// `fstatat` of the C library. Old ones have only `__fxstatat`; both end in this system call, whose layout is theirs.
pub(crate) fn fstatat(directory: c_int, path: *const c_char, out: *mut stat, flags: c_int) -> c_int {
    newest_fstatat::call(directory, path, out, flags).unwrap_or_else(|| {
        // SAFETY: the kernel checks its pointers.
        unsafe { libc::syscall(libc::SYS_newfstatat, directory, path, out, flags) as c_int }
    })
}

/// `fstatat`, if the C library exports it.
mod newest_fstatat {
    use super::*;

    type Function = unsafe extern "C" fn(c_int, *const c_char, *mut stat, c_int) -> c_int;

    pub(super) fn call(directory: c_int, path: *const c_char, out: *mut stat, flags: c_int) -> Option<c_int> {
        static NEXT: Next = Next(AtomicUsize::new(UNKNOWN));
        match NEXT.get(c"fstatat") {
            MISSING => None,
            // SAFETY: the C library's function of this name has this signature; the arguments are the program's.
            address => Some(unsafe { std::mem::transmute::<usize, Function>(address)(directory, path, out, flags) }),
        }
    }
}
