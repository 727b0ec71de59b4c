//! The working directory, while it is in the namespace.
//!
//! The kernel's working directory cannot be in the namespace. So this module keeps the directory's path, and `calls/names.rs`
//! changes the kernel's directory to an empty one (`nowhere`): a relative path that bypasses this library finds no file, rather
//! than a wrong one.
//!
//! A `vfork` child has a working directory of its own, in its parent's memory: its changes are kept per child.

use std::cell::Cell;
use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dayfly_client::current::Current;
use dayfly_client::locate::CWD_VARIABLE;

use crate::memory::{self, FromC};
use crate::{next, setup, vfork};

/// Whether [`DIRECTORY`] holds a path, so that a process outside the namespace pays for only one load.
static IS_OURS: AtomicBool = AtomicBool::new(false);
static DIRECTORY: Current<Vec<u8>> = Current::none();

thread_local! {
    /// The working directory of this thread's `vfork` child: the child's process id (0: none), and the path if it is in the
    /// namespace. The path is never freed, because the C library allocates memory when a destructor is registered.
    static OF_CHILD: Cell<(i32, Option<&'static [u8]>)> = const { Cell::new((0, None)) };
}

/// Returns the working directory's path, if it is in the namespace.
#[inline]
pub(crate) fn current() -> Option<Vec<u8>> {
    if let Some(child) = vfork::child() {
        let (noted, directory) = OF_CHILD.get();
        if noted == child {
            return directory.map(<[u8]>::to_vec);
        }
    }
    if !IS_OURS.load(Ordering::Acquire) {
        return None;
    }
    DIRECTORY.load().as_ref().map(|directory| directory.to_vec())
}

/// Returns `false` only if the working directory is not in the namespace. Costs less than [`current`].
#[inline]
pub(crate) fn may_be_ours() -> bool {
    IS_OURS.load(Ordering::Acquire) || vfork::child().is_some()
}

/// Takes over the working directory of the program that started this one, which passed it in the environment. Call it before
/// the program's `main`.
pub(crate) fn inherit() {
    let Some(directory) = setup::variable(CWD_VARIABLE) else { return };
    note(Some(directory.into_vec()));
    // The variable would become wrong with the next `chdir`. The hooks that start other programs add it again.
    if let Ok(name) = CString::new(CWD_VARIABLE) {
        memory::unset_variable(&name);
    }
}

fn note(directory: Option<Vec<u8>>) {
    if let Some(child) = vfork::child() {
        OF_CHILD.set((child, directory.map(|directory| &*directory.leak())));
        return;
    }
    IS_OURS.store(directory.is_some(), Ordering::Release);
    DIRECTORY.store(directory.map(Arc::new));
}

/// Records that the process is now in a directory of the namespace.
pub(crate) fn enter(directory: Vec<u8>) {
    note(Some(directory));
}

/// Records that the process has left the namespace, so the kernel's working directory applies again.
pub(crate) fn leave() {
    if vfork::child().is_some() || IS_OURS.load(Ordering::Acquire) {
        note(None);
    }
}

/// Returns the kernel's working directory.
pub(crate) fn of_kernel() -> Option<Vec<u8>> {
    let mut buffer = vec![0_u8; libc::PATH_MAX as usize];
    // SAFETY: a live buffer, with its length.
    let room = unsafe { FromC::new(buffer.as_mut_ptr().cast()) };
    if next::getcwd(room, buffer.len()).is_null() {
        return None;
    }
    buffer.truncate(buffer.iter().position(|&byte| byte == 0)?);
    Some(buffer)
}

/// Returns the path of the kernel's directory that a descriptor names.
pub(crate) fn of_descriptor(number: i32) -> Option<Vec<u8>> {
    let path = CString::new(format!("/proc/self/fd/{number}")).ok()?;
    let mut buffer = vec![0_u8; libc::PATH_MAX as usize];
    // SAFETY: a live buffer, with its length.
    let room = unsafe { FromC::new(buffer.as_mut_ptr().cast()) };
    let len = next::readlink(path.as_c_str().into(), room, buffer.len());
    buffer.truncate(usize::try_from(len).ok()?);
    Some(buffer)
}
