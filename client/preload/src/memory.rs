//! The border to C: pointers that C code passes, `errno`, and values that C expects.
//!
//! A C function's caller promises that its pointers are valid. Rust cannot check that promise, so the type [`FromC`] carries it:
//! C code passes a `FromC` as an argument, and inside this library, only `unsafe` code or a conversion from a reference creates
//! one. No safe function of this crate follows a bare raw pointer.
//!
//! The promise also covers lengths. A `len` or `count` is the number that C passed with the pointer, or a smaller one.
//!
//! Some programs break the promise, and the kernel answers them with EFAULT. So the functions below first ask [`crate::pages`]
//! whether the memory is there. If it is not, they fail with EFAULT or find no value. A caller that passes its arguments on to the
//! kernel passes them unchanged, and the kernel fails the call.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::fs::File;
use std::marker::PhantomData;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use dayfly_meta::limits::PAGE_SIZE;

use crate::pages;

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

    /// Copies the value out; `None` for the null pointer, and where there is no readable memory.
    pub(crate) fn get(self) -> Option<T>
    where
        T: Copy,
    {
        // SAFETY: readable, and so by C's promise a value.
        (!self.0.is_null() && pages::is_readable(self.0 as usize, size_of::<T>())).then(|| unsafe { self.0.read_unaligned() })
    }

    /// Copies an argument that may be left out: `None` for the null pointer.
    ///
    /// # Errors
    ///
    /// EFAULT if there is no readable memory.
    pub(crate) fn get_if_given(self) -> Result<Option<T>, Errno>
    where
        T: Copy,
    {
        if self.0.is_null() { Ok(None) } else { self.get().map(Some).ok_or(libc::EFAULT) }
    }

    /// Checks that `count` values are in readable memory.
    ///
    /// # Errors
    ///
    /// EFAULT if they are not.
    pub(crate) fn check(self, count: usize) -> Result<(), Errno> {
        let len = count.checked_mul(size_of::<T>()).ok_or(libc::EFAULT)?;
        if pages::is_readable(self.0 as usize, len) { Ok(()) } else { Err(libc::EFAULT) }
    }

    /// Copies the values of an array, which need not be aligned.
    ///
    /// # Errors
    ///
    /// EFAULT if not all of it is in readable memory.
    pub(crate) fn values(self, count: usize) -> Result<impl Iterator<Item = T> + Clone + 'a, Errno>
    where
        T: Copy + 'a,
    {
        self.check(count)?;
        // SAFETY: readable, and `count` elements by C's promise.
        Ok((0..count).map(move |index| unsafe { self.0.wrapping_add(index).read_unaligned() }))
    }

    /// Borrows an array; the null pointer counts as an empty array.
    ///
    /// # Errors
    ///
    /// EFAULT if not all of it is in readable memory, EINVAL if it is not aligned.
    pub(crate) fn slice(self, count: usize) -> Result<&'a [T], Errno> {
        if self.0.is_null() || count == 0 {
            return Ok(&[]);
        }
        self.check(count)?;
        if !self.0.is_aligned() {
            return Err(libc::EINVAL);
        }
        // SAFETY: readable, and `count` elements by C's promise.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) })
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

    /// Copies the value out; `None` for the null pointer, and where there is no readable memory.
    pub(crate) fn get(self) -> Option<T>
    where
        T: Copy,
    {
        self.as_const().get()
    }

    /// See [`FromC::get_if_given`].
    pub(crate) fn get_if_given(self) -> Result<Option<T>, Errno>
    where
        T: Copy,
    {
        self.as_const().get_if_given()
    }

    /// Stores a value for the caller.
    ///
    /// # Errors
    ///
    /// EFAULT for the null pointer, and where there is no writable memory.
    pub(crate) fn put(self, value: T) -> Result<(), Errno> {
        if pages::writable_len(self.0 as usize, size_of::<T>()) < size_of::<T>() {
            return Err(libc::EFAULT);
        }
        // SAFETY: writable, and by C's promise room for a value.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Returns the pointer to an element of an array. By C's promise, the array has this element.
    pub(crate) fn at(self, index: usize) -> Self {
        Self(self.0.wrapping_add(index), PhantomData)
    }

    /// Checks that `count` values are in writable memory.
    ///
    /// # Errors
    ///
    /// EFAULT if they are not.
    pub(crate) fn check_writable(self, count: usize) -> Result<(), Errno> {
        let len = count.checked_mul(size_of::<T>()).ok_or(libc::EFAULT)?;
        if pages::writable_len(self.0 as usize, len) < len { Err(libc::EFAULT) } else { Ok(()) }
    }

    /// Borrows an array for writing; the null pointer counts as an empty array.
    ///
    /// # Errors
    ///
    /// EFAULT if not all of it is in writable memory, EINVAL if it is not aligned.
    pub(crate) fn slice_mut(self, count: usize) -> Result<&'a mut [T], Errno> {
        if self.0.is_null() || count == 0 {
            return Ok(&mut []);
        }
        self.check_writable(count)?;
        if !self.0.is_aligned() {
            return Err(libc::EINVAL);
        }
        // SAFETY: writable, and `count` elements by C's promise.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0, count) })
    }
}

