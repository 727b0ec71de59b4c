//! Attachments to sessions.

use std::env;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use dayfly_client::locate::{self, Environment, SessionFolder};
use dayfly_client::{ClientError, OnMissing, View, ViewError, fault};
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::path::join;
use dayfly_meta::wire::status::SOURCES;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::dataset::Dataset;
use crate::failure;
use crate::order::Order;
use crate::path::{from_python, list_from_python, to_python};
use crate::stat::{DirEntry, Stat};
use crate::wait::without_gil;
use crate::{fork, memory};

/// Names for where bytes were when they were read, in the order of [`Source`](dayfly_meta::wire::status::Source).
const PLACES: [&str; SOURCES] = ["drive", "cached", "memory", "server"];

/// An attachment of this process to a node's server.
#[pyclass(frozen, module = "dayfly", weakref)]
pub(crate) struct Session {
    pub(crate) view: Arc<View>,
}

/// Attaches this process to a session on this machine.
#[pyfunction]
#[pyo3(signature = (session=None, node=None))]
pub(crate) fn attach(py: Python<'_>, session: Option<&Bound<'_, PyAny>>, node: Option<u16>) -> PyResult<Session> {
    let name = session.map(from_python).transpose()?;
    // The environment is read with the GIL, because Python code may change it.
    let folder = folder(name.as_deref()).map_err(failure::general)?;
    let node = match node {
        Some(node) => NodeId(node),
        None => default_node(&folder, name.is_some()).map_err(failure::general)?,
    };
    open(py, &folder, node)
}

/// Attaches the process that unpickles a session: to the same node, or to a node of the same session if that one is not here.
#[pyfunction]
#[pyo3(name = "_reattach")]
pub(crate) fn reattach(py: Python<'_>, session: &str, node: u16) -> PyResult<Session> {
    if let Some(view) = session.parse().ok().and_then(|session| fork::known(session, NodeId(node))) {
        return Ok(Session { view });
    }
    let folder = folder(Some(session.as_bytes())).map_err(failure::general)?;
    let node = Some(NodeId(node)).filter(|node| folder.live_nodes().contains(node));
    let node = node.map_or_else(|| folder.my_node(), Ok).map_err(failure::general)?;
    open(py, &folder, node)
}

fn open(py: Python<'_>, folder: &SessionFolder, node: NodeId) -> PyResult<Session> {
    if let Some(view) = fork::known(folder.session, node) {
        return Ok(Session { view });
    }
    // Without the handler, the client reads every sample with `pread`, and views are copies.
    let _ = fault::install(libc::sigaction);
    let session = without_gil(py, || dayfly_client::Session::attach_to(folder, node)).map_err(failure::general)?;
    Ok(Session { view: fork::record(View::new(session)) })
}

/// Returns the folder of the session that was named by its id or its folder; else of the one that the environment names; else of
/// the only session on this machine.
fn folder(name: Option<&[u8]>) -> Result<SessionFolder, ClientError> {
    let variable = |variable: &str| env::var_os(variable);
    match name {
        None if env::var_os(locate::SESSION_VARIABLE).is_some_and(|name| !name.is_empty()) => {
            Environment::read(variable).folder()
        }
        None => locate::find(None),
        Some(path) if path.contains(&b'/') => {
            let folder = PathBuf::from(std::ffi::OsStr::from_bytes(path));
            let last = folder.file_name().and_then(|last| last.to_str()).unwrap_or_default();
            let session: SessionId = last.parse().map_err(|_| unknown(&folder.to_string_lossy()))?;
            locate::check_private(&folder)?;
            Ok(SessionFolder { session, folder })
        }
        Some(name) => {
            let name = String::from_utf8_lossy(name).into_owned();
            let named = |variable_name: &str| {
                if variable_name == locate::SESSION_VARIABLE { Some(name.clone().into()) } else { variable(variable_name) }
            };
            Environment::read(named).folder().map_err(|error| match error {
                ClientError::Unknown { .. } => unknown(&name),
                error => error,
            })
        }
    }
}

fn unknown(name: &str) -> ClientError {
    let running = locate::running().unwrap_or_default();
    ClientError::Refused(match running.is_empty() {
        true => format!("you have no session '{name}' on this machine, and no other either; start one with 'dayfly up'"),
        false => {
            let ids: Vec<String> = running.iter().map(|location| location.session.to_string()).collect();
            format!("you have no session '{name}' on this machine; there are {}", ids.join(", "))
        }
    })
}

/// Returns the node of this process. `DAYFLY_NODE` belongs to the session that the environment names, so it counts for another one
/// only if that has such a node here.
fn default_node(folder: &SessionFolder, is_named: bool) -> Result<NodeId, ClientError> {
    match folder.my_node() {
        Err(ClientError::NoNode { .. }) if is_named => folder.live_nodes().first().copied().ok_or(ClientError::NoSession),
        node => node,
    }
}

impl Session {
    pub(crate) fn root(&self) -> &[u8] {
        self.view.session().prefix()
    }
}

#[pymethods]
impl Session {
    #[getter]
    fn id(&self) -> String {
        self.view.session().id().to_string()
    }

    #[getter]
    fn node(&self) -> u16 {
        self.view.session().node().0
    }

    #[getter]
    fn nodes(&self) -> u16 {
        self.view.session().nodes()
    }

