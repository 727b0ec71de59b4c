//! Starting another program in a new process: `posix_spawn`, `system`, `popen`.
//!
//! glibc's versions do not call our hooks between the fork and the `exec`. So everything is prepared beforehand: the open files
//! are handed over (see `exec_handoff`), and the working directory is passed in the environment.
//!
//! A *list of file actions* (`posix_spawn_file_actions_t`) belongs to libc, which cannot carry out actions on the namespace. This
//! module records such an action by the list's address. An action that opens a file becomes one that duplicates a kernel copy, and
//! every other action becomes a [`Need`] that is met before the spawn.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};

use dayfly_client::locate::CWD_VARIABLE;
use dayfly_client::reserved_fd::{ReservedFd, is_hidden};
use dayfly_client::{cancellation, fork};
use libc::{FILE, mode_t, pid_t};

use super::exec::{Environment, Script, executable_copy, found_in_path, is_active};
use super::hook;
use crate::attach::view;
use crate::environment::Strings;
use crate::fault::{Fault, answer};
use crate::memory::FromC;
use crate::path::{Side, side_of};
use crate::{cwd, exec_handoff, kernel_copy, memory, placeholder, table};

/// A list of file actions, or spawn attributes: structures of libc, which this library does not look into.
type Opaque<'a> = FromC<'a, *const c_void>;
type OpaqueMut<'a> = FromC<'a, *mut c_void>;

/// What each list of file actions needs from this library, by the list's address.
static LISTS: Mutex<Vec<(usize, Need)>> = Mutex::new(Vec::new());

enum Need {
    /// The list duplicates this number of ours, so it must be handed over.
    HandOver(RawFd),
    /// The list duplicates this copy, at this number, where it must stay open as long as the list exists.
    KeepOpen(ReservedFd, RawFd),
    /// The list changes the working directory: to this one in the namespace, or to a kernel directory.
    Directory(Option<Vec<u8>>),
}

