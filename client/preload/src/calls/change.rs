//! Calls that change files. The namespace is read-only, so they fail as on a read-only mount.
//!
//! The table below has one line per function: its names, its arguments, and the *policy* that decides which error the call gets
//! when it concerns the namespace. All other calls are passed on.
//!
//! | policy | the call | its error |
//! |---|---|---|
//! | `existing` | changes what a path names, and does not follow a symlink at its end | EROFS, or why the path names nothing |
//! | `followed` | the same, but follows a symlink at the end | as above |
//! | `followed_or_itself` | the same, and an empty path with `AT_EMPTY_PATH` means the descriptor | as above |
//! | `new` | creates a name that must not exist | EEXIST, EROFS, or why the directory cannot hold it |
//! | `temporary` | creates a name that it chooses itself | EROFS, or why the directory cannot hold it |
//! | `between` | involves two paths | EXDEV if one is the kernel's, else EROFS |
//! | `descriptor` | changes what a descriptor names, which is open for reading | the error in the table |

use std::ffi::{c_char, c_int, c_uint, c_void};

use dayfly_client::{View, ViewError};
use libc::{dev_t, gid_t, mode_t, off_t, size_t, timespec, timeval, uid_t, utimbuf};

use super::hook;
use super::open::cannot_create;
use crate::fault::Fault;
use crate::memory::{Errno, FromC, fail};
use crate::path::{at, at_or_itself, is_ours};
use crate::table::{self, created};

const HERE: c_int = libc::AT_FDCWD;

/// A path or a name.
type Text<'a> = FromC<'a, *const c_char>;
/// A pattern that the call replaces with the name that it has chosen.
type Template<'a> = FromC<'a, *mut c_char>;

fn existing(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    view.lstat(path)?;
    Err(Fault::Errno(libc::EROFS))
}

fn followed(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    view.stat(path)?;
    Err(Fault::Errno(libc::EROFS))
}

fn new(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    match view.lstat(path) {
        Ok(_) => Err(Fault::Errno(libc::EEXIST)),
        Err(ViewError::NotFound) => Err(cannot_create(view, path)),
        Err(error) => Err(error.into()),
    }
}

fn temporary(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    Err(cannot_create(view, path))
}

/// A directory's descriptor and a path relative to it.
type At<'a> = (c_int, Text<'a>);

fn between(from: At, to: At, kernel: impl FnOnce() -> c_int) -> c_int {
    let is_bad = |path: Text| path.path().is_none();
    if is_bad(from.1) && !is_ours(to.0, to.1) || is_bad(to.1) && !is_ours(from.0, from.1) {
        return kernel();
    }
    if is_bad(from.1) || is_bad(to.1) {
        // The kernel does not know the other path, and would fail for that reason.
        let is_long = |path: Text| path.string().is_some();
        let bad = if is_bad(from.1) { from.1 } else { to.1 };
        return fail(if is_long(bad) { libc::ENAMETOOLONG } else { libc::EFAULT });
    }
    match (is_ours(from.0, from.1), is_ours(to.0, to.1)) {
        (false, false) => kernel(),
        (true, true) => fail(libc::EROFS),
        _ => fail(libc::EXDEV),
    }
}

fn descriptor(number: c_int, errno: c_int, read: impl FnOnce() -> Result<(), Errno>, kernel: impl FnOnce() -> c_int) -> c_int {
    if table::is_open(number) { fail(read().err().unwrap_or(errno)) } else { kernel() }
}

/// An argument that the kernel reads before it looks at the file.
trait ReadFirst {
    /// Fails with EFAULT, as the kernel then does.
    fn read(self) -> Result<(), Errno>;
}

impl ReadFirst for Text<'_> {
    fn read(self) -> Result<(), Errno> {
        self.string().map(drop).ok_or(libc::EFAULT)
    }
}

/// Reads times, which may be left out.
macro_rules! times {
    ($($kind:ty: $count:expr),*) => {$(
        impl ReadFirst for FromC<'_, *const $kind> {
            fn read(self) -> Result<(), Errno> {
                if self.is_null() { Ok(()) } else { self.check($count) }
            }
        }
    )*};
}

