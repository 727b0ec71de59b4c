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
//! | `cut` | truncates what a path names | the same, EISDIR for a directory, EINVAL for a negative length |
//! | `new`, `new_directory` | creates a name that must not exist | EEXIST, EROFS, or why the directory cannot hold it |
//! | `temporary` | creates a name that it chooses itself | EROFS, or why the directory cannot hold it |
//! | `file_removed` | removes a file | EROFS, ENOENT if the file is missing, EISDIR for `.`, `..` and the prefix |
//! | `directory_removed` | removes a directory | EROFS, ENOENT if it is missing; EINVAL, ENOTEMPTY, EBUSY for `.`, `..`, the prefix |
//! | `either_removed` | removes a file or a directory | as the two above |
//! | `descriptor` | changes a file through its descriptor, which is open only for reading | the error in the table |

use std::ffi::{c_char, c_int, c_void};

use dayfly_client::{FileKind, View};
use libc::{dev_t, gid_t, mode_t, off_t, size_t, timespec, timeval, uid_t, utimbuf};

use super::attributes::check_name;
use super::hook;
use crate::fault::Fault;
use crate::last_name::{Kind, LastName, cannot_create};
use crate::memory::{Errno, FromC, fail};
use crate::path::{at, at_or_itself};
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

fn cut(view: &View, path: &[u8], len: off_t) -> Result<c_int, Fault> {
    if len < 0 {
        return Err(Fault::Errno(libc::EINVAL));
    }
    let is_directory = view.stat(path)?.kind == FileKind::Directory;
    Err(Fault::Errno(if is_directory { libc::EISDIR } else { libc::EROFS }))
}

fn new(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    Err(cannot_create(view, path, false))
}

fn new_directory(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    Err(cannot_create(view, path, true))
}

fn temporary(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    LastName::find(view, path)?;
    Err(Fault::Errno(libc::EROFS))
}

fn file_removed(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    let last = LastName::find(view, path)?;
    Err(if last.kind == Kind::Name { last.cannot_remove(view) } else { Fault::Errno(libc::EISDIR) })
}

fn directory_removed(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    let last = LastName::find(view, path)?;
    Err(match last.kind {
        Kind::Prefix => Fault::Errno(libc::EBUSY),
        Kind::Dot => Fault::Errno(libc::EINVAL),
        Kind::DotDot => Fault::Errno(libc::ENOTEMPTY),
        Kind::Name => last.cannot_remove(view),
    })
}

fn either_removed(view: &View, path: &[u8]) -> Result<c_int, Fault> {
    match file_removed(view, path) {
        Err(Fault::Errno(libc::EISDIR)) => directory_removed(view, path),
        result => result,
    }
}

fn descriptor(number: c_int, errno: c_int, read: impl FnOnce() -> Result<(), Errno>, kernel: impl FnOnce() -> c_int) -> c_int {
    if table::is_open(number) { fail(read().err().unwrap_or(errno)) } else { kernel() }
}

/// An argument that the kernel reads before it looks at the file.
trait ReadFirst {
    /// Fails if the argument cannot be read or is not valid, as the kernel then does.
    fn read(self) -> Result<(), Errno>;
}

impl ReadFirst for Text<'_> {
    fn read(self) -> Result<(), Errno> {
        match self.path() {
            Some(path) if path.is_empty() => Err(libc::ENOENT),
            Some(_) => Ok(()),
            None => Err(if self.string().is_some() { libc::ENAMETOOLONG } else { libc::EFAULT }),
        }
    }
}

/// The name of an extended attribute.
struct Attribute<'a>(Text<'a>);

