//! Gives each thread a number without using Rust's thread-local variables: the first use of such a variable in a thread may
//! allocate memory, which a signal handler must not do.

/// Returns a number that no other running thread of this process has. After a fork, the child's
/// thread has the number of the thread that forked.
#[inline]
#[cfg(target_arch = "x86_64")]
pub fn current() -> usize {
    let number;
    // SAFETY: reads the first word of the thread's control block. By the ABI, this word is the block's own address.
    unsafe { core::arch::asm!("mov {}, fs:0", out(reg) number, options(nostack, preserves_flags, pure, readonly)) };
    number
}

/// Returns a number that no other running thread of this process has. After a fork, the child's
/// thread has the number of the thread that forked.
#[inline]
#[cfg(not(target_arch = "x86_64"))]
pub fn current() -> usize {
    // SAFETY: libc returns the address of this thread's errno. The address is not followed here.
    unsafe { nix::libc::__errno_location() }.addr()
}

/// Returns a number below `count` that differs between most threads. `count` must be a power of two above 1.
#[inline]
pub fn spread(count: usize) -> usize {
    // The addresses of several threads differ by about the length of a stack. The multiplication, by 2^64 divided by the golden
    // ratio, puts such neighbors far from each other in the upper bits.
    let mixed = (current() as u64 >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (u64::BITS - count.ilog2())) as usize
}
