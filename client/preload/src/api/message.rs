//! What `dayfly_error` returns: for each thread, the text of its last failure.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use dayfly_client::{ClientError, ViewError};
use dayfly_meta::path::display;
use dayfly_meta::text::without_os_numbers;

use crate::fault::{self, Fault};
use crate::memory::{self, Errno, Failed};

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// Why a function of the header fails, with the text for the program.
pub(super) struct Failure {
    fault: Fault,
    message: String,
}

impl Failure {
    pub(super) fn new(errno: Errno, message: &str) -> Self {
        Self { fault: Fault::Errno(errno), message: message.to_owned() }
    }
}

impl Failure {
    pub(super) fn errno(&self) -> Errno {
        self.fault.errno()
    }

    /// Keeps the message for this thread, and returns the errno.
    pub(super) fn tell(self) -> Errno {
        set(&self.message);
        self.errno()
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::new(errno, &memory::reason(errno).to_string_lossy())
    }
}

impl From<ViewError> for Failure {
    fn from(error: ViewError) -> Self {
        let message = error.to_string();
        Self { fault: error.into(), message }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        ViewError::from(error).into()
    }
}

/// Returns a function that adds a path to an error that does not name it.
pub(super) fn at(path: &[u8]) -> impl Fn(ViewError) -> Failure {
    move |error| {
        let is_named = matches!(error, ViewError::Client(_));
        let Failure { fault, message } = error.into();
        Failure { fault, message: if is_named { message } else { format!("'{}': {message}", display(path)) } }
    }
}

/// Like [`fault::answer`], for functions of the header. Keeps the message of a failure for the program.
pub(super) fn answer<R: Failed>(mut work: impl FnMut() -> Result<R, Failure>) -> R {
    fault::answer(|| work().map_err(keep))
}

/// Like [`answer`], for functions that call functions of the program.
pub(super) fn answer_once<R: Failed>(work: impl FnOnce() -> Result<R, Failure>) -> R {
    fault::answer_once(|| work().map_err(keep))
}

fn keep(Failure { fault, message }: Failure) -> Fault {
    set(&message);
    fault
}

/// Keeps a message for this thread.
pub(super) fn set(message: &str) {
    let message = CString::new(without_os_numbers(message).replace('\0', "?")).unwrap_or_default();
    // A thread that is ending keeps no message.
    let _ = MESSAGE.try_with(|kept| kept.replace(message));
}

/// Returns this thread's message.
pub(super) fn get() -> *const c_char {
    MESSAGE.try_with(|kept| kept.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
