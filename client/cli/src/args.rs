//! Defines the command line as data.
//!
//! The doc comments of these types are the text of `--help` and of the man pages.

mod namespace;
mod session;
mod stage_in;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub(crate) use namespace::{
    CatArguments, CpArguments, DfArguments, DuArguments, LsArguments, MetricsArguments, StatArguments, StatusArguments,
    TopArguments, TuneArguments, VerifyArguments,
};
pub(crate) use session::{
    CleanArguments, DoctorArguments, DownArguments, EnvArguments, ExecArguments, RunArguments, ServeArguments, UpArguments,
};
pub(crate) use stage_in::{Group, OnConflict, StageInArguments, StageInOptions};

/// An ad hoc distributed file system for deep-learning jobs.
///
/// A session lives as long as its job. Its servers, one per node, hold a dataset unpacked on the
/// nodes' local drives, and show it under one namespace. A whole job is one command:
///
///   dayfly run --stage-in 'train.tar:/dayfly/train' -- CMD
///
/// CMD and all its children see a read-only namespace below /dayfly (or --prefix). The programs
/// need no changes: a library that is loaded before the C library provides the namespace. It does
/// not reach static programs, programs for musl, set-user-ID programs and raw system calls.
///
/// Write a path of the namespace as programs see it, including the prefix (/dayfly/train). Every
/// other path is a local file. Commands use the session that DAYFLY_SESSION names, otherwise that
/// of your job, otherwise the only one that you run on this machine.
///
/// Exit status: 0 success; 1 failure; 2 wrong usage; 3 staged in, except for what --keep-going left
/// out. `run` and `exec` exit with the status of CMD, or with 125 if they fail themselves, 126 if
/// CMD cannot be executed, and 127 if it does not exist.
#[derive(Parser)]
#[command(name = "dayfly", version, max_term_width = 110)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    Up(UpArguments),
    StageIn(StageInArguments),
    Run(RunArguments),
    Exec(ExecArguments),
    Env(EnvArguments),
    Ls(LsArguments),
    Stat(StatArguments),
    Cat(CatArguments),
    Cp(CpArguments),
    Du(DuArguments),
    Df(DfArguments),
    Verify(VerifyArguments),
    Status(StatusArguments),
    Top(TopArguments),
    Metrics(MetricsArguments),
    Tune(TuneArguments),
    Doctor(DoctorArguments),
    Down(DownArguments),
    Clean(CleanArguments),
    Serve(ServeArguments),
    Completions(CompletionsArguments),
    Man(ManArguments),
    /// Exits with 0 if the preload library is loaded into this process.
    #[command(hide = true)]
    IsPreloaded,
}

/// Print a completion script for a shell.
///
/// For example: dayfly completions bash > ~/.local/share/bash-completion/completions/dayfly
#[derive(Args)]
pub(crate) struct CompletionsArguments {
    /// The shell that will run the completions.
    pub(crate) shell: CompletionShell,
}

/// Shells that have a completion script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CompletionShell {
    Bash,
    Zsh,
    Fish,
}

/// Write man pages: dayfly.1, and one page for each command.
///
/// For example: dayfly man ~/.local/share/man/man1
#[derive(Args)]
pub(crate) struct ManArguments {
    /// Write all pages into DIR, which must exist. [default: print the page of dayfly itself]
    #[arg(value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Arguments::command().debug_assert();
    }
}
