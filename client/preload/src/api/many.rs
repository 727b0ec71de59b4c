//! Many files at once, and the order in which they will be read.

use std::ffi::{c_char, c_int, c_void};

use dayfly_client::{Batch, ClientError, Delivery, OnMissing, Order, View, ViewError};
use dayfly_meta::id::SampleId;
use libc::{size_t, ssize_t};

use super::bytes;
use crate::memory::{Errno, buffer, put};
use crate::process::Fault;

/// `DAYFLY_TELL_MISSING`.
const TELL_MISSING: c_int = 1;
/// `DAYFLY_AS_THEY_COME`.
const AS_THEY_COME: c_int = 2;

/// `struct dayfly_request`.
#[repr(C)]
pub(crate) struct Request {
    path: *const c_char,
    buffer: *mut c_void,
    len: size_t,
    result: i64,
}

/// `struct dayfly_view`.
#[repr(C)]
pub(crate) struct SampleView {
    index: size_t,
    bytes: *const c_void,
    len: u64,
    error: c_int,
}

fn choices(flags: c_int) -> Result<(Delivery, OnMissing), Errno> {
    if flags & !(TELL_MISSING | AS_THEY_COME) != 0 {
        return Err(libc::EINVAL);
    }
    let delivery = if flags & AS_THEY_COME == 0 { Delivery::InOrder } else { Delivery::AsAvailable };
    Ok((delivery, if flags & TELL_MISSING == 0 { OnMissing::Fail } else { OnMissing::Report }))
}

fn errno(error: &ClientError) -> Errno {
    match error {
        ClientError::Path { errno, .. } => *errno,
        _ => libc::EIO,
    }
}

fn paths<'a>(paths: &[*const c_char]) -> Result<Vec<&'a [u8]>, Errno> {
    paths.iter().map(|&path| bytes(path)).collect()
}

/// Reads whole files into the requests' buffers.
pub(super) fn read(view: &View, requests: &mut [Request], flags: c_int) -> Result<ssize_t, Fault> {
    let (_, on_missing) = choices(flags)?;
    let paths = requests.iter().map(|request| bytes(request.path)).collect::<Result<Vec<_>, _>>()?;
    let mut buffers =
        requests.iter().map(|request| buffer(request.buffer, request.len)).collect::<Result<Vec<&mut [u8]>, _>>()?;
    let sizes = view.read_many_into(&paths, &mut buffers, on_missing).map_err(ViewError::Client)?;
    let mut failed = 0;
    for (request, size) in requests.iter_mut().zip(sizes) {
        failed += ssize_t::from(size.is_err());
        request.result = size.map_or_else(|error| -i64::from(errno(&error)), |size| size as i64);
    }
    Ok(failed)
}

pub(super) fn open(view: &'static View, names: &[*const c_char], flags: c_int) -> Result<*mut Batch<'static>, Fault> {
    let (delivery, on_missing) = choices(flags)?;
    let batch = view.read_many(&paths(names)?, delivery, on_missing).map_err(ViewError::Client)?;
    Ok(Box::into_raw(Box::new(batch)))
}

pub(super) fn open_ids(view: &'static View, path: &[u8], ids: &[u32], flags: c_int) -> Result<*mut Batch<'static>, Fault> {
    let (delivery, on_missing) = choices(flags)?;
    let dataset = view.dataset_of(path)?;
    let samples: Vec<SampleId> = ids.iter().copied().map(SampleId).collect();
    let batch = view.session().read_many(&dataset, &samples, delivery, on_missing).map_err(ViewError::Client)?;
    Ok(Box::into_raw(Box::new(batch)))
}

pub(super) fn next(batch: &mut Batch<'static>, out: *mut SampleView) -> Result<c_int, Fault> {
    match batch.next() {
        None => Ok(0),
        Some(delivered) => {
            let delivered = delivered.map_err(ViewError::Client)?;
            Ok(put(out, sample_view(delivered.index, delivered.bytes)).map(|()| 1)?)
        }
    }
}

pub(super) fn get(batch: &Batch<'static>, index: size_t, out: *mut SampleView) -> Result<c_int, Fault> {
    let bytes = batch.get(index).ok_or(libc::ENOENT)?;
    Ok(put(out, sample_view(index, Ok(bytes))).map(|()| 0)?)
}

fn sample_view(index: usize, bytes: Result<&[u8], &ClientError>) -> SampleView {
    match bytes {
        Ok(bytes) => SampleView { index, bytes: bytes.as_ptr().cast(), len: bytes.len() as u64, error: 0 },
        Err(error) => SampleView { index, bytes: std::ptr::null(), len: 0, error: errno(error) },
    }
}

/// Has files read ahead in this order. They are of one dataset.
pub(super) fn order(view: &'static View, names: &[*const c_char]) -> Result<*mut Order<'static>, Fault> {
    let Some(&first) = names.first() else { return Err(Fault::Errno(libc::EINVAL)) };
    let dataset = view.dataset_of(bytes(first)?)?;
    let mut samples = Vec::with_capacity(names.len());
    for &name in names {
        let file = view.open(bytes(name)?)?;
        if file.dataset().id() != dataset.id() {
            return Err(Fault::Errno(libc::EXDEV));
        }
        samples.push(file.sample());
    }
    Ok(Box::into_raw(Box::new(view.session().submit(&dataset, samples)?)))
}
