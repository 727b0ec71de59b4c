//! The functions that start asynchronous reads: those of the C library, of libaio and of liburing. The descriptors in a request
//! first get kernel copies (see [`crate::kernel_reads`]). Then the call is passed on.
//!
//! A library of the program may define these functions too. If it was loaded with `RTLD_LOCAL`, it may not come after this library
//! in the search for names. So [`find`] looks there too.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_void};
use std::ptr::null_mut;

use libc::size_t;

use super::hook;
use crate::kernel_reads::{is_needed, serve, serve_all};
use crate::memory::{self, FromC};
use crate::next::{self, Next, c_name};

/// `struct aiocb`, of which only the first field matters here: the descriptor.
type Request<'a> = FromC<'a, *const c_int>;
/// `struct iocb`: the descriptor is its sixth field, 20 bytes from the start.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelRequest {
    _before: [u32; 5],
    descriptor: c_int,
}

/// Calls a function of liburing that sets up a ring, and returns a negative error number if it fails.
macro_rules! ring_function {
    ($name:ident($($argument:ident: $kind:ty),*)) => {{
        let before = memory::errno();
        let found = find(c_name!($name), $name as *const () as usize);
        memory::set_errno(before);
        let result = match found {
            // SAFETY: the library's function of this name has this signature, and the arguments are the program's.
            Some(address) => unsafe {
                std::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> c_int>(address)($($argument),*)
            },
            None => -libc::ENOSYS,
        };
        if result >= 0 {
            serve_all();
        }
        result
    }};
}

hook! {
    fn aio_read | aio_read64 (request: Request) -> c_int {
        if is_needed() {
            request.get().into_iter().for_each(serve);
        }
        aio_read::next(request)
    }

    fn lio_listio | lio_listio64 (mode: c_int, list: FromC<*const Request>, count: c_int, event: FromC<*mut c_void>) -> c_int {
        if is_needed() {
            // This ignores a list that cannot be read, and leaves it to the C library, which reads the list itself.
            let requests = list.values(usize::try_from(count).unwrap_or(0)).into_iter().flatten();
            requests.filter_map(|request| request.get()).for_each(serve);
        }
        lio_listio::next(mode, list, count, event)
    }

    fn io_uring_queue_init(count: c_uint, ring: FromC<*mut c_void>, flags: c_uint) -> c_int {
        ring_function!(io_uring_queue_init(count: c_uint, ring: FromC<*mut c_void>, flags: c_uint))
    }

    fn io_uring_queue_init_params(count: c_uint, ring: FromC<*mut c_void>, params: FromC<*mut c_void>) -> c_int {
        ring_function!(io_uring_queue_init_params(count: c_uint, ring: FromC<*mut c_void>, params: FromC<*mut c_void>))
    }

    fn io_uring_queue_init_mem(
        count: c_uint,
        ring: FromC<*mut c_void>,
        params: FromC<*mut c_void>,
        memory: FromC<*mut c_void>,
        len: size_t,
    ) -> c_int {
        ring_function!(io_uring_queue_init_mem(
            count: c_uint,
            ring: FromC<*mut c_void>,
            params: FromC<*mut c_void>,
            memory: FromC<*mut c_void>,
            len: size_t
        ))
    }

    fn io_uring_setup(count: c_uint, params: FromC<*mut c_void>) -> c_int {
        ring_function!(io_uring_setup(count: c_uint, params: FromC<*mut c_void>))
    }

    fn io_submit(context: usize, count: c_long, list: FromC<*const FromC<*const KernelRequest>>) -> c_int {
        static NEXT: Next = Next::new();
        serve_submitted(count, list);
        if NEXT.address(c"io_submit").is_some() {
            return io_submit::next(context, count, list);
        }
        // What libaio does: it returns the error, and leaves errno alone.
        let before = memory::errno();
        let result = next::syscall(libc::SYS_io_submit, context, count as usize, list.raw().addr(), 0, 0, 0);
        let result = if result < 0 { -memory::errno() } else { result as c_int };
        memory::set_errno(before);
        result
    }
}

/// Finds a function by its name, but not this library's own: the next library's, or that of any library that is loaded.
fn find(name: &'static CStr, own: usize) -> Option<usize> {
    type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
    let next = Next::new();
    if let Some(address) = next.address(name) {
        return Some(address);
    }
    let open = Next::new();
    let open = open.address(c"dlopen")?;
    loaded_libraries().iter().find_map(|path| {
        // SAFETY: the C library's `dlopen` has this signature, and the path and the name are strings. A library that is found stays
        // loaded, because the program is about to use it.
        let found = unsafe {
            let library = std::mem::transmute::<usize, Open>(open)(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            if library.is_null() { null_mut() } else { libc::dlsym(library, name.as_ptr()) }
        };
        (!found.is_null() && found as usize != own).then_some(found as usize)
    })
}

/// Returns the paths of the libraries that are loaded.
fn loaded_libraries() -> Vec<CString> {
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _len: size_t, paths: *mut c_void) -> c_int {
        // SAFETY: the loader passes a description of a library, and the pointer that it got from `loaded_libraries`.
        let (name, paths) = unsafe { (FromC::new((*info).dlpi_name), &mut *paths.cast::<Vec<CString>>()) };
        // The program itself has no name.
        paths.extend(name.string().filter(|name| !name.is_empty()).map(CStr::to_owned));
        0
    }
    let mut paths: Vec<CString> = Vec::new();
    // SAFETY: `add` has the signature that is expected, and the pointer stays valid during the call.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut paths).cast()) };
    paths
}

/// Gives kernel copies to the descriptors in requests of libaio.
pub(crate) fn serve_submitted(count: c_long, list: FromC<*const FromC<*const KernelRequest>>) {
    if is_needed() {
        // The kernel fails for a list that cannot be read.
        let requests = list.values(usize::try_from(count).unwrap_or(0)).into_iter().flatten();
        requests.filter_map(|request| request.get()).for_each(|request| serve(request.descriptor));
    }
}
