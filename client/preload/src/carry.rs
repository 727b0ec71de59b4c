//! Carrying what is open over to programs that do not have our records: at `exec`, to a child, over a socket. Behind the same
//! number then lies a file of the kernel's with the same bytes and offset: a sealed memfd, or, where that would be too much
//! memory, a nameless file on the node's data dir.

mod mail;

pub(crate) use mail::{end as end_mail, open as open_mail, take as take_mail};

use std::ffi::CString;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::Instant;

use dayfly_client::reserved_fd::ReservedFd;
use dayfly_client::{OpenFile, View};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::{BLOCK_SIZE_MAX, MEMORY_COPY_LEN_MAX};

use crate::memory::{self, Errno};
use crate::offset::{EMPTY, FILLED};
use crate::process::{self, Fault};
use crate::table::{self, Reference};
use crate::{next, vfork};

/// Copied at a time.
const CHUNK_LEN: u64 = 8 << 20;

/// A descriptor that the kernel has just made for us.
pub(crate) fn owned(descriptor: RawFd) -> Result<File, Errno> {
    if descriptor < 0 {
        return Err(memory::errno());
    }
    // SAFETY: the caller got it from a call that makes descriptors; nobody else owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(descriptor) }))
}

fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// An empty file that can take a copy.
fn empty(view: &View, file: &OpenFile) -> Result<File, Fault> {
    empty_of(view, file, file.stat().size)
}

/// An empty file for `len` bytes of a file.
pub(crate) fn empty_of(view: &View, file: &OpenFile, len: u64) -> Result<File, Fault> {
    if len > MEMORY_COPY_LEN_MAX {
        return Ok(view.session().spill(len)?);
    }
    let path = file.path(view)?;
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    let name = CString::new(&name[..name.len().min(200)]).map_err(|_| libc::EIO)?;
    // SAFETY: the name is a string; the result is checked.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    Ok(owned(descriptor)?)
}

/// Copies all of a file; afterwards nobody can change a copy in memory.
fn fill(view: &View, file: &OpenFile, copy: &File) -> Result<(), Fault> {
    copy_range(view, file, 0, file.stat().size, copy, 0)?;
    if file.stat().size <= MEMORY_COPY_LEN_MAX {
        let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        next::fcntl(copy.as_raw_fd(), libc::F_ADD_SEALS, seals as u64);
    }
    Ok(())
}

/// Copies a range of a file into another.
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

/// A file of the kernel's with the bytes of a file; its offset is 0.
pub(crate) fn copy_of(view: &View, file: &OpenFile) -> Result<File, Fault> {
    let copy = empty(view, file)?;
    fill(view, file, &copy)?;
    Ok(read_only(copy))
}

/// Another descriptor by which a file cannot be written, where /proc can give one.
fn read_only(file: File) -> File {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or(file)
}

