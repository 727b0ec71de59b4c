//! This process: whether it is part of a session, its attachment, and what became of it by `fork` and `vfork`.

use std::env;
use std::ffi::{CString, OsString};
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};

use dayfly_client::locate::{CWD_VARIABLE, PREFIX_VARIABLE, SESSION_VARIABLE, SessionFolder};
use dayfly_client::reserved_fd::ReservedFd;
use dayfly_client::{ClientError, Session, View, ViewError, fault, fork};
use dayfly_meta::id::NodeId;

use crate::memory::{self, Errno, Failed};
use crate::{carry, cwd, next, offset, table, vfork};

/// What the environment told when the process began.
pub(crate) struct Setup {
    /// The prefix, without a slash at its end.
    pub(crate) prefix: CString,
    /// Its last name.
    pub(crate) last: CString,
    /// `st_dev` of all that is in the namespace.
    pub(crate) device: u64,
}

static SETUP: OnceLock<Setup> = OnceLock::new();
static VIEW: AtomicPtr<View> = AtomicPtr::new(null_mut());
/// A descriptor by which nothing can be read, of which all of ours are copies; and what tells them from others.
static PLACEHOLDER: AtomicI32 = AtomicI32::new(-1);
static PLACEHOLDER_DEVICE: AtomicU64 = AtomicU64::new(0);
static PLACEHOLDER_INODE: AtomicU64 = AtomicU64::new(0);
static HAS_COMPLAINED: AtomicBool = AtomicBool::new(false);

/// Why a call on the namespace ends.
pub(crate) enum Fault {
    /// It fails.
    Errno(Errno),
    /// It goes on outside, at this path.
    Leaves(Vec<u8>),
}

impl From<Errno> for Fault {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<ViewError> for Fault {
    fn from(error: ViewError) -> Self {
        if let ViewError::Outside(path) = error {
            return Self::Leaves(path);
        }
        if let ViewError::Client(error) = &error {
            report(error);
        }
        Self::Errno(error.errno())
    }
}

impl From<ClientError> for Fault {
    fn from(error: ClientError) -> Self {
        ViewError::from(error).into()
    }
}

/// Reads the environment; called once, before the program's `main`.
pub(crate) fn set_up() {
    let (Some(session), Some(prefix)) = (variable(SESSION_VARIABLE), variable(PREFIX_VARIABLE)) else { return };
    let prefix = prefix.into_vec();
    let prefix = prefix.strip_suffix(b"/").unwrap_or(&prefix);
    let Some(slash) = prefix.iter().rposition(|&byte| byte == b'/').filter(|_| prefix.starts_with(b"/")) else { return };
    let (Ok(whole), Ok(last)) = (CString::new(prefix), CString::new(&prefix[slash + 1..])) else { return };
    // A device without a major number, as kernels give to file systems without a block device.
    let device = session.as_bytes().iter().fold(0_u64, |hash, &byte| hash.wrapping_mul(31) + u64::from(byte));
    let setup = Setup { prefix: whole, last, device: libc::makedev(0, 0x8_0000 | (device as u32 & 0x7_ffff)) };
    if SETUP.set(setup).is_ok() {
        vfork::set_home();
        if let Some(directory) = variable(CWD_VARIABLE) {
            cwd::inherit(directory.into_vec());
            // From here on it is ours to tell: what starts other programs adds it.
            memory::unset_variable(CWD_VARIABLE);
        }
        // SAFETY: all three are functions that live as long as the library, which is never unloaded.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_in_parent), Some(after_fork_in_child)) };
    }
}

fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// What the environment told; nothing where this process is part of no session.
#[inline]
pub(crate) fn setup() -> Option<&'static Setup> {
    SETUP.get()
}

/// The view, for the time of a call.
pub(crate) enum Attached {
    /// This process's own.
    Own(&'static View),
    /// One for a single call of a `vfork` child: what it opens is not in its parent's descriptor table.
    Passing(Box<View>),
}

impl Deref for Attached {
    type Target = View;

    fn deref(&self) -> &View {
        match self {
            Self::Own(view) => view,
            Self::Passing(view) => view,
        }
    }
}

/// The view, attached to on first use.
#[inline]
pub(crate) fn view() -> Result<Attached, Fault> {
    match known_view() {
        Some(view) => Ok(Attached::Own(view)),
        None => attach(),
    }
}

/// The view, if this process has used it.
pub(crate) fn known_view() -> Option<&'static View> {
    let view = VIEW.load(Ordering::Acquire);
    // SAFETY: published once by `attach`, from a box that is never ended.
    (!view.is_null()).then(|| unsafe { &*view })
}

#[cold]
fn attach() -> Result<Attached, Fault> {
    let location = SessionFolder::of_environment()?;
    let node = location.node_of_environment()?;
    let socket = location.socket(node);
    if !socket.exists() {
        return Err(no_server(&location, node));
    }
    if vfork::child().is_some() {
        return Ok(Attached::Passing(Box::new(View::new(Session::attach_to(&location, node)?))));
    }
    if let Err(error) = fault::install(next_sigaction) {
        log(&format!("SIGBUS cannot be caught ({error}): segments are not mapped"));
    }
    let session = Session::attach_to(&location, node)?;
    match hold_placeholder(&socket) {
        // The server has ended since it was attached to. That says nothing about the path that the program looks for.
        Err(Fault::Errno(libc::ENOENT)) => return Err(no_server(&location, node)),
        held => held?,
    }
    log(&format!("process {} attached to node {node} of session {}", std::process::id(), location.session));
    let view = Box::into_raw(Box::new(View::new(session)));
    if VIEW.compare_exchange(null_mut(), view, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // Another thread was faster.
        // SAFETY: made just above, and not published.
        drop(unsafe { Box::from_raw(view) });
    }
    known_view().map(Attached::Own).ok_or(Fault::Errno(libc::EIO))
}

