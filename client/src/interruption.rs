//! Lets a program end a wait for the server early, for example because its user has pressed Ctrl-C.
//!
//! A wait asks the program's function after each signal and after each poll interval, on the thread that waits. If the function
//! returns `true`, the call fails with [`crate::ClientError::Interrupted`]. A request that was interrupted leaves nothing behind: its
//! connection is closed, so that its answer reaches nobody.

use std::sync::OnceLock;

/// Returns whether this thread's wait shall end.
pub type IsRequested = fn() -> bool;

static IS_REQUESTED: OnceLock<IsRequested> = OnceLock::new();

/// Sets the function that is asked. Only the first call has an effect.
pub fn ask(function: IsRequested) {
    IS_REQUESTED.get_or_init(|| function);
}

/// Returns whether the program wants this thread's wait to end.
pub(crate) fn is_requested() -> bool {
    IS_REQUESTED.get().is_some_and(|is_requested| is_requested())
}
