//! Records which of the process's descriptor numbers are ours, and what they have open.
//!
//! As in a kernel, a number names an *open file description*, and several numbers may name the same one. There are two tables:
//!
//! - `descriptors`, by number: a *word* that names a description, or 0.
//! - `descriptions`, by index: slots with a reference count and a generation. Each number holds one reference, and so does each
//!   [`Reference`], which a call holds while it uses the description.
//!
//! A word contains its slot's generation, so a word that outlives its description never finds the next description in that slot.
//!
//! Everything is an atomic in memory that never moves. A lookup in `read` costs one load if the number is not ours. A fork copies
//! the tables as they are. Neither a signal handler nor a thread that a fork left behind leaves anything locked.
//!
//! A program can close one of our numbers by a system call that this library does not see, and the kernel then gives the number
//! to another file. So the table is believed only after a look at what the kernel has at the number:
//!
//! - [`find`] and [`is_ours`] look each time, which costs two system calls if the table has the number, and none otherwise.
//! - [`find_early`] is for calls that give no bytes of the file, and that programs and runtimes make right after `open`: `fstat`,
//!   `isatty`, `posix_fadvise`. It believes the table the first few times.
//! - [`presume`] always believes the table. It is for `read` and `lseek`, which would become much slower otherwise.
//! - [`created`] is for every call in which the kernel gives out a number: whatever the table has at that number is out of date.
//!
//! In a `vfork` child these are the parent's tables. There, every lookup also asks the kernel, and the child changes nothing here.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use dayfly_client::reserved_fd::ReservedFd;
use dayfly_client::{Directory, OpenFile, Stat, raw_call, reserved_fd};

use crate::memory::{self, Errno};
use crate::offset::Offset;
use crate::place::Place;
use crate::{placeholder, vfork};

/// One more than the highest descriptor number that can be ours. The kernel provides memory only for pages that are used.
const DESCRIPTORS_MAX: usize = 1 << 20;
/// The most open file descriptions that a process can have at a time.
const DESCRIPTIONS_MAX: usize = 1 << 17;

/// The two tables. All-zero bytes are empty tables.
struct Tables {
    /// By number: 0, or a word (a slot's index plus one in the low bits, its generation above).
    descriptors: [AtomicU64; DESCRIPTORS_MAX],
    descriptions: [Slot; DESCRIPTIONS_MAX],
}

/// The tables, which are never freed; null in a process that has not attached. If they were part of the library's own memory, a
/// process that locks all of its memory (`mlockall`) would need 28 MiB for them, even if it never uses the namespace.
static TABLES: AtomicPtr<Tables> = AtomicPtr::new(null_mut());
/// One more than the highest number that was ever ours.
static DESCRIPTORS_USED: AtomicUsize = AtomicUsize::new(0);
/// One more than the highest index that was ever used.
static DESCRIPTIONS_USED: AtomicUsize = AtomicUsize::new(0);
/// The list of free slots below [`DESCRIPTIONS_USED`]: the first one's index plus one in the low bits. The bits above count
/// changes, so that a compare-and-exchange never takes an old state of the list for the current one.
static FREE: AtomicU64 = AtomicU64::new(0);

const INDEX_BITS: u32 = 20;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
const REFERENCES_MASK: u64 = (1 << 24) - 1;

/// How often [`find_early`] believes the table. Python's `open` makes three such calls.
const BELIEVED_MAX: u8 = 4;
/// A value of [`Description::trust`]: the kernel had our placeholder at the number. As long as nobody has asked the kernel about the
/// number, the value is lower, and counts how often `find_early` has believed the table.
const CHECKED: u8 = BELIEVED_MAX + 1;
/// A value of [`Description::trust`]: nobody can tell whether the number is ours or the program's, so reading fails.
const LOST: u8 = BELIEVED_MAX + 2;

/// The file or directory that is open.
pub(crate) enum Object {
    File(OpenFile),
    Directory(Directory),
    /// Opened with `O_PATH`.
    Place(Place),
}

/// An open file description.
pub(crate) struct Description {
    pub(crate) object: Object,
    /// The flags that `F_GETFL` returns.
    pub(crate) flags: AtomicI32,
    pub(crate) offset: Offset,
    trust: AtomicU8,
}

impl Description {
    pub(crate) fn new(object: Object, flags: i32) -> Self {
        let trust = if placeholder::is_checked_each_time() { CHECKED } else { 0 };
        Self { object, flags: AtomicI32::new(flags), offset: Offset::new(), trust: AtomicU8::new(trust) }
    }

    fn trust(&self) -> u8 {
        self.trust.load(Ordering::Relaxed)
    }