fn no_server(location: &SessionFolder, node: NodeId) -> Fault {
    let (session, socket) = (location.session, location.socket(node));
    complain(&format!("node {node} of session {session} has no server on this machine any more ('{}')", socket.display()));
    Fault::Errno(libc::EIO)
}

unsafe extern "C" fn next_sigaction(number: i32, new: *const libc::sigaction, old: *mut libc::sigaction) -> i32 {
    next::sigaction(number, new, old)
}

/// Opens the placeholder: the server's socket, by `O_PATH`. Reading by such a descriptor is EBADF, and opening it again
/// through /proc is ENXIO: whoever goes round this library gets an error, never an end of file.
fn hold_placeholder(socket: &std::path::Path) -> Result<(), Fault> {
    let path = CString::new(socket.as_os_str().as_bytes()).map_err(|_| libc::EINVAL)?;
    let descriptor = next::open(path.as_ptr(), libc::O_PATH | libc::O_CLOEXEC, 0);
    let file = carry::owned(descriptor)?;
    let kept = ReservedFd::new(file);
    let stat = kernel_stat(kept.as_raw_fd()).ok_or(libc::EIO)?;
    PLACEHOLDER_DEVICE.store(stat.st_dev, Ordering::Release);
    PLACEHOLDER_INODE.store(stat.st_ino, Ordering::Release);
    if PLACEHOLDER.compare_exchange(-1, kept.as_raw_fd(), Ordering::AcqRel, Ordering::Acquire).is_ok() {
        // It is needed for as long as the process lives.
        std::mem::forget(kept);
    }
    Ok(())
}

/// A new number for something of ours, the lowest that is free.
pub(crate) fn new_number(close_on_exec: bool) -> Result<RawFd, Errno> {
    let placeholder = PLACEHOLDER.load(Ordering::Acquire);
    let number = match close_on_exec {
        true => next::fcntl(placeholder, libc::F_DUPFD_CLOEXEC, 0),
        false => next::dup(placeholder),
    };
    if number < 0 { Err(memory::errno()) } else { Ok(number) }
}

/// Whether the kernel has a copy of our placeholder at a number.
pub(crate) fn is_placeholder(number: RawFd) -> bool {
    let wanted = (PLACEHOLDER_DEVICE.load(Ordering::Acquire), PLACEHOLDER_INODE.load(Ordering::Acquire));
    kernel_stat(number).is_some_and(|stat| (stat.st_dev, stat.st_ino) == wanted)
}

pub(crate) fn kernel_stat(number: RawFd) -> Option<libc::stat> {
    let mut stat = memory::zeroed();
    (next::fstatat(number, c"".as_ptr(), &raw mut stat, libc::AT_EMPTY_PATH) == 0).then_some(stat)
}

extern "C" fn before_fork() {
    fork::acquire();
    if known_view().is_some() {
        carry::before_fork();
        let open: Vec<table::Reference> = table::descriptions().collect();
        offset::share(open.iter().map(|description| &**description));
    }
}

extern "C" fn after_fork_in_parent() {
    fork::release();
}

extern "C" fn after_fork_in_child() {
    fork::release();
    vfork::set_home();
    carry::end_mail();
    if let Some(view) = known_view() {
        view.session().after_fork();
        // What another thread opened or closed meanwhile may be in our memory and not in our descriptor table, or the reverse.
        table::numbers(0, RawFd::MAX).filter(|&number| !carry::is_in_kernel(number)).for_each(table::forget);
    }
}

/// Does a call on the namespace in the way of C: errno is as it was unless it fails, and no panic leaves.
pub(crate) fn answer<R: Failed>(work: impl FnOnce() -> Result<R, Fault>) -> R {
    let before = memory::errno();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    match result {
        Ok(Ok(value)) => {
            memory::set_errno(before);
            value
        }
        Ok(Err(Fault::Errno(errno))) => memory::fail(errno),
        Ok(Err(Fault::Leaves(_))) => memory::fail(libc::ENOENT),
        Err(_) => memory::fail(libc::EIO),
    }
}

/// One line about a server that does not answer or a session that has ended, once; all else only if `DAYFLY_LOG` asks.
fn report(error: &ClientError) {
    complain(&error.to_string());
}

fn complain(message: &str) {
    let is_new = !HAS_COMPLAINED.swap(true, Ordering::Relaxed);
    if is_new || is_logging() {
        write_line(message);
    }
}

fn is_logging() -> bool {
    env::var_os("DAYFLY_LOG").is_some_and(|value| !value.is_empty())
}

pub(crate) fn log(message: &str) {
    if is_logging() {
        write_line(message);
    }
}

fn write_line(message: &str) {
    let line = format!("dayfly: {}\n", dayfly_meta::path::display(message.as_bytes()));
    // To standard error, if there is one.
    let _ = next::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
}
