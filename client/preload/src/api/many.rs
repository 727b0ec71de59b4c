//! Reading many files with one call, and announcing the order in which files will be read.

use std::ffi::{c_char, c_int, c_void};

use dayfly_client::{Batch, ClientError, Delivery, OnMissing, Order, Session, View, ViewError};
use dayfly_meta::id::SampleId;
use dayfly_meta::path::display;
use libc::{size_t, ssize_t};

use super::bytes;
use super::message::{self, Failure, at};
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

pub(super) fn choices(flags: c_int) -> Result<(Delivery, OnMissing), Errno> {
    if flags & !(REPORT_MISSING | AS_AVAILABLE) != 0 {
        return Err(libc::EINVAL);
    }
    let delivery = if flags & AS_AVAILABLE == 0 { Delivery::InOrder } else { Delivery::AsAvailable };
    Ok((delivery, if flags & REPORT_MISSING == 0 { OnMissing::Fail } else { OnMissing::Report }))
}

pub(super) fn errno(error: &ClientError) -> Errno {
    match error {
        ClientError::Path { errno, .. } => *errno,
        ClientError::Buffer => libc::EFAULT,
        _ => libc::EIO,
    }
}

fn paths<'a>(paths: &[Path<'a>]) -> Result<Vec<&'a [u8]>, Errno> {
    paths.iter().map(|&path| bytes(path)).collect()
}

/// Reads whole files into the requests' buffers. Returns the number of files that failed. If the whole call fails, its errno is the
/// result of each request, so that no program takes an earlier call's result for that of this one.
pub(super) fn read(view: &View, requests: &mut [FileRequest], flags: c_int) -> Result<ssize_t, Failure> {
    read_each(view, requests, flags).inspect_err(|failure| {
        let result = -i64::from(failure.errno());
        requests.iter_mut().for_each(|request| request.result = result);
    })
}

fn read_each(view: &View, requests: &mut [FileRequest], flags: c_int) -> Result<ssize_t, Failure> {
    let (_, on_missing) = choices(flags)?;
    let paths = requests.iter().map(|request| bytes(request.path)).collect::<Result<Vec<_>, _>>()?;
    let mut buffers = FromC::buffers(requests.iter().map(|request| (request.buffer, request.len)))?;
    let sizes = view.read_many_into(&paths, &mut buffers, on_missing).map_err(ViewError::Client)?;
    let mut failed = 0;
    for (request, size) in requests.iter_mut().zip(sizes) {
        request.result = match size {
            Ok(size) => size as i64,
            Err(error) => {
                failed += 1;
                message::set(&error.to_string());
                -i64::from(errno(&error))
            }
        };
    }
    Ok(failed)
}

/// Begins to read files by their paths.
pub(super) fn open(view: &'static View, names: &[Path], flags: c_int) -> Result<*mut Batch<&'static Session>, Failure> {
    let (delivery, on_missing) = choices(flags)?;
    let batch = view.read_many(&paths(names)?, delivery, on_missing).map_err(ViewError::Client)?;
    Ok(super::new_handle(batch))
}

/// Begins to read files by their numbers in the dataset that contains `path`.
pub(super) fn open_ids(
    view: &'static View,
    path: &[u8],
    ids: &[u32],
    flags: c_int,
) -> Result<*mut Batch<&'static Session>, Failure> {
    let (delivery, on_missing) = choices(flags)?;
    let dataset = view.dataset_of(path).map_err(at(path))?;
    let samples: Vec<SampleId> = ids.iter().copied().map(SampleId).collect();
    let batch = view.session().read_many(&dataset, &samples, delivery, on_missing).map_err(ViewError::Client)?;
    Ok(super::new_handle(batch))
}

/// Stores the view of a batch's next file. Returns 1, or 0 at the end.
pub(super) fn next(batch: &mut Batch<&'static Session>, out: FromC<*mut SampleView>) -> Result<c_int, Failure> {
    let files = batch.len();
    // A batch whose connection has failed has not reached its end.
    if batch.is_broken() {
        out.put(no_view(files, libc::EIO))?;
        return Err(Failure::new(libc::EIO, "the batch has failed before"));
    }
    match batch.next() {
        None => Ok(out.put(no_view(files, 0)).map(|()| 0)?),
        Some(Ok(delivered)) => Ok(out.put(sample_view(delivered.index, delivered.bytes)).map(|()| 1)?),
        Some(Err(error)) => {
            out.put(no_view(files, errno(&error)))?;
            Err(ViewError::Client(error).into())
        }
    }
}

/// Stores the view of one file of a batch. The program has already waited for the whole batch.
pub(super) fn get(batch: &Batch<&'static Session>, index: size_t, out: FromC<*mut SampleView>) -> Result<c_int, Failure> {
    let Some(bytes) = batch.delivered(index) else {
        let (error, why) = match index < batch.len() {
            true => (libc::EAGAIN, "the file was not delivered yet"),
            false => (libc::ENOENT, "the batch has no such file"),
        };
        out.put(no_view(index, error))?;
        return Err(Failure::new(error, why));
    };
    Ok(out.put(sample_view(index, bytes)).map(|()| 0)?)
}

/// Whoever does not look at a function's result must not find the bytes of an earlier view.
fn no_view(index: usize, error: Errno) -> SampleView {
    SampleView { index, bytes: std::ptr::null(), len: 0, error }
}

fn sample_view(index: usize, bytes: Result<&[u8], &ClientError>) -> SampleView {
    match bytes {
        Ok(bytes) => SampleView { index, bytes: bytes.as_ptr().cast(), len: bytes.len() as u64, error: 0 },
        Err(error) => {
            message::set(&error.to_string());
            no_view(index, errno(error))
        }
    }
}

/// Announces that files of one dataset will be read in this order.
///
/// # Errors
///
/// EINVAL if there are no files, EXDEV if the files belong to several datasets.
pub(super) fn order(view: &'static View, names: &[Path]) -> Result<*mut Order, Failure> {
    let Some(&first) = names.first() else { return Err(Failure::new(libc::EINVAL, "an order of no files")) };
    let first = bytes(first)?;
    let dataset = view.dataset_of(first).map_err(at(first))?;
    let mut samples = Vec::with_capacity(names.len());
    for &name in names {
        let name = bytes(name)?;
        let file = view.open(name).map_err(at(name))?;
        if file.dataset().id() != dataset.id() {
            return Err(Failure::new(
                libc::EXDEV,
                &format!("'{}': is in another dataset than '{}'", display(name), display(first)),
            ));
        }
        samples.push(file.sample());
    }
    Ok(super::new_handle(view.session().submit(&dataset, samples)?))
}
