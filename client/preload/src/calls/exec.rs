//! Becoming another program. Before that, what the program inherits becomes the kernel's (see `carry`), and the working
//! directory goes along in the environment.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;

use dayfly_client::locate::CWD_VARIABLE;
use dayfly_client::{OpenFile, View};

use super::hook;
use super::names::access;
use crate::memory::{self, fail, string, strings};
use crate::process::{Fault, answer, setup};
use crate::{carry, cwd, next, path, table};

type Strings = *const *const c_char;

unsafe extern "C" {
    static environ: Strings;
}

pub(super) fn current_environment() -> Strings {
    // SAFETY: libc's variable, read as any C program does.
    unsafe { environ }
}

hook! {
    fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
        if !is_active() {
            return next::execve(path, arguments, environment);
        }
        let environment = Environment::new(environment);
        if answer(|| carry::carry_over().map(|()| 0)) != 0 {
            return -1;
        }
        let kernel = |_, path| next::execve(path, arguments, environment.strings());
        let ours = |view: &View, full: &[u8]| run(view, full, string(path), arguments, environment.strings());
        path::at(libc::AT_FDCWD, path, ours, kernel)
    }

    fn execv(path: *const c_char, arguments: Strings) -> c_int {
        execve(path, arguments, current_environment())
    }

    fn execvp(path: *const c_char, arguments: Strings) -> c_int {
        execvpe(path, arguments, current_environment())
    }

    fn execvpe(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
        if !is_active() {
            return next::execvpe(path, arguments, environment);
        }
        if let Some(path) = found_in_path(path) {
            return execve(path.as_ptr(), arguments, environment);
        }
        let environment = Environment::new(environment);
        if answer(|| carry::carry_over().map(|()| 0)) != 0 {
            return -1;
        }
        next::execvpe(path, arguments, environment.strings())
    }

    fn fexecve(descriptor: c_int, arguments: Strings, environment: Strings) -> c_int {
        execveat(descriptor, c"".as_ptr(), arguments, environment, libc::AT_EMPTY_PATH)
    }

    fn execveat(directory: c_int, path: *const c_char, arguments: Strings, environment: Strings, flags: c_int) -> c_int {
        let call = |directory, path, environment| match flags & libc::AT_EMPTY_PATH != 0 && directory >= 0 {
            true if string(path).is_some_and(|path| path.is_empty()) => next::fexecve(directory, arguments, environment),
            _ => next::execveat(directory, path, arguments, environment, flags),
        };
        if !is_active() {
            return call(directory, path, environment);
        }
        let environment = Environment::new(environment);
        if answer(|| carry::carry_over().map(|()| 0)) != 0 {
            return -1;
        }
        if let Some(open) = table::find(directory).filter(|_| string(path).is_some_and(|path| path.is_empty())) {
            let Some(path) = path::path_of(&open) else { return fail(libc::ENOENT) };
            return answer(|| run(&*crate::process::view()?, &path, None, arguments, environment.strings()));
        }
        let kernel = |directory, path| call(directory, path, environment.strings());
        path::at(directory, path, |view, path| run(view, path, None, arguments, environment.strings()), kernel)
    }
}

/// The variadic ones, whose arguments `variadic.c` has put into an array.
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

variadic!(execl => dayfly_execl, execlp => dayfly_execlp, execle => dayfly_execle);

/// What `variadic.c` calls.
#[unsafe(no_mangle)]
extern "C" fn dayfly_execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    execve(path, arguments, if environment.is_null() { current_environment() } else { environment })
}

/// As above, looking for the name in PATH.
#[unsafe(no_mangle)]
extern "C" fn dayfly_execvp(path: *const c_char, arguments: Strings) -> c_int {
    execvpe(path, arguments, current_environment())
}

/// The path of a program that is named by one, or that a folder of ours in PATH has before all others; else libc finds it.
pub(super) fn found_in_path(name: *const c_char) -> Option<CString> {
    let name = string(name)?;
    if name.to_bytes().contains(&b'/') || name.is_empty() {
        return Some(name.to_owned());
    }
    let variable = std::env::var_os("PATH")?;
    let before = memory::errno();
    let candidates = variable.as_bytes().split(|&byte| byte == b':').map(|folder| {
        CString::new([if folder.is_empty() { b"." } else { folder }, b"/", name.to_bytes()].concat()).unwrap_or_default()
    });
    let candidates: Vec<CString> = candidates.collect();
    // Where none of ours is in it, libc looks as ever.
    let is_ours = |candidate: &CString| path::is_ours(libc::AT_FDCWD, candidate.as_ptr());
    if !candidates.iter().any(is_ours) {
        return None;
    }
    let found = candidates.into_iter().find(|candidate| access(candidate.as_ptr(), libc::X_OK) == 0);
    memory::set_errno(before);
    found
}

