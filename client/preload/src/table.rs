//! Which of the process's descriptor numbers are ours, and what is open behind them.
//!
//! As in a kernel: a number names an open file description, which several numbers may share. Everything is an atomic in
//! memory that never moves, so a lookup in `read` costs one load, a fork copies it as it is, and a signal handler or a thread
//! that was forked away leaves nothing locked.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

use dayfly_client::{Directory, OpenFile, Stat};

use crate::memory::Errno;
use crate::offset::Offset;
use crate::vfork;

/// Descriptor numbers that can be ours; memory is taken only for those that are.
const DESCRIPTORS_MAX: usize = 1 << 20;
/// Open file descriptions of a process.
const DESCRIPTIONS_MAX: usize = 1 << 17;

/// Of each number: 0, or which description (index plus one in the low bits, its generation above).
static DESCRIPTORS: [AtomicU64; DESCRIPTORS_MAX] = [const { AtomicU64::new(0) }; DESCRIPTORS_MAX];
static DESCRIPTIONS: [Slot; DESCRIPTIONS_MAX] = [const { Slot::empty() }; DESCRIPTIONS_MAX];
/// One more than the highest number, and the highest index, that was ever used.
static DESCRIPTORS_USED: AtomicUsize = AtomicUsize::new(0);
static DESCRIPTIONS_USED: AtomicUsize = AtomicUsize::new(0);
/// Free indices below [`DESCRIPTIONS_USED`]: the top one plus one, below a count that makes each state of the list unique.
static FREE: AtomicU64 = AtomicU64::new(0);

const INDEX_BITS: u32 = 20;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;
const REFERENCES_MASK: u64 = (1 << 24) - 1;

/// What is open.
pub(crate) enum Object {
    /// A file.
    File(OpenFile),
    /// A directory.
    Directory(Directory),
}

/// An open file description.
pub(crate) struct Description {
    pub(crate) object: Object,
    /// What `F_GETFL` tells.
    pub(crate) flags: AtomicI32,
    pub(crate) offset: Offset,
}

impl Description {
    pub(crate) fn stat(&self) -> Stat {
        match &self.object {
            Object::File(file) => file.stat(),
            Object::Directory(directory) => directory.stat(),
        }
    }

    pub(crate) fn file(&self) -> Result<&OpenFile, Errno> {
        match &self.object {
            Object::File(file) => Ok(file),
            Object::Directory(_) => Err(libc::EISDIR),
        }
    }

    pub(crate) fn directory(&self) -> Result<&Directory, Errno> {
        match &self.object {
            Object::Directory(directory) => Ok(directory),
            Object::File(_) => Err(libc::ENOTDIR),
        }
    }
}

struct Slot {
    /// References in the low bits, the generation above.
    state: AtomicU64,
    /// While free: the next free index plus one.
    next: AtomicU64,
    description: UnsafeCell<MaybeUninit<Description>>,
}

// SAFETY: the description is written by the one thread that took the slot from the free list, before its word is published,
// read only by those who hold a reference, and ended by the one that drops the last.
unsafe impl Sync for Slot {}

impl Slot {
    const fn empty() -> Self {
        Self { state: AtomicU64::new(0), next: AtomicU64::new(0), description: UnsafeCell::new(MaybeUninit::uninit()) }
    }
}

/// A reference to a description: it stays while this lives.
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
            // SAFETY: that was the last reference, and `acquire` makes none from zero: nobody else sees the description.
            unsafe { (*self.slot.description.get()).assume_init_drop() };
            release_index((self.word & INDEX_MASK) as usize - 1);
        }
    }
}

impl Reference {
    /// What names the description, in this memory.
    pub(crate) fn word(&self) -> u64 {
        self.word
    }

    /// One more reference, for one more number.
    fn again(&self) -> Self {
        self.slot.state.fetch_add(1, Ordering::AcqRel);
        Self { slot: self.slot, word: self.word }
    }
}

fn take_index() -> Option<usize> {
    loop {
        let top = FREE.load(Ordering::Acquire);
        let Some(index) = (top & INDEX_MASK).checked_sub(1) else { break };
        let next = DESCRIPTIONS[index as usize].next.load(Ordering::Acquire);
        let changed = (top & !INDEX_MASK).wrapping_add(1 << INDEX_BITS) | next;
        if FREE.compare_exchange_weak(top, changed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return Some(index as usize);
        }
    }
    let fits = |used: usize| (used < DESCRIPTIONS_MAX).then_some(used + 1);
    DESCRIPTIONS_USED.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fits).ok()
}