times!(utimbuf: 1, timeval: 2, timespec: 2);

/// Defines the hooks of the table. `HERE` in a policy means that the path is relative to the working directory; otherwise the
/// argument before the path names a directory. After `reads` comes an argument that the kernel reads before it looks at the file:
/// a bad pointer there is EFAULT.
macro_rules! refuse {
    ($(fn $name:ident $(| $alias:ident)* ($($argument:ident: $kind:ty),*)
        => $policy:ident($($subject:tt)*) $(reads $first:ident)?;)*) => {
        hook! {$(
            fn $name $(| $alias)* ($($argument: $kind),*) -> c_int {
                let read_first = || -> Result<(), Errno> { Ok(())$(.and($first.read()))? };
                refuse!(@$policy ($($subject)*) read_first $name($($argument),*))
            }
        )*}
    };
    (@between (HERE $from:ident, HERE $to:ident) $read:ident $name:ident $arguments:tt) => {{
        let _ = $read;
        between((HERE, $from), (HERE, $to), || $name::next $arguments)
    }};
    (@between ($from_directory:ident $from:ident, $to_directory:ident $to:ident) $read:ident $name:ident $arguments:tt) => {{
        let _ = $read;
        between(($from_directory, $from), ($to_directory, $to), || $name::next $arguments)
    }};
    (@descriptor ($number:ident $errno:ident) $read:ident $name:ident $arguments:tt) => {
        descriptor($number, libc::$errno, $read, || $name::next $arguments)
    };
    (@temporary (HERE $template:ident) $read:ident $name:ident $arguments:tt) => {
        at(HERE, $template.as_const(), after($read, temporary), |_, _| created($name::next $arguments))
    };
    (@followed_or_itself ($directory:ident $path:ident $flags:ident) $read:ident $name:ident $arguments:tt) => {
        at_or_itself($directory, $path, $flags, after($read, followed), |$directory, $path| $name::next $arguments)
    };
    (@$policy:ident (HERE $path:ident) $read:ident $name:ident $arguments:tt) => {
        at(HERE, $path, after($read, $policy), |_, $path| $name::next $arguments)
    };
    (@$policy:ident ($directory:ident $path:ident) $read:ident $name:ident $arguments:tt) => {
        at($directory, $path, after($read, $policy), |$directory, $path| $name::next $arguments)
    };
}

/// Returns a policy that first reads what the kernel reads first.
fn after(
    read: impl Fn() -> Result<(), Errno>,
    policy: impl Fn(&View, &[u8]) -> Result<c_int, Fault>,
) -> impl Fn(&View, &[u8]) -> Result<c_int, Fault> {
    move |view, path| {
        read()?;
        policy(view, path)
    }
}

