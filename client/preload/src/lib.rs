//! `libdayfly_preload.so`: loaded before the C library, it answers calls about paths below the session's prefix, and about
//! descriptors that such calls gave out. Everything else goes on to the C library at the cost of a comparison.
//!
//! The functions in [`calls`] have C's names and contracts. They are safe to read: pointers are followed in [`memory`] only,
//! the next library is called through [`next`], and whose a path or a number is stands in [`path`] and [`table`].
//! `docs/SEMANTICS.md` says what a program sees.

#![cfg_attr(test, allow(dead_code, reason = "in a build for tests, C calls nothing"))]

mod api;
mod calls;
mod carry;
mod cwd;
mod memory;
mod next;
mod offset;
mod path;
mod process;
mod table;
mod vfork;

/// Runs before the program's `main`.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

#[cfg(not(test))]
extern "C" fn start() {
    process::set_up();
}
