//! What a descriptor opened with `O_PATH` stands for: a place in the namespace. Such a descriptor can be duplicated, inspected and
//! used as the start of a path, but nothing can be read through it, and every other call fails with EBADF. The placeholder behind
//! it in the kernel was opened with `O_PATH` too, so this library passes on the calls that must fail, and the kernel fails them.

use dayfly_client::{Directory, OpenFile, Stat, View};

/// A place in the namespace.
pub(crate) enum Place {
    File(OpenFile),
    Directory(Directory),
    /// A symlink itself (`O_NOFOLLOW`): its path and its attributes.
    Symlink(Vec<u8>, Stat),
}

impl Place {
    pub(crate) fn stat(&self) -> Stat {
        match self {
            Self::File(file) => file.stat(),
            Self::Directory(directory) => directory.stat(),
            Self::Symlink(_, stat) => *stat,
        }
    }

    /// Returns the path; `None` if it can no longer be found.
    pub(crate) fn path(&self, view: &View) -> Option<Vec<u8>> {
        match self {
            Self::File(file) => file.path(view).ok(),
            Self::Directory(directory) => Some(directory.path().to_vec()),
            Self::Symlink(path, _) => Some(path.clone()),
        }
    }
}
