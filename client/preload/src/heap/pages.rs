//! Pages from the kernel. This module makes the system calls itself, because the functions with these names are hooks of this
//! library, set `errno`, and may belong to another preloaded library.

use std::ptr::null_mut;

/// Length of a page, and the alignment of every mapping.
pub(super) const LEN: usize = 4096;

/// Maps memory with the given length and alignment (a power of two), filled with zeros. Returns the null pointer if there is no
/// memory.
pub(super) fn map(len: usize, align: usize) -> *mut u8 {
    if align <= LEN {
        return map_pages(len);
    }
    // Maps more, and returns what lies before and after the aligned part.
    let (len, spare) = (len.next_multiple_of(LEN), align - LEN);
    let Some(room) = len.checked_add(spare) else { return null_mut() };
    let memory = map_pages(room);
    if memory.is_null() {
        return memory;
    }
    let before = memory.addr().next_multiple_of(align) - memory.addr();
    let aligned = memory.wrapping_add(before);
    // SAFETY: both parts lie in the mapping just made, and nobody uses them.
    unsafe {
        unmap(memory, before);
        unmap(aligned.wrapping_add(len), spare - before);
    }
    aligned
}

fn map_pages(len: usize) -> *mut u8 {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    // SAFETY: a new mapping, which replaces nothing.
    let memory = unsafe { system_call(libc::SYS_mmap, [0, len, protection, flags, usize::MAX, 0]) };
    pointer(memory)
}

/// Unmaps memory.
///
/// # Safety
///
/// Nobody uses the memory. It is a whole mapping that [`map`] made, or a part at the beginning or the end of one.
pub(super) unsafe fn unmap(memory: *mut u8, len: usize) {
    if len > 0 {
        // SAFETY: by the caller's promise. This fails only if the process has too many mappings; then the pages stay.
        unsafe { system_call(libc::SYS_munmap, [memory.addr(), len, 0, 0, 0, 0]) };
    }
}

/// Makes mapped memory shorter or longer, and returns its address, which may be a new one. If there is no memory, this returns the
/// null pointer and changes nothing.
///
/// # Safety
///
/// The memory was mapped by [`map`] or this function, and has the length `old`. Unless this fails, nobody uses the old address
/// anymore.
pub(super) unsafe fn remap(memory: *mut u8, old: usize, new: usize) -> *mut u8 {
    let (old, new) = (old.next_multiple_of(LEN), new.next_multiple_of(LEN));
    // SAFETY: by the caller's promise.
    pointer(unsafe { system_call(libc::SYS_mremap, [memory.addr(), old, new, libc::MREMAP_MAYMOVE as usize, 0, 0]) })
}

/// Returns the address that a system call returned, or the null pointer if it failed.
fn pointer(result: usize) -> *mut u8 {
    // The kernel returns failures as the highest 4095 numbers.
    if result > usize::MAX - LEN { null_mut() } else { std::ptr::with_exposed_provenance_mut(result) }
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!("system_call is not written for this processor yet");

/// Makes a system call and leaves `errno` as it is.
///
/// # Safety
///
/// As for the system call.
#[cfg(target_arch = "x86_64")]
unsafe fn system_call(number: i64, arguments: [usize; 6]) -> usize {
    let result;
    // SAFETY: the kernel's calling convention, which leaves all other registers alone.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}
