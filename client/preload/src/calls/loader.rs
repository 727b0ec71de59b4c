//! Loading libraries: `dlopen`, `dlmopen`, `dlerror`, `dladdr`.
//!
//! The dynamic linker searches for a library in folders that its *caller* names, and finds the caller by the return address. So
//! `dlopen` is written in assembly: it asks [`target`] which path to load, and then jumps to the next `dlopen`, which returns to
//! the program. For a library of the namespace, [`target`] returns the path of the library's copy (see [`crate::library`]); every
//! other name is passed on as it is.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};

use dayfly_client::View;
use libc::Dl_info;

use super::hook;
use crate::attach::view;
use crate::fault::Fault;
use crate::library::{self, Carried};
use crate::memory::{self, Errno, FromC};
use crate::next::{Next, forward};
use crate::path::{Side, side_of};

/// The path to load, and the next library's function. The calling convention returns both in registers.
#[repr(C)]
struct Target {
    path: *const c_char,
    function: usize,
}

/// `dlopen(3)`.
///
/// # Safety
///
/// As for C's `dlopen`.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "push rsi",
        "call {target}",
        "pop rsi",
        "mov rdi, rax",
        "jmp rdx",
        target = sym dlopen_target,
    )
}

/// `dlmopen(3)`.
///
/// # Safety
///
/// As for C's `dlmopen`.
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn dlmopen(group: libc::Lmid_t, path: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "push rdi",
        "push rdx",
        "sub rsp, 8",
        "mov rdi, rsi",
        "call {target}",
        "mov rsi, rax",
        "mov rax, rdx",
        "add rsp, 8",
        "pop rdx",
        "pop rdi",
        "jmp rax",
        target = sym dlmopen_target,
    )
}

extern "C" fn dlopen_target(path: FromC<*const c_char>, flags: c_int) -> Target {
    static NEXT: Next = Next::new();
    Target { path: path_to_load(path, Some(flags)), function: NEXT.address(c"dlopen").unwrap_or(missing as *const () as usize) }
}

extern "C" fn dlmopen_target(path: FromC<*const c_char>) -> Target {
    static NEXT: Next = Next::new();
    Target { path: path_to_load(path, None), function: NEXT.address(c"dlmopen").unwrap_or(missing as *const () as usize) }
}

/// Stands for the next library's function where there is none.
extern "C" fn missing() -> *mut c_void {
    memory::fail(libc::ENOSYS)
}

/// Returns the path that the linker is to load. Without flags, needed libraries are not loaded first.
fn path_to_load(path: FromC<*const c_char>, flags: Option<c_int>) -> *const c_char {
    // The linker searches its own folders for a name without a slash.
    let Some(text) = path.string().filter(|text| text.to_bytes().contains(&b'/')) else { return path.raw() };
    match side_of(libc::AT_FDCWD, path) {
        Side::Kernel => path.raw(),
        Side::Ours(ours) => prepared(text, &ours, flags),
    }
}

#[cold]
fn prepared(text: &CStr, ours: &[u8], flags: Option<c_int>) -> *const c_char {
    let before = memory::errno();
    let work = || view().and_then(|view| carried(&view, ours, flags, &mut Vec::new()));
    let found = std::panic::catch_unwind(work).unwrap_or(Err(Fault::Errno(libc::EIO)));
    memory::set_errno(before);
    match found {
        Ok(carried) => carried.path().as_ptr(),
        Err(Fault::Leaves(outside)) => kept(CString::new(outside).unwrap_or_default()),
        Err(Fault::Errno(errno)) => unloadable(text, errno),
    }
}

/// Carries a library, after loading the libraries that it needs from the namespace. `seen` has the names of the needed libraries
/// that have been looked at, because libraries may need each other.
fn carried(view: &View, path: &[u8], flags: Option<c_int>, seen: &mut Vec<CString>) -> Result<&'static Carried, Fault> {
    let file = view.open(path)?;
    if let Some(flags) = flags.filter(|flags| flags & libc::RTLD_NOLOAD == 0) {
        for needed in library::needed(view, &file)? {
            if seen.contains(&needed.name) || is_loaded(&needed.name) {
                continue;
            }
            seen.push(needed.name);
            // If this fails, the linker reports the library that it misses.
            if let Ok(carried) = carried(view, needed.path.to_bytes(), Some(flags), seen) {
                let binding = flags & (libc::RTLD_NOW | libc::RTLD_LAZY);
                load(carried.path().into(), binding | libc::RTLD_LOCAL);
            }
        }
    }
    library::carry(view, &file)
}

