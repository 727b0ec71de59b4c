//! Starting another program. glibc's own does not come back to us on its way, so all that is to be done is done before: also
//! for descriptors that are only going to be inherited because the program says so in its list of actions.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, PoisonError};

use dayfly_client::fork;
use dayfly_client::locate::CWD_VARIABLE;
use dayfly_client::reserved_fd::ReservedFd;
use libc::{FILE, mode_t, pid_t};

use super::exec::{Environment, Script, executable_copy, found_in_path, is_active};
use super::hook;
use crate::memory::Errno;
use crate::path::{Whose, whose};
use crate::process::{Fault, answer, view};
use crate::{carry, cwd, memory, next, table};

type Strings = *const *const c_char;

/// What a program's lists of actions need of us, by their addresses.
static LISTS: Mutex<Vec<(usize, Need)>> = Mutex::new(Vec::new());

enum Need {
    /// This number will be duplicated.
    Carry(RawFd),
    /// This copy will be.
    Copy(#[allow(dead_code, reason = "kept until the list ends")] ReservedFd),
    /// The child's working directory, if it is one of ours.
    Directory(Option<Vec<u8>>),
}

/// Looks at the lists. Not across a fork, lest the child have a lock that nobody opens.
fn with_lists<R>(look: impl FnOnce(&mut Vec<(usize, Need)>) -> R) -> R {
    let _no_fork = fork::lock();
    look(&mut LISTS.lock().unwrap_or_else(PoisonError::into_inner))
}

hook! {
    fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int {
        if let Whose::Ours(ours) = whose(libc::AT_FDCWD, path) {
            return spawn_ours(pid, &ours, actions, attributes, arguments, environment);
        }
        let spawn = |environment| next::posix_spawn(pid, path, actions, attributes, arguments, environment);
        prepared(actions, environment, spawn)
    }

    fn posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings) -> c_int {
        if let Some(path) = found_in_path(file) {
            return posix_spawn(pid, path.as_ptr(), actions, attributes, arguments, environment);
        }
        let spawn = |environment| next::posix_spawnp(pid, file, actions, attributes, arguments, environment);
        prepared(actions, environment, spawn)
    }

    fn posix_spawn_file_actions_adddup2(actions: *mut c_void, from: c_int, to: c_int) -> c_int {
        let result = next::posix_spawn_file_actions_adddup2(actions, from, to);
        if result == 0 && table::is_ours(from) {
            with_lists(|lists| lists.push((actions as usize, Need::Carry(from))));
        }
        result
    }

    fn posix_spawn_file_actions_addopen(actions: *mut c_void, to: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        let Whose::Ours(ours) = whose(libc::AT_FDCWD, path) else {
            return next::posix_spawn_file_actions_addopen(actions, to, path, flags, mode);
        };
        // The child could not open it: it gets a copy.
        let opened = (|| {
            if flags & libc::O_ACCMODE != libc::O_RDONLY {
                return Err(Fault::Errno(libc::EROFS));
            }
            let view = view()?;
            Ok(ReservedFd::new(carry::copy_of(&view, &view.open(&ours)?)?))
        })();
        match opened {
            Ok(copy) => {
                let result = next::posix_spawn_file_actions_adddup2(actions, copy.as_raw_fd(), to);
                with_lists(|lists| lists.push((actions as usize, Need::Copy(copy))));
                result
            }
            Err(fault) => errno_of(&fault),
        }
    }

    fn posix_spawn_file_actions_addchdir_np | posix_spawn_file_actions_addchdir (actions: *mut c_void, path: *const c_char) -> c_int {
        let Whose::Ours(ours) = whose(libc::AT_FDCWD, path) else {
            let result = next::posix_spawn_file_actions_addchdir_np(actions, path);
            if result == 0 && is_active() {
                with_lists(|lists| lists.push((actions as usize, Need::Directory(None))));
            }
            return result;
        };
        let entered = view().and_then(|view| Ok(view.open_directory(&ours)?.path().to_vec()));
        match entered {
            Ok(directory) => {
                with_lists(|lists| lists.push((actions as usize, Need::Directory(Some(directory)))));
                0
            }
            Err(fault) => errno_of(&fault),
        }
    }

