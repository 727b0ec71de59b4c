//! Generates load and measures Dayfly. METHOD.md explains how to measure, and why ratios are taken
//! side by side in one run.

mod catalog;
mod epochs;
mod make;
mod measure;
mod pfs;
mod ping_pong;
mod placement;
mod posix;
mod prefetch;
mod read;
mod stream;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measure parts of Dayfly. Build it with --profile dist
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Catalog(catalog::Catalog),
    Read(read::Read),
    Epochs(epochs::Epochs),
    Stream(stream::Stream),
    Prefetch(prefetch::Prefetch),
    Make(make::Make),
    Posix(posix::Posix),
    Pfs(pfs::Pfs),
    PingPong(ping_pong::PingPong),
    Placement(placement::Measure),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().what {
        What::Catalog(arguments) => catalog::run(&arguments),
        What::Read(arguments) => read::run(&arguments),
        What::Epochs(arguments) => epochs::run(&arguments),
        What::Stream(arguments) => stream::run(&arguments),
        What::Prefetch(arguments) => prefetch::run(&arguments),
        What::Make(arguments) => make::run(&arguments),
        What::Posix(arguments) => posix::run(&arguments),
        What::Pfs(arguments) => pfs::run(&arguments),
        What::PingPong(arguments) => ping_pong::run(&arguments),
        What::Placement(arguments) => placement::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dayfly-bench: {error}");
            ExitCode::FAILURE
        }
    }
}
