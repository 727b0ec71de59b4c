//! Reads samples into objects of Python.

use dayfly_client::{ClientError, OnMissing, ViewError};
use dayfly_meta::id::SampleId;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{Dataset, facts};
use crate::array::Array;
use crate::failure;
use crate::memory::{self, Target};
use crate::wait::without_gil;

/// Reads one sample.
pub(super) fn read_one<'py>(dataset: &Dataset, py: Python<'py>, sample: SampleId) -> PyResult<Bound<'py, PyBytes>> {
    let size = facts::sizes(dataset.dataset.catalog(), &[sample])[0] as usize;
    let (object, mut target) = memory::new_bytes(py, size)?;
    let read = without_gil(py, || dataset.view.session().read_at(&dataset.dataset, sample, 0, target.bytes(), &mut None));
    read.map_err(|error| failed(dataset, py, sample, error))?;
    Ok(object)
}

/// Reads samples, each into an object of its own.
pub(super) fn read_each<'py>(dataset: &Dataset, py: Python<'py>, samples: &[SampleId]) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let sizes: Vec<usize> = facts::sizes(dataset.dataset.catalog(), samples).into_iter().map(|size| size as usize).collect();
    let (objects, mut targets) = memory::new_bytes_each(py, &sizes)?;
    fill(dataset, py, samples, || targets.iter_mut().map(Target::bytes).collect())?;
    Ok(objects)
}

/// Reads samples into one buffer, which is the caller's or a new one. Returns the buffer and the samples' offsets.
pub(super) fn read_into<'py>(
    dataset: &Dataset,
    py: Python<'py>,
    samples: &[SampleId],
    into: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Bound<'py, PyAny>, Array)> {
    let sizes = facts::sizes(dataset.dataset.catalog(), samples);
    let mut offsets = Vec::with_capacity(samples.len() + 1);
    let mut end = 0_u64;
    offsets.push(end);
    for &size in &sizes {
        end = end.checked_add(size).ok_or_else(|| PyValueError::new_err("the samples are too large for one buffer"))?;
        offsets.push(end);
    }
    let exported = into.map(buffer_of).transpose()?;
    let (object, mut target) = match (into, &exported) {
        (Some(object), Some(exported)) => (object.clone(), memory::caller_buffer(exported, end as usize)?),
        _ => {
            let (object, target) = memory::new_bytearray(py, end as usize)?;
            (object.into_any(), target)
        }
    };
    let read = fill(dataset, py, samples, || {
        let mut rest = target.bytes();
        let mut buffers = Vec::with_capacity(sizes.len());
        for &size in &sizes {
            let (buffer, after) = rest.split_at_mut(size as usize);
            buffers.push(buffer);
            rest = after;
        }
        buffers
    });
    if let Some(exported) = exported {
        exported.release(py);
    }
    read.map(|()| (object, offsets.into()))
}

fn buffer_of(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    PyUntypedBuffer::get(object).map_err(|error| match error.is_instance_of::<PyTypeError>(object.py()) {
        true => error,
        false => PyValueError::new_err(format!("the buffer cannot be used: {}", error.value(object.py()))),
    })
}

/// Reads samples into the buffers that `buffers` returns, one for each.
fn fill<'a>(
    dataset: &Dataset,
    py: Python<'_>,
    samples: &[SampleId],
    buffers: impl FnOnce() -> Vec<&'a mut [u8]> + Send,
) -> PyResult<()> {
    let read =
        without_gil(py, || dataset.view.session().read_many_into(&dataset.dataset, samples, &mut buffers(), OnMissing::Report));
    let sizes = match (read, samples.first()) {
        (Ok(sizes), _) => sizes,
        (Err(error), Some(&first)) => return Err(failed(dataset, py, first, error)),
        (Err(error), None) => return Err(failure::general(error)),
    };
    for (&sample, size) in samples.iter().zip(sizes) {
        size.map_err(|error| failed(dataset, py, sample, error))?;
    }
    Ok(())
}

fn failed(dataset: &Dataset, py: Python<'_>, sample: SampleId, error: ClientError) -> PyErr {
    failure::at(py, &dataset.path(sample), ViewError::Client(error))
}
