//! `fts` below the prefix: a walk over our own directory calls. It never changes the working directory, as programs may ask of
//! every `fts`.

use std::ffi::{CStr, c_char, c_int, c_long, c_short, c_ushort, c_void};
use std::mem::{offset_of, transmute};
use std::ptr::{NonNull, null_mut};

use libc::{dev_t, ino_t, nlink_t, stat as KernelStat};

use super::directory::{closedir, opendir, readdir};
use super::{hook, stat};
use crate::memory::{self, get, set_errno, string, zeroed};
use crate::next;
use crate::path::is_ours;

const FOLLOW_ROOTS: c_int = 0x1;
const LOGICAL: c_int = 0x2;
const SEE_DOT: c_int = 0x20;
const ONE_DEVICE: c_int = 0x40;
/// Among the options that `fts` keeps for itself: this walk is ours.
const OURS: c_int = 0x4000_0000;

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

const AGAIN: c_ushort = 1;
const FOLLOW: c_ushort = 2;
const NO_INSTRUCTION: c_ushort = 3;
const SKIP: c_ushort = 4;

/// `FTSENT`; its name follows it.
#[repr(C)]
struct Entry {
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
struct Public {
    current: *mut Entry,
    child: *mut Entry,
    array: *mut *mut Entry,
    device: dev_t,
    path: *mut c_char,
    root_descriptor: c_int,
    path_len: c_int,
    item_count: c_int,
    compare: *const c_void,
    options: c_int,
}

type Compare = extern "C" fn(*const *const Entry, *const *const Entry) -> c_int;

/// A walk of ours.
#[repr(C)]
struct Walk {
    public: Public,
    compare: Option<Compare>,
    /// Above all roots.
    top: NonNull<Entry>,
    /// What comes after the current entry, if that has been listed already.
    children: Option<Vec<NonNull<Entry>>>,
    /// What is left of each directory on the way down, the next one last.
    waiting: Vec<Vec<NonNull<Entry>>>,
}

fn walk<'a>(pointer: *mut c_void) -> Option<&'a mut Walk> {
    let options = get(pointer.wrapping_byte_add(offset_of!(Public, options)).cast::<c_int>().cast_const());
    let is_ours = !pointer.is_null() && options.is_some_and(|options| options & OURS != 0);
    // SAFETY: only our walks have the mark; the program passes each to one thread at a time.
    is_ours.then(|| unsafe { &mut *pointer.cast::<Walk>() })
}

hook! {
    fn fts_open | fts64_open (paths: *const *mut c_char, options: c_int, compare: *const c_void) -> *mut c_void {
        let roots: Vec<&CStr> = memory::strings(paths.cast()).collect();
        if !roots.iter().any(|root| is_ours(libc::AT_FDCWD, root.as_ptr())) {
            return next::fts_open(paths, options, compare);
        }
        // SAFETY: the program gives a function of this kind, or null.
        let compare = unsafe { transmute::<*const c_void, Option<Compare>>(compare) };
        let top = Entry::new(b"", b"", -1, null_mut());
        let public = Public {
            current: null_mut(), child: null_mut(), array: null_mut(), device: 0, path: null_mut(), root_descriptor: -1,
            path_len: 0, item_count: roots.len() as c_int, compare: null_mut(), options: options | OURS,
        };
        let mut walk = Box::new(Walk { public, compare, top, children: None, waiting: Vec::new() });
        let follow = options & (FOLLOW_ROOTS | LOGICAL) != 0;
        let entries = roots.iter().map(|root| {
            let path = root.to_bytes();
            let name = path.rsplit(|&byte| byte == b'/').find(|name| !name.is_empty()).unwrap_or(b"/");
            let mut entry = Entry::new(path, name, 0, top.as_ptr());
            // SAFETY: made just now.
            unsafe { entry.as_mut() }.look(follow);
            entry
        }).collect();
        let entries = walk.arrange(entries);
        walk.waiting.push(entries);
        Box::into_raw(walk).cast()
    }

    fn fts_read | fts64_read (pointer: *mut c_void) -> *mut c_void {
        let Some(walk) = walk(pointer) else { return next::fts_read(pointer) };
        walk.advance().map_or_else(null_mut, |entry| entry.as_ptr().cast())
    }

    fn fts_children | fts64_children (pointer: *mut c_void, options: c_int) -> *mut c_void {
        let Some(walk) = walk(pointer) else { return next::fts_children(pointer, options) };
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
        first.map_or_else(null_mut, |entry| entry.as_ptr().cast())
    }

    fn fts_set | fts64_set (pointer: *mut c_void, entry: *mut c_void, instruction: c_int) -> c_int {
        if walk(pointer).is_none() {
            return next::fts_set(pointer, entry, instruction);
        }
        match (u16::try_from(instruction), NonNull::new(entry.cast::<Entry>())) {
            (Ok(instruction @ 0..=SKIP), Some(mut entry)) => {
                // SAFETY: an entry that this walk has given out and not yet ended.
                unsafe { entry.as_mut() }.instruction = instruction;
                0
            }
            _ => {
                set_errno(libc::EINVAL);
                1
            }
        }
    }

    fn fts_close | fts64_close (pointer: *mut c_void) -> c_int {
        if walk(pointer).is_none() {
            return next::fts_close(pointer);
        }
        // SAFETY: made by `Box::into_raw` in `fts_open`; the program gives it up.
        let walk = unsafe { Box::from_raw(pointer.cast::<Walk>()) };
        let mut above = NonNull::new(walk.public.current);
        let rest = walk.waiting.into_iter().chain(walk.children).flatten();
        rest.for_each(Entry::end);
        // From the current entry up; the top is its own end.
        while let Some(entry) = above.filter(|&entry| entry != walk.top) {
            // SAFETY: entries on the way up live as long as what is below them.
            above = NonNull::new(unsafe { entry.as_ref() }.parent);
            Entry::end(entry);
        }
        Entry::end(walk.top);
        0
    }
}

impl Walk {
    fn current(&mut self) -> Option<&mut Entry> {
        // SAFETY: the current entry lives until the walk goes on.
        NonNull::new(self.public.current).map(|mut entry| unsafe { entry.as_mut() })
    }

