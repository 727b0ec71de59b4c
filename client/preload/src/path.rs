//! Decides whether a path leads into the namespace or to the kernel's files.
//!
//! Every call with a path needs the answer, even in programs that never use the namespace. For a path outside the namespace, the
//! answer costs a comparison and one search for the prefix's last name: no lookup, no allocation, no lock.
//!
//! A path leads into the namespace if it begins with the prefix (after slashes and dots are resolved), if it is relative to a
//! directory of ours, or if it leads through `/dev/fd/N`, `/proc/PID/fd/N` or the like and the number N is ours, or through
//! `/proc/PID/cwd` and the working directory is ours. This module compares text: it
//! does not resolve symlinks of the kernel's file systems that point into the namespace.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int};
use std::os::fd::RawFd;

use dayfly_client::View;
use dayfly_meta::limits::SYMLINKS_FOLLOWED_MAX;

use crate::attach::{known_view, view};
use crate::descriptor_link::{descriptor_link, directory_link, link_number};
use crate::fault::{Fault, finish};
use crate::memory::{self, Failed, FromC};
use crate::setup::{Setup, setup};
use crate::{cwd, table};

/// The side to which a path leads.
pub(crate) enum Side<'a> {
    /// To the kernel's files.
    Kernel,
    /// Into the namespace, at this absolute path, which begins with the prefix.
    Ours(Cow<'a, [u8]>),
}

/// Decides where a path leads, relative to a directory's descriptor or `AT_FDCWD`.
#[inline]
pub(crate) fn side_of<'a>(directory: RawFd, path: FromC<'a, *const c_char>) -> Side<'a> {
    let Some(setup) = setup() else { return Side::Kernel };
    // A path that cannot be read fails in the kernel.
    let Some(path) = path.path() else { return Side::Kernel };
    let bytes = path.to_bytes();
    match bytes.first() {
        None => Side::Kernel,
        Some(b'/') => absolute(setup, path),
        Some(_) => match base(directory) {
            Some(base) => Side::Ours(Cow::Owned([&base, &b"/"[..], bytes].concat())),
            None if mentions_prefix(setup, path) => relative(setup, directory, bytes),
            None => Side::Kernel,
        },
    }
}

/// Returns the directory of ours that a relative path starts from.
#[inline]
fn base(directory: RawFd) -> Option<Vec<u8>> {
    if directory == libc::AT_FDCWD {
        return cwd::current();
    }
    // The descriptor may be a file's, and nothing is below a file. The view finds the right error when this path follows the file's
    // path.
    path_of(&*table::find(directory).filter(|open| !open.is_symlink())?)
}

#[inline]
fn absolute<'a>(setup: &Setup, path: &'a CStr) -> Side<'a> {
    let bytes = path.to_bytes();
    if is_below(setup, bytes) {
        return Side::Ours(Cow::Borrowed(bytes));
    }
    if let Some((number, rest)) = descriptor_link(bytes) {
        return by_descriptor(number, rest);
    }
    if let Some(rest) = directory_link(bytes)
        && let Some(directory) = cwd::current()
    {
        return Side::Ours(Cow::Owned([&directory, rest].concat()));
    }
    if mentions_prefix(setup, path) { not_plain(setup, bytes) } else { Side::Kernel }
}

