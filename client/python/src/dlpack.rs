//! Exports the bytes of a view by DLPack, the protocol by which tensor libraries share memory.
//!
//! A capsule holds a structure that names the memory and a function that ends the export. A library that takes the memory renames
//! the capsule, and calls the function when its last tensor is gone, perhaps on a thread without the GIL. The structures are those
//! of `dlpack.h`, version 1.0.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::lent::Sample;

/// Memory of the processor, as `__dlpack_device__` returns it: kind and number.
pub(crate) const CPU: (i32, i32) = (1, 0);

const UNSIGNED: u8 = 1;
const VERSION: [u32; 2] = [1, 0];
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;
const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: [i32; 2],
    dimensions: c_int,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct PlainTensor {
    tensor: Tensor,
    context: *mut c_void,
    delete: Option<unsafe extern "C" fn(*mut PlainTensor)>,
}

#[repr(C)]
struct VersionedTensor {
    version: [u32; 2],
    context: *mut c_void,
    delete: Option<unsafe extern "C" fn(*mut VersionedTensor)>,
    flags: u64,
    tensor: Tensor,
}

/// What keeps the bytes of an export in place.
enum Owner {
    Lent(Arc<Sample>),
    Copy { _bytes: Vec<u8> },
}

/// An export with everything that its structure points to.
#[repr(C)]
struct Export<T> {
    /// Comes first, so that a pointer to the structure is a pointer to the export.
    structure: T,
    shape: [i64; 1],
    strides: [i64; 1],
    owner: Owner,
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Self::Lent(sample) = self {
            sample.end_export();
        }
    }
}

/// Returns a capsule with the bytes of a sample, or with a copy of them.
pub(crate) fn export<'py>(py: Python<'py>, sample: Arc<Sample>, is_versioned: bool, copy: bool) -> PyResult<Bound<'py, PyAny>> {
    let bytes = sample.bytes()?;
    // The bytes stay where they are when their owner moves.
    let (owner, start, len) = if copy {
        let copied = bytes.to_vec();
        let (start, len) = (copied.as_ptr(), copied.len());
        (Owner::Copy { _bytes: copied }, start, len)
    } else {
        let (start, len) = (bytes.as_ptr(), bytes.len());
        sample.export();
        (Owner::Lent(sample), start, len)
    };
    let memory = (start.cast_mut().cast(), len as i64);
    let flags = if copy { IS_COPIED } else { READ_ONLY };
    if is_versioned {
        let structure = |tensor| VersionedTensor { version: VERSION, context: null_mut(), delete: Some(delete), flags, tensor };
        let export = place(owner, memory, structure, |structure| &mut structure.tensor);
        // SAFETY: a new structure under its name; the destructor knows both.
        let capsule = unsafe { ffi::PyCapsule_New(export.cast(), VERSIONED.as_ptr(), Some(end_unused::<VersionedTensor>)) };
        owned(py, capsule, export)
    } else {
        let structure = |tensor| PlainTensor { tensor, context: null_mut(), delete: Some(delete) };
        let export = place(owner, memory, structure, |structure| &mut structure.tensor);
        // SAFETY: as above.
        let capsule = unsafe { ffi::PyCapsule_New(export.cast(), PLAIN.as_ptr(), Some(end_unused::<PlainTensor>)) };
        owned(py, capsule, export)
    }
}

/// Puts an export where it stays, and makes its structure point into it.
fn place<T>(
    owner: Owner,
    (data, len): (*mut c_void, i64),
    structure: impl FnOnce(Tensor) -> T,
    tensor: impl FnOnce(&mut T) -> &mut Tensor,
) -> *mut Export<T> {
    let new = Tensor {
        data,
        device: [CPU.0, CPU.1],
        dimensions: 1,
        code: UNSIGNED,
        bits: 8,
        lanes: 1,
        shape: null_mut(),
        strides: null_mut(),
        byte_offset: 0,
    };
    let mut export = Box::new(Export { structure: structure(new), shape: [len], strides: [1], owner });
    let (shape, strides) = (export.shape.as_mut_ptr(), export.strides.as_mut_ptr());
    let tensor = tensor(&mut export.structure);
    (tensor.shape, tensor.strides) = (shape, strides);
    Box::into_raw(export)
}

fn owned<T>(py: Python<'_>, capsule: *mut ffi::PyObject, export: *mut Export<T>) -> PyResult<Bound<'_, PyAny>> {
    if capsule.is_null() {
        // SAFETY: made by `place`, and no capsule holds it.
        drop(unsafe { Box::from_raw(export) });
    }
    // SAFETY: a new reference, or null with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }
}

/// Ends an export. The library that took the structure calls this once.
unsafe extern "C" fn delete<T>(structure: *mut T) {
    // SAFETY: made by `place`; the structure is the first field of its export.
    drop(unsafe { Box::from_raw(structure.cast::<Export<T>>()) });
}

/// The name under which a capsule holds a structure until a library takes it.
trait Named {
    const NAME: &'static CStr;
}

impl Named for PlainTensor {
    const NAME: &'static CStr = PLAIN;
}

impl Named for VersionedTensor {
    const NAME: &'static CStr = VERSIONED;
}

/// Ends the export of a capsule that no library took.
unsafe extern "C" fn end_unused<T: Named>(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter passes the capsule that it destroys. Only an unused one still has its first name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, T::NAME.as_ptr()) != 0 {
            delete(ffi::PyCapsule_GetPointer(capsule, T::NAME.as_ptr()).cast::<T>());
        }
    }
}
