//! A number for each thread, without thread-local variables of Rust: their first use in a thread may allocate, which a signal
//! handler must not do.

/// Returns a number that no other running thread of this process has. After a fork, the child's
/// thread has the number of the thread that forked.
#[inline]
#[cfg(target_arch = "x86_64")]
pub fn current() -> usize {
    let number;
    // SAFETY: reads the first word of the thread's own block, which by the ABI is the block's address.
    unsafe { core::arch::asm!("mov {}, fs:0", out(reg) number, options(nostack, preserves_flags, pure, readonly)) };
    number
}

/// Returns a number that no other running thread of this process has. After a fork, the child's
/// thread has the number of the thread that forked.
#[inline]
#[cfg(not(target_arch = "x86_64"))]
pub fn current() -> usize {
    // SAFETY: libc returns the address of this thread's errno. It exists as long as the thread, and is not followed here.
    unsafe { nix::libc::__errno_location() }.addr()
}

/// Returns a number below `count`, a power of two above 1, which differs for most threads.
#[inline]
pub fn spread(count: usize) -> usize {
    // The addresses of several threads differ by about the length of a stack. The multiplication, by 2^64 divided by the golden
    // ratio, puts such neighbors far from each other in the upper bits.
    let mixed = (current() as u64 >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (u64::BITS - count.ilog2())) as usize
}
