//! Failures: how a call on the namespace fails, how C learns of it, and what the user reads about it.
//!
//! [`answer`] is the border of every hook: inside it the code uses `Result`; outside it there is a return value and `errno`. A
//! failure of the server or the session also prints one line to standard error, once per process, because EIO alone does not tell
//! a user that the session has ended. `DAYFLY_LOG` makes every such line appear, along with others.

use std::sync::atomic::{AtomicBool, Ordering};

use dayfly_client::cancellation::{self, AfterHandlers, Attempts};
use dayfly_client::{ClientError, ViewError};
use dayfly_meta::path::display;
use dayfly_meta::text::without_os_numbers;

use crate::memory::{self, Errno, Failed};
use crate::{environment, next};

/// Why a call on the namespace has no result.
pub(crate) enum Fault {
    /// The call fails with this error number.
    Errno(Errno),
    /// A symlink leads out of the namespace: the call continues at this path outside the namespace.
    Leaves(Vec<u8>),
}

impl Fault {
    /// Returns the error number for callers that cannot continue outside the namespace.
    pub(crate) fn errno(&self) -> Errno {
        match self {
            Self::Errno(errno) => *errno,
            Self::Leaves(_) => libc::ENOENT,
        }
    }
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
        // A bad buffer is the program's fault, and its errno says all there is to say.
        if let ViewError::Client(error) = &error
            && !matches!(error, ClientError::Buffer | ClientError::Interrupted)
        {
            complain(&error.to_string());
        }
        Self::Errno(error.errno())
    }
}

impl From<ClientError> for Fault {
    fn from(error: ClientError) -> Self {
        ViewError::from(error).into()
    }
}

/// Runs a call on the namespace and returns as C functions do: `errno` stays as it was unless the call fails, and a panic becomes
/// EIO instead of unwinding into C. In the meantime, nobody can cancel the thread, and the program's signal handlers wait. The
/// wait is short, because `work` waits for nothing but the server. If the server stands still, `work` runs again after the handlers.
pub(crate) fn answer<R: Failed>(mut work: impl FnMut() -> Result<R, Fault>) -> R {
    finish(false, || {
        let _deferral = cancellation::uninterrupted();
        work()
    })
}

/// Like [`answer`], for work that must not run again: the handlers wait until it is done.
pub(crate) fn answer_once<R: Failed>(work: impl FnOnce() -> Result<R, Fault>) -> R {
    let _whole = cancellation::Whole::begin();
    let _deferral = cancellation::uninterrupted();
    let before = memory::errno();
    complete(before, std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))).unwrap_or_else(memory::fail)
}

/// Like [`answer`], for calls that hardly ever make a system call. Where `work` makes one that is a cancellation point, it holds
/// a [`cancellation::Deferral`] itself.
pub(crate) fn answer_from_memory<R: Failed>(work: impl FnMut() -> Result<R, Fault>) -> R {
    finish(false, work)
}

/// Like [`answer_from_memory`], for calls that may fail with EINTR if the program's handlers want that.
pub(crate) fn answer_until_signal<R: Failed>(work: impl FnMut() -> Result<R, Fault>) -> R {
    finish(true, work)
}

/// Like [`answer_from_memory`]. `may_fail` says whether the call may fail with EINTR if the program's handlers want that.
pub(crate) fn finish<R: Failed>(may_fail: bool, mut work: impl FnMut() -> Result<R, Fault>) -> R {
    let (before, attempts) = (memory::errno(), Attempts::begin());
    loop {
        let errno = match complete(before, std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut work))) {
            Ok(value) => return value,
            Err(errno) => errno,
        };
        // What failed for another reason fails again, or has already had an effect.
        match (errno == libc::EINTR).then(|| attempts.is_another(may_fail)).flatten() {
            None => return memory::fail(errno),
            Some(AfterHandlers::Fail) => return memory::fail(libc::EINTR),
            Some(AfterHandlers::BeginAgain) => {}
        }
    }
}

/// Restores errno if the work has succeeded. Returns the error number if it has not.
fn complete<R>(before: Errno, result: std::thread::Result<Result<R, Fault>>) -> Result<R, Errno> {
    match result {
        Ok(Ok(value)) => {
            memory::set_errno(before);
            Ok(value)
        }
        Ok(Err(fault)) => Err(fault.errno()),
        Err(_) => Err(libc::EIO),
    }
}

/// Prints a line about a server that does not answer, or a session that has ended. A process prints the first such line
/// only, unless `DAYFLY_LOG` is set.
pub(crate) fn complain(message: &str) {
    static HAS_COMPLAINED: AtomicBool = AtomicBool::new(false);
    tell_once(&HAS_COMPLAINED, message);
}

/// Prints a line about a server that this process waits for. A process prints the first such line only, unless `DAYFLY_LOG` is set.
pub(crate) fn notify(message: &str) {
    static HAS_NOTIFIED: AtomicBool = AtomicBool::new(false);
    tell_once(&HAS_NOTIFIED, message);
}

/// Prints a line if it is the first of its kind, or if `DAYFLY_LOG` is set.
pub(crate) fn tell_once(has_told: &AtomicBool, message: &str) {
    let is_first = !has_told.swap(true, Ordering::Relaxed);
    if is_first || is_logging() {
        write_line(message);
    }
}

/// Prints a line if `DAYFLY_LOG` is set.
pub(crate) fn log(message: &str) {
    if is_logging() {
        write_line(message);
    }
}

static IS_LOGGING: AtomicBool = AtomicBool::new(false);

/// Finds out whether `DAYFLY_LOG` is set. Call it before the program's `main`: later, a signal handler may have interrupted a
/// change of the environment.
#[cfg_attr(test, allow(dead_code, reason = "a test has no start"))]
pub(crate) fn read_environment() {
    IS_LOGGING.store(environment::variable("DAYFLY_LOG").is_some_and(|value| !value.is_empty()), Ordering::Relaxed);
}

fn is_logging() -> bool {
    IS_LOGGING.load(Ordering::Relaxed)
}

fn write_line(message: &str) {
    let _deferral = cancellation::defer();
    let line = format!("dayfly: {}\n", display(without_os_numbers(message).as_bytes()));
    // If the process has no standard error, there is nothing to do.
    let _ = next::write_bytes(libc::STDERR_FILENO, line.as_bytes());
}
