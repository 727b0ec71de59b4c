//! Datasets, whose samples are named by numbers.

mod facts;
mod reading;

use std::sync::{Arc, OnceLock};

use dayfly_client::{Samples, View as ClientView};
use dayfly_meta::id::{NodeId, SampleId};
use dayfly_meta::path::join;
use pyo3::exceptions::PyFileNotFoundError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::array::Array;
use crate::failure;
use crate::ids;
use crate::order::Order;
use crate::path::{from_python, to_python};
use crate::session::{Session, native, reattach};
use crate::view::View;
use crate::wait::without_gil;

/// The owner of a sample that no node owns.
pub(crate) const NO_OWNER: u16 = u16::MAX;

/// A dataset of a session.
#[pyclass(frozen, module = "dayfly", weakref)]
pub(crate) struct Dataset {
    session: Py<Session>,
    pub(crate) view: Arc<ClientView>,
    pub(crate) dataset: Arc<dayfly_client::Dataset>,
    /// The dataset's path, as programs see it.
    root: Vec<u8>,
    /// Needed for orders only.
    samples: OnceLock<Samples>,
    fingerprint: OnceLock<String>,
}

/// Opens the dataset of a pickled object.
#[pyfunction]
#[pyo3(name = "_reopen_dataset")]
pub(crate) fn reopen_dataset(py: Python<'_>, session: &str, node: u16, root: &Bound<'_, PyAny>) -> PyResult<Dataset> {
    Dataset::open(Bound::new(py, reattach(py, session, node)?)?, &from_python(root)?)
}

impl Dataset {
    pub(crate) fn open(session: Bound<'_, Session>, path: &[u8]) -> PyResult<Self> {
        let py = session.py();
        let view = session.get().view.clone();
        let found = without_gil(py, || match view.dataset_of(path) {
            Err(dayfly_client::ViewError::IsADirectory) => Ok(None),
            found => found.map(Some),
        });
        let Some(dataset) = found.map_err(|error| failure::at(py, path, error))? else {
            return Err(failure::without_dataset(path));
        };
        let root = join(view.session().prefix(), dataset.target());
        Ok(Self { session: session.unbind(), view, dataset, root, samples: OnceLock::new(), fingerprint: OnceLock::new() })
    }

    fn samples(&self) -> &Samples {
        self.samples.get_or_init(|| Samples::of(self.dataset.catalog()))
    }

    pub(crate) fn count(&self) -> u32 {
        self.dataset.catalog().header().samples
    }

    /// Returns the path of a sample, as programs see it.
    pub(crate) fn path(&self, sample: SampleId) -> Vec<u8> {
        let catalog = self.dataset.catalog();
        catalog.entry_of(sample).map_or_else(|| self.root.clone(), |entry| join(&self.root, &catalog.path(&entry)))
    }

    /// Returns the samples that a caller has named, or all.
    fn chosen(&self, ids: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<SampleId>> {
        match ids {
            Some(ids) => ids::from_python(ids, self.count()),
            None => Ok((0..self.count()).map(SampleId).collect()),
        }
    }
}

#[pymethods]
impl Dataset {
    #[getter]
    fn session(&self, py: Python<'_>) -> Py<Session> {
        self.session.clone_ref(py)
    }

    #[getter]
    fn root<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        to_python(py, &self.root)
    }

    #[getter]
    fn id(&self) -> u32 {
        self.dataset.id().0
    }

    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> String {
        without_gil(py, || self.fingerprint.get_or_init(|| facts::fingerprint(self.dataset.catalog())).clone())
    }

    #[getter]
    fn total_size(&self) -> u64 {
        self.dataset.catalog().header().bytes
    }

    #[getter]
    fn is_gone(&self) -> bool {
        self.view.session().is_dataset_gone(&self.dataset)
    }

    fn __len__(&self) -> usize {
        self.count() as usize
    }

    fn id_of(&self, py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<u32> {
        let given = from_python(path)?;
        let full = if given.starts_with(b"/") { given.clone() } else { join(&self.root, &given) };
        // Most paths are written as the catalog has them. Others lead through symlinks, or have `.` or `..` in them.
        let within = full.strip_prefix(&*self.root).and_then(|rest| rest.strip_prefix(b"/"));
        let entry = within.and_then(|within| self.dataset.catalog().find(within));
        if let Some(sample) = entry.and_then(|entry| entry.sample()) {
            return Ok(sample.0);
        }
        let file = without_gil(py, || self.view.open(&full)).map_err(|error| failure::at(py, &given, error))?;
        if file.dataset().id() != self.dataset.id() {
            let text = "it is in another dataset";
            return Err(PyFileNotFoundError::new_err((libc::ENOENT, text, to_python(py, &given)?.unbind())));
        }
        Ok(file.sample().0)
    }

    fn path_of<'py>(&self, py: Python<'py>, id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
        to_python(py, &self.path(ids::one(id, self.count())?))
    }

