//! The next library: the C library, or another preloaded library before it.
//!
//! Each hook has a counterpart, `NAME::next`, that passes the arguments on unchanged. [`forward!`] generates it; the address is
//! looked up by name on the first call and cached in an atomic, so a call costs one load and two comparisons more than a direct
//! call. A lookup takes no lock of ours, and a fork copies its result. Functions that a signal handler may call are looked up
//! when the program sets its first handler ([`early`]).
//!
//! The functions have the ABI `C-unwind`, because many of them are cancellation points: if a thread waits in one, `pthread_cancel`
//! ends the thread by unwinding its stack, including our frames.
//!
//! The `hook!` macro of [`crate::calls`] declares almost every C function, once, for the hook and for its counterpart. This file
//! declares the few functions that modules below `calls` use ([`declare!`]). Some of them have no hook at all, and the hooks of the
//! others take their argument types from here. So no module below `calls` has to import `calls`.

pub(crate) mod early;

use std::ffi::{CStr, c_char, c_int, c_long, c_ulong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{mode_t, msghdr, off_t, sigaction as Action, size_t};

use crate::memory::FromC;

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

unsafe extern "C" {
    /// The C library's `dlvsym`, for names that newer C libraries keep for old programs only.
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// The address has not been looked up yet.
const UNKNOWN: usize = 0;
/// The address has been looked up, and no library has the function.
const MISSING: usize = 1;
/// The oldest version of glibc's symbols on x86-64.
const OLDEST: &CStr = c"GLIBC_2.2.5";

/// The address of one function of the next library.
pub(crate) struct Next(AtomicUsize);

impl Next {
    pub(crate) const fn new() -> Self {
        Self(AtomicUsize::new(UNKNOWN))
    }

    /// Returns the address, or `None` where no library after this one has the function.
    #[inline]
    pub(crate) fn address(&self, name: &CStr) -> Option<usize> {
        let address = match self.0.load(Ordering::Relaxed) {
            UNKNOWN => self.look_up(name),
            known => known,
        };
        (address != MISSING).then_some(address)
    }

    #[cold]
    fn look_up(&self, name: &CStr) -> usize {
        let found = match early::address(name) {
            UNKNOWN => find(name),
            known => known,
        };
        self.0.store(found, Ordering::Relaxed);
        found
    }
}

/// Asks the dynamic linker for an address. Returns [`MISSING`] where no library after this one has the function.
fn find(name: &CStr) -> usize {
    // SAFETY: both names are strings; RTLD_NEXT asks for the libraries after this one.
    let found = unsafe {
        let newest = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
        if newest.is_null() { dlvsym(libc::RTLD_NEXT, name.as_ptr(), OLDEST.as_ptr()) } else { newest }
    };
    if found.is_null() { MISSING } else { found as usize }
}

/// Turns a function's name into a C string.
macro_rules! c_name {
    ($name:ident) => {
        const {
            match ::std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("an identifier contains no NUL"),
            }
        }
    };
}

/// Returns whether a next library has the function.
macro_rules! exists {
    ($symbol:ident) => {{
        static NEXT: $crate::next::Next = $crate::next::Next::new();
        NEXT.address($crate::next::c_name!($symbol)).is_some()
    }};
}

/// Defines `$function`, which calls the next library's `$symbol`. Where no library has it, the call fails with ENOSYS.
macro_rules! forward {
    ($function:ident calls $symbol:ident($($argument:ident: $kind:ty),*) -> $result:ty) => {
        #[inline]
        #[allow(clippy::too_many_arguments, reason = "the C function has as many")]
        #[allow(dead_code, reason = "some hooks answer by way of another function's next")]
        pub(crate) fn $function($($argument: $kind),*) -> $result {
            static NEXT: $crate::next::Next = $crate::next::Next::new();
            let Some(address) = NEXT.address($crate::next::c_name!($symbol)) else {
                return $crate::memory::fail(libc::ENOSYS);
            };
            // SAFETY: the C library's function of this name has this signature. Pointers are what the program passed to our
            // function, whose contract is the same, or point to our own live objects: `FromC` says so.
            unsafe { ::std::mem::transmute::<usize, unsafe extern "C-unwind" fn($($kind),*) -> $result>(address)($($argument),*) }
        }
    };
}

/// Declares functions that modules below `calls` use. For each, it emits a function that calls the next library, and an arm of the
/// macro `declared!`. If a hook lists its arguments by name only, `hook!` takes their types from that arm. The first token is `$`,
/// which a macro cannot write into the macro that it defines.
macro_rules! declare {
    ($dollar:tt $(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) -> $result:ty;)*) => {
        $(forward! { $name calls $name($($argument: $kind),*) -> $result })*

        macro_rules! declared {
            $(($name $dollar($dollar rest:tt)*) => { hook! { @declared $name [$($kind),*] [$result] $dollar($dollar rest)* } };)*
        }
        pub(crate) use declared;
    };
}

