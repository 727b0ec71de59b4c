//! Reads mapped files whose bytes may be missing, because the drive fails or the server discarded the file. The processor then
//! faults and the kernel sends SIGBUS. If this module was copying the bytes, its handler makes the copy return early, so that the
//! process does not die.
//!
//! If the program itself looks at missing bytes in place, the handler maps a page of zeros over them. That page stays for as long
//! as the mapping does, so the whole mapping is poisoned first: it lends no further views, and no copy from it is trusted. The
//! handler also counts the pages that it replaces. From the count, a batch learns that the program may have seen zeros.
//!
//! Nothing is mapped before the process has called [`install`]. A SIGBUS with any other cause goes
//! to the handler that the program or the system had set, with the mask and the flags that the program chose.
//!
//! The kernel ends a process that raises a blocked SIGBUS. A thread that blocks SIGBUS therefore reads with `pread`, and gets
//! no views: see `is_blocked_here`.

use std::cell::Cell;
use std::io;
use std::mem::{MaybeUninit, transmute};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

use dayfly_meta::limits::{PAGE_SIZE, SEGMENT_MAP_BYTES_MAX, SEGMENT_WINDOW_LEN};
use nix::libc::{
    self, SA_NODEFER, SA_ONSTACK, SA_RESETHAND, SA_RESTART, SA_SIGINFO, SIG_DFL, SIG_IGN, SIGBUS, c_int, c_void, sigaction,
    siginfo_t,
};

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// The action for SIGBUS before `install`, or the action that the program has requested since then:
/// the handler, the flags and the mask of its `sigaction`.
static HANDLER: AtomicUsize = AtomicUsize::new(SIG_DFL);
static FLAGS: AtomicUsize = AtomicUsize::new(0);
static MASK: AtomicU64 = AtomicU64::new(0);

/// The system's `sigaction`. A library that replaces `sigaction` passes the original function.
pub type SetAction = unsafe extern "C" fn(c_int, *const sigaction, *mut sigaction) -> c_int;

/// How the program wants SIGBUS handled: a handler (or `SIG_DFL`, `SIG_IGN`), and the flags and the
/// mask of `sigaction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disposition {
    /// As in `sa_sigaction`.
    pub handler: usize,
    /// As in `sa_flags`.
    pub flags: c_int,
    /// The signals of `sa_mask`, one bit each, as the kernel stores them.
    pub mask: u64,
}

/// Signals that the kernel removes from every mask: SIGKILL and SIGSTOP.
const NEVER_BLOCKED: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);

impl Disposition {
    /// Returns the disposition that an action asks for.
    #[must_use]
    pub fn of(action: &sigaction) -> Self {
        // SAFETY: the first word of the C library's set of signals is the kernel's set.
        let mask = unsafe { (&raw const action.sa_mask).cast::<u64>().read() };
        Self { handler: action.sa_sigaction, flags: action.sa_flags, mask: mask & !NEVER_BLOCKED }
    }

    /// Stores this disposition in an action, and leaves the other fields as they are.
    pub fn put_in(&self, action: &mut sigaction) {
        (action.sa_sigaction, action.sa_flags) = (self.handler, self.flags);
        // SAFETY: as in `of`.
        unsafe { (&raw mut action.sa_mask).cast::<u64>().write(self.mask) };
    }

    /// Returns the action to give to the kernel: our handler, with the flags and the mask that the program wants for its own.
    fn kernel_action(&self) -> sigaction {
        let asked = match self.handler {
            SIG_DFL | SIG_IGN => Self { handler: 0, flags: SA_ONSTACK | SA_NODEFER | SA_RESTART, mask: 0 },
            _ => *self,
        };
        // SAFETY: all-zero bytes are a valid `sigaction`.
        let mut action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        let (handler, flags) = (on_bus_error as *const () as usize, asked.flags & !SA_RESETHAND | SA_SIGINFO);
        Self { handler, flags, mask: asked.mask }.put_in(&mut action);
        action
    }
}

