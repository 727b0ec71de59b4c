//! `fts` below the prefix: a walk over our own directory calls.
//!
//! A program reads the structures of a walk directly, so [`Entry`] and [`Public`] have the layout of `FTSENT` and `FTS`. A mark
//! among the options tells our walks from libc's. Our walks never change the working directory. libc's walks do so unless the
//! program passes FTS_NOCHDIR, but programs must not depend on that.
//!
//! Ownership: a walk owns its current entry, the directories above it, the entries still to be visited, and the children that
//! `fts_children` has listed. Each entry is freed when the walk moves past it, or with the walk.

use std::ffi::{CStr, c_char, c_int, c_long, c_short, c_ushort, c_void};
use std::mem::offset_of;
use std::ptr::{NonNull, null_mut};

use libc::{dev_t, ino_t, nlink_t, stat as KernelStat};

use super::directory::{Listing, name_of};
use super::{hook, stat};
use crate::memory::{self, FromC, set_errno, zeroed};
use crate::path::is_ours;

// Options: FTS_COMFOLLOW, FTS_LOGICAL, FTS_SEEDOT, FTS_XDEV.
const FOLLOW_ROOTS: c_int = 0x1;
const LOGICAL: c_int = 0x2;
const SEE_DOT: c_int = 0x20;
const ONE_DEVICE: c_int = 0x40;
/// The mark of our walks, in the range of options that programs do not set.
const OURS: c_int = 0x4000_0000;

// What an entry is (`fts_info`).
const D: c_ushort = 1;
const DC: c_ushort = 2;
const DEFAULT: c_ushort = 3;
const DNR: c_ushort = 4;
const DOT: c_ushort = 5;
const DP: c_ushort = 6;
const F: c_ushort = 8;
const NS: c_ushort = 10;
const SL: c_ushort = 12;
const SLNONE: c_ushort = 13;

// Instructions of `fts_set`.
const AGAIN: c_ushort = 1;
const FOLLOW: c_ushort = 2;
const NO_INSTRUCTION: c_ushort = 3;
const SKIP: c_ushort = 4;

/// `FTSENT`. Its name begins in the last field and continues after the structure.
#[repr(C)]
pub(crate) struct Entry {
    cycle: *mut Entry,
    parent: *mut Entry,
    link: *mut Entry,
    number: c_long,
    pointer: *mut c_void,
    access_path: *mut c_char,
    path: *mut c_char,
    errno: c_int,
    symlink_descriptor: c_int,
    path_len: c_ushort,
    name_len: c_ushort,
    inode: ino_t,
    device: dev_t,
    links: nlink_t,
    level: c_short,
    info: c_ushort,
    flags: c_ushort,
    instruction: c_ushort,
    stat: *mut KernelStat,
    name: [c_char; 1],
}

/// `FTS`.
#[repr(C)]
pub(crate) struct Public {
    current: *mut Entry,
    child: *mut Entry,
    array: *mut *mut Entry,
    device: dev_t,
    path: *mut c_char,
    root_descriptor: c_int,
    path_len: c_int,
    item_count: c_int,
    compare: Compare,
    options: c_int,
}

/// The program's function that orders entries.
type Compare = Option<extern "C-unwind" fn(*const *const Entry, *const *const Entry) -> c_int>;

/// A walk of ours.
#[repr(C)]
struct Walk {
    public: Public,
    /// The parent of all roots, which the program does not see.
    top: NonNull<Entry>,
    /// The children of the current entry, if they have been listed already, in reverse order: the next child is the last element.
    children: Option<Vec<NonNull<Entry>>>,
    /// For each directory on the way down, the entries that are left, also in reverse order.
    waiting: Vec<Vec<NonNull<Entry>>>,
}

/// Returns the walk behind a program's pointer if it is one of ours.
fn walk(pointer: FromC<'_, *mut Public>) -> Option<&mut Walk> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: not null, and so a walk of either kind.
    let options = unsafe { (*pointer.raw()).options };
    // SAFETY: only our walks have the mark, and the program uses a walk in one thread at a time.
    (options & OURS != 0).then(|| unsafe { &mut *pointer.raw().cast::<Walk>() })
}

