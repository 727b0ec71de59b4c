//! `stat`, in all of glibc's shapes.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::OnceLock;

use dayfly_client::Stat;
use libc::{stat as KernelStat, statx as KernelStatx};

use super::hook;
use crate::memory::{put, string, zeroed};
use crate::process::{Fault, answer, setup, view};
use crate::{cwd, next, path, table};

/// What programs are told to read at once.
const IO_SIZE: u32 = 128 << 10;

hook! {
    fn stat | stat64 (path: *const c_char, out: *mut KernelStat) -> c_int {
        fstatat(libc::AT_FDCWD, path, out, 0)
    }

    fn lstat | lstat64 (path: *const c_char, out: *mut KernelStat) -> c_int {
        fstatat(libc::AT_FDCWD, path, out, libc::AT_SYMLINK_NOFOLLOW)
    }

    fn fstat | fstat64 (descriptor: c_int, out: *mut KernelStat) -> c_int {
        match table::find(descriptor) {
            None => next::fstatat(descriptor, c"".as_ptr(), out, libc::AT_EMPTY_PATH),
            Some(open) => answer(|| Ok(put(out, kernel_form(&open.stat())).map(|()| 0)?)),
        }
    }

    fn fstatat | fstatat64 (directory: c_int, path: *const c_char, out: *mut KernelStat, flags: c_int) -> c_int {
        if flags & libc::AT_EMPTY_PATH != 0 && string(path).is_none_or(|path| path.is_empty()) {
            return match of_directory(directory) {
                Some(found) => answer(|| Ok(put(out, kernel_form(&found?)).map(|()| 0)?)),
                None => next::fstatat(directory, path, out, flags),
            };
        }
        let ours = |view: &dayfly_client::View, path: &[u8]| {
            let found = if flags & libc::AT_SYMLINK_NOFOLLOW != 0 { view.lstat(path) } else { view.stat(path) };
            Ok(put(out, kernel_form(&found?)).map(|()| 0)?)
        };
        path::at(directory, path, ours, |directory, path| next::fstatat(directory, path, out, flags))
    }

    fn __xstat | __xstat64 (_version: c_int, path: *const c_char, out: *mut KernelStat) -> c_int {
        stat(path, out)
    }

    fn __lxstat | __lxstat64 (_version: c_int, path: *const c_char, out: *mut KernelStat) -> c_int {
        lstat(path, out)
    }

    fn __fxstat | __fxstat64 (_version: c_int, descriptor: c_int, out: *mut KernelStat) -> c_int {
        fstat(descriptor, out)
    }

    fn __fxstatat | __fxstatat64 (_version: c_int, directory: c_int, path: *const c_char, out: *mut KernelStat, flags: c_int) -> c_int {
        fstatat(directory, path, out, flags)
    }

    fn statx(directory: c_int, path: *const c_char, flags: c_int, mask: c_uint, out: *mut KernelStatx) -> c_int {
        if flags & libc::AT_EMPTY_PATH != 0 && string(path).is_none_or(|path| path.is_empty()) {
            return match of_directory(directory) {
                Some(found) => answer(|| Ok(put(out, extended_form(&found?)).map(|()| 0)?)),
                None => next::statx(directory, path, flags, mask, out),
            };
        }
        let ours = |view: &dayfly_client::View, path: &[u8]| {
            let found = if flags & libc::AT_SYMLINK_NOFOLLOW != 0 { view.lstat(path) } else { view.stat(path) };
            Ok(put(out, extended_form(&found?)).map(|()| 0)?)
        };
        path::at(directory, path, ours, |directory, path| next::statx(directory, path, flags, mask, out))
    }
}

/// What an empty path means: the descriptor itself, or the working directory, if that is ours.
fn of_directory(directory: c_int) -> Option<Result<Stat, Fault>> {
    if directory == libc::AT_FDCWD {
        return cwd::current().map(|directory| Ok(view()?.stat(&directory)?));
    }
    table::find(directory).map(|open| Ok(open.stat()))
}

/// User and group of this process: to them all files belong.
fn owner() -> (u32, u32) {
    static OWNER: OnceLock<(u32, u32)> = OnceLock::new();
    // SAFETY: both ask only.
    *OWNER.get_or_init(|| unsafe { (libc::geteuid(), libc::getegid()) })
}

fn device() -> u64 {
    setup().map_or(0, |setup| setup.device)
}

/// As `struct stat`.
pub(crate) fn kernel_form(stat: &Stat) -> KernelStat {
    let mut form: KernelStat = zeroed();
    (form.st_uid, form.st_gid) = owner();
    form.st_dev = device();
    form.st_ino = stat.inode;
    form.st_mode = stat.mode();
    form.st_nlink = stat.links.into();
    form.st_size = stat.size as i64;
    form.st_blksize = IO_SIZE.into();
    form.st_blocks = stat.size.div_ceil(512) as i64;
    (form.st_mtime, form.st_mtime_nsec) = (stat.mtime_s, stat.mtime_ns.into());
    (form.st_atime, form.st_atime_nsec) = (form.st_mtime, form.st_mtime_nsec);
    (form.st_ctime, form.st_ctime_nsec) = (form.st_mtime, form.st_mtime_nsec);
    form
}

/// As `struct statx`.
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
