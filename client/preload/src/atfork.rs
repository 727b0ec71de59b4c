//! Forks: what this library does before and after a fork, in the parent and in the child.
//!
//! Before the fork, offsets move to memory that both processes share, because POSIX gives parent and child one offset per open file
//! description. After the fork, the child forgets numbers that another thread opened or closed while the kernel copied memory and
//! descriptor table: the two copies do not reflect the same moment.
//!
//! `vfork` is not handled here; see [`crate::vfork`].

use std::os::fd::RawFd;

use dayfly_client::{cancellation, fork, reserved_fd};

use crate::attach::known_view;
use crate::{exec_handoff, offset, pages, table, vfork};

/// Registers the functions below with libc. Call it once, before the program's `main`.
pub(crate) fn register() {
    // SAFETY: all three are functions that live as long as the library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
}

extern "C" fn before() {
    let _deferral = cancellation::defer();
    fork::acquire();
    if known_view().is_some() {
        exec_handoff::prepare_fork();
        let open: Vec<table::Reference> = table::descriptions().collect();
        offset::share(open.iter().map(|description| &description.offset));
    }
}

extern "C" fn after_in_parent() {
    fork::release();
}

extern "C" fn after_in_child() {
    let _deferral = cancellation::defer();
    fork::release();
    // The program may have excluded some of its memory from the child (MADV_DONTFORK).
    pages::forget_all();
    vfork::set_home();
    reserved_fd::restore_limit_after_fork();
    exec_handoff::close_vfork_channel();
    if let Some(view) = known_view() {
        view.session().after_fork();
        table::numbers(0, RawFd::MAX).filter(|&number| !table::is_in_kernel(number)).for_each(table::forget);
    }
}
