//! Orders that a process has announced to its node's server.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::wait::without_gil;

/// An order, which lasts until `end` or as long as the object.
#[pyclass(frozen, module = "dayfly")]
pub(crate) struct Order {
    /// `None` if the order has ended.
    order: Mutex<Option<dayfly_client::Order>>,
    len: usize,
}

impl Order {
    pub(crate) fn new(order: dayfly_client::Order, len: usize) -> Self {
        Self { order: Mutex::new(Some(order)), len }
    }
}

#[pymethods]
impl Order {
    fn end(&self, py: Python<'_>) {
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner).take();
        without_gil(py, || drop(order));
    }

    fn __len__(&self) -> usize {
        self.len
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_arguments))]
    fn __exit__(&self, py: Python<'_>, _arguments: &Bound<'_, pyo3::types::PyTuple>) {
        self.end(py);
    }
}