fn release_index(index: usize) {
    loop {
        let top = FREE.load(Ordering::Acquire);
        DESCRIPTIONS[index].next.store(top & INDEX_MASK, Ordering::Release);
        let changed = (top & !INDEX_MASK).wrapping_add(1 << INDEX_BITS) | (index as u64 + 1);
        if FREE.compare_exchange_weak(top, changed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

/// A description that no number names yet.
pub(crate) fn describe(description: Description) -> Result<Reference, Errno> {
    let index = take_index().ok_or(libc::ENFILE)?;
    let slot = &DESCRIPTIONS[index];
    // SAFETY: the index came off the free list for us alone, and no word of this generation is published.
    unsafe { (*slot.description.get()).write(description) };
    // The generation counts on, so that a word that outlived its description never finds another.
    let generation = (slot.state.load(Ordering::Relaxed) >> 24) + 1;
    slot.state.store(generation << 24 | 1, Ordering::Release);
    Ok(Reference { slot, word: (generation << INDEX_BITS) | (index as u64 + 1) })
}

/// Another reference to what a word names, if that is still open.
fn acquire(word: u64) -> Option<Reference> {
    let slot = DESCRIPTIONS.get(((word & INDEX_MASK) as usize).checked_sub(1)?)?;
    let mut state = slot.state.load(Ordering::Acquire);
    loop {
        // The generation's high bits do not fit a word; 40 of them do.
        if state & REFERENCES_MASK == 0 || (state >> 24) << INDEX_BITS != word & !INDEX_MASK {
            return None;
        }
        match slot.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(Reference { slot, word }),
            Err(now) => state = now,
        }
    }
}

fn place(number: RawFd) -> Option<&'static AtomicU64> {
    DESCRIPTORS.get(usize::try_from(number).ok()?)
}

/// Whether a number is ours.
#[inline]
pub(crate) fn is_ours(number: RawFd) -> bool {
    place(number).is_some_and(|place| place.load(Ordering::Acquire) != 0) && !vfork::has_replaced(number)
}

/// What is open behind a number, if it is ours.
#[inline]
pub(crate) fn find(number: RawFd) -> Option<Reference> {
    match place(number)?.load(Ordering::Acquire) {
        0 => None,
        _ if vfork::has_replaced(number) => None,
        word => acquire(word),
    }
}

/// What a word names that was sent from a child.
pub(crate) fn find_word(word: u64) -> Option<Reference> {
    acquire(word)
}

/// What is open behind a number of this memory's own process.
pub(crate) fn find_at_home(number: RawFd) -> Option<Reference> {
    match place(number)?.load(Ordering::Acquire) {
        0 => None,
        word => acquire(word),
    }
}

/// Makes a number name a description; what it named before ends. `false` where a number is too high for the table.
pub(crate) fn name(number: RawFd, description: &Reference) -> bool {
    let Some(place) = place(number) else { return false };
    let again = description.again();
    let word = again.word;
    std::mem::forget(again);
    DESCRIPTORS_USED.fetch_max(number as usize + 1, Ordering::AcqRel);
    end(place.swap(word, Ordering::AcqRel));
    true
}

/// Makes a number no longer ours.
pub(crate) fn forget(number: RawFd) {
    if let Some(place) = place(number) {
        end(place.swap(0, Ordering::AcqRel));
    }
}

/// Drops the reference that a number held.
fn end(word: u64) {
    if let Some(index) = ((word & INDEX_MASK) as usize).checked_sub(1) {
        drop(Reference { slot: &DESCRIPTIONS[index], word });
    }
}

/// All numbers that are ours at this moment, within a range.
pub(crate) fn numbers(first: RawFd, last: RawFd) -> impl Iterator<Item = RawFd> {
    let end = DESCRIPTORS_USED.load(Ordering::Acquire) as RawFd;
    let is_ours = |number: &RawFd| place(*number).is_some_and(|place| place.load(Ordering::Acquire) != 0);
    (first..end.min(last.saturating_add(1))).filter(is_ours)
}

/// All descriptions that are open at this moment.
pub(crate) fn descriptions() -> impl Iterator<Item = Reference> {
    let used = DESCRIPTIONS_USED.load(Ordering::Acquire);
    (0..used).filter_map(|index| {
        let generation = DESCRIPTIONS[index].state.load(Ordering::Acquire) >> 24;
        acquire((generation << INDEX_BITS) | (index as u64 + 1))
    })
}
