//! What is told of the file system, and extended attributes, of which there are none.

use std::ffi::{c_char, c_int, c_void};

use dayfly_client::View;
use libc::{size_t, statfs as KernelStatfs, statvfs as KernelStatvfs};

use super::hook;
use crate::memory::{fail, put, zeroed};
use crate::path::at;
use crate::process::{Fault, answer, view};
use crate::{next, table};

const HERE: c_int = libc::AT_FDCWD;
/// The file system's number, where each has one: "DFLY".
const MAGIC: i64 = 0x4446_4c59;
const BLOCK_SIZE: u64 = 4096;
/// Where `struct statfs` has its flags, and the one that says that they mean something.
const FLAGS_OFFSET: usize = 80;
const ST_VALID: i64 = 0x20;

hook! {
    fn statfs | statfs64 | __statfs (path: *const c_char, out: *mut KernelStatfs) -> c_int {
        let ours = |view: &View, path: &[u8]| {
            view.stat(path)?;
            Ok(put(out, file_system(view)?).map(|()| 0)?)
        };
        at(HERE, path, ours, |_, path| next::statfs(path, out))
    }

    fn fstatfs | fstatfs64 | __fstatfs (descriptor: c_int, out: *mut KernelStatfs) -> c_int {
        match table::is_ours(descriptor) {
            true => answer(|| Ok(put(out, file_system(&*view()?)?).map(|()| 0)?)),
            false => next::fstatfs(descriptor, out),
        }
    }

    fn statvfs | statvfs64 (path: *const c_char, out: *mut KernelStatvfs) -> c_int {
        let ours = |view: &View, path: &[u8]| {
            view.stat(path)?;
            Ok(put(out, portable(&file_system(view)?)).map(|()| 0)?)
        };
        at(HERE, path, ours, |_, path| next::statvfs(path, out))
    }

    fn fstatvfs | fstatvfs64 (descriptor: c_int, out: *mut KernelStatvfs) -> c_int {
        match table::is_ours(descriptor) {
            true => answer(|| Ok(put(out, portable(&file_system(&*view()?)?)).map(|()| 0)?)),
            false => next::fstatvfs(descriptor, out),
        }
    }

    fn getxattr(path: *const c_char, name: *const c_char, value: *mut c_void, len: size_t) -> isize {
        at(HERE, path, |view, path| none(view.stat(path).map(drop)), |_, path| next::getxattr(path, name, value, len))
    }

    fn lgetxattr(path: *const c_char, name: *const c_char, value: *mut c_void, len: size_t) -> isize {
        at(HERE, path, |view, path| none(view.lstat(path).map(drop)), |_, path| next::lgetxattr(path, name, value, len))
    }

    fn fgetxattr(descriptor: c_int, name: *const c_char, value: *mut c_void, len: size_t) -> isize {
        if table::is_ours(descriptor) { fail(libc::ENODATA) } else { next::fgetxattr(descriptor, name, value, len) }
    }

    fn listxattr(path: *const c_char, list: *mut c_char, len: size_t) -> isize {
        at(HERE, path, |view, path| Ok(view.stat(path).map(|_| 0)?), |_, path| next::listxattr(path, list, len))
    }

    fn llistxattr(path: *const c_char, list: *mut c_char, len: size_t) -> isize {
        at(HERE, path, |view, path| Ok(view.lstat(path).map(|_| 0)?), |_, path| next::llistxattr(path, list, len))
    }

    fn flistxattr(descriptor: c_int, list: *mut c_char, len: size_t) -> isize {
        if table::is_ours(descriptor) { 0 } else { next::flistxattr(descriptor, list, len) }
    }
}

fn none(found: Result<(), dayfly_client::ViewError>) -> Result<isize, Fault> {
    found?;
    Err(Fault::Errno(libc::ENODATA))
}

/// As large as what is in it, full, and read-only.
fn file_system(view: &View) -> Result<KernelStatfs, Fault> {
    let datasets = view.session().datasets()?;
    let sum = |number: &dyn Fn(&dayfly_meta::catalog::Header) -> u64| -> u64 {
        datasets.iter().map(|dataset| number(dataset.catalog().header())).sum()
    };
    let mut form: KernelStatfs = zeroed();
    form.f_type = MAGIC;
    form.f_bsize = BLOCK_SIZE as i64;
    form.f_frsize = BLOCK_SIZE as i64;
    form.f_blocks = sum(&|header| header.bytes).div_ceil(BLOCK_SIZE);
    form.f_files = sum(&|header| header.entries.into());
    form.f_namelen = dayfly_meta::limits::NAME_LEN_MAX as i64;
    // `f_flags`, which the `libc` crate does not name: "valid", and read-only.
    let flags = (&raw mut form).wrapping_byte_add(FLAGS_OFFSET).cast::<i64>();
    put(flags, ST_VALID | libc::ST_RDONLY as i64)?;
    Ok(form)
}

fn portable(from: &KernelStatfs) -> KernelStatvfs {
    let mut form: KernelStatvfs = zeroed();
    (form.f_bsize, form.f_frsize) = (BLOCK_SIZE, BLOCK_SIZE);
    (form.f_blocks, form.f_files) = (from.f_blocks, from.f_files);
    form.f_namemax = from.f_namelen as u64;
    form.f_flag = libc::ST_RDONLY;
    form
}
