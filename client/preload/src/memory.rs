//! The border to C: pointers that C code passes, `errno`, and values that C expects.
//!
//! A C function's caller promises that its pointers are valid. Rust cannot check that promise, so the type [`FromC`] carries it:
//! C code passes a `FromC` as an argument, and inside this library, only `unsafe` code or a conversion from a reference creates
//! one. No safe function of this crate follows a bare raw pointer.
//!
//! The promise also covers lengths. Functions with a `len` or `count` expect the one that C passed with the pointer, or less.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::fs::File;
use std::marker::PhantomData;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// An error number, as in `errno`.
pub(crate) type Errno = c_int;

/// A type that a C function returns, with the value that means failure.
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

/// Returns this thread's `errno`.
pub(crate) fn errno() -> Errno {
    // SAFETY: libc returns the address of this thread's errno, which lives as long as the thread.
    unsafe { *libc::__errno_location() }
}

/// Sets this thread's `errno`.
pub(crate) fn set_errno(value: Errno) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = value }
}

/// Sets `errno` and returns the failure value of a C function.
pub(crate) fn fail<R: Failed>(value: Errno) -> R {
    set_errno(value);
    R::FAILED
}

/// Returns libc's text for an error number.
pub(crate) fn reason(value: Errno) -> &'static CStr {
    // SAFETY: libc returns a string that lives until this thread asks for the text of an unknown number, which no kernel returns.
    unsafe { CStr::from_ptr(libc::strerror(value)) }
}

/// Takes ownership of a descriptor that the kernel has just made, or returns the `errno` of the call that failed to make it.
pub(crate) fn owned(descriptor: RawFd) -> Result<File, Errno> {
    if descriptor < 0 {
        return Err(errno());
    }
    // SAFETY: the caller got it from a call that makes descriptors, so nobody else owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(descriptor) }))
}

/// A value of type `P` (a raw pointer, or a word that may hold one) for which C code keeps C's promise: it is null, or valid
/// for `'a` in the way that the receiving function documents.
///
/// Hooks and callbacks take their pointer arguments as `FromC`, which has the layout of `P`. The lifetime ends with the call.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct FromC<'a, P>(P, PhantomData<&'a ()>);

impl<P: Copy> FromC<'_, P> {
    /// Wraps a pointer for which this library itself makes the promise.
    ///
    /// # Safety
    ///
    /// The pointer is null, or for the whole lifetime it is valid for what the functions that receive it do with it.
    pub(crate) unsafe fn new(pointer: P) -> Self {
        Self(pointer, PhantomData)
    }

    /// Returns the bare pointer, which safe code can compare and pass on but not follow.
    pub(crate) fn raw(self) -> P {
        self.0
    }
}

impl<'a, T> FromC<'a, *const T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Copies the value out; `None` for the null pointer.
    pub(crate) fn get(self) -> Option<T>
    where
        T: Copy,
    {
        // SAFETY: not null, so by C's promise it is readable.
        (!self.0.is_null()).then(|| unsafe { self.0.read_unaligned() })
    }

    /// Borrows an array; the null pointer counts as an empty array.
    pub(crate) fn slice(self, count: usize) -> &'a [T] {
        if self.0.is_null() || count == 0 {
            return &[];
        }
        // SAFETY: not null, and `count` elements by C's promise.
        unsafe { std::slice::from_raw_parts(self.0, count) }
    }
}

impl<'a, T> FromC<'a, *mut T> {
    /// Returns the null pointer.
    pub(crate) fn null() -> Self {
        Self(std::ptr::null_mut(), PhantomData)
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn as_const(self) -> FromC<'a, *const T> {
        FromC(self.0.cast_const(), PhantomData)
    }

    /// Copies the value out; `None` for the null pointer.
    pub(crate) fn get(self) -> Option<T>
    where
        T: Copy,
    {
        self.as_const().get()
    }

    /// Stores a value for the caller.
    ///
    /// # Errors
    ///
    /// EFAULT for the null pointer.
    pub(crate) fn put(self, value: T) -> Result<(), Errno> {
        if self.0.is_null() {
            return Err(libc::EFAULT);
        }
        // SAFETY: not null, so by C's promise it is writable.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Borrows an array for writing; the null pointer counts as an empty array.
    pub(crate) fn slice_mut(self, count: usize) -> &'a mut [T] {
        if self.0.is_null() || count == 0 {
            return &mut [];
        }
        // SAFETY: not null, and `count` writable elements by C's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0, count) }
    }
}

impl<'a> FromC<'a, *const c_char> {
    /// Borrows a C string; `None` for the null pointer.
    pub(crate) fn string(self) -> Option<&'a CStr> {
        // SAFETY: not null, so by C's promise a string that ends with a NUL.
        (!self.0.is_null()).then(|| unsafe { CStr::from_ptr(self.0) })
    }
}

