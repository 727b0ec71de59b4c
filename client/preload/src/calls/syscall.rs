//! `syscall`: system calls by number. libuv closes descriptors in this way, and other libraries open, read and duplicate them.
//!
//! Every number but those of [`rules`] goes on to the next library with all registers and `errno` untouched: the entry is
//! written in assembly and ends with a jump. The numbers of `rules` concern descriptors or paths. Such a call continues in
//! [`dispatch`], which answers for the namespace as the C library's function of that name does, and otherwise passes it on.
//!
//! A call that is passed on goes to the next library's `syscall`, never through a hook. The next library may have made the call in
//! its own function of that name (as tcmalloc does in `mmap`), and the hook would call that function again.
//!
//! [`descriptors`] lists the calls that name descriptors: to them, the reserved ones look closed.
//!
//! In a process without a session no number is of interest.

mod descriptors;
mod rules;

use std::ffi::{c_char, c_int, c_long, c_void};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use dayfly_client::reserved_fd::is_hidden;
use libc::{msghdr, pollfd};

use super::descriptor::{make_room, record_copy};
use super::hidden::NEVER_OPEN;
use super::map;
use super::poll::Set;
use crate::memory::{self, FromC};
use crate::{cwd, kernel_reads, next, pages, path, table};

/// One more than the highest number that can be of interest.
const NUMBERS_MAX: usize = 512;
/// The most arguments that a system call can have.
const ARGUMENTS: usize = 6;

/// By number: 1 if calls of this number continue in [`dispatch`].
static IS_OF_INTEREST: [AtomicU8; NUMBERS_MAX] = [const { AtomicU8::new(0) }; NUMBERS_MAX];
/// The address of the next library's `syscall`; 0 before it has been looked up.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Begins to look at the calls of interest. Call it before the program's `main`, if there is a session.
pub(crate) fn begin() {
    look_up();
    for &number in rules::NUMBERS.iter().chain(descriptors::NUMBERS) {
        if let Some(entry) = usize::try_from(number).ok().and_then(|number| IS_OF_INTEREST.get(number)) {
            entry.store(1, Ordering::Release);
        }
    }
}

/// The entry that programs call. It uses only registers that a call may change anyway (r11; x16 and x17).
#[cfg_attr(not(test), unsafe(export_name = "syscall"))]
#[unsafe(naked)]
#[allow(dead_code, reason = "called from C")]
unsafe extern "C" fn entry() {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!(
        "endbr64",
        "cmp rdi, {max}",
        "jae 2f",
        "lea r11, [rip + {interest}]",
        "cmp byte ptr [r11 + rdi], 0",
        "jne {dispatch}",
        "2:",
        "mov r11, [rip + {next}]",
        "test r11, r11",
        "jz 3f",
        "jmp r11",
        // The first call of a process whose constructors have not run: keep the arguments while the address is looked up.
        "3:",
        "push rax",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "call {look_up}",
        "mov r11, rax",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rax",
        "jmp r11",
        max = const NUMBERS_MAX,
        interest = sym IS_OF_INTEREST,
        next = sym NEXT,
        dispatch = sym dispatch,
        look_up = sym look_up,
    );
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!(
        "bti c",
        "cmp x0, #{max}",
        "b.hs 2f",
        "adrp x16, {interest}",
        "add x16, x16, :lo12:{interest}",
        "ldrb w16, [x16, x0]",
        "cbz w16, 2f",
        "b {dispatch}",
        "2:",
        "adrp x16, {next}",
        "ldr x16, [x16, :lo12:{next}]",
        "cbz x16, 3f",
        "br x16",
        "3:",
        "stp x29, x30, [sp, #-80]!",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "str x6, [sp, #64]",
        "bl {look_up}",
        "mov x16, x0",
        "ldr x6, [sp, #64]",
        "ldp x4, x5, [sp, #48]",
        "ldp x2, x3, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #80",
        "br x16",
        max = const NUMBERS_MAX,
        interest = sym IS_OF_INTEREST,
        next = sym NEXT,
        dispatch = sym dispatch,
        look_up = sym look_up,
    );
}

/// Returns the address of the next library's `syscall`, or of a function that fails. Leaves `errno` as it was.
extern "C" fn look_up() -> usize {
    let before = memory::errno();
    let address = next::address_of_syscall().unwrap_or(missing as *const () as usize);
    memory::set_errno(before);
    NEXT.store(address, Ordering::Release);
    address
}

extern "C" fn missing() -> c_long {
    memory::fail(libc::ENOSYS)
}

/// Calls of interest continue here. A hook may end the thread, if the thread is canceled.
extern "C-unwind" fn dispatch(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let mut arguments = [a, b, c, d, e, f];
    for &at in descriptors::positions(number) {
        if is_hidden(arguments[at] as RawFd) {
            arguments[at] = NEVER_OPEN as usize;
        }
    }
    rules::follow(&Call { number, arguments })
}