/// Replaces the program's disposition for SIGBUS, which applies to all faults that are not ours. Returns the previous one.
///
/// # Errors
///
/// If `sigaction` fails.
pub fn replace_disposition(new: Disposition, set: SetAction) -> io::Result<Disposition> {
    // SAFETY: a live object, and a handler that is async-signal-safe and has the signature that SA_SIGINFO asks for.
    if unsafe { set(SIGBUS, &new.kernel_action(), null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(record(new))
}

fn record(new: Disposition) -> Disposition {
    let flags = FLAGS.swap(new.flags as u32 as usize, Ordering::AcqRel) as c_int;
    let mask = MASK.swap(new.mask, Ordering::AcqRel);
    Disposition { handler: HANDLER.swap(new.handler, Ordering::AcqRel), flags, mask }
}

/// Returns how the program wants SIGBUS handled.
pub fn disposition() -> Disposition {
    let flags = FLAGS.load(Ordering::Acquire) as c_int;
    Disposition { handler: HANDLER.load(Ordering::Acquire), flags, mask: MASK.load(Ordering::Acquire) }
}

/// Whether a thread of this process may block SIGBUS.
static MAY_BE_BLOCKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread is known not to block SIGBUS. A new thread inherits a mask, so it asks the kernel once.
    static IS_UNBLOCKED: Cell<bool> = const { Cell::new(false) };
}

/// Records that this thread's mask has changed, and may contain SIGBUS.
pub fn note_mask() {
    MAY_BE_BLOCKED.store(true, Ordering::Release);
    IS_UNBLOCKED.set(false);
}

/// Returns whether this thread blocks SIGBUS, so that it must not touch mapped bytes. This is one load in a process in which no
/// thread has ever blocked SIGBUS. This library does not see changes of the mask that `siglongjmp` or the mask of a handler makes.
/// After such a change, a drive that fails while the thread reads ends the process, as it would without this library.
#[inline]
pub(crate) fn is_blocked_here() -> bool {
    MAY_BE_BLOCKED.load(Ordering::Relaxed) && !IS_UNBLOCKED.get() && ask_kernel()
}

#[cold]
fn ask_kernel() -> bool {
    let mut mask = 0_u64;
    // SAFETY: without a new mask the call only stores the current one, in a live object whose size it is told.
    let asked = unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, null::<u64>(), &raw mut mask, 8) };
    let is_blocked = asked != 0 || mask >> (SIGBUS - 1) & 1 == 1;
    IS_UNBLOCKED.set(!is_blocked);
    is_blocked
}

/// Returns whether the handler is installed, so that segments may be mapped.
pub fn is_available() -> bool {
    INSTALLED.load(Ordering::Acquire)
}

/// Installs the handler for SIGBUS. `set` is the system's `sigaction`. A library that replaces
/// `sigaction` passes the original function.
///
/// # Errors
///
/// If `sigaction` fails.
pub fn install(set: SetAction) -> io::Result<()> {
    if !cfg!(target_arch = "x86_64") || INSTALLED.swap(true, Ordering::AcqRel) {
        return Ok(());
    }
    let mut before = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: asks for the current action, and stores it in a live object.
    let mut result = unsafe { set(SIGBUS, null(), before.as_mut_ptr()) };
    if result == 0 {
        // SAFETY: `sigaction` succeeded and has filled `before` in.
        let before = Disposition::of(unsafe { before.assume_init_ref() });
        // Recorded first, because the handler may need the disposition from the moment that it is installed.
        record(before);
        // SAFETY: as in `replace_disposition`.
        result = unsafe { set(SIGBUS, &before.kernel_action(), null_mut()) };
    }
    if result != 0 {
        INSTALLED.store(false, Ordering::Release);
        return Err(io::Error::last_os_error());
    }
    // A program inherits its mask from the process that started it, so SIGBUS may be blocked already.
    if ask_kernel() {
        note_mask();
    }
    Ok(())
}

/// The side of a copy on which the kernel found no bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The mapping that is copied from.
    Source,
    /// The buffer that is copied to, which may be mapped from a file that was cut short.
    Target,
}

/// A bit that is set in the number of bytes left if the copy stopped at its target. No copy is so long that its length needs this
/// bit.
const AT_TARGET: usize = 1 << 63;

/// Copies from mapped bytes.
///
/// # Errors
///
/// If bytes on either side are missing.
pub(crate) fn copy(from: *const u8, to: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: `from` points into a live mapping at least as long as `to`, as the caller has
    // checked. If its pages are missing, the handler that `install` set makes the function return
    // early. No reference to the source is made.
    match unsafe { copy_until_fault(to.as_mut_ptr(), from, to.len()) } {
        0 => Ok(()),
        left if left & AT_TARGET != 0 => Err(Fault::Target),
        _ => Err(Fault::Source),
    }
}

