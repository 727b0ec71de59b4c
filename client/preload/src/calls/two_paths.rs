//! Renaming and linking, which involve two paths. Each may lead into the namespace or to the kernel's files, and the kernel looks
//! up both before it decides; so do these functions.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int, c_uint};

use dayfly_client::View;
use dayfly_meta::limits::SYMLINKS_FOLLOWED_MAX;
use libc::{EBUSY, EEXIST, EINVAL, EISDIR, ENOENT, ENOTDIR, EROFS, EXDEV};

use super::hook;
use crate::attach::view;
use crate::fault::{Fault, answer_from_memory};
use crate::last_name::{Kind, LastName, cannot_create, start_of_name, trim};
use crate::memory::{self, Errno, Failed, FromC, fail};
use crate::path::{Side, is_ours, side_of};
use crate::{next, table};

const HERE: c_int = libc::AT_FDCWD;

/// A path of the program, absolute or relative to a directory.
type Text<'a> = FromC<'a, *const c_char>;
/// A directory's descriptor and a path relative to it.
type At<'a> = (c_int, Text<'a>);

hook! {
    fn rename(from: Text, to: Text) -> c_int {
        between((HERE, from), (HERE, to), &Rename { flags: 0 }, |_, from, _, to| rename::next(from, to))
    }

    fn renameat(from_directory: c_int, from: Text, to_directory: c_int, to: Text) -> c_int {
        let kernel = |a, from: Text, b, to: Text| renameat::next(a, from, b, to);
        between((from_directory, from), (to_directory, to), &Rename { flags: 0 }, kernel)
    }

    fn renameat2(from_directory: c_int, from: Text, to_directory: c_int, to: Text, flags: c_uint) -> c_int {
        let kernel = |a, from: Text, b, to: Text| renameat2::next(a, from, b, to, flags);
        between((from_directory, from), (to_directory, to), &Rename { flags }, kernel)
    }

    fn link(from: Text, to: Text) -> c_int {
        between((HERE, from), (HERE, to), &Link { flags: 0 }, |_, from, _, to| link::next(from, to))
    }

    fn linkat(from_directory: c_int, from: Text, to_directory: c_int, to: Text, flags: c_int) -> c_int {
        let is_itself = flags & libc::AT_EMPTY_PATH != 0 && from.path().is_some_and(CStr::is_empty);
        if is_itself && table::is_ours(from_directory) && to.path().is_some() {
            return fail(EXDEV);
        }
        let kernel = |a, from: Text, b, to: Text| linkat::next(a, from, b, to, flags);
        between((from_directory, from), (to_directory, to), &Link { flags }, kernel)
    }
}

/// The checks that the kernel makes before it finds that a file system is read-only, in the kernel's order.
trait Rules {
    /// Checks the flags.
    fn check(&self) -> Result<(), Errno>;
    /// Looks up the part of the first path that the kernel looks up. The path leads into the namespace.
    fn look_up(&self, view: &View, path: &[u8]) -> Result<(), Fault>;
    /// Does the same for a path that leads to the kernel's files.
    fn look_up_in_kernel(&self, directory: c_int, path: &CStr) -> Result<(), Errno>;
    /// Returns why the call fails. At least one of the paths leads into the namespace.
    fn error(&self, from: &End, to: &End) -> Result<Errno, Fault>;
}

/// Where one of the two paths leads.
enum End<'a> {
    /// Into the namespace.
    Ours(Vec<u8>),
    Kernel(c_int, Cow<'a, CStr>),
}

/// The two paths for the kernel, or `None` if the call has failed.
struct Kernels<'a>(Option<[(c_int, Cow<'a, CStr>); 2]>);

impl Failed for Kernels<'_> {
    const FAILED: Self = Self(None);
}

