//! The library's own heap, apart from the program's `malloc`.
//!
//! `open`, `read`, `fstat`, `close` and many other functions may be called in a signal handler, which may have interrupted
//! `malloc`. Whatever this library allocates in such a call must therefore not come from `malloc`. This heap takes no lock, and
//! each of its steps is one atomic change. So a signal handler, a thread that runs between two steps of another thread, and a
//! forked child all find the heap in order.
//!
//! - The length of a *block* is a power of two, from [`UNIT`] to [`BLOCK_LEN_MAX`] bytes, and determines the block's *class*.
//!   Anything longer gets a mapping of its own.
//! - Blocks lie in *chunks* of [`CHUNK_LEN`] bytes, which are never unmapped. The first is part of the library's own memory, so
//!   that a program which never uses the namespace maps nothing.
//! - A *free list* holds the free blocks of one class. [`FREE`] has a list of each class in every shard, and a thread begins at
//!   the shard that its number selects, so that threads rarely meet.
//!
//! # Why a list is always in order
//!
//! A list's head is one word: the number of its first block, and a tag that each change increments. To take a block, a thread reads
//! the head and then the first block's link, and it replaces the head only if the head is still the same. If another thread has
//! meanwhile taken the block and returned it in front of another successor, the tag differs. The tag has 34 bits. So a thread is
//! misled only if, between those two steps, the list changes exactly 2^34 times or a multiple of that. 2^34 changes take minutes,
//! even if the program does nothing else.
//!
//! Links do not lie in the blocks but in the header of their chunk: a thread that is too late reads an old link, never bytes that
//! the block's new owner writes.
//!
//! A forked child gets the memory of one instant. While the kernel copies a process, a write of another thread either reaches the
//! pages that parent and child share, or waits until the copy is complete. So the child's heap is as if its other threads had been
//! interrupted forever. The child never gets back the blocks that those threads held.

mod pages;

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use dayfly_client::thread_number;

/// Length of the shortest block. Numbers of blocks count units.
const UNIT: usize = 16;
/// Classes of blocks.
const CLASSES: usize = 13;
/// Length of the longest block.
const BLOCK_LEN_MAX: usize = UNIT << (CLASSES - 1);
/// Length of a chunk, to which all chunks but the first are aligned.
const CHUNK_LEN: usize = 1 << 20;
const UNITS: usize = CHUNK_LEN / UNIT;
/// The first unit of a chunk that is not part of its header.
const FIRST_UNIT: usize = size_of::<Header>().div_ceil(UNIT);
/// The most chunks that there can be: together 16 GiB.
const CHUNKS_MAX: usize = 1 << 14;
const SHARDS: usize = 8;
/// Bits of a block's number: its chunk's number, and the number of its first unit. No block begins at unit 0, so 0 stands for no
/// block.
const NUMBER_BITS: u32 = CHUNKS_MAX.ilog2() + UNITS.ilog2();
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

/// The beginning of a chunk.
#[repr(C)]
struct Header {
    number: AtomicUsize,
    /// By unit: for a free block that begins there, the number of the next free block.
    links: [AtomicU32; UNITS],
}

/// A chunk in the library's own memory.
#[repr(C, align(4096))]
struct Chunk {
    header: Header,
    blocks: UnsafeCell<[u8; CHUNK_LEN - size_of::<Header>()]>,
}

// SAFETY: the header is atomic, and each of the blocks belongs to the one caller that allocated it.
unsafe impl Sync for Chunk {}

/// The head of a free list, in a cache line of its own.
#[repr(align(64))]
struct List(AtomicU64);

static FIRST: Chunk = Chunk {
    header: Header { number: AtomicUsize::new(0), links: [const { AtomicU32::new(0) }; UNITS] },
    blocks: UnsafeCell::new([0; CHUNK_LEN - size_of::<Header>()]),
};
/// The chunks after the first, by number.
static CHUNKS: [AtomicPtr<Header>; CHUNKS_MAX] = [const { AtomicPtr::new(null_mut()) }; CHUNKS_MAX];
static CHUNKS_USED: AtomicUsize = AtomicUsize::new(1);
/// Where the memory that was never allocated begins: a chunk's number, and a unit's number in the low 32 bits.
static FRESH: AtomicU64 = AtomicU64::new(FIRST_UNIT as u64);
static FREE: [[List; CLASSES]; SHARDS] = [const { [const { List(AtomicU64::new(0)) }; CLASSES] }; SHARDS];

