//! Lets a program show its user that it waits for the server, for example because the server stands still.

use std::sync::OnceLock;

/// Shows one line.
pub type Show = fn(&str);

static SHOW: OnceLock<Show> = OnceLock::new();

/// Sets the function that shows lines. Only the first call has an effect. It may be called on any thread, also in a signal handler.
pub fn show_with(function: Show) {
    SHOW.get_or_init(|| function);
}

/// Shows a line, if the program wants to.
pub(crate) fn show(message: &str) {
    if let Some(show) = SHOW.get() {
        show(message);
    }
}