hook! {
    fn fts_open | fts64_open (paths: FromC<*const *const c_char>, options: c_int, compare: Compare) -> *mut Public {
        if !paths.are_readable() {
            return fts_open::next(paths, options, compare);
        }
        let roots: Vec<&CStr> = paths.strings().collect();
        if !roots.iter().any(|&root| is_ours(libc::AT_FDCWD, root.into())) {
            return fts_open::next(paths, options, compare);
        }
        let top = Entry::new(b"", b"", -1, null_mut());
        let public = Public {
            current: null_mut(), child: null_mut(), array: null_mut(), device: 0, path: null_mut(), root_descriptor: -1,
            path_len: 0, item_count: roots.len() as c_int, compare, options: options | OURS,
        };
        let mut walk = Box::new(Walk { public, top, children: None, waiting: Vec::new() });
        let follow = options & (FOLLOW_ROOTS | LOGICAL) != 0;
        let entries = roots.iter().map(|root| {
            let path = root.to_bytes();
            let name = path.rsplit(|&byte| byte == b'/').find(|name| !name.is_empty()).unwrap_or(b"/");
            let mut entry = Entry::new(path, name, 0, top.as_ptr());
            // SAFETY: just created.
            unsafe { entry.as_mut() }.examine(follow);
            entry
        }).collect();
        let entries = walk.arrange(entries);
        walk.waiting.push(entries);
        Box::into_raw(walk).cast()
    }

    fn fts_read | fts64_read (pointer: FromC<*mut Public>) -> *mut Entry {
        let Some(walk) = walk(pointer) else { return fts_read::next(pointer) };
        walk.advance().map_or_else(null_mut, NonNull::as_ptr)
    }

    fn fts_children | fts64_children (pointer: FromC<*mut Public>, options: c_int) -> *mut Entry {
        let Some(walk) = walk(pointer) else { return fts_children::next(pointer, options) };
        let first = match walk.current() {
            None => walk.waiting.last().and_then(|roots| roots.last().copied()),
            Some(entry) if entry.info == D => {
                let children = match walk.children.take() {
                    Some(known) => known,
                    None => walk.list(),
                };
                walk.children.insert(children).last().copied()
            }
            Some(_) => None,
        };
        set_errno(0);
        first.map_or_else(null_mut, NonNull::as_ptr)
    }

    fn fts_set | fts64_set (pointer: FromC<*mut Public>, entry: FromC<*mut Entry>, instruction: c_int) -> c_int {
        if walk(pointer).is_none() {
            return fts_set::next(pointer, entry, instruction);
        }
        match (u16::try_from(instruction), NonNull::new(entry.raw())) {
            (Ok(instruction @ 0..=SKIP), Some(mut entry)) => {
                // SAFETY: an entry that this walk has returned and not yet freed, by the program's promise.
                unsafe { entry.as_mut() }.instruction = instruction;
                0
            }
            _ => {
                set_errno(libc::EINVAL);
                1
            }
        }
    }

    fn fts_close | fts64_close (pointer: FromC<*mut Public>) -> c_int {
        if walk(pointer).is_none() {
            return fts_close::next(pointer);
        }
        // SAFETY: made by `Box::into_raw` in `fts_open`; the program gives up ownership.
        let walk = unsafe { Box::from_raw(pointer.raw().cast::<Walk>()) };
        let mut above = NonNull::new(walk.public.current);
        let rest = walk.waiting.into_iter().chain(walk.children).flatten();
        rest.for_each(Entry::free);
        // The current entry and the directories above it.
        while let Some(entry) = above.filter(|&entry| entry != walk.top) {
            // SAFETY: an entry lives at least as long as the entries below it.
            above = NonNull::new(unsafe { entry.as_ref() }.parent);
            Entry::free(entry);
        }
        Entry::free(walk.top);
        0
    }
}

impl Walk {
    fn current(&mut self) -> Option<&mut Entry> {
        // SAFETY: the current entry lives until the walk moves past it.
        NonNull::new(self.public.current).map(|mut entry| unsafe { entry.as_mut() })
    }

