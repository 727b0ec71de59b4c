//! Names: where links lead, what may be done, where the process is.

use std::ffi::{c_char, c_int, c_void};

use dayfly_client::{FileKind, Stat, View};
use libc::size_t;

use super::hook;
use crate::memory::{self, Errno, buffer, fail};
use crate::process::{Fault, answer};
use crate::{cwd, next, path, table};

hook! {
    fn access(path: *const c_char, mode: c_int) -> c_int {
        path::at(libc::AT_FDCWD, path, |view, path| may(&view.stat(path)?, mode), |_, path| next::access(path, mode))
    }

    fn euidaccess | eaccess (path: *const c_char, mode: c_int) -> c_int {
        path::at(libc::AT_FDCWD, path, |view, path| may(&view.stat(path)?, mode), |_, path| next::euidaccess(path, mode))
    }

    fn faccessat(directory: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
        let ours = |view: &View, path: &[u8]| {
            let stat = if flags & libc::AT_SYMLINK_NOFOLLOW != 0 { view.lstat(path) } else { view.stat(path) };
            may(&stat?, mode)
        };
        path::at_or_itself(directory, path, flags, ours, |directory, path| next::faccessat(directory, path, mode, flags))
    }

    fn readlink(path: *const c_char, out: *mut c_char, len: size_t) -> isize {
        let ours = |view: &View, path: &[u8]| Ok(copy_cut(&view.read_link(path)?, out, len)?);
        match of_descriptor(path) {
            Some(target) => answer(|| Ok(copy_cut(&target, out, len)?)),
            None => path::at(libc::AT_FDCWD, path, ours, |_, path| next::readlink(path, out, len)),
        }
    }

    fn readlinkat(directory: c_int, path: *const c_char, out: *mut c_char, len: size_t) -> isize {
        let ours = |view: &View, path: &[u8]| Ok(copy_cut(&view.read_link(path)?, out, len)?);
        match of_descriptor(path) {
            Some(target) => answer(|| Ok(copy_cut(&target, out, len)?)),
            None => path::at(directory, path, ours, |directory, path| next::readlinkat(directory, path, out, len)),
        }
    }

    fn __readlink_chk(path: *const c_char, out: *mut c_char, len: size_t, room: size_t) -> isize {
        readlink(path, out, len.min(room))
    }

    fn __readlinkat_chk(directory: c_int, path: *const c_char, out: *mut c_char, len: size_t, room: size_t) -> isize {
        readlinkat(directory, path, out, len.min(room))
    }

    fn realpath(path: *const c_char, resolved: *mut c_char) -> *mut c_char {
        let ours = |view: &View, path: &[u8]| give_path(&view.canonical(path)?, resolved);
        path::at(libc::AT_FDCWD, path, ours, |_, path| next::realpath(path, resolved))
    }

    fn __realpath_chk(path: *const c_char, resolved: *mut c_char, _room: size_t) -> *mut c_char {
        realpath(path, resolved)
    }

    fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
        realpath(path, std::ptr::null_mut())
    }

    fn chdir(path: *const c_char) -> c_int {
        path::at(libc::AT_FDCWD, path, go, |_, path| {
            let result = next::chdir(path);
            if result == 0 {
                cwd::leave();
            }
            result
        })
    }

    fn fchdir(descriptor: c_int) -> c_int {
        match table::find(descriptor) {
            Some(open) => answer(|| {
                cwd::enter(open.directory()?.path().to_vec());
                Ok(0)
            }),
            None => {
                let result = next::fchdir(descriptor);
                if result == 0 {
                    cwd::leave();
                }
                result
            }
        }
    }

    fn getcwd(out: *mut c_char, len: size_t) -> *mut c_char {
        match cwd::current() {
            None => next::getcwd(out, len),
            Some(_) if len == 0 && !out.is_null() => fail(libc::EINVAL),
            Some(directory) if directory.len() >= len && len != 0 => fail(libc::ERANGE),
            Some(directory) if out.is_null() => answer(|| Ok(memory::allocate_string(&directory, len)?)),
            Some(directory) => answer(|| give_path(&directory, out)),
        }
    }

    fn get_current_dir_name() -> *mut c_char {
        match cwd::current() {
            None => next::get_current_dir_name(),
            Some(directory) => answer(|| Ok(memory::allocate_string(&directory, 0)?)),
        }
    }

    fn getwd(out: *mut c_char) -> *mut c_char {
        getcwd(out, libc::PATH_MAX as size_t)
    }

    fn __getcwd_chk(out: *mut c_char, len: size_t, room: size_t) -> *mut c_char {
        getcwd(out, len.min(room))
    }

    fn __getwd_chk(out: *mut c_char, room: size_t) -> *mut c_char {
        getcwd(out, room.min(libc::PATH_MAX as size_t))
    }
}

/// All may be read and nothing written; what has no execute bit is not executed.
fn may(stat: &Stat, mode: c_int) -> Result<c_int, Fault> {
    if mode & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 {
        return Err(Fault::Errno(libc::EINVAL));
    }
    if mode & libc::W_OK != 0 {
        return Err(Fault::Errno(libc::EROFS));
    }
    let lacks_execute = stat.kind == FileKind::File && stat.permissions & 0o111 == 0;
    if mode & libc::X_OK != 0 && lacks_execute { Err(Fault::Errno(libc::EACCES)) } else { Ok(0) }
}

fn go(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    let directory = view.open_directory(path)?;
    cwd::enter(directory.path().to_vec());
    Ok(0)
}

/// The path behind `/proc/self/fd/N`, if N is ours.
fn of_descriptor(path: *const c_char) -> Option<Vec<u8>> {
    let number = memory::string(path)?.to_bytes().strip_prefix(b"/proc/self/fd/")?;
    path::path_of(&*table::find(std::str::from_utf8(number).ok()?.parse().ok()?)?)
}

/// As `readlink` gives it: no NUL, and cut where there is no room.
fn copy_cut(bytes: &[u8], out: *mut c_char, len: size_t) -> Result<isize, Errno> {
    if len == 0 {
        return Err(libc::EINVAL);
    }
    let count = bytes.len().min(len);
    buffer(out.cast::<c_void>(), count)?.copy_from_slice(&bytes[..count]);
    Ok(count as isize)
}

/// A path where the program wants it, or in memory of its own.
fn give_path(path: &[u8], out: *mut c_char) -> Result<*mut c_char, Fault> {
    if path.len() >= libc::PATH_MAX as usize {
        return Err(Fault::Errno(libc::ENAMETOOLONG));
    }
    if out.is_null() {
        return Ok(memory::allocate_string(path, 0)?);
    }
    memory::write_string(out, path);
    Ok(out)
}