/// Fails by the rules if a path leads into the namespace, and otherwise calls `kernel`.
fn between(from: At, to: At, rules: &dyn Rules, kernel: impl FnOnce(c_int, Text, c_int, Text) -> c_int) -> c_int {
    if !is_ours(from.0, from.1) && !is_ours(to.0, to.1) {
        return kernel(from.0, from.1, to.0, to.1);
    }
    let (Some(from_text), Some(to_text)) = (from.1.path(), to.1.path()) else {
        // The kernel is not asked: it does not know the other path, and would fail for that reason.
        let bad = if from.1.path().is_none() { from.1 } else { to.1 };
        return fail(if bad.string().is_some() { libc::ENAMETOOLONG } else { libc::EFAULT });
    };
    let outcome = answer_from_memory(|| {
        rules.check()?;
        let from = lead(from.0, from_text, &|view, path| rules.look_up(view, path))?;
        if let End::Kernel(directory, path) = &from {
            rules.look_up_in_kernel(*directory, path)?;
        }
        match (from, lead(to.0, to_text, &|view, path| LastName::find(view, path).map(drop))?) {
            (End::Kernel(a, from), End::Kernel(b, to)) => Ok(Kernels(Some([(a, from), (b, to)]))),
            (from, to) => Err(Fault::Errno(rules.error(&from, &to)?)),
        }
    });
    match &outcome.0 {
        Some([(a, from), (b, to)]) => kernel(*a, (&**from).into(), *b, (&**to).into()),
        None => -1,
    }
}

/// A look-up of a path of the namespace.
type LookUp<'a> = &'a dyn Fn(&View, &[u8]) -> Result<(), Fault>;

/// Finds where a path leads. `look_up` fails with [`Fault::Leaves`] if it leads out of the namespace.
fn lead<'a>(directory: c_int, path: &'a CStr, look_up: LookUp<'_>) -> Result<End<'a>, Fault> {
    let mut ours = match side_of(directory, path.into()) {
        Side::Kernel => return Ok(End::Kernel(directory, Cow::Borrowed(path))),
        Side::Ours(ours) => ours.into_owned(),
    };
    for _ in 0..SYMLINKS_FOLLOWED_MAX {
        match look_up(&*view()?, &ours) {
            Ok(()) => return Ok(End::Ours(ours)),
            Err(Fault::Leaves(outside)) => {
                let outside = CString::new(outside).map_err(|_| ENOENT)?;
                let again = match side_of(HERE, outside.as_c_str().into()) {
                    Side::Kernel => None,
                    Side::Ours(again) => Some(again.into_owned()),
                };
                match again {
                    Some(again) => ours = again,
                    None => return Ok(End::Kernel(HERE, Cow::Owned(outside))),
                }
            }
            Err(fault) => return Err(fault),
        }
    }
    Err(Fault::Errno(libc::ELOOP))
}

/// What decides how a rename fails.
#[derive(Clone, Copy)]
struct Subject {
    kind: Kind,
    /// Whether the name belongs to a directory of the namespace. The prefix itself belongs to the directory above it.
    is_inside: bool,
    has_slash: bool,
}

fn subject(end: &End) -> Result<Subject, Fault> {
    match end {
        End::Ours(path) => {
            let last = LastName::find(&*view()?, path)?;
            Ok(Subject { kind: last.kind, is_inside: last.kind != Kind::Prefix, has_slash: last.has_slash })
        }
        End::Kernel(directory, path) => {
            let (kind, _) = kernel_name(*directory, path)?;
            Ok(Subject { kind, is_inside: false, has_slash: path.to_bytes().ends_with(b"/") })
        }
    }
}

/// Checks that the directory of the kernel's path exists. Returns the kind of the last name, and the path without slashes at its
/// end.
fn kernel_name(directory: c_int, path: &CStr) -> Result<(Kind, CString), Errno> {
    if path.is_empty() {
        return Err(ENOENT);
    }
    let trimmed = trim(path.to_bytes());
    let start = start_of_name(trimmed);
    let parent = if start == 0 { &b"."[..] } else { &trimmed[..start] };
    if kernel_mode(directory, parent, 0)? & libc::S_IFMT != libc::S_IFDIR {
        return Err(ENOTDIR);
    }
    Ok((Kind::of(&trimmed[start..]), CString::new(trimmed).map_err(|_| ENOENT)?))
}

