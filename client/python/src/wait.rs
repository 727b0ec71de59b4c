//! Waits without the GIL, which Ctrl-C and other signals end.
//!
//! The client library asks after each signal and after each poll interval whether the wait shall end. The answer is found by the
//! interpreter: it runs the program's signal handlers, and if one of them raises an exception, the wait ends and the exception goes
//! to the caller. Until then, further waits of the same call end, too: the client library may do without what it waited for. Only the
//! main thread runs handlers.

use std::cell::RefCell;
use std::io::Write;

use dayfly_client::{ClientError, interruption, notice};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

thread_local! {
    /// The exception of a signal handler that ended this thread's wait.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Whether this thread waits for a call of this module, so that an exception has somewhere to go.
    static IS_WAITING: RefCell<bool> = const { RefCell::new(false) };
}

/// Makes signals end the waits of this module.
pub(crate) fn let_signals_interrupt() {
    interruption::ask(|| {
        if !IS_WAITING.with(|is_waiting| *is_waiting.borrow()) {
            return false;
        }
        if RAISED.with(|slot| slot.borrow().is_some()) {
            return true;
        }
        let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
        let is_raised = raised.is_some();
        if is_raised {
            RAISED.with(|slot| slot.replace(raised));
        }
        is_raised
    });
}

/// Shows the user, on standard error, that a call of this module waits for the server.
pub(crate) fn show_long_waits() {
    // Without standard error, nobody can be told.
    notice::show_with(|message| drop(writeln!(std::io::stderr(), "dayfly: {message}")));
}

/// Runs `work`, which may wait, while other threads run Python code.
pub(crate) fn without_gil<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    py.detach(|| {
        let before = IS_WAITING.with(|is_waiting| is_waiting.replace(true));
        let result = work();
        IS_WAITING.with(|is_waiting| is_waiting.replace(before));
        result
    })
}

/// Returns the exception that ended a wait of this thread's call. It matters more than the failure of the call.
pub(crate) fn raised() -> Option<PyErr> {
    RAISED.with(|slot| slot.take())
}

/// Returns the exception of an interrupted call, if `error` is the failure of one.
pub(crate) fn interruption(error: &ClientError) -> Option<PyErr> {
    let unknown = || PyKeyboardInterrupt::new_err("the wait was interrupted");
    raised().or_else(|| matches!(error, ClientError::Interrupted).then(unknown))
}
