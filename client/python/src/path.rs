//! Paths of Python as bytes, and back, in the encoding of `os.fsencode` and `os.fsdecode`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

/// Returns the bytes of a `str`, `bytes` or `os.PathLike`.
pub(crate) fn from_python(path: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Some(bytes) = plain(path)? {
        return Ok(bytes);
    }
    let plain_path = path.py().import("os")?.call_method1("fspath", (path,))?;
    plain(&plain_path)?.ok_or_else(|| PyTypeError::new_err("a path must be str, bytes or os.PathLike"))
}

fn plain(path: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u8>>> {
    if path.is_instance_of::<PyString>() {
        Ok(Some(path.extract::<OsString>()?.into_vec()))
    } else {
        Ok(path.cast::<PyBytes>().ok().map(|bytes| bytes.as_bytes().to_vec()))
    }
}

/// Returns a path as a `str`. Bytes that are not UTF-8 become surrogates.
pub(crate) fn to_python<'py>(py: Python<'py>, path: &[u8]) -> PyResult<Bound<'py, PyString>> {
    match std::str::from_utf8(path) {
        Ok(path) => Ok(PyString::new(py, path)),
        Err(_) => Ok(OsStr::from_bytes(path).into_pyobject(py)?),
    }
}

/// Returns a list of paths.
pub(crate) fn list_from_python(paths: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<u8>>> {
    if paths.is_instance_of::<PyString>() || paths.is_instance_of::<PyBytes>() {
        return Err(PyTypeError::new_err("expected several paths, not one"));
    }
    paths.try_iter()?.map(|path| from_python(&path?)).collect()
}
