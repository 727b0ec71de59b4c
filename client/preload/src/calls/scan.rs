//! `scandir` and `glob`, whose own ways within libc do not come back through its symbols.

use std::ffi::{c_char, c_int, c_void};
use std::mem::transmute;

use libc::{DIR, dirent, size_t, stat as KernelStat};

use super::directory::{closedir, open_at, opendir, readdir};
use super::{hook, stat};
use crate::memory::{self, get, put, set_errno};
use crate::path::is_ours;
use crate::{next, process};

type Entry = *mut dirent;
type Filter = extern "C" fn(*const dirent) -> c_int;
type Compare = extern "C" fn(*const *const dirent, *const *const dirent) -> c_int;

hook! {
    fn scandir | scandir64 (path: *const c_char, list: *mut *mut Entry, filter: *const c_void, compare: *const c_void) -> c_int {
        match is_ours(libc::AT_FDCWD, path) {
            true => scan(libc::AT_FDCWD, path, list, filter, compare),
            false => next::scandir(path, list, filter, compare),
        }
    }

    fn scandirat | scandirat64 (directory: c_int, path: *const c_char, list: *mut *mut Entry, filter: *const c_void, compare: *const c_void) -> c_int {
        match is_ours(directory, path) {
            true => scan(directory, path, list, filter, compare),
            false => next::scandirat(directory, path, list, filter, compare),
        }
    }

    fn glob | glob64 (pattern: *const c_char, flags: c_int, on_error: *const c_void, out: *mut c_void) -> c_int {
        let out = out.cast::<Glob>();
        let Some(mut found) = get(out.cast_const()).filter(|_| flags & ALT_DIR_FUNC == 0 && process::setup().is_some()) else {
            return next::glob(pattern, flags, on_error, out.cast());
        };
        // libc's own, with our functions below it: a pattern may lead in anywhere.
        found.closedir = Some(glob_closedir);
        found.readdir = Some(glob_readdir);
        found.opendir = Some(glob_opendir);
        found.lstat = Some(glob_lstat);
        found.stat = Some(glob_stat);
        if put(out, found).is_err() {
            return GLOB_ABORTED;
        }
        let result = next::glob(pattern, flags | ALT_DIR_FUNC, on_error, out.cast());
        if let Some(mut found) = get(out.cast_const()) {
            found.flags &= !ALT_DIR_FUNC;
            // It was written before.
            let _ = put(out, found);
        }
        result
    }
}

fn scan(directory: c_int, path: *const c_char, list: *mut *mut Entry, filter: *const c_void, compare: *const c_void) -> c_int {
    let stream = match open_at(directory, path) {
        Ok(stream) => stream,
        Err(errno) => return memory::fail(errno),
    };
    // SAFETY: the program gives functions of these kinds, or null.
    let (filter, compare) =
        unsafe { (transmute::<*const c_void, Option<Filter>>(filter), transmute::<*const c_void, Option<Compare>>(compare)) };
    let mut entries: Vec<Entry> = Vec::new();
    let mut failure = 0;
    loop {
        let entry = readdir(stream);
        let Some(value) = get(entry.cast_const()) else { break };
        if filter.is_some_and(|filter| filter(entry) == 0) {
            continue;
        }
        match allocate(value) {
            Ok(copy) => entries.push(copy),
            Err(errno) => {
                failure = errno;
                break;
            }
        }
    }
    closedir(stream);
    if let Some(compare) = compare {
        entries.sort_by(|left, right| {
            let (left, right) = (left.cast_const(), right.cast_const());
            compare(&raw const left, &raw const right).cmp(&0)
        });
    }
    let given = if failure == 0 { give(&entries).and_then(|array| put(list, array)) } else { Err(failure) };
    match given {
        Ok(()) => entries.len() as c_int,
        Err(errno) => {
            // SAFETY: made by `malloc` in `allocate`, and not given to the program.
            entries.iter().for_each(|&entry| unsafe { libc::free(entry.cast()) });
            memory::fail(errno)
        }
    }
}

fn allocate(value: dirent) -> Result<Entry, memory::Errno> {
    // SAFETY: plain allocation; null is looked for.
    let copy: Entry = unsafe { libc::malloc(size_of::<dirent>()) }.cast();
    if copy.is_null() {
        return Err(libc::ENOMEM);
    }
    put(copy, value).map(|()| copy)
}

fn give(entries: &[Entry]) -> Result<*mut Entry, memory::Errno> {
    // SAFETY: plain allocation; null is looked for.
    let array: *mut Entry = unsafe { libc::malloc(size_of::<Entry>() * entries.len().max(1)) }.cast();
    if array.is_null() {
        return Err(libc::ENOMEM);
    }
    memory::array_mut(array, entries.len()).copy_from_slice(entries);
    Ok(array)
}

const ALT_DIR_FUNC: c_int = 1 << 9;
const GLOB_ABORTED: c_int = 2;

/// `glob_t`, with the functions that libc's header shows.
#[repr(C)]
#[derive(Clone, Copy)]
struct Glob {
    count: size_t,
    paths: *mut *mut c_char,
    offset: size_t,
    flags: c_int,
    closedir: Option<extern "C" fn(*mut c_void)>,
    readdir: Option<extern "C" fn(*mut c_void) -> *mut dirent>,
    opendir: Option<extern "C" fn(*const c_char) -> *mut c_void>,
    lstat: Option<extern "C" fn(*const c_char, *mut c_void) -> c_int>,
    stat: Option<extern "C" fn(*const c_char, *mut c_void) -> c_int>,
}

extern "C" fn glob_closedir(stream: *mut c_void) {
    closedir(stream.cast::<DIR>());
}

extern "C" fn glob_readdir(stream: *mut c_void) -> *mut dirent {
    let before = memory::errno();
    let entry = readdir(stream.cast::<DIR>());
    if !entry.is_null() {
        set_errno(before);
    }
    entry
}

extern "C" fn glob_opendir(path: *const c_char) -> *mut c_void {
    opendir(path).cast()
}

extern "C" fn glob_lstat(path: *const c_char, out: *mut c_void) -> c_int {
    stat::lstat(path, out.cast::<KernelStat>())
}

extern "C" fn glob_stat(path: *const c_char, out: *mut c_void) -> c_int {
    stat::stat(path, out.cast::<KernelStat>())
}
