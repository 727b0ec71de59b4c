//! The functions of `dayfly.h`, for programs that are written for Dayfly. The header documents them for their callers.
//!
//! A handle (`dayfly *`, `dayfly_file *`, ...) is a pointer to a boxed object. The program promises, as for every C library, that
//! it passes only handles that it received from this API and has not closed. Null pointers are tolerated: functions fail with
//! EINVAL or EFAULT.

mod dataset;
mod many;
mod message;

use std::ffi::{CString, c_char, c_int, c_uchar, c_void};

use dayfly_client::locate::Environment;
use dayfly_client::{Batch, Dataset, FileKind, OpenFile, Order, Samples, Session, View, cancellation, fault};
use dayfly_meta::id::SampleId;
use dayfly_meta::path::join;
use libc::{size_t, ssize_t};

use crate::attach::next_sigaction;
use crate::environment;
use crate::memory::{Errno, FromC};
use crate::stat_form::kernel_form;
use dataset::{DatasetHandle, SampleFacts, exactly, given};
use many::{FileRequest, SampleView};
use message::{Failure, answer, answer_once, at};

/// A function of the program that is called with a sample's path, the sample's size in bytes, and the program's context.
type VisitSample = Option<extern "C" fn(*const c_char, u64, *mut c_void) -> c_int>;
/// A function of the program that is called with a directory entry's name, the entry's type, and the program's context.
type VisitEntry = Option<extern "C" fn(*const c_char, c_uchar, *mut c_void) -> c_int>;

/// Borrows the object behind a handle.
fn object<'a, T>(handle: FromC<'a, *const T>) -> Result<&'a T, Errno> {
    // SAFETY: not null, so by the program's promise it was created by one of the functions below and is not closed yet.
    if handle.is_null() { Err(libc::EINVAL) } else { Ok(unsafe { &*handle.raw() }) }
}

/// Borrows an object that only one thread may use at a time.
fn object_mut<'a, T>(handle: FromC<'a, *mut T>) -> Result<&'a mut T, Errno> {
    // SAFETY: as in `object`. The program also promises that no other thread uses it in the meantime.
    if handle.is_null() { Err(libc::EINVAL) } else { Ok(unsafe { &mut *handle.raw() }) }
}

fn new_handle<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

fn close<T>(handle: FromC<*mut T>) {
    if !handle.is_null() {
        let _deferral = cancellation::defer();
        // SAFETY: made by `new_handle`; the program gives up ownership.
        drop(unsafe { Box::from_raw(handle.raw()) });
    }
}

fn bytes<'a>(path: FromC<'a, *const c_char>) -> Result<&'a [u8], Errno> {
    path.string().map(|path| path.to_bytes()).ok_or(libc::EFAULT)
}

/// Defines functions of the header.
macro_rules! header {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name($($argument: $kind),*) -> $result $body
    )*};
}

/// A session's handle, for functions whose results keep using the session. The program closes these results before it detaches.
type SessionHandle = FromC<'static, *const View>;

/// A handle of a dataset, which uses its session.
type DatasetPointer = FromC<'static, *const DatasetHandle>;

