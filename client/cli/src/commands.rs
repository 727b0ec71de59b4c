//! Runs the commands. Each command has a file of its own.

mod cat;
mod clean;
mod completions;
mod cp;
mod df;
mod doctor;
mod down;
mod du;
mod exec;
mod ls;
mod man;
mod metrics;
mod policy;
mod query;
mod rejoin;
mod run;
mod serve;
mod signals;
mod stage_in;
mod start;
mod stat;
mod status;
mod top;
mod tune;
mod up;
mod verify;

use std::process::ExitCode;

use crate::args::Command;
use crate::failure::Failure;
use crate::preload;

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
        Command::Rejoin(arguments) => rejoin::run(&arguments),
        Command::Down(_) => down::run(),
        Command::Clean(arguments) => clean::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Completions(arguments) => completions::run(&arguments),
        Command::Man(arguments) => man::run(&arguments),
        Command::IsPreloaded => Ok(if preload::is_loaded() { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
    }
}
