//! `dayfly completions`: prints completion scripts for shells.

use std::io::Write;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::{Arguments, CompletionShell, CompletionsArguments};
use crate::failure::{Failure, output};

pub(super) fn run(arguments: &CompletionsArguments) -> Result<ExitCode, Failure> {
    let mut output = output();
    output.write_all(&script(arguments.shell))?;
    output.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn script(shell: CompletionShell) -> Vec<u8> {
    let shell = match shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Zsh => Shell::Zsh,
        CompletionShell::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "dayfly", &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_scripts_know_the_commands_and_their_options() {
        for shell in [CompletionShell::Bash, CompletionShell::Zsh, CompletionShell::Fish] {
            let script = String::from_utf8(script(shell)).unwrap();
            for word in ["stage-in", "data-dir", "completions"] {
                assert!(script.contains(word), "{shell:?} lacks {word}");
            }
        }
    }
}
