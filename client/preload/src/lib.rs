//! `libdayfly_preload.so` shows a session's namespace to unchanged programs. The dynamic linker loads it before the C library
//! (`LD_PRELOAD`). It answers calls about paths below the session's prefix, and about descriptors that such calls returned. Every
//! other call goes on to the C library, at the cost of a comparison.
//!
//! # Parts, from the bottom up
//!
//! | module | what it holds |
//! |---|---|
//! | `heap` | memory for this library, apart from `malloc` |
//! | `pages` | which memory of the program can be read and written |
//! | `memory` | the border to C: pointers from C (`FromC`), `errno` |
//! | `next` | the functions of the next library, found by name on first use |
//! | `fault` | why a call fails, how C learns of it, the line on standard error |
//! | `sanitizer` | options for AddressSanitizer |
//! | `setup` | the session that the environment names |
//! | `placeholder` | the kernel descriptor that holds a number for each open file of the namespace |
//! | `place` | what a descriptor opened with `O_PATH` stands for |
//! | `vfork` | which process runs in this memory |
//! | `offset`, `table` | open file descriptions, their offsets, and the numbers that name them |
//! | `attach` | the view on the session |
//! | `descriptor_link` | paths such as `/proc/self/fd/N` |
//! | `cwd`, `path` | the working directory; which paths are ours |
//! | `stat_form` | a view's attributes as `struct stat` |
//! | `nowhere` | an empty kernel directory that no path leads to |
//! | `kernel_copy`, `exec_handoff` | kernel files with the same bytes, for programs that do not share our records |
//! | `kernel_reads` | kernel copies that are made at once, for interfaces that name descriptors to the kernel |
//! | `elf`, `library` | libraries of the namespace, for the dynamic linker |
//! | `atfork` | what happens around a fork |
//! | `calls` | the hooks: functions with C's names |
//! | `api` | the functions of `dayfly.h` |
//!
//! A module uses only modules above it in this table. `docs/SEMANTICS.md` says what a program sees.
//!
//! # Invariants
//!
//! - A program that does not touch the namespace runs as it would without the library: same results, same `errno`, same
//!   descriptors.
//! - Nothing panics into C. The unwinding of a thread that is canceled passes only through hooks that are waiting in the next
//!   library; it never meets `catch_unwind` (see `dayfly_client::cancellation`).
//! - The library follows a pointer of the program only after it has checked that memory is there. A bad pointer gives the error
//!   that the kernel gives.
//! - A fork copies all state as it is. No lock is held across a fork, and nothing waits without a deadline.
//! - The library starts no thread.
//! - A function that POSIX calls async-signal-safe stays so, even in the namespace and on its first use. It takes no lock that
//!   this thread may already hold, calls no function of the C library that takes such a lock, and allocates from `heap` only. Its
//!   state changes in single atomic steps. Between two steps, a signal handler may run and change the same state.

#![cfg_attr(test, allow(dead_code, reason = "in a test build no C code calls the hooks"))]

mod api;
mod atfork;
mod attach;
mod calls;
mod cwd;
mod descriptor_link;
mod elf;
mod environment;
mod exec_handoff;
mod fault;
mod heap;
mod kernel_copy;
mod kernel_reads;
mod last_name;
mod library;
mod memory;
mod next;
mod nowhere;
mod offset;
mod pages;
mod path;
mod place;
mod placeholder;
mod sanitizer;
mod setup;
mod stat_form;
mod table;
mod vfork;

/// The dynamic linker calls this before the program's `main`.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

#[global_allocator]
static HEAP: heap::Heap = heap::Heap;

#[cfg(not(test))]
extern "C" fn start() {
    fault::read_environment();
    calls::prepare();
    dayfly_client::notice::show_with(fault::notify);
    if setup::read_environment() {
        vfork::set_home();
        cwd::inherit();
        atfork::register();
        calls::syscall::begin();
    }
}