    /// Sorts as the program wishes, links, and turns around: the next entry is the last.
    fn arrange(&self, mut entries: Vec<NonNull<Entry>>) -> Vec<NonNull<Entry>> {
        if let Some(compare) = self.compare {
            entries.sort_by(|left, right| {
                let (left, right) = (left.as_ptr().cast_const(), right.as_ptr().cast_const());
                compare(&raw const left, &raw const right).cmp(&0)
            });
        }
        let links: Vec<*mut Entry> = entries.iter().skip(1).map(|entry| entry.as_ptr()).chain([null_mut()]).collect();
        for (entry, link) in entries.iter_mut().zip(links) {
            // SAFETY: made by this walk, and not ended.
            unsafe { entry.as_mut() }.link = link;
        }
        entries.reverse();
        entries
    }

    /// The entries of the current directory; what cannot be read is noted on it.
    fn list(&mut self) -> Vec<NonNull<Entry>> {
        let options = self.public.options;
        let Some(directory) = self.current() else { return Vec::new() };
        let stream = opendir(directory.path);
        if stream.is_null() {
            directory.errno = memory::errno();
            directory.info = DNR;
            return Vec::new();
        }
        let path = string(directory.path).map_or(&b""[..], CStr::to_bytes);
        let mut entries = Vec::new();
        while let Some(found) = get(readdir(stream).cast_const()) {
            let name: Vec<u8> = found.d_name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
            let is_dot = name == b"." || name == b"..";
            if is_dot && options & SEE_DOT == 0 {
                continue;
            }
            let child = [path, if path.ends_with(b"/") { b"" } else { b"/" }, &name].concat();
            let mut entry = Entry::new(&child, &name, directory.level + 1, &raw mut *directory);
            // SAFETY: made just now.
            let looked = unsafe { entry.as_mut() };
            looked.look(options & LOGICAL != 0);
            if is_dot {
                looked.info = DOT;
            }
            entries.push(entry);
        }
        closedir(stream);
        self.arrange(entries)
    }

