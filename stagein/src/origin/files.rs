//! Opens and reads sources.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path};
use std::sync::Arc;

use dayfly_meta::catalog::Version;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::Mode;

use crate::source::plain::version_of;

/// What the file system says about an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileState {
    /// Size and times.
    pub version: Version,
    /// The inode's number.
    pub inode: u64,
    /// Whether it is a regular file.
    pub is_file: bool,
}

impl FileState {
    /// Returns whether the two may have the same bytes. The change time also changes when a file is moved or gets another mode.
    pub(super) fn has_content_of(&self, other: &Self) -> bool {
        let content =
            |state: &Self| (state.version.size, state.version.mtime_s, state.version.mtime_ns, state.inode, state.is_file);
        content(self) == content(other)
    }
}

/// Access to the file system that the sources lie on. Tests decorate it to count reads and to make them fail.
pub trait SourceFiles: Send + Sync {
    /// An open file or directory.
    type File: Send + Sync;

    /// Opens a file for reading. Follows symlinks, but never waits for another process, whatever is at `path`.
    ///
    /// # Errors
    ///
    /// The system's answer.
    fn open(&self, path: &Path) -> io::Result<Self::File>;

    /// Opens a directory. Follows symlinks.
    ///
    /// # Errors
    ///
    /// The system's answer.
    fn open_directory(&self, path: &Path) -> io::Result<Self::File>;

    /// Opens a file below a directory for reading, as [`Self::open`] does. Follows no symlinks and does not leave the
    /// directory.
    ///
    /// # Errors
    ///
    /// The system's answer; `ELOOP`, `ENOTDIR` or `EXDEV` if the path would lead through a symlink or out of the directory.
    fn open_below(&self, directory: &Self::File, path: &Path) -> io::Result<Self::File>;

    /// Returns the current state of an open file.
    ///
    /// # Errors
    ///
    /// The system's answer.
    fn state(&self, file: &Self::File) -> io::Result<FileState>;

    /// Reads bytes at an offset, perhaps fewer than wanted; 0 at the end of the file.
    ///
    /// # Errors
    ///
    /// The system's answer.
    fn read_at(&self, file: &Self::File, bytes: &mut [u8], offset: u64) -> io::Result<usize>;
}

/// Files that several parts of a program share.
pub type SharedFiles = Arc<dyn SourceFiles<File = File>>;

impl<F: SourceFiles + ?Sized> SourceFiles for Arc<F> {
    type File = F::File;

    fn open(&self, path: &Path) -> io::Result<F::File> {
        (**self).open(path)
    }

    fn open_directory(&self, path: &Path) -> io::Result<F::File> {
        (**self).open_directory(path)
    }

    fn open_below(&self, directory: &F::File, path: &Path) -> io::Result<F::File> {
        (**self).open_below(directory, path)
    }

    fn state(&self, file: &F::File) -> io::Result<FileState> {
        (**self).state(file)
    }

    fn read_at(&self, file: &F::File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        (**self).read_at(file, bytes, offset)
    }
}

/// The kernel's file systems.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemFiles;

/// A FIFO would make `open` wait for a writer, and a terminal could become the process's own.
const READ_FLAGS: OFlag = OFlag::O_RDONLY.union(OFlag::O_NONBLOCK).union(OFlag::O_NOCTTY).union(OFlag::O_CLOEXEC);
const DIRECTORY_FLAGS: OFlag = OFlag::O_PATH.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

impl SourceFiles for SystemFiles {
    type File = File;

    fn open(&self, path: &Path) -> io::Result<File> {
        File::options().read(true).custom_flags(READ_FLAGS.bits()).open(path)
    }

    fn open_directory(&self, path: &Path) -> io::Result<File> {
        File::options().read(true).custom_flags(DIRECTORY_FLAGS.bits()).open(path)
    }

    fn open_below(&self, directory: &File, path: &Path) -> io::Result<File> {
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
        match openat2(directory, path, OpenHow::new().flags(READ_FLAGS).resolve(resolve)) {
            // The kernel is older than Linux 5.6, or a sandbox forbids the call.
            Err(Errno::ENOSYS | Errno::EPERM) => open_by_component(directory, path),
            opened => Ok(opened?.into()),
        }
    }

    fn state(&self, file: &File) -> io::Result<FileState> {
        let metadata = file.metadata()?;
        Ok(FileState { version: version_of(&metadata), inode: metadata.ino(), is_file: metadata.is_file() })
    }

    fn read_at(&self, file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        file.read_at(bytes, offset)
    }
}

/// Does what `openat2` does with the flags above, one directory at a time.
fn open_by_component(directory: &File, path: &Path) -> io::Result<File> {
    let mut above: Option<File> = None;
    let mut components = path.components().peekable();
    while let Some(component) = components.next() {
        let Component::Normal(name) = component else { return Err(Errno::EXDEV.into()) };
        let flags = if components.peek().is_some() { DIRECTORY_FLAGS } else { READ_FLAGS };
        let opened: File = openat(above.as_ref().unwrap_or(directory), name, flags | OFlag::O_NOFOLLOW, Mode::empty())?.into();
        if components.peek().is_none() {
            return Ok(opened);
        }
        above = Some(opened);
    }
    Err(Errno::ENOENT.into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn both_ways_of_opening_stay_in_the_directory_and_follow_no_symlink() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("tree/sub/deep")).unwrap();
        fs::write(at("tree/sub/deep/file"), "inside").unwrap();
        fs::write(at("secret"), "outside").unwrap();
        symlink(at("secret"), at("tree/absolute")).unwrap();
        symlink("../secret", at("tree/relative")).unwrap();
        symlink("sub", at("tree/link")).unwrap();
        nix::unistd::mkfifo(&at("tree/fifo"), Mode::S_IRWXU).unwrap();
        let root = SystemFiles.open_directory(&at("tree")).unwrap();
        type Open<'a> = &'a dyn Fn(&Path) -> io::Result<File>;
        let ways: [Open<'_>; 2] = [&|path| SystemFiles.open_below(&root, path), &|path| open_by_component(&root, path)];
        for open in ways {
            let file = open(Path::new("sub/deep/file")).unwrap();
            let mut bytes = [0; 10];
            assert_eq!((SystemFiles.read_at(&file, &mut bytes, 2).unwrap(), &bytes[..4]), (4, &b"side"[..]));
            assert!(SystemFiles.state(&file).unwrap().is_file);
            for path in ["absolute", "relative", "link", "link/deep/file", "../secret", "sub/../../secret", "/etc/passwd", ""] {
                assert!(open(Path::new(path)).is_err(), "{path}");
            }
            let absent = open(Path::new("sub/none")).unwrap_err();
            assert_eq!(absent.kind(), io::ErrorKind::NotFound);
            assert!(!SystemFiles.state(&open(Path::new("fifo")).unwrap()).unwrap().is_file);
        }
        assert!(!SystemFiles.state(&SystemFiles.open(&at("tree/fifo")).unwrap()).unwrap().is_file);
        assert!(SystemFiles.open_directory(&at("secret")).is_err());
    }
}
