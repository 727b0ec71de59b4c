//! `dayfly man`: writes man pages from the same text as `--help`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_mangen::Man;
use dayfly_launch::units::counted;

use crate::args::{Arguments, ManArguments};
use crate::failure::{Failure, output, print_line};

pub(super) fn run(arguments: &ManArguments) -> Result<ExitCode, Failure> {
    let pages = pages()?;
    let Some(folder) = &arguments.folder else {
        let mut output = output();
        output.write_all(&pages[0].1)?;
        output.flush()?;
        return Ok(ExitCode::SUCCESS);
    };
    for (name, page) in &pages {
        write(folder, name, page)?;
    }
    print_line!("wrote {} to '{}'", counted(pages.len() as u64, "man page"), folder.display());
    Ok(ExitCode::SUCCESS)
}

fn write(folder: &Path, name: &str, page: &[u8]) -> Result<(), Failure> {
    let path = folder.join(name);
    fs::write(&path, page).map_err(|error| Failure::new(format!("cannot write '{}': {error}", path.display())))
}

/// File names and contents of all pages. The page of `dayfly` itself comes first.
fn pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut program = Arguments::command();
    program.build();
    let commands = program.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help").cloned();
    let named: Vec<clap::Command> = commands
        .map(|command| {
            let name = format!("dayfly-{}", command.get_name());
            command.display_name(name)
        })
        .collect();
    let mut pages = Vec::new();
    for command in std::iter::once(program).chain(named) {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
        let mut page = Vec::new();
        Man::new(command).render(&mut page)?;
        pages.push((format!("{name}.1"), page));
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_man_page_for_the_program_and_for_each_command() {
        let pages = pages().unwrap();
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names[0], "dayfly.1");
        for name in ["dayfly-run.1", "dayfly-stage-in.1", "dayfly-man.1"] {
            assert!(names.contains(&name), "{names:?}");
        }
        assert!(!names.contains(&"dayfly-is-preloaded.1"), "hidden commands have no page");
        let run = &pages[names.iter().position(|name| *name == "dayfly-run.1").unwrap()].1;
        assert!(String::from_utf8_lossy(run).contains("data\\-dir"), "it explains the options");
    }
}
