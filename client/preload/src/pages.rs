//! Knows which pages of the process's memory can be read and written.
//!
//! A program may pass a bad pointer, and the kernel then answers EFAULT. If this library looks at the program's memory before the
//! kernel does, the library must not crash instead. So it asks this module before it follows a pointer. The kernel is asked once
//! per page, and the answer is remembered until the program unmaps or protects the page: a program that passes good pointers pays
//! for one load and one comparison.
//!
//! The tables hold atomics in memory that never moves: a signal handler or a forked child finds nothing locked. They can be wrong
//! only about memory that something unmaps behind the back of our hooks, such as `free` inside the C library. A program that passes
//! a pointer into such memory uses the memory after it was freed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dayfly_meta::limits::PAGE_SIZE;

const PAGE_LEN: usize = PAGE_SIZE as usize;
const SLOTS: usize = 1 << SLOT_BITS;
/// Enough for a batch of some hundred buffers whose first pages are all known.
const SLOT_BITS: u32 = 10;

/// Readable pages: a page's number plus one, in the slot that [`slot`] names. 0 where the slot is empty.
static READABLE: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];
/// Ranges of writable pages, in the slot of the first page: the first page's number, and the count of pages in the low bits. 0
/// where the slot is empty.
static WRITABLE: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];
/// One bit for each slot of [`WRITABLE`] that was ever used, so that [`forget`] need not look at the others.
static WRITABLE_USED: [AtomicU64; SLOTS / 64] = [const { AtomicU64::new(0) }; SLOTS / 64];
/// Counts calls of [`forget`]. An answer of the kernel that is older than the last such call is not remembered.
static FORGOTTEN: AtomicU32 = AtomicU32::new(0);

/// Addresses have at most 57 bits, so the number of a page leaves this many bits for the count.
const COUNT_BITS: u32 = 19;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
/// From this many pages on, one call that also provides the memory is cheaper than a question about each page.
const POPULATED_MIN: usize = 3;

fn slot(page: usize) -> usize {
    // The high bits of a product with the golden ratio depend on all bits of the page's number.
    ((page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - SLOT_BITS)) as usize
}

/// Returns whether bytes can be read.
#[inline]
pub(crate) fn is_readable(start: usize, len: usize) -> bool {
    match len.checked_sub(1).map(|rest| start.checked_add(rest)) {
        None => true,
        Some(None) => false,
        Some(Some(last)) => (start / PAGE_LEN..=last / PAGE_LEN).all(is_page_readable),
    }
}

#[inline]
fn is_page_readable(page: usize) -> bool {
    READABLE[slot(page)].load(Ordering::Relaxed) == page as u64 + 1 || probe_readable(page)
}

#[cold]
fn probe_readable(page: usize) -> bool {
    let before = FORGOTTEN.load(Ordering::SeqCst);
    let can = kernel_can_read(page * PAGE_LEN);
    if can {
        remember(&READABLE[slot(page)], page as u64 + 1, before);
    }
    can
}

/// Returns how many bytes can be written from `start` on, at most `len`.
#[inline]
pub(crate) fn writable_len(start: usize, len: usize) -> usize {
    let Some(rest) = len.checked_sub(1) else { return 0 };
    let Some(last) = start.checked_add(rest) else { return 0 };
    let (first, last) = (start / PAGE_LEN, last / PAGE_LEN);
    let known = WRITABLE[slot(first)].load(Ordering::Relaxed);
    let count = (last - first + 1) as u64;
    if known >> COUNT_BITS == first as u64 && known & COUNT_MASK >= count { len } else { probe_writable(start, len) }
}

#[cold]
fn probe_writable(start: usize, len: usize) -> usize {
    let before = FORGOTTEN.load(Ordering::SeqCst);
    let first = start / PAGE_LEN;
    let count = (start % PAGE_LEN + len).div_ceil(PAGE_LEN);
    let is_populated = count >= POPULATED_MIN && kernel_can_populate(first * PAGE_LEN, count * PAGE_LEN);
    // Ask page by page if the kernel is too old for that call, or to find out where the writable pages end.
    let good = if is_populated {
        count
    } else {
        (first..first + count).take_while(|page| kernel_can_write((page * PAGE_LEN).max(start))).count()
    };
    if good > 0 {
        let at = slot(first);
        WRITABLE_USED[at / 64].fetch_or(1 << (at % 64), Ordering::SeqCst);
        remember(&WRITABLE[at], (first as u64) << COUNT_BITS | (good as u64).min(COUNT_MASK), before);
    }
    if good == count { len } else { (good * PAGE_LEN).saturating_sub(start % PAGE_LEN) }
}

