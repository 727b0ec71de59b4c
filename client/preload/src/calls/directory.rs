//! Directory streams. Ours and libc's look alike to a program; a mark at the start of ours tells them apart.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::RawFd;

use dayfly_client::{FileKind, View};
use libc::{DIR, dirent, off_t, size_t};

use super::hook;
use super::open::{give_number, open_in};
use crate::memory::{self, Errno, buffer, put, zeroed};
use crate::offset::Offset;
use crate::process::{Fault, answer};
use crate::table::{self, Description, Object, Reference};
use crate::{next, path};

/// What no stream of libc begins with: there stand a descriptor and a lock, which is never all ones.
const MARK: u64 = u64::from_le_bytes(*b"DFLY\xff\xff\xff\xff");
/// Positions of `.` and `..`; after them come those of the listing, which begin at 0, moved by this many.
const DOTS: u64 = 2;

/// A directory stream of ours.
#[repr(C)]
struct Stream {
    mark: u64,
    open: Reference,
    /// The number in the kernel's table, made when it is asked for.
    number: Option<RawFd>,
    position: u64,
    entry: dirent,
}

fn stream<'a>(pointer: *mut DIR) -> Option<&'a mut Stream> {
    let mark = memory::get(pointer.cast_const().cast::<u64>())?;
    // SAFETY: only our streams begin with the mark; the program passes each to one thread at a time.
    (mark == MARK).then(|| unsafe { &mut *pointer.cast::<Stream>() })
}

fn new_stream(open: Reference, number: Option<RawFd>) -> *mut DIR {
    Box::into_raw(Box::new(Stream { mark: MARK, open, number, position: 0, entry: zeroed() })).cast()
}

hook! {
    fn opendir(path: *const c_char) -> *mut DIR {
        let ours = |view: &View, path: &[u8]| {
            let object = Object::Directory(view.open_directory(path)?);
            let flags = (libc::O_DIRECTORY | libc::O_CLOEXEC).into();
            Ok(new_stream(table::describe(Description { object, flags, offset: Offset::new() })?, None))
        };
        path::at(libc::AT_FDCWD, path, ours, |_, path| next::opendir(path))
    }

    fn fdopendir(descriptor: c_int) -> *mut DIR {
        match table::find(descriptor) {
            None => next::fdopendir(descriptor),
            Some(open) => answer(|| {
                open.directory()?;
                next::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC as u64);
                Ok(new_stream(open, Some(descriptor)))
            }),
        }
    }

    fn readdir | readdir64 (pointer: *mut DIR) -> *mut dirent {
        match stream(pointer) {
            None => next::readdir(pointer),
            Some(stream) => match stream.read() {
                true => &raw mut stream.entry,
                false => std::ptr::null_mut(),
            },
        }
    }

    fn readdir_r | readdir64_r (pointer: *mut DIR, out: *mut dirent, result: *mut *mut dirent) -> c_int {
        let Some(stream) = stream(pointer) else { return next::readdir_r(pointer, out, result) };
        let is_there = stream.read();
        let given = if is_there { put(out, stream.entry) } else { Ok(()) };
        let given = given.and_then(|()| put(result, if is_there { out } else { std::ptr::null_mut() }));
        given.err().unwrap_or(0)
    }

    fn telldir(pointer: *mut DIR) -> i64 {
        stream(pointer).map_or_else(|| next::telldir(pointer), |stream| stream.position as i64)
    }

    fn seekdir(pointer: *mut DIR, position: i64) -> () {
        match stream(pointer) {
            None => next::seekdir(pointer, position),
            Some(stream) => stream.position = position as u64,
        }
    }

    fn rewinddir(pointer: *mut DIR) -> () {
        match stream(pointer) {
            None => next::rewinddir(pointer),
            Some(stream) => stream.position = 0,
        }
    }

    fn dirfd(pointer: *mut DIR) -> c_int {
        let Some(stream) = stream(pointer) else { return next::dirfd(pointer) };
        match stream.number {
            Some(number) => number,
            None => answer(|| {
                let number = give_number(&stream.open, true)?;
                stream.number = Some(number);
                Ok(number)
            }),
        }
    }

    fn closedir(pointer: *mut DIR) -> c_int {
        let Some(stream) = stream(pointer) else { return next::closedir(pointer) };
        // A stream that is used after its end is not taken for ours again.
        stream.mark = 0;
        // SAFETY: made by `Box::into_raw` in `new_stream`; the program gives it up.
        let stream = unsafe { Box::from_raw(pointer.cast::<Stream>()) };
        match stream.number {
            Some(number) => super::descriptor::close(number),
            None => 0,
        }
    }

    fn getdents64(descriptor: c_int, out: *mut c_void, len: size_t) -> isize {
        match table::find(descriptor) {
            None => next::getdents64(descriptor, out, len),
            Some(open) => answer(|| read_records(&open, buffer(out, len)?)),
        }
    }
}

impl Stream {
    /// Fills in the next entry; `false` at the end.
    fn read(&mut self) -> bool {
        let Some((name, inode, kind, next)) = entry_at(&self.open, self.position) else { return false };
        self.position = next;
        self.entry.d_ino = inode;
        self.entry.d_off = next as off_t;
        self.entry.d_type = kind;
        self.entry.d_reclen = record_len(name.len()) as u16;
        let room = &mut self.entry.d_name;
        let len = name.len().min(room.len() - 1);
        for (to, from) in room.iter_mut().zip(&name[..len]) {
            *to = *from as c_char;
        }
        room[len] = 0;
        true
    }
}

/// Bytes of a `dirent` with a name of this length: 19 before it, a NUL after it, up to a multiple of 8.
fn record_len(name_len: usize) -> usize {
    (19 + name_len + 1).next_multiple_of(8)
}

/// The entry at a position: name, inode, type, and the position of the next.
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

/// As many records as there is room for, from the description's offset on.
fn read_records(open: &Description, out: &mut [u8]) -> Result<isize, Fault> {
    open.directory()?;
    let mut filled = 0;
    let mut position = open.offset.load();
    while let Some((name, inode, kind, next)) = entry_at(open, position) {
        let len = record_len(name.len());
        let Some(record) = out.get_mut(filled..filled + len) else { break };
        record.fill(0);
        record[..8].copy_from_slice(&inode.to_ne_bytes());
        record[8..16].copy_from_slice(&next.to_ne_bytes());
        record[16..18].copy_from_slice(&(len as u16).to_ne_bytes());
        record[18] = kind;
        record[19..19 + name.len()].copy_from_slice(name);
        filled += len;
        position = next;
    }
    if filled == 0 && entry_at(open, position).is_some() {
        return Err(Fault::Errno(libc::EINVAL));
    }
    open.offset.store(position);
    Ok(filled as isize)
}

/// Opens a directory below another, for walks.
pub(super) fn open_at(directory: RawFd, path: *const c_char) -> Result<*mut DIR, Errno> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let number = path::at(
        directory,
        path,
        |view, path| open_in(view, path, flags),
        |directory, path| next::openat(directory, path, flags, 0),
    );
    if number < 0 {
        return Err(memory::errno());
    }
    let stream = fdopendir(number);
    if stream.is_null() { Err(memory::errno()) } else { Ok(stream) }
}