/// Returns whether the process has loaded a library of this name.
fn is_loaded(name: &CStr) -> bool {
    let handle = load(name.into(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
    if handle.is_null() {
        return false;
    }
    // SAFETY: the linker has just returned the handle, and counted this use of it.
    unload(unsafe { FromC::new(handle) });
    true
}

forward! { unload calls dlclose(handle: FromC<*mut c_void>) -> c_int }
forward! { load calls dlopen(path: FromC<*const c_char>, flags: c_int) -> *mut c_void }

/// Returns the linker's message about the last failure, and forgets it.
fn next_error() -> *mut c_char {
    // SAFETY: the C library's function of this name has this signature.
    let call = |address| unsafe { std::mem::transmute::<usize, unsafe extern "C" fn() -> *mut c_char>(address)() };
    NEXT_ERROR.address(c"dlerror").map_or(std::ptr::null_mut(), call)
}

static NEXT_ERROR: Next = Next::new();

/// Looks up the linker's `dlerror`. Call it before the program's `main`: a lookup clears the message that a program is about to ask
/// for.
pub(crate) fn prepare() {
    NEXT_ERROR.address(c"dlerror");
}

/// Returns a path that the linker fails to open, for a library that the namespace does not have or cannot give. [`dlerror`]
/// replaces the linker's message about it.
fn unloadable(text: &CStr, errno: Errno) -> *const c_char {
    let number = errno.to_string();
    kept(CString::new([UNLOADABLE, number.as_bytes(), b"/", text.to_bytes()].concat()).unwrap_or_default())
}

/// Keeps a path for as long as the linker may use it. After the jump to the linker, nothing can free the path.
fn kept(path: CString) -> *const c_char {
    path.into_raw()
}

/// The beginning of a path that the linker cannot open: no descriptor has a negative number. An error number and a path follow.
const UNLOADABLE: &[u8] = b"/proc/self/fd/-";

thread_local! {
    /// The last message that this thread got from [`dlerror`], if it is not the linker's.
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Returns the message that the linker would have given for the program's own path; `None` if that is the linker's message.
fn message_for(given: &CStr) -> Option<CString> {
    let given = given.to_bytes();
    if let Some(rest) = given.strip_prefix(UNLOADABLE) {
        let (number, rest) = rest.split_at(rest.iter().position(|&byte| byte == b'/')?);
        let errno = std::str::from_utf8(number).ok()?.parse().ok()?;
        // The message ends with the linker's reason, which is not the real one.
        let path = rest[1..].split(|&byte| byte == b':').next()?;
        let reason = memory::reason(errno);
        return CString::new([path, b": cannot open shared object file: ", reason.to_bytes()].concat()).ok();
    }
    let end = given.iter().position(|&byte| byte == b':')?;
    let name = library::name_of(&CString::new(&given[..end]).ok()?)?;
    CString::new([name.to_bytes(), &given[end..]].concat()).ok()
}

hook! {
    fn dladdr(address: FromC<*const c_void>, out: FromC<*mut Dl_info>) -> c_int {
        let result = dladdr::next(address, out);
        rename(result, out)
    }

    fn dladdr1(address: FromC<*const c_void>, out: FromC<*mut Dl_info>, extra: FromC<*mut *mut c_void>, flags: c_int) -> c_int {
        let result = dladdr1::next(address, out, extra, flags);
        rename(result, out)
    }

    fn dlerror() -> *mut c_char {
        let given = next_error();
        // SAFETY: the linker's message, which lives until this thread asks for the next one.
        let message = unsafe { FromC::new(given.cast_const()) }.string().and_then(message_for);
        let Some(message) = message else { return given };
        // In a thread that is ending, there may be no room for the message.
        MESSAGE.try_with(|kept| {
            kept.replace(message);
            kept.borrow().as_ptr().cast_mut()
        })
        .unwrap_or(given)
    }
}

/// Replaces the path of a copy by the library's path in the namespace, because programs look for other files next to a library.
fn rename(result: c_int, out: FromC<*mut Dl_info>) -> c_int {
    if result != 0
        && let Some(mut info) = out.get()
        // SAFETY: the linker's string, which lives as long as the library that it names.
        && let Some(name) = unsafe { FromC::new(info.dli_fname) }.string().and_then(library::name_of)
    {
        info.dli_fname = name.as_ptr();
        // Not null, because the linker has just filled it.
        let _ = out.put(info);
    }
    result
}