/// Makes the processor fetch bytes. Missing pages and invalid addresses are ignored.
pub(crate) fn prefetch(start: *const u8, len: u64) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..len as usize).step_by(64) {
        // SAFETY: a prefetch is a hint and never faults.
        unsafe { core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(start.wrapping_add(line).cast()) };
    }
}

/// Copies bytes, and returns how many were left when the copy stopped. If bytes of the target were missing, the result also
/// contains [`AT_TARGET`].
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

/// The number of missing pages of this process that were replaced by zeros.
static ZEROED: AtomicUsize = AtomicUsize::new(0);
/// The mapped ranges that may be lent as views.
static VIEWED: [Viewed; VIEWED_MAX] =
    [const { Viewed { start: AtomicUsize::new(0), len: AtomicUsize::new(0), is_poisoned: AtomicBool::new(false) } }; VIEWED_MAX];
const VIEWED_MAX: usize = (SEGMENT_MAP_BYTES_MAX / SEGMENT_WINDOW_LEN) as usize;

/// A range that may be lent. Its fields are atomic, because a signal handler searches the ranges
/// while other threads map and unmap.
struct Viewed {
    start: AtomicUsize,
    len: AtomicUsize,
    /// Whether some of its pages are zeros in place of missing bytes.
    is_poisoned: AtomicBool,
}

/// A registered range, whose missing pages become zeros when the program looks at them.
pub(crate) struct Mapped {
    viewed: &'static Viewed,
}

