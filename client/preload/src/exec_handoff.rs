//! Handing open files over to programs that do not have our records: across `exec` and `spawn`, and over a socket.
//!
//! Such a program inherits descriptors, but not the records of this library; it may even run without the library. So before it
//! starts, each number of ours that it inherits gets a *kernel copy* in place of the placeholder: a kernel file with the same
//! bytes and the same offset (see `kernel_copy`). From then on the kernel keeps the description's offset, for this process too,
//! so that both programs continue where the other stopped.
//!
//! - A forked child may `exec` later. [`prepare_fork`] therefore makes empty kernel copies before the fork, so that parent and
//!   child use the same ones. The first process that needs a copy fills it.
//! - A `vfork` child must not touch the parent's records. It makes its own copy and sends it to the parent (see
//!   `vfork_channel`), which adopts it.
//! - A directory has no bytes. Its number keeps the placeholder, which nothing can be read from. If the kernel is asked to read the
//!   directory, or another process receives it over a socket, an empty directory takes its place (see `nowhere`).
//!
//! The working directory is passed in the environment; `calls/exec.rs` does that.

mod vfork_channel;

pub(crate) use vfork_channel::{
    close as close_vfork_channel, open as open_vfork_channel, receive_all as receive_from_vfork_child,
};

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dayfly_client::reserved_fd::ReservedFd;
use dayfly_client::{View, cancellation};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::MEMORY_COPY_LEN_MAX;

use crate::attach::{known_view, view};
use crate::fault::Fault;
use crate::kernel_copy::{begin, copy_of, errno_of, fill, named_copy_of};
use crate::offset::{EMPTY, FILLED};
use crate::place::Place;
use crate::table::{self, Object, Reference};
use crate::{memory, next, nowhere, placeholder, vfork};

/// The most kernel copies that one fork prepares. It prepares them only for files that fit in memory. More would slow down programs
/// that fork and never call `exec`.
const PREPARED_MAX: usize = 64;