/// Stores an answer, unless memory was unmapped after the question. `before` is the count of [`FORGOTTEN`] when the question began.
fn remember(slot: &AtomicU64, answer: u64, before: u32) {
    slot.store(answer, Ordering::SeqCst);
    if FORGOTTEN.load(Ordering::SeqCst) != before {
        let _ = slot.compare_exchange(answer, 0, Ordering::SeqCst, Ordering::Relaxed);
    }
}

/// Forgets what is known about a range, after it was unmapped, protected or replaced.
pub(crate) fn forget(start: usize, len: usize) {
    FORGOTTEN.fetch_add(1, Ordering::SeqCst);
    let (first, end) = (start / PAGE_LEN, start.saturating_add(len).div_ceil(PAGE_LEN));
    let clear = |slot: &AtomicU64, known: u64| {
        let _ = slot.compare_exchange(known, 0, Ordering::SeqCst, Ordering::Relaxed);
    };
    if end - first < SLOTS {
        let clear_page = |page: usize, slot: &AtomicU64| {
            if slot.load(Ordering::Relaxed) == page as u64 + 1 {
                clear(slot, page as u64 + 1);
            }
        };
        (first..end).for_each(|page| clear_page(page, &READABLE[slot(page)]));
    } else {
        for slot in &READABLE {
            let known = slot.load(Ordering::Relaxed);
            if (first as u64 + 1..end as u64 + 1).contains(&known) {
                clear(slot, known);
            }
        }
    }
    for (word, slots) in WRITABLE_USED.iter().zip(WRITABLE.chunks(64)) {
        let mut used = word.load(Ordering::SeqCst);
        while used != 0 {
            let slot = &slots[used.trailing_zeros() as usize];
            let known = slot.load(Ordering::Relaxed);
            let known_first = known >> COUNT_BITS;
            if known_first < end as u64 && known_first + (known & COUNT_MASK) > first as u64 {
                clear(slot, known);
            }
            used &= used - 1;
        }
    }
}

/// Forgets everything: after memory of unknown extent was unmapped, and in a forked child, which may lack some of it.
pub(crate) fn forget_all() {
    forget(0, usize::MAX);
}

#[cfg(target_arch = "x86_64")]
mod kernel {
    //! System calls that look at memory for us. They are written out, because they must not set `errno`, be canceled, or pass
    //! through a hook for `syscall`.

    use std::arch::asm;

    /// Makes a system call with six arguments.
    ///
    /// # Safety
    ///
    /// The call with these arguments must be sound. It may read and write memory.
    pub(super) unsafe fn call(number: i64, arguments: [usize; 6]) -> isize {
        let result;
        let [first, second, third, fourth, fifth, sixth] = arguments;
        // SAFETY: the instruction changes rax, rcx, r11 and what the call itself changes, for which the caller vouches.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") number as isize => result,
                in("rdi") first, in("rsi") second, in("rdx") third, in("r10") fourth, in("r8") fifth, in("r9") sixth,
                lateout("rcx") _, lateout("r11") _,
                options(nostack),
            );
        }
        result
    }
}

/// Asks the kernel to read 8 bytes of a page as a signal mask, for a kind of change that does not exist. The kernel fails with
/// EFAULT if it cannot read the bytes, else with EINVAL.
fn kernel_can_read(page: usize) -> bool {
    let no_such_change = usize::MAX;
    // Not the first bytes of the page, because the kernel treats the null pointer as a mask that was left out.
    let address = page + 8;
    // SAFETY: the kernel checks the address, and changes nothing in either case.
    let result = unsafe { kernel::call(libc::SYS_rt_sigprocmask, [no_such_change, address, 0, 8, 0, 0]) };
    result != -(libc::EFAULT as isize)
}

/// Returns whether the kernel can write at an address.
fn kernel_can_write(address: usize) -> bool {
    // A stack grows when a program or `read` touches the page below it, but not when a futex call does. So if the futex call fails,
    // this reads from the page and tries again.
    kernel_can_add(address) || kernel_can_read(address / PAGE_LEN * PAGE_LEN) && kernel_can_add(address)
}

