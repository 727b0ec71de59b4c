//! Directory streams.
//!
//! A program holds a `DIR *` that is either libc's or points to a [`Stream`] of ours. A mark at the start of ours, which no libc
//! stream can have there, tells them apart.
//!
//! The walks of `ftw`, `fts` and `scandir` use a [`Listing`], which owns a stream of either kind.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::RawFd;

use dayfly_client::{FileKind, View};
use libc::{DIR, dirent, off_t, size_t};

use super::descriptor::{close, fcntl};
use super::hook;
use super::open::{give_number, open_in, openat};
use crate::fault::{Fault, answer, answer_from_memory, answer_once};
use crate::memory::{self, Errno, FromC, zeroed};
use crate::path;
use crate::table::{self, Description, Object, Reference};

/// The mark at the start of our streams. A libc stream begins with a descriptor and a lock, and the lock is never all ones.
const MARK: u64 = u64::from_le_bytes(*b"DFLY\xff\xff\xff\xff");
/// The number of positions for `.` and `..`. The positions of the listing, which begin at 0, are moved up by this number.
const DOTS: u64 = 2;

/// A directory stream of ours.
#[repr(C)]
struct Stream {
    mark: u64,
    open: Reference,
    /// The descriptor that `dirfd` returns, which is created on the first call.
    number: Option<RawFd>,
    /// The position of the next entry; `None` before the first, which is where the description's offset says.
    position: Option<u64>,
    /// The entry that `readdir` returned last.
    entry: dirent,
}

/// Returns the stream behind a program's pointer if it is one of ours.
fn stream(pointer: FromC<'_, *mut DIR>) -> Option<&mut Stream> {
    // SAFETY: a stream of either kind is longer than the mark.
    let mark = unsafe { FromC::new(pointer.raw().cast_const().cast::<u64>()) }.get()?;
    // SAFETY: only our streams begin with the mark, and the program uses a stream in one thread at a time.
    (mark == MARK).then(|| unsafe { &mut *pointer.raw().cast::<Stream>() })
}

fn new_stream(open: Reference, number: Option<RawFd>) -> *mut DIR {
    Box::into_raw(Box::new(Stream { mark: MARK, open, number, position: None, entry: zeroed() })).cast()
}

