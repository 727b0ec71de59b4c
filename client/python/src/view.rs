//! Views: samples that are lent in place, as objects of Python.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use dayfly_client::ViewError;
use dayfly_meta::id::SampleId;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::dataset::Dataset;
use crate::dlpack;
use crate::failure::{self, Error};
use crate::ids;
use crate::lent::{Lent, Sample};
use crate::memory::Exported;
use crate::session::native;
use crate::wait::{self, without_gil};

/// The bytes of one sample in place.
#[pyclass(frozen, module = "dayfly", weakref)]
pub(crate) struct View {
    dataset: Py<Dataset>,
    id: SampleId,
    /// `None` after `release`.
    sample: Mutex<Option<Arc<Sample>>>,
}

const ITEM_SIZE: [ffi::Py_ssize_t; 1] = [1];

/// Opens the view of a pickled object. The bytes are lent in place, as those of the original are.
#[pyfunction]
#[pyo3(name = "_reopen_view")]
pub(crate) fn reopen_view(dataset: &Bound<'_, Dataset>, number: u32, id: &Bound<'_, PyAny>) -> PyResult<View> {
    let py = dataset.py();
    if dataset.get().dataset.id().0 != number {
        let text = "another stage-in has replaced the dataset of the view";
        return Err(failure::os_error(py, libc::ESTALE, text, &dataset.get().path(SampleId(u32::MAX))));
    }
    let sample = ids::one(id, dataset.get().count())?;
    View::open(dataset, &[sample])?.pop().ok_or_else(|| Error::new_err("no view"))
}

impl View {
    /// Lends samples of a dataset, all in one batch. Waits until they have arrived.
    pub(crate) fn open(dataset: &Bound<'_, Dataset>, samples: &[SampleId]) -> PyResult<Vec<Self>> {
        let (py, inner) = (dataset.py(), dataset.get());
        if samples.is_empty() {
            return Ok(Vec::new());
        }
        let lent = without_gil(py, || Lent::wait_for(inner.view.clone(), &inner.dataset, samples));
        let first = |error| failure::at(py, &inner.path(samples[0]), ViewError::Client(error));
        let lent = Arc::new(lent.map_err(first)?);
        // The batch reports an interrupted sample like one that cannot be read.
        if let Some(raised) = wait::raised() {
            return Err(raised);
        }
        let mut views = Vec::with_capacity(samples.len());
        for (index, &id) in samples.iter().enumerate() {
            let len = lent.len(index).map_err(|error| failure::os_error(py, libc::EIO, &error, &inner.path(id)))?;
            let sample = Mutex::new(Some(Arc::new(Sample::new(lent.clone(), index, len))));
            views.push(Self { dataset: dataset.clone().unbind(), id, sample });
        }
        Ok(views)
    }

    fn sample(&self) -> PyResult<Arc<Sample>> {
        let sample = self.sample.lock().unwrap_or_else(PoisonError::into_inner);
        sample.clone().ok_or_else(|| Error::new_err("the view was released"))
    }
}

#[pymethods]
impl View {
    #[getter]
    fn id(&self) -> u32 {
        self.id.0
    }

    #[getter]
    fn dataset(&self, py: Python<'_>) -> Py<Dataset> {
        self.dataset.clone_ref(py)
    }

    #[getter]
    fn is_good(&self) -> bool {
        self.sample().is_ok_and(|sample| sample.is_good())
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let mut slot = self.sample.lock().unwrap_or_else(PoisonError::into_inner);
        let exports = slot.as_ref().map_or(0, |sample| sample.exports());
        if exports > 0 {
            return Err(PyBufferError::new_err(format!("{exports} objects refer to the bytes of the view")));
        }
        let sample = slot.take();
        drop(slot);
        without_gil(py, || drop(sample));
        Ok(())
    }

    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, self.sample()?.bytes()?))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.sample()?.len[0] as usize)
    }

    // The interpreter calls this with a structure of its own.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let sample = slf.get().sample()?;
        let exported = Exported { start: sample.bytes()?.as_ptr(), count: &sample.len, item_size: &ITEM_SIZE, format: c"B" };
        // SAFETY: a structure of the interpreter. The view owns the sample, and keeps it while the count of exports is not 0.
        unsafe { exported.fill(view, flags, slf.clone().into_any()) }?;
        sample.export();
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        if let Ok(sample) = self.sample() {
            sample.end_export();
        }
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Memory of the processor has no streams.
        let _ = stream;
        if dl_device.is_some_and(|device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err("the bytes can be exported to the CPU only"));
        }
        let is_versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::export(py, self.sample()?, is_versioned, copy == Some(true))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_arguments))]
    fn __exit__(&self, py: Python<'_>, _arguments: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        match self.sample() {
            Ok(sample) => format!("<dayfly.View of sample {}, {} bytes>", self.id.0, sample.len[0]),
            Err(_) => format!("<dayfly.View of sample {}, released>", self.id.0),
        }
    }

    #[expect(clippy::type_complexity, reason = "the interpreter asks for a function and its arguments")]
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Py<Dataset>, u32, u32))> {
        let number = self.dataset.get().dataset.id().0;
        Ok((native(py, "_reopen_view")?, (self.dataset.clone_ref(py), number, self.id.0)))
    }
}
