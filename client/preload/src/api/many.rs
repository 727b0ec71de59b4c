//! Reading many files with one call, and announcing the order in which files will be read.

use std::ffi::{c_char, c_int, c_void};

use dayfly_client::{Batch, ClientError, Delivery, OnMissing, Order, View, ViewError};
use dayfly_meta::id::SampleId;
use libc::{size_t, ssize_t};

use super::bytes;
use crate::fault::Fault;
use crate::memory::{Errno, FromC};

/// `DAYFLY_REPORT_MISSING`.
const REPORT_MISSING: c_int = 1;
/// `DAYFLY_AS_AVAILABLE`.
const AS_AVAILABLE: c_int = 2;

/// A path in a program's array.
type Path<'a> = FromC<'a, *const c_char>;

/// `struct dayfly_request`.
#[repr(C)]
pub(crate) struct FileRequest<'a> {
    path: Path<'a>,
    buffer: FromC<'a, *mut c_void>,
    /// Room in the buffer, in bytes.
    len: size_t,
    /// The file's size in bytes, or minus an errno.
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
    if flags & !(REPORT_MISSING | AS_AVAILABLE) != 0 {
        return Err(libc::EINVAL);
    }
    let delivery = if flags & AS_AVAILABLE == 0 { Delivery::InOrder } else { Delivery::AsAvailable };
    Ok((delivery, if flags & REPORT_MISSING == 0 { OnMissing::Fail } else { OnMissing::Report }))
}

fn errno(error: &ClientError) -> Errno {
    match error {
        ClientError::Path { errno, .. } => *errno,
        ClientError::Buffer => libc::EFAULT,
        _ => libc::EIO,
    }
}

fn paths<'a>(paths: &[Path<'a>]) -> Result<Vec<&'a [u8]>, Errno> {
    paths.iter().map(|&path| bytes(path)).collect()
}

/// Reads whole files into the requests' buffers. Returns the number of files that failed.
pub(super) fn read(view: &View, requests: &mut [FileRequest], flags: c_int) -> Result<ssize_t, Fault> {
    let (_, on_missing) = choices(flags)?;
    let paths = requests.iter().map(|request| bytes(request.path)).collect::<Result<Vec<_>, _>>()?;
    let mut buffers = requests.iter().map(|request| request.buffer.buffer(request.len)).collect::<Result<Vec<&mut [u8]>, _>>()?;
    let sizes = view.read_many_into(&paths, &mut buffers, on_missing).map_err(ViewError::Client)?;
    let mut failed = 0;
    for (request, size) in requests.iter_mut().zip(sizes) {
        failed += ssize_t::from(size.is_err());
        request.result = size.map_or_else(|error| -i64::from(errno(&error)), |size| size as i64);
    }
    Ok(failed)
}

/// Begins to read files by their paths.
pub(super) fn open(view: &'static View, names: &[Path], flags: c_int) -> Result<*mut Batch<'static>, Fault> {
    let (delivery, on_missing) = choices(flags)?;
    let batch = view.read_many(&paths(names)?, delivery, on_missing).map_err(ViewError::Client)?;
    Ok(super::new_handle(batch))
}

/// Begins to read files by their numbers in the dataset that contains `path`.
pub(super) fn open_ids(view: &'static View, path: &[u8], ids: &[u32], flags: c_int) -> Result<*mut Batch<'static>, Fault> {
    let (delivery, on_missing) = choices(flags)?;
    let dataset = view.dataset_of(path)?;
    let samples: Vec<SampleId> = ids.iter().copied().map(SampleId).collect();
    let batch = view.session().read_many(&dataset, &samples, delivery, on_missing).map_err(ViewError::Client)?;
    Ok(super::new_handle(batch))
}

/// Stores the view of a batch's next file. Returns 1, or 0 at the end.
pub(super) fn next(batch: &mut Batch<'static>, out: FromC<*mut SampleView>) -> Result<c_int, Fault> {
    match batch.next() {
        None => Ok(0),
        Some(delivered) => {
            let delivered = delivered.map_err(ViewError::Client)?;
            Ok(out.put(sample_view(delivered.index, delivered.bytes)).map(|()| 1)?)
        }
    }
}

/// Stores the view of one file of a batch. The program has already waited for the whole batch.
pub(super) fn get(batch: &Batch<'static>, index: size_t, out: FromC<*mut SampleView>) -> Result<c_int, Fault> {
    let bytes = batch.get(index).ok_or(libc::ENOENT)?;
    Ok(out.put(sample_view(index, Ok(bytes))).map(|()| 0)?)
}

fn sample_view(index: usize, bytes: Result<&[u8], &ClientError>) -> SampleView {
    match bytes {
        Ok(bytes) => SampleView { index, bytes: bytes.as_ptr().cast(), len: bytes.len() as u64, error: 0 },
        Err(error) => SampleView { index, bytes: std::ptr::null(), len: 0, error: errno(error) },
    }
}

/// Announces that files of one dataset will be read in this order.
///
/// # Errors
///
/// EINVAL if there are no files, EXDEV if the files belong to several datasets.
pub(super) fn order(view: &'static View, names: &[Path]) -> Result<*mut Order<'static>, Fault> {
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
    Ok(super::new_handle(view.session().submit(&dataset, samples)?))
}
