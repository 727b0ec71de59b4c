//! Notices that this process was started with its standard output closed. Before `main`, Rust's
//! runtime opens `/dev/null` in place of a closed stream, so every write would seem to succeed.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// The dynamic linker calls this before Rust's runtime starts.
#[used]
#[unsafe(link_section = ".init_array")]
static EXAMINE: extern "C" fn() = examine;

extern "C" fn examine() {
    WAS_CLOSED.store(fcntl(io::stdout(), FcntlArg::F_GETFD) == Err(Errno::EBADF), Ordering::Relaxed);
}

/// Fails if standard output was closed.
pub(crate) fn check() -> io::Result<()> {
    if WAS_CLOSED.load(Ordering::Relaxed) { Err(Errno::EBADF.into()) } else { Ok(()) }
}
