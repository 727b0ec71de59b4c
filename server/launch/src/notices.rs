//! Notices: messages that the user should see while a session starts and runs.

use std::fmt::{self, Debug, Display};
use std::sync::Arc;

/// Shows one notice.
type Show = dyn Fn(&dyn Display) + Send + Sync;

/// Passes messages for the user to the program that embeds this crate.
///
/// The crate itself never writes to standard error. A notice is not an error: the operation that
/// issued it continues.
#[derive(Clone)]
pub struct Notices(Arc<Show>);

impl Notices {
    /// Calls `show` with each notice, on whatever thread issues it.
    pub fn new(show: impl Fn(&dyn Display) + Send + Sync + 'static) -> Self {
        Self(Arc::new(show))
    }

    pub(crate) fn show(&self, notice: impl Display) {
        (self.0)(&notice);
    }
}

impl Debug for Notices {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Notices")
    }
}
