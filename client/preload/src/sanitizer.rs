//! Lets programs that were built with AddressSanitizer start, although their runtime library is not the first one.
//!
//! The runtime asks this function for its options before it reads `ASAN_OPTIONS`. It refuses to start if another library comes
//! before it, because that library's functions could hide the runtime's. Ours pass every call on to the next library, the runtime.

use std::ffi::{CStr, c_char};

const OPTIONS: &CStr = c"verify_asan_link_order=0";

/// Returns options for the runtime. A program that has this function itself keeps its own.
#[cfg_attr(not(test), unsafe(no_mangle))]
extern "C" fn __asan_default_options() -> *const c_char {
    OPTIONS.as_ptr()
}