/// A buffer for copying is never shorter than this, unless less was asked for.
const BUFFER_LEN_MIN: usize = 4096;

/// The allocator for all of this library's Rust code.
pub(crate) struct Heap;

/// Returns a buffer of `len` zeros for copying, or a shorter one if there is not enough memory. Programs limit their memory, and
/// where the standard library cannot allocate, it ends the process.
///
/// # Errors
///
/// ENOMEM if there is not even memory for a short buffer.
pub(crate) fn buffer(len: usize) -> Result<Vec<u8>, i32> {
    let (mut bytes, mut len) = (Vec::new(), len);
    while bytes.try_reserve_exact(len).is_err() {
        if len <= BUFFER_LEN_MIN {
            return Err(libc::ENOMEM);
        }
        len = (len / 4).max(BUFFER_LEN_MIN);
    }
    bytes.resize(len, 0);
    Ok(bytes)
}

// SAFETY: `take` returns blocks that nobody else has, which are long enough and aligned to the lower of their length and a page;
// what needs more gets pages of its own. Nothing here unwinds.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class_of(layout) {
            Some(class) => take(class),
            None => pages::map(layout.size(), layout.align()),
        }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        match class_of(layout) {
            Some(class) => push(my_shard(), class, number_of(memory)),
            // SAFETY: the caller returns what `alloc` or `realloc` mapped for this layout.
            None => unsafe { pages::unmap(memory, layout.size()) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the same.
        let memory = unsafe { self.alloc(layout) };
        // The kernel has filled new pages with zeros.
        if class_of(layout).is_some() && !memory.is_null() {
            // SAFETY: just allocated, and at least this long.
            unsafe { memory.write_bytes(0, layout.size()) };
        }
        memory
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises a size that is not too large for the alignment.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (class_of(layout), class_of(new)) {
            (Some(old), Some(new)) if old == new => memory,
            // SAFETY: the old memory was mapped for the old layout, and needs no more alignment than any page has.
            (None, None) if layout.align() <= pages::LEN => unsafe { pages::remap(memory, layout.size(), size) },
            // SAFETY: the new memory is apart from the old, and both have the bytes that are copied.
            _ => unsafe {
                let moved = self.alloc(new);
                if !moved.is_null() {
                    moved.copy_from_nonoverlapping(memory, layout.size().min(size));
                    self.dealloc(memory, layout);
                }
                moved
            },
        }
    }
}

/// Returns the class of the blocks for a layout; `None` for memory that is mapped by itself.
fn class_of(layout: Layout) -> Option<usize> {
    let len = layout.size().max(layout.align());
    let fits = len <= BLOCK_LEN_MAX && layout.align() <= pages::LEN;
    fits.then(|| len.div_ceil(UNIT).next_power_of_two().trailing_zeros() as usize)
}

fn my_shard() -> usize {
    thread_number::spread(SHARDS)
}

/// Allocates a block, or returns the null pointer.
fn take(class: usize) -> *mut u8 {
    let mine = my_shard();
    let freed = (0..SHARDS).find_map(|step| pop((mine + step) % SHARDS, class));
    freed.or_else(|| fresh(class)).map_or(null_mut(), address_of)
}

fn header_of_chunk(chunk: usize) -> *const Header {
    match chunk {
        0 => &raw const FIRST.header,
        _ => CHUNKS[chunk].load(Ordering::Acquire),
    }
}

fn address_of(number: u32) -> *mut u8 {
    let (chunk, unit) = (number as usize / UNITS, number as usize % UNITS);
    header_of_chunk(chunk).cast_mut().cast::<u8>().wrapping_add(unit * UNIT)
}

