//! The last name of a path, for the calls that create, remove or rename it. On a read-only file system, the kernel looks up only
//! the directory that contains the name, so these calls fail by rules of their own. For example, `.` and `..` cannot be removed,
//! and renaming a missing file fails with EROFS.

use dayfly_client::{FileKind, View, ViewError};
use dayfly_meta::limits::SYMLINKS_FOLLOWED_MAX;
use libc::{EEXIST, EISDIR, ELOOP, ENOENT, ENOTDIR, EROFS};

use crate::fault::Fault;

/// What the last name of a path is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The namespace's own directory, which the kernel would treat as a mount point.
    Prefix,
    Dot,
    DotDot,
    Name,
}

impl Kind {
    /// Classifies a name in a directory.
    pub(crate) fn of(name: &[u8]) -> Self {
        match name {
            b"." => Self::Dot,
            b".." => Self::DotDot,
            _ => Self::Name,
        }
    }

    pub(crate) fn is_dots(self) -> bool {
        matches!(self, Self::Dot | Self::DotDot)
    }
}

/// A path of the namespace whose directory exists.
#[derive(Clone, Copy)]
pub(crate) struct LastName<'a> {
    pub(crate) kind: Kind,
    /// The path without slashes at its end.
    path: &'a [u8],
    pub(crate) has_slash: bool,
}

impl<'a> LastName<'a> {
    /// Looks up the directory that contains a path's last name.
    pub(crate) fn find(view: &View, path: &'a [u8]) -> Result<Self, Fault> {
        let trimmed = trim(path);
        let has_slash = trimmed.len() < path.len();
        if trimmed == trim(view.session().prefix()) {
            return Ok(Self { kind: Kind::Prefix, path: trimmed, has_slash });
        }
        let start = start_of_name(trimmed);
        match view.stat(trim(&trimmed[..start])) {
            Ok(stat) if stat.kind == FileKind::Directory => {}
            Ok(_) => return Err(Fault::Errno(ENOTDIR)),
            Err(ViewError::Outside(directory)) => return Err(Fault::Leaves([trim(&directory), b"/", &path[start..]].concat())),
            Err(error) => return Err(error.into()),
        }
        Ok(Self { kind: Kind::of(&trimmed[start..]), path: trimmed, has_slash })
    }

    /// Returns why the name cannot be removed. Linux says EROFS about a missing name, too, but programs that remove what an earlier
    /// run may have left, such as Python's import system, expect ENOENT.
    pub(crate) fn cannot_remove(&self, view: &View) -> Fault {
        match view.lstat(self.path) {
            Err(ViewError::NotFound) => Fault::Errno(ENOENT),
            _ => Fault::Errno(EROFS),
        }
    }
}

/// Returns a path without slashes at its end.
pub(crate) fn trim(path: &[u8]) -> &[u8] {
    &path[..path.iter().rposition(|&byte| byte != b'/').map_or(0, |last| last + 1)]
}

/// Returns where the last name of a path without slashes at its end begins.
pub(crate) fn start_of_name(path: &[u8]) -> usize {
    path.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1)
}

/// Returns why a new file or symlink cannot be created; if `is_directory`, returns why a new directory cannot be created.
pub(crate) fn cannot_create(view: &View, path: &[u8], is_directory: bool) -> Fault {
    let last = match LastName::find(view, path) {
        Ok(last) if last.kind == Kind::Name => last,
        Ok(_) => return Fault::Errno(EEXIST),
        Err(fault) => return fault,
    };
    match view.lstat(last.path) {
        Ok(_) => Fault::Errno(EEXIST),
        Err(ViewError::NotFound) => Fault::Errno(if last.has_slash && !is_directory { ENOENT } else { EROFS }),
        Err(error) => error.into(),
    }
}

/// Returns why `open` cannot create a file at a path that names nothing. Symlinks are followed.
pub(crate) fn cannot_open_new(view: &View, path: &[u8]) -> Fault {
    let mut path = path.to_vec();
    for _ in 0..SYMLINKS_FOLLOWED_MAX {
        let last = match LastName::find(view, &path) {
            Ok(last) if last.has_slash => return Fault::Errno(EISDIR),
            Ok(last) => last,
            Err(fault) => return fault,
        };
        let Ok(target) = view.read_link(last.path) else { return Fault::Errno(EROFS) };
        path = match target.first() {
            Some(b'/') if !view.contains(&target) => return Fault::Leaves(target),
            Some(b'/') => target,
            _ => [&last.path[..start_of_name(last.path)], &target].concat(),
        };
    }
    Fault::Errno(ELOOP)
}