    pub(crate) fn stat(&self) -> Stat {
        match &self.object {
            Object::File(file) => file.stat(),
            Object::Directory(directory) => directory.stat(),
            Object::Place(place) => place.stat(),
        }
    }

    /// Returns the open file; EISDIR for a directory, EBADF for a place.
    pub(crate) fn file(&self) -> Result<&OpenFile, Errno> {
        match &self.object {
            _ if self.trust() == LOST => Err(libc::EIO),
            Object::File(file) => Ok(file),
            Object::Directory(_) => Err(libc::EISDIR),
            Object::Place(_) => Err(libc::EBADF),
        }
    }

    /// Returns the open directory; ENOTDIR for a file, EBADF for a place.
    pub(crate) fn directory(&self) -> Result<&Directory, Errno> {
        match &self.object {
            _ if self.trust() == LOST => Err(libc::EIO),
            Object::Directory(directory) => Ok(directory),
            Object::File(_) => Err(libc::ENOTDIR),
            Object::Place(_) => Err(libc::EBADF),
        }
    }

    /// Returns the directory that the description stands for, whether the program opened it for reading or with `O_PATH`; ENOTDIR
    /// for everything else.
    pub(crate) fn reached_directory(&self) -> Result<&Directory, Errno> {
        match &self.object {
            Object::Directory(directory) | Object::Place(Place::Directory(directory)) => Ok(directory),
            _ => Err(libc::ENOTDIR),
        }
    }

    /// Returns whether this stands for a symlink itself. The library leaves calls about such a symlink, and calls with a path relative
    /// to it, to the kernel.
    pub(crate) fn is_symlink(&self) -> bool {
        matches!(self.object, Object::Place(Place::Symlink(..)))
    }

    /// Returns whether this only stands for a place (`O_PATH`).
    pub(crate) fn is_place(&self) -> bool {
        matches!(self.object, Object::Place(_))
    }
}

struct Slot {
    /// The reference count in the low bits, the generation above.
    state: AtomicU64,
    /// While the slot is free: the index of the next free slot plus one, or 0.
    next: AtomicU64,
    description: UnsafeCell<MaybeUninit<Description>>,
}

// SAFETY: the one thread that took the slot from the free list writes the description, before it publishes a word for it. Only
// holders of a reference read it, and the thread that drops the last reference drops it.
unsafe impl Sync for Slot {}

#[inline]
fn tables() -> Option<&'static Tables> {
    let tables = TABLES.load(Ordering::Acquire);
    // SAFETY: published once by `create`, and never freed.
    (!tables.is_null()).then(|| unsafe { &*tables })
}

/// Creates the tables, unless there are any. Call it before the first number is ours.
///
/// # Errors
///
/// ENOMEM if the kernel gives no room for them.
pub(crate) fn create() -> Result<(), Errno> {
    if tables().is_some() {
        return Ok(());
    }
    let layout = Layout::new::<Tables>();
    // SAFETY: the layout's size is not zero.
    let created = unsafe { alloc_zeroed(layout) }.cast::<Tables>();
    if created.is_null() {
        return Err(libc::ENOMEM);
    }
    if TABLES.compare_exchange(null_mut(), created, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: allocated just above, and not published, because another thread was faster.
        unsafe { dealloc(created.cast(), layout) };
    }
    Ok(())
}

/// A counted reference to a description, which stays open while this lives.
pub(crate) struct Reference {
    slot: &'static Slot,
    word: u64,
}

impl Deref for Reference {
    type Target = Description;

    fn deref(&self) -> &Description {
        // SAFETY: a reference exists only to a slot that holds a description, and keeps it there.
        unsafe { (*self.slot.description.get()).assume_init_ref() }
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        let before = self.slot.state.fetch_sub(1, Ordering::AcqRel);
        if before & REFERENCES_MASK == 1 {
            // SAFETY: that was the last reference, and `acquire` makes none when the count is zero, so nobody else can see the
            // description.
            unsafe { (*self.slot.description.get()).assume_init_drop() };
            release_index((self.word & INDEX_MASK) as usize - 1);
        }
    }
}

impl Reference {
    /// Returns whether the kernel has our placeholder at a number, or the description's kernel copy in its place.
    fn is_at(&self, number: RawFd) -> bool {
        let is_copy = |copy: &ReservedFd| raw_call::identity(number) == Some(copy.identity());
        placeholder::is_at(number) || self.offset.kernel_copy().is_some_and(is_copy)
    }

    /// Returns the word that names the description in this process's memory.
    pub(crate) fn word(&self) -> u64 {
        self.word
    }

