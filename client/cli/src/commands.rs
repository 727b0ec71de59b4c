//! The commands, each a file.

mod cat;
mod clean;
mod cp;
mod df;
mod doctor;
mod down;
mod du;
mod exec;
mod ls;
mod metrics;
mod run;
mod serve;
mod signals;
mod stage_in;
mod stat;
mod status;
mod top;
mod tune;
mod up;
mod verify;

use std::process::ExitCode;

use crate::args::Command;
use crate::failure::Failure;

/// Runs a command.
pub(crate) fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Up(arguments) => up::run(&arguments),
        Command::StageIn(arguments) => stage_in::run(arguments),
        Command::Run(arguments) => run::run(arguments),
        Command::Exec(arguments) => exec::run(arguments),
        Command::Env(arguments) => exec::print(arguments),
        Command::Ls(arguments) => ls::run(arguments),
        Command::Stat(arguments) => stat::run(arguments),
        Command::Cat(arguments) => cat::run(arguments),
        Command::Cp(arguments) => cp::run(arguments),
        Command::Du(arguments) => du::run(arguments),
        Command::Df(arguments) => df::run(arguments),
        Command::Verify(arguments) => verify::run(arguments),
        Command::Status(arguments) => status::run(arguments),
        Command::Top(arguments) => top::run(&arguments),
        Command::Metrics(arguments) => metrics::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Down(_) => down::run(),
        Command::Clean(arguments) => clean::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::IsPreloaded => Ok(if crate::preload::is_loaded() { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
    }
}

/// For who has a session's key: no core file of this process, and no other process of this user looks into it.
fn harden() {
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        crate::failure::complain(format_args!("this process can be looked into by others of its user: {error}"));
    }
}
