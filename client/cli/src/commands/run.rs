//! `dayfly run`: a session around one command. It ends whatever that command does. What can be known to fail fails before it begins
//! (`preflight`).

mod preflight;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::pin::{Pin, pin};
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use dayfly_client::locate::Location;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpgrp, tcgetpgrp};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::signals::Interruptions;
use super::{down, exec, harden, stage_in};
use crate::args::Run;
use crate::failure::{Failure, NOT_STARTED, complain, end_soon};
use crate::launch::{self, Planned, Started};
use crate::size;

/// How long CMD may take to end after it was told to.
const GRACE: Duration = Duration::from_secs(30);
/// A session that is lost is known to be within this.
const LOSS_TOLD_TIMEOUT: Duration = Duration::from_millis(500);

pub(super) fn run(arguments: Run) -> Result<ExitCode, Failure> {
    harden();
    let itself = |failure: Failure| failure.with_status(NOT_STARTED);
    let stage_ins = arguments.stage_in.iter().map(|argument| part(argument)).collect::<Result<Vec<_>, _>>()?;
    if arguments.options.report.is_some() && stage_ins.len() > 1 {
        return Err(Failure::usage("--report is of one --stage-in; give the others in a session of 'dayfly up'"));
    }
    let planned = launch::plan(&arguments.session, Duration::ZERO).map_err(itself)?;
    preflight::check(&arguments, &planned, &stage_ins)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        // From here on a signal does not end us, but what we do.
        let mut interruptions = Interruptions::new()?;
        let Some(mut started) = start(planned, &mut interruptions).await.map_err(itself)? else {
            return Ok(ExitCode::from(interruptions.status()));
        };
        let mut loss = pin!(ever_lost(started.loss()));
        let work = async {
            for (source, target) in stage_ins {
                let (location, options) = (started.location.clone(), arguments.options.clone());
                let telling = stage_in::Telling::default();
                let told = telling.clone();
                let staging =
                    tokio::task::spawn_blocking(move || stage_in::stage(&location, &[source], &target, &options, false, &told));
                tokio::select! {
                    staged = staging => if let Err(failure) = staged.map_err(Failure::new)? {
                        // One that fails since the session is lost hears first of what it lost by that.
                        let reason = timeout(LOSS_TOLD_TIMEOUT, &mut loss).await;
                        return Err(itself(reason.map_or(failure, Failure::new)));
                    },
                    number = interruptions.next() => {
                        telling.interrupt();
                        return Ok(128 + number as u8);
                    }
                    reason = &mut loss => return Err(itself(Failure::new(reason))),
                }
            }
            command(&started.location, &arguments.command, &mut interruptions, loss).await
        };
        let status = work.await;
        let ended = down::end_servers(&started.location);
        drop(started);
        // Both count; CMD's own failure is told first.
        let (status, ended) = (status?, ended.map_err(itself)?);
        complain(format_args!("session down: {} nodes ended, {} freed", ended.nodes, size::show(ended.freed_bytes)));
        Ok(ExitCode::from(status))
    });
    // A stage-in that was interrupted may still wait for its answer.
    runtime.shutdown_background();
    result
}

/// Why a session is lost that has ended; `None` where it ended as it was told to.
pub(super) async fn lost(loss: Option<oneshot::Receiver<String>>) -> Option<String> {
    loss?.await.ok()
}