impl Mapped {
    /// Registers a range. `None` if the table is full; then no view of the range may be lent.
    pub(crate) fn register(start: *const u8, len: usize) -> Option<Self> {
        let take =
            |viewed: &&Viewed| viewed.start.compare_exchange(0, start as usize, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let viewed = VIEWED.iter().find(take)?;
        viewed.is_poisoned.store(false, Ordering::Relaxed);
        viewed.len.store(len, Ordering::Release);
        Some(Self { viewed })
    }

    /// Returns whether some bytes of the range are zeros in place of missing bytes. Must be called after a copy, not before it: the
    /// handler poisons the range before it makes any zeros visible.
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

/// Returns how many pages of this process are zeros in place of missing bytes. If the number changed, bytes that were read in the
/// meantime are not valid.
pub(crate) fn zeroed() -> usize {
    ZEROED.load(Ordering::Acquire)
}

/// Maps a page of zeros over a missing page, if it lies in a registered range.
fn put_zeros(address: usize) -> bool {
    let is_within = |viewed: &&Viewed| {
        let within = address.checked_sub(viewed.start.load(Ordering::Acquire));
        within.is_some_and(|within| within < viewed.len.load(Ordering::Acquire))
    };
    let Some(viewed) = VIEWED.iter().find(is_within) else { return false };
    // Both changes come in this order, before any zero is visible. A batch that begins after the
    // count has changed sees the poison, and a batch that began earlier sees the changed count.
    viewed.is_poisoned.store(true, Ordering::SeqCst);
    ZEROED.fetch_add(1, Ordering::SeqCst);
    let page = address / PAGE_SIZE as usize * PAGE_SIZE as usize;
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the page lies in a mapping of ours whose bytes are gone, and only readers of views
    // refer to it. A plain system call is async-signal-safe.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, page, PAGE_SIZE as usize, libc::PROT_READ, flags, -1, 0) };
    mapped as usize == page
}

/// Handles SIGBUS: makes a copy that faulted return early, puts zeros in place of a missing page of a registered range, and passes
/// every other signal on to the program.
unsafe extern "C" fn on_bus_error(number: c_int, info: *mut siginfo_t, context: *mut c_void) {
    #[cfg(target_arch = "x86_64")]
    {
        let context = context.cast::<libc::ucontext_t>();
        // SAFETY: with SA_SIGINFO the kernel passes the interrupted thread's context, which may be
        // changed. The thread resumes at the instruction after the copy, where `rcx` contains the
        // number of bytes left. `rdi` is where the next byte would have been stored.
        unsafe {
            let registers = &mut (*context).uc_mcontext.gregs;
            if registers[libc::REG_RIP as usize] == (&raw const dayfly_copy_instruction) as i64 {
                let left = registers[libc::REG_RCX as usize] as usize;
                let beyond_target = ((*info).si_addr() as usize).wrapping_sub(registers[libc::REG_RDI as usize] as usize);
                if beyond_target < left {
                    registers[libc::REG_RCX as usize] = (left | AT_TARGET) as i64;
                }
                registers[libc::REG_RIP as usize] = (&raw const dayfly_copy_end) as i64;
                return;
            }
        }
    }
    // SAFETY: with SA_SIGINFO the kernel passes a valid `siginfo_t`, whose address field is set for
    // SIGBUS.
    if put_zeros(unsafe { (*info).si_addr() } as usize) {
        return;
    }
    let Disposition { handler, flags, .. } = disposition();
    if !matches!(handler, SIG_DFL | SIG_IGN) {
        if flags & SA_RESETHAND != 0 {
            HANDLER.store(SIG_DFL, Ordering::Release);
        }
        // While the program's handler runs, the signals in its mask are blocked, perhaps SIGBUS among them.
        note_mask();
    }
    match handler {
        // Restores the default action and returns: the instruction faults again and ends the
        // process, as it would without this library.
        // SAFETY: both are plain system calls.
        SIG_DFL | SIG_IGN => unsafe {
            let default: sigaction = MaybeUninit::zeroed().assume_init();
            libc::syscall(libc::SYS_rt_sigaction, number, &raw const default, null::<sigaction>(), 8);
            // A signal that a process sent, and that no instruction raised, would not come again by itself.
            if (*info).si_code <= 0 && handler == SIG_DFL {
                libc::raise(number);
            }
        },
        // SAFETY: the program registered this address as a handler with three arguments.
        handler if flags & SA_SIGINFO != 0 => unsafe {
            transmute::<usize, unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void)>(handler)(number, info, context);
        },
        // SAFETY: the program registered this address as a handler with one argument.
        handler => unsafe { transmute::<usize, unsafe extern "C" fn(c_int)>(handler)(number) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memmap2::MmapOptions;

    #[test]
    fn a_copy_from_missing_bytes_returns_early() {
        install(libc::sigaction).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let map = MmapOptions::new().len(8192).map_raw_read_only(&file).unwrap();
        let mut buffer = vec![1; 8192];
        assert_eq!(copy(map.as_ptr(), &mut buffer), Ok(()));
        assert!(buffer.iter().all(|&byte| byte == 0));
        file.set_len(4096).unwrap();
        assert_eq!(copy(map.as_ptr(), &mut buffer), Err(Fault::Source));
        assert_eq!(copy(map.as_ptr(), &mut buffer[..4096]), Ok(()));
        file.set_len(0).unwrap();
        assert_eq!(copy(map.as_ptr(), &mut buffer[..1]), Err(Fault::Source));
    }

    #[test]
    fn a_copy_to_a_buffer_that_lost_its_memory_blames_the_buffer() {
        install(libc::sigaction).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let map = MmapOptions::new().len(8192).map_raw(&file).unwrap();
        file.set_len(4096).unwrap();
        // SAFETY: a live mapping of 8192 bytes. Its second page has no bytes, which `copy` handles.
        let buffer = unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr(), 8192) };
        let source = vec![3; 8192];
        assert_eq!(copy(source.as_ptr(), &mut buffer[..4096]), Ok(()));
        assert_eq!(copy(source.as_ptr(), &mut buffer[100..]), Err(Fault::Target));
        assert_eq!(buffer[4095], 3);
    }

    /// SEMANTICS: "Views are valid until the batch ends. If the session ends, the dataset is replaced, or the drive that holds
    /// the bytes fails, views may show zeros, but never raise SIGBUS, and is_good returns false."
    #[test]
    fn a_view_of_missing_bytes_shows_zeros_and_poisons_its_mapping() {
        install(libc::sigaction).unwrap();
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 8192], 0).unwrap();
        let map = MmapOptions::new().len(8192).map_raw_read_only(&file).unwrap();
        let viewed = Mapped::register(map.as_ptr(), 8192).unwrap();
        // SAFETY: in bounds of the mapping. Missing pages are replaced by the handler, which is
        // what this test checks.
        let look = |at: usize| unsafe { std::ptr::read_volatile(map.as_ptr().add(at)) };
        assert_eq!((look(0), look(8191)), (7, 7));
        file.set_len(0).unwrap();
        let before = zeroed();
        assert!(!viewed.is_poisoned());
        assert_eq!((look(1), look(8191), look(4096)), (0, 0, 0));
        assert!(zeroed() >= before + 2 && viewed.is_poisoned(), "the zeros are noticeable");
        drop(viewed);
        let other = MmapOptions::new().len(8192).map_raw_read_only(&file).unwrap();
        assert!(!Mapped::register(other.as_ptr(), 8192).unwrap().is_poisoned(), "a new mapping of the same file is not poisoned");
    }
}