fn number_of(memory: *mut u8) -> u32 {
    let within_first = memory.addr().wrapping_sub((&raw const FIRST).addr());
    if within_first < CHUNK_LEN {
        return (within_first / UNIT) as u32;
    }
    let within = memory.addr() % CHUNK_LEN;
    let header = memory.wrapping_sub(within).cast::<Header>();
    // SAFETY: a block that is not in the first chunk lies in an aligned one, which begins with its header and is never unmapped.
    let chunk = unsafe { (*header).number.load(Ordering::Relaxed) };
    (chunk * UNITS + within / UNIT) as u32
}

fn link(number: u32) -> &'static AtomicU32 {
    // SAFETY: the number of a block, whose chunk is there and is never unmapped.
    unsafe { &(*header_of_chunk(number as usize / UNITS)).links[number as usize % UNITS] }
}

/// Takes a free block.
fn pop(shard: usize, class: usize) -> Option<u32> {
    let head = &FREE[shard][class].0;
    let mut now = head.load(Ordering::Acquire);
    loop {
        let first = (now & NUMBER_MASK) as u32;
        if first == 0 {
            return None;
        }
        let changed = next_tag(now) | u64::from(link(first).load(Ordering::Relaxed));
        match head.compare_exchange_weak(now, changed, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(first),
            Err(other) => now = other,
        }
    }
}

/// Adds a block to the free ones. The caller no longer owns it.
fn push(shard: usize, class: usize, number: u32) {
    let head = &FREE[shard][class].0;
    let mut now = head.load(Ordering::Relaxed);
    loop {
        link(number).store((now & NUMBER_MASK) as u32, Ordering::Relaxed);
        match head.compare_exchange_weak(now, next_tag(now) | u64::from(number), Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return,
            Err(other) => now = other,
        }
    }
}

/// Returns a list's next head after a change: the next tag, and no block.
fn next_tag(head: u64) -> u64 {
    (head & !NUMBER_MASK).wrapping_add(1 << NUMBER_BITS)
}

/// Takes a block from memory that was never allocated.
#[cold]
fn fresh(class: usize) -> Option<u32> {
    let units = 1 << class;
    loop {
        let now = FRESH.load(Ordering::Acquire);
        let (chunk, at) = ((now >> 32) as usize, now as u32 as usize);
        let start = at.next_multiple_of(units);
        if start + units > UNITS {
            grow(now)?;
            continue;
        }
        let after = (chunk as u64) << 32 | (start + units) as u64;
        if FRESH.compare_exchange(now, after, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            donate(chunk, at, start);
            return Some((chunk * UNITS + start) as u32);
        }
    }
}

/// Continues in a new chunk, unless [`FRESH`] has changed since it was `now`. `None` if there is no memory.
fn grow(now: u64) -> Option<()> {
    let header: *mut Header = pages::map(CHUNK_LEN, CHUNK_LEN).cast();
    if header.is_null() {
        return None;
    }
    let one_more = |used: usize| (used < CHUNKS_MAX).then_some(used + 1);
    let Ok(chunk) = CHUNKS_USED.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more) else {
        // SAFETY: mapped just above, and unused.
        unsafe { pages::unmap(header.cast(), CHUNK_LEN) };
        return None;
    };
    // SAFETY: mapped just above, and zero, which is a valid header.
    unsafe { (*header).number.store(chunk, Ordering::Relaxed) };
    CHUNKS[chunk].store(header, Ordering::Release);
    let start = (chunk as u64) << 32 | FIRST_UNIT as u64;
    match FRESH.compare_exchange(now, start, Ordering::AcqRel, Ordering::Relaxed) {
        Ok(_) => donate((now >> 32) as usize, now as u32 as usize, UNITS),
        // Another thread has added a chunk. The units of this one become free blocks.
        Err(_) => donate(chunk, FIRST_UNIT, UNITS),
    }
    Some(())
}