impl ReadFirst for Attribute<'_> {
    fn read(self) -> Result<(), Errno> {
        check_name(self.0)
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
/// a bad pointer there is EFAULT. After `as` comes what the argument is.
macro_rules! refuse {
    ($(fn $name:ident $(| $alias:ident)* ($($argument:ident: $kind:ty),*)
        => $policy:ident($($subject:tt)*) $(reads $first:ident $(as $form:ident)?)?;)*) => {
        hook! {$(
            fn $name $(| $alias)* ($($argument: $kind),*) -> c_int {
                let read_first = || -> Result<(), Errno> { Ok(())$(.and($($form)?($first).read()))? };
                refuse!(@$policy ($($subject)*) read_first $name($($argument),*))
            }
        )*}
    };
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
    fn symlink(target: Text, path: Text) => new(HERE path) reads target;
    fn symlinkat(target: Text, directory: c_int, path: Text) => new(directory path) reads target;
    fn mkdir(path: Text, mode: mode_t) => new_directory(HERE path);
    fn mkdirat(directory: c_int, path: Text, mode: mode_t) => new_directory(directory path);
    fn mkfifo(path: Text, mode: mode_t) => new(HERE path);
    fn mkfifoat(directory: c_int, path: Text, mode: mode_t) => new(directory path);
    fn mknod(path: Text, mode: mode_t, device: dev_t) => new(HERE path);
    fn mknodat(directory: c_int, path: Text, mode: mode_t, device: dev_t) => new(directory path);

    fn mkstemp | mkstemp64 (template: Template) => temporary(HERE template);
    fn mkostemp | mkostemp64 (template: Template, flags: c_int) => temporary(HERE template);
    fn mkstemps | mkstemps64 (template: Template, suffix_len: c_int) => temporary(HERE template);
    fn mkostemps | mkostemps64 (template: Template, suffix_len: c_int, flags: c_int) => temporary(HERE template);

    fn unlink(path: Text) => file_removed(HERE path);
    fn rmdir(path: Text) => directory_removed(HERE path);
    fn remove(path: Text) => either_removed(HERE path);

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
    fn futimens(descriptor: c_int, times: FromC<*const timespec>) => descriptor(descriptor EROFS) reads times;
    fn futimes(descriptor: c_int, times: FromC<*const timeval>) => descriptor(descriptor EROFS) reads times;

    fn setxattr(path: Text, name: Text, value: FromC<*const c_void>, len: size_t, flags: c_int) => followed(HERE path) reads name as Attribute;
    fn lsetxattr(path: Text, name: Text, value: FromC<*const c_void>, len: size_t, flags: c_int) => existing(HERE path) reads name as Attribute;
    fn fsetxattr(descriptor: c_int, name: Text, value: FromC<*const c_void>, len: size_t, flags: c_int) => descriptor(descriptor EROFS) reads name as Attribute;
    fn removexattr(path: Text, name: Text) => followed(HERE path) reads name as Attribute;
    fn lremovexattr(path: Text, name: Text) => existing(HERE path) reads name as Attribute;
    fn fremovexattr(descriptor: c_int, name: Text) => descriptor(descriptor EROFS) reads name as Attribute;
}

// The functions that have rules of their own.
hook! {
    fn futimesat(directory: c_int, path: Text, times: FromC<*const timeval>) -> c_int {
        if path.is_null() {
            // The call is about the descriptor itself.
            return descriptor(directory, libc::EROFS, || times.read(), || futimesat::next(directory, path, times));
        }
        let policy = after(|| times.read(), followed);
        at(directory, path, policy, |directory, path| futimesat::next(directory, path, times))
    }

    fn unlinkat(directory: c_int, path: Text, flags: c_int) -> c_int {
        let ours = |view: &View, path: &[u8]| match flags {
            0 => file_removed(view, path),
            libc::AT_REMOVEDIR => directory_removed(view, path),
            _ => Err(Fault::Errno(libc::EINVAL)),
        };
        at(directory, path, ours, |directory, path| unlinkat::next(directory, path, flags))
    }

    fn truncate | truncate64 (path: Text, len: off_t) -> c_int {
        at(HERE, path, |view, path| cut(view, path, len), |_, path| truncate::next(path, len))
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