/// Whether there is anything to be done.
pub(super) fn is_active() -> bool {
    setup().is_some()
}

/// Runs a program that lies in the namespace: from a copy, for the kernel can run nothing else.
fn run(view: &View, path: &[u8], given: Option<&CStr>, arguments: Strings, environment: Strings) -> Result<c_int, Fault> {
    if let Some(script) = Script::at(view, path, given)? {
        let arguments = script.arguments(arguments);
        // The interpreter may lie in the namespace, too.
        let result = execve(script.interpreter.as_ptr(), arguments.as_ptr(), environment);
        return if result < 0 { Err(memory::errno().into()) } else { Ok(0) };
    }
    let copy = executable_copy(view, path)?;
    if next::fexecve(copy.as_raw_fd(), arguments, environment) < 0 { Err(memory::errno().into()) } else { Ok(0) }
}

/// A copy of a program that may be executed.
pub(super) fn executable_copy(view: &View, path: &[u8]) -> Result<File, Fault> {
    carry::copy_of(view, &executable(view, path)?)
}

fn executable(view: &View, path: &[u8]) -> Result<OpenFile, Fault> {
    let file = view.open(path)?;
    if file.stat().permissions & 0o111 == 0 { Err(Fault::Errno(libc::EACCES)) } else { Ok(file) }
}

/// A script of the namespace: its interpreter is run, as the kernel would, with the script's own path, by which it finds what
/// lies beside it.
pub(super) struct Script {
    pub(super) interpreter: CString,
    argument: Option<CString>,
    path: CString,
}

/// The kernel looks at as many bytes of a script's first line.
const FIRST_LINE_MAX: usize = 256;

impl Script {
    /// `given` is how the program has named it, if that was a path.
    pub(super) fn at(view: &View, path: &[u8], given: Option<&CStr>) -> Result<Option<Self>, Fault> {
        let mut start = [0; FIRST_LINE_MAX];
        let count = view.read_at(&executable(view, path)?, 0, &mut start)?;
        let Some(line) = start[..count].strip_prefix(b"#!") else { return Ok(None) };
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii();
        let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
        let text = |bytes: &[u8]| CString::new(bytes).map_err(|_| libc::ENOEXEC);
        // All that follows is one argument.
        let argument = line[end..].trim_ascii();
        let argument = if argument.is_empty() { None } else { Some(text(argument)?) };
        Ok(Some(Self {
            interpreter: text(&line[..end])?,
            argument,
            path: given.map_or_else(|| text(path), |given| Ok(given.to_owned()))?,
        }))
    }

    /// What the interpreter is called with; it lives as long as this and the program's own arguments.
    pub(super) fn arguments(&self, given: Strings) -> Vec<*const c_char> {
        let own = [Some(&self.interpreter), self.argument.as_ref(), Some(&self.path)].into_iter().flatten();
        let rest = strings(given).skip(1).map(CStr::as_ptr);
        own.map(|text| text.as_ptr()).chain(rest).chain([std::ptr::null()]).collect()
    }
}

/// An environment with the working directory in it, if that is ours, and without if it is not.
pub(super) struct Environment {
    given: Strings,
    changed: Option<(Vec<*const c_char>, Option<CString>)>,
}

impl Environment {
    fn new(given: Strings) -> Self {
        Self::in_directory(given, cwd::current())
    }

    pub(super) fn in_directory(given: Strings, directory: Option<Vec<u8>>) -> Self {
        let name = [CWD_VARIABLE.as_bytes(), b"="].concat();
        let is_known = strings(given).any(|variable| variable.to_bytes().starts_with(&name));
        if directory.is_none() && !is_known {
            return Self { given, changed: None };
        }
        let variable = directory.and_then(|directory| CString::new([name.clone(), directory].concat()).ok());
        let others = strings(given).filter(|variable| !variable.to_bytes().starts_with(&name)).map(|variable| variable.as_ptr());
        let pointers = others.chain(variable.iter().map(|variable| variable.as_ptr())).chain([std::ptr::null()]).collect();
        Self { given, changed: Some((pointers, variable)) }
    }

    pub(super) fn strings(&self) -> Strings {
        self.changed.as_ref().map_or(self.given, |(pointers, _)| pointers.as_ptr())
    }
}
