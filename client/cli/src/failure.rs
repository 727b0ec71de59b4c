//! Messages and failures: lines on standard error, output on standard output, and exit statuses.
//!
//! Commands never use `eprintln!` and `println!`, which panic if they cannot write. [`mention`] and
//! [`complain`] write messages, [`output`] and `print_line!` write output. Text from outside
//! (paths, host names) is escaped for a terminal.

use std::fmt::Display;
use std::io::{self, Stderr, StdoutLock, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use clap::error::ContextValue;
use dayfly_client::ClientError;
use dayfly_launch::preflight::PreflightError;
use dayfly_launch::{LaunchError, Notices, owner_hint};
use dayfly_meta::path::display;
use dayfly_meta::text::without_os_numbers;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};

use crate::closed_stdout;

/// The operation failed.
pub(crate) const FAILED: u8 = 1;
/// The arguments are wrong (clap uses the same status).
pub(crate) const USAGE: u8 = 2;
/// With `--keep-going`: the dataset is staged in, without the files that could not be read.
pub(crate) const LEFT_OUT: u8 = 3;
/// `exec` or `run` itself failed, before or after it ran CMD. GNU `env` and `timeout` use the same
/// status.
pub(crate) const NOT_STARTED: u8 = 125;
/// CMD was found but cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// CMD was not found.
pub(crate) const NOT_FOUND: u8 = 127;
/// The reader of standard output closed it. A program that SIGPIPE kills has the same status (128 +
/// 13).
const BROKEN_PIPE: u8 = 141;

/// A failed command: its message and its exit status.
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

    /// Creates a failure whose messages were already printed.
    pub(crate) fn silent() -> Self {
        Self { message: None, status: FAILED }
    }

    pub(crate) fn with_status(self, status: u8) -> Self {
        Self { status, ..self }
    }

    /// Prints the message, and returns the exit status.
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

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let owner = if let ClientError::NotPrivate(exposed) = &error { owner_hint(exposed) } else { String::new() };
        Self::new(format!("{error}{owner}"))
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        match error {
            LaunchError::Client(error) => error.into(),
            error if error.is_usage() => Self::usage(error),
            error => Self::new(error),
        }
    }
}

impl From<PreflightError> for Failure {
    fn from(error: PreflightError) -> Self {
        LaunchError::from(error).into()
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        // A reader that has seen enough (`dayfly cat x | head`) is not worth a message.
        let is_closed = error.kind() == io::ErrorKind::BrokenPipe;
        if is_closed { Self { message: None, status: BROKEN_PIPE } } else { Self::new(error) }
    }
}

/// Returns a handler that prints the launch crate's notices with [`complain`].
pub(crate) fn notices() -> Notices {
    Notices::new(|notice| complain(notice))
}

/// Prints a line on standard error, beginning with `dayfly:`. The message is escaped, so it stays
/// on one line whatever names it contains. The operating system's error numbers are removed.
pub(crate) fn complain(message: impl Display) {
    mention(format_args!("dayfly: {}", display(without_os_numbers(&message.to_string()).as_bytes())));
}

/// Prints a line on standard error as it is. If the message cannot be written, it is dropped and
/// the command continues.
pub(crate) fn mention(message: impl Display) {
    let line = format!("{message}\n");
    let mut rest = line.as_bytes();
    // Does not take the lock of standard error, because another thread may hold it while waiting
    // for a stopped terminal (Ctrl-S).
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

/// How long a message waits for its reader once this process has to end.
const LAST_MESSAGE_TIMEOUT_MS: u16 = 500;

/// Whether a signal, or the end of the process of `--end-with`, asks this process to end. From then on, messages that nobody reads are
/// dropped, so that they do not delay the end of a session.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// From now on, makes this process drop messages that nobody reads.
pub(crate) fn end_soon() {
    IS_ENDING.store(true, Ordering::Relaxed);
}

fn is_writable(stderr: &Stderr) -> bool {
    let mut wanted = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    // If the poll fails, the write will report why.
    poll(&mut wanted, LAST_MESSAGE_TIMEOUT_MS) != Ok(0)
}

/// Reports what the argument parser returned: help on standard output, and errors on standard
/// error.
///
/// An error message repeats arguments as the user gave them. This function escapes each argument,
/// and then each line of the message, but keeps the line ends.
pub(crate) fn report_arguments(mut error: clap::Error) -> Result<ExitCode, Failure> {
    if !error.use_stderr() {
        closed_stdout::check().and_then(|()| error.print()).map_err(name_stdout)?;
        return Ok(ExitCode::SUCCESS);
    }
    // To render without colors, clap removes escape sequences, even those in arguments, so the
    // arguments are escaped first.
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

/// A writer to standard output, whose errors name standard output.
pub(crate) struct Output(StdoutLock<'static>);

pub(crate) fn output() -> Output {
    Output(io::stdout().lock())
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        closed_stdout::check().and_then(|()| self.0.write(bytes)).map_err(name_stdout)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(name_stdout)
    }
}

/// Adds the stream's name to an error. Keeps the error's kind, because callers recognize a closed
/// reader by it.
fn name_stdout(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted => error,
        kind => io::Error::new(kind, format!("cannot write to standard output: {error}")),
    }
}

/// The error of the first `print_line!` that failed.
static OUTPUT_ERROR: Mutex<Option<io::Error>> = Mutex::new(None);

/// Records that a `print_line!` failed, so that [`check_output`] can report it at the end of the
/// command. A reader that has seen enough and closed the output is not a failure.
pub(crate) fn record_output_error(error: io::Error) {
    if error.kind() != io::ErrorKind::BrokenPipe {
        OUTPUT_ERROR.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Fails if a `print_line!` failed, because a command that succeeds must have printed its output.
pub(crate) fn check_output() -> Result<(), Failure> {
    let error = OUTPUT_ERROR.lock().unwrap_or_else(PoisonError::into_inner).take();
    error.map_or(Ok(()), |error| Err(error.into()))
}

/// Prints a line on standard output. A failed write is reported at the end of the command.
macro_rules! print_line {
    ($($argument:tt)*) => {{
        use std::io::Write;
        if let Err(error) = writeln!(crate::failure::output(), $($argument)*) {
            crate::failure::record_output_error(error);
        }
    }};
}
pub(crate) use print_line;