/// The file that stands for a description from now on, for this process and those that it shares the description with.
fn carrier<'a>(view: &View, description: &'a Reference) -> Result<&'a ReservedFd, Fault> {
    let file = description.file()?;
    if description.offset.carrier().is_none() {
        description.offset.set_carrier(ReservedFd::new(empty(view, file)?));
    }
    let carrier = description.offset.carrier().ok_or(libc::EIO)?;
    let filled = description.offset.filled();
    let me = std::process::id().max(FILLED + 1);
    let deadline = Instant::now() + Deadlines::DEFAULT.server;
    loop {
        match filled.compare_exchange(EMPTY, me, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(FILLED) => return Ok(carrier),
            // Another process of ours is at it. Should it have died there, its work is done again.
            Err(other) => {
                // SAFETY: signal 0 is never sent; this asks whether the process lives.
                let is_dead = unsafe { libc::kill(other as i32, 0) } != 0 && memory::errno() == libc::ESRCH;
                if is_dead && filled.compare_exchange(other, me, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    break;
                }
                if Instant::now() > deadline {
                    return Err(Fault::Errno(libc::EIO));
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
    let result = fill(view, file, carrier);
    // Asked for again: a fork may have moved it meanwhile.
    match result {
        Ok(()) => description.offset.hand_over(carrier.as_raw_fd()),
        Err(_) => description.offset.filled().store(EMPTY, Ordering::Release),
    }
    result.map(|()| carrier)
}

/// Carriers made at one fork at most, and for files that fit memory: more would be a burden to those who never need it.
const CARRIERS_MAX: usize = 64;

/// Makes the carrier of whatever a child may take to another program, so that both have the same offset then too.
pub(crate) fn before_fork() {
    let Some(view) = process::known_view() else { return };
    for number in table::numbers(0, RawFd::MAX).take(CARRIERS_MAX) {
        let is_inherited = next::fcntl(number, libc::F_GETFD, 0) == 0;
        let Some(description) = table::find(number).filter(|_| is_inherited) else { continue };
        if let Ok(file) = description.file()
            && description.offset.carrier().is_none()
            && file.stat().size <= MEMORY_COPY_LEN_MAX
            && let Ok(empty) = empty(view, file)
        {
            description.offset.set_carrier(ReservedFd::new(empty));
        }
    }
}

/// Whether the kernel has at a number what our record says: the placeholder, or what has taken its place.
pub(crate) fn is_in_kernel(number: RawFd) -> bool {
    if process::is_placeholder(number) {
        return true;
    }
    let identity = |number| process::kernel_stat(number).map(|stat| (stat.st_dev, stat.st_ino));
    let Some(description) = table::find_at_home(number) else { return false };
    let carrier = description.offset.carrier().and_then(|carrier| identity(carrier.as_raw_fd()));
    carrier.is_some() && identity(number) == carrier
}

/// Puts files of the kernel's behind all numbers of ours that another program would inherit.
pub(crate) fn carry_over() -> Result<(), Fault> {
    let Some(view) = process::known_view() else { return Ok(()) };
    let child = vfork::child();
    let numbers = match child {
        Some(child) => vfork::numbers(child),
        None => table::numbers(0, RawFd::MAX).collect(),
    };
    for number in numbers {
        if next::fcntl(number, libc::F_GETFD, 0) == 0 && process::is_placeholder(number) {
            carry_one(view, child, number, 0)?;
        }
    }
    if child.is_some() {
        vfork::forget_copies();
    }
    Ok(())
}

/// Where a number of ours is that of standard input, libc's own stream will read it, and does not come back to us: it
/// gets a file of the kernel's now. One that is too large for memory stays as it is, and is an error there.
pub(crate) fn serve_standard_input(number: RawFd) {
    let is_small = || table::find(number).is_some_and(|open| open.stat().size <= MEMORY_COPY_LEN_MAX);
    let Some(view) = process::known_view().filter(|_| number == libc::STDIN_FILENO && vfork::child().is_none()) else { return };
    if is_small() {
        let before = memory::errno();
        let close_on_exec = next::fcntl(number, libc::F_GETFD, 0) == libc::FD_CLOEXEC;
        // What cannot be read is told by whoever reads it.
        let _ = carry_one(view, None, number, if close_on_exec { libc::O_CLOEXEC } else { 0 });
        memory::set_errno(before);
    }
}

/// Puts a file of the kernel's behind one number of ours; `flags` are those of `dup3`.
pub(crate) fn carry_one(view: &View, child: Option<i32>, number: RawFd, flags: i32) -> Result<(), Fault> {
    let description = match child {
        Some(child) => vfork::find(child, number),
        None => table::find(number),
    };
    let Some(description) = description else { return Ok(()) };
    // A directory has no bytes; it stays what cannot be read.
    let Ok(file) = description.file() else { return Ok(()) };
    if child.is_some() {
        // Our records are the parent's, and the descriptors are not: what we make here it gets by mail.
        if let Some(carrier) = description.offset.kernel() {
            return put(carrier, number, flags);
        }
        let mut copy = copy_of(view, file)?;
        copy.seek(SeekFrom::Start(description.offset.load())).map_err(|error| errno_of(&error))?;
        mail::send(&description, copy.as_raw_fd());
        return put(copy.as_raw_fd(), number, flags);
    }
    put(carrier(view, &description)?.as_raw_fd(), number, flags)
}

fn put(file: RawFd, number: RawFd, flags: i32) -> Result<(), Fault> {
    if next::dup3(file, number, flags) < 0 { Err(memory::errno().into()) } else { Ok(()) }
}

/// A copy of what is open behind a number, to be passed on, with its offset.
pub(crate) fn for_another(number: RawFd) -> Result<Option<File>, Fault> {
    let Some(description) = table::find(number) else { return Ok(None) };
    let view = process::view()?;
    let mut copy = copy_of(&view, description.file()?)?;
    copy.seek(SeekFrom::Start(description.offset.load())).map_err(|error| errno_of(&error))?;
    Ok(Some(copy))
}