    /// Sorts entries as the program requests, links them, and reverses the list, so that the next entry is its last element.
    fn arrange(&self, mut entries: Vec<NonNull<Entry>>) -> Vec<NonNull<Entry>> {
        if let Some(compare) = self.public.compare {
            entries.sort_by(|left, right| {
                let (left, right) = (left.as_ptr().cast_const(), right.as_ptr().cast_const());
                compare(&raw const left, &raw const right).cmp(&0)
            });
        }
        let links: Vec<*mut Entry> = entries.iter().skip(1).map(|entry| entry.as_ptr()).chain([null_mut()]).collect();
        for (entry, link) in entries.iter_mut().zip(links) {
            // SAFETY: made by this walk, and not freed.
            unsafe { entry.as_mut() }.link = link;
        }
        entries.reverse();
        entries
    }

    /// Lists the current directory. A directory that cannot be read gets the error, and no entries.
    fn list(&mut self) -> Vec<NonNull<Entry>> {
        let options = self.public.options;
        let Some(directory) = self.current() else { return Vec::new() };
        let mut listing = match Listing::open(directory.path()) {
            Ok(listing) => listing,
            Err(errno) => {
                directory.errno = errno;
                directory.info = DNR;
                return Vec::new();
            }
        };
        let path = directory.path().to_bytes().to_vec();
        let mut entries = Vec::new();
        while let Some(name) = listing.next().map(name_of) {
            let is_dot = name == b"." || name == b"..";
            if is_dot && options & SEE_DOT == 0 {
                continue;
            }
            let child = [&path[..], if path.ends_with(b"/") { b"" } else { b"/" }, &name].concat();
            let mut entry = Entry::new(&child, &name, directory.level + 1, &raw mut *directory);
            // SAFETY: just created.
            let child = unsafe { entry.as_mut() };
            child.examine(options & LOGICAL != 0);
            if is_dot {
                child.info = DOT;
            }
            entries.push(entry);
        }
        drop(listing);
        self.arrange(entries)
    }

    /// Carries out the program's instruction for the current entry, and moves to the next one.
    fn advance(&mut self) -> Option<NonNull<Entry>> {
        let options = self.public.options;
        let root_device = self.public.device;
        if let Some(entry) = self.current() {
            let instruction = std::mem::replace(&mut entry.instruction, NO_INSTRUCTION);
            if instruction == AGAIN {
                entry.examine(options & LOGICAL != 0);
                return NonNull::new(self.public.current);
            }
            if instruction == FOLLOW && matches!(entry.info, SL | SLNONE) {
                entry.examine(true);
                return NonNull::new(self.public.current);
            }
            if entry.info == D {
                let stays = instruction == SKIP || options & ONE_DEVICE != 0 && entry.device != root_device;
                let children = match self.children.take() {
                    Some(known) if !stays => known,
                    known => {
                        known.into_iter().flatten().for_each(Entry::free);
                        if stays { Vec::new() } else { self.list() }
                    }
                };
                if children.is_empty() {
                    let entry = self.current()?;
                    if entry.info == D {
                        entry.info = DP;
                    }
                    return NonNull::new(self.public.current);
                }
                self.waiting.push(children);
                return self.next_sibling(None);
            }
        }
        let last = NonNull::new(self.public.current);
        self.next_sibling(last)
    }

    /// Moves to the next entry of the directory, or to the directory itself once more, and frees the finished entry.
    fn next_sibling(&mut self, finished: Option<NonNull<Entry>>) -> Option<NonNull<Entry>> {
        let next = self.waiting.last_mut()?.pop();
        let parent = finished.and_then(|entry| {
            // SAFETY: the finished entry is freed below, after this.
            NonNull::new(unsafe { entry.as_ref() }.parent)
        });
        if let Some(finished) = finished {
            Entry::free(finished);
        }
        self.public.current = match next {
            Some(next) => next.as_ptr(),
            None => {
                self.waiting.pop();
                match parent.filter(|&parent| parent != self.top) {
                    None => null_mut(),
                    Some(mut parent) => {
                        // SAFETY: a directory lives until the walk moves past it.
                        unsafe { parent.as_mut() }.info = DP;
                        parent.as_ptr()
                    }
                }
            }
        };
        let entry = self.current()?;
        let (device, level) = (entry.device, entry.level);
        if level == 0 {
            self.public.device = device;
        }
        NonNull::new(self.public.current)
    }
}