/// Returns the mode of the kernel's file.
fn kernel_mode(directory: c_int, path: &[u8], flags: c_int) -> Result<libc::mode_t, Errno> {
    let path = CString::new(path).map_err(|_| ENOENT)?;
    let mut found: libc::stat = memory::zeroed();
    match next::fstatat(directory, path.as_c_str().into(), (&mut found).into(), flags) {
        0 => Ok(found.st_mode),
        _ => Err(memory::errno()),
    }
}

struct Rename {
    flags: c_uint,
}

impl Rules for Rename {
    fn check(&self) -> Result<(), Errno> {
        let known = libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE | libc::RENAME_WHITEOUT;
        let contradicts = self.flags & libc::RENAME_EXCHANGE != 0 && self.flags != libc::RENAME_EXCHANGE;
        if self.flags & !known != 0 || contradicts { Err(EINVAL) } else { Ok(()) }
    }

    fn look_up(&self, view: &View, path: &[u8]) -> Result<(), Fault> {
        LastName::find(view, path).map(drop)
    }

    fn look_up_in_kernel(&self, directory: c_int, path: &CStr) -> Result<(), Errno> {
        kernel_name(directory, path).map(drop)
    }

    fn error(&self, from: &End, to: &End) -> Result<Errno, Fault> {
        let replaces = self.flags & libc::RENAME_NOREPLACE == 0;
        let exchanges = self.flags & libc::RENAME_EXCHANGE != 0;
        let (old, new) = (subject(from)?, subject(to)?);
        Ok(match from {
            _ if old.is_inside != new.is_inside => EXDEV,
            _ if old.kind.is_dots() => EBUSY,
            _ if new.kind.is_dots() && replaces => EBUSY,
            _ if new.kind.is_dots() => EEXIST,
            _ if old.is_inside => EROFS,
            // Here one of the paths is the prefix, which is busy like a mount point.
            End::Kernel(directory, path) => {
                let mode = kernel_mode(*directory, path.to_bytes(), libc::AT_SYMLINK_NOFOLLOW)?;
                match mode & libc::S_IFMT == libc::S_IFDIR {
                    _ if !replaces => EEXIST,
                    false if new.has_slash && !exchanges => ENOTDIR,
                    false if !exchanges => EISDIR,
                    _ => EBUSY,
                }
            }
            End::Ours(_) => EBUSY,
        })
    }
}

struct Link {
    flags: c_int,
}

impl Link {
    fn follows(&self) -> bool {
        self.flags & libc::AT_SYMLINK_FOLLOW != 0
    }
}

impl Rules for Link {
    fn check(&self) -> Result<(), Errno> {
        if self.flags & !(libc::AT_SYMLINK_FOLLOW | libc::AT_EMPTY_PATH) != 0 { Err(EINVAL) } else { Ok(()) }
    }

    fn look_up(&self, view: &View, path: &[u8]) -> Result<(), Fault> {
        let found = if self.follows() { view.stat(path) } else { view.lstat(path) };
        Ok(found.map(drop)?)
    }

    fn look_up_in_kernel(&self, directory: c_int, path: &CStr) -> Result<(), Errno> {
        let follow = if self.follows() { 0 } else { libc::AT_SYMLINK_NOFOLLOW };
        kernel_mode(directory, path.to_bytes(), follow | self.flags & libc::AT_EMPTY_PATH).map(drop)
    }

    fn error(&self, _from: &End, to: &End) -> Result<Errno, Fault> {
        let (directory, path) = match to {
            End::Ours(path) => return Err(cannot_create(&*view()?, path, false)),
            End::Kernel(directory, path) => (*directory, path),
        };
        let (kind, trimmed) = kernel_name(directory, path)?;
        Ok(match kernel_mode(directory, trimmed.to_bytes(), libc::AT_SYMLINK_NOFOLLOW) {
            _ if kind != Kind::Name => EEXIST,
            Ok(_) => EEXIST,
            Err(ENOENT) if path.to_bytes().ends_with(b"/") => ENOENT,
            Err(ENOENT) => EXDEV,
            Err(errno) => errno,
        })
    }
}
