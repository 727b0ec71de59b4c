//! Ids of samples, as an array of any library or as any iterable of integers.

use dayfly_meta::id::SampleId;
use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyList, PyString, PyTuple};

/// Returns the ids, each of which is a sample of a dataset with `count` samples.
pub(crate) fn from_python(ids: &Bound<'_, PyAny>, count: u32) -> PyResult<Vec<SampleId>> {
    let is_sequence = ids.is_instance_of::<PyList>() || ids.is_instance_of::<PyTuple>();
    if !is_sequence && let Ok(buffer) = PyUntypedBuffer::get(ids) {
        if ids.is_instance_of::<PyBytes>() || ids.is_instance_of::<PyByteArray>() {
            return Err(PyTypeError::new_err("expected an array of integers, not bytes"));
        }
        if buffer.dimensions() != 1 {
            return Err(PyValueError::new_err(format!("ids have {} dimensions, not one", buffer.dimensions())));
        }
        if let Some(found) = from_buffer(ids, count) {
            return found;
        }
    }
    if ids.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err("expected several ids, not a string"));
    }
    // A tensor would yield each number as a tensor.
    if !is_sequence && ids.hasattr("tolist")? {
        let list = ids.call_method0("tolist")?;
        if list.is_instance_of::<PyList>() {
            return from_iterable(&list, count);
        }
    }
    from_iterable(ids, count)
}

fn from_iterable(ids: &Bound<'_, PyAny>, count: u32) -> PyResult<Vec<SampleId>> {
    let mut found = Vec::with_capacity(ids.len().unwrap_or(0).min(count as usize));
    for id in ids.try_iter()? {
        found.push(one(&id?, count)?);
    }
    Ok(found)
}

/// Returns one id.
pub(crate) fn one(id: &Bound<'_, PyAny>, count: u32) -> PyResult<SampleId> {
    if id.is_instance_of::<PyBool>() {
        return Err(PyTypeError::new_err("expected an id, not a bool"));
    }
    match id.extract::<i64>() {
        Ok(number) => checked(number.into(), count),
        Err(error) if error.is_instance_of::<pyo3::exceptions::PyOverflowError>(id.py()) => Err(unknown(&id.to_string(), count)),
        Err(error) => Err(error),
    }
}

/// Returns the ids of an array, if its elements are integers of a known width.
fn from_buffer(ids: &Bound<'_, PyAny>, count: u32) -> Option<PyResult<Vec<SampleId>>> {
    of_type::<i64>(ids, count)
        .or_else(|| of_type::<u32>(ids, count))
        .or_else(|| of_type::<i32>(ids, count))
        .or_else(|| of_type::<u64>(ids, count))
        .or_else(|| of_type::<u16>(ids, count))
        .or_else(|| of_type::<i16>(ids, count))
        .or_else(|| of_type::<u8>(ids, count))
        .or_else(|| of_type::<i8>(ids, count))
}

fn of_type<T: Element + Into<i128>>(ids: &Bound<'_, PyAny>, count: u32) -> Option<PyResult<Vec<SampleId>>> {
    let buffer = PyBuffer::<T>::get(ids).ok()?;
    let numbers = buffer.to_vec(ids.py());
    Some(numbers.and_then(|numbers| numbers.into_iter().map(|number| checked(number.into(), count)).collect()))
}

fn checked(number: i128, count: u32) -> PyResult<SampleId> {
    match u32::try_from(number) {
        Ok(id) if id < count => Ok(SampleId(id)),
        _ => Err(unknown(&number.to_string(), count)),
    }
}

fn unknown(id: &str, count: u32) -> PyErr {
    PyIndexError::new_err(format!("the dataset has no sample {id}; it has {count}, numbered from 0"))
}
