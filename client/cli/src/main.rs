//! `dayfly`: the one program, command line and daemon. This is the composition root: it alone may depend on everything.

mod args;
mod commands;
mod failure;
mod launch;
mod namespace;
mod preload;
mod size;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let arguments = args::Arguments::parse();
    commands::run(arguments.command).unwrap_or_else(|failure| failure.report())
}
