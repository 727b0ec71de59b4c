//! Starts the session of a run, and ends it, as a user does: with `up` and `down`, or with `run`.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::chaos::deadlines;
use crate::chaos::network::Network;
use crate::chaos::schedule::{Launch, NODES, Schedule};
use crate::harness::{Cluster, Ground, output_of, permits, text, wait_for};

/// With a tenth of the deadlines, a server that gets no processor for half a second counts as silent. If that happens while a session
/// starts, the session does not start; then there is another attempt.
const START_ATTEMPTS: usize = 3;
/// How long readers wait for samples of compressed tars that are read again.
pub(crate) const RECOVERY_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the transport that all sessions must use: the value of `DAYFLY_CHAOS_TRANSPORT`.
pub(crate) fn transport() -> Option<String> {
    std::env::var("DAYFLY_CHAOS_TRANSPORT").ok()
}

/// Returns whether a session did not start because a server was silent for too long.
fn is_of_silence(errors: &str) -> bool {
    ["no byte arrived", "did not answer within"].iter().any(|silence| errors.contains(silence))
}

/// How a session was started.
pub(crate) enum Launched {
    Up,
    Run {
        child: Child,
        status: u8,
        /// The command of `run` ends when this file exists.
        end: PathBuf,
        errors: PathBuf,
    },
}

impl Launched {
    /// Starts a session.
    pub(crate) fn start(ground: Ground, schedule: &Schedule, network: Option<&Network>) -> Result<(Cluster, Self), String> {
        let command = |name: &str| {
            let mut command = match network {
                None => ground.dayfly(),
                Some(network) => network.dayfly(&ground),
            };
            command.arg(name);
            match network {
                None => command.args(["--local", &NODES.to_string()]),
                Some(network) => command.args(network.options()).arg("--data-dir").arg(ground.data.path()),
            };
            command.args(["--memory", schedule.memory, "--capacity", "140MiB"]).args(&schedule.options);
            command.args(["--deadlines-divisor", &deadlines::divisor().to_string()]);
            command.args(["--recovery-timeout", &RECOVERY_TIMEOUT.as_secs().to_string()]);
            if let Some(transport) = transport() {
                command.args(["--transport", &transport]);
            }
            command
        };
        ground.hold([permits::take(usize::from(NODES))]);
        let (id, launched) = match schedule.launch {
            Launch::Up => {
                let mut attempts = 1..START_ATTEMPTS;
                let output = loop {
                    let output = output_of(&mut command("up"));
                    let errors = text(&output.stderr);
                    match output.status.success() {
                        true => break output,
                        false if is_of_silence(&errors) && attempts.next().is_some() => {}
                        false => return Err(format!("`up` failed: {errors}")),
                    }
                };
                (text(&output.stdout).trim().to_owned(), Self::Up)
            }
            Launch::Run(status) => Self::run(&ground, &mut command("run"), status)?,
        };
        Ok((Cluster { ground, id }, launched))
    }

    fn run(ground: &Ground, command: &mut Command, status: u8) -> Result<(String, Self), String> {
        let (id, end, errors) = (ground.at("id"), ground.at("end"), ground.at("run.err"));
        let script = format!(
            "echo $DAYFLY_SESSION > {id}.new; mv {id}.new {id}; while [ ! -e {end} ]; do sleep 0.05; done; exit {status}",
            id = id.display(),
            end = end.display()
        );
        command.args(["--", "sh", "-c", &script]).stdout(Stdio::null()).stderr(File::create(&errors).unwrap());
        let mut child = command.spawn().unwrap();
        let deadline = Instant::now() + crate::harness::COMMAND_TIMEOUT;
        while !id.exists() {
            if let Some(status) = child.try_wait().unwrap() {
                return Err(format!("`run` exited with {status}: {}", fs::read_to_string(&errors).unwrap_or_default()));
            }
            if Instant::now() > deadline {
                return Err("HANGS: `run` does not start its command".to_owned());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let session = fs::read_to_string(&id).unwrap().trim().to_owned();
        Ok((session, Self::Run { child, status, end, errors }))
    }

    /// Lets the command of `run` end, and checks that `run` ends with its status, unless the supervisor was killed. Returns false if
    /// the session was started by `up`, and must be ended with `down`.
    pub(crate) fn end(&mut self, is_killed: bool) -> Result<bool, String> {
        let Self::Run { child, status, end, errors } = self else { return Ok(false) };
        fs::write(end, "").unwrap();
        let Some(found) = wait_for(child, deadlines::of_command()) else {
            return Err("HANGS: `run` does not end after its command".to_owned());
        };
        if !is_killed && found.code() != Some(i32::from(*status)) {
            let errors = fs::read_to_string(errors).unwrap_or_default();
            return Err(format!("STATUS: `run` exited with {found} instead of {status}: {errors}"));
        }
        Ok(true)
    }

    /// Returns what `run` has printed.
    pub(crate) fn printed(&self) -> String {
        match self {
            Self::Up => String::new(),
            Self::Run { errors, .. } => fs::read_to_string(errors).unwrap_or_default(),
        }
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        if let Self::Run { child, .. } = self {
            // It has exited already, unless the run failed.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
