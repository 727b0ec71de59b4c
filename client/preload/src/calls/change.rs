//! Changing things: the namespace is read-only, and says so as a read-only mount does.

use std::ffi::{c_char, c_int, c_uint, c_void};

use dayfly_client::View;
use libc::{dev_t, gid_t, mode_t, off_t, size_t, timespec, timeval, uid_t, utimbuf};

use super::hook;
use super::open::cannot_create;
use crate::memory::fail;
use crate::path::{at, at_or_itself, is_ours};
use crate::process::Fault;
use crate::{next, table};

const HERE: c_int = libc::AT_FDCWD;
const READ_ONLY: Fault = Fault::Errno(libc::EROFS);

/// To change what must be there; `follow` says whether a symlink is meant or what it names.
fn existing(follow: bool) -> impl Fn(&View, &[u8]) -> Result<c_int, Fault> {
    move |view, path| {
        if follow {
            view.stat(path)?
        } else {
            view.lstat(path)?
        };
        Err(READ_ONLY)
    }
}

/// To make what must not be there.
fn new(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    match view.lstat(path) {
        Ok(_) => Err(Fault::Errno(libc::EEXIST)),
        Err(dayfly_client::ViewError::NotFound) => Err(cannot_create(view, path)),
        Err(error) => Err(error.into()),
    }
}

/// To make something of a name that is still to be chosen.
fn temporary(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    Err(cannot_create(view, path))
}

/// Between two paths: nothing goes from one file system to another, and within ours nothing changes.
fn between(from: (c_int, *const c_char), to: (c_int, *const c_char), kernel: impl FnOnce() -> c_int) -> c_int {
    match (is_ours(from.0, from.1), is_ours(to.0, to.1)) {
        (false, false) => kernel(),
        (true, true) => fail(libc::EROFS),
        _ => fail(libc::EXDEV),
    }
}

/// Of a descriptor that is open to be read.
fn of_descriptor(descriptor: c_int, errno: c_int, kernel: impl FnOnce() -> c_int) -> c_int {
    if table::is_ours(descriptor) { fail(errno) } else { kernel() }
}

