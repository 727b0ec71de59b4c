//! Memory of Python objects that is filled while other threads run Python code.

use std::ffi::{CStr, c_int};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

/// Makes glibc keep freed memory for the next batch. By default it returns a batch's memory to the kernel as soon as the batch is
/// freed, and the page faults of the next batch then cost more than the copies. When glibc frees an object that it had mapped, it
/// maps only larger ones from then on, and keeps up to twice as many bytes.
pub(crate) fn keep_freed_memory() {
    const KEPT_LEN: usize = 16 << 20;
    drop(std::hint::black_box(Vec::<u8>::with_capacity(KEPT_LEN)));
}

/// Memory in which a read stores bytes. The owner of the memory must live longer than this value.
pub(crate) struct Target {
    start: *mut u8,
    len: usize,
}

// SAFETY: a pointer to memory that any thread may write, as its creators promise.
unsafe impl Send for Target {}

impl Target {
    /// Returns the memory, to be filled.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: live memory of this length, as the functions below ensure. They zero it or know it to be initialized, except that
        // fresh memory of the allocator is treated as initialized bytes; it is only written before it is read.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Creates a `bytes` object of a length, to be filled before any other code sees the object.
pub(crate) fn new_bytes(py: Python<'_>, len: usize) -> PyResult<(Bound<'_, PyBytes>, Target)> {
    let signed = checked(len)?;
    // SAFETY: a null pointer asks for an object whose bytes the caller fills. The result is a new reference or null with an
    // exception. The bytes stay where they are as long as the object lives.
    let (object, start) = unsafe {
        let object = Bound::from_owned_ptr_or_err(py, ffi::PyBytes_FromStringAndSize(std::ptr::null(), signed))?;
        let start = ffi::PyBytes_AsString(object.as_ptr()).cast();
        (object.cast_into_unchecked::<PyBytes>(), start)
    };
    Ok((object, Target { start, len }))
}

/// Creates a `bytearray` of a length, to be filled before any other code sees the object.
pub(crate) fn new_bytearray(py: Python<'_>, len: usize) -> PyResult<(Bound<'_, PyByteArray>, Target)> {
    let signed = checked(len)?;
    // SAFETY: as in `new_bytes`. Nothing resizes the array before other code sees it.
    let (object, start) = unsafe {
        let object = Bound::from_owned_ptr_or_err(py, ffi::PyByteArray_FromStringAndSize(std::ptr::null(), signed))?;
        let start = ffi::PyByteArray_AsString(object.as_ptr()).cast();
        (object.cast_into_unchecked::<PyByteArray>(), start)
    };
    Ok((object, Target { start, len }))
}

fn checked(len: usize) -> PyResult<ffi::Py_ssize_t> {
    ffi::Py_ssize_t::try_from(len).map_err(|_| PyValueError::new_err("the samples are too large for one object"))
}

/// Returns the first `len` bytes of a caller's buffer. They may be written as long as `buffer` lives.
pub(crate) fn caller_buffer(buffer: &PyUntypedBuffer, len: usize) -> PyResult<Target> {
    if buffer.readonly() {
        return Err(PyValueError::new_err("the buffer is read-only"));
    }
    if !buffer.is_c_contiguous() {
        return Err(PyValueError::new_err("the buffer is not contiguous"));
    }
    if buffer.len_bytes() < len {
        let have = buffer.len_bytes();
        return Err(PyValueError::new_err(format!("the samples have {len} bytes, but the buffer has {have}")));
    }
    // A program whose other threads use the buffer meanwhile has the race that it would have with `readinto`.
    Ok(Target { start: buffer.buf_ptr().cast(), len })
}

/// What `__getbuffer__` exports: read-only elements in one dimension, which live as long as their owner.
pub(crate) struct Exported<'a> {
    pub(crate) start: *const u8,
    pub(crate) count: &'a [ffi::Py_ssize_t; 1],
    pub(crate) item_size: &'a [ffi::Py_ssize_t; 1],
    pub(crate) format: &'static CStr,
}

impl Exported<'_> {
    /// Fills in the structure that the interpreter passes to `__getbuffer__`.
    ///
    /// # Safety
    ///
    /// `view` is null or points to a structure of the interpreter. `owner` keeps everything that `self` points to.
    pub(crate) unsafe fn fill(self, view: *mut ffi::Py_buffer, flags: c_int, owner: Bound<'_, PyAny>) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no structure for the buffer"));
        }
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            // SAFETY: not null. The protocol wants a null owner after a failure.
            unsafe { (*view).obj = std::ptr::null_mut() };
            return Err(PyBufferError::new_err("the bytes are read-only"));
        }
        let wants = |flag: c_int| flags & flag == flag;
        // SAFETY: not null, and nobody else uses it before this function returns. The structure takes over the reference.
        unsafe {
            (*view).buf = self.start.cast_mut().cast();
            (*view).len = self.count[0] * self.item_size[0];
            (*view).readonly = 1;
            (*view).itemsize = self.item_size[0];
            (*view).format = if wants(ffi::PyBUF_FORMAT) { self.format.as_ptr().cast_mut() } else { std::ptr::null_mut() };
            (*view).ndim = 1;
            (*view).shape = if wants(ffi::PyBUF_ND) { self.count.as_ptr().cast_mut() } else { std::ptr::null_mut() };
            (*view).strides = if wants(ffi::PyBUF_STRIDES) { self.item_size.as_ptr().cast_mut() } else { std::ptr::null_mut() };
            (*view).suboffsets = std::ptr::null_mut();
            (*view).internal = std::ptr::null_mut();
            (*view).obj = owner.into_ptr();
        }
        Ok(())
    }
}

/// Creates a `bytes` object for each length; see [`new_bytes`].
pub(crate) fn new_bytes_each<'py>(py: Python<'py>, lens: &[usize]) -> PyResult<(Vec<Bound<'py, PyBytes>>, Vec<Target>)> {
    let mut objects = Vec::with_capacity(lens.len());
    let mut targets = Vec::with_capacity(lens.len());
    for &len in lens {
        let (object, target) = new_bytes(py, len)?;
        objects.push(object);
        targets.push(target);
    }
    Ok((objects, targets))
}