    fn posix_spawn_file_actions_addfchdir_np | posix_spawn_file_actions_addfchdir (actions: *mut c_void, descriptor: c_int) -> c_int {
        let Some(open) = table::find(descriptor) else {
            let result = next::posix_spawn_file_actions_addfchdir_np(actions, descriptor);
            if result == 0 && is_active() {
                with_lists(|lists| lists.push((actions as usize, Need::Directory(None))));
            }
            return result;
        };
        match open.directory() {
            Ok(directory) => {
                with_lists(|lists| lists.push((actions as usize, Need::Directory(Some(directory.path().to_vec())))));
                0
            }
            Err(errno) => errno,
        }
    }

    fn posix_spawn_file_actions_init(actions: *mut c_void) -> c_int {
        if is_active() {
            // A list that was not destroyed may have been at the same address.
            forget(actions);
        }
        next::posix_spawn_file_actions_init(actions)
    }

    fn posix_spawn_file_actions_destroy(actions: *mut c_void) -> c_int {
        if is_active() {
            forget(actions);
        }
        next::posix_spawn_file_actions_destroy(actions)
    }

    fn system(command: *const c_char) -> c_int {
        if !is_active() || command.is_null() {
            return next::system(command);
        }
        match answer(|| carry::carry_over().map(|()| 0)) {
            0 => with_directory(|| next::system(command)),
            failed => failed,
        }
    }

    fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
        if !is_active() {
            return next::popen(command, mode);
        }
        match answer(|| carry::carry_over().map(|()| 0)) {
            0 => with_directory(|| next::popen(command, mode)),
            _ => std::ptr::null_mut(),
        }
    }
}

fn forget(actions: *mut c_void) {
    with_lists(|lists| lists.retain(|(list, _)| *list != actions as usize));
}

fn errno_of(fault: &Fault) -> Errno {
    match fault {
        Fault::Errno(errno) => *errno,
        Fault::Leaves(_) => libc::ENOENT,
    }
}

/// Spawns a program that lies in the namespace: from a copy, which the child finds by its number.
fn spawn_ours(
    pid: *mut pid_t,
    path: &[u8],
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    match view().and_then(|view| Script::at(&view, path, None)) {
        Ok(Some(script)) => {
            let arguments = script.arguments(arguments);
            return posix_spawn(pid, script.interpreter.as_ptr(), actions, attributes, arguments.as_ptr(), environment);
        }
        Ok(None) => {}
        Err(fault) => return errno_of(&fault),
    }
    match view().and_then(|view| executable_copy(&view, path)) {
        Ok(copy) => {
            let path = CString::new(format!("/proc/self/fd/{}", copy.as_raw_fd())).unwrap_or_default();
            let spawn = |environment| next::posix_spawn(pid, path.as_ptr(), actions, attributes, arguments, environment);
            prepared(actions, environment, spawn)
        }
        Err(fault) => errno_of(&fault),
    }
}

/// Does what the list of actions needs, then spawns.
fn prepared(actions: *const c_void, environment: Strings, spawn: impl FnOnce(Strings) -> c_int) -> c_int {
    if !is_active() {
        return spawn(environment);
    }
    let mut directory = cwd::current();
    let result = carry::carry_over().and_then(|()| {
        let mut numbers = Vec::new();
        with_lists(|lists| {
            for (_, need) in lists.iter().filter(|(list, _)| !actions.is_null() && *list == actions as usize) {
                match need {
                    Need::Carry(number) => numbers.push(*number),
                    Need::Directory(path) => directory.clone_from(path),
                    Need::Copy(_) => {}
                }
            }
        });
        numbers
            .into_iter()
            .filter(|&number| crate::process::is_placeholder(number))
            .try_for_each(|number| carry::carry_one(&*view()?, None, number, libc::O_CLOEXEC))
    });
    match result {
        Ok(()) => spawn(Environment::in_directory(environment, directory).strings()),
        Err(fault) => errno_of(&fault),
    }
}

/// Calls what runs a shell with this process's own environment, with the working directory in that for the time.
fn with_directory<R>(call: impl FnOnce() -> R) -> R {
    let Some(directory) = cwd::current().and_then(|directory| CString::new(directory).ok()) else {
        return call();
    };
    let name = CString::new(CWD_VARIABLE).unwrap_or_default();
    // SAFETY: strings; that other threads must not look at the environment meanwhile is the rule of `setenv`, and a program
    // that goes into the namespace and runs a shell from several threads at once would break the shell's own.
    unsafe { libc::setenv(name.as_ptr(), directory.as_ptr(), 1) };
    let result = call();
    let errno = memory::errno();
    // SAFETY: as above.
    unsafe { libc::unsetenv(name.as_ptr()) };
    memory::set_errno(errno);
    result
}
