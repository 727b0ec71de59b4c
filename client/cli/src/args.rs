//! Defines the command line as data.
//!
//! The doc comments of these types are the text of `--help` and of the man pages.

mod namespace;
mod session;
mod stage_in;

use std::ffi::OsString;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

pub(crate) use namespace::{
    CatArguments, CpArguments, DfArguments, DuArguments, LsArguments, MetricsArguments, StatArguments, StatusArguments,
    TopArguments, TuneArguments, VerifyArguments,
};
pub(crate) use session::{
    CleanArguments, DoctorArguments, DownArguments, EnvArguments, ExecArguments, RejoinArguments, RunArguments, ServeArguments,
    SourceAndTarget, UpArguments,
};
pub(crate) use stage_in::{Group, OnConflict, StageInArguments, StageInOptions};

/// An ad hoc distributed file system for deep-learning jobs.
///
/// A session lives as long as its job. Its servers, one per node, store unpacked datasets on the
/// nodes' local drives, and show them in one namespace. A single command runs a whole job:
///
///   dayfly run --stage-in 'train.tar:/dayfly/train' -- CMD
///
/// CMD and all its children see a read-only namespace below /dayfly (or --prefix). The programs
/// need no changes: a library that is loaded before the C library provides the namespace. The
/// library does not reach static programs, programs for musl, set-user-ID programs or raw system
/// calls.
///
/// Paths in the namespace are given as programs see them, including the prefix (/dayfly/train). Any
/// other path names a local file. Commands use the session that DAYFLY_SESSION names, otherwise
/// your job's session, otherwise the only session that you run on this machine.
///
/// Exit status: 0 success; 1 failure; 2 wrong usage; 3 staged in, except for what --keep-going left
/// out. `run` and `exec` exit with CMD's status, or with 125 if they themselves fail, 126 if CMD
/// cannot be executed, and 127 if it does not exist.
#[derive(Parser)]
#[command(name = "dayfly", version, max_term_width = 110)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Arguments {
    /// Parses a command line, which begins with the program's name.
    pub(crate) fn parse_line(line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        // Without this, `--seed -1` would be called an unknown option instead of a wrong number.
        let is_option = |argument: &clap::Arg| !argument.is_positional() && argument.get_action().takes_values();
        let allow = |argument: clap::Arg| if is_option(&argument) { argument.allow_negative_numbers(true) } else { argument };
        let mut command = Self::command().mut_subcommands(|command| command.mut_args(allow));
        let matches = command.try_get_matches_from_mut(line)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    }

    /// Checks what the parser cannot check: that the launch options have an effect, and how many paths there are, because the parser
    /// counts those before an option and those after it by themselves.
    pub(crate) fn check(&self) -> Result<(), String> {
        let needs_paths = |paths: &[OsString]| match paths {
            [_, _, ..] => Ok(()),
            few => Err(match few.first().and_then(|one| one.to_str()?.rsplit_once(":/")) {
                Some((source, target)) if !source.is_empty() => {
                    format!("give SOURCE and TARGET as two arguments: '{source}' '/{target}'")
                }
                _ => "give at least one SOURCE, and a TARGET".to_owned(),
            }),
        };
        match &self.command {
            Command::Up(arguments) => arguments.session.launch.check(),
            Command::Run(arguments) => arguments.session.launch.check(),
            Command::StageIn(arguments) => needs_paths(&arguments.paths),
            Command::Cp(arguments) => needs_paths(&arguments.paths),
            _ => Ok(()),
        }
    }
}

/// Returns a parser of whole numbers in a range.
fn number<T: TryFrom<u64>>(range: RangeInclusive<u64>) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number)).and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("it is not a whole number from {} to {}", range.start(), range.end()))
    }
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
    Rejoin(RejoinArguments),
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

    use super::Arguments;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn invalid_arguments_and_options_without_effect_are_refused_with_a_reason() {
        let check = |line: &str, expect: Option<&str>| {
            let words = ["dayfly"].into_iter().chain(line.split(' ')).map(Into::into);
            let parsed = Arguments::parse_line(words).map_err(|error| error.to_string());
            let message = parsed.and_then(|arguments| arguments.check()).err();
            match (&message, expect) {
                (Some(message), Some(word)) => assert!(message.contains(word), "{line}: {message}"),
                (message, expect) => assert_eq!(message.as_deref(), expect, "{line}"),
            }
        };
        for number in ["-1", "x", "99999999999999999999", "1.5"] {
            check(
                &format!("stage-in a /dayfly/a --seed {number}"),
                Some("it is not a whole number from 0 to 18446744073709551615"),
            );
            check(&format!("up --local {number}"), Some("it is not a whole number from 1 to 250"));
        }
        check("stage-in a /dayfly/a --seed 18446744073709551615", None);
        check("stage-in a --seed 1 b --copies 2 /dayfly/a --json", None);
        check("cp /dayfly/a -r b", None);
        for alone in ["stage-in /dayfly/a", "stage-in --seed 1 /dayfly/a", "stage-in :/dayfly/a", "cp a"] {
            check(alone, Some("give at least one SOURCE, and a TARGET"));
        }
        check("stage-in a:b.tar:/dayfly/a", Some("as two arguments: 'a:b.tar' '/dayfly/a'"));
        for without in ["stage-in", "cp -r"] {
            check(without, Some("<SOURCE>... <TARGET>"));
        }
        check("top --interval -1", Some("is not a number of seconds"));
        for wrong in ["a.tar", ":/dayfly/a", "a.tar:dayfly"] {
            check(&format!("run --stage-in {wrong} -- true"), Some("as in train.tar:/dayfly/train"));
        }
        check("run --stage-in a.tar:/dayfly/a -- true", None);
        check("up --nodes 3", Some("only with --launcher manual"));
        check("run --launcher ssh --hosts a --nodes 3 -- true", Some("only with --launcher manual"));
        check("up --launcher manual --nodes 3 --key-file k", None);
        check("up --local 2 --launcher-args -v", Some("--launcher-args has no effect"));
        check("up --launcher local --key-file k", Some("--key-file has no effect"));
        check("up --launcher slurm --launcher-args -v --key-file k", None);
    }
}