fn is_below(setup: &Setup, path: &[u8]) -> bool {
    path.strip_prefix(setup.prefix.to_bytes()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

/// Returns whether a path contains the prefix's last name. A path that does not begin with the prefix can lead into the namespace
/// only if it contains that name.
#[inline]
fn mentions_prefix(setup: &Setup, path: &CStr) -> bool {
    // SAFETY: both are strings with a NUL at their end.
    !unsafe { libc::strstr(path.as_ptr(), setup.last.as_ptr()) }.is_null()
}

/// Handles an absolute path that may have doubled slashes, `.` and `..` before or within the prefix.
#[cold]
fn not_plain<'a>(setup: &Setup, path: &[u8]) -> Side<'a> {
    match enter(setup, path) {
        Some(ours) => Side::Ours(Cow::Owned(ours)),
        None => Side::Kernel,
    }
}

/// Follows a path name by name until it has reached the prefix. The rest stays as it is: the view resolves it.
fn enter(setup: &Setup, path: &[u8]) -> Option<Vec<u8>> {
    let mut reached: Vec<u8> = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some(start) = rest.iter().position(|&byte| byte != b'/') {
        let end = rest[start..].iter().position(|&byte| byte == b'/').map_or(rest.len(), |len| start + len);
        match &rest[start..end] {
            b"." => {}
            b".." => reached.truncate(reached.iter().rposition(|&byte| byte == b'/').unwrap_or(0)),
            name => {
                reached.push(b'/');
                reached.extend_from_slice(name);
            }
        }
        rest = &rest[end..];
        if reached == setup.prefix.to_bytes() {
            reached.extend_from_slice(rest);
            return Some(reached);
        }
    }
    None
}

/// Handles a relative path that contains the prefix's last name: it may lead in from a directory outside the namespace.
#[cold]
fn relative<'a>(setup: &Setup, directory: RawFd, path: &[u8]) -> Side<'a> {
    let before = memory::errno();
    let base = match directory {
        libc::AT_FDCWD => cwd::of_kernel(),
        _ => cwd::of_descriptor(directory),
    };
    memory::set_errno(before);
    match base.and_then(|base| enter(setup, &[&base, &b"/"[..], path].concat())) {
        Some(ours) => Side::Ours(Cow::Owned(ours)),
        None => Side::Kernel,
    }
}

/// Returns the description that a path such as `/proc/self/fd/N` leads to through its last name, if the number is ours.
pub(crate) fn linked(path: FromC<*const c_char>) -> Option<table::Reference> {
    setup()?;
    match link_number(path.string()?.to_bytes())? {
        (number, b"") => table::find(number),
        _ => None,
    }
}

/// Returns the working directory if it is in the namespace and the path's last name is the link to it in /proc.
#[inline]
pub(crate) fn linked_directory(path: FromC<*const c_char>) -> Option<Vec<u8>> {
    if !cwd::may_be_ours() {
        return None;
    }
    match directory_link(path.string()?.to_bytes())? {
        b"" => cwd::current(),
        _ => None,
    }
}

fn by_descriptor<'a>(number: RawFd, rest: &[u8]) -> Side<'a> {
    // Nothing is below a symlink that was not followed. So the call goes to the kernel, which fails it, because the kernel has a
    // placeholder at that number.
    let found = table::find(number).filter(|open| rest.is_empty() || !open.is_symlink());
    let path = found.and_then(|description| path_of(&description));
    path.map_or(Side::Kernel, |path| Side::Ours(Cow::Owned([&path, rest].concat())))
}

/// Returns the path of an open file or directory.
pub(crate) fn path_of(description: &table::Description) -> Option<Vec<u8>> {
    match &description.object {
        table::Object::Directory(directory) => Some(directory.path().to_vec()),
        table::Object::File(file) => file.path(known_view()?).ok(),
        table::Object::Place(place) => place.path(known_view()?),
    }
}

/// Runs a call with a path: `ours` if the path leads into the namespace, else `kernel`. `kernel` gets the directory and the path to
/// pass on, which are not always the caller's: a symlink may lead out of the namespace.
#[inline]
pub(crate) fn at<R: Failed>(
    directory: RawFd,
    path: FromC<*const c_char>,
    ours: impl Fn(&View, &[u8]) -> Result<R, Fault>,
    kernel: impl Fn(RawFd, FromC<*const c_char>) -> R,
) -> R {
    on_either_side(false, directory, path, ours, kernel)
}

/// Like [`at`], for a call that may fail with EINTR if the program's handlers want that.
#[inline]
pub(crate) fn at_until_signal<R: Failed>(
    directory: RawFd,
    path: FromC<*const c_char>,
    ours: impl Fn(&View, &[u8]) -> Result<R, Fault>,
    kernel: impl Fn(RawFd, FromC<*const c_char>) -> R,
) -> R {
    on_either_side(true, directory, path, ours, kernel)
}

#[inline]
fn on_either_side<R: Failed>(
    may_fail: bool,
    directory: RawFd,
    path: FromC<*const c_char>,
    ours: impl Fn(&View, &[u8]) -> Result<R, Fault>,
    kernel: impl Fn(RawFd, FromC<*const c_char>) -> R,
) -> R {
    match side_of(directory, path) {
        Side::Kernel => kernel(directory, path),
        Side::Ours(path) => in_namespace(&path, may_fail, &ours, &kernel),
    }
}

/// A call on the namespace, with an absolute path.
type OnNamespace<'a, R> = &'a dyn Fn(&View, &[u8]) -> Result<R, Fault>;
/// A call on the kernel's files.
type OnKernel<'a, R> = &'a dyn Fn(RawFd, FromC<*const c_char>) -> R;

/// Like [`at`], but an empty path with `AT_EMPTY_PATH` means the directory's descriptor itself.
pub(crate) fn at_or_itself<R: Failed>(
    directory: RawFd,
    path: FromC<*const c_char>,
    flags: c_int,
    ours: impl Fn(&View, &[u8]) -> Result<R, Fault>,
    kernel: impl Fn(RawFd, FromC<*const c_char>) -> R,
) -> R {
    let is_itself = flags & libc::AT_EMPTY_PATH != 0 && path.path().is_some_and(CStr::is_empty);
    match table::find(directory).filter(|open| is_itself && !open.is_symlink()).and_then(|open| path_of(&open)) {
        Some(path) => in_namespace(&path, false, &ours, &kernel),
        None => at(directory, path, ours, kernel),
    }
}

/// Where a call on the namespace ended.
enum Outcome<R> {
    Answer(R),
    Outside(CString),
}

#[inline(never)]
fn in_namespace<R: Failed>(path: &[u8], may_fail: bool, ours: OnNamespace<'_, R>, kernel: OnKernel<'_, R>) -> R {
    let mut path = Cow::Borrowed(path);
    // A symlink may lead out of the namespace, to a path that leads back in.
    for _ in 0..SYMLINKS_FOLLOWED_MAX {
        let outcome = finish(may_fail, || match view().and_then(|view| ours(&view, &path)) {
            Ok(value) => Ok(Outcome::Answer(value)),
            Err(Fault::Leaves(outside)) => Ok(Outcome::Outside(CString::new(outside).map_err(|_| libc::ENOENT)?)),
            Err(fault) => Err(fault),
        });
        match outcome {
            Outcome::Answer(value) => return value,
            Outcome::Outside(outside) => match side_of(libc::AT_FDCWD, outside.as_c_str().into()) {
                Side::Kernel => return kernel(libc::AT_FDCWD, outside.as_c_str().into()),
                Side::Ours(again) => path = Cow::Owned(again.into_owned()),
            },
        }
    }
    memory::fail(libc::ELOOP)
}

impl<R: Failed> Failed for Outcome<R> {
    const FAILED: Self = Self::Answer(R::FAILED);
}

/// Returns whether a path leads into the namespace.
pub(crate) fn is_ours(directory: RawFd, path: FromC<*const c_char>) -> bool {
    matches!(side_of(directory, path), Side::Ours(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup() -> Setup {
        let environment = dayfly_client::locate::Environment::read(crate::environment::variable);
        Setup { prefix: c"/pfs/dayfly".to_owned(), last: c"dayfly".to_owned(), device: 0, environment, temporary: "/tmp".into() }
    }

    #[test]
    fn every_spelling_of_the_prefix_is_recognized() {
        let check = |path: &str, expect: Option<&str>| {
            let found = enter(&setup(), path.as_bytes());
            assert_eq!(found.as_deref(), expect.map(str::as_bytes), "{path}");
        };
        check("/pfs/dayfly", Some("/pfs/dayfly"));
        check("//pfs/./dayfly/a/../b", Some("/pfs/dayfly/a/../b"));
        check("/pfs/x/../dayfly/", Some("/pfs/dayfly/"));
        check("/../pfs/dayfly", Some("/pfs/dayfly"));
        check("/pfs/dayfly2/a", None);
        check("/pfs/dayfly-x", None);
        check("/x/pfs/dayfly", None);
        check("/", None);
    }
}
