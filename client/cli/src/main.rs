//! `dayfly`: the one program, both command line and daemon.
//!
//! It parses arguments, runs a command, and turns its result into messages and an exit status. As
//! the composition root, it alone may depend on every crate.

mod args;
mod closed_stdout;
mod commands;
mod failure;
mod namespace;
mod preload;
mod process;
mod size;

use std::env;
use std::process::ExitCode;

use failure::Failure;

fn main() -> ExitCode {
    dayfly_client::notice::show_with(|message| failure::complain(message));
    let result = match args::Arguments::parse_line(env::args_os()) {
        Ok(arguments) => arguments.check().map_err(Failure::usage).and_then(|()| commands::run(arguments.command)),
        Err(error) => failure::report_arguments(error),
    };
    let status = result.unwrap_or_else(|failure| failure.report());
    match failure::check_output() {
        Ok(()) => status,
        // The status of a failed command says more than a failed write.
        Err(write_failure) => match write_failure.report() {
            write_status if status == ExitCode::SUCCESS => write_status,
            _ => status,
        },
    }
}