header! {
    fn dayfly_error() -> *const c_char {
        message::get()
    }

    fn dayfly_attach() -> *mut View {
        answer(|| {
            let environment = Environment::read(environment::variable);
            let location = environment.folder()?;
            // Without the handler, segments are not mapped, and each read takes a system call.
            let _ = fault::install(next_sigaction);
            let session = Session::attach_to(&location, environment.node(&location)?)?;
            Ok(new_handle(View::new(session)))
        })
    }

    fn dayfly_detach(session: FromC<*mut View>) -> () {
        close(session);
    }

    fn dayfly_open(session: FromC<*const View>, path: FromC<*const c_char>) -> *mut OpenFile {
        answer(|| Ok(new_handle(open(object(session)?, bytes(path)?)?)))
    }

    fn dayfly_close(file: FromC<*mut OpenFile>) -> () {
        close(file);
    }

    fn dayfly_size(file: FromC<*const OpenFile>) -> u64 {
        object(file).map_or(0, |file| file.stat().size)
    }

    fn dayfly_read(
        session: FromC<*const View>,
        file: FromC<*const OpenFile>,
        out: FromC<*mut c_void>,
        len: size_t,
        offset: u64,
    ) -> ssize_t {
        answer(|| {
            let file = object(file)?;
            let count = (len as u64).min(file.stat().size.saturating_sub(offset)) as usize;
            Ok(object(session)?.read_at(file, offset, out.buffer(count)?)? as ssize_t)
        })
    }

    fn dayfly_read_many(session: FromC<*const View>, requests: FromC<*mut FileRequest>, count: size_t, flags: c_int) -> ssize_t {
        answer(|| many::read(object(session)?, requests.slice_mut(count)?, flags))
    }

    fn dayfly_batch_open(
        session: SessionHandle,
        paths: FromC<*const FromC<*const c_char>>,
        count: size_t,
        flags: c_int,
    ) -> *mut Batch<&'static Session> {
        answer(|| many::open(object(session)?, paths.slice(count)?, flags))
    }

    fn dayfly_batch_open_ids(
        session: SessionHandle,
        path: FromC<*const c_char>,
        ids: FromC<*const u32>,
        count: size_t,
        flags: c_int,
    ) -> *mut Batch<&'static Session> {
        answer(|| many::open_ids(object(session)?, bytes(path)?, ids.slice(count)?, flags))
    }

    fn dayfly_batch_next(batch: FromC<*mut Batch<&'static Session>>, out: FromC<*mut SampleView>) -> c_int {
        answer(|| many::next(object_mut(batch)?, out))
    }

    fn dayfly_batch_wait(batch: FromC<*mut Batch<&'static Session>>) -> c_int {
        answer(|| Ok(object_mut(batch)?.wait().map(|()| 0)?))
    }

    fn dayfly_batch_get(batch: FromC<*const Batch<&'static Session>>, index: size_t, out: FromC<*mut SampleView>) -> c_int {
        answer(|| many::get(object(batch)?, index, out))
    }

    fn dayfly_batch_is_good(batch: FromC<*const Batch<&'static Session>>) -> c_int {
        object(batch).map_or(0, |batch| c_int::from(batch.is_good()))
    }

    fn dayfly_batch_close(batch: FromC<*mut Batch<&'static Session>>) -> () {
        close(batch);
    }

    fn dayfly_id(file: FromC<*const OpenFile>) -> u32 {
        object(file).map_or(u32::MAX, |file| file.sample().0)
    }

    fn dayfly_order_epoch(
        session: SessionHandle,
        path: FromC<*const c_char>,
        seed: u64,
        epoch: u64,
        reader: u32,
        readers: u32,
    ) -> *mut Order {
        answer(|| {
            let (view, share) = (object(session)?, readers.max(1) as usize);
            let path = bytes(path)?;
            let dataset = view.dataset_of(path).map_err(at(path))?;
            let samples = Samples::of(dataset.catalog());
            let order = samples.epoch(seed, epoch).skip(reader as usize).step_by(share);
            Ok(new_handle(view.session().submit(&dataset, order)?))
        })
    }

    fn dayfly_order_files(
        session: SessionHandle,
        paths: FromC<*const FromC<*const c_char>>,
        count: size_t,
    ) -> *mut Order {
        answer(|| many::order(object(session)?, paths.slice(count)?))
    }

    fn dayfly_order_ids(dataset: DatasetPointer, ids: FromC<*const u32>, count: size_t) -> *mut Order {
        answer(|| Ok(new_handle(object(dataset)?.order(given(ids, count)?)?)))
    }

    fn dayfly_order_end(order: FromC<*mut Order>) -> () {
        close(order);
    }

    fn dayfly_dataset_open(session: SessionHandle, path: FromC<*const c_char>) -> *mut DatasetHandle {
        answer(|| Ok(new_handle(DatasetHandle::open(object(session)?, bytes(path)?)?)))
    }

    fn dayfly_dataset_close(dataset: FromC<*mut DatasetHandle>) -> () {
        close(dataset);
    }

    fn dayfly_dataset_count(dataset: DatasetPointer) -> u32 {
        object(dataset).map_or(0, DatasetHandle::count)
    }

    fn dayfly_dataset_path(dataset: DatasetPointer, id: u32, out: FromC<*mut c_char>, len: size_t) -> ssize_t {
        answer(|| object(dataset)?.path(id, out, len))
    }

    fn dayfly_dataset_look(dataset: DatasetPointer, ids: FromC<*const u32>, count: size_t, out: FromC<*mut SampleFacts>) -> c_int {
        answer(|| object(dataset)?.look(given(ids, count)?, exactly(out, count)?).map(|()| 0))
    }

    fn dayfly_epoch_ids(dataset: DatasetPointer, seed: u64, epoch: u64, out: FromC<*mut u32>) -> c_int {
        answer(|| {
            let dataset = object(dataset)?;
            dataset.epoch(seed, epoch, exactly(out, dataset.count() as usize)?);
            Ok(0)
        })
    }

    fn dayfly_local_ids(dataset: DatasetPointer, out: FromC<*mut u32>) -> ssize_t {
        answer(|| {
            let dataset = object(dataset)?;
            Ok(dataset.local(exactly(out, dataset.count() as usize)?))
        })
    }

    fn dayfly_read_many_ids(
        dataset: DatasetPointer,
        ids: FromC<*const u32>,
        count: size_t,
        buffer: FromC<*mut c_void>,
        len: size_t,
        offsets: FromC<*mut u64>,
        errors: FromC<*mut c_int>,
        flags: c_int,
    ) -> ssize_t {
        answer(|| {
            let offsets = exactly(offsets, count.checked_add(1).ok_or(libc::EFAULT)?)?;
            let errors = errors.slice_mut(count)?;
            let failed = object(dataset)?.read(given(ids, count)?, buffer, len, offsets, errors, flags);
            failed.inspect_err(|failure| errors.fill(failure.errno()))
        })
    }

    fn dayfly_stat(session: FromC<*const View>, path: FromC<*const c_char>, out: FromC<*mut libc::stat>) -> c_int {
        answer(|| {
            let path = bytes(path)?;
            Ok(out.put(kernel_form(&object(session)?.stat(path).map_err(at(path))?)).map(|()| 0)?)
        })
    }

    fn dayfly_epoch(
        session: FromC<*const View>,
        path: FromC<*const c_char>,
        seed: u64,
        epoch: u64,
        see: VisitSample,
        context: *mut c_void,
    ) -> c_int {
        answer_once(|| {
            visit_samples(object(session)?, bytes(path)?, see, context, |samples, _, visit| {
                first_nonzero(samples.epoch(seed, epoch).map(visit))
            })
        })
    }

    fn dayfly_local(session: FromC<*const View>, path: FromC<*const c_char>, see: VisitSample, context: *mut c_void) -> c_int {
        answer_once(|| {
            let view = object(session)?;
            visit_samples(view, bytes(path)?, see, context, |samples, dataset, visit| {
                let order = samples.local(dataset, view.session().node(), view.session().nodes());
                first_nonzero(order.into_iter().map(visit))
            })
        })
    }

    fn dayfly_list(session: FromC<*const View>, path: FromC<*const c_char>, see: VisitEntry, context: *mut c_void) -> c_int {
        answer_once(|| {
            let see = see.ok_or(libc::EINVAL)?;
            let path = bytes(path)?;
            let directory = object(session)?.open_directory(path).map_err(at(path))?;
            for entry in directory.entries(0) {
                let kind = match entry.kind {
                    FileKind::File => libc::DT_REG,
                    FileKind::Directory => libc::DT_DIR,
                    FileKind::Symlink => libc::DT_LNK,
                };
                let name = CString::new(entry.name).map_err(|_| libc::EIO)?;
                match see(name.as_ptr(), kind, context) {
                    0 => {}
                    other => return Ok(other),
                }
            }
            Ok(0)
        })
    }
}

