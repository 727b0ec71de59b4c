//! Kernel files with the bytes of a file of the namespace, for code that this library does not reach: another program, the
//! kernel's `exec`, a mapping.
//!
//! A copy of up to `MEMORY_COPY_LEN_MAX` bytes is a memfd, which is sealed once it is complete. A larger one would take too
//! much memory: it is a file without a name on the node's data dir, and all processes of the node share it. Only if the node has no
//! such file, for example because its owner may not read it, a process has a file of its own there.
//!
//! A program gets a descriptor that is open for reading only, as every file of the namespace is. The kernel itself then refuses to
//! write to the file, to truncate it, or to make a mapping of it writable.

use std::ffi::CString;
use std::fs::{File, FileTimes, OpenOptions, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::time::{Duration, SystemTime};

use dayfly_client::{OpenFile, Stat, View};
use dayfly_meta::limits::{BLOCK_SIZE_MAX, MEMORY_COPY_LEN_MAX};
use dayfly_meta::wire::local::Original;

use crate::fault::Fault;
use crate::heap::buffer;
use crate::memory::{self, Errno};
use crate::next;

/// Bytes that are copied at a time.
const CHUNK_LEN: u64 = 8 << 20;
/// Bytes of a file's name that become the memfd's name, which the kernel limits to 249.
const NAME_LEN_MAX: usize = 200;

pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Creates a file for [`fill`], unless there is a shared copy. The descriptor is open for reading; [`fill`] opens the file again.
pub(crate) fn begin(view: &View, file: &OpenFile) -> Result<File, Fault> {
    match shared(view, file)? {
        Some(copy) => Ok(copy),
        None => Ok(read_only(empty_of(view, file, file.stat().size)?)),
    }
}

/// Returns the copy of a large file that all processes of the node share. `None` if there is none.
fn shared(view: &View, file: &OpenFile) -> Result<Option<File>, Fault> {
    let Stat { size, permissions, .. } = file.stat();
    // The server opens the copy again for each process, so it must be readable.
    if size <= MEMORY_COPY_LEN_MAX || permissions & 0o400 == 0 {
        return Ok(None);
    }
    // Nobody may open it for writing by its name in /proc.
    let fill = |copy: &File| write(view, file, copy, permissions & !0o222);
    view.session().shared_copy(file.dataset(), Original::Sample(file.sample()), fill)
}

/// Creates an empty file that has room for `len` bytes of a file. The descriptor is open for reading and writing.
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

/// Copies all of a file, with its mode and its time, unless the copy is whole. Afterward, nobody can change an in-memory copy.
///
/// # Errors
///
/// EBADF if the copy was opened for reading and /proc is not mounted anymore, so it cannot be opened for writing.
pub(crate) fn fill(view: &View, file: &OpenFile, copy: &File) -> Result<(), Fault> {
    let stat = file.stat();
    // A copy is written from its beginning to its end.
    if stat.size > MEMORY_COPY_LEN_MAX && copy.metadata().is_ok_and(|copy| copy.len() == stat.size) {
        return Ok(());
    }
    let writer = again(copy, OpenOptions::new().write(true));
    let writer = writer.as_ref().unwrap_or(copy);
    write(view, file, writer, stat.permissions)?;
    if stat.size <= MEMORY_COPY_LEN_MAX {
        let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        next::fcntl_number(writer.as_raw_fd(), libc::F_ADD_SEALS, seals);
    }
    Ok(())
}

/// Copies all of a file into an empty one, with its time.
fn write(view: &View, file: &OpenFile, copy: &File, permissions: u32) -> Result<(), Fault> {
    let stat = file.stat();
    copy_range(view, file, 0, stat.size, copy, 0)?;
    // Even without the mode and the times, the copy has the right bytes, which matters more.
    let _ = copy.set_permissions(Permissions::from_mode(permissions));
    let _ = times(&stat).map(|times| copy.set_times(times));
    Ok(())
}

/// Returns a file's only time as both of the times that can be set. `None` if C cannot express this time.
fn times(stat: &Stat) -> Option<FileTimes> {
    let seconds = Duration::from_secs(stat.mtime_s.unsigned_abs());
    let whole = match stat.mtime_s < 0 {
        true => SystemTime::UNIX_EPOCH.checked_sub(seconds),
        false => SystemTime::UNIX_EPOCH.checked_add(seconds),
    };
    let time = whole?.checked_add(Duration::from_nanos(stat.mtime_ns.into()))?;
    Some(FileTimes::new().set_accessed(time).set_modified(time))
}

/// Copies `len` bytes at offset `from` of a file to offset `at` of another.
pub(crate) fn copy_range(view: &View, file: &OpenFile, from: u64, len: u64, to: &File, at: u64) -> Result<(), Fault> {
    const { assert!(CHUNK_LEN <= BLOCK_SIZE_MAX) };
    let mut buffer = buffer(len.min(CHUNK_LEN) as usize)?;
    let mut done = 0;
    while done < len {
        let count = (len - done).min(buffer.len() as u64) as usize;
        let count = view.read_at(file, from + done, &mut buffer[..count])?;
        if count == 0 {
            break;
        }
        to.write_all_at(&buffer[..count], at + done).map_err(|error| errno_of(&error))?;
        done += count as u64;
    }
    Ok(())
}

/// Returns a complete copy of a file, with offset 0.
pub(crate) fn copy_of(view: &View, file: &OpenFile) -> Result<File, Fault> {
    match shared(view, file)? {
        Some(copy) => Ok(copy),
        None => own_copy_of(view, file),
    }
}

/// Creates a complete copy of a file, which no other process uses, with offset 0.
pub(crate) fn own_copy_of(view: &View, file: &OpenFile) -> Result<File, Fault> {
    let writable = empty_of(view, file, file.stat().size)?;
    // Opened before the file gets its own mode, which may not allow it.
    let copy = read_only(writable);
    fill(view, file, &copy)?;
    Ok(copy)
}

/// Creates a complete copy of a file, behind a descriptor that only names it (`O_PATH`).
pub(crate) fn named_copy_of(view: &View, file: &OpenFile) -> Result<File, Fault> {
    let copy = copy_of(view, file)?;
    Ok(again(&copy, OpenOptions::new().read(true).custom_flags(libc::O_PATH)).unwrap_or(copy))
}

/// Returns a descriptor for mapping a file that is complete. No mapping made from it can become writable for other processes.
pub(crate) fn for_mapping(file: File) -> File {
    // Needed where /proc is not mounted, because the descriptor stays writable there. A file that is not in memory has no seals.
    next::fcntl_number(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE);
    read_only(file)
}

/// Opens a file again for reading only. Where /proc is not mounted, the descriptor stays writable.
fn read_only(file: File) -> File {
    again(&file, OpenOptions::new().read(true)).unwrap_or(file)
}

/// Opens a file again, with other flags. `None` where /proc is not mounted.
fn again(file: &File, options: &OpenOptions) -> Option<File> {
    options.open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}
