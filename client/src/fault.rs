//! Copying out of a mapped file whose bytes may not be there: the drive may fail, or the server give the file up. The
//! processor then faults, the kernel sends SIGBUS, and our handler lets the copy return early instead of ending the process.
//!
//! Where the program itself looks at bytes in place, the page that is not there becomes one of zeros. It stays one for as long as the
//! mapping does, so the whole mapping is poisoned first: no view of it is given out any more, no copy out of it is believed, and
//! whoever has a view learns by [`zeroed`] that it may have seen zeros.
//!
//! Only a process that has called [`install`] is served; until then nothing is mapped. Whatever else raises SIGBUS goes to
//! whoever wanted it before us.

use std::io;
use std::mem::{MaybeUninit, transmute};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

use dayfly_meta::limits::{PAGE_SIZE, SEGMENT_MAP_BYTES_MAX, SEGMENT_WINDOW_LEN};
use nix::libc::{self, SA_NODEFER, SA_ONSTACK, SA_SIGINFO, SIG_DFL, SIG_IGN, SIGBUS, c_int, c_void, sigaction, siginfo_t};

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// What SIGBUS did before, or what the program has asked for since: handler, and flags of its `sigaction`.
static HANDLER: AtomicUsize = AtomicUsize::new(SIG_DFL);
static FLAGS: AtomicUsize = AtomicUsize::new(0);

/// The program's wish for SIGBUS: a handler (or `SIG_DFL`, `SIG_IGN`) and the flags of `sigaction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disposition {
    /// As in `sa_sigaction`.
    pub handler: usize,
    /// As in `sa_flags`.
    pub flags: c_int,
}

/// Sets another wish than was known, and tells what that was.
pub fn replace_disposition(new: Disposition) -> Disposition {
    let flags = FLAGS.swap(new.flags as usize, Ordering::AcqRel) as c_int;
    Disposition { handler: HANDLER.swap(new.handler, Ordering::AcqRel), flags }
}

/// The program's wish.
pub fn disposition() -> Disposition {
    Disposition { handler: HANDLER.load(Ordering::Acquire), flags: FLAGS.load(Ordering::Acquire) as c_int }
}

/// Whether the handler is there, and so segments may be mapped.
pub fn is_available() -> bool {
    INSTALLED.load(Ordering::Acquire)
}

/// Takes SIGBUS over. `set` is the system's `sigaction`: a library that stands in front of it passes what is behind it.
pub fn install(set: unsafe extern "C" fn(c_int, *const sigaction, *mut sigaction) -> c_int) -> io::Result<()> {
    if !cfg!(target_arch = "x86_64") || INSTALLED.swap(true, Ordering::AcqRel) {
        return Ok(());
    }
    let mut before = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: all-zero bytes are a valid `sigaction`; the handler has the signature that SA_SIGINFO asks for and does only
    // what a signal handler may; both pointers are to live objects.
    let result = unsafe {
        let mut ours: sigaction = MaybeUninit::zeroed().assume_init();
        ours.sa_sigaction = on_bus_error as *const () as usize;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        set(SIGBUS, &raw const ours, before.as_mut_ptr())
    };
    if result != 0 {
        INSTALLED.store(false, Ordering::Release);
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `sigaction` succeeded and has filled it in.
    let before = unsafe { before.assume_init() };
    replace_disposition(Disposition { handler: before.sa_sigaction, flags: before.sa_flags });
    Ok(())
}

/// Copies from mapped bytes; `false` if they could not be read.
pub(crate) fn copy(from: *const u8, to: &mut [u8]) -> bool {
    // SAFETY: `from` points into a live mapping at least as long as `to`, as the caller has checked. Should its pages not
    // be there, the handler that `install` set makes the function return early; no reference to the source is made.
    unsafe { copy_until_fault(to.as_mut_ptr(), from, to.len()) == 0 }
}

/// Has the processor fetch bytes; pages that are not there, and addresses that mean nothing, are passed over.
pub(crate) fn prefetch(start: *const u8, len: u64) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..len as usize).step_by(64) {
        // SAFETY: a hint, which never faults.
        unsafe { core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(start.wrapping_add(line).cast()) };
    }
}