pub(crate) use {c_name, exists, forward};

declare! { $
    fn dup(descriptor: c_int) -> c_int;
    fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    fn fcntl(descriptor: c_int, command: c_int, argument: FromC<c_ulong>) -> c_int;
    fn getcwd(buffer: FromC<*mut c_char>, len: size_t) -> *mut c_char;
    fn lseek(descriptor: c_int, offset: off_t, whence: c_int) -> off_t;
    fn open(path: FromC<*const c_char>, flags: c_int, mode: mode_t) -> c_int;
    fn readlink(path: FromC<*const c_char>, buffer: FromC<*mut c_char>, len: size_t) -> isize;
    fn sendmsg(socket: c_int, message: FromC<*const msghdr>, flags: c_int) -> isize;
    fn sigaction(number: c_int, new: FromC<*const Action>, old: FromC<*mut Action>) -> c_int;
    fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
    fn write(descriptor: c_int, buffer: FromC<*const c_void>, len: size_t) -> isize;
}

/// Calls the C library's `fstatat`. Old C libraries have only `__fxstatat`; both make this system call, which fills in the
/// same structure.
pub(crate) fn fstatat(directory: c_int, path: FromC<*const c_char>, out: FromC<*mut libc::stat>, flags: c_int) -> c_int {
    static NEXT: Next = Next::new();
    type Function = unsafe extern "C-unwind" fn(c_int, FromC<*const c_char>, FromC<*mut libc::stat>, c_int) -> c_int;
    match NEXT.address(c"fstatat") {
        // SAFETY: the C library's function of this name has this signature; `FromC` vouches for the pointers.
        Some(address) => unsafe { std::mem::transmute::<usize, Function>(address)(directory, path, out, flags) },
        None => old_fstatat(directory, path, out, flags),
    }
}

/// Makes the system call where the C library has no function.
#[cold]
fn old_fstatat(directory: c_int, path: FromC<*const c_char>, out: FromC<*mut libc::stat>, flags: c_int) -> c_int {
    let (path, out) = (path.raw().addr(), out.raw().addr());
    syscall(libc::SYS_newfstatat, directory as usize, path, out, flags as usize, 0, 0) as c_int
}

/// Returns the address of the next library's `syscall`.
pub(crate) fn address_of_syscall() -> Option<usize> {
    static NEXT: Next = Next::new();
    NEXT.address(c"syscall")
}

/// Ends this thread if a `pthread_cancel` is pending. A call that POSIX lists as a cancellation point begins with this if we answer
/// it without a system call. Otherwise, nobody could cancel a thread that only reads our files.
#[inline]
pub(crate) fn act_on_cancel() {
    // SAFETY: no arguments. It may unwind, so callers hold nothing that must outlive the thread, and run outside of `answer`.
    unsafe { pthread_testcancel() };
}

/// Writes bytes of this library to a descriptor.
pub(crate) fn write_bytes(descriptor: c_int, bytes: &[u8]) -> isize {
    // SAFETY: a live slice, with its length.
    write(descriptor, unsafe { FromC::new(bytes.as_ptr().cast()) }, bytes.len())
}

/// Calls `fcntl` with a command whose argument is a number.
pub(crate) fn fcntl_number(descriptor: c_int, command: c_int, argument: c_int) -> c_int {
    fcntl(descriptor, command, FromC::number(argument as c_ulong))
}
