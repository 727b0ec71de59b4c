//! Running another program in this process: `exec` and related calls.
//!
//! Before the kernel is asked, three things happen. The open files that the program inherits become kernel files (see
//! `exec_handoff`). The working directory, if it is in the namespace, is passed in an environment variable. And a program that
//! lies in the namespace is copied, because the kernel can run kernel files only; a script's interpreter is started with the
//! script's own path, as the kernel would do.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::fs::{File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use dayfly_client::locate::CWD_VARIABLE;
use dayfly_client::{OpenFile, View, ViewError, cancellation};

use super::hook;
use super::names::access;
use crate::attach::view;
use crate::environment::{self, Strings};
use crate::fault::{Fault, answer, answer_from_memory};
use crate::memory::{self, FromC, fail};
use crate::setup::setup;
use crate::{cwd, exec_handoff, kernel_copy, path, table};

hook! {
    fn execve(path: FromC<*const c_char>, arguments: Strings, environment: Strings) -> c_int {
        if !is_active() {
            return execve::next(path, arguments, environment);
        }
        let environment = Environment::new(environment);
        if !hand_over_files() {
            return -1;
        }
        let kernel = |_, path: FromC<*const c_char>| execve::next(path, arguments, environment.strings());
        let ours = |view: &View, full: &[u8]| run(view, full, path.string(), arguments, environment.strings());
        path::at(libc::AT_FDCWD, path, ours, kernel)
    }

    fn execv(path: FromC<*const c_char>, arguments: Strings) -> c_int {
        execve(path, arguments, environment::current())
    }

    fn execvp(path: FromC<*const c_char>, arguments: Strings) -> c_int {
        execvpe(path, arguments, environment::current())
    }

    fn execvpe(path: FromC<*const c_char>, arguments: Strings, environment: Strings) -> c_int {
        if !is_active() {
            return execvpe::next(path, arguments, environment);
        }
        if let Some(path) = found_in_path(path) {
            return execve(path.as_c_str().into(), arguments, environment);
        }
        let environment = Environment::new(environment);
        if !hand_over_files() {
            return -1;
        }
        execvpe::next(path, arguments, environment.strings())
    }

    fn fexecve(descriptor: c_int, arguments: Strings, environment: Strings) -> c_int {
        if arguments.is_null() || environment.is_null() {
            return fail(libc::EINVAL);
        }
        execveat(descriptor, c"".into(), arguments, environment, libc::AT_EMPTY_PATH)
    }

    fn execveat(directory: c_int, path: FromC<*const c_char>, arguments: Strings, environment: Strings, flags: c_int) -> c_int {
        let is_empty = path.path().is_some_and(CStr::is_empty);
        let is_descriptor = is_empty && flags & libc::AT_EMPTY_PATH != 0 && directory >= 0;
        let kernel = |directory, path: FromC<*const c_char>, environment: Strings| match is_descriptor {
            true => fexecve::next(directory, arguments, environment),
            false => execveat::next(directory, path, arguments, environment, flags),
        };
        if !is_active() {
            return kernel(directory, path, environment);
        }
        let environment = Environment::new(environment);
        if !hand_over_files() {
            return -1;
        }
        if let Some(open) = table::find(directory).filter(|_| is_empty) {
            let Some(path) = path::path_of(&open) else { return fail(libc::ENOENT) };
            return answer_from_memory(|| run(&*view()?, &path, None, arguments, environment.strings()));
        }
        let ours = |view: &View, path: &[u8]| run(view, path, None, arguments, environment.strings());
        path::at(directory, path, ours, |directory, path| kernel(directory, path, environment.strings()))
    }
}

/// Hands the open files over. Returns `false`, with `errno` set, if that fails.
fn hand_over_files() -> bool {
    answer(|| exec_handoff::hand_over_all().map(|()| 0)) == 0
}

/// Exports the variadic functions. `variadic.c` collects their arguments, and continues below or in another hook.
macro_rules! variadic {
    ($($name:ident => $body:ident),*) => {$(
        unsafe extern "C" {
            fn $body();
        }

        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!("jmp {body}", body = sym $body);
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!("b {body}", body = sym $body);
        }
    )*};
}

variadic! {
    execl => dayfly_execl,
    execlp => dayfly_execlp,
    execle => dayfly_execle,
    dprintf => dayfly_dprintf,
    __dprintf_chk => dayfly_dprintf_chk
}

