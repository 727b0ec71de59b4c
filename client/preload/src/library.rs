//! Libraries of the namespace that the dynamic linker loads.
//!
//! The linker opens files by calls that this library does not see. So a library is *carried* once per process: it is copied to a
//! kernel file, which stays open, and the linker opens it as `/proc/self/fd/N`. Because each library has one copy and one path, the
//! linker recognizes a library that it has loaded already.
//!
//! A library names folders for the libraries that it needs (`DT_RUNPATH`). The linker searches these folders, but cannot see those
//! in the namespace. So [`needed`] finds the libraries there. Once they are loaded, the linker recognizes them by their names.
//!
//! The list of carried libraries only grows, without a lock, so a fork copies it as it is.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use dayfly_client::reserved_fd::ReservedFd;
use dayfly_client::{OpenFile, View};
use dayfly_meta::id::{DatasetId, SampleId};

use crate::fault::Fault;
use crate::path::is_ours;
use crate::{elf, kernel_copy, memory};

/// A library of the namespace with its copy, which lives as long as the process.
pub(crate) struct Carried {
    file: (DatasetId, SampleId),
    /// Where the linker finds the copy.
    path: CString,
    /// The library's path in the namespace.
    name: CString,
    copy: ReservedFd,
    /// The number in the path.
    number: RawFd,
    next: *const Carried,
}

/// The library that was carried last.
static NEWEST: AtomicPtr<Carried> = AtomicPtr::new(null_mut());

/// Iterates over all libraries that have been carried, the newest first.
fn all() -> impl Iterator<Item = &'static Carried> {
    let mut at: *const Carried = NEWEST.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: null, or from a box that `publish` filled before it stored the pointer, and that is never freed.
        let carried = unsafe { at.as_ref() }?;
        at = carried.next;
        Some(carried)
    })
}

impl Carried {
    /// Returns the path by which the linker opens the library.
    pub(crate) fn path(&self) -> &CStr {
        &self.path
    }

    /// Returns whether the path still leads to the copy. The program may have taken the number away.
    fn is_open(&self) -> bool {
        self.copy.get().is_ok_and(|copy| copy.as_raw_fd() == self.number)
    }
}

fn carried(file: &OpenFile) -> Option<&'static Carried> {
    let key = (file.dataset().id(), file.sample());
    all().find(|carried| carried.file == key && carried.is_open())
}

/// Returns the carried library for a file. Copies the file if it has not been carried yet.
pub(crate) fn carry(view: &View, file: &OpenFile) -> Result<&'static Carried, Fault> {
    if let Some(carried) = carried(file) {
        return Ok(carried);
    }
    let copy = ReservedFd::new(kernel_copy::copy_of(view, file)?);
    let number = copy.number();
    let path = CString::new(format!("/proc/self/fd/{number}")).map_err(|_| libc::EIO)?;
    let name = CString::new(file.path(view)?).map_err(|_| libc::EIO)?;
    let key = (file.dataset().id(), file.sample());
    Ok(publish(Carried { file: key, path, name, copy, number, next: null_mut() }))
}

/// Adds a library to the list, unless another thread has added the same one.
fn publish(new: Carried) -> &'static Carried {
    let new = Box::into_raw(Box::new(new));
    let mut newest = NEWEST.load(Ordering::Acquire);
    loop {
        // SAFETY: not published yet, so nobody else uses it.
        unsafe { (*new).next = newest };
        match NEWEST.compare_exchange(newest, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: published, and never freed from now on.
            Ok(_) => return unsafe { &*new },
            Err(now) => newest = now,
        }
        // SAFETY: as above.
        let key = unsafe { (*new).file };
        if let Some(other) = all().find(|carried| carried.file == key && carried.is_open()) {
            // SAFETY: from the box above, and not published.
            drop(unsafe { Box::from_raw(new) });
            return other;
        }
    }
}

/// Returns the path in the namespace of a library that the linker knows by the path of its copy.
pub(crate) fn name_of(path: &CStr) -> Option<&'static CStr> {
    all().find(|carried| carried.path.as_c_str() == path).map(|carried| carried.name.as_c_str())
}

/// A library that another one needs.
pub(crate) struct Needed {
    /// The name by which the linker looks for it.
    pub(crate) name: CString,
    /// Its path in the namespace.
    pub(crate) path: CString,
}

/// Finds the libraries that a library needs. Looks only in those of its `DT_RUNPATH` folders that are in the namespace.
pub(crate) fn needed(view: &View, file: &OpenFile) -> Result<Vec<Needed>, Fault> {
    let Some(needs) = elf::needs(|offset, buffer| Ok(view.read_at(file, offset, buffer)?))? else { return Ok(Vec::new()) };
    let path = file.path(view)?;
    let origin = &path[..path.iter().rposition(|&byte| byte == b'/').unwrap_or(0)];
    let folders: Vec<Vec<u8>> = needs.folders.iter().filter_map(|folder| expanded(folder, origin)).collect();
    let mut found = Vec::new();
    for name in needs.names.iter().filter(|name| !name.contains(&b'/')) {
        for folder in &folders {
            let Ok(path) = CString::new([folder, &b"/"[..], name].concat()) else { continue };
            if !is_ours(libc::AT_FDCWD, path.as_c_str().into()) {
                if exists(&path) {
                    // The linker finds this one by itself.
                    break;
                }
            } else if view.stat(path.to_bytes()).is_ok() {
                found.push(Needed { name: CString::new(&name[..]).map_err(|_| libc::EIO)?, path });
                break;
            }
        }
    }
    Ok(found)
}

/// Replaces `$ORIGIN` in a folder's path. `None` for the linker's other variables, which do not name folders of the namespace.
fn expanded(folder: &[u8], origin: &[u8]) -> Option<Vec<u8>> {
    let rest = folder.strip_prefix(b"$ORIGIN").or_else(|| folder.strip_prefix(b"${ORIGIN}"));
    let folder = rest.map_or_else(|| folder.to_vec(), |rest| [origin, rest].concat());
    (!folder.contains(&b'$') && folder.starts_with(b"/")).then_some(folder)
}

fn exists(path: &CStr) -> bool {
    let before = memory::errno();
    let exists = std::path::PathBuf::from(std::ffi::OsString::from_vec(path.to_bytes().to_vec())).exists();
    memory::set_errno(before);
    exists
}
