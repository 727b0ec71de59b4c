//! The C interface of `dayfly.h`, for programs that are written for Dayfly.

mod many;

use std::ffi::{CString, c_char, c_int, c_uchar, c_void};

use dayfly_client::locate::SessionFolder;
use dayfly_client::{Batch, Dataset, FileKind, OpenFile, Order, Samples, Session, View};
use dayfly_meta::id::SampleId;
use dayfly_meta::path::join;
use libc::{size_t, ssize_t};

use crate::calls::kernel_form;
use crate::memory::{Errno, array, array_mut, buffer, put, string};
use crate::process::{Fault, answer};
use many::{Request, SampleView};

type SeeSample = extern "C" fn(*const c_char, u64, *mut c_void) -> c_int;
type See = extern "C" fn(*const c_char, c_uchar, *mut c_void) -> c_int;

/// What a pointer of the program's points to.
fn given<'a, T>(pointer: *const T) -> Result<&'a T, Errno> {
    // SAFETY: not null, and so made by one of the functions below and not yet ended, by the program's promise.
    if pointer.is_null() { Err(libc::EINVAL) } else { Ok(unsafe { &*pointer }) }
}

/// As [`given`], of what only one thread may use at a time.
fn given_mut<'a, T>(pointer: *mut T) -> Result<&'a mut T, Errno> {
    // SAFETY: as above; that nobody else uses it meanwhile is the program's promise too.
    if pointer.is_null() { Err(libc::EINVAL) } else { Ok(unsafe { &mut *pointer }) }
}

fn end<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: made by `Box::into_raw` below; the program gives it up.
        drop(unsafe { Box::from_raw(pointer) });
    }
}

pub(super) fn bytes<'a>(path: *const c_char) -> Result<&'a [u8], Errno> {
    string(path).map(|path| path.to_bytes()).ok_or(libc::EFAULT)
}

/// Defines functions of the header.
macro_rules! header {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name($($argument: $kind),*) -> $result $body
    )*};
}

