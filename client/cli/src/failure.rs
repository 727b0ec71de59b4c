//! How a command fails: one line on standard error, and an exit status that means something.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use dayfly_client::ClientError;
use dayfly_client::locate::NotPrivate;
use dayfly_meta::path::display;
use nix::unistd::User;

/// The operation failed.
pub(crate) const FAILED: u8 = 1;
/// The arguments cannot be (clap uses the same).
pub(crate) const USAGE: u8 = 2;
/// Staged in, but for what could not be read: with `--keep-going`.
pub(crate) const LEFT_OUT: u8 = 3;
/// `exec` and `run` failed themselves, before or after CMD; as `env` and `timeout` do.
pub(crate) const NOT_STARTED: u8 = 125;
/// CMD was found but cannot be run.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// CMD was not found.
pub(crate) const NOT_FOUND: u8 = 127;

/// A failed command.
#[derive(Debug)]
pub(crate) struct Failure {
    message: Option<String>,
    status: u8,
}

impl Failure {
    pub(crate) fn new(message: impl Display) -> Self {
        Self { message: Some(message.to_string()), status: FAILED }
    }

    pub(crate) fn usage(message: impl Display) -> Self {
        Self { message: Some(message.to_string()), status: USAGE }
    }

    /// All has been said already.
    pub(crate) fn silent() -> Self {
        Self { message: None, status: FAILED }
    }

    pub(crate) fn with_status(self, status: u8) -> Self {
        Self { status, ..self }
    }

    /// The exit status that it will be.
    #[cfg(test)]
    pub(crate) fn status(&self) -> u8 {
        self.status
    }

    pub(crate) fn report(self) -> ExitCode {
        if let Some(message) = self.message {
            complain(&message);
        }
        ExitCode::from(self.status)
    }
}

impl Display for Failure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.message.as_deref().unwrap_or("it failed"))
    }
}

/// A line on standard error; nothing can be done if that is closed. Whatever names are in it, it stays one line, and says nothing to
/// the terminal.
pub(crate) fn complain(message: impl Display) {
    let _ = writeln!(io::stderr(), "dayfly: {}", display(message.to_string().as_bytes()));
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let owner = if let ClientError::NotPrivate(exposed) = &error { owner(exposed) } else { String::new() };
        Self::new(format!("{error}{owner}"))
    }
}

/// Who can take away what is in our place, by name.
pub(crate) fn owner(exposed: &NotPrivate) -> String {
    let Some(owner) = exposed.owner() else { return String::new() };
    let name = User::from_uid(owner.into()).ok().flatten().map_or_else(String::new, |user| format!(" ('{}')", user.name));
    format!(" (only user {owner}{name} or root can remove it)")
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        // A reader that has seen enough (`dayfly cat x | head`) is no failure worth a word.
        if error.kind() == io::ErrorKind::BrokenPipe { Self { message: None, status: 141 } } else { Self::new(error) }
    }
}

/// A line on standard output. Whoever has seen enough of it and closed it is no failure, and surely no panic.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stdout(), $($argument)*);
    }};
}
pub(crate) use say;