    /// Creates another reference, for another number.
    fn again(&self) -> Self {
        self.slot.state.fetch_add(1, Ordering::AcqRel);
        Self { slot: self.slot, word: self.word }
    }
}

fn take_index(tables: &Tables) -> Option<usize> {
    loop {
        let top = FREE.load(Ordering::Acquire);
        let Some(index) = (top & INDEX_MASK).checked_sub(1) else { break };
        let next = tables.descriptions[index as usize].next.load(Ordering::Acquire);
        let changed = (top & !INDEX_MASK).wrapping_add(1 << INDEX_BITS) | next;
        if FREE.compare_exchange_weak(top, changed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return Some(index as usize);
        }
    }
    let fits = |used: usize| (used < DESCRIPTIONS_MAX).then_some(used + 1);
    DESCRIPTIONS_USED.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fits).ok()
}

fn release_index(index: usize) {
    let Some(slot) = tables().and_then(|tables| tables.descriptions.get(index)) else { return };
    loop {
        let top = FREE.load(Ordering::Acquire);
        slot.next.store(top & INDEX_MASK, Ordering::Release);
        let changed = (top & !INDEX_MASK).wrapping_add(1 << INDEX_BITS) | (index as u64 + 1);
        if FREE.compare_exchange_weak(top, changed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// Stores a description that no number names yet.
///
/// # Errors
///
/// ENFILE if the process has too many.
pub(crate) fn describe(description: Description) -> Result<Reference, Errno> {
    let tables = tables().ok_or(libc::ENOMEM)?;
    let index = take_index(tables).ok_or(libc::ENFILE)?;
    let slot = &tables.descriptions[index];
    // SAFETY: the index came off the free list for this thread alone, and no word of the new generation is published.
    unsafe { (*slot.description.get()).write(description) };
    // A new generation, so that old words for this slot find nothing.
    let generation = (slot.state.load(Ordering::Relaxed) >> 24) + 1;
    slot.state.store(generation << 24 | 1, Ordering::Release);
    Ok(Reference { slot, word: (generation << INDEX_BITS) | (index as u64 + 1) })
}

/// Creates another reference to the description that a word names, if it is still open.
fn acquire(word: u64) -> Option<Reference> {
    let slot = tables()?.descriptions.get(((word & INDEX_MASK) as usize).checked_sub(1)?)?;
    let mut state = slot.state.load(Ordering::Acquire);
    loop {
        // A word has room for the whole generation, which is 40 bits here.
        if state & REFERENCES_MASK == 0 || (state >> 24) << INDEX_BITS != word & !INDEX_MASK {
            return None;
        }
        match slot.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(Reference { slot, word }),
            Err(now) => state = now,
        }
    }
}

fn entry(number: RawFd) -> Option<&'static AtomicU64> {
    tables()?.descriptors.get(usize::try_from(number).ok()?)
}

/// Returns whether the table has a number. The table may be out of date.
#[inline]
pub(crate) fn is_named(number: RawFd) -> bool {
    entry(number).is_some_and(|entry| entry.load(Ordering::Acquire) != 0)
}

/// Returns whether a number is ours.
#[inline]
pub(crate) fn is_ours(number: RawFd) -> bool {
    find(number).is_some()
}

/// Returns the description that a number names, if the number is ours.
#[inline]
pub(crate) fn find(number: RawFd) -> Option<Reference> {
    match entry(number)?.load(Ordering::Acquire) {
        0 => None,
        word => confirmed(number, word),
    }
}

/// Like [`find`], but believes the table without asking the kernel.
#[inline]
pub(crate) fn presume(number: RawFd) -> Option<Reference> {
    match entry(number)?.load(Ordering::Acquire) {
        0 => None,
        _ if vfork::has_replaced(number) => None,
        word => acquire(word),
    }
}

/// Like [`find`], but believes the table the first few times that it is asked about a description.
#[inline]
pub(crate) fn find_early(number: RawFd) -> Option<Reference> {
    let open = presume(number)?;
    let believed = open.trust();
    if believed >= BELIEVED_MAX {
        return confirmed(number, open.word);
    }
    open.trust.store(believed + 1, Ordering::Relaxed);
    Some(open)
}

/// Returns the description that a word names, if the kernel has the description's placeholder or kernel copy at the number.
/// Otherwise the number was closed without calling our hooks, and is forgotten.
#[cold]
#[inline(never)]
fn confirmed(number: RawFd, word: u64) -> Option<Reference> {
    if vfork::child().is_some() {
        return if vfork::has_replaced(number) { None } else { acquire(word) };
    }
    let open = acquire(word)?;
    if open.is_at(number) {
        open.trust.store(CHECKED, Ordering::Relaxed);
        return Some(open);
    }
    // Each of our numbers is created as a duplicate of the placeholder. If the program had put another file of its own in the
    // placeholder's place by then, the number is a duplicate of that file. So nobody can tell whether the number is still ours or is
    // now the program's, and neither our bytes nor the kernel's are certain to be right.
    if open.trust() != CHECKED && placeholder::is_suspect() {
        let before = memory::errno();
        let is_repaired = open.trust() != LOST && placeholder::repair(number);
        memory::set_errno(before);
        open.trust.store(if is_repaired { CHECKED } else { LOST }, Ordering::Relaxed);
        return Some(open);
    }
    // Fails if another thread has closed the number, or has given it another description.
    if entry(number)?.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        drop_word(word);
    }
    None
}