impl<'a> FromC<'a, *const c_char> {
    /// Borrows a C string; `None` for the null pointer, and for a string that runs into memory that cannot be read.
    pub(crate) fn string(self) -> Option<&'a CStr> {
        self.string_within(isize::MAX as usize)
    }

    /// Borrows a path. Also `None` for a path that is longer than the kernel takes.
    #[inline]
    pub(crate) fn path(self) -> Option<&'a CStr> {
        self.string_within(libc::PATH_MAX as usize)
    }

    /// Borrows a C string of at most `max` bytes, its NUL included.
    #[inline]
    fn string_within(self, max: usize) -> Option<&'a CStr> {
        const { assert!(PAGE_SIZE.is_power_of_two()) };
        let mut len = 0;
        while len < max {
            let at = self.0.wrapping_add(len);
            if !pages::is_readable(at as usize, 1) {
                return None;
            }
            let in_page = (PAGE_SIZE as usize - at as usize % PAGE_SIZE as usize).min(max - len);
            // SAFETY: the rest of a page that can be read, or less.
            let found = unsafe { libc::strnlen(at, in_page) };
            len += found;
            if found < in_page {
                // SAFETY: `len` readable bytes without a NUL, and a NUL after them.
                return Some(unsafe { CStr::from_bytes_with_nul_unchecked(std::slice::from_raw_parts(self.0.cast(), len + 1)) });
            }
        }
        None
    }
}

impl<'a> FromC<'a, *const *const c_char> {
    /// Returns whether the array and all of its strings can be read.
    pub(crate) fn are_readable(self) -> bool {
        let mut at = self.0;
        loop {
            // SAFETY: by C's promise a part of the array, which ends with a null pointer; `get` finds out whether it is there.
            let Some(text) = unsafe { FromC::new(at) }.get() else { return self.0.is_null() };
            if text.is_null() {
                return true;
            }
            // SAFETY: by C's promise a string; `string` finds out whether it is there.
            if unsafe { FromC::new(text) }.string().is_none() {
                return false;
            }
            at = at.wrapping_add(1);
        }
    }

    /// Iterates over an array of strings that ends with a null pointer, as `argv` does, or up to a pointer that cannot be followed.
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
    /// EFAULT if not all of it is in writable memory, unless `len` is 0.
    pub(crate) fn buffer(self, len: usize) -> Result<&'a mut [u8], Errno> {
        let all = self.start_of_buffer(len)?;
        if all.len() < len { Err(libc::EFAULT) } else { Ok(all) }
    }

    /// Borrows several of a caller's buffers for writing. Buffers that follow each other in memory are checked with one question,
    /// because each question costs a system call.
    ///
    /// # Errors
    ///
    /// EFAULT if not all of them are in writable memory.
    pub(crate) fn buffers(all: impl Iterator<Item = (Self, usize)> + Clone) -> Result<Vec<&'a mut [u8]>, Errno> {
        let mut rest = all.clone().filter(|&(_, len)| len > 0).peekable();
        while let Some((first, mut len)) = rest.next() {
            while let Some((_, more)) = rest.next_if(|(next, _)| next.0 == first.0.wrapping_byte_add(len)) {
                len = len.checked_add(more).ok_or(libc::EFAULT)?;
            }
            first.buffer(len)?;
        }
        let borrow = |(start, len): (Self, usize)| match len {
            0 => &mut [][..],
            // SAFETY: `len` bytes by C's promise, which can be written.
            _ => unsafe { std::slice::from_raw_parts_mut(start.0.cast(), len) },
        };
        Ok(all.map(borrow).collect())
    }

    /// Borrows the part of a caller's buffer before the first byte that cannot be written. Reads fill that part, as in the kernel.
    ///
    /// # Errors
    ///
    /// EFAULT if that part is empty, unless `len` is 0.
    #[inline]
    pub(crate) fn start_of_buffer(self, len: usize) -> Result<&'a mut [u8], Errno> {
        match pages::writable_len(self.0 as usize, len) {
            0 if len == 0 => Ok(&mut []),
            0 => Err(libc::EFAULT),
            // SAFETY: `len` bytes by C's promise, of which these are writable. No process can have more than `isize::MAX` of them.
            good => Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast(), good.min(isize::MAX as usize)) }),
        }
    }

    /// Checks that a buffer lies in the program's part of the address space, as the kernel does before it looks at the buffer.
    ///
    /// # Errors
    ///
    /// EFAULT if it does not.
    #[inline]
    pub(crate) fn check_range(self, len: usize) -> Result<(), Errno> {
        let start = self.0 as usize;
        match start.checked_add(len) {
            Some(end) if end <= USER_END => Ok(()),
            Some(_) if start >= USER_END && pages::is_readable(start, 1) => Ok(()),
            _ => Err(libc::EFAULT),
        }
    }
}

/// The end of a program's memory on x86-64, unless the program has asked the kernel for addresses beyond it.
const USER_END: usize = 1 << 47;

impl<'a> FromC<'a, *mut c_char> {
    /// The same bytes without C's type for characters.
    pub(crate) fn bytes(self) -> FromC<'a, *mut c_void> {
        FromC(self.0.cast(), PhantomData)
    }

    /// Writes bytes and a NUL after them. C promises room for both.
    ///
    /// # Errors
    ///
    /// EFAULT if there is no writable memory.
    pub(crate) fn write_string(self, bytes: &[u8]) -> Result<(), Errno> {
        if let Some((last, all)) = self.bytes().buffer(bytes.len() + 1)?.split_last_mut() {
            all.copy_from_slice(bytes);
            *last = 0;
        }
        Ok(())
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
    unsafe { FromC::new(memory) }.write_string(bytes)?;
    Ok(memory)
}

/// Returns a C structure with every byte zero.
pub(crate) fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` types are valid when all bytes are zero.
    unsafe { std::mem::zeroed() }
}

/// A C structure that is valid when all its bytes are zero. A C function that gets a pointer to one reads and writes only that one.
///
/// # Safety
///
/// The structure consists of numbers, arrays of numbers, and pointers that may be null. It is never an element of a string or an
/// array, because C code reads more than one element of those.
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
