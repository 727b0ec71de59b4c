//! `dayfly clean`.

use std::process::ExitCode;

use dayfly_client::locate;

use crate::args::Clean;
use crate::failure::{Failure, say};
use crate::launch;

pub(super) fn run(arguments: &Clean) -> Result<ExitCode, Failure> {
    let removed = launch::sweep_patiently(&locate::runtime_dir(), &launch::chosen_data_dirs(&arguments.data_dir))?;
    let running = locate::running()?.len();
    match removed {
        0 => say!("nothing was left over; sessions that run here: {running}"),
        count => say!("what was left over is removed, in {count} places; sessions that run here: {running}"),
    }
    Ok(ExitCode::SUCCESS)
}