/// Takes the result of a call in which the kernel gives out a number, and returns that result for the program. If there is a new
/// number, whatever the table has there is out of date: the number was closed without calling our hooks.
#[inline]
pub(crate) fn created(number: RawFd) -> RawFd {
    if number < 0 {
        placeholder::note_failed(memory::errno());
    } else if entry(number).is_some_and(|entry| entry.load(Ordering::Acquire) != 0) || reserved_fd::is_watched(number) {
        forget_created(number);
    }
    number
}

#[cold]
fn forget_created(number: RawFd) {
    // In a `vfork` child it is the child's number, but these are the parent's records.
    if vfork::child().is_none() {
        forget(number);
        placeholder::note_given(number);
        reserved_fd::note_given(number);
    }
}

/// Returns whether a number is ours and open for reading. The kernel answers for all other numbers. It also answers for a place
/// (`O_PATH`), because it refuses to use the placeholder just as it would refuse to use the place.
pub(crate) fn is_open(number: RawFd) -> bool {
    find(number).is_some_and(|open| !open.is_place())
}

/// Returns the description for a word that a `vfork` child has sent.
pub(crate) fn find_word(word: u64) -> Option<Reference> {
    acquire(word)
}

/// Like [`find`], but for a number of the process that owns this memory, even if a `vfork` child asks.
pub(crate) fn find_at_home(number: RawFd) -> Option<Reference> {
    match entry(number)?.load(Ordering::Acquire) {
        0 => None,
        word => acquire(word),
    }
}

/// Binds a number to a description, and drops what it named before. Returns `false` if the number is too high for the table.
pub(crate) fn name(number: RawFd, description: &Reference) -> bool {
    let Some(entry) = entry(number) else { return false };
    let again = description.again();
    let word = again.word;
    std::mem::forget(again);
    DESCRIPTORS_USED.fetch_max(number as usize + 1, Ordering::AcqRel);
    drop_word(entry.swap(word, Ordering::AcqRel));
    true
}

/// Returns a number to the kernel, and drops what it named.
pub(crate) fn forget(number: RawFd) {
    if let Some(entry) = entry(number) {
        drop_word(entry.swap(0, Ordering::AcqRel));
    }
}

/// Drops the reference that a number held.
fn drop_word(word: u64) {
    let index = ((word & INDEX_MASK) as usize).checked_sub(1);
    if let Some((index, tables)) = index.zip(tables()) {
        drop(Reference { slot: &tables.descriptions[index], word });
    }
}

/// Returns whether the kernel's entry for a number matches our record. The answer is for this process, even if it is a forked
/// child.
pub(crate) fn is_in_kernel(number: RawFd) -> bool {
    find_at_home(number).is_some_and(|open| open.is_at(number))
}

/// Iterates over the numbers in a range, both ends included, that are ours now.
pub(crate) fn numbers(first: RawFd, last: RawFd) -> impl Iterator<Item = RawFd> {
    let end = DESCRIPTORS_USED.load(Ordering::Acquire) as RawFd;
    let is_ours = |number: &RawFd| entry(*number).is_some_and(|entry| entry.load(Ordering::Acquire) != 0);
    (first..end.min(last.saturating_add(1))).filter(is_ours)
}

/// Iterates over the descriptions that are open now.
pub(crate) fn descriptions() -> impl Iterator<Item = Reference> {
    let used = DESCRIPTIONS_USED.load(Ordering::Acquire);
    let slots = tables().map_or(&[][..], |tables| &tables.descriptions[..used]);
    slots.iter().enumerate().filter_map(|(index, slot)| {
        let generation = slot.state.load(Ordering::Acquire) >> 24;
        acquire((generation << INDEX_BITS) | (index as u64 + 1))
    })
}
