//! How a command fails: one line on standard error, and an exit status that means something.

use std::fmt::Display;
use std::io::{self, Stderr, StdoutLock, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use clap::error::ContextValue;
use dayfly_client::ClientError;
use dayfly_client::locate::NotPrivate;
use dayfly_meta::path::display;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
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
    mention(format_args!("dayfly: {}", display(message.to_string().as_bytes())));
}

/// The same of what is no complaint, in our own words. Not `eprintln!`, which panics where it cannot write: what nobody can read is no
/// reason for a command to fail.
pub(crate) fn mention(message: impl Display) {
    let line = format!("{message}\n");
    let mut rest = line.as_bytes();
    // Not by the lock of standard error: another thread may have it, and wait for a terminal that was stopped (Ctrl-S).
    let stderr = io::stderr();
    while !rest.is_empty() {
        if IS_ENDING.load(Ordering::Relaxed) && !is_writable(&stderr) {
            return;
        }
        match nix::unistd::write(&stderr, rest) {
            Ok(count) => rest = &rest[count..],
            Err(Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}

/// How long a message waits for its reader once a signal has come.
const LAST_WORD_TIMEOUT_MS: u16 = 500;

/// Whether a signal has come: from then on the end of a session waits for no reader.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// From here on messages that nobody reads are dropped.
pub(crate) fn end_soon() {
    IS_ENDING.store(true, Ordering::Relaxed);
}

fn is_writable(stderr: &Stderr) -> bool {
    let mut wanted = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    // What went wrong here is told by the write.
    poll(&mut wanted, LAST_WORD_TIMEOUT_MS) != Ok(0)
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

/// Tells what the parser of arguments has to say: help on standard output, else what is wrong on standard error. There it repeats
/// arguments as they were given, so these are escaped, and then all but line ends.
pub(crate) fn about_arguments(mut error: clap::Error) -> Result<ExitCode, Failure> {
    if !error.use_stderr() {
        error.print().map_err(named)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Rendering without colors would leave out what begins like one.
    let given: Vec<_> = error.context().map(|(kind, value)| (kind, value.clone())).collect();
    for (kind, value) in given {
        let escaped = |text: String| display(text.as_bytes());
        let value = match value {
            ContextValue::String(text) => ContextValue::String(escaped(text)),
            ContextValue::Strings(texts) => ContextValue::Strings(texts.into_iter().map(escaped).collect()),
            other => other,
        };
        error.insert(kind, value);
    }
    let text = error.render().to_string();
    mention(text.lines().map(|line| display(line.as_bytes())).collect::<Vec<_>>().join("\n"));
    Ok(ExitCode::from(USAGE))
}

/// Standard output, whose errors name it.
pub(crate) struct Output(StdoutLock<'static>);

pub(crate) fn output() -> Output {
    Output(io::stdout().lock())
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(named)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(named)
    }
}

/// The kind stays, for a reader that has gone is told by it.
fn named(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted => error,
        kind => io::Error::new(kind, format!("cannot write to standard output: {error}")),
    }
}

/// The first line of `say!` that could not be written, until it is asked for.
static UNSAID: Mutex<Option<io::Error>> = Mutex::new(None);

/// The error of a line of `say!`, kept for the end of the command. Whoever has seen enough of the output and closed it is no failure.
pub(crate) fn note_unsaid(error: io::Error) {
    if error.kind() != io::ErrorKind::BrokenPipe {
        UNSAID.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Whether all that was said by `say!` was written: a command that succeeds has told what it was asked.
pub(crate) fn all_said() -> Result<(), Failure> {
    let unsaid = UNSAID.lock().unwrap_or_else(PoisonError::into_inner).take();
    unsaid.map_or(Ok(()), |error| Err(error.into()))
}

/// A line on standard output; what fails of it is told at the command's end.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write;
        if let Err(error) = writeln!(crate::failure::output(), $($argument)*) {
            crate::failure::note_unsaid(error);
        }
    }};
}
pub(crate) use say;