/// Copies; returns how many bytes were left when it had to stop.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn copy_until_fault(to: *mut u8, from: *const u8, len: usize) -> usize {
    core::arch::naked_asm!(
        "mov rcx, rdx",
        ".globl dayfly_copy_instruction",
        ".hidden dayfly_copy_instruction",
        "dayfly_copy_instruction:",
        "rep movsb",
        ".globl dayfly_copy_end",
        ".hidden dayfly_copy_end",
        "dayfly_copy_end:",
        "mov rax, rcx",
        "ret",
    )
}

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    static dayfly_copy_instruction: u8;
    static dayfly_copy_end: u8;
}

#[cfg(not(target_arch = "x86_64"))]
unsafe extern "C" fn copy_until_fault(_: *mut u8, _: *const u8, len: usize) -> usize {
    len
}

/// Pages of zeros that were put in the place of others.
static ZEROED: AtomicUsize = AtomicUsize::new(0);
/// Mapped ranges that are given out as views.
static VIEWED: [Viewed; VIEWED_MAX] =
    [const { Viewed { start: AtomicUsize::new(0), len: AtomicUsize::new(0), is_poisoned: AtomicBool::new(false) } }; VIEWED_MAX];
const VIEWED_MAX: usize = (SEGMENT_MAP_BYTES_MAX / SEGMENT_WINDOW_LEN) as usize;

/// A range. All of it is atomic, for a signal handler looks through them while other threads map and unmap.
struct Viewed {
    start: AtomicUsize,
    len: AtomicUsize,
    /// Whether some of its pages are zeros that should be something else.
    is_poisoned: AtomicBool,
}

/// A mapped range whose missing pages become zeros when somebody looks at them.
pub(crate) struct Mapped {
    viewed: &'static Viewed,
}