/// Adds unused units of a chunk to the free blocks.
fn donate(chunk: usize, mut from: usize, to: usize) {
    while from < to {
        let class = (from.trailing_zeros() as usize).min((to - from).ilog2() as usize).min(CLASSES - 1);
        push(my_shard(), class, (chunk * UNITS + from) as u32);
        from += 1 << class;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).expect("a layout")
    }

    /// Memory that is filled with one byte.
    struct Filled(*mut u8, Layout, u8);

    impl Filled {
        fn new(layout: Layout, byte: u8) -> Self {
            // SAFETY: the size is not zero, and the result is checked before it is written.
            let memory = unsafe { Heap.alloc(layout) };
            assert!(!memory.is_null() && memory.addr() % layout.align() == 0);
            // SAFETY: just allocated for this size.
            unsafe { memory.write_bytes(byte, layout.size()) };
            Self(memory, layout, byte)
        }

        fn resize(&mut self, size: usize) {
            // SAFETY: allocated with this layout.
            self.0 = unsafe { Heap.realloc(self.0, self.1, size) };
            assert!(!self.0.is_null());
            self.check(size.min(self.1.size()));
            self.1 = layout(size, self.1.align());
            // SAFETY: has this size now.
            unsafe { self.0.write_bytes(self.2, size) };
        }

        fn check(&self, len: usize) {
            // SAFETY: at least `len` bytes, which `new` and `resize` wrote.
            let bytes = unsafe { std::slice::from_raw_parts(self.0, len) };
            assert!(bytes.iter().all(|&byte| byte == self.2), "another owner wrote to this memory");
        }
    }

    impl Drop for Filled {
        fn drop(&mut self) {
            self.check(self.1.size());
            // SAFETY: allocated with this layout.
            unsafe { Heap.dealloc(self.0, self.1) };
        }
    }

    #[test]
    fn classes_are_powers_of_two_and_the_rest_is_mapped() {
        let class = |size, align| class_of(layout(size, align));
        assert_eq!([class(1, 1), class(16, 8), class(17, 1), class(1, 64)], [Some(0), Some(0), Some(1), Some(2)]);
        assert_eq!([class(BLOCK_LEN_MAX, 4096), class(BLOCK_LEN_MAX + 1, 1), class(1, 8192)], [Some(CLASSES - 1), None, None]);
    }

    #[test]
    fn threads_never_get_the_same_memory() {
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                scope.spawn(move || {
                    let mut random = u32::from(thread) + 1;
                    let mut next = move |below: u32| {
                        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                        (random >> 8) % below
                    };
                    let mut all: Vec<Filled> = Vec::new();
                    for step in 0..20_000_u32 {
                        let size = 1 + (next(1 << 18) >> next(18)) as usize;
                        match next(4) {
                            0 if !all.is_empty() => drop(all.swap_remove(next(all.len() as u32) as usize)),
                            1 if !all.is_empty() => {
                                let at = next(all.len() as u32) as usize;
                                all[at].resize(size);
                            }
                            _ => all.push(Filled::new(layout(size, 1 << next(14)), step as u8 ^ thread << 6)),
                        }
                        if all.len() > 100 {
                            all.truncate(50);
                        }
                    }
                });
            }
        });
    }

    /// `tests/posix/limits.c` asks for buffers where memory is scarce.
    #[test]
    fn a_buffer_has_the_length_that_was_asked_for() {
        for len in [0, 1, 4096, 100_000, 8 << 20] {
            assert!(buffer(len).is_ok_and(|bytes| bytes.len() == len && bytes.iter().all(|&byte| byte == 0)));
        }
    }

    #[test]
    fn memory_that_was_used_before_is_zero_where_that_was_asked() {
        for size in [64, 3000, BLOCK_LEN_MAX, 3 * BLOCK_LEN_MAX] {
            drop(Filled::new(layout(size, 16), 0xff));
            // SAFETY: the size is not zero; the memory is read and returned with the same layout.
            unsafe {
                let memory = Heap.alloc_zeroed(layout(size, 16));
                assert!(std::slice::from_raw_parts(memory, size).iter().all(|&byte| byte == 0));
                Heap.dealloc(memory, layout(size, 16));
            }
        }
    }
}
