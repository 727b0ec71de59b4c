//! `dayfly up`. The process that the user starts reports the result; another process stays in the
//! background as the supervisor.

use std::env;
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use dayfly_launch::{RunningSession, SessionPlan, cleanup};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, dup2_stderr, dup2_stdout, setsid};

use super::down;
use super::signals::Interruptions;
use super::start::{lost, prepare_supervisor, start};
use crate::args::UpArguments;
use crate::failure::{FAILED, Failure, complain, end_soon, notices, output};
use crate::process::{self, Process};

pub(super) fn run(arguments: &UpArguments) -> Result<ExitCode, Failure> {
    if arguments.foreground || arguments.background { supervise(arguments) } else { start_supervisor() }
}

/// Starts the supervisor with this process's arguments, and prints the supervisor's messages until
/// the session is up.
fn start_supervisor() -> Result<ExitCode, Failure> {
    let mut supervisor = Command::new(env::current_exe()?);
    supervisor.args(env::args_os().skip(1)).arg("--background");
    let mut supervisor = supervisor.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let errors = supervisor.stderr.take().map(|errors| {
        thread::spawn(move || {
            BufReader::new(errors).lines().map_while(Result::ok).for_each(|line| drop(writeln!(io::stderr(), "{line}")))
        })
    });
    let mut id = String::new();
    if let Some(output) = supervisor.stdout.take() {
        BufReader::new(output).read_line(&mut id)?;
    }
    if !id.is_empty() {
        // The supervisor now writes to its log, so its standard error has ended.
        let _ = errors.map(thread::JoinHandle::join);
        let Err(error) = output().write_all(id.as_bytes()) else { return Ok(ExitCode::SUCCESS) };
        // The supervisor ends its session before it exits.
        kill(Pid::from_raw(supervisor.id() as i32), Signal::SIGTERM).map_err(io::Error::from)?;
        supervisor.wait()?;
        return Err(id_not_printed(&error));
    }
    let status = supervisor.wait()?;
    // The supervisor has reported the reason.
    let _ = errors.map(thread::JoinHandle::join);
    Ok(ExitCode::from(status.code().map_or(FAILED, |code| code as u8)))
}

/// Starts a session, and supervises it until it ends.
fn supervise(arguments: &UpArguments) -> Result<ExitCode, Failure> {
    if arguments.background {
        // The terminal's signals are not meant for this process.
        setsid().map_err(io::Error::from)?;
        // If the user interrupts the parent, the start is interrupted too.
        set_pdeathsig(Signal::SIGTERM).map_err(io::Error::from)?;
    }
    let owner = arguments.end_with.map(find_owner).transpose()?;
    prepare_supervisor();
    let plan = SessionPlan::new(&arguments.session.to_options(), arguments.keep.unwrap_or_default(), notices())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interruptions = Interruptions::new()?;
        let mut session = match start(plan, reason_to_end(&mut interruptions, owner)).await? {
            ControlFlow::Continue(session) => session,
            ControlFlow::Break(Reason::Signal(number)) => return Ok(ExitCode::from(128 + number as u8)),
            ControlFlow::Break(Reason::OwnerEnded(pid)) => {
                return Err(Failure::new(format_args!("no session: process {pid}, which --end-with names, has ended")));
            }
        };
        if arguments.background {
            // The parent exits once it has the id. If the parent has already exited, the write
            // below fails.
            set_pdeathsig(None).map_err(io::Error::from)?;
            // This process must not keep the working directory's file system busy. Relative paths
            // have been resolved by now.
            env::set_current_dir("/")?;
        }
        if let Err(error) = writeln!(output(), "{}", session.location().session) {
            let ended = down::end_servers(session.location());
            drop(session);
            return Err(ended.err().unwrap_or_else(|| id_not_printed(&error)));
        }
        if arguments.background {
            redirect_to_log(&session)?;
        }
        let (location, end, loss) = (session.location().clone(), session.end_handle(), session.loss());
        let was_ended = session.ended();
        let mut waiting = tokio::task::spawn_blocking(move || session.wait());
        tokio::select! {
            _ = &mut waiting => match lost(loss).await {
                Some(reason) => Err(Failure::new(reason)),
                None => Ok(ExitCode::SUCCESS),
            },
            reason = reason_to_end(&mut interruptions, owner) => {
                if let Reason::OwnerEnded(pid) = reason {
                    complain(format_args!("the session ends with process {pid}, as --end-with asks"));
                }
                let was_ended = was_ended.look();
                let ending = location.clone();
                let ended = tokio::task::spawn_blocking(move || down::end_servers(&ending)).await.map_err(Failure::new)?;
                drop(end);
                let _ = waiting.await;
                if let Err(failure) = ended {
                    complain(failure);
                }
                // The supervisor may have ended before the last server was killed.
                cleanup::remove_soon(&location)?;
                Ok(match reason {
                    // 'dayfly down' tells a supervisor to end that waits for servers which cannot be asked.
                    Reason::Signal(number) if !was_ended => ExitCode::from(128 + number as u8),
                    _ => ExitCode::SUCCESS,
                })
            }
        }
    })
}

/// Finds the process of `--end-with`.
fn find_owner(pid: i32) -> Result<Process, Failure> {
    Process::find(pid).map_err(|error| Failure::usage(format_args!("--end-with {pid}: {error}")))
}

/// Why a session has to end.
enum Reason {
    /// This signal has arrived.
    Signal(i32),
    /// The process with this number has ended, which the session ends with.
    OwnerEnded(i32),
}

/// Waits until a session has to end. From then on, messages that nobody reads do not delay its end.
async fn reason_to_end(interruptions: &mut Interruptions, owner: Option<Process>) -> Reason {
    let reason = tokio::select! {
        number = interruptions.next() => Reason::Signal(number),
        pid = process::ended(owner) => Reason::OwnerEnded(pid),
    };
    end_soon();
    reason
}

/// Returns the failure of a session whose id cannot be printed. Nobody could find such a session to
/// end it.
fn id_not_printed(error: &io::Error) -> Failure {
    Failure::new(format!("the session was ended because its id cannot be printed to standard output: {error}"))
}

/// Redirects this process's output, which nobody reads from now on, to a log in the session's
/// folder.
fn redirect_to_log(session: &RunningSession) -> io::Result<()> {
    let path = session.location().folder.join("supervisor.log");
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    dup2_stdout(&log)?;
    dup2_stderr(&log)?;
    Ok(())
}
