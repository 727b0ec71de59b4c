//! What a drive of the schedule does wrong, as system calls that fail or take longer.

use std::path::Path;

use crate::harness::strace::Tracer;
use crate::schedule::{Drive, Victim};

/// Begins it in a process.
pub(crate) fn begin(pid: i32, victim: Victim, drive: Drive, folder: &Path) -> Result<Tracer, String> {
    let reads = match victim {
        Victim::Server(_) => "sendfile,pread64,preadv2",
        Victim::Reader(_) => "pread64",
    };
    let writes = "pwritev,pwritev2,pwrite64";
    let (calls, how) = match drive {
        Drive::ReadFails { nth } => (reads, format!("error=EIO:when={nth}+{nth}")),
        Drive::ReadGivesNothing { nth } => (reads, format!("retval=0:when={nth}+{nth}")),
        Drive::ReadIsSlow { ms } => {
            // Nothing seems to be in the page cache, for what is there no drive is asked for.
            let slow = format!("delay_enter={}", ms * 1000);
            return Tracer::inject(pid, &[("preadv2", "error=EAGAIN"), ("pread64", &slow)], folder);
        }
        Drive::WriteFails { nth } => (writes, format!("error=EIO:when={nth}+{nth}")),
        Drive::NoRoom { nth } => ("fallocate", format!("error=ENOSPC:when={nth}+{nth}")),
        Drive::SyncFails { nth } => ("fdatasync,fsync,sync_file_range", format!("error=EIO:when={nth}+{nth}")),
    };
    Tracer::inject(pid, &[(calls, &how)], folder)
}