header! {
    fn dayfly_attach() -> *mut View {
        answer(|| {
            let location = SessionFolder::of_environment()?;
            let session = Session::attach_to(&location, location.node_of_environment()?)?;
            Ok(Box::into_raw(Box::new(View::new(session))))
        })
    }

    fn dayfly_detach(session: *mut View) -> () {
        end(session);
    }

    fn dayfly_open(session: *const View, path: *const c_char) -> *mut OpenFile {
        answer(|| Ok(Box::into_raw(Box::new(given(session)?.open(bytes(path)?)?))))
    }

    fn dayfly_close(file: *mut OpenFile) -> () {
        end(file);
    }

    fn dayfly_size(file: *const OpenFile) -> u64 {
        given(file).map_or(0, |file| file.stat().size)
    }

    fn dayfly_read(session: *const View, file: *const OpenFile, out: *mut c_void, len: size_t, offset: u64) -> ssize_t {
        answer(|| {
            let file = given(file)?;
            let count = (len as u64).min(file.stat().size.saturating_sub(offset)) as usize;
            Ok(given(session)?.read_at(file, offset, buffer(out, count)?)? as ssize_t)
        })
    }

    fn dayfly_read_many(session: *const View, requests: *mut Request, count: size_t, flags: c_int) -> ssize_t {
        answer(|| many::read(given(session)?, array_mut(requests, count), flags))
    }

    fn dayfly_batch_open(session: *const View, paths: *const *const c_char, count: size_t, flags: c_int) -> *mut Batch<'static> {
        answer(|| many::open(given(session)?, array(paths, count), flags))
    }

    fn dayfly_batch_open_ids(
        session: *const View,
        path: *const c_char,
        ids: *const u32,
        count: size_t,
        flags: c_int,
    ) -> *mut Batch<'static> {
        answer(|| many::open_ids(given(session)?, bytes(path)?, array(ids, count), flags))
    }

    fn dayfly_batch_next(batch: *mut Batch<'static>, out: *mut SampleView) -> c_int {
        answer(|| many::next(given_mut(batch)?, out))
    }

    fn dayfly_batch_wait(batch: *mut Batch<'static>) -> c_int {
        answer(|| Ok(given_mut(batch)?.wait().map(|()| 0)?))
    }

    fn dayfly_batch_get(batch: *const Batch<'static>, index: size_t, out: *mut SampleView) -> c_int {
        answer(|| many::get(given(batch)?, index, out))
    }

    fn dayfly_batch_is_good(batch: *const Batch<'static>) -> c_int {
        given(batch).map_or(0, |batch| c_int::from(batch.is_good()))
    }

    fn dayfly_batch_close(batch: *mut Batch<'static>) -> () {
        end(batch);
    }

    fn dayfly_id(file: *const OpenFile) -> u32 {
        given(file).map_or(u32::MAX, |file| file.sample().0)
    }

    fn dayfly_order_epoch(
        session: *const View,
        path: *const c_char,
        seed: u64,
        epoch: u64,
        reader: u32,
        readers: u32,
    ) -> *mut Order<'static> {
        answer(|| {
            let (view, share) = (given(session)?, readers.max(1) as usize);
            let dataset = view.dataset_of(bytes(path)?)?;
            let samples = Samples::of(dataset.catalog());
            let order = samples.epoch(seed, epoch).skip(reader as usize).step_by(share);
            Ok(Box::into_raw(Box::new(view.session().submit(&dataset, order)?)))
        })
    }

    fn dayfly_order_files(session: *const View, paths: *const *const c_char, count: size_t) -> *mut Order<'static> {
        answer(|| many::order(given(session)?, array(paths, count)))
    }

    fn dayfly_order_end(order: *mut Order<'static>) -> () {
        end(order);
    }

    fn dayfly_stat(session: *const View, path: *const c_char, out: *mut libc::stat) -> c_int {
        answer(|| Ok(put(out, kernel_form(&given(session)?.stat(bytes(path)?)?)).map(|()| 0)?))
    }

    fn dayfly_epoch(
        session: *const View,
        path: *const c_char,
        seed: u64,
        epoch: u64,
        see: Option<SeeSample>,
        context: *mut c_void,
    ) -> c_int {
        answer(|| {
            see_samples(given(session)?, bytes(path)?, see, context, |samples, _, see| {
                let mut told = samples.epoch(seed, epoch).map(see);
                told.find(|told| !matches!(told, Ok(0))).unwrap_or(Ok(0))
            })
        })
    }

    fn dayfly_local(session: *const View, path: *const c_char, see: Option<SeeSample>, context: *mut c_void) -> c_int {
        answer(|| {
            let view = given(session)?;
            see_samples(view, bytes(path)?, see, context, |samples, dataset, see| {
                let order = samples.local(dataset, view.session().node(), view.session().nodes());
                let mut told = order.into_iter().map(see);
                told.find(|told| !matches!(told, Ok(0))).unwrap_or(Ok(0))
            })
        })
    }

    fn dayfly_list(session: *const View, path: *const c_char, see: Option<See>, context: *mut c_void) -> c_int {
        answer(|| {
            let see = see.ok_or(libc::EINVAL)?;
            let directory = given(session)?.open_directory(bytes(path)?)?;
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

/// Tells the samples of the dataset that `path` is in, in the order that `order` makes.
fn see_samples(
    view: &View,
    path: &[u8],
    see: Option<SeeSample>,
    context: *mut c_void,
    order: impl Fn(&Samples, &Dataset, &mut dyn FnMut(SampleId) -> Result<c_int, Fault>) -> Result<c_int, Fault>,
) -> Result<c_int, Fault> {
    let see = see.ok_or(Fault::Errno(libc::EINVAL))?;
    let dataset = view.dataset_of(path)?;
    let samples = Samples::of(dataset.catalog());
    let root = join(view.session().prefix(), dataset.target());
    order(&samples, &dataset, &mut |sample| {
        let catalog = dataset.catalog();
        let entry = samples.entry(sample).and_then(|entry| catalog.entry(entry)).ok_or(Fault::Errno(libc::EIO))?;
        let path = CString::new(join(&root, &catalog.path(&entry))).map_err(|_| Fault::Errno(libc::EIO))?;
        let size = catalog.attributes(&entry).map_or(0, |attributes| attributes.size);
        Ok(see(path.as_ptr(), size, context))
    })
}
