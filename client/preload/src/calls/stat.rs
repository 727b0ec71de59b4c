//! `stat`, under all the names that glibc gives it.

use std::ffi::{CStr, c_char, c_int, c_uint};

use dayfly_client::reserved_fd::is_hidden;
use dayfly_client::{Stat, View, ViewError};
use libc::{stat as KernelStat, statx as KernelStatx};

use super::hidden::as_seen;
use super::hook;
use crate::attach::view;
use crate::fault::{Fault, answer_from_memory};
use crate::memory::{Errno, FromC, fail, zeroed};
use crate::next::exists;
use crate::stat_form::{IO_SIZE, device, kernel_form, owner};
use crate::{cwd, next, path, table};

const HERE: c_int = libc::AT_FDCWD;
const NO_FOLLOW: c_int = libc::AT_SYMLINK_NOFOLLOW;
/// The two flags of `statx` that exclude each other: whether to ask a server.
const SYNC_TYPE: c_int = libc::AT_STATX_FORCE_SYNC | libc::AT_STATX_DONT_SYNC;
const KNOWN_FLAGS: c_int = NO_FOLLOW | libc::AT_NO_AUTOMOUNT | libc::AT_EMPTY_PATH | SYNC_TYPE;

hook! {
    fn stat | stat64 (path: FromC<*const c_char>, out: FromC<*mut KernelStat>) -> c_int {
        relative(HERE, path, out, 0, |directory, path: FromC<*const c_char>| match directory == HERE && exists!(stat) {
            true => stat::next(path, out),
            false => next::fstatat(directory, path, out, 0),
        })
    }

    fn lstat | lstat64 (path: FromC<*const c_char>, out: FromC<*mut KernelStat>) -> c_int {
        relative(HERE, path, out, NO_FOLLOW, |directory, path: FromC<*const c_char>| match directory == HERE && exists!(lstat) {
            true => lstat::next(path, out),
            false => next::fstatat(directory, path, out, NO_FOLLOW),
        })
    }

    fn fstat | fstat64 (descriptor: c_int, out: FromC<*mut KernelStat>) -> c_int {
        match table::find_early(descriptor) {
            // `fstatat` would take AT_FDCWD for the working directory.
            None if descriptor < 0 || is_hidden(descriptor) => fail(libc::EBADF),
            None if exists!(fstat) => fstat::next(descriptor, out),
            None => next::fstatat(descriptor, c"".into(), out, libc::AT_EMPTY_PATH),
            Some(open) => answer_from_memory(|| Ok(out.put(kernel_form(&open.stat())).map(|()| 0)?)),
        }
    }

    fn fstatat | fstatat64 (directory: c_int, path: FromC<*const c_char>, out: FromC<*mut KernelStat>, flags: c_int) -> c_int {
        relative(directory, path, out, flags, |directory, path: FromC<*const c_char>| {
            next::fstatat(as_seen(directory), path, out, flags)
        })
    }

    // The names that programs built for old C libraries use. Each passes calls on to the next function of its own name. Otherwise
    // fakeroot's `fstatat` would call `__fxstatat`, and that would call `fstatat` again.

    fn __xstat | __xstat64 (version: c_int, path: FromC<*const c_char>, out: FromC<*mut KernelStat>) -> c_int {
        relative(HERE, path, out, 0, |directory, path: FromC<*const c_char>| match directory == HERE && exists!(__xstat) {
            true => __xstat::next(version, path, out),
            false => next::fstatat(directory, path, out, 0),
        })
    }

    fn __lxstat | __lxstat64 (version: c_int, path: FromC<*const c_char>, out: FromC<*mut KernelStat>) -> c_int {
        relative(HERE, path, out, NO_FOLLOW, |directory, path: FromC<*const c_char>| match directory == HERE && exists!(__lxstat) {
            true => __lxstat::next(version, path, out),
            false => next::fstatat(directory, path, out, NO_FOLLOW),
        })
    }

    fn __fxstat | __fxstat64 (version: c_int, descriptor: c_int, out: FromC<*mut KernelStat>) -> c_int {
        match table::is_ours(descriptor) || !exists!(__fxstat) {
            true => fstat(descriptor, out),
            false => __fxstat::next(version, descriptor, out),
        }
    }

    fn __fxstatat | __fxstatat64 (
        version: c_int,
        directory: c_int,
        path: FromC<*const c_char>,
        out: FromC<*mut KernelStat>,
        flags: c_int,
    ) -> c_int {
        relative(directory, path, out, flags, |directory, path: FromC<*const c_char>| match exists!(__fxstatat) {
            true => __fxstatat::next(version, directory, path, out, flags),
            false => next::fstatat(as_seen(directory), path, out, flags),
        })
    }

    fn statx(directory: c_int, path: FromC<*const c_char>, flags: c_int, mask: c_uint, out: FromC<*mut KernelStatx>) -> c_int {
        if means_descriptor(path, flags) {
            return match Ours::of(directory) {
                Some(ours) => answer_from_memory(|| {
                    check_extended(flags, mask)?;
                    Ok(out.put(extended_form(&ours.stat()?)).map(|()| 0)?)
                }),
                None => statx::next(directory, path, flags, mask, out),
            };
        }
        if let Some(mode) = mode_of_link(path, flags) {
            return with_mode(statx::next(directory, path, flags, mask, out), out, |form| form.stx_mode |= mode as u16);
        }
        let ours = |view: &View, path: &[u8]| {
            check_extended(flags, mask)?;
            Ok(out.put(extended_form(&look_up(view, path, flags)?)).map(|()| 0)?)
        };
        path::at(directory, path, ours, |directory, path| statx::next(directory, path, flags, mask, out))
    }
}