/// Returns the description's kernel copy, filled. From now on the copy stands for the description, in this process and in all
/// others that share the description.
fn filled_copy<'a>(view: &View, description: &'a Reference) -> Result<&'a ReservedFd, Fault> {
    let file = description.file()?;
    if description.offset.kernel_copy().is_none() {
        description.offset.set_kernel_copy(ReservedFd::new(begin(view, file)?));
    }
    let copy = description.offset.kernel_copy().ok_or(libc::EIO)?;
    let filled = description.offset.filled();
    let me = std::process::id().max(FILLED + 1);
    let deadline = Instant::now() + Deadlines::DEFAULT.server;
    loop {
        match filled.compare_exchange(EMPTY, me, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(FILLED) => return Ok(copy),
            // Another process that shares the copy is filling it. If that process has died, this one redoes the work.
            Err(other) => {
                // SAFETY: signal 0 is never delivered; the call only asks whether the process lives.
                let is_dead = unsafe { libc::kill(other as i32, 0) } != 0 && memory::errno() == libc::ESRCH;
                if is_dead && filled.compare_exchange(other, me, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    break;
                }
                if Instant::now() > deadline {
                    return Err(Fault::Errno(libc::EIO));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    let result = copy.get().map_err(|_| Fault::Errno(libc::EIO)).and_then(|copy| {
        fill(view, file, &copy)?;
        put_flags(&copy, description.flags.load(Ordering::Acquire));
        description.offset.hand_over(copy.as_raw_fd());
        Ok(())
    });
    match result {
        Ok(()) => {}
        // Not the variable `filled`: a fork may have moved the state to shared memory in the meantime.
        Err(_) => description.offset.filled().store(EMPTY, Ordering::Release),
    }
    result.map(|()| copy)
}

/// Creates an empty kernel copy for each description that a forked child may hand over to another program, so that parent and
/// child then have the same copy and the same offset.
pub(crate) fn prepare_fork() {
    let Some(view) = known_view() else { return };
    for number in table::numbers(0, RawFd::MAX).take(PREPARED_MAX) {
        let is_inherited = next::fcntl_number(number, libc::F_GETFD, 0) == 0;
        let Some(description) = table::find(number).filter(|_| is_inherited) else { continue };
        if let Ok(file) = description.file()
            && description.offset.kernel_copy().is_none()
            && file.stat().size <= MEMORY_COPY_LEN_MAX
            && let Ok(empty) = begin(view, file)
        {
            description.offset.set_kernel_copy(ReservedFd::new(empty));
        }
    }
}

/// Puts kernel copies in place of all numbers of ours that another program would inherit.
pub(crate) fn hand_over_all() -> Result<(), Fault> {
    let _deferral = cancellation::uninterrupted();
    let Some(view) = known_view() else { return Ok(()) };
    let child = vfork::child();
    for number in candidates(child) {
        let is_ours = child.is_some() || table::is_ours(number);
        if is_ours && next::fcntl_number(number, libc::F_GETFD, 0) == 0 && placeholder::is_at(number) {
            hand_over(view, child, number, 0)?;
        }
    }
    if child.is_some() {
        vfork::forget_copies();
    }
    Ok(())
}

/// Returns every number that may be ours in this process.
fn candidates(child: Option<i32>) -> Vec<RawFd> {
    let mut numbers: Vec<RawFd> = table::numbers(0, RawFd::MAX).collect();
    if let Some(child) = child {
        numbers.extend(vfork::copies_of(child));
        numbers.sort_unstable();
        numbers.dedup();
    }
    numbers
}

/// Puts a kernel copy in place of a number of ours that has a placeholder, and leaves the number's close-on-exec flag as it is.
/// Does nothing in a `vfork` child, which must not change its parent's records.
pub(crate) fn give_kernel_file(view: &View, number: RawFd) -> Result<(), Fault> {
    if vfork::child().is_some() || !placeholder::is_at(number) {
        return Ok(());
    }
    let close_on_exec = next::fcntl_number(number, libc::F_GETFD, 0) == libc::FD_CLOEXEC;
    let flags = if close_on_exec { libc::O_CLOEXEC } else { 0 };
    match table::find(number) {
        Some(description) if matches!(description.object, Object::Directory(_)) => put_directory(&description, number, flags),
        _ => hand_over(view, None, number, flags),
    }
}

/// Puts an empty directory in place of a number of ours that names a directory, so that the kernel refuses to read from the number,
/// as it does for any directory.
fn put_directory(description: &Reference, number: RawFd, flags: i32) -> Result<(), Fault> {
    let _deferral = cancellation::uninterrupted();
    if description.offset.kernel_copy().is_none() {
        let directory = nowhere::open(0).ok_or(libc::EIO)?;
        // The copy is never filled, because this process lists the directory from its own records. From now on the table expects
        // the copy at the number.
        description.offset.set_kernel_copy(ReservedFd::new(directory));
    }
    put(description.offset.kernel_copy().ok_or(libc::EIO)?, number, flags)
}

/// Puts a kernel copy at a number that has just become ours, if the number is standard input: libc's own stream reads standard
/// input without calling our hooks. A file that is too large for memory gets no copy, and reading that stream fails.
pub(crate) fn serve_standard_input(number: RawFd) {
    let is_small = || table::find(number).is_some_and(|open| open.stat().size <= MEMORY_COPY_LEN_MAX);
    let Some(view) = known_view().filter(|_| number == libc::STDIN_FILENO && vfork::child().is_none()) else { return };
    if is_small() {
        let _deferral = cancellation::uninterrupted();
        let before = memory::errno();
        // If the file cannot be copied now, the program gets the error when it reads.
        let _ = give_kernel_file(view, number);
        memory::set_errno(before);
    }
}

/// Puts a kernel copy in place of one number of ours; `flags` are those of `dup3`. If this process is a `vfork` child, `child` is
/// its process id.
pub(crate) fn hand_over(view: &View, child: Option<i32>, number: RawFd, flags: i32) -> Result<(), Fault> {
    let _deferral = cancellation::uninterrupted();
    let description = match child {
        Some(child) => table::find_at_home(vfork::source_of(child, number)),
        None => table::find(number),
    };
    let Some(description) = description else { return Ok(()) };
    if let Object::Place(Place::File(file)) = &description.object {
        if description.offset.kernel_copy().is_none() {
            let copy = named_copy_of(view, file)?;
            if child.is_some() {
                return put_file(&copy, number, flags);
            }
            // The copy is never filled, because nothing is read through it. From now on the table expects the copy at the number.
            description.offset.set_kernel_copy(ReservedFd::new(copy));
        }
        let copy = description.offset.kernel_copy().ok_or(libc::EIO)?;
        return put(copy, number, flags);
    }
    let Ok(file) = description.file() else { return Ok(()) };
    if child.is_none() {
        return match filled_copy(view, &description) {
            // Another thread closed the number meanwhile, and the kernel may have given it to another file.
            Ok(_) if !placeholder::is_at(number) => Ok(()),
            Ok(copy) => put(copy, number, flags),
            // The copy was prepared while /proc was mounted, and cannot be filled without /proc. The other program gets an offset
            // of its own.
            Err(Fault::Errno(libc::EBADF)) => put_file(&copy_with_offset(view, &description, file)?, number, flags),
            Err(fault) => Err(fault),
        };
    }
    if let Some(copy) = description.offset.kernel() {
        return put(copy, number, flags);
    }
    let copy = copy_with_offset(view, &description, file)?;
    vfork_channel::send(&description, copy.as_raw_fd());
    put_file(&copy, number, flags)
}

fn put(copy: &ReservedFd, number: RawFd, flags: i32) -> Result<(), Fault> {
    put_file(&*copy.get().map_err(|_| libc::EIO)?, number, flags)
}

fn put_file(file: &File, number: RawFd, flags: i32) -> Result<(), Fault> {
    if next::dup3(file.as_raw_fd(), number, flags) < 0 { Err(memory::errno().into()) } else { Ok(()) }
}

fn copy_with_offset(view: &View, description: &Reference, file: &dayfly_client::OpenFile) -> Result<File, Fault> {
    let mut copy = copy_of(view, file)?;
    copy.seek(SeekFrom::Start(description.offset.load())).map_err(|error| errno_of(&error))?;
    put_flags(&copy, description.flags.load(Ordering::Acquire));
    Ok(copy)
}

/// Sets the flags of a kernel copy that a program can change.
fn put_flags(copy: &File, flags: i32) {
    let flags = flags & (libc::O_APPEND | libc::O_NOATIME | libc::O_NONBLOCK);
    next::fcntl_number(copy.as_raw_fd(), libc::F_SETFL, flags);
}

/// Copies the flags that a program can change from a description to its kernel copy, if there is one.
pub(crate) fn copy_flags(description: &Reference) {
    let _deferral = cancellation::uninterrupted();
    if let Some(copy) = description.offset.kernel_copy().and_then(|copy| copy.get().ok()) {
        put_flags(&copy, description.flags.load(Ordering::Acquire));
    }
}

/// Returns a kernel copy of the file that is open at a number, to be sent to another process. That process shares the offset. For a
/// directory, returns an empty directory. `None` if the number is not ours.
pub(crate) fn for_another_process(number: RawFd) -> Result<Option<File>, Fault> {
    let _deferral = cancellation::uninterrupted();
    let Some(description) = table::find(number) else { return Ok(None) };
    let view = view()?;
    if let Object::Place(Place::File(file)) = &description.object {
        return Ok(Some(named_copy_of(&view, file)?));
    }
    if description.reached_directory().is_ok() {
        let flags = if description.is_place() { libc::O_PATH } else { 0 };
        return Ok(Some(nowhere::open(flags).ok_or(libc::EIO)?));
    }
    let file = description.file()?;
    // A `vfork` child must not change its parent's records.
    if vfork::child().is_some() {
        return Ok(Some(copy_with_offset(&view, &description, file)?));
    }
    match filled_copy(&view, &description) {
        Ok(copy) => Ok(Some(copy.get().and_then(|copy| copy.duplicate()).map_err(|error| errno_of(&error))?)),
        Err(Fault::Errno(libc::EBADF)) => Ok(Some(copy_with_offset(&view, &description, file)?)),
        Err(fault) => Err(fault),
    }
}