/// A system call that a program makes.
struct Call {
    number: c_long,
    /// As many as the call has; the rest is whatever the program had in its registers.
    arguments: [usize; ARGUMENTS],
}

/// A type that one of a call's arguments can have.
trait Argument {
    fn of(word: usize) -> Self;
}

impl Argument for c_int {
    fn of(word: usize) -> Self {
        word as Self
    }
}

impl Argument for u32 {
    fn of(word: usize) -> Self {
        word as Self
    }
}

impl Argument for i64 {
    fn of(word: usize) -> Self {
        word as Self
    }
}

impl Argument for u64 {
    fn of(word: usize) -> Self {
        word as Self
    }
}

impl Argument for usize {
    fn of(word: usize) -> Self {
        word
    }
}

impl<T> Argument for FromC<'_, *const T> {
    fn of(word: usize) -> Self {
        // SAFETY: a program that makes the call keeps the promise for its pointers that C's function of that name demands.
        unsafe { FromC::new(word as *const T) }
    }
}

impl<T> Argument for FromC<'_, *mut T> {
    fn of(word: usize) -> Self {
        // SAFETY: as above.
        unsafe { FromC::new(word as *mut T) }
    }
}

impl Argument for FromC<'_, u64> {
    fn of(word: usize) -> Self {
        // SAFETY: as above.
        unsafe { FromC::new(word as u64) }
    }
}

impl Call {
    fn get<T: Argument>(&self, index: usize) -> T {
        T::of(self.arguments[index])
    }

    /// Passes the call on.
    fn kernel(&self) -> c_long {
        let [a, b, c, d, e, f] = self.arguments;
        next::syscall(self.number, a, b, c, d, e, f)
    }

    /// Passes the call on with other words for some of its arguments.
    fn kernel_with(&self, changes: &[(usize, usize)]) -> c_long {
        let mut arguments = self.arguments;
        changes.iter().for_each(|&(index, word)| arguments[index] = word);
        Self { number: self.number, arguments }.kernel()
    }

    /// Answers `poll` and `ppoll`. `now` is the word for a timeout that does not wait.
    fn polls(&self, now: usize) -> c_long {
        let kernel = |others: FromC<*mut pollfd>, is_ready| match is_ready {
            true => self.kernel_with(&[(0, others.raw().addr()), (2, now)]) as c_int,
            false => self.kernel_with(&[(0, others.raw().addr())]) as c_int,
        };
        super::poll::poll_with(self.get(0), self.get::<u32>(1).into(), kernel).into()
    }

    /// Answers `select` and `pselect6`. `now` is the word for a timeout that does not wait.
    fn selects(&self, now: usize) -> c_long {
        let kernel = |count: c_int, [read, write, except]: [Set; 3], is_ready| {
            let sets = [(0, count as usize), (1, read.raw().addr()), (2, write.raw().addr()), (3, except.raw().addr())];
            match is_ready {
                true => self.kernel_with(&[sets[0], sets[1], sets[2], sets[3], (4, now)]) as c_int,
                false => self.kernel_with(&sets) as c_int,
            }
        };
        super::poll::select_with(self.get(0), [self.get(1), self.get(2), self.get(3)], kernel).into()
    }

    /// Returns whether the table has the descriptor in an argument. The hook decides whether to believe it.
    fn may_be_ours(&self, descriptor: usize) -> bool {
        table::presume(self.get(descriptor)).is_some()
    }

    /// Returns whether the descriptor in an argument is ours.
    fn is_ours(&self, descriptor: usize) -> bool {
        table::is_ours(self.get(descriptor))
    }

    /// Returns whether a path leads into the namespace.
    fn leads_in(&self, path: usize) -> bool {
        path::is_ours(libc::AT_FDCWD, self.get(path))
    }

    /// Returns whether a path leads into the namespace from a directory's descriptor, or is empty and the descriptor is ours.
    fn leads_in_from(&self, directory: usize, path: usize) -> bool {
        let (directory, path): (RawFd, FromC<*const c_char>) = (self.get(directory), self.get(path));
        if path::is_ours(directory, path) {
            return true;
        }
        // The first byte tells whether the path is empty.
        let is_empty = path.is_null() || path.string().is_some_and(|path| path.is_empty());
        is_empty && (table::is_ours(directory) || directory == libc::AT_FDCWD && cwd::current().is_some())
    }

    /// Passes on a call that returns a new descriptor.
    fn creates(&self) -> c_long {
        let number = self.kernel();
        table::created(number as RawFd);
        number
    }

    /// Passes on a call that returns a new descriptor or some other number.
    fn may_create(&self) -> c_long {
        let number = self.kernel();
        // Asks the kernel, and forgets the number if it is no longer ours.
        let _ = RawFd::try_from(number).is_ok_and(table::is_ours);
        number
    }

