//! Operations on paths themselves: symlinks, access rights, and the working directory.

use std::ffi::{CStr, c_char, c_int, c_void};

use dayfly_client::{FileKind, Stat, View, ViewError, cancellation};
use libc::size_t;

use super::hook;
use crate::attach::known_view;
use crate::fault::{Fault, answer};
use crate::memory::{self, Errno, FromC, fail};
use crate::place::Place;
use crate::{cwd, nowhere, path, table};

hook! {
    fn access(path: FromC<*const c_char>, mode: c_int) -> c_int {
        path::at(libc::AT_FDCWD, path, |view, path| may(|| view.stat(path), mode), |_, path| access::next(path, mode))
    }

    fn euidaccess | eaccess (path: FromC<*const c_char>, mode: c_int) -> c_int {
        // glibc ignores the other bits.
        let ours = |view: &View, path: &[u8]| may(|| view.stat(path), mode & (libc::R_OK | libc::W_OK | libc::X_OK));
        path::at(libc::AT_FDCWD, path, ours, |_, path| euidaccess::next(path, mode))
    }

    fn faccessat(directory: c_int, path: FromC<*const c_char>, mode: c_int, flags: c_int) -> c_int {
        let ours = |view: &View, path: &[u8]| {
            if flags & !(libc::AT_EACCESS | libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
                return Err(Fault::Errno(libc::EINVAL));
            }
            may(|| if flags & libc::AT_SYMLINK_NOFOLLOW != 0 { view.lstat(path) } else { view.stat(path) }, mode)
        };
        if flags & libc::AT_SYMLINK_NOFOLLOW != 0 && (path::linked(path).is_some() || path::linked_directory(path).is_some()) {
            // The call is about the link in /proc, which the kernel has.
            return faccessat::next(directory, path, mode, flags);
        }
        path::at_or_itself(directory, path, flags, ours, |directory, path| faccessat::next(directory, path, mode, flags))
    }

    fn readlink(path, out, len) {
        let ours = |view: &View, path: &[u8]| {
            check_room(len)?;
            Ok(copy_cut(&view.read_link(path)?, out, len)?)
        };
        match target_of_link(path) {
            Some(target) => answer(|| Ok(copy_cut(&target, out, len)?)),
            None => path::at(libc::AT_FDCWD, path, ours, |_, path| readlink::next(path, out, len)),
        }
    }

    fn readlinkat(directory: c_int, path: FromC<*const c_char>, out: FromC<*mut c_char>, len: size_t) -> isize {
        let ours = |view: &View, path: &[u8]| {
            check_room(len)?;
            Ok(copy_cut(&view.read_link(path)?, out, len)?)
        };
        match target_of_link(path).or_else(|| target_of_place(directory, path)) {
            Some(target) => answer(|| Ok(copy_cut(&target, out, len)?)),
            None => path::at(directory, path, ours, |directory, path| readlinkat::next(directory, path, out, len)),
        }
    }

    fn __readlink_chk(path: FromC<*const c_char>, out: FromC<*mut c_char>, len: size_t, room: size_t) -> isize {
        readlink(path, out, len.min(room))
    }

    fn __readlinkat_chk(
        directory: c_int,
        path: FromC<*const c_char>,
        out: FromC<*mut c_char>,
        len: size_t,
        room: size_t,
    ) -> isize {
        readlinkat(directory, path, out, len.min(room))
    }

    fn name_to_handle_at(
        directory: c_int,
        path: FromC<*const c_char>,
        handle: FromC<*mut c_void>,
        mount_id: FromC<*mut c_int>,
        flags: c_int,
    ) -> c_int {
        let ours = |view: &View, path: &[u8]| {
            let stat = if flags & libc::AT_SYMLINK_FOLLOW != 0 { view.stat(path) } else { view.lstat(path) };
            // The same as on a file system that has no file handles.
            stat.map_err(Fault::from).and(Err(Fault::Errno(libc::EOPNOTSUPP)))
        };
        path::at_or_itself(directory, path, flags, ours, |directory, path| {
            name_to_handle_at::next(directory, path, handle, mount_id, flags)
        })
    }

    fn realpath(path: FromC<*const c_char>, resolved: FromC<*mut c_char>) -> *mut c_char {
        let ours = |view: &View, path: &[u8]| give_path(&view.canonical(path)?, resolved);
        path::at(libc::AT_FDCWD, path, ours, |_, path| realpath::next(path, resolved))
    }

    fn __realpath_chk(path: FromC<*const c_char>, resolved: FromC<*mut c_char>, _room: size_t) -> *mut c_char {
        realpath(path, resolved)
    }

    fn canonicalize_file_name(path: FromC<*const c_char>) -> *mut c_char {
        realpath(path, FromC::<*mut c_char>::null())
    }

    fn chdir(path: FromC<*const c_char>) -> c_int {
        let ours = |view: &View, path: &[u8]| {
            let _deferral = cancellation::uninterrupted();
            enter(view.open_directory(path)?.path().to_vec());
            Ok(0)
        };
        path::at(libc::AT_FDCWD, path, ours, |_, path| left(chdir::next(path)))
    }

    fn fchdir(descriptor: c_int) -> c_int {
        match table::find(descriptor) {
            Some(open) => answer(|| {
                enter(open.reached_directory()?.path().to_vec());
                Ok(0)
            }),
            None => left(fchdir::next(descriptor)),
        }
    }

    fn getcwd(out, len) {
        match cwd::current() {
            None => getcwd::next(out, len),
            Some(_) if len == 0 && !out.is_null() => fail(libc::EINVAL),
            Some(directory) if directory.len() >= len && len != 0 => fail(libc::ERANGE),
            Some(directory) if out.is_null() => answer(|| Ok(memory::allocate_string(&directory, len)?)),
            Some(directory) => answer(|| give_path(&directory, out)),
        }
    }

    fn get_current_dir_name() -> *mut c_char {
        match cwd::current() {
            None => get_current_dir_name::next(),
            Some(directory) => answer(|| Ok(memory::allocate_string(&directory, 0)?)),
        }
    }

    fn getwd(out: FromC<*mut c_char>) -> *mut c_char {
        getcwd(out, libc::PATH_MAX as size_t)
    }

    fn __getcwd_chk(out: FromC<*mut c_char>, len: size_t, room: size_t) -> *mut c_char {
        getcwd(out, len.min(room))
    }

    fn __getwd_chk(out: FromC<*mut c_char>, room: size_t) -> *mut c_char {
        getcwd(out, room.min(libc::PATH_MAX as size_t))
    }
}