hook! {
    fn opendir(path: FromC<*const c_char>) -> *mut DIR {
        let ours = |view: &View, path: &[u8]| {
            let object = Object::Directory(view.open_directory(path)?);
            Ok(new_stream(table::describe(Description::new(object, libc::O_DIRECTORY | libc::O_CLOEXEC))?, None))
        };
        path::at(libc::AT_FDCWD, path, ours, |_, path| {
            let stream = opendir::next(path);
            if !stream.is_null() {
                // SAFETY: libc's new stream.
                table::created(dirfd::next(unsafe { FromC::new(stream) }));
            }
            stream
        })
    }

    fn fdopendir(descriptor: c_int) -> *mut DIR {
        match table::find(descriptor) {
            None => fdopendir::next(descriptor),
            Some(open) => answer_once(|| {
                open.reached_directory()?;
                fcntl::next(descriptor, libc::F_SETFD, FromC::number(libc::FD_CLOEXEC as u64));
                Ok(new_stream(open, Some(descriptor)))
            }),
        }
    }

    fn readdir | readdir64 (pointer: FromC<*mut DIR>) -> *mut dirent {
        match stream(pointer) {
            None => readdir::next(pointer),
            Some(stream) if stream.open.is_place() => memory::fail(libc::EBADF),
            Some(stream) => match stream.read() {
                true => &raw mut stream.entry,
                false => std::ptr::null_mut(),
            },
        }
    }

    fn readdir_r | readdir64_r (pointer: FromC<*mut DIR>, out: FromC<*mut dirent>, result: FromC<*mut *mut dirent>) -> c_int {
        let Some(stream) = stream(pointer) else { return readdir_r::next(pointer, out, result) };
        let has_entry = stream.read();
        let stored = if has_entry { out.put(stream.entry) } else { Ok(()) };
        let stored = stored.and_then(|()| result.put(if has_entry { out.raw() } else { std::ptr::null_mut() }));
        stored.err().unwrap_or(0)
    }

    fn telldir(pointer: FromC<*mut DIR>) -> i64 {
        match stream(pointer) {
            None => telldir::next(pointer),
            Some(stream) => stream.position() as i64,
        }
    }

    fn seekdir(pointer: FromC<*mut DIR>, position: i64) -> () {
        match stream(pointer) {
            None => seekdir::next(pointer, position),
            Some(stream) => stream.move_to(position as u64),
        }
    }

    fn rewinddir(pointer: FromC<*mut DIR>) -> () {
        match stream(pointer) {
            None => rewinddir::next(pointer),
            Some(stream) => stream.move_to(0),
        }
    }

    fn dirfd(pointer: FromC<*mut DIR>) -> c_int {
        let Some(stream) = stream(pointer) else { return dirfd::next(pointer) };
        match stream.number {
            Some(number) => number,
            None => answer(|| {
                let number = give_number(&stream.open, true)?;
                stream.number = Some(number);
                Ok(number)
            }),
        }
    }

    fn closedir(pointer: FromC<*mut DIR>) -> c_int {
        let Some(stream) = stream(pointer) else { return closedir::next(pointer) };
        // If the program uses the stream after this, it must not be mistaken for one of ours.
        stream.mark = 0;
        // SAFETY: made by `Box::into_raw` in `new_stream`; the program gives up ownership.
        let stream = unsafe { Box::from_raw(pointer.raw().cast::<Stream>()) };
        match stream.number {
            Some(number) => close(number),
            None => 0,
        }
    }

    fn getdents64(descriptor: c_int, out: FromC<*mut c_void>, len: size_t) -> isize {
        match table::find(descriptor) {
            None => getdents64::next(descriptor, out, len),
            Some(open) => answer_from_memory(|| {
                open.directory()?;
                read_records(&open, &RECORD, out.start_of_buffer(len)?, len)
            }),
        }
    }
}

/// Answers the system call `getdents`, which no function of the C library makes, for a directory of ours. `None` for others.
#[cfg(target_arch = "x86_64")]
pub(super) fn old_getdents(descriptor: c_int, out: FromC<*mut c_void>, len: size_t) -> Option<isize> {
    let open = table::find(descriptor)?;
    Some(answer_from_memory(|| {
        open.directory()?;
        read_records(&open, &OLD_RECORD, out.start_of_buffer(len)?, len)
    }))
}

impl Stream {
    fn position(&self) -> u64 {
        self.position.unwrap_or_else(|| self.open.offset.load())
    }

    /// Goes to a position, and takes the description's offset there, for others who use the description.
    fn move_to(&mut self, position: u64) {
        self.position = Some(position);
        if self.number.is_some() {
            self.open.offset.store(position);
        }
    }

    /// Fills in the next entry. Returns `false` at the end.
    fn read(&mut self) -> bool {
        let position = self.position();
        let Some((name, inode, kind, next)) = entry_at(&self.open, position) else { return false };
        self.entry.d_ino = inode;
        self.entry.d_off = next as off_t;
        self.entry.d_type = kind;
        self.entry.d_reclen = RECORD.len(name.len()) as u16;
        let room = &mut self.entry.d_name;
        let len = name.len().min(room.len() - 1);
        for (to, from) in room.iter_mut().zip(&name[..len]) {
            *to = *from as c_char;
        }
        room[len] = 0;
        self.move_to(next);
        true
    }
}

/// How the kernel lays out an entry: inode (8 bytes), next position (8), length (2), type and name in either order, and zeros up
/// to a multiple of 8.
struct RecordForm {
    name_at: usize,
    /// Whether the type is the last byte, after at least one zero that ends the name. Otherwise it comes before the name.
    is_type_last: bool,
}

/// The form of `getdents64`, which is also C's `dirent`.
const RECORD: RecordForm = RecordForm { name_at: 19, is_type_last: false };
/// The form of `getdents`.
#[cfg(target_arch = "x86_64")]
const OLD_RECORD: RecordForm = RecordForm { name_at: 18, is_type_last: true };

