//! `dayfly up`. The process that the user started says what comes of it; another, in the background, keeps the session.

use std::env;
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, dup2_stderr, dup2_stdout, setsid};

use super::run::start;
use super::signals::Interruptions;
use super::{down, harden};
use crate::args::Up;
use crate::failure::{FAILED, Failure, complain, output};
use crate::launch::{self, Started};

pub(super) fn run(arguments: &Up) -> Result<ExitCode, Failure> {
    if arguments.foreground || arguments.background { keep(arguments) } else { start_supervisor() }
}

/// Starts the supervisor, with our own arguments, and tells what it says until the session is there.
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
        // What it has to say it has said by now, or says in its log.
        let _ = errors.map(thread::JoinHandle::join);
        let Err(error) = output().write_all(id.as_bytes()) else { return Ok(ExitCode::SUCCESS) };
        // It ends its session with itself.
        kill(Pid::from_raw(supervisor.id() as i32), Signal::SIGTERM).map_err(io::Error::from)?;
        supervisor.wait()?;
        return Err(never_told(&error));
    }
    let status = supervisor.wait()?;
    // It has said why.
    let _ = errors.map(thread::JoinHandle::join);
    Ok(ExitCode::from(status.code().map_or(FAILED, |code| code as u8)))
}

/// Starts a session and stays until it ends.
fn keep(arguments: &Up) -> Result<ExitCode, Failure> {
    if arguments.background {
        // The terminal's signals are not meant for it.
        setsid().map_err(io::Error::from)?;
        // Who waits for this may be interrupted.
        set_pdeathsig(Signal::SIGTERM).map_err(io::Error::from)?;
    }
    harden();
    let planned = launch::plan(&arguments.session, arguments.keep.unwrap_or_default())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interruptions = Interruptions::new()?;
        let Some(mut started) = start(planned, &mut interruptions).await? else {
            return Ok(ExitCode::from(interruptions.status()));
        };
        if arguments.background {
            // It ends when it has heard; if it is gone before, it hears nothing.
            set_pdeathsig(None).map_err(io::Error::from)?;
            // No job's folder stays busy; what was given relative to it has been looked up.
            env::set_current_dir("/")?;
        }
        if let Err(error) = writeln!(output(), "{}", started.location.session) {
            // In the background whoever started this is gone.
            let ended = down::end_servers(&started.location);
            drop(started);
            return Err(ended.err().unwrap_or_else(|| never_told(&error)));
        }
        if arguments.background {
            to_log(&started)?;
        }
        let (location, end, loss) = (started.location.clone(), started.end_handle(), started.loss());
        let mut waiting = tokio::task::spawn_blocking(move || started.wait());
        tokio::select! {
            _ = &mut waiting => match super::run::lost(loss).await {
                Some(reason) => Err(Failure::new(reason)),
                None => Ok(ExitCode::SUCCESS),
            },
            _ = interruptions.next() => {
                let ended = tokio::task::spawn_blocking(move || down::end_servers(&location)).await.map_err(Failure::new)?;
                drop(end);
                let _ = waiting.await;
                if let Err(failure) = ended {
                    complain(failure);
                }
                Ok(ExitCode::from(interruptions.status()))
            }
        }
    })
}

/// Nobody would find a session whose id was never told, and it would stay.
fn never_told(error: &io::Error) -> Failure {
    Failure::new(format!("the session is ended, for its id cannot be told on standard output: {error}"))
}

/// From here on nobody reads what is said but in the session's folder.
fn to_log(started: &Started) -> io::Result<()> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(started.location.folder.join("supervisor.log"))?;
    dup2_stdout(&log)?;
    dup2_stderr(&log)?;
    Ok(())
}
