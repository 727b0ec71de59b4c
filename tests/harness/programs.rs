//! The programs from outside that tests use, by the table `tests/programs.toml`. A test that misses one names its Debian package.

#![allow(dead_code, reason = "each crate uses its part")]

use std::io::Write;
use std::process::Command;

/// The table. The `tidy` tests check that each row is one line of this form.
const TABLE: &str = include_str!("../programs.toml");

/// If this variable is set, as in `.ci/run`, a test fails for want of a program that it would otherwise skip.
const ALL_PROGRAMS: &str = "DAYFLY_TEST_ALL_PROGRAMS";

/// Returns the Debian package of a program. Options, as in `gcc -m32`, count if the table has a row with them.
fn package_of(program: &str) -> Option<&'static str> {
    let row =
        |name: &str| TABLE.lines().find_map(|line| line.trim().strip_prefix(&format!("{{ name = \"{name}\", package = \"")));
    let row = row(program).or_else(|| row(program.split(' ').next()?))?;
    row.split('"').next()
}

/// Says what is missing and how to install it.
pub(crate) fn missing(program: &str) -> String {
    let package = package_of(program).unwrap_or_else(|| panic!("'{program}' is not in tests/programs.toml; add it"));
    format!("'{program}' does not work here; on Debian, run: apt-get install {package}")
}

/// Returns a command that runs a program of the table.
///
/// # Panics
///
/// If the program is not installed.
pub(crate) fn program(name: &str) -> Command {
    assert!(is_found(name), "{}", missing(name));
    Command::new(name)
}

fn is_found(name: &str) -> bool {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).any(|folder| folder.join(name).is_file())
}

/// Returns whether a program is installed. A program with options is there if it succeeds with them. If it is not there, says so,
/// and fails if `.ci/run` has set the variable for that.
pub(crate) fn is_installed(program: &str) -> bool {
    let works = |words: &str| Command::new("sh").args(["-c", &format!("{words} > /dev/null 2>&1")]).status().unwrap().success();
    let is_there = if program.contains(' ') { works(program) } else { is_found(program) };
    if !is_there {
        skip(&missing(program));
    }
    is_there
}

/// Says why something is not tested here, and fails if `.ci/run` has set the variable for that.
pub(crate) fn skip(reason: &str) {
    assert!(std::env::var_os(ALL_PROGRAMS).is_none(), "{reason}");
    // Written directly, because the test harness captures the output of `eprintln!`.
    let _ = std::io::stderr().write_all(format!("NOT tested: {reason}\n").as_bytes());
}