/// Calls a function with the recorded needs. No thread may fork in the meantime: the child would have a lock that nobody unlocks.
fn with_lists<R>(work: impl FnOnce(&mut Vec<(usize, Need)>) -> R) -> R {
    let _no_fork = fork::lock();
    work(&mut LISTS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn record(actions: OpaqueMut, need: Need) {
    with_lists(|lists| lists.push((actions.raw() as usize, need)));
}

/// Records a change of the working directory to a kernel directory, if libc has accepted it.
fn left(actions: OpaqueMut, result: c_int) -> c_int {
    if result == 0 && is_active() {
        record(actions, Need::Directory(None));
    }
    result
}

hook! {
    fn posix_spawn(
        pid: FromC<*mut pid_t>,
        path: FromC<*const c_char>,
        actions: Opaque,
        attributes: Opaque,
        arguments: Strings,
        environment: Strings,
    ) -> c_int {
        if let Side::Ours(ours) = side_of(libc::AT_FDCWD, path) {
            return spawn_ours(pid, &ours, actions, attributes, arguments, environment);
        }
        let spawn = |environment: Strings| posix_spawn::next(pid, path, actions, attributes, arguments, environment);
        prepared(actions, environment, spawn)
    }

    fn posix_spawnp(
        pid: FromC<*mut pid_t>,
        file: FromC<*const c_char>,
        actions: Opaque,
        attributes: Opaque,
        arguments: Strings,
        environment: Strings,
    ) -> c_int {
        if let Some(path) = found_in_path(file) {
            return posix_spawn(pid, path.as_c_str().into(), actions, attributes, arguments, environment);
        }
        let spawn = |environment: Strings| posix_spawnp::next(pid, file, actions, attributes, arguments, environment);
        prepared(actions, environment, spawn)
    }

    fn posix_spawn_file_actions_adddup2(actions: OpaqueMut, from: c_int, to: c_int) -> c_int {
        if is_hidden(from) {
            return libc::EBADF;
        }
        let result = posix_spawn_file_actions_adddup2::next(actions, from, to);
        if result == 0 && table::is_ours(from) {
            record(actions, Need::HandOver(from));
        }
        result
    }

    fn posix_spawn_file_actions_addopen(
        actions: OpaqueMut,
        to: c_int,
        path: FromC<*const c_char>,
        flags: c_int,
        mode: mode_t,
    ) -> c_int {
        let Side::Ours(ours) = side_of(libc::AT_FDCWD, path) else {
            return posix_spawn_file_actions_addopen::next(actions, to, path, flags, mode);
        };
        // libc's child cannot open the file, so the list duplicates a copy instead.
        let _deferral = cancellation::defer();
        let opened = (|| {
            if flags & libc::O_ACCMODE != libc::O_RDONLY {
                return Err(Fault::Errno(libc::EROFS));
            }
            let view = view()?;
            Ok(ReservedFd::new(kernel_copy::copy_of(&view, &view.open(&ours)?)?))
        })();
        match opened {
            Ok(copy) => {
                let number = copy.number();
                let result = posix_spawn_file_actions_adddup2::next(actions, number, to);
                record(actions, Need::KeepOpen(copy, number));
                result
            }
            Err(fault) => fault.errno(),
        }
    }

    fn posix_spawn_file_actions_addchdir_np | posix_spawn_file_actions_addchdir (
        actions: OpaqueMut,
        path: FromC<*const c_char>,
    ) -> c_int {
        let Side::Ours(ours) = side_of(libc::AT_FDCWD, path) else {
            return left(actions, posix_spawn_file_actions_addchdir_np::next(actions, path));
        };
        let entered = view().and_then(|view| Ok(view.open_directory(&ours)?.path().to_vec()));
        match entered {
            Ok(directory) => {
                record(actions, Need::Directory(Some(directory)));
                0
            }
            Err(fault) => fault.errno(),
        }
    }

    fn posix_spawn_file_actions_addfchdir_np | posix_spawn_file_actions_addfchdir (
        actions: OpaqueMut,
        descriptor: c_int,
    ) -> c_int {
        let Some(open) = table::find(descriptor) else {
            return left(actions, posix_spawn_file_actions_addfchdir_np::next(actions, descriptor));
        };
        match open.reached_directory() {
            Ok(directory) => {
                record(actions, Need::Directory(Some(directory.path().to_vec())));
                0
            }
            Err(errno) => errno,
        }
    }

    fn posix_spawn_file_actions_init(actions: OpaqueMut) -> c_int {
        if is_active() {
            // An earlier list at the same address may not have been destroyed.
            forget(actions);
        }
        posix_spawn_file_actions_init::next(actions)
    }

    fn posix_spawn_file_actions_destroy(actions: OpaqueMut) -> c_int {
        if is_active() {
            forget(actions);
        }
        posix_spawn_file_actions_destroy::next(actions)
    }

    fn system(command: FromC<*const c_char>) -> c_int {
        if !is_active() || command.is_null() {
            return system::next(command);
        }
        match answer(|| exec_handoff::hand_over_all().map(|()| 0)) {
            0 => with_directory(|| system::next(command)),
            failed => failed,
        }
    }

    fn popen(command: FromC<*const c_char>, mode: FromC<*const c_char>) -> *mut FILE {
        if !is_active() {
            return popen::next(command, mode);
        }
        match answer(|| exec_handoff::hand_over_all().map(|()| 0)) {
            0 => with_directory(|| popen::next(command, mode)),
            _ => std::ptr::null_mut(),
        }
    }
}

fn forget(actions: OpaqueMut) {
    let _deferral = cancellation::defer();
    with_lists(|lists| lists.retain(|(list, _)| *list != actions.raw() as usize));
}

/// Spawns a program that lies in the namespace, from a copy that the child inherits.
fn spawn_ours(
    pid: FromC<*mut pid_t>,
    path: &[u8],
    actions: Opaque,
    attributes: Opaque,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    let _deferral = cancellation::defer();
    if !arguments.are_readable() {
        return libc::EFAULT;
    }
    match view().and_then(|view| Script::at(&view, path, None)) {
        Ok(Some(script)) => {
            let arguments = script.arguments(arguments);
            let interpreter = script.interpreter.as_c_str().into();
            return posix_spawn(pid, interpreter, actions, attributes, arguments.strings(), environment);
        }
        Ok(None) => {}
        Err(fault) => return fault.errno(),
    }
    match view().and_then(|view| executable_copy(&view, path)) {
        Ok(copy) => {
            let path = CString::new(format!("/proc/self/fd/{}", copy.as_raw_fd())).unwrap_or_default();
            let path = path.as_c_str().into();
            let spawn = |environment: Strings| posix_spawn::next(pid, path, actions, attributes, arguments, environment);
            prepared(actions, environment, spawn)
        }
        Err(fault) => fault.errno(),
    }
}

/// Carries out what the list of actions needs, then spawns.
fn prepared(actions: Opaque, environment: Strings, spawn: impl FnOnce(Strings) -> c_int) -> c_int {
    if !is_active() {
        return spawn(environment);
    }
    let mut directory = cwd::current();
    let result = exec_handoff::hand_over_all().and_then(|()| {
        let (mut numbers, mut has_copies) = (Vec::new(), true);
        with_lists(|lists| {
            for (_, need) in lists.iter().filter(|(list, _)| !actions.is_null() && *list == actions.raw() as usize) {
                match need {
                    Need::HandOver(number) => numbers.push(*number),
                    Need::Directory(path) => directory.clone_from(path),
                    Need::KeepOpen(copy, number) => has_copies &= copy.number() == *number && copy.is_intact(),
                }
            }
        });
        if !has_copies {
            return Err(Fault::Errno(libc::EIO));
        }
        numbers
            .into_iter()
            .filter(|&number| placeholder::is_at(number))
            .try_for_each(|number| exec_handoff::hand_over(&*view()?, None, number, libc::O_CLOEXEC))
    });
    match result {
        Ok(()) => spawn(Environment::in_directory(environment, directory).strings()),
        Err(fault) => fault.errno(),
    }
}

/// Calls a function that runs a shell with this process's own environment. During the call, the environment contains the working
/// directory.
fn with_directory<R>(call: impl FnOnce() -> R) -> R {
    let Some(directory) = cwd::current().and_then(|directory| CString::new(directory).ok()) else {
        return call();
    };
    let name = CString::new(CWD_VARIABLE).unwrap_or_default();
    // SAFETY: strings. No other thread may use the environment during `setenv`. This runs only if the working directory is in
    // the namespace and the program starts a shell, which a program does not do from several threads at once.
    unsafe { libc::setenv(name.as_ptr(), directory.as_ptr(), 1) };
    let _unset = Unset(name);
    call()
}

/// Removes a variable from the environment when dropped, even if the thread is canceled.
struct Unset(CString);

impl Drop for Unset {
    fn drop(&mut self) {
        let errno = memory::errno();
        // SAFETY: as in `with_directory`.
        unsafe { libc::unsetenv(self.0.as_ptr()) };
        memory::set_errno(errno);
    }
}