/// Answers `fstatat`, or passes it on to `kernel`.
#[inline]
fn relative(
    directory: c_int,
    path: FromC<*const c_char>,
    out: FromC<*mut KernelStat>,
    flags: c_int,
    kernel: impl Fn(c_int, FromC<*const c_char>) -> c_int,
) -> c_int {
    if means_descriptor(path, flags) {
        return match Ours::of(directory) {
            Some(ours) => answer_from_memory(|| Ok(out.put(kernel_form(&ours.stat()?)).map(|()| 0)?)),
            None => kernel(directory, path),
        };
    }
    if let Some(mode) = mode_of_link(path, flags) {
        return with_mode(kernel(directory, path), out, |form| form.st_mode |= mode);
    }
    let ours = |view: &View, path: &[u8]| {
        check_flags(flags)?;
        Ok(out.put(kernel_form(&look_up(view, path, flags)?)).map(|()| 0)?)
    };
    path::at(directory, path, ours, kernel)
}

/// Refuses unknown flags, as the kernel does before it looks at the path.
fn check_flags(flags: c_int) -> Result<(), Errno> {
    if flags & !KNOWN_FLAGS != 0 { Err(libc::EINVAL) } else { Ok(()) }
}

/// Refuses arguments of `statx`, as the kernel does before it looks at the path.
fn check_extended(flags: c_int, mask: c_uint) -> Result<(), Errno> {
    let is_valid = mask & libc::STATX__RESERVED as c_uint == 0 && flags & SYNC_TYPE != SYNC_TYPE;
    if is_valid { check_flags(flags) } else { Err(libc::EINVAL) }
}

fn look_up(view: &View, path: &[u8], flags: c_int) -> Result<Stat, ViewError> {
    if flags & libc::AT_SYMLINK_NOFOLLOW != 0 { view.lstat(path) } else { view.stat(path) }
}

/// Returns the permissions that a link to a descriptor of ours lacks in /proc, if the call is about the link itself. The kernel has
/// the link, but gives it the permissions of the placeholder. The link to the working directory lacks none.
fn mode_of_link(path: FromC<*const c_char>, flags: c_int) -> Option<u32> {
    if flags & libc::AT_SYMLINK_NOFOLLOW == 0 {
        return None;
    }
    if path::linked_directory(path).is_some() {
        return Some(0);
    }
    Some(if path::linked(path)?.is_place() { 0 } else { 0o500 })
}

/// Corrects the attributes that the kernel has stored, unless the call failed. Returns the result for the program.
fn with_mode<T: Copy>(result: c_int, out: FromC<*mut T>, correct: impl FnOnce(&mut T)) -> c_int {
    if result == 0
        && let Some(mut form) = out.get()
    {
        correct(&mut form);
        // Cannot fail: the pointer is not null.
        let _ = out.put(form);
    }
    result
}

/// Returns whether the call is about the descriptor itself. Newer kernels treat the null pointer as an empty path.
fn means_descriptor(path: FromC<*const c_char>, flags: c_int) -> bool {
    flags & libc::AT_EMPTY_PATH != 0 && (path.is_null() || path.path().is_some_and(CStr::is_empty))
}

/// What a number stands for that a call names in place of a path.
enum Ours {
    WorkingDirectory(Vec<u8>),
    Open(Stat),
}

impl Ours {
    /// Returns `None` for what is not in the namespace.
    fn of(directory: c_int) -> Option<Self> {
        if directory == libc::AT_FDCWD {
            return cwd::current().map(|directory| Self::WorkingDirectory(directory.to_vec()));
        }
        table::find_early(directory).map(|open| Self::Open(open.stat()))
    }

    fn stat(&self) -> Result<Stat, Fault> {
        match self {
            Self::WorkingDirectory(path) => Ok(view()?.stat(path)?),
            Self::Open(stat) => Ok(*stat),
        }
    }
}

/// Returns attributes as `struct statx`.
fn extended_form(stat: &Stat) -> KernelStatx {
    let mut form: KernelStatx = zeroed();
    (form.stx_uid, form.stx_gid) = owner();
    form.stx_mask = libc::STATX_BASIC_STATS;
    form.stx_blksize = IO_SIZE;
    (form.stx_dev_major, form.stx_dev_minor) = (libc::major(device()), libc::minor(device()));
    form.stx_ino = stat.inode;
    form.stx_mode = stat.mode() as u16;
    form.stx_nlink = stat.links;
    form.stx_size = stat.size;
    form.stx_blocks = stat.size.div_ceil(512);
    let mut time = form.stx_mtime;
    (time.tv_sec, time.tv_nsec) = (stat.mtime_s, stat.mtime_ns);
    (form.stx_mtime, form.stx_atime, form.stx_ctime) = (time, time, time);
    form
}