fn open(view: &View, path: &[u8]) -> Result<OpenFile, Failure> {
    view.open(path).map_err(at(path))
}

/// Returns the first failure or nonzero result, and does not consume the results after it.
fn first_nonzero(mut results: impl Iterator<Item = Result<c_int, Failure>>) -> Result<c_int, Failure> {
    results.find(|result| !matches!(result, Ok(0))).unwrap_or(Ok(0))
}

/// Calls the program's function for samples of the dataset that contains `path`. `order` chooses the samples and their order, and
/// calls its last argument for each of them.
fn visit_samples(
    view: &View,
    path: &[u8],
    see: VisitSample,
    context: *mut c_void,
    order: impl Fn(&Samples, &Dataset, &mut dyn FnMut(SampleId) -> Result<c_int, Failure>) -> Result<c_int, Failure>,
) -> Result<c_int, Failure> {
    let see = see.ok_or(libc::EINVAL)?;
    let dataset = view.dataset_of(path).map_err(at(path))?;
    let samples = Samples::of(dataset.catalog());
    let root = join(view.session().prefix(), dataset.target());
    order(&samples, &dataset, &mut |sample| {
        let catalog = dataset.catalog();
        let entry = samples.entry(sample).and_then(|entry| catalog.entry(entry)).ok_or(libc::EIO)?;
        let path = CString::new(join(&root, &catalog.path(&entry))).map_err(|_| libc::EIO)?;
        let size = catalog.attributes(&entry).map_or(0, |attributes| attributes.size);
        Ok(see(path.as_ptr(), size, context))
    })
}