impl Entry {
    /// Creates an entry in memory of its own, with its name after it.
    fn new(path: &[u8], name: &[u8], level: c_short, parent: *mut Entry) -> NonNull<Self> {
        let (path_len, name_len) = (path.len(), name.len());
        let path = memory::allocate_string(path, 0).unwrap_or(null_mut());
        let entry = Self {
            cycle: null_mut(),
            parent,
            link: null_mut(),
            number: 0,
            pointer: null_mut(),
            access_path: path,
            path,
            errno: 0,
            symlink_descriptor: -1,
            path_len: path_len as c_ushort,
            name_len: name_len as c_ushort,
            inode: 0,
            device: 0,
            links: 0,
            level,
            info: 0,
            flags: 0,
            instruction: NO_INSTRUCTION,
            stat: Box::into_raw(Box::new(zeroed())),
            name: [0],
        };
        let words = (size_of::<Self>() + name_len).div_ceil(align_of::<Self>());
        let memory = Box::leak(vec![0_u64; words].into_boxed_slice());
        let place = NonNull::from(memory).cast::<Self>();
        // SAFETY: the memory is aligned for an entry and has room for it and the name.
        unsafe { place.write(entry) };
        let name_field = place.as_ptr().cast::<c_char>().wrapping_add(offset_of!(Self, name));
        // SAFETY: the memory has room for the name and a NUL from here on.
        let _ = unsafe { FromC::new(name_field) }.write_string(name);
        place
    }

    fn free(entry: NonNull<Self>) {
        // SAFETY: all three were made in `new`, with these lengths, and nobody uses the entry anymore.
        unsafe {
            let this = entry.as_ref();
            let words = (size_of::<Self>() + usize::from(this.name_len)).div_ceil(align_of::<Self>());
            libc::free(this.path.cast());
            drop(Box::from_raw(this.stat));
            drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(entry.as_ptr().cast::<u64>(), words)));
        }
    }

    /// Returns the entry's path; empty if there was no memory for it.
    fn path(&self) -> &CStr {
        // SAFETY: null, or a string from `new`. A program may shorten it, but not free it.
        unsafe { FromC::new(self.path.cast_const()) }.string().unwrap_or(c"")
    }

    /// Finds out what the entry is, and fills in its attributes.
    fn examine(&mut self, follow: bool) {
        let mut found: KernelStat = zeroed();
        let path = self.path().to_owned();
        let mut result = match follow {
            true => stat::stat(path.as_c_str().into(), (&mut found).into()),
            false => stat::lstat(path.as_c_str().into(), (&mut found).into()),
        };
        let mut is_dangling = false;
        if result != 0 && follow {
            self.errno = memory::errno();
            result = stat::lstat(path.as_c_str().into(), (&mut found).into());
            is_dangling = result == 0;
        }
        (self.inode, self.device, self.links) = (found.st_ino, found.st_dev, found.st_nlink);
        self.info = match found.st_mode & libc::S_IFMT {
            _ if result != 0 => NS,
            _ if is_dangling => SLNONE,
            libc::S_IFDIR => D,
            libc::S_IFLNK => SL,
            libc::S_IFREG => F,
            _ => DEFAULT,
        };
        if result != 0 {
            self.errno = memory::errno();
        }
        // SAFETY: made in `new`, and freed with the entry.
        unsafe { self.stat.write(found) };
        let mut above = NonNull::new(self.parent);
        while let Some(directory) = above.filter(|_| self.info == D) {
            // SAFETY: a directory lives at least as long as the entries below it.
            let directory = unsafe { directory.as_ref() };
            if directory.level >= 0 && (directory.inode, directory.device) == (self.inode, self.device) {
                self.info = DC;
                self.cycle = std::ptr::from_ref(directory).cast_mut();
            }
            above = NonNull::new(directory.parent);
        }
    }
}