impl RecordForm {
    /// Returns the length of a record in bytes.
    fn len(&self, name_len: usize) -> usize {
        (self.name_at + name_len + 1 + usize::from(self.is_type_last)).next_multiple_of(8)
    }
}

/// Returns the entry at a position: name, inode, type, and the position of the next one.
fn entry_at(open: &Description, position: u64) -> Option<(&[u8], u64, u8, u64)> {
    let directory = open.directory().ok()?;
    match position {
        0 => Some((b".", directory.stat().inode, libc::DT_DIR, 1)),
        1 => Some((b"..", directory.parent_inode(), libc::DT_DIR, DOTS)),
        _ => {
            let entry = directory.entry(position - DOTS)?;
            let kind = match entry.kind {
                FileKind::File => libc::DT_REG,
                FileKind::Directory => libc::DT_DIR,
                FileKind::Symlink => libc::DT_LNK,
            };
            Some((entry.name, entry.inode, kind, entry.next + DOTS))
        }
    }
}

/// Writes as many records as fit, starting at the description's offset. `out` is the writable part of the program's buffer, which
/// has `len` bytes in all.
///
/// # Errors
///
/// If there is no room for a single record: EFAULT if a part of the buffer cannot be written, else EINVAL.
fn read_records(open: &Description, form: &RecordForm, out: &mut [u8], len: usize) -> Result<isize, Fault> {
    let mut filled = 0;
    let mut position = open.offset.load();
    while let Some((name, inode, kind, next)) = entry_at(open, position) {
        let record_len = form.len(name.len());
        let Some(record) = out.get_mut(filled..filled + record_len) else { break };
        record.fill(0);
        record[..8].copy_from_slice(&inode.to_ne_bytes());
        record[8..16].copy_from_slice(&next.to_ne_bytes());
        record[16..18].copy_from_slice(&(record_len as u16).to_ne_bytes());
        record[if form.is_type_last { record_len - 1 } else { 18 }] = kind;
        record[form.name_at..form.name_at + name.len()].copy_from_slice(name);
        filled += record_len;
        position = next;
    }
    if filled == 0 && entry_at(open, position).is_some() {
        return Err(Fault::Errno(if out.len() < len { libc::EFAULT } else { libc::EINVAL }));
    }
    open.offset.store(position);
    Ok(filled as isize)
}

/// A directory stream, of ours or of libc's, that this library has opened for a walk.
pub(super) struct Listing(*mut DIR);

impl Listing {
    /// Opens a directory by its path.
    ///
    /// # Errors
    ///
    /// The `errno` of `opendir`.
    pub(super) fn open(path: &CStr) -> Result<Self, Errno> {
        Self::own(opendir(path.into()))
    }

    /// Opens a directory by a path relative to another one.
    ///
    /// # Errors
    ///
    /// The `errno` of `openat`.
    pub(super) fn open_at(directory: RawFd, path: FromC<*const c_char>) -> Result<Self, Errno> {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let ours = |view: &View, path: &[u8]| open_in(view, path, flags);
        let number = path::at(directory, path, ours, |directory, path| openat::next(directory, path, flags, 0));
        if number < 0 { Err(memory::errno()) } else { Self::own(fdopendir(number)) }
    }

    fn own(stream: *mut DIR) -> Result<Self, Errno> {
        if stream.is_null() { Err(memory::errno()) } else { Ok(Self(stream)) }
    }

    /// Returns the next entry, or `None` at the end.
    pub(super) fn next(&mut self) -> Option<&dirent> {
        // SAFETY: the stream is open until this is dropped. An entry is valid until the next call.
        unsafe { readdir(FromC::new(self.0)).as_ref() }
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        // SAFETY: the stream is open, and nobody uses it after this.
        closedir(unsafe { FromC::new(self.0) });
    }
}

/// Returns the name in an entry.
pub(super) fn name_of(entry: &dirent) -> Vec<u8> {
    entry.d_name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect()
}
