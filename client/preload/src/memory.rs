//! The program's memory: where pointers that came from C are followed. Whoever calls a C function promises that its
//! pointers are good; these helpers rest on that promise, as libc does, and on nothing else.

use std::ffi::{CStr, c_char, c_int, c_void};

/// An errno.
pub(crate) type Errno = c_int;

/// What a C function returns when it fails.
pub(crate) trait Failed {
    const FAILED: Self;
}

impl Failed for () {
    const FAILED: Self = ();
}

impl Failed for c_int {
    const FAILED: Self = -1;
}

impl Failed for i64 {
    const FAILED: Self = -1;
}

impl Failed for isize {
    const FAILED: Self = -1;
}

impl<T> Failed for *mut T {
    const FAILED: Self = std::ptr::null_mut();
}

/// This thread's errno.
pub(crate) fn errno() -> Errno {
    // SAFETY: libc gives the address of this thread's errno, which lives as long as the thread.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(value: Errno) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = value }
}

/// Fails in the way of C.
pub(crate) fn fail<R: Failed>(value: Errno) -> R {
    set_errno(value);
    R::FAILED
}

/// A string of the program's.
pub(crate) fn string<'a>(pointer: *const c_char) -> Option<&'a CStr> {
    // SAFETY: not null, and so a string that ends, by the program's promise.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}

/// Bytes of the program's, to be filled.
pub(crate) fn buffer<'a>(pointer: *mut c_void, len: usize) -> Result<&'a mut [u8], Errno> {
    match (pointer.is_null(), len) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(libc::EFAULT),
        // SAFETY: not null, and `len` writable bytes by the program's promise; more than a process can have is cut.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), len.min(isize::MAX as usize)) }),
    }
}

/// An array of the program's.
pub(crate) fn array<'a, T>(pointer: *const T, count: usize) -> &'a [T] {
    if pointer.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: not null, and `count` elements by the program's promise.
    unsafe { std::slice::from_raw_parts(pointer, count) }
}

/// An array of the program's, to be changed.
pub(crate) fn array_mut<'a, T>(pointer: *mut T, count: usize) -> &'a mut [T] {
    if pointer.is_null() || count == 0 {
        return &mut [];
    }
    // SAFETY: not null, and `count` writable elements by the program's promise.
    unsafe { std::slice::from_raw_parts_mut(pointer, count) }
}

/// Strings of an array that ends with a null pointer, as `argv` does.
pub(crate) fn strings<'a>(mut array: *const *const c_char) -> impl Iterator<Item = &'a CStr> {
    std::iter::from_fn(move || {
        let text = string(get(array)?)?;
        array = array.wrapping_add(1);
        Some(text)
    })
}

/// Takes a variable out of the environment. Only before the program's `main`, while there is one thread.
pub(crate) fn unset_variable(name: &str) {
    if let Ok(name) = std::ffi::CString::new(name) {
        // SAFETY: a string, and nobody else looks at the environment yet.
        unsafe { libc::unsetenv(name.as_ptr()) };
    }
}

/// A value of the program's.
pub(crate) fn get<T: Copy>(pointer: *const T) -> Option<T> {
    // SAFETY: not null, and so readable by the program's promise.
    (!pointer.is_null()).then(|| unsafe { pointer.read_unaligned() })
}

/// Gives the program a value.
pub(crate) fn put<T>(pointer: *mut T, value: T) -> Result<(), Errno> {
    if pointer.is_null() {
        return Err(libc::EFAULT);
    }
    // SAFETY: not null, and so writable by the program's promise.
    unsafe { pointer.write_unaligned(value) };
    Ok(())
}

/// Gives the program bytes with a NUL after them, in memory from `malloc` that it shall free, of at least `room` bytes.
pub(crate) fn allocate_string(bytes: &[u8], room: usize) -> Result<*mut c_char, Errno> {
    // SAFETY: plain allocation; null is looked for below.
    let memory = unsafe { libc::malloc(room.max(bytes.len() + 1)) };
    if memory.is_null() {
        return Err(libc::ENOMEM);
    }
    write_string(memory.cast(), bytes);
    Ok(memory.cast())
}

/// Writes bytes with a NUL after them to where there is room for both.
pub(crate) fn write_string(to: *mut c_char, bytes: &[u8]) {
    let room = array_mut(to.cast::<u8>(), bytes.len() + 1);
    if let Some((last, all)) = room.split_last_mut() {
        all.copy_from_slice(bytes);
        *last = 0;
    }
}

/// A value of C's whose fields are all numbers, set to zero.
pub(crate) fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` types are valid when all bytes are zero.
    unsafe { std::mem::zeroed() }
}

/// Types of C for which all-zero bytes are a value.
///
/// # Safety
///
/// Only for types that consist of numbers, arrays of numbers and raw pointers.
pub(crate) unsafe trait Plain {}

// SAFETY: numbers and arrays of numbers.
unsafe impl Plain for libc::stat {}
// SAFETY: as above.
unsafe impl Plain for libc::statx {}
// SAFETY: as above.
unsafe impl Plain for libc::statfs {}
// SAFETY: as above.
unsafe impl Plain for libc::statvfs {}
// SAFETY: as above.
unsafe impl Plain for libc::dirent {}
// SAFETY: as above; an empty set.
unsafe impl Plain for libc::fd_set {}
// SAFETY: numbers, and a function pointer that may be null.
unsafe impl Plain for libc::sigaction {}
// SAFETY: numbers.
unsafe impl Plain for libc::sigset_t {}