impl Mapped {
    /// Of the range; `None` where there is no room to note it, and so no view of it may be given out.
    pub(crate) fn note(start: *const u8, len: usize) -> Option<Self> {
        let take =
            |viewed: &&Viewed| viewed.start.compare_exchange(0, start as usize, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let viewed = VIEWED.iter().find(take)?;
        viewed.is_poisoned.store(false, Ordering::Relaxed);
        viewed.len.store(len, Ordering::Release);
        Some(Self { viewed })
    }

    /// Whether some of its bytes are made up. To be asked after they were copied: the handler says so before it makes any up.
    pub(crate) fn is_poisoned(&self) -> bool {
        fence(Ordering::Acquire);
        self.viewed.is_poisoned.load(Ordering::Acquire)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.viewed.len.store(0, Ordering::Release);
        self.viewed.start.store(0, Ordering::Release);
    }
}

/// How many pages of this process are zeros that should be something else: what was looked at while this changed does not count.
pub(crate) fn zeroed() -> usize {
    ZEROED.load(Ordering::Acquire)
}

/// Maps a page of zeros over one that is not there, if it is one of those.
fn put_zeros(address: usize) -> bool {
    let is_within = |viewed: &&Viewed| {
        let within = address.checked_sub(viewed.start.load(Ordering::Acquire));
        within.is_some_and(|within| within < viewed.len.load(Ordering::Acquire))
    };
    let Some(viewed) = VIEWED.iter().find(is_within) else { return false };
    // In this order, and before there is a zero to be seen: a batch that begins after the count sees the poison, and one that began
    // before sees the count.
    viewed.is_poisoned.store(true, Ordering::SeqCst);
    ZEROED.fetch_add(1, Ordering::SeqCst);
    let page = address / PAGE_SIZE as usize * PAGE_SIZE as usize;
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the page lies in a mapping of ours, whose bytes are gone; nobody but readers of views refers to it. A plain system
    // call, which a signal handler may make.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, page, PAGE_SIZE as usize, libc::PROT_READ, flags, -1, 0) };
    mapped as usize == page
}

/// Lets an interrupted copy return; passes everything else on.
unsafe extern "C" fn on_bus_error(number: c_int, info: *mut siginfo_t, context: *mut c_void) {
    #[cfg(target_arch = "x86_64")]
    {
        let context = context.cast::<libc::ucontext_t>();
        // SAFETY: with SA_SIGINFO the kernel passes the interrupted thread's context, which may be changed; it resumes at the
        // instruction after the copy, where `rcx` tells what was left.
        unsafe {
            let at = &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize];
            if *at == (&raw const dayfly_copy_instruction) as i64 {
                *at = (&raw const dayfly_copy_end) as i64;
                return;
            }
        }
    }
    // SAFETY: the kernel passes what it knows of the fault; reading its address is what it is for.
    if put_zeros(unsafe { (*info).si_addr() } as usize) {
        return;
    }
    let Disposition { handler, flags } = disposition();
    match handler {
        // Back to the default, and once more: the instruction faults again and ends the process as it would have.
        // SAFETY: plain system calls.
        SIG_DFL | SIG_IGN => unsafe {
            let default: sigaction = MaybeUninit::zeroed().assume_init();
            libc::syscall(libc::SYS_rt_sigaction, number, &raw const default, null::<sigaction>(), 8);
            // Not raised by an instruction but sent by somebody: then there is no second time.
            if (*info).si_code <= 0 && handler == SIG_DFL {
                libc::raise(number);
            }
        },
        // SAFETY: the program gave this address as a handler of this kind.
        handler if flags & SA_SIGINFO != 0 => unsafe {
            transmute::<usize, unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void)>(handler)(number, info, context);
        },
        // SAFETY: as above.
        handler => unsafe { transmute::<usize, unsafe extern "C" fn(c_int)>(handler)(number) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memmap2::MmapOptions;

    #[test]
    fn a_copy_from_bytes_that_are_gone_returns() {
        install(libc::sigaction).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let map = MmapOptions::new().len(8192).map_raw_read_only(&file).unwrap();
        let mut buffer = vec![1; 8192];
        assert!(copy(map.as_ptr(), &mut buffer));
        assert!(buffer.iter().all(|&byte| byte == 0));
        file.set_len(4096).unwrap();
        assert!(!copy(map.as_ptr(), &mut buffer));
        assert!(copy(map.as_ptr(), &mut buffer[..4096]));
        file.set_len(0).unwrap();
        assert!(!copy(map.as_ptr(), &mut buffer[..1]));
    }

    #[test]
    fn who_looks_at_bytes_that_are_gone_sees_zeros() {
        install(libc::sigaction).unwrap();
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 8192], 0).unwrap();
        let map = MmapOptions::new().len(8192).map_raw_read_only(&file).unwrap();
        let viewed = Mapped::note(map.as_ptr(), 8192).unwrap();
        // SAFETY: in bounds of the mapping; what is not there any more is made up by the handler, which is what is tested.
        let look = |at: usize| unsafe { std::ptr::read_volatile(map.as_ptr().add(at)) };
        assert_eq!((look(0), look(8191)), (7, 7));
        file.set_len(0).unwrap();
        let before = zeroed();
        assert!(!viewed.is_poisoned());
        assert_eq!((look(1), look(8191), look(4096)), (0, 0, 0));
        assert!(zeroed() >= before + 2 && viewed.is_poisoned(), "and can know that they are none");
        drop(viewed);
        let other = MmapOptions::new().len(8192).map_raw_read_only(&file).unwrap();
        assert!(!Mapped::note(other.as_ptr(), 8192).unwrap().is_poisoned(), "another is another");
    }
}