/// The same, once it is lost; a session that ends otherwise never is.
async fn ever_lost(loss: Option<oneshot::Receiver<String>>) -> String {
    match lost(loss).await {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}

/// Starts a session; `None` if it was interrupted.
pub(super) async fn start(planned: Planned, interruptions: &mut Interruptions) -> Result<Option<Started>, Failure> {
    let (cancel, cancelled) = oneshot::channel();
    let mut starting = tokio::task::spawn_blocking(move || launch::start(planned, cancelled));
    tokio::select! {
        started = &mut starting => started.map_err(Failure::new)?.map(Some),
        _ = interruptions.next() => {
            // It may just have been done with.
            let _ = cancel.send(());
            drop(starting.await);
            Ok(None)
        }
    }
}

/// `SOURCE:TARGET` at the last `:/`.
fn part(argument: &OsStr) -> Result<(OsString, OsString), Failure> {
    let bytes = argument.as_bytes();
    let colon = bytes.windows(2).rposition(|pair| pair == b":/").filter(|&colon| colon > 0);
    let colon = colon.ok_or_else(|| Failure::usage(format!("'{}' is not SOURCE:/TARGET", argument.display())))?;
    Ok((OsStr::from_bytes(&bytes[..colon]).to_owned(), OsStr::from_bytes(&bytes[colon + 1..]).to_owned()))
}

/// Runs CMD and tells it of the signals that we get. It ends with the session, where that is lost.
async fn command(
    location: &Location,
    command: &[OsString],
    interruptions: &mut Interruptions,
    mut loss: Pin<&mut impl Future<Output = String>>,
) -> Result<u8, Failure> {
    let variables = exec::variables(location, None).map_err(|failure| failure.with_status(NOT_STARTED))?;
    let (program, rest) = exec::split(command, &variables)?;
    let mut child =
        Command::new(&program).args(rest).envs(variables).spawn().map_err(|error| exec::not_started(&program, &error))?;
    let mut reason = None;
    let number = loop {
        tokio::select! {
            status = child.wait() => return Ok(status_of(status.map_err(|error| Failure::new(error).with_status(NOT_STARTED))?)),
            signalled = interruptions.next_of_all() => match signalled {
                // What a scheduler or a user tells CMD by these is between them.
                number if number == Signal::SIGUSR1 as i32 || number == Signal::SIGUSR2 as i32 => pass_on(&child, number),
                number => break number,
            },
            lost = &mut loss => {
                reason = Some(lost);
                break Signal::SIGTERM as i32;
            }
        }
    };
    end_soon();
    // A terminal has told all of its foreground group already.
    if !(number == Signal::SIGINT as i32 || number == Signal::SIGQUIT as i32) || !is_in_foreground() {
        pass_on(&child, number);
    }
    let status = match timeout(GRACE, child.wait()).await {
        Ok(status) => status,
        Err(_) => {
            complain(format_args!("CMD has not ended within {} s of the signal; it is killed", GRACE.as_secs()));
            pass_on(&child, Signal::SIGKILL as i32);
            child.wait().await
        }
    };
    match reason {
        Some(reason) => Err(Failure::new(reason).with_status(NOT_STARTED)),
        None => Ok(status_of(status.map_err(|error| Failure::new(error).with_status(NOT_STARTED))?)),
    }
}

fn is_in_foreground() -> bool {
    tcgetpgrp(std::io::stdin()).is_ok_and(|group| group == getpgrp())
}

fn pass_on(child: &Child, number: i32) {
    if let (Some(pid), Ok(signal)) = (child.id(), Signal::try_from(number)) {
        // It may have ended just now.
        let _ = kill(Pid::from_raw(pid as i32), signal);
    }
}

/// As shells give it: 128 and the signal that ended it.
fn status_of(status: ExitStatus) -> u8 {
    status.code().map_or_else(|| 128 + status.signal().unwrap_or(0) as u8, |code| code as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_and_targets_part_at_the_last_colon_slash() {
        let check = |argument: &str, expect: Option<(&str, &str)>| {
            let found = part(OsStr::new(argument)).ok();
            assert_eq!(found, expect.map(|(source, target)| (source.into(), target.into())), "{argument}");
        };
        check("a.tar:/dayfly/a", Some(("a.tar", "/dayfly/a")));
        check("/pfs/x:/y/*.tar:/dayfly/a", Some(("/pfs/x:/y/*.tar", "/dayfly/a")));
        check("a.tar", None);
        check("a.tar:dayfly", None);
        check(":/dayfly", None);
    }
}