/// Decides about access: everything may be read and nothing written, and a file without an execute bit cannot be executed.
fn may(look_up: impl FnOnce() -> Result<Stat, ViewError>, mode: c_int) -> Result<c_int, Fault> {
    if mode & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 {
        return Err(Fault::Errno(libc::EINVAL));
    }
    let stat = look_up()?;
    let lacks_execute = stat.kind == FileKind::File && stat.permissions & 0o111 == 0;
    match () {
        () if mode & libc::X_OK != 0 && lacks_execute => Err(Fault::Errno(libc::EACCES)),
        () if mode & libc::W_OK != 0 => Err(Fault::Errno(libc::EROFS)),
        () => Ok(0),
    }
}

/// Enters a directory of the namespace.
fn enter(directory: Vec<u8>) {
    if cwd::current().is_none() {
        // A relative path that bypasses this library then finds nothing.
        nowhere::within(|path| (chdir::next(path.into()) == 0).then_some(()));
    }
    cwd::enter(directory);
}

/// Records that the kernel has changed its working directory, if it has.
fn left(result: c_int) -> c_int {
    if result == 0 {
        cwd::leave();
    }
    result
}

/// Returns the path that a link in /proc refers to, if it is the link to a descriptor of ours or to the working directory.
fn target_of_link(path: FromC<*const c_char>) -> Option<Vec<u8>> {
    match path::linked(path) {
        Some(open) => path::path_of(&open),
        None => path::linked_directory(path),
    }
}

/// Returns the target of the symlink that a directory's descriptor stands for, if the path is empty (`O_PATH`, `O_NOFOLLOW`).
fn target_of_place(directory: c_int, path: FromC<*const c_char>) -> Option<Vec<u8>> {
    let is_empty = table::is_ours(directory) && path.path().is_some_and(CStr::is_empty);
    match &table::find(directory).filter(|_| is_empty)?.object {
        table::Object::Place(Place::Symlink(path, _)) => known_view()?.read_link(path).ok(),
        _ => None,
    }
}

/// Refuses a buffer without room. The kernel reads its length as an `int`, and looks at it before the path.
fn check_room(len: size_t) -> Result<(), Errno> {
    if len as c_int <= 0 { Err(libc::EINVAL) } else { Ok(()) }
}

/// Stores a symlink's target as `readlink` does: without a NUL, and truncated if there is too little room.
fn copy_cut(bytes: &[u8], out: FromC<*mut c_char>, len: size_t) -> Result<isize, Errno> {
    check_room(len)?;
    let count = bytes.len().min(len);
    out.bytes().buffer(count)?.copy_from_slice(&bytes[..count]);
    Ok(count as isize)
}

/// Stores a path in the program's buffer, which has room for PATH_MAX bytes. If the pointer is null, stores the path in new memory.
fn give_path(path: &[u8], out: FromC<*mut c_char>) -> Result<*mut c_char, Fault> {
    if path.len() >= libc::PATH_MAX as usize {
        return Err(Fault::Errno(libc::ENAMETOOLONG));
    }
    if out.is_null() {
        return Ok(memory::allocate_string(path, 0)?);
    }
    out.write_string(path)?;
    Ok(out.raw())
}