impl<'a> FromC<'a, *const *const c_char> {
    /// Iterates over an array of strings that ends with a null pointer, as `argv` does.
    pub(crate) fn strings(self) -> impl Iterator<Item = &'a CStr> {
        let mut at = self.0;
        std::iter::from_fn(move || {
            // SAFETY: by C's promise the array and its strings are readable up to the null pointer, and nothing reads past it.
            let text = unsafe { FromC::new(FromC::new(at).get()?) }.string()?;
            at = at.wrapping_add(1);
            Some(text)
        })
    }
}

impl<'a> FromC<'a, *mut c_void> {
    /// Borrows a caller's buffer for writing.
    ///
    /// # Errors
    ///
    /// EFAULT for the null pointer, unless `len` is 0.
    pub(crate) fn buffer(self, len: usize) -> Result<&'a mut [u8], Errno> {
        match (self.0.is_null(), len) {
            (_, 0) => Ok(&mut []),
            (true, _) => Err(libc::EFAULT),
            // SAFETY: not null, and `len` writable bytes by C's promise. No process can have more than `isize::MAX` of them.
            _ => Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast(), len.min(isize::MAX as usize)) }),
        }
    }
}

impl<'a> FromC<'a, *mut c_char> {
    /// The same bytes without C's type for characters.
    pub(crate) fn bytes(self) -> FromC<'a, *mut c_void> {
        FromC(self.0.cast(), PhantomData)
    }

    /// Writes bytes and a NUL after them. C promises room for both.
    pub(crate) fn write_string(self, bytes: &[u8]) {
        let room: FromC<'_, *mut u8> = FromC(self.0.cast(), PhantomData);
        if let Some((last, all)) = room.slice_mut(bytes.len() + 1).split_last_mut() {
            all.copy_from_slice(bytes);
            *last = 0;
        }
    }
}

impl<'a> FromC<'a, c_ulong> {
    /// Wraps a plain number, for the commands of `fcntl` that take one.
    pub(crate) fn number(value: c_ulong) -> Self {
        Self(value, PhantomData)
    }

    /// Reads the word as a pointer.
    ///
    /// # Safety
    ///
    /// The word is the argument of a command of `fcntl` or `ioctl` that takes a pointer to a `T`.
    pub(crate) unsafe fn pointer<T>(self) -> FromC<'a, *mut T> {
        FromC(self.0 as *mut T, PhantomData)
    }
}

impl<'a> From<&'a CStr> for FromC<'a, *const c_char> {
    fn from(text: &'a CStr) -> Self {
        Self(text.as_ptr(), PhantomData)
    }
}

impl<'a, T: Plain> From<&'a T> for FromC<'a, *const T> {
    fn from(value: &'a T) -> Self {
        Self(value, PhantomData)
    }
}

impl<'a, T: Plain> From<&'a mut T> for FromC<'a, *mut T> {
    fn from(value: &'a mut T) -> Self {
        Self(value, PhantomData)
    }
}

/// Removes a variable from the environment. Call it only before the program's `main`, while there is one thread.
pub(crate) fn unset_variable(name: &CStr) {
    // SAFETY: a string, and no other thread looks at the environment yet.
    unsafe { libc::unsetenv(name.as_ptr()) };
}

/// Copies bytes and a NUL into new memory from `malloc` of at least `room` bytes, which the C caller frees.
pub(crate) fn allocate_string(bytes: &[u8], room: usize) -> Result<*mut c_char, Errno> {
    // SAFETY: plain allocation; null is checked below.
    let memory: *mut c_char = unsafe { libc::malloc(room.max(bytes.len() + 1)) }.cast();
    if memory.is_null() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: just allocated, with room for the bytes and the NUL.
    unsafe { FromC::new(memory) }.write_string(bytes);
    Ok(memory)
}

/// Returns a C structure with every byte zero.
pub(crate) fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` types are valid when all bytes are zero.
    unsafe { std::mem::zeroed() }
}

/// A C structure for which all-zero bytes are a value, and which C functions read and write through a pointer to that one value.
///
/// # Safety
///
/// Only for structures that consist of numbers, arrays of numbers and pointers that may be null, and never for an element of a
/// string or an array, where C code reads more than one element.
pub(crate) unsafe trait Plain {}

// SAFETY: numbers and arrays of numbers.
unsafe impl Plain for libc::stat {}
// SAFETY: as above.
unsafe impl Plain for libc::statx {}
// SAFETY: as above.
unsafe impl Plain for libc::statfs64 {}
// SAFETY: as above.
unsafe impl Plain for libc::statvfs {}
// SAFETY: as above.
unsafe impl Plain for libc::dirent {}
// SAFETY: as above.
unsafe impl Plain for libc::timespec {}
// SAFETY: as above.
unsafe impl Plain for libc::timeval {}
// SAFETY: numbers, and a function pointer that may be null.
unsafe impl Plain for libc::sigaction {}
// SAFETY: numbers.
unsafe impl Plain for libc::sigset_t {}
