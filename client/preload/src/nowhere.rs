//! An empty kernel directory that no path leads to: it is removed as soon as it is made. It stands for a directory of the namespace
//! where the kernel needs a directory. Code that bypasses this library finds nothing in it, rather than wrong files.

use std::ffi::{CStr, CString};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::memory;
use crate::setup::setup;

/// Makes a directory, calls `work` with its path, and removes the directory. Tries one parent folder after another until
/// `work` returns a result.
pub(crate) fn within<R>(work: impl Fn(&CStr) -> Option<R>) -> Option<R> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let before = memory::errno();
    let session = setup().and_then(|setup| setup.environment.folder().ok()).map(|location| location.folder);
    let temporary = setup().map(|setup| setup.temporary.clone());
    let mut folders = session.into_iter().chain(temporary).chain(["/dev/shm".into(), "/tmp".into()]);
    let done = folders.find_map(|folder| {
        let name = format!(".cwd-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = folder.join(name);
        let c_path = CString::new(path.as_os_str().as_bytes()).ok()?;
        DirBuilder::new().mode(0o700).create(&path).ok()?;
        let done = work(&c_path);
        // If that fails, an empty folder stays behind.
        let _ = fs::remove_dir(&path);
        done
    });
    memory::set_errno(before);
    done
}

/// Opens an empty directory that no path leads to, with `O_DIRECTORY` and `flags`.
pub(crate) fn open(flags: i32) -> Option<File> {
    within(|path| {
        let path = Path::new(std::ffi::OsStr::from_bytes(path.to_bytes()));
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | flags).open(path).ok()
    })
}
