//! Samples that are lent in place.
//!
//! All samples of one call belong to one batch, which keeps its connection and its leases until nothing refers to the last of them. A
//! batch that needs no connection gives it back at once. Only a few batches of a process may keep theirs; the samples of further
//! batches are copied, as are samples beyond the process's share of the arena.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dayfly_client::{Batch, ClientError, Dataset, Delivery, OnMissing, View};
use dayfly_meta::id::SampleId;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::failure::Error;

/// Refers to a session from batches, which may outlive the Python object.
struct SharedSession(Arc<View>);

impl Deref for SharedSession {
    type Target = dayfly_client::Session;

    fn deref(&self) -> &dayfly_client::Session {
        self.0.session()
    }
}

/// How many batches of a process may keep their connections for their views. Each connection costs the server a descriptor, and
/// each batch keeps at least one chunk of the arena.
const KEPT_BATCHES_MAX: usize = 32;
static KEPT_BATCHES: AtomicUsize = AtomicUsize::new(0);

/// The samples of one call, which stay in place as long as this value lives.
pub(crate) struct Lent {
    batch: Batch<SharedSession>,
    /// Whether the batch keeps its connection and is counted in [`KEPT_BATCHES`].
    is_counted: bool,
}

impl Lent {
    /// Waits for samples, and keeps them in place.
    pub(crate) fn wait_for(view: Arc<View>, dataset: &Arc<Dataset>, samples: &[SampleId]) -> Result<Self, ClientError> {
        let mut batch = Batch::of(SharedSession(view), dataset, samples, Delivery::InOrder, OnMissing::Report)?;
        batch.wait()?;
        let mut is_counted = batch.settle(false)?;
        if is_counted && KEPT_BATCHES.fetch_add(1, Ordering::Relaxed) >= KEPT_BATCHES_MAX {
            KEPT_BATCHES.fetch_sub(1, Ordering::Relaxed);
            batch.settle(true)?;
            is_counted = false;
        }
        Ok(Self { batch, is_counted })
    }

    /// Returns the length of a sample, or the reason why it could not be read.
    pub(crate) fn len(&self, index: usize) -> Result<usize, String> {
        match self.batch.delivered(index) {
            Some(Ok(bytes)) => Ok(bytes.len()),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("it was not delivered".to_owned()),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.is_counted {
            KEPT_BATCHES.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// One sample of a [`Lent`], as long as some object of Python refers to its bytes.
pub(crate) struct Sample {
    lent: Arc<Lent>,
    index: usize,
    pub(crate) len: [ffi::Py_ssize_t; 1],
    /// Number of memory views, arrays and tensors that refer to the bytes.
    exports: AtomicUsize,
}

impl Sample {
    pub(crate) fn new(lent: Arc<Lent>, index: usize, len: usize) -> Self {
        Self { lent, index, len: [len as ffi::Py_ssize_t], exports: AtomicUsize::new(0) }
    }

    /// Returns whether the bytes are valid, as far as they have been looked at.
    pub(crate) fn is_good(&self) -> bool {
        self.lent.batch.is_good()
    }

    /// Returns how many objects refer to the bytes.
    pub(crate) fn exports(&self) -> usize {
        self.exports.load(Ordering::Acquire)
    }

    /// Returns the bytes. They may change if their lease is revoked later; then [`Self::is_good`] says so.
    ///
    /// # Errors
    ///
    /// `dayfly.Error` if the lease has been revoked already.
    pub(crate) fn bytes(&self) -> PyResult<&[u8]> {
        let bytes = self.lent.batch.get(self.index).filter(|bytes| bytes.len() as ffi::Py_ssize_t == self.len[0]);
        bytes.ok_or_else(|| Error::new_err("the bytes of the view are no longer in place; read the sample again"))
    }

    /// Counts another object that refers to the bytes.
    pub(crate) fn export(&self) {
        self.exports.fetch_add(1, Ordering::AcqRel);
    }

    /// Ends what [`Self::export`] began.
    pub(crate) fn end_export(&self) {
        self.exports.fetch_sub(1, Ordering::AcqRel);
    }
}