hook! {
    fn rename(from: *const c_char, to: *const c_char) -> c_int {
        between((HERE, from), (HERE, to), || next::rename(from, to))
    }

    fn renameat(from_directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char) -> c_int {
        between((from_directory, from), (to_directory, to), || next::renameat(from_directory, from, to_directory, to))
    }

    fn renameat2(from_directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_uint) -> c_int {
        between((from_directory, from), (to_directory, to), || next::renameat2(from_directory, from, to_directory, to, flags))
    }

    fn link(from: *const c_char, to: *const c_char) -> c_int {
        between((HERE, from), (HERE, to), || next::link(from, to))
    }

    fn linkat(from_directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_int) -> c_int {
        if flags & libc::AT_EMPTY_PATH != 0 && table::is_ours(from_directory) {
            return fail(libc::EXDEV);
        }
        between((from_directory, from), (to_directory, to), || next::linkat(from_directory, from, to_directory, to, flags))
    }

    fn symlink(target: *const c_char, path: *const c_char) -> c_int {
        at(HERE, path, new, |_, path| next::symlink(target, path))
    }

    fn symlinkat(target: *const c_char, directory: c_int, path: *const c_char) -> c_int {
        at(directory, path, new, |directory, path| next::symlinkat(target, directory, path))
    }

    fn mkdir(path: *const c_char, mode: mode_t) -> c_int {
        at(HERE, path, new, |_, path| next::mkdir(path, mode))
    }

    fn mkdirat(directory: c_int, path: *const c_char, mode: mode_t) -> c_int {
        at(directory, path, new, |directory, path| next::mkdirat(directory, path, mode))
    }

    fn mkstemp | mkstemp64 (template: *mut c_char) -> c_int {
        at(HERE, template, temporary, |_, _| next::mkstemp(template))
    }

    fn mkostemp | mkostemp64 (template: *mut c_char, flags: c_int) -> c_int {
        at(HERE, template, temporary, |_, _| next::mkostemp(template, flags))
    }

    fn mkstemps | mkstemps64 (template: *mut c_char, suffix_len: c_int) -> c_int {
        at(HERE, template, temporary, |_, _| next::mkstemps(template, suffix_len))
    }

    fn mkostemps | mkostemps64 (template: *mut c_char, suffix_len: c_int, flags: c_int) -> c_int {
        at(HERE, template, temporary, |_, _| next::mkostemps(template, suffix_len, flags))
    }

    fn mkdtemp(template: *mut c_char) -> *mut c_char {
        at(HERE, template, |view, path| temporary(view, path).map(|_| template), |_, _| next::mkdtemp(template))
    }

    fn mkfifo(path: *const c_char, mode: mode_t) -> c_int {
        at(HERE, path, new, |_, path| next::mkfifo(path, mode))
    }

    fn mkfifoat(directory: c_int, path: *const c_char, mode: mode_t) -> c_int {
        at(directory, path, new, |directory, path| next::mkfifoat(directory, path, mode))
    }

    fn mknod(path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
        at(HERE, path, new, |_, path| next::mknod(path, mode, device))
    }

    fn mknodat(directory: c_int, path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
        at(directory, path, new, |directory, path| next::mknodat(directory, path, mode, device))
    }

    fn unlink(path: *const c_char) -> c_int {
        at(HERE, path, existing(false), |_, path| next::unlink(path))
    }

    fn unlinkat(directory: c_int, path: *const c_char, flags: c_int) -> c_int {
        at(directory, path, existing(false), |directory, path| next::unlinkat(directory, path, flags))
    }

    fn rmdir(path: *const c_char) -> c_int {
        at(HERE, path, existing(false), |_, path| next::rmdir(path))
    }

    fn remove(path: *const c_char) -> c_int {
        at(HERE, path, existing(false), |_, path| next::remove(path))
    }

    fn truncate | truncate64 (path: *const c_char, len: off_t) -> c_int {
        at(HERE, path, existing(true), |_, path| next::truncate(path, len))
    }

    fn ftruncate | ftruncate64 (descriptor: c_int, len: off_t) -> c_int {
        of_descriptor(descriptor, libc::EINVAL, || next::ftruncate(descriptor, len))
    }

    fn chmod(path: *const c_char, mode: mode_t) -> c_int {
        at(HERE, path, existing(true), |_, path| next::chmod(path, mode))
    }

    fn lchmod(path: *const c_char, mode: mode_t) -> c_int {
        at(HERE, path, existing(false), |_, path| next::lchmod(path, mode))
    }

    fn fchmodat(directory: c_int, path: *const c_char, mode: mode_t, flags: c_int) -> c_int {
        at_or_itself(directory, path, flags, existing(true), |directory, path| next::fchmodat(directory, path, mode, flags))
    }

    fn fchmod(descriptor: c_int, mode: mode_t) -> c_int {
        of_descriptor(descriptor, libc::EROFS, || next::fchmod(descriptor, mode))
    }

    fn chown(path: *const c_char, user: uid_t, group: gid_t) -> c_int {
        at(HERE, path, existing(true), |_, path| next::chown(path, user, group))
    }

    fn lchown(path: *const c_char, user: uid_t, group: gid_t) -> c_int {
        at(HERE, path, existing(false), |_, path| next::lchown(path, user, group))
    }

    fn fchownat(directory: c_int, path: *const c_char, user: uid_t, group: gid_t, flags: c_int) -> c_int {
        at_or_itself(directory, path, flags, existing(true), |directory, path| next::fchownat(directory, path, user, group, flags))
    }

    fn fchown(descriptor: c_int, user: uid_t, group: gid_t) -> c_int {
        of_descriptor(descriptor, libc::EROFS, || next::fchown(descriptor, user, group))
    }

    fn utime(path: *const c_char, times: *const utimbuf) -> c_int {
        at(HERE, path, existing(true), |_, path| next::utime(path, times))
    }

    fn utimes(path: *const c_char, times: *const timeval) -> c_int {
        at(HERE, path, existing(true), |_, path| next::utimes(path, times))
    }

    fn lutimes(path: *const c_char, times: *const timeval) -> c_int {
        at(HERE, path, existing(false), |_, path| next::lutimes(path, times))
    }

    fn futimesat(directory: c_int, path: *const c_char, times: *const timeval) -> c_int {
        at(directory, path, existing(true), |directory, path| next::futimesat(directory, path, times))
    }

    fn utimensat(directory: c_int, path: *const c_char, times: *const timespec, flags: c_int) -> c_int {
        if path.is_null() && table::is_ours(directory) {
            return fail(libc::EROFS);
        }
        let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
        at_or_itself(directory, path, flags, existing(follow), |directory, path| next::utimensat(directory, path, times, flags))
    }

    fn futimens(descriptor: c_int, times: *const timespec) -> c_int {
        of_descriptor(descriptor, libc::EROFS, || next::futimens(descriptor, times))
    }

    fn futimes(descriptor: c_int, times: *const timeval) -> c_int {
        of_descriptor(descriptor, libc::EROFS, || next::futimes(descriptor, times))
    }

    fn setxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: size_t, flags: c_int) -> c_int {
        at(HERE, path, existing(true), |_, path| next::setxattr(path, name, value, len, flags))
    }

    fn lsetxattr(path: *const c_char, name: *const c_char, value: *const c_void, len: size_t, flags: c_int) -> c_int {
        at(HERE, path, existing(false), |_, path| next::lsetxattr(path, name, value, len, flags))
    }

    fn fsetxattr(descriptor: c_int, name: *const c_char, value: *const c_void, len: size_t, flags: c_int) -> c_int {
        of_descriptor(descriptor, libc::EROFS, || next::fsetxattr(descriptor, name, value, len, flags))
    }

    fn removexattr(path: *const c_char, name: *const c_char) -> c_int {
        at(HERE, path, existing(true), |_, path| next::removexattr(path, name))
    }

    fn lremovexattr(path: *const c_char, name: *const c_char) -> c_int {
        at(HERE, path, existing(false), |_, path| next::lremovexattr(path, name))
    }

    fn fremovexattr(descriptor: c_int, name: *const c_char) -> c_int {
        of_descriptor(descriptor, libc::EROFS, || next::fremovexattr(descriptor, name))
    }
}
