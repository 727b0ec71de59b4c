//! The C interface of `dayfly.h`, for programs that are written for Dayfly.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_uchar, c_void};

use dayfly_client::locate::Location;
use dayfly_client::{Dataset, FileKind, OpenFile, Samples, Session, View};
use dayfly_meta::id::{BlockId, DatasetId, SampleId};
use dayfly_meta::limits::BLOCK_SIZE_MAX;
use dayfly_meta::path::join;
use libc::{size_t, ssize_t};

use crate::calls::kernel_form;
use crate::memory::{Errno, array_mut, buffer, put, string};
use crate::process::{Fault, answer};

type SeeSample = extern "C" fn(*const c_char, u64, *mut c_void) -> c_int;
type See = extern "C" fn(*const c_char, c_uchar, *mut c_void) -> c_int;

/// `struct dayfly_request`.
#[repr(C)]
pub(crate) struct Request {
    path: *const c_char,
    buffer: *mut c_void,
    len: size_t,
    result: i64,
}

/// What a pointer of the program's points to.
fn given<'a, T>(pointer: *const T) -> Result<&'a T, Errno> {
    // SAFETY: not null, and so made by one of the functions below and not yet ended, by the program's promise.
    if pointer.is_null() { Err(libc::EINVAL) } else { Ok(unsafe { &*pointer }) }
}

fn end<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: made by `Box::into_raw` below; the program gives it up.
        drop(unsafe { Box::from_raw(pointer) });
    }
}

fn bytes<'a>(path: *const c_char) -> Result<&'a [u8], Errno> {
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
            let location = Location::of_environment()?;
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

    fn dayfly_read_batch(session: *const View, requests: *mut Request, count: size_t) -> ssize_t {
        answer(|| read_batch(given(session)?, array_mut(requests, count)))
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

/// Reads whole files, block by block in the order that is best for the node.
fn read_batch(view: &View, requests: &mut [Request]) -> Result<ssize_t, Fault> {
    let mut wanted: BTreeMap<DatasetId, BTreeMap<BlockId, Vec<(usize, u64)>>> = BTreeMap::new();
    for (number, request) in requests.iter_mut().enumerate() {
        let file = match bytes(request.path).map_err(Fault::Errno).and_then(|path| Ok(view.open(path)?)) {
            Ok(file) => file,
            Err(fault) => {
                request.result = -i64::from(errno_of(&fault));
                continue;
            }
        };
        request.result = file.stat().size as i64;
        if let Some((size, blocks)) = file.dataset().catalog().sample(file.sample()) {
            let needed = size.min(request.len as u64).div_ceil(BLOCK_SIZE_MAX) as u32;
            let of_dataset = wanted.entry(file.dataset().id()).or_default();
            for part in 0..needed {
                let place = (number, u64::from(part) * BLOCK_SIZE_MAX);
                of_dataset.entry(BlockId(blocks.start + part)).or_default().push(place);
            }
        }
    }
    for (id, blocks) in wanted {
        let datasets = view.session().datasets()?;
        let Some(dataset) = datasets.iter().find(|dataset| dataset.id() == id) else { return Err(Fault::Errno(libc::EIO)) };
        read_dataset(view, dataset, &blocks, requests);
    }
    Ok(requests.iter().filter(|request| request.result < 0).count() as ssize_t)
}

fn errno_of(fault: &Fault) -> Errno {
    match fault {
        Fault::Errno(errno) => *errno,
        Fault::Leaves(_) => libc::ENOENT,
    }
}

fn read_dataset(view: &View, dataset: &Dataset, blocks: &BTreeMap<BlockId, Vec<(usize, u64)>>, requests: &mut [Request]) {
    let order: Vec<BlockId> = blocks.keys().copied().collect();
    let result = view.session().read_blocks(dataset, &order, &mut |data| {
        if view.session().verifies_reads() {
            data.verify(dataset)?;
        }
        for &(number, start) in blocks.get(&data.block).into_iter().flatten() {
            let request = &mut requests[number];
            let room = (request.len as u64).saturating_sub(start).min(data.bytes.len() as u64) as usize;
            let target = request.buffer.wrapping_byte_add(start as usize);
            match buffer(target, room) {
                Ok(out) => out.copy_from_slice(&data.bytes[..room]),
                Err(errno) => request.result = -i64::from(errno),
            }
        }
        Ok(())
    });
    if let Err(error) = result {
        // Which blocks came is not told: none of this dataset's files is given as whole.
        let errno = errno_of(&error.into());
        blocks.values().flatten().for_each(|&(number, _)| requests[number].result = -i64::from(errno));
    }
}