    #[getter]
    fn prefix<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        to_python(py, self.root())
    }

    #[getter]
    fn is_gone(&self) -> bool {
        self.view.session().is_gone()
    }

    #[pyo3(signature = (path, *, follow_symlinks=true))]
    fn stat(&self, py: Python<'_>, path: &Bound<'_, PyAny>, follow_symlinks: bool) -> PyResult<Stat> {
        let path = from_python(path)?;
        let stat = without_gil(py, || if follow_symlinks { self.view.stat(&path) } else { self.view.lstat(&path) });
        Ok(Stat::new(stat.map_err(|error| failure::at(py, &path, error))?, self.view.session().id()))
    }

    fn lstat(&self, py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Stat> {
        self.stat(py, path, false)
    }

    fn readlink<'py>(&self, py: Python<'py>, path: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyString>> {
        let path = from_python(path)?;
        let target = without_gil(py, || self.view.read_link(&path)).map_err(|error| failure::at(py, &path, error))?;
        to_python(py, &target)
    }

    fn list(&self, py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Vec<DirEntry>> {
        let path = from_python(path)?;
        let listed = without_gil(py, || {
            let directory = self.view.open_directory(&path)?;
            Ok(directory.entries(0).map(|entry| DirEntry::new(&path, entry.name, entry.kind)).collect())
        });
        listed.map_err(|error| failure::at(py, &path, error))
    }

    fn read<'py>(&self, py: Python<'py>, path: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        self.read_range(py, path, 0, u64::MAX)
    }

    fn read_range<'py>(
        &self,
        py: Python<'py>,
        path: &Bound<'py, PyAny>,
        start: u64,
        length: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let path = from_python(path)?;
        let failed = |error| failure::at(py, &path, error);
        let file = without_gil(py, || self.view.open(&path)).map_err(failed)?;
        let len = length.min(file.stat().size.saturating_sub(start)) as usize;
        let (bytes, mut target) = memory::new_bytes(py, len)?;
        without_gil(py, || self.view.read_at(&file, start, target.bytes())).map_err(failed)?;
        Ok(bytes)
    }

    fn read_many<'py>(&self, py: Python<'py>, paths: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let paths = list_from_python(paths)?;
        let borrowed: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
        let sizes = without_gil(py, || {
            let size = |path: &&[u8]| self.view.open(path).map(|file| file.stat().size as usize);
            borrowed.iter().map(|path| size(path).map_err(|error| (path.to_vec(), error))).collect::<Result<Vec<_>, _>>()
        });
        let sizes: Vec<usize> = sizes.map_err(|(path, error)| failure::at(py, &path, error))?;
        let (objects, mut targets) = memory::new_bytes_each(py, &sizes)?;
        let read = without_gil(py, || {
            let mut buffers: Vec<&mut [u8]> = targets.iter_mut().map(memory::Target::bytes).collect();
            self.view.read_many_into(&borrowed, &mut buffers, OnMissing::Report)
        });
        for (path, size) in paths.iter().zip(read.map_err(failure::general)?) {
            size.map_err(|error| failure::at(py, path, ViewError::Client(error)))?;
        }
        Ok(objects)
    }

    #[getter]
    fn reads<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let named = PyDict::new(py);
        for (name, reads) in PLACES.iter().zip(self.view.session().reads()) {
            named.set_item(name, (reads.count, reads.bytes))?;
        }
        Ok(named)
    }

    fn datasets<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyString>>> {
        let roots = without_gil(py, || -> Result<Vec<Vec<u8>>, ClientError> {
            let datasets = self.view.session().datasets()?;
            Ok(datasets.iter().map(|dataset| join(self.root(), dataset.target())).collect())
        });
        let mut roots = roots.map_err(failure::general)?;
        roots.sort();
        roots.iter().map(|root| to_python(py, root)).collect()
    }

    fn dataset(slf: Bound<'_, Self>, path: &Bound<'_, PyAny>) -> PyResult<Dataset> {
        Dataset::open(slf, &from_python(path)?)
    }

    fn order_paths(&self, py: Python<'_>, paths: &Bound<'_, PyAny>) -> PyResult<Order> {
        let paths = list_from_python(paths)?;
        let Some(first) = paths.first() else { return Err(PyValueError::new_err("samples must name at least one file")) };
        let failed = |path: &[u8], error| failure::at(py, path, error);
        let dataset = without_gil(py, || self.view.dataset_of(first)).map_err(|error| failed(first, error))?;
        let found = without_gil(py, || {
            let mut samples = Vec::with_capacity(paths.len());
            for path in &paths {
                let file = self.view.open(path).map_err(|error| (path.clone(), Some(error)))?;
                if file.dataset().id() != dataset.id() {
                    return Err((path.clone(), None));
                }
                samples.push(file.sample());
            }
            Ok(samples)
        });
        let samples = found.map_err(|(path, error)| match error {
            Some(error) => failed(&path, error),
            None => failure::os_error(py, libc::EXDEV, "it is in another dataset than the first file of the order", &path),
        })?;
        let len = samples.len();
        let order = without_gil(py, || self.view.session().submit(&dataset, samples)).map_err(failure::general)?;
        Ok(Order::new(order, len))
    }

    fn __repr__(&self) -> String {
        format!("<dayfly.Session '{}' node {} of {}>", self.id(), self.node(), self.nodes())
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Self>().is_ok_and(|other| Arc::ptr_eq(&self.view, &other.get().view))
    }

    fn __hash__(&self) -> u64 {
        Arc::as_ptr(&self.view) as u64
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String, u16))> {
        Ok((native(py, "_reattach")?, (self.id(), self.node())))
    }
}

/// Returns a function of this module, for `__reduce__`.
pub(crate) fn native<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("dayfly._dayfly")?.getattr(name)
}