refuse! {
    fn rename(from: Text, to: Text) => between(HERE from, HERE to);
    fn renameat(from_directory: c_int, from: Text, to_directory: c_int, to: Text)
        => between(from_directory from, to_directory to);
    fn renameat2(from_directory: c_int, from: Text, to_directory: c_int, to: Text, flags: c_uint)
        => between(from_directory from, to_directory to);
    fn link(from: Text, to: Text) => between(HERE from, HERE to);

    fn symlink(target: Text, path: Text) => new(HERE path) reads target;
    fn symlinkat(target: Text, directory: c_int, path: Text) => new(directory path) reads target;
    fn mkdir(path: Text, mode: mode_t) => new(HERE path);
    fn mkdirat(directory: c_int, path: Text, mode: mode_t) => new(directory path);
    fn mkfifo(path: Text, mode: mode_t) => new(HERE path);
    fn mkfifoat(directory: c_int, path: Text, mode: mode_t) => new(directory path);
    fn mknod(path: Text, mode: mode_t, device: dev_t) => new(HERE path);
    fn mknodat(directory: c_int, path: Text, mode: mode_t, device: dev_t) => new(directory path);

    fn mkstemp | mkstemp64 (template: Template) => temporary(HERE template);
    fn mkostemp | mkostemp64 (template: Template, flags: c_int) => temporary(HERE template);
    fn mkstemps | mkstemps64 (template: Template, suffix_len: c_int) => temporary(HERE template);
    fn mkostemps | mkostemps64 (template: Template, suffix_len: c_int, flags: c_int) => temporary(HERE template);

    fn unlink(path: Text) => existing(HERE path);
    fn unlinkat(directory: c_int, path: Text, flags: c_int) => existing(directory path);
    fn rmdir(path: Text) => existing(HERE path);
    fn remove(path: Text) => existing(HERE path);

    fn truncate | truncate64 (path: Text, len: off_t) => followed(HERE path);
    fn ftruncate | ftruncate64 (descriptor: c_int, len: off_t) => descriptor(descriptor EINVAL);

    fn chmod(path: Text, mode: mode_t) => followed(HERE path);
    fn lchmod(path: Text, mode: mode_t) => existing(HERE path);
    fn fchmodat(directory: c_int, path: Text, mode: mode_t, flags: c_int) => followed_or_itself(directory path flags);
    fn fchmod(descriptor: c_int, mode: mode_t) => descriptor(descriptor EROFS);

    fn chown(path: Text, user: uid_t, group: gid_t) => followed(HERE path);
    fn lchown(path: Text, user: uid_t, group: gid_t) => existing(HERE path);
    fn fchownat(directory: c_int, path: Text, user: uid_t, group: gid_t, flags: c_int)
        => followed_or_itself(directory path flags);
    fn fchown(descriptor: c_int, user: uid_t, group: gid_t) => descriptor(descriptor EROFS);

    fn utime(path: Text, times: FromC<*const utimbuf>) => followed(HERE path) reads times;
    fn utimes(path: Text, times: FromC<*const timeval>) => followed(HERE path) reads times;
    fn lutimes(path: Text, times: FromC<*const timeval>) => existing(HERE path) reads times;
    fn futimesat(directory: c_int, path: Text, times: FromC<*const timeval>) => followed(directory path) reads times;
    fn futimens(descriptor: c_int, times: FromC<*const timespec>) => descriptor(descriptor EROFS) reads times;
    fn futimes(descriptor: c_int, times: FromC<*const timeval>) => descriptor(descriptor EROFS) reads times;

    fn setxattr(path: Text, name: Text, value: FromC<*const c_void>, len: size_t, flags: c_int) => followed(HERE path) reads name;
    fn lsetxattr(path: Text, name: Text, value: FromC<*const c_void>, len: size_t, flags: c_int) => existing(HERE path) reads name;
    fn fsetxattr(descriptor: c_int, name: Text, value: FromC<*const c_void>, len: size_t, flags: c_int) => descriptor(descriptor EROFS) reads name;
    fn removexattr(path: Text, name: Text) => followed(HERE path) reads name;
    fn lremovexattr(path: Text, name: Text) => existing(HERE path) reads name;
    fn fremovexattr(descriptor: c_int, name: Text) => descriptor(descriptor EROFS) reads name;
}

// The functions that have rules of their own.
hook! {
    fn linkat(from_directory: c_int, from: Text, to_directory: c_int, to: Text, flags: c_int) -> c_int {
        if flags & libc::AT_EMPTY_PATH != 0 && table::is_ours(from_directory) && from.path().is_some() && to.path().is_some() {
            return fail(libc::EXDEV);
        }
        between((from_directory, from), (to_directory, to), || linkat::next(from_directory, from, to_directory, to, flags))
    }

    fn mkdtemp(template: Template) -> *mut c_char {
        let ours = |view: &View, path: &[u8]| temporary(view, path).map(|_| template.raw());
        at(HERE, template.as_const(), ours, |_, _| mkdtemp::next(template))
    }

    fn utimensat(directory: c_int, path: Text, times: FromC<*const timespec>, flags: c_int) -> c_int {
        if path.is_null() && table::is_open(directory) {
            return fail(times.read().err().unwrap_or(libc::EROFS));
        }
        let policy = if flags & libc::AT_SYMLINK_NOFOLLOW == 0 { followed } else { existing };
        at_or_itself(directory, path, flags, after(|| times.read(), policy), |directory, path| utimensat::next(directory, path, times, flags))
    }
}