/// `execl` and `execle` continue here. No environment means the current one.
#[unsafe(no_mangle)]
extern "C" fn dayfly_execve(path: FromC<*const c_char>, arguments: Strings, environment: Strings) -> c_int {
    execve(path, arguments, if environment.is_null() { environment::current() } else { environment })
}

/// `execlp` continues here.
#[unsafe(no_mangle)]
extern "C" fn dayfly_execvp(path: FromC<*const c_char>, arguments: Strings) -> c_int {
    execvpe(path, arguments, environment::current())
}

/// Returns the path of the program that a name means, if the name is a path or if PATH names a directory of the namespace.
/// Otherwise libc searches PATH as usual.
pub(super) fn found_in_path(name: FromC<*const c_char>) -> Option<CString> {
    let name = name.path()?;
    if name.to_bytes().contains(&b'/') || name.is_empty() {
        return Some(name.to_owned());
    }
    let variable = environment::variable("PATH")?;
    let before = memory::errno();
    let candidates = variable.as_bytes().split(|&byte| byte == b':').map(|folder| {
        CString::new([if folder.is_empty() { b"." } else { folder }, b"/", name.to_bytes()].concat()).unwrap_or_default()
    });
    let candidates: Vec<CString> = candidates.collect();
    let is_ours = |candidate: &CString| path::is_ours(libc::AT_FDCWD, candidate.as_c_str().into());
    if !candidates.iter().any(is_ours) {
        return None;
    }
    let is_allowed = |candidate: &&CString, mode| access(candidate.as_c_str().into(), mode) == 0;
    let found = candidates.iter().find(|candidate| is_allowed(candidate, libc::X_OK) && !is_directory(candidate));
    // If there is no program, something else that has its name decides about the error.
    let found = found.or_else(|| candidates.iter().find(|candidate| is_allowed(candidate, libc::F_OK)));
    memory::set_errno(before);
    found.cloned()
}

fn is_directory(path: &CStr) -> bool {
    std::fs::metadata(OsStr::from_bytes(path.to_bytes())).is_ok_and(|attributes| attributes.is_dir())
}

/// Returns whether this process is part of a session. If not, nothing needs to be handed over.
pub(super) fn is_active() -> bool {
    setup().is_some()
}

/// Runs a program that lies in the namespace. Returns only on failure.
fn run(view: &View, path: &[u8], named: Option<&CStr>, arguments: Strings, environment: Strings) -> Result<c_int, Fault> {
    let _deferral = cancellation::defer();
    if !arguments.are_readable() {
        return Err(Fault::Errno(libc::EFAULT));
    }
    if let Some(script) = Script::at(view, path, named)? {
        let arguments = script.arguments(arguments);
        // The interpreter may lie in the namespace as well.
        let result = execve(script.interpreter.as_c_str().into(), arguments.strings(), environment);
        return if result < 0 { Err(memory::errno().into()) } else { Ok(0) };
    }
    let copy = executable_copy(view, path)?;
    // The kernel takes a null pointer for an empty array, but the C library's `fexecve` refuses it.
    let empty = StringArray::of(std::iter::empty());
    let arguments = if arguments.is_null() { empty.strings() } else { arguments };
    let environment = if environment.is_null() { empty.strings() } else { environment };
    if fexecve::next(copy.as_raw_fd(), arguments, environment) == 0 {
        return Ok(0);
    }
    let errno = memory::errno();
    if errno != libc::ETXTBSY {
        return Err(errno.into());
    }
    // Root can open a shared copy for writing.
    let copy = own_executable_copy(view, &executable(view, path)?)?;
    if fexecve::next(copy.as_raw_fd(), arguments, environment) < 0 { Err(memory::errno().into()) } else { Ok(0) }
}

/// Returns a kernel copy of a program.
///
/// # Errors
///
/// EACCES if the file is not executable, or is a directory.
pub(super) fn executable_copy(view: &View, path: &[u8]) -> Result<File, Fault> {
    let file = executable(view, path)?;
    if mode_of_copy(&file) == file.stat().permissions {
        kernel_copy::copy_of(view, &file)
    } else {
        own_executable_copy(view, &file)
    }
}

fn own_executable_copy(view: &View, file: &OpenFile) -> Result<File, Fault> {
    let copy = kernel_copy::own_copy_of(view, file)?;
    copy.set_permissions(Permissions::from_mode(mode_of_copy(file))).map_err(|error| kernel_copy::errno_of(&error))?;
    Ok(copy)
}

/// Returns the mode of a program's copy. The kernel enforces the copy's mode, but the namespace does not enforce the file's. So the
/// owner may always read and run the copy.
fn mode_of_copy(file: &OpenFile) -> u32 {
    file.stat().permissions & 0o777 | 0o500
}

