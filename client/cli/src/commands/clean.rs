//! `dayfly clean`: removes what killed sessions left on this machine.

use std::process::ExitCode;

use dayfly_client::locate;
use dayfly_launch::units::counted;
use dayfly_launch::{chosen_data_dirs, cleanup};

use crate::args::CleanArguments;
use crate::failure::{Failure, print_line};

pub(super) fn run(arguments: &CleanArguments) -> Result<ExitCode, Failure> {
    let removed = cleanup::sweep_patiently(&locate::runtime_dir(), &chosen_data_dirs(&arguments.data_dir))?;
    let running = counted(locate::running()?.len() as u64, "session");
    match removed {
        0 => print_line!("nothing was left over; you have {running} running here"),
        count => print_line!("removed {}; you have {running} running here", counted(count as u64, "leftover folder")),
    }
    for path in &arguments.data_dir {
        path.metadata().map_err(|error| Failure::new(format!("cannot clean the data dir '{}': {error}", path.display())))?;
    }
    Ok(ExitCode::SUCCESS)
}
