//! `dayfly run`: runs one command in a session of its own, and ends the session however the command
//! ends.
//!
//! Mistakes that can be detected in advance are reported before anything starts.

use std::ffi::{OsStr, OsString};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::pin::{Pin, pin};
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use dayfly_client::locate::SessionFolder;
use dayfly_launch::units::counted;
use dayfly_launch::{SessionPlan, preflight};
use dayfly_meta::wire::control::Selection;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpgrp, tcgetpgrp};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::signals::Interruptions;
use super::start::{prepare_supervisor, start, until_lost};
use super::{down, exec, stage_in};
use crate::args::{RunArguments, SourceAndTarget};
use crate::failure::{Failure, NOT_STARTED, complain, end_soon, notices};
use crate::preload;
use crate::size;

/// How long CMD may take to end after a signal.
const GRACE: Duration = Duration::from_secs(30);
/// How long to wait, after a stage-in has failed, for a report that the session was lost. Such a
/// report explains the failure better.
const LOSS_TIMEOUT: Duration = Duration::from_millis(500);

pub(super) fn run(arguments: RunArguments) -> Result<ExitCode, Failure> {
    prepare_supervisor();
    let own = |failure: Failure| failure.with_status(NOT_STARTED);
    let stage_ins = arguments.stage_in.clone();
    if arguments.options.report.is_some() && stage_ins.len() > 1 {
        return Err(Failure::usage(
            "--report works with a single --stage-in; for several, use 'dayfly up' and 'dayfly stage-in --report'",
        ));
    }
    let plan = SessionPlan::new(&arguments.session.to_options(), Duration::ZERO, notices());
    let plan = plan.map_err(|error| if error.is_usage() { error.into() } else { own(error.into()) })?;
    check(&arguments, &plan, &stage_ins)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        // From here on, signals end what this process is running, not the process itself.
        let mut interruptions = Interruptions::new()?;
        let mut session = match start(plan, interruptions.next()).await.map_err(own)? {
            ControlFlow::Continue(session) => session,
            ControlFlow::Break(number) => return Ok(ExitCode::from(128 + number as u8)),
        };
        let mut loss = pin!(until_lost(session.loss()));
        let work = async {
            for SourceAndTarget { source, target } in stage_ins {
                let (location, options) = (session.location().clone(), arguments.options.clone());
                let display = stage_in::ProgressDisplay::default();
                let shared = display.clone();
                let staging = tokio::task::spawn_blocking(move || {
                    stage_in::perform(&location, &[source], &target, &options, false, &shared)
                });
                tokio::select! {
                    staged = staging => if let Err(failure) = staged.map_err(Failure::new)? {
                        // If the stage-in failed because the session is lost, report the loss
                        // instead.
                        let reason = timeout(LOSS_TIMEOUT, &mut loss).await;
                        return Err(own(reason.map_or(failure, Failure::new)));
                    },
                    number = interruptions.next() => {
                        display.interrupt();
                        return Ok(128 + number as u8);
                    }
                    reason = &mut loss => return Err(own(Failure::new(reason))),
                }
            }
            run_command(session.location(), &arguments.command, &mut interruptions, loss).await
        };
        let status = work.await;
        let was_ended = session.ended().look();
        let ended = down::end_servers(session.location());
        drop(session);
        // If both failed, the failure of CMD is reported.
        let (status, ended) = (status?, ended.map_err(own)?);
        match was_ended {
            true => complain("the session was ended by another command, such as 'dayfly down'"),
            false => complain(format_args!(
                "session down: {} ended, {} freed",
                counted(ended.nodes as u64, "node"),
                size::show(ended.freed_bytes)
            )),
        }
        Ok(ExitCode::from(status))
    });
    // A stage-in that was interrupted may still be waiting for its answer.
    runtime.shutdown_background();
    result
}

