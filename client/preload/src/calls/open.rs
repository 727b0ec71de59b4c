//! Opening files and directories.

use std::ffi::{c_char, c_int};
use std::os::fd::{IntoRawFd, RawFd};

use dayfly_client::{FileKind, Opened, View, ViewError, cancellation};
use libc::mode_t;

use super::descriptor::close;
use super::hook;
use crate::fault::{Fault, answer};
use crate::last_name::{LastName, cannot_open_new};
use crate::memory::{Errno, FromC};
use crate::next::act_on_cancel;
use crate::place::Place;
use crate::table::{self, Description, Object, Reference};
use crate::{exec_handoff, kernel_copy, kernel_reads, next, path, placeholder, vfork};

/// The kernel's `O_LARGEFILE`, which `F_GETFL` shows for every descriptor. C's constant of that name is 0 on 64-bit systems.
const LARGE_FILE: c_int = 0o100_000;
/// The flags that have a meaning together with `O_PATH`.
const FLAGS_OF_PLACE: c_int = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;

hook! {
    fn open | open64 | __open | __open64 (path, flags, mode) {
        openat(libc::AT_FDCWD, path, flags, mode)
    }

    fn openat | openat64 (directory: c_int, path: FromC<*const c_char>, flags: c_int, mode: mode_t) -> c_int {
        let kernel = |directory, path: FromC<*const c_char>| {
            table::created(match directory {
                libc::AT_FDCWD => open::next(path, flags, mode),
                _ => openat::next(directory, path, flags, mode),
            })
        };
        act_on_cancel();
        let linked = path::linked(path);
        if flags & libc::O_NOFOLLOW != 0 && (linked.is_some() || path::linked_directory(path).is_some()) {
            // The call is about the link in /proc, which the kernel has.
            return kernel(directory, path);
        }
        if let Some(link) = linked.filter(|open| open.is_symlink()) {
            return answer(|| open_symlink(&link, flags));
        }
        path::at_until_signal(directory, path, |view, path| open_in(view, path, flags), kernel)
    }

    fn creat | creat64 (path: FromC<*const c_char>, mode: mode_t) -> c_int {
        openat(libc::AT_FDCWD, path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode)
    }

    fn __open_2 | __open64_2 (path: FromC<*const c_char>, flags: c_int) -> c_int {
        openat(libc::AT_FDCWD, path, flags, 0)
    }

    fn __openat_2 | __openat64_2 (directory: c_int, path: FromC<*const c_char>, flags: c_int) -> c_int {
        openat(directory, path, flags, 0)
    }
}

/// The bit of `O_TMPFILE` that is not `O_DIRECTORY`.
const TEMPORARY: c_int = libc::O_TMPFILE & !libc::O_DIRECTORY;

/// Opens a path of the namespace with the flags of `open`.
pub(crate) fn open_in(view: &View, path: &[u8], flags: c_int) -> Result<RawFd, Fault> {
    // With O_PATH, Linux ignores all flags but these.
    let flags = if flags & libc::O_PATH != 0 { flags & FLAGS_OF_PLACE } else { flags | LARGE_FILE };
    let object = look_up(view, path, flags).map_err(|fault| if has_no_number(&fault) { libc::EMFILE.into() } else { fault })?;
    let close_on_exec = flags & libc::O_CLOEXEC != 0;
    if vfork::child().is_some() {
        // Our records belong to the parent, so the child gets a kernel file.
        let _deferral = cancellation::defer();
        let copy = match &object {
            Object::File(file) => kernel_copy::copy_of(view, file)?,
            Object::Place(Place::File(file)) => kernel_copy::named_copy_of(view, file)?,
            _ => return Err(Fault::Errno(libc::EMFILE)),
        };
        let copy = copy.into_raw_fd();
        next::fcntl_number(copy, libc::F_SETFD, c_int::from(close_on_exec));
        return Ok(copy);
    }
    if let Object::File(file) = &object {
        file.prefetch();
    }
    let only_at_open = libc::O_CLOEXEC | libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC;
    let flags = flags & !only_at_open;
    let description = table::describe(Description::new(object, flags))?;
    Ok(give_number(&description, close_on_exec)?)
}

/// Returns whether the call must fail for lack of a free number instead: the kernel looks for a number before it looks at the path.
/// Programs often look for files that do not exist. For such a fault, this asks the kernel only if numbers were scarce before.
fn has_no_number(fault: &Fault) -> bool {
    match fault {
        Fault::Leaves(_) => false,
        Fault::Errno(libc::ENOENT) if !placeholder::are_numbers_scarce() => false,
        Fault::Errno(_) => !placeholder::has_free_number(),
    }
}

