//! `scandir` and `glob`. libc's versions call internal functions, which bypass our hooks. `scandir` is therefore implemented
//! here, and `glob` is given our directory functions.

use std::ffi::{c_char, c_int};

use libc::{DIR, dirent, size_t, stat as KernelStat};

use super::directory::{Listing, closedir, opendir, readdir};
use super::{hook, stat};
use crate::memory::{self, FromC, set_errno};
use crate::path::is_ours;
use crate::setup::setup;

type Entry = *mut dirent;
/// The program's function that chooses entries.
type Filter = Option<extern "C-unwind" fn(*const dirent) -> c_int>;
/// The program's function that orders entries.
type Compare = Option<extern "C-unwind" fn(*const *const dirent, *const *const dirent) -> c_int>;
/// The program's function for errors of `glob`.
type OnError = Option<extern "C-unwind" fn(*const c_char, c_int) -> c_int>;

hook! {
    fn scandir | scandir64 (path: FromC<*const c_char>, list: FromC<*mut *mut Entry>, filter: Filter, compare: Compare) -> c_int {
        match is_ours(libc::AT_FDCWD, path) {
            true => scan(libc::AT_FDCWD, path, list, filter, compare),
            false => scandir::next(path, list, filter, compare),
        }
    }

    fn scandirat | scandirat64 (
        directory: c_int,
        path: FromC<*const c_char>,
        list: FromC<*mut *mut Entry>,
        filter: Filter,
        compare: Compare,
    ) -> c_int {
        match is_ours(directory, path) {
            true => scan(directory, path, list, filter, compare),
            false => scandirat::next(directory, path, list, filter, compare),
        }
    }

    fn glob | glob64 (pattern: FromC<*const c_char>, flags: c_int, on_error: OnError, out: FromC<*mut Glob>) -> c_int {
        let Some(mut found) = out.get().filter(|_| flags & ALT_DIR_FUNC == 0 && setup().is_some()) else {
            return glob::next(pattern, flags, on_error, out);
        };
        // Done in every session, because any pattern may lead into the namespace.
        found.closedir = Some(glob_closedir);
        found.readdir = Some(glob_readdir);
        found.opendir = Some(glob_opendir);
        found.lstat = Some(glob_lstat);
        found.stat = Some(glob_stat);
        if out.put(found).is_err() {
            return GLOB_ABORTED;
        }
        let result = glob::next(pattern, flags | ALT_DIR_FUNC, on_error, out);
        if let Some(mut found) = out.get() {
            found.flags &= !ALT_DIR_FUNC;
            // Cannot fail: the pointer was not null above.
            let _ = out.put(found);
        }
        result
    }
}

fn scan(directory: c_int, path: FromC<*const c_char>, list: FromC<*mut *mut Entry>, filter: Filter, compare: Compare) -> c_int {
    let mut listing = match Listing::open_at(directory, path) {
        Ok(listing) => listing,
        Err(errno) => return memory::fail(errno),
    };
    let mut entries: Vec<Entry> = Vec::new();
    let mut failure = 0;
    while let Some(entry) = listing.next() {
        if filter.is_some_and(|filter| filter(entry) == 0) {
            continue;
        }
        match allocate(&[*entry]) {
            Ok(copy) => entries.push(copy),
            Err(errno) => {
                failure = errno;
                break;
            }
        }
    }
    drop(listing);
    if let Some(compare) = compare {
        entries.sort_by(|left, right| {
            let (left, right) = (left.cast_const(), right.cast_const());
            compare(&raw const left, &raw const right).cmp(&0)
        });
    }
    let stored = if failure == 0 { allocate(&entries).and_then(|array| list.put(array)) } else { Err(failure) };
    match stored {
        Ok(()) => entries.len() as c_int,
        Err(errno) => {
            // SAFETY: made by `malloc` in `allocate`, and not given to the program.
            entries.iter().for_each(|&entry| unsafe { libc::free(entry.cast()) });
            memory::fail(errno)
        }
    }
}

/// Copies values into new memory from `malloc`, which the program frees.
fn allocate<T: Copy>(values: &[T]) -> Result<*mut T, memory::Errno> {
    // SAFETY: plain allocation; null is checked.
    let copy: *mut T = unsafe { libc::malloc(size_of::<T>() * values.len().max(1)) }.cast();
    if copy.is_null() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: just allocated, with room for all of them.
    unsafe { FromC::new(copy) }.slice_mut(values.len())?.copy_from_slice(values);
    Ok(copy)
}

/// `GLOB_ALTDIRFUNC`: the structure contains functions.
const ALT_DIR_FUNC: c_int = 1 << 9;
const GLOB_ABORTED: c_int = 2;

/// `glob_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Glob {
    count: size_t,
    paths: *mut *mut c_char,
    offset: size_t,
    flags: c_int,
    closedir: Option<extern "C-unwind" fn(FromC<*mut DIR>)>,
    readdir: Option<extern "C-unwind" fn(FromC<*mut DIR>) -> *mut dirent>,
    opendir: Option<extern "C-unwind" fn(FromC<*const c_char>) -> *mut DIR>,
    lstat: Option<extern "C-unwind" fn(FromC<*const c_char>, FromC<*mut KernelStat>) -> c_int>,
    stat: Option<extern "C-unwind" fn(FromC<*const c_char>, FromC<*mut KernelStat>) -> c_int>,
}

extern "C-unwind" fn glob_closedir(stream: FromC<*mut DIR>) {
    closedir(stream);
}

/// Reads an entry without changing `errno`, which `glob` would take for a failure.
extern "C-unwind" fn glob_readdir(stream: FromC<*mut DIR>) -> *mut dirent {
    let before = memory::errno();
    let entry = readdir(stream);
    if !entry.is_null() {
        set_errno(before);
    }
    entry
}

extern "C-unwind" fn glob_opendir(path: FromC<*const c_char>) -> *mut DIR {
    opendir(path)
}

extern "C-unwind" fn glob_lstat(path: FromC<*const c_char>, out: FromC<*mut KernelStat>) -> c_int {
    stat::lstat(path, out)
}

extern "C-unwind" fn glob_stat(path: FromC<*const c_char>, out: FromC<*mut KernelStat>) -> c_int {
    stat::stat(path, out)
}