/// Checks targets, CMD, the preload library, the report and the sources.
fn check(arguments: &RunArguments, plan: &SessionPlan, stage_ins: &[SourceAndTarget]) -> Result<(), Failure> {
    let own = |failure: Failure| failure.with_status(NOT_STARTED);
    preflight::check_targets(plan.prefix(), stage_ins.iter().map(|stage_in| stage_in.target.as_os_str()))?;
    check_command(&arguments.command, plan.prefix())?;
    preload::library().map_err(own)?;
    let options = &arguments.options;
    if let Some(report) = &options.report {
        preflight::check_report(report).map_err(|error| own(error.into()))?;
    }
    let selection = Selection {
        include: options.include.clone(),
        exclude: options.exclude.clone(),
        no_unpack: options.no_unpack,
        dereference: options.dereference,
        keep_going: options.keep_going,
        decoder_memory: options.decoder_memory,
        ..Selection::default()
    };
    for SourceAndTarget { source, target } in stage_ins {
        let path = stage_in::absolute(source).map_err(own)?;
        // Node 0 reads the sources. If node 0 is another machine, it may see other files, so
        // nothing is checked here.
        if plan.has_node_0_here() {
            preflight::check_sources(&[path], target, &selection).map_err(|error| own(error.into()))?;
        }
    }
    Ok(())
}

/// Checks that CMD exists and can be executed. A CMD in the namespace cannot be checked, because it
/// exists only after the stage-in.
fn check_command(command: &[OsString], prefix: &[u8]) -> Result<(), Failure> {
    let program = command.first().ok_or_else(|| Failure::usage("no command was given"))?;
    if exec::is_in_namespace(program, Path::new(OsStr::from_bytes(prefix))) {
        return Ok(());
    }
    let found = preflight::find_program(program, &exec::search_path()?);
    found.map(drop).map_err(|error| exec::not_started(program, &error))
}

/// Runs CMD, and passes signals on to it. If the session is lost, CMD is asked to end.
async fn run_command(
    location: &SessionFolder,
    command: &[OsString],
    interruptions: &mut Interruptions,
    mut loss: Pin<&mut impl Future<Output = String>>,
) -> Result<u8, Failure> {
    let own = |error: std::io::Error| Failure::new(error).with_status(NOT_STARTED);
    let variables = exec::variables(location, None).map_err(|failure| failure.with_status(NOT_STARTED))?;
    let (program, rest) = exec::split(command, &variables)?;
    let mut child =
        Command::new(&program).args(rest).envs(variables).spawn().map_err(|error| exec::not_started(&program, &error))?;
    let mut reason = None;
    let number = loop {
        tokio::select! {
            status = child.wait() => return Ok(shell_status(status.map_err(own)?)),
            number = interruptions.next_of_all() => match number {
                // A scheduler or a user means these for CMD; they mean nothing to `dayfly run`.
                number if number == Signal::SIGUSR1 as i32 || number == Signal::SIGUSR2 as i32 => forward(&child, number),
                number => break number,
            },
            lost = &mut loss => {
                reason = Some(lost);
                break Signal::SIGTERM as i32;
            }
        }
    };
    end_soon();
    // A terminal sends SIGINT and SIGQUIT to its whole foreground process group, so CMD has already
    // received them.
    if !(number == Signal::SIGINT as i32 || number == Signal::SIGQUIT as i32) || !is_in_foreground() {
        forward(&child, number);
    }
    let status = match timeout(GRACE, child.wait()).await {
        Ok(status) => status,
        Err(_) => {
            complain(format_args!("CMD did not end within {} s of the signal; killing it", GRACE.as_secs()));
            forward(&child, Signal::SIGKILL as i32);
            child.wait().await
        }
    };
    match reason {
        Some(reason) => Err(Failure::new(reason).with_status(NOT_STARTED)),
        None => Ok(shell_status(status.map_err(own)?)),
    }
}

fn is_in_foreground() -> bool {
    tcgetpgrp(std::io::stdin()).is_ok_and(|group| group == getpgrp())
}

/// Sends a signal to CMD.
fn forward(child: &Child, number: i32) {
    if let (Some(pid), Ok(signal)) = (child.id(), Signal::try_from(number)) {
        // CMD may have just ended.
        let _ = kill(Pid::from_raw(pid as i32), signal);
    }
}

/// Returns the exit status as shells report it: 128 plus the number of the signal that ended a
/// process.
fn shell_status(status: ExitStatus) -> u8 {
    status.code().map_or_else(|| 128 + status.signal().unwrap_or(0) as u8, |code| code as u8)
}