/// Asks the kernel to add 0 to a word, atomically, which changes nothing: EFAULT if it cannot be written.
fn kernel_can_add(address: usize) -> bool {
    static NOBODY_WAITS_HERE: AtomicU32 = AtomicU32::new(0);
    /// `FUTEX_OP_ADD` of 0. The rest, `FUTEX_OP_CMP_EQ` with 2047, decides whether waiters at the address wake.
    const ADD_NOTHING: usize = 1 << 28 | 2047;
    let word = address & !3;
    let operation = (libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG) as usize;
    let ours = &raw const NOBODY_WAITS_HERE as usize;
    // SAFETY: the kernel checks the address. Adding 0 changes no byte, even beside other threads. A waiter at the word may wake
    // up if the word is 2047, which the contract of futexes allows at any time.
    let result = unsafe { kernel::call(libc::SYS_futex, [ours, operation, 1, 0, word, ADD_NOTHING]) };
    result != -(libc::EFAULT as isize)
}

/// Asks the kernel to provide memory for a range of whole pages, which is about to be written anyway. Kernels before 5.14 fail.
fn kernel_can_populate(start: usize, len: usize) -> bool {
    // SAFETY: changes no byte of the range.
    unsafe { kernel::call(libc::SYS_madvise, [start, len, libc::MADV_POPULATE_WRITE as usize, 0, 0, 0]) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maps pages, of which the first can be written, the second only read, and the third not accessed.
    fn three_pages() -> usize {
        // SAFETY: new mappings, which replace nothing but each other.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let pages = libc::mmap(std::ptr::null_mut(), 4 * PAGE_LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(pages.byte_add(PAGE_LEN), PAGE_LEN, libc::PROT_READ), 0);
            assert_eq!(libc::mprotect(pages.byte_add(2 * PAGE_LEN), PAGE_LEN, libc::PROT_NONE), 0);
            pages as usize
        }
    }

    #[test]
    fn pages_are_known_as_the_kernel_has_them() {
        let start = three_pages();
        for _ in 0..2 {
            assert!(is_readable(start + PAGE_LEN - 1, PAGE_LEN + 1) && is_readable(start, 0) && is_readable(0, 0));
            assert!(!is_readable(start + PAGE_LEN, PAGE_LEN + 1) && !is_readable(start + 2 * PAGE_LEN, 1));
            assert!(!is_readable(0, 1) && !is_readable(usize::MAX, 1) && !is_readable(usize::MAX, 2));
            assert_eq!(writable_len(start + 100, PAGE_LEN - 100), PAGE_LEN - 100);
            assert_eq!(writable_len(start + 100, 3 * PAGE_LEN), PAGE_LEN - 100);
            assert_eq!(writable_len(start + PAGE_LEN, 1), 0);
            assert_eq!((writable_len(0, 1), writable_len(usize::MAX, 7), writable_len(start, 0)), (0, 0, 0));
        }
    }

    #[test]
    fn pages_that_can_no_longer_be_accessed_are_forgotten() {
        let (start, other) = (three_pages(), three_pages());
        // Not `munmap`: the tests of other threads could map memory in the same place.
        // SAFETY: the pages of this test.
        let lock = |start: usize, len| assert_eq!(unsafe { libc::mprotect(start as *mut _, len, libc::PROT_NONE) }, 0);
        assert!(is_readable(start, 8) && writable_len(start, 8) == 8 && is_readable(other, 8));
        lock(start, PAGE_LEN);
        forget(start, PAGE_LEN);
        assert!(!is_readable(start, 8) && writable_len(start, 8) == 0 && is_readable(other, 8));
        lock(other, 4 * PAGE_LEN);
        forget_all();
        assert!(!is_readable(other, 8) && !is_readable(other + PAGE_LEN, 8));
    }

    #[test]
    fn a_long_range_is_provided_at_once_and_nothing_in_it_changes() {
        let mut memory = vec![7_u8; 100 * PAGE_LEN];
        assert_eq!(writable_len(memory.as_mut_ptr() as usize, memory.len()), memory.len());
        assert!(memory.iter().all(|&byte| byte == 7));
    }
}
