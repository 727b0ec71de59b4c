//! File system attributes (`statfs`, `statvfs`), and extended attributes. The namespace has no extended attributes.

use std::ffi::{c_char, c_int, c_void};

use dayfly_client::{View, ViewError};
use libc::{size_t, statfs64 as KernelStatfs, statvfs as KernelStatvfs};

use super::hook;
use crate::attach::view;
use crate::fault::{Fault, answer};
use crate::memory::{Errno, FromC, zeroed};
use crate::path::at;
use crate::table;

const HERE: c_int = libc::AT_FDCWD;
/// The file system type (`f_type`): "DFLY".
const MAGIC: i64 = 0x4446_4c59;
const BLOCK_SIZE: u64 = 4096;
/// The most bytes in the name of an extended attribute.
const NAME_LEN_MAX: usize = 255;
/// The bit of `f_flags` that says that `f_flags` is valid.
const ST_VALID: i64 = 0x20;

hook! {
    fn statfs | statfs64 | __statfs (path: FromC<*const c_char>, out: FromC<*mut KernelStatfs>) -> c_int {
        let ours = |view: &View, path: &[u8]| {
            view.stat(path)?;
            Ok(out.put(file_system(view)?).map(|()| 0)?)
        };
        at(HERE, path, ours, |_, path| statfs::next(path, out))
    }

    fn fstatfs | fstatfs64 | __fstatfs (descriptor: c_int, out: FromC<*mut KernelStatfs>) -> c_int {
        match table::is_ours(descriptor) {
            true => answer(|| Ok(out.put(file_system(&*view()?)?).map(|()| 0)?)),
            false => fstatfs::next(descriptor, out),
        }
    }

    fn statvfs | statvfs64 (path: FromC<*const c_char>, out: FromC<*mut KernelStatvfs>) -> c_int {
        let ours = |view: &View, path: &[u8]| {
            view.stat(path)?;
            Ok(out.put(portable(&file_system(view)?)).map(|()| 0)?)
        };
        at(HERE, path, ours, |_, path| statvfs::next(path, out))
    }

    fn fstatvfs | fstatvfs64 (descriptor: c_int, out: FromC<*mut KernelStatvfs>) -> c_int {
        match table::is_ours(descriptor) {
            true => answer(|| Ok(out.put(portable(&file_system(&*view()?)?)).map(|()| 0)?)),
            false => fstatvfs::next(descriptor, out),
        }
    }

    fn getxattr(path: FromC<*const c_char>, name: FromC<*const c_char>, value: FromC<*mut c_void>, len: size_t) -> isize {
        at(HERE, path, |view, path| no_data(name, view.stat(path).map(drop)), |_, path| getxattr::next(path, name, value, len))
    }

    fn lgetxattr(path: FromC<*const c_char>, name: FromC<*const c_char>, value: FromC<*mut c_void>, len: size_t) -> isize {
        at(HERE, path, |view, path| no_data(name, view.lstat(path).map(drop)), |_, path| lgetxattr::next(path, name, value, len))
    }

    fn fgetxattr(descriptor: c_int, name: FromC<*const c_char>, value: FromC<*mut c_void>, len: size_t) -> isize {
        match table::is_open(descriptor) {
            true => answer(|| no_data(name, Ok(()))),
            false => fgetxattr::next(descriptor, name, value, len),
        }
    }

    fn listxattr(path: FromC<*const c_char>, list: FromC<*mut c_char>, len: size_t) -> isize {
        at(HERE, path, |view, path| Ok(view.stat(path).map(|_| 0)?), |_, path| listxattr::next(path, list, len))
    }

    fn llistxattr(path: FromC<*const c_char>, list: FromC<*mut c_char>, len: size_t) -> isize {
        at(HERE, path, |view, path| Ok(view.lstat(path).map(|_| 0)?), |_, path| llistxattr::next(path, list, len))
    }

    fn flistxattr(descriptor: c_int, list: FromC<*mut c_char>, len: size_t) -> isize {
        if table::is_open(descriptor) { 0 } else { flistxattr::next(descriptor, list, len) }
    }
}

/// Checks the name of an extended attribute, as the kernel does before it looks at the file.
pub(super) fn check_name(name: FromC<*const c_char>) -> Result<(), Errno> {
    let is_valid = (1..=NAME_LEN_MAX).contains(&name.string().ok_or(libc::EFAULT)?.count_bytes());
    if is_valid { Ok(()) } else { Err(libc::ERANGE) }
}

/// Reports that a file has no such attribute, if the file exists.
fn no_data(name: FromC<*const c_char>, found: Result<(), ViewError>) -> Result<isize, Fault> {
    check_name(name)?;
    found?;
    Err(Fault::Errno(libc::ENODATA))
}

/// Describes the namespace as a file system: as large as the datasets in it, full, and read-only.
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
    form.f_flags = ST_VALID | libc::ST_RDONLY as i64;
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
