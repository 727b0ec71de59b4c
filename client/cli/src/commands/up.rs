//! `dayfly up`.

use std::io::{self, Write};
use std::process::ExitCode;

use crate::args::Up;
use crate::failure::Failure;
use crate::launch;

pub(super) fn run(arguments: Up) -> Result<ExitCode, Failure> {
    let started = launch::start(&arguments.session, false)?;
    writeln!(io::stdout(), "{}", started.location.session)?;
    Ok(ExitCode::SUCCESS)
}
