//! Whose a path is: the kernel's or ours. For a path of the kernel's, this costs a comparison and one search for the prefix's
//! last name; no lookup, no allocation, no lock.

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int};
use std::os::fd::RawFd;

use dayfly_client::View;
use dayfly_meta::limits::SYMLINKS_FOLLOWED_MAX;

use crate::memory::{self, Failed};
use crate::process::{self, Fault, Setup, answer, setup};
use crate::{cwd, table};

/// Whose a path is.
pub(crate) enum Whose<'a> {
    /// The kernel's, as it is.
    Kernel,
    /// Ours: absolute, with the prefix.
    Ours(Cow<'a, [u8]>),
}

/// Decides whose a path is, relative to a directory's descriptor or `AT_FDCWD`.
#[inline]
pub(crate) fn whose<'a>(directory: RawFd, path: *const c_char) -> Whose<'a> {
    let (Some(setup), Some(path)) = (setup(), memory::string(path)) else { return Whose::Kernel };
    let bytes = path.to_bytes();
    match bytes.first() {
        None => Whose::Kernel,
        Some(b'/') => absolute(setup, path),
        Some(_) => match base(directory) {
            Some(base) => Whose::Ours(Cow::Owned([&base, &b"/"[..], bytes].concat())),
            None if mentions_prefix(setup, path) => relative(setup, directory, bytes),
            None => Whose::Kernel,
        },
    }
}

/// The directory of ours that a relative path starts from.
#[inline]
fn base(directory: RawFd) -> Option<Vec<u8>> {
    if directory == libc::AT_FDCWD {
        return cwd::current();
    }
    if !table::is_ours(directory) {
        return None;
    }
    let description = table::find(directory)?;
    match description.directory() {
        Ok(directory) => Some(directory.path().to_vec()),
        // Below a file there is nothing: this path, and so the error, is the view's.
        Err(_) => process::known_view().and_then(|view| description.file().ok()?.path(view).ok()),
    }
}

#[inline]
fn absolute<'a>(setup: &Setup, path: &'a CStr) -> Whose<'a> {
    let bytes = path.to_bytes();
    if is_below(setup, bytes) {
        return Whose::Ours(Cow::Borrowed(bytes));
    }
    if let Some(number) = descriptor_link(bytes) {
        return by_descriptor(number);
    }
    if mentions_prefix(setup, path) { not_plain(setup, bytes) } else { Whose::Kernel }
}

