//! `dayfly`: the one program, command line and daemon. This is the composition root: it alone may depend on everything.

mod args;
mod commands;
mod failure;
#[path = "../../../server/launch/src/lib.rs"]
mod launch;
mod namespace;
mod preload;
mod size;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let ended = match args::Arguments::try_parse() {
        Ok(arguments) => commands::run(arguments.command),
        Err(error) => failure::about_arguments(error),
    };
    let status = ended.unwrap_or_else(|failure| failure.report());
    match failure::all_said() {
        Ok(()) => status,
        // A failure says more by its own status.
        Err(unsaid) => match unsaid.report() {
            unsaid if status == ExitCode::SUCCESS => unsaid,
            _ => status,
        },
    }
}