    /// Passes on a call that stores two new descriptors where an argument points.
    fn creates_two(&self, pair: usize) -> c_long {
        let result = self.kernel();
        if result == 0 {
            super::creates::both_created(self.get(pair));
        }
        result
    }

    /// Passes on a call that receives a message, perhaps with descriptors.
    fn receives(&self, message: usize) -> c_long {
        let result = self.kernel();
        if result >= 0 {
            super::creates::received(self.get::<FromC<*mut msghdr>>(message));
        }
        result
    }

    /// Passes on a call that receives several messages and returns their count.
    fn receives_many(&self, messages: usize) -> c_long {
        let result = self.kernel();
        super::creates::all_received(self.get(messages), result);
        result
    }

    /// Passes on a call that takes the process to another directory.
    fn leaves(&self) -> c_long {
        let result = self.kernel();
        if result == 0 {
            cwd::leave();
        }
        result
    }

    /// Answers `getcwd`, which returns a length here.
    fn working_directory(&self) -> c_long {
        match cwd::current() {
            None => self.kernel(),
            Some(directory) => {
                let out: FromC<*mut c_char> = self.get(0);
                if directory.len() >= self.get::<usize>(1) {
                    return memory::fail(libc::ERANGE);
                }
                if !out.is_null() && !super::names::getcwd(out, self.get(1)).is_null() {
                    return directory.len() as c_long + 1;
                }
                if out.is_null() { memory::fail(libc::EFAULT) } else { -1 }
            }
        }
    }

    /// Answers `fadvise64`, which fails with -1 here.
    fn advise(&self) -> c_long {
        match super::read::posix_fadvise(self.get(0), self.get(1), self.get(2), self.get(3)) {
            0 => 0,
            errno => memory::fail(errno),
        }
    }

    /// Passes on a call of libaio, after the descriptors that it names have got kernel copies.
    fn submits(&self) -> c_long {
        super::kernel_reads::serve_submitted(self.get(1), self.get(2));
        self.kernel()
    }

    /// Passes on a call that sets up a ring of io_uring. From then on, every open file has a kernel copy.
    fn sets_up_ring(&self) -> c_long {
        let number = self.creates();
        if number >= 0 {
            kernel_reads::serve_all();
        }
        number
    }

    /// Passes on a call that duplicates a descriptor.
    fn duplicates(&self) -> c_long {
        record_copy(self.get(0), self.kernel() as c_int).into()
    }

    /// Passes on a call that duplicates a descriptor to a given number.
    fn duplicates_to(&self) -> c_long {
        let (from, to): (RawFd, RawFd) = (self.get(0), self.get(1));
        if from == to {
            return self.kernel();
        }
        match make_room(from, to) {
            Ok(()) => self.duplicates(),
            Err(errno) => memory::fail(errno),
        }
    }

    /// Answers `fcntl`. The kernel knows the flags of a descriptor of ours, but not those of its description.
    fn controls(&self) -> c_long {
        match self.get(1) {
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => self.duplicates(),
            libc::F_GETFD | libc::F_SETFD => self.kernel(),
            _ if self.is_ours(0) => super::descriptor::fcntl(self.get(0), self.get(1), self.get(2)).into(),
            _ => self.kernel(),
        }
    }

    /// Passes on an `mmap` that does not map a file of ours.
    fn maps(&self) -> c_long {
        let result = self.kernel();
        map::note_mapped(result as *mut c_void, self.get(1), self.get(2), self.get(3));
        result
    }

    /// Passes on `munmap`.
    fn unmaps(&self) -> c_long {
        let result = self.kernel();
        if result == 0 {
            map::note_unmapped(self.get(0), self.get(1));
        }
        result
    }

    /// Passes on `mremap`, unless a file of ours must not get longer.
    fn resizes(&self) -> c_long {
        if !map::may_resize(self.get(0), self.get(1), self.get(2)) {
            return memory::fail(libc::ENOMEM);
        }
        let result = self.kernel();
        map::note_moved(self.get(0), self.get(1), result as *mut c_void, self.get(2));
        result
    }

    /// Passes on a call that protects memory, either in the way that its third argument says or with a key.
    fn protects(&self) -> c_long {
        let result = self.kernel();
        let protection = if self.number == libc::SYS_mprotect { self.get(2) } else { libc::PROT_NONE };
        map::note_protected(self.get(0), self.get(1), protection);
        result
    }

    /// Passes on `shmdt`, which does not say how much it detaches.
    fn detaches(&self) -> c_long {
        let result = self.kernel();
        pages::forget_all();
        result
    }

    fn address(mapped: *mut c_void) -> c_long {
        mapped as c_long
    }
}
