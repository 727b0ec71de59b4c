//! Kernel files with the bytes of a file of the namespace, for code that this library does not reach: another program, the
//! kernel's `exec`, a mapping.
//!
//! A copy of up to `MEMORY_COPY_LEN_MAX` bytes is a memfd, which is sealed once it is complete. A larger one would take too
//! much memory: it is a file without a name on the node's data dir.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use dayfly_client::{OpenFile, View};
use dayfly_meta::limits::{BLOCK_SIZE_MAX, MEMORY_COPY_LEN_MAX};

use crate::fault::Fault;
use crate::memory::{self, Errno};
use crate::next;

/// Bytes that are copied at a time.
const CHUNK_LEN: u64 = 8 << 20;
/// Bytes of a file's name that become the memfd's name, which the kernel limits to 249.
const NAME_LEN_MAX: usize = 200;

pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Creates an empty file that has room for all of a file.
pub(crate) fn empty(view: &View, file: &OpenFile) -> Result<File, Fault> {
    empty_of(view, file, file.stat().size)
}

/// Creates an empty file that has room for `len` bytes of a file.
pub(crate) fn empty_of(view: &View, file: &OpenFile, len: u64) -> Result<File, Fault> {
    if len > MEMORY_COPY_LEN_MAX {
        return Ok(view.session().spill(len)?);
    }
    let path = file.path(view)?;
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    let name = CString::new(&name[..name.len().min(NAME_LEN_MAX)]).map_err(|_| libc::EIO)?;
    // SAFETY: the name is a string; `owned` checks the result.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    Ok(memory::owned(descriptor)?)
}

/// Copies all of a file. Afterward, nobody can change an in-memory copy.
pub(crate) fn fill(view: &View, file: &OpenFile, copy: &File) -> Result<(), Fault> {
    copy_range(view, file, 0, file.stat().size, copy, 0)?;
    if file.stat().size <= MEMORY_COPY_LEN_MAX {
        let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        next::fcntl_number(copy.as_raw_fd(), libc::F_ADD_SEALS, seals);
    }
    Ok(())
}

/// Copies `len` bytes at offset `from` of a file to offset `at` of another.
pub(crate) fn copy_range(view: &View, file: &OpenFile, from: u64, len: u64, to: &File, at: u64) -> Result<(), Fault> {
    const { assert!(CHUNK_LEN <= BLOCK_SIZE_MAX) };
    let mut buffer = vec![0; len.min(CHUNK_LEN) as usize];
    let mut done = 0;
    while done < len {
        let count = (len - done).min(CHUNK_LEN) as usize;
        let count = view.read_at(file, from + done, &mut buffer[..count])?;
        if count == 0 {
            break;
        }
        to.write_all_at(&buffer[..count], at + done).map_err(|error| errno_of(&error))?;
        done += count as u64;
    }
    Ok(())
}

/// Creates a complete copy of a file, with offset 0.
pub(crate) fn copy_of(view: &View, file: &OpenFile) -> Result<File, Fault> {
    let copy = empty(view, file)?;
    fill(view, file, &copy)?;
    Ok(read_only(copy))
}

/// Opens a file again for reading only. Where /proc is not mounted, the descriptor stays writable.
fn read_only(file: File) -> File {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or(file)
}