/// Gives a description the lowest free number.
pub(crate) fn give_number(description: &Reference, close_on_exec: bool) -> Result<RawFd, Errno> {
    let number = placeholder::new_number(close_on_exec)?;
    if table::name(number, description) {
        exec_handoff::serve_standard_input(number);
        kernel_reads::note_open(number);
        return Ok(number);
    }
    let _deferral = cancellation::defer();
    close::next(number);
    Err(libc::EMFILE)
}

/// Opens a symlink that `/proc/self/fd/N` leads to. The kernel follows the link in /proc, but not the one that it leads to.
fn open_symlink(link: &Reference, flags: c_int) -> Result<RawFd, Fault> {
    match &link.object {
        _ if flags & libc::O_DIRECTORY != 0 => Err(Fault::Errno(libc::ENOTDIR)),
        Object::Place(Place::Symlink(path, stat)) if flags & libc::O_PATH != 0 => {
            let object = Object::Place(Place::Symlink(path.clone(), *stat));
            let description = table::describe(Description::new(object, flags & FLAGS_OF_PLACE & !libc::O_CLOEXEC))?;
            Ok(give_number(&description, flags & libc::O_CLOEXEC != 0)?)
        }
        _ => Err(Fault::Errno(libc::ELOOP)),
    }
}

fn look_up(view: &View, path: &[u8], flags: c_int) -> Result<Object, Fault> {
    let has = |flag| flags & flag == flag;
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let is_exclusive = has(libc::O_CREAT | libc::O_EXCL);
    if flags & (libc::O_CREAT | TEMPORARY) != 0 {
        check_creation(view, path, flags)?;
    }
    if (has(libc::O_NOFOLLOW) || is_exclusive)
        && let Ok(stat) = view.lstat(path)
        && stat.kind == FileKind::Symlink
    {
        return match has(libc::O_PATH) {
            _ if is_exclusive => Err(Fault::Errno(libc::EEXIST)),
            _ if has(libc::O_DIRECTORY) => Err(Fault::Errno(libc::ENOTDIR)),
            true => Ok(Object::Place(Place::Symlink(path.to_vec(), stat))),
            false => Err(Fault::Errno(libc::ELOOP)),
        };
    }
    match view.open_any(path) {
        Ok(Opened::File(_)) if has(libc::O_PATH | libc::O_DIRECTORY) => Err(Fault::Errno(libc::ENOTDIR)),
        Ok(Opened::File(file)) if has(libc::O_PATH) => Ok(Object::Place(Place::File(file))),
        Ok(Opened::Directory(directory)) if has(libc::O_PATH) => Ok(Object::Place(Place::Directory(directory))),
        Ok(_) if is_exclusive => Err(Fault::Errno(libc::EEXIST)),
        Ok(Opened::Directory(_)) if has(libc::O_TMPFILE) => Err(Fault::Errno(libc::EROFS)),
        Ok(Opened::Directory(_)) if writes || flags & (libc::O_CREAT | libc::O_TRUNC) != 0 => Err(Fault::Errno(libc::EISDIR)),
        Ok(Opened::File(_)) if has(libc::O_DIRECTORY) => Err(Fault::Errno(libc::ENOTDIR)),
        Ok(Opened::File(_)) if writes || has(libc::O_TRUNC) => Err(Fault::Errno(libc::EROFS)),
        Ok(Opened::File(file)) => Ok(Object::File(file)),
        Ok(Opened::Directory(directory)) => Ok(Object::Directory(directory)),
        Err(ViewError::NotFound) if has(libc::O_CREAT) => Err(cannot_open_new(view, path)),
        Err(error) => Err(error.into()),
    }
}

/// Fails if a file cannot be created with these flags, or at a path that can only name a directory.
#[cold]
fn check_creation(view: &View, path: &[u8], flags: c_int) -> Result<(), Fault> {
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let is_valid = match flags & (TEMPORARY | libc::O_DIRECTORY | libc::O_CREAT) {
        libc::O_CREAT => true,
        libc::O_TMPFILE => writes,
        _ => false,
    };
    if !is_valid {
        return Err(Fault::Errno(libc::EINVAL));
    }
    if flags & libc::O_CREAT == 0 || !path.ends_with(b"/") {
        return Ok(());
    }
    match LastName::find(view, path)?.kind.is_dots() {
        true if flags & libc::O_EXCL == 0 => Ok(()),
        true => Err(Fault::Errno(libc::EEXIST)),
        false => Err(Fault::Errno(libc::EISDIR)),
    }
}