    #[pyo3(signature = (ids=None))]
    fn paths<'py>(&self, py: Python<'py>, ids: Option<&Bound<'py, PyAny>>) -> PyResult<Vec<Bound<'py, PyString>>> {
        self.chosen(ids)?.into_iter().map(|sample| to_python(py, &self.path(sample))).collect()
    }

    #[pyo3(signature = (ids=None))]
    fn names<'py>(&self, py: Python<'py>, ids: Option<&Bound<'py, PyAny>>) -> PyResult<Vec<Bound<'py, PyString>>> {
        let catalog = self.dataset.catalog();
        let name = |sample| catalog.entry_of(sample).map_or(&b""[..], |entry| entry.name);
        self.chosen(ids)?.into_iter().map(|sample| to_python(py, name(sample))).collect()
    }

    #[pyo3(signature = (ids=None))]
    fn sizes(&self, py: Python<'_>, ids: Option<&Bound<'_, PyAny>>) -> PyResult<Array> {
        let samples = self.chosen(ids)?;
        Ok(without_gil(py, || facts::sizes(self.dataset.catalog(), &samples)).into())
    }

    fn owners(&self, py: Python<'_>) -> Array {
        without_gil(py, || facts::owners(self.dataset.catalog(), self.view.session().nodes())).into()
    }

    #[pyo3(signature = (ids=None))]
    fn is_here<'py>(&self, py: Python<'py>, ids: Option<&Bound<'py, PyAny>>) -> PyResult<Bound<'py, PyBytes>> {
        let samples = self.chosen(ids)?;
        let flags = without_gil(py, || facts::is_here(&self.dataset, &samples));
        Ok(PyBytes::new(py, &flags))
    }

    fn epoch_ids(&self, py: Python<'_>, seed: u64, epoch: u64) -> Array {
        without_gil(py, || self.samples().epoch(seed, epoch).map(|sample| sample.0).collect::<Vec<u32>>()).into()
    }

    #[pyo3(signature = (node=None))]
    fn local_ids(&self, py: Python<'_>, node: Option<u16>) -> Array {
        let session = self.view.session();
        let node = node.map_or(session.node(), NodeId);
        let local = || self.samples().local(&self.dataset, node, session.nodes());
        without_gil(py, || local().into_iter().map(|sample| sample.0).collect::<Vec<u32>>()).into()
    }

    fn directories<'py>(&self, py: Python<'py>) -> PyResult<(Array, Vec<Bound<'py, PyString>>)> {
        let (indices, names) = without_gil(py, || facts::directories(self.dataset.catalog()));
        let names = names.iter().map(|name| to_python(py, name)).collect::<PyResult<_>>()?;
        Ok((indices.into(), names))
    }

    #[pyo3(signature = (ids, into=None))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        ids: &Bound<'py, PyAny>,
        into: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Array)> {
        reading::read_into(self, py, &ids::from_python(ids, self.count())?, into)
    }

    fn read_each<'py>(&self, py: Python<'py>, ids: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        reading::read_each(self, py, &ids::from_python(ids, self.count())?)
    }

    fn read_one<'py>(&self, py: Python<'py>, id: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        reading::read_one(self, py, ids::one(id, self.count())?)
    }

    fn views(slf: Bound<'_, Self>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<View>> {
        let samples = ids::from_python(ids, slf.get().count())?;
        View::open(&slf, &samples)
    }

    fn order(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Order> {
        let samples = ids::from_python(ids, self.count())?;
        let len = samples.len();
        let order = without_gil(py, || self.view.session().submit(&self.dataset, samples)).map_err(failure::general)?;
        Ok(Order::new(order, len))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<dayfly.Dataset {} with {} samples>", self.root(py)?.repr()?, self.count()))
    }

    #[expect(clippy::type_complexity, reason = "the interpreter asks for a function and its arguments")]
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String, u16, Bound<'py, PyString>))> {
        let session = self.view.session();
        Ok((native(py, "_reopen_dataset")?, (session.id().to_string(), session.node().0, self.root(py)?)))
    }
}
