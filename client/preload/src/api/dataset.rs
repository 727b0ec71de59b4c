//! Datasets whose files a program names by numbers. A number costs 4 bytes, while a path has to be resolved for each use.

use std::ffi::{c_char, c_int};
use std::sync::{Arc, OnceLock};

use dayfly_client::{Dataset, OnMissing, Order, Samples, View, ViewError};
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::path::join;
use libc::{size_t, ssize_t};

use super::many::{choices, errno};
use super::message::{self, Failure, at};
use crate::memory::{Errno, FromC};

/// `dayfly_dataset`.
pub(crate) struct DatasetHandle {
    view: &'static View,
    dataset: Arc<Dataset>,
    /// Needed for paths and orders only.
    samples: OnceLock<Samples>,
}

/// `struct dayfly_sample`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SampleFacts {
    size: u64,
    is_here: c_int,
}

impl DatasetHandle {
    pub(super) fn open(view: &'static View, path: &[u8]) -> Result<Self, Failure> {
        let dataset = view.dataset_of(path).map_err(at(path))?;
        Ok(Self { view, dataset, samples: OnceLock::new() })
    }

    pub(super) fn count(&self) -> u32 {
        self.dataset.catalog().header().samples
    }

    fn samples(&self) -> &Samples {
        self.samples.get_or_init(|| Samples::of(self.dataset.catalog()))
    }

    /// Stores the path of a file with a NUL at its end. Returns its length without the NUL.
    pub(super) fn path(&self, id: u32, out: FromC<*mut c_char>, len: size_t) -> Result<ssize_t, Failure> {
        let catalog = self.dataset.catalog();
        let entry = self.samples().entry(SampleId(id)).and_then(|entry| catalog.entry(entry)).ok_or_else(|| self.unknown(id))?;
        let root = join(self.view.session().prefix(), self.dataset.target());
        let mut path = join(&root, &catalog.path(&entry));
        path.push(0);
        if len < path.len() {
            return Err(Failure::new(libc::ERANGE, &format!("the path needs room for {} bytes", path.len())));
        }
        exactly(out, path.len())?.copy_from_slice(&path.iter().map(|&byte| byte as c_char).collect::<Vec<c_char>>());
        Ok(path.len() as ssize_t - 1)
    }

    /// Stores what is known about files.
    pub(super) fn look(&self, ids: &[u32], out: &mut [SampleFacts]) -> Result<(), Failure> {
        for (&id, out) in ids.iter().zip(out) {
            let (size, blocks) = self.dataset.catalog().sample(SampleId(id)).ok_or_else(|| self.unknown(id))?;
            let is_here = (blocks.start..blocks.end).all(|block| self.dataset.is_here(BlockId(block)));
            *out = SampleFacts { size, is_here: is_here.into() };
        }
        Ok(())
    }

    /// Stores the order of an epoch.
    pub(super) fn epoch(&self, seed: u64, epoch: u64, out: &mut [u32]) {
        out.iter_mut().zip(self.samples().epoch(seed, epoch)).for_each(|(out, sample)| *out = sample.0);
    }

    /// Stores the files that this node owns. Returns their number.
    pub(super) fn local(&self, out: &mut [u32]) -> ssize_t {
        let session = self.view.session();
        let order = self.samples().local(&self.dataset, session.node(), session.nodes());
        out.iter_mut().zip(&order).for_each(|(out, sample)| *out = sample.0);
        order.len() as ssize_t
    }

    pub(super) fn order(&self, ids: &[u32]) -> Result<Order, Failure> {
        self.check(ids)?;
        Ok(self.view.session().submit(&self.dataset, ids.iter().copied().map(SampleId))?)
    }

    /// Reads whole files into one buffer, one after another. Returns how many could not be read. `errors` has an element for each
    /// file, or none.
    pub(super) fn read(
        &self,
        ids: &[u32],
        buffer: FromC<*mut std::ffi::c_void>,
        len: size_t,
        offsets: &mut [u64],
        errors: &mut [c_int],
        flags: c_int,
    ) -> Result<ssize_t, Failure> {
        let (_, on_missing) = choices(flags)?;
        if on_missing == OnMissing::Fail {
            self.check(ids)?;
        }
        let samples: Vec<SampleId> = ids.iter().copied().map(SampleId).collect();
        let mut end = 0_u64;
        let mut lens = Vec::with_capacity(ids.len());
        for (at, &sample) in samples.iter().enumerate() {
            // A file that the dataset does not have is reported below like any other that cannot be read.
            let size = self.dataset.catalog().sample(sample).map_or(0, |(size, _)| size);
            if let Some(offset) = offsets.get_mut(at) {
                *offset = end;
            }
            lens.push(size as usize);
            end = end.checked_add(size).ok_or(libc::EOVERFLOW)?;
        }
        if let Some(offset) = offsets.get_mut(ids.len()) {
            *offset = end;
        }
        if end > len as u64 {
            return Err(Failure::new(libc::ERANGE, &format!("the files have {end} bytes, but the buffer has {len}")));
        }
        let mut rest = buffer.buffer(end as usize)?;
        let mut targets = Vec::with_capacity(lens.len());
        for len in lens {
            let (target, after) = rest.split_at_mut(len);
            targets.push(target);
            rest = after;
        }
        let sizes =
            self.view.session().read_many_into(&self.dataset, &samples, &mut targets, on_missing).map_err(ViewError::Client)?;
        let mut failed = 0;
        for (at, (&id, size)) in ids.iter().zip(sizes).enumerate() {
            let error = match size {
                _ if id >= self.count() => self.unknown(id).tell(),
                Ok(_) => 0,
                Err(error) => {
                    message::set(&error.to_string());
                    errno(&error)
                }
            };
            failed += ssize_t::from(error != 0);
            if let Some(out) = errors.get_mut(at) {
                *out = error;
            }
        }
        Ok(failed)
    }

    fn check(&self, ids: &[u32]) -> Result<(), Failure> {
        let unknown = ids.iter().find(|&&id| id >= self.count());
        unknown.map_or(Ok(()), |&id| Err(self.unknown(id)))
    }

    fn unknown(&self, id: u32) -> Failure {
        Failure::new(libc::ENOENT, &format!("the dataset has no file {id}, only 0 to {}", self.count().saturating_sub(1)))
    }
}

/// Borrows an array for results, which must be there.
pub(super) fn exactly<'a, T>(out: FromC<'a, *mut T>, count: usize) -> Result<&'a mut [T], Errno> {
    let out = out.slice_mut(count)?;
    if out.len() == count { Ok(out) } else { Err(libc::EFAULT) }
}

/// Borrows an array of arguments, which must be there.
pub(super) fn given<'a, T>(values: FromC<'a, *const T>, count: usize) -> Result<&'a [T], Errno> {
    let values = values.slice(count)?;
    if values.len() == count { Ok(values) } else { Err(libc::EFAULT) }
}