fn is_below(setup: &Setup, path: &[u8]) -> bool {
    path.strip_prefix(setup.prefix.to_bytes()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

/// A path that comes into the namespace without beginning with the prefix names the prefix's last name somewhere.
#[inline]
fn mentions_prefix(setup: &Setup, path: &CStr) -> bool {
    // SAFETY: both are strings that end.
    !unsafe { libc::strstr(path.as_ptr(), setup.last.as_ptr()) }.is_null()
}

/// An absolute path that may have doubled slashes, dots and dot-dots before the prefix.
#[cold]
fn not_plain<'a>(setup: &Setup, path: &[u8]) -> Whose<'a> {
    match enter(setup, path) {
        Some(ours) => Whose::Ours(Cow::Owned(ours)),
        None => Whose::Kernel,
    }
}

/// Goes along a path name by name until it is below the prefix; what comes then is the view's.
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

/// A relative path that names the prefix's last name: it may lead in from a directory of the kernel's.
#[cold]
fn relative<'a>(setup: &Setup, directory: RawFd, path: &[u8]) -> Whose<'a> {
    let before = memory::errno();
    let base = match directory {
        libc::AT_FDCWD => cwd::of_kernel(),
        _ => cwd::read_link(&format!("/proc/self/fd/{directory}")),
    };
    memory::set_errno(before);
    match base.and_then(|base| enter(setup, &[&base, &b"/"[..], path].concat())) {
        Some(ours) => Whose::Ours(Cow::Owned(ours)),
        None => Whose::Kernel,
    }
}

/// The number in `/dev/fd/N`, `/dev/stdin` and their like.
#[inline]
fn descriptor_link(path: &[u8]) -> Option<RawFd> {
    let rest = match path.get(..5)? {
        b"/dev/" => match &path[5..] {
            b"stdin" => return Some(0),
            rest => rest.strip_prefix(b"fd/")?,
        },
        b"/proc" => path.strip_prefix(b"/proc/self/fd/")?,
        _ => return None,
    };
    std::str::from_utf8(rest).ok()?.parse().ok()
}

fn by_descriptor<'a>(number: RawFd) -> Whose<'a> {
    let path = table::find(number).and_then(|description| path_of(&description));
    path.map_or(Whose::Kernel, |path| Whose::Ours(Cow::Owned(path)))
}

/// The path of what is open.
pub(crate) fn path_of(description: &table::Description) -> Option<Vec<u8>> {
    match &description.object {
        table::Object::Directory(directory) => Some(directory.path().to_vec()),
        table::Object::File(file) => file.path(process::known_view()?).ok(),
    }
}

/// Does a call with a path: `ours` if it is ours, else `kernel`, with the directory and path to be passed on.
#[inline]
pub(crate) fn at<R: Failed>(
    directory: RawFd,
    path: *const c_char,
    ours: impl Fn(&View, &[u8]) -> Result<R, Fault>,
    kernel: impl Fn(RawFd, *const c_char) -> R,
) -> R {
    match whose(directory, path) {
        Whose::Kernel => kernel(directory, path),
        Whose::Ours(path) => in_namespace(&path, &ours, &kernel),
    }
}

/// A call on the namespace, with an absolute path.
type Ours<'a, R> = &'a dyn Fn(&View, &[u8]) -> Result<R, Fault>;

/// As [`at`], where an empty path with `AT_EMPTY_PATH` means the directory's descriptor itself.
pub(crate) fn at_or_itself<R: Failed>(
    directory: RawFd,
    path: *const c_char,
    flags: c_int,
    ours: impl Fn(&View, &[u8]) -> Result<R, Fault>,
    kernel: impl Fn(RawFd, *const c_char) -> R,
) -> R {
    let is_itself = flags & libc::AT_EMPTY_PATH != 0 && memory::string(path).is_some_and(CStr::is_empty);
    match table::find(directory).filter(|_| is_itself).and_then(|open| path_of(&open)) {
        Some(path) => in_namespace(&path, &ours, &kernel),
        None => at(directory, path, ours, kernel),
    }
}

/// What a call on the namespace leads to.
enum Led<R> {
    Answer(R),
    Outside(CString),
}

#[inline(never)]
fn in_namespace<R: Failed>(path: &[u8], ours: Ours<'_, R>, kernel: &dyn Fn(RawFd, *const c_char) -> R) -> R {
    let mut path = Cow::Borrowed(path);
    // A symlink may lead out, and one out there in again.
    for _ in 0..SYMLINKS_FOLLOWED_MAX {
        let led = answer(|| match process::view().and_then(|view| ours(&view, &path)) {
            Ok(value) => Ok(Led::Answer(value)),
            Err(Fault::Leaves(outside)) => Ok(Led::Outside(CString::new(outside).map_err(|_| libc::ENOENT)?)),
            Err(fault) => Err(fault),
        });
        match led {
            Led::Answer(value) => return value,
            Led::Outside(outside) => match whose(libc::AT_FDCWD, outside.as_ptr()) {
                Whose::Kernel => return kernel(libc::AT_FDCWD, outside.as_ptr()),
                Whose::Ours(again) => path = Cow::Owned(again.into_owned()),
            },
        }
    }
    memory::fail(libc::ELOOP)
}

impl<R: Failed> Failed for Led<R> {
    const FAILED: Self = Self::Answer(R::FAILED);
}

/// Whether a path is ours, for calls on two paths.
pub(crate) fn is_ours(directory: RawFd, path: *const c_char) -> bool {
    matches!(whose(directory, path), Whose::Ours(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup() -> Setup {
        Setup { prefix: c"/pfs/dayfly".to_owned(), last: c"dayfly".to_owned(), device: 0 }
    }

    #[test]
    fn paths_come_in_by_any_way() {
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

    #[test]
    fn descriptors_have_paths() {
        let check = |path: &str, expect| assert_eq!(descriptor_link(path.as_bytes()), expect, "{path}");
        check("/dev/fd/7", Some(7));
        check("/dev/stdin", Some(0));
        check("/proc/self/fd/12", Some(12));
        check("/proc/self/fd/", None);
        check("/proc/self/fdinfo/1", None);
        check("/dev/null", None);
        check("/de", None);
    }
}
