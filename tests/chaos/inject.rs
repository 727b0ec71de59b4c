//! Injects faults of drives and of sources, as system calls that fail or are delayed.

use std::path::{Path, PathBuf};

use crate::chaos::schedule::{Drive, Sources, Victim};
use crate::harness::strace::Tracer;

/// Starts to inject `drive`'s faults into a process.
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
            // The page cache must look empty, because a read of a cached page never reaches the drive.
            let slow = format!("delay_enter={}", ms * 1000);
            return Tracer::inject(pid, &[("preadv2", "error=EAGAIN"), ("pread64", &slow)], folder);
        }
        Drive::WriteFails { nth } => (writes, format!("error=EIO:when={nth}+{nth}")),
        Drive::NoRoom { nth } => ("fallocate", format!("error=ENOSPC:when={nth}+{nth}")),
        Drive::SyncFails { nth } => ("fdatasync,fsync,sync_file_range", format!("error=EIO:when={nth}+{nth}")),
    };
    Tracer::inject(pid, &[(calls, &how)], folder)
}

/// Starts to inject faults into a server's reads of the sources.
pub(crate) fn begin_sources(pid: i32, sources: Sources, files: &[PathBuf], folder: &Path) -> Result<Tracer, String> {
    let how = match sources {
        Sources::ReadFails { nth } => format!("error=EIO:when={nth}+{nth}"),
        Sources::ReadIsSlow { ms } => format!("delay_enter={}", ms * 1000),
    };
    Tracer::inject_at(files, pid, &[("read,pread64,preadv2", &how)], folder)
}