fn executable(view: &View, path: &[u8]) -> Result<OpenFile, Fault> {
    let file = view.open(path).map_err(|error| match error {
        ViewError::IsADirectory => Fault::Errno(libc::EACCES),
        error => error.into(),
    })?;
    if file.stat().permissions & 0o111 == 0 { Err(Fault::Errno(libc::EACCES)) } else { Ok(file) }
}

/// A script in the namespace. Its interpreter runs with the script's own path, so that it finds the files next to the script.
pub(super) struct Script {
    pub(super) interpreter: CString,
    /// The rest of the first line, which the kernel passes as one argument.
    argument: Option<CString>,
    path: CString,
}

/// Bytes of a script's first line that the kernel looks at.
const FIRST_LINE_MAX: usize = 256;

impl Script {
    /// Reads a program's first line; `None` if it is not a script. `named` is the path by which the caller named the program.
    pub(super) fn at(view: &View, path: &[u8], named: Option<&CStr>) -> Result<Option<Self>, Fault> {
        let mut start = [0; FIRST_LINE_MAX];
        let count = view.read_at(&executable(view, path)?, 0, &mut start)?;
        let Some(line) = start[..count].strip_prefix(b"#!") else { return Ok(None) };
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii();
        let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
        let text = |bytes: &[u8]| CString::new(bytes).map_err(|_| libc::ENOEXEC);
        let argument = line[end..].trim_ascii();
        let argument = if argument.is_empty() { None } else { Some(text(argument)?) };
        Ok(Some(Self {
            interpreter: text(&line[..end])?,
            argument,
            path: named.map_or_else(|| text(path), |named| Ok(named.to_owned()))?,
        }))
    }

    /// Returns the interpreter's arguments: its name, the argument in the script, the script's path, and the caller's arguments
    /// after the first.
    pub(super) fn arguments<'a>(&'a self, given: Strings<'a>) -> StringArray<'a> {
        let own = [Some(&self.interpreter), self.argument.as_ref(), Some(&self.path)].into_iter().flatten();
        StringArray::of(own.map(CString::as_c_str).chain(given.strings().skip(1)))
    }
}

/// An array of strings with a null pointer at its end, made by this library.
pub(super) struct StringArray<'a> {
    pointers: Vec<*const c_char>,
    strings: std::marker::PhantomData<&'a CStr>,
}

impl<'a> StringArray<'a> {
    fn of(strings: impl Iterator<Item = &'a CStr>) -> Self {
        let pointers = strings.map(CStr::as_ptr).chain([std::ptr::null()]).collect();
        Self { pointers, strings: std::marker::PhantomData }
    }

    pub(super) fn strings(&self) -> Strings<'_> {
        // SAFETY: the array ends with a null pointer, and its strings outlive it.
        unsafe { FromC::new(self.pointers.as_ptr()) }
    }
}

/// The environment for another program. It contains the working directory if that is in the namespace, and never a stale one.
pub(super) struct Environment<'a> {
    given: Strings<'a>,
    /// The changed array, and the variable that was added to it.
    changed: Option<(Vec<*const c_char>, Option<CString>)>,
}

impl<'a> Environment<'a> {
    fn new(given: Strings<'a>) -> Self {
        Self::in_directory(given, cwd::current())
    }

    pub(super) fn in_directory(given: Strings<'a>, directory: Option<Vec<u8>>) -> Self {
        if !given.are_readable() {
            // The array cannot be read. The kernel finds that out, too.
            return Self { given, changed: None };
        }
        let name = [CWD_VARIABLE.as_bytes(), b"="].concat();
        let is_known = given.strings().any(|variable| variable.to_bytes().starts_with(&name));
        if directory.is_none() && !is_known {
            return Self { given, changed: None };
        }
        let variable = directory.and_then(|directory| CString::new([name.clone(), directory].concat()).ok());
        let others = given.strings().filter(|variable| !variable.to_bytes().starts_with(&name)).map(CStr::as_ptr);
        let pointers = others.chain(variable.iter().map(|variable| variable.as_ptr())).chain([std::ptr::null()]).collect();
        Self { given, changed: Some((pointers, variable)) }
    }

    pub(super) fn strings(&self) -> Strings<'_> {
        match &self.changed {
            None => self.given,
            // SAFETY: the array ends with a null pointer; its strings are the caller's, or live as long as this.
            Some((pointers, _)) => unsafe { FromC::new(pointers.as_ptr()) },
        }
    }
}