    fn advance(&mut self) -> Option<NonNull<Entry>> {
        let options = self.public.options;
        let root_device = self.public.device;
        if let Some(entry) = self.current() {
            let instruction = std::mem::replace(&mut entry.instruction, NO_INSTRUCTION);
            if instruction == AGAIN {
                entry.look(options & LOGICAL != 0);
                return NonNull::new(self.public.current);
            }
            if instruction == FOLLOW && matches!(entry.info, SL | SLNONE) {
                entry.look(true);
                return NonNull::new(self.public.current);
            }
            if entry.info == D {
                let stays = instruction == SKIP || options & ONE_DEVICE != 0 && entry.device != root_device;
                let children = match self.children.take() {
                    Some(known) if !stays => known,
                    known => {
                        known.into_iter().flatten().for_each(Entry::end);
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

    /// The next entry of the directory, or the directory itself once more.
    fn next_sibling(&mut self, finished: Option<NonNull<Entry>>) -> Option<NonNull<Entry>> {
        let next = self.waiting.last_mut()?.pop();
        let parent = finished.and_then(|entry| {
            // SAFETY: the finished entry is ended below, after this.
            NonNull::new(unsafe { entry.as_ref() }.parent)
        });
        if let Some(finished) = finished {
            Entry::end(finished);
        }
        self.public.current = match next {
            Some(next) => next.as_ptr(),
            None => {
                self.waiting.pop();
                match parent.filter(|&parent| parent != self.top) {
                    None => null_mut(),
                    Some(mut parent) => {
                        // SAFETY: a directory lives until the walk has left it.
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
    /// An entry in memory of its own, with its name behind it.
    fn new(path: &[u8], name: &[u8], level: c_short, parent: *mut Entry) -> NonNull<Self> {
        let (path_len, name_len) = (path.len(), name.len());
        // From `malloc`, for a program may shorten it.
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
        memory::write_string(place.as_ptr().cast::<c_char>().wrapping_add(offset_of!(Self, name)), name);
        place
    }

    fn end(entry: NonNull<Self>) {
        // SAFETY: all three were made in `new`, with these lengths, and nobody uses the entry any more.
        unsafe {
            let this = entry.as_ref();
            let words = (size_of::<Self>() + usize::from(this.name_len)).div_ceil(align_of::<Self>());
            libc::free(this.path.cast());
            drop(Box::from_raw(this.stat));
            drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(entry.as_ptr().cast::<u64>(), words)));
        }
    }

    /// Looks what it is.
    fn look(&mut self, follow: bool) {
        let mut found: KernelStat = zeroed();
        let mut result = if follow { stat::stat(self.path, &raw mut found) } else { stat::lstat(self.path, &raw mut found) };
        let mut is_dangling = false;
        if result != 0 && follow {
            self.errno = memory::errno();
            result = stat::lstat(self.path, &raw mut found);
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
        // Given by `new`.
        let _ = memory::put(self.stat, found);
        let mut above = NonNull::new(self.parent);
        while let Some(directory) = above.filter(|_| self.info == D) {
            // SAFETY: directories on the way up live as long as what is below them.
            let directory = unsafe { directory.as_ref() };
            if directory.level >= 0 && (directory.inode, directory.device) == (self.inode, self.device) {
                self.info = DC;
                self.cycle = std::ptr::from_ref(directory).cast_mut();
            }
            above = NonNull::new(directory.parent);
        }
    }
}
