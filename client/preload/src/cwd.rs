//! The working directory, while it is one of ours. The kernel cannot be there, so it is put where nothing is: a relative path
//! that goes round this library finds no file, rather than a wrong one.

use std::cell::RefCell;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use arc_swap::ArcSwapOption;
use dayfly_client::locate::SessionFolder;

use crate::memory;
use crate::{next, vfork};

/// Whether [`DIRECTORY`] has one, so that others pay one load.
static IS_OURS: AtomicBool = AtomicBool::new(false);
static DIRECTORY: ArcSwapOption<Vec<u8>> = ArcSwapOption::const_empty();

thread_local! {
    /// Where a `vfork` child of this thread has gone: the child, and the directory if it is one of ours.
    static OF_CHILD: RefCell<Option<(i32, Option<Vec<u8>>)>> = const { RefCell::new(None) };
}

/// The working directory, if it is ours.
#[inline]
pub(crate) fn current() -> Option<Vec<u8>> {
    if let Some(child) = vfork::child() {
        let of_child = OF_CHILD.with_borrow(|noted| noted.clone().filter(|noted| noted.0 == child));
        if let Some((_, directory)) = of_child {
            return directory;
        }
    }
    if !IS_OURS.load(Ordering::Acquire) {
        return None;
    }
    DIRECTORY.load().as_ref().map(|directory| directory.to_vec())
}

/// What the program before this one left us in.
pub(crate) fn inherit(directory: Vec<u8>) {
    note(Some(directory));
}

fn note(directory: Option<Vec<u8>>) {
    if let Some(child) = vfork::child() {
        OF_CHILD.set(Some((child, directory)));
        return;
    }
    IS_OURS.store(directory.is_some(), Ordering::Release);
    DIRECTORY.store(directory.map(std::sync::Arc::new));
}

/// Goes to a directory of ours.
pub(crate) fn enter(directory: Vec<u8>) {
    if current().is_none() {
        leave_kernel_nowhere();
    }
    note(Some(directory));
}

/// The kernel has gone somewhere else.
pub(crate) fn leave() {
    if vfork::child().is_some() || IS_OURS.load(Ordering::Acquire) {
        note(None);
    }
}

/// The kernel's working directory.
pub(crate) fn of_kernel() -> Option<Vec<u8>> {
    let mut buffer = vec![0_u8; libc::PATH_MAX as usize];
    if next::getcwd(buffer.as_mut_ptr().cast(), buffer.len()).is_null() {
        return None;
    }
    buffer.truncate(buffer.iter().position(|&byte| byte == 0)?);
    Some(buffer)
}

pub(crate) fn read_link(path: &str) -> Option<Vec<u8>> {
    let path = CString::new(path).ok()?;
    let mut buffer = vec![0_u8; libc::PATH_MAX as usize];
    let len = next::readlink(path.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len());
    buffer.truncate(usize::try_from(len).ok()?);
    Some(buffer)
}

/// Puts the kernel into a directory that is removed at once.
fn leave_kernel_nowhere() {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let before = memory::errno();
    let session = SessionFolder::of_environment().ok().map(|location| location.folder);
    let folders = session.into_iter().chain([std::env::temp_dir(), "/dev/shm".into(), "/tmp".into()]);
    for folder in folders {
        let name = format!("{}/.cwd-{}-{}", folder.display(), std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let Ok(path) = CString::new(name) else { continue };
        if next::mkdir(path.as_ptr(), 0o700) != 0 {
            continue;
        }
        let is_there = next::chdir(path.as_ptr()) == 0;
        next::rmdir(path.as_ptr());
        if is_there {
            break;
        }
    }
    memory::set_errno(before);
}
