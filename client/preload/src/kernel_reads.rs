//! Interfaces through which a program asks the kernel to read, later and by itself: libaio, io_uring, and the C library's own
//! asynchronous reads, whose threads do not call our hooks. Their requests name descriptors, and at ours the kernel finds only a
//! placeholder, which it cannot read. So the descriptors get kernel copies (see `exec_handoff`) before such a request is made:
//!
//! - Where a hook sees the request itself, the descriptor in it gets a copy, whatever the file's size ([`serve`]).
//! - A ring's requests lie in memory that no hook sees. Once a process has set up a ring, each of its open files and each file that
//!   it opens from then on gets a copy ([`serve_all`]), up to the size of a copy in memory. A larger file is left alone, because
//!   the program may never read it through its ring, and a line on standard error says so.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use dayfly_meta::limits::MEMORY_COPY_LEN_MAX;

use crate::attach::known_view;
use crate::fault::tell_once;
use crate::{exec_handoff, memory, path, table};

/// Whether this process has set up a ring.
static HAS_RING: AtomicBool = AtomicBool::new(false);

/// Returns whether this process may have files of ours. If not, nobody needs to look at its requests.
pub(crate) fn is_needed() -> bool {
    known_view().is_some()
}

/// Gives a number a kernel copy, if the number is ours. Call it before the kernel is asked to read from the number.
pub(crate) fn serve(number: RawFd) {
    if !table::is_open(number) {
        return;
    }
    let Some(view) = known_view() else { return };
    let before = memory::errno();
    if let Err(fault) = exec_handoff::give_kernel_file(view, number) {
        let reason = std::io::Error::from_raw_os_error(fault.errno());
        tell(number, &format!("it cannot be copied: {reason}"));
    }
    memory::set_errno(before);
}

/// Gives a kernel copy to every open file, and from now on to each file that is opened. Call it when the process has set up a ring.
pub(crate) fn serve_all() {
    if !HAS_RING.swap(true, Ordering::SeqCst) {
        table::numbers(0, RawFd::MAX).for_each(serve_small);
    }
}

/// Gives a number that has just become ours a kernel copy, if this process has a ring.
#[inline]
pub(crate) fn note_open(number: RawFd) {
    if HAS_RING.load(Ordering::SeqCst) {
        serve_small(number);
    }
}

#[cold]
fn serve_small(number: RawFd) {
    let Some(open) = table::find(number) else { return };
    let Ok(file) = open.file() else { return };
    if file.stat().size > MEMORY_COPY_LEN_MAX {
        tell(number, "it is too large to be copied when it is opened");
        return;
    }
    drop(open);
    serve(number);
}

fn tell(number: RawFd, reason: &str) {
    static HAS_TOLD: AtomicBool = AtomicBool::new(false);
    let path = table::find(number).and_then(|open| path::path_of(&open)).unwrap_or_default();
    let path = String::from_utf8_lossy(&path).into_owned();
    let message = format!(
        "asynchronous reads (io_uring, libaio, aio_read) of '{path}' fail with EBADF, because {reason}; make the program use \
         ordinary reads"
    );
    tell_once(&HAS_TOLD, &message);
}
