//! Arrays of integers, which NumPy and `memoryview` see without a copy.

use std::ffi::{CStr, c_int};

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::{IntoPyObjectExt, ffi};

use crate::memory::Exported;

/// A read-only array of integers.
#[pyclass(frozen, module = "dayfly", sequence)]
pub(crate) struct Array {
    numbers: Numbers,
    count: [ffi::Py_ssize_t; 1],
    item_size: [ffi::Py_ssize_t; 1],
}

/// The numbers of an array, in one of three widths.
pub(crate) enum Numbers {
    U16(Vec<u16>),
    U32(Vec<u32>),
    U64(Vec<u64>),
}

impl From<Numbers> for Array {
    fn from(numbers: Numbers) -> Self {
        let (count, item_size) = match &numbers {
            Numbers::U16(numbers) => (numbers.len(), 2),
            Numbers::U32(numbers) => (numbers.len(), 4),
            Numbers::U64(numbers) => (numbers.len(), 8),
        };
        Self { numbers, count: [count as ffi::Py_ssize_t], item_size: [item_size] }
    }
}

impl From<Vec<u16>> for Array {
    fn from(numbers: Vec<u16>) -> Self {
        Numbers::U16(numbers).into()
    }
}

impl From<Vec<u32>> for Array {
    fn from(numbers: Vec<u32>) -> Self {
        Numbers::U32(numbers).into()
    }
}

impl From<Vec<u64>> for Array {
    fn from(numbers: Vec<u64>) -> Self {
        Numbers::U64(numbers).into()
    }
}

impl Array {
    fn get(&self, at: usize) -> Option<u64> {
        match &self.numbers {
            Numbers::U16(numbers) => numbers.get(at).copied().map(u64::from),
            Numbers::U32(numbers) => numbers.get(at).copied().map(u64::from),
            Numbers::U64(numbers) => numbers.get(at).copied(),
        }
    }

    /// Returns the format as `struct` spells it. "L" has 64 bits on Linux, and NumPy calls it `uint64`.
    fn format(&self) -> &'static CStr {
        match &self.numbers {
            Numbers::U16(_) => c"H",
            Numbers::U32(_) => c"I",
            Numbers::U64(_) => c"L",
        }
    }
}

#[pymethods]
impl Array {
    fn __len__(&self) -> usize {
        self.count[0] as usize
    }

    fn __getitem__(&self, index: isize) -> PyResult<u64> {
        let at = if index < 0 { index + self.count[0] } else { index };
        usize::try_from(at).ok().and_then(|at| self.get(at)).ok_or_else(|| PyIndexError::new_err("array index out of range"))
    }

    #[getter]
    fn typecode(&self) -> &'static str {
        self.format().to_str().unwrap_or_default()
    }

    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.numbers {
            Numbers::U16(numbers) => numbers.into_bound_py_any(py),
            Numbers::U32(numbers) => numbers.into_bound_py_any(py),
            Numbers::U64(numbers) => numbers.into_bound_py_any(py),
        }
    }

    fn __repr__(&self) -> String {
        let shown: Vec<String> = (0..8).map_while(|at| self.get(at)).map(|number| number.to_string()).collect();
        let more = if self.count[0] > 8 { ", ..." } else { "" };
        format!("<dayfly.Array '{}' of {}: [{}{more}]>", self.typecode(), self.count[0], shown.join(", "))
    }

    // The interpreter calls this with a structure of its own.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let array = slf.get();
        let start = match &array.numbers {
            Numbers::U16(numbers) => numbers.as_ptr().cast(),
            Numbers::U32(numbers) => numbers.as_ptr().cast(),
            Numbers::U64(numbers) => numbers.as_ptr().cast(),
        };
        let exported = Exported { start, count: &array.count, item_size: &array.item_size, format: array.format() };
        // SAFETY: a structure of the interpreter; the array, which never changes, owns the numbers.
        unsafe { exported.fill(view, flags, slf.clone().into_any()) }
    }
}
